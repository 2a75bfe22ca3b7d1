"""Rows in Redis, for tables larger than a machine's memory: written from a published log, read by key.

    clickfleet:head                     {"prefix", "sequence", "hash", "chain", "factors", "row_formats"}
    clickfleet:<prefix>:<8 bytes>       embed_w, and embedx where the row has it, as little-endian float32; of a small format, a byte
                                        that tells the format (1: float16, 2: int8) and the record

The prefix names the base; deltas change rows under it. A new base is written beside the old one, then the head changes, then the old
rows are deleted. Deltas change rows in place, so a reply may mix rows of two sequences while a delta is written. If that matters, serve
from files.
"""

import json
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, NotRequired, TypedDict, cast

import numpy as np

from clickfleet.data.arrow_ipc import numbers
from clickfleet.data.batch import Floats, Keys
from clickfleet.errors import CheckpointError, MissingError, PublishError
from clickfleet.store import row_format
from clickfleet.store.published import LOG, Entry, Log, since_base
from clickfleet.store.row_format import Records, RowFormat

HEAD = b"clickfleet:head"


class RedisHead(TypedDict):
    """The entry that the rows in Redis belong to."""

    prefix: str
    sequence: int
    hash: str
    chain: str
    factors: int
    row_formats: NotRequired[list[RowFormat]]
    """The formats of the entries since the base. Old heads lack it: float32."""


class FillResult(TypedDict):
    url: str
    sequence: int
    entries: int
    rows: int
    deleted: int


CHUNK = 5000
TAGS: dict[RowFormat, bytes] = {"float16": b"\x01", "int8": b"\x02"}
"""The first byte of a row in a small format."""


def connect(url: str) -> Any:
    try:
        import redis
    except ModuleNotFoundError:
        raise MissingError("redis", "redis") from None
    try:
        client = redis.Redis.from_url(url, socket_timeout=10, socket_connect_timeout=3)
        client.ping()
    except (redis.RedisError, ValueError, OSError) as error:
        raise PublishError(f"cannot reach {url}: {error}") from None
    return client


def head(client: Any) -> RedisHead | None:
    """Return the facts of the entry that the rows belong to; None if there is none yet."""
    content = client.get(HEAD)
    if content is None:
        return None
    try:
        facts = json.loads(content)
        return cast(RedisHead, {**facts, "prefix": str(facts["prefix"])})
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CheckpointError(f"{HEAD.decode()} in Redis is damaged: {error}", "fill Redis again") from None


def names(prefix: str, keys: Keys) -> list[bytes]:
    start, raw = f"clickfleet:{prefix}:".encode(), keys.astype("<u8").tobytes()
    return [start + raw[at : at + 8] for at in range(0, len(raw), 8)]


def fill(url: str, published: Log | Path | str, check: Callable[[Entry], object] = Entry.verify) -> FillResult:
    """Bring Redis to the newest entry of a log, or to a single entry: by deltas if possible, else by the base.

    `check` raises for an entry that must not be written.
    """
    client = connect(url)
    before = head(client)
    entries, last, from_base = _missing(published, None if before is None else before["hash"])
    prefix = entries[0].hash[:16] if before is None or from_base else before["prefix"]
    formats = set() if before is None or from_base else set(row_formats(before))
    written = deleted = 0
    for entry in entries:
        check(entry)
        formats.add(entry.row_format)
        if entry.base:
            _remove(client, prefix)  # left by an interrupted call
        written += _write(client, prefix, entry)
        keys = np.asarray(entry.deleted(), np.uint64)
        for at in range(0, len(keys), CHUNK):
            deleted += int(client.delete(*names(prefix, keys[at : at + CHUNK])))
        facts: RedisHead = {
            "prefix": prefix,
            "sequence": entry.sequence,
            "hash": entry.hash,
            "chain": entry.manifest["chain"],
            "factors": entry.manifest["factors"],
            "row_formats": sorted(formats),
        }
        client.set(HEAD, json.dumps(facts))
    if before is not None and before["prefix"] != prefix:
        _remove(client, before["prefix"])
    return {"url": url, "sequence": last, "entries": len(entries), "rows": written, "deleted": deleted}


