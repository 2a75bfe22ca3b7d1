"""Messages over real sockets of this process: whole and in order, dropped when foreign, learned once when repeated."""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zmq
from hypothesis import given
from hypothesis import strategies as st

from clickfleet.cluster import shard_client, shard_server
from clickfleet.cluster.shard import Rules, Shard
from clickfleet.cluster.shard_client import AbandonedError, ShardClient, ShardTable
from clickfleet.cluster.wire import (
    MAX_FRAME,
    BadMessageError,
    PeerIdentity,
    Server,
    pack_request,
    unpack_answer,
    unpack_request,
)
from clickfleet.config.sections import DenseSettings
from clickfleet.errors import ClusterError
from clickfleet.store.rules import rule
from clickfleet.store.table import Table
from clickfleet.training.embedding import Push
from clickfleet.training.sharding import Gradient, Kind, Piece, Request, Spread

WHO = PeerIdentity(schema=11, run=bytes(range(16)), generation=3)
FLOATS = Spread(2, 3, 3000).spans[0][1]
"""Dense weights of the first shard."""
KEYS = np.arange(1, 500, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)


class Cluster:
    """Two shards behind sockets."""

    def __init__(self, tmp: Any) -> None:
        self.spread = Spread(2, 3, 3000)
        self.said: list[str] = []
        make = lambda: Table(factors=2, rule=rule("sgd", lr=0.01, scale="none"))  # noqa: E731
        self.shards = [
            Shard(make(), torch.zeros(last - first), DenseSettings("sgd", lr=1.0), Rules())
            for first, last in self.spread.spans
        ]
        for shard in self.shards:
            shard.begin([0, 1])
        self.servers = [
            Server(
                shard.handle,
                lambda: WHO,
                3,
                ["tcp://127.0.0.1:*", f"ipc://{tmp}/shard-{i}"],
                floats=len(shard.optimizer.values),
                log=self.said.append,
            )
            for i, shard in enumerate(self.shards)
        ]
        self.links: list[ShardClient] = []
        for server in self.servers:
            server.start()

    def link(self, who: PeerIdentity = WHO, peer: int = 0, **options: Any) -> ShardClient:
        self.links.append(ShardClient([s.endpoints for s in self.servers], self.spread, who, peer, **options))
        return self.links[-1]

    def close(self) -> None:
        for link in self.links:
            link.close()
        for server in self.servers:
            server.close()


@pytest.fixture
def cluster(tmp_path: Any) -> Iterator[Cluster]:
    found = Cluster(tmp_path)
    yield found
    found.close()


def pushed(keys: Any = KEYS, g: float = -1.0) -> Request:
    ones = np.ones(len(keys), np.float32)
    grads = np.full((len(keys), 3), g, np.float32) * np.arange(1, len(keys) + 1, dtype=np.float32)[:, None]
    push = Push(keys, grads, ones, ones * 0, np.zeros(len(keys), np.uint16), 1.0)
    return Request(push=push, dense=Gradient(-np.arange(3000, dtype=np.float32), 1.0, 1.0))


def test_what_is_pushed_comes_back_in_the_order_asked_for(cluster: Cluster) -> None:
    link = cluster.link()
    before = link.ask(Request(pull=KEYS)).wait().rows
    link.ask(pushed()).wait()
    reply = link.ask(Request(pull=KEYS, values=True)).wait()
    assert before is not None
    assert reply.rows is not None
    assert reply.values is not None
    moved = 0.01 * np.arange(1, len(KEYS) + 1, dtype=np.float32)[:, None]
    assert np.allclose(reply.rows, before + moved, rtol=1e-5)
    assert np.array_equal(reply.values, np.arange(3000, dtype=np.float32))
    assert [len(shard.table) > 100 for shard in cluster.shards] == [True, True]
    assert np.array_equal(ShardTable(link, 2).pull(KEYS), reply.rows)
    unknown = np.array([12345], np.uint64)
    assert not ShardTable(link, 2).pull(unknown, training=False).any()


def test_answers_may_come_in_another_order(cluster: Cluster) -> None:
    """What a marked peer pushes is held back; what it pulls is answered."""
    first, second = cluster.link(peer=0), cluster.link(peer=1)
    first.ask(Request(Kind.MARK, checkpoint=1)).wait()
    held = first.ask(pushed())
    assert first.ask(Request(values=True)).wait().values is not None
    assert not held.ready()
    second.ask(Request(Kind.MARK, checkpoint=1)).wait()
    held.wait()
    assert [shard.version for shard in cluster.shards] == [1, 1]


