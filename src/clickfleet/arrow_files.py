"""Arrow IPC files of columns without nulls, mapped when read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pyarrow as pa

from clickfleet.errors import CheckpointError

FLOATS = pa.list_(pa.field("item", pa.float32(), nullable=False))


def columns(kinds: Mapping[str, pa.DataType]) -> pa.Schema:
    """
    >>> columns({"key": pa.uint64()}).field("key").nullable
    False
    """
    return pa.schema([pa.field(name, kind, nullable=False) for name, kind in kinds.items()])


def batches(path: Path, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """The record batches of a file, which must have exactly these columns."""
    try:
        with pa.memory_map(str(path)) as source, pa.ipc.open_file(source) as reader:
            if reader.schema != schema:
                raise CheckpointError(f"{path} has other columns than this version of clickfleet writes")
            for i in range(reader.num_record_batches):
                yield reader.get_batch(i)
    except (pa.ArrowException, OSError) as error:
        raise CheckpointError(f"{path} is broken: {error}") from error
