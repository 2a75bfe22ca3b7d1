"""The published log: a model as consumers see it, a base and then deltas, each a directory that names the one before it.

    <published>/000007-delta/  manifest.json  rows.arrow  deleted.arrow  dense.onnx  golden.arrow  info.json
    <published>/LOG.jsonl      a header, then a line per entry, in order

`rows.arrow` is an Arrow IPC file with the rows to set: key uint64 · slot uint16 (65535: none) · embed_w float32 · embedx list<float32>
(empty in a short row), none with nulls. A record batch holds full rows only or short rows only; each kind ascends by mix64(key) through
the file, and every batch of a kind but its last has exactly 2^20 rows: a reader that maps the file finds row r of a kind in that kind's
batch r >> 20. A model without factors has one kind. `deleted.arrow` has the keys to forget; a key is set once or deleted once, never
both. `dense.onnx` is the whole network, with inputs dense[B, F], first[B, S], factors[B, S, D] and the outputs the manifest names. A
delta may lean on the last whole network of its chain instead (format version 2): `dense` in its manifest names the entry that has it,
with size and checksum of the file. Without further files the network is the same; with `dense.xor` it is that file's bytes XORed with
the other's, and `network` has its size and checksum. `dense.xor` holds every fourth byte from the first on, then from the second on and
so on (zeros fill up the last four), compressed by zstd. `golden.arrow` has requests and what they must give: dense list<float32> · keys
list<uint64> · counts list<uint32> (keys per slot) · one list<float32> per output.

The manifest covers all of them but info.json, which tells when, where and by which versions the entry was made: a replay gives equal
hashes. info.json names the manifest's hash and carries the hash of itself; the fact `sealed` in the manifest says so, and entries
without that fact were written before. Further facts: kind, sequence, parent (hash of the manifest before, null at first), chain, schema,
model, factors, rows, deleted, step, outputs. Entries of one chain have one schema and one model; a change starts a new chain with a base.

The log's header says where its lines begin, which hash the first of them follows, and from which sequence on directories are `kept`:
retention rewrites the file, drops lines and then removes directories. A log without a header was written before there was one. A line
repeats sequence, kind, name, hash, parent and chain. Header and lines carry the BLAKE2b-256 of themselves; what stands after the last
whole line was not published. A directory is complete before its line is written, so a writer that was killed leaves at most one entry
without a line, the next one: the next writer adds that line. Nothing here needs torch.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from clickfleet import _core, arrow_ipc, difference, storage
from clickfleet.arrow_files import FLOATS, batches, columns
from clickfleet.errors import CheckpointError
from clickfleet.paths import inside
from clickfleet.table import Columns, Floats, Keys

LOG = "LOG.jsonl"
KIND = "published"
VERSION = 2
"""The newest format of an entry that is read here."""
BATCH_ROWS = 1 << 20
NAME = re.compile(r"(\d{6,})-(base|delta)")
DENSE, XOR, INFO = "dense.onnx", "dense.xor", "info.json"
LARGE_NETWORK = 1 << 16
"""Bytes from which on a network is worth a difference."""
WORTH = 0.85
"""A difference is kept while it takes at most this share of the whole network."""

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
        self.manifest = storage.read_manifest(self.path, KIND, VERSION)
        self.hash = storage.digest(self.manifest)

    def __repr__(self) -> str:
        return f"Entry({self.path.name}, {self.manifest['rows']:,} rows)"

    @property
    def base(self) -> bool:
        return bool(self.manifest["kind"] == "base")

    @property
    def sequence(self) -> int:
        return int(self.manifest["sequence"])

    @property
    def size(self) -> int:
        """Bytes of its files."""
        return sum(int(file["bytes"]) for file in self.manifest["files"].values())

    def verify(self) -> storage.Manifest:
        """Reads every byte; the manifest."""
        storage.verify_files(self.path, self.manifest)
        if DENSE not in self.manifest["files"]:
            self.graph()
        _ = self.info
        return self.manifest

    def batches(self) -> Iterator[pa.RecordBatch]:
        """The rows, mapped from the file."""
        return batches(self.path / "rows.arrow", ROWS)

    def deleted(self) -> Any:
        """Keys that consumers forget."""
        parts = [batch.column("key").to_numpy() for batch in batches(self.path / "deleted.arrow", DELETED)]
        return np.concatenate([np.empty(0, np.uint64), *parts])

    def dense(self) -> dict[str, Any]:
        """Which entry of the chain holds the last whole network, with the size and checksum of its file."""
        files = self.manifest["files"]
        return {"entry": self.path.name, **files[DENSE]} if DENSE in files else dict(self.manifest.get("dense") or {})

    def graph(self) -> bytes:
        """The network: of this entry, of the one that it names, or that one's with the difference kept here."""
        whole = self.whole_network()
        if XOR not in self.manifest["files"]:
            return whole
        network = difference.apply(self._bytes(XOR), whole, self.path / XOR)
        if storage.checksum(network) != self.manifest.get("network"):
            raise CheckpointError(f"{self.path / XOR} is broken: it does not give the network of {self.path.name}")
        return network

    def whole_network(self) -> bytes:
        """The last whole network of the chain."""
        if DENSE in self.manifest["files"]:
            return self._bytes(DENSE)
        place = self.dense()
        if not NAME.fullmatch(str(place.get("entry"))):
            raise CheckpointError(f"{self.path / storage.MANIFEST} names no entry with its network")
        file: Path = self.path.parent / str(place["entry"]) / DENSE
        try:
            content = file.read_bytes()
        except OSError as error:
            raise CheckpointError(
                f"{file}, the network of {self.path.name}, cannot be read: {error.strerror}",
                "keep an entry in the folder it was published to",
            ) from error
        if storage.checksum(content) != {key: place.get(key) for key in ("bytes", "xxh3_128")}:
            raise CheckpointError(f"{file} is broken: it is not the network of {self.path.name}")
        return content

    def golden(self) -> pa.Table:
        """Requests with what they must give."""
        try:
            found = arrow_ipc.open_bytes(self._bytes("golden.arrow"))
            return pa.Table.from_batches(found, found.schema)
        except (pa.ArrowException, ValueError, MemoryError) as error:
            raise CheckpointError(f"{self.path / 'golden.arrow'} is broken: {error}") from error

    @cached_property
    def info(self) -> dict[str, Any]:
        """When, where and by what it was made."""
        content = self._bytes(INFO)
        try:
            if "sealed" not in self.manifest:  # written before info.json had a hash
                return dict(json.loads(content))
            facts = storage.unsealed(content)
            if facts.pop("entry", None) != self.hash:
                raise ValueError("it belongs to another entry")
            return facts
        except (ValueError, TypeError, RecursionError) as error:
            raise CheckpointError(
                f"{self.path / INFO} is broken: {error}", "restore the entry from a copy, or publish a base"
            ) from error

    def _bytes(self, name: str) -> bytes:
        try:
            return inside(self.path, name).read_bytes()
        except OSError as error:
            raise CheckpointError(f"{self.path / name} cannot be read: {error.strerror}") from error


