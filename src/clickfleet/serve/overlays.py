"""Open the row files of published entries as layers, and merge layers into new files.

A merged folder has `rows.arrow` and `deleted.arrow` like an entry, so the same code opens both.
"""

import os
import shutil
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from clickfleet import _core
from clickfleet.data.arrow_ipc import batches, numbers
from clickfleet.errors import CheckpointError
from clickfleet.store.published import BATCH_ROWS, DELETED, ROWS, Entry
from clickfleet.store.table import NO_SLOT, sort_by_hash

Rows = Literal["mapped", "memory"]
Layer = Any
"""`_core.FrozenLayer`."""

_HASHES = 2**64


def open_layer(folder: Path | str, factors: int, rows: Rows = "mapped") -> Layer:
    """Open the rows and deleted keys of an entry or merged folder."""
    folder = Path(folder)
    full, short, memory = [], [], []
    mapped = rows == "mapped"
    for batch in batches(folder / "rows.arrow", ROWS, mapped=mapped):
        keys, weights = numbers(batch.column("key"), np.uint64), numbers(batch.column("embed_w"), np.float32)
        lists = batch.column("embedx")
        values = numbers(lists.values, np.float32)[lists.offsets[0].as_py() : lists.offsets[-1].as_py()]
        widths = np.diff(numbers(lists.offsets, np.int32))
        uniform = (widths == widths[:1]).all() and (widths >= 0).all()  # rows are read by position
        memory.append(batch)
        if lists.values.null_count or not uniform or len(values) not in (0, len(keys) * factors):
            raise CheckpointError(f"{folder / 'rows.arrow'} mixes short and full rows, or has rows of another width")
        if factors and len(values):
            full.append((keys, weights, values.reshape(len(keys), factors)))
        else:
            short.append((keys, weights))
    deleted_batches = batches(folder / "deleted.arrow", DELETED, mapped=mapped)
    deleted_keys = [numbers(batch.column("key"), np.uint64) for batch in deleted_batches]
    deleted = sort_by_hash(np.unique(np.concatenate([np.empty(0, np.uint64), *deleted_keys])))
    if len(deleted) != sum(map(len, deleted_keys)):
        raise CheckpointError(f"{folder / 'deleted.arrow'} contains a key twice")
    try:
        return _core.FrozenLayer(full, short, deleted, (memory, full, short, deleted))
    except ValueError as error:
        raise CheckpointError(f"{folder / 'rows.arrow'} is broken: {error}") from None


def size(layer: Layer) -> int:
    """Return the number of rows and deleted keys of a layer."""
    return int(layer.full_rows + layer.short_rows + layer.deleted)


def write_merged(layers: Sequence[Layer], factors: int, folder: Path, keep_deleted: bool) -> None:
    """Merge layers, newest first, into one folder. Deleted keys must be kept if older layers remain below."""
    folder.mkdir()
    deleted: list[Any] = []
    kinds: dict[bool, list[Any]] = {True: [], False: []}  # full or short: rows not written yet
    with pa.OSFile(str(folder / "rows.arrow"), "wb") as sink, pa.ipc.new_file(sink, ROWS) as writer:
        for low, high in _ranges(sum(map(size, layers))):
            *full, short, weights, deleted_keys = _core.merge_frozen(list(layers), factors, low, high, keep_deleted)
            deleted.append(deleted_keys)
            nothing = np.empty((len(short), 0), np.float32)
            for kind, columns in ((True, tuple(full)), (False, (short, weights, nothing))):
                kinds[kind] = _write_full_batches(writer, [*kinds[kind], columns], factors if kind else 0)
        for kind, parts in kinds.items():
            if parts and len(parts[0][0]):
                writer.write_batch(_record_batch(factors if kind else 0, *parts[0]))
    with pa.OSFile(str(folder / "deleted.arrow"), "wb") as sink, pa.ipc.new_file(sink, DELETED) as writer:
        deleted_keys = _arrow(np.concatenate([np.empty(0, np.uint64), *deleted]), pa.uint64())
        writer.write_batch(pa.RecordBatch.from_arrays([deleted_keys], schema=DELETED))


