"""Hand what workers scored to the recorder, a process that writes the show log: in files that one appends to and the other removes.

    <folder>/<writer>-000003.frames        where the frames end, then frames: length, hash, entries as msgpack
    <folder>/<writer>-000003.frames.read   how far the recorder has read
    <folder>/<writer>-000002.spare         a file without frames, for the writer to use again

A worker appends a frame before it replies. The files are in memory where the system has a file system there: a frame is a copy into a
mapping (native/core/frame_file.h), and no disk makes a reply wait. What a worker has appended survives its death, and that of the
recorder: a file is removed, or used again, when all of it is in the log. After a kill, the frame being written is left out; its request
had no reply.

The core turns frames into columns (native/core/shows.h).
"""

from __future__ import annotations

import itertools
import os
import secrets
import struct
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from clickfleet._core import FrameAppender, ShowColumns, frame_hash, frames_end
from clickfleet.data.files import check_private, move
from clickfleet.store.event_log import create_held, hold

FILE_BYTES = 4 << 20
MAPPED_BYTES = FILE_BYTES + (1 << 20)
"""Bytes of a file that are mapped. A file that has `FILE_BYTES` is full, and its last frame may be long."""
MAX_FILES = 16
"""Full files of a worker that may wait for the recorder. Beyond it, what the worker scores is not logged."""
MAX_SPARES = 2
"""Files of a worker that are kept for it to use again."""
READ_BYTES = 1 << 18
"""Bytes read at a time. A frame may be longer."""
RELIST_NS = 100_000_000
"""A folder that changed within this time is listed again: its time of change may be coarse."""
FRAMES_BEGIN = 8
"""Where the first frame of a file begins: before it stands where the last one ends."""
_HEAD = struct.Struct("<IQ")
_READ = struct.Struct("<Q")
_encoder = msgspec.msgpack.Encoder()


class FrameWriter:
    """The files of one worker, in the first of some folders that has room. A write that fails in all of them raises OSError."""

    def __init__(self, *folders: Path) -> None:
        self.folders = folders
        self.name = f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{secrets.token_hex(4)}"
        self._number = 0
        self._file: int | None = None
        self._appender: FrameAppender | None = None
        self._folder = folders[0]
        """Where the newest file is."""

    def write(self, entries: Sequence[Any]) -> None:
        """Append entries as one frame: tuples of plain values."""
        payload = _encoder.encode(entries)
        frame = _HEAD.pack(len(payload), frame_hash(payload)) + payload
        problem = OSError("there is no folder")
        if self._appender is not None and self._appender.end < FILE_BYTES:
            try:
                self._appender.append(frame)
                return
            except OSError as error:
                problem = error
        for folder in self.folders:
            try:
                self._open(folder).append(frame)
                return
            except OSError as error:
                problem = error
        raise problem

    def write_plain(
        self, route: str, request: str, time_us: int, model: str, sequence: int, scores: bytes, body: bytes
    ) -> None:
        """Append a scored request whose rows have no ids, in one call of the core: it is part of most requests."""
        appender = self._appender
        if appender is not None and appender.end < FILE_BYTES:
            try:
                appender.append_show(route, request, time_us, model, sequence, scores, body)
                return
            except OSError:
                pass  # `write` tries again, and then elsewhere
        self.write(((route, request, time_us, model, sequence, scores, body, None, None, None),))

    def make_room(self) -> None:
        """Prepare for the next frames: space, or a new file. Call it when nobody waits for a reply: it costs more than to append them."""
        if self._appender is None:
            return
        if self._appender.end >= FILE_BYTES:
            with suppress(OSError):  # `write` tries again, and says what is wrong
                self._open(self._folder)
        self._appender.make_room()

    def _open(self, folder: Path) -> FrameAppender:
        if sum(1 for _ in self._files()) >= MAX_FILES:
            raise OSError(f"the recorder is {MAX_FILES * FILE_BYTES >> 20} MiB behind")
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_private(folder)
        self._number += 1
        path = folder / f"{self.name}-{self._number:06d}.frames"
        file = None
        for spare in itertools.islice(folder.glob(f"{self.name}-*.spare"), 1):
            file = _take(spare, path)
        if file is None:
            file = create_held(path, os.O_RDWR)
        self.close()
        self._file, self._folder = file, folder
        self._appender = FrameAppender(file, MAPPED_BYTES)
        return self._appender

    def _files(self) -> Iterator[Path]:
        """Yield the files that the recorder has not removed yet."""
        for folder in self.folders:
            yield from folder.glob(f"{self.name}-*.frames")

    @property
    def waiting_bytes(self) -> int:
        """Bytes that the recorder has not logged yet."""
        waiting = 0
        for path in self._files():
            with suppress(FileNotFoundError):
                waiting += _frames_until(path) - _read_until(Path(f"{path}.read"))
        return waiting

    def close(self) -> None:
        self._appender = None
        if self._file is not None:
            os.close(self._file)
            self._file = None


def _take(spare: Path, path: Path) -> int | None:
    """Lock a spare file and give it its next name. Return None if the recorder has removed it."""
    with suppress(FileNotFoundError), ExitStack() as undo:
        file = os.open(spare, os.O_RDWR)
        undo.callback(os.close, file)
        hold(file)
        move(spare, path)
        undo.pop_all()
        return file
    return None


