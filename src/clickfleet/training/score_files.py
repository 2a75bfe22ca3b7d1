"""Write scores to files: as text, csv, Parquet or NumPy, with columns of the data beside them."""

from __future__ import annotations

import csv
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import pyarrow as pa

from clickfleet.data.batch import Floats
from clickfleet.data.dataset import Data
from clickfleet.data.files import writing
from clickfleet.data.kept_columns import KeptColumns
from clickfleet.data.reader import Reader
from clickfleet.data.schema import Schema
from clickfleet.errors import ConfigError
from clickfleet.training.model import SavedModel

SCORE = "score"
PACKED = ".gz"
SEPARATORS = {".csv": ",", ".tsv": "\t"}
"""Endings of text files with a header, and the separators of their columns."""


class WrittenScores(TypedDict):
    """How many scores were written, how fast, and where."""

    rows: int
    seconds: float
    rows_per_s: float
    out: str


class WrittenRows(WrittenScores):
    """The same, with the number of lines that have no score."""

    bad_lines: int


def write_scores(
    model: SavedModel, data: Data, out: str | Path, batch_size: int | None = None, keep: Sequence[str] = ()
) -> WrittenRows:
    """Write the scores of all rows to a file, which appears when it is complete. `keep` names columns to copy beside them."""
    source = model.source(data, batch_size)
    if not keep:
        done = write_parts((scores for _, scores in model.scores(source)), out, score_columns(model.schema))
        return {**done, "bad_lines": source.counters.bad_lines}
    if not isinstance(source, Reader):
        raise ConfigError("columns can be kept of files only", "add the scores to the frame: frame['score'] = scores")
    names = score_columns(model.schema)
    ending(out, keep, names)
    columns = KeptColumns(source, keep)

    def tables() -> Iterator[pa.Table]:
        for batch, scores in model.scores(source):
            table = columns.take(len(batch))
            for name, column in zip(names, _columns(scores, names), strict=True):
                table = table.append_column(name, column)
            yield table

    try:
        done = write_tables(tables(), out, keep, names)
    finally:
        columns.close()
    return {**done, "bad_lines": source.counters.bad_lines}


def score_columns(schema: Schema) -> list[str]:
    """Return the names of the columns with scores: `score`, or one per label if there are several.

    >>> from clickfleet.data.schema import Label, Slot
    >>> score_columns(Schema(slots=(Slot("ad"),), labels=(Label("click"), Label("buy"))))
    ['score_click', 'score_buy']
    """
    tasks = schema.tasks
    return [SCORE] if len(tasks) == 1 else [f"{SCORE}_{task.name}" for task in tasks]


def _columns(scores: Floats, names: Sequence[str]) -> list[pa.Array]:
    """Return each column of scores [rows] or [rows, labels]."""
    return [pa.array(column, pa.float32()) for column in scores.reshape(len(scores), len(names)).T]


def write_parts(parts: Iterable[Floats], out: str | Path, names: Sequence[str] = (SCORE,)) -> WrittenScores:
    """Write scores to a file, which appears when it is complete."""
    tables = (pa.table(dict(zip(names, _columns(scores, names), strict=True))) for scores in parts)
    return write_tables(tables, out, names=names)


def ending(out: str | Path, keep: Sequence[str] = (), names: Sequence[str] = (SCORE,)) -> str:
    """Return the ending of a file of scores, without that of its compression. Refuse what it cannot hold."""
    name = Path(out).name
    suffix = Path(name.removesuffix(PACKED)).suffix
    if suffix in (".parquet", ".npy") and name.endswith(PACKED):
        raise ConfigError(f"{name}: {suffix} files are not compressed again", f"choose {name.removesuffix(PACKED)}")
    if keep and suffix != ".parquet" and suffix not in SEPARATORS:
        raise ConfigError(
            f"{name} cannot hold columns beside the scores", "choose a name that ends in .csv, .tsv or .parquet"
        )
    if taken := [name for name in names if name in keep]:
        raise ConfigError(f"the scores are in the column {taken[0]!r}, so no other of this name can be kept")
    return suffix


