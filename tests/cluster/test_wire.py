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
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import given
from hypothesis import strategies as st

from clickfleet.cluster import authentication, shard_client, shard_server
from clickfleet.cluster.authentication import (
    BadMessageError,
    ClientGuard,
    ProcessKey,
    ShardAddress,
    WorkerLinks,
    new_key,
)
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
    """Sends any bytes to a shard, with the key of a worker, another key, a token that was read in the network, or nothing."""

    def __init__(
        self,
        cluster: Cluster,
        key: ProcessKey | None,
        shard_key: bytes | None = None,
        token_of: ClientGuard | None = None,
    ) -> None:
        self.server, self._context = cluster.servers[0], zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.linger = 0
        address = cluster.address(0)
        if key is not None:
            self.guard = ClientGuard(key, address._replace(key=shard_key or address.key), address.addresses[0])
            self.guard.protect(self.socket)
        if token_of is not None:
            token_of.protect(self.socket)
        self.socket.connect(address.addresses[0])

    def send(self, frames: list[bytes]) -> None:
        """Send a genuine message, and wait until the shard has seen it."""
        self.send_raw(sealed(self.guard, frames))

    def send_raw(self, frames: list[bytes]) -> None:
        before = self.server.messages
        self.socket.send_multipart(frames)
        await_that(lambda: self.server.messages > before)
        with self.server.lock:  # held until the message is handled
            pass

    def close(self) -> None:
        self.socket.close()
        self._context.term()


def sealed(guard: ClientGuard, frames: list[bytes]) -> list[bytes]:
    return [bytes(each) for each in guard.seal(frames)]


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


def greeting(mechanism: bytes) -> bytes:
    return b"\xff" + bytes(8) + b"\x7f\x03\x00" + mechanism.ljust(20, b"\0") + b"\x00" + bytes(31)


def command(data: bytes) -> bytes:
    return b"\x04" + bytes([len(data)]) + data


def greeted(guard: ClientGuard) -> bytes:
    """What a connection with the token of a link sends before its first message."""
    assert guard.link is not None
    name, password = guard.worker.hex().encode(), guard.link.password.encode()
    hello = b"\x05HELLO" + bytes([len(name)]) + name + bytes([len(password)]) + password
    initiate = b"\x08INITIATE\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
    return greeting(b"PLAIN") + command(hello) + command(initiate)


def test_frames_that_announce_too_much_end_their_connection(cluster: Cluster) -> None:
    """The transport's own header says a gigabyte and more: nothing is allocated, and the shard goes on."""
    host, _, port = cluster.servers[0].endpoints[0].removeprefix("tcp://").rpartition(":")
    size = struct.pack(">Q", MAX_FRAME + authentication.TAG_BYTES + 1)
    known = ClientGuard(cluster.key, cluster.address(0), cluster.servers[0].endpoints[0])
    for start in (greeting(b"PLAIN") + b"\x06", greeted(known) + b"\x02"):
        with socket.create_connection((host, int(port)), timeout=60) as raw:
            raw.sendall(start + size)
            while raw.recv(4096):
                pass  # until it is closed
    assert cluster.link().ask(Request(values=True)).wait().values is not None


def test_a_stranger_never_gets_beyond_the_handshake(cluster: Cluster) -> None:
    """Whatever follows a wrong token, the shard receives no message."""
    server = cluster.servers[0]
    host, _, port = server.endpoints[0].removeprefix("tcp://").rpartition(":")
    strange = ClientGuard(new_key(cluster.key.encrypt), cluster.address(0), server.endpoints[0])
    ready = b"\x05READY\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
    starts = {
        "with an unknown key": greeted(strange),
        "without a key": greeting(b"NULL") + command(ready),
    }
    for kind, start in starts.items():
        before = server.refused.counts[kind]
        with suppress(ConnectionError), socket.create_connection((host, int(port)), timeout=60) as raw:
            raw.sendall(start)
            raw.sendall(b"\x00\x05hello" * 1000)
            while raw.recv(4096):
                pass
        await_that(lambda kind=kind, before=before: server.refused.counts[kind] > before)  # type: ignore[misc]
    assert (server.messages, server.dropped.total) == (0, 0)


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


