"""A shard under any order of messages: every push is learned exactly once, and a cut holds what its positions say."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from clickfleet.cluster.shard import Cut, Rules, Shard
from clickfleet.embedding import Push
from clickfleet.exchange import Gradient, Kind, Piece, Request
from clickfleet.rules import rule
from clickfleet.sections import Dense
from clickfleet.table import Table


def push_of(peer: int, batch: int) -> Request:
    """A batch whose one key is its own, and counts itself in the dense weights."""
    key = np.array([1000 * peer + batch], np.uint64)
    push = Push(key, np.ones((1, 2), np.float32), *np.ones((2, 1), np.float32), np.zeros(1, np.uint16), 1.0)
    return Request(push=push, dense=Gradient(-np.ones(4, np.float32), 1.0, 1.0))


def make(waits: bool = False, peers: int = 3) -> tuple[Shard, list[tuple[int, dict[int, float], float]]]:
    shard = Shard(Table(factors=1, rule=rule("sgd", lr=0.1)), torch.zeros(4), Dense("sgd", lr=1.0), Rules(waits=waits))
    shard.begin(range(peers))
    cuts: list[tuple[int, dict[int, float], float]] = []

    def on_cut(cut: Cut) -> None:
        with cut.rows as rows:
            found = {int(k): float(s) for part in rows for k, s in zip(part["key"], part["show"], strict=True)}
        cuts.append((cut.number, found, float(cut.dense["values"][0])))

    shard.on_cut = on_cut
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
            mine += [Piece(Request(Kind.MARK, cut=c + 1)) for c in range(2) if marks[peer][c] == batch - 1]
            mine += [Piece(push_of(peer, batch), sequence=batch)] * chance.choice([1, 1, 1, 2])
            mine += [Piece(Request(pull=np.array([batch], np.uint64)))] * chance.randrange(2)
        mine += [Piece(Request(Kind.MARK, cut=c + 1)) for c in range(2) if marks[peer][c] == 8]
        todo.append(mine)
    sent: dict[int, list[Piece]] = {peer: [] for peer in range(peers)}
    while any(todo):
        peer = chance.choice([p for p in range(peers) if todo[p]])
        # The second cut is asked for when the first one is taken.
        if todo[peer][0].request.kind is Kind.MARK and todo[peer][0].request.cut > shard.cut + 1:
            if all(not t or (t[0].request.kind is Kind.MARK and t[0].request.cut > shard.cut + 1) for t in todo):
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


def test_rounds_wait_for_all_and_are_learned_as_one() -> None:
    shard, cuts = make(waits=True, peers=2)
    assert shard.handle(0, Piece(push_of(0, 1), sequence=1, number=5)) == []
    answers = shard.handle(1, Piece(push_of(1, 1), sequence=1, number=6))
    assert [(peer, answer.number) for peer, answer in answers] == [(0, 5), (1, 6)]
    assert shard.version == 1
    assert torch.equal(shard.optimizer.values, torch.ones(4))  # Σ gradient / Σ n
    wanted = push_of(0, 2)
    wanted.cut = 1
    shard.handle(0, Piece(wanted, sequence=2))
    assert cuts == []
    answers = shard.handle(1, Piece(push_of(1, 2), sequence=2))
    assert [answer.cut for _, answer in answers] == [1, 1]
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
