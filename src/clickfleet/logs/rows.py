"""Rows that are moved but not understood: lines of text, or a piece of an Arrow table."""

import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clickfleet.progress import progress

_BUCKET_BYTES = 32 << 20
_MOST_BUCKETS = 512  # files open at once
_HANDFUL = 4096  # rows handed out at once


class Rows(ABC):
    """Some rows of a file; `header` comes before them in every file."""

    header: bytes = b""
    content: Any
    """What a Sink writes."""

    @abstractmethod
    def __len__(self) -> int: ...
    @abstractmethod
    def __getitem__(self, rows: slice) -> "Rows": ...
    @abstractmethod
    def take(self, order: NDArray[np.intp]) -> "Rows": ...

    def without(self, gone: Sequence[int]) -> "Rows":
        """All but some rows."""
        return self.take(np.delete(np.arange(len(self)), gone)) if gone else self


class LineRows(Rows):
    """Whole lines, each with its newline."""

    def __init__(self, content: bytes, header: bytes = b"") -> None:
        self.content, self.header = content, header
        self._ends = np.flatnonzero(np.frombuffer(content, np.uint8) == 10) + 1

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, rows: slice) -> "LineRows":
        start, stop, _ = rows.indices(len(self))
        if start == 0 and stop >= len(self):
            return self
        return LineRows(self.content[self._place(start) : self._place(max(start, stop))], self.header)

    def _place(self, row: int) -> int:
        return int(self._ends[row - 1]) if row else 0

    def take(self, order: NDArray[np.intp]) -> "LineRows":
        starts = np.concatenate([[0], self._ends[:-1]])[order].tolist()
        ends = self._ends[order].tolist()
        picked = b"".join([self.content[start:end] for start, end in zip(starts, ends, strict=True)])
        return LineRows(picked, self.header)


class TableRows(Rows):
    """Rows of an Arrow record batch."""

    def __init__(self, content: Any) -> None:
        self.content = content

    def __len__(self) -> int:
        return int(self.content.num_rows)

    def __getitem__(self, rows: slice) -> "TableRows":
        start, stop, _ = rows.indices(len(self))
        return TableRows(self.content.slice(start, max(stop - start, 0)))

    def take(self, order: NDArray[np.intp]) -> "TableRows":
        return TableRows(self.content.take(order))


def shuffled(
    rows: Iterator[Rows], size: int, seed: int, folder: Path, bucket_bytes: int = _BUCKET_BYTES
) -> Iterator[Rows]:
    """All rows in random order: dealt to files of about `bucket_bytes`, then each file shuffled in memory."""
    rng = np.random.default_rng(seed)
    buckets = min(size // bucket_bytes + 1, _MOST_BUCKETS)
    folder.mkdir()
    header = b""
    lines = True
    open_files: list[Any] = []
    try:
        for some in rows:
            header, lines = some.header, isinstance(some, LineRows)
            home = rng.integers(buckets, size=len(some))
            for bucket in range(buckets):
                if len(open_files) <= bucket:
                    open_files.append(_Bucket(folder / str(bucket)))
                open_files[bucket].add(some.take(np.flatnonzero(home == bucket)))
    finally:
        for file in open_files:
            file.close()
    with progress("shuffling", buckets, "files") as bar:
        for file in open_files:
            whole = file.read(lines, header)
            if whole is not None:
                order = rng.permutation(len(whole))
                for start in range(0, len(order), _HANDFUL):
                    yield whole.take(order[start : start + _HANDFUL])
            del whole  # before the next one is read
            file.path.unlink()
            bar.advance(1)
    shutil.rmtree(folder)


class _Bucket:
    """A file of rows on their way."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("wb")
        self._writer: Any = None

    def add(self, rows: Rows) -> None:
        if not len(rows):
            return
        if isinstance(rows, LineRows):
            self._file.write(rows.content)
            return
        import pyarrow as pa

        self._writer = self._writer or pa.ipc.new_stream(self._file, rows.content.schema)
        self._writer.write_batch(rows.content)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._file.close()

    def read(self, lines: bool, header: bytes) -> Rows | None:
        content = self.path.read_bytes()
        if not content:
            return None
        if lines:
            return LineRows(content, header)
        import pyarrow as pa

        return TableRows(pa.ipc.open_stream(content).read_all().combine_chunks().to_batches()[0])
