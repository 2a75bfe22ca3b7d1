"""The formats of published rows: float32, and the small formats float16 and int8.

In a small format, a row is a record of a few bytes. float16: embed_w and each factor as a half. int8: a signed byte per factor,
embed_w as a half, and a byte for the scale of the row; `native/core/small_rows.h` has the details. Training never sees them: rows are
packed when an entry is written, and unpacked one by one when they are read.

Files of small rows have the columns key uint64 · slot uint8 (255: none; uint16 as in float32 if the model has more than 255 slots) ·
row_float16 or row_int8, fixed_size_binary. `rows.arrow` has the widest rows. If there are others, `rows-W.arrow` has those with W
factors, and `short.arrow` those without.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from clickfleet import _core
from clickfleet.data import arrow_ipc
from clickfleet.data.arrow_ipc import FLOATS, columns, numbers
from clickfleet.data.batch import Floats, Keys
from clickfleet.errors import CheckpointError
from clickfleet.store.table import NO_SLOT, Columns

RowFormat = Literal["float32", "float16", "int8"]
FORMATS: tuple[RowFormat, ...] = get_args(RowFormat)
FULL, SHORT = "rows.arrow", "short.arrow"
ROWS = columns({"key": pa.uint64(), "slot": pa.uint16(), "embed_w": pa.float32(), "embedx": FLOATS})
"""Columns of float32 rows, of both kinds, in `rows.arrow`."""
NO_SLOT_BYTE = 255
_NARROW = re.compile(r"rows-([1-9]\d{0,6})\.arrow")

Records = NDArray[np.uint8]
"""[rows, bytes]"""


def file_name(width: int, factors: int) -> str:
    """Return the name of the file of small rows of this width, in a model whose widest rows have `factors`.

    >>> [file_name(width, 32) for width in (32, 10, 0)]
    ['rows.arrow', 'rows-10.arrow', 'short.arrow']
    """
    return SHORT if not width else FULL if width == factors else f"rows-{width}.arrow"


def widths_of(names: Iterable[str], factors: int) -> dict[str, int]:
    """Return which of these files hold small rows, and the width of their rows.

    >>> widths_of(["golden.arrow", "rows-10.arrow", "rows.arrow"], 32)
    {'rows-10.arrow': 10, 'rows.arrow': 32}
    """
    found = {}
    for name in names:
        if name in (FULL, SHORT):
            found[name] = factors if name == FULL else 0
        elif (narrow := _NARROW.fullmatch(name)) and int(narrow[1]) < factors:
            found[name] = int(narrow[1])
    return found


def record_bytes(form: RowFormat, factors: int) -> int:
    """Return the bytes of a row without its key and slot.

    >>> record_bytes("float32", 10), record_bytes("float16", 10), record_bytes("int8", 10), record_bytes("int8", 0)
    (44, 22, 13, 2)
    """
    if form == "int8":
        return factors + 3 if factors else 2
    return (2 if form == "float16" else 4) * (1 + factors)


def file_bytes(form: RowFormat, factors: int, slots: int) -> int:
    """Return the bytes of a row in its file, without what Arrow adds per file and record batch.

    >>> [file_bytes(form, 10, 26) for form in FORMATS]
    [58, 31, 22]
    """
    if form == "float32":
        return 8 + 2 + 4 + record_bytes(form, factors)  # 4: where its list of factors ends
    return 8 + (1 if slot_type(slots) == pa.uint8() else 2) + record_bytes(form, factors)


def index_bytes(rows: int) -> int:
    """Return the bytes of the index that a server makes for rows of one kind.

    >>> index_bytes(3_000_000)
    4194308
    """
    return 4 * ((1 << max(1, (rows // 4).bit_length())) + 1)


def memory_bytes(form: RowFormat, factors: int) -> int:
    """Return the bytes of a row that a server reads: its key and its numbers. The index is extra."""
    return 8 + record_bytes(form, factors)


def describe(form: RowFormat, size: int, rows: int, drift: float | None) -> str:
    """Return a line about the rows of an entry: their size in bytes, and how far their format moves golden scores.

    >>> describe("int8", 22_000, 1000, 0.00031)
    'rows: int8, 22,000 bytes, 22.0 per row; golden scores move by at most 0.00031'
    """
    moved = "" if drift is None else f"; golden scores move by at most {drift:.2g}"
    return f"rows: {form}, {size:,} bytes, {size / max(1, rows):.1f} per row{moved}"


def slot_type(slots: int) -> pa.DataType:
    """Return the type of the column `slot` in files of small rows."""
    return pa.uint8() if slots <= NO_SLOT_BYTE else pa.uint16()


def schema(form: RowFormat, factors: int, slots: int = 0) -> pa.Schema:
    """Return the columns of a file of small rows with this many factors each."""
    return columns(
        {"key": pa.uint64(), "slot": slot_type(slots), f"row_{form}": pa.binary(record_bytes(form, factors))}
    )


def format_of(found: pa.Schema, factors: int) -> RowFormat | None:
    """Return the format of a file's rows by its columns; None if it has other columns."""
    if found == ROWS:
        return "float32"
    small = (form for form in FORMATS[1:] for slots in (0, NO_SLOT) if found == schema(form, factors, slots))
    return next(small, None)


