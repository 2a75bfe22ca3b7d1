"""Pieces of a log -> the bytes or the columns of a format."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clickfleet._core import PrintColumn, print_rows
from clickfleet.batch import Batch
from clickfleet.errors import DataError
from clickfleet.schema import Schema

Floats = NDArray[np.float32] | NDArray[np.float64]

_LIST_SEPARATOR = "|"


def raw_lines(columns: Any, separator: str, quote: bool) -> bytes:
    """An Arrow record batch as delimited lines; a missing value is an empty field."""
    printed = [_raw(columns.column(i), separator, quote, columns.schema.names[i]) for i in range(columns.num_columns)]
    return bytes(print_rows(printed, separator))


def _raw(column: Any, separator: str, quote: bool, name: str) -> PrintColumn:
    import pyarrow as pa

    around: dict[str, Any] = {}
    present = None if column.null_count == 0 else column.is_valid().to_numpy(zero_copy_only=False).astype(np.uint8)
    if pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
        if not quote:
            raise DataError(
                f"column {name} holds lists, which this format cannot", "write csv, parquet or arrow instead"
            )
        column = column.cast(pa.large_list(column.type.value_type))
        starts = column.offsets.to_numpy()
        around = {"starts": starts - starts[0], "between": _LIST_SEPARATOR}
        column = column.flatten()  # an absent list is an empty one
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    return _printed(column, present, separator, quote, name, around)


def _printed(
    column: Any, present: NDArray[np.uint8] | None, separator: str, quote: bool, name: str, around: dict[str, Any]
) -> PrintColumn:
    import pyarrow as pa

    if pa.types.is_boolean(column.type):
        column = column.cast(pa.int8())
    kind = column.type
    if pa.types.is_integer(kind):
        whole = np.uint64 if kind == pa.uint64() else np.int64
        return PrintColumn(column.fill_null(0).to_numpy(zero_copy_only=False).astype(whole), present=present, **around)
    if pa.types.is_floating(kind):
        real = np.float32 if kind == pa.float32() else np.float64
        values = column.fill_null(0).to_numpy(zero_copy_only=False).astype(real)
        return PrintColumn(values, present=present, bare=True, **around)
    if pa.types.is_nested(kind):
        raise DataError(f"column {name} holds {kind}, which delimited text cannot", "write parquet or arrow instead")
    column = (column if pa.types.is_binary(kind) else column.cast(pa.string())).cast(pa.binary())
    if _holds(column, separator + "\n\r" + ('"' if quote else "") + around.get("between", "")):
        if not quote or _holds(column, "\n\r") or around:
            raise DataError(
                f"column {name} holds a value with a separator or a line end in it", "write parquet or arrow instead"
            )
        column = _doubled(column)
        around = {"prefix": '"', "suffix": '"'}
    _, ends, data = column.buffers()
    ends = np.frombuffer(ends, np.int32)[column.offset : column.offset + len(column) + 1]
    values = np.frombuffer(data, np.uint8) if data is not None and data.size else np.empty(0, np.uint8)
    return PrintColumn(values, ends=ends, present=present, **around)


def _holds(column: Any, characters: str) -> bool:
    """Whether a value contains one of `characters`: a quick look at all bytes, then value by value."""
    import pyarrow.compute as pc

    data = column.buffers()[2]
    content = b"" if data is None else data.to_pybytes()
    found = [character for character in characters if character.encode() in content]
    return any(pc.any(pc.match_substring(column, character.encode())).as_py() for character in found)


def _doubled(column: Any) -> Any:
    import pyarrow.compute as pc

    return pc.replace_substring(column, b'"', b'""')


def slots_lines(batch: Batch, dense: Floats, schema: Schema) -> bytes:
    """`name:value` tokens, the label first."""
    columns = [_number(values, prefix=f"{name}:") for name, values in row_columns(batch, schema).items()]
    columns += [_dense(dense, i, prefix=f"{column.source or column.name}:") for i, column in enumerate(schema.dense)]
    columns += [
        _keys(batch, i, prefix=f"{slot.source or slot.name}:", skip_absent=True) for i, slot in enumerate(schema.slots)
    ]
    return bytes(print_rows(columns, " "))


def feasign_lines(batch: Batch, dense: Floats, schema: Schema) -> bytes:
    """`value:slot` tokens, the label first; there is no place for dense values."""
    assert not dense.shape[1]
    columns = [_number(values, suffix=f":{name}") for name, values in row_columns(batch, schema).items()]
    columns += [
        _keys(batch, i, suffix=f":{slot.source or slot.name}", skip_absent=True) for i, slot in enumerate(schema.slots)
    ]
    return bytes(print_rows(columns, " "))


def multislot_lines(batch: Batch, dense: Floats, schema: Schema) -> bytes:
    """Counted blocks: the dense values, the slots (an empty one is padded with a 0), other columns, the label."""
    width = dense.shape[1]
    columns = [_dense(dense, i, before=f"{width} " if i == 0 else "") for i in range(width)]
    columns += [_keys(batch, i, counted=True, absent="1 0") for i in range(len(schema.slots))]
    numbers = row_columns(batch, schema)
    if schema.label in numbers:
        numbers[schema.label] = numbers.pop(schema.label)  # last
    columns += [_number(values, before="1 ") for values in numbers.values()]
    return bytes(print_rows(columns, " "))


def libffm_lines(batch: Batch, dense: Floats, schema: Schema) -> bytes:
    """`field:key:value` tokens after the label: a dense column is a field with one key, its own number."""
    columns = [] if batch.labels is None else [_number(batch.labels)]
    for i in range(dense.shape[1]):
        present = (dense[:, i] != 0).astype(np.uint8)
        columns.append(_dense(dense, i, prefix=f"{i}:{i}:", present=present, skip_absent=True))
    values = np.ones(len(batch.keys), np.float32) if batch.values is None else batch.values
    columns += [
        _keys(batch, i, prefix=f"{dense.shape[1] + i}:", skip_absent=True, values=values) for i in range(batch.slots)
    ]
    return bytes(print_rows(columns, " "))


def row_columns(batch: Batch, schema: Schema) -> dict[str, NDArray[Any]]:
    """The label and what else there is once per row, by its name in the files."""
    named = {
        schema.label: batch.labels,
        schema.show: batch.shows,
        schema.click: batch.clicks,
        schema.weight: batch.weights,
        schema.time: batch.times,
        schema.group: batch.groups,
    }
    return {name: values for name, values in named.items() if name is not None and values is not None}


def _number(values: NDArray[Any], **around: Any) -> PrintColumn:
    return PrintColumn(values, bare=values.dtype.kind == "f", **around)


def _dense(dense: Floats, i: int, **around: Any) -> PrintColumn:
    """A double shows 12 significant digits, as the published files do; a float as few as give it back."""
    return PrintColumn(np.ascontiguousarray(dense[:, i]), digits=12 if dense.dtype == np.float64 else 0, **around)


def _keys(batch: Batch, slot: int, *, values: NDArray[np.float32] | None = None, **around: Any) -> PrintColumn:
    keys, starts, picked = slot_keys(batch, slot, values)
    return PrintColumn(keys, starts=starts, weights=picked, **around)


def slot_keys(
    batch: Batch, slot: int, values: NDArray[np.float32] | None = None
) -> tuple[NDArray[np.uint64], NDArray[np.int64], NDArray[np.float32] | None]:
    """The keys of one slot, where each row's begin, and their values."""
    if batch.one_each:
        pick: Any = slice(slot, None, batch.slots)
        starts = np.arange(len(batch) + 1, dtype=np.int64)
    else:
        begin = batch.offsets[slot :: batch.slots][: len(batch)]
        length = batch.offsets[slot + 1 :: batch.slots][: len(batch)] - begin
        starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(length)])
        pick = np.repeat(begin - starts[:-1], length) + np.arange(starts[-1])
    return (
        np.ascontiguousarray(batch.keys[pick]),
        starts,
        None if values is None else np.ascontiguousarray(values[pick]),
    )


def key_columns(batch: Batch, dense: Floats, schema: Schema) -> Any:
    """Rows as an Arrow record batch: the label, float dense columns, keys as uint64 or lists of them."""
    import pyarrow as pa

    if batch.values is not None and not (batch.values == 1).all():
        raise DataError("the keys carry values other than 1, and only libffm has a place for them")
    columns: dict[str, Any] = {name: pa.array(values) for name, values in row_columns(batch, schema).items()}
    for i, column in enumerate(schema.dense):
        columns[column.source or column.name] = pa.array(np.ascontiguousarray(dense[:, i]))
    for i, slot in enumerate(schema.slots):
        keys, starts, _ = slot_keys(batch, i)
        one = pa.array(keys)
        columns[slot.source or slot.name] = pa.LargeListArray.from_arrays(starts, one) if slot.multi else one
    return pa.RecordBatch.from_pydict(columns)


LINES: dict[str, Callable[[Batch, Floats, Schema], bytes]] = {
    "slots": slots_lines,
    "feasign": feasign_lines,
    "multislot": multislot_lines,
    "libffm": libffm_lines,
}
"""Text formats of keys."""
