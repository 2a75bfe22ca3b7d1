"""A log of events in a folder: Arrow files that several processes append to, and others read while they grow.

    <folder>/<day>/<writer>-000007.arrow        complete: an Arrow file, compressed
    <folder>/<day>/<writer>-000008.arrow.open   growing: an Arrow stream, not compressed, one record batch per write; of shows, with a row
                                                per request

Every process is a writer with files of its own, numbered from 1. A growing file is only ever extended by whole record batches. It becomes
complete, under its final name, when it is large or old enough. A writer that is killed leaves its growing file behind, without the record
batch that it was writing; readers have the others, and the next writer in the folder completes the file.

Readers remember a place for every writer: the number of a file, and the rows that they have read of it. Rows keep their order when a file
becomes complete. A reader also takes files that other programs put into the folder: Arrow files, and lines of JSON in .jsonl files, which
may grow.
"""

from __future__ import annotations

import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from clickfleet.data.arrow_ipc import check, open_ipc
from clickfleet.data.events import EventsRead, no_events, read_columns, read_lines, shows_of
from clickfleet.data.files import flush, move

OPEN = ".open"
END = b"\xff\xff\xff\xff\x00\x00\x00\x00"
"""The end of an Arrow stream."""
BATCH_ROWS = 8192
BATCH_BYTES = 16 << 20
"""A record batch of a complete file has at most so many rows, and not many more bytes."""
LINES_BYTES = 1 << 22
"""Lines of JSON read at once."""
RELIST_NS = 2_000_000_000
"""A folder that changed within this time is listed again: its time of change may be coarse."""
COPYING_S = 5.0
"""A file of another program that cannot be read may still be copied; it is read again until it is this old."""
LOW_PRIORITY = 10
_NAME = re.compile(r"(?P<writer>\d{8}T\d{6}-[0-9a-f]{8})-(?P<number>\d{6,})\.arrow")
_ARROW = (".arrow", ".feather", ".arrows", ".ipc")
_LINES = (".jsonl", ".ndjson", ".json")
_ERRORS = (pa.ArrowException, OSError, ValueError, TypeError, KeyError, OverflowError, MemoryError)


class LogWriter:
    """One writer. Use it from one thread. A write that fails leaves the file as it was, and raises OSError.

    `durable` flushes every write to the disk. `rotate_bytes` and `rotate_s` limit the size and age of a growing file.
    """

    def __init__(
        self,
        folder: Path | str,
        schema: pa.Schema,
        *,
        rotate_bytes: int = 64 << 20,
        rotate_s: float = 300.0,
        durable: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.folder, self.schema = Path(folder), schema
        self.rotate_bytes, self.rotate_s, self.durable, self.clock = rotate_bytes, rotate_s, durable, clock
        self.name = f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime(clock()))}-{secrets.token_hex(4)}"
        self._head = stream_head(schema)
        self._file: _GrowingFile | None = None
        self._number = 0
        self._sealing: list[threading.Thread] = []

    def write(self, batch: pa.RecordBatch) -> int:
        """Append a record batch. Return the bytes written."""
        message = stream_bytes(batch)
        if self._file is None:
            self._open()
        assert self._file is not None
        self._file.append(message, self.durable)
        self.rotate()
        return len(message)

    def _open(self) -> None:
        now = self.clock()
        day = self.folder / time.strftime("%Y%m%d", time.gmtime(now))
        day.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = _GrowingFile(day / f"{self.name}-{self._number + 1:06d}.arrow{OPEN}", now)
        try:
            file.append(memoryview(self._head), self.durable)
        except OSError:
            file.remove()
            raise
        if self.durable:
            flush(day)
        self._number, self._file = self._number + 1, file

    def settle(self) -> bool:
        """Return True: what was written is in the file."""
        return True

    def rotate(self) -> None:
        """Complete the growing file if it is large or old enough."""
        file = self._file
        if file is not None and (file.size >= self.rotate_bytes or self.clock() >= file.begun_s + self.rotate_s):
            self._complete(file)

    def _complete(self, file: _GrowingFile) -> None:
        self._file = None
        with suppress(OSError):  # a full disk: the file is as good without its end
            file.append(memoryview(END), self.durable)
        thread = threading.Thread(target=_seal_quietly, args=(file.path, file.close), name="clickfleet-seal")
        thread.start()
        self._sealing = [one for one in self._sealing if one.is_alive()] + [thread]

    def close(self) -> None:
        """Complete the growing file, and wait until all files have their final names."""
        if self._file is not None:
            self._complete(self._file)
        for thread in self._sealing:
            thread.join()
        self._sealing = []


