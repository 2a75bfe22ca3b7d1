"""Forget keys: write checkpoints without their rows, and find the places that still hold them.

A checkpoint is rewritten file by file and never loaded, so its size does not matter. Files without any of the keys are linked. What
consumers have of a key goes into `changed.arrow` as deleted: the next entry deletes it.

`forgotten.arrow` in the run folder lists the keys, each with the step of the checkpoint that forgot it. A rollback or rewind to before
that step leaves their rows out. The list holds keys only, and shrinks as retention removes what is older.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypedDict

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from safetensors import numpy as numpy_tensors

from clickfleet.data import arrow_ipc
from clickfleet.data.arrow_ipc import columns, numbers
from clickfleet.data.batch import Keys
from clickfleet.data.files import filesystem, flush, reading
from clickfleet.data.names import Names, text_keys
from clickfleet.data.parsing.layout import layout
from clickfleet.data.schema import Schema
from clickfleet.errors import CheckpointError, ConfigError, DataError
from clickfleet.store import atomic, checkpoint, published, redis_rows, row_format
from clickfleet.store.calibration import FILE as CALIBRATION
from clickfleet.store.calibration import Calibration
from clickfleet.store.mirror import NAMES
from clickfleet.store.table import mix64

FORGOTTEN = "forgotten.arrow"
_FORGOTTEN = columns({"key": pa.uint64(), "step": pa.int64()})
_REPLICA = re.compile(r"worker-\d+-(rows|old)\.arrow")
_LEFTOVER = re.compile(r"\.(step-\d{12}|\d{6,}-(base|delta))\.(writing|removing)|\.again")
Mask = NDArray[np.bool_]
Values = Mapping[str, str | Sequence[str]]
EditState = Callable[[dict[str, Any], "WantedKeys"], None]


class WantedKeys:
    """Distinct keys, to find among others.

    >>> wanted = WantedKeys(np.array([7, 5, 7], np.uint64))
    >>> len(wanted), wanted.mask(np.array([5, 6, 7], np.uint64)).tolist()
    (2, [True, False, True])
    """

    def __init__(self, keys: Keys) -> None:
        unique = np.unique(keys)
        hashes = mix64(unique)
        order = np.argsort(hashes)
        self.keys: Keys = unique[order]
        """In the order of row files."""
        self._hashes = hashes[order]

    def __len__(self) -> int:
        return len(self.keys)

    def mask(self, keys: Keys) -> Mask:
        """Return which of `keys` are in the set. Keys in the order of row files cost little more than the set."""
        out: Mask = np.zeros(len(keys), np.bool_)
        if not len(self) or not len(keys):
            return out
        hashes = mix64(np.ascontiguousarray(keys))
        if (hashes[1:] > hashes[:-1]).all():
            low, high = np.searchsorted(self._hashes, hashes[[0, -1]])
            wanted = self._hashes[low : high + 1]
            at = np.minimum(np.searchsorted(hashes, wanted), len(hashes) - 1)
            out[at[hashes[at] == wanted]] = True
            return out
        at = np.minimum(np.searchsorted(self._hashes, hashes), len(self) - 1)
        np.equal(self._hashes[at], hashes, out=out)
        return out

    def count(self, keys: Keys) -> int:
        return int(self.mask(keys).sum())


def read_keys(schema: Schema, keys: str | Path | Sequence[int] | Keys | None, values: Values | None) -> WantedKeys:
    """Return the keys of a file or an array, and those of values by slot.

    A text file has a key (decimal or 0x…), or a slot, a tab and a value, per line. A csv, parquet or Arrow file has a column `key`, or
    columns that are named like slots.
    """
    parts: list[Keys] = [np.empty(0, np.uint64)]
    if isinstance(keys, str | Path):
        parts += _file_keys(schema, Path(keys))
    elif keys is not None:
        parts.append(_as_keys(keys))
    for slot, texts in (values or {}).items():
        parts.append(
            value_keys(schema, slot, pa.array([texts] if isinstance(texts, str) else list(texts), pa.string()))
        )
    found = WantedKeys(np.concatenate(parts))
    if not len(found):
        raise ConfigError("no keys were given", "name a file with --keys, or a value with --value SLOT=VALUE")
    return found


def _as_keys(keys: Sequence[int] | Keys) -> Keys:
    try:
        out = keys if isinstance(keys, np.ndarray) else np.array([int(key) for key in keys], np.uint64)
        if out.ndim != 1 or out.dtype.kind not in "ui" or (out.dtype.kind == "i" and (out < 0).any()):
            raise ValueError("they are not whole numbers from 0 on")
        return out.astype(np.uint64)
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"these are no keys: {error}", "pass whole numbers from 0 to 2^64 - 1") from None


def value_keys(schema: Schema, slot: str, texts: pa.Array) -> Keys:
    """Return the key of each value of a slot."""
    names = [one.name for one in schema.key_columns]
    if slot not in names:
        known = [one.name for one in schema.slots]
        raise ConfigError(f"the model has no slot {slot}", f"slots: {', '.join(known)}")
    place = names.index(slot)
    if (bucket := schema.key_columns[place].bucket) is not None:
        raise ConfigError(f"slot {slot} holds buckets of the column {bucket.column}", "give keys instead of values")
    try:
        return text_keys(layout(schema, label=False), place, texts)
    except ValueError as error:
        raise ConfigError(f"slot {slot}: {error}", "with the key rule raw, a value is a whole number") from None


def _file_keys(schema: Schema, path: Path) -> Iterator[Keys]:
    kind = path.suffix.lower()
    with reading(str(path)):
        if kind in (".csv", ".parquet", ".arrow", ".feather"):
            yield from _table_keys(schema, _read_table(path, kind), path)
        else:
            yield from _line_keys(schema, path)


def _read_table(path: Path, kind: str) -> pa.Table:
    if kind == ".csv":
        from pyarrow import csv

        with path.open("rb") as file:
            names = file.readline().decode().rstrip("\r\n").split(",")
        kinds = {name.strip('"'): pa.string() for name in names}
        options = csv.ConvertOptions(column_types=kinds, strings_can_be_null=True, null_values=[""])
        return csv.read_csv(path, convert_options=options)
    if kind == ".parquet":
        from pyarrow import parquet

        return parquet.read_table(path)
    with pa.memory_map(str(path)) as source:
        return pa.Table.from_batches(list(arrow_ipc.open_ipc(source)))


def _table_keys(schema: Schema, table: pa.Table, path: Path) -> Iterator[Keys]:
    slots = [slot.name for slot in schema.slots]
    if "key" in table.column_names and "key" not in slots:
        wanted = table.column("key").combine_chunks().drop_null()
        yield (
            _parsed(wanted, path)
            if pa.types.is_string(wanted.type)
            else _as_keys(wanted.to_numpy(zero_copy_only=False))
        )
        return
    known = [name for name in table.column_names if name in slots]
    if not known:
        raise DataError(
            f"{path}: has neither a column key nor the column of a slot",
            f"name its columns like slots: {', '.join(slots)}",
        )
    for name in known:
        texts = table.column(name).combine_chunks().drop_null()
        yield value_keys(schema, name, texts.cast(pa.string()))


def _line_keys(schema: Schema, path: Path) -> Iterator[Keys]:
    lines = pc.split_pattern(pa.array([path.read_text(encoding="utf-8")], pa.large_string()), "\n").flatten()
    lines = pc.utf8_rtrim(lines, "\r")
    lines = lines.filter(pc.greater(pc.utf8_length(pc.utf8_trim_whitespace(lines)), 0))
    tabbed = pc.greater_equal(pc.find_substring(lines, "\t"), 0)
    yield _parsed(lines.filter(pc.invert(tabbed)), path)
    pairs = pc.split_pattern(lines.filter(tabbed), "\t", max_splits=1)
    slots, values = pc.list_element(pairs, 0), pc.list_element(pairs, 1)
    for slot in pc.unique(slots).to_pylist():
        yield value_keys(schema, slot, values.filter(pc.equal(slots, slot)).cast(pa.string()))


def _parsed(texts: pa.Array, path: Path) -> Keys:
    """Return keys that are written as numbers."""
    texts = pc.utf8_trim_whitespace(texts)
    plain = pc.match_substring_regex(texts, "^[0-9]{1,20}$")
    try:
        decimal = texts.filter(plain).cast(pa.uint64()).to_numpy(zero_copy_only=False)
        other = [int(text, 0) for text in texts.filter(pc.invert(plain)).to_pylist()]
        return np.concatenate([decimal, np.array(other, np.uint64)])
    except (ValueError, OverflowError) as error:  # pyarrow's errors are ValueErrors
        raise DataError(
            f"{path}: has a line that is no key: {error}", "write a number, or a slot, a tab and a value, per line"
        ) from None


@dataclass
class Rewritten:
    """What is gone from a checkpoint, and what is left."""

    path: Path
    removed: int
    """Rows, without those of a cluster's replicas."""
    rows: int
    deletions: int
    """Keys that the next entry deletes for consumers."""


