"""The events of histories in batches: equal lengths of all columns, and the limit of each history."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from clickfleet.data.batch import Batch
from clickfleet.data.schema import History, Schema
from clickfleet.errors import DataError

Counts = NDArray[np.int64]


def history_columns(schema: Schema) -> Iterator[tuple[History, int]]:
    """Yield each history with the number of its first key column."""
    first = len(schema.slots)
    for history in schema.histories:
        yield history, first
        first += len(history.slots)


def kept_events(history: History, counts: Counts) -> NDArray[np.bool_]:
    """Return which of the events of a column are kept. `counts` has the number of events per row.

    >>> kept_events(History("seen", ("item",), max=2), np.array([3, 1])).tolist()
    [False, True, True, True]
    """
    starts = np.cumsum(counts) - counts
    event = np.arange(int(counts.sum())) - np.repeat(starts, counts)
    if history.keep == "first":
        return np.asarray(event < history.max)
    return np.asarray(event >= np.repeat(counts - history.max, counts))


def keep_events(batch: Batch, schema: Schema) -> Batch:
    """Return a batch that was not made by a parser with the events that its schema keeps. Reject columns of unequal length."""
    if not schema.histories or not len(batch):
        return batch
    counts = np.diff(batch.offsets).reshape(len(batch), batch.slots)
    if all((counts[:, first] <= history.max).all() for history, first in history_columns(schema)) and all(
        (counts[:, first + i] == counts[:, first]).all()
        for history, first in history_columns(schema)
        for i in range(len(history.slots))
    ):
        return batch
    keep = np.ones(len(batch.keys), bool)
    column_of_key = np.repeat(np.tile(np.arange(batch.slots), len(batch)), counts.reshape(-1))
    for history, first in history_columns(schema):
        for column in range(first, first + len(history.slots)):
            unequal = np.flatnonzero(counts[:, column] != counts[:, first])
            if len(unequal):
                raise DataError(
                    f"row {unequal[0]} of a batch: the columns of the history {history.name} have different lengths"
                )
            keep[column_of_key == column] = kept_events(history, counts[:, column])
        counts[:, first : first + len(history.slots)] = np.minimum(
            counts[:, first : first + len(history.slots)], history.max
        )
    offsets = np.concatenate((np.zeros(1, np.int64), np.cumsum(counts.reshape(-1))))
    values = None if batch.values is None else batch.values[keep]
    return Batch(batch.dense, batch.keys[keep], batch.slots, offsets, values=values, **batch.row_columns())
