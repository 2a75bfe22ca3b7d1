"""Open the row files of published entries as layers, and merge layers into new files.

A merged folder has `rows.arrow` and `deleted.arrow` like an entry, so the same code opens both. Layers of one small format are merged
into that format, record by record. Layers of several formats are merged into float32, which holds all of them exactly.
"""

import os
import shutil
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import ExitStack, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa

from clickfleet import _core
from clickfleet.data import arrow_ipc
from clickfleet.data.arrow_ipc import batches, numbers
from clickfleet.errors import CheckpointError
from clickfleet.store import row_format
from clickfleet.store.published import BATCH_ROWS, DELETED, Entry
from clickfleet.store.row_format import FULL, ROWS, RowFormat
from clickfleet.store.table import NO_SLOT, sort_by_hash

Rows = Literal["mapped", "memory"]
Layer = Any
"""`_core.FrozenLayer`."""

_HASHES = 2**64


def open_layer(folder: Path | str, factors: int, rows: Rows = "mapped") -> Layer:
    """Open the rows and deleted keys of an entry or merged folder."""
    folder, mapped = Path(folder), rows == "mapped"
    form = row_format.format_of(arrow_ipc.schema_of(folder / FULL), factors)
    if form is None:
        raise CheckpointError(f"{folder / FULL} does not have the columns that this version of clickfleet writes")
    deleted = _open_deleted(folder / "deleted.arrow", mapped)
    try:
        if form == "float32":
            full, short, memory = _open_floats(folder / FULL, factors, mapped)
            return _core.FrozenLayer(full, short, deleted, (memory, full, short, deleted))
        parts: dict[bool, list[tuple[Any, Any]]] = {False: [], True: []}  # short and full rows
        kept: list[pa.RecordBatch] = []
        for name, width in row_format.widths_of(sorted(os.listdir(folder)), factors).items():
            records, memory = _open_records(folder / name, form, width, mapped)
            parts[width > 0] += records
            kept += memory
        return _core.FrozenLayer.small(form, factors, parts[True], parts[False], deleted, (kept, parts, deleted))
    except ValueError as error:
        raise CheckpointError(f"{folder / FULL} is broken: {error}") from None


def _open_floats(path: Path, factors: int, mapped: bool) -> tuple[list[Any], list[Any], list[pa.RecordBatch]]:
    """Return the parts of full rows and of short rows, and what keeps their memory."""
    full, short, memory = [], [], []
    for batch in batches(path, ROWS, mapped=mapped):
        keys, weights = numbers(batch.column("key"), np.uint64), numbers(batch.column("embed_w"), np.float32)
        lists = batch.column("embedx")
        values = numbers(lists.values, np.float32)[lists.offsets[0].as_py() : lists.offsets[-1].as_py()]
        widths = np.diff(numbers(lists.offsets, np.int32))
        uniform = (widths == widths[:1]).all() and (widths >= 0).all()  # rows are read by position
        memory.append(batch)
        if lists.values.null_count or not uniform or len(values) > len(keys) * factors:
            raise CheckpointError(f"{path} mixes rows of several widths, or has rows that are too wide")
        if len(values):
            full.append((keys, weights, values.reshape(len(keys), -1)))
        else:
            short.append((keys, weights))
    return full, short, memory


def _open_records(
    path: Path, form: RowFormat, factors: int, mapped: bool
) -> tuple[list[tuple[Any, Any]], list[pa.RecordBatch]]:
    """Return the parts of small rows, and what keeps their memory."""
    parts = [part for part in row_format.read_records(path, form, factors, mapped=mapped) if len(part.keys)]
    return [(part.keys, part.records) for part in parts], [part.memory for part in parts]


def _open_deleted(path: Path, mapped: bool) -> Any:
    parts = [numbers(batch.column("key"), np.uint64) for batch in batches(path, DELETED, mapped=mapped)]
    deleted = sort_by_hash(np.unique(np.concatenate([np.empty(0, np.uint64), *parts])))
    if len(deleted) != sum(map(len, parts)):
        raise CheckpointError(f"{path} contains a key twice")
    return deleted


def size(layer: Layer) -> int:
    """Return the number of rows and deleted keys of a layer."""
    return int(layer.full_rows + layer.short_rows + layer.deleted)


def formats(layers: Sequence[Layer]) -> set[RowFormat]:
    """Return the formats of the rows of layers."""
    return {layer.format for layer in layers if layer.full_rows or layer.short_rows}


