"""The published log: a model as readers see it, a base and then deltas, each a directory that names the one before it.

    <published>/000007-delta/  manifest.json  rows.arrow  deleted.arrow  dense.onnx  golden.arrow  info.json
    <published>/LOG.jsonl      a line per entry, in order

`rows.arrow` is an Arrow IPC file with the rows to set: key uint64 · slot uint16 (65535: none) · embed_w float32 · embedx list<float32>
(empty in a short row), none with nulls. A record batch holds full rows only or short rows only; each kind ascends by mix64(key) through
the file, and every batch of a kind but its last has exactly 2^20 rows: a reader that maps the file finds row r of a kind in that kind's
batch r >> 20. A model without factors has one kind. `deleted.arrow` has the keys to forget. `dense.onnx` is the whole network, with
inputs dense[B, F], first[B, S], factors[B, S, D] and the outputs the manifest names. `golden.arrow` has requests and what they must
give: dense list<float32> · keys list<uint64> · counts list<uint32> (keys per slot) · one list<float32> per output.

The manifest covers all of them but info.json, which tells when, where and by which versions the entry was made: a replay gives equal
hashes. Its facts: kind, sequence, parent (hash of the manifest before, null at first), chain, schema, model, factors, rows, deleted,
step, outputs. Entries of one chain have one schema and one model; a change starts a new chain with a base. A line of the log repeats
sequence, kind, name, hash, parent and chain, and carries the BLAKE2b-256 of itself; what stands after the last whole line was not
published. Nothing here needs torch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from clickfleet import arrow_ipc, storage
from clickfleet.arrow_files import FLOATS, batches, columns
from clickfleet.errors import CheckpointError
from clickfleet.table import Columns, Floats, Keys

LOG = "LOG.jsonl"
KIND = "published"
BATCH_ROWS = 1 << 20

ROWS = columns({"key": pa.uint64(), "slot": pa.uint16(), "embed_w": pa.float32(), "embedx": FLOATS})
DELETED = columns({"key": pa.uint64()})


class Rows(Protocol):
    """What an entry sets and deletes: `Changes` of a table, or a part of them."""

    base: bool

    def __iter__(self) -> Iterator[Columns]: ...
    @property
    def deleted(self) -> Keys:
        """Known after the last rows."""
        ...


class Sample:
    """A few rows of every slot, and a few deleted keys, to make golden requests of."""

    PER_SLOT, ROWS = 4, 1 << 16

    def __init__(self) -> None:
        self.rows: dict[int, list[tuple[int, Floats]]] = {}
        """By slot: key, and its embed_w and factors (none in a short row)."""
        self.deleted: Keys = np.empty(0, np.uint64)
        self._left = self.ROWS

    def look_at(self, columns: Columns, width: int) -> None:
        """Takes what is wanted of some rows with `width` factors each."""
        size = min(len(columns["key"]), self._left)
        self._left -= size
        for slot in np.unique(columns["slot"][:size]).tolist():
            taken = self.rows.setdefault(slot, [])
            for i in np.flatnonzero(columns["slot"][:size] == slot)[: self.PER_SLOT - len(taken)]:
                factors = columns["embedx"][i * width : (i + 1) * width]
                taken.append((int(columns["key"][i]), np.append(columns["embed_w"][i], factors).astype(np.float32)))


@dataclass(frozen=True)
class Content:
    """What an entry carries besides its rows."""

    schema: dict[str, Any]
    model: dict[str, Any]
    factors: int
    step: int
    graph: bytes
    golden: Callable[[Sample], pa.Table]
    outputs: tuple[str, ...]
    info: dict[str, Any] = field(default_factory=dict)
    more: dict[str, Any] = field(default_factory=dict)
    """Further facts for the manifest."""

    def identity(self) -> dict[str, Any]:
        """What all entries of a chain have in common."""
        return {"schema": self.schema, "model": self.model, "factors": self.factors, "outputs": list(self.outputs)}


class Entry:
    """One published directory; opening it checks its manifest, `verify` every byte."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.manifest = storage.read_manifest(self.path, KIND)
        self.hash = storage.digest(self.manifest)

    def __repr__(self) -> str:
        return f"Entry({self.path.name}, {self.manifest['rows']:,} rows)"

    @property
    def base(self) -> bool:
        return bool(self.manifest["kind"] == "base")

    @property
    def sequence(self) -> int:
        return int(self.manifest["sequence"])

    def verify(self) -> storage.Manifest:
        """Reads every byte; the manifest."""
        storage.verify_files(self.path, self.manifest)
        return self.manifest

    def batches(self) -> Iterator[pa.RecordBatch]:
        """The rows, mapped from the file."""
        return batches(self.path / "rows.arrow", ROWS)

    def deleted(self) -> Any:
        """Keys that readers forget."""
        parts = [batch.column("key").to_numpy() for batch in batches(self.path / "deleted.arrow", DELETED)]
        return np.concatenate([np.empty(0, np.uint64), *parts])

    def graph(self) -> bytes:
        return self._bytes("dense.onnx")

    def golden(self) -> pa.Table:
        """Requests with what they must give."""
        try:
            found = arrow_ipc.open_bytes(self._bytes("golden.arrow"))
            return pa.Table.from_batches(found, found.schema)
        except (pa.ArrowException, ValueError, MemoryError) as error:
            raise CheckpointError(f"{self.path / 'golden.arrow'} is broken: {error}") from error

    @cached_property
    def info(self) -> dict[str, Any]:
        facts: dict[str, Any] = json.loads(self._bytes("info.json"))
        return facts

    def _bytes(self, name: str) -> bytes:
        try:
            return (self.path / name).read_bytes()
        except OSError as error:
            raise CheckpointError(f"{self.path / name} cannot be read: {error.strerror}") from error


