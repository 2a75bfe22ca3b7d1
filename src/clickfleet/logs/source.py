"""Logs as they come: rows of a schema and, where the format holds raw columns, these too.

A piece is one block of a file. `batch` is what training would see; `columns` are the values as they stand in the file, missing ones
null. The text formats of columns are parsed twice, first by the format itself, so that bad lines are refused in its words.
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
        if columns and self.format in ("parquet", "arrow"):
            for piece in _stored(path, self.format):
                bar.advance(piece.columns.nbytes if bar.unit == "bytes" else len(piece))  # type: ignore[union-attr]
                yield piece
            return
        bad = BadLines(self.bad_lines, self.max_bad_fraction, None)
        names = _names(form, path, self.schema) if columns else ()
        lines = 0
        for block in form.blocks(path, self.schema, 0):
            parsed = block.parse("all" if columns and bad.on_bad != "stop" else bad.on_bad)
            bad.handle(path, lines + _header(form), parsed, self.counters, self.format)
            lines += parsed.lines
            bar.advance(block.size if bar.unit == "bytes" else len(parsed.batch))
            if len(parsed.batch):
                gone = [item.line for item in parsed.bad]
                yield Piece(parsed.batch, _columns(form, block, names, gone, path, self.schema) if columns else None)
        bad.check(self.counters)


def default_schema(kind: str) -> Schema:
    """What files of a format mean when nobody says: what the format says, or Criteo's columns where any columns may be."""
    known = load(kind).schema
    if known is None and kind in COLUMNAR:
        return preset("criteo")
    if known is None:
        raise ConfigError(f"files of the format {kind} do not name their columns", "describe them in a file and give --schema")
    return known


@contextmanager
def reading(files: Sequence[str], what: str) -> Iterator[Bar]:
    """A progress bar for files: by bytes where their sizes say how much there is to read, else by rows."""
    plain = all("://" not in path and packing(path) is None and not path.endswith(".parquet") for path in files)
    with progress(what, sum(map(os.path.getsize, files)) if plain else None, "bytes" if plain else "rows") as bar:
        yield bar


def exact_dense(schema: Schema, columns: "pa.RecordBatch") -> NDArray[np.float64]:
    """The dense values of a batch, [B, F], in double precision: what a text file of them should show."""
    rows = [_transform(dense, _numbers(columns.column(dense.source or dense.name))) for dense in schema.dense]
    return np.stack(rows, axis=1) if rows else np.empty((columns.num_rows, 0))


def _transform(dense: Dense, x: NDArray[np.float64]) -> NDArray[np.float64]:
    name, a = dense.transform.name, dense.transform.a
    if name == "log1p":
        scaled = np.sign(x) * np.log1p(np.abs(x))
    else:
        scaled = x if name == "none" else (x - a) / dense.transform.scale
    return np.where(np.isnan(x), dense.missing, scaled)


def _numbers(column: Any) -> NDArray[np.float64]:
    import pyarrow as pa

    numbers: NDArray[np.float64] = column.cast(pa.float64()).to_numpy(zero_copy_only=False)  # null: NaN
    return numbers


def _header(form: Format) -> int:
    return form.header_lines


def _names(form: Format, path: str, schema: Schema) -> tuple[str, ...]:
    """The columns of a file of delimited text."""
    assert isinstance(form, Delimited)
    stream = Unpacked(path)
    try:
        first = b""
        while b"\n" not in first and (more := stream.read(1 << 16)):
            first += more
    finally:
        stream.close()
    line = first.partition(b"\n")[0].removesuffix(b"\r")
    if _header(form):
        return tuple(name.strip('"') for name in line.decode().split(form.separator))
    found = line.count(form.separator.encode()) + 1
    unlabelled = found == len(form.columns) - 1
    return tuple(name for name in form.columns if not (unlabelled and name == schema.label))


def _columns(form: Format, block: Block, names: Sequence[str], gone: Sequence[int], path: str, schema: Schema) -> Any:
    """A block's lines as columns: numbers for the label and dense ones, bytes for all others."""
    assert isinstance(block, LineBlock) and isinstance(form, Delimited)
    lines = block.lines
    if gone:
        kept = np.ones(lines.count(b"\n"), bool)
        kept[list(gone)] = False
        lines = b"".join(line for line, keep in zip(lines.splitlines(keepends=True), kept, strict=True) if keep)
    return text_columns(lines, names, form.separator, '"' if form.quotes else "", schema, path)


def text_columns(lines: bytes, names: Sequence[str], separator: str, quote: str, schema: Schema, path: str) -> Any:
    """Delimited lines as an Arrow record batch."""
    import pyarrow as pa
    from pyarrow import csv

    numbers = {schema.label, *(dense.source or dense.name for dense in schema.dense)}
    try:
        table = csv.read_csv(
            pa.BufferReader(lines),
            csv.ReadOptions(use_threads=False, block_size=len(lines) + 1, column_names=list(names)),
            csv.ParseOptions(delimiter=separator, quote_char=quote or False, newlines_in_values=False),
            csv.ConvertOptions(
                column_types={name: pa.float64() if name in numbers else pa.binary() for name in names},
                null_values=[""],
                strings_can_be_null=True,
                quoted_strings_can_be_null=True,
            ),
        )
    except pa.ArrowInvalid as error:
        raise DataError(f"{path}: {error}") from None
    return table.combine_chunks().to_batches()[0]


def _stored(path: str, kind: str) -> Iterator[Piece]:
    """Record batches as they are stored, with the columns the schema names."""
    import pyarrow as pa
    from pyarrow import parquet

    from clickfleet.files import open_bytes

    try:
        with open_bytes(path) as file:
            if kind == "parquet":
                batches: Any = parquet.ParquetFile(file).iter_batches(batch_size=1 << 14)
            else:
                reader = pa.ipc.open_file(file)
                batches = (reader.get_batch(i) for i in range(reader.num_record_batches))
            for batch in batches:
                yield Piece(None, batch)
    except pa.ArrowInvalid as error:
        raise DataError(f"{path}: not a readable {kind} file: {error}") from None