def write_merged(layers: Sequence[Layer], factors: int, folder: Path, keep_deleted: bool) -> None:
    """Merge layers, newest first, into one folder. Deleted keys must be kept if older layers remain below."""
    folder.mkdir()
    found = formats(layers)
    form: RowFormat = found.pop() if len(found) == 1 else "float32"
    merge = _core.merge_frozen if form == "float32" else _core.merge_records
    deleted: list[Any] = []
    with ExitStack() as opened:
        kinds = {factors: _MergedKind(opened, folder / FULL, form, factors)}
        kinds[factors].open()
        for low, high in _ranges(sum(map(size, layers))):
            full, short, values, deleted_keys = merge(list(layers), factors, low, high, keep_deleted)
            deleted.append(deleted_keys)
            none = [np.empty((len(short), 0), np.float32)] if form == "float32" else []
            for width, *columns in (*full, (0, short, values, *none)):
                if width not in kinds:
                    shared = kinds[factors] if form == "float32" else None
                    kinds[width] = _MergedKind(
                        opened, folder / row_format.file_name(width, factors), form, width, shared
                    )
                kinds[width].add(columns)
        for kind in kinds.values():
            kind.finish()
    with pa.OSFile(str(folder / "deleted.arrow"), "wb") as sink, pa.ipc.new_file(sink, DELETED) as writer:
        deleted_keys = _arrow(np.concatenate([np.empty(0, np.uint64), *deleted]), pa.uint64())
        writer.write_batch(pa.RecordBatch.from_arrays([deleted_keys], schema=DELETED))


class _MergedKind:
    """Writes merged rows of one kind. Its file is made with the first of them, unless it shares that of the other kind."""

    def __init__(
        self, opened: ExitStack, path: Path, form: RowFormat, factors: int, shared: "_MergedKind | None" = None
    ) -> None:
        self._opened, self._path, self._shared, self._factors = opened, path, shared, factors
        self._schema = ROWS if form == "float32" else row_format.schema(form, factors)
        self._columns: list[Any] = []
        """Columns of the rows that are not written yet."""
        self._writer: Any = None

    def open(self) -> Any:
        if self._shared is not None:
            return self._shared.open()
        if self._writer is None:
            sink = self._opened.enter_context(pa.OSFile(str(self._path), "wb"))
            self._writer = self._opened.enter_context(pa.ipc.new_file(sink, self._schema))
        return self._writer

    def add(self, columns: list[Any]) -> None:
        """Add rows, and write those that fill record batches."""
        if self._columns:
            columns = [np.concatenate(parts) for parts in zip(self._columns, columns, strict=True)]
        while len(columns[0]) >= BATCH_ROWS:
            self._write([column[:BATCH_ROWS] for column in columns])
            columns = [column[BATCH_ROWS:] for column in columns]
        self._columns = columns

    def finish(self) -> None:
        """Write the rest."""
        if self._columns and len(self._columns[0]):
            self._write(self._columns)

    def _write(self, columns: list[Any]) -> None:
        if self._schema == ROWS:
            batch = _record_batch(self._factors, *columns)
        else:
            keys, records = columns
            batch = row_format.record_batch(self._schema, keys, np.full(len(keys), NO_SLOT, np.uint16), records)
        self.open().write_batch(batch)


