"""Saved models: load one, evaluate it, score with it, describe it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import pyarrow as pa

from clickfleet.config.check import cores
from clickfleet.config.load import Config
from clickfleet.data.batch import Batch, Floats
from clickfleet.data.dataset import Data, Source, for_scoring, open_source, with_format
from clickfleet.data.files import writing
from clickfleet.data.schema import Schema
from clickfleet.errors import CheckpointError, ConfigError
from clickfleet.store import checkpoint, mirror, run_folder
from clickfleet.store.onnx import Engine
from clickfleet.training import predict, saving
from clickfleet.training.learner import Learner
from clickfleet.training.metrics import Metrics
from clickfleet.training.predict import Results, Scorer, results


@dataclass(eq=False)
class SavedModel:
    """A model that can score: rows, network and schema."""

    loaded: Learner | None
    """None: it is loaded from `path` when it is first used."""
    path: Path | None = None
    threads: int = 0
    form: str | None = None
    """The format of the files to score. Default: that of the training data."""
    engine: Engine | None = None
    """Computes the network. Default: torch."""

    def __post_init__(self) -> None:
        self.threads = self.threads or cores(self.config)

    @property
    def learner(self) -> Learner:
        if self.loaded is None:
            if self.path is None:
                raise CheckpointError("the run has no checkpoint yet")
            # Trusted: this process has just written it, by the configuration that the user gave.
            self.loaded = saving.load(run_folder.whole(self.path), trust=True)
        return self.loaded

    @property
    def config(self) -> Config:
        return self.learner.config

    @property
    def schema(self) -> Schema:
        return self.learner.schema

    def reading(self, form: str | None = None, threads: int | None = None, engine: Engine | None = None) -> SavedModel:
        """Return the same model for files of another format, with other threads, or scored by ONNX Runtime. Keep the rest."""
        return SavedModel(self.learner, self.path, threads or self.threads, form or self.form, engine or self.engine)

    def evaluate(self, data: Data, batch_size: int | None = None) -> Results:
        """Return the metrics on data with labels."""
        return results(self.measure(data, batch_size))

    def measure(
        self, data: Data, batch_size: int | None = None, on_batch: Callable[[Batch], None] | None = None
    ) -> Metrics:
        """Return the metrics as sums and buckets. `on_batch` is called with every batch."""
        source = self.source(data, batch_size, labels=True)
        return predict.measure(self.learner, source, self.threads, on_batch, self.engine)

    def scores(self, data: Data, batch_size: int | None = None) -> Iterable[tuple[Batch, Floats]]:
        """Yield each batch with its scores, in the order of the data. The data may exceed the memory."""
        return Scorer(self.learner, self.threads, self.engine)(self.source(data, batch_size))

    def predict(self, data: Data, batch_size: int | None = None) -> Floats:
        """Return the probability of a click for every row, in order."""
        parts = [scores for _, scores in self.scores(data, batch_size)]
        return np.concatenate([np.empty(0, np.float32), *parts])

    def source(self, data: Data, batch_size: int | None = None, labels: bool = False) -> Source:
        """Open data to score, in its order, even if training shuffled it."""
        config = for_scoring(with_format(self.config, self.form), batch_size)
        return open_source(config, data, self.schema, labels=labels)


def load(model: str | Path, trust: bool = False) -> SavedModel:
    """Load a model from a run folder (its newest or best checkpoint), a checkpoint, a published log or an entry.

    A model can name code: a user's model or reader, or the command of a `pipe`. The code runs only with `trust`.
    """
    path = run_folder.resolve(model)
    return SavedModel(saving.load(path, trust), path)


def epochs(model: str | Path, span: str) -> list[tuple[int, Path]]:
    """Return the checkpoints that a run kept of its epochs `first:last`, without the last."""
    first, last = parse_span(span)
    wanted = range(first, 1 << 31 if last is None else last)
    kept = checkpoint.epochs(Path(model) / "checkpoints")
    chosen = [(epoch, path) for epoch, path in kept.items() if epoch in wanted]
    missing = [epoch for epoch in wanted if epoch not in kept] if last is not None else []
    if missing or not chosen:
        known = ", ".join(map(str, kept)) or "none; run.keep_epochs keeps them"
        raise CheckpointError(
            f"{model} has no checkpoint of epoch {missing[0] if missing else first}", f"kept: {known}"
        )
    return chosen


def parse_span(span: str) -> tuple[int, int | None]:
    """Return the first epoch of a span and the one after its last; None if it is open.

    >>> parse_span("0:4"), parse_span("2"), parse_span("1:")
    ((0, 4), (2, 3), (1, None))
    """
    first, colon, last = span.partition(":")
    try:
        begin = int(first or 0) if colon else int(first)
        return begin, (int(last) if last else None) if colon else begin + 1
    except ValueError:
        raise ConfigError(f"{span!r} is not a span of epochs", "write 0:4 for the epochs 0, 1, 2 and 3") from None


class WrittenScores(TypedDict):
    """How many scores were written, how fast, and where."""

    rows: int
    seconds: float
    rows_per_s: float
    out: str


class WrittenRows(WrittenScores):
    """The same, with the number of lines that have no score."""

    bad_lines: int


def write_scores(model: SavedModel, data: Data, out: str | Path, batch_size: int | None = None) -> WrittenRows:
    """Write the scores of all rows to a file, which appears when it is complete."""
    source = model.source(data, batch_size)
    done = write_parts((scores for _, scores in model.scores(source)), out)
    return {**done, "bad_lines": source.counters.bad_lines}


def write_parts(parts: Iterable[Floats], out: str | Path) -> WrittenScores:
    """Write scores to a file, which appears when it is complete."""
    out = Path(out)
    writers = {".parquet": _write_parquet, ".npy": _write_npy}
    begin = time.monotonic()
    with writing(out) as temporary:
        rows = writers.get(out.suffix, _write_text)(temporary, parts)
    seconds = time.monotonic() - begin
    return {"rows": rows, "seconds": seconds, "rows_per_s": rows / max(seconds, 1e-9), "out": str(out)}


SCORE = pa.schema([pa.field("score", pa.float32(), nullable=False)])


def _write_text(path: Path, parts: Iterable[Floats]) -> int:
    from pyarrow import csv  # writes the shortest digits that identify a number

    return _write_batches(csv.CSVWriter(str(path), SCORE, write_options=csv.WriteOptions(include_header=False)), parts)


def _write_parquet(path: Path, parts: Iterable[Floats]) -> int:
    from pyarrow import parquet

    return _write_batches(parquet.ParquetWriter(path, SCORE), parts)


def _write_batches(writer: Any, parts: Iterable[Floats]) -> int:
    rows = 0
    with writer:
        for scores in parts:
            writer.write_batch(pa.record_batch([pa.array(scores)], schema=SCORE))
            rows += len(scores)
    return rows


def _write_npy(path: Path, parts: Iterable[Floats]) -> int:
    scores = np.concatenate([np.empty(0, np.float32), *parts])
    with path.open("wb") as file:
        np.save(file, scores)
    return len(scores)


class ModelFacts(TypedDict):
    """Facts about a saved model, as `clickfleet inspect --json` prints them."""

    checkpoint: str
    step: int
    model: dict[str, object]
    parameters: int
    rows: int
    full_rows: int
    bytes: int
    factors: int
    rule: dict[str, object]
    slots: dict[str, int]


def facts(path: Path, learner: Learner) -> ModelFacts:
    """Return facts about the saved model at a resolved path."""
    table = learner.table.stats()
    return {
        "checkpoint": str(path),
        "step": run_folder.step(path),
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
    """Return the number of rows of each slot. A row belongs to the slot in which it was first seen."""
    counts = np.zeros(1 << 16, np.int64)
    with learner.table.snapshot() as rows:
        for columns in rows:
            counts += np.bincount(columns["slot"], minlength=1 << 16)
    return {slot.name: int(counts[i]) for i, slot in enumerate(learner.schema.slots)}


@dataclass(eq=False)
class TrainingResult(SavedModel):
    """The model that training made, and its results. `path` is the best checkpoint if the run keeps it, else the newest."""

    rows: int = 0
    """Rows trained since the run began: all epochs, and those before a resume."""
    new_rows: int = 0
    """Rows trained by this call."""
    seconds: float = 0.0
    rows_per_s: float = 0.0
    train: Results = field(default_factory=dict)
    """Training metrics of the last epoch."""
    test: Results | None = None
    """Metrics of this model on the test data."""
    last: Path | None = None
    """The newest checkpoint, from which a resume starts."""
    signal: int | None = None
    """The signal that stopped the run early."""
    best: Path | None = None
    """The checkpoint with the best test AUC, if it is kept (run.keep_best, train.patience)."""
    best_auc: float | None = None

    def to_dict(self) -> dict[str, object]:
        return {
            "rows": self.rows,
            "new_rows": self.new_rows,
            "seconds": self.seconds,
            "rows_per_s": self.rows_per_s,
            "train_auc": self.train.get("auc"),
            "test_auc": None if self.test is None else self.test["auc"],
            "checkpoint": None if self.path is None else mirror.origin(self.path) or str(self.path),
        }
