"""The show log: every scored row with its features as the client sent them, for the join with feedback.

A worker hands the body of a request to the recorder before it replies, in one copy to memory: frames.py. The recorder, a process of its
own, cuts the features out of the bodies and writes them as record batches. They are not parsed again. The core does it (`batch_of`);
`encode` does the same in Python for what the core leaves: tensors, and JSON with escaped names.
"""

from __future__ import annotations

import base64
import secrets
import struct
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
import xxhash

from clickfleet._core import ShowColumns
from clickfleet.data.batch import Batch
from clickfleet.data.events import MAX_TEXTS, REQUESTS
from clickfleet.errors import hide
from clickfleet.serve.batching import ScoreResult
from clickfleet.serve.counters import Meter
from clickfleet.serve.frames import FrameWriter
from clickfleet.serve.open_inference import NUMBERS, AnyTensor, RawTensor, features_of
from clickfleet.serve.predictor import Version

ROW = REQUESTS.field("rows").type.value_type
REPORT_S = 60.0
"""Time between two messages about the same problem."""


class _PredictBody(msgspec.Struct):
    rows: list[msgspec.Raw]


class _RankBody(msgspec.Struct):
    candidates: list[msgspec.Raw]
    user: msgspec.Raw = msgspec.Raw(b"")


_predict = msgspec.json.Decoder(_PredictBody)
_rank = msgspec.json.Decoder(_RankBody)
_encoder = msgspec.json.Encoder()
_decoder = msgspec.msgpack.Decoder()


class Scored(NamedTuple):
    """A request that was scored, as plain values: workers hand it to the recorder."""

    route: str
    request: str
    time_us: int
    model: str
    sequence: int
    scores: bytes
    """float32."""
    content: Any
    """The body of a JSON request; the inputs of an Open Inference request."""
    items: list[str] | None
    """Ids of the rows; None: their numbers from 0 on."""
    places: list[int] | None = None
    """Which candidates of the request were scored; None: all."""
    ranked: list[str] | None = None
    """Ids in the order of the reply; None: the order of the request."""

    @property
    def rows(self) -> int:
        return len(self.scores) // 4


class ShowLog:
    """Hands the scored rows of one worker to the recorder. `sample` is the fraction of requests, chosen by the hash of their ids."""

    def __init__(self, folders: Sequence[Path], meter: Meter, sample: float = 1.0) -> None:
        self.meter = meter
        self._limit = int(sample * 2**64) if sample < 1 else None
        self.writer = FrameWriter(*folders)
        self._reported_at = -REPORT_S

    def predict(self, request: str, body: bytes, items: list[str] | None, done: ScoreResult) -> None:
        if self._limit is None or is_sampled(request, self._limit):
            self._put("predict", request, body, items, done)

    def rank(
        self, request: str, body: bytes, items: list[str], places: list[int], ranked: list[str], done: ScoreResult
    ) -> None:
        if self._limit is None or is_sampled(request, self._limit):
            self._put("rank", request, body, items, done, places, ranked)

    def infer(
        self, request: str, tensors: Sequence[AnyTensor], batch: Batch, version: Version, done: ScoreResult
    ) -> None:
        if self._limit is None or is_sampled(request, self._limit):
            self._put("infer", request, inputs_of_request(tensors, batch, version), None, done)

    def _put(
        self,
        route: str,
        request: str,
        content: Any,
        items: list[str] | None,
        done: ScoreResult,
        places: list[int] | None = None,
        ranked: list[str] | None = None,
    ) -> None:
        identity, scores = done.version.identity, done.outputs.get("score")
        if scores is None:
            scores = np.full(len(next(iter(done.outputs.values()))), np.nan, np.float32)
        first = scores if scores.ndim == 1 else scores[:, 0]  # of several labels, the score of the first
        now = time.time_ns() // 1000
        head = (route, request, now, identity.name, identity.sequence, first.tobytes(), content)  # as in Scored
        try:
            if items is None and route != "infer":
                self.writer.write_plain(*head)
            else:
                self.writer.write(((*head, items, places, ranked),))
        except Exception as error:  # the server answers whatever happens to its log
            self.meter.count("shows_dropped", len(first))
            self._report(error)

    def _report(self, error: Exception) -> None:
        if (now := time.monotonic()) >= self._reported_at + REPORT_S:
            self._reported_at = now
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            print(f"shows: cannot write the log: {hide(reason)[:500]}", file=sys.stderr, flush=True)

    def make_room(self) -> None:
        """Prepare for the next request. Call it after a reply was sent."""
        self.writer.make_room()
        if not _requests:
            _draw_requests()

    @property
    def waiting_bytes(self) -> int:
        """Bytes that the recorder has not logged yet."""
        return self.writer.waiting_bytes

    def close(self) -> None:
        self.writer.close()