def _signed(facts: dict[str, Any]) -> bytes:
    return storage.canonical({**facts, "line": storage.digest(facts)}) + b"\n"


def _checked(text: bytes) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads(text)
    if facts.pop("line") != storage.digest(facts):
        raise ValueError("its hash does not fit")
    return facts


@dataclass(frozen=True)
class Header:
    """The first line of a log."""

    begins: int = 1
    """Sequence of its first line."""
    kept: int = 1
    """Directories of entries from here on are there; retention removed those before."""
    parent: str | None = None
    """Hash of the entry that the first line follows."""

    def text(self) -> bytes:
        return _signed({"format": "clickfleet/log", "version": 1, **vars(self)})

    @classmethod
    def parse(cls, text: bytes, path: Path) -> Header | None:
        """None where the line is of an entry: the log has no header."""
        try:
            facts = _checked(text)
            if "begins" not in facts:
                return None
            form, version = facts.pop("format"), facts.pop("version")
            if form != "clickfleet/log" or version > 1:
                raise ValueError(f"{form} {version} is not known here; upgrade clickfleet to read it")
            return cls(**facts)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{path} has a broken line: line 1, {error}", HOW_TO_REPAIR) from error


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
        return _signed(vars(self))

    @classmethod
    def of(cls, entry: Entry) -> Line:
        """The line of an entry, which its manifest gives exactly."""
        facts = entry.manifest
        return cls(entry.sequence, facts["kind"], entry.path.name, entry.hash, facts["parent"], facts["chain"])

    @classmethod
    def parse(cls, text: bytes, path: Path) -> Line:
        try:
            line = cls(**_checked(text))
            if line.kind not in ("base", "delta") or line.name != name_of(line.sequence, line.kind):
                raise ValueError(f"{line.name!r} is no name of entry {line.sequence}")
            return line
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{path} has a broken line: {error}", HOW_TO_REPAIR) from error

    def follows(self, before: Line) -> bool:
        return self.parent == before.hash and self.sequence == before.sequence + 1


