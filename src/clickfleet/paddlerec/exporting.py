"""Write our models in PaddleRec's layout, for its consumers: bases and deltas as text, and the network as variables.

<dir>/000/part-000-00000        key slot unseen_days delta_score show click embed_w state… [embedx… state…]
<dir>/001/part-000              of a checkpoint: one line per dense value, w [mean square]
<dir>/dnn_plugin/<variable>     the network, one binary file per variable
<dir>/manifest.json             ours: checksums of all files, and which model it is

A network with first-order weights in a table of its own has that table as 000 and the factors as 001, and the dense values as 002.
Row `key` is in file `key mod parts`. Numbers have as many digits as it takes to read them back exactly. A delta sets a deleted key to
a short row of zeros, which scores as no row does.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash
from safetensors import torch as torch_tensors

from clickfleet._core import PrintColumn, print_rows
from clickfleet.data.schema import Schema
from clickfleet.errors import CheckpointError, ConfigError
from clickfleet.paddlerec.dumps import KIND
from clickfleet.paddlerec.importing import layer_settings
from clickfleet.paddlerec.networks import NETWORKS
from clickfleet.paddlerec.pickles import Arrays
from clickfleet.paddlerec.sources import STATES, Width, initial_state, part_state
from clickfleet.paddlerec.tensors import Layer, dense_order, layers, static_names, their_arrays
from clickfleet.paddlerec.variables import pack
from clickfleet.store import atomic, checkpoint, published, run_folder
from clickfleet.store.published import Entry, Log
from clickfleet.store.rollback import changed_keys
from clickfleet.store.rules import Rule, rule
from clickfleet.store.table import NO_SLOT, Columns, Keys
from clickfleet.training import saving
from clickfleet.training.learner import Learner
from clickfleet.training.onnx_graph import read_weights

PLUGIN = "dnn_plugin"
CHUNK = 100_000
Numbers = Any


@dataclass
class Exported:
    """A model in PaddleRec's layout."""

    path: Path
    kind: str
    rows: int
    deleted: int
    bytes: int
    step: int
    notes: list[str] = field(default_factory=list)

    def text(self) -> str:
        gone = f", {self.deleted:,} of deleted keys" if self.deleted else ""
        return f"{self.path}: {self.kind} of step {self.step:,}, {self.rows:,} rows{gone}, {self.bytes:,} bytes"

    def to_dict(self) -> dict[str, object]:
        return {**vars(self), "path": str(self.path)}


