"""What a worker and the shards say to each other: the few types every cluster mode turns on.

A worker puts what it has to say to all shards into one `Request`; `Spread` cuts it into a `Piece` per shard and joins their
`Answer`s to one `Reply`. Rows belong to shards by virtual shard, dense values by blocks of 1024 floats in order.

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
from clickfleet.batch import Floats, Keys
from clickfleet.checkpoint import span
from clickfleet.embedding import Push
from clickfleet.errors import ClusterError

BLOCK = 1024
"""Floats of a dense block; a block never lies on two shards."""


class Kind(IntEnum):
    ASK = 0
    """Learn what is pushed, then read what is pulled."""
    MARK = 1
    """All that belongs to a cut has been sent."""
    DONE = 2
    """No more rounds from this worker until the next epoch."""
    SHIP = 3
    """Add differences (geo), answer with what others changed."""


class Gradient(NamedTuple):
    """Of the dense weights, over one batch or several."""

    vector: Floats  # [L]
    n: float
    """Weight of the rows it comes from."""
    scale: float
    """What it must be multiplied by to be a mean."""
    batches: int = 1


@dataclass(slots=True)
class Request:
    """Everything one worker tells all shards at once; what is None is not part of it."""

    kind: Kind = Kind.ASK
    push: Push | None = None
    dense: Gradient | None = None
    pull: Keys | None = None
    values: bool = False
    """Whether the dense values are wanted."""
    training: bool = True
    cut: int = 0
    """The cut that a mark belongs to, or that is wanted after this round."""
    seen: list[int] = field(default_factory=list)
    """Pushes each shard had learned when the rows of this push were read."""
    rows: NDArray[np.uint8] | None = None
    """The arrays of `push` as bytes, one behind the other, in the part for one shard."""


@dataclass(slots=True)
class Piece:
    """The part of a request that concerns one shard."""

    request: Request
    sequence: int = 0
    """Counts the pushes of one peer; 0 where nothing is learned."""
    seen: int = 0
    """Pushes the shard had learned when the rows of this push were read."""
    number: int = 0
    """Of the request among those of its peer; the answer carries it back."""


@dataclass(slots=True)
class Answer:
    """What one shard says to one piece."""

    rows: Floats | None = None
    values: Floats | None = None
    version: int = 0
    """Pushes it has learned."""
    cut: int = 0
    """The cut that was taken right after this round."""
    keys: Keys | None = None
    """geo: keys that others changed, whose rows are `rows`."""
    deleted: Keys | None = None
    error: str = ""
    number: int = 0
    """Of the request it belongs to."""


@dataclass(slots=True)
class Reply:
    """The answers of all shards."""

    rows: Floats | None = None
    values: Floats | None = None
    cut: int = 0
    keys: Keys | None = None
    deleted: Keys | None = None
    seen: list[int] = field(default_factory=list)


class Ticket(Protocol):
    """A reply under way."""

    def ready(self) -> bool: ...
    def wait(self) -> Reply: ...


class Link(Protocol):
    """The way of one thread of a worker to all shards; messages to a shard stay in order."""

    def ask(self, request: Request) -> Ticket: ...


class Spread:
    """Which shard has what, and the cutting and joining that follows from it."""

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

    def cut(self, request: Request, pull: Split | None, push: Split | None = None) -> list[Request]:
        """The request as each shard sees it; keys and rows are copies, the dense gradient is not."""
        parts = [
            Request(request.kind, values=request.values, training=request.training, cut=request.cut)
            for _ in range(self.shards)
        ]
        if request.push is not None:
            by = push or self.split(request.push.keys)
            for part, own in zip(parts, by.spans, strict=True):
                part.rows = np.empty((own.stop - own.start) * row_bytes(self.width), np.uint8)
                _core.pack_rows(by.order[own], by.keys[own], *request.push[1:5], part.rows)
                part.push = rows_of(part.rows, self.width, request.push.n)
        if request.dense is not None:
            for part, (first, last) in zip(parts, self.spans, strict=True):
                part.dense = request.dense._replace(vector=request.dense.vector[first:last])
        if pull is not None:
            for part, own in zip(parts, pull.spans, strict=True):
                part.pull = pull.keys[own]
        return parts

    def join(self, answers: Sequence[Answer], pull: Split | None) -> Reply:
        """One reply; rows come in the order of the keys that were asked for."""
        reply = Reply(cut=max(answer.cut for answer in answers), seen=[answer.version for answer in answers])
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
    """Keys sorted by shard."""

    def __init__(self, spread: Spread, keys: Keys) -> None:
        self.given = keys
        self.keys, self.order = np.empty_like(keys), np.empty(len(keys), np.uint32)
        starts = np.empty(spread.shards + 1, np.int64)
        _core.split(keys, spread.owner, self.keys, self.order, starts)
        edges = starts.tolist()
        self.spans = [slice(first, last) for first, last in itertools.pairwise(edges)]
        self._width = spread.width

    def put(self, parts: Sequence[Floats | None]) -> Floats:
        """Rows by shard back into the order the keys were given in."""
        out = np.empty((len(self.keys), self._width), np.float32)
        for own, part in zip(self.spans, parts, strict=True):
            assert part is not None
            _core.put_rows(self.order[own], part, out)
        return out


def row_bytes(width: int) -> int:
    """Of one row of a push: its key, gradients, show, click and slot."""
    return 8 + 4 * width + 4 + 4 + 2


def rows_of(packed: Any, width: int, n: float) -> Push:
    """The push whose arrays lie one behind the other in some bytes; those before keep each of them aligned."""
    size = memoryview(packed).nbytes
    count, rest = divmod(size, row_bytes(width))
    if rest:
        raise ClusterError(f"a push of {size} bytes does not hold rows of {width} weights")
    keys = array(packed, np.uint64, count)
    grads = array(packed, np.float32, count * width, 8 * count).reshape(count, width)
    show, click = (array(packed, np.float32, count, (8 + 4 * width + 4 * i) * count) for i in (0, 1))
    return Push(keys, grads, show, click, array(packed, np.uint16, count, (16 + 4 * width) * count), n)


def array(packed: Any, kind: type[np.generic], count: int = -1, offset: int = 0) -> Any:
    """Some of the bytes as an array, without a copy unless they lie askew."""
    found = np.frombuffer(packed, kind, count, offset) if len(packed) else np.empty(0, kind)
    return found if found.flags.aligned else found.copy()


def merged(pushes: Sequence[Push], mean: bool = False) -> Push:
    """One push of several: each key once, gradients, counts and weights added; with `mean`, gradients over their number.

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
        mine = where[start : start + len(push.keys)]
        start += len(push.keys)
        _core.add_rows(mine, push.grads, grads)
        _core.add_rows(mine, np.stack([push.show, push.click], 1), counts)
        slots[mine] = push.slots
    if mean:
        grads /= len(pushes)
    n = sum(push.n for push in pushes)
    show, click = np.ascontiguousarray(counts.T)
    return Push(distinct, grads, show, click, slots, n / len(pushes) if mean else n)


def unique(keys: Keys) -> tuple[Keys, NDArray[np.uint32]]:
    """Each key once, and where every key went."""
    distinct, where = np.empty(len(keys), np.uint64), np.empty(len(keys), np.uint32)
    return distinct[: _core.unique_into(keys, distinct, where)], where


def copied(push: Push) -> Push:
    """A push that stays good when its maker goes on to the next batch."""
    return Push(push.keys.copy(), push.grads.copy(), push.show.copy(), push.click.copy(), push.slots.copy(), push.n)


def summed(gradients: Sequence[Gradient], clipped: bool, mean: bool) -> Gradient:
    """One dense gradient of several: Σ gradient and Σ n; clipped ones are means already and weigh by their rows.

    `mean` says whether the loss is a mean over rows; else gradients just add up.
    """
    if len(gradients) == 1:
        return gradients[0]
    weighed = mean and clipped
    vector = np.zeros_like(gradients[0].vector)
    for gradient in gradients:
        vector += gradient.vector * np.float32(gradient.n) if weighed else gradient.vector
    n = sum(gradient.n for gradient in gradients)
    return Gradient(vector, n, 1.0 / (n or 1.0) if mean else 1.0, sum(gradient.batches for gradient in gradients))