HOW_TO_REPAIR = "clickfleet verify RUN --repair makes it anew from the entries"


def name_of(sequence: int, kind: str) -> str:
    return f"{sequence:06d}-{kind}"


def since_base(lines: Sequence[Line]) -> Sequence[Line]:
    """The last base and the deltas after it; nothing where there is no base."""
    bases = [i for i, line in enumerate(lines) if line.kind == "base"]
    return lines[bases[-1] :] if bases else []


class Log:
    """A published folder; any number of readers, one writer, who holds a lock. Each line is read and checked once."""

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self.path = self.folder / LOG
        self._forget()
        self._swept: tuple[int, int] | None = None
        """File and size at which no entry was without a line."""

    def _forget(self) -> None:
        self.header: Header | None = None
        self._lines: list[Line] = []
        self._stamp: tuple[int, int, int] | None = None
        self._size = 0  # of all whole lines
        self._last = b""

    def refresh(self) -> bool:
        """Reads what was added since the last look; whether anything is new. A log whose past changed is read anew."""
        try:
            if _stamp(os.stat(self.path)) == self._stamp:
                return False
            with self.path.open("rb") as file:
                stamp = _stamp(os.fstat(file.fileno()))
                file.seek(max(0, self._size - len(self._last)))
                grown = file.read()
                replaced = self._stamp is not None and stamp[0] != self._stamp[0]
                if replaced or not self._last or not grown.startswith(self._last):
                    file.seek(0)
                    self._forget()
                    grown = file.read()
        except FileNotFoundError:
            there = self._stamp is not None
            self._forget()
            return there
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read: {error.strerror}") from error
        for text in grown[len(self._last) :].split(b"\n")[:-1]:
            self._add(text)
        self._stamp = stamp
        return True

    def _add(self, text: bytes) -> None:
        header = Header.parse(text, self.path) if self._size == 0 else None
        if header is not None:
            self.header = header
        else:
            line = Line.parse(text, self.path)
            if not self._lines and (line.sequence, line.parent) != self._first():
                raise CheckpointError(f"{self.path} does not begin with entry {self._first()[0]}", HOW_TO_REPAIR)
            if self._lines and not line.follows(self._lines[-1]):
                raise CheckpointError(
                    f"{self.path}: entry {line.sequence} does not follow entry {self._lines[-1].sequence}",
                    HOW_TO_REPAIR,
                )
            self._lines.append(line)
        self._last = text + b"\n"
        self._size += len(self._last)

    def _first(self) -> tuple[int, str | None]:
        """Sequence and parent that the first line must have."""
        header = self.header or Header()
        return header.begins, header.parent

    def lines(self) -> list[Line]:
        """What was published, oldest first, each the child of the one before."""
        self.refresh()
        return list(self._lines)

    def kept(self) -> list[Line]:
        """The lines whose directories must be there."""
        lines = self.lines()
        if self.header is not None:
            return [line for line in lines if line.sequence >= self.header.kept]
        there = [i for i, line in enumerate(lines) if line.kind == "base" and (self.folder / line.name).exists()]
        return lines[there[0] :] if there else lines  # retention left no other trace in a log without a header

    def entry(self, line: Line) -> Entry:
        """The directory of a line, which must be the one that was published."""
        entry = Entry(self.folder / line.name)
        if entry.hash != line.hash:
            raise CheckpointError(f"{entry.path} is not the entry that {self.path.name} names", "restore it")
        return entry

    def newest(self) -> list[Entry]:
        """The newest base and the deltas after it: together, the model as it was published last."""
        lines = since_base(self.lines())
        if not lines:
            raise CheckpointError(f"{self.folder} holds no published base")
        return [self.entry(line) for line in lines]

    def append(self, rows: Rows, content: Content) -> Entry:
        """Writes an entry and its line; the cost does not depend on how many there are."""
        head = self.recover()
        before = None if head is None else self.entry(head)
        parent = None if head is None else head.hash
        sequence = self._first()[0] if head is None else head.sequence + 1
        kind = "base" if rows.base else "delta"
        named = self._chain(before, kind, sequence, content)
        path = self.folder / name_of(sequence, kind)
        place = {"sequence": sequence, "parent": parent, "chain": named}
        entry = write(path, rows, content, before, **place)
        try:
            self._write_line(Line.of(entry))
        except CheckpointError:
            storage.remove(entry.path)  # nobody has heard of it
            raise
        return entry

    def _write_line(self, line: Line) -> None:
        """Adds a line to what `recover` found; a failure leaves the file as it was."""
        text = (b"" if self._size else Header().text()) + line.text()
        with storage.plainly(self.path), open(self.path, "r+b", opener=_made) as out:
            out.seek(self._size)
            try:
                out.write(text)
                out.flush()
                os.fsync(out.fileno())
            except OSError:
                out.truncate(self._size)
                raise
            self._swept = (os.fstat(out.fileno()).st_ino, self._size + len(text))

    def _chain(self, before: Entry | None, kind: str, sequence: int, content: Content) -> str:
        identity = content.identity()
        if before is not None and {k: before.manifest.get(k) for k in identity} == _plain(identity):
            return str(before.manifest["chain"])
        if kind != "base":
            raise CheckpointError(
                f"a delta does not fit {self.folder}: it has another schema, model or width", "publish a base first"
            )
        return chain(content, sequence)

    def recover(self) -> Line | None:
        """Mends what a killed writer left; the last line. Entries that may have been published are never removed.

        Half a line at the end is cut off, and an entry that is whole and follows the last line gets its line.
        """
        with storage.plainly(self.path):
            self.folder.mkdir(parents=True, exist_ok=True)
        self.refresh()
        if self._stamp is None or self._swept != self._stamp[:2]:  # another wrote, or was killed while writing
            self._sweep()
        return self._lines[-1] if self._lines else None

    def _sweep(self) -> None:
        last = self._lines[-1].sequence if self._lines else self._first()[0] - 1
        beyond = [(number, path) for number, path in directories(self.folder) if number > last]
        follower = self._follower(last, beyond)
        if self._stamp is not None:
            with storage.plainly(self.path):
                os.truncate(self.path, self._size)
            self._swept = (self._stamp[0], self._size)
        if follower is not None:
            self._write_line(Line.of(follower))
        self.refresh()

    def _follower(self, last: int, beyond: list[tuple[int, Path]]) -> Entry | None:
        """The entry without a line that a killed writer left; any other state is damage."""
        if not beyond:
            return None
        names = f"{beyond[0][1].name} to {beyond[-1][1].name}" if len(beyond) > 1 else beyond[0][1].name
        cut_off = CheckpointError(
            f"{self.path} ends with entry {last or 'none'}, and {self.folder} holds {names}: the log was cut off, "
            "and nothing was published or removed",
            f"{HOW_TO_REPAIR}; or move that aside",
        )
        if len(beyond) > 1 or beyond[0][0] != last + 1:
            raise cut_off
        entry = Entry(beyond[0][1])
        line = Line.of(entry)
        fits = line.follows(self._lines[-1]) if self._lines else (line.sequence, line.parent) == self._first()
        if not fits or line.name != name_of(line.sequence, line.kind):
            raise cut_off
        entry.verify()
        return entry

    def begin(self, begins: int, kept: int) -> None:
        """Drops the lines before a sequence and says from which one on directories are kept; at once or not at all."""
        lines = self.lines()
        first = next((line for line in lines if line.sequence >= begins), None)
        if first is None or self.header == (header := Header(first.sequence, kept, first.parent)):
            return
        self.rewrite(header, [line for line in lines if line.sequence >= begins])

    def rewrite(self, header: Header, lines: Sequence[Line]) -> None:
        """Replaces the whole log."""
        storage.replace(self.path, header.text() + b"".join(line.text() for line in lines))
        self.refresh()
        assert self._stamp is not None
        self._swept = (self._stamp[0], self._size)

    def text(self) -> bytes:
        """The log as it is, for a copy of it: header and lines."""
        self.refresh()
        header = b"" if self.header is None else self.header.text()
        return header + b"".join(line.text() for line in self._lines)


