"""Shows on disk, numbered in the order of their arrival: appended, read by number, and forgotten from the oldest on.

Shows lie in segments of equal numbers of rows. The newest ones are plain, so that any show is read where it lies. Those that are seldom
read are written again in a thread, compressed and with an index. So the memory needed does not depend on the number of shows.
"""

from __future__ import annotations

import os
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from clickfleet.data.arrow_ipc import check, numbers
from clickfleet.data.events import SHOWS, concatenated
from clickfleet.data.files import flush, move
from clickfleet.errors import CheckpointError
from clickfleet.store.event_log import StreamTail, stream_bytes, stream_head

SEGMENT_ROWS = 1 << 16
BATCH_ROWS = 512
"""Rows of a record batch: what one read decompresses."""
CACHE_BYTES = 32 << 20
STORED = SHOWS.append(pa.field("stream", pa.int32(), nullable=False)).remove_metadata()
"""The columns of a show, and the number of the stream it came from."""
Places = NDArray[np.int64]


class ShowsState(TypedDict):
    """What a commit must remember."""

    first: int
    rows: int
    bytes: int
    """Size of the growing segment."""


class ShowStore:
    """See the module. Use it from one thread. What was appended after the last commit is gone when it is opened again."""

    def __init__(self, folder: Path, state: ShowsState | None = None) -> None:
        self.folder = folder
        self.first = 0 if state is None else state["first"]
        """The first show that is kept."""
        self.rows = 0 if state is None else state["rows"]
        """Number of shows ever appended."""
        self._buffer: list[pa.RecordBatch] = []
        """The last shows, which are not in a file yet: too few for a record batch."""
        self._starts: list[int] = []
        self._head = stream_head(STORED)
        self._growing = _GrowingSegment(folder, self.rows // SEGMENT_ROWS, self._head)
        if state is not None:
            self._growing.restore(self.rows % SEGMENT_ROWS, state["bytes"])
        self._full: list[_GrowingSegment] = []
        """Full segments whose shows are still read often."""
        self._sealing: dict[int, tuple[threading.Thread, _GrowingSegment]] = {}
        self._sizes: dict[int, int] = {}
        self._removed = self.first // SEGMENT_ROWS
        """Segments before this one have no files."""
        self._opened: OrderedDict[int, Any] = OrderedDict()
        self._cache: OrderedDict[tuple[int, int], pa.RecordBatch] = OrderedDict()
        self._cached_bytes = 0
        self._adopt()

    def _adopt(self) -> None:
        """Remove files that were written after the last commit, and finish segments that were full by then."""
        newest = self.rows // SEGMENT_ROWS
        for path in self.folder.glob("*shows-*"):
            number = _number_of(path)
            kept = number is not None and self.first // SEGMENT_ROWS <= number <= newest
            if number == newest:
                kept = path.suffix == ".log" and self._growing.rows > 0
            if number is None or not kept or path.name.startswith("."):
                path.unlink(missing_ok=True)
            elif path.suffix == ".log" and number != newest:
                if _final(self.folder, number).exists():
                    path.unlink()
                    continue
                segment = _GrowingSegment(self.folder, number, self._head)
                segment.restore(SEGMENT_ROWS, path.stat().st_size)
                self._full.append(segment)
        self._full.sort(key=lambda segment: segment.number)
        plain = {segment.number for segment in self._full}
        for number in range(self.first // SEGMENT_ROWS, newest):
            if number not in plain and not _final(self.folder, number).is_file():
                raise CheckpointError(
                    f"{_final(self.folder, number)} is missing", "the join starts anew with an empty store"
                )

    def __len__(self) -> int:
        return self.rows - self.first

    @property
    def bytes(self) -> int:
        """Size of the files."""
        plain = {segment.number: segment for segment in (*self._full, self._growing)}
        plain |= {number: segment for number, (_, segment) in self._sealing.items()}
        total = 0
        for number in range(self.first // SEGMENT_ROWS, self._growing.number + 1):
            if number not in self._sizes and number not in plain:
                self._sizes[number] = _final(self.folder, number).stat().st_size
            total += plain[number].size if number in plain else self._sizes[number]
        return total

    def append(self, shows: pa.RecordBatch) -> int:
        """Append shows with the columns `STORED`. Return the number of the first of them."""
        first = self.rows
        if len(shows):
            self._buffer.append(shows)
            self._starts.append(first)
            self.rows += len(shows)
            if self.rows - self._starts[0] >= BATCH_ROWS:
                self._write()
        return first

    def _write(self) -> None:
        """Write the last shows to files."""
        if not self._buffer:
            return
        shows, written, at = concatenated(self._buffer), self._starts[0], 0
        while at < len(shows):
            room = SEGMENT_ROWS - (written + at) % SEGMENT_ROWS
            part = shows.slice(at, min(room, BATCH_ROWS))
            self._growing.append(part)
            at += len(part)
            if (written + at) % SEGMENT_ROWS == 0:
                self._full.append(self._growing)
                self._growing = _GrowingSegment(self.folder, (written + at) // SEGMENT_ROWS, self._head)
        self._buffer, self._starts = [], []

    def take(self, places: Places) -> pa.RecordBatch:
        """Return the shows with these numbers, which must rise, with the columns `STORED`."""
        parts, at = [], 0
        while at < len(places):
            start, batch = self._batch(int(places[at]))
            end = at + int(np.searchsorted(places[at:], start + len(batch)))
            some = places[at:end] - start
            if some[-1] - some[0] == len(some) - 1:
                parts.append(batch.slice(int(some[0]), len(some)))
            else:
                parts.append(batch.take(pa.array(some)))
            at = end
        return concatenated(parts) if parts else pa.RecordBatch.from_pylist([], STORED)

    def times(self, since: int) -> Iterator[tuple[int, NDArray[np.int64], NDArray[np.int32]]]:
        """Yield (number of the first show, times in microseconds, streams) of the shows from a number on."""
        at = since
        while at < self.rows:
            start, batch = self._batch(at)
            rows = batch.slice(at - start)
            yield at, numbers(rows.column("time"), np.int64).copy(), numbers(rows.column("stream"), np.int32).copy()
            at += len(rows)

    @property
    def segment_rows(self) -> int:
        return SEGMENT_ROWS

    def newest_time(self, first: int) -> int:
        """Return the latest time, in microseconds, of the shows in the segment that begins at a number."""
        newest, number = 0, first // SEGMENT_ROWS
        segment = self._in_stream(number)
        for index in range(-(-SEGMENT_ROWS // BATCH_ROWS) if segment is None else len(segment.starts)):
            batch = self._final_batch(number, index) if segment is None else segment.read(index)  # not to be cached
            newest = max(newest, int(numbers(batch.column("time"), np.int64).max()))
        return newest

    def _batch(self, place: int) -> tuple[int, pa.RecordBatch]:
        """Return the record batch that holds a show, and the number of its first show."""
        if not self.first <= place < self.rows:
            raise IndexError(f"show {place} is not kept")
        if self._buffer and place >= self._starts[0]:
            at = bisect_right(self._starts, place) - 1
            return self._starts[at], self._buffer[at]
        number, row = divmod(place, SEGMENT_ROWS)
        segment = self._in_stream(number)
        if segment is not None:
            index = segment.find(row)
            return number * SEGMENT_ROWS + segment.starts[index], segment.read(index)
        index = row // BATCH_ROWS
        batch = self._cache.get((number, index))
        if batch is None:
            batch = self._cache[number, index] = self._final_batch(number, index)
            self._cached_bytes += batch.nbytes
            while self._cached_bytes > CACHE_BYTES and len(self._cache) > 1:
                self._cached_bytes -= self._cache.popitem(last=False)[1].nbytes
        else:
            self._cache.move_to_end((number, index))
        return place - row % BATCH_ROWS, batch

    def _in_stream(self, number: int) -> _GrowingSegment | None:
        """Return a segment that is not written again yet."""
        if number == self._growing.number:
            return self._growing
        for segment in self._full:
            if segment.number == number:
                return segment
        if number in self._sealing:
            thread, segment = self._sealing[number]
            if thread.is_alive() or not _final(self.folder, number).exists():
                return segment
            self._sealing.pop(number)
            segment.remove()
        return None

    def _final_batch(self, number: int, index: int) -> pa.RecordBatch:
        reader = self._opened.get(number)
        path = _final(self.folder, number)
        try:
            if reader is None:
                reader = self._opened[number] = pa.ipc.open_file(pa.memory_map(str(path)))
                if len(self._opened) > 16:
                    self._opened.popitem(last=False)
            batch = reader.get_batch(index)
            check(batch)
        except (pa.ArrowException, OSError, ValueError) as error:
            raise CheckpointError(f"{path} is damaged: {error}", "the join starts anew with an empty store") from error
        return batch

    def forget(self, before: int) -> int:
        """Forget whole segments before a number. Return the first number that is kept."""
        self.first = max(self.first, min(before, self.rows) // SEGMENT_ROWS * SEGMENT_ROWS)
        return self.first

    def commit(self) -> ShowsState:
        """Make all shows durable. Call `committed` when the returned state is durable too."""
        self._write()
        for segment in (*self._full, self._growing):
            segment.flush()
        return {"first": self.first, "rows": self.rows, "bytes": self._growing.size}

    def committed(self, seldom: int) -> None:
        """Remove what only earlier commits needed. Shows before the number `seldom` are seldom read: compress their segments."""
        for segment in [one for one in self._full if (one.number + 1) * SEGMENT_ROWS <= seldom]:
            self._full.remove(segment)
            self._seal(segment)
        for number in [number for number in self._sealing if not self._sealing[number][0].is_alive()]:
            self._in_stream(number)
        for number in range(self._removed, self.first // SEGMENT_ROWS):
            if number in self._sealing:
                break
            for segment in [one for one in self._full if one.number == number]:
                self._full.remove(segment)
                segment.remove()
            _final(self.folder, number).unlink(missing_ok=True)
            self._sizes.pop(number, None)
            self._opened.pop(number, None)
            self._removed = number + 1

    def _seal(self, segment: _GrowingSegment) -> None:
        thread = threading.Thread(target=segment.seal, name="clickfleet-segment", daemon=True)
        self._sealing[segment.number] = (thread, segment)
        thread.start()

    def close(self) -> None:
        for thread, _ in self._sealing.values():
            thread.join()
        for segment in (*self._full, self._growing, *(one for _, one in self._sealing.values())):
            segment.close()
        self._opened.clear()
        self._cache.clear()


def _final(folder: Path, number: int) -> Path:
    return folder / f"shows-{number:08d}.arrow"


def _number_of(path: Path) -> int | None:
    digits = path.name.lstrip(".").removeprefix("shows-").partition(".")[0]
    return int(digits) if digits.isdigit() else None


class _GrowingSegment:
    """A segment as an Arrow stream, with the place of every record batch in memory."""

    def __init__(self, folder: Path, number: int, head: bytes) -> None:
        self.number, self._head = number, head
        self.path = folder / f"shows-{number:08d}.log"
        self.starts: list[int] = []
        """First row of each record batch."""
        self._offsets: list[int] = []
        self.rows = self.size = 0
        self._file: Any = None
        self._map: Any = None
        self._mapped = 0
        self._unflushed = False

    def restore(self, rows: int, size: int) -> None:
        """Read what a commit covered, and remove the rest."""
        if not rows:
            return
        try:
            self._file = self.path.open("r+b", buffering=0)
            self._file.truncate(size)
            tail, at = StreamTail(self._file), len(self._head)
            for batch in tail:
                self.starts.append(self.rows)
                self._offsets.append(at)
                self.rows, at = self.rows + len(batch), tail.at
        except (pa.ArrowException, OSError, ValueError) as error:
            raise CheckpointError(f"{self.path} is damaged: {error}") from error
        self.size = size
        if self.rows < rows or self.size != at:
            raise CheckpointError(f"{self.path} is damaged: it ends early", "the join starts anew with an empty store")

    def append(self, batch: pa.RecordBatch) -> None:
        if self._file is None:
            self._file = self.path.open("w+b", buffering=0)
            self._write(self._head)
        self.starts.append(self.rows)
        self._offsets.append(self.size)
        self._write(stream_bytes(batch))
        self.rows += len(batch)
        self._unflushed = True

    def _write(self, content: bytes | memoryview) -> None:
        self._file.seek(self.size)
        rest = memoryview(content)
        while rest:
            rest = rest[self._file.write(rest) :]
        self.size += len(content)

    def find(self, row: int) -> int:
        """Return the index of the record batch that holds a row."""
        return bisect_right(self.starts, row) - 1

    def read(self, index: int) -> pa.RecordBatch:
        """Return a record batch without copying it. It was checked when it was written or restored."""
        start = self._offsets[index]
        end = self._offsets[index + 1] if index + 1 < len(self._offsets) else self.size
        if end > self._mapped:
            self._map, self._mapped = pa.memory_map(str(self.path)), self.size
        content = self._map.read_at(end - start, start)
        return pa.ipc.read_record_batch(pa.ipc.read_message(pa.BufferReader(content)), STORED)

    def flush(self) -> None:
        if self._unflushed:
            os.fsync(self._file.fileno())
            self._unflushed = False

    def seal(self) -> None:
        """Write the segment again as an Arrow file with record batches of equal size."""
        final = self.path.with_suffix(".arrow")
        hidden = final.with_name(f".{final.name}.writing")
        options = pa.ipc.IpcWriteOptions(compression="zstd", use_threads=False)
        try:
            waiting: list[pa.RecordBatch] = []
            rows = 0
            with pa.OSFile(str(hidden), "wb") as sink, pa.ipc.new_file(sink, STORED, options=options) as out:
                for index in range(len(self.starts)):
                    waiting.append(self.read(index))
                    rows += len(waiting[-1])
                    if rows >= BATCH_ROWS or index == len(self.starts) - 1:
                        table = concatenated(waiting)
                        whole = len(table) if index == len(self.starts) - 1 else rows // BATCH_ROWS * BATCH_ROWS
                        for at in range(0, whole, BATCH_ROWS):
                            out.write_batch(table.slice(at, min(BATCH_ROWS, whole - at)))
                        waiting, rows = ([table.slice(whole)], rows - whole) if whole < rows else ([], 0)
            flush(hidden)
            move(hidden, final)
        except (pa.ArrowException, OSError):  # a full disk: the stream stays as it is
            with suppress(OSError):
                hidden.unlink(missing_ok=True)

    def remove(self) -> None:
        self.close()
        self.path.unlink(missing_ok=True)

    def close(self) -> None:
        self._map, self._mapped = None, 0
        if self._file is not None:
            self._file.close()
            self._file = None
