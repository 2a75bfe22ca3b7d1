"""Learn that files in a folder changed without polling it: by inotify on Linux.

Elsewhere, and where inotify cannot watch (its limits are reached, or another host writes to a network file system), a waiting caller
is woken only by its timeout. So a caller still looks for itself from time to time.
"""

from __future__ import annotations

import ctypes
import os
import select
import struct
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

CLOSE_WRITE, MOVED_FROM, MOVED_TO, CREATE, DELETE = 0x8, 0x40, 0x80, 0x100, 0x200
_CHANGES = CLOSE_WRITE | MOVED_FROM | MOVED_TO | CREATE | DELETE
_ONLY_FOLDERS = 0x01000000
_HEAD = struct.Struct("iIII")
"""Watch, event, cookie, length of the name."""


class FileEvents:
    """Events in folders: a file was closed after writing, renamed, created or removed. Events within subfolders do not count.

    `names`: only these files count; None means all.
    """

    def __init__(self, folders: Iterable[Path | str] = (), names: Iterable[str] | None = None) -> None:
        self._names = None if names is None else {os.fsencode(name) for name in names}
        self._watched: dict[str, int] = {}
        self._fd: int | None = None
        self._libc: Any = inotify()
        if self._libc is not None:
            fd = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
            self._fd = fd if fd >= 0 else None
        for folder in folders:
            self.add(folder)

    @property
    def active(self) -> bool:
        """Whether events are reported for all folders that were added."""
        return self._fd is not None and all(watch >= 0 for watch in self._watched.values())

    def add(self, folder: Path | str) -> bool:
        """Report events in a folder too. Return False if it cannot be watched; call it again when the folder exists."""
        name = str(folder)
        if self._fd is not None and self._watched.get(name, -1) < 0:
            self._watched[name] = self._libc.inotify_add_watch(self._fd, os.fsencode(name), _CHANGES | _ONLY_FOLDERS)
        return self._watched.get(name, -1) >= 0

    def watches(self, folder: Path | str) -> bool:
        """Return whether events in a folder are reported."""
        return self._watched.get(str(folder), -1) >= 0

    def keep_only(self, folders: Iterable[Path | str]) -> None:
        """Stop to report events in all other folders."""
        wanted = {str(folder) for folder in folders}
        for name in [name for name in self._watched if name not in wanted]:
            watch = self._watched.pop(name)
            if watch >= 0 and self._fd is not None:
                self._libc.inotify_rm_watch(self._fd, watch)

    def fileno(self) -> int:
        """Return a descriptor that is readable when there are events, for an event loop."""
        assert self._fd is not None
        return self._fd

    def wait(self, timeout_s: float) -> bool:
        """Wait for an event. Return whether there was one."""
        end = time.monotonic() + max(timeout_s, 0.0)
        while True:
            left = end - time.monotonic()
            if self._fd is None:
                time.sleep(max(left, 0.0))
                return False
            poll = select.poll()
            poll.register(self._fd, select.POLLIN)
            ready = poll.poll(max(0, round(left * 1000)))
            if ready and self.take():
                return True
            if left <= 0:
                return False

    def take(self) -> bool:
        """Discard the events that are there. Return whether one of them counts."""
        counts = False
        while self._fd is not None:
            try:
                content = os.read(self._fd, 1 << 16)
            except BlockingIOError:
                break
            at = 0
            while at < len(content):
                watch, event, _, length = _HEAD.unpack_from(content, at)
                name = content[at + _HEAD.size : at + _HEAD.size + length].rstrip(b"\0")
                at += _HEAD.size + length
                if not event & _CHANGES:  # the folder is gone, or events were lost
                    self._watched = {folder: -1 if w == watch else w for folder, w in self._watched.items()}
                    counts = True
                elif self._names is None or name in self._names:
                    counts = True
        return counts

    def close(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            with suppress(OSError):
                os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def inotify() -> Any:
    """Return the library of the system that has inotify, or None."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        _ = libc.inotify_init1, libc.inotify_add_watch, libc.inotify_rm_watch
    except (OSError, AttributeError):
        return None
    return libc