def _made(path: str, flags: int) -> int:
    """Opens a file, which is made where it is not there."""
    return os.open(path, flags | os.O_CREAT, 0o644)


def _stamp(found: os.stat_result) -> tuple[int, int, int]:
    return found.st_ino, found.st_size, found.st_mtime_ns


def directories(folder: Path) -> list[tuple[int, Path]]:
    """The entries of a folder by sequence, whether the log names them or not."""
    if not folder.is_dir():
        return []
    found = ((NAME.fullmatch(path.name), path) for path in folder.iterdir() if path.is_dir())
    return sorted((int(match[1]), path) for match, path in found if match)


def chain(content: Content, first: int) -> str:
    """The name of the chain that begins with entry `first`."""
    return storage.digest({**content.identity(), "first": first})


def write(path: Path, rows: Rows, content: Content, before: Entry | None = None, **place: Any) -> Entry:
    """An entry as a directory, outside a log or for one; a delta may lean on the network of the entry `before` it."""
    with storage.write(path, KIND) as out:
        network = _write_network(out, content.graph, None if rows.base else before)
        sample = Sample()
        written = _write_rows(out, rows, content.factors, sample)
        gone = sample.deleted = rows.deleted
        if len(np.unique(gone)) != len(gone):
            raise CheckpointError(f"{path} would delete a key twice", "this is a fault of clickfleet; please report it")
        _write_table(out, "deleted.arrow", pa.table({"key": pa.array(gone, pa.uint64())}, DELETED))
        _write_table(out, "golden.arrow", content.golden(sample))
        out.beside(INFO, content.info)
        out.facts = {
            "kind": "base" if rows.base else "delta",
            **content.identity(),
            "step": content.step,
            "rows": written,
            "deleted": len(gone),
            "sealed": [INFO],
            **network,
            **content.more,
            **place,
        }
    return Entry(path)


