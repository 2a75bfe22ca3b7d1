"""Batch: labels, dense values and ragged keys of some rows.

>>> batch = Batch(dense=np.zeros((2, 1), np.float32), keys=np.array([7, 8, 8], np.uint64), slots=2,
...               offsets=np.array([0, 1, 1, 2, 3]), labels=np.array([0, 1], np.float32))
>>> batch[1:].keys, batch[1:].offsets
(array([8, 8], dtype=uint64), array([0, 1, 2]))
>>> batch.unique()
(array([7, 8], dtype=uint64), array([0, 1, 1]))
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, cast

import numpy as np
from numpy.typing import NDArray

from clickfleet import _core
from clickfleet.errors import DataError

Floats = NDArray[np.float32]
Integers = NDArray[np.int64]
Keys = NDArray[np.uint64]

ROW_COLUMNS: Final = ("labels", "shows", "clicks", "weights", "times", "groups")
AMOUNTS: Final = ("shows", "clicks", "weights")
"""Columns with one number per row, None where the data has none."""

NOT_A_LABEL: Final = "is not a label: 1 is a click and 0 is none, so convert other labels first"

_counting: Integers = np.arange(1, dtype=np.int64)


def _count_to(n: int) -> Integers:
    """0, 1 … n - 1 without making it anew each time; not to be written to, though torch wants to be told it may."""
    global _counting
    if len(_counting) < n:
        _counting = np.arange(max(n, 2 * len(_counting)), dtype=np.int64)
    return _counting[:n]


@dataclass(slots=True, eq=False)
class Batch:
    """Rows of one schema; slot s of row b has the keys from `offsets[b * slots + s]` to the offset after it."""

    dense: Floats  # [B, F]
    keys: Keys  # [N]
    slots: int
    offsets: Integers = None  # type: ignore[assignment]  # [B * slots + 1]; None: exactly one key in every slot
    labels: Floats | None = None  # [B], as all below
    shows: Floats | None = None
    clicks: Floats | None = None
    weights: Floats | None = None
    times: Integers | None = None
    groups: Keys | None = None
    values: Floats | None = None  # [N]
    one_each: bool = field(default=False, init=False)
    """Every slot of every row has exactly one key, so offsets just count."""
    epoch: int = field(default=0, init=False)
    """Which pass over the data it was read in, and how many rows of that pass came before it."""
    row: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        if cast(Any, self.offsets) is None:
            self.one_each = True
            self.offsets = _count_to(len(self.dense) * self.slots + 1)
        self._check()

    def _check(self) -> None:
        rows = len(self.dense)
        if self.dense.ndim != 2 or len(self.offsets) != rows * self.slots + 1 or self.offsets[-1] != len(self.keys):
            raise DataError(
                f"a batch of dense {self.dense.shape}, {self.slots} slots, {len(self.offsets)} offsets "
                f"and {len(self.keys)} keys is not whole",
                "dense is [rows, columns], offsets [rows * slots + 1] and ends with the number of keys",
            )
        if self.values is not None and len(self.values) != len(self.keys):
            raise DataError(f"a batch has {len(self.values)} values for {len(self.keys)} keys")
        for name in ROW_COLUMNS:
            column = getattr(self, name)
            if column is not None and len(column) != rows:
                raise DataError(f"a batch of {rows} rows has {len(column)} {name}")

    def __len__(self) -> int:
        return len(self.dense)

    def __getitem__(self, rows: slice) -> "Batch":
        """Consecutive rows, sharing memory where they can."""
        start, stop, step = rows.indices(len(self))
        if step != 1:
            raise IndexError("a batch is sliced by consecutive rows; take() picks others")
        stop = max(start, stop)
        part = object.__new__(Batch)  # a slice of what was checked needs no check, and there are many
        part.slots, part.one_each = self.slots, self.one_each
        part.epoch = part.row = 0
        part.dense = self.dense[start:stop]
        first, last = start * self.slots, stop * self.slots
        if self.one_each:
            part.offsets = _count_to(last - first + 1)
        else:
            part.offsets = self.offsets[first : last + 1] - self.offsets[first]
            first, last = int(self.offsets[first]), int(self.offsets[last])
        part.keys = self.keys[first:last]
        part.values = None if self.values is None else self.values[first:last]
        for name in ROW_COLUMNS:
            column = getattr(self, name)
            setattr(part, name, None if column is None else column[start:stop])
        return part

    def take(self, order: NDArray[np.integer[Any]]) -> "Batch":
        """The rows named by `order`, in that order, copied."""
        columns = {name: getattr(self, name) for name in ROW_COLUMNS}
        picked = {name: column[order] for name, column in columns.items() if column is not None}
        offsets: Integers | None = None
        values = self.values
        if self.one_each:
            keys = self.keys.reshape(-1, self.slots)[order].reshape(-1) if self.slots else self.keys[:0]
            if values is not None and self.slots:
                values = values.reshape(-1, self.slots)[order].reshape(-1)
        else:
            starts = self.offsets[order * self.slots]
            ends = self.offsets[order * self.slots + self.slots]
            lengths = ends - starts
            where = np.repeat(starts - np.cumsum(lengths) + lengths, lengths) + np.arange(lengths.sum(), dtype=np.int64)
            keys = self.keys[where]
            values = None if values is None else values[where]
            counts = np.diff(self.offsets).reshape(-1, self.slots)[order].reshape(-1)
            offsets = np.concatenate((np.zeros(1, np.int64), np.cumsum(counts)))
        return Batch(self.dense[order], keys, self.slots, offsets, values=values, **picked)  # type: ignore[arg-type]

    def bad_label(self) -> int | None:
        """The first row whose label is neither 0 nor 1."""
        if self.labels is None:
            return None
        good = (self.labels == 0) | (self.labels == 1)
        return None if good.all() else int(np.argmin(good))

    def check_rows(self) -> None:
        """Refuses labels other than 0 and 1, and negative amounts. Formats do it line by line; this is for batches that others made."""
        row = self.bad_label()
        if row is not None:
            assert self.labels is not None
            raise DataError(f"row {row} of a batch: its label {self.labels[row]:g} {NOT_A_LABEL}")
        for name in AMOUNTS:
            column = getattr(self, name)
            if column is not None and not (good := column >= 0).all():
                row = int(np.argmin(good))
                raise DataError(f"row {row} of a batch: {column[row]:g} in {name} is out of range")

    def unique(self) -> tuple[Keys, Integers]:
        """Each key once, in the order of first occurrence, and the place of each of `keys` among them."""
        distinct, where = _core.unique(self.keys)
        return distinct.view(np.uint64), where.view(np.int64)  # C's long long otherwise, for which torch knows no name


def concatenate(batches: Sequence[Batch]) -> Batch:
    """The rows of several batches of one schema, in order."""
    if len(batches) == 1:
        return batches[0]
    first = batches[0]
    joined: dict[str, Any] = {}
    for name in (*ROW_COLUMNS, "values"):
        columns = [getattr(batch, name) for batch in batches]
        absent = sum(column is None for column in columns)
        if absent and absent < len(columns):
            if name != "values":
                raise DataError(
                    f"some rows have {name} and some have none",
                    "read files with and without that column separately, or let every line carry it",
                )
            columns = [
                np.ones(len(batch.keys), np.float32) if batch.values is None else batch.values for batch in batches
            ]
        joined[name] = None if columns[0] is None else np.concatenate(columns)
    offsets: Integers | None = None
    if not all(batch.one_each for batch in batches):
        ends = np.cumsum([0] + [len(batch.keys) for batch in batches])
        offsets = np.concatenate(
            [np.zeros(1, np.int64)] + [batch.offsets[1:] + end for batch, end in zip(batches, ends, strict=False)]
        )
    return Batch(
        np.concatenate([batch.dense for batch in batches]),
        np.concatenate([batch.keys for batch in batches]),
        first.slots,
        offsets,  # type: ignore[arg-type]
        **joined,
    )


def empty(schema_dense: int, slots: int) -> Batch:
    """No rows of that many dense columns and slots."""
    return Batch(np.empty((0, schema_dense), np.float32), np.empty(0, np.uint64), slots)
