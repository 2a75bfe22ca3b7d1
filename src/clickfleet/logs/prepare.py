"""A raw log -> parts to train and to test on, and a schema with its dense transforms fitted to the training part.

Rows are copied as they stand, so every format can be prepared; the split is by row, the first nine tenths to train on
(after shuffling, if asked for). One pass counts the rows, one splits and fits; memory does not grow with the log.
"""

import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from clickfleet.bad_lines import BadLines, Counters, Policy
from clickfleet.errors import ConfigError, DataError
from clickfleet.files import expand, open_bytes, packing, reading
from clickfleet.formats import load
from clickfleet.formats._delimited import Delimited
from clickfleet.formats._lines import Lines
from clickfleet.logs.rows import LineRows, Rows, shuffled
from clickfleet.logs.sink import ENDINGS, Sink
from clickfleet.logs.sketch import Spread
from clickfleet.logs.source import (
    COLUMNAR,
    bites,
    column_names,
    first_line,
    numbers,
    schema_for,
    stored,
    text_columns,
    watched,
)
from clickfleet.progress import progress
from clickfleet.schema import Dense, Schema, Transform, write_schema

Fit = Literal["minmax", "standard", "log1p", "none"]


@dataclass(frozen=True)
class Options:
    format: str = "criteo"
    transform: Fit = "minmax"
    """What is fitted: minmax takes the least value and the 95th percentile and cuts off nothing beyond."""
    test_share: float = 0.1
    part_rows: int = 200_000
    shuffle: bool = False
    seed: int = 7
    keys: str | None = None
    bad_lines: Policy = "error"

    def __post_init__(self) -> None:
        if not 0 <= self.test_share < 1:
            raise ConfigError(f"the test share must be at least 0 and less than 1, not {self.test_share}")
        if self.part_rows < 1:
            raise ConfigError(f"a part needs at least one row, not {self.part_rows}")
        if self.transform not in ("minmax", "standard", "log1p", "none"):
            raise ConfigError(f"unknown transform {self.transform!r}", "choose minmax, standard, log1p or none")


def prepare(
    inputs: str | Path | Iterable[str | Path],
    out: str | Path,
    options: Options | None = None,
    schema: Schema | None = None,
) -> dict[str, Any]:
    """Writes `out`/train, `out`/test and `out`/schema.yaml; the folder appears when all of it is written."""
    options, out = options or Options(), Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise DataError(f"{out} exists already", "choose a new folder, or remove it first")
    schema = schema_for(options.format, schema, options.keys)
    files = expand(inputs)
    train_rows = round(_count(files, options.format) * (1 - options.test_share))
    beside = out.with_name(f".{out.name}.writing")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    try:
        log = _Log(files, schema, options)
        rows: Iterator[Rows] = log.rows()
        if options.shuffle:
            rows = shuffled(rows, _size(files), options.seed, beside / "shuffling")
        with _Writer(beside, options) as writer:
            for some in rows:
                cut = max(train_rows - writer.rows["train"], 0)
                writer.write("train", some[:cut])
                log.fit(some[:cut])
                writer.write("test", some[cut:])
        fitted = log.fitted()
        write_schema(fitted, beside / "schema.yaml")
        if out.exists():
            out.rmdir()
        os.replace(beside, out)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return {
        "rows": sum(writer.rows.values()),
        "train_rows": writer.rows["train"],
        "test_rows": writer.rows["test"],
        "bad_lines": log.counters.bad_lines,
        "parts": writer.parts,
        "out": str(out),
        "schema": str(out / "schema.yaml"),
        "transforms": {column.name: str(column.transform) for column in fitted.dense},
    }


