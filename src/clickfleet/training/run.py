"""Train a configuration; open the folder of a run.

import clickfleet

result = clickfleet.train("config.yaml", "train.epochs=2")
result.test["auc"], result.predict("more/*.tsv")
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar, cast

import numpy as np
import torch

from clickfleet.config.check import check, configure, cores, hogwild
from clickfleet.config.load import Config
from clickfleet.config.plugins import find
from clickfleet.config.sections import Run
from clickfleet.data.batch import ROW_COLUMNS
from clickfleet.data.dataset import QUARANTINE, Data, Source, open_source, total_bytes
from clickfleet.data.schema import Schema
from clickfleet.errors import CheckpointError, ConfigError, TrainingError
from clickfleet.store import checkpoint, run_folder
from clickfleet.store.mirror import Mirror
from clickfleet.store.run_folder import NO_CHECKPOINT, State, local_folder, open_folder, write_config
from clickfleet.training import devices, modes, predict, saving
from clickfleet.training.learner import Learner, table_settings
from clickfleet.training.loop import Arrangement, Job, TrainingSession, keeps_best
from clickfleet.training.metrics import make_metrics
from clickfleet.training.model import SavedModel, TrainingResult
from clickfleet.training.monitor import Monitor
from clickfleet.training.network import Model
from clickfleet.training.profile import Profile
from clickfleet.training.report import write_report
from clickfleet.training.report.evidence import Evidence
from clickfleet.training.step import NotFiniteError

CLUSTER = "clickfleet.cluster.run_on_cluster"
"""The module that trains in the modes of a cluster. It is imported by name: training itself needs no cluster."""


def train(
    config: Config | Mapping[str, Any] | str | Path | None = None,
    *overrides: str,
    data: Data = None,
    test: Data = None,
    schema: Schema | None = None,
    resume: bool = False,
    quiet: bool = False,
) -> TrainingResult:
    """Train as configured by a file, its content, or a Config; `key=value` overrides take precedence.

    `data` and `test` may be in memory instead of files. With `data` in memory and no `run.dir`, nothing is written.
    `resume` continues from the newest checkpoint of the run folder, or starts from the beginning if there is none yet.
    """
    settings = configure(config, overrides)
    check(settings)
    settings = settled(settings)
    devices.find(settings.train.device)
    in_memory = data is not None and not isinstance(data, str | Path)
    where = None if in_memory and settings.run.dir == Run.dir else settings.run.dir
    source = open_source(
        settings,
        data if data is not None else settings.data.train,
        schema,
        labels=True,
        folder=None if where is None else local_folder(where),
    )
    size = total_bytes(source, settings)
    if modes.distributed(settings):
        cluster: Any = import_module(CLUSTER)
        with open_run(settings, where, resume, cluster.ClusterMonitor, quiet, size) as run:
            return cast(TrainingResult, cluster.train(run, source, test))
    with open_run(settings, where, resume, Monitor, quiet, size) as run:
        return _train(run, source, test)


class Startable(Protocol):
    """What a run starts: the learner of this process, or the driver of a cluster."""

    def start_new(self) -> None:
        """Start with initial values."""

    def start_from(self, path: Path) -> list[str]:
        """Start with what fits of another model; return the names of what does not."""
        ...

    def resume(self, path: Path) -> int:
        """Resume from a checkpoint; return its step."""
        ...


M = TypeVar("M", bound=Monitor)


@dataclass
class OpenRun(Generic[M]):
    """A run whose folder this process has locked: how it starts, and where it writes."""

    settings: Config
    """With the run folder on this machine as `run.dir`."""
    folder: Path | None
    """None: the run writes nothing."""
    mirror: Mirror | None
    """Keeps the folder in step with the URL of the run."""
    resumes: Path | None
    """The checkpoint to resume from. Without one, the run starts anew or from train.init_from."""
    monitor: M
    notes: list[str] = field(default_factory=list)
    step: int = 0
    """Where the run starts."""

    @property
    def checkpoints(self) -> Path:
        assert self.folder is not None
        return self.folder / "checkpoints"

    def begin(self, target: Startable) -> None:
        """Resume or start; then write config.yaml, start the mirror, and log what was done."""
        settings, init_from = self.settings, self.settings.train.init_from
        if self.resumes is not None:
            self.step = target.resume(self.resumes)
            checkpoint.forget_after(self.checkpoints, self.step)
            self.notes.append(f"resuming from {self.resumes}")
            if not keeps_best(settings) and checkpoint.forget_best(self.checkpoints):
                self.notes.append(
                    "the best checkpoint is no longer kept: neither train.patience nor run.keep_best asks for it"
                )
        else:
            self.monitor.forget_after(0, size=0)  # lines of a run that ended before its first checkpoint
            if self.folder is not None:
                (self.folder / QUARANTINE).unlink(missing_ok=True)  # its bad lines are read again
            if init_from is None:
                target.start_new()
            else:
                misfits = target.start_from(run_folder.resolve(init_from))
                self.notes += [f"starting from {init_from}", *(f"initialised anew: {name}" for name in misfits)]
        if self.folder is not None:
            write_config(self.folder, settings)
        if self.mirror is not None:
            other_hosts = modes.distributed(settings) and settings.cluster.address is not None
            self.mirror.start(self.monitor.log, skip_checkpoints=other_hosts)
        for note in self.notes:
            self.monitor.log(note)

    def saver(self) -> saving.Saver | None:
        """Return the writer of this process's checkpoints; None if the run writes nothing."""
        if self.folder is None:
            return None
        run = self.settings.run
        saver = saving.Saver(self.checkpoints, run.keep, run.keep_epochs, self.monitor.log)
        if self.mirror is not None:
            saver.written = self.mirror.wake
        if self.resumes is not None:
            saver.last = (self.step, self.resumes)
        return saver


