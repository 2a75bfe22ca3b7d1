"""Logs of events and joined rows: lines, messages, growing and complete files, and the state of a join."""

from __future__ import annotations

import io
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa

from clickfleet.data.events import (
    FEEDBACK,
    JOINED,
    SHOWS,
    Feedback,
    Show,
    feedback_columns,
    feedback_rows,
    read_lines,
    read_message,
    show_columns,
)
from clickfleet.data.formats.joined import Joined
from clickfleet.data.reader import Reader
from clickfleet.data.schema import Dense, Schema, Slot
from clickfleet.errors import ClickfleetError
from clickfleet.online.joiner import EventRound, Joiner, JoinRules
from clickfleet.store.event_log import EventFolder, LogPlace, StreamReader, StreamTail, stream_bytes, stream_head

FOLDER = Path(tempfile.mkdtemp(prefix="clickfleet-fuzz-"))
SCHEMA = Schema(dense=(Dense("x"),), slots=(Slot("a"), Slot("b", multi=True)), label="click", group="a")
SHOWN = show_columns(
    [
        Show(f"r{i}", "0", 10**6 * (i + 1), '{"a": "v", "b": ["u", 3], "x": 1.5}', 1, "m", 1, 0.5, "predict", None)
        for i in range(3)
    ]
)
TOLD = feedback_columns(
    [Feedback(f"r{i}", "0", {"click": 1.0, "buy": 0.0}, f"e{i}", 10**6, 2 * 10**6) for i in range(3)]
)
EVENT = b'{"request": "r", "item": 7, "label": {"click": 1}, "event": "e", "time": 1700000000.5}\n'
SHOW = (
    b'{"request": "r", "features": {"a": 1, "b": ["x"]}, "user": {"x": 2}, "position": 3, "score": 0.5, "time": 17}\n'
)


def joined_file() -> bytes:
    rows: list[dict[str, Any]] = [
        {
            "kind": "correction", "request": "r", "item": "0", "labels": [("click", 1.0)], "previous": [("click", 0.0)],
            "shown": 10**6, "known": 10**7, "labelled": 10**7, "event": "e", "position": 1, "features": features, "route": "rank",
            "user": '{"x": 1}',
        }
        for features in ('{"a": "v", "id": 3}', '["hash", [1.0], [[1], []], null]', '{"b": {"k": 1.5}}')
    ]  # fmt: skip
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, JOINED) as out:
        out.write_batch(pa.RecordBatch.from_pylist(rows, JOINED))
    return bytes(sink.getvalue())


def lines(schema: pa.Schema) -> Callable[[bytes], object]:
    return lambda data: read_lines(data, schema, 5)


def messages(schema: pa.Schema) -> Callable[[bytes], object]:
    def read(data: bytes) -> object:
        found = read_message(data, schema, 5)
        return feedback_rows(found.batch) if schema is FEEDBACK else found.batch.to_pylist()

    return read


def file(name: str, schema: pa.Schema) -> Callable[[bytes], object]:
    """A file in the folder of a log, read to its end; damage is a warning, and the events before it are kept."""

    def read(data: bytes) -> object:
        with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
            path = Path(folder) / "20260101" / name
            path.parent.mkdir()
            path.write_bytes(data)
            os.utime(path, (1, 1))
            log = EventFolder(folder)
            listed = log.streams()
            (stream,) = listed
            reader = StreamReader(log, stream, schema, LogPlace(), lambda text: None)
            found = 0
            while (events := reader.read(listed)) is not None:
                found += len(events.batch)
            reader.close()
            return found

    return read


def tail(data: bytes) -> object:
    try:
        return [batch.num_rows for batch in StreamTail(io.BytesIO(data))]
    except (pa.ArrowException, OSError, ValueError, TypeError, KeyError, OverflowError, MemoryError):
        return None


def joined(data: bytes) -> object:
    path = FOLDER / "joined.arrow"
    path.write_bytes(data)
    return [len(batch) for batch in Reader(path, SCHEMA, Joined(), 10, bad_lines="skip", max_bad_fraction=1.0)]


def features(data: bytes) -> object:
    """The features of one row, as text."""
    text = data.decode("utf-8", "replace")
    row = {
        "kind": "label",
        "request": "r",
        "item": "0",
        "labels": [("click", 1.0)],
        "shown": 1,
        "known": 1,
        "features": text,
    }
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, JOINED) as out:
        out.write_batch(pa.RecordBatch.from_pylist([row], JOINED))
    return joined(bytes(sink.getvalue()))


@cache
def committed() -> Path:
    """The folder of a join with shows that wait."""
    folder = Path(tempfile.mkdtemp(dir=FOLDER))
    made = Joiner(folder, JoinRules())
    made.apply(EventRound([(1, SHOWN)], [TOLD.slice(1)], {1: 10**6}))
    made.commit({})
    made.close()
    return folder


def state(name: str) -> Callable[[bytes], object]:
    """A file of the state of a join, damaged: it is refused, or what is read is in bounds."""

    def read(data: bytes) -> object:
        with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
            shutil.copytree(committed(), folder, dirs_exist_ok=True)
            (path,) = Path(folder).glob(name)
            path.write_bytes(data)
            try:
                again = Joiner(Path(folder), JoinRules())
            except ClickfleetError:
                return None
            try:
                return again.apply(EventRound([], [TOLD], {1: 10**9}))
            except (IndexError, pa.ArrowException, ValueError) as error:
                raise ClickfleetError(str(error)) from None
            finally:
                again.close()

    return read


GROWING = "20260101T000000-0123abcd-000001.arrow.open"
STREAM = stream_head(SHOWS) + stream_bytes(SHOWN) + stream_bytes(SHOWN)
SINK = pa.BufferOutputStream()
with pa.ipc.new_file(SINK, SHOWS) as _out:
    _out.write_batch(SHOWN)
COMPLETE = bytes(SINK.getvalue())
ENCODED = json.dumps([SCHEMA.inputs().hash, [1.5], [[2**64 - 1], [1, 2]], None]).encode()

TARGETS = [
    ("event-lines", lines(FEEDBACK), [EVENT * 2, b"{}\n[]\nnull\n\n", b'{"request": "\\ud800", "label": {"a": 1e400}}\n']),
    ("show-lines", lines(SHOWS), [SHOW * 2, b'{"request": "r", "features": {"a": NaN}}\n', b'{"features": [' + b"[" * 3000]),
    ("event-message", messages(FEEDBACK), [EVENT, stream_head(FEEDBACK) + stream_bytes(TOLD)]),
    ("show-message", messages(SHOWS), [SHOW, STREAM]),
    ("growing-log", file(GROWING, SHOWS), [STREAM, STREAM[:-7], STREAM[:300]]),
    ("complete-log", file(GROWING.removesuffix(".open"), SHOWS), [COMPLETE, STREAM]),
    ("foreign-log", file("theirs.jsonl", FEEDBACK), [EVENT * 3, EVENT[:-1]]),
    ("stream-tail", tail, [STREAM, STREAM[8:], b"\xff\xff\xff\xff\x08\x00\x00\x00" + bytes(8)]),
    ("joined", joined, [joined_file()]),
    ("joined-features", features, [b'{"a": "v", "b": ["x", 3], "x": 1.5}', ENCODED, b'{"b": {"k": 2}}', b"[1, 2]", b"null"]),
    ("join-state", state("join.json"), [b"{}", b'{"hash":"x"}', b"[]"]),
    ("join-keys", state("keys-*.log"), [bytes(72), b"\xff" * 72]),
]  # fmt: skip
