"""Measure a log quickly: its rows, clicks, and distinct values per slot, from a bounded sample of its first rows."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np

from clickfleet.config.load import Config
from clickfleet.data.batch import Batch
from clickfleet.data.dataset import Data, for_scoring, open_source
from clickfleet.data.files import filesystem, packing
from clickfleet.data.memory import Feed
from clickfleet.data.reader import Reader
from clickfleet.data.schema import Schema

SAMPLE_ROWS = 50_000
SAMPLE_S = 0.5
"""Seconds after which a sample ends. It holds at least `LEAST_ROWS` rows, so that it does not depend on the load of the machine."""
LEAST_ROWS = 10_000
PACKED_RATIO = 4.0
"""Estimate of how much smaller compressed files are."""


@dataclass(frozen=True)
class LogFacts:
    """The size of a log."""

    rows: int
    """Exact if the sample holds all rows, else an estimate from the bytes of the files."""
    exact: bool
    dense: int
    """Number of dense columns."""
    slots: int
    positives: float
    """Fraction of rows with a click, in the sample."""
    ids: int
    """Distinct values of all slots, in the sample."""
    shows_per_id: float = 0.0
    """How often such a value occurs, on average, in the sample."""

    @property
    def events(self) -> int:
        """Rows of the rarer label."""
        return int(self.rows * min(self.positives, 1 - self.positives))


def measure(config: Config, data: Data, schema: Schema | None = None) -> LogFacts | None:
    """Return the facts about training data; None if its size is unknown, as with an iterator."""
    source = open_source(for_scoring(config, batch_size=2000), data, schema, labels=True)
    if isinstance(source, Feed) and not source.rereadable:
        return None
    sample = _Sample()
    batches: Any = iter(source)
    with closing(batches):
        sample.read(batches)
    if not sample.rows:
        return None
    exact = sample.ended
    rows = sample.rows
    if not exact:
        estimate = _length(source) if isinstance(source, Feed) else _from_bytes(source)
        if estimate is None:
            return None
        rows = max(estimate, rows)
    return LogFacts(
        rows,
        exact,
        len(source.schema.dense),
        len(source.schema.key_columns),
        sample.clicks / sample.rows,
        sample.ids,
        sample.keys / max(sample.ids, 1),
    )


class _Sample:
    """The first rows of a log."""

    def __init__(self) -> None:
        self.rows = self.ids = self.keys = 0
        self.clicks = 0.0
        self.ended = False

    def read(self, batches: Iterator[Batch]) -> None:
        begin, keys = time.monotonic(), np.empty(0, np.uint64)
        for batch in batches:
            assert batch.clicked is not None
            self.rows, self.keys = self.rows + len(batch), self.keys + len(batch.keys)
            self.clicks += float((batch.clicked > 0).sum())
            keys = np.union1d(keys, batch.keys)
            if self.rows >= SAMPLE_ROWS or (self.rows >= LEAST_ROWS and time.monotonic() - begin > SAMPLE_S):
                break
        else:
            self.ended = True
        self.ids = len(keys)


def _length(feed: Feed) -> int | None:
    data = feed.data
    if isinstance(data, Batch):
        return len(data)
    first = next(iter(data.values()), ()) if isinstance(data, dict) else data
    if isinstance(first, list | tuple) and first and isinstance(first[0], Batch):
        return sum(map(len, first))
    return len(first) if hasattr(first, "__len__") else None


def _from_bytes(reader: Any) -> int | None:
    """Estimate the rows of all files from the bytes and lines of those that were read."""
    assert isinstance(reader, Reader)
    lines_per_byte = reader.counters.lines / max(reader.counters.bytes, 1)
    rows = 0.0
    for path in reader.files:
        if "://" not in path and path.endswith(".parquet"):
            rows += _parquet_rows(path)
            continue
        size = filesystem(path)[0].size(filesystem(path)[1]) if "://" in path else os.path.getsize(path)
        if size is None:
            return None
        rows += size * (PACKED_RATIO if packing(path) or path.endswith(".parquet") else 1.0) * lines_per_byte
    return int(rows)


def _parquet_rows(path: str) -> int:
    from pyarrow import parquet

    return int(parquet.read_metadata(path).num_rows)