def test_a_connection_without_the_right_keys_is_refused_and_counted(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, genuine, encrypt = cluster.servers[0], packed(WHOLE), cluster.key.encrypt
    foreign = {
        "no key": (None, None, "without a key"),
        "another key of the shard": (cluster.key, new_key(encrypt).shared, "with an unknown key"),
        "an unknown key of a worker": (new_key(encrypt), None, "with an unknown key"),
        "the other setting": (cluster.key._replace(encrypt=not encrypt), None, "with an unknown key"),
    }
    for name, (key, shard_key, kind) in foreign.items():
        before, stranger = server.refused.counts[kind], Stranger(cluster, key, shard_key)
        stranger.socket.send_multipart(genuine)
        await_that(lambda before=before, kind=kind: server.refused.counts[kind] > before)  # type: ignore[misc]
        assert not stranger.socket.poll(50), name
        stranger.close()
    with monkeypatch.context() as patch:
        patch.setattr(authentication, "PROTOCOL", 99)
        newer = Stranger(cluster, cluster.key)
    await_that(lambda: server.refused.counts["protocol"] > 0)
    newer.close()
    assert (server.messages, server.dropped.total, cluster.shards[0].version) == (0, 0, 0)
    assert "refused connections so far: 1 without a key" in cluster.said[0]
    cluster.link().ask(pushed()).wait()
    assert cluster.shards[0].version == 1


def test_workers_are_accepted_and_rejected_while_a_shard_runs(cluster: Cluster) -> None:
    first, second = cluster.link(), new_key(cluster.key.encrypt)
    first.ask(pushed()).wait()
    server, stranger = cluster.servers[0], Stranger(cluster, second)
    stranger.socket.send_multipart(sealed(stranger.guard, packed(WHOLE, peer=1)))
    await_that(lambda: server.refused.counts["with an unknown key"] > 0)
    stranger.close()
    for each in cluster.servers:
        each.accept([cluster.key.shared, second.shared])
    cluster.link(peer=1, key=second).ask(pushed()).wait()
    first.ask(pushed()).wait()
    assert cluster.shards[0].version == 3
    for each in cluster.servers:
        each.accept([second.shared])
    first.ask(pushed())  # over a connection that was accepted
    await_that(lambda: server.dropped.counts["with a key that is no longer accepted"] > 0)
    cluster.link(peer=1, key=second).ask(Request(values=True)).wait()
    assert cluster.shards[0].version == 3


def test_a_shard_that_moves_brings_its_own_key(cluster: Cluster) -> None:
    """Requests without an answer are sent to the new process. What was recorded before means nothing to it."""
    link, old = cluster.link(), cluster.servers[0]
    recorded = sealed(ClientGuard(cluster.key, cluster.address(0), old.endpoints[0]), packed(WHOLE))
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
    stranger = Stranger(cluster, cluster.key)
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
    encrypt = cluster.key.encrypt
    unknown = ClientGuard(new_key(encrypt), cluster.address(0), cluster.servers[0].endpoints[0])
    setting = ClientGuard(
        cluster.key._replace(encrypt=not encrypt), cluster.address(0), cluster.servers[0].endpoints[0]
    )
    flip = lambda data, at: data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]  # noqa: E731
    plain, wrong = [header, rows, dense], "with a wrong seal"
    return {
        "no seal": (plain, "without a seal"),
        "a seal cut off": ([*plain, seal[:-1]], "without a seal"),
        "one message twice": (genuine, "repeated"),
        "nothing but a seal": ([seal], "without a seal"),
        "the seal of another shard": (sealed(elsewhere, plain), wrong),
        "the seal of an unknown worker": (sealed(unknown, plain), "with an unknown key"),
        "the seal of the other setting": (sealed(setting, plain), "without a seal"),
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
        "a frame more": ([*plain, b"", seal], wrong if encrypt else "without a seal"),
        "a frame less": ([header, rows, seal], wrong if encrypt else "without a seal"),
    }