def rewrite(path: Path, keys: WantedKeys, *, step: int | None = None, edit_state: EditState | None = None) -> Rewritten:
    """Write a checkpoint without the rows of `keys`: as that of another `step`, or in the place of the old one.

    In place, LATEST, BEST and EPOCH-… name it at any moment: while it is exchanged they name both. `edit_state` removes the keys from
    state.json.
    """
    manifest = checkpoint.verify(path)
    target = path if step is None else checkpoint.step_folder(path.parent, step)
    labels = [label for label in _labels(path.parent) if step is None and checkpoint.is_named(path, label)]
    with atomic.damage_errors(path), atomic.write_folder(target, "checkpoint", replaces=step is None) as out:
        out.ready = lambda new: checkpoint.relabel(path, labels, atomic.digest(manifest), new)
        removed, consumers = [0, 0], list[Keys]()
        for name in manifest["files"]:
            if name.startswith("rows-") or _REPLICA.fullmatch(name):
                short, full, listed = _copy_rows(out, path / name, keys, manifest["table"]["factors"])
                if name.startswith("rows-"):
                    removed = [removed[0] + short, removed[1] + full]
                    consumers.append(listed)
            elif name == "state.json":
                _put(out, path / name, _state(path, keys, step, edit_state))
            elif name == "metrics.safetensors":
                _put(out, path / name, _metrics(path, keys))
            elif name != "changed.arrow":
                _adopt(out, path / name, manifest["files"][name])
        deletions = _copy_changed(out, path, keys, np.concatenate([np.empty(0, np.uint64), *consumers]), manifest)
        facts = {key: value for key, value in manifest.items() if key not in ("format", "version", "files", "memory")}
        left = [manifest["short_rows"] - removed[0], manifest["full_rows"] - removed[1]]
        out.facts = {**facts, "short_rows": left[0], "full_rows": left[1], **({} if step is None else {"step": step})}
    checkpoint.relabel(path, labels)
    return Rewritten(target, sum(removed), sum(left), deletions)