def _write_network(out: storage.Writer, graph: bytes, before: Entry | None) -> dict[str, Any]:
    """The network whole, or what differs from the last whole one; facts for the manifest."""
    dense = {} if before is None else before.dense()
    if dense.items() >= (checksum := storage.checksum(graph)).items():
        return {"version": VERSION, "dense": dense}
    if before is not None and len(graph) >= LARGE_NETWORK and dense.get("bytes") == len(graph):
        content = difference.make(graph, before.whole_network())
        if len(content) <= WORTH * len(graph):
            out.put(XOR, content)
            return {"version": VERSION, "dense": dense, "network": checksum}
    out.put(DENSE, graph)
    return {}


class _Gathered:
    """Rows of one kind until they fill a record batch."""

    def __init__(self, width: int) -> None:
        self.width, self.size = width, 0
        self._parts: list[Columns] = []
        self._last = -1
        """The largest hash so far."""

    def add(self, columns: Columns) -> Iterator[pa.RecordBatch]:
        self._check(columns)
        self._parts.append(columns)
        self.size += len(columns["key"])
        while self.size >= BATCH_ROWS:
            yield self.take(BATCH_ROWS)

    def _check(self, columns: Columns) -> None:
        """Refuses what no consumer would take: rows out of the order of their hashes, or of another width."""
        keys = np.ascontiguousarray(columns["key"])
        if not len(keys):
            return
        mixed = np.empty_like(keys)
        _core.mix64(keys, mixed)
        if int(mixed[0]) <= self._last or not (mixed[1:] > mixed[:-1]).all():
            raise CheckpointError(
                "rows to publish are not in the order of their hashes",
                "this is a fault of clickfleet; please report it",
            )
        if len(columns["embedx"]) != len(keys) * self.width:
            raise CheckpointError(f"rows to publish have other widths than 0 and {self.width}")
        self._last = int(mixed[-1])

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
