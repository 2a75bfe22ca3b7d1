"""Rows of data in memory as Arrow files, for the processes of a cluster: written once, and each worker reads its share.

>>> import tempfile
>>> rows = Batch(np.zeros((3, 1), np.float32), np.array([7, 8, 9], np.uint64), 1, labels=np.array([0, 1, 0], np.float32))
>>> with tempfile.TemporaryDirectory() as folder:
...     fed = write_rows([rows], Path(folder))
...     [share.keys.tolist() for i in range(2) for share in fed.share(i, 2)]
[[7], [8, 9]]
"""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from clickfleet.data.arrow_ipc import IpcReader, numbers
from clickfleet.data.batch import BY_LABEL, ROW_COLUMNS, Batch
from clickfleet.data.files import reading, writing

CHUNK_ROWS = 8192
FILE_ROWS = 1 << 18
"""Rows of a file. A worker reads only files that hold rows of its share."""
_KINDS = {"times": (pa.int64(), np.int64), "groups": (pa.uint64(), np.uint64)}
_NUMBER = (pa.float32(), np.float32)


@dataclass(frozen=True)
class FeedFiles:
    """A range of the rows in some files. It is iterable as batches of any size, and small enough to send to any process."""

    files: tuple[tuple[str, int], ...]
    """Paths, each with its number of rows."""
    digest: str
    """A hash of all rows of the files."""
    slots: int
    first: int
    last: int

    def __len__(self) -> int:
        return self.last - self.first

    def share(self, index: int, of: int) -> "FeedFiles":
        """Return part `index` of `of` about equal parts, in order."""
        first, rows = self.first, len(self)
        return replace(self, first=first + rows * index // of, last=first + rows * (index + 1) // of)

    def __iter__(self) -> Iterator[Batch]:
        start = 0
        for path, rows in self.files:
            if self.first < self.last and start < self.last and start + rows > self.first:
                yield from _read(path, self.slots, max(self.first - start, 0), min(self.last - start, rows))
            start += rows

    def __str__(self) -> str:
        return f"rows {self.first:,} to {self.last:,} of the data in memory"


def write_rows(parts: Iterable[Batch], folder: Path) -> FeedFiles:
    """Write the rows of some batches to files in `folder`."""
    digest = hashlib.blake2b(digest_size=16)
    files: list[tuple[str, int]] = []
    chunks = _chunks(parts)
    chunk, slots = next(chunks, None), 0
    while chunk is not None:
        path, rows = folder / f"rows-{len(files):05d}.arrow", 0
        slots, schema = chunk.slots, _schema(chunk)
        with writing(path) as temporary, pa.OSFile(str(temporary), "wb") as sink, pa.ipc.new_file(sink, schema) as out:
            while chunk is not None and rows < FILE_ROWS:
                columns = _columns(chunk)
                for array in columns.values():
                    digest.update(np.ascontiguousarray(array).tobytes())
                out.write_batch(_pack(chunk, columns, schema))
                rows += len(chunk)
                chunk = next(chunks, None)
        files.append((str(path), rows))
    return FeedFiles(tuple(files), digest.hexdigest(), slots, 0, sum(rows for _, rows in files))


def _chunks(parts: Iterable[Batch]) -> Iterator[Batch]:
    for part in parts:
        for start in range(0, len(part), CHUNK_ROWS):
            yield part[start : start + CHUNK_ROWS]


def _schema(batch: Batch) -> pa.Schema:
    """Return the columns of a file: a row each, with all its keys. Null columns are absent in the batch."""
    dense = pa.list_(pa.float32(), batch.dense.shape[1])
    lists = {"keys": pa.large_list(pa.uint64()), "values": pa.large_list(pa.float32()), "counts": pa.list_(pa.int64())}
    sides = {name: _KINDS.get(name, _NUMBER)[0] for name in ROW_COLUMNS}
    if batch.labels is not None and batch.labels.ndim == 2:
        sides |= dict.fromkeys(BY_LABEL, pa.list_(pa.float32(), batch.labels.shape[1]))
    return pa.schema({"dense": dense, **lists, **sides})


def _columns(batch: Batch) -> dict[str, Any]:
    """Return the arrays of a batch by the column they belong to."""
    arrays: dict[str, Any] = {"dense": batch.dense, "keys": batch.keys, "values": batch.values}
    arrays["counts"] = None if batch.one_each else np.diff(batch.offsets)
    arrays |= {name: getattr(batch, name) for name in ROW_COLUMNS}
    return {name: array for name, array in arrays.items() if array is not None}


def _pack(batch: Batch, columns: dict[str, Any], schema: pa.Schema) -> pa.RecordBatch:
    rows = len(batch)
    ends = pa.array(batch.offsets[:: batch.slots] if batch.slots else np.zeros(rows + 1, np.int64), pa.int64())
    arrays = []
    for field in schema:
        array = columns.get(field.name)
        if array is not None and array.ndim == 2:
            flat = pa.array(np.ascontiguousarray(array).reshape(-1), pa.float32())
            width = array.shape[1]
            column = pa.FixedSizeListArray.from_arrays(flat, width) if width else pa.array([[]] * rows, field.type)
        elif array is None:
            column = pa.nulls(rows, field.type)
        elif field.name == "counts":
            each = pa.array(np.arange(rows + 1, dtype=np.int32) * batch.slots)
            column = pa.ListArray.from_arrays(each, pa.array(array, pa.int64()))
        elif field.name in ("keys", "values"):
            column = pa.LargeListArray.from_arrays(ends, pa.array(array, field.type.value_type))
        else:
            column = pa.array(array, field.type)
        arrays.append(column)
    return pa.record_batch(arrays, schema=schema)


def _read(path: str, slots: int, first: int, last: int) -> Iterator[Batch]:
    """Yield the rows of a file from `first` to before `last`."""
    with reading(path), pa.memory_map(path) as source:
        start = 0
        for table in IpcReader(source, is_file=True):
            if start < last and start + len(table) > first:
                yield _unpack(table, slots)[max(first - start, 0) : min(last - start, len(table))]
            start += len(table)


def _unpack(table: pa.RecordBatch, slots: int) -> Batch:
    rows = len(table)
    counts, values = table.column("counts"), table.column("values")
    offsets: Any = None
    if not counts.null_count:
        offsets = np.concatenate((np.zeros(1, np.int64), np.cumsum(numbers(counts.values, np.int64))))
    sides = {}
    for name in ROW_COLUMNS:
        if not (column := table.column(name)).null_count:
            several = pa.types.is_fixed_size_list(column.type)
            side = numbers(column.values if several else column, _KINDS.get(name, _NUMBER)[1]).copy()
            sides[name] = side.reshape(rows, column.type.list_size) if several else side
    dense = table.column("dense")
    return Batch(
        numbers(dense.values, np.float32).reshape(rows, dense.type.list_size).copy(),
        numbers(table.column("keys").values, np.uint64).copy(),
        slots,
        offsets,
        values=None if values.null_count else numbers(values.values, np.float32).copy(),
        **sides,
    )