@dataclass
class _Log:
    """Reads checked rows, and fits the dense columns of those that are for training."""

    files: list[str]
    schema: Schema
    options: Options
    counters: Counters = field(default_factory=Counters)

    def __post_init__(self) -> None:
        self._form = load(self.options.format)
        self._fits = self.options.format in COLUMNAR and self.options.transform in ("minmax", "standard")
        self._spreads = [Spread() for _ in self.schema.dense]
        self._names: tuple[str, ...] = ()

    def rows(self) -> Iterator[Rows]:
        bad = BadLines(self.options.bad_lines, 0.1, None)
        with watched(self.files, "splitting") as bar:
            for path in self.files:
                header = self._header(path)
                lines = self._form.header_lines
                for block in self._form.blocks(path, self.schema, 0):
                    some = stored(block, header)
                    parsed = block.parse("stop" if self.options.bad_lines == "error" else "all")
                    bad.handle(path, lines, parsed, self.counters, self.options.format)
                    lines += parsed.lines
                    bar.advance(block.size if bar.unit == "bytes" else len(parsed.batch))
                    if len(parsed.batch):
                        yield some.without([item.line for item in parsed.bad])
        bad.check(self.counters)

    def _header(self, path: str) -> bytes:
        """The line with the names of the columns, which every part repeats; all files must have the same columns."""
        if not isinstance(self._form, Delimited):
            return b""
        names = column_names(self._form, path, self.schema)
        if self._names and names != self._names:
            raise DataError(f"{path} has other columns than {self.files[0]}", "prepare them one by one")
        self._names = names
        return first_line(path) + b"\n" if self._form.header_lines else b""

    def fit(self, rows: Rows) -> None:
        """Learns the spread of the dense columns from some rows."""
        if not self._fits or not self._spreads or not len(rows):
            return
        columns = rows.content
        if isinstance(rows, LineRows):
            assert isinstance(self._form, Delimited)
            dense = [column.source or column.name for column in self.schema.dense]
            columns = text_columns(rows.content, self._names, self._form, self.schema, self.files[0], only=dense)
        for spread, column in zip(self._spreads, self.schema.dense, strict=True):
            spread.add(numbers(columns.column(column.source or column.name)))

    def fitted(self) -> Schema:
        """The schema with the transforms that were learnt."""
        if self.options.format not in COLUMNAR:  # dense values there were transformed before they were written
            return self.schema
        dense = zip(self.schema.dense, self._spreads, strict=True)
        return replace(
            self.schema, dense=tuple(_fitted(column, spread, self.options.transform) for column, spread in dense)
        )


def _fitted(column: Dense, spread: Spread, kind: Fit) -> Dense:
    if kind in ("log1p", "none"):
        return replace(column, transform=Transform(kind))
    if not spread.count:  # nothing was there to learn from
        return replace(column, transform=Transform("none"))
    if kind == "standard":
        return replace(column, transform=Transform("standard", spread.mean, spread.deviation or 1.0))
    high = next(top for top in (spread.quantile(0.95), spread.high, spread.low + 1) if top > spread.low)
    return replace(column, transform=Transform("minmax", spread.low, high))


def _size(files: list[str]) -> int:
    """Bytes of all files once unpacked, or about that."""
    return sum(
        (4 if packing(path) else 1) * (os.path.getsize(path) if "://" not in path else 1 << 30) for path in files
    )


def _count(files: list[str], kind: str) -> int:
    """All rows, bad ones included."""
    form = load(kind)
    rows = 0
    with progress("counting rows in files", len(files), "files") as bar:
        for path in files:
            rows += _count_lines(path) - form.header_lines if isinstance(form, Lines) else _count_table(path, kind)
            bar.advance(1)
    return rows


def _count_lines(path: str) -> int:
    rows, last = 0, b"\n"
    for data in bites(path):
        rows += data.count(b"\n")
        last = data[-1:]
    return rows + (last != b"\n")


def _count_table(path: str, kind: str) -> int:
    from pyarrow import parquet

    from clickfleet.arrow_ipc import Checked, is_file

    with open_bytes(path) as file, reading(path):
        if kind == "parquet":
            return int(parquet.ParquetFile(file).metadata.num_rows)
        start = file.read(8)
        file.seek(0)
        return sum(batch.num_rows for batch in Checked(file, is_file=is_file(start)))


class _Writer:
    """Parts of train and test, each of `part_rows` rows but for the last."""

    def __init__(self, out: Path, options: Options) -> None:
        self._out, self._options = out, options
        self._sinks: dict[str, Sink] = {}
        self.rows = {"train": 0, "test": 0}
        self.parts = {"train": 0, "test": 0}

    def write(self, name: str, rows: Rows) -> None:
        while len(rows):
            sink = self._sinks.get(name) or self._next(name)
            some = rows[: self._options.part_rows - sink.rows]
            sink.write(some.content, len(some), some.header)
            self.rows[name] += len(some)
            rows = rows[len(some) :]
            if sink.rows == self._options.part_rows:
                sink.__exit__(None, None, None)
                del self._sinks[name]

    def _next(self, name: str) -> Sink:
        path = self._out / name / f"part-{self.parts[name]}{ENDINGS.get(self._options.format, '')}"
        self.parts[name] += 1
        self._sinks[name] = Sink(path, self._options.format)
        return self._sinks[name]

    def __enter__(self) -> "_Writer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        for sink in self._sinks.values():
            sink.__exit__(kind, error, where)