def _frames_until(path: Path) -> int:
    """Return where the frames of a file end."""
    file = os.open(path, os.O_RDONLY)
    try:
        return int(frames_end(file))
    finally:
        os.close(file)


def _read_until(path: Path) -> int:
    """Return how far the recorder has read a file."""
    with suppress(OSError, struct.error):
        return int(_READ.unpack(path.read_bytes())[0])
    return FRAMES_BEGIN


class FramePlace(NamedTuple):
    """How far a file was read. Call `done` when everything before is in the log."""

    file: FrameFile
    end: int

    def done(self) -> None:
        self.file.done(self.end)


class FrameFile:
    """One file, read from where the last recorder stopped."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = os.open(path, os.O_RDONLY)
        self._read = os.open(f"{path}.read", os.O_RDWR | os.O_CREAT, 0o600)
        saved = os.pread(self._read, _READ.size, 0)
        self._at = self._done = _READ.unpack(saved)[0] if len(saved) == _READ.size else FRAMES_BEGIN
        self.damaged = False

    def read(self, shows: ShowColumns) -> Iterator[FramePlace]:
        """Append the frames that are complete and were not read before, a part at a time."""
        size, more = READ_BYTES, True
        while more and not self.damaged:
            more, taken, needed, self.damaged = shows.read(self._file, self._at, size)
            if taken:
                self._at += taken
                yield FramePlace(self, self._at)
            size = max(READ_BYTES, needed)

    def done(self, end: int) -> None:
        self._done = end
        os.pwrite(self._read, _READ.pack(end), 0)

    @property
    def all_done(self) -> bool:
        return self._done == self._at

    @property
    def is_left(self) -> bool:
        """Return whether its writer is dead or has a newer file."""
        return hold(self._file, release=True)

    def remove(self) -> None:
        self.close()
        for path in (self.path, Path(f"{self.path}.read")):
            with suppress(OSError):
                path.unlink()

    def recycle(self) -> None:
        """Leave the file to its writer, which it costs less than new memory. After a kill in between, it is a file without frames."""
        with self.path.open("r+b") as file:
            file.write(bytes(FRAMES_BEGIN))
            file.truncate(min(os.fstat(file.fileno()).st_size, MAPPED_BYTES))
        Path(f"{self.path}.read").unlink()
        move(self.path, self.path.with_suffix(".spare"))
        self.close()

    def close(self) -> None:
        os.close(self._file)
        os.close(self._read)


class FrameReader:
    """All files of some folders."""

    def __init__(self, *folders: Path) -> None:
        self.folders = folders
        self._files: dict[str, FrameFile] = {}
        self._left: set[str] = set()
        """Files that their writers had left before they were read last."""
        self._listed: dict[Path, int] = {}
        """By folder: the time of change, if it was long ago, when it was listed last."""

    def _changed(self, folder: Path) -> bool:
        """Return whether a folder has to be listed. New files are rare, and listing costs more than looking at the known ones."""
        try:
            changed = os.stat(folder).st_mtime_ns
        except OSError:
            self._listed.pop(folder, None)
            return False
        if self._listed.get(folder) == changed:
            return False
        self._listed[folder] = changed if time.time_ns() > changed + RELIST_NS else -1
        return True

    def read(self, shows: ShowColumns) -> Iterator[FramePlace]:
        """Append new frames of all workers, and yield after each part."""
        found = [path for folder in self.folders if self._changed(folder) for path in folder.glob("*.frames")]
        for path in sorted(found, key=lambda path: path.name):
            if path.name not in self._files:
                try:
                    self._files[path.name] = FrameFile(path)
                except FileNotFoundError:
                    pass
                except OSError:
                    self._listed.clear()
                    raise
        for name, file in list(self._files.items()):
            if file.is_left:  # asked before reading: nothing comes after
                self._left.add(name)
            yield from file.read(shows)
        self.release()

    def release(self) -> None:
        """Let go of the files that their writers have left and that are in the log. `read` does it too."""
        for name in [name for name in self._left if self._files[name].all_done]:
            self._left.remove(name)
            self._let_go(self._files.pop(name))

    def _let_go(self, file: FrameFile) -> None:
        """Remove a file, or leave it to its writer if that has a newer one and few spare ones."""
        writer = file.path.name.rpartition("-")[0]
        spares = [spare for folder in self.folders for spare in folder.glob(f"{writer}-*.spare")]
        if not any(name.startswith(f"{writer}-") for name in self._files):
            for spare in spares:
                with suppress(OSError):
                    spare.unlink()
        elif len(spares) < MAX_SPARES:
            with suppress(OSError):
                file.recycle()
                return
        file.remove()

    def most_files(self) -> int:
        """Return how many files the worker has that has the most. One of them is the one that it appends to."""
        names = (path.name.rpartition("-")[0] for folder in self.folders for path in folder.glob("*.frames"))
        return max(Counter(names).values(), default=0)

    @property
    def empty(self) -> bool:
        """Return whether everything of dead writers is in the log."""
        return not self._files

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files, self._left = {}, set()
