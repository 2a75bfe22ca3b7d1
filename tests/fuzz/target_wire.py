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
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from clickfleet.cluster import wire
from clickfleet.cluster.authentication import ClientGuard, LinkKeys, ProcessKey, ShardAddress, WorkerLinks
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


class Ends:
    """A worker and a shard with fixed keys. What the shard opens, it also unpacks."""

    def __init__(self, encrypt: bool) -> None:
        pairs = [X25519PrivateKey.from_private_bytes(bytes([i]) * 32) for i in (1, 2)]
        worker, shard = (
            ProcessKey(encrypt, pair.public_key().public_bytes_raw(), pair.private_bytes_raw()) for pair in pairs
        )
        self.links = WorkerLinks(shard)
        self.links.accept([worker.shared])
        self.client = ClientGuard(worker, ShardAddress([], shard.shared), "tcp://")
        assert self.client.link is not None
        self.link: LinkKeys = self.client.link
        self.token = self.client.worker.hex().encode() + b" " + self.link.password.encode()
        self.user = self.links.admit(*self.token.split(b" "))
        sealed = self.client.seal(frames_of(request()))
        opened, shard_link = self.links.open(sealed, self.user)
        self.requests = [as_bytes(sealed), as_bytes(self.client.seal(opened)), as_bytes(sealed[-1:]), b""]
        self.answers = [as_bytes(shard_link.seal(frames_of(answer()))), request(), b""]

    def serve(self, data: bytes) -> object:
        opened, link = self.links.open(frames_of(data), self.user)
        link.claim(wire.unpack_header(opened).peer)
        return wire.unpack_request(opened, WIDTH)

    def receive(self, data: bytes) -> object:
        return wire.unpack_answer(self.client.open(frames_of(data)), WIDTH)

    def admit(self, data: bytes) -> object:
        name, _, password = data.partition(b" ")
        return self.links.admit(name, password)


ENCRYPTED, SEALED = Ends(True), Ends(False)


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
    ("wire-encrypted", ENCRYPTED.serve, ENCRYPTED.requests),
    ("wire-sealed", SEALED.serve, SEALED.requests),
    ("wire-encrypted-answer", ENCRYPTED.receive, ENCRYPTED.answers),
    ("wire-sealed-answer", SEALED.receive, SEALED.answers),
    ("wire-token", ENCRYPTED.admit, [ENCRYPTED.token, SEALED.token, b" ", b"00 " + b"00" * 42]),
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
