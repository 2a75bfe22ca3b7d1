"""Arrow IPC files of columns without nulls, mapped when read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pyarrow as pa

from clickfleet.arrow_ipc import Checked
from clickfleet.errors import CheckpointError

FLOATS = pa.list_(pa.field("item", pa.float32(), nullable=False))


def columns(kinds: Mapping[str, pa.DataType]) -> pa.Schema:
    """
    >>> columns({"key": pa.uint64()}).field("key").nullable
    False
    """
    return pa.schema([pa.field(name, kind, nullable=False) for name, kind in kinds.items()])


def batches(path: Path, schema: pa.Schema, *, mapped: bool = True) -> Iterator[pa.RecordBatch]:
    """The record batches of a file, which must have exactly these columns; each is checked before it is given.

    Columns of a mapped file are read from disk when they are used: nobody may cut it short meanwhile. Our writers put a new file
    in the place of an old one and never change it.
    """
    try:
        source = pa.memory_map(str(path)) if mapped else pa.BufferReader(path.read_bytes())
        with source:
            found = Checked(source, is_file=True)
            if found.schema != schema:
                raise CheckpointError(f"{path} has other columns than this version of clickfleet writes")
            for batch in found:
                if any(column.null_count for column in batch.columns):
                    raise CheckpointError(f"{path} is broken: a row lacks a value")
                yield batch
    except (pa.ArrowException, OSError, ValueError, MemoryError) as error:
        raise CheckpointError(f"{path} is broken: {error or 'it asks for more memory than there is'}") from error
