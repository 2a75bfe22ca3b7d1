"""The published log: the model for consumers, as a base followed by deltas. Each entry is a folder that names its predecessor.

    <published>/000007-delta/  manifest.json  rows.arrow  deleted.arrow  dense.onnx  golden.arrow  info.json
    <published>/LOG.jsonl      a header, then a line per entry, in order

`rows.arrow` is an Arrow IPC file with the rows to set: key uint64 · slot uint16 (65535: none) · embed_w float32 · embedx list<float32>
(empty in a short row), all without nulls. A record batch holds only rows of one width. Each width ascends by mix64(key) through
the file, and every batch of a kind except its last has exactly 2^20 rows. A client that maps the file finds row r of a kind in that
kind's batch r >> 20. A model without factors has one kind. `deleted.arrow` has the keys to delete. An entry sets a key once or deletes
it once, never both. `golden.arrow` has requests and their expected results: dense list<float32> · keys list<uint64> · counts
list<uint32> (keys per slot) · one list<float32> per output.

`dense.onnx` is the whole network, with inputs dense[B, F], first[B, S], factors[B, S, D] and the outputs that the manifest names. A
delta may refer to the last whole network of its chain instead (format version 2): `dense` in its manifest names that entry, with the
size and checksum of the file. Without `dense.xor` the network is the same. With it, the network is the XOR of the unpacked `dense.xor`
and that file, and `network` has its size and checksum. `dense.xor` holds every fourth byte beginning with the first, then every fourth
beginning with the second and so on (zeros pad the last four), compressed by zstd.

Rows in a small format (format version 4, `row_format` in the manifest) are records instead of lists: the widest rows in `rows.arrow`,
narrower ones in `rows-W.arrow` and `short.arrow`, each in the same order as above. store/row_format.py describes them. Golden requests
are answered with the rows as they are published. The entries of a chain may differ in their format.

`calibration.json`, where there is one (format version 3), maps the scores of the network to those that are served: see
store/calibration.py. Golden scores are calibrated; the output `logit` is not.

The manifest covers all files except info.json, which tells when, where and by which versions the entry was written; in a base it may
hold the values behind frequent keys (`names`). So a replay gives equal hashes. info.json holds the manifest's hash and its own. The
fact `sealed` in the manifest marks this; entries without it are older. Further facts: kind, sequence, parent (hash of the previous
manifest, null in the first), chain, schema, model, factors, rows, deleted, step, outputs. All entries of a chain have the same schema
and model; a change starts a new chain with a base.

The header of the log holds the sequence of its first line, the hash that this line follows, and the sequence from which folders are
`kept`. Retention rewrites the file without the oldest lines, then removes folders. Logs without a header are older. A line repeats
sequence, kind, name, hash, parent and chain. The header and each line hold their own BLAKE2b-256. Bytes after the last complete line
were not published. A folder is complete before its line is written, so a killed writer leaves at most one entry without a line, the next
one in order. The next writer adds that line. Nothing here needs torch.
"""

from __future__ import annotations

import bisect
import contextlib
import json
import os
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, TypedDict, cast

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from clickfleet.data import arrow_ipc
from clickfleet.data.arrow_ipc import FLOATS, batches, columns, numbers
from clickfleet.data.files import inside
from clickfleet.errors import CheckpointError
from clickfleet.store import atomic, row_format
from clickfleet.store.calibration import FILE as CALIBRATION
from clickfleet.store.calibration import Calibration
from clickfleet.store.row_format import FULL, ROWS, RecordBatch, RowFormat
from clickfleet.store.table import Columns, Floats, Keys, mix64

_ZSTD = pa.Codec("zstd", compression_level=-5)
"""A fast level: half the bytes of a difference are noise, which no level makes smaller."""


def make_difference(new: bytes, old: bytes) -> bytes:
    """Return the content of `dense.xor` for two networks of the same length."""
    words = _words(new) ^ _words(old)
    planes = np.empty((4, len(words)), np.uint8)
    for place, plane in enumerate(planes):
        np.copyto(plane, words >> np.uint32(8 * place), casting="unsafe")
    packed: bytes = _ZSTD.compress(planes, asbytes=True)
    return packed


