"""Checkpoints: everything training needs to go on, as a directory per step.

    <folder>/step-000000001200/  manifest.json  rows-00000-of-00008.arrow …  changed.arrow
                                 dense.safetensors  optimizer.safetensors  metrics.safetensors  state.json  config.yaml
    <folder>/LATEST              the newest one's name and the hash of its manifest
    <folder>/EPOCH-0003          the same of the one at the end of epoch 3 (counted from 0), which is kept
    <folder>/BEST                the same of the one with the best test AUC so far, which is kept

Row files are Arrow IPC files, so DuckDB, Polars or pandas can query a model. Row file i of n (a power of two up to 32) holds the virtual
shards [i·1024/n, (i+1)·1024/n), a row's shard being mix64(key) mod 1024. A record batch holds short rows (without factors) or full
ones; each kind ascends by mix64(key) through the file. Columns, none with nulls:

    key uint64 · slot uint16 (65535: none) · show float64 · click float64 · unseen_days uint16 · delta_score float32
    published uint8 (readers of the published log have it) · embed_w float32 · embed_state list<float32>
    embedx list<float32> (empty in a short row) · embedx_state list<float32> (likewise)

`changed.arrow` holds what the next publication must carry: key uint64, deleted bool. The manifest holds the table's description, its
numbers of rows, whether anything was published and, under a memory limit, how each shard used its memory (`memory`): with the same limit
and number of shards, what is evicted after a restart is what would have been evicted without.

A checkpoint of a training run also has, all written at the same instant between two steps:

    dense.safetensors       parameters and buffers of the network by their names in torch
    optimizer.safetensors   `steps`, and per parameter what the optimizer keeps: `mean/<name>`, `square/<name>` …
    metrics.safetensors     the sums behind the training metrics
    state.json              step, rows, epoch, the reader's position, random state, early stopping, arrangement of threads
    config.yaml             the configuration of the run, every path absolute

and in its manifest `schema`, `model` and `step`. A checkpoint without these is a table alone. Directories appear whole or not at all and
carry checksums (storage.py). Saving what was loaded gives the same bytes.
"""

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from clickfleet import _core, storage
from clickfleet.arrow_files import FLOATS, batches, columns
from clickfleet.errors import CheckpointError
from clickfleet.table import Columns, Snapshot, Table

LATEST, BEST = "LATEST", "BEST"
MAX_FILES = 32
"""Row files of a checkpoint at most."""
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
"""What of a table's description bounds its memory."""
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
    """Writes the table as it is at this instant, or was when `snapshot` was taken in as many files, while others go on using it.

    `attached` are further files by name.
    """
    path = Path(path)
    with (
        storage.write(path, "checkpoint") as out,
        table.snapshot(files) if snapshot is None else nullcontext(snapshot) as rows,
    ):
        for name, content in (attached or {}).items():
            out.put(name, content)
        counts = write_rows(out.file, rows, files, range(files))
        write_changed(out, rows.changed, rows.deleted)
        out.facts = {
            "table": table.describe(),
            "short_rows": counts[0],
            "full_rows": counts[1],
            "row_files": files,
            "tracking": rows.tracking,
            **memory_facts([rows.memory]),
            **facts,
        }
    return path


def memory_facts(of_shards: list[list[int] | None]) -> dict[str, Any]:
    """For a manifest: how each shard of the table used its memory, where a limit bounds it."""
    return {"memory": of_shards} if None not in of_shards else {}