@dataclass(frozen=True)
class Line:
    """A line of the log."""

    sequence: int
    kind: str
    name: str
    hash: str
    parent: str | None
    chain: str

    def text(self) -> bytes:
        facts = vars(self)
        return storage.canonical({**facts, "line": storage.digest(facts)}) + b"\n"

    @classmethod
    def parse(cls, text: bytes, path: Path) -> Line:
        try:
            facts = json.loads(text)
            if facts.pop("line") != storage.digest(facts):
                raise ValueError("its hash does not fit")
            return cls(**facts)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{path} has a broken line: {error}") from error


class Log:
    """A published folder; any number of readers, one writer."""

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self.path = self.folder / LOG

    def lines(self) -> list[Line]:
        """What was published, oldest first, each the child of the one before."""
        try:
            whole = self.path.read_bytes()
        except FileNotFoundError:
            return []
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read: {error.strerror}") from error
        found = [Line.parse(text, self.path) for text in whole.split(b"\n")[:-1]]
        for before, line in pairwise(found):
            if line.parent != before.hash or line.sequence != before.sequence + 1:
                raise CheckpointError(f"{self.path}: entry {line.sequence} does not follow entry {before.sequence}")
        return found

    def entry(self, line: Line) -> Entry:
        """The directory of a line, which must be the one that was published."""
        entry = Entry(self.folder / line.name)
        if entry.hash != line.hash:
            raise CheckpointError(f"{entry.path} is not the entry that {self.path.name} names", "restore it")
        return entry

    def newest(self) -> list[Entry]:
        """The newest base and the deltas after it: together, the model as it was published last."""
        lines = self.lines()
        bases = [i for i, line in enumerate(lines) if line.kind == "base"]
        if not bases:
            raise CheckpointError(f"{self.folder} holds no published base")
        return [self.entry(line) for line in lines[bases[-1] :]]

    def append(self, rows: Rows, content: Content) -> Entry:
        """Writes an entry and its line; a crash leaves the log with both or with neither."""
        head = self._recover()
        parent = None if head is None else head.hash
        sequence = 1 if head is None else head.sequence + 1
        kind = "base" if rows.base else "delta"
        named = self._chain(head, kind, sequence, content)
        path = self.folder / f"{sequence:06d}-{kind}"
        entry = write(path, rows, content, sequence=sequence, parent=parent, chain=named)
        line = Line(sequence, kind, entry.path.name, entry.hash, parent, named)
        try:
            with storage.plainly(self.path), self.path.open("ab") as out:
                out.write(line.text())
                out.flush()
                os.fsync(out.fileno())
        except CheckpointError:
            self._recover()  # what nobody will read gives its space back
            raise
        return entry

    def _chain(self, head: Line | None, kind: str, sequence: int, content: Content) -> str:
        same = head is not None and {k: self.entry(head).manifest.get(k) for k in content.identity()} == _plain(
            content.identity()
        )
        if head is not None and same:
            return head.chain
        if kind != "base":
            raise CheckpointError(
                f"a delta does not fit {self.folder}: it has another schema, model or width", "publish a base first"
            )
        return chain(content, sequence)

    def _recover(self) -> Line | None:
        """Removes what a killed writer left behind the last whole line; that line."""
        with storage.plainly(self.path):
            self.folder.mkdir(parents=True, exist_ok=True)
            if self.path.exists():
                whole = self.path.read_bytes()
                kept = whole.rfind(b"\n") + 1
                if kept < len(whole):
                    os.truncate(self.path, kept)
        lines = self.lines()
        last = lines[-1].sequence if lines else 0
        for path in self.folder.glob("[0-9]" * 6 + "-*"):
            if int(path.name[:6]) > last:
                storage.remove(path)
        return lines[-1] if lines else None