def write_tables(
    tables: Iterable[pa.Table], out: str | Path, keep: Sequence[str] = (), names: Sequence[str] = (SCORE,)
) -> WrittenScores:
    """Write tables of scores and kept columns to a file, which appears when it is complete."""
    out = Path(out)
    suffix = ending(out, keep, names)
    begin = time.monotonic()
    with writing(out) as temporary:
        if suffix == ".parquet":
            rows = _write_parquet(temporary, tables, keep, names)
        elif suffix == ".npy":
            rows = _write_npy(temporary, tables, names)
        else:
            rows = _write_text(temporary, tables, keep, names, SEPARATORS.get(suffix), out.name.endswith(PACKED))
    seconds = time.monotonic() - begin
    return {"rows": rows, "seconds": seconds, "rows_per_s": rows / max(seconds, 1e-9), "out": str(out)}


def _write_parquet(path: Path, tables: Iterable[pa.Table], keep: Sequence[str], names: Sequence[str]) -> int:
    from pyarrow import parquet

    rows, writer = 0, None
    scores = [pa.field(name, pa.float32(), nullable=False) for name in names]
    try:
        for table in tables:
            if writer is None:
                kept = [table.schema.field(name) for name in keep]
                schema = pa.schema([*kept, *scores])
                writer = parquet.ParquetWriter(path, schema)
            writer.write_table(table.cast(schema))
            rows += len(table)
        if writer is None:
            parquet.write_table(
                pa.schema([*(pa.field(name, pa.string()) for name in keep), *scores]).empty_table(), path
            )
    finally:
        if writer is not None:
            writer.close()
    return rows


def _write_npy(path: Path, tables: Iterable[pa.Table], names: Sequence[str]) -> int:
    """Write an array [rows], or [rows, labels] of several labels."""
    empty = np.empty((0, len(names)), np.float32)
    parts = [np.stack([table[name].to_numpy() for name in names], axis=1) for table in tables]
    scores = np.concatenate([empty, *parts])
    with path.open("wb") as file:
        np.save(file, scores[:, 0] if len(names) == 1 else scores)
    return len(scores)


def _write_text(
    path: Path,
    tables: Iterable[pa.Table],
    keep: Sequence[str],
    names: Sequence[str],
    separator: str | None,
    packed: bool,
) -> int:
    """Write lines of text. Files with a separator have a header; other files hold one score per line, or one per label."""
    from pyarrow.csv import WriteOptions, write_csv  # writes the shortest digits that identify a number

    rows = 0
    with pa.OSFile(str(path), "wb") as file:
        sink = pa.CompressedOutputStream(file, "gzip") if packed else file
        out = _Lines(sink.write)
        writer = csv.writer(out, delimiter=separator or ",", lineterminator="\n")
        if separator:
            writer.writerow([*keep, *names])
            out.flush()
        for table in tables:
            if keep:
                writer.writerows(zip(*(_texts(table[name]) for name in (*keep, *names)), strict=True))
                out.flush()
            else:
                write_csv(table, sink, WriteOptions(include_header=False, delimiter=separator or ","))
            rows += len(table)
        if packed:
            sink.close()
    return rows


class _Lines:
    """Collects lines for a file of bytes."""

    def __init__(self, write: Callable[[bytes], Any]) -> None:
        self._write, self._parts = write, list[str]()

    def write(self, text: str) -> None:
        self._parts.append(text)

    def flush(self) -> None:
        self._write("".join(self._parts).encode())
        self._parts.clear()


def _texts(column: pa.ChunkedArray) -> list[str]:
    """Return a column as text: numbers by their shortest digits, nothing for a missing value, lists as JSON."""
    kind = column.type
    if pa.types.is_dictionary(kind):
        column, kind = column.cast(kind.value_type), kind.value_type
    if pa.types.is_nested(kind) or pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        values = column.to_pylist()
        return ["" if value is None else json.dumps(value, default=str, ensure_ascii=False) for value in values]
    return [text or "" for text in column.cast(pa.string()).to_pylist()]