REQUEST_CHARACTERS = 20
DRAWN_REQUESTS = 16
_requests: list[str] = []
"""The next ids: a few at once cost less than each on its own."""


def new_request() -> str:
    """Return the id of a request that named none. Nobody can guess it. Use it from one thread only."""
    if not _requests:
        _draw_requests()
    return _requests.pop()


def _draw_requests() -> None:
    some = base64.urlsafe_b64encode(secrets.token_bytes(DRAWN_REQUESTS * 15)).decode()  # 15 bytes each
    _requests.extend(some[at : at + REQUEST_CHARACTERS] for at in range(0, len(some), REQUEST_CHARACTERS))


def is_sampled(request: str, limit: int) -> bool:
    """Return whether the hash of a request's id is below a limit: the same everywhere, whatever the server."""
    return xxhash.xxh3_64_intdigest(request.encode("utf-8", "replace")) < limit


def inputs_of_request(tensors: Sequence[AnyTensor], batch: Batch, version: Version) -> tuple[Any, Any]:
    """Return the inputs of an Open Inference request as plain values: named ones, and the encoded rows.

    The second is only there if the first is not, or may hold bytes that are no text.
    """
    named = features_of(tensors, version)
    columns, is_text = None, True
    if named is not None:
        columns = [(name, *_column(tensor)) for name, tensor in named.items()]
        is_text = all(not isinstance(values, bytes) or kind or values.isascii() for _, _, kind, values in columns)
    if columns is not None and is_text:
        return columns, None
    offsets = None if batch.one_each else batch.offsets.tobytes()
    values = None if batch.values is None else batch.values.tobytes()
    encoded = (version.schema.inputs().hash, batch.slots, batch.dense.tobytes(), batch.keys.tobytes(), offsets, values)
    return columns, encoded


def _column(tensor: AnyTensor) -> tuple[int, str, Any]:
    """Return the values per row of a tensor, the type of its numbers ("": texts, or any values), and the values."""
    width = tensor.shape[1] if len(tensor.shape) == 2 else 1
    if not isinstance(tensor, RawTensor):
        return width, "", tensor.flat()
    if tensor.datatype == "BYTES":
        return width, "", bytes(tensor.content)
    return width, np.dtype(NUMBERS[tensor.datatype]).str, bytes(tensor.content)


def batch_of(shows: ShowColumns) -> pa.RecordBatch:
    """Return the columns that the core made as REQUESTS, without a copy, and empty them."""
    requests, rows, columns = shows.requests, shows.rows, shows.take()

    def column(field: pa.Field, values: int) -> pa.Array:
        buffers = [None if part is None else pa.py_buffer(part) for part in columns[field.name]]
        if field.name != "rows":
            return pa.Array.from_buffers(field.type, values, buffers)
        row = pa.Array.from_buffers(field.type.value_type, rows, [None], children=[column(one, rows) for one in ROW])
        return pa.Array.from_buffers(field.type, values, buffers, children=[row])

    return pa.RecordBatch.from_arrays([column(field, requests) for field in REQUESTS], schema=REQUESTS)


def scored_of(content: bytes) -> list[Scored]:
    """Return the entries of a frame. Raise ValueError if a worker of this version did not write them."""
    try:
        return [Scored(*entry) for entry in _decoder.decode(content)]
    except (msgspec.DecodeError, TypeError, RecursionError) as error:
        raise ValueError(str(error)) from None


