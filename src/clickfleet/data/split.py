"""Set a part of the training rows aside for validation.

Whether a row is set aside depends on its place (file and line) or on its time, never on its content. So every process, any
number of threads, every epoch and a resumed run decide alike.

>>> split = RowSplit(share=0.5, seed=7)
>>> split.aside("clicks.csv", 0, Batch(np.zeros((8, 0), np.float32), np.zeros(8, np.uint64), 1)).tolist()
[True, True, True, False, True, True, True, True]
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clickfleet import _core
from clickfleet.data.batch import Batch, Integers, concatenate
from clickfleet.errors import DataError

SHARE = 0.1
MAX_ROWS = 100_000
"""Rows of validation data above which the default share gets smaller."""
KEPT_ROWS = 1_000_000
"""Rows of validation data that are kept in memory. More are read again for each evaluation."""
LEAST_ROWS = 20
"""Rows of either label that validation data needs."""
SAMPLED_TIMES = 1 << 20
BY_ROW = "give every row a time, name validation data with data.valid, or set data.valid_share=0"
MAX_NEWEST = 0.3
"""Largest share of rows that the newest time may have, if validation is by time."""


@dataclass(frozen=True)
class RowSplit:
    """Which rows are set aside: those from the time `since` on, or a random `share` of them."""

    share: float
    seed: int
    since: int | None = None

    def aside(self, file: str, line: int, rows: Batch) -> NDArray[np.bool_]:
        """Return for each row of a block whether it is set aside. `line` is the number of lines of the file before the block."""
        if self.since is not None:
            if rows.times is None:
                raise DataError(f"{file or 'the data'}: rows without a time, but validation is by time", BY_ROW)
            return rows.times >= self.since
        if rows.previous is not None:
            raise DataError(
                f"{file or 'the data'}: a random choice would part corrections from their shows",
                "name validation data with data.valid, or set data.valid_share=0",
            )
        name = file.replace("\\", "/").rsplit("/", 1)[-1]  # the choice survives a move to another folder
        start = hashlib.blake2b(f"{self.seed}\0{name}".encode(), digest_size=8).digest()
        draws = np.arange(line + 1, line + 1 + len(rows), dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        draws += np.uint64(int.from_bytes(start, "little"))
        _core.mix64(draws, draws)
        return draws < np.uint64(min(int(self.share * 2**64), 2**64 - 1))

    def part(self, file: str, line: int, rows: Batch, validation: bool) -> Batch:
        """Return the rows of a block that are set aside (`validation`), or the others."""
        return rows.take(np.flatnonzero(self.aside(file, line, rows) == validation))

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any] | None) -> RowSplit | None:
        return None if saved is None else cls(**saved)


class TimeSample:
    """An even sample of the times of a log of any length."""

    def __init__(self, limit: int = SAMPLED_TIMES) -> None:
        self.limit, self._every, self._seen = limit, 1, 0
        self._parts: list[Integers] = []
        self._size = 0

    def add(self, times: Integers) -> None:
        """Add the times of the next rows."""
        part = times[-self._seen % self._every :: self._every]
        self._seen += len(times)
        self._parts.append(part)
        self._size += len(part)
        while self._size > 2 * self.limit:
            self._every *= 2
            kept = np.concatenate(self._parts)[::2]
            self._parts, self._size = [kept], len(kept)

    def since(self, share: float) -> int | None:
        """Return the time from which on about `share` of the rows are; None if the times are too coarse for that."""
        times, counts = np.unique(np.concatenate([np.empty(0, np.int64), *self._parts]), return_counts=True)
        if len(times) < 2:
            return None
        shares = counts[::-1].cumsum()[::-1] / counts.sum()  # of the rows from each time on
        at = int(np.argmin(np.abs(shares[1:] - share))) + 1
        return int(times[at]) if shares[at] <= max(share, MAX_NEWEST) else None


@dataclass(frozen=True)
class HeldOut:
    """The rows that were set aside: how many, and the rows themselves unless they are too many to keep."""

    rows: int = 0
    clicks: int = 0
    kept: Batch | None = None

    @property
    def enough(self) -> bool:
        """Whether there are enough rows of either label to judge a model."""
        return min(self.clicks, self.rows - self.clicks) >= LEAST_ROWS


def count(batches: Iterable[Batch], limit: int = KEPT_ROWS) -> HeldOut:
    """Read batches and return what they hold."""
    total = clicks = 0
    parts: list[Batch] = []
    for batch in batches:
        assert batch.clicked is not None
        total, clicks = total + len(batch), clicks + int((batch.clicked > 0).sum())
        parts.append(batch)
        if total > limit:
            parts = []
    return HeldOut(total, clicks, concatenate(parts) if 0 < total <= limit else None)


def describe(split: RowSplit, rows: int | None, time: str | None) -> str:
    """Describe a split in one line.

    >>> describe(RowSplit(0.1, 7), 5772, None)
    'validation: 10% of the rows (5,772), chosen at random'
    >>> describe(RowSplit(0.1, 7, 1414627200), 5772, "time")
    'validation: the newest 10% of the rows (5,772) by `time`, from 2014-10-30'
    """
    number = "" if rows is None else f" ({rows:,})"
    if split.since is None:
        return f"validation: {percent(split.share)} of the rows{number}, chosen at random"
    return f"validation: the newest {percent(split.share)} of the rows{number} by `{time}`, from {moment(split.since)}"


def percent(share: float) -> str:
    """
    >>> percent(0.1), percent(0.0022), percent(0.25)
    ('10%', '0.22%', '25%')
    """
    return f"{100 * share:.3g}%"


def moment(time: int) -> str:
    """Return a time as a date if it is one: seconds or milliseconds since 1970.

    >>> moment(1414627200), moment(1414627260_000), moment(17)
    ('2014-10-30', '2014-10-30 00:01:00', '17')
    """
    for unit in (1, 1000):
        if 3e8 < time / unit < 4.2e9:  # 1979 to 2103
            text = datetime.fromtimestamp(time / unit, UTC).strftime("%Y-%m-%d %H:%M:%S")
            return text.removesuffix(" 00:00:00")
    return str(time)
