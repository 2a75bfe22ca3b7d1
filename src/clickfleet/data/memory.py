"""Turn data in memory into batches: arrays, pandas or Polars frames, Arrow tables, dictionaries, a DataLoader.

>>> import numpy as np
>>> from clickfleet.data.schema import Dense, Schema, Slot
>>> schema = Schema(dense=(Dense("age"),), slots=(Slot("city"),))
>>> feed = Feed({"label": np.array([0, 1]), "age": np.array([30, 40]), "city": np.array(["Bern", "Oslo"])}, schema)
>>> [batch.dense.tolist() for batch in feed]
[[[30.0], [40.0]]]
"""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from clickfleet.data.bad_lines import Counters, describe
from clickfleet.data.batch import Batch, SourceState, concatenate
from clickfleet.data.feed_files import FeedFiles
from clickfleet.data.histories import keep_events
from clickfleet.data.parsing.layout import nothing
from clickfleet.data.reader import order
from clickfleet.data.schema import Schema
from clickfleet.data.split import RowSplit
from clickfleet.errors import ConfigError, DataError

if TYPE_CHECKING:
    import pyarrow as pa

_CHUNK_ROWS = 8192


class Feed:
    """An iterable of batches over `data`, checked against the schema. Use it wherever a Reader is accepted.

    `data` is a frame or table, a mapping from names to arrays (2-D arrays are lists), or an iterable. The items of an iterable
    are rows (mappings), groups of rows (mappings or tuples of arrays or tensors, as a DataLoader yields them) or batches.
    `names` are the names of the entries of a tuple. `shuffle` shuffles all rows, in a new order for each pass. Like a split, it
    converts all rows first, and needs data that can be read again: not an iterator and not a DataLoader.
    """

    def __init__(
        self,
        data: Any,
        schema: Schema,
        batch_size: int = 1000,
        *,
        names: Sequence[str] | None = None,
        shuffle: bool = False,
        seed: int = 0,
    ) -> None:
        if batch_size < 1:
            raise ConfigError("batch_size must be at least 1")
        self.data, self.schema, self.batch_size = data, schema, batch_size
        self.names = None if names is None else list(names)
        self.shuffle, self.seed = shuffle, seed
        if shuffle and not is_rereadable(data):
            raise ConfigError(
                f"data.shuffle cannot shuffle a {type(data).__name__}, which is read once, from its start to its end",
                "shuffle it yourself and set data.shuffle=0, or pass a frame, a table, a mapping of arrays or a list",
            )
        self.split: RowSplit | None = None
        """The rows that are set aside. The feed returns the others or, with `validation`, these."""
        self.validation = False
        self.counters = Counters()
        self.epoch = 0
        self._skip = 0
        self._until: int | None = None
        """Row of the pass, in its order, before which it ends. `split_off` gave the others to other feeds."""
        self._rows: tuple[tuple[RowSplit | None, bool], Batch] | None = None

    @property
    def rereadable(self) -> bool:
        """Whether every pass over the data yields the same rows in the same order."""
        return is_rereadable(self.data)

    def rows(self) -> Batch:
        """Return all rows of this part as one batch, in their order."""
        part = self.split, self.validation
        if self._rows is None or self._rows[0] != part:
            parts = list(self.parts())
            self._rows = part, concatenate(parts) if parts else nothing(self.schema)
        return self._rows[1]

    def parts(self) -> Iterator[Batch]:
        """Yield the rows of this part in their order, in batches of any size."""
        before = 0
        for rows in self._parts():
            yield rows if self.split is None else self.split.part("", before, rows, self.validation)
            before += len(rows)

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches of one pass over the data, or the rest of it after `restore`."""
        if self.shuffle or self.split is not None:
            rows = self.rows()
            indices = order(len(rows), self.seed, self.epoch) if self.shuffle else np.arange(len(rows))
            indices = indices[: self._until]
            for first in range(self._skip, len(indices), self.batch_size):
                yield self._hand_out(rows.take(indices[first : first + self.batch_size]))
        else:
            yield from self._in_order()
        self._skip, self._until = 0, None
        self.epoch += 1

    def _in_order(self) -> Iterator[Batch]:
        skip, rows = self._skip, 0
        rest: list[Batch] = []
        left = sys.maxsize if self._until is None else self._until - skip
        for part in self._parts():
            batch = part[min(skip, len(part)) :]
            skip -= len(part) - len(batch)
            batch = batch[:left]
            left -= len(batch)
            while rows + len(batch) >= self.batch_size:
                cut = self.batch_size - rows
                ready = concatenate([*rest, batch[:cut]])
                rest, rows, batch = [], 0, batch[cut:]
                yield self._hand_out(ready)
            if len(batch):
                rest.append(batch)
                rows += len(batch)
            if not left:
                break
        if rest:
            yield self._hand_out(concatenate(rest))

    def _hand_out(self, batch: Batch) -> Batch:
        batch.epoch, batch.row = self.epoch, self._skip
        self._skip += len(batch)
        self.counters.rows += len(batch)
        self.counters.lines += len(batch)
        return batch

    def state(self) -> SourceState:
        """Return the position after the last batch."""
        return {
            "schema": self.schema.hash,
            "epoch": self.epoch,
            "skip": self._skip,
            "counters": self.counters.to_dict(),
            **({} if self._until is None else {"until": self._until}),
            **self._identity(),
        }

    def _identity(self) -> Mapping[str, Any]:
        """Return what decides the order of the rows."""
        return {
            **({"shuffle": self.seed} if self.shuffle else {}),
            **({} if self.split is None else {"split": self.split.to_dict()}),
            **({"data": [data.digest, data.first, data.last]} if isinstance(data := self.data, FeedFiles) else {}),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Skip the rows before a saved position. The data must be the same, in the same order."""
        if state["schema"] != self.schema.hash:
            raise DataError("the saved state belongs to data with a different schema")
        for name in ("shuffle", "split"):
            if state.get(name) != self._identity().get(name):
                raise DataError(
                    f"the saved state has {name} {state.get(name)!r}, this run has {self._identity().get(name)!r}",
                    "resume with the same data, train.seed, data.shuffle and data.valid_share",
                )
        if "data" in state and state["data"] != self._identity().get("data"):
            raise DataError(
                "the run began this epoch with other data in memory", "resume with the same rows in the same order"
            )
        self.epoch, self._skip, self._until = state["epoch"], state["skip"], state.get("until")
        self.counters = Counters(**state["counters"])

    def _parts(self) -> Iterator[Batch]:
        """Yield the rows in batches of any size."""
        data = self.data
        if isinstance(data, Batch):
            yield self._checked(data)
        elif hasattr(data, "__arrow_c_stream__") or hasattr(data, "__arrow_c_array__"):
            yield from self._from_arrow(data)
        elif isinstance(data, Mapping):
            yield from self._from_arrow(self._table(data, "the data"))
        elif isinstance(data, Iterable) and not isinstance(data, str | bytes):
            yield from self._from_items(data)
        else:
            raise DataError(
                f"cannot read rows from {type(data).__name__}",
                "pass a frame, a table, a mapping of arrays, or an iterable of rows or batches",
            )

    def head(self, rows: int) -> Iterator["pa.RecordBatch"]:
        """Yield the first rows as Arrow columns: of a frame, a table, a mapping of arrays or a list of rows; else nothing."""
        import pyarrow as pa

        data = self.data
        if isinstance(data, Mapping):
            data = self._table({name: values[:rows] for name, values in data.items()}, "the data")
        elif isinstance(data, list | tuple) and data and isinstance(data[0], Mapping):
            data = pa.Table.from_pylist([dict(row) for row in data[:rows]])
        if hasattr(data, "__arrow_c_stream__"):
            for batch in pa.RecordBatchReader.from_stream(data):
                if rows > 0 and len(batch):
                    yield batch.slice(0, rows)
                rows -= len(batch)

    def _from_arrow(self, data: Any, before: int = 0) -> Iterator[Batch]:
        import pyarrow as pa

        from clickfleet.data.parsing.columns import Columns

        if hasattr(data, "__arrow_c_stream__"):
            stream = pa.RecordBatchReader.from_stream(data)
        else:
            stream = pa.table([pa.record_batch(data)]).to_reader()
        columns = Columns(self.schema, stream.schema.names, "the data")
        for record_batch in stream:
            for start in range(0, len(record_batch), _CHUNK_ROWS):
                piece = record_batch.slice(start, _CHUNK_ROWS)
                parsed = columns.parse(piece, "stop")
                for bad in parsed.bad:
                    raise DataError(f"row {before + bad.line} of the data: {describe(bad)}")
                yield parsed.batch
                before += len(piece)

    def _from_items(self, items: Iterable[Any]) -> Iterator[Batch]:
        iterator = iter(items)
        first = next(iterator, None)
        if first is None:
            return
        rest = chain([first], iterator)
        if isinstance(first, Mapping) and not any(_is_array(value) and np.ndim(value) for value in first.values()):
            yield from self._from_rows(rest)
            return
        before = 0
        for item in rest:
            if isinstance(item, Batch):
                yield self._checked(item)
                continue
            for batch in self._from_arrow(self._table(self._named(item), f"item {before}"), before):
                before += len(batch)
                yield batch

    def _from_rows(self, rows: Iterator[Any]) -> Iterator[Batch]:
        import pyarrow as pa

        before = 0
        while chunk := list(islice(rows, _CHUNK_ROWS)):
            names = list(dict.fromkeys(name for row in chunk for name in row))
            try:
                table = pa.table({name: [_plain(row.get(name)) for row in chunk] for name in names})
            except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError) as error:
                raise DataError(
                    f"rows {before} to {before + len(chunk) - 1} of the data: a column mixes types ({error})",
                    "use one type per column: text, integers or numbers",
                ) from None
            yield from self._from_arrow(table, before)
            before += len(chunk)

    def _named(self, item: Any) -> Mapping[str, Any]:
        if isinstance(item, Mapping):
            return item
        if not isinstance(item, list | tuple):
            raise DataError(
                f"an item of the data is a {type(item).__name__}", "pass mappings, tuples of arrays, or batches"
            )
        if self.names is None:
            raise DataError("the data yields tuples, which have no names", "pass names=[…]")
        if len(item) != len(self.names):
            raise DataError(f"the data yields tuples of {len(item)} entries, but there are {len(self.names)} names")
        return dict(zip(self.names, item, strict=True))

    def _table(self, arrays: Mapping[str, Any], where: str) -> "pa.Table":
        """Return a mapping from names to arrays as a table. `dense` may hold all dense columns as one 2-D array."""
        dense = arrays.get("dense")
        has_column_dense = any("dense" in (column.name, column.source) for column in self.schema.columns)
        if dense is None or has_column_dense or (values := _numpy(dense)).ndim != 2:
            return table_of(arrays, where)
        if values.shape[1] != len(self.schema.dense):
            raise DataError(f"{where}: dense has {values.shape[1]} columns, the schema has {len(self.schema.dense)}")
        columns = {column.source_name: values[:, i] for i, column in enumerate(self.schema.dense)}
        return table_of({**{name: array for name, array in arrays.items() if name != "dense"}, **columns}, where)

    def _checked(self, batch: Batch) -> Batch:
        if batch.dense.shape[1] != len(self.schema.dense) or batch.slots != len(self.schema.key_columns):
            raise DataError(
                f"a batch has {batch.dense.shape[1]} dense columns and {batch.slots} slots, "
                f"the schema has {len(self.schema.dense)} and {len(self.schema.key_columns)}"
                + (" with the columns of its histories" if self.schema.histories else "")
            )
        batch.check_rows(self.schema)
        return keep_events(batch, self.schema)