def test_sealed_messages_cannot_be_changed_or_repeated(cluster: Cluster) -> None:
    """Somebody who has read a connection uses its token: it admits, but lets no message pass."""
    server = cluster.servers[0]
    worker = Stranger(cluster, cluster.key)
    stranger = Stranger(cluster, None, token_of=worker.guard)
    genuine = sealed(worker.guard, packed(WHOLE))
    worker.send_raw(genuine)
    worker.socket.recv_multipart()
    assert cluster.shards[0].version == 1
    for name, (frames, kind) in forged(genuine, cluster).items():
        before = server.dropped.counts.copy()
        stranger.send_raw(frames)
        assert server.dropped.counts - before == {kind: 1}, name
    assert cluster.shards[0].version == 1
    assert not stranger.socket.poll(50)
    worker.send(packed(WHOLE, sequence=2))
    assert cluster.shards[0].version == 2
    for each in (worker, stranger):
        each.close()


def test_a_connection_speaks_only_for_its_own_link(cluster: Cluster) -> None:
    """Also a genuine message is dropped if it comes over the connection of another link."""
    first, second = Stranger(cluster, cluster.key), Stranger(cluster, cluster.key)
    first.send(packed(Request(values=True), sequence=0))
    second.send_raw(sealed(first.guard, packed(WHOLE)))
    assert cluster.servers[0].dropped.counts == {"with a wrong seal": 1}
    assert cluster.shards[0].version == 0
    for each in (first, second):
        each.close()


def test_links_that_were_replaced_cannot_be_recorded_and_used(cluster: Cluster) -> None:
    server, address = cluster.servers[0], cluster.address(0)
    old = ClientGuard(cluster.key, address, address.addresses[0])
    recorded, kept = sealed(old, packed(WHOLE)), sealed(old, packed(WHOLE, sequence=2))
    worker, stranger = Stranger(cluster, cluster.key), Stranger(cluster, None, token_of=old)
    worker.send(packed(Request(values=True), sequence=0))
    for frames in (recorded, kept):
        stranger.send_raw(frames)
    assert server.dropped.counts == {"repeated": 2}
    assert cluster.shards[0].version == 0
    for each in (worker, stranger):
        each.close()


def test_changed_answers_are_dropped_and_asked_for_again(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_client, "RESEND_S", 0.0)
    server, answers = cluster.servers[0], 0
    send = server.send

    def changing(route: Any, answer: Any) -> None:
        nonlocal answers
        answers += 1
        if answers > 6:
            return send(route, answer)
        header, error, values, seal = (bytes(each) for each in route.seal(pack_answer(answer)))
        foreign = [
            [header, error, values],
            [header, error, values[:-1] + bytes([values[-1] ^ 1]), seal],
            [header, error + values[:4], values[4:], seal],
            [header, error, values, bytes(len(seal))],
            [header, values, error, seal],
            [seal],
        ]
        route.socket.send_multipart([route.connection, *foreign[answers - 1]])
        return None

    monkeypatch.setattr(server, "send", changing)
    link = cluster.link()
    assert link.ask(Request(values=True)).wait().values is not None
    assert link.dropped == 6


