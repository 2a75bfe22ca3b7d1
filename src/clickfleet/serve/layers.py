"""Row files of published entries as layers that can be read at once, and merges of layers into new files.

A merged folder holds `rows.arrow` and `deleted.arrow` like an entry, so one reader opens both.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from clickfleet import _core
from clickfleet.arrow_files import batches
from clickfleet.errors import CheckpointError
from clickfleet.published import BATCH_ROWS, DELETED, ROWS

Rows = Literal["mapped", "memory"]
Layer = Any
"""`_core.FrozenLayer`."""

NO_SLOT = np.uint16(0xFFFF)
_LAST_HASH = 2**64 - 1


def open_layer(folder: Path | str, factors: int, rows: Rows = "mapped") -> Layer:
    """The rows and deleted keys of an entry or merged folder."""
    folder = Path(folder)
    full, brief, memory = [], [], []
    for batch in _batches(folder / "rows.arrow", ROWS, rows):
        _check(batch, folder / "rows.arrow")
        keys, weights = _numbers(batch.column("key"), np.uint64), _numbers(batch.column("embed_w"), np.float32)
        lists = batch.column("embedx")
        values = _numbers(lists.values, np.float32)[lists.offsets[0].as_py() : lists.offsets[-1].as_py()]
        memory.append(batch)
        if len(values) not in (0, len(keys) * factors):
            raise CheckpointError(f"{folder / 'rows.arrow'} mixes short and full rows, or rows of another width")
        if factors and len(values):
            full.append((keys, weights, values.reshape(len(keys), factors)))
        else:
            brief.append((keys, weights))
    gone = []
    for batch in _batches(folder / "deleted.arrow", DELETED, rows):
        _check(batch, folder / "deleted.arrow")
        gone.append(_numbers(batch.column("key"), np.uint64))
    deleted = _by_hash(gone)
    if len(deleted) != sum(map(len, gone)):
        raise CheckpointError(f"{folder / 'deleted.arrow'} has a key twice")
    try:
        return _core.FrozenLayer(full, brief, deleted, (memory, full, brief, deleted))
    except ValueError as error:
        raise CheckpointError(f"{folder / 'rows.arrow'} is broken: {error}") from None


def _check(batch: pa.RecordBatch, path: Path) -> None:
    """Refuses nulls, and lists that are not all of one length: rows are read by their place."""
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        if column.null_count:
            raise CheckpointError(f"{path} has nulls in {name}")
    if "embedx" in batch.schema.names and batch.num_rows:
        lists = batch.column("embedx")
        steps = np.diff(_numbers(lists.offsets, np.int32))
        if lists.values.null_count or (steps != steps[0]).any() or steps[0] < 0:
            raise CheckpointError(f"{path} mixes short and full rows, or rows of another width")


def _batches(path: Path, schema: pa.Schema, rows: Rows) -> Iterator[pa.RecordBatch]:
    return batches(path, schema, mapped=rows == "mapped")


def _numbers(column: pa.Array, kind: Any) -> Any:
    """The column where it lies; Arrow's own way to NumPy imports pandas first, which takes a second."""
    data = column.buffers()[1]
    if data is None or not len(column):
        return np.empty(0, kind)
    return np.frombuffer(data, kind, len(column), column.offset * np.dtype(kind).itemsize)


def _by_hash(parts: list[Any]) -> Any:
    keys = np.unique(np.concatenate([np.empty(0, np.uint64), *parts]))
    hashes = np.empty_like(keys)
    _core.mix64(keys, hashes)
    return keys[np.argsort(hashes)]


def size(layer: Layer) -> int:
    """Rows and deleted keys of a layer."""
    return int(layer.full_rows + layer.short_rows + layer.deleted)


def write_merged(layers: Sequence[Layer], factors: int, folder: Path, keep_deleted: bool) -> None:
    """Layers, newest first, as one folder; deleted keys are kept where older layers remain below."""
    folder.mkdir()
    deleted: list[Any] = []
    kinds: dict[bool, list[Any]] = {True: [], False: []}  # full or short: parts waiting for a whole batch
    with pa.OSFile(str(folder / "rows.arrow"), "wb") as sink, pa.ipc.new_file(sink, ROWS) as writer:
        for low, high in _ranges(sum(map(size, layers))):
            *full, brief, weights, gone = _core.merge_frozen(list(layers), factors, low, high, keep_deleted)
            deleted.append(gone)
            nothing = np.empty((len(brief), 0), np.float32)
            for kind, columns in ((True, tuple(full)), (False, (brief, weights, nothing))):
                kinds[kind] = _write_whole(writer, [*kinds[kind], columns], factors if kind else 0)
        for kind, parts in kinds.items():
            if parts and len(parts[0][0]):
                writer.write_batch(_record_batch(factors if kind else 0, *parts[0]))
    with pa.OSFile(str(folder / "deleted.arrow"), "wb") as sink, pa.ipc.new_file(sink, DELETED) as writer:
        gone = _arrow(np.concatenate([np.empty(0, np.uint64), *deleted]), pa.uint64())
        writer.write_batch(pa.RecordBatch.from_arrays([gone], schema=DELETED))


def _ranges(rows: int) -> list[tuple[int, int]]:
    """Ranges of hashes that cover all, each with about as many rows as a record batch."""
    n = max(1, -(-rows // BATCH_ROWS))
    edges = [i * (_LAST_HASH + 1) // n for i in range(n + 1)]
    return [(low, high - 1) for low, high in pairwise(edges)]


def _write_whole(writer: Any, parts: list[Any], factors: int) -> list[Any]:
    joined = tuple(np.concatenate(columns) for columns in zip(*parts, strict=True))
    while len(joined[0]) >= BATCH_ROWS:
        writer.write_batch(_record_batch(factors, *(column[:BATCH_ROWS] for column in joined)))
        joined = tuple(column[BATCH_ROWS:] for column in joined)
    return [joined]


def _record_batch(factors: int, keys: Any, weights: Any, rows: Any) -> pa.RecordBatch:
    offsets = _arrow(np.arange(len(keys) + 1, dtype=np.int32) * np.int32(factors), pa.int32())
    lists = pa.ListArray.from_arrays(offsets, _arrow(rows.reshape(-1), pa.float32()), type=ROWS.field("embedx").type)
    slots = _arrow(np.full(len(keys), NO_SLOT), pa.uint16())
    columns = [_arrow(keys, pa.uint64()), slots, _arrow(weights, pa.float32()), lists]
    return pa.RecordBatch.from_arrays(columns, schema=ROWS)


def _arrow(values: Any, kind: pa.DataType) -> pa.Array:
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(np.ascontiguousarray(values))])
