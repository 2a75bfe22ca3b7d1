"""A shard: one part of the table and of the dense weights. It applies pushes, answers pulls and takes checkpoints.

One thread handles all messages of a shard, so pushes of a peer are applied in the order it sent them. A shard does not know the
wire: `handle` takes a piece and returns the answers that are now due, each with its peer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TypedDict

import numpy as np
import torch
from torch import Tensor

from clickfleet.config import sections
from clickfleet.config.load import Config
from clickfleet.data.batch import Keys
from clickfleet.errors import ClusterError
from clickfleet.store.checkpoint import SPLIT_FILES
from clickfleet.store.key_set import KeySet
from clickfleet.store.table import Snapshot, Table
from clickfleet.training import modes, optimizer
from clickfleet.training.embedding import Push
from clickfleet.training.optimizer import Optimizer
from clickfleet.training.sharding import Answer, Gradient, Kind, Piece, summed, unique

Answers = list[tuple[int, Answer]]


@dataclass
class Rules:
    """How a shard applies pushes."""

    waits: bool = False
    """Apply a round as one batch, after all workers have sent their part."""
    mean: bool = False
    """Divide the gradients of a round by the number of workers in it."""
    loss_mean: bool = True
    row_files: int = 8
    ordered: bool = True
    """Apply the messages of a peer in their order: hold one until those before it have arrived. A cut connection loses messages, which
    the peer then sends again. False if a failed process is replaced alone, because then messages may be missing for ever."""


class ShardCounts(TypedDict):
    """What a shard had applied at the moment of a checkpoint."""

    version: int
    batches: int


@dataclass
class ShardCheckpoint:
    """The state of a shard at the moment when every peer had marked the checkpoint."""

    number: int
    rows: Snapshot
    dense: dict[str, Tensor]
    facts: ShardCounts


@dataclass
class Staleness:
    """How many pushes of others were applied between a pull and the push of its gradients."""

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
    """A peer outside the run sent a push."""


class Shard:
    """The state of one shard, and how messages change it."""

    def __init__(self, table: Table, values: Tensor, config: sections.DenseSettings, rules: Rules) -> None:
        self.table, self.rules = table, rules
        self.optimizer = Optimizer(config, values)
        self.on_checkpoint: Callable[[ShardCheckpoint], None] = lambda taken: taken.rows.close()
        self.peers: set[int] = set()
        self.version = 0
        """Pushes applied."""
        self.batches = 0
        """Batches applied: the clock of the learning-rate schedule."""
        self.staleness = Staleness()
        self.begin(())

    def begin(self, peers: Iterable[int]) -> None:
        """Accept pushes of these peers only, and forget everything they sent before."""
        self.peers = set(peers)
        self.active = set(self.peers)
        self.learned: dict[int, int] = dict.fromkeys(self.peers, 0)
        """The last message applied of each peer, by its sequence number."""
        self.batches_of: dict[int, int] = dict.fromkeys(self.peers, 0)
        """Batches applied of each peer."""
        self.gathered: dict[int, Piece] = {}
        self.held: list[tuple[int, Piece]] = []
        self.early: dict[int, dict[int, Piece]] = {peer: {} for peer in self.peers}
        """Messages of each peer that overtook another one, by sequence number."""
        self.marked: set[int] = set()
        self.last_checkpoint = 0
        """Number of the last checkpoint taken."""
        self.changed: dict[int, list[Keys]] = {peer: [] for peer in self.peers}
        self.holds: dict[int, KeySet] = {}
        self._deletions_sent: dict[int, int] = {}
        """The number of deletions when a peer last received the deleted keys."""

    def resume_rounds(self) -> None:
        """Expect all peers in the next round again. Call it when an epoch begins."""
        self.active = set(self.peers)

    def handle(self, peer: int, piece: Piece) -> Answers:
        """Apply a piece, or hold it until the other peers have sent theirs. Return the answers that are due."""
        kind = piece.request.kind
        if peer not in self.peers and (piece.sequence or kind is not Kind.ASK):
            raise UnknownPeerError(f"peer {peer} is not part of the run and may only pull")
        if kind is Kind.MARK:
            return [
                (peer, Answer(version=self.version, number=piece.number)),
                *self._mark(peer, piece.request.checkpoint),
            ]
        if kind is Kind.DONE:
            self.active.discard(peer)
            return [(peer, Answer(version=self.version, number=piece.number)), *self._round()]
        if piece.sequence:
            if piece.sequence <= self.learned.get(peer, 0):  # applied already; its answer did not arrive
                return [(peer, self._answer(peer, piece))]
            if peer in self.marked:
                self.held.append((peer, piece))
                return []
            if self.rules.waits and kind is Kind.ASK:
                self.gathered[peer] = piece
                return self._round()
            if self.rules.ordered and piece.sequence > self.learned[peer] + 1:
                self.early[peer][piece.sequence] = piece
                return []
            self._learn(peer, piece)
        answers = [(peer, self._answer(peer, piece))]
        following = self.early[peer].pop(self.learned[peer] + 1, None) if piece.sequence else None
        return answers if following is None else answers + self.handle(peer, following)

    def _answer(self, peer: int, piece: Piece, checkpoint: int = 0) -> Answer:
        request = piece.request
        answer = Answer(version=self.version, checkpoint=checkpoint, number=piece.number)
        if request.pull is not None:
            answer.rows = self.table.pull(request.pull, training=request.training)
            if peer in self.holds:  # the worker replicates these rows from now on
                self.holds[peer].add(request.pull)
        if request.values:
            answer.values, answer.batches = self.optimizer.values.numpy().copy(), self.batches
        if request.kind is Kind.SHIP:
            self._changes(peer, answer)
        return answer

    def _learn(self, peer: int, piece: Piece) -> None:
        request = piece.request
        if request.push is not None:
            if request.kind is Kind.SHIP:
                self._add(peer, request.push)
            else:
                self.table.push(**request.push._asdict())
        if request.dense is not None:
            self._step([request.dense])
        if request.difference is not None:
            self.optimizer.values += torch.from_numpy(request.difference)
        self.batches += request.batches
        self._note(peer, piece)
        self.staleness.add(max(0, self.version - piece.seen))
        self.version += 1

    def _step(self, gradients: list[Gradient]) -> None:
        config = self.optimizer.config
        clips = config.clip_norm is not None or config.clip_value is not None
        total = summed(gradients, clips, self.rules.loss_mean)
        lr = config.lr * optimizer.factor(config.schedule, self.batches)
        self.optimizer.step_clipped(torch.from_numpy(total.vector), total.scale, lr)

    def _note(self, peer: int, piece: Piece) -> None:
        """Count a piece that was applied."""
        self.learned[peer] = piece.sequence
        self.batches_of[peer] += piece.request.batches

    def _round(self) -> Answers:
        """Apply the pushes of all workers as one, if all have arrived."""
        if not self.gathered or not self.active <= self.gathered.keys():
            return []
        round_, self.gathered = dict(sorted(self.gathered.items())), {}
        pushes = [piece.request.push for piece in round_.values() if piece.request.push is not None]
        if pushes:
            self.table.push(**_concatenated(pushes, self.rules.mean)._asdict())
        gradients = [piece.request.dense for piece in round_.values() if piece.request.dense is not None]
        if gradients:
            self._step(gradients)
        self.batches += 1
        for peer, piece in round_.items():
            self._note(peer, piece)
            self.staleness.add(max(0, self.version - piece.seen))
        self.version += 1
        number = max(piece.request.checkpoint for piece in round_.values())
        if number <= self.last_checkpoint:
            number = 0
        if number:
            self._take(number)
        return [(peer, self._answer(peer, piece, number)) for peer, piece in round_.items()]

    def _mark(self, peer: int, number: int) -> Answers:
        if number <= self.last_checkpoint:  # taken already: a repeated mark, or a worker without more rounds
            return []
        self.marked.add(peer)
        if not self.peers <= self.marked:
            return []
        self._take(number)
        held, self.held = self.held, []
        answers: Answers = []
        for holder, piece in held:
            answers += self.handle(holder, piece)
        return answers

    def _take(self, number: int) -> None:
        self.last_checkpoint = number
        self.marked = set()
        facts: ShardCounts = {"version": self.version, "batches": self.batches}
        files = self.rules.row_files if self.rules.row_files <= SPLIT_FILES else 1  # beyond: one per shard
        dense, rows = self.dense_state(), self.table.snapshot(files)
        self.on_checkpoint(ShardCheckpoint(number, rows, dense, facts))

    def _add(self, peer: int, push: Push) -> None:
        """Add shipped differences, and note for every worker which rows changed.

        A sender knows the new value of a row that only it has changed: it adds its difference in the same way.
        """
        if not len(push.keys):
            return
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
            keys.append(self._unknown_to(peer, push.keys) if other == peer else push.keys)

    def _unknown_to(self, peer: int, keys: Keys) -> Keys:
        """Return the keys whose new value the sender cannot compute itself."""
        if peer not in self.holds or not self.table.at_birth or self._deletions() != self._deletions_sent[peer]:
            return keys
        unheld = keys[~self.holds[peer].has(keys)]  # this shard replaces one that failed
        self.holds[peer].add(unheld)
        return unheld

    def _deletions(self) -> int:
        stats = self.table.stats()
        return stats["shrunk"] + stats["evicted"]

    def _changes(self, peer: int, answer: Answer) -> None:
        """Answer with the changed rows that the worker replicates, and with the keys of deleted rows."""
        keys, self.changed[peer] = self.changed[peer], []
        answer.deleted = np.empty(0, np.uint64)
        if peer in self.holds and (deletions := self._deletions()) != self._deletions_sent[peer]:
            self._deletions_sent[peer] = deletions
            held = self.holds[peer].keys()
            answer.deleted = held[~self.table.known(held)]
        distinct = unique(np.concatenate([np.empty(0, np.uint64), *keys]))[0]
        answer.keys = distinct[self.holds[peer].has(distinct)] if peer in self.holds else distinct
        answer.rows = self.table.pull(answer.keys)

    def replicate(self, peers: Iterable[int]) -> None:
        """Track from now on which rows each peer replicates."""
        self.holds = {peer: KeySet() for peer in peers}
        self._deletions_sent = dict.fromkeys(self.holds, self._deletions())

    def dense_state(self) -> dict[str, Tensor]:
        return {"values": self.optimizer.values.clone(), **self.optimizer.state()}

    def stats(self) -> dict[str, float]:
        """Return the counts of a status report."""
        late = self.staleness
        return {
            **self.table.stats(),
            "pushes": self.version,
            "held": len(self.held) + len(self.gathered),
            "staleness": late.total / late.pushes if late.pushes else 0.0,
            "staleness_most": late.most,
        }


def rules_of(config: Config, row_files: int = 8) -> Rules:
    """Return how the shards of a configuration apply pushes."""
    return Rules(
        waits=modes.needs(config).shards_wait,
        mean=config.mode.settings.get("reduce") == "mean",
        loss_mean=config.train.loss.reduction == "mean",
        row_files=row_files,
        ordered=config.cluster.on_failure == "rollback",
    )


def _concatenated(pushes: list[Push], mean: bool) -> Push:
    """Concatenate the pushes of a round. The table adds gradients of equal keys in this order."""
    if len(pushes) == 1:
        return pushes[0]
    keys, grads, show, click, slots = (np.concatenate(columns) for columns in list(zip(*pushes, strict=True))[:5])
    n = sum(push.n for push in pushes)
    if mean:
        grads /= len(pushes)
        n /= len(pushes)
    return Push(keys, grads, show, click, slots, n, distinct=False)
