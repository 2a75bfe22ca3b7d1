"""A file that appears under its name when it is whole: lines of text, Parquet or Arrow, packed if its name says so."""

import os
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

from clickfleet.errors import DataError
from clickfleet.files import packing

ENDINGS = {"csv": ".csv", "parquet": ".parquet", "arrow": ".arrow"}
"""What file names of a format end in; the others have no ending of their own."""


class Sink:
    """Writes bytes (text formats) or Arrow record batches (parquet, arrow); `-` is stdout."""

    def __init__(self, path: str | Path, kind: str) -> None:
        self.path, self.kind, self.rows = str(path), kind, 0
        self._writer: Any = None
        if self.path == "-":
            if kind in ("parquet", "arrow"):
                raise DataError(f"{kind} cannot be written to the terminal", "name a file with --out")
            self._file: Any = sys.stdout.buffer if hasattr(sys.stdout, "buffer") else _Text()
            return
        where = Path(path)
        where.parent.mkdir(parents=True, exist_ok=True)
        self._beside = where.with_name(f".{where.name}.writing")
        try:
            self._raw: Any = self._beside.open("wb")
        except OSError as error:
            raise DataError(f"cannot write {where}: {error.strerror}") from None
        self._file = self._raw
        if kind not in ("parquet", "arrow") and (packed := packing(self.path)):
            import pyarrow as pa

            self._file = pa.CompressedOutputStream(pa.PythonFile(self._raw, mode="w"), packed)

    def write(self, content: Any, rows: int, header: bytes = b"") -> None:
        """`rows` rows; a `header` goes before the first of a file."""
        try:
            if header and not self.rows:
                self._file.write(header)
            if self.kind in ("parquet", "arrow"):
                self._open(content.schema).write_batch(content)
            else:
                self._file.write(content)
        except OSError as error:
            raise DataError(f"cannot write {self.path}: {error.strerror or error}", "is the disk full?") from None
        self.rows += rows

    def _open(self, schema: Any) -> Any:
        if self._writer is None:
            import pyarrow as pa
            from pyarrow import parquet

            if self.kind == "parquet":
                self._writer = parquet.ParquetWriter(self._file, schema, compression="zstd")
            else:
                self._writer = pa.ipc.new_file(self._file, schema)
        return self._writer

    def __enter__(self) -> "Sink":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self.path == "-":
            self._file.flush()
            return
        try:
            if self._writer is not None:
                self._writer.close()
            if self._file is not self._raw:
                self._file.close()
            if not self._raw.closed:
                self._raw.flush()
                os.fsync(self._raw.fileno())
                self._raw.close()
            if kind is None:
                os.replace(self._beside, self.path)
        finally:
            self._beside.unlink(missing_ok=True)


class _Text:
    """A stdout that takes only text, as notebooks and tests have."""

    def write(self, content: bytes) -> None:
        sys.stdout.write(content.decode("utf-8", "surrogateescape"))

    def flush(self) -> None:
        sys.stdout.flush()
