"""Assignments of work: the streams that a worker reads in one epoch. A stream is a share of the data.

An epoch begins with a stream for each worker. When workers come or go, the rest of the streams is divided again: what was begun
continues as it is, and the files that were not begun become new streams. Data in memory is divided by row.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NotRequired, TypedDict, cast

from clickfleet.config.load import Config
from clickfleet.data.bad_lines import Counters
from clickfleet.data.batch import Batch
from clickfleet.data.dataset import Source
from clickfleet.data.feed_files import FeedFiles
from clickfleet.data.files import split_files
from clickfleet.data.memory import split_off as split_off_rows
from clickfleet.data.reader import split_off
from clickfleet.data.schema import Schema
from clickfleet.data.split import RowSplit
from clickfleet.training import modes

KeptFiles = dict[str, bytes]
"""Files of a mode, by name."""


def links_of(config: Config) -> int:
    """Return how many links to the shards each worker has."""
    return config.cluster.threads if modes.needs(config).link_per_trainer else 1


Share = Sequence[str] | FeedFiles
"""The data of one worker: files, or rows of data in memory."""


def share_of(data: Share, index: int, of: int) -> Share:
    """Return part `index` of `of` about equal parts of the data, in order."""
    return data.share(index, of) if isinstance(data, FeedFiles) else split_files(list(data), index, of)


def described(share: Share) -> list[Any]:
    """Return the data of a stream as a checkpoint holds it: its files, or its first and last row of data in memory."""
    return [share.first, share.last] if isinstance(share, FeedFiles) else list(share)


def described_share(data: Share, description: list[Any]) -> Share:
    """Return the data of a stream from its description. `data` is the data of all streams."""
    if isinstance(data, FeedFiles):
        return replace(data, first=description[0], last=description[1])
    return list(description)


class EpochPosition(TypedDict):
    """How far an epoch has been read, as checkpoints of a cluster hold it."""

    epoch: int
    of: int
    """The number of streams that the data was split into when the epoch began."""
    streams: dict[str, Mapping[str, object] | None]
    """The position of each stream by its number; None at its end."""
    shares: NotRequired[dict[str, list[Any]]]
    """The data of streams that were made within the epoch: files, or the first and last row of data in memory."""
    workers: NotRequired[int]
    """The number of workers that the streams were divided among. Older checkpoints hold the number in `of`."""
    owners: NotRequired[dict[str, int]]
    """The worker of each stream."""


NEXT_EPOCH: EpochPosition = {"epoch": -1, "of": 0, "streams": {}}
"""The position after the end of an epoch."""


@dataclass(frozen=True)
class AssignedStream:
    """A share of the data of an epoch, and how far it has been read."""

    number: int
    data: Share
    state: Mapping[str, object] | None = None
    owner: int | None = None
    """The worker that has read it so far."""
    part: bool = False
    """Whether it was made within the epoch, as a part of other streams."""

    @property
    def begun(self) -> bool:
        """Whether some of it has been read."""
        return self.state is not None and any(cast(list[int], self.state.get("reach", [1])))


def moved(stream: AssignedStream, worker: int) -> AssignedStream:
    """Return a stream as a worker reads it. Lines that another one has quarantined stay where they are."""
    if not stream.begun:
        return replace(stream, state=None)
    if stream.state is None or "quarantine" not in stream.state or stream.owner in (None, worker):
        return stream
    return replace(stream, state={**stream.state, "quarantine": None})


def dealt(streams: Iterable[AssignedStream], workers: Sequence[int]) -> dict[int, list[AssignedStream]]:
    """Return the streams of each worker: in turn, without dividing any. A worker keeps its own."""
    shares: dict[int, list[AssignedStream]] = {worker: [] for worker in workers}
    for stream, worker in zip(streams, itertools.cycle(workers), strict=False):
        chosen = stream.owner if stream.owner in shares else worker
        assert chosen is not None
        shares[chosen].append(moved(stream, chosen))
    return shares


def divided(
    streams: Sequence[AssignedStream], workers: Sequence[int], first: int
) -> tuple[dict[int, list[AssignedStream]], bool]:
    """Divide the rest of streams about equally among workers. All get new numbers, from `first` on.

    Return the streams of each worker, and whether every one was divided as far as possible: a shuffle of all rows, and a state of an
    older version, keep a stream whole.
    """
    numbers = itertools.count(first)
    if any(isinstance(stream.data, FeedFiles) for stream in streams):
        return _divided_by_row(streams, workers, numbers), True
    shares: dict[int, list[AssignedStream]] = {worker: [] for worker in workers}
    unread: list[str] = []
    begun, exact = [], True
    for stream in streams:
        files = cast(list[str], list(stream.data))
        state, rest = (None, files) if stream.state is None else split_off(files, dict(stream.state))
        unread += rest
        if state is not None:
            begun.append(replace(stream, number=next(numbers), state=state, part=True))
            exact = exact and state.get("shuffle") != "global" and "reach" in state
    for stream in sorted(begun, key=lambda stream: stream.owner not in shares):  # first those that stay where they are
        fewest = min(workers, key=lambda worker: len(shares[worker]))
        stays = stream.owner in shares and not shares[stream.owner]
        worker = stream.owner if stays and stream.owner is not None else fewest
        shares[worker].append(moved(stream, worker))
    start = 0
    for worker, count in zip(workers, level([len(shares[worker]) / 2 for worker in workers], len(unread)), strict=True):
        if count:
            stream = AssignedStream(next(numbers), unread[start : start + count], owner=worker, part=True)
            shares[worker].append(stream)
        start += count
    return shares, exact


def _divided_by_row(
    streams: Sequence[AssignedStream], workers: Sequence[int], numbers: Iterator[int]
) -> dict[int, list[AssignedStream]]:
    shares: dict[int, list[AssignedStream]] = {worker: [] for worker in workers}
    pieces = [(stream, dict[str, Any](stream.state or {})) for stream in streams]
    total = sum(state.get("until", len(stream.data)) - state["skip"] for stream, state in pieces)
    for i, worker in enumerate(workers):
        room = total * (i + 1) // len(workers) - total * i // len(workers)
        while room and pieces:
            stream, state = pieces.pop(0)
            mine, others = split_off_rows(len(stream.data), state, room)
            room -= mine.get("until", len(stream.data)) - mine["skip"]
            shares[worker].append(AssignedStream(next(numbers), stream.data, mine, worker, part=True))
            if others is not None:
                pieces.insert(0, (stream, others))
    return shares


def level(loads: Sequence[float], count: int) -> list[int]:
    """Return how many of `count` equal pieces to add to each load, so that the largest sum is as small as possible.

    >>> level([0.5, 0.5, 0, 0], 5)
    [1, 1, 2, 1]
    """
    heap = [(load, i) for i, load in enumerate(loads)]
    heapq.heapify(heap)
    added = [0] * len(loads)
    for _ in range(count):
        load, i = heap[0]
        heapq.heapreplace(heap, (load + 1, i))
        added[i] += 1
    return added


@dataclass(frozen=True)
class Assignment:
    """The work of one worker in one epoch."""

    epoch: int
    streams: tuple[AssignedStream, ...]
    saved: dict[str, bytes] = field(default_factory=dict)
    """Files that the mode kept in the last checkpoint."""
    skip: int = 0
    """Batches to skip, because the shards have applied them."""
    reading: Config | None = None
    """How to read the files. None: as the worker's configuration says."""
    split: RowSplit | None = None
    """The rows that are set aside for validation."""
    by_batch: bool = False
    """A program hands over the batches, one at a time. There are no streams."""
    score_first: bool = False
    """Score each batch in evaluation mode before training on it, if training adds noise."""