class TextLayout:
    """Where the numbers of a model belong in PaddleRec's files."""

    def __init__(self, learner: Learner, parts: int = 1) -> None:
        if not learner.model.scores_rows:
            raise CheckpointError(
                f"{learner.config.model.name} has no rows that PaddleRec's parameter server would keep",
                "clickfleet words export writes its vectors as text",
            )
        self.parts, self.shape = parts, learner.shape
        self.settings = layer_settings(learner)
        state = learner.model.state_dict()
        frozen = {name for name, parameter in learner.model.named_parameters() if not parameter.requires_grad}
        self._sizes = {
            name: tuple(tensor.shape)
            for name, tensor in state.items()
            if tensor.numel() and name not in frozen and "num_batches" not in name
        }
        self.network, self.wanted = self._counterpart(learner.config.model.name)
        self.notes = self._remarks(learner)
        named = [layer for layer in self.wanted if layer.kind == "embedding"]
        whole = self.network in (None, "slot_dnn")
        table = learner.table
        if len(table.classes) > 1:
            raise ConfigError(
                "slots with widths, rules or admissions of their own cannot be written as a table of PaddleRec, which has one of each",
                "train a model without table.dims and table.slots to export it",
            )
        self.width = Width(table.factors, _known(table.rule), _known(table.embed_rule), whole, len(named) > 1)
        self._has_state = table.rule.name in STATES and table.embed_rule.name in STATES
        self._slots = _slot_numbers(learner.schema)

    @property
    def tables(self) -> int:
        """Number of sparse tables."""
        return 1 + self.width.has_first

    def _counterpart(self, model: str) -> tuple[str | None, list[Layer]]:
        """Return PaddleRec's name of the network and its layers; None if it does not have the network."""
        for name, network in NETWORKS.items():
            if network.model == model and network.original:
                try:
                    wanted = layers(name, self.settings, self.shape)
                except (CheckpointError, KeyError):
                    break
                zeros = {ours: np.zeros(size, np.float32) for ours, size in self._sizes.items()}
                if their_arrays(name, zeros, wanted, self.shape, self.settings) is not None:
                    return name, wanted
        return None, []

    def _remarks(self, learner: Learner) -> list[str]:
        notes, model = [], learner.config.model
        if self.network is None:
            notes.append(f"PaddleRec does not have this {model.name}: {PLUGIN} has its tensors under our names")
        elif not model.settings.get("paddlerec", False):
            notes.append("model.paddlerec is false: PaddleRec's network may compute other scores from the same numbers")
        unknown = {learner.table.rule.name, learner.table.embed_rule.name} - STATES.keys()
        notes += [f"PaddleRec does not have the rule {one}: rows are written without its state" for one in unknown]
        return notes

    def lines(self, columns: Columns) -> Iterator[tuple[int, Keys, Numbers]]:
        """Yield the lines of some rows, all short or all full: the number of the table, the keys, and the fields [n, width].

        Rows without statistics and state, as entries have them, get zeros and initial states.
        """
        keys = columns["key"]
        n, w = len(keys), self.width
        head = np.zeros((n, 5), np.float32)
        head[:, 0] = self._slots[columns["slot"]]
        for i, name in enumerate(("unseen_days", "delta_score", "show", "click"), start=1):
            head[:, i] = columns.get(name, 0)
        embed_w = np.asarray(columns["embed_w"], np.float32)[:, None]
        embed_state = self._state(columns, "embed_state", w.embed_rule, 1)
        full = bool(columns["full"])
        factors = np.asarray(columns["embedx"], np.float32).reshape(n, -1) if full else None
        state = self._state(columns, "embedx_state", w.rule, w.factors) if full else None
        if w.whole:
            rest = [] if factors is None else [factors, state]
            yield 0, keys, np.concatenate([head, embed_w, embed_state, *rest], 1)
            return
        if w.has_first:
            yield 0, keys, np.concatenate([head, embed_w, embed_state], 1)
        if factors is None:
            nothing = np.zeros((n, 1), np.float32)
            yield self.tables - 1, keys, np.concatenate([head, nothing, initial_state(w.rule, n, 1)], 1)
            return
        first, rest_state = part_state(w.rule, state, w.factors)
        yield self.tables - 1, keys, np.concatenate([head, factors[:, :1], first, factors[:, 1:], rest_state], 1)

    def _state(self, columns: Columns, name: str, of: Rule, weights: int) -> Numbers:
        rows = len(columns["key"])
        if name not in columns or not self._has_state:
            return initial_state(of, rows, weights)
        return np.asarray(columns[name], np.float32).reshape(rows, -1)

    def variables(self, tensors: Mapping[str, Any]) -> Arrays:
        """Return the network as PaddleRec's variables, by the names of a static program."""
        ours = {name: np.asarray(tensors[name], np.float32) for name in self._sizes}
        if self.network is None:
            return ours
        names = static_names(self.wanted)
        return {names[place]: values for place, values in self._theirs(ours).items()}

    def dense_lines(self, tensors: Mapping[str, Any], moments: Iterable[Mapping[str, Any]]) -> Numbers:
        """Return the dense table [n, 1 + states]: weights in the order of their static names, then their moments."""
        columns = []
        for values in (tensors, *moments):
            ours = {
                name: np.asarray(values.get(name, np.zeros(size)), np.float32) for name, size in self._sizes.items()
            }
            theirs = self._theirs(ours)
            columns.append(np.concatenate([theirs[name].ravel() for name, _ in dense_order(self.wanted)]))
        return np.stack(columns, 1)

    def _theirs(self, ours: Arrays) -> Arrays:
        assert self.network is not None
        theirs = their_arrays(self.network, ours, self.wanted, self.shape, self.settings)
        assert theirs is not None  # the network has the shapes that were checked before
        return theirs


def _known(of: Rule) -> Rule:
    """Return a rule, or the one without state if PaddleRec does not have it."""
    return of if of.name in STATES else rule("sgd")


def _slot_numbers(schema: Schema) -> Numbers:
    """Return the number of each slot: its name if that is a number, else its place; -1 for no slot."""
    numbers = np.full(NO_SLOT + 1, -1, np.float32)
    for i, slot in enumerate(schema.slots):
        numbers[i] = int(slot.name) if slot.name.isdecimal() and len(slot.name) < 8 else i + 1
    return numbers