def test_a_repeated_push_is_learned_once(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_client, "RESEND_S", 0.0)
    link = cluster.link()
    for server in cluster.servers:
        server.lock.acquire()  # the shards are slow
    ticket = link.ask(pushed())
    link.timeout_s = 0.5
    with pytest.raises(ClusterError, match=r"shard 0 .* has not answered"):
        ticket.wait()
    for server in cluster.servers:
        server.lock.release()
    link.timeout_s = 30.0
    ticket.wait()
    link.ask(Request(values=True)).wait()
    assert cluster.servers[0].messages > 2  # it was sent again
    assert [shard.version for shard in cluster.shards] == [1, 1]


class Stranger:
    """Sends any bytes to a shard."""

    def __init__(self, server: Server) -> None:
        self.server, self._context = server, zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.connect(server.endpoints[0])

    def send(self, frames: list[bytes]) -> None:
        """Until the shard has seen it."""
        before, deadline = self.server.messages, time.monotonic() + 60
        self.socket.send_multipart(frames)
        while self.server.messages == before and time.monotonic() < deadline:
            time.sleep(0.001)
        assert self.server.messages > before

    def close(self) -> None:
        self.socket.close()
        self._context.term()


@pytest.fixture
def stranger(cluster: Cluster) -> Iterator[Stranger]:
    found = Stranger(cluster.servers[0])
    yield found
    found.close()


def packed(request: Request, who: PeerIdentity = WHO, peer: int = 0, sequence: int = 1) -> list[bytes]:
    part = Spread(1, 3, FLOATS).divide(
        request, None if request.pull is None else Spread(1, 3, FLOATS).split(request.pull)
    )[0]
    return [bytes(frame) for frame in pack_request(Piece(part, sequence, 0, 7), who, peer)]


WHOLE = Request(push=pushed().push, dense=Gradient(np.ones(FLOATS, np.float32), 1.0, 1.0))
PUSH = packed(WHOLE)
PULL = packed(Request(pull=KEYS), sequence=0)
HEADER = PUSH[0]


def changed(place: int, value: bytes) -> bytes:
    return HEADER[:place] + value + HEADER[place + len(value) :]


FOREIGN = {
    "another run": (packed(pushed(), WHO._replace(run=b"x" * 16)), "of another run"),
    "another schema": (packed(pushed(), WHO._replace(schema=5)), "of another schema"),
    "an older protocol": ([struct.pack("<H", 1) + bytes(68)], "protocol"),
    "a newer protocol": ([changed(0, b"\x63\x00"), *PUSH[1:]], "protocol"),
    "nothing": ([b""], "malformed"),
    "one byte": ([b"x"], "malformed"),
    "text": ([b"GET / HTTP/1.1"], "malformed"),
    "a header cut off": ([HEADER[:-1], *PUSH[1:]], "malformed"),
    "a header too long": ([HEADER + b"x", *PUSH[1:]], "malformed"),
    "an unknown kind": ([changed(2, b"\x09"), *PUSH[1:]], "malformed"),
    "unknown flags": ([changed(3, b"\xff"), *PUSH[1:]], "malformed"),
    "too few frames": (PUSH[:-1], "malformed"),
    "too many frames": ([*PUSH, b""], "malformed"),
    "no frames but the header": ([HEADER], "malformed"),
    "rows cut off": ([HEADER, PUSH[1][:-1], PUSH[2]], "malformed"),
    "a gradient cut off": ([HEADER, PUSH[1], PUSH[2][:-3]], "malformed"),
    "a gradient of another length": ([HEADER, PUSH[1], PUSH[2][:-4]], "malformed"),
    "keys cut off": ([PULL[0], PULL[1][:-1]], "malformed"),
    "a push without a number": (packed(pushed(), sequence=0), "malformed"),
    "a weight that is no number": (packed(Request(push=pushed().push._replace(n=float("nan")))), "malformed"),  # type: ignore[union-attr]
    "an unknown peer": (packed(WHOLE, peer=9), "of an unknown peer"),
    "a mark of an unknown peer": (packed(Request(Kind.MARK, checkpoint=1), peer=9, sequence=0), "of an unknown peer"),
    "a shipment of an unknown peer": (packed(Request(Kind.SHIP), peer=9, sequence=0), "of an unknown peer"),
}


