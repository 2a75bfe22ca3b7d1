"""A configuration -> live objects -> train, evaluate, predict.

import clickfleet

trained = clickfleet.train("config.yaml", "train.epochs=2")
trained.test["auc"], trained.predict("more/*.tsv")
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from clickfleet import checkpoint, modes, saving, scoring, storage
from clickfleet import schema as schemas
from clickfleet.batch import ROW_COLUMNS, Batch, Floats
from clickfleet.config import Config, checked, dump, override
from clickfleet.config import load as load_config
from clickfleet.errors import CheckpointError, ConfigError, DataError, TrainingError
from clickfleet.feeds import Feed
from clickfleet.files import expand, packing
from clickfleet.formats import load as load_format
from clickfleet.job import Job, Source
from clickfleet.learner import Learner
from clickfleet.metrics import Metrics
from clickfleet.reader import Reader
from clickfleet.schema import Schema
from clickfleet.sections import Plugin, Run
from clickfleet.session import Results, Session
from clickfleet.step import NotFiniteError
from clickfleet.watch import Watch

Data = Any
"""Paths of files, or anything a Feed takes: a frame, a table, a mapping of arrays, rows, batches."""


class Trained:
    """A model that can score: rows, network and schema."""

    def __init__(self, learner: Learner, path: Path | None = None, threads: int | None = None) -> None:
        self.learner, self.path = learner, path
        self.threads = threads or cores(learner.config)

    @property
    def config(self) -> Config:
        return self.learner.config

    @property
    def schema(self) -> Schema:
        return self.learner.schema

    def reading(self, form: str | None = None, threads: int | None = None) -> Trained:
        """The same model for files of another format, or with other threads."""
        if form is not None:
            data = replace(self.config.data, format=Plugin(form))
            self.learner.config = replace(self.config, data=data)
        return Trained(self.learner, self.path, threads or self.threads)

    def evaluate(self, data: Data, batch_size: int | None = None) -> Results:
        """The metrics on data with labels."""
        return scoring.evaluate(self.learner, self.source(data, batch_size, labels=True), self.threads)

    def scores(self, data: Data, batch_size: int | None = None) -> Iterable[tuple[Batch, Floats]]:
        """Each batch with its scores, in the order of the data, which may be larger than the memory."""
        return scoring.Scorer(self.learner, self.threads)(self.source(data, batch_size))

    def predict(self, data: Data, batch_size: int | None = None) -> Floats:
        """The probability of a click for every row, in order."""
        parts = [scores for _, scores in self.scores(data, batch_size)]
        return np.concatenate(parts) if parts else np.empty(0, np.float32)

    def source(self, data: Data, batch_size: int | None = None, labels: bool = False) -> Source:
        config = replace(self.config.data, batch_size=batch_size or test_batch_size(self.config))
        if config.bad_lines == "quarantine":  # what was put aside in training is only counted in scoring
            config = replace(config, bad_lines="skip")
        return open_source(replace(self.config, data=config), data, self.schema, labels=labels)


@dataclass
class Outcome(Trained):
    """What training made."""

    learner: Learner
    path: Path | None
    threads: int
    rows: int = 0
    """Rows trained on by this call."""
    seconds: float = 0.0
    rows_per_s: float = 0.0
    train: Results = field(default_factory=dict)
    """Metrics of the last epoch's training, taken as it went on."""
    test: Results | None = None
    signal: int | None = None
    """The signal that stopped the run before its end."""

    def to_dict(self) -> dict[str, Any]:
        return {
            "rows": self.rows,
            "seconds": self.seconds,
            "rows_per_s": self.rows_per_s,
            "train_auc": self.train.get("auc"),
            "test_auc": None if self.test is None else self.test["auc"],
            "checkpoint": None if self.path is None else str(self.path),
        }