def _ranges(rows: int) -> list[tuple[int, int]]:
    """Split all hashes into ranges, each with about as many rows as a record batch."""
    n = max(1, -(-rows // BATCH_ROWS))
    edges = [i * _HASHES // n for i in range(n + 1)]
    return [(low, high - 1) for low, high in pairwise(edges)]


def _record_batch(factors: int, keys: Any, weights: Any, rows: Any) -> pa.RecordBatch:
    offsets = _arrow(np.arange(len(keys) + 1, dtype=np.int32) * np.int32(factors), pa.int32())
    lists = pa.ListArray.from_arrays(offsets, _arrow(rows.reshape(-1), pa.float32()), type=ROWS.field("embedx").type)
    slots = _arrow(np.full(len(keys), NO_SLOT, np.uint16), pa.uint16())
    columns = [_arrow(keys, pa.uint64()), slots, _arrow(weights, pa.float32()), lists]
    return pa.RecordBatch.from_arrays(columns, schema=ROWS)


def _arrow(values: Any, kind: pa.DataType) -> pa.Array:
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(np.ascontiguousarray(values))])


MAX_OVERLAYS = 4
"""Overlays of a version. More are merged."""
MOST_OVERLAYS = 12
"""Overlays while a large merge is in progress. Beyond it, the next delta waits for the merge."""
QUICK_ROWS = 1 << 15
"""Rows that are merged at once, in a few milliseconds. Larger merges are left to a thread."""
MERGE_NICENESS = 10


class _Merge(NamedTuple):
    """A merge in progress."""

    folders: list[str]
    """What is merged, newest first."""
    result: Path
    layer: Future[Layer]


class Stack:
    """The layers of a version, newest first. It merges them when there are too many: a small delta costs a small merge.

    A large merge runs in a thread of low priority while further deltas are pushed. `take_merged` puts its result in place.
    """

    def __init__(self, state: Path) -> None:
        self.state = state
        self.folders: list[str] = []
        self.opened: dict[str, Layer] = {}
        self._prepared: tuple[str, Layer] | None = None
        """The layer of the delta that is expected next, by the hash of its entry."""
        self._merges = 0
        self._merge: _Merge | None = None
        self._thread = ThreadPoolExecutor(1, "clickfleet-merge", _lower_priority)
        self._unused = [(time.monotonic(), folder) for folder in state.glob("merged-*")]  # left by an earlier updater

    def start(self, base: Entry, rows: Rows) -> None:
        self.folders = [str(base.path)]
        self._open(base.path, int(base.manifest["factors"]), rows)

    def prepare(self, delta: Entry, rows: Rows) -> None:
        """Open the layer of a delta that will perhaps be pushed."""
        self._prepared = delta.hash, open_layer(delta.path, int(delta.manifest["factors"]), rows)

    def push(self, delta: Entry, rows: Rows) -> None:
        """Put a delta on top. Call `tidy` before the next one."""
        self.folders = [str(delta.path), *self.folders]
        factors = int(delta.manifest["factors"])
        if self._prepared is not None and self._prepared[0] == delta.hash:
            self.opened[str(delta.path)] = self._prepared[1]
        self._prepared = None
        for folder in self.folders:
            self._open(Path(folder), factors, rows)

    def tidy(self, factors: int, rows: Rows) -> None:
        """Merge what can be merged quickly, until there is room for one more delta."""
        while self._reduce(factors, rows):
            pass

    def take_merged(self, wait: bool = False) -> bool:
        """Replace the folders of a merge that has ended by its result. Return whether there was one."""
        merge = self._merge
        if merge is None or not (wait or merge.layer.done()):
            return False
        self._merge = None
        at = next((i for i, folder in enumerate(self.folders) if folder == merge.folders[0]), None)
        if at is None or self.folders[at : at + len(merge.folders)] != merge.folders:  # another model is served by now
            wait_for([merge.layer])
            self._unused.append((time.monotonic(), merge.result))
            return False
        self._replace(merge.folders, merge.result, merge.layer.result())
        return True

    def _reduce(self, factors: int, rows: Rows) -> bool:
        """Merge some layers unless there is room for another. Return whether there may still be none."""
        self.take_merged()
        merging = [] if self._merge is None else self._merge.folders
        overlays = self.folders[:-1]
        if sum(folder not in merging for folder in overlays) < MAX_OVERLAYS - bool(merging):
            return False
        choice = self._choose(merging)
        if choice is not None and sum(size(self.opened[folder]) for folder in choice) <= QUICK_ROWS:
            result = self._new_folder()
            self._replace(choice, result, self._merged(choice, self._keeps_deleted(choice), result, factors, rows))
            return True
        if choice is not None and not merging:
            result = self._new_folder()
            work = self._thread.submit(self._merged, choice, self._keeps_deleted(choice), result, factors, rows)
            self._merge = _Merge(choice, result, work)
            return True
        return len(overlays) > MOST_OVERLAYS and self.take_merged(wait=True)

    def _choose(self, merging: list[str]) -> list[str] | None:
        """Return which neighbours to merge: the two smallest, or all layers when the overlays outweigh half of the base."""
        sizes = [size(self.opened[folder]) for folder in self.folders]
        if not merging and sum(sizes[:-1]) > sizes[-1] // 2:
            return list(self.folders)
        pairs = [i for i in range(len(sizes) - 2) if not {*self.folders[i : i + 2]} & {*merging}]
        at = min(pairs, key=lambda i: sizes[i] + sizes[i + 1], default=None)
        return None if at is None else self.folders[at : at + 2]

    def _keeps_deleted(self, folders: list[str]) -> bool:
        return folders[-1] != self.folders[-1]

    def _new_folder(self) -> Path:
        self._merges += 1
        return self.state / f"merged-{os.getpid()}-{self._merges:06d}"

    def _merged(self, folders: list[str], keep_deleted: bool, result: Path, factors: int, rows: Rows) -> Layer:
        write_merged([self.opened[name] for name in folders], factors, result, keep_deleted)
        return open_layer(result, factors, rows)

    def _replace(self, folders: list[str], result: Path, layer: Layer) -> None:
        at = self.folders.index(folders[0])
        self.folders = [*self.folders[:at], str(result), *self.folders[at + len(folders) :]]
        self.opened[str(result)] = layer
        for path in map(Path, folders):
            if path.parent == self.state:
                self._unused.append((time.monotonic(), path))

    def _open(self, folder: Path, factors: int, rows: Rows) -> None:
        if str(folder) not in self.opened:
            self.opened[str(folder)] = open_layer(folder, factors, rows)

    def remove_unused(self, keep_s: float = 30.0) -> None:
        """Remove merged folders that no version has used for a while. A process that mapped them keeps the data."""
        now = time.monotonic()
        merging = [] if self._merge is None else self._merge.folders
        for since, folder in list(self._unused):
            if now - since > keep_s and str(folder) not in self.folders and str(folder) not in merging:
                shutil.rmtree(folder, ignore_errors=True)
                self._unused.remove((since, folder))
        used = {*self.folders, *merging}
        self.opened = {folder: layer for folder, layer in self.opened.items() if folder in used}

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)


def _lower_priority() -> None:
    """Leave the processor to requests. Only Linux has a priority per thread."""
    if sys.platform.startswith("linux"):
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), MERGE_NICENESS)
