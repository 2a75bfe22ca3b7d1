"""Messages over real sockets of this process: whole and in order, dropped when foreign, learned once when repeated."""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zmq
from hypothesis import given
from hypothesis import strategies as st

from clickfleet.cluster import authentication, shard_client, shard_server
from clickfleet.cluster.authentication import BadMessageError, ClientGuard, ProcessKey, ShardAddress, new_key
from clickfleet.cluster.shard import Rules, Shard
from clickfleet.cluster.shard_client import AbandonedError, ShardClient, ShardTable
from clickfleet.cluster.wire import (
    MAX_FRAME,
    PeerIdentity,
    Server,
    pack_answer,
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
    """Two shards behind sockets, and the key of one worker that they accept."""

    def __init__(self, tmp: Any, encrypt: bool = True) -> None:
        self.tmp, self.key, self.keys = tmp, new_key(encrypt), [new_key(encrypt) for _ in range(2)]
        self.spread = Spread(2, 3, 3000)
        self.said: list[str] = []
        make = lambda: Table(factors=2, rule=rule("sgd", lr=0.01, scale="none"))  # noqa: E731
        self.shards = [
            Shard(make(), torch.zeros(last - first), DenseSettings("sgd", lr=1.0), Rules())
            for first, last in self.spread.spans
        ]
        for shard in self.shards:
            shard.begin([0, 1])
        for i in range(2):
            (tmp / str(i)).mkdir(mode=0o700)
        self.servers = [
            Server(
                shard.handle,
                lambda: WHO,
                3,
                ["tcp://127.0.0.1:*", f"ipc://{tmp}/{i}/shard"],
                self.keys[i],
                floats=len(shard.optimizer.values),
                log=self.said.append,
            )
            for i, shard in enumerate(self.shards)
        ]
        self.links: list[ShardClient] = []
        for server in self.servers:
            server.accept([self.key.shared])
            server.start()

    def address(self, shard: int, local: bool = False) -> ShardAddress:
        """Where a shard listens: on the network, or on its Unix socket."""
        return ShardAddress([self.servers[shard].endpoints[int(local)]], self.keys[shard].shared)

    def link(
        self, who: PeerIdentity = WHO, peer: int = 0, key: ProcessKey | None = None, local: bool = False, **options: Any
    ) -> ShardClient:
        shards = [self.address(i, local) for i in range(2)]
        self.links.append(ShardClient(shards, self.spread, who, peer, key or self.key, **options))
        return self.links[-1]

    def close(self) -> None:
        for link in self.links:
            link.close()
        for server in self.servers:
            server.close()


@pytest.fixture(params=[True, False], ids=["encrypted", "sealed"])
def cluster(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    found = Cluster(tmp_path, request.param)
    yield found
    found.close()


@pytest.fixture
def sealed(tmp_path: Path) -> Iterator[Cluster]:
    """Messages are authenticated, but not encrypted."""
    found = Cluster(tmp_path, encrypt=False)
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


def await_that(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.001)
    assert holds()


class Stranger:
    """Sends any bytes to a shard, with the key of a worker, another key or none."""

    def __init__(self, cluster: Cluster, key: ProcessKey | None, shard_key: bytes | None = None) -> None:
        self.server, self._context = cluster.servers[0], zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.linger = 0
        address = cluster.address(0)
        if key is not None:
            self.guard = ClientGuard(key, address._replace(key=shard_key or address.key), address.addresses[0])
            self.guard.protect(self.socket)
        self.socket.connect(address.addresses[0])

    def send(self, frames: list[bytes]) -> None:
        """Send a genuine message, and wait until the shard has seen it."""
        self.send_raw(self.guard.seal(frames))

    def send_raw(self, frames: list[bytes]) -> None:
        before = self.server.messages
        self.socket.send_multipart(frames)
        await_that(lambda: self.server.messages > before)
        with self.server.lock:  # held until the message is handled
            pass

    def close(self) -> None:
        self.socket.close()
        self._context.term()


@pytest.fixture
def stranger(cluster: Cluster) -> Iterator[Stranger]:
    """A worker that sends nonsense: even with the right key."""
    found = Stranger(cluster, cluster.key)
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


def test_frames_that_announce_too_much_end_their_connection(sealed: Cluster) -> None:
    """The transport's own header says a gigabyte and more: nothing is allocated, and the shard goes on."""
    host, _, port = sealed.servers[0].endpoints[0].removeprefix("tcp://").rpartition(":")
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16) + b"\x00" + bytes(31)
    ready = b"\x05READY\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
    with socket.create_connection((host, int(port)), timeout=60) as raw:
        raw.sendall(greeting + b"\x04" + bytes([len(ready)]) + ready)
        raw.sendall(b"\x02" + struct.pack(">Q", MAX_FRAME + 1))
        while raw.recv(4096):
            pass  # until it is closed
    assert sealed.link().ask(Request(values=True)).wait().values is not None


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

    def broken(route: Any, answer: Any) -> None:
        if not sent:
            sent.append(1)
            route.socket.send_multipart([route.connection, *route.seal([b"\x00", b"nonsense"])])
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
    generations: list[int] = []
    link = cluster.link(abandoned=lambda: bool(generations))
    link.ask(Request(Kind.MARK, checkpoint=1)).wait()
    generations.append(0)
    with pytest.raises(AbandonedError):
        link.ask(pushed()).wait()  # held back for ever


def test_a_connection_without_the_right_keys_is_refused_and_counted(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    server, genuine = cluster.servers[0], packed(WHOLE)
    foreign = {
        "no key": (None, None, "without a key"),
        "another key of the shard": (cluster.key, new_key(True).shared, "without a key"),
        "an unknown key of a worker": (new_key(True), None, "with an unknown key"),
    }
    try:
        for name, (key, shard_key, kind) in foreign.items():
            before, stranger = server.refused.counts[kind], Stranger(cluster, key, shard_key)
            stranger.socket.send_multipart(genuine)
            await_that(lambda before=before, kind=kind: server.refused.counts[kind] > before)  # type: ignore[misc]
            assert not stranger.socket.poll(50), name
            stranger.close()
        assert (server.messages, server.dropped.total, cluster.shards[0].version) == (0, 0, 0)
        assert "refused connections so far: 1 without a key" in cluster.said[0]
        cluster.link().ask(pushed()).wait()
        assert cluster.shards[0].version == 1
    finally:
        cluster.close()


def test_workers_are_accepted_and_rejected_while_a_shard_runs(cluster: Cluster) -> None:
    first, second = cluster.link(), new_key(cluster.key.encrypt)
    first.ask(pushed()).wait()
    server, stranger = cluster.servers[0], Stranger(cluster, second)
    stranger.socket.send_multipart(stranger.guard.seal(packed(WHOLE, peer=1)))
    counts = server.refused.counts if cluster.key.encrypt else server.dropped.counts
    await_that(lambda: counts["with an unknown key"] == 1)
    stranger.close()
    for each in cluster.servers:
        each.accept([cluster.key.shared, second.shared])
    cluster.link(peer=1, key=second).ask(pushed()).wait()
    first.ask(pushed()).wait()
    assert cluster.shards[0].version == 3
    for each in cluster.servers:
        each.accept([second.shared])
    dropped = server.dropped.total
    first.ask(pushed())  # over a connection that was accepted
    await_that(lambda: server.dropped.total > dropped)
    cluster.link(peer=1, key=second).ask(Request(values=True)).wait()
    assert cluster.shards[0].version == 3


def test_a_shard_that_moves_brings_its_own_key(cluster: Cluster) -> None:
    """Requests without an answer are sent to the new process. What was recorded before means nothing to it."""
    link, old = cluster.link(), cluster.servers[0]
    recorded = ClientGuard(cluster.key, cluster.address(0), old.endpoints[0]).seal(packed(WHOLE))
    link.ask(Request(values=True)).wait()
    old.close()
    ticket = link.ask(pushed())
    key, floats = new_key(cluster.key.encrypt), len(cluster.shards[0].optimizer.values)
    cluster.servers[0] = server = Server(
        cluster.shards[0].handle, lambda: WHO, 3, ["tcp://127.0.0.1:*"], key, floats=floats
    )
    cluster.keys[0] = key
    server.accept([cluster.key.shared])
    server.start()
    link.move(0, cluster.address(0))
    ticket.wait()
    assert [shard.version for shard in cluster.shards] == [1, 1]
    if not cluster.key.encrypt:
        stranger = Stranger(cluster, None)
        stranger.send_raw(recorded)
        stranger.close()
        assert server.dropped.counts == {"with a wrong seal": 1}


def test_a_unix_socket_needs_no_key(cluster: Cluster) -> None:
    """Its folder admits only this user."""
    link = cluster.link(local=True, key=new_key(cluster.key.encrypt))
    link.ask(pushed()).wait()
    assert [shard.version for shard in cluster.shards] == [1, 1]


def forged(genuine: list[bytes], cluster: Cluster) -> dict[str, tuple[list[bytes], str]]:
    """Messages of somebody who has read a genuine one, with the name under which each is counted."""
    header, rows, dense, seal = genuine
    elsewhere = ClientGuard(cluster.key, cluster.address(1), cluster.servers[1].endpoints[0])
    unknown = ClientGuard(new_key(False), cluster.address(0), cluster.servers[0].endpoints[0])
    flip = lambda data, at: data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]  # noqa: E731
    plain, wrong = [header, rows, dense], "with a wrong seal"
    return {
        "no seal": (plain, "without a seal"),
        "a seal cut off": ([*plain, seal[:-1]], "without a seal"),
        "one message twice": (genuine, "repeated"),
        "the seal of another shard": (elsewhere.seal(plain), wrong),
        "the seal of an unknown worker": (unknown.seal(plain), "with an unknown key"),
        "another generation": ([flip(header, 32), rows, dense, seal], wrong),
        "another peer": ([flip(header, 36), rows, dense, seal], wrong),
        "another number": ([flip(header, 40), rows, dense, seal], wrong),
        "another sequence": ([flip(header, 48), rows, dense, seal], wrong),
        "other rows": ([header, flip(rows, 0), dense, seal], wrong),
        "another gradient": ([header, rows, flip(dense, len(dense) - 1), seal], wrong),
        "a byte in another frame": ([header, rows[:-1], rows[-1:] + dense, seal], wrong),
        "frames in another order": ([header, dense, rows, seal], wrong),
        "another link": ([*plain, flip(seal, 16)], wrong),
        "another count": ([*plain, flip(seal, 24)], wrong),
        "another worker": ([*plain, flip(seal, 0)], "with an unknown key"),
        "another code": ([*plain, flip(seal, len(seal) - 1)], wrong),
        "a frame more": ([*plain, b"", seal], wrong),
    }


def test_sealed_messages_cannot_be_changed_or_repeated(sealed: Cluster) -> None:
    server = sealed.servers[0]
    worker, stranger = Stranger(sealed, sealed.key), Stranger(sealed, None)
    genuine = worker.guard.seal(packed(WHOLE))
    worker.send_raw(genuine)
    worker.socket.recv_multipart()
    assert sealed.shards[0].version == 1
    for name, (frames, kind) in forged(genuine, sealed).items():
        before = server.dropped.counts.copy()
        stranger.send_raw(frames)
        assert server.dropped.counts - before == {kind: 1}, name
    assert sealed.shards[0].version == 1
    assert not stranger.socket.poll(50)
    worker.send(packed(WHOLE, sequence=2))
    assert sealed.shards[0].version == 2
    for each in (worker, stranger):
        each.close()


def test_links_that_were_replaced_cannot_be_recorded_and_used(sealed: Cluster) -> None:
    server, address = sealed.servers[0], sealed.address(0)
    old = ClientGuard(sealed.key, address, address.addresses[0])
    recorded, kept = old.seal(packed(WHOLE)), old.seal(packed(WHOLE, sequence=2))
    worker = Stranger(sealed, sealed.key)
    worker.send(packed(Request(values=True), sequence=0))
    for frames in (recorded, kept):
        worker.send_raw(frames)
    assert server.dropped.counts == {"repeated": 2}
    assert sealed.shards[0].version == 0
    worker.close()


def test_changed_answers_are_dropped_and_asked_for_again(sealed: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_client, "RESEND_S", 0.0)
    server, answers = sealed.servers[0], 0
    send = server.send

    def changing(route: Any, answer: Any) -> None:
        nonlocal answers
        answers += 1
        if answers > 4:
            return send(route, answer)
        header, error, values, seal = route.seal([bytes(each) for each in pack_answer(answer)])
        foreign = [
            [header, error, values],
            [header, error, values[:-1] + b"\x01", seal],
            [header, error + values[:4], values[4:], seal],
            [header, error, values, bytes(len(seal))],
        ]
        route.socket.send_multipart([route.connection, *foreign[answers - 1]])
        return None

    monkeypatch.setattr(server, "send", changing)
    link = sealed.link()
    assert link.ask(Request(values=True)).wait().values is not None
    assert link.dropped == 4


def test_a_zeromq_without_curve_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(authentication.zmq, "has", lambda capability: False)
    with pytest.raises(ClusterError, match=r"without CURVE(.|\n)*cluster.encrypt: false"):
        new_key(True)
    assert len(new_key(False).secret) == 32


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