def train(
    config: Config | Mapping[str, Any] | str | Path | None = None,
    *overrides: str,
    data: Data = None,
    test: Data = None,
    schema: Schema | None = None,
    resume: bool = False,
    quiet: bool = False,
) -> Outcome:
    """Trains as a configuration says: a file, its content, or a Config, with `key=value` over it.

    `data` and `test` may stand in memory instead of files; with `data` in memory and no `run.dir`, nothing is written.
    """
    settings = configure(config, overrides)
    check(settings)
    in_memory = data is not None and not isinstance(data, str | Path)
    folder = None if in_memory and settings.run.dir == Run.dir else Path(settings.run.dir).absolute()
    if folder is not None:
        settings = replace(settings, run=replace(settings.run, dir=str(folder)))
    source = open_source(
        settings, data if data is not None else settings.data.train, schema, labels=True, folder=folder
    )
    metrics_of = settings.train.metrics
    metrics = Metrics(metrics_of.thresholds, metrics_of.sliding or None, groups=source.schema.group is not None)
    scoring.slice_slot(source.schema, metrics_of.slices)
    threads, trainers = cores(settings), hogwild(settings)
    arrangement = {
        "deterministic": settings.train.deterministic,
        "threads": threads,
        "hogwild": trainers,
        "cpu": cpu_class(),
    }

    state: saving.State | None = None
    notes: list[str] = []
    checkpoints = None if folder is None else folder / "checkpoints"
    if resume:
        if checkpoints is None:
            raise ConfigError("there is no run folder to resume from", "set run.dir")
        path = checkpoint.latest(checkpoints)
        learner, state = saving.resume(path, settings, source.schema, metrics)
        check_arrangement(state["arrangement"], arrangement)
        checkpoint.forget_after(checkpoints, state["step"])
        notes.append(f"going on from {path}")
    else:
        if checkpoints is not None and checkpoint.steps(checkpoints):
            raise CheckpointError(f"{folder} holds a run already", "go on with --resume, or choose another run.dir")
        torch.manual_seed(settings.train.seed)
        if settings.train.init_from is not None:
            learner, anew = saving.start_from(saving.resolve(settings.train.init_from), settings, source.schema)
            notes.append(f"starting from {settings.train.init_from}")
            notes += [f"initialised anew: {what}" for what in anew]
        else:
            learner = Learner(settings, source.schema)

    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.yaml").write_text(dump(settings), encoding="utf-8")
    watch = Watch(folder, total_bytes(source, settings), quiet=quiet)
    saver = None
    if checkpoints is not None:
        saver = saving.Saver(checkpoints, settings.run.keep, settings.run.keep_epochs, watch.log)
        if state is not None:
            saver.last = (state["step"], path)
    held_out = test if test is not None else settings.data.test or None
    evaluator = Trained(learner, threads=threads)
    if held_out is None and (settings.train.patience or settings.train.eval_every):
        raise ConfigError("train.patience and train.eval_every need test data", "set data.test")
    session = Session(
        settings, watch, saver, None if held_out is None else lambda: evaluator.evaluate(held_out), arrangement
    )
    job = Job(learner, source, metrics, session.attend, watch.tick, trainers=trainers, threads=threads)
    if state is not None:
        session.restore(job, state)
    before = job.rows
    for note in notes:
        watch.log(note)
    try:
        with session.interruptible():
            modes.load(settings)(job)
    except NotFiniteError as problem:
        if saver is not None:
            saver.wait()
        raise not_finite(problem, job.steps, folder, saver) from None
    finally:
        job.close()
        watch.close()
    rows = job.rows - before
    return Outcome(
        learner,
        saver.last[1] if saver is not None and saver.last is not None else None,
        threads,
        rows=rows,
        seconds=session.trained_s + session.last_save_s,
        rows_per_s=rows / session.trained_s if session.trained_s else 0.0,
        train=session.progress.train or dict(metrics.results()),
        test=session.progress.test,
        signal=session.signal,
    )


def load(model: str | Path) -> Trained:
    """A saved model: of a run folder its newest checkpoint, or a checkpoint."""
    path = saving.resolve(model)
    return Trained(saving.load(path), path)


