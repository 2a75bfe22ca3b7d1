"""One part of the table and of the dense weights: learns what is pushed, answers pulls, takes cuts.

A shard is driven by one thread, message after message, so what a peer sends is learned in the order it was sent. It knows nothing of
the wire: `handle` takes a piece and gives the answers that are now due, to whom ever.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from clickfleet import schedules, sections
from clickfleet.batch import Keys
from clickfleet.config import Config
from clickfleet.embedding import Push
from clickfleet.errors import ClusterError
from clickfleet.exchange import Answer, Gradient, Kind, Piece, summed, unique
from clickfleet.key_set import KeySet
from clickfleet.optimizers import Optimizer
from clickfleet.table import Snapshot, Table

Answers = list[tuple[int, Answer]]


@dataclass
class Rules:
    """How a shard treats what it gets."""

    waits: bool = False
    """sync: a round is learned at once when all workers have sent theirs."""
    mean: bool = False
    """Gradients of a round are divided by the number of workers in it."""
    loss_mean: bool = True
    row_files: int = 8


@dataclass
class Cut:
    """A shard at the instant when every peer had sent what belongs to a cut."""

    number: int
    rows: Snapshot
    dense: dict[str, Tensor]
    facts: dict[str, Any]


@dataclass
class Staleness:
    """How many pushes of others were learned between the reading of rows and the learning of their gradients."""

    pushes: int = 0
    total: int = 0
    most: int = 0
    counts: Counter[int] = field(default_factory=Counter)

    def add(self, missed: int) -> None:
        self.pushes += 1
        self.total += missed
        self.most = max(self.most, missed)
        self.counts[missed] += 1


class UnknownPeerError(ClusterError):
    """Who takes no part in a run wants to change something."""


class Shard:
    """The state of one shard and the rules by which messages change it."""

    def __init__(self, table: Table, values: Tensor, config: sections.Dense, rules: Rules) -> None:
        self.table, self.rules = table, rules
        self.optimizer = Optimizer(config, values)
        self.on_cut: Callable[[Cut], None] = lambda cut: cut.rows.close()
        self.peers: set[int] = set()
        self.version = 0
        """Pushes learned."""
        self.batches = 0
        """Batches the dense weights have learned from: the clock of the learning-rate schedule."""
        self.staleness = Staleness()
        self.begin(())

    def begin(self, peers: Iterable[int]) -> None:
        """These peers, and only they, take part from now on; nothing they sent before counts."""
        self.peers = set(peers)
        self.active = set(self.peers)
        self.learned: dict[int, int] = dict.fromkeys(self.peers, 0)
        self.gathered: dict[int, Piece] = {}
        self.held: list[tuple[int, Piece]] = []
        self.marked: set[int] = set()
        self.cut = 0
        """The last cut taken."""
        self.changed: dict[int, list[Keys]] = {peer: [] for peer in self.peers}
        self.holds: dict[int, KeySet] = {}
        self._gone: dict[int, int] = {}

    def resume_rounds(self) -> None:
        """All peers take part in rounds again: another epoch begins."""
        self.active = set(self.peers)

    def handle(self, peer: int, piece: Piece) -> Answers:
        """Learns from a piece, or keeps it until others have sent theirs; the answers that are due."""
        kind = piece.request.kind
        if peer not in self.peers and (piece.sequence or kind is not Kind.ASK):
            raise UnknownPeerError(f"peer {peer} takes no part in the run, and may only read")
        if kind is Kind.MARK:
            return [(peer, Answer(version=self.version, number=piece.number)), *self._mark(peer, piece.request.cut)]
        if kind is Kind.DONE:
            self.active.discard(peer)
            return [(peer, Answer(version=self.version, number=piece.number)), *self._round()]
        if piece.sequence:
            if piece.sequence <= self.learned.get(peer, 0):  # its answer was lost
                return [(peer, self._answer(peer, piece))]
            if peer in self.marked:
                self.held.append((peer, piece))
                return []
            if self.rules.waits and kind is Kind.ASK:
                self.gathered[peer] = piece
                return self._round()
            self._learn(peer, piece)
        return [(peer, self._answer(peer, piece))]

    def _answer(self, peer: int, piece: Piece, cut: int = 0) -> Answer:
        request = piece.request
        answer = Answer(version=self.version, cut=cut, number=piece.number)
        if request.pull is not None:
            answer.rows = self.table.pull(request.pull, training=request.training)
            if peer in self.holds:  # geo: the worker has these rows from now on
                self.holds[peer].add(request.pull)
        if request.values:
            answer.values = self.optimizer.values.numpy().copy()
        if request.kind is Kind.SHIP:
            self._changes(peer, answer)
        return answer

    def _learn(self, peer: int, piece: Piece) -> None:
        request = piece.request
        if request.kind is Kind.SHIP:
            self._add(peer, request.push, request.dense)
        else:
            if request.push is not None:
                self.table.push(**request.push._asdict())
            if request.dense is not None:
                self._step([request.dense])
        self.learned[peer] = piece.sequence
        self.staleness.add(max(0, self.version - piece.seen))
        self.version += 1

    def _step(self, gradients: list[Gradient]) -> None:
        config = self.optimizer.config
        clips = config.clip_norm is not None or config.clip_value is not None
        one = summed(gradients, clips, self.rules.loss_mean)
        lr = config.lr * schedules.factor(config.schedule, self.batches)
        self.optimizer.step_clipped(torch.from_numpy(one.vector), one.scale, lr)
        self.batches += 1 if self.rules.waits else one.batches

    def _round(self) -> Answers:
        """sync: learns the pushes of all workers as one, once they are there."""
        if not self.gathered or not self.active <= self.gathered.keys():
            return []
        round_, self.gathered = dict(sorted(self.gathered.items())), {}
        pushes = [piece.request.push for piece in round_.values() if piece.request.push is not None]
        if pushes:
            self.table.push(**_together(pushes, self.rules.mean)._asdict())
        gradients = [piece.request.dense for piece in round_.values() if piece.request.dense is not None]
        if gradients:
            self._step(gradients)
        for peer, piece in round_.items():
            self.learned[peer] = piece.sequence
            self.staleness.add(max(0, self.version - piece.seen))
        self.version += 1
        cut = max(piece.request.cut for piece in round_.values())
        if cut <= self.cut:
            cut = 0
        if cut:
            self._take(cut)
        return [(peer, self._answer(peer, piece, cut)) for peer, piece in round_.items()]

    def _mark(self, peer: int, cut: int) -> Answers:
        if cut <= self.cut:  # taken already: a repeated mark, or one of a worker that had no more rounds
            return []
        self.marked.add(peer)
        if not self.peers <= self.marked:
            return []
        self._take(cut)
        held, self.held = self.held, []
        answers: Answers = []
        for one, piece in held:
            answers += self.handle(one, piece)
        return answers

    def _take(self, number: int) -> None:
        self.cut = number
        self.marked = set()
        state = self.optimizer.state()
        dense = {"values": self.optimizer.values.clone(), **state}
        facts = {"version": self.version, "batches": self.batches, "learned": dict(self.learned)}
        self.on_cut(Cut(number, self.table.snapshot(self.rules.row_files), dense, facts))

    def _add(self, peer: int, push: Push | None, dense: Gradient | None) -> None:
        """geo: differences are added; every worker that has one of these rows will hear of it.

        Its sender knows what became of a row that only it has changed: what it had before and its difference, added as here.
        """
        if push is not None and len(push.keys):
            self.table.move(
                push.keys,
                push.grads,
                add=True,
                show=push.show,
                click=push.click,
                slots=push.slots,
                distinct=push.distinct,
            )
            for other, keys in self.changed.items():
                keys.append(self._surprising(peer, push.keys) if other == peer else push.keys)
        if dense is not None:
            self.optimizer.values += torch.from_numpy(dense.vector)
            self.batches += dense.batches

    def _surprising(self, peer: int, keys: Keys) -> Keys:
        """Of rows that a worker has sent differences of: those of which it may have thought otherwise before."""
        if peer not in self.holds or self.table.policy.admission.by != "birth" or self._deletions() != self._gone[peer]:
            return keys
        unheld = keys[~self.holds[peer].has(keys)]  # this shard goes on in the place of a lost one
        self.holds[peer].add(unheld)
        return unheld

    def _deletions(self) -> int:
        stats = self.table.stats()
        return stats["shrunk"] + stats["evicted"]

    def _changes(self, peer: int, answer: Answer) -> None:
        """geo: the rows that changed and that the worker has, and keys of rows that are no more."""
        keys, self.changed[peer] = self.changed[peer], []
        answer.deleted = np.empty(0, np.uint64)
        if peer in self.holds and (gone := self._deletions()) != self._gone[peer]:
            self._gone[peer] = gone
            held = self.holds[peer].keys()
            answer.deleted = held[~self.table.known(held)]
        distinct = unique(np.concatenate([np.empty(0, np.uint64), *keys]))[0]
        mine = distinct[self.holds[peer].has(distinct)] if peer in self.holds else distinct
        answer.keys, answer.rows = mine, self.table.pull(mine)

    def replicate(self, peers: Iterable[int]) -> None:
        """geo: from now on remembers which rows each of the peers has."""
        self.holds = {peer: KeySet() for peer in peers}
        self._gone = dict.fromkeys(self.holds, self._deletions())

    def dense_state(self) -> dict[str, Tensor]:
        return {"values": self.optimizer.values.clone(), **self.optimizer.state()}

    def stats(self) -> dict[str, Any]:
        """Numbers for people."""
        late = self.staleness
        return {
            **self.table.stats(),
            "pushes": self.version,
            "held": len(self.held) + len(self.gathered),
            "staleness": late.total / late.pushes if late.pushes else 0.0,
            "staleness_most": late.most,
        }


def rules_of(config: Config, row_files: int = 8) -> Rules:
    """How the shards of a configuration treat what they get."""
    name, settings = config.mode.name, config.mode.settings
    return Rules(
        waits=name == "sync",
        mean=settings.get("reduce") == "mean",
        loss_mean=config.train.loss.reduction == "mean",
        row_files=row_files,
    )


def _together(pushes: list[Push], mean: bool) -> Push:
    """Pushes of a round one after the other: the table adds up what has the same key, in this order."""
    if len(pushes) == 1:
        return pushes[0]
    keys, grads, show, click, slots = (np.concatenate(columns) for columns in list(zip(*pushes, strict=True))[:5])
    n = sum(push.n for push in pushes)
    if mean:
        grads /= len(pushes)
        n /= len(pushes)
    return Push(keys, grads, show, click, slots, n, distinct=False)
