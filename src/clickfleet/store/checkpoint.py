"""Checkpoints: everything a run needs to resume, one folder per step.

    <folder>/step-000000001200/  manifest.json  rows-00000-of-00008.arrow …  changed.arrow
                                 dense.safetensors  optimizer.safetensors  metrics.safetensors  state.json  config.yaml
    <folder>/LATEST              name of the newest checkpoint, and the hash of its manifest; two while it is being replaced
    <folder>/EPOCH-0003          the same for the end of epoch 3 (counted from 0); this checkpoint is kept
    <folder>/BEST                the same for the best test AUC so far; this checkpoint is kept

Row files are Arrow IPC files, so DuckDB, Polars or pandas can query a model. Row file i of n holds the virtual shards `span(i, n)`: those
from i·1024/n to (i+1)·1024/n. n is a power of two up to 32; a cluster with more shards writes one file per shard. The virtual shard of a
row is mix64(key) mod 1024. A record batch holds either short rows (without
factors) or full rows, of slots with the same width, rules and admission; each kind ascends by mix64(key) through the file. Columns,
all without nulls:

    key uint64 · slot uint16 (65535: none) · show float64 · click float64 · unseen_days uint16 · delta_score float32
    published uint8 (1: consumers of the published log have the row) · embed_w float32 · embed_state list<float32>
    embedx list<float32> (empty in a short row) · embedx_state list<float32> (likewise)

`changed.arrow` holds what the next publication must contain: key uint64, deleted bool. The manifest holds the table's description, its
numbers of rows and whether anything was published. Under a memory limit it also holds how each shard used its memory (`memory`). With
the same limit and number of shards, a resumed run then evicts the same rows as an uninterrupted one. Which rows were in memory and
which on disk is not saved: a checkpoint loads into any table, with or without rows on disk.

A checkpoint of a training run also has these files, all of the same moment between two steps:

    dense.safetensors       parameters and buffers of the network by their names in torch
    optimizer.safetensors   `steps`, and per parameter what the optimizer keeps: `mean/<name>`, `square/<name>` …
    metrics.safetensors     sums for the training metrics
    state.json              step, rows, epoch, the reader's position, random state, early stopping, arrangement of threads
    config.yaml             the configuration of the run, every path absolute

and `schema`, `model` and `step` in its manifest. A checkpoint without these is only a table. A checkpoint is written atomically and has
checksums (atomic.py). Loading and saving it again gives the same bytes.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

from clickfleet import _core
from clickfleet.data import arrow_ipc
from clickfleet.data.arrow_ipc import FLOATS, batches, columns
from clickfleet.data.files import inside
from clickfleet.errors import CheckpointError
from clickfleet.store import atomic
from clickfleet.store.table import MAX_CLASSES, NO_SLOT, Columns, Snapshot, Table, mix64

LATEST, BEST = "LATEST", "BEST"
MAX_SHARDS = _core.VIRTUAL_SHARDS
"""Largest number of shards, and of row files: a virtual shard is not divided."""
SPLIT_FILES = 32
"""Largest number of row files that one table writes, a power of two."""
T = TypeVar("T")
_STEP = re.compile(r"^step-(\d{12})$")
_EPOCH = re.compile(r"^EPOCH-(\d{4,})$")

ROWS = columns(
    {
        "key": pa.uint64(),
        "slot": pa.uint16(),
        "show": pa.float64(),
        "click": pa.float64(),
        "unseen_days": pa.uint16(),
        "delta_score": pa.float32(),
        "published": pa.uint8(),
        "embed_w": pa.float32(),
        "embed_state": FLOATS,
        "embedx": FLOATS,
        "embedx_state": FLOATS,
    }
)
CHANGED = columns({"key": pa.uint64(), "deleted": pa.bool_()})
MEMORY = ("memory_limit", "snapshot_reserve")
"""Settings in a table's description that bound its memory."""
DISK = ("disk", "disk_limit")
"""Settings of the machine that holds the table."""
LOADED_ROWS = 1 << 20
"""Rows that are loaded at once into a table with rows on disk. Each time makes new files."""
_LISTS = ("embed_state", "embedx", "embedx_state")


