"""Which record of a topic a line of a file came from: a small hidden file beside it says so.

Errors, examples and quarantined lines then name the topic, partition and offset. The file holds runs of records: the number of the
first line (from 1), the partition, the offset of the first record, and the lines of each record.
"""

from __future__ import annotations

import bisect
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple


class Origin(NamedTuple):
    """A record of a topic."""

    topic: str
    partition: int
    offset: int

    def __str__(self) -> str:
        return f"{self.topic} partition {self.partition} offset {self.offset}"


def write_origins(path: Path, topic: str, records: Iterable[tuple[int, int, int]]) -> None:
    """Notes where the lines of a file come from: its records in order as (partition, offset, lines)."""
    line, runs = 1, list[list[int]]()
    here = following = each = -1
    for partition, offset, lines in records:
        if offset != following or lines != each or partition != here:
            runs.append([line, partition, offset, lines])
        here, following, each, line = partition, offset + 1, lines, line + lines
    places_of(path).write_text(json.dumps({"topic": topic, "runs": runs}))


def places_of(path: Path) -> Path:
    """The file that says where the lines of another come from."""
    return path.with_name(f".{path.name}.places")


class Origins:
    """Finds the records that lines came from.

    >>> Origins("/no/such/file").of(1) is None
    True
    """

    def __init__(self, path: str) -> None:
        self._topic, self._runs = "", list[list[int]]()
        places = places_of(Path(path)) if "://" not in path else None
        if places is not None and os.path.exists(places):
            saved: dict[str, Any] = json.loads(places.read_text())
            self._topic, self._runs = saved["topic"], saved["runs"]

    def of(self, line: int) -> Origin | None:
        """The record of a line, counted from 1; None for files that hold no records of a topic."""
        at = bisect.bisect_right(self._runs, line, key=lambda run: run[0]) - 1
        if at < 0:
            return None
        first, partition, offset, lines = self._runs[at]
        return Origin(self._topic, partition, offset + (line - first) // max(lines, 1))