def _ranges(rows: int) -> list[tuple[int, int]]:
    """Split all hashes into ranges, each with about as many rows as a record batch."""
    n = max(1, -(-rows // BATCH_ROWS))
    edges = [i * _HASHES // n for i in range(n + 1)]
    return [(low, high - 1) for low, high in pairwise(edges)]


def _write_full_batches(writer: Any, parts: list[Any], factors: int) -> list[Any]:
    joined = tuple(np.concatenate(columns) for columns in zip(*parts, strict=True))
    while len(joined[0]) >= BATCH_ROWS:
        writer.write_batch(_record_batch(factors, *(column[:BATCH_ROWS] for column in joined)))
        joined = tuple(column[BATCH_ROWS:] for column in joined)
    return [joined]


def _record_batch(factors: int, keys: Any, weights: Any, rows: Any) -> pa.RecordBatch:
    offsets = _arrow(np.arange(len(keys) + 1, dtype=np.int32) * np.int32(factors), pa.int32())
    lists = pa.ListArray.from_arrays(offsets, _arrow(rows.reshape(-1), pa.float32()), type=ROWS.field("embedx").type)
    slots = _arrow(np.full(len(keys), NO_SLOT, np.uint16), pa.uint16())
    columns = [_arrow(keys, pa.uint64()), slots, _arrow(weights, pa.float32()), lists]
    return pa.RecordBatch.from_arrays(columns, schema=ROWS)


def _arrow(values: Any, kind: pa.DataType) -> pa.Array:
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(np.ascontiguousarray(values))])


MAX_OVERLAYS = 4


class Stack:
    """The layers of a version, newest first. It merges them when there are too many."""

    def __init__(self, state: Path) -> None:
        self.state = state
        self.folders: list[str] = []
        self.opened: dict[str, Layer] = {}
        self._merges = 0
        self._unused = [(time.monotonic(), folder) for folder in state.glob("merged-*")]  # left by an earlier updater

    def start(self, base: Entry, rows: Rows) -> None:
        self.folders = [str(base.path)]
        self._open(base.path, int(base.manifest["factors"]), rows)

    def push(self, delta: Entry, rows: Rows) -> None:
        factors = int(delta.manifest["factors"])
        self.folders = [str(delta.path), *self.folders]
        for folder in self.folders:
            self._open(Path(folder), factors, rows)
        while len(self.folders) - 1 > MAX_OVERLAYS:
            sizes = [size(self.opened[folder]) for folder in self.folders]
            if sum(sizes[:-1]) > sizes[-1] // 2:
                self._merge(0, len(self.folders), factors, rows)
            else:  # the two cheapest neighbours
                at = min(range(len(sizes) - 2), key=lambda i: sizes[i] + sizes[i + 1])
                self._merge(at, at + 2, factors, rows)

    def _open(self, folder: Path, factors: int, rows: Rows) -> None:
        if str(folder) not in self.opened:
            self.opened[str(folder)] = open_layer(folder, factors, rows)

    def _merge(self, first: int, last: int, factors: int, rows: Rows) -> None:
        self._merges += 1
        folder = self.state / f"merged-{os.getpid()}-{self._merges:06d}"
        merged = self.folders[first:last]
        write_merged([self.opened[name] for name in merged], factors, folder, keep_deleted=last < len(self.folders))
        self._open(folder, factors, rows)
        self.folders = [*self.folders[:first], str(folder), *self.folders[last:]]
        for path in map(Path, merged):
            if path.parent == self.state:
                self._unused.append((time.monotonic(), path))

    def remove_unused(self, keep_s: float = 30.0) -> None:
        """Remove merged folders that no version has used for a while. A process that mapped them keeps the data."""
        now = time.monotonic()
        for since, folder in list(self._unused):
            if now - since > keep_s and str(folder) not in self.folders:
                shutil.rmtree(folder, ignore_errors=True)
                self._unused.remove((since, folder))
        self.opened = {folder: layer for folder, layer in self.opened.items() if folder in self.folders}
