"""paired: ids in a file that ends in `x.txt`, labels in its neighbour `y.txt`, line by line."""

import os
from dataclasses import dataclass

from clickfleet.data.files import ByteStream, Unpacked
from clickfleet.data.formats.csv import Csv as _Csv
from clickfleet.errors import DataError

CHUNK = 1 << 16


@dataclass(frozen=True)
class Paired(_Csv):
    """A row is the label, if there is a file of labels, then the ids, separated by spaces. The file of labels gives no rows."""

    separator: str = " "

    def stream(self, path: str) -> ByteStream:
        if _stem(path, "y") is not None:
            return _Joined(path)
        stem = _stem(path, "x")
        if stem is None:
            raise DataError(f"{path}: expected a file of ids (…x.txt) or of labels (…y.txt)", "rename the file")
        labels = f"{stem}y{path[len(stem) + 1 :]}"
        return _Joined(path, path, labels) if "://" in path or os.path.exists(labels) else _Joined(path, path)


def _stem(path: str, letter: str) -> str | None:
    for end in (".txt", ".txt.gz", ".txt.zst"):
        if path.endswith(letter + end):
            return path.removesuffix(letter + end)
    return None


class _Joined(ByteStream):
    """The lines of several files side by side. The labels come first."""

    def __init__(self, path: str, *parts: str) -> None:
        self.path = path
        self._files = [_Lines(part) for part in reversed(parts)]
        self._left = b""

    def _read_some(self, space: memoryview) -> int:
        if not self._left:
            self._left = self._join()
        got = min(len(space), len(self._left))
        space[:got], self._left = self._left[:got], self._left[got:]
        return got

    def _join(self) -> bytes:
        """Return the next rows that all files have lines for; none at the end."""
        ready = [file.ready() for file in self._files]
        if any(ready) and not all(ready):
            names = " and ".join(file.path for file in self._files)
            raise DataError(f"{names} have different numbers of lines", "a label belongs to each line of ids")
        rows = zip(*(file.take(min(ready)) for file in self._files), strict=True)
        return b"".join(b" ".join(row) + b"\n" for row in rows)

    def _too_short(self, missing: int) -> DataError:
        return DataError(f"{self.path}: ends {missing} bytes before the position to resume from; was it replaced?")

    def close(self) -> None:
        for file in self._files:
            file.close()


class _Lines:
    """The lines of a file, without the ends of lines and outer blanks."""

    def __init__(self, path: str) -> None:
        self.path, self._stream = path, Unpacked(path)
        self._lines: list[bytes] = []
        self._rest, self._space = b"", bytearray(CHUNK)

    def ready(self) -> int:
        """Return how many lines can be taken; none at the end."""
        while not self._lines:
            got = self._stream.readinto(memoryview(self._space))
            if not got:
                self._lines, self._rest = [self._rest] if self._rest else [], b""
                break
            *self._lines, self._rest = (self._rest + self._space[:got]).split(b"\n")
        return len(self._lines)

    def take(self, count: int) -> list[bytes]:
        taken, self._lines = self._lines[:count], self._lines[count:]
        return [line.strip() for line in taken]

    def close(self) -> None:
        self._stream.close()
