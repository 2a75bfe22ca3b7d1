"""What a worker is to do: streams, which are shares of the files of an epoch, one after the other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from clickfleet.bad_lines import Counters
from clickfleet.batch import Batch
from clickfleet.config import Config
from clickfleet.reader import Reader
from clickfleet.schema import Schema

ROUNDS = ("sync", "half_async")
"""Modes that send a worker's gradients as one, over one link, and take part in cuts by themselves."""


def links_of(config: Config) -> int:
    """Links of a worker: one, unless its trainers send each for itself."""
    return config.cluster.threads if config.mode.name == "async" else 1


@dataclass(frozen=True)
class Stream:
    """A share of the files of an epoch, with how far it has been trained on."""

    number: int
    files: tuple[str, ...]
    state: dict[str, Any] | None = None


@dataclass(frozen=True)
class Assignment:
    """What a worker is to do in one epoch over the data."""

    epoch: int
    streams: tuple[Stream, ...]
    saved: dict[str, bytes] = field(default_factory=dict)
    """What the mode had kept for itself."""
    skip: int = 0
    """Batches to leave out, as the shards have learned them."""
    reading: Config | None = None
    """How the files are to be read, where not as the worker's own configuration says."""
    score_first: bool = False
    """Score each batch in evaluation mode before it is trained on, where training adds noise."""


class Streams:
    """The streams of a worker one after the other."""

    def __init__(self, schema: Schema, epoch: int, readers: dict[int, Reader], skip: int = 0) -> None:
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

    def state(self) -> dict[str, Any]:
        return {str(number): None if number in self.ended else r.state() for number, r in self.readers.items()}
