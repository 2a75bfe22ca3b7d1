"""Assignments of work: the streams that a worker reads in one epoch. A stream is a share of the data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from clickfleet.config.load import Config
from clickfleet.data.bad_lines import Counters
from clickfleet.data.batch import Batch
from clickfleet.data.dataset import Source
from clickfleet.data.feed_files import FeedFiles
from clickfleet.data.files import split_files
from clickfleet.data.schema import Schema
from clickfleet.data.split import RowSplit
from clickfleet.training import modes


def links_of(config: Config) -> int:
    """Return how many links to the shards each worker has."""
    return config.cluster.threads if modes.needs(config).link_per_trainer else 1


Share = Sequence[str] | FeedFiles
"""The data of one worker: files, or rows of data in memory."""


def share_of(data: Share, index: int, of: int) -> Share:
    """Return part `index` of `of` about equal parts of the data, in order."""
    return data.share(index, of) if isinstance(data, FeedFiles) else split_files(list(data), index, of)


@dataclass(frozen=True)
class AssignedStream:
    """A share of the data of an epoch, and how far it has been read."""

    number: int
    data: Share
    state: Mapping[str, object] | None = None


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

    def state(self) -> dict[str, Mapping[str, object] | None]:
        """Return the position of each stream by its number; None for a stream that has ended."""
        return {str(number): None if number in self.ended else r.state() for number, r in self.readers.items()}
