"""Arrow IPC files and streams that anybody may have written: checked in full before a value is touched.

Arrow trusts the numbers in a file: where buffers lie, how long lists are, which entry of a dictionary a row uses. A damaged one
makes its functions read outside of their memory, so every record batch is validated first.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa

MAX_ROWS = 1 << 31
"""Rows of one record batch: a column of nulls takes no bytes, so a short file may claim any number."""

_MAGIC = b"ARROW1"


class Checked:
    """The schema and the record batches of a file or stream; what pyarrow finds wrong is raised as pyarrow has it."""

    def __init__(self, source: Any, *, is_file: bool) -> None:
        options = pa.ipc.IpcReadOptions(use_threads=False, ensure_alignment=pa.ipc.Alignment.DataTypeSpecific)
        opened = pa.ipc.open_file if is_file else pa.ipc.open_stream
        self._reader = opened(source, options=options)
        self._is_file = is_file
        self.schema: pa.Schema = self._reader.schema

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        reader = self._reader
        found = (reader.get_batch(i) for i in range(reader.num_record_batches)) if self._is_file else reader
        for batch in found:
            check(batch)
            yield batch


def check(batch: pa.RecordBatch) -> None:
    """Raises pa.ArrowInvalid where a record batch contradicts itself."""
    if batch.num_rows > MAX_ROWS:
        raise pa.ArrowInvalid(f"a record batch claims {batch.num_rows} rows")
    batch.validate(full=True)
    for column in batch.columns:
        if "view" in str(column.type):
            _check_views(column)


def _check_views(column: pa.Array) -> None:
    """Refuses views that point outside, those of missing values too: validation leaves them out, and Arrow's casts read them."""
    kind, types = column.type, pa.types
    if types.is_string_view(kind) or types.is_binary_view(kind):
        _, views, *data = column.buffers()
        sizes, _, which, starts = _slots(views, np.int32, column, 4).T.astype(np.int64)
        rooms = np.array([0 if buffer is None else buffer.size for buffer in data] or [0], np.int64)
        long = sizes > 12  # shorter ones stand in the view itself
        inside = (which >= 0) & (which < len(rooms)) & (starts >= 0)
        fit = starts + sizes <= rooms[np.where(inside, which, 0)]
        _need(bool(((sizes >= 0) & (~long | (inside & fit))).all()))
    elif types.is_list_view(kind) or types.is_large_list_view(kind):
        wide = np.int64 if types.is_large_list_view(kind) else np.int32
        starts, sizes = (_slots(buffer, wide, column, 1)[:, 0].astype(np.int64) for buffer in column.buffers()[1:3])
        _need(bool(((starts >= 0) & (sizes >= 0) & (starts <= len(column.values) - sizes)).all()))
        _check_views(column.values)
    elif types.is_struct(kind):
        for i in range(kind.num_fields):
            _check_views(column.field(i))
    elif types.is_dictionary(kind):
        _check_views(column.dictionary)
    elif types.is_map(kind):
        _check_views(column.keys)
        _check_views(column.items)
    elif types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        _check_views(column.values)
    elif isinstance(column, pa.ExtensionArray):
        _check_views(column.storage)


def _slots(buffer: Any, kind: Any, column: pa.Array, width: int) -> Any:
    if buffer is None or not len(column):
        return np.empty((0, width), kind)
    return np.frombuffer(buffer, kind)[column.offset * width : (column.offset + len(column)) * width].reshape(-1, width)


def _need(fits: bool) -> None:
    if not fits:
        raise pa.ArrowInvalid("a view points outside of its data")


def is_file(start: bytes) -> bool:
    """Whether this is how an IPC file begins; anything else may be a stream."""
    return start.startswith(_MAGIC)


def open_bytes(content: Any) -> Checked:
    """A file or stream in memory."""
    return Checked(pa.BufferReader(content), is_file=is_file(bytes(content[: len(_MAGIC)])))
