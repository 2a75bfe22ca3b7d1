"""A model that can score: from its files to metrics, scores and a description."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from clickfleet import checkpoint, machine, saving, scoring
from clickfleet.batch import Batch, Floats
from clickfleet.config import Config
from clickfleet.engine import Engine
from clickfleet.errors import CheckpointError, ConfigError, DataError
from clickfleet.job import Source
from clickfleet.learner import Learner
from clickfleet.metrics import Metrics
from clickfleet.opening import Data, for_scoring, open_source, with_format
from clickfleet.schema import Schema
from clickfleet.scoring import Results


class Trained:
    """A model that can score: rows, network and schema."""

    engine: Engine | None = None
    """What computes the network; torch by default."""
    form: str | None = None
    """The format of the files to score; that of the training data by default."""

    def __init__(self, learner: Learner, path: Path | None = None, threads: int | None = None) -> None:
        self.learner, self.path = learner, path
        self.threads = threads or cores(learner.config)

    @property
    def config(self) -> Config:
        return self.learner.config

    @property
    def schema(self) -> Schema:
        return self.learner.schema

    def reading(self, form: str | None = None, threads: int | None = None, engine: Engine | None = None) -> Trained:
        """The same model for files of another format, with other threads, or scored by ONNX Runtime."""
        same = Trained(self.learner, self.path, threads or self.threads)
        same.form, same.engine = form or self.form, engine
        return same

    def evaluate(self, data: Data, batch_size: int | None = None) -> Results:
        """The metrics on data with labels."""
        return scoring.results(self.measure(data, batch_size))

    def measure(self, data: Data, batch_size: int | None = None, look: scoring.Look | None = None) -> Metrics:
        """The same as sums and buckets; `look` is shown every batch."""
        source = self.source(data, batch_size, labels=True)
        return scoring.measure(self.learner, source, self.threads, look, self.engine)

    def scores(self, data: Data, batch_size: int | None = None) -> Iterable[tuple[Batch, Floats]]:
        """Each batch with its scores, in the order of the data, which may be larger than the memory."""
        return scoring.Scorer(self.learner, self.threads, self.engine)(self.source(data, batch_size))

    def predict(self, data: Data, batch_size: int | None = None) -> Floats:
        """The probability of a click for every row, in order."""
        parts = [scores for _, scores in self.scores(data, batch_size)]
        return np.concatenate(parts) if parts else np.empty(0, np.float32)

    def source(self, data: Data, batch_size: int | None = None, labels: bool = False) -> Source:
        """The rows of data to score, in their order, whatever order the model was trained in."""
        config = for_scoring(with_format(self.config, self.form), batch_size)
        return open_source(config, data, self.schema, labels=labels)


def load(model: str | Path) -> Trained:
    """A saved model: of a run folder its newest checkpoint, a checkpoint, a published log or an entry."""
    path = saving.resolve(model)
    return Trained(saving.load(path), path)


def epochs(model: str | Path, span: str) -> list[tuple[int, Path]]:
    """The checkpoints a run kept of its epochs `first:last`, without the last."""
    first, last = parse_span(span)
    wanted = range(first, 1 << 31 if last is None else last)
    kept = checkpoint.epochs(Path(model) / "checkpoints")
    found = [(epoch, path) for epoch, path in kept.items() if epoch in wanted]
    missing = [epoch for epoch in wanted if epoch not in kept] if last is not None else []
    if missing or not found:
        known = ", ".join(map(str, kept)) or "none; run.keep_epochs keeps them"
        raise CheckpointError(
            f"{model} has no checkpoint of epoch {missing[0] if missing else first}", f"kept: {known}"
        )
    return found


def parse_span(span: str) -> tuple[int, int | None]:
    """The first of some epochs and the one after the last, None without an end.

    >>> parse_span("0:4"), parse_span("2"), parse_span("1:")
    ((0, 4), (2, 3), (1, None))
    """
    first, colon, last = span.partition(":")
    try:
        begin = int(first or 0) if colon else int(first)
        return begin, (int(last) if last else None) if colon else begin + 1
    except ValueError:
        raise ConfigError(f"epochs {span!r} are not a span", "write 0:4 for the epochs 0, 1, 2 and 3") from None


def write_scores(model: Trained, data: Data, out: str | Path, batch_size: int | None = None) -> dict[str, Any]:
    """Scores of all rows into a file, which appears when it is complete."""
    source = model.source(data, batch_size)
    done = write_parts((scores for _, scores in model.scores(source)), out)
    return {**done, "bad_lines": source.counters.bad_lines}


def write_parts(found: Iterable[Floats], out: str | Path) -> dict[str, Any]:
    """The same for scores that come from elsewhere."""
    out = Path(out)
    kinds = {".parquet": _write_parquet, ".npy": _write_npy}
    rows, begin = 0, time.monotonic()

    def parts() -> Iterator[Floats]:
        nonlocal rows
        for scores in found:
            rows += len(scores)
            yield scores

    hidden = out.with_name(f".{out.name}.writing")
    try:
        hidden.parent.mkdir(parents=True, exist_ok=True)
        kinds.get(out.suffix, _write_text)(hidden, parts())
        hidden.replace(out)
    except OSError as error:
        raise DataError(f"{out} cannot be written: {error.strerror or error}") from error
    finally:
        hidden.unlink(missing_ok=True)
    seconds = time.monotonic() - begin
    return {"rows": rows, "seconds": seconds, "rows_per_s": rows / max(seconds, 1e-9), "out": str(out)}


def _write_text(path: Path, parts: Iterable[Floats]) -> None:
    import pyarrow as pa
    from pyarrow import csv

    columns = pa.schema([pa.field("score", pa.float32(), nullable=False)])  # as few digits as name the number
    with csv.CSVWriter(str(path), columns, write_options=csv.WriteOptions(include_header=False)) as writer:
        for scores in parts:
            writer.write_batch(pa.record_batch([pa.array(scores)], schema=columns))


def _write_npy(path: Path, parts: Iterable[Floats]) -> None:
    found = list(parts)
    with path.open("wb") as file:
        np.save(file, np.concatenate(found) if found else np.empty(0, np.float32))


def _write_parquet(path: Path, parts: Iterable[Floats]) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    columns = pa.schema([pa.field("score", pa.float32(), nullable=False)])
    with parquet.ParquetWriter(path, columns) as writer:
        for scores in parts:
            writer.write_batch(pa.record_batch([pa.array(scores)], schema=columns))


def facts(path: Path, learner: Learner) -> dict[str, Any]:
    """What the saved model at a resolved path is made of."""
    table = learner.table.stats()
    return {
        "checkpoint": str(path),
        "step": saving.step(path),
        "model": learner.facts["model"],
        "parameters": sum(p.numel() for p in learner.model.parameters()),
        "rows": table["rows"],
        "full_rows": table["full_rows"],
        "bytes": table["bytes"],
        "factors": learner.table.factors,
        "rule": learner.table.rule.to_dict(),
        "slots": rows_per_slot(learner),
    }


def rows_per_slot(learner: Learner) -> dict[str, int]:
    """How many rows the table holds of each slot; a row belongs to the slot that it was first seen in."""
    counts = np.zeros(1 << 16, np.int64)
    with learner.table.snapshot() as rows:
        for columns in rows:
            counts += np.bincount(columns["slot"], minlength=1 << 16)
    return {slot.name: int(counts[i]) for i, slot in enumerate(learner.schema.slots)}


def cores(config: Config) -> int:
    """Threads that compute at the same time."""
    return config.train.threads or machine.cores()
