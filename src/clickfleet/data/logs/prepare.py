"""Split a raw log into training and test parts, and fit the dense transforms of its schema to the training part.

Rows are copied unchanged, so that every format is supported. By default the first nine tenths, after an optional shuffle, are
for training. One pass counts the rows; another splits and fits. Memory does not grow with the log.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Literal

from clickfleet.config.plugins import AUTO, Plugin
from clickfleet.data.bad_lines import Policy
from clickfleet.data.dataset import count_rows
from clickfleet.data.files import expand, move, packing
from clickfleet.data.logs.sketch import Quantiles
from clickfleet.data.logs.source import (
    COLUMNAR,
    LineRows,
    LogReport,
    LogRows,
    LogSource,
    column_names,
    first_line,
    numbers,
    progress_of,
    recognise,
    shuffled,
    text_columns,
)
from clickfleet.data.logs.target import ENDINGS, OutputFile
from clickfleet.data.parsing.delimited import Delimited
from clickfleet.data.progress import progress
from clickfleet.data.schema import Dense, Schema, Transform, write_schema
from clickfleet.errors import ConfigError, DataError

Fit = Literal["minmax", "standard", "log1p", "none"]


@dataclass(frozen=True)
class PrepareOptions:
    format: str = AUTO
    transform: Fit | None = None
    """Transform to fit. minmax maps the minimum and the 95th percentile to 0 and 1, without clipping.

    Default: minmax; with a guessed schema, its own transforms.
    """
    test_share: float = 0.1
    part_rows: int = 200_000
    shuffle: bool = False
    seed: int = 7
    keys: str | None = None
    bad_lines: Policy = "error"

    def __post_init__(self) -> None:
        if not 0 <= self.test_share < 1:
            raise ConfigError(f"--test-share must be at least 0 and less than 1, not {self.test_share}")
        if self.part_rows < 1:
            raise ConfigError(f"--part-rows must be at least 1, not {self.part_rows}")
        if self.transform not in (None, "minmax", "standard", "log1p", "none"):
            raise ConfigError(f"unknown transform {self.transform!r}", "choose minmax, standard, log1p or none")


def prepare(
    inputs: str | Path | Iterable[str | Path],
    out: str | Path,
    options: PrepareOptions | None = None,
    schema: Schema | None = None,
) -> LogReport:
    """Write `out`/train, `out`/test and `out`/schema.yaml. The folder appears when it is complete."""
    options, out = options or PrepareOptions(), Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise DataError(f"{out} already exists", "choose a new folder, or remove it first")
    files = expand(inputs)
    form, schema, found = recognise(files, options.format, schema, options.keys)
    guessed = found is not None and any(slot.bucket for slot in schema.slots)
    if guessed and options.transform is not None:  # the buckets belong to the guessed transforms
        schema = replace(schema, slots=tuple(slot for slot in schema.slots if slot.bucket is None))
    options = replace(options, format=form.name, transform=options.transform or (None if guessed else "minmax"))
    train_rows = round(_count(files, form) * (1 - options.test_share))
    beside = out.with_name(f".{out.name}.writing")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    try:
        log = _Log(files, schema, options, form)
        rows: Iterator[LogRows] = log.rows()
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
        move(beside, out)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return {
        "rows": sum(writer.rows.values()),
        "train_rows": writer.rows["train"],
        "test_rows": writer.rows["test"],
        "bad_lines": log.source.counters.bad_lines,
        "parts": writer.parts,
        "out": str(out),
        "schema": str(out / "schema.yaml"),
        "transforms": {column.name: str(column.transform) for column in fitted.dense},
    }


@dataclass
class _Log:
    """Reads checked rows, and fits the dense columns to the training rows."""

    files: list[str]
    schema: Schema
    options: PrepareOptions
    form: Plugin

    def __post_init__(self) -> None:
        self.source = LogSource(self.files, self.form, self.schema, self.options.bad_lines)
        self._form = self.source.form
        self._fits = self.options.format in COLUMNAR and self.options.transform in ("minmax", "standard")
        self._spreads = [Quantiles() for _ in self.schema.dense]
        self._names: tuple[str, ...] = ()

    def rows(self) -> Iterator[LogRows]:
        with progress_of(self.files, "splitting") as bar:
            for path in self.files:
                for _, rows in self.source.blocks(path, bar, raw=True, header=self._header(path)):
                    assert rows is not None
                    yield rows
        self.source.check()

    def _header(self, path: str) -> bytes:
        """Return the header line, which every part repeats. All files must have the same columns."""
        if not isinstance(self._form, Delimited):
            return b""
        names = column_names(self._form, path, self.schema)
        if self._names and names != self._names:
            raise DataError(f"{path} does not have the same columns as {self.files[0]}", "prepare them one by one")
        self._names = names
        return first_line(path) + b"\n" if self._form.header_lines else b""

    def fit(self, rows: LogRows) -> None:
        """Add rows to the statistics of the dense columns."""
        if not self._fits or not self._spreads or not len(rows):
            return
        columns = rows.content
        if isinstance(rows, LineRows):
            assert isinstance(self._form, Delimited)
            dense = [column.source_name for column in self.schema.dense]
            columns = text_columns(rows.content, self._names, self._form, self.schema, self.files[0], only=dense)
        for spread, column in zip(self._spreads, self.schema.dense, strict=True):
            spread.add(numbers(columns.column(column.source_name)))

    def fitted(self) -> Schema:
        """Return the schema with the fitted transforms."""
        transform = self.options.transform
        if transform is None or self.options.format not in COLUMNAR:  # other formats store transformed values
            return self.schema
        dense = zip(self.schema.dense, self._spreads, strict=True)
        return replace(self.schema, dense=tuple(_fitted(column, spread, transform) for column, spread in dense))


def _fitted(column: Dense, spread: Quantiles, kind: Fit) -> Dense:
    if kind in ("log1p", "none"):
        return replace(column, transform=Transform(kind))
    if not spread.count:
        return replace(column, transform=Transform("none"))
    if kind == "standard":
        return replace(column, transform=Transform("standard", spread.mean, spread.deviation or 1.0))
    high = next(top for top in (spread.quantile(0.95), spread.high, spread.low + 1) if top > spread.low)
    return replace(column, transform=Transform("minmax", spread.low, high))


def _size(files: list[str]) -> int:
    """Return the approximate decompressed size of all files."""
    return sum(
        (4 if packing(path) else 1) * (os.path.getsize(path) if "://" not in path else 1 << 30) for path in files
    )


def _count(files: list[str], plugin: Plugin) -> int:
    """Return the number of rows, including bad ones."""
    rows = 0
    with progress("counting rows in files", len(files), "files") as bar:
        for path in files:
            rows += count_rows(path, plugin)
            bar.advance(1)
    return rows


class _Writer:
    """Writes train and test parts of `part_rows` rows each; the last ones may have fewer."""

    def __init__(self, out: Path, options: PrepareOptions) -> None:
        self._out, self._options = out, options
        self._sinks: dict[str, OutputFile] = {}
        self.rows = {"train": 0, "test": 0}
        self.parts = {"train": 0, "test": 0}

    def write(self, name: str, rows: LogRows) -> None:
        while len(rows):
            sink = self._sinks.get(name) or self._next(name)
            some = rows[: self._options.part_rows - sink.rows]
            sink.write(some.content, len(some), some.header)
            self.rows[name] += len(some)
            rows = rows[len(some) :]
            if sink.rows == self._options.part_rows:
                sink.__exit__(None, None, None)
                del self._sinks[name]

    def _next(self, name: str) -> OutputFile:
        path = self._out / name / f"part-{self.parts[name]}{ENDINGS.get(self._options.format, '')}"
        self.parts[name] += 1
        self._sinks[name] = OutputFile(path, self._options.format)
        return self._sinks[name]

    def __enter__(self) -> _Writer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        for sink in self._sinks.values():
            sink.__exit__(kind, error, where)