def test_what_is_not_of_the_run_is_dropped_and_counted(cluster: Cluster, stranger: Stranger) -> None:
    """No bytes end a shard or are learned, and their sender hears nothing."""
    server, link = cluster.servers[0], cluster.link(peer=1)
    for name, (frames, kind) in FOREIGN.items():
        before = server.dropped.counts.copy()
        stranger.send(frames)
        assert server.dropped.counts - before == {kind: 1}, name
        assert link.ask(Request(values=True)).wait().seen == [0, 0], name  # it goes on, and has learned nothing
    assert server.failure is None
    assert not stranger.socket.poll(100)
    line, *_ = cluster.said  # the first; those about the others are rare
    assert "1 of another run" in line
    assert "127.0.0.1" in line
    assert WHO.run.hex() not in line


def test_frames_that_announce_too_much_end_their_connection(cluster: Cluster) -> None:
    """The transport's own header says a gigabyte and more: nothing is allocated, and the shard goes on."""
    host, _, port = cluster.servers[0].endpoints[0].removeprefix("tcp://").rpartition(":")
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16) + b"\x00" + bytes(31)
    ready = b"\x05READY\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
    with socket.create_connection((host, int(port)), timeout=60) as raw:
        raw.sendall(greeting + b"\x04" + bytes([len(ready)]) + ready)
        raw.sendall(b"\x02" + struct.pack(">Q", MAX_FRAME + 1))
        while raw.recv(4096):
            pass  # until it is closed
    assert cluster.link().ask(Request(values=True)).wait().values is not None


@given(st.lists(st.binary(max_size=300), max_size=5), st.sampled_from([HEADER, PULL[0], b""]), st.data())
def test_any_bytes_are_a_message_or_an_error(frames: list[bytes], start: bytes, data: st.DataObject) -> None:
    head = bytearray(start)
    for place in data.draw(st.lists(st.integers(0, max(0, len(head) - 1)), max_size=3)) if head else ():
        head[place] = data.draw(st.integers(0, 255))
    for given_frames in ([bytes(head), *frames], frames):
        with suppress(BadMessageError):
            piece, _, _ = unpack_request(given_frames, 3, 10)
            arrays = [piece.request.pull, *(piece.request.push or ())[:5]]
            size = sum(each.nbytes for each in arrays if each is not None)
            assert size <= sum(map(len, given_frames))
        with suppress(BadMessageError):
            unpack_answer(given_frames, 3)


def test_a_bad_answer_is_asked_for_again(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_client, "RESEND_S", 0.0)
    server, sent = cluster.servers[0], []
    send = server.send

    def broken(route: bytes, answer: Any) -> None:
        if not sent:
            sent.append(1)
            server.socket.send_multipart([route, b"\x00", b"nonsense"])
        else:
            send(route, answer)

    monkeypatch.setattr(server, "send", broken)
    link = cluster.link()
    assert link.ask(Request(values=True)).wait().values is not None
    assert link.dropped == 1


def test_messages_of_an_older_epoch_are_refused(cluster: Cluster) -> None:
    with pytest.raises(AbandonedError):
        cluster.link(WHO._replace(generation=2)).ask(pushed()).wait()
    assert [shard.version for shard in cluster.shards] == [0, 0]


def test_an_abandoned_worker_stops_waiting(cluster: Cluster) -> None:
    link = cluster.link(abandoned=lambda: True)
    link.ask(Request(Kind.MARK, checkpoint=1)).wait()
    with pytest.raises(AbandonedError):
        link.ask(pushed()).wait()  # held back for ever


def test_sockets_of_killed_shards_are_cleared_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_server.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(shard_server.tempfile, "tempdir", str(tmp_path))
    left, young, alive, plain, open_to_all = (Path(shard_server.new()) for _ in range(5))
    plain.write_text("no socket")
    with socket.socket(socket.AF_UNIX) as listening:
        for path in (left, young, open_to_all):
            with socket.socket(socket.AF_UNIX) as killed:
                killed.bind(str(path))
        listening.bind(str(alive))
        listening.listen()
        for path in (left, alive, plain, open_to_all):
            os.utime(path, (0, 0))
        open_to_all.parent.chmod(0o755)
        mine = Path(shard_server.new())
    assert (mine.parent.stat().st_mode & 0o777, mine.exists()) == (0o700, False)
    kept = {path.parent.name for path in (young, alive, plain, open_to_all, mine)}
    assert {path.name for path in tmp_path.iterdir()} == kept
    assert [shard_server.is_ours(str(path)) for path in (young, plain, open_to_all, mine)] == [
        True,
        False,
        False,
        False,
    ]
