"""Arrow IPC files and streams that anybody may have written: checked in full before a value is touched.

Arrow trusts the numbers in a file: where buffers lie, how long lists are, which entry of a dictionary a row uses. A damaged one
makes its functions read outside of their memory, so every record batch is validated first.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

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


def is_file(start: bytes) -> bool:
    """Whether this is how an IPC file begins; anything else may be a stream."""
    return start.startswith(_MAGIC)


def open_bytes(content: Any) -> Checked:
    """A file or stream in memory."""
    return Checked(pa.BufferReader(content), is_file=is_file(bytes(content[: len(_MAGIC)])))