def _labels(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if checkpoint.is_label(path.name))


def _adopt(out: atomic.FolderWriter, source: Path, facts: atomic.FileFacts) -> None:
    """Take over an unchanged file without copying it, if the file system has links."""
    target = out.hidden / source.name
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
        flush(target)
    out.adopt(source.name, facts)


def _put(out: atomic.FolderWriter, source: Path, content: bytes | None) -> None:
    """Write the changed content of a file, or take over the file if it is None."""
    if content is None:
        _adopt(out, source, atomic.read_manifest(source.parent, "checkpoint")["files"][source.name])
    else:
        out.put(source.name, content)


def _copy_rows(out: atomic.FolderWriter, source: Path, keys: WantedKeys, factors: int) -> tuple[int, int, Keys]:
    """Copy a file of rows without those of `keys`. Return how many short and full ones are gone, and which keys consumers have."""
    masks = [keys.mask(numbers(batch.column("key"), np.uint64)) for batch in arrow_ipc.batches(source, checkpoint.ROWS)]
    if not any(mask.any() for mask in masks):
        _adopt(out, source, atomic.read_manifest(source.parent, "checkpoint")["files"][source.name])
        return 0, 0, np.empty(0, np.uint64)
    counts, listed = [0, 0], []
    sink = out.file(source.name)
    with pa.ipc.new_file(sink, checkpoint.ROWS) as writer:
        for mask, batch in zip(masks, arrow_ipc.batches(source, checkpoint.ROWS), strict=True):
            if mask.any():
                full = factors == 0 or len(batch.column("embedx").flatten()) > 0
                counts[full] += int(mask.sum())
                gone = batch.select(["key", "published"]).filter(pa.array(mask))
                listed.append(gone.column("key").to_numpy()[gone.column("published").to_numpy() > 0])
                batch = batch.filter(pa.array(~mask))
            if batch.num_rows:
                writer.write_batch(batch)
    sink.close()
    return counts[0], counts[1], np.concatenate([np.empty(0, np.uint64), *listed])


