"""Saved models: load one, evaluate it, score with it, describe it."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np

from clickfleet.config.check import cores
from clickfleet.config.load import Config
from clickfleet.data.batch import Batch, Floats
from clickfleet.data.dataset import Data, Source, for_scoring, open_source, with_format
from clickfleet.data.files import inside
from clickfleet.data.names import Names, collect
from clickfleet.data.schema import Schema
from clickfleet.errors import CheckpointError, ConfigError, DataError
from clickfleet.store import atomic, checkpoint, mirror, run_folder
from clickfleet.store.onnx import Engine
from clickfleet.store.row_format import RowFormat
from clickfleet.training import predict, saving
from clickfleet.training.callbacks import Record, flat
from clickfleet.training.learner import Learner
from clickfleet.training.metrics import Metrics
from clickfleet.training.network import Model
from clickfleet.training.predict import Results, Scorer, results

if TYPE_CHECKING:
    from clickfleet.training.report.evidence import Importance


@dataclass(eq=False)
class SavedModel:
    """A model that can score: rows, network and schema."""

    loaded: Learner | None
    """None: it is loaded from `path` when it is first used."""
    path: Path | None = None
    """The folder of the model. None: it is in memory only."""
    threads: int = 0
    """Number of scoring threads."""
    form: str | None = None
    """The format of the files to score. Default: that of the training data."""
    engine: Engine | None = None
    """Computes the network. Default: torch."""
    model_class: type[Model] | None = None
    """The class of the network, if it was passed in Python."""
    files: Callable[[], dict[str, bytes]] | None = field(default=None, repr=False)
    """Returns the files of a checkpoint of the model besides its rows, if it lies in no folder."""
    known_names: Names | None = None
    """The values behind frequent keys, if they are known before the run folder has them."""
    run: Config | None = field(default=None, repr=False)
    """The configuration of the run of this process that made the model."""

    def __post_init__(self) -> None:
        self.threads = self.threads or cores(self.config)

    @property
    def learner(self) -> Learner:
        if self.loaded is None:
            if self.path is None:
                raise CheckpointError("the run has no checkpoint yet")
            # Trusted: this process has just written it, by the configuration that the user gave.
            self.loaded = saving.load(run_folder.whole(self.path), True, self.model_class, self.run)
        return self.loaded

    @property
    def config(self) -> Config:
        return self.learner.config

    @property
    def schema(self) -> Schema:
        return self.learner.schema

    def reading(self, form: str | None = None, threads: int | None = None, engine: Engine | None = None) -> SavedModel:
        """Return the same model for files of another format, with other threads, or scored by ONNX Runtime. Keep the rest."""
        return replace(
            SavedModel(self.learner, self.path, model_class=self.model_class, known_names=self.known_names),
            threads=threads or self.threads,
            form=form or self.form,
            engine=engine or self.engine,
        )

    @property
    def names(self) -> Names | None:
        """The values behind frequent keys; None if the run does not keep them."""
        if self.known_names is None and self.path is not None and self.config.run.names:
            self.known_names = run_folder.read_names(self.path, self.schema)
        return self.known_names

    def named(self, found: Results, data: Data) -> Results:
        """Return results with the values of slices in place of their keys, as far as the run or the data tells them."""
        slot = self.config.train.metrics.slices
        if slot is None or not self.config.run.names:
            return found
        here, known = collect(data), self.names
        both = known if here is None else here if known is None else known.merge(here)
        return predict.name_slices(found, both, slot)

    def evaluate(
        self, data: Data, batch_size: int | None = None, on_batch: Callable[[Batch], None] | None = None
    ) -> Results:
        """Return the metrics on data with labels. `on_batch` is called with every batch."""
        source = self.source(data, batch_size, labels=True)
        return self.named(results(self.measure(source, on_batch=on_batch)), source)

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
        """Return the probability of a click for every row, in order; with several labels, a column for each: [rows, labels]."""
        parts = [scores for _, scores in self.scores(data, batch_size)]
        labels = len(self.schema.tasks)
        return np.concatenate([np.empty((0, labels) if labels > 1 else 0, np.float32), *parts])

    def source(self, data: Data, batch_size: int | None = None, labels: bool = False) -> Source:
        """Open data to score, in its order, even if training shuffled it."""
        config = for_scoring(with_format(self.config, self.form), batch_size)
        return open_source(config, data, self.schema, labels=labels)

    @property
    def step(self) -> int:
        """Steps that the model was trained."""
        if self.path is not None:
            return run_folder.step(self.path)
        return int(json.loads(self._files()["state.json"])["step"])

    @property
    def history(self) -> list[Record]:
        """One record per epoch and evaluation of the run: kind, epoch, step, rows and metrics. `pandas.DataFrame` makes a table of it.

        Empty if the model does not lie in its run folder.
        """
        if self.path is None or self.path.parent.name != "checkpoints":
            return []
        from clickfleet.training.report.evidence import read_lines

        lines = read_lines(self.path.parent.parent)
        records = [record for kind, of_kind in lines.items() if kind in RECORDED for record in of_kind]
        return [flat(str(record["kind"]), record) for record in sorted(records, key=lambda record: record["time"])]

    def save(self, path: str | Path, overwrite: bool = False) -> Path:
        """Write the model as a checkpoint: a folder that `clickfleet.load` and every command accept."""
        path = Path(path)
        files, step = self._files(), self.step
        if overwrite and path.exists():
            atomic.read_manifest(path, "checkpoint")  # only what we wrote is removed
            shutil.rmtree(path)
        return checkpoint.save(self.learner.table, path, attached=files, step=step, **self.learner.facts)

    def _files(self) -> dict[str, bytes]:
        """Return the files of a checkpoint besides its rows."""
        if self.files is not None:
            return self.files()
        if self.path is None:
            raise CheckpointError("the model has no state to save", "train it with clickfleet.train or clickfleet.fit")
        if run_folder.entries(self.path) is not None:
            raise CheckpointError(
                f"{self.path} is a published model, which has no optimizer state", "copy the folder instead"
            )
        whole = run_folder.whole(self.path)
        names = atomic.read_manifest(whole, "checkpoint")["files"]
        return {name: checkpoint.read(whole, name) for name in names if not name.endswith(ROWS)}

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the model as the files of a checkpoint. Unpickling loads them as `load` does and runs no code that they name."""
        with tempfile.TemporaryDirectory(prefix="clickfleet-") as folder:
            saved = self.save(Path(folder) / "model")
            files = {path.name: path.read_bytes() for path in saved.iterdir()}
        return _unpickled, (files, self.threads, self.form, self.model_class)

    def export(self, path: str | Path, inputs: Sequence[str] | None = None, *, rows: RowFormat = "float32") -> Path:
        """Write the model for serving. `inputs` are the columns that requests contain; default: all.

        `rows` is the format of the rows: float32, float16 or int8.
        """
        from clickfleet.training.export import export

        return export(self.learner, path, self.step, inputs, rows=rows).path

    def importance(self, data: Data, groups: Sequence[Sequence[str]] | None = None) -> list[Importance]:
        """Return how much worse the metrics become if a field, or a group of fields, is shuffled; the largest first.

        It is measured on a sample of `data`, which needs labels.
        """
        from clickfleet.training.report.evidence import EvidenceSample, importance

        sample = EvidenceSample.for_importance(self.learner)
        for batch in self.source(data, labels=True):
            sample.add(batch)
        if not len(sample):
            raise DataError("the data holds no rows")
        return importance(self.learner, sample.rows, groups, threads=self.threads)

    def explain(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return the score of a row, and the contribution of each field: the score minus the score with that field missing."""
        explanation: dict[str, Any] = import_module(EXPLAIN).explain(self, row)
        return explanation


def _unpickled(files: dict[str, bytes], threads: int, form: str | None, model_class: type[Model] | None) -> SavedModel:
    with tempfile.TemporaryDirectory(prefix="clickfleet-") as folder:
        for name, content in files.items():
            inside(Path(folder), name).write_bytes(content)
        learner = saving.load(Path(folder), False, model_class)
    kept = {name: content for name, content in files.items() if name != atomic.MANIFEST and not name.endswith(ROWS)}
    return SavedModel(learner, None, threads, form, model_class=model_class, files=lambda: kept)


ROWS = ".arrow"
"""How the names of files with rows end."""
EXPLAIN = "clickfleet.workbench.explain"
"""The module that explains scores. It is imported by name: training itself does not need it."""
RECORDED = ("epoch", "test", "valid")
"""The kinds of records in metrics.jsonl that `history` shows."""


def load(model: str | Path, trust: bool = False, model_class: type[Model] | None = None) -> SavedModel:
    """Load a model from a run folder (its newest or best checkpoint), a checkpoint, a published log or an entry.

    A model can name code: a user's model or reader, or the command of a `pipe`. The code runs only with `trust`. If the class of the
    network was defined in a notebook or a script, pass it as `model_class`.
    """
    path = run_folder.resolve(model)
    return SavedModel(saving.load(path, trust, model_class), path, model_class=model_class)


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
    steps: int = 0
    """Steps since the run began."""
    new_rows: int = 0
    """Rows trained by this call."""
    seconds: float = 0.0
    rows_per_s: float = 0.0
    train: Results = field(default_factory=dict)
    """Training metrics of the last epoch."""
    valid: Results | None = None
    """Metrics of this model on the validation data."""
    test: Results | None = None
    """Metrics of this model on the test data."""
    last: Path | None = None
    """The newest checkpoint, from which a resume starts."""
    signal: int | None = None
    """The signal that stopped the run early."""
    best: Path | None = None
    """The checkpoint with the best train.monitor on validation data, if it is kept (run.keep_best, train.patience)."""
    records: list[Record] = field(default_factory=list, repr=False)
    """The records of a run without a folder."""

    @property
    def history(self) -> list[Record]:
        """One record per epoch and evaluation of the run: kind, epoch, step, rows and metrics. `pandas.DataFrame` makes a table of it."""
        return list(self.records) if self.last is None else super().history

    def in_memory(self) -> TrainingResult:
        """Return the result with its model in memory, independent of the folder of the run."""
        kept = self._files()
        return replace(self, loaded=self.learner, path=None, last=None, best=None, files=lambda: kept)

    def to_dict(self) -> dict[str, object]:
        return {
            "rows": self.rows,
            "steps": self.steps,
            "new_rows": self.new_rows,
            "seconds": self.seconds,
            "rows_per_s": self.rows_per_s,
            "train_auc": self.train.get("auc"),
            "valid_auc": None if self.valid is None else self.valid["auc"],
            "test_auc": None if self.test is None else self.test["auc"],
            "checkpoint": None if self.path is None else mirror.origin(self.path) or str(self.path),
            **({"tasks": measured["tasks"]} if "tasks" in (measured := self.test or self.valid or self.train) else {}),
        }