@contextmanager
def open_run(
    settings: Config,
    where: str | Path | None,
    resume: bool | None,
    monitor_type: type[M],
    quiet: bool = False,
    total_bytes: int | None = None,
    repair: Callable[[Path], object] = lambda folder: None,
) -> Iterator[OpenRun[M]]:
    """Lock the run folder at `where`, fetch it if it belongs to a URL, and find out how the run starts.

    `resume` is False if the folder must not hold a run, True to resume it or to start if it has no checkpoint yet, and None to do
    either without a message. `repair` is called with the locked folder before anything is read there. When the block ends, the
    mirror is complete and the folder is unlocked.
    """
    epochs = settings.train.epochs
    if where is None:
        if resume:
            raise ConfigError("there is no run folder to resume from", "set run.dir")
        with closing(monitor_type(None, total_bytes, epochs=epochs, quiet=quiet)) as monitor:
            yield OpenRun(settings, None, None, None, monitor)
        return
    needs_rows = settings.cluster.address is None
    with open_folder(where, False if resume is False else None, needs_rows) as (folder, mirror):
        settings = replace(settings, run=replace(settings.run, dir=str(folder)))
        repair(folder)
        checkpoints = folder / "checkpoints"
        has_checkpoints = bool(checkpoint.steps(checkpoints))
        if has_checkpoints and resume is False:
            raise CheckpointError(
                f"{folder} holds a run already",
                "resume it with --resume (resume=True in Python), or choose another run.dir",
            )
        notes = [NO_CHECKPOINT.format(checkpoints)] if resume and not has_checkpoints else []
        newest = checkpoint.latest(checkpoints) if has_checkpoints else None
        with closing(monitor_type(folder, total_bytes, epochs=epochs, quiet=quiet)) as monitor:
            yield OpenRun(settings, folder, mirror, newest, monitor, notes)


class LocalStart:
    """The learner of a run in this process."""

    learner: Learner

    def __init__(self, settings: Config, schema: Schema) -> None:
        self.settings, self.schema = settings, schema
        self.metrics = make_metrics(settings, schema)
        self.arrangement = arrange(settings)
        self.state: State | None = None
        """The state of the checkpoint that the run resumes from."""

    def start_new(self) -> None:
        torch.manual_seed(self.settings.train.seed)
        self.learner = Learner(self.settings, self.schema)

    def start_from(self, path: Path) -> list[str]:
        torch.manual_seed(self.settings.train.seed)
        self.learner, misfits = saving.start_from(path, self.settings, self.schema)
        return misfits

    def resume(self, path: Path) -> int:
        self.learner, self.state = saving.resume(path, self.settings, self.schema, self.metrics)
        check_arrangement(self.state["arrangement"], self.arrangement)
        return int(self.state["step"])