def _copy_changed(
    out: atomic.FolderWriter, path: Path, keys: WantedKeys, consumers: Keys, manifest: atomic.Manifest
) -> int:
    """Write what the next entry must contain. Return how many of `keys` it deletes."""
    parts = list(arrow_ipc.batches(path / "changed.arrow", checkpoint.CHANGED))
    table = pa.Table.from_batches(parts, checkpoint.CHANGED)
    changed, deleted = table["key"].to_numpy(), table["deleted"].to_numpy()
    before = changed[deleted]
    owed = np.setdiff1d(consumers, before) if manifest["tracking"] else np.empty(0, np.uint64)
    set_again = changed[~deleted]
    checkpoint.write_changed(out, set_again[~keys.mask(set_again)], np.concatenate([before, owed]))
    return len(owed) + keys.count(before)


def _state(path: Path, keys: WantedKeys, step: int | None, edit_state: EditState | None) -> bytes | None:
    old = checkpoint.read(path, "state.json")
    state = json.loads(old)
    if step is not None:
        state["step"] = step
    if edit_state is not None:
        edit_state(state, keys)
    new = atomic.canonical(state)
    return None if new == old else new


_GROUPS = {"groups": ("groups", "scores", "weights"), "values": ("values", "slices")}
"""Arrays of metrics.safetensors that hold keys, and the arrays beside them: one number or row per key."""


def _metrics(path: Path, keys: WantedKeys) -> bytes | None:
    """Return the sums of the training metrics without groups and slices of `keys`; None if there are none."""
    sums, found = checkpoint.parsed(path, "metrics.safetensors", numpy_tensors.load), False
    for prefix, kind, mask in _groups_of(sums, keys):
        found = True
        for name in _GROUPS[kind]:
            array = sums[f"{prefix}{name}"]
            rest = array[len(mask) :]  # the slice of all other values
            sums[f"{prefix}{name}"] = np.ascontiguousarray(np.concatenate([array[: len(mask)][~mask], rest]))
    return numpy_tensors.save(sums) if found else None


def _groups_of(sums: Mapping[str, Any], keys: WantedKeys) -> list[tuple[str, str, Mask]]:
    out = []
    for name, array in sums.items():
        prefix, dot, kind = name.rpartition(".")
        if dot and prefix.rpartition(".")[2] in ("groups", "slices") and kind in _GROUPS:
            mask = keys.mask(np.ascontiguousarray(array, np.uint64))
            if mask.any():
                out.append((f"{prefix}.", kind, mask))
    return out


def forget_names(folder: Path, schema: Schema, keys: WantedKeys) -> int:
    """Remove the values behind `keys` from names.json. Return how many there were."""
    path = folder / NAMES
    if not path.is_file():
        return 0
    with atomic.damage_errors(path):
        names = Names.from_dict(atomic.unseal(path.read_bytes()), schema)
        gone = _named(names, keys)
        if gone:
            atomic.write_file(path, atomic.seal(_without(names, gone).to_dict()))
    return sum(map(len, gone.values()))


