"""`POST /upload` (a file of text lines in a form) and `POST /rec/prediction` (feed and fetch, for older clients)."""

import asyncio
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from clickfleet.data.bad_lines import describe
from clickfleet.data.batch import Batch, Floats
from clickfleet.data.formats import load as load_format
from clickfleet.data.parsing.lines import Lines
from clickfleet.errors import ClickfleetError, ConfigError, MissingError, ServeError
from clickfleet.serve import open_inference
from clickfleet.serve.context import Context
from clickfleet.serve.json_api import Row
from clickfleet.serve.predictor import RUN_HISTORY_KEYS, Version

TEXT_FORMATS = ("slots", "criteo", "feasign", "libffm", "libsvm", "vw", "multislot", "csv", "jsonl")
"""Formats accepted for uploads. User-defined formats are not, because they run code."""
PIECE_ROWS = 512


def parse(content: bytes, form: str, version: Version) -> Batch:
    """Parse an uploaded file. In the format of the training data, that format's settings apply too, such as the separator."""
    if form not in TEXT_FORMATS:
        raise ServeError(f"unknown format {form!r}", f"formats: {', '.join(TEXT_FORMATS)}")
    if not content.strip():
        raise ServeError("the file is empty")
    lines = content if content.endswith(b"\n") else content + b"\n"
    reader = load_format(version.format if version.format["name"] == form else form)
    assert isinstance(reader, Lines)
    first, _, rest = lines.partition(b"\n")
    try:
        parser = reader.parser(version.schema, first.removesuffix(b"\r"), "the upload")
        parsed = parser(rest if reader.header_lines else lines, "stop")
    except ConfigError as error:
        raise ServeError(str(error)) from None
    for bad in parsed.bad:
        raise ServeError(f"line {bad.line + 1 + reader.header_lines}: {describe(bad)}")
    if not len(parsed.batch):
        raise ServeError("the file has no rows")
    batch = parsed.batch
    return Batch(batch.dense, batch.keys, batch.slots, None if batch.one_each else batch.offsets, values=batch.values)  # type: ignore[arg-type]


async def score_all(context: Context, batch: Batch, version: Version) -> Floats:
    """Score many rows in pieces, so that other requests are not delayed."""
    deadline = time.perf_counter() + max(60.0, context.settings.max_time_ms / 1e3)
    parts = []
    for piece in _pieces(batch, version):
        done = await context.batcher.score(piece, version, deadline)
        if done.version.version != version.version:  # a reply must come from one version
            return await asyncio.to_thread(_score_by, version, batch)
        parts.append(done.outputs["score"])
    return np.concatenate(parts)


def _score_by(version: Version, batch: Batch) -> Floats:
    return np.concatenate([version.run(piece)["score"] for piece in _pieces(batch, version)])


def _pieces(batch: Batch, version: Version) -> Iterator[Batch]:
    """Yield the rows in pieces that take a few milliseconds each. Long histories make them shorter."""
    at = 0
    while at < len(batch):
        piece = batch[at : at + PIECE_ROWS]
        fitting = RUN_HISTORY_KEYS // max(1, version.history_keys(piece))
        piece = piece[: max(1, fitting)]
        yield piece
        at += len(piece)


def is_true(text: str | None) -> bool:
    return (text or "").lower() == "true"


async def upload(context: Context, query: Any, content: bytes | None) -> tuple[int, bytes, str]:
    """Return (status, body, content type) for an upload."""
    user = query.get("user_id")
    if content is None:
        return _error(400, "the form has no field 'file'")
    if not user:
        return _error(400, "user_id is missing")
    target = (query.get("re_model") or "json").lower()
    if target not in ("json", "redis"):
        return _error(400, "re_model must be json or redis")
    size = query.get("batch_size") or "5"
    if not size.isascii() or not size.isdigit() or len(size) > 6 or not 0 < int(size) <= 100000:
        return _error(400, "batch_size must be a number from 1 to 100000")
    if is_true(query.get("save")) and context.settings.upload_dir is None:
        return _error(400, "saving uploads is disabled; start the server with --upload-dir")
    if target == "redis" and context.settings.results_redis is None:
        return _error(400, "results in Redis are disabled; start the server with --results-redis")
    version = context.batcher.version
    if "score" not in version.outputs:
        return _error(400, "the model has no output 'score'")
    begin = time.perf_counter()
    batch = parse(content, query.get("format") or "slots", version)
    parsed = time.perf_counter()
    scores = await score_all(context, batch, version)
    scored = time.perf_counter()
    if is_true(query.get("save")):
        _save(Path(str(context.settings.upload_dir)), content)
    rows = scores.reshape(len(batch), -1).tolist()
    batches = [rows[at : at + int(size)] for at in range(0, len(rows), int(size))]
    if target == "redis":
        return await _to_redis(str(context.settings.results_redis), user, batches)
    facts: dict[str, object] = {
        "code": 200,
        "dtype": "float32",
        "data": batches if is_true(query.get("full")) else rows,
        "user_id": user,
        "server_ms": round(1e3 * (scored - begin), 3),
    }
    if len(version.tasks) > 1:
        facts["labels"] = version.tasks
    if is_true(query.get("debug")):
        facts["timing_ms"] = {"parse": 1e3 * (parsed - begin), "score": 1e3 * (scored - parsed)}
    return 200, orjson.dumps(facts), "application/json"


