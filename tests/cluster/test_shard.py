"""A shard under any order of messages: every push is learned exactly once, and a cut holds what its positions say."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from clickfleet.cluster.shard import Rules, Shard, ShardCheckpoint
from clickfleet.config.sections import DenseSettings
from clickfleet.store.rules import rule
from clickfleet.store.table import Table
from clickfleet.training.embedding import Push
from clickfleet.training.sharding import Gradient, Kind, Piece, Request


def push_of(peer: int, batch: int) -> Request:
    """A batch whose one key is its own, and counts itself in the dense weights."""
    key = np.array([1000 * peer + batch], np.uint64)
    push = Push(key, np.ones((1, 2), np.float32), *np.ones((2, 1), np.float32), np.zeros(1, np.uint16), 1.0)
    return Request(push=push, dense=Gradient(-np.ones(4, np.float32), 1.0, 1.0))


def make(waits: bool = False, peers: int = 3) -> tuple[Shard, list[tuple[int, dict[int, float], float]]]:
    shard = Shard(
        Table(factors=1, rule=rule("sgd", lr=0.1)), torch.zeros(4), DenseSettings("sgd", lr=1.0), Rules(waits=waits)
    )
    shard.begin(range(peers))
    cuts: list[tuple[int, dict[int, float], float]] = []

    def on_cut(cut: ShardCheckpoint) -> None:
        with cut.rows as rows:
            found = {int(k): float(s) for part in rows for k, s in zip(part["key"], part["show"], strict=True)}
        cuts.append((cut.number, found, float(cut.dense["values"][0])))

    shard.on_checkpoint = on_cut
    return shard, cuts


@given(seed=st.integers(0, 10**6), peers=st.integers(1, 4))
def test_any_interleaving_of_push_repeat_mark_and_pull(seed: int, peers: int) -> None:
    """Each peer sends its batches in order, now and then twice, with two marks somewhere between them."""
    chance = random.Random(seed)
    shard, cuts = make(peers=peers)
    marks = [sorted(chance.sample(range(9), 2)) for _ in range(peers)]
    todo: list[list[Piece]] = []
    for peer in range(peers):
        mine: list[Piece] = []
        for batch in range(1, 9):
            mine += [Piece(Request(Kind.MARK, checkpoint=c + 1)) for c in range(2) if marks[peer][c] == batch - 1]
            mine += [Piece(push_of(peer, batch), sequence=batch)] * chance.choice([1, 1, 1, 2])
            mine += [Piece(Request(pull=np.array([batch], np.uint64)))] * chance.randrange(2)
        mine += [Piece(Request(Kind.MARK, checkpoint=c + 1)) for c in range(2) if marks[peer][c] == 8]
        todo.append(mine)
    sent: dict[int, list[Piece]] = {peer: [] for peer in range(peers)}
    while any(todo):
        peer = chance.choice([p for p in range(peers) if todo[p]])
        # The second cut is asked for when the first one is taken.
        if todo[peer][0].request.kind is Kind.MARK and todo[peer][0].request.checkpoint > shard.last_checkpoint + 1:
            if all(
                not t or (t[0].request.kind is Kind.MARK and t[0].request.checkpoint > shard.last_checkpoint + 1)
                for t in todo
            ):
                pytest.fail("the first cut is never taken")
            continue
        shard.handle(peer, todo[peer].pop(0))
        sent[peer].append(Piece(Request()))
    assert len(shard.table) == 8 * peers
    assert torch.equal(shard.optimizer.values, torch.full((4,), 8.0 * peers))
    assert [number for number, _, _ in cuts] == [1, 2]
    for number, found, dense in cuts:
        expected = {1000 * p + b: 1.0 for p in range(peers) for b in range(1, marks[p][number - 1] + 1)}
        assert found == expected
        assert dense == len(expected)


class World:
    """Two shards, some peers and the messages between them, which arrive in any order but that of one way."""

    def __init__(self, seed: int, peers: int) -> None:
        self.chance, self.peers, self.epoch, self.cut = random.Random(seed), peers, 0, 0
        self.saved = (dict.fromkeys(range(peers), 0), [dict[int, float](), dict[int, float]()], [0.0, 0.0])
        self.late: list[tuple[int, int, int, Piece]] = []
        self.restart()

    def restart(self) -> None:
        """Everyone goes back to the last cut; what is still on its way belongs to the epoch before."""
        self.epoch += 1
        positions, rows, dense = self.saved
        self.sent, self.marked = dict(positions), dict.fromkeys(range(self.peers), 0)
        self.base = dict(positions)
        self.ways: dict[tuple[int, int], list[tuple[int, Piece]]] = {}
        self.parts: dict[int, dict[int, Any]] = {}
        self.at_mark: dict[int, dict[int, int]] = {}
        self.shards = []
        for i in range(2):
            shard, _ = make(peers=self.peers)
            keys = np.array(sorted(rows[i]), np.uint64)
            shard.table.move(keys, np.zeros((len(keys), 2), np.float32), add=False, show=np.ones(len(keys), np.float32))
            shard.optimizer.values += dense[i]
            shard.last_checkpoint = self.cut

            def on_cut(cut: ShardCheckpoint, i: int = i) -> None:
                with cut.rows as found:
                    here = {int(k): float(s) for part in found for k, s in zip(part["key"], part["show"], strict=True)}
                self.parts.setdefault(cut.number, {})[i] = (here, float(cut.dense["values"][0]))

            shard.on_checkpoint = on_cut
            self.shards.append(shard)

    def send(self, peer: int, request: Request, sequence: int = 0) -> None:
        for i in range(2):
            way = self.ways.setdefault((peer, i), [])
            way += [(self.epoch, Piece(request, sequence))] * self.chance.choice([1, 1, 2])

    def act(self) -> None:
        """Something happens."""
        peer, what = self.chance.randrange(self.peers), self.chance.random()
        if what < 0.3 and self.sent[peer] < BATCHES:
            self.sent[peer] += 1
            self.send(peer, push_of(peer, self.sent[peer]), self.sent[peer] - self.base[peer])
        elif what < 0.4:
            self.send(peer, Request(pull=np.array([1000 * peer], np.uint64)))
        elif what < 0.5 and self.marked[peer] <= self.cut:  # a cut is asked for when the one before is complete
            self.marked[peer] = self.cut + 1
            self.at_mark.setdefault(self.cut + 1, {})[peer] = self.sent[peer]
            self.send(peer, Request(Kind.MARK, checkpoint=self.cut + 1))
        elif what < 0.52:
            for (whom, i), way in self.ways.items():
                self.late += [(whom, i, epoch, piece) for epoch, piece in way[:1]]
            self.restart()
        elif what < 0.54 and self.late:
            self.deliver(*self.late.pop())
        elif ways := [key for key, way in self.ways.items() if way]:
            whom, i = self.chance.choice(ways)
            self.deliver(whom, i, *self.ways[whom, i].pop(0))

    def deliver(self, peer: int, shard: int, epoch: int, piece: Piece) -> None:
        if epoch != self.epoch:  # stale
            return
        self.shards[shard].handle(peer, piece)
        done = self.parts.get(self.cut + 1, {})
        if len(done) == 2:
            self.cut += 1
            self.saved = (self.at_mark[self.cut], [done[i][0] for i in range(2)], [done[i][1] for i in range(2)])


BATCHES = 10


@given(seed=st.integers(0, 10**6), peers=st.integers(1, 3))
def test_any_interleaving_of_push_pull_cut_and_restart_learns_everything_once(seed: int, peers: int) -> None:
    """Whatever is sent twice, lost in a restart or comes too late: in the end, and in every cut, each batch counts once."""
    world = World(seed, peers)
    for _ in range(400):
        world.act()
    while any(world.sent[peer] < BATCHES for peer in range(peers)) or any(world.ways.values()):
        for peer in range(peers):
            while world.sent[peer] < BATCHES:
                world.sent[peer] += 1
                world.send(peer, push_of(peer, world.sent[peer]), world.sent[peer] - world.base[peer])
            if world.marked[peer] <= world.cut and any(mark > world.cut for mark in world.marked.values()):
                world.marked[peer] = world.cut + 1  # nobody waits for ever for the rest of a cut
                world.at_mark.setdefault(world.cut + 1, {})[peer] = world.sent[peer]
                world.send(peer, Request(Kind.MARK, checkpoint=world.cut + 1))
        for (peer, i), way in world.ways.items():
            while way:
                world.deliver(peer, i, *way.pop(0))
    expected = {1000 * peer + batch: 1.0 for peer in range(peers) for batch in range(1, BATCHES + 1)}
    for i, shard in enumerate(world.shards):
        with shard.table.snapshot() as rows:
            found = {int(k): float(s) for part in rows for k, s in zip(part["key"], part["show"], strict=True)}
        assert found == expected
        assert float(shard.optimizer.values[0]) == len(expected)
        positions, kept, dense = world.saved
        assert kept[i] == {1000 * p + b: 1.0 for p in range(peers) for b in range(1, positions[p] + 1)}
        assert dense[i] == len(kept[i])


@given(seed=st.integers(0, 10**6))
def test_a_lost_message_that_is_sent_again_is_learned_in_its_place(seed: int) -> None:
    """A cut connection loses messages of a peer while later ones arrive. All are answered, once each, in their order."""
    chance = random.Random(seed)
    shard, _ = make(peers=2)
    answered: list[int] = []
    lost = [batch for batch in range(1, 9) if chance.random() < 0.4]
    for batch in [batch for batch in range(1, 9) if batch not in lost] + lost:
        piece = Piece(push_of(0, batch), sequence=batch, number=batch)
        answered += [answer.number for peer, answer in shard.handle(0, piece) if peer == 0]
        assert shard.learned == {0: len(answered), 1: 0}
    assert answered == list(range(1, 9))
    assert torch.equal(shard.optimizer.values, torch.full((4,), 8.0))


def test_rounds_wait_for_all_and_are_learned_as_one() -> None:
    shard, cuts = make(waits=True, peers=2)
    assert shard.handle(0, Piece(push_of(0, 1), sequence=1, number=5)) == []
    answers = shard.handle(1, Piece(push_of(1, 1), sequence=1, number=6))
    assert [(peer, answer.number) for peer, answer in answers] == [(0, 5), (1, 6)]
    assert shard.version == 1
    assert torch.equal(shard.optimizer.values, torch.ones(4))  # Σ gradient / Σ n
    wanted = push_of(0, 2)
    wanted.checkpoint = 1
    shard.handle(0, Piece(wanted, sequence=2))
    assert cuts == []
    answers = shard.handle(1, Piece(push_of(1, 2), sequence=2))
    assert [answer.checkpoint for _, answer in answers] == [1, 1]
    assert len(cuts[0][1]) == 4
    shard.handle(0, Piece(push_of(0, 3), sequence=3))
    done: Any = shard.handle(1, Piece(Request(Kind.DONE)))
    assert [peer for peer, _ in done] == [1, 0]  # who is done is not waited for
    assert shard.version == 3


def test_staleness_counts_what_others_pushed_since_the_pull() -> None:
    shard, _ = make(peers=2)
    for batch in range(1, 4):
        shard.handle(0, Piece(push_of(0, batch), sequence=batch, seen=batch - 1))
    shard.handle(1, Piece(push_of(1, 1), sequence=1, seen=0))
    assert dict(shard.staleness.counts) == {0: 3, 3: 1}