def _without(names: Names, gone: Mapping[str, set[str]]) -> Names:
    values = {
        slot: {text: count for text, count in counts.items() if text not in gone.get(slot, ())}
        for slot, counts in names.values.items()
    }
    return Names(names.schema, values, names.ranges)


def _named(names: Names, keys: WantedKeys) -> dict[str, set[str]]:
    """Return the values of each slot whose keys are among `keys`."""
    out = {}
    for slot, counts in names.values.items():
        texts = list(counts)
        mask = keys.mask(names.keys(slot, texts)).tolist() if texts else []
        if found := {text for text, held in zip(texts, mask, strict=True) if held}:
            out[slot] = found
    return out


def without_names(info: Mapping[str, Any], schema: Mapping[str, Any], keys: WantedKeys) -> dict[str, Any]:
    """Return the content of an entry's info.json without the values behind `keys`."""
    if not len(keys) or info.get("names") is None:
        return dict(info)
    names = Names.from_dict(info["names"], Schema.from_dict(schema))
    return {**info, "names": _without(names, _named(names, keys)).to_dict()}


def without_requests(golden: pa.Table, keys: WantedKeys) -> pa.Table:
    """Return golden requests without those that hold one of `keys`: their scores are different now."""
    if not len(keys):
        return golden
    return golden.filter(pa.array([not keys.count(np.array(row, np.uint64)) for row in golden["keys"].to_pylist()]))


