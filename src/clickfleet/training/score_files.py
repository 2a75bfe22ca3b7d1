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
        done = write_parts((scores for _, scores in model.scores(source)), out)
        return {**done, "bad_lines": source.counters.bad_lines}
    if not isinstance(source, Reader):
        raise ConfigError("columns can be kept of files only", "add the scores to the frame: frame['score'] = scores")
    ending(out, keep)
    columns = KeptColumns(source, keep)

    def tables() -> Iterator[pa.Table]:
        for batch, scores in model.scores(source):
            yield columns.take(len(batch)).append_column(SCORE, pa.array(scores))

    try:
        done = write_tables(tables(), out, keep)
    finally:
        columns.close()
    return {**done, "bad_lines": source.counters.bad_lines}


def write_parts(parts: Iterable[Floats], out: str | Path) -> WrittenScores:
    """Write scores to a file, which appears when it is complete."""
    return write_tables((pa.table({SCORE: pa.array(scores, pa.float32())}) for scores in parts), out)


def ending(out: str | Path, keep: Sequence[str] = ()) -> str:
    """Return the ending of a file of scores, without that of its compression. Refuse what it cannot hold."""
    name = Path(out).name
    suffix = Path(name.removesuffix(PACKED)).suffix
    if suffix in (".parquet", ".npy") and name.endswith(PACKED):
        raise ConfigError(f"{name}: {suffix} files are not compressed again", f"choose {name.removesuffix(PACKED)}")
    if keep and suffix != ".parquet" and suffix not in SEPARATORS:
        raise ConfigError(
            f"{name} cannot hold columns beside the scores", "choose a name that ends in .csv, .tsv or .parquet"
        )
    if SCORE in keep:
        raise ConfigError(f"the scores are in the column {SCORE!r}, so no other of this name can be kept")
    return suffix


def write_tables(tables: Iterable[pa.Table], out: str | Path, keep: Sequence[str] = ()) -> WrittenScores:
    """Write tables of scores and kept columns to a file, which appears when it is complete."""
    out = Path(out)
    suffix = ending(out, keep)
    begin = time.monotonic()
    with writing(out) as temporary:
        if suffix == ".parquet":
            rows = _write_parquet(temporary, tables, keep)
        elif suffix == ".npy":
            rows = _write_npy(temporary, tables)
        else:
            rows = _write_text(temporary, tables, keep, SEPARATORS.get(suffix), out.name.endswith(PACKED))
    seconds = time.monotonic() - begin
    return {"rows": rows, "seconds": seconds, "rows_per_s": rows / max(seconds, 1e-9), "out": str(out)}


def _empty(keep: Sequence[str]) -> pa.Table:
    """Return what to write of data without rows."""
    score = pa.field(SCORE, pa.float32(), nullable=False)
    return pa.schema([*(pa.field(name, pa.string()) for name in keep), score]).empty_table()


def _write_parquet(path: Path, tables: Iterable[pa.Table], keep: Sequence[str]) -> int:
    from pyarrow import parquet

    rows, writer = 0, None
    try:
        for table in tables:
            if writer is None:
                kept = [table.schema.field(name) for name in keep]
                schema = pa.schema([*kept, pa.field(SCORE, pa.float32(), nullable=False)])
                writer = parquet.ParquetWriter(path, schema)
            writer.write_table(table.cast(schema))
            rows += len(table)
        if writer is None:
            parquet.write_table(_empty(keep), path)
    finally:
        if writer is not None:
            writer.close()
    return rows


def _write_npy(path: Path, tables: Iterable[pa.Table]) -> int:
    scores = np.concatenate([np.empty(0, np.float32), *(table[SCORE].to_numpy() for table in tables)])
    with path.open("wb") as file:
        np.save(file, scores)
    return len(scores)


def _write_text(
    path: Path, tables: Iterable[pa.Table], keep: Sequence[str], separator: str | None, packed: bool
) -> int:
    """Write lines of text. Files with a separator have a header; other files hold one score per line."""
    from pyarrow.csv import WriteOptions, write_csv  # writes the shortest digits that identify a number

    rows = 0
    with pa.OSFile(str(path), "wb") as file:
        sink = pa.CompressedOutputStream(file, "gzip") if packed else file
        out = _Lines(sink.write)
        writer = csv.writer(out, delimiter=separator or ",", lineterminator="\n")
        if separator:
            writer.writerow([*keep, SCORE])
            out.flush()
        for table in tables:
            if keep:
                writer.writerows(zip(*(_texts(table[name]) for name in (*keep, SCORE)), strict=True))
                out.flush()
            else:
                write_csv(table, sink, WriteOptions(include_header=False))
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