def _train(run: OpenRun[Monitor], source: Source, test: Data) -> TrainingResult:
    settings, folder, monitor = run.settings, run.folder, run.monitor
    predict.slice_slot(source.schema, settings.train.metrics.slices)
    held_out = test if test is not None else settings.data.test or None
    check_test_data(settings, held_out is not None)
    start = LocalStart(settings, source.schema)
    run.begin(start)
    learner, metrics, arrangement = start.learner, start.metrics, start.arrangement
    threads, trainers = arrangement["threads"], arrangement["hogwild"]
    saver = run.saver()
    evaluator, evidence = SavedModel(learner, threads=threads), Evidence()
    evaluate = None if held_out is None else lambda: evidence.gather(evaluator, held_out)
    profile = Profile(monitor.tick) if settings.train.profile else None
    report_step = monitor.tick if profile is None else profile.tick
    job = Job(learner, source, metrics, report_step, trainers=trainers, threads=threads)
    session = TrainingSession(settings, job, modes.load(settings), monitor, saver, arrangement, evaluate)
    if profile is not None:
        profile.attach(job)
    if start.state is not None:
        session.restore(start.state)
    first_row = job.rows
    try:
        with session.interruptible():
            session.run()
    except NotFiniteError as problem:
        if saver is not None:
            saver.wait()
        raise not_finite(problem, job.steps, folder, saver) from None
    finally:
        if profile is not None:
            profile.stop()
        job.close()
        monitor.close()
    if profile is not None:
        show_profile(profile, folder, monitor)
    progress, rows = session.progress, job.rows - first_row
    last = saver.last[1] if saver is not None and saver.last is not None else None
    best = None if folder is None else checkpoint.best(run.checkpoints)
    result = TrainingResult(
        learner,
        last,
        threads,
        rows=job.rows,
        new_rows=rows,
        seconds=session.trained_s + session.last_save_s,
        rows_per_s=rows / session.trained_s if session.trained_s else 0.0,
        train=progress.train or dict(metrics.results()),
        test=progress.test,
        last=last,
        signal=session.signal,
        best=best,
        best_auc=progress.best_auc,
    )
    if best is not None and best != last and session.signal is None:
        result = replace(result, loaded=None, path=best, test=progress.best_test or progress.test)
    if folder is not None and settings.run.report and rows and session.signal is None:
        if result.path != last:  # the best model is loaded in addition to the last one
            table_bytes = learner.table.stats()["bytes"]
            write_report(folder, result, Evidence(), monitor.log, table_bytes=table_bytes, test=held_out)
        else:
            write_report(folder, evaluator, evidence, monitor.log)
    return result


def check_test_data(settings: Config, has_test: bool) -> None:
    """Refuse settings that need test data if there is none."""
    if not has_test and (settings.train.patience or settings.train.eval_every or settings.run.keep_best):
        raise ConfigError("train.patience, train.eval_every and run.keep_best need test data", "set data.test")


def show_profile(profile: Profile, folder: Path | None, monitor: Monitor) -> None:
    """Log the time of every layer and write it to the run folder."""
    monitor.log(profile.table())
    if folder is not None:
        path = profile.write(folder)
        monitor.log(f"{path}: open it in chrome://tracing or ui.perfetto.dev")


def not_finite(problem: NotFiniteError, step: int, folder: Path | None, saver: saving.Saver | None) -> TrainingError:
    """Save the batch whose loss is not finite; return the error to raise."""
    saved = ""
    if folder is not None:
        path = folder / f"bad-batch-{step:012d}.npz"
        columns = {name: getattr(problem.batch, name) for name in ("dense", "keys", "offsets", "values", *ROW_COLUMNS)}
        np.savez(path, **{name: column for name, column in columns.items() if column is not None})
        saved = f"; it is saved in {path}"
    last = f", and resume from {saver.last[1]} with --resume" if saver is not None and saver.last is not None else ""
    return TrainingError(
        f"step {step}: {problem}; the batch was not trained{saved}",
        f"check the dense columns and weights of that batch, lower dense.lr or set dense.clip_norm{last}",
    )


def settled(config: Config) -> Config:
    """Fill in the defaults of the model: the rows of a step and the rule of the table."""
    kind: type[Model] = find("models", config.model, Model)
    check_model(config, kind)
    size = config.data.batch_size or kind.batch_rows(config)
    return replace(config, data=replace(config.data, batch_size=size), table=table_settings(config))


def arrange(settings: Config) -> Arrangement:
    """Return the arrangement of a run in this process."""
    return {
        "deterministic": settings.train.deterministic,
        "threads": cores(settings),
        "hogwild": hogwild(settings),
        "cpu": f"{torch.backends.cpu.get_cpu_capability()} torch {torch.__version__}",
    }


def check_arrangement(saved: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    """Refuse to resume a deterministic run with other threads or on another kind of CPU."""
    if current["deterministic"] and dict(saved) != dict(current):
        differences = ", ".join(
            f"{key} was {saved[key]} and is now {value}" for key, value in current.items() if saved[key] != value
        )
        raise ConfigError(
            f"train.deterministic does not allow this resume: {differences}",
            "resume with the same arrangement, or with train.deterministic=false",
        )


def check_model(config: Config, kind: type[Model]) -> None:
    """Refuse data that the model cannot use."""
    if config.data.test and not kind.scores_rows:
        raise ConfigError(
            f"data.test cannot be used with model {config.model.name}, which does not score rows",
            "remove it, and evaluate the run after training: clickfleet evaluate RUN FILE",
        )
    if config.data.vocabulary is not None and not kind.reads_vocabulary:
        raise ConfigError(f"data.vocabulary cannot be used with model {config.model.name}", "remove it")
