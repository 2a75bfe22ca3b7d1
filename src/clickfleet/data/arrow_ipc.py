"""Read untrusted Arrow IPC files and streams. Every record batch is validated before use.

Arrow trusts the numbers in a file: offsets of buffers, lengths of lists, indices into dictionaries. A damaged number
would make it read outside its memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from clickfleet.errors import CheckpointError

FLOATS = pa.list_(pa.field("item", pa.float32(), nullable=False))


def columns(kinds: Mapping[str, pa.DataType]) -> pa.Schema:
    """Return the Arrow schema of columns that have no missing values.

    >>> columns({"key": pa.uint64()}).field("key").nullable
    False
    """
    return pa.schema([pa.field(name, kind, nullable=False) for name, kind in kinds.items()])


def batches(path: Path, schema: pa.Schema, *, mapped: bool = True) -> Iterator[pa.RecordBatch]:
    """Yield the validated record batches of a file, which must have exactly these columns.

    Columns of a mapped file are read from disk on first use, so the file must not be truncated meanwhile. Our writers replace
    files and never change them.
    """
    try:
        source = pa.memory_map(str(path)) if mapped else pa.BufferReader(path.read_bytes())
        with source:
            reader = IpcReader(source, is_file=True)
            if reader.schema != schema:
                raise CheckpointError(f"{path} does not have the columns that this version of clickfleet writes")
            for batch in reader:
                if any(column.null_count for column in batch.columns):
                    raise CheckpointError(f"{path} is broken: a row lacks a value")
                yield batch
    except (pa.ArrowException, OSError, ValueError, MemoryError) as error:
        raise CheckpointError(f"{path} is broken: {error or 'it needs more memory than this machine has'}") from error


def schema_of(path: Path) -> pa.Schema:
    """Return the columns of a file."""
    try:
        with pa.memory_map(str(path)) as source:
            return IpcReader(source, is_file=True).schema
    except (pa.ArrowException, OSError, ValueError, MemoryError) as error:
        raise CheckpointError(f"{path} is broken: {error}") from error


def numbers(column: pa.Array, kind: Any) -> Any:
    """Return a column of numbers as a NumPy view. Arrow's `to_numpy` would import pandas, which takes a second."""
    data = column.buffers()[1]
    if data is None or not len(column):
        return np.empty(0, kind)
    return np.frombuffer(data, kind, len(column), column.offset * np.dtype(kind).itemsize)


MAX_ROWS = 1 << 31
"""Maximum rows of a record batch. A column of nulls takes no bytes, so a short file could claim any number."""

_MAGIC = b"ARROW1"


class IpcReader:
    """The schema and the validated record batches of a file or stream. Raises pyarrow's own exceptions."""

    def __init__(self, source: Any, *, is_file: bool) -> None:
        options = pa.ipc.IpcReadOptions(use_threads=False, ensure_alignment=pa.ipc.Alignment.DataTypeSpecific)
        open_source = pa.ipc.open_file if is_file else pa.ipc.open_stream
        self._reader = open_source(source, options=options)
        self._is_file = is_file
        self.schema: pa.Schema = self._reader.schema

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        reader = self._reader
        batches = (reader.get_batch(i) for i in range(reader.num_record_batches)) if self._is_file else reader
        for batch in batches:
            check(batch)
            yield batch


def check(batch: pa.RecordBatch) -> None:
    """Raise pa.ArrowInvalid if a record batch is inconsistent."""
    if batch.num_rows > MAX_ROWS:
        raise pa.ArrowInvalid(f"a record batch claims {batch.num_rows} rows")
    batch.validate(full=True)
    for column in batch.columns:
        if "view" in str(column.type):
            _check_views(column)


def _check_views(column: pa.Array) -> None:
    """Reject views outside their data, including those of missing values: Arrow does not validate these, but its casts read them."""
    kind, types = column.type, pa.types
    if types.is_string_view(kind) or types.is_binary_view(kind):
        _, views, *data = column.buffers()
        sizes, _, which, starts = _slots(views, np.int32, column, 4).T.astype(np.int64)
        rooms = np.array([0 if buffer is None else buffer.size for buffer in data] or [0], np.int64)
        long = sizes > 12  # shorter values are stored in the view itself
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
        raise pa.ArrowInvalid("a view points outside its data")


def open_ipc(source: Any) -> IpcReader:
    """Open a file object that contains an IPC file or an IPC stream."""
    start = source.read(len(_MAGIC))
    source.seek(0)
    return IpcReader(source, is_file=start == _MAGIC)


def open_bytes(content: Any) -> IpcReader:
    """Open an IPC file or stream in memory."""
    return open_ipc(pa.BufferReader(content))