def split_off(rows: int, state: SourceState, size: int) -> tuple[SourceState, SourceState | None]:
    """Divide the rest of an interrupted pass over `rows` rows. Return the states that read its next `size` rows, and the others."""
    until = state.get("until", rows)
    if state["skip"] + size >= until:
        return state, None
    others = {**state, "skip": state["skip"] + size, "counters": Counters().to_dict()}
    return {**state, "until": state["skip"] + size}, others


def is_rereadable(data: Any) -> bool:
    """Return whether every pass over data yields the same rows in the same order."""
    return (
        isinstance(data, Batch | Mapping | list | tuple | FeedFiles)
        or hasattr(data, "__arrow_c_array__")
        or (hasattr(data, "__arrow_c_stream__") and hasattr(data, "__len__"))
    )


def table_of(arrays: Mapping[str, Any], where: str) -> "pa.Table":
    """Return a mapping from names to arrays as a table."""
    import pyarrow as pa

    columns: dict[str, Any] = {}
    try:
        for name, array in arrays.items():
            if isinstance(array, pa.Array | pa.ChunkedArray):
                columns[name] = array
                continue
            if isinstance(array, list) and any(isinstance(value, list | tuple | np.ndarray) for value in array[:1000]):
                columns[name] = pa.array(array)  # lists of different lengths
                continue
            values = _numpy(array)
            if values.ndim == 0:
                raise DataError(f"{where}: {name!r} is a single value; expected one per row")
            if values.ndim == 2 and values.shape[1] != 1:
                flat = pa.array(np.ascontiguousarray(values).reshape(-1))
                columns[name] = pa.FixedSizeListArray.from_arrays(flat, values.shape[1])
            elif values.ndim <= 2:
                columns[name] = pa.array(values.reshape(-1), from_pandas=True)  # NaN is a missing value
            else:
                raise DataError(f"{where}: {name!r} has {values.ndim} dimensions; expected one or two")
        lengths = {name: len(values) for name, values in columns.items()}
        if len(set(lengths.values())) > 1:
            raise DataError(f"{where}: the arrays have different lengths: {lengths}")
        return pa.table(columns)
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError) as error:
        raise DataError(f"{where}: {error}") from None


def _numpy(value: Any) -> NDArray[Any]:
    if isinstance(value, list | tuple) and value and hasattr(value[0], "detach"):
        return np.stack([_numpy(one) for one in value], axis=1)  # torch collates lists to one tensor per position
    return np.asarray(value.detach().cpu().numpy() if hasattr(value, "detach") else value)


def _is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray) or hasattr(value, "detach")


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.generic | np.ndarray) or hasattr(value, "detach") else value
