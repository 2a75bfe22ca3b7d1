"""Messages between a worker and the shards, as types.

A worker sends one `Request` to all shards. `Spread` divides it into a `Piece` per shard and joins their `Answer`s to one `Reply`.
Rows belong to shards by virtual shard, dense weights by blocks of 1024 floats in order.

>>> Spread(shards=2, width=3, floats=5000).spans
[(0, 2048), (2048, 5000)]
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from clickfleet import _core
from clickfleet.data.batch import Floats, Keys
from clickfleet.errors import ClusterError
from clickfleet.store.checkpoint import span
from clickfleet.training.embedding import Push

BLOCK = 1024
"""Floats of a dense block. A block lies on one shard."""


class Kind(IntEnum):
    ASK = 0
    """Apply the push, then read the pull."""
    MARK = 1
    """The peer has sent everything that belongs to a checkpoint."""
    DONE = 2
    """This worker has no more rounds until the next epoch."""
    SHIP = 3
    """Add differences to replicated rows. The answer holds what others changed."""


class Gradient(NamedTuple):
    """A gradient of the dense weights, over one or more batches."""

    vector: Floats  # [L]
    n: float
    """Weight of its rows."""
    scale: float
    """Factor that turns it into a mean."""


@dataclass(slots=True)
class Request:
    """One message of a worker to all shards. A part that is None is left out."""

    kind: Kind = Kind.ASK
    push: Push | None = None
    dense: Gradient | None = None
    difference: Floats | None = None
    """What to add to the dense weights [L], of a worker that trains its own copy of them."""
    batches: int = 1
    """Batches that the push contains."""
    pull: Keys | None = None
    values: bool = False
    """Whether the answer must hold the dense weights."""
    training: bool = True
    checkpoint: int = 0
    """The checkpoint that a mark belongs to, or that must follow this round."""
    seen: list[int] = field(default_factory=list)
    """Pushes that each shard had applied when the rows of this push were read."""
    rows: NDArray[np.uint8] | None = None
    """The arrays of `push` as bytes, one after the other, in the part for one shard."""

    @property
    def learns(self) -> bool:
        """Whether the shards learn from it."""
        return self.push is not None or self.dense is not None or self.difference is not None


@dataclass(slots=True)
class Piece:
    """The part of a request for one shard."""

    request: Request
    sequence: int = 0
    """Number of the message among those of its peer that the shards learn from; 0 for all others."""
    seen: int = 0
    """Pushes that the shard had applied when the rows of this push were read."""
    number: int = 0
    """Number of the request among those of its peer; the answer repeats it."""


@dataclass(slots=True)
class Answer:
    """The answer of one shard to one piece."""

    rows: Floats | None = None
    values: Floats | None = None
    batches: int = 0
    """Batches that all workers have trained so far, if `values` were asked for: the clock of the learning-rate schedule."""
    version: int = 0
    """Pushes the shard has applied."""
    checkpoint: int = 0
    """The checkpoint that was taken right after this round."""
    keys: Keys | None = None
    """Keys that others changed, in an answer to SHIP; `rows` holds their rows."""
    deleted: Keys | None = None
    error: str = ""
    number: int = 0
    """Number of the request."""


@dataclass(slots=True)
class Reply:
    """The answers of all shards."""

    rows: Floats | None = None
    values: Floats | None = None
    batches: int = 0
    checkpoint: int = 0
    keys: Keys | None = None
    deleted: Keys | None = None
    seen: list[int] = field(default_factory=list)


class Ticket(Protocol):
    """A pending reply."""

    def ready(self) -> bool: ...
    def wait(self) -> Reply: ...


class Link(Protocol):
    """The connection of one thread of a worker to all shards. Messages to a shard stay in order."""

    def ask(self, request: Request) -> Ticket: ...


class Spread:
    """Which shard has what. Divide requests and join answers accordingly."""

    def __init__(self, shards: int, width: int, floats: int) -> None:
        self.shards, self.width, self.floats = shards, width, floats
        self.owner = np.empty(_core.VIRTUAL_SHARDS, np.uint16)
        for shard in range(shards):
            first, last = span(shard, shards)
            self.owner[first:last] = shard
        blocks = -(-floats // BLOCK)
        edges = [
            min(floats, blocks * span(shard, shards)[0] // _core.VIRTUAL_SHARDS * BLOCK) for shard in range(shards)
        ]
        self.spans = list(zip(edges, [*edges[1:], floats], strict=True))

    def split(self, keys: Keys) -> Split:
        return Split(self, keys)

    def divide(self, request: Request, pull: Split | None, push: Split | None = None) -> list[Request]:
        """Return the part of a request for each shard. Keys and rows are copies, the dense part is not."""
        parts = [
            Request(
                request.kind,
                batches=request.batches,
                values=request.values,
                training=request.training,
                checkpoint=request.checkpoint,
            )
            for _ in range(self.shards)
        ]
        if request.push is not None:
            by = push or self.split(request.push.keys)
            for part, rows in zip(parts, by.spans, strict=True):
                part.rows = np.empty((rows.stop - rows.start) * row_bytes(self.width), np.uint8)
                _core.pack_rows(by.order[rows], by.keys[rows], *request.push[1:5], part.rows)
                part.push = rows_of(part.rows, self.width, request.push.n)
        if request.dense is not None:
            for part, (first, last) in zip(parts, self.spans, strict=True):
                part.dense = request.dense._replace(vector=request.dense.vector[first:last])
        if request.difference is not None:
            for part, (first, last) in zip(parts, self.spans, strict=True):
                part.difference = request.difference[first:last]
        if pull is not None:
            for part, rows in zip(parts, pull.spans, strict=True):
                part.pull = pull.keys[rows]
        return parts

    def join(self, answers: Sequence[Answer], pull: Split | None) -> Reply:
        """Return one reply, with rows in the order of the requested keys."""
        reply = Reply(
            batches=max(answer.batches for answer in answers),
            checkpoint=max(answer.checkpoint for answer in answers),
            seen=[answer.version for answer in answers],
        )
        if pull is not None:
            reply.rows = pull.put([answer.rows for answer in answers])
        if answers[0].values is not None:
            reply.values = np.concatenate([answer.values for answer in answers if answer.values is not None])
        if answers[0].keys is not None:
            reply.keys = np.concatenate([answer.keys for answer in answers if answer.keys is not None])
            reply.rows = np.concatenate([answer.rows for answer in answers if answer.rows is not None])
            reply.deleted = np.concatenate([answer.deleted for answer in answers if answer.deleted is not None])
        return reply


class Split:
    """Keys, grouped by shard."""

    def __init__(self, spread: Spread, keys: Keys) -> None:
        self.given = keys
        self.keys, self.order = np.empty_like(keys), np.empty(len(keys), np.uint32)
        starts = np.empty(spread.shards + 1, np.int64)
        _core.split(keys, spread.owner, self.keys, self.order, starts)
        edges = starts.tolist()
        self.spans = [slice(first, last) for first, last in itertools.pairwise(edges)]
        self._width = spread.width

    def put(self, parts: Sequence[Floats | None]) -> Floats:
        """Return the rows of all shards in the original order of the keys."""
        out = np.empty((len(self.keys), self._width), np.float32)
        for rows, part in zip(self.spans, parts, strict=True):
            assert part is not None
            _core.put_rows(self.order[rows], part, out)
        return out


def row_bytes(width: int) -> int:
    """Return the bytes of one row of a push: key, gradients, show, click and slot."""
    return 8 + 4 * width + 4 + 4 + 2


def rows_of(packed: Any, width: int, n: float) -> Push:
    """Return the push whose arrays lie one after the other in some bytes, ordered so that each is aligned."""
    size = memoryview(packed).nbytes
    count, rest = divmod(size, row_bytes(width))
    if rest:
        raise ClusterError(f"a push of {size} bytes cannot hold rows of {width} weights")
    keys = array(packed, np.uint64, count)
    grads = array(packed, np.float32, count * width, 8 * count).reshape(count, width)
    show, click = (array(packed, np.float32, count, (8 + 4 * width + 4 * i) * count) for i in (0, 1))
    return Push(keys, grads, show, click, array(packed, np.uint16, count, (16 + 4 * width) * count), n)


def array(packed: Any, kind: type[np.generic], count: int = -1, offset: int = 0) -> Any:
    """Return some of the bytes as an array; copy them only if they are not aligned."""
    values = np.frombuffer(packed, kind, count, offset) if len(packed) else np.empty(0, kind)
    return values if values.flags.aligned else values.copy()


def merged(pushes: Sequence[Push], mean: bool = False) -> Push:
    """Merge pushes: each key once, with gradients, counts and weights added. With `mean`, divide gradients by their number.

    >>> one = Push(np.array([5], np.uint64), np.ones((1, 2), np.float32), *np.ones((2, 1), np.float32), np.zeros(1, np.uint16), 1.0)
    >>> merged([one, one]).grads.tolist(), merged([one, one]).n
    ([[2.0, 2.0]], 2.0)
    """
    if len(pushes) == 1:
        return pushes[0]
    distinct, where = unique(np.concatenate([push.keys for push in pushes]))
    grads = np.zeros((len(distinct), pushes[0].grads.shape[1]), np.float32)
    counts = np.zeros((len(distinct), 2), np.float32)
    slots = np.empty(len(distinct), np.uint16)
    start = 0
    for push in pushes:
        rows = where[start : start + len(push.keys)]
        start += len(push.keys)
        _core.add_rows(rows, push.grads, grads)
        _core.add_rows(rows, np.stack([push.show, push.click], 1), counts)
        slots[rows] = push.slots
    if mean:
        grads /= len(pushes)
    n = sum(push.n for push in pushes)
    show, click = np.ascontiguousarray(counts.T)
    return Push(distinct, grads, show, click, slots, n / len(pushes) if mean else n)


def unique(keys: Keys) -> tuple[Keys, NDArray[np.uint32]]:
    """Return each key once, and the position of every key among them."""
    distinct, where = np.empty(len(keys), np.uint64), np.empty(len(keys), np.uint32)
    return distinct[: _core.unique_into(keys, distinct, where)], where


def copied(push: Push) -> Push:
    """Return a copy of a push that stays valid after the next batch."""
    return Push(push.keys.copy(), push.grads.copy(), push.show.copy(), push.click.copy(), push.slots.copy(), push.n)


def summed(gradients: Sequence[Gradient], clipped: bool, mean: bool) -> Gradient:
    """Add dense gradients: Σ gradient and Σ n. Clipped gradients are already means and are weighted by their rows.

    `mean` tells whether the loss is a mean over rows; if not, the gradients are only added.
    """
    if len(gradients) == 1:
        return gradients[0]
    weighed = mean and clipped
    vector = np.zeros_like(gradients[0].vector)
    for gradient in gradients:
        vector += gradient.vector * np.float32(gradient.n) if weighed else gradient.vector
    n = sum(gradient.n for gradient in gradients)
    return Gradient(vector, n, 1.0 / (n or 1.0) if mean else 1.0)