class _PartFiles:
    """The text files of the sparse tables. Each is open only while lines are added, so that there may be many."""

    def __init__(self, folder: Path, tables: int, parts: int) -> None:
        self._folder, self._parts = folder, parts
        self.names = [[f"{table:03d}/part-000-{part:05d}" for part in range(parts)] for table in range(tables)]
        self._hashes = {name: xxhash.xxh3_128() for names in self.names for name in names}
        self.bytes = dict.fromkeys(self._hashes, 0)
        for table in range(tables):
            (folder / f"{table:03d}").mkdir()

    def add(self, table: int, keys: Keys, fields: Numbers) -> None:
        part = (keys % np.uint64(self._parts)).astype(np.int64)
        order = np.argsort(part, kind="stable")
        ends = np.searchsorted(part[order], np.arange(self._parts + 1))
        for number in np.flatnonzero(np.diff(ends)).tolist():
            chosen = order[ends[number] : ends[number + 1]]
            self._append(self.names[table][number], lines_of(keys[chosen], fields[chosen]))

    def _append(self, name: str, text: bytes) -> None:
        with (self._folder / name).open("ab") as file:
            file.write(text)
        self._hashes[name].update(text)
        self.bytes[name] += len(text)

    def close(self, out: atomic.FolderWriter) -> None:
        """Create the empty files too, flush all to the disk, and list them in the manifest."""
        for name, content in self._hashes.items():
            with (self._folder / name).open("ab") as file:
                os.fsync(file.fileno())
            out.adopt(name, {"bytes": self.bytes[name], "xxh3_128": content.hexdigest()})


def lines_of(keys: Keys, fields: Numbers) -> bytes:
    """Return lines of text: a key and its fields each.

    >>> lines_of(np.array([2**64 - 1, 5], np.uint64), np.array([[0.1, 3], [-1, 1e-8]], np.float32))
    b'18446744073709551615 0.1 3\\n5 -1 1e-08\\n'
    """
    return bytes(print_rows([PrintColumn(np.ascontiguousarray(keys)), _wide(fields)], " "))


def _wide(fields: Numbers) -> PrintColumn:
    rows, width = fields.shape
    starts = np.arange(rows + 1, dtype=np.int64) * width
    values = np.ascontiguousarray(fields, np.float32).reshape(-1)
    return PrintColumn(values, starts=starts, between=" ", bare=True)


def _write(
    layout: TextLayout,
    path: Path,
    rows: Iterable[Columns],
    tensors: Mapping[str, Any],
    *,
    deleted: Keys | None = None,
    moments: Iterable[Mapping[str, Any]] | None = None,
    replaces: bool = False,
    **facts: Any,
) -> Exported:
    """Write a folder that appears when it is complete."""
    gone = np.empty(0, np.uint64) if deleted is None else deleted
    count = 0
    with atomic.write_folder(path, KIND, replaces) as out:
        files = _PartFiles(out.hidden, layout.tables, layout.parts)
        for columns in _chunks([*_zeros(gone)], rows):
            count += len(columns["key"])
            for table, keys, fields in layout.lines(columns):
                files.add(table, keys, fields)
        files.close(out)
        size = sum(files.bytes.values())
        if moments is not None and layout.network is not None:
            (out.hidden / f"{layout.tables:03d}").mkdir()
            text = bytes(print_rows([_wide(layout.dense_lines(tensors, moments))], " "))
            out.put(f"{layout.tables:03d}/part-000", text)
            size += len(text)
        (out.hidden / PLUGIN).mkdir()
        for name, values in layout.variables(tensors).items():
            out.put(f"{PLUGIN}/{name}", pack(values))
            size += values.nbytes
        count -= len(gone)
        out.facts = {"network": layout.network, "rows": count, "deleted": len(gone), "parts": layout.parts, **facts}
    return Exported(path, str(facts["kind"]), count, len(gone), size, int(facts["step"]), list(layout.notes))


def _zeros(keys: Keys) -> Iterator[Columns]:
    """Yield short rows of zeros for deleted keys."""
    if len(keys):
        n = len(keys)
        slots, zeros = np.full(n, NO_SLOT, np.uint16), np.zeros(n, np.float32)
        yield {"full": False, "key": keys, "slot": slots, "embed_w": zeros, "embedx": zeros[:0]}