def apply_difference(difference: bytes, old: bytes, path: Path) -> bytes:
    """Return the new network. `path` is where the difference was read from, for errors."""
    words = _words(old).copy()
    wide = np.empty_like(words)
    try:
        raw = _ZSTD.decompress(difference, decompressed_size=4 * len(words))
        for place, plane in enumerate(np.frombuffer(raw, np.uint8).reshape(4, -1)):
            np.copyto(wide, plane)
            wide <<= np.uint32(8 * place)
            words ^= wide
    except (pa.ArrowException, OSError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    return words.tobytes()[: len(old)]


def _words(content: bytes) -> NDArray[np.uint32]:
    """Return bytes as little-endian words. Zeros pad the last one."""
    return np.frombuffer(content + bytes(-len(content) % 4), "<u4")


LOG = "LOG.jsonl"
KIND = "published"
VERSION = 4
"""Newest readable format of an entry."""
BATCH_ROWS = 1 << 20
NAME = re.compile(r"(\d{6,})-(base|delta)")
DENSE, XOR, INFO = "dense.onnx", "dense.xor", "info.json"
LARGE_NETWORK = 1 << 16
"""Smallest network, in bytes, for which a difference is written."""
WORTH = 0.85
"""A difference is used if it takes at most this fraction of the whole network."""

DELETED = columns({"key": pa.uint64()})


class EventTimes(TypedDict):
    """The times of the events that an entry has learned, in seconds since 1970, by the clock of whoever wrote them.

    It is `events` in info.json; an entry without it has learned no events with a time.
    """

    rows: int
    oldest: float
    newest: float
    times: list[float]
    """At even steps from the oldest to the newest event: each stands for as many events."""


class NetworkFile(TypedDict, total=False):
    """The entry that has a network, with the size and checksum of its file; empty if there is none."""

    entry: str
    bytes: int
    xxh3_128: str


class PublishedRows(Protocol):
    """What an entry sets and deletes: `Changes` of a table, or a part of them."""

    base: bool

    def __iter__(self) -> Iterator[Columns]: ...
    @property
    def deleted(self) -> Keys:
        """Available after the last rows were read."""
        ...


class Sample:
    """A few rows of every slot, and the deleted keys, from which golden requests are made."""

    PER_SLOT, ROWS = 4, 1 << 16

    def __init__(self) -> None:
        self.rows: dict[int, list[tuple[int, Floats]]] = {}
        """Slot -> pairs of a key and its [embed_w, factors] (no factors in a short row)."""
        self.deleted: Keys = np.empty(0, np.uint64)
        self._left = self.ROWS

    @property
    def left(self) -> int:
        """Rows that it still looks at."""
        return self._left

    def add(self, columns: Columns, width: int) -> None:
        """Keep a few of these rows, which have `width` factors each."""
        size = min(len(columns["key"]), self._left)
        self._left -= size
        for slot in np.unique(columns["slot"][:size]).tolist():
            kept = self.rows.setdefault(slot, [])
            for i in np.flatnonzero(columns["slot"][:size] == slot)[: self.PER_SLOT - len(kept)]:
                factors = columns["embedx"][i * width : (i + 1) * width]
                kept.append((int(columns["key"][i]), np.append(columns["embed_w"][i], factors).astype(np.float32)))


@dataclass(frozen=True)
class Content:
    """What an entry contains besides its rows."""

    schema: Mapping[str, object]
    model: Mapping[str, object]
    factors: int
    step: int
    graph: bytes
    golden: Callable[[Sample], pa.Table]
    outputs: tuple[str, ...]
    info: Mapping[str, object] = field(default_factory=dict)
    more: Mapping[str, object] = field(default_factory=dict)
    """Further facts for the manifest."""
    calibration: Calibration | None = None
    """What maps the scores of the network to those that are served."""
    row_format: RowFormat = "float32"
    """How rows are stored."""
    names: Mapping[str, object] | None = None
    """The values behind frequent keys. They are part of the info.json of a base, so they change no hash."""

    def identity(self) -> dict[str, object]:
        """Return what all entries of a chain have in common."""
        return {"schema": self.schema, "model": self.model, "factors": self.factors, "outputs": list(self.outputs)}


class Entry:
    """One published entry. Opening it checks its manifest; `verify` checks every byte."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.manifest = atomic.read_manifest(self.path, KIND, VERSION)
        self.hash = atomic.digest(self.manifest)
        self._network: bytes | None = None
        """The network that `verify` has put together, until it is asked for."""

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
        """Size of its files in bytes."""
        return sum(int(file["bytes"]) for file in self.manifest["files"].values())

    @property
    def row_format(self) -> RowFormat:
        """How its rows are stored."""
        found = self.manifest.get("row_format", "float32")
        if found not in row_format.FORMATS:
            raise CheckpointError(f"{self.path / atomic.MANIFEST} names an unknown row_format: {found}")
        return cast(RowFormat, found)

    @property
    def row_files(self) -> tuple[str, ...]:
        """Names of the files with its rows."""
        return tuple(row_format.widths_of(self.manifest["files"], int(self.manifest["factors"])))

    @property
    def row_bytes(self) -> int:
        """Size of its rows in bytes."""
        return sum(int(self.manifest["files"][name]["bytes"]) for name in self.row_files)

    def describe_rows(self) -> str:
        """Return a line about its rows: format, bytes, and how far the format moves golden scores."""
        return row_format.describe(
            self.row_format, self.row_bytes, int(self.manifest["rows"]), self.info.get("golden_drift")
        )

    def verify(self, rows_only: bool = False) -> atomic.Manifest:
        """Check every byte, or only those of the rows. Return the manifest."""
        if rows_only:
            files = {name: self.manifest["files"][name] for name in (*self.row_files, "deleted.arrow")}
            atomic.verify_files(self.path, {**self.manifest, "files": files})
        else:
            atomic.verify_files(self.path, self.manifest)
            if DENSE not in self.manifest["files"]:
                self._network = self.graph()
        _ = self.info
        return self.manifest

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yield the rows in float32: mapped from the file, or unpacked."""
        form = self.row_format
        if form == "float32":
            yield from batches(self.path / FULL, ROWS)
            return
        for factors, part in self.records():
            yield row_format.as_floats(form, part, factors)

    def records(self) -> Iterator[tuple[int, RecordBatch]]:
        """Yield the rows in their small format, each record batch with the number of factors of its rows."""
        widths = row_format.widths_of(self.manifest["files"], int(self.manifest["factors"]))
        for name, width in sorted(widths.items(), key=lambda item: -item[1]):
            for part in row_format.read_records(self.path / name, self.row_format, width):
                yield width, part

    def deleted(self) -> Any:
        """Return the keys that consumers must delete."""
        parts = [batch.column("key").to_numpy() for batch in batches(self.path / "deleted.arrow", DELETED)]
        return np.concatenate([np.empty(0, np.uint64), *parts])

    def dense(self) -> NetworkFile:
        """Return the name of the entry with the chain's last whole network, and the size and checksum of that file."""
        files = self.manifest["files"]
        if DENSE not in files:
            return cast(NetworkFile, self.manifest.get("dense") or {})
        return {"entry": self.path.name, "bytes": files[DENSE]["bytes"], "xxh3_128": files[DENSE]["xxh3_128"]}

    def graph(self) -> bytes:
        """Return the network: from this entry, or from the entry it refers to, with the difference applied if there is one."""
        if self._network is not None:
            network, self._network = self._network, None
            return network
        whole = self.whole_network()
        if XOR not in self.manifest["files"]:
            return whole
        network = apply_difference(self._bytes(XOR), whole, self.path / XOR)
        if atomic.checksum(network) != self.manifest.get("network"):
            raise CheckpointError(f"{self.path / XOR} is damaged: it does not produce the network of {self.path.name}")
        return network

    @property
    def network(self) -> object:
        """Size and checksum of the network, whichever files it is made of."""
        dense = self.dense()
        return self.manifest.get("network") or {key: dense.get(key) for key in ("bytes", "xxh3_128")}

    def whole_network(self) -> bytes:
        """Return the last whole network of the chain."""
        if DENSE in self.manifest["files"]:
            content = self._bytes(DENSE)
            if atomic.checksum(content) != self.manifest["files"][DENSE]:
                raise CheckpointError(f"{self.path / DENSE} is damaged: its checksum differs")
            return content
        dense = self.dense()
        if not NAME.fullmatch(str(dense.get("entry"))):
            raise CheckpointError(f"{self.path / atomic.MANIFEST} does not name the entry with its network")
        file: Path = self.path.parent / str(dense["entry"]) / DENSE
        try:
            content = file.read_bytes()
        except OSError as error:
            raise CheckpointError(
                f"cannot read {file}, the network of {self.path.name}: {error.strerror}",
                "leave entries in the folder they were published to",
            ) from error
        if atomic.checksum(content) != {key: dense.get(key) for key in ("bytes", "xxh3_128")}:
            raise CheckpointError(f"{file} is damaged: it is not the network of {self.path.name}")
        return content

    def calibration(self) -> Calibration | None:
        """Return the map from the scores of the network to those that are served; None if they are the same."""
        if CALIBRATION not in self.manifest["files"]:
            return None
        content = self._bytes(CALIBRATION)
        if atomic.checksum(content) != self.manifest["files"][CALIBRATION]:
            raise CheckpointError(f"{self.path / CALIBRATION} is damaged: its checksum differs")
        return Calibration.from_bytes(content, self.path / CALIBRATION)

    def golden(self) -> pa.Table:
        """Return the golden requests with their expected results."""
        try:
            requests = arrow_ipc.open_bytes(self._bytes("golden.arrow"))
            return pa.Table.from_batches(requests, requests.schema)
        except (pa.ArrowException, ValueError, MemoryError) as error:
            raise CheckpointError(f"{self.path / 'golden.arrow'} is damaged: {error}") from error

    @cached_property
    def info(self) -> dict[str, Any]:
        """When, where and by which versions it was written."""
        content = self._bytes(INFO)
        try:
            if "sealed" not in self.manifest:  # written before info.json had a hash
                return dict(json.loads(content))
            facts = atomic.unseal(content)
            if facts.pop("entry", None) != self.hash:
                raise ValueError("it belongs to another entry")
            return facts
        except (ValueError, TypeError, RecursionError) as error:
            raise CheckpointError(
                f"{self.path / INFO} is damaged: {error}", "restore the entry from a copy, or publish a base"
            ) from error

    def _bytes(self, name: str) -> bytes:
        try:
            return inside(self.path, name).read_bytes()
        except OSError as error:
            raise CheckpointError(f"cannot read {self.path / name}: {error.strerror}") from error


@dataclass(frozen=True)
class Header:
    """The first line of a log."""

    begins: int = 1
    """Sequence of the first line."""
    kept: int = 1
    """Sequence of the oldest entry whose folder exists; retention removed the older ones."""
    parent: str | None = None
    """Hash of the entry before the first line."""

    def text(self) -> bytes:
        return atomic.seal({"format": "clickfleet/log", "version": 1, **vars(self)}, "line") + b"\n"

    @classmethod
    def parse(cls, text: bytes, path: Path) -> Header | None:
        """Return the header, or None if the line belongs to an entry, because the log has no header."""
        try:
            facts = atomic.unseal(text.removesuffix(b"\n"), "line")
            if "begins" not in facts:
                return None
            kind, version = facts.pop("format"), facts.pop("version")
            if kind != "clickfleet/log" or version > 1:
                raise ValueError(f"{kind} {version} is unknown; upgrade clickfleet to read it")
            return cls(**facts)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise CheckpointError(f"{path} is damaged: line 1: {error}", HOW_TO_REPAIR) from error


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
        return atomic.seal(vars(self), "line") + b"\n"

    @classmethod
    def of(cls, entry: Entry) -> Line:
        """Return the line of an entry, which follows from its manifest."""
        facts = entry.manifest
        return cls(entry.sequence, facts["kind"], entry.path.name, entry.hash, facts["parent"], facts["chain"])

    @classmethod
    def parse(cls, text: bytes, path: Path) -> Line:
        try:
            facts = atomic.unseal(text.removesuffix(b"\n"), "line")
            line = cls(**{**facts, "chain": sys.intern(facts["chain"])})  # equal in many lines
            if line.kind not in ("base", "delta") or line.name != name_of(line.sequence, line.kind):
                raise ValueError(f"{line.name!r} is not a name of entry {line.sequence}")
            return line
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise CheckpointError(f"{path} has a damaged line: {error}", HOW_TO_REPAIR) from error

    def follows(self, before: Line) -> bool:
        return self.parent == before.hash and self.sequence == before.sequence + 1


HOW_TO_REPAIR = "clickfleet verify RUN --repair rebuilds it from the entries"


def name_of(sequence: int, kind: str) -> str:
    return f"{sequence:06d}-{kind}"


def since_base(lines: Sequence[Line]) -> Sequence[Line]:
    """Return the last base and the deltas after it; empty if there is no base."""
    bases = [i for i, line in enumerate(lines) if line.kind == "base"]
    return lines[bases[-1] :] if bases else []


class Log:
    """A published folder, for any number of consumers and one writer, which must hold the lock. Each line is read and checked once.

    Threads may share it: a trainer looks for newer entries while another thread appends one.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self.path = self.folder / LOG
        self._reading = threading.RLock()
        """Held while lines are added or looked up."""
        self._forget()
        self._swept: tuple[int, int] | None = None
        """Inode and size of the log when every entry was known to have its line."""

    def _forget(self) -> None:
        self.header: Header | None = None
        self._lines: list[Line] = []
        self._bases: list[int] = []
        """Places of the bases in `_lines`."""
        self._stamp: tuple[int, int, int] | None = None
        self._size = 0  # of all whole lines
        self._last = b""

    def refresh(self) -> bool:
        """Read the lines added since the last call. Return whether anything changed. A log that was rewritten is read from the start."""
        with self._reading:
            return self._read()

    def _read(self) -> bool:
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
            existed = self._stamp is not None
            self._forget()
            return existed
        except OSError as error:
            raise CheckpointError(f"cannot read {self.path}: {error.strerror}") from error
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
            if line.kind == "base":
                self._bases.append(len(self._lines))
            self._lines.append(line)
        self._last = text + b"\n"
        self._size += len(self._last)

    def _first(self) -> tuple[int, str | None]:
        """Return the sequence and parent that the first line must have."""
        header = self.header or Header()
        return header.begins, header.parent

    def lines(self) -> list[Line]:
        """Return all lines, oldest first; each names the one before as its parent."""
        with self._reading:
            self.refresh()
            return list(self._lines)

    @property
    def head(self) -> Line | None:
        """The last line, as of the last `refresh`."""
        with self._reading:
            return self._lines[-1] if self._lines else None

    @property
    def first(self) -> Line | None:
        """The first line, as of the last `refresh`."""
        with self._reading:
            return self._lines[0] if self._lines else None

    def find(self, sequence: int) -> Line | None:
        """Return the line of a sequence, as of the last `refresh`. Sequences are consecutive."""
        with self._reading:
            place = sequence - self._lines[0].sequence if self._lines else -1
            return self._lines[place] if 0 <= place < len(self._lines) else None

    def after(self, sequence: int, entry_hash: str) -> list[Line] | None:
        """Return the lines after an entry, as of the last `refresh`; None if the log does not continue it."""
        with self._reading:
            line = self.find(sequence)
            if line is not None:
                return self._lines[sequence - self._lines[0].sequence + 1 :] if line.hash == entry_hash else None
            return list(self._lines) if self._lines and self._lines[0].parent == entry_hash else None

    def chain(self, upto: int | None = None) -> list[Line]:
        """Return the last base and the deltas after it, as of the last `refresh`; empty if there is no base.

        With `upto`, the model of that sequence.
        """
        with self._reading:
            end = len(self._lines) if upto is None else upto - self._lines[0].sequence + 1 if self._lines else 0
            base = bisect.bisect_left(self._bases, max(end, 0))
            return self._lines[self._bases[base - 1] : max(end, 0)] if base else []

    def kept(self) -> list[Line]:
        """Return the lines whose folders must exist."""
        lines = self.lines()
        if self.header is not None:
            return [line for line in lines if line.sequence >= self.header.kept]
        # Older logs have no header. Missing folders are the only trace of retention.
        bases = [i for i, line in enumerate(lines) if line.kind == "base" and (self.folder / line.name).exists()]
        return lines[bases[0] :] if bases else lines

    def entry(self, line: Line) -> Entry:
        """Open the entry of a line. Raise CheckpointError if its hash differs."""
        entry = Entry(self.folder / line.name)
        if entry.hash != line.hash:
            raise CheckpointError(
                f"{entry.path} is not the entry that {self.path.name} names", "restore the entry from a copy"
            )
        return entry

    def newest(self) -> list[Entry]:
        """Return the newest base and the deltas after it: the newest published model."""
        self.refresh()
        lines = self.chain()
        if not lines:
            raise CheckpointError(f"{self.folder} holds no published base")
        return [self.entry(line) for line in lines]

    def append(self, rows: PublishedRows, content: Content) -> Entry:
        """Write an entry and its line. The cost does not depend on the length of the log."""
        head = self.recover()
        before = None if head is None else self.entry(head)
        parent = None if head is None else head.hash
        sequence = self._first()[0] if head is None else head.sequence + 1
        kind = "base" if rows.base else "delta"
        chain = self._chain(before, kind, sequence, content)
        path = self.folder / name_of(sequence, kind)
        entry = write(path, rows, content, before, sequence=sequence, parent=parent, chain=chain)
        try:
            self._write_line(Line.of(entry))
        except CheckpointError:
            atomic.remove(entry.path)  # it is not published without its line
            raise
        return entry

    def _write_line(self, line: Line) -> None:
        """Append a line after `recover`. A failure leaves the file unchanged."""
        text = (b"" if self._size else Header().text()) + line.text()
        with atomic.write_errors(self.path):
            atomic.append(self.path, text, durable=True)
            self._swept = _stamp(os.stat(self.path))[:2]

    def _chain(self, before: Entry | None, kind: str, sequence: int, content: Content) -> str:
        identity = content.identity()
        if before is not None and {k: before.manifest.get(k) for k in identity} == _plain(identity):
            return str(before.manifest["chain"])
        if kind != "base":
            raise CheckpointError(
                f"cannot append a delta to {self.folder}: its schema, model or width differs", "publish a base first"
            )
        return chain(content, sequence)

    def recover(self) -> Line | None:
        """Repair what a killed writer left, and return the last line. Never remove an entry that may have been published.

        An incomplete line at the end is removed. A complete entry that follows the last line gets its line.
        """
        with atomic.write_errors(self.path):
            self.folder.mkdir(parents=True, exist_ok=True)
        self.refresh()
        if self._stamp is None or self._swept != self._stamp[:2]:
            self._sweep()  # another process wrote to the log, or was killed while writing
        return self.head

    def _sweep(self) -> None:
        last = self._lines[-1].sequence if self._lines else self._first()[0] - 1
        beyond = [(number, path) for number, path in directories(self.folder) if number > last]
        follower = self._follower(last, beyond)
        if self._stamp is not None:
            with atomic.write_errors(self.path):
                os.truncate(self.path, self._size)
            self._swept = (self._stamp[0], self._size)
        if follower is not None:
            self._write_line(Line.of(follower))
        self.refresh()

    def _follower(self, last: int, beyond: list[tuple[int, Path]]) -> Entry | None:
        """Return the entry without a line that a killed writer left. Raise CheckpointError for any other mismatch."""
        if not beyond:
            return None
        names = f"{beyond[0][1].name} to {beyond[-1][1].name}" if len(beyond) > 1 else beyond[0][1].name
        cut_off = CheckpointError(
            f"{self.path} ends with entry {last or 'none'}, but {self.folder} holds {names}: the log was truncated. "
            "Nothing was published or removed",
            f"{HOW_TO_REPAIR}; or move those entries away",
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

    def drop_before(self, begins: int, kept: int) -> None:
        """Drop the lines before sequence `begins` and record that folders are kept from sequence `kept` on, atomically."""
        lines = self.lines()
        first = next((line for line in lines if line.sequence >= begins), None)
        if first is None or self.header == (header := Header(first.sequence, kept, first.parent)):
            return
        self.rewrite(header, [line for line in lines if line.sequence >= begins])

    def rewrite(self, header: Header, lines: Sequence[Line]) -> None:
        """Replace the whole log."""
        atomic.write_file(self.path, header.text() + b"".join(line.text() for line in lines))
        self.refresh()
        assert self._stamp is not None
        self._swept = (self._stamp[0], self._size)

    def text(self) -> bytes | None:
        """Return the header and all lines as of the last `refresh`, for a copy of the log; None if it was rewritten since."""
        try:
            with self._reading, self.path.open("rb") as file:
                same = self._stamp is not None and os.fstat(file.fileno()).st_ino == self._stamp[0]
                return file.read(self._size) if same else None
        except FileNotFoundError:
            return None


def _stamp(facts: os.stat_result) -> tuple[int, int, int]:
    return facts.st_ino, facts.st_size, facts.st_mtime_ns


def directories(folder: Path) -> list[tuple[int, Path]]:
    """Return all entries in a folder by sequence, whether or not the log names them."""
    if not folder.is_dir():
        return []
    matches = ((NAME.fullmatch(path.name), path) for path in folder.iterdir() if path.is_dir())
    return sorted((int(match[1]), path) for match, path in matches if match)


def chain(content: Content, first: int) -> str:
    """Return the name of the chain that starts with entry `first`."""
    return atomic.digest({**content.identity(), "first": first})


def write(
    path: Path,
    rows: PublishedRows,
    content: Content,
    before: Entry | None = None,
    *,
    replaces: bool = False,
    **place: Any,
) -> Entry:
    """Write an entry, for a log or on its own. A delta may refer to the network of the entry `before` it.

    With `replaces`, it takes the place of an entry that stands alone.
    """
    if replaces and (path.parent / LOG).exists():
        raise CheckpointError(f"{path} is an entry of a published log, which is not replaced", "choose another name")
    with atomic.write_folder(path, KIND, replaces) as out:
        network = _write_network(out, content.graph, None if rows.base else before)
        if content.calibration is not None:
            out.put(CALIBRATION, content.calibration.to_bytes())
            network["version"] = 3
        small = content.row_format != "float32"
        sample, exact = Sample(), Sample()
        written = _write_rows(out, rows, content, sample, exact)
        deleted = sample.deleted = exact.deleted = rows.deleted
        if len(np.unique(deleted)) != len(deleted):
            raise CheckpointError(f"{path} would delete a key twice", "this is a bug in clickfleet; please report it")
        write_table(out, "deleted.arrow", pa.table({"key": pa.array(deleted, pa.uint64())}, DELETED))
        golden = content.golden(sample)
        write_table(out, "golden.arrow", golden)
        drift: dict[str, object] = {}
        if small:
            network = {**network, "version": VERSION, "row_format": content.row_format}
            drift = {"golden_drift": _largest_gap(golden, content.golden(exact))}
        names = {"names": content.names} if rows.base and content.names is not None else {}
        out.beside(INFO, {**drift, **content.info, **names})
        out.facts = {
            "kind": "base" if rows.base else "delta",
            **content.identity(),
            "step": content.step,
            "rows": written,
            "deleted": len(deleted),
            "sealed": [INFO],
            **network,
            **content.more,
            **place,
        }
    return Entry(path)


def _write_network(out: atomic.FolderWriter, graph: bytes, before: Entry | None) -> dict[str, object]:
    """Write the whole network, or its difference from the last whole one. Return facts for the manifest."""
    dense: NetworkFile = {} if before is None else before.dense()
    if dense.items() >= (checksum := atomic.checksum(graph)).items():
        return {"version": 2, "dense": dense}
    if before is not None and len(graph) >= LARGE_NETWORK and dense.get("bytes") == len(graph):
        content = make_difference(graph, before.whole_network())
        if len(content) <= WORTH * len(graph):
            out.put(XOR, content)
            return {"version": 2, "dense": dense, "network": checksum}
    out.put(DENSE, graph)
    return {}


def has_network(folder: Path) -> bool:
    """Return whether an entry that is being written has its network, or will have none: its rows are written after it."""
    return (folder / FULL).exists()


def unfinished_network(folder: Path, before: Entry) -> bytes | None:
    """Return the network of an entry that is being written; None if it is that of the entry `before` it.

    Nobody has checked it: compare its checksum with `Entry.network` when the entry is complete.
    """
    if (folder / DENSE).exists():
        return (folder / DENSE).read_bytes()
    if (folder / XOR).exists():
        return apply_difference((folder / XOR).read_bytes(), before.whole_network(), folder / XOR)
    return None


def _largest_gap(found: pa.Table, exact: pa.Table) -> float | None:
    """Return the largest difference of a golden score, or of a logit; None if there is neither."""
    name = next((name for name in ("score", "logit") if name in found.column_names), None)
    if name is None or not found.num_rows:
        return None
    ours, theirs = (numbers(table.column(name).combine_chunks().flatten(), np.float32) for table in (found, exact))
    gap = float(np.abs(ours - theirs).max(initial=0.0))
    return gap if np.isfinite(gap) else None


class _RowBuffer:
    """Collects rows of one kind until they fill a record batch."""

    def __init__(self, width: int, form: RowFormat = "float32", slots: int = 0) -> None:
        self.width, self.form, self.size = width, form, 0
        self.schema = ROWS if form == "float32" else row_format.schema(form, width, slots)
        self._parts: list[Columns] = []
        self._last = -1
        """Largest hash so far."""

    def add(self, columns: Columns) -> Iterator[pa.RecordBatch]:
        """Add rows as `prepare` returned them."""
        self._parts.append(columns)
        self.size += len(columns["key"])
        while self.size >= BATCH_ROWS:
            yield self.take(BATCH_ROWS)

    def prepare(self, columns: Columns) -> Columns:
        """Check rows, and pack them if the format is small."""
        self._check(columns)
        if self.form == "float32":
            return columns
        plain = {name: columns[name] for name in ("key", "slot")}
        return {**plain, "record": row_format.pack(self.form, columns, self.width)}

    def _check(self, columns: Columns) -> None:
        """Raise CheckpointError for rows that consumers would reject: not ordered by hash, or of another width."""
        keys = columns["key"]
        if not len(keys):
            return
        hashes = mix64(keys)
        if int(hashes[0]) <= self._last or not (hashes[1:] > hashes[:-1]).all():
            raise CheckpointError(
                "rows to publish are not ordered by their hashes",
                "this is a bug in clickfleet; please report it",
            )
        if len(columns["embedx"]) != len(keys) * self.width:
            raise CheckpointError(f"rows to publish have a width other than {self.width}")
        self._last = int(hashes[-1])

    def take(self, size: int) -> pa.RecordBatch:
        names = ROWS.names if self.form == "float32" else ("key", "slot", "record")
        joined = {name: np.concatenate([part[name] for part in self._parts]) for name in names}
        ends = {name: size * (self.width if name == "embedx" else 1) for name in names}
        self._parts = [{name: values[ends[name] :] for name, values in joined.items()}]
        self.size -= size
        if self.form != "float32":
            return row_format.record_batch(self.schema, *(joined[name][:size] for name in names))
        plain = [pa.array(joined[name][: ends[name]], ROWS.field(name).type) for name in ROWS.names[:-1]]
        offsets = pa.array(np.arange(size + 1, dtype=np.int32) * np.int32(self.width))
        values = pa.array(joined["embedx"][: ends["embedx"]], pa.float32())
        factors = pa.ListArray.from_arrays(offsets, values, type=FLOATS)
        return pa.RecordBatch.from_arrays([*plain, factors], schema=ROWS)


def _write_rows(
    out: atomic.FolderWriter, rows: Iterable[Columns], content: Content, sample: Sample, exact: Sample
) -> int:
    """Write the rows. `sample` receives some of them as consumers get them; in a small format, `exact` the same before rounding."""
    form, factors = content.row_format, content.factors
    slots = len(cast(Sequence[object], content.schema.get("slots", ())))
    kinds = {factors: _RowBuffer(factors, form, slots)}  # by width
    written = 0
    with contextlib.ExitStack() as opened:

        def open_file(name: str, kind: _RowBuffer) -> Any:
            sink = opened.enter_context(contextlib.closing(out.file(name)))
            return opened.enter_context(pa.ipc.new_file(sink, kind.schema))

        writers = {FULL: open_file(FULL, kinds[factors])}

        def write_batches(kind: _RowBuffer, ready: Iterable[pa.RecordBatch]) -> None:
            name = FULL if form == "float32" else row_format.file_name(kind.width, factors)
            for batch in ready:
                if name not in writers:
                    writers[name] = open_file(name, kind)
                writers[name].write_batch(batch)

        for columns in rows:
            written += len(columns["key"])
            width = len(columns["embedx"]) // max(len(columns["key"]), 1)
            if width > factors:
                raise CheckpointError(f"rows to publish have a width of {width}, more than {factors}")
            if width not in kinds:
                kinds[width] = _RowBuffer(width, form, slots)
            kind = kinds[width]
            prepared = kind.prepare(columns)
            if form == "float32":
                sample.add(columns, kind.width)
            elif sample.left:
                exact.add(columns, kind.width)
                sample.add(_rounded(kind, prepared, sample.left), kind.width)
            write_batches(kind, kind.add(prepared))
        for _, kind in sorted(kinds.items()):
            if kind.size:
                write_batches(kind, [kind.take(kind.size)])
    return written


def _rounded(kind: _RowBuffer, prepared: Columns, most: int) -> Columns:
    """Return the first rows as consumers unpack them."""
    rows = row_format.unpack(kind.form, prepared["record"][:most], kind.width)
    plain = {name: prepared[name][:most] for name in ("key", "slot")}
    return {**plain, "embed_w": rows[:, 0], "embedx": rows[:, 1:].reshape(-1)}


def write_table(out: atomic.FolderWriter, name: str, table: pa.Table) -> None:
    sink = out.file(name)
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    sink.close()


def _plain(value: Any) -> Any:
    return json.loads(atomic.canonical(value))


SPARE = 2
"""Number of bases whose lines stay in the log after their folders were removed. A run that resumes before them compares hashes."""


def prune(log: Log, keep: int) -> list[str]:
    """Keep the newest `keep` bases and their deltas. Return the names of the removed entries.

    The log is rewritten first, then the folders are removed. A consumer that still uses one of them keeps the files it has mapped,
    and finds the newest base at its next poll. The caller must hold the lock of the log.
    """
    lines = log.lines()
    bases = [line.sequence for line in lines if line.kind == "base"]
    if len(bases) < keep:
        return []
    kept = bases[-keep]
    log.drop_before(bases[-keep - SPARE] if len(bases) >= keep + SPARE else lines[0].sequence, kept)
    old = [path for number, path in directories(log.folder) if number < kept]
    for path in old:
        atomic.remove(path)
    return [path.name for path in old]
