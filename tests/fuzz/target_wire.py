"""What others send: shards and workers of a cluster, Kafka, and servers that may be hostile."""

from __future__ import annotations

import gzip
import io
import tempfile
from collections.abc import Callable
from email.message import Message
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from clickfleet.cluster import wire
from clickfleet.config.load import Config, checked
from clickfleet.data.batch import Batch
from clickfleet.data.schema import Dense, Schema, Slot, write_schema
from clickfleet.online.sources.broker import Record
from clickfleet.online.sources.messages import Spool, columns_of
from clickfleet.serve.client import Client
from clickfleet.training.sharding import Answer, Gradient, Kind, Piece, Request, row_bytes, rows_of

FOLDER = Path(tempfile.mkdtemp(prefix="clickfleet-fuzz-"))
SCHEMA = Schema(dense=(Dense("x"),), slots=(Slot("a"), Slot("b", multi=True)), label="click", time="t")
WIDTH = 3


def frames_of(data: bytes) -> list[Any]:
    """Frames behind each other, each after its length in two bytes."""
    frames, at = [], 0
    while at < len(data):
        size = int.from_bytes(data[at : at + 2], "little")
        frames.append(memoryview(data[at + 2 : at + 2 + size]))
        at += 2 + size
    return frames or [memoryview(b"")]


def as_bytes(frames: list[Any]) -> bytes:
    parts = [bytes(frame.bytes if hasattr(frame, "bytes") else frame) for frame in frames]
    return b"".join(len(part).to_bytes(2, "little") + part for part in parts)


def request() -> bytes:
    rows = np.zeros(2 * row_bytes(WIDTH), np.uint8)
    asked = Request(Kind(0), values=True, training=True, pull=np.arange(3, dtype=np.uint64))
    asked.rows, asked.push = rows, rows_of(rows, WIDTH, 1.0)
    asked.dense = Gradient(np.ones(4, np.float32), 1.0, 1.0)
    return as_bytes(wire.pack_request(Piece(asked, 1, 1, 1), wire.PeerIdentity(1, b"r" * 16, 3), 0))


def answer() -> bytes:
    found = Answer(version=1, number=2, rows=np.ones((2, WIDTH), np.float32), keys=np.arange(2, dtype=np.uint64))
    return as_bytes(wire.pack_answer(found))


def records(kind: str, skip: str) -> Callable[[bytes], object]:
    """The records of a topic, `|` between them, as a pass writes them to a file."""
    write_schema(SCHEMA, FOLDER / "schema.yaml")
    raw = {
        "data": {"format": "csv", "schema": str(FOLDER / "schema.yaml"), "bad_lines": skip},
        "online": {"kafka": {"brokers": "none:9092", "topic": "clicks", "format": kind}, "start_day": 20260101},
    }
    config = checked(Config, raw, source="fuzz")

    def run(data: bytes) -> object:
        spool = Spool(FOLDER / f"spool-{kind}-{skip}", config)
        parts = [data] if kind == "arrow" else data.split(b"|")
        found = [Record("clicks", 0, i, 1.0 + i, part) for i, part in enumerate(parts)]
        counts = [spool.rows_of(record) for record in found]
        return counts, spool.write("pass", {0: found})

    return run


def arrow_records() -> bytes:
    sink, columns = io.BytesIO(), columns_of(SCHEMA)
    with pa.ipc.new_stream(sink, columns) as writer:
        writer.write_table(
            pa.Table.from_pylist([{"click": 1.0, "t": 5, "x": 0.5, "a": "q", "b": ["r", "s"]}] * 3, columns)
        )
    return sink.getvalue()


class Reply:
    """An answer of a server: a status, headers and content."""

    def __init__(self, data: bytes) -> None:
        head, _, self.content = data.partition(b"\n\n")
        first, *lines = head.decode("latin1").split("\n")
        self.status = int(first) if first.isdecimal() and len(first) < 6 else 200
        self.headers = Message()
        for line in lines:
            name, _, value = line.partition(":")
            self.headers[name.strip() or "x"] = value.strip().replace("\r", "")

    def read(self, size: int | None = None) -> bytes:
        return self.content

    def getheaders(self) -> list[tuple[str, str]]:
        return [(name, str(value)) for name, value in self.headers.items()]

    def getheader(self, name: str, default: str | None = None) -> str | None:
        return self.headers.get(name, default)


def client(ask: Callable[[Client], object]) -> Callable[[bytes], object]:
    """A client whose server answers with the fuzzer's bytes."""

    def run(data: bytes) -> object:
        class Connection:
            sock = None

            def request(self, *given: Any, **more: Any) -> None: ...
            def getresponse(self) -> Reply:
                return Reply(data)

            def close(self) -> None: ...

        made = Client("http://127.0.0.1:1")
        made.connection = Connection()  # type: ignore[assignment]
        made.model_name = "m"
        return ask(made)

    return run


BATCH = Batch(np.zeros((2, 1), np.float32), np.arange(4, dtype=np.uint64), 2)
JSON = b'{"click": 1, "t": 5, "x": 0.5, "a": "q", "b": ["r", 7]}'
HEAD = b'{"model_version":"1","outputs":[{"name":"score","shape":[2],"parameters":{"binary_data_size":8}}]}'
INFER = b"200\ninference-header-content-length: %d\nserver-timing: total;dur=1.5\n\n%b" % (len(HEAD), HEAD + b"\0" * 8)
PACKED = b"200\ncontent-encoding: gzip\n\n" + gzip.compress(b'{"result": {"score": [[0.5], [0.25]]}}')
FEED = b'200\nserver-timing: total;dur=1.5\n\n{"result": {"score": [[0.5], [0.25]]}}'
SURROGATE = b'{"click": 1, "t": 5, "a": "\\ud800"}'
DEEP = b'{"a": ' + b"[" * 3000 + b"]" * 3000 + b"}"
DIGITS = b'{"click": 1, "t": ' + b"9" * 400 + b', "x": 1e999}'

TARGETS = [
    ("wire-request", lambda data: wire.unpack_request(frames_of(data), WIDTH), [request(), b"", b"\x02\x00\x01\x00"]),
    ("wire-answer", lambda data: wire.unpack_answer(frames_of(data), WIDTH), [answer(), b"", b"\x01\x00\x00"]),
    ("kafka-json-skip", records("json", "skip"), [JSON, JSON + b"\n" + JSON + b"|" + JSON, SURROGATE, DEEP, DIGITS]),
    ("kafka-json-error", records("json", "error"), [JSON, SURROGATE, DEEP, DIGITS]),
    ("kafka-text", records("text", "skip"), [b"1,5,0.5,q,r|s", b"\xff\n\n"]),
    ("kafka-arrow", records("arrow", "skip"), [arrow_records()]),
    ("client-model", client(lambda one: one.model()), [b'200\n\n{"name":"m","schema":{}}', b"500\n\n{}", b"200\n\n" + b"[" * 3000]),
    ("client-predict", client(lambda one: one.predict([{"a": 1}])), [b'200\n\n{"scores":[0.5]}', b'200\n\n{"scores":{}}', b'200\n\n[1]']),
    ("client-feed", client(lambda one: one.feed({"x": [[1], [2]]}, ["score"])), [FEED, PACKED]),
    ("client-score", client(lambda one: one.score(BATCH)), [INFER, b"200\n\n{}", b"200\ninference-header-content-length: x\n\n"]),
    ("client-upload", client(lambda one: one.upload(b"x", "csv")), [b'200\n\n{"data":[[0.5]],"server_ms":1}', b'200\n\n{"data":"x"}']),
]  # fmt: skip
