"""A configuration -> live objects -> train.

import clickfleet

trained = clickfleet.train("config.yaml", "train.epochs=2")
trained.test["auc"], trained.predict("more/*.tsv")
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from clickfleet import checkpoint, devices, mirror, modes, report, saving, scoring, storage
from clickfleet.batch import ROW_COLUMNS
from clickfleet.config import Config, checked, dump, override
from clickfleet.config import load as load_config
from clickfleet.errors import CheckpointError, ConfigError, TrainingError
from clickfleet.files import expand
from clickfleet.job import Job, Source
from clickfleet.learner import Learner
from clickfleet.lock import Lock
from clickfleet.machine import free_memory
from clickfleet.metrics import Metrics
from clickfleet.mirror import Mirror
from clickfleet.opening import Data, open_source, total_bytes
from clickfleet.profiling import Profile
from clickfleet.progress import amount
from clickfleet.reader import Reader
from clickfleet.report.evidence import Evidence
from clickfleet.schema import Schema
from clickfleet.scoring import Results
from clickfleet.sections import Run
from clickfleet.session import Session
from clickfleet.step import NotFiniteError
from clickfleet.trained import Trained, cores
from clickfleet.watch import Watch

if TYPE_CHECKING:
    from clickfleet.cluster.driver import Driver


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
    best: Path | None = None
    """The checkpoint with the best test AUC, where it is kept (run.keep_best, train.patience)."""
    best_auc: float | None = None

    def to_dict(self) -> dict[str, Any]:
        return {
            "rows": self.rows,
            "seconds": self.seconds,
            "rows_per_s": self.rows_per_s,
            "train_auc": self.train.get("auc"),
            "test_auc": None if self.test is None else self.test["auc"],
            "checkpoint": None if self.path is None else mirror.origin(self.path) or str(self.path),
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
    devices.find(settings.train.device)
    in_memory = data is not None and not isinstance(data, str | Path)
    where = None if in_memory and settings.run.dir == Run.dir else settings.run.dir
    folder = None if where is None else home_of(where)
    source = open_source(
        settings, data if data is not None else settings.data.train, schema, labels=True, folder=folder
    )
    work = _train_on_cluster if modes.distributed(settings) else _train
    if where is None:
        return work(settings, source, test, None, resume, quiet, None)
    with at_home(where, resume, rows=settings.cluster.address is None) as (folder, copy):
        settings = replace(settings, run=replace(settings.run, dir=str(folder)))
        return work(settings, source, test, folder, resume, quiet, copy)


def _train(
    settings: Config, source: Source, test: Data, folder: Path | None, resume: bool, quiet: bool, copy: Mirror | None
) -> Outcome:
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
        write_config(folder, settings)
    watch = Watch(folder, total_bytes(source, settings), epochs=settings.train.epochs, quiet=quiet)
    saver = None
    if checkpoints is not None:
        saver = saving.Saver(checkpoints, settings.run.keep, settings.run.keep_epochs, watch.log)
        if copy is not None:
            saver.written = copy.wake
            copy.start(watch.log)
        if state is not None:
            saver.last = (state["step"], path)
    held_out = test if test is not None else settings.data.test or None
    if held_out is None and (settings.train.patience or settings.train.eval_every or settings.run.keep_best):
        raise ConfigError("train.patience, train.eval_every and run.keep_best need test data", "set data.test")
    evaluator, evidence = Trained(learner, threads=threads), Evidence()
    evaluate = None if held_out is None else lambda: evidence.gather(evaluator, held_out)
    session = Session(settings, watch, saver, evaluate, arrangement)
    profile = Profile(watch.tick) if settings.train.profile else None
    report_step = watch.tick if profile is None else profile.tick
    job = Job(learner, source, metrics, session.attend, report_step, trainers=trainers, threads=threads)
    if profile is not None:
        profile.attach(job)
    if state is not None:
        session.restore(job, state)
    else:
        watch.forget_after(0)  # of a run that ended before its first checkpoint
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
        if profile is not None:
            profile.stop()
        job.close()
        watch.close()
    if profile is not None:
        show_profile(profile, folder, watch)
    rows = job.rows - before
    if folder is not None and settings.run.report and rows and session.signal is None:
        write_report(folder, evaluator, evidence, watch.log)
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
        best=None if checkpoints is None else checkpoint.best(checkpoints),
        best_auc=session.progress.best_auc,
    )


class LoadedLater:
    """A model that is loaded from its checkpoint when it is first used."""

    path: Path | None
    learner: Learner

    def __getattr__(self, name: str) -> Any:
        if name != "learner" or self.path is None:
            raise AttributeError(name)
        whole = any(self.path.glob("rows-*"))  # or only at its URL
        self.learner = saving.load(self.path if whole else saving.resolve(mirror.origin(self.path) or self.path))
        return self.learner


class Distant(LoadedLater, Outcome):
    """What training on a cluster made."""


def _train_on_cluster(
    settings: Config,
    source: Source,
    test: Data,
    folder: Path | None,
    resume: bool,
    quiet: bool,
    copy: Mirror | None,
) -> Outcome:
    from clickfleet.cluster import driver
    from clickfleet.cluster.overview import ClusterWatch

    if not isinstance(source, Reader) or folder is None:
        raise ConfigError(f"mode {settings.mode.name} reads files", "give paths, or use mode local for data in memory")
    test = test if test is not None else settings.data.test
    held_out = expand(test) if test else []
    if not held_out and (settings.train.patience or settings.train.eval_every or settings.run.keep_best):
        raise ConfigError("train.patience, train.eval_every and run.keep_best need test data", "set data.test")
    checkpoints = folder / "checkpoints"
    if not resume and checkpoint.steps(checkpoints):
        raise CheckpointError(f"{folder} holds a run already", "go on with --resume, or choose another run.dir")
    checkpoints.mkdir(parents=True, exist_ok=True)
    write_config(folder, settings)
    watch = ClusterWatch(folder, total_bytes(source, settings), epochs=settings.train.epochs, quiet=quiet)
    if copy is not None:
        copy.start(watch.log, apart=settings.cluster.address is not None)
    before = 0

    def prepare(run: driver.Driver) -> None:
        nonlocal before
        run.copy = copy
        if resume:
            path = checkpoint.latest(checkpoints)
            run.resume(path)
            checkpoint.forget_after(checkpoints, run.base.steps)
            before = run.base.rows
            watch.log(f"going on from {path}")
        elif settings.train.init_from is not None:
            anew = run.start_from(saving.resolve(settings.train.init_from))
            watch.log(f"starting from {settings.train.init_from}")
            for what in anew:
                watch.log(f"initialised anew: {what}")

    done = driver.run(settings, source.schema, source.files, held_out, watch, prepare)
    outcome = Distant.__new__(Distant)
    rows = done.base.rows - before
    vars(outcome).update(
        path=done.path,
        threads=cores(settings),
        rows=rows,
        seconds=done.trained_s + done.last_save_s,
        rows_per_s=rows / done.trained_s if done.trained_s else 0.0,
        train=done.progress.train or dict(done.base.metrics.results()),
        test=done.progress.test,
        signal=done.signal,
        best=checkpoint.best(checkpoints),
        best_auc=done.progress.best_auc,
    )
    if settings.run.report and rows and done.signal is None:
        evidence = Evidence(results=done.progress.test or {})
        write_led_report(folder, outcome, evidence, done, watch)
    return outcome


def home_of(where: str | Path) -> Path:
    """The folder of a run on this machine."""
    url = mirror.url_of(where)
    return Path(where).absolute() if url is None else mirror.home(url)


@contextmanager
def at_home(where: str | Path, resume: bool | None = None, rows: bool = True) -> Iterator[tuple[Path, Mirror | None]]:
    """The folder of a run, which no other process has meanwhile; of one at a URL, with what it needs to go on, and kept the same there.

    `resume` says whether there must or must not be a checkpoint (None: either), `rows` whether this machine needs its rows.
    """
    url, folder = mirror.url_of(where), home_of(where)
    with Lock(folder / ".lock", "trains" if url is None else f"trains {url}"):
        if url is None:
            yield folder, None
            return
        copy = Mirror(url, folder)
        copy.empty()
        if resume is False and copy.steps():
            raise CheckpointError(f"{url} holds a run already", "go on with --resume, or choose another run.dir")
        if resume is not False:
            copy.fetch(rows, must=resume is True)
        try:
            yield folder, copy
        finally:
            copy.close()


def write_config(folder: Path, config: Config) -> None:
    """Puts the configuration into a run folder, whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    storage.replace(folder / "config.yaml", dump(saving.at_origin(config)).encode())


