"""Read logs block by block: rows of a schema and, if the format stores them, raw columns.

A piece is one block of a file. `batch` is what training would read; `columns` are the raw values of the file, with null for
missing ones. Delimited text is parsed twice: the first parser, that of its format, finds the bad lines.
"""

from __future__ import annotations

import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from clickfleet.config.plugins import Plugin
from clickfleet.data.bad_lines import BadLines, Counters, Policy
from clickfleet.data.batch import Batch
from clickfleet.data.files import Unpacked, decompressed_size
from clickfleet.data.formats import Block, load
from clickfleet.data.formats.csv import Csv
from clickfleet.data.formats.joined import JoinedBlock
from clickfleet.data.guess import Guess, guess
from clickfleet.data.parsing.columns import TableBlock
from clickfleet.data.parsing.delimited import MISSING_WORDS, Delimited
from clickfleet.data.parsing.lines import LineBlock
from clickfleet.data.progress import Bar, progress
from clickfleet.data.recognition import sample
from clickfleet.data.schema import Dense, Schema, preset
from clickfleet.errors import ConfigError, DataError

if TYPE_CHECKING:
    import pyarrow as pa


LogReport = dict[str, Any]
"""The result of a log tool: plain values for JSON."""

_BUCKET_BYTES = 32 << 20
_MAX_BUCKETS = 512  # files open at once
_SHUFFLED_ROWS = 4096  # rows returned at once
_MOST_BLANKS = 33


class LogRows(ABC):
    """Some rows of a file. `header` is the first line of every file with such rows."""

    header: bytes = b""
    content: Any
    """What an OutputFile writes."""

    @abstractmethod
    def __len__(self) -> int: ...
    @abstractmethod
    def __getitem__(self, rows: slice) -> LogRows: ...
    @abstractmethod
    def take(self, order: NDArray[np.intp]) -> LogRows: ...

    def without(self, bad: Sequence[int]) -> LogRows:
        """Return all rows except those with the indices `bad`."""
        return self.take(np.delete(np.arange(len(self)), bad)) if bad else self


class LineRows(LogRows):
    """Whole lines, each with its newline."""

    def __init__(self, content: bytes, header: bytes = b"") -> None:
        self.content, self.header = content, header
        self._ends = np.flatnonzero(np.frombuffer(content, np.uint8) == 10) + 1

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, rows: slice) -> LineRows:
        start, stop, _ = rows.indices(len(self))
        if start == 0 and stop >= len(self):
            return self
        return LineRows(self.content[self._place(start) : self._place(max(start, stop))], self.header)

    def _place(self, row: int) -> int:
        return int(self._ends[row - 1]) if row else 0

    def take(self, order: NDArray[np.intp]) -> LineRows:
        starts = np.concatenate([[0], self._ends[:-1]])[order].tolist()
        ends = self._ends[order].tolist()
        picked = b"".join([self.content[start:end] for start, end in zip(starts, ends, strict=True)])
        return LineRows(picked, self.header)


class TableRows(LogRows):
    """Rows of an Arrow record batch."""

    def __init__(self, content: Any) -> None:
        self.content = content

    def __len__(self) -> int:
        return int(self.content.num_rows)

    def __getitem__(self, rows: slice) -> TableRows:
        start, stop, _ = rows.indices(len(self))
        return TableRows(self.content.slice(start, max(stop - start, 0)))

    def take(self, order: NDArray[np.intp]) -> TableRows:
        return TableRows(self.content.take(order))