def span(shard: int, shards: int) -> tuple[int, int]:
    """The virtual shards that shard `shard` of `shards` holds: of up to 32 shards, each has whole row files of its own.

    >>> span(0, 3), span(1, 3), span(2, 3)
    ((0, 320), (320, 672), (672, 1024))
    """
    pieces = MAX_FILES if shards <= MAX_FILES else _core.VIRTUAL_SHARDS
    first, last = (pieces * s // shards * (_core.VIRTUAL_SHARDS // pieces) for s in (shard, shard + 1))
    return first, last


def load(path: Path | str, *, shard: int = 0, shards: int = 1, **changes: Any) -> Table:
    """The table of a checkpoint, or the part of it that shard `shard` of `shards` holds; `changes` override its description."""
    path = Path(path)
    manifest = storage.read_manifest(path, "checkpoint")
    if not 0 <= shard < shards <= _core.VIRTUAL_SHARDS:
        raise CheckpointError(
            f"there is no shard {shard} of {shards}", f"shards are numbered from 0, at most {_core.VIRTUAL_SHARDS}"
        )
    storage.verify_files(path, manifest)
    table = Table.like({**manifest["table"], **changes})
    first, last = span(shard, shards)
    files = manifest["row_files"]
    per_file = _core.VIRTUAL_SHARDS // files
    same = all(changes.get(key, manifest["table"][key]) == manifest["table"][key] for key in MEMORY)
    memory = manifest["memory"][shard] if same and len(manifest.get("memory", ())) == shards else None
    if memory is not None:
        table.core.prepare(memory)
    else:
        table.core.reserve(
            *(manifest[kind] * (last - first) // _core.VIRTUAL_SHARDS for kind in ("short_rows", "full_rows"))
        )
    mine = [file for file in range(files) if file * per_file < last and (file + 1) * per_file > first]
    for batch in itertools.chain.from_iterable(batches(path / _name(file, files), ROWS) for file in mine):
        _restore(table, batch, first, last)
    changed = pa.Table.from_batches(batches(path / "changed.arrow", CHANGED), CHANGED)
    if manifest["tracking"]:
        keys, deleted = changed["key"].to_numpy(), changed["deleted"].to_numpy()
        ours = _in_shards(keys, first, last)
        table.core.restore_changes(keys[~deleted & ours], keys[deleted & ours])
    if memory is not None:
        table.core.settle(memory)
    return table


def verify(path: Path | str) -> storage.Manifest:
    """Checks every byte of a checkpoint without loading it; its manifest."""
    manifest = storage.read_manifest(path, "checkpoint")
    storage.verify_files(path, manifest)
    return manifest


def read(path: Path | str, name: str) -> bytes:
    """An attached file of a checkpoint; `load` or `verify` checks it."""
    try:
        return (Path(path) / name).read_bytes()
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} has no {name}", "it is the checkpoint of a table alone, not of a training run"
        ) from None
    except OSError as error:
        raise CheckpointError(f"{Path(path) / name} cannot be read: {error.strerror}") from error


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
    """Saves the checkpoint of a step, points LATEST (and EPOCH-…, BEST) at it, then removes all but the newest `keep` and labelled ones."""
    path = save(table, Path(folder) / f"step-{step:012d}", step=step, **contents)
    register(path, keep, epoch, best)
    return path


def register(path: Path, keep: int, epoch: int | None = None, best: bool = False) -> None:
    """Points LATEST (and EPOCH-…, BEST) at a checkpoint that is complete, then removes old ones as `write` does."""
    _point(path.parent / LATEST, path)
    if epoch is not None:
        label_epoch(path.parent, epoch, path)
    if best:
        label_best(path.parent, path)
    prune(path.parent, keep)


def label_epoch(folder: Path | str, epoch: int, path: Path) -> None:
    """Keeps a checkpoint as the one of an epoch's end."""
    _point(Path(folder) / f"EPOCH-{epoch:04d}", path)


def label_best(folder: Path | str, path: Path) -> None:
    """Keeps a checkpoint as the best one, instead of an earlier one."""
    _point(Path(folder) / BEST, path)


def is_label(name: str) -> bool:
    """Whether a file of that name points at a checkpoint."""
    return name in (LATEST, BEST) or _EPOCH.match(name) is not None


def labelled(folder: Path | str, label: str) -> Path:
    """The checkpoint that LATEST, BEST or EPOCH-… names, its manifest checked."""
    return _pointed(Path(folder) / label)


def _point(pointer: Path, path: Path) -> None:
    storage.write_pointer(pointer, f"{path.name} {storage.digest(storage.read_manifest(path, 'checkpoint'))}")


def epochs(folder: Path | str) -> dict[int, Path]:
    """The checkpoints kept of epochs' ends, by epoch."""
    folder = Path(folder)
    found = (_EPOCH.match(entry.name) for entry in folder.iterdir()) if folder.is_dir() else ()
    return {
        epoch: _pointed(folder / f"EPOCH-{epoch:04d}") for epoch in sorted(int(match[1]) for match in found if match)
    }


def steps(folder: Path | str) -> list[int]:
    """Steps with a checkpoint, oldest first."""
    folder = Path(folder)
    found = (_STEP.match(entry.name) for entry in folder.iterdir()) if folder.is_dir() else ()
    return sorted(int(match[1]) for match in found if match)


def latest(folder: Path | str) -> Path:
    """The checkpoint LATEST names, its manifest checked; before the first LATEST, the newest one that is whole."""
    found = steps(folder)
    if found and not (Path(folder) / LATEST).exists():  # the run ended between the two
        path = Path(folder) / f"step-{found[-1]:012d}"
        storage.read_manifest(path, "checkpoint")
        return path
    return labelled(folder, LATEST)


def chosen(folder: Path | str) -> Path | None:
    """The checkpoint that a run folder stands for: the best where it is kept, else the newest; None if there is none."""
    folder = Path(folder)
    label = next((name for name in (BEST, LATEST) if (folder / name).is_file()), None)
    return None if label is None else labelled(folder, label)


def is_named(path: Path, label: str) -> bool:
    """Whether a label beside a checkpoint names it."""
    try:
        return (path.parent / label).read_text().partition(" ")[0] == path.name
    except OSError:
        return False


def forget_best(folder: Path | str) -> bool:
    """Keeps the best one no longer; whether there was one."""
    pointer = Path(folder) / BEST
    kept = pointer.is_file()
    pointer.unlink(missing_ok=True)
    return kept


