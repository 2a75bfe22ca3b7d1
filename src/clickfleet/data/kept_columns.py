"""Read columns of files as they are, beside the batches that a reader makes of the same rows.

A bad line that the reader skips is skipped here too, so that row i of the columns always belongs to row i of the batches.
"""

from __future__ import annotations

import csv
import io
import json
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from clickfleet.config.plugins import closest
from clickfleet.data.block_queue import BlockResult
from clickfleet.data.files import Unpacked, open_bytes, reading
from clickfleet.data.formats import Format
from clickfleet.data.formats.arrow import Arrow
from clickfleet.data.formats.jsonl import Jsonl
from clickfleet.data.formats.parquet import Parquet
from clickfleet.data.parsing.columns import BLOCK_ROWS
from clickfleet.data.parsing.delimited import Delimited
from clickfleet.data.reader import Reader
from clickfleet.data.schema import Schema
from clickfleet.errors import ConfigError, DataError

_CHUNK = 1 << 20


class _ReadBlock(NamedTuple):
    """What a reader read: so many lines of a file, of which some were bad."""

    file: int
    path: str
    lines: int
    bad: list[int]


class KeptColumns:
    """The columns `names` of the rows that a reader returns, in their order. Create it before the reader is used."""

    def __init__(self, reader: Reader, names: Sequence[str]) -> None:
        if len(set(names)) < len(names):
            raise ConfigError("a column to keep is named twice", "name each column once")
        check_named(reader.format, reader.format_name)
        self._reader, self._names = reader, list(names)
        self._read: deque[_ReadBlock] = deque()
        self._rows: deque[pa.Table] = deque()
        self._ready = 0
        self._file: tuple[int, _Records] | None = None
        self.schema: pa.Schema | None = None
        """The types of the columns, as soon as a file was opened."""
        reader.on_block, reader.every_bad_line = self._note, True

    def _note(self, block: BlockResult) -> None:
        assert block.parsed is not None
        bad = [bad.line for bad in block.parsed.bad]
        self._read.append(_ReadBlock(block.file, block.path, block.parsed.lines, bad))

    def take(self, rows: int) -> pa.Table:
        """Return the columns of the next rows."""
        while self._ready < rows:
            block = self._read.popleft()
            if self._file is None or self._file[0] != block.file:
                self.close()
                records = _open(self._reader.format, block.path, self._reader.schema, self._names)
                self._file = block.file, records
            part = self._file[1].take(block.lines, block.bad)
            self.schema = self.schema or part.schema
            try:
                self._rows.append(part.cast(self.schema))
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
                raise DataError(f"{block.path}: a column to keep has another type than before ({error})") from None
            self._ready += len(part)
        taken, missing = [], rows
        while missing:
            part = self._rows.popleft()
            if len(part) > missing:
                self._rows.appendleft(part.slice(missing))
                part = part.slice(0, missing)
            taken.append(part)
            missing -= len(part)
        self._ready -= rows
        return pa.concat_tables(taken) if taken else pa.table({name: pa.array([], pa.string()) for name in self._names})

    def close(self) -> None:
        """Close the file that is being read."""
        if self._file is not None:
            self._file[1].close()
            self._file = None


class _Records(ABC):
    """The records of one file, read from its start to its end."""

    @abstractmethod
    def take(self, n: int, bad: Sequence[int]) -> pa.Table:
        """Return the columns of the next `n` records without those with the indices `bad`."""

    @abstractmethod
    def close(self) -> None: ...


class _LineRecords(_Records):
    """Fields of a text file with one record per line, as text."""

    def __init__(self, path: str, names: list[str]) -> None:
        self._path, self._names = path, names
        self._stream = Unpacked(path)
        self._lines = self._split()

    def _split(self) -> Iterator[bytes]:
        rest, space = b"", memoryview(bytearray(_CHUNK))
        while got := self._stream.readinto(space):
            *lines, rest = (rest + bytes(space[:got])).split(b"\n")
            yield from lines
        if rest:
            yield rest

    def take(self, n: int, bad: Sequence[int]) -> pa.Table:
        skipped = set(bad)
        lines = [line for i, line in zip(range(n), self._lines, strict=False) if i not in skipped]
        table = self._parse(lines) if lines else pa.table({name: pa.array([], pa.string()) for name in self._names})
        if len(table) != n - len(bad):
            raise DataError(f"{self._path}: cannot match its columns with its rows", "write the file again as Parquet")
        return table

    @abstractmethod
    def _parse(self, lines: list[bytes]) -> pa.Table:
        """Return the columns of whole lines."""

    def close(self) -> None:
        self._stream.close()