def _error(status: int, what: str) -> tuple[int, bytes, str]:
    return status, orjson.dumps({"code": status, "error": what}), "application/json"


def _save(folder: Path, content: bytes) -> None:
    """Save an upload under a generated name. The client's file name is never used."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{secrets.token_hex(8)}.txt"
    with path.open("xb") as out:
        out.write(content)


async def _to_redis(url: str, user: str, batches: list[list[list[float]]]) -> tuple[int, bytes, str]:
    try:
        from redis import asyncio as redis
        from redis.exceptions import RedisError
    except ModuleNotFoundError:
        raise MissingError("redis", "redis") from None
    try:
        async with redis.from_url(url, socket_timeout=5, socket_connect_timeout=2) as client:
            entries = [orjson.dumps({"data": rows, "dtype": "float32"}) for rows in batches]
            await client.lpush(f"deepfm_re:{user}", *entries)
    except (RedisError, OSError):
        return 502, b"error", "text/plain"
    return 200, b"ok", "text/plain"


async def prediction(context: Context, body: bytes) -> tuple[int, bytes]:
    """Score feed: [{input: values of the whole batch}], fetch: [output], and return result: {output: [[p], …]}."""
    try:
        request = orjson.loads(body)
    except orjson.JSONDecodeError:
        return 400, orjson.dumps({"error": "the body is not JSON"})
    if not isinstance(request, dict) or not isinstance(request.get("fetch"), list) or not request["fetch"]:
        return 400, orjson.dumps({"error": "fetch must be a list of outputs"})
    feed = request.get("feed")
    if not isinstance(feed, list) or not feed or not isinstance(feed[0], dict):
        return 400, orjson.dumps({"error": "feed must be a list with one mapping from inputs to values"})
    version = context.batcher.version
    try:
        names = open_inference.pick_outputs([str(name) for name in request["fetch"]], version)
        batch = _feed_batch(feed[0], version, context.settings.max_rows)
        done = await context.batcher.score(batch, version, time.perf_counter() + context.settings.max_time_ms / 1e3)
    except ClickfleetError as error:
        if type(error) is not ServeError:
            raise
        return 400, orjson.dumps({"error": str(error), "result": str(error)})
    values = {name: open_inference.output_of(name, done.outputs, done.version) for name in names}
    result = {name: column.reshape(len(batch), -1) for name, column in values.items()}
    return 200, orjson.dumps({"result": result}, option=orjson.OPT_SERIALIZE_NUMPY)


def _feed_batch(feed: Row, version: Version, max_rows: int) -> Batch:
    lengths = {name: len(values) if isinstance(values, list) else -1 for name, values in feed.items()}
    if not lengths or len(set(lengths.values())) != 1 or -1 in lengths.values():
        raise ServeError("every input in feed must be a list with one item per row")
    rows = next(iter(lengths.values()))
    open_inference.check_rows(rows, max_rows)
    if "keys" in feed and set(feed) <= {"keys", "dense"} and "keys" not in version.fields.names:
        kinds = {"keys": "UINT64", "dense": "FP32"}
        widths = {"keys": len(version.schema.key_columns), "dense": len(version.schema.dense)}
        tensors = [
            open_inference.ListTensor(name, kinds[name], [rows, widths[name]], values) for name, values in feed.items()
        ]
        return open_inference.batch(tensors, version, max_rows)
    feed = _by_our_names(feed, version)
    return version.fields.rows([{name: values[i] for name, values in feed.items()} for i in range(rows)])


def _by_our_names(feed: Row, version: Version) -> Row:
    """Return the feed under the names of the model's inputs. One input of all dense values may become several."""
    parts: Row = {}
    for name, rows in feed.items():
        if not version.aliases.is_split(name):
            parts[name] = rows
            continue
        if not all(isinstance(values, list) and len(values) == len(rows[0]) for values in rows):
            raise ServeError(f"{name}: every row must be a list with all dense values")
        for group, first, end in version.aliases.parts(name, len(rows[0])):
            some = [values[first:end] for values in rows]
            parts[group] = [values[0] for values in some] if end - first == 1 else some
    return version.aliases.inputs(parts)
