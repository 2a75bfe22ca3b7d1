"""A published log that grows, read line by line as they come."""

import os
from pathlib import Path

from clickfleet.errors import CheckpointError
from clickfleet.published import Line, Log


class Tail:
    """The lines of a log that grows: each is read and checked once."""

    def __init__(self, folder: Path) -> None:
        self.log = Log(folder)
        self.lines: list[Line] = []
        self._stamp: tuple[int, int, int] | None = None
        self._size = 0
        self._last = b""

    def refresh(self) -> bool:
        """Whether there is something new; a log whose past changed is read again from its start."""
        try:
            return self._refresh()
        except OSError as error:
            raise CheckpointError(f"{self.log.path} cannot be read: {error.strerror or error}") from None

    def _refresh(self) -> bool:
        found = os.stat(self.log.path)
        stamp = (found.st_mtime_ns, found.st_size, found.st_ino)
        if stamp == self._stamp:
            return False
        with open(self.log.path, "rb") as file:
            file.seek(max(0, self._size - len(self._last)))
            grown = file.read()
        if not self._last or not grown.startswith(self._last):
            self.lines = self.log.lines()
            whole = self.log.path.read_bytes()
            self._size = whole.rfind(b"\n") + 1
            self._last = whole[: self._size].rsplit(b"\n", 2)[-2] + b"\n" if self._size else b""
        else:
            fresh = grown[len(self._last) :]
            fresh = fresh[: fresh.rfind(b"\n") + 1]
            for text in fresh.split(b"\n")[:-1]:
                line = Line.parse(text, self.log.path)
                before = self.lines[-1]
                if line.parent != before.hash or line.sequence != before.sequence + 1:
                    raise CheckpointError(
                        f"{self.log.path}: entry {line.sequence} does not follow entry {before.sequence}"
                    )
                self.lines.append(line)
                self._last = text + b"\n"
            self._size += len(fresh)
        self._stamp = stamp
        return True