class _DelimitedRecords(_LineRecords):
    """Fields between separators."""

    def __init__(self, form: Delimited, path: str, schema: Schema, names: list[str]) -> None:
        super().__init__(path, names)
        self._form = form
        try:
            first = next(self._lines, b"")
            self._columns = columns_of(form, schema, first)
            _check_present(names, self._columns, path)
        except BaseException:
            self.close()
            raise
        if not form.header_lines:
            self._lines = chain([first], self._lines)

    def _parse(self, lines: list[bytes]) -> pa.Table:
        text = b"\n".join(lines) + b"\n"
        try:
            return self._read(text)
        except pa.ArrowInvalid:  # not UTF-8
            return self._read(text.decode("utf-8", "backslashreplace").encode())

    def _read(self, text: bytes) -> pa.Table:
        from pyarrow import csv as arrow_csv

        kinds = dict.fromkeys(self._names, pa.string())
        return arrow_csv.read_csv(
            io.BytesIO(text),
            arrow_csv.ReadOptions(column_names=self._columns, use_threads=False, block_size=len(text) + 1),
            arrow_csv.ParseOptions(delimiter=self._form.separator, quote_char='"' if self._form.quotes else False),
            arrow_csv.ConvertOptions(column_types=kinds, include_columns=self._names, strings_can_be_null=False),
        )


class _JsonRecords(_LineRecords):
    """Members of JSON objects. An absent one is a missing value."""

    def _parse(self, lines: list[bytes]) -> pa.Table:
        rows = [json.loads(line) for line in lines]
        return pa.table({name: pa.array([_text(row.get(name)) for row in rows], pa.string()) for name in self._names})


def _text(value: object) -> str | None:
    return value if value is None or isinstance(value, str) else json.dumps(value, ensure_ascii=False)


class _TableRecords(_Records):
    """Columns of a Parquet or Arrow file."""

    def __init__(self, path: str, names: list[str], parquet: bool) -> None:
        self._path, self._names, self._parquet = path, names, parquet
        self._raw = open_bytes(path)
        self._batches = self._open()
        self._rest: list[pa.Table] = []

    def _open(self) -> Iterator[pa.RecordBatch]:
        from pyarrow import parquet

        from clickfleet.data.arrow_ipc import open_ipc

        with reading(self._path):
            if self._parquet:
                file = parquet.ParquetFile(self._raw)
                _check_present(self._names, file.schema_arrow.names, self._path)
                yield from file.iter_batches(BLOCK_ROWS, columns=self._names, use_threads=False)
            else:
                batches = open_ipc(self._raw)
                _check_present(self._names, batches.schema.names, self._path)
                yield from (batch.select(self._names) for batch in batches)

    def take(self, n: int, bad: Sequence[int]) -> pa.Table:
        while sum(map(len, self._rest)) < n:
            self._rest.append(pa.Table.from_batches([next(self._batches)]).select(self._names))
        whole = pa.concat_tables(self._rest)
        self._rest = [whole.slice(n)]
        records = whole.slice(0, n)
        if bad:
            records = records.take(np.delete(np.arange(n), list(bad)))
        return records

    def close(self) -> None:
        self._raw.close()


def columns_of(form: Delimited, schema: Schema, first_line: bytes) -> list[str]:
    """Return the names of the columns of a file that starts with this line."""
    line = first_line.removesuffix(b"\r").decode("utf-8-sig", "replace")
    fields = next(csv.reader([line], delimiter=form.separator), []) if form.quotes else line.split(form.separator)
    if form.header_lines:
        return fields
    names = list(form.columns)
    if len(fields) == len(names) - 1 and schema.label in names:
        names.remove(schema.label)  # rows without a label
    return names


def check_named(form: Format, name: str) -> None:
    """Refuse a format whose columns have no names."""
    if not isinstance(form, Delimited | Jsonl | Parquet | Arrow):
        raise ConfigError(
            f"the columns of {name} files have no names, so none can be kept",
            "keep columns of csv, jsonl, parquet and arrow files",
        )


def _open(form: Format, path: str, schema: Schema, names: list[str]) -> _Records:
    if isinstance(form, Delimited):
        return _DelimitedRecords(form, path, schema, names)
    if isinstance(form, Jsonl):
        return _JsonRecords(path, names)
    return _TableRecords(path, names, isinstance(form, Parquet))


def _check_present(names: Sequence[str], present: Sequence[str], path: str) -> None:
    for name in names:
        if name not in present:
            raise DataError(f"{path}: there is no column {name!r} to keep{closest(name, present)}")