def epochs(model: str | Path, span: str) -> list[tuple[int, Path]]:
    """The checkpoints a run kept of its epochs `first:last`, without the last."""
    first, colon, last = span.partition(":")
    try:
        wanted = range(int(first or 0), int(last) if last else 1 << 31) if colon else range(int(first), int(first) + 1)
    except ValueError:
        raise ConfigError(f"epochs {span!r} are not a span", "write 0:4 for the epochs 0, 1, 2 and 3") from None
    kept = checkpoint.epochs(Path(model) / "checkpoints")
    found = [(epoch, path) for epoch, path in kept.items() if epoch in wanted]
    missing = [epoch for epoch in wanted if epoch not in kept] if last or not colon else []
    if missing or not found:
        known = ", ".join(map(str, kept)) or "none; run.keep_epochs keeps them"
        raise CheckpointError(
            f"{model} has no checkpoint of epoch {missing[0] if missing else first}", f"kept: {known}"
        )
    return found


def write_scores(model: Trained, data: Data, out: str | Path, batch_size: int | None = None) -> dict[str, Any]:
    """Scores of all rows into a file, which appears when it is complete."""
    out = Path(out)
    kinds = {".parquet": _write_parquet, ".npy": _write_npy}
    rows, begin = 0, time.monotonic()

    def parts() -> Iterator[Floats]:
        nonlocal rows
        for _, scores in model.scores(data, batch_size):
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
    with path.open("w") as file:
        for scores in parts:
            file.write("".join(f"{score:.7g}\n" for score in scores.tolist()))


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


def describe(model: str | Path) -> dict[str, Any]:
    """What a saved model is made of."""
    path = saving.resolve(model)
    learner = saving.load(path)
    counts = np.zeros(1 << 16, np.int64)
    with learner.table.snapshot() as rows:
        for columns in rows:
            counts += np.bincount(columns["slot"], minlength=1 << 16)
    table = learner.table.stats()
    return {
        "checkpoint": str(path),
        "step": storage.read_manifest(path, "checkpoint")["step"],
        "model": learner.facts["model"],
        "parameters": sum(p.numel() for p in learner.model.parameters()),
        "rows": table["rows"],
        "full_rows": table["full_rows"],
        "bytes": table["bytes"],
        "factors": learner.table.factors,
        "rule": learner.table.rule.to_dict(),
        "slots": {slot.name: int(counts[i]) for i, slot in enumerate(learner.schema.slots)},
    }


def configure(config: Config | Mapping[str, Any] | str | Path | None, overrides: Iterable[str] = ()) -> Config:
    """A configuration from whatever names one."""
    if isinstance(config, Config):
        if overrides:
            raise ConfigError("a Config is changed by dataclasses.replace, not by key=value")
        return config
    if isinstance(config, Mapping):
        raw: dict[str, Any] = {key: dict(part) if isinstance(part, Mapping) else part for key, part in config.items()}
        for item in overrides:
            override(raw, item)
        return checked(Config, raw, source="the configuration", base=Path.cwd())
    return load_config(config, overrides, Path.cwd())


def check(config: Config) -> None:
    """Refuses settings that contradict each other, before any work."""
    train = config.train
    if train.deterministic and (train.hogwild or 1) > 1:
        raise ConfigError(f"train.hogwild is {train.hogwild}, and train.deterministic allows one", "remove one of them")
    if train.profile:
        raise ConfigError("train.profile is not available", "py-spy and perf can watch a running training")
    if config.data.schema is not None and config.data.preset is not None:
        raise ConfigError("data.schema and data.preset both say what the columns mean", "remove one of them")
    if train.hogwild is not None and train.hogwild > cores(config):
        raise ConfigError(
            f"train.hogwild is {train.hogwild}, more than train.threads ({cores(config)})", "raise threads"
        )


def cores(config: Config) -> int:
    """Threads that compute at the same time."""
    return config.train.threads or len(os.sched_getaffinity(0))