def save(
    table: Table,
    path: Path | str,
    *,
    files: int = 8,
    attached: Mapping[str, bytes] | None = None,
    snapshot: Snapshot | None = None,
    **facts: Any,
) -> Path:
    """Write the table as it is now, or as it was when `snapshot` was taken with the same `files`. Other threads may keep using it.

    `attached` holds further files by name.
    """
    path = Path(path)
    with (
        atomic.write_folder(path, "checkpoint") as out,
        table.snapshot(files) if snapshot is None else nullcontext(snapshot) as rows,
    ):
        for name, content in (attached or {}).items():
            out.put(name, content)
        counts = write_rows(out.file, rows, files, range(files))
        write_changed(out, rows.changed, rows.deleted)
        out.facts = {
            "table": portable(table.describe()),
            **count_facts([counts]),
            "row_files": files,
            "tracking": rows.tracking,
            **memory_facts([rows.memory]),
            **facts,
        }
    return path


def portable(description: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the manifest holds of a table's description. With rows on disk, a memory limit has no influence on the rows.

    >>> portable({"factors": 1, "memory_limit": 8, "snapshot_reserve": 1, "disk": "/x", "disk_limit": None})
    {'factors': 1, 'memory_limit': None, 'snapshot_reserve': 0}
    """
    kept = {key: value for key, value in description.items() if key not in DISK and value != {}}
    return kept if "disk" not in description else {**kept, "memory_limit": None, "snapshot_reserve": 0}


def count_facts(of_shards: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Return the manifest's numbers of rows, from those of each kind on each shard.

    >>> count_facts([[1, 2], [3, 4]]), count_facts([[1, 2, 3, 4]])
    ({'short_rows': 4, 'full_rows': 6}, {'short_rows': 4, 'full_rows': 6, 'kind_rows': [1, 2, 3, 4]})
    """
    counts = [sum(kind) for kind in zip_longest(*of_shards, fillvalue=0)]
    kinds = {"kind_rows": counts} if len(counts) > 2 else {}
    return {"short_rows": sum(counts[::2]), "full_rows": sum(counts[1::2]), **kinds}


def memory_facts(of_shards: list[list[int] | None]) -> dict[str, list[list[int] | None]]:
    """Return the manifest's facts on how each shard used its memory; empty without a memory limit."""
    return {"memory": of_shards} if None not in of_shards else {}


def span(shard: int, shards: int) -> tuple[int, int]:
    """Return the range of virtual shards of shard `shard` of `shards`, and of a row file. No two shards share a row file.

    >>> span(0, 3), span(1, 3), span(2, 3)
    ((0, 320), (320, 672), (672, 1024))
    """
    pieces = SPLIT_FILES if shards <= SPLIT_FILES else _core.VIRTUAL_SHARDS
    first, last = (pieces * s // shards * (_core.VIRTUAL_SHARDS // pieces) for s in (shard, shard + 1))
    return first, last


def row_files(shards: int) -> int:
    """Return the number of row files of a cluster's checkpoint: the smallest from 8 on that gives each shard whole files.

    >>> row_files(2), row_files(3), row_files(16), row_files(48)
    (8, 32, 16, 48)
    """
    if shards > SPLIT_FILES:
        return shards
    edges = [span(shard, shards)[0] for shard in range(shards)]
    return next(n for n in (8, 16, 32) if all(edge * n % _core.VIRTUAL_SHARDS == 0 for edge in edges))


def files_within(first: int, last: int, files: int) -> list[int]:
    """Return the row files, of `files`, that hold virtual shards from `first` to before `last`.

    >>> files_within(0, 320, 8), files_within(320, 672, 8), files_within(0, 43, 48)
    ([0, 1, 2], [2, 3, 4, 5], [0, 1, 2])
    """
    spans = (span(file, files) for file in range(files))
    return [file for file, (begin, end) in enumerate(spans) if begin < last and end > first]


def load(path: Path | str, *, shard: int = 0, shards: int = 1, **changes: Any) -> Table:
    """Load the table of a checkpoint, or the part that belongs to shard `shard` of `shards`. `changes` override its description."""
    path = Path(path)
    if not 0 <= shard < shards <= _core.VIRTUAL_SHARDS:
        raise CheckpointError(
            f"invalid shard {shard} of {shards}", f"shards are numbered from 0; {_core.VIRTUAL_SHARDS} at most"
        )
    manifest = verify(path)
    with atomic.damage_errors(path):
        return _load(path, manifest, shard, shards, changes)


def _load(path: Path, manifest: atomic.Manifest, shard: int, shards: int, changes: Mapping[str, object]) -> Table:
    table = Table.like({**manifest["table"], **changes})
    first, last = span(shard, shards)
    files = manifest["row_files"]
    if not isinstance(files, int) or not 1 <= files <= MAX_SHARDS:
        raise CheckpointError(f"{path} is damaged: it claims {files} row files")
    stored = sum(facts["bytes"] for facts in manifest["files"].values())
    counts = manifest.get("kind_rows") or [manifest["short_rows"], manifest["full_rows"]]
    if len(counts) > 2 * MAX_CLASSES or not all(0 <= rows <= stored for rows in counts):
        raise CheckpointError(f"{path} is damaged: it claims more rows than its files can hold")
    same_limits = all(changes.get(key, manifest["table"][key]) == manifest["table"][key] for key in MEMORY)
    in_memory = table.disk is None and len(manifest.get("memory", ())) == shards
    memory = manifest["memory"][shard] if same_limits and in_memory else None
    if memory is not None:
        table.core.prepare(memory)
    else:
        wanted = [0] * len(table.core.kinds)
        for kind, rows in zip(_kinds(manifest["table"], table, len(counts)), counts, strict=True):
            wanted[kind] += rows * (last - first) // _core.VIRTUAL_SHARDS
        table.core.reserve(wanted)
    for file in files_within(first, last, files):
        read = batches(path / _name(file, files), ROWS)
        for batch in read if table.disk is None else _joined(table, read):
            _restore(table, batch, first, last)
    changed = pa.Table.from_batches(batches(path / "changed.arrow", CHANGED), CHANGED)
    if manifest["tracking"]:
        keys, deleted = changed["key"].to_numpy(), changed["deleted"].to_numpy()
        virtual_shards = mix64(keys) % _core.VIRTUAL_SHARDS
        in_span = (virtual_shards >= first) & (virtual_shards < last)
        table.core.restore_changes(keys[~deleted & in_span], keys[deleted & in_span])
    if memory is not None:
        table.core.settle(memory)
    return table


def _kinds(saved: Mapping[str, Any], table: Table, kinds: int) -> list[int]:
    """Return the kind in a table of each kind of saved rows. Settings of slots may have changed since."""
    before = Table.like(saved).class_of(np.arange(NO_SLOT + 1).astype(np.uint16))
    slots = [int(np.argmax(before == row_class)) if row_class else NO_SLOT for row_class in range((kinds + 1) // 2)]
    after = table.class_of(np.array(slots, np.uint16)).tolist()
    return [2 * after[kind // 2] + kind % 2 for kind in range(kinds)]


def _joined(table: Table, read: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Join batches of the same kind of rows to larger ones."""
    waiting: defaultdict[tuple[int, int], list[pa.RecordBatch]] = defaultdict(list)
    for batch in read:
        if not batch.num_rows:
            continue
        kind = int(table.class_of(batch.column("slot").to_numpy()[:1])[0]), len(batch.column("embedx").flatten())
        kind = kind[0], kind[1] // batch.num_rows
        waiting[kind].append(batch)
        if sum(one.num_rows for one in waiting[kind]) >= LOADED_ROWS:
            yield from pa.Table.from_batches(waiting[kind]).combine_chunks().to_batches()
            waiting[kind] = []
    for rest in waiting.values():
        yield from pa.Table.from_batches(rest).combine_chunks().to_batches() if rest else ()


def verify(path: Path | str) -> atomic.Manifest:
    """Check every byte of a checkpoint without loading it. Return its manifest."""
    manifest = atomic.read_manifest(path, "checkpoint")
    atomic.verify_files(path, manifest)
    return manifest


def parsed(path: Path | str, name: str, parse: Callable[[bytes], T]) -> T:
    """Read an attached file and parse it."""
    content = read(path, name)
    with atomic.damage_errors(Path(path) / name):
        return parse(content)


def read(path: Path | str, name: str) -> bytes:
    """Read an attached file of a checkpoint. This does not check it; `load` and `verify` do."""
    try:
        return inside(Path(path), name).read_bytes()
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} has no {name}", "it is the checkpoint of a table, not of a training run"
        ) from None
    except OSError as error:
        raise CheckpointError(f"cannot read {Path(path) / name}: {error.strerror}") from error


def write(
    table: Table,
    folder: Path | str,
    step: int,
    *,
    keep: int = 3,
    epoch: int | None = None,
    best: bool = False,
    **contents: Any,
) -> Path:
    """Save the checkpoint of a step, point LATEST (and EPOCH-…, BEST) at it, and remove all but the newest `keep` and the labelled ones."""
    path = save(table, step_folder(folder, step), step=step, **contents)
    register(path, keep, epoch, best)
    return path


def register(path: Path, keep: int, epoch: int | None = None, best: bool = False) -> None:
    """Point LATEST (and EPOCH-…, BEST) at a complete checkpoint, then remove old ones like `write`."""
    make_latest(path)
    if epoch is not None:
        label_epoch(path, epoch)
    if best:
        label_best(path)
    prune(path.parent, keep)


def make_latest(path: Path) -> None:
    """Point LATEST at a checkpoint."""
    _label(path, LATEST)


def label_epoch(path: Path, epoch: int) -> None:
    """Keep a checkpoint as that of an epoch's end."""
    _label(path, f"EPOCH-{epoch:04d}")


def label_best(path: Path) -> None:
    """Keep a checkpoint as the best one; it replaces the previous best."""
    _label(path, BEST)


def _label(path: Path, label: str) -> None:
    manifest = atomic.read_manifest(path, "checkpoint")
    atomic.write_file(path.parent / label, f"{path.name} {atomic.digest(manifest)}\n".encode())


def relabel(path: Path, labels: Iterable[str], *hashes: str) -> None:
    """Point labels at a checkpoint that is being replaced: at any of these hashes, or at what it is now."""
    for label in labels:
        if hashes:
            atomic.write_file(path.parent / label, f"{path.name} {' '.join(hashes)}\n".encode())
        else:
            _label(path, label)


def is_step(name: str) -> bool:
    """Return whether a folder of that name is a checkpoint."""
    return _STEP.match(name) is not None


def is_label(name: str) -> bool:
    """Return whether a file of that name points at a checkpoint."""
    return name in (LATEST, BEST) or _EPOCH.match(name) is not None


def labelled(folder: Path | str, label: str) -> Path:
    """Return the checkpoint that LATEST, BEST or EPOCH-… names, after checking its manifest."""
    folder = Path(folder)
    try:
        name, *hashes = (folder / label).read_text().split()
    except FileNotFoundError:
        raise CheckpointError(f"{folder} holds no checkpoint yet") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder / label} is damaged: {error}") from error
    if not _STEP.match(name) or atomic.digest(atomic.read_manifest(folder / name, "checkpoint")) not in hashes:
        known = ", ".join(step_folder(folder, step).name for step in steps(folder)) or "none"
        raise CheckpointError(
            f"{folder / label} is damaged: it names no valid checkpoint", f"existing checkpoints: {known}"
        )
    return folder / name


def epochs(folder: Path | str) -> dict[int, Path]:
    """Return the checkpoints kept at the ends of epochs, by epoch."""
    return {epoch: labelled(folder, f"EPOCH-{epoch:04d}") for epoch in _numbers(Path(folder), _EPOCH)}


def steps(folder: Path | str) -> list[int]:
    """Return the steps that have a checkpoint, oldest first."""
    return _numbers(Path(folder), _STEP)


def _numbers(folder: Path, pattern: re.Pattern[str]) -> list[int]:
    matches = (pattern.match(path.name) for path in folder.iterdir()) if folder.is_dir() else ()
    return sorted(int(match[1]) for match in matches if match)


def step_folder(folder: Path | str, step: int) -> Path:
    """Return the path of a step's checkpoint."""
    return Path(folder) / f"step-{step:012d}"


def latest(folder: Path | str) -> Path:
    """Return the checkpoint that LATEST names, after checking its manifest. Without LATEST, return the newest complete one."""
    complete = steps(folder)
    if not complete or (Path(folder) / LATEST).exists():
        return labelled(folder, LATEST)
    path = step_folder(folder, complete[-1])  # the run was killed after its first checkpoint, before LATEST
    atomic.read_manifest(path, "checkpoint")
    return path


def chosen(folder: Path | str) -> Path | None:
    """Return the checkpoint that represents a run: the best if it is kept, else the newest. None if there is none."""
    folder = Path(folder)
    label = next((name for name in (BEST, LATEST) if (folder / name).is_file()), None)
    return None if label is None else labelled(folder, label)


def is_named(path: Path, label: str) -> bool:
    """Return whether a label in the checkpoint's folder names it."""
    try:
        return (path.parent / label).read_text().partition(" ")[0] == path.name
    except OSError:
        return False


def forget_best(folder: Path | str) -> bool:
    """Stop keeping the best checkpoint. Return whether there was one."""
    label = Path(folder) / BEST
    existed = label.is_file()
    label.unlink(missing_ok=True)
    return existed


def best(folder: Path | str) -> Path | None:
    """Return the checkpoint kept as the best, or None."""
    return labelled(folder, BEST) if (Path(folder) / BEST).is_file() else None


def prune(folder: Path | str, keep: int) -> list[int]:
    """Remove all but the newest `keep` checkpoints and the labelled ones. Return the removed steps."""
    labelled_paths = {*epochs(folder).values(), best(folder)}
    older = steps(folder)[:-keep] if keep > 0 else []  # 0: keep all
    removed = [step for step in older if step_folder(folder, step) not in labelled_paths]
    for step in removed:
        atomic.remove(step_folder(folder, step))
    return removed


def forget_after(folder: Path | str, step: int) -> None:
    """Remove the checkpoints of later steps, which a killed run wrote but did not register in LATEST."""
    for later in steps(folder):
        if later > step:
            atomic.remove(step_folder(folder, later))


def _name(file: int, files: int) -> str:
    return f"rows-{file:05d}-of-{files:05d}.arrow"


def write_rows(
    file: Callable[[str], atomic.HashedFile], rows: Iterable[Columns], files: int, wanted: Iterable[int]
) -> list[int]:
    """Write the wanted row files, in ascending order. Return the number of rows of each kind. `rows` must not belong to other files."""
    counts: list[int] = [0, 0]
    batches = iter(rows)
    columns = next(batches, None)
    for number in wanted:
        sink = file(_name(number, files))
        with pa.ipc.new_file(sink, ROWS) as writer:
            while columns is not None and columns["file"] == number:
                writer.write_batch(_to_batch(columns))
                counts += [0] * (columns["kind"] // 2 * 2 + 2 - len(counts))
                counts[columns["kind"]] += len(columns["key"])
                columns = next(batches, None)
        sink.close()
    assert columns is None
    return counts


def _to_batch(columns: Columns) -> pa.RecordBatch:
    """Convert columns to Arrow without copying. Checking every value would block other threads, because it holds the GIL."""
    size = len(columns["key"])

    def plain(kind: pa.DataType, values: Any) -> pa.Array:
        return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(values)])

    def column(field: pa.Field) -> pa.Array:
        values = columns[field.name]
        if field.name not in _LISTS:
            return plain(field.type, values)
        offsets = np.arange(size + 1, dtype=np.int32) * np.int32(len(values) // size)
        items = plain(field.type.value_type, values)
        return pa.Array.from_buffers(field.type, size, [None, pa.py_buffer(offsets)], children=[items])

    return pa.RecordBatch.from_arrays([column(field) for field in ROWS], schema=ROWS)


def pack(table: Table) -> bytes:
    """Return all rows of a table as one Arrow IPC file in memory."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, ROWS) as writer, table.snapshot() as rows:
        for part in rows:
            writer.write_batch(_to_batch(part))
    return bytes(sink.getvalue())


def unpack(table: Table, packed: bytes) -> None:
    """Add the rows from `pack` to an empty table of the same width and rules."""
    parts, rows = arrow_ipc.open_bytes(packed), [0] * len(table.core.kinds)
    for batch in parts:
        full = len(batch.column("embedx").flatten()) > 0
        classes = np.bincount(table.class_of(batch.column("slot").to_numpy()), minlength=len(table.classes))
        for row_class, count in enumerate(classes.tolist()):
            rows[2 * row_class + (full or not table.classes[row_class].factors)] += count
    table.core.reserve(rows)
    for batch in parts:
        _restore(table, batch, 0, _core.VIRTUAL_SHARDS)


def keep_rows(rows: Iterable[Columns], table: Table, wanted: Callable[[Columns], Any]) -> None:
    """Copy the wanted rows into another table of the same kind; `wanted` returns a mask."""
    for part in rows:
        batch = _to_batch(part).filter(pa.array(wanted(part)))
        if batch.num_rows:
            _restore(table, batch, 0, _core.VIRTUAL_SHARDS)


def write_changed(out: atomic.FolderWriter, changed: Any, deleted: Any) -> None:
    keys = np.concatenate([changed, deleted])
    flags = np.arange(len(keys)) >= len(changed)
    sink = out.file("changed.arrow")
    with pa.ipc.new_file(sink, CHANGED) as writer:
        writer.write_batch(pa.RecordBatch.from_arrays([pa.array(keys), pa.array(flags)], schema=CHANGED))
    sink.close()


def _restore(table: Table, batch: pa.RecordBatch, first: int, last: int) -> None:
    def column(name: str) -> Any:
        values = batch.column(name)
        return (values.flatten() if name in _LISTS else values).to_numpy()

    put(table, {name: column(name) for name in ROWS.names}, first, last)


def put(table: Table, columns: Columns, first: int = 0, last: int = _core.VIRTUAL_SHARDS) -> None:
    """Add the rows of the given virtual shards to a table. All rows must be short, or all full; the columns are those of row files."""
    rows = len(columns["key"])
    row_classes = table.class_of(columns["slot"])
    if rows and (row_classes != row_classes[0]).any():
        for row_class in np.unique(row_classes):
            put(table, _picked(columns, row_classes == row_class), first, last)
        return
    row_class = int(row_classes[0]) if rows else 0
    full = len(columns["embedx"]) > 0 or table.classes[row_class].factors == 0
    kind = 2 * row_class + full
    for name, width in zip(("embedx", "embed_state", "embedx_state"), table.core.kinds[kind][:3], strict=True):
        if len(columns[name]) != rows * width:
            raise CheckpointError(f"the checkpoint's {name} does not fit the table: expected {width} floats per row")
    table.core.restore(kind, *(columns[name] for name in ROWS.names), first, last)


def _picked(columns: Columns, wanted: Any) -> Columns:
    """Return some of the rows."""
    rows = len(wanted)
    return {
        name: np.ascontiguousarray(values.reshape(rows, -1)[wanted].reshape(-1) if name in _LISTS else values[wanted])
        for name, values in columns.items()
    }


def batches_of(path: Path, key: int, files: int) -> Iterator[pa.RecordBatch]:
    """Yield the rows of the only file that may hold a key."""
    shard = int(mix64(np.array([key], np.uint64))[0]) % _core.VIRTUAL_SHARDS
    return batches(path / _name(files_within(shard, shard + 1, files)[0], files), ROWS)
