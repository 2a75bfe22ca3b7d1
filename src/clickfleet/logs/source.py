"""Logs as they come: rows of a schema and, where the format holds raw columns, these too.

A piece is one block of a file. `batch` is what training would see; `columns` are the values as they stand in the file,
missing ones null. Delimited text is parsed twice, first by its format, so that bad lines are refused in its words.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from clickfleet.bad_lines import BadLines, Counters, Policy
from clickfleet.batch import Batch
from clickfleet.errors import ConfigError, DataError
from clickfleet.files import Unpacked, packing
from clickfleet.formats import Block, Format, load
from clickfleet.formats._delimited import Delimited
from clickfleet.formats._lines import LineBlock
from clickfleet.formats._tables import TableBlock
from clickfleet.formats.csv import Csv
from clickfleet.logs.rows import LineRows, Rows, TableRows
from clickfleet.progress import Bar, progress
from clickfleet.schema import Dense, Schema, preset

if TYPE_CHECKING:
    import pyarrow as pa

COLUMNAR = ("criteo", "csv", "parquet", "arrow")
"""Formats that hold raw columns."""


@dataclass
class Piece:
    """Some rows of a log."""

    batch: Batch | None
    columns: "pa.RecordBatch | None" = None

    def __len__(self) -> int:
        return len(self.batch) if self.batch is not None else self.columns.num_rows if self.columns is not None else 0


@dataclass
class Source:
    """Files of one format, read piece by piece in order."""

    files: Sequence[str]
    format: str
    schema: Schema
    bad_lines: Policy = "error"
    max_bad_fraction: float = 0.1

    def __post_init__(self) -> None:
        self.counters = Counters()

    def pieces(self, path: str, *, columns: bool, bar: Bar) -> Iterator[Piece]:
        """The rows of one file, with their raw columns if asked for."""
        form = load(self.format)
        bad = BadLines(self.bad_lines, self.max_bad_fraction, None)
        names = column_names(form, path, self.schema) if columns and isinstance(form, Delimited) else ()
        lines = form.header_lines
        for block in form.blocks(path, self.schema, 0):
            content = stored(block) if columns else None
            parsed = block.parse("all" if columns and bad.on_bad != "stop" else bad.on_bad)
            bad.handle(path, lines, parsed, self.counters, self.format)
            lines += parsed.lines
            bar.advance(block.size if bar.unit == "bytes" else len(parsed.batch))
            if len(parsed.batch):
                gone = [item.line for item in parsed.bad]
                yield Piece(parsed.batch, None if content is None else self._columns(form, content, names, gone, path))
        bad.check(self.counters)

    def _columns(self, form: Format, content: Rows, names: Sequence[str], gone: Sequence[int], path: str) -> Any:
        """A block's raw columns, without its bad rows."""
        kept = content.without(gone)
        if not isinstance(kept, LineRows):
            return kept.content
        assert isinstance(form, Delimited)
        return text_columns(kept.content, names, form, self.schema, path)


def stored(block: Block, header: bytes = b"") -> Rows:
    """A block's rows as they stand in the file; to be called before it is parsed, because its memory is used again."""
    if isinstance(block, TableBlock):
        return TableRows(_plain(block.table))
    return LineRows(bytes(block.space[: block.used]) if isinstance(block, LineBlock) else b"\n", header)


def _plain(table: "pa.RecordBatch") -> "pa.RecordBatch":
    """Without dictionaries, which differ from block to block."""
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
    return pa.list_(_plain_type(kind.value_type)) if pa.types.is_list(kind) else kind


def schema_for(kind: str, schema: Schema | None = None, keys: str | None = None) -> Schema:
    """The schema to read a format with: what is given, else what the format says, else Criteo's columns.

    `keys` replaces its key rule; `py2` alone stands for the published ids and scaling of Criteo's columns.
    """
    given = schema or load(kind).schema or (preset("criteo") if kind in COLUMNAR else None)
    if given is None:
        raise ConfigError(
            f"files of the format {kind} do not say what their columns are",
            "describe them in a file and give it as --schema",
        )
    if keys == "py2":
        return preset("criteo-paddle") if schema is None and kind in COLUMNAR else given.with_keys("py2 mod 1000001")
    return given.with_keys(keys) if keys else given


