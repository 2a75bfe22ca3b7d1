"""The Batch: labels, dense values and ragged keys of some rows.

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
from clickfleet.data.corrections import Corrections
from clickfleet.data.schema import Label, Schema
from clickfleet.errors import DataError

Floats = NDArray[np.float32]
Integers = NDArray[np.int64]
Keys = NDArray[np.uint64]
SourceState = dict[str, Any]
"""The saved position of a source of batches: plain values for JSON."""

ROW_COLUMNS: Final = ("labels", "shows", "clicks", "weights", "times", "groups", "previous", "on_time")
BY_LABEL: Final = ("labels", "previous", "on_time")
"""Columns with a number per row, or with one per row and label if there are several labels."""
_LATE: Final = {"previous": np.float32(np.nan), "on_time": np.float32(1.0)}
"""Columns that only batches with late labels have, and what a row without them has there."""
AMOUNTS: Final = ("shows", "clicks", "weights")
"""Columns with one number per row; None if the data does not have them."""

NOT_A_LABEL: Final = "is not a label; labels must be 1 (click) or 0 (no click)"

_counting: Integers = np.arange(1, dtype=np.int64)


def _count_to(n: int) -> Integers:
    """Return 0, 1 … n - 1 from a shared array. Do not write to it; it is marked writable only because torch asks for that."""
    global _counting
    if len(_counting) < n:
        _counting = np.arange(max(n, 2 * len(_counting)), dtype=np.int64)
    return _counting[:n]


@dataclass(slots=True, eq=False)
class Batch:
    """Rows of one schema. The keys of slot s in row b start at `offsets[b * slots + s]` and end at the next offset.

    The columns of histories are slots, too; they follow the others.
    """

    dense: Floats  # [B, F]
    keys: Keys  # [N]
    slots: int
    offsets: Integers = None  # type: ignore[assignment]  # [B * slots + 1]; None: exactly one key in every slot
    labels: Floats | None = None  # [B], or [B, T] of several labels; there, NaN is a missing label
    shows: Floats | None = None  # [B], as all below
    clicks: Floats | None = None
    weights: Floats | None = None
    times: Integers | None = None
    groups: Keys | None = None
    values: Floats | None = None  # [N]
    previous: Floats | None = (
        None  # as labels: those that a correction replaces, else NaN; None: no row is a correction
    )
    on_time: Floats | None = None  # as labels: the share of the positives that come before a row counts as negative
    one_each: bool = field(default=False, init=False)
    """Every slot of every row has exactly one key, so that the offsets are 0, 1, 2 …"""
    epoch: int = field(default=0, init=False)
    """The epoch in which the batch was read."""
    row: int = field(default=0, init=False)
    """The number of rows of that epoch before this batch."""
    parts: int = field(default=1, init=False)
    """How many parts it was cut into, if it is a part of a batch."""
    counted: bool = field(default=True, init=False)
    """Whether it counts as a batch. Of the parts of a batch, only the first counts, so that no part is ever trained twice."""

    def __post_init__(self) -> None:
        if cast(Any, self.offsets) is None:
            self.one_each = True
            self.offsets = _count_to(len(self.dense) * self.slots + 1)
        rows = len(self.dense)
        if self.dense.ndim != 2 or len(self.offsets) != rows * self.slots + 1 or self.offsets[-1] != len(self.keys):
            raise DataError(
                f"inconsistent batch: dense {self.dense.shape}, {self.slots} slots, {len(self.offsets)} offsets, "
                f"{len(self.keys)} keys",
                "dense has the shape [rows, columns]; offsets has rows * slots + 1 entries, the last is the number of keys",
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
        """Return consecutive rows, without a copy where possible."""
        start, stop, step = rows.indices(len(self))
        if step != 1:
            raise IndexError("slice a batch by consecutive rows, or use take()")
        stop = max(start, stop)
        columns = self.row_columns(slice(start, stop))
        first, last = start * self.slots, stop * self.slots
        offsets: Integers | None = None
        if not self.one_each:
            offsets = self.offsets[first : last + 1] - self.offsets[first]
            first, last = int(self.offsets[first]), int(self.offsets[last])
        values = None if self.values is None else self.values[first:last]
        return Batch(self.dense[start:stop], self.keys[first:last], self.slots, offsets, values=values, **columns)  # type: ignore[arg-type]

    def take(self, order: NDArray[np.integer[Any]]) -> "Batch":
        """Return a copy of the rows with the indices `order`, in that order."""
        columns = self.row_columns(order)
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
        return Batch(self.dense[order], keys, self.slots, offsets, values=values, **columns)  # type: ignore[arg-type]

    def row_columns(self, rows: Any = slice(None)) -> dict[str, Any]:
        """Return the given rows of all columns that the batch has, apart from dense values and keys."""
        columns = {name: getattr(self, name) for name in ROW_COLUMNS}
        return {name: column[rows] for name, column in columns.items() if column is not None}

    @property
    def clicked(self) -> Floats | None:
        """The first label of each row, as the statistics of rows need it: a missing one counts as 0."""
        if self.labels is None or self.labels.ndim == 1:
            return self.labels
        return np.nan_to_num(self.labels[:, 0])

    @property
    def corrections(self) -> Corrections | None:
        """The rows that correct earlier ones; None if there are none."""
        return None if self.previous is None or self.labels is None else Corrections(self.labels, self.previous)

    def statistics(self) -> tuple[Floats | None, Floats | None]:
        """Return the shows and clicks that each row adds to the statistics of its keys. None: 1 show, 0 clicks."""
        if (late := self.corrections) is not None:
            return late.shows(self.shows), late.clicks(self.clicks)
        return self.shows, self.clicked if self.clicks is None else self.clicks

    def check_rows(self, schema: Schema) -> None:
        """Reject wrong labels and negative amounts. The built-in formats check this per line; user code may not."""
        if self.labels is not None:
            tasks = schema.tasks
            if self.labels.shape[1:] != ((len(tasks),) if len(tasks) > 1 else ()):
                raise DataError(f"a batch has labels of the shape {self.labels.shape} for {len(tasks)} labels")
            for i, task in enumerate(tasks):
                self._check_labels(task, self.labels if len(tasks) == 1 else self.labels[:, i], len(tasks) > 1)
        for name in AMOUNTS:
            column = getattr(self, name)
            if column is not None and not (good := column >= 0).all():
                row = int(np.argmin(good))
                raise DataError(f"row {row} of a batch: {column[row]:g} in {name} is out of range")
        for name in _LATE:
            column = getattr(self, name)
            if column is not None and (self.labels is None or column.shape != self.labels.shape):
                raise DataError(f"a batch has {name} of the shape {column.shape}", "give them the shape of the labels")

    @staticmethod
    def _check_labels(task: Label, labels: Floats, may_miss: bool) -> None:
        good = np.isfinite(labels)
        if task.loss == "log":
            good = (labels == 0) | (labels == 1)
        elif task.loss == "poisson":
            good &= labels >= 0
        if not (good := good | np.isnan(labels) if may_miss else good).all():
            row = int(np.argmin(good))
            reason = NOT_A_LABEL if task.loss == "log" else "is out of range"
            raise DataError(f"row {row} of a batch: its label {labels[row]:g} {reason}")

    def unique(self) -> tuple[Keys, Integers]:
        """Return the distinct keys in the order of first occurrence, and the index of each of `keys` among them."""
        distinct, where = _core.unique(self.keys)
        return distinct.view(np.uint64), where.view(np.int64)  # else C's long long, which torch cannot convert


def concatenate(batches: Sequence[Batch]) -> Batch:
    """Return the rows of several batches of one schema, in order."""
    if len(batches) == 1:
        return batches[0]
    first = batches[0]
    joined = {}
    for name in (*ROW_COLUMNS, "values"):
        columns = [getattr(batch, name) for batch in batches]
        absent = sum(column is None for column in columns)
        if absent and absent < len(columns):
            if name in _LATE:
                like = next(column for column in columns if column is not None)
                columns = [
                    np.full((len(batch), *like.shape[1:]), _LATE[name], np.float32) if column is None else column
                    for batch, column in zip(batches, columns, strict=True)
                ]
            elif name != "values":
                raise DataError(
                    f"some rows have {name}, others do not",
                    "read files with and without that column separately, or add it to every line",
                )
            else:
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