class ForgottenKeys:
    """The list of a run: keys, and the step from which on no checkpoint or entry may have their old rows."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / FORGOTTEN
        self.keys, self.steps = np.empty(0, np.uint64), np.empty(0, np.int64)
        if self.path.is_file():
            table = pa.Table.from_batches(arrow_ipc.batches(self.path, _FORGOTTEN, mapped=False), _FORGOTTEN)
            self.keys, self.steps = table["key"].to_numpy(), table["step"].to_numpy()

    def since(self, step: int) -> WantedKeys:
        """Return the keys that were forgotten after a step."""
        return WantedKeys(self.keys[self.steps > step])

    def add(self, keys: WantedKeys, step: int, oldest: int) -> None:
        """Add keys. Drop those that were forgotten before everything that is kept: the oldest step."""
        kept = (self.steps > oldest) & ~keys.mask(self.keys)
        every = np.concatenate([self.keys[kept], keys.keys])
        steps = np.concatenate([self.steps[kept], np.full(len(keys), step, np.int64)])
        table = pa.Table.from_arrays([pa.array(every, pa.uint64()), pa.array(steps, pa.int64())], schema=_FORGOTTEN)
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, _FORGOTTEN) as writer:
            writer.write_table(table)
        atomic.write_file(self.path, bytes(sink.getvalue()))
        self.keys, self.steps = every, steps


class Holder(TypedDict):
    """A place that still holds some of the keys."""

    place: str
    kind: Literal["checkpoint", "entry", "names", "redis", "leftover"]
    rows: int | None
    """None: it was left by a killed process and cannot be read."""
    golden: int
    """Keys in golden requests, without those that the entry deletes."""
    names: int
    """Values behind keys."""
    slices: int
    """Slices of the calibration, and groups of metrics."""
    marks: int
    """Keys that are only named, to be deleted. They hold nothing learned, and do not count."""


def holder_of(place: str, kind: Any, **counts: int | None) -> Holder:
    zero: dict[str, Any] = dict.fromkeys(("rows", "golden", "names", "slices", "marks"), 0)
    return {"place": place, "kind": kind, **zero, **counts}  # type: ignore[typeddict-item]


def leftover(place: str) -> Holder:
    """Return a folder that a killed process left. Its files are not complete, so that nobody can tell what it holds."""
    return holder_of(place, "leftover", rows=None)


def holds(holder: Holder) -> bool:
    """Return whether a place has more than marks."""
    return holder["rows"] is None or any(holder[part] for part in ("rows", "golden", "names", "slices"))


class KeySearch:
    """Looks for keys in a run folder or a published log, here or at a URL. Nothing is downloaded as a whole."""

    def __init__(self, url: str, keys: WantedKeys, schema: Schema) -> None:
        self.url, self.keys, self.schema = url.rstrip("/"), keys, schema
        self.fs, self._root = filesystem(self.url)
        self._local = "file" in self.fs.protocol

    def holders(self) -> Iterator[Holder]:
        """Yield every place that holds or names one of the keys: checkpoints, entries, names.json, what killed processes left."""
        folders: dict[str, list[str]] = {}
        for path in self._files():
            folder, _, name = path.rpartition("/")
            folders.setdefault(folder, []).append(name)
        for folder in sorted(folders):
            try:
                found = self._folder(folder, folders[folder])
            except FileNotFoundError:  # retention has just removed it
                continue
            if found is not None and (holds(found) or found["marks"]):
                yield found

    def _files(self) -> list[str]:
        """Return all files below the root, relative to it."""
        with reading(self.url):
            self.fs.invalidate_cache()
            paths = [str(path) for path in self.fs.find(self._root)] if self.fs.exists(self._root) else []
        start = len(self._root.rstrip("/")) + 1
        return [path[path.index(self._root.rstrip("/")) + start :] for path in paths if path != self._root]

    def _folder(self, folder: str, names: list[str]) -> Holder | None:
        last = folder.rpartition("/")[2]
        if _LEFTOVER.fullmatch(last) or _LEFTOVER.fullmatch(folder.split("/")[-2] if "/" in folder else ""):
            return leftover(f"{self.url}/{folder}") if any(map(_has_rows, names)) else None
        if NAMES in names and folder == "":
            plain = atomic.unseal(self._bytes(NAMES))
            return self._holder(NAMES, "names", names=self._names(plain))
        if atomic.MANIFEST not in names:
            return None
        if checkpoint.is_step(last):
            return self.checkpoint(folder)
        return self._entry(folder, names) if published.NAME.fullmatch(last) else None

    def _holder(self, place: str, kind: Any, **counts: int) -> Holder:
        return holder_of(f"{self.url}/{place}", kind, **counts)

    def checkpoint(self, folder: str) -> Holder:
        """Return what the checkpoint in a folder below the root holds."""
        names = self._json(f"{folder}/{atomic.MANIFEST}")["files"]
        rows = sum(
            self.keys.count(keys)
            for name in names
            if name.startswith("rows-") or _REPLICA.fullmatch(name)
            for keys in self._columns(f"{folder}/{name}")
        )
        marks = sum(map(self.keys.count, self._columns(f"{folder}/changed.arrow")))
        slices = 0
        if "state.json" in names:
            state = self._json(f"{folder}/state.json")
            known = (state.get("published") or {}).get("calibrator")
            if known is not None and len(Calibration.from_bytes(known["calibration"].encode(), folder).slots) == 1:
                slices += self.keys.count(np.array(known["keys"], np.uint64))
        if "metrics.safetensors" in names:
            sums = numpy_tensors.load(self._bytes(f"{folder}/metrics.safetensors"))
            slices += sum(int(mask.sum()) for *_, mask in _groups_of(sums, self.keys))
        return self._holder(folder, "checkpoint", rows=rows, marks=marks, slices=slices)

    def _entry(self, folder: str, names: list[str]) -> Holder:
        deleted = np.concatenate([np.empty(0, np.uint64), *self._columns(f"{folder}/deleted.arrow")])
        marks = self.keys.count(deleted)
        rows = sum(
            self.keys.count(keys)
            for name in row_format.widths_of(names, 1 << 20)
            for keys in self._columns(f"{folder}/{name}")
        )
        golden = arrow_ipc.open_bytes(self._bytes(f"{folder}/golden.arrow"))
        asked = np.unique(np.concatenate([np.empty(0, np.uint64), *map(_golden_keys, golden)]))
        slices = 0
        if CALIBRATION in names:
            known = Calibration.from_bytes(self._bytes(f"{folder}/{CALIBRATION}"), f"{self.url}/{folder}/{CALIBRATION}")
            slices = len(known.shifts or ()) - len(known.without(self.keys.mask).shifts or ())
        plain = self._json(f"{folder}/{published.INFO}").get("names")
        return self._holder(
            folder,
            "entry",
            rows=rows,
            golden=self.keys.count(np.setdiff1d(asked, deleted)),
            names=0 if plain is None else self._names(plain),
            slices=slices,
            marks=marks,
        )

    def _names(self, plain: Mapping[str, Any]) -> int:
        return sum(map(len, _named(Names.from_dict(plain, self.schema), self.keys).values()))

    def _columns(self, path: str) -> Iterator[Keys]:
        """Yield the column `key` of an Arrow file."""
        full = f"{self._root}/{path}"
        with (
            atomic.damage_errors(f"{self.url}/{path}"),
            pa.memory_map(full) if self._local else self.fs.open(full, "rb") as source,
        ):
            for batch in arrow_ipc.IpcReader(source, is_file=True):
                yield numbers(batch.column("key"), np.uint64)

    def _bytes(self, path: str) -> bytes:
        return bytes(self.fs.cat_file(f"{self._root}/{path}"))

    def _json(self, path: str) -> dict[str, Any]:
        content = self._bytes(path)
        with atomic.damage_errors(f"{self.url}/{path}"):
            return dict(json.loads(content))


def _has_rows(name: str) -> bool:
    return name == "rows.arrow" or name.startswith("rows-") or bool(_REPLICA.fullmatch(name))


def _golden_keys(batch: pa.RecordBatch) -> Keys:
    keys: Keys = batch.column("keys").flatten().to_numpy(zero_copy_only=False).astype(np.uint64)
    return keys


def held_in_redis(url: str, keys: WantedKeys) -> Holder | None:
    """Return how many of the keys have a row in Redis; None if there are none."""
    client = redis_rows.connect(url)
    head = redis_rows.head(client)
    found = 0
    for at in range(0, len(keys) if head is not None else 0, redis_rows.CHUNK):
        assert head is not None
        found += int(client.exists(*redis_rows.names(head["prefix"], keys.keys[at : at + redis_rows.CHUNK])))
    return holder_of(url, "redis", rows=found) if found else None


def remove_leftovers(folder: Path) -> None:
    """Remove what killed processes left in a folder of checkpoints or entries. Nobody else may write there."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if _LEFTOVER.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)


