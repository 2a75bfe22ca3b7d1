"""A file that grows by whole lines; what a full disk does not take waits in memory until there is space.

>>> import tempfile
>>> with tempfile.TemporaryDirectory() as folder:
...     lines = Appended(Path(folder) / "log.txt")
...     lines.add(b"one\\n")
...     lines.flush(), lines.path.read_bytes()
(True, b'one\\n')
"""

from __future__ import annotations

import errno
import threading
from pathlib import Path

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""What the system says when a file cannot grow: the disk is full, or a quota or limit is reached."""


class Appended:
    """Appends for any number of threads; never leaves a part of a line in the file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.waiting = b""
        """What is not in the file yet."""
        self.problem: OSError | None = None
        """Why."""
        self._lock = threading.Lock()

    def add(self, lines: bytes) -> None:
        """Appends, if not now then later."""
        with self._lock:
            self.waiting += lines
        self.flush()

    def flush(self) -> bool:
        """Tries to write what waits; whether all is in the file."""
        with self._lock:
            if self.waiting:
                try:
                    self._write()
                    self.waiting, self.problem = b"", None
                except OSError as error:
                    if error.errno not in FULL:
                        raise
                    self.problem = error
            return not self.waiting

    def _write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab", buffering=0) as out:
            size, left = out.tell(), memoryview(self.waiting)
            try:
                while left:
                    left = left[out.write(left) :]
            except OSError:
                out.truncate(size)
                raise