def test_a_repeated_answer_is_dropped(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    server, recorded = cluster.servers[0], list[list[bytes]]()

    def twice(route: Any, answer: Any) -> None:
        recorded.append([bytes(each) for each in route.seal(pack_answer(answer))])
        for frames in (recorded[0], recorded[-1]):
            route.socket.send_multipart([route.connection, *frames])

    monkeypatch.setattr(server, "send", twice)
    link = cluster.link()
    for _ in range(3):
        assert link.ask(Request(values=True)).wait().values is not None
    await_that(lambda: not link._receive(0) and link.dropped == 3)


def test_no_nonce_is_used_twice(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for messages that are sent again or to a shard that moved, not for answers, and not by a worker that left and came back."""
    used: list[tuple[bytes, bytes]] = []

    class Cipher:
        def __init__(self, key: bytes) -> None:
            self._key, self._cipher = key, AESGCM(key)
            self.decrypt, self.decrypt_into = self._cipher.decrypt, getattr(self._cipher, "decrypt_into", None)

        def encrypt(self, nonce: bytes, data: Any, associated_data: Any) -> bytes:
            used.append((self._key, nonce))
            return self._cipher.encrypt(nonce, data, associated_data)

    monkeypatch.setattr(authentication, "AESGCM", Cipher)
    monkeypatch.setattr(shard_client, "RESEND_S", 0.0)
    link, server = cluster.link(), cluster.servers[0]
    link.ask(pushed()).wait()
    with server.lock:
        tickets = [link.ask(Request(values=True)) for _ in range(2)]
        link.timeout_s = 0.5
        with pytest.raises(ClusterError, match="has not answered"):
            tickets[0].wait()  # sends again
        link.timeout_s = 30.0
        link.move(0, cluster.address(0))
    for ticket in tickets:
        ticket.wait()
    for keys in ([], [cluster.key.shared]):
        server.accept(keys)
    ticket = link.ask(Request(values=True))
    ticket.wait()
    assert len(used) > 40
    assert len(set(used)) == len(used)


class Ends:
    """Both ends of a link, without sockets."""

    def __init__(self, encrypt: bool) -> None:
        self.keys = new_key(encrypt), new_key(encrypt)
        self.links = WorkerLinks(self.keys[1])
        self.links.accept([self.keys[0].shared])
        self.client, self.user = self.connect()

    def connect(self) -> tuple[ClientGuard, str]:
        client = ClientGuard(self.keys[0], ShardAddress([], self.keys[1].shared), "tcp://")
        assert client.link is not None
        return client, self.links.admit(client.worker.hex().encode(), client.link.password.encode())

    def receive(self, frames: list[bytes], user: str | None = None) -> list[bytes]:
        return [bytes(each) for each in self.links.open(frames, user or self.user)[0]]


MESSAGES = st.lists(st.binary(max_size=40), min_size=1, max_size=5)


@given(st.booleans(), MESSAGES, st.data())
def test_nothing_but_the_message_itself_is_opened(encrypt: bool, frames: list[bytes], data: st.DataObject) -> None:
    """In both directions: bits flipped, frames dropped, added, swapped, joined, or taken from another message or link."""
    ends = Ends(encrypt)
    other, user = ends.connect()
    request = sealed(ends.client, frames)
    assert ends.receive(request) == frames
    answer_of = ends.links.open(sealed(ends.client, frames), ends.user)[1].seal
    answer = [bytes(each) for each in answer_of(frames)]
    assert [bytes(each) for each in ends.client.open(answer)] == frames
    if encrypt:
        assert all(frame not in b"".join(request + answer) for frame in frames if len(frame) > 8)
    request, answer = sealed(ends.client, frames), [bytes(each) for each in answer_of(frames)]
    later, foreign = sealed(ends.client, frames), sealed(other, frames)
    for message, more in (
        (request, [later, foreign, answer]),
        (answer, [[bytes(e) for e in answer_of(frames)], request]),
    ):
        changed = list(message)
        kind = data.draw(st.sampled_from(["flip", "drop", "add", "swap", "join", "take"]))
        at = data.draw(st.integers(0, len(message) - 1))
        if kind == "flip" and message[at]:
            bit = data.draw(st.integers(0, 8 * len(message[at]) - 1))
            value = int.from_bytes(message[at], "little") ^ 1 << bit
            changed[at] = value.to_bytes(len(message[at]), "little")
        elif kind == "drop":
            del changed[at]
        elif kind == "add":
            changed.insert(at, data.draw(st.binary(max_size=64)))
        elif kind == "swap":
            changed[at - 1], changed[at] = changed[at], changed[at - 1]
        elif kind == "join" and at:
            changed[at - 1 : at + 1] = [changed[at - 1] + changed[at]]
        elif kind == "take":
            source = data.draw(st.sampled_from(more))
            changed[at] = source[at]
        receive = ends.receive if message is request else ends.client.open
        if changed != message:
            with pytest.raises(BadMessageError):
                receive(changed)
        assert [bytes(each) for each in receive(message)] == frames  # a failed attempt uses nothing up
        with pytest.raises(BadMessageError, match="recorded"):
            receive(message)
    assert ends.receive(later) == frames
    assert ends.receive(foreign, user) == frames
    with pytest.raises(BadMessageError):
        ends.receive(foreign)


@pytest.mark.parametrize("encrypt", [True, False])
def test_a_worker_that_comes_back_starts_no_count_again(encrypt: bool) -> None:
    ends = Ends(encrypt)
    first = sealed(ends.client, [b"first"])
    _, link = ends.links.open(first, ends.user)
    answers = [link.seal([b"answer"]) for _ in range(2)]
    ends.links.accept([])
    with pytest.raises(BadMessageError) as problem:
        ends.links.open(sealed(ends.client, [b"second"]), ends.user)
    assert problem.value.kind == "with a key that is no longer accepted"
    assert ends.client.link is not None
    token = ends.client.worker.hex().encode(), ends.client.link.password.encode()
    with pytest.raises(BadMessageError) as problem:
        ends.links.admit(*token)
    assert problem.value.kind == "with an unknown key"
    ends.links.accept([ends.keys[0].shared])
    assert ends.links.admit(*token) == ends.user
    with pytest.raises(BadMessageError) as problem:
        ends.links.open(first, ends.user)
    assert problem.value.kind == "repeated"
    _, link = ends.links.open(sealed(ends.client, [b"third"]), ends.user)
    answers.append(link.seal([b"answer"]))
    for answer in answers:
        assert [bytes(each) for each in ends.client.open(answer)] == [b"answer"]


@given(st.booleans(), st.binary(max_size=300), st.binary(max_size=300), st.integers(0, 2**64 - 1), st.data())
def test_no_other_token_is_admitted(
    encrypt: bool, name: bytes, password: bytes, number: int, data: st.DataObject
) -> None:
    ends = Ends(encrypt)
    assert ends.client.link is not None
    genuine = (ends.client.worker.hex().encode(), ends.client.link.password.encode())
    other = bytes.fromhex(genuine[1].decode())
    flipped = bytearray(other)
    flipped[data.draw(st.integers(0, len(other) - 1))] ^= data.draw(st.integers(1, 255))
    moved = other[:2] + number.to_bytes(8, "little") + other[10:]
    for attempt in ((name, password), (genuine[0], password), (name, genuine[1]), (genuine[0], flipped.hex().encode())):
        with pytest.raises(BadMessageError):
            ends.links.admit(*attempt)
    if moved != other:
        with pytest.raises(BadMessageError):
            ends.links.admit(genuine[0], moved.hex().encode())
    assert ends.links.admit(*genuine) == ends.user
    assert [list(worker.links) for worker in ends.links._workers.values()] == [[ends.client.link.number]]


def test_arrays_over_the_network_can_be_changed(cluster: Cluster) -> None:
    """As those over a Unix socket: a caller may work in place."""
    for local in (False, True):
        rows = cluster.link(local=local, peer=int(local)).ask(Request(values=True)).wait().values
        assert rows is not None
        rows += 1
    ends = Ends(cluster.key.encrypt)
    for each in ends.links.open(ends.client.seal([np.arange(3, dtype=np.float32), np.zeros((2, 2))]), ends.user)[0]:
        assert len(each) in (12, 32)


def test_an_older_cryptography_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(authentication, "_INTO", False)
    ends = Ends(encrypt=True)
    assert ends.receive(sealed(ends.client, [b"one", b""])) == [b"one", b""]


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