def remove_old_entries(url: str, kept: int) -> list[str]:
    """Remove the entries before sequence `kept` from a copy of a log. Return their names."""
    fs, root = filesystem(url)
    removed = []
    with reading(url):
        for path in fs.ls(root, detail=False) if fs.exists(root) else ():
            name = str(path).rstrip("/").rpartition("/")[2]
            match = published.NAME.fullmatch(name)
            if match is not None and int(match[1]) < kept:
                with suppress(FileNotFoundError):
                    fs.rm(f"{root}/{name}", recursive=True)
                removed.append(name)
    return sorted(removed)


def schema_at(url: str) -> Schema:
    """Return the schema of the newest checkpoint or entry below a folder or URL."""
    fs, root = filesystem(url)
    with reading(url):
        paths = sorted(str(path) for path in fs.find(root)) if fs.exists(root) else []
    for pattern in (r"/step-\d{12}/manifest\.json$", r"/\d{6,}-(base|delta)/manifest\.json$"):
        for path in reversed([path for path in paths if re.search(pattern, path)]):
            facts = json.loads(bytes(fs.cat_file(path)))
            if "schema" in facts:
                return Schema.from_dict(facts["schema"], path)
    raise CheckpointError(
        f"{url} holds no checkpoint or published entry" if paths else f"{url} does not exist",
        "name a run folder, or a folder or URL with published entries",
    )