def pack(form: RowFormat, rows: Columns, width: int) -> Records:
    """Return the records of rows with `width` factors each. Raise CheckpointError for a number that the format cannot hold."""
    weights, factors = (np.ascontiguousarray(rows[name], np.float32) for name in ("embed_w", "embedx"))
    records, packed = _core.pack_rows(form, weights, factors, width)
    if packed < len(weights):
        row = np.append(weights[packed], factors[packed * width : (packed + 1) * width])
        raise _unfit(form, f" of key {int(rows['key'][packed])}", row)
    packed_rows: Records = records
    return packed_rows


def unpack(form: RowFormat, records: Records, factors: int) -> Floats:
    """Return the rows of records as [embed_w, embedx]."""
    out = np.empty((len(records), 1 + factors), np.float32)
    _core.unpack_rows(form, np.ascontiguousarray(records), out)
    return out


def widened(form: RowFormat, records: Records, width: int, factors: int) -> Records:
    """Return records with more factors, all of them zero. The other numbers do not change."""
    rows = np.zeros((len(records), 1 + factors), np.float32)
    rows[:, : 1 + width] = unpack(form, records, width)
    return pack(form, {"embed_w": rows[:, 0], "embedx": rows[:, 1:].reshape(-1)}, factors)


def round_rows(form: RowFormat, rows: Floats) -> Floats:
    """Round rows, [embed_w, embedx], in place to what consumers of a format get. Return them."""
    if form != "float32":
        rounded = _core.round_rows(form, rows)
        if rounded < len(rows):
            raise _unfit(form, "", rows[rounded])
    return rows


def _unfit(form: RowFormat, which: str, row: Any) -> CheckpointError:
    values = np.asarray(row, np.float64)
    worst = values[~np.isfinite(values)] if not np.isfinite(values).all() else values[np.abs(values).argmax()][None]
    return CheckpointError(
        f"the row{which} holds {worst[0]:g}, which {form} cannot hold",
        "find out why the row grew (bounds of table.rule limit it), or publish float32 rows",
    )


class RecordBatch(NamedTuple):
    """Rows of one kind in a small format. The arrays are views of `memory`."""

    keys: Keys
    slots: NDArray[np.uint16]
    records: Records
    memory: pa.RecordBatch


def read_records(path: Path, form: RowFormat, factors: int, *, mapped: bool = True) -> Iterator[RecordBatch]:
    """Yield the records of a file of small rows."""
    found = arrow_ipc.schema_of(path)
    if format_of(found, factors) != form:
        raise CheckpointError(f"{path} does not hold rows in {form} with {factors} factors")
    size = record_bytes(form, factors)
    for batch in arrow_ipc.batches(path, found, mapped=mapped):
        column = batch.column(f"row_{form}")
        data = column.buffers()[1]
        flat = np.frombuffer(b"" if data is None else data, np.uint8)
        records = flat[column.offset * size : (column.offset + batch.num_rows) * size].reshape(batch.num_rows, size)
        yield RecordBatch(numbers(batch.column("key"), np.uint64), _wide_slots(batch.column("slot")), records, batch)


def _wide_slots(column: pa.Array) -> NDArray[np.uint16]:
    if column.type == pa.uint16():
        wide: NDArray[np.uint16] = numbers(column, np.uint16)
        return wide
    slots: NDArray[np.uint16] = numbers(column, np.uint8).astype(np.uint16)
    slots[slots == NO_SLOT_BYTE] = NO_SLOT
    return slots


def record_batch(kind: pa.Schema, keys: Keys, slots: Any, records: Records) -> pa.RecordBatch:
    """Return a record batch of small rows for a file with these columns."""
    slot_kind = kind.field("slot").type
    if slot_kind == pa.uint8():
        slots = np.where(slots == NO_SLOT, NO_SLOT_BYTE, slots)
        if len(slots) and int(slots.max()) > NO_SLOT_BYTE:
            raise CheckpointError(f"a row belongs to slot {int(slots.max())}, which the schema does not have")
    narrow = np.ascontiguousarray(slots, np.uint8 if slot_kind == pa.uint8() else np.uint16)
    values = zip(kind.types, (np.ascontiguousarray(keys), narrow, np.ascontiguousarray(records)), strict=True)
    arrays = [pa.Array.from_buffers(type_, len(keys), [None, pa.py_buffer(array)]) for type_, array in values]
    return pa.RecordBatch.from_arrays(arrays, schema=kind)


def as_floats(form: RowFormat, batch: RecordBatch, factors: int) -> pa.RecordBatch:
    """Return small rows as float32 rows."""
    rows = unpack(form, batch.records, factors)
    ends = pa.array(np.arange(len(rows) + 1, dtype=np.int32) * np.int32(factors))
    lists = pa.ListArray.from_arrays(ends, pa.array(np.ascontiguousarray(rows[:, 1:]).reshape(-1)), type=FLOATS)
    plain = [pa.array(values) for values in (batch.keys, batch.slots, np.ascontiguousarray(rows[:, 0]))]
    return pa.RecordBatch.from_arrays([*plain, lists], schema=ROWS)