def _missing(published: Log | Path | str, held: str | None) -> tuple[list[Entry], int, bool]:
    """Return the entries to write after the one with hash `held`, the last sequence, and whether they start with a base."""
    if not isinstance(published, Log):
        folder = Path(published)
        if not (folder / LOG).is_file():
            entry = Entry(folder)
            if not entry.base:
                raise PublishError(f"{folder} is a delta", "name the log it belongs to")
            return ([], entry.sequence, False) if entry.hash == held else ([entry], entry.sequence, True)
        published = Log(folder)
    lines = since_base(published.lines())
    if not lines:
        raise CheckpointError(f"{published.folder} holds no published base")
    at = next((i for i, line in enumerate(lines) if line.hash == held), -1)
    return [published.entry(line) for line in lines[at + 1 :]], lines[-1].sequence, at < 0


def _write(client: Any, prefix: str, entry: Entry) -> int:
    written = 0
    tag = TAGS.get(entry.row_format, b"")
    for keys, rows in rows_of(entry):
        for at in range(0, len(keys), CHUNK):
            chunk = names(prefix, keys[at : at + CHUNK])
            client.mset(dict(zip(chunk, (tag + row.tobytes() for row in rows[at : at + CHUNK]), strict=True)))
            written += len(chunk)
    return written


def rows_of(entry: Entry) -> Iterator[tuple[Keys, Floats | Records]]:
    """Yield, for each record batch, the keys and their [embed_w, embedx] or [embed_w], or their records.

    Rows with factors are as wide as the widest: the length of a value tells its format.
    """
    form, widest = entry.row_format, int(entry.manifest["factors"])
    if form != "float32":
        for width, part in entry.records():
            same = width in (0, widest)
            yield part.keys, part.records if same else row_format.widened(form, part.records, width, widest)
        return
    for batch in entry.batches():
        weights = numbers(batch.column("embed_w"), np.float32)[:, None]
        factors = numbers(batch.column("embedx").flatten(), np.float32)
        rows = np.zeros((len(batch), 1 + widest), "<f4") if len(factors) else weights.astype("<f4")
        if len(factors):
            factors = factors.reshape(len(batch), -1)
            rows[:, :1], rows[:, 1 : 1 + factors.shape[1]] = weights, factors
        yield numbers(batch.column("key"), np.uint64), rows


def _remove(client: Any, prefix: str) -> None:
    found = _scan(client, prefix)
    while chunk := list(islice(found, CHUNK)):
        client.delete(*chunk)


def _scan(client: Any, prefix: str) -> Iterator[bytes]:
    return iter(client.scan_iter(match=f"clickfleet:{prefix}:*".encode(), count=CHUNK))


def read(client: Any, prefix: str, keys: Keys, factors: int) -> tuple[Floats, Any]:
    """Return the rows of distinct keys (zeros if missing) and a mask of those found. Uses one MGET per few thousand keys."""
    out = np.zeros((len(keys), 1 + factors), np.float32)
    known = np.zeros(len(keys), bool)
    sizes = _value_sizes(factors)
    places: dict[_ValueKind, list[int]] = {}
    parts: dict[_ValueKind, list[bytes]] = {}
    for at in range(0, len(keys), CHUNK):
        for place, content in enumerate(client.mget(names(prefix, keys[at : at + CHUNK])), start=at):
            if content is None:
                continue
            kind = sizes.get((len(content), b"")) or sizes.get((len(content), content[:1]))
            if kind is None:
                raise CheckpointError(
                    f"a row in Redis has {len(content)} bytes, which no row with {factors} factors has",
                    "fill Redis again",
                )
            places.setdefault(kind, []).append(place)
            parts.setdefault(kind, []).append(content)
            known[place] = True
    for kind, found in parts.items():
        tag = len(TAGS.get(kind.form, b""))
        values = np.frombuffer(b"".join(found), np.uint8).reshape(len(found), -1)
        out[places[kind], : 1 + kind.factors] = row_format.unpack(kind.form, values[:, tag:], kind.factors)
    return out, known


class _ValueKind(NamedTuple):
    """The format of a value and the number of factors in it."""

    form: RowFormat
    factors: int


def _value_sizes(factors: int) -> dict[tuple[int, bytes], _ValueKind]:
    """Return, by length and tag, what a value can be. No small record has the length of a float32 row."""
    kinds = [_ValueKind(form, width) for form in row_format.FORMATS for width in (0, factors)]
    tags = {form: TAGS.get(form, b"") for form in row_format.FORMATS}
    return {(len(tags[kind.form]) + row_format.record_bytes(*kind), tags[kind.form]): kind for kind in kinds}


def row_formats(head: RedisHead) -> tuple[RowFormat, ...]:
    """Return the formats of the rows in Redis."""
    return tuple(head.get("row_formats") or ("float32",))


def count(client: Any, prefix: str) -> int:
    """Count the rows by scanning all names."""
    return sum(1 for _ in _scan(client, prefix))