@contextmanager
def watched(files: Sequence[str], what: str) -> Iterator[Bar]:
    """A progress bar for files: by bytes where their sizes say how much there is to read, else by rows."""
    plain = all("://" not in path and packing(path) is None and not path.endswith(".parquet") for path in files)
    with progress(what, sum(map(os.path.getsize, files)) if plain else None, "bytes" if plain else "rows") as bar:
        yield bar


def exact_dense(schema: Schema, columns: "pa.RecordBatch") -> NDArray[np.float64]:
    """The dense values of a batch, [B, F], in double precision: what a text file of them should show."""
    rows = [_transform(dense, numbers(columns.column(dense.source or dense.name))) for dense in schema.dense]
    return np.stack(rows, axis=1) if rows else np.empty((columns.num_rows, 0))


def _transform(dense: Dense, x: NDArray[np.float64]) -> NDArray[np.float64]:
    name, a = dense.transform.name, dense.transform.a
    if name == "log1p":
        scaled = np.sign(x) * np.log1p(np.abs(x))
    else:
        scaled = x if name == "none" else (x - a) / dense.transform.scale
    return np.where(np.isnan(x), dense.missing, scaled)


def numbers(column: Any) -> NDArray[np.float64]:
    """A dense column as doubles, NaN where it is missing."""
    import pyarrow as pa

    doubles: NDArray[np.float64] = column.cast(pa.float64()).to_numpy(zero_copy_only=False)
    return doubles


def bites(path: str, size: int = 1 << 20) -> Iterator[bytes]:
    """A file's content, unpacked, `size` bytes at a time."""
    stream = Unpacked(path)
    space = bytearray(size)
    try:
        with memoryview(space) as view:
            while got := stream.readinto(view):
                yield bytes(view[:got])
    finally:
        stream.close()


def first_line(path: str) -> bytes:
    """The first line of a text file, without its end."""
    first = b""
    for part in bites(path, 1 << 14):
        first += part
        if b"\n" in part:
            break
    return first.partition(b"\n")[0].removesuffix(b"\r")


def column_names(form: Delimited, path: str, schema: Schema) -> tuple[str, ...]:
    """The columns of a file of delimited text."""
    line = first_line(path)
    if isinstance(form, Csv) and form.header_lines:
        return tuple(form.split(line.decode("utf-8-sig")))
    unlabelled = line.count(form.separator.encode()) == len(form.columns) - 2
    return tuple(name for name in form.columns if not (unlabelled and name == schema.label))


def text_columns(
    lines: bytes, names: Sequence[str], form: Delimited, schema: Schema, path: str, only: Sequence[str] = ()
) -> Any:
    """Delimited lines as an Arrow record batch: numbers for the label and dense columns, bytes for all others."""
    import pyarrow as pa
    from pyarrow import csv

    real = {schema.label, *(dense.source or dense.name for dense in schema.dense)}
    try:
        table = csv.read_csv(
            pa.BufferReader(lines),
            csv.ReadOptions(use_threads=False, block_size=len(lines) + 1, column_names=list(names)),
            csv.ParseOptions(
                delimiter=form.separator,
                quote_char='"' if form.quotes else False,
                newlines_in_values=False,
                ignore_empty_lines=False,
            ),
            csv.ConvertOptions(
                column_types={name: pa.float64() if name in real else pa.binary() for name in names},
                include_columns=list(only) or None,
                null_values=[""],
                strings_can_be_null=True,
                quoted_strings_can_be_null=True,
            ),
        )
    except pa.ArrowInvalid as error:
        raise DataError(f"{path}: {error}") from None
    if table.num_rows != lines.count(b"\n"):
        raise DataError(f"{path}: a carriage return stands inside a line", "remove it, or convert the file's line ends")
    return table.combine_chunks().to_batches()[0]