def best(folder: Path | str) -> Path | None:
    """The checkpoint kept as the best, where there is one."""
    return labelled(folder, BEST) if (Path(folder) / BEST).is_file() else None


def _pointed(pointer: Path) -> Path:
    folder = pointer.parent
    try:
        name, _, wanted = pointer.read_text().strip().partition(" ")
    except FileNotFoundError:
        raise CheckpointError(f"{folder} holds no checkpoint yet") from None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{pointer} is broken: {error}") from error
    if not _STEP.match(name) or storage.digest(storage.read_manifest(folder / name, "checkpoint")) != wanted:
        known = ", ".join(f"step-{step:012d}" for step in steps(folder)) or "none"
        raise CheckpointError(f"{pointer} is broken", f"checkpoints there: {known}")
    return folder / name


def prune(folder: Path | str, keep: int) -> list[int]:
    """Removes all but the newest `keep` checkpoints and labelled ones; the steps that went."""
    folder = Path(folder)
    kept = {path.name for path in (*epochs(folder).values(), best(folder)) if path is not None}
    others = [step for step in steps(folder) if f"step-{step:012d}" not in kept]
    newest = steps(folder)[-keep:] if keep > 0 else others  # 0: all
    gone = [step for step in others if step not in newest]
    for step in gone:
        storage.remove(folder / f"step-{step:012d}")
    return gone


def forget_after(folder: Path | str, step: int) -> None:
    """Removes checkpoints of later steps, which LATEST does not name: of a run that was killed while writing them."""
    for later in steps(folder):
        if later > step:
            storage.remove(Path(folder) / f"step-{later:012d}")


def _name(file: int, files: int) -> str:
    return f"rows-{file:05d}-of-{files:05d}.arrow"


def write_rows(
    file: Callable[[str], storage.HashedFile], rows: Iterable[Columns], files: int, wanted: Iterable[int]
) -> list[int]:
    """The wanted row files, ascending; the number of short and of full rows. Rows of other files there must not be."""
    counts = [0, 0]
    batches = iter(rows)
    columns = next(batches, None)
    for number in wanted:
        sink = file(_name(number, files))
        with pa.ipc.new_file(sink, ROWS) as writer:
            while columns is not None and columns["file"] == number:
                writer.write_batch(_to_batch(columns))
                counts[columns["full"]] += len(columns["key"])
                columns = next(batches, None)
        sink.close()
    assert columns is None
    return counts


def _to_batch(columns: Columns) -> pa.RecordBatch:
    """Columns as Arrow, straight from their memory: checks of every value would hold up who waits for the interpreter."""
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
    """All rows of a table as one Arrow IPC file in memory."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, ROWS) as writer, table.snapshot() as rows:
        for part in rows:
            writer.write_batch(_to_batch(part))
    return bytes(sink.getvalue())


def unpack(table: Table, packed: bytes) -> None:
    """Puts the rows of `pack` into a table of the same width and rules."""
    with pa.ipc.open_file(pa.BufferReader(packed)) as reader:
        for i in range(reader.num_record_batches):
            _restore(table, reader.get_batch(i), 0, _core.VIRTUAL_SHARDS)


def keep_rows(rows: Iterable[Columns], table: Table, wanted: Callable[[Columns], Any]) -> None:
    """Copies the wanted rows into another table of the same kind; `wanted` gives a mask."""
    for part in rows:
        batch = _to_batch(part).filter(pa.array(wanted(part)))
        if batch.num_rows:
            _restore(table, batch, 0, _core.VIRTUAL_SHARDS)


def write_changed(out: storage.Writer, changed: Any, deleted: Any) -> None:
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
    """Puts rows, all short or all full, into a table, those of the given virtual shards; the columns are those of row files."""
    full = len(columns["embedx"]) > 0 or table.factors == 0
    rows = len(columns["key"])
    widths = {
        "embed_state": table.core.embed_state,
        "embedx": table.factors * full,
        "embedx_state": table.core.embedx_state * full,
    }
    for name, width in widths.items():
        if len(columns[name]) != rows * width:
            raise CheckpointError(
                f"the checkpoint's {name} does not fit the table: {width} floats per row were expected"
            )
    order = ("key", "slot", "show", "click", "unseen_days", "delta_score", "published", "embed_w", *_LISTS)
    table.core.restore(full, *(columns[name] for name in order), first, last)


def batches_of(path: Path, key: int, files: int) -> Iterator[pa.RecordBatch]:
    """The rows of the one file that may hold a key."""
    mixed = np.empty(1, np.uint64)
    _core.mix64(np.array([key], np.uint64), mixed)
    shard = int(mixed[0]) % _core.VIRTUAL_SHARDS
    return batches(path / _name(shard * files // _core.VIRTUAL_SHARDS, files), ROWS)


def _in_shards(keys: Any, first: int, last: int) -> Any:
    mixed = np.empty_like(keys)
    _core.mix64(keys, mixed)
    shard = mixed % _core.VIRTUAL_SHARDS
    return (shard >= first) & (shard < last)