def files_of(kept: Mapping[int, KeptFiles], workers: Sequence[int]) -> dict[int, KeptFiles]:
    """Return the files of each worker. One that has joined gets those of another: their states are a better start than none.

    >>> files_of({0: {"x": b"a"}, 1: {"x": b"b"}}, [1, 2])
    {1: {'x': b'b'}, 2: {'x': b'b'}}
    """
    stay = [worker for worker in workers if worker in kept]
    like = kept[stay[0]] if stay else {}
    return {worker: kept.get(worker, like) for worker in workers}


class AssignedStreams:
    """The streams of a worker, read one after the other."""

    def __init__(self, schema: Schema, epoch: int, readers: dict[int, Source], skip: int = 0) -> None:
        self.schema, self.epoch, self.readers = schema, epoch, readers
        self.ended: set[int] = set()
        self._skip = skip

    def __iter__(self) -> Iterator[Batch]:
        for number, reader in self.readers.items():
            if number not in self.ended:
                for batch in reader:
                    if self._skip:
                        self._skip -= 1
                    else:
                        yield batch
                self.ended.add(number)

    @property
    def counters(self) -> Counters:
        total = Counters()
        for reader in self.readers.values():
            total.bytes += reader.counters.bytes
            total.bad_lines += reader.counters.bad_lines
        return total

    def read(self) -> tuple[int, int]:
        """Return the bytes and bad lines of the streams that have ended."""
        counters = [self.readers[number].counters for number in self.ended]
        return sum(each.bytes for each in counters), sum(each.bad_lines for each in counters)

    @property
    def left(self) -> int:
        """The number of streams that have not ended."""
        return len(self.readers) - len(self.ended)

    def state(self) -> dict[str, Mapping[str, object] | None]:
        """Return the position of each stream by its number; None for a stream that has ended."""
        return {str(number): None if number in self.ended else r.state() for number, r in self.readers.items()}
