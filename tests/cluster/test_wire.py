"""Messages over real sockets of this process: whole and in order, refused when foreign, learned once when repeated."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zmq

from clickfleet.cluster import remote, sockets
from clickfleet.cluster.remote import AbandonedError, Remote, RemoteTable
from clickfleet.cluster.shard import Rules, Shard
from clickfleet.cluster.wire import Identity, Server
from clickfleet.embedding import Push
from clickfleet.errors import ClusterError
from clickfleet.exchange import Gradient, Kind, Request, Spread
from clickfleet.rules import rule
from clickfleet.sections import Dense
from clickfleet.table import Table

WHO = Identity(schema=11, run=22, epoch=3)
KEYS = np.arange(1, 500, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)


class Cluster:
    """Two shards behind sockets."""

    def __init__(self, tmp: Any) -> None:
        self.spread = Spread(2, 3, 3000)
        make = lambda: Table(factors=2, rule=rule("sgd", lr=0.01, scale="none"))  # noqa: E731
        self.shards = [
            Shard(make(), torch.zeros(last - first), Dense("sgd", lr=1.0), Rules()) for first, last in self.spread.spans
        ]
        for shard in self.shards:
            shard.begin([0, 1])
        self.servers = [
            Server(shard.handle, lambda: WHO, 3, ["tcp://127.0.0.1:*", f"ipc://{tmp}/shard-{i}"])
            for i, shard in enumerate(self.shards)
        ]
        self.links: list[Remote] = []
        for server in self.servers:
            server.start()

    def link(self, who: Identity = WHO, peer: int = 0, **options: Any) -> Remote:
        self.links.append(Remote([s.endpoints for s in self.servers], self.spread, who, peer, **options))
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
    assert np.array_equal(RemoteTable(link, 2).pull(KEYS), reply.rows)
    unknown = np.array([12345], np.uint64)
    assert not RemoteTable(link, 2).pull(unknown, training=False).any()


def test_answers_may_come_in_another_order(cluster: Cluster) -> None:
    """What a marked peer pushes is held back; what it pulls is answered."""
    first, second = cluster.link(peer=0), cluster.link(peer=1)
    first.ask(Request(Kind.MARK, cut=1)).wait()
    held = first.ask(pushed())
    assert first.ask(Request(values=True)).wait().values is not None
    assert not held.ready()
    second.ask(Request(Kind.MARK, cut=1)).wait()
    held.wait()
    assert [shard.version for shard in cluster.shards] == [1, 1]


def test_a_repeated_push_is_learned_once(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "RESEND_S", 0.0)
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


@pytest.mark.parametrize(
    ("who", "message"), [(WHO._replace(run=5), "belongs to run"), (WHO._replace(schema=5), "another schema")]
)
def test_foreign_messages_are_refused_by_name(cluster: Cluster, who: Identity, message: str) -> None:
    with pytest.raises(ClusterError, match=message):
        cluster.link(who).ask(Request(values=True)).wait()


def test_messages_of_an_older_epoch_are_refused(cluster: Cluster) -> None:
    with pytest.raises(AbandonedError):
        cluster.link(WHO._replace(epoch=2)).ask(pushed()).wait()
    assert [shard.version for shard in cluster.shards] == [0, 0]


def test_another_protocol_is_refused(cluster: Cluster) -> None:
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.connect(cluster.servers[0].endpoints[0])
    socket.send_multipart([b"\x63\x00nonsense"])
    assert socket.poll(5000)
    assert b"protocol 99" in socket.recv_multipart()[1]
    socket.close()
    context.term()
    cluster.link().ask(Request(values=True)).wait()  # the shard goes on


def test_an_abandoned_worker_stops_waiting(cluster: Cluster) -> None:
    link = cluster.link(abandoned=lambda: True)
    link.ask(Request(Kind.MARK, cut=1)).wait()
    with pytest.raises(AbandonedError):
        link.ask(pushed()).wait()  # held back for ever


def test_sockets_of_killed_shards_are_cleared_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets.tempfile, "gettempdir", lambda: str(tmp_path))
    left, young, alive = (tmp_path / f"clickfleet-{run}-0-1" for run in ("a", "b", "c"))
    other, plain = tmp_path / "clickfleet-run-0-x", tmp_path / "clickfleet-d-0-1"
    plain.write_text("no socket")
    with socket.socket(socket.AF_UNIX) as listening:
        for path in (left, young, other):
            with socket.socket(socket.AF_UNIX) as killed:
                killed.bind(str(path))
        listening.bind(str(alive))
        listening.listen()
        for path in (left, alive, other, plain):
            os.utime(path, (0, 0))
        assert sockets.new(0xE, 3) == str(tmp_path / f"clickfleet-e-3-{os.getpid()}")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(p.name for p in (young, alive, other, plain))