def encode(entries: Sequence[Scored]) -> pa.RecordBatch:
    """Return scored requests as the columns `REQUESTS`. Those without rows are left out."""
    features: list[Any] = []
    users: list[Any] = []
    items: list[str] = []
    positions: list[int | None] = []
    counted = [(entry, count) for entry in entries if (count := entry.rows)]
    for entry, count in counted:
        user = None
        if entry.route == "infer":
            features += tensor_rows(*entry.content)
        elif entry.route == "predict":
            features += map(bytes, _predict.decode(entry.content).rows)
        else:
            body = _rank.decode(entry.content)
            assert entry.places is not None
            features += [bytes(body.candidates[place]) for place in entry.places]
            user = bytes(body.user) or None
            if user is not None and len(user) * count > MAX_TEXTS:
                raise ValueError(f"the user's features, for each row, have more than {MAX_TEXTS >> 20} MiB")
        users.append(user)
        items += map(str, range(count)) if entry.items is None else entry.items
        if entry.ranked is None:
            positions += range(1, count + 1)
        else:
            place_of = {item: place for place, item in enumerate(entry.ranked, 1)}
            positions += map(place_of.get, entry.items or ())
    row = {
        "item": pa.array(items, pa.string()),
        "features": pa.array(features, pa.binary()).view(pa.string()),
        "position": pa.array(positions, pa.int32()),
        "score": pa.array(np.frombuffer(b"".join(entry.scores for entry, _ in counted), np.float32)),
    }
    entries = [entry for entry, _ in counted]
    until = np.cumsum([0, *(count for _, count in counted)], dtype=np.int32)
    rows = pa.StructArray.from_arrays([row[field.name] for field in ROW], fields=list(ROW))
    columns = {
        "request": pa.array([entry.request for entry in entries], pa.string()),
        "time": pa.array([entry.time_us for entry in entries], REQUESTS.field("time").type),
        "rows": pa.ListArray.from_arrays(pa.array(until), rows, type=REQUESTS.field("rows").type),
        "model": pa.array([entry.model for entry in entries], pa.string()),
        "sequence": pa.array([entry.sequence for entry in entries], pa.int64()),
        "route": pa.array([entry.route for entry in entries], pa.string()),
        "user": pa.array(users, pa.binary()).view(pa.string()),
    }
    return pa.record_batch([columns[field.name] for field in REQUESTS], schema=REQUESTS)


def tensor_rows(columns: list[Any] | None, encoded: Any) -> list[bytes]:
    """Return the features of every row of an Open Inference request as JSON: named, or encoded if they were or cannot be text."""
    if columns is not None:
        try:
            names = [name for name, *_ in columns]
            values = [_values(*column) for _, *column in columns]
            return [_encoder.encode(dict(zip(names, row, strict=True))) for row in zip(*values, strict=True)]
        except UnicodeDecodeError:
            pass
    return encoded_rows(*encoded)


def _values(width: int, kind: str, values: Any) -> list[Any]:
    """Return the value, or the list of values, of every row."""
    if isinstance(values, list):
        flat = [value.decode() if isinstance(value, bytes) else value for value in values]
    else:
        flat = np.frombuffer(values, kind).tolist() if kind else _texts(values)
    return flat if width == 1 else [flat[at : at + width] for at in range(0, len(flat), width)]


def _texts(packed: bytes) -> list[str]:
    """Return the texts of a tensor: each has four bytes with its length before it."""
    texts, at = [], 0
    while at < len(packed):
        (length,) = struct.unpack_from("<I", packed, at)
        texts.append(packed[at + 4 : at + 4 + length].decode())
        at += 4 + length
    return texts


def encoded_rows(
    schema_hash: str, slots: int, dense: bytes, keys: bytes, offsets: bytes | None, values: bytes | None
) -> list[bytes]:
    """Return encoded rows as JSON: [hash of the schema, dense values, keys of each slot, values of the keys or null]."""
    flat, amounts = np.frombuffer(keys, np.uint64).tolist(), None
    if values is not None:
        amounts = np.frombuffer(values, np.float32).astype(np.float64).tolist()
    ends = list(range(len(flat) + 1)) if offsets is None else np.frombuffer(offsets, np.int64).tolist()
    numbers = np.frombuffer(dense, np.float32).astype(np.float64)
    count = (len(ends) - 1) // slots if slots else len(numbers)
    rows = []
    for i, own in enumerate(numbers.reshape(count, -1).tolist()):
        edges = ends[i * slots : (i + 1) * slots + 1]
        cells = list(pairwise(edges))
        weights = None if amounts is None else [amounts[first:end] for first, end in cells]
        rows.append(_encoder.encode([schema_hash, own, [flat[first:end] for first, end in cells], weights]))
    return rows