class _GrowingFile:
    """A file that is only extended. Its lock tells other processes that its writer lives."""

    def __init__(self, path: Path, now_s: float) -> None:
        self.path, self.begun_s, self.size = path, now_s, 0
        self._file = create_held(path)

    def append(self, content: memoryview, durable: bool) -> None:
        rest = content
        try:
            while rest:
                rest = rest[os.write(self._file, rest) :]
            if durable:
                getattr(os, "fdatasync", os.fsync)(self._file)
        except OSError:
            os.ftruncate(self._file, self.size)
            raise
        self.size += len(content)

    def close(self) -> None:
        os.close(self._file)

    def remove(self) -> None:
        self.close()
        with suppress(OSError):
            self.path.unlink()


def create_held(path: Path, flags: int = os.O_WRONLY | os.O_APPEND) -> int:
    """Create a file for its owner only, to append to unless `flags` differ. It is locked before it gets its name."""
    hidden = path.with_name(f".{path.name}")
    file = os.open(hidden, flags | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        hold(file)
        move(hidden, path)
    except OSError:
        os.close(file)
        raise
    return file


def hold(file: int, release: bool = False) -> bool:
    """Lock an open file until it is closed or the process dies. Return whether nobody else holds it.

    With `release`, only ask.
    """
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if release:
            fcntl.flock(file, fcntl.LOCK_UN)
    except (ImportError, OSError):  # there is no fcntl on Windows, where nobody serves
        return False
    return True


def _stream(schema: pa.Schema, *batches: pa.RecordBatch) -> bytes:
    """Return record batches as a compressed Arrow stream. Without any, its head and its end."""
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression="lz4", use_threads=False)
    with pa.ipc.new_stream(sink, schema, options=options) as out:
        for batch in batches:
            out.write_batch(batch)
    return bytes(memoryview(sink.getvalue()))


@lru_cache
def stream_head(schema: pa.Schema) -> bytes:
    """Return the beginning of an Arrow stream, before its first record batch."""
    return _stream(schema)[: -len(END)]


def stream_bytes(batch: pa.RecordBatch) -> memoryview:
    """Return a record batch as a part of an Arrow stream. Compressing it would cost as much as all else that a recorder does."""
    return memoryview(batch.serialize())


def as_message(batch: pa.RecordBatch) -> bytes:
    """Return a record batch as a message of a topic: an Arrow stream of its own."""
    return _stream(batch.schema, batch)


def complete_leftovers(folder: Path | str) -> list[Path]:
    """Complete the growing files whose writers are dead. Return their final names."""
    completed = []
    for path in sorted(Path(folder).glob(f"*/*.arrow{OPEN}")):
        if _NAME.fullmatch(path.name.removesuffix(OPEN)) is None:
            continue
        with suppress(OSError):
            file = os.open(path, os.O_RDONLY)
            try:
                if hold(file):
                    completed.append(seal(path))
            finally:
                os.close(file)
    return completed


def _seal_quietly(path: Path, close: Callable[[], None]) -> None:
    """Seal a file with low priority, then release its lock."""
    with suppress(AttributeError, OSError):  # only Linux knows priorities of threads
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOW_PRIORITY)
    with suppress(OSError):
        seal(path)
    close()


def seal(path: Path) -> Path:
    """Turn a growing file into a complete one. On a full disk it only gets its final name: a stream is complete too."""
    final = path.with_name(path.name.removesuffix(OPEN))
    hidden = path.with_name(f".{final.name}.writing")
    try:
        with path.open("rb") as source, _create(hidden) as sink:
            tail = StreamTail(source)
            out = None
            for batch in merged(map(shows_of, tail)):
                out = out or pa.ipc.new_file(
                    sink, batch.schema, options=pa.ipc.IpcWriteOptions(compression="zstd", use_threads=False)
                )
                out.write_batch(batch)
            if out is None and tail.schema is not None:
                out = pa.ipc.new_file(sink, shows_of(no_events(tail.schema)).schema)
            if out is not None:
                out.close()
                sink.flush()
                os.fsync(sink.fileno())
        if out is None:  # not even its head was written
            hidden.unlink()
            path.unlink()
            return final
        move(hidden, final)
        path.unlink()
    except _ERRORS:
        with suppress(OSError):
            hidden.unlink()
        move(path, final)
    return final