def hogwild(config: Config) -> int:
    """Trainer threads: on few cores, one core each is faster than sharing every operator between them."""
    if config.train.deterministic:
        return 1
    return config.train.hogwild or min(cores(config), 8)


def cpu_class() -> str:
    """What decides the last bits of a product."""
    return f"{torch.backends.cpu.get_cpu_capability()} torch {torch.__version__}"


def check_arrangement(saved: Mapping[str, Any], mine: Mapping[str, Any]) -> None:
    """A deterministic run is the same only with the same threads and kind of CPU."""
    if mine["deterministic"] and dict(saved) != dict(mine):
        differences = ", ".join(
            f"{key} {saved[key]} there, {mine[key]} here" for key in mine if saved[key] != mine[key]
        )
        raise ConfigError(
            f"the checkpoint and train.deterministic do not fit: {differences}",
            "resume with the same arrangement, or with train.deterministic=false",
        )


def test_batch_size(config: Config) -> int:
    return config.data.test_batch_size or config.data.batch_size


def open_source(
    config: Config, data: Data, schema: Schema | None, *, labels: bool = False, folder: Path | None = None
) -> Source:
    """Files or data in memory as batches of the schema: the given one, else the configuration's."""
    of = config.data
    if isinstance(data, Reader | Feed):
        if schema is not None:
            schema.check_same(data.schema, "the model", "the data")
        return data
    form: Any = load_format({"name": of.format.name, **of.format.settings})
    wanted = schema or (
        schemas.read_schema(of.schema) if of.schema else schemas.preset(of.preset) if of.preset else None
    )
    paths = isinstance(data, str | Path) or (
        isinstance(data, list | tuple) and all(isinstance(item, str | Path) for item in data)
    )
    if not paths:
        if wanted is None:
            raise ConfigError("data in memory needs a schema", "give schema=Schema(…), data.schema or data.preset")
        if of.shuffle:
            raise ConfigError("data.shuffle is for files", "shuffle what is in memory before you give it")
        return Feed(data, wanted, of.batch_size)
    if not data:
        raise ConfigError("data.train is missing", "name files, e.g. data.train=train/part-*")
    quarantine = of.quarantine
    if of.bad_lines == "quarantine" and quarantine is None:
        quarantine = str((folder or Path()) / "quarantine.txt")
        Path(quarantine).parent.mkdir(parents=True, exist_ok=True)
    reader = Reader(
        data,
        wanted,
        form,
        of.batch_size,
        shuffle=of.shuffle,
        seed=config.train.seed,
        threads=of.threads,
        interleave=of.interleave,
        bad_lines=of.bad_lines,
        max_bad_fraction=of.max_bad_fraction,
        quarantine=quarantine if of.bad_lines == "quarantine" else None,
        require_labels=labels,
    )
    reader.format_name = of.format.name
    return reader


def total_bytes(source: Source, config: Config) -> int | None:
    """Bytes that training will read, where they are known."""
    files = expand(source.files) if isinstance(source, Reader) else []
    if not files or any("://" in path or packing(path) or path.endswith(".parquet") for path in files):
        return None
    return config.train.epochs * sum(map(os.path.getsize, files))


def not_finite(problem: NotFiniteError, step: int, folder: Path | None, saver: saving.Saver | None) -> TrainingError:
    """Saves the batch that gave no number, and says where."""
    saved = ""
    if folder is not None:
        path = folder / f"bad-batch-{step:012d}.npz"
        columns = {name: getattr(problem.batch, name) for name in ("dense", "keys", "offsets", "values", *ROW_COLUMNS)}
        np.savez(path, **{name: column for name, column in columns.items() if column is not None})
        saved = f"; its batch is in {path}"
    last = f", and go on from {saver.last[1]} with --resume" if saver is not None and saver.last is not None else ""
    return TrainingError(
        f"step {step}: {problem}, nothing of it was learned{saved}",
        f"check the dense columns and weights of that batch, lower dense.lr or set dense.clip_norm{last}",
    )