def write_report(folder: Path, model: Trained, evidence: Evidence, log: Callable[[str], None]) -> None:
    """The page at the end; a failure is only told, as the run is done and saved."""
    try:
        report.write(folder, model, evidence)
    except Exception as error:
        log(f"no report: {type(error).__name__}: {error}; try again with clickfleet report {folder}")


def write_led_report(folder: Path, model: Trained, evidence: Evidence, driver: Driver, watch: Watch) -> None:
    """The same after a run on a cluster, where this machine has memory for the whole table."""
    bytes_ = driver.overview.table.stats()["bytes"]
    if bytes_ > free_memory() / 2:
        watch.log(
            f"no report: the table takes {amount(bytes_, 'bytes')}; clickfleet report {folder} writes it elsewhere"
        )
        return
    write_report(folder, model, evidence, watch.log)


def show_profile(profile: Profile, folder: Path | None, watch: Watch) -> None:
    """What every layer took, for people and as files."""
    watch.log(profile.table())
    if folder is not None:
        path = profile.write(folder)
        watch.log(f"{path}: open it in chrome://tracing or ui.perfetto.dev")


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
    if config.model.name == "word2vec":
        if config.data.test:
            raise ConfigError(
                "data.test does not go with word2vec",
                "ask analogies after training: clickfleet evaluate RUN questions.txt",
            )
    elif config.data.vocabulary is not None:
        raise ConfigError(f"data.vocabulary is for word2vec, and model.name is {config.model.name}", "remove it")
    if config.data.schema is not None and config.data.preset is not None:
        raise ConfigError("data.schema and data.preset both say what the columns mean", "remove one of them")
    if train.hogwild is not None and train.hogwild > cores(config):
        raise ConfigError(
            f"train.hogwild is {train.hogwild}, more than train.threads ({cores(config)})", "raise threads"
        )


def hogwild(config: Config) -> int:
    """Trainer threads: on few cores, one core each is faster than sharing every operator between them."""
    if config.train.deterministic:
        return 1
    few = min(cores(config), 8) if config.train.device == "cpu" else 1  # an accelerator works on one step at a time
    return config.train.hogwild or few


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