def _create(path: Path) -> Any:
    return open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb")


def merged(batches: Iterator[pa.RecordBatch], most: int = BATCH_ROWS) -> Iterator[pa.RecordBatch]:
    """Yield the rows of many small record batches in fewer ones with about so many rows each."""
    waiting: list[pa.RecordBatch] = []
    rows = size = 0
    for batch in batches:
        waiting.append(batch)
        rows, size = rows + len(batch), size + batch.nbytes
        if rows >= most or size >= BATCH_BYTES:
            yield from pa.Table.from_batches(waiting).combine_chunks().to_batches()
            waiting, rows, size = [], 0, 0
    if waiting:
        yield from pa.Table.from_batches(waiting).combine_chunks().to_batches()


class StreamTail:
    """The complete record batches of an Arrow stream that may grow. Iterating yields those that it has not yielded before."""

    def __init__(self, source: Any) -> None:
        self._source, self.at = source, 0
        self.schema: pa.Schema | None = None
        self.ended = False
        """Whether the end of the stream was read: it will not grow."""

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        while not self.ended:
            self._source.seek(self.at)
            head = self._source.read(8)
            if len(head) < 8:
                return
            if head == END:
                self.ended = True
                return
            size = int.from_bytes(head[4:], "little")
            metadata = self._source.read(size)
            if head[:4] != END[:4] or len(metadata) < size:
                if head[:4] != END[:4]:
                    raise pa.ArrowInvalid("it is no Arrow stream")
                return
            content = self._body(head + metadata)
            if content is None:
                return
            self.at += len(content)
            message = pa.ipc.read_message(pa.BufferReader(content))
            if self.schema is None:
                self.schema = pa.ipc.read_schema(message)
                continue
            batch = pa.ipc.read_record_batch(message, self.schema)
            check(batch)
            yield batch

    def _body(self, head: bytes) -> bytes | None:
        """Return a whole message whose head was read, or None if its body is not complete yet."""
        length = _body_length(head[8:])
        if not 0 <= length <= MAX_BODY:
            raise pa.ArrowInvalid(f"a message claims {length} bytes")
        body = self._source.read(length)
        return head + body if len(body) == length else None


MAX_BODY = 1 << 30


def _body_length(metadata: bytes) -> int:
    """Return the length of the body that follows the metadata of an Arrow message: field 3 of its flat buffer."""

    def number(at: int, size: int) -> int:
        if not 0 <= at <= len(metadata) - size:
            raise pa.ArrowInvalid("the metadata of a message is damaged")
        return int.from_bytes(metadata[at : at + size], "little", signed=size != 2)

    table = number(0, 4)
    fields = table - number(table, 4)
    if number(fields, 2) <= 10:
        return 0
    offset = number(fields + 10, 2)
    return number(table + offset, 8) if offset else 0


class LogPlace(NamedTuple):
    """How far a reader has read one stream: file `number`, and `offset` rows of it; bytes of lines of JSON."""

    number: int = 1
    offset: int = 0


@dataclass(frozen=True)
class Listed:
    """Files of one stream: final and growing ones, by number."""

    final: dict[int, Path]
    growing: dict[int, Path]
    foreign: bool


class EventFolder:
    """The streams of a folder: one per writer, and one per file of another program."""

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self._seen: dict[Path, tuple[int, int, list[os.DirEntry[str]]]] = {}

    def streams(self) -> dict[str, Listed]:
        """Return the files of every stream, by its name."""
        found: dict[str, Listed] = {}
        folders = [self.folder]
        for folder in folders:
            for entry in self._entries(folder):
                if entry.name.startswith((".", "_")):
                    continue
                if folder == self.folder and entry.is_dir():
                    folders.append(Path(entry.path))
                    continue
                self._add(Path(entry.path), found)
        return found

    def _add(self, path: Path, found: dict[str, Listed]) -> None:
        name = path.name.removesuffix(OPEN)
        match = _NAME.fullmatch(name)
        if match is not None:
            listed = found.setdefault(match["writer"], Listed({}, {}, False))
            (listed.growing if path.name.endswith(OPEN) else listed.final)[int(match["number"])] = path
        elif path.suffix in (*_ARROW, *_LINES):
            found[path.relative_to(self.folder).as_posix()] = Listed({1: path}, {}, True)

    def _entries(self, folder: Path) -> list[os.DirEntry[str]]:
        """List a folder, or return the last list if the folder did not change."""
        try:
            changed = os.stat(folder).st_mtime_ns
        except OSError:
            self._seen.pop(folder, None)
            return []
        known = self._seen.get(folder)
        if known is not None and known[0] == changed and known[1] > changed + RELIST_NS:
            return known[2]
        now = time.time_ns()
        with suppress(OSError), os.scandir(folder) as scan:
            entries = sorted(scan, key=lambda entry: entry.name)
            self._seen[folder] = (changed, now, entries)
            return entries
        return []