def shuffled(
    rows: Iterator[LogRows], size: int, seed: int, folder: Path, bucket_bytes: int = _BUCKET_BYTES
) -> Iterator[LogRows]:
    """Yield all rows in random order. Distribute them to files of about `bucket_bytes`, then shuffle each in memory."""
    rng = np.random.default_rng(seed)
    buckets = min(size // bucket_bytes + 1, _MAX_BUCKETS)
    folder.mkdir()
    header = b""
    lines = True
    open_files: list[Any] = []
    try:
        for some in rows:
            header, lines = some.header, isinstance(some, LineRows)
            drawn = rng.integers(buckets, size=len(some))
            for bucket in range(buckets):
                if len(open_files) <= bucket:
                    open_files.append(_Bucket(folder / str(bucket)))
                open_files[bucket].add(some.take(np.flatnonzero(drawn == bucket)))
    finally:
        for file in open_files:
            file.close()
    with progress("shuffling", buckets, "files") as bar:
        for file in open_files:
            whole = file.read(lines, header)
            if whole is not None:
                order = rng.permutation(len(whole))
                for start in range(0, len(order), _SHUFFLED_ROWS):
                    yield whole.take(order[start : start + _SHUFFLED_ROWS])
            del whole  # before the next one is read
            file.path.unlink()
            bar.advance(1)
    shutil.rmtree(folder)


class _Bucket:
    """A temporary file of rows to shuffle."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("wb")
        self._writer: Any = None

    def add(self, rows: LogRows) -> None:
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

    def read(self, lines: bool, header: bytes) -> LogRows | None:
        content = self.path.read_bytes()
        if not content:
            return None
        if lines:
            return LineRows(content, header)
        import pyarrow as pa

        return TableRows(pa.ipc.open_stream(content).read_all().combine_chunks().to_batches()[0])


COLUMNAR = ("criteo", "csv", "parquet", "arrow")
"""Formats that store raw columns."""


@dataclass
class LogPiece:
    """Some rows of a log."""

    batch: Batch | None
    columns: pa.RecordBatch | None = None

    def __len__(self) -> int:
        return len(self.batch) if self.batch is not None else self.columns.num_rows if self.columns is not None else 0


@dataclass
class LogSource:
    """Reads files of one format in pieces, in order."""

    files: Sequence[str]
    plugin: Plugin
    schema: Schema
    bad_lines: Policy = "error"

    def __post_init__(self) -> None:
        self.format = self.plugin.name
        self.form = load(self.plugin)
        self.counters = Counters()
        self._bad = BadLines(self.bad_lines, 0.1, None)

    def blocks(self, path: str, bar: Bar, *, raw: bool, header: bytes = b"") -> Iterator[tuple[Batch, LogRows | None]]:
        """Yield the rows of each block of a file without its bad lines, and also as they are stored if `raw` is set."""
        lines = self.form.header_lines
        for block in self.form.blocks(path, self.schema, 0):
            rows = stored(block, header) if raw else None
            parsed = block.parse("all" if raw and self._bad.on_bad != "stop" else self._bad.on_bad)
            self._bad.handle(path, lines, parsed, self.counters, self.format)
            lines += parsed.lines
            bar.advance(block.size if bar.unit == "bytes" else len(parsed.batch))
            if len(parsed.batch):
                yield parsed.batch, None if rows is None else rows.without([item.line for item in parsed.bad])

    def check(self) -> None:
        """Raise DataError if too many of the lines read so far are bad."""
        self._bad.check(self.counters)

    def pieces(self, path: str, *, columns: bool, bar: Bar) -> Iterator[LogPiece]:
        """Yield the rows of a file, with their raw columns if `columns` is set."""
        form = self.form
        names = column_names(form, path, self.schema) if columns and isinstance(form, Delimited) else ()
        for batch, rows in self.blocks(path, bar, raw=columns):
            if isinstance(rows, LineRows):
                assert isinstance(form, Delimited)
                yield LogPiece(batch, text_columns(rows.content, names, form, self.schema, path))
            else:
                yield LogPiece(batch, None if rows is None else rows.content)
        self.check()


def stored(block: Block, header: bytes = b"") -> LogRows:
    """Return the raw rows of a block. Call this before it is parsed, because parsing releases its memory."""
    if isinstance(block, JoinedBlock):
        block = block.columns()
    if isinstance(block, TableBlock):
        return TableRows(_plain(block.table))
    return LineRows(bytes(block.space[: block.used]) if isinstance(block, LineBlock) else b"\n", header)


def _plain(table: pa.RecordBatch) -> pa.RecordBatch:
    """Decode dictionaries, which differ between blocks."""
    import pyarrow as pa

    fields = [
        field.with_type(_plain_type(field.type)) if field.type != _plain_type(field.type) else field
        for field in table.schema
    ]
    return table.cast(pa.schema(fields))


def _plain_type(kind: Any) -> Any:
    import pyarrow as pa

    if pa.types.is_dictionary(kind):
        return kind.value_type
    if pa.types.is_large_list(kind):
        return pa.large_list(_plain_type(kind.value_type))
    return pa.list_(_plain_type(kind.value_type)) if pa.types.is_list(kind) else kind


def recognise(
    files: Sequence[str], given: str | Plugin, schema: Schema | None = None, keys: str | None = None
) -> tuple[Plugin, Schema, Guess | None]:
    """Return the format and schema to read files with, and the guess if the schema comes from one. `given` may be auto."""
    form = given if isinstance(given, Plugin) else Plugin(given)
    found = None
    if schema is not None and form.automatic:
        form = sample(files, form, schema).format
    elif schema is None and (form.automatic or load(form).schema is None):
        found = guess(list(files), None, form, need_label=False)
        form = found.format
        if not found.of_format and found.schema != preset("criteo"):
            schema = found.schema
    return form, schema_for(form.name, schema, keys), found


def schema_for(kind: str, schema: Schema | None = None, keys: str | None = None) -> Schema:
    """Return the schema to read a format with: the given one, else that of the format, else Criteo's columns.

    `keys` replaces the key rule. `py2` without a modulus means the published ids and scaling of Criteo's columns.
    """
    given = schema or load(kind).schema or (preset("criteo") if kind in COLUMNAR else None)
    if given is None:
        raise ConfigError(
            f"the format {kind} has no default schema",
            "describe the columns in a file and pass it as --schema",
        )
    if keys == "py2":
        return preset("criteo-paddle") if schema is None and kind in COLUMNAR else given.with_keys("py2 mod 1000001")
    return given.with_keys(keys) if keys else given


def progress_of(files: Sequence[str], what: str) -> AbstractContextManager[Bar]:
    """Show a progress bar for reading files: by bytes if their decompressed size is known, else by rows."""
    size = decompressed_size(files)
    return progress(what, size, "rows" if size is None else "bytes")


def exact_dense(schema: Schema, columns: pa.RecordBatch) -> NDArray[np.float64]:
    """Return the transformed dense values of a batch, [B, F], in double precision, for text files."""
    rows = [_transform(dense, numbers(columns.column(dense.source_name))) for dense in schema.dense]
    return np.stack(rows, axis=1) if rows else np.empty((columns.num_rows, 0))


def _transform(dense: Dense, x: NDArray[np.float64]) -> NDArray[np.float64]:
    name, a = dense.transform.name, dense.transform.a
    if name == "log1p":
        scaled = np.sign(x) * np.log1p(np.abs(x))
    else:
        scaled = x if name == "none" else (x - a) / dense.transform.scale
    return np.where(np.isnan(x), dense.missing, scaled)


def numbers(column: Any) -> NDArray[np.float64]:
    """Return a dense column as doubles, with NaN for missing values."""
    import pyarrow as pa

    doubles: NDArray[np.float64] = column.cast(pa.float64()).to_numpy(zero_copy_only=False)
    return doubles


def read_chunks(path: str, size: int = 1 << 20) -> Iterator[bytes]:
    """Yield the decompressed content of a file, `size` bytes at a time."""
    stream = Unpacked(path)
    space = bytearray(size)
    try:
        with memoryview(space) as view:
            while got := stream.readinto(view):
                yield bytes(view[:got])
    finally:
        stream.close()


def first_line(path: str) -> bytes:
    """Return the first line of a text file, without its line ending."""
    first = b""
    for part in read_chunks(path, 1 << 14):
        first += part
        if b"\n" in part:
            break
    return first.partition(b"\n")[0].removesuffix(b"\r")


def column_names(form: Delimited, path: str, schema: Schema) -> tuple[str, ...]:
    """Return the names of the columns of a delimited text file."""
    line = first_line(path)
    if isinstance(form, Csv) and form.header_lines:
        return tuple(form.split(line.decode("utf-8-sig")))
    unlabelled = line.count(form.separator.encode()) + 1 == len(form.columns) - len(schema.tasks)
    return tuple(name for name in form.columns if not (unlabelled and name in schema.label_columns))


def text_columns(
    lines: bytes, names: Sequence[str], form: Delimited, schema: Schema, path: str, only: Sequence[str] = ()
) -> Any:
    """Return delimited lines as an Arrow record batch: numbers for labels and dense columns, bytes for all others.

    Columns with several values, such as histories, are lists of bytes if the format separates such values.
    """
    import pyarrow as pa
    import pyarrow.compute as pc
    from pyarrow import csv

    real = {*schema.label_columns, *(dense.source_name for dense in schema.dense)}

    def parse(numbers: Any) -> Any:
        return csv.read_csv(
            pa.BufferReader(lines),
            csv.ReadOptions(use_threads=False, block_size=len(lines) + 1, column_names=list(names)),
            csv.ParseOptions(
                delimiter=form.separator,
                quote_char='"' if form.quotes else False,
                newlines_in_values=False,
                ignore_empty_lines=False,
            ),
            csv.ConvertOptions(
                column_types={name: numbers if name in real else pa.binary() for name in names},
                include_columns=list(only) or None,
                null_values=["", *(" " * n for n in range(1, _MOST_BLANKS))] if form.blank_is_missing else [""],
                strings_can_be_null=True,
                quoted_strings_can_be_null=True,
            ),
        )

    try:
        try:
            table = parse(pa.float64())
        except pa.ArrowInvalid:  # words for missing values, such as NA
            if not form.missing_words:
                raise
            table = parse(pa.string())
            for at, name in enumerate(table.column_names):
                if name in real:
                    table = table.set_column(at, name, _numbers_or_words(table.column(name)))
    except pa.ArrowInvalid as error:
        raise DataError(f"{path}: {error}") from None
    if table.num_rows != lines.count(b"\n"):
        raise DataError(f"{path}: a line contains a carriage return", "remove it, or convert the file's line endings")
    for name in dict.fromkeys(slot.source_name for slot in schema.read_columns if slot.multi):
        if form.list_separator and name in table.column_names and name not in real:
            at = table.column_names.index(name)
            table = table.set_column(at, name, pc.split_pattern(table.column(name), form.list_separator.encode()))
    return table.combine_chunks().to_batches()[0] if table.num_rows else table.schema.empty_table().to_batches()[0]


def _numbers_or_words(column: Any) -> Any:
    """Return text as numbers, with null for a word that means a missing value."""
    import pyarrow as pa
    import pyarrow.compute as pc

    trimmed = pc.utf8_trim_whitespace(column)
    missing = pc.is_in(trimmed, pa.array([*MISSING_WORDS, ""]))
    return pc.if_else(missing, pa.scalar(None, pa.string()), trimmed).cast(pa.float64())
