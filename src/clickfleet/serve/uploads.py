"""Whole files and old clients: `POST /upload` (text lines in a form) and `POST /rec/prediction` (feed and fetch)."""

import asyncio
import secrets
import time
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from clickfleet.bad_lines import describe
from clickfleet.batch import Batch, Floats
from clickfleet.errors import ClickfleetError, ConfigError, MissingError, ServeError
from clickfleet.formats import load as load_format
from clickfleet.formats._lines import Lines
from clickfleet.serve import oip
from clickfleet.serve.context import Context
from clickfleet.serve.fields import pick
from clickfleet.serve.predictor import Version

TEXT_FORMATS = ("slots", "criteo", "feasign", "libffm", "multislot", "csv")
"""Formats an upload may have; a user's own code is not run."""
PIECE_ROWS = 512


def parse(content: bytes, form: str, version: Version) -> Batch:
    """The rows of an uploaded file; one in the format of the training data has its settings too, such as a separator."""
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
        raise ServeError("the file holds no rows")
    batch = parsed.batch
    return Batch(batch.dense, batch.keys, batch.slots, None if batch.one_each else batch.offsets, values=batch.values)  # type: ignore[arg-type]


async def score_all(context: Context, batch: Batch, version: Version) -> Floats:
    """The scores of many rows, in pieces that let other requests through."""
    deadline = time.perf_counter() + max(60.0, context.settings.max_time_ms / 1e3)
    parts = []
    for at in range(0, len(batch), PIECE_ROWS):
        done = await context.batcher.score(batch[at : at + PIECE_ROWS], version, deadline)
        if done.version.version != version.version:  # a reply is of one version: score it again by that one
            return await asyncio.to_thread(_score_by, version, batch)
        parts.append(done.outputs["score"])
    return np.concatenate(parts)


def _score_by(version: Version, batch: Batch) -> Floats:
    pieces = (batch[at : at + PIECE_ROWS] for at in range(0, len(batch), PIECE_ROWS))
    return np.concatenate([version.run(piece)["score"] for piece in pieces])


def truth(text: str | None) -> bool:
    return (text or "").lower() == "true"


async def upload(context: Context, query: Any, content: bytes | None) -> tuple[int, bytes, str]:
    """(status, body, content type) of an upload."""
    user = query.get("user_id")
    if content is None:
        return _say(400, "the form has no field 'file'")
    if not user:
        return _say(400, "user_id is missing")
    target = (query.get("re_model") or "json").lower()
    if target not in ("json", "redis"):
        return _say(400, "re_model is json or redis")
    size = query.get("batch_size") or "5"
    if not size.isascii() or not size.isdigit() or not 0 < int(size) <= 100000:
        return _say(400, "batch_size must be a number from 1 to 100000")
    if truth(query.get("save")) and context.settings.upload_dir is None:
        return _say(400, "this server keeps no uploads (it was started without --upload-dir)")
    if target == "redis" and context.settings.results_redis is None:
        return _say(400, "this server has no Redis for results (it was started without --results-redis)")
    version = context.batcher.version
    if "score" not in version.outputs:
        return _say(400, "this artifact has no output 'score'")
    begin = time.perf_counter()
    batch = parse(content, query.get("format") or "slots", version)
    parsed = time.perf_counter()
    scores = await score_all(context, batch, version)
    scored = time.perf_counter()
    if truth(query.get("save")):
        _keep(Path(str(context.settings.upload_dir)), content)
    rows = [[score] for score in scores.tolist()]
    batches = [rows[at : at + int(size)] for at in range(0, len(rows), int(size))]
    if target == "redis":
        return await _to_redis(str(context.settings.results_redis), user, batches)
    facts: dict[str, Any] = {
        "code": 200,
        "dtype": "float32",
        "data": batches if truth(query.get("full")) else rows,
        "user_id": user,
        "server_ms": round(1e3 * (scored - begin), 3),
    }
    if truth(query.get("debug")):
        facts["timing_ms"] = {"parse": 1e3 * (parsed - begin), "score": 1e3 * (scored - parsed)}
    return 200, orjson.dumps(facts), "application/json"


def _say(status: int, what: str) -> tuple[int, bytes, str]:
    return status, orjson.dumps({"code": status, "error": what}), "application/json"


def _keep(folder: Path, content: bytes) -> None:
    """Under a name of ours: what the client called its file never reaches the disk."""
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
    """feed: [{input: values of the whole batch}], fetch: [output] -> result: {output: [[p], …]}."""
    try:
        given = orjson.loads(body)
    except orjson.JSONDecodeError:
        return 400, orjson.dumps({"error": "the body is not JSON"})
    if not isinstance(given, dict) or not isinstance(given.get("fetch"), list) or not given["fetch"]:
        return 400, orjson.dumps({"error": "fetch is missing: the list of outputs"})
    feed = given.get("feed")
    if not isinstance(feed, list) or not feed or not isinstance(feed[0], dict):
        return 400, orjson.dumps({"error": "feed is missing: a list with one mapping from inputs to values"})
    version = context.batcher.version
    try:
        names = pick([str(name) for name in given["fetch"]], version.outputs, "output")
        batch = _fed(feed[0], version, context.settings.max_rows)
        done = await context.batcher.score(batch, version, time.perf_counter() + context.settings.max_time_ms / 1e3)
    except ClickfleetError as error:
        if type(error) is not ServeError:
            raise
        return 400, orjson.dumps({"error": str(error), "result": str(error)})
    result = {name: done.outputs[name].reshape(len(batch), -1) for name in names}
    return 200, orjson.dumps({"result": result}, option=orjson.OPT_SERIALIZE_NUMPY)


def _fed(feed: dict[str, Any], version: Version, max_rows: int) -> Batch:
    lengths = {name: len(values) if isinstance(values, list) else -1 for name, values in feed.items()}
    if not lengths or len(set(lengths.values())) != 1 or -1 in lengths.values():
        raise ServeError("every input of feed must be a list with one item per row")
    rows = next(iter(lengths.values()))
    oip.check_rows(rows, max_rows)
    if "keys" in feed and set(feed) <= {"keys", "dense"} and "keys" not in version.fields.names:
        kinds = {"keys": "UINT64", "dense": "FP32"}
        widths = {"keys": len(version.schema.slots), "dense": len(version.schema.dense)}
        tensors = [oip.Listed(name, kinds[name], [rows, widths[name]], values) for name, values in feed.items()]
        return oip.batch(tensors, version, max_rows)
    return version.fields.rows([{name: values[i] for name, values in feed.items()} for i in range(rows)])