class StreamReader:
    """Reads one stream of a folder from a place on. `read` returns None when there is nothing more at the moment."""

    def __init__(
        self, folder: EventFolder, name: str, schema: pa.Schema, place: LogPlace, warn: Callable[[str], None]
    ) -> None:
        self.folder, self.name, self.schema, self.place, self.warn = folder, name, schema, place, warn
        self._file: _OpenedFile | None = None

    def read(self, listed: Mapping[str, Listed]) -> EventsRead | None:
        """Return the next events. `listed` is what `EventFolder.streams` returned last."""
        here = listed.get(self.name)
        while here is not None:
            if self._file is None and not self._open(here):
                return None
            file = self._file
            assert file is not None
            try:
                read = file.read()
            except _ERRORS as error:
                if here.foreign and time.time() < os.stat(file.path).st_mtime + COPYING_S:
                    self.close()
                    return None
                return self._give_up(file, str(error).partition("\n")[0][:200])
            if read is not None:
                self.place = LogPlace(self.place.number, file.offset)
                return read
            if not file.ended or here.foreign:
                return None
            self._next()
        return None

    def _give_up(self, file: _OpenedFile, reason: str) -> EventsRead:
        self.warn(f"{file.path} is damaged and left out from {self.place.offset} on: {reason}")
        self._next()
        return EventsRead(no_events(self.schema), 1, reason)

    def _next(self) -> None:
        self.close()
        self.place = LogPlace(self.place.number + 1)

    def _open(self, here: Listed) -> bool:
        """Open the file at the place, or the first one after it if that is gone. Return False if there is none."""
        numbers = [number for number in {*here.final, *here.growing} if number >= self.place.number]
        if not numbers:
            return False
        first = min(numbers)
        if first > self.place.number:
            last = "" if first == self.place.number + 1 else f" to {first - 1}"
            gone = f"{self.name}-{self.place.number:06d}{last}"
            self.warn(f"{self.folder.folder}: {gone} was removed before it was read")
            self.place = LogPlace(first)
        for path in (here.final.get(first), here.growing.get(first)):
            if path is None:
                continue
            with suppress(FileNotFoundError):  # it was renamed: the next listing has its new name
                self._file = _OpenedFile(path, self.schema, self.place.offset)
                return True
        return False

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


class _OpenedFile:
    """A file that is being read, from an offset on."""

    def __init__(self, path: Path, schema: pa.Schema, offset: int) -> None:
        self.path, self.schema, self.offset = path, schema, offset
        self.ended = False
        """Whether all of it was read, and it will not grow."""
        self._lines = path.suffix in _LINES
        self._source = path.open("rb")
        self._skip = 0 if self._lines else offset
        self._tail = StreamTail(self._source) if path.name.endswith(OPEN) else None
        self._batches: Iterator[pa.RecordBatch] | None = None

    def read(self) -> EventsRead | None:
        """Return the next events; None if there are no more at the moment."""
        if self._lines:
            return self._read_lines()
        if self._batches is None:
            self._batches = iter(self._tail or open_ipc(self._source))
        for batch in map(shows_of, self._batches):
            if self._skip >= len(batch):
                self._skip -= len(batch)
                continue
            rows = batch.slice(self._skip)
            self._skip = 0
            self.offset += len(rows)
            return read_columns(rows, self.schema)
        if self._tail is None:
            self.ended = True
        else:
            self.ended, self._batches = self._tail.ended, None
        return None

    def _read_lines(self) -> EventsRead | None:
        self._source.seek(self.offset)
        lines = self._source.read(LINES_BYTES)
        whole = lines.rfind(b"\n") + 1
        if not whole:
            if len(lines) == LINES_BYTES:
                raise ValueError(f"a line is longer than {LINES_BYTES} bytes")
            return None
        self.offset += whole
        return read_lines(lines[:whole], self.schema, time.time_ns() // 1000)

    def close(self) -> None:
        self._batches = None
        self._source.close()