def chain(content: Content, first: int) -> str:
    """The name of the chain that begins with entry `first`."""
    return storage.digest({**content.identity(), "first": first})


def write(path: Path, rows: Rows, content: Content, **place: Any) -> Entry:
    """An entry as a directory, outside a log or for one."""
    with storage.write(path, KIND) as out:
        out.put("dense.onnx", content.graph)
        sample = Sample()
        written = _write_rows(out, rows, content.factors, sample)
        gone = sample.deleted = rows.deleted
        _write_table(out, "deleted.arrow", pa.table({"key": pa.array(gone, pa.uint64())}, DELETED))
        _write_table(out, "golden.arrow", content.golden(sample))
        out.beside("info.json", storage.canonical(content.info))
        out.facts = {
            "kind": "base" if rows.base else "delta",
            **content.identity(),
            "step": content.step,
            "rows": written,
            "deleted": len(gone),
            **content.more,
            **place,
        }
    return Entry(path)


class _Gathered:
    """Rows of one kind until they fill a record batch."""

    def __init__(self, width: int) -> None:
        self.width, self.size = width, 0
        self._parts: list[Columns] = []

    def add(self, columns: Columns) -> Iterator[pa.RecordBatch]:
        self._parts.append(columns)
        self.size += len(columns["key"])
        while self.size >= BATCH_ROWS:
            yield self.take(BATCH_ROWS)

    def take(self, size: int) -> pa.RecordBatch:
        whole = {name: np.concatenate([part[name] for part in self._parts]) for name in ROWS.names}
        cuts = {name: size * (self.width if name == "embedx" else 1) for name in ROWS.names}
        self._parts = [{name: values[cuts[name] :] for name, values in whole.items()}]
        self.size -= size
        plain = [pa.array(whole[name][: cuts[name]], ROWS.field(name).type) for name in ROWS.names[:-1]]
        offsets = pa.array(np.arange(size + 1, dtype=np.int32) * np.int32(self.width))
        factors = pa.ListArray.from_arrays(
            offsets, pa.array(whole["embedx"][: cuts["embedx"]], pa.float32()), type=FLOATS
        )
        return pa.RecordBatch.from_arrays([*plain, factors], schema=ROWS)


def _write_rows(out: storage.Writer, rows: Iterable[Columns], factors: int, sample: Sample) -> int:
    kinds = (_Gathered(0), _Gathered(factors))
    written = 0
    sink = out.file("rows.arrow")
    with pa.ipc.new_file(sink, ROWS) as writer:
        for columns in rows:
            written += len(columns["key"])
            kind = kinds[bool(columns["full"]) or factors == 0]
            sample.look_at(columns, kind.width)
            for batch in kind.add(columns):
                writer.write_batch(batch)
        for kind in kinds:
            if kind.size:
                writer.write_batch(kind.take(kind.size))
    sink.close()
    return written


def _write_table(out: storage.Writer, name: str, table: pa.Table) -> None:
    sink = out.file(name)
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    sink.close()


def _plain(value: Any) -> Any:
    return json.loads(storage.canonical(value))
