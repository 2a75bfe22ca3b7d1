"""Data people have at hand -> batches: arrays, pandas or Polars frames, Arrow tables, dictionaries, a DataLoader.

>>> import numpy as np
>>> from clickfleet.schema import Dense, Schema, Slot
>>> schema = Schema(dense=(Dense("age"),), slots=(Slot("city"),))
>>> feed = Feed({"label": np.array([0, 1]), "age": np.array([30, 40]), "city": np.array(["Bern", "Oslo"])}, schema)
>>> [batch.dense.tolist() for batch in feed]
[[[30.0], [40.0]]]
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from clickfleet.bad_lines import Counters, describe
from clickfleet.batch import Batch, concatenate
from clickfleet.errors import ConfigError, DataError
from clickfleet.schema import Schema

if TYPE_CHECKING:
    import pyarrow as pa

    from clickfleet.formats._columns import Columns

_CHUNK_ROWS = 8192


class Feed:
    """An iterable of batches over `data`, checked against the schema; it can stand wherever a Reader can.

    `data` is a frame or table, a mapping from names to arrays (2-D ones are lists), or an iterable of rows (mappings),
    of groups of rows (mappings or tuples of arrays or tensors, as a DataLoader gives them) or of batches; `names` are
    those of a tuple's entries.
    """

    def __init__(
        self, data: Any, schema: Schema, batch_size: int = 1000, *, names: Sequence[str] | None = None
    ) -> None:
        if batch_size < 1:
            raise ConfigError("batch_size must be at least 1")
        self.data, self.schema, self.batch_size = data, schema, batch_size
        self.names = None if names is None else list(names)
        self.counters = Counters()
        self.epoch = 0
        self._skip = 0

    def __iter__(self) -> Iterator[Batch]:
        """One pass over the data, or the rest of it after `restore`."""
        skip, rows = self._skip, 0
        rest: list[Batch] = []
        for part in self._parts():
            batch = part[min(skip, len(part)) :]
            skip -= len(part) - len(batch)
            while rows + len(batch) >= self.batch_size:
                cut = self.batch_size - rows
                ready = concatenate([*rest, batch[:cut]])
                rest, rows, batch = [], 0, batch[cut:]
                yield self._hand_out(ready)
            if len(batch):
                rest.append(batch)
                rows += len(batch)
        if rest:
            yield self._hand_out(concatenate(rest))
        self._skip = 0
        self.epoch += 1

    def _hand_out(self, batch: Batch) -> Batch:
        batch.epoch, batch.row = self.epoch, self._skip
        self._skip += len(batch)
        self.counters.rows += len(batch)
        self.counters.lines += len(batch)
        return batch

    def state(self) -> dict[str, Any]:
        """Where the feed stands after the last batch it handed out."""
        return {
            "schema": self.schema.hash,
            "epoch": self.epoch,
            "skip": self._skip,
            "counters": self.counters.to_dict(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Skips what was handed out before; the data must be the same, in the same order."""
        if state["schema"] != self.schema.hash:
            raise DataError("the saved state belongs to data of another schema")
        self.epoch, self._skip = state["epoch"], state["skip"]
        self.counters = Counters(**state["counters"])

    def _parts(self) -> Iterator[Batch]:
        """The rows in pieces of any size."""
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
                "give a frame, a table, a mapping of arrays, or an iterable of rows or batches",
            )

    def _from_arrow(self, data: Any, before: int = 0) -> Iterator[Batch]:
        import pyarrow as pa

        if hasattr(data, "__arrow_c_stream__"):
            stream = pa.RecordBatchReader.from_stream(data)
        else:
            stream = pa.table([pa.record_batch(data)]).to_reader()
        columns = self._columns(stream.schema.names)
        for record_batch in stream:
            for start in range(0, len(record_batch), _CHUNK_ROWS):
                piece = record_batch.slice(start, _CHUNK_ROWS)
                yield self._rows(columns, piece, before)
                before += len(piece)

    def _columns(self, names: Sequence[str]) -> "Columns":
        from clickfleet.formats._columns import Columns

        return Columns(self.schema, names, "the data")

    @staticmethod
    def _rows(columns: "Columns", table: "pa.RecordBatch", before: int) -> Batch:
        parsed = columns.parse(table, "stop")
        for bad in parsed.bad:
            raise DataError(f"row {before + bad.line} of the data: {describe(bad)}")
        return parsed.batch

    def _from_items(self, items: Iterable[Any]) -> Iterator[Batch]:
        iterator = iter(items)
        first = next(iterator, None)
        if first is None:
            return
        rest = _chain(first, iterator)
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
                    f"rows {before} to {before + len(chunk) - 1} of the data: a column mixes kinds of values ({error})",
                    "give one kind of value per name: all text, or all integers, or all numbers",
                ) from None
            yield from self._from_arrow(table, before)
            before += len(chunk)

    def _named(self, item: Any) -> Mapping[str, Any]:
        if isinstance(item, Mapping):
            return item
        if not isinstance(item, list | tuple):
            raise DataError(
                f"an item of the data is a {type(item).__name__}", "give mappings, tuples of arrays, or batches"
            )
        if self.names is None:
            raise DataError("the data gives tuples, which have no names", "say what they are: names=[…]")
        if len(item) != len(self.names):
            raise DataError(f"the data gives tuples of {len(item)} entries for {len(self.names)} names")
        return dict(zip(self.names, item, strict=True))

    def _table(self, arrays: Mapping[str, Any], where: str) -> "pa.Table":
        """A mapping from names to arrays as a table; `dense` may be all dense columns side by side."""
        import pyarrow as pa

        columns: dict[str, Any] = {}
        for name, array in arrays.items():
            values = _numpy(array)
            if values.ndim == 0:
                raise DataError(f"{where}: {name!r} is a single value, not one per row")
            if name == "dense" and values.ndim == 2 and self._no_column_is("dense"):
                if values.shape[1] != len(self.schema.dense):
                    raise DataError(
                        f"{where}: dense has {values.shape[1]} columns, the schema {len(self.schema.dense)}"
                    )
                columns |= {c.source or c.name: values[:, i] for i, c in enumerate(self.schema.dense)}
            elif values.ndim == 1:
                columns[name] = values
            elif values.shape[1:] == (1,):
                columns[name] = values[:, 0]
            elif values.ndim == 2:
                flat = pa.array(np.ascontiguousarray(values).reshape(-1))
                columns[name] = pa.FixedSizeListArray.from_arrays(flat, values.shape[1])
            else:
                raise DataError(f"{where}: {name!r} has {values.ndim} dimensions; one or two can be read")
        lengths = {name: len(values) for name, values in columns.items()}
        if len(set(lengths.values())) > 1:
            raise DataError(f"{where}: the arrays have different lengths: {lengths}")
        try:
            return pa.table(columns)
        except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError) as error:
            raise DataError(f"{where}: {error}") from None

    def _no_column_is(self, name: str) -> bool:
        return all(name not in (column.name, column.source) for column in self.schema.columns)

    def _checked(self, batch: Batch) -> Batch:
        if batch.dense.shape[1] != len(self.schema.dense) or batch.slots != len(self.schema.slots):
            raise DataError(
                f"a batch has {batch.dense.shape[1]} dense columns and {batch.slots} slots, "
                f"the schema {len(self.schema.dense)} and {len(self.schema.slots)}"
            )
        batch.check_rows()
        return batch


def _chain(first: Any, rest: Iterator[Any]) -> Iterator[Any]:
    yield first
    yield from rest


def _numpy(value: Any) -> NDArray[Any]:
    if isinstance(value, list | tuple) and value and hasattr(value[0], "detach"):
        return np.stack([_numpy(one) for one in value], axis=1)  # how torch collates lists: one tensor per place
    return np.asarray(value.detach().cpu().numpy() if hasattr(value, "detach") else value)


def _is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray) or hasattr(value, "detach")


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.generic | np.ndarray) or hasattr(value, "detach") else value