def _chunks(*sources: Iterable[Columns]) -> Iterator[Columns]:
    """Yield rows in pieces that fit into the memory as text."""
    for columns in (columns for source in sources for columns in source):
        rows = len(columns["key"])
        for start in range(0, rows, CHUNK):
            end = min(start + CHUNK, rows)
            yield {
                name: values[start * (len(values) // rows) : end * (len(values) // rows)]
                if isinstance(values, np.ndarray)
                else values
                for name, values in columns.items()
            }


def write_entry(
    layout: TextLayout, entry: Entry, path: Path, replaces: bool = False, before: Sequence[Entry] = ()
) -> Exported:
    """Write a published base or delta. It has weights only, so the statistics are 0 and the optimizer states initial.

    A delta includes the changes of the deltas `before` it.
    """
    if "pruned_from" in entry.manifest:
        raise CheckpointError(
            f"{entry.path} was exported with only some of the inputs", "export the whole model, without --inputs"
        )
    entry.verify()
    changes = _Changes([*before, entry])
    return _write(
        layout,
        path,
        changes,
        {name: tensor.numpy() for name, tensor in read_weights(entry.graph()).items()},
        deleted=None if entry.base else changes.deleted(),
        replaces=replaces,
        kind="base" if entry.base else "delta",
        step=entry.manifest["step"],
        entry=entry.hash,
        source=entry.path.name,
        first=(before[0] if before else entry).path.name,
    )


class _Changes:
    """What successive entries set and delete together. A later entry wins."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        self._entries = entries

    def __iter__(self) -> Iterator[Columns]:
        for entry, later in self._newest_first():
            for columns in _entry_rows(entry):
                yield columns if not len(later) else _without(columns, later)

    def deleted(self) -> Keys:
        parts = [np.setdiff1d(entry.deleted(), later) for entry, later in self._newest_first()]
        return np.concatenate([np.empty(0, np.uint64), *parts])

    def _newest_first(self) -> Iterator[tuple[Entry, Keys]]:
        """Yield each entry with the keys that later entries set or delete."""
        later = np.empty(0, np.uint64)
        for entry in reversed(self._entries):
            yield entry, later
            if entry is not self._entries[0]:
                later = np.unique(np.concatenate([later, *changed_keys(entry)]))


def _without(columns: Columns, keys: Keys) -> Columns:
    kept = ~np.isin(columns["key"], keys)
    plain = {name: columns[name][kept] for name in ("key", "slot", "embed_w")}
    factors = columns["embedx"].reshape(len(kept), -1)[kept].reshape(-1)
    return {**plain, "embedx": factors, "full": columns["full"]}


def _entry_rows(entry: Entry) -> Iterator[Columns]:
    for batch in entry.batches():
        factors = batch.column("embedx").flatten().to_numpy()
        plain = {name: batch.column(name).to_numpy() for name in ("key", "slot", "embed_w")}
        yield {**plain, "embedx": factors, "full": len(factors) > 0 or entry.manifest["factors"] == 0}


class TextSource(NamedTuple):
    """The entry that a folder was written from, and the first of those whose changes it includes."""

    name: str
    hash: str
    first: str


def source_of(path: Path) -> TextSource | None:
    """Return what a folder was written from; None if it is not such a folder."""
    try:
        facts = atomic.read_manifest(path, KIND)
    except CheckpointError:
        return None
    return TextSource(str(facts.get("source")), str(facts.get("entry")), str(facts.get("first")))


def export_text(model: Path, out: Path, parts: int = 1, trust: bool = False, overwrite: bool = False) -> list[Exported]:
    """Write the model at a resolved path: a checkpoint or an entry as `out`; of a log, each entry since its newest base in `out`."""
    if (model / published.LOG).is_file():
        entries = Log(model).newest()
        layout = _layout_of(entries[0], trust, parts)
        return [write_entry(layout, entry, out / entry.path.name, overwrite) for entry in entries]
    if atomic.read_kind(model) == published.KIND:
        entry = Entry(model)
        return [write_entry(_layout_of(entry, trust, parts), entry, out, overwrite)]
    learner = saving.load(model, trust)
    layout = TextLayout(learner, parts)
    with learner.table.snapshot() as rows:
        done = _write(
            layout,
            out,
            rows,
            {name: tensor.cpu().numpy() for name, tensor in learner.dense().items()},
            moments=_moments(model, learner),
            replaces=overwrite,
            kind="checkpoint",
            step=run_folder.step(model),
            source=model.name,
        )
    return [done]


def _moments(path: Path, learner: Learner) -> list[dict[str, Any]]:
    """Return Adam's moments of the dense weights in a checkpoint, `mean` and `square`; none for other optimizers."""
    if learner.config.dense.optimizer not in ("adam", "adamw"):
        return []
    kept = checkpoint.parsed(path, "optimizer.safetensors", torch_tensors.load)
    return [
        {name.removeprefix(f"{kind}/"): tensor.numpy() for name, tensor in kept.items() if name.startswith(f"{kind}/")}
        for kind in ("mean", "square")
    ]


def _layout_of(entry: Entry, trust: bool, parts: int) -> TextLayout:
    """Return the layout of a published entry. The run it belongs to knows the rules of the rows."""
    run = entry.path.parent.parent
    saved = checkpoint.chosen(run / "checkpoints") if entry.path.parent.name == "published" else None
    if saved is None:
        raise CheckpointError(
            f"{entry.path} does not tell the rules of its rows, which decide the width of a line",
            "export the run folder, a checkpoint, or the log in its run folder (RUN/published)",
        )
    schema = Schema.from_dict(entry.manifest["schema"], str(entry.path))
    layout = TextLayout(Learner(run_folder.read_config(saved, trust), schema), parts)
    layout.notes.append("published entries have weights only: statistics are written as 0, optimizer states as initial")
    return layout
