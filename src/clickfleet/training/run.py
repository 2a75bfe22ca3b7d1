"""Train a configuration; open the folder of a run.

import clickfleet

result = clickfleet.train("config.yaml", "train.epochs=2")
result.test["auc"], result.predict("more/*.tsv")
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import torch

from clickfleet.config.check import check, cores, hogwild
from clickfleet.config.load import Config
from clickfleet.config.load import load as load_config
from clickfleet.config.plugins import PASSED, find
from clickfleet.config.sections import Run
from clickfleet.data.batch import ROW_COLUMNS
from clickfleet.data.dataset import (
    QUARANTINE,
    SCHEMA_FILE,
    Data,
    Source,
    open_source,
    settle,
    total_bytes,
    with_schema_file,
)
from clickfleet.data.guess import Guess, is_files
from clickfleet.data.memory import is_rereadable
from clickfleet.data.names import Names, collect
from clickfleet.data.schema import Schema
from clickfleet.errors import CheckpointError, ConfigError, DataError, TrainingError, hide
from clickfleet.store import checkpoint, run_folder
from clickfleet.store.lock import Lock
from clickfleet.store.mirror import NAMES, Mirror, url_of
from clickfleet.store.run_folder import NO_CHECKPOINT, State, local_folder, open_folder, write_config
from clickfleet.training import averaging, defaults, devices, modes, predict, saving, validation
from clickfleet.training.arguments import Settings, configured, is_data
from clickfleet.training.callbacks import Callback, Callbacks, StepProgress
from clickfleet.training.learner import Learner, table_settings
from clickfleet.training.loop import Arrangement, Job, TrainingSession, record
from clickfleet.training.losses import LossFunction
from clickfleet.training.metrics import check_monitor, make_metrics, metric_name
from clickfleet.training.model import SavedModel, TrainingResult
from clickfleet.training.monitor import Monitor
from clickfleet.training.network import Model
from clickfleet.training.predict import MetricFunction, MetricFunctions, Results
from clickfleet.training.profile import Profile
from clickfleet.training.report import too_large, write_report
from clickfleet.training.report.evidence import Evidence
from clickfleet.training.step import NotFiniteError

CLUSTER = "clickfleet.cluster.run_on_cluster"
"""The module that trains in the modes of a cluster. It is imported by name: training itself needs no cluster."""


def train(
    config: Settings | Data = None,
    *overrides: str,
    data: Data = None,
    valid: Data = None,
    test: Data = None,
    label: str | None = None,
    schema: Schema | None = None,
    recipe: str | None = None,
    resume: bool = False,
    overwrite: bool = False,
    quiet: bool = False,
    callbacks: Sequence[Callback | Callable[[StepProgress], bool | None]] = (),
    loss: LossFunction | str | None = None,
    metrics: Mapping[str, MetricFunction | str] | None = None,
    **settings: Any,
) -> TrainingResult:
    """Train as configured by a file, its content, a Config or a recipe; `key=value` overrides and keywords take precedence.

    A keyword is a section (`model="dcn_v2"`, `train={"epochs": 3}`), a key with `__` for the dot (`train__epochs=3`), or only the last
    word of a key if no other section has it (`epochs=3`). `model` may be a class derived from `clickfleet.Model`.

    `data`, `valid` and `test` may be in memory instead of files: a pandas or Polars frame, an Arrow table, a mapping of arrays. Data may
    also be the first argument. Without a schema, the format and schema of the data are guessed, and written to the run folder as
    schema.yaml; `label` names the label column. With `data` in memory and no `run.dir`, nothing is written.

    `resume` continues from the newest checkpoint of the run folder, or starts from the beginning if there is none yet.
    `overwrite` replaces a run in the folder, once the settings and the data have been checked.
    `callbacks` are called during training. `loss(logits, labels, weights)` replaces the log loss; it returns the loss of each row, or
    their weighted sum. `metrics` are functions `(labels, scores, weights) -> float` by name, for evaluations.
    """
    if resume and overwrite:
        raise ConfigError("resume and overwrite exclude each other", "remove one of them")
    if is_data(config):
        if data is not None:
            raise ConfigError("the data is given twice", "pass it once: as the first argument or as data=…")
        config, data = None, config
    chosen = configured(config, overrides, settings, recipe, label, schema, loss, metrics)
    check(chosen)
    check_model(chosen, find("models", chosen.model, Model))
    devices.find(chosen.train.device)
    MetricFunctions(chosen, missing_ok=False)
    listeners = Callbacks(callbacks)
    in_memory = data is not None and not is_files(data)
    where = None if in_memory and chosen.run.dir == Run.dir else chosen.run.dir
    distributed = modes.distributed(chosen)
    if distributed:
        check_for_cluster(chosen, listeners, where)
    folder = None if where is None else local_folder(where)
    if resume and folder is not None:
        chosen = with_saved_format(chosen, folder)
    chosen, guess = settle(chosen, data, schema)
    chosen = with_schema_file(chosen, guess, folder)
    saved = defaults.saved_config(where) if resume and where is not None else None
    try:
        choice = defaults.choose(chosen, data, valid, schema if guess is None else guess.schema, saved)
    except DataError as error:
        if where is not None and url_of(where) is None:
            record_failure(Path(where), error)
        raise
    chosen = settled(choice.config)
    averaging.check_average(chosen)
    source = open_source(
        chosen,
        data if data is not None else chosen.data.train,
        schema if guess is None else guess.schema,
        labels=True,
        folder=folder,
    )
    size = total_bytes(source, chosen)
    cluster: Any = import_module(CLUSTER) if distributed else None
    monitor_type = cluster.ClusterMonitor if distributed else Monitor
    in_passing = where is None and not resume and (distributed or validation.keeps_best(chosen))
    with ExitStack() as around:
        if in_passing:  # the best model, and what the processes of a cluster write, has to be kept somewhere
            where = around.enter_context(tempfile.TemporaryDirectory(prefix="clickfleet-"))
            epochs, every = bool(chosen.train.average), chosen.run.checkpoint_every if distributed else None
            few = replace(chosen.run, checkpoint_every=every, keep=1, keep_epochs=epochs, report=False)
            chosen = replace(chosen, run=few)
        run = around.enter_context(open_run(chosen, where, resume, monitor_type, quiet, size, overwrite=overwrite))
        if guess is not None:
            record_guess(guess, run)
        run.notes += choice.notes
        train_run = cluster.train if distributed else _train
        result: TrainingResult = train_run(run, source, valid, test, listeners)
        result = result.in_memory() if in_passing else result
    listeners.end(result)
    return result


def fit(
    data: Data,
    label: str | None = None,
    *overrides: str,
    valid: Data = None,
    test: Data = None,
    schema: Schema | None = None,
    resume: bool = False,
    quiet: bool = False,
    callbacks: Sequence[Callback | Callable[[StepProgress], bool | None]] = (),
    loss: LossFunction | str | None = None,
    metrics: Mapping[str, MetricFunction | str] | None = None,
    **settings: Any,
) -> TrainingResult:
    """Train a model on a pandas or Polars frame, an Arrow table, a mapping from names to arrays, or files.

    `label` names the column with the clicks. The other columns are inputs; their kinds are guessed unless `schema` is given. Rows in
    memory are shuffled before every epoch; `data__shuffle=0` keeps their order.

    `settings` are those of `clickfleet.train`: `model="dcn_v2"`, `epochs=3` and so on. With `run__dir`, the run folder receives
    checkpoints and a report; otherwise nothing is written for data in memory until you call `save`.
    """
    shuffle = ["data.shuffle=global"] if is_rereadable(data) and not is_files(data) else []
    return train(
        None,
        *shuffle,
        *overrides,
        data=data,
        valid=valid,
        test=test,
        label=label,
        schema=schema,
        resume=resume,
        quiet=quiet,
        callbacks=callbacks,
        loss=loss,
        metrics=metrics,
        **settings,
    )


def check_for_cluster(config: Config, callbacks: Callbacks, where: str | None) -> None:
    """Refuse what only a run in one process can do."""
    if where is None and config.cluster.address is not None:
        raise ConfigError("several hosts need a run folder that all of them see", "set run.dir")
    if callbacks.hooks["on_step"]:
        raise ConfigError(
            f"on_step cannot be called in mode {config.mode.name}: its workers make the steps, in other processes",
            "use on_evaluation and on_epoch, which the driver calls; or use mode local",
        )
    for plugin, what in ((config.model, "model"), (config.train.loss.function, "loss function")):
        if plugin is not None and plugin.name.startswith(PASSED):
            raise ConfigError(
                f"the processes of mode {config.mode.name} cannot import the {what} {plugin.name.removeprefix(PASSED)}",
                "define it in a file of its own, or use mode local",
            )


def in_short(error: BaseException) -> str:
    """Return the text of an error for the record of a run."""
    return hide(str(error))[:500] or type(error).__name__


def record_failure(folder: Path, error: Exception) -> None:
    """Record in a run folder that a new run has failed before it began. A folder with checkpoints stays as it is."""
    if checkpoint.steps(folder / "checkpoints"):
        return
    with (
        suppress(CheckpointError, OSError),
        Lock(folder / ".lock", "trains"),
        closing(Monitor(folder, quiet=True)) as monitor,
    ):
        monitor.log(str(error))
        monitor.end("failed", error=in_short(error))


def with_saved_format(settings: Config, folder: Path) -> Config:
    """Return the configuration with the format and schema that the run in `folder` guessed, so that it never guesses again."""
    path, data = folder / "config.yaml", settings.data
    if not path.is_file() or data.schema is not None or data.preset is not None:
        return settings
    saved = load_config(path).data
    if data.format.automatic:
        data = replace(data, format=saved.format)
    if saved.schema == str(folder / SCHEMA_FILE):
        data = replace(data, schema=saved.schema, label=None)
    return replace(settings, data=data)


def record_guess(guess: Guess, run: OpenRun[Any]) -> None:
    """Show the guess, and write the guessed schema to the run folder."""
    run.monitor.log(guess.text())
    if run.folder is not None and not guess.of_format:
        guess.write(run.folder / SCHEMA_FILE)
        run.monitor.log(f"schema: {run.folder / SCHEMA_FILE} (edit it, and set data.schema to use it)")


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
    replaces: bool = False
    """Whether the folder holds another run, which is removed when this one begins."""
    signal: int | None = None
    """The signal that stopped the run early."""

    @property
    def checkpoints(self) -> Path:
        assert self.folder is not None
        return self.folder / "checkpoints"

    def begin(self, target: Startable) -> None:
        """Resume or start; then write config.yaml, start the mirror, and log what was done."""
        settings, init_from = self.settings, self.settings.train.init_from
        if self.replaces and self.folder is not None:
            run_folder.remove_run(self.folder)
            self.notes.insert(0, f"replaced the run in {self.folder}")
        if self.resumes is not None:
            self.step = target.resume(self.resumes)
            checkpoint.forget_after(self.checkpoints, self.step)
            averaging.forget_average(self.checkpoints, run_folder.read_state(self.resumes)["progress"].get("best_step"))
            self.notes.append(f"resuming from {self.resumes}")
            if not validation.keeps_best(settings) and checkpoint.forget_best(self.checkpoints):
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

    def choose_validation(self, source: Source, valid: Data, test: Data, local: bool = True) -> Data:
        """Return the validation data of the run; None if it has none. Rows that it takes from the training data are set aside.

        `local`: this process evaluates the model, so that it needs the rows.
        """
        kind: type[Model] = find("models", self.settings.model, Model)
        train = self.settings.train
        check_monitor(train.monitor, source.schema, own=train.metrics.functions)
        saved = None if self.resumes is None else run_folder.read_state(self.resumes)
        chosen = validation.choose(self.settings, source, valid, test, saved, kind.scores_rows, local)
        self.settings = validation.with_share(self.settings, chosen.split)
        self.notes += chosen.notes
        return chosen.data

    def collect_names(self, source: Source, *more: Source) -> Names | None:
        """Return the values behind frequent keys, and write them into the run folder. A resumed run has them already."""
        if not self.settings.run.names:
            if self.folder is not None:
                (self.folder / NAMES).unlink(missing_ok=True)
            return None
        if self.resumes is not None and self.folder is not None:
            with suppress(CheckpointError):  # damaged: collected again
                known = run_folder.read_names(self.folder, source.schema)
                if known is not None:
                    return known
        names = collect(source, *more)
        if names is not None and self.folder is not None:
            run_folder.write_names(self.folder, names)
        return names

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
    overwrite: bool = False,
) -> Iterator[OpenRun[M]]:
    """Lock the run folder at `where`, fetch it if it belongs to a URL, and find out how the run starts.

    `resume` is False if the folder must not hold a run, True to resume it or to start if it has no checkpoint yet, and None to do
    either without a message. `repair` is called with the locked folder before anything is read there. With `overwrite`, a run in the
    folder is replaced when this one begins. When the block ends, the mirror is complete and the folder is unlocked.
    """
    shown: dict[str, Any] = {"epochs": settings.train.epochs, "print_every": settings.train.print_every, "quiet": quiet}
    if where is None:
        if resume:
            raise ConfigError("there is no run folder to resume from", "set run.dir")
        with closing(monitor_type(None, total_bytes, **shown)) as monitor:
            yield OpenRun(settings, None, None, None, monitor)
        return
    needs_rows = settings.cluster.address is None
    with open_folder(where, False if resume is False else None, needs_rows) as (folder, mirror):
        settings = replace(settings, run=replace(settings.run, dir=str(folder)))
        repair(folder)
        checkpoints = folder / "checkpoints"
        has_checkpoints = bool(checkpoint.steps(checkpoints))
        if has_checkpoints and resume is False:
            if not overwrite:
                raise CheckpointError(
                    f"{folder} holds a run already",
                    "resume it with --resume (resume=True in Python), replace it with --overwrite (overwrite=True), "
                    "or choose another run.dir",
                )
            run_folder.check_replaceable(Path(where))
            source = settings.train.init_from
            if source is not None and Path(source).absolute().resolve().is_relative_to(folder.resolve()):
                raise ConfigError(
                    f"train.init_from is in {folder}, which --overwrite would replace", "choose another run.dir"
                )
        notes = [NO_CHECKPOINT.format(checkpoints)] if resume and not has_checkpoints else []
        newest = checkpoint.latest(checkpoints) if has_checkpoints and not overwrite else None
        with closing(monitor_type(folder, total_bytes, **shown)) as monitor:
            run = OpenRun(settings, folder, mirror, newest, monitor, notes, replaces=overwrite and has_checkpoints)
            try:
                yield run
            except (KeyboardInterrupt, SystemExit):
                monitor.end("stopped")
                raise
            except BaseException as error:
                if monitor.started or not has_checkpoints:  # otherwise the run is as it was
                    monitor.end("failed", error=in_short(error))
                raise
            monitor.end("finished" if run.signal is None else "stopped")


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


def _train(run: OpenRun[Monitor], source: Source, valid: Data, test: Data, callbacks: Callbacks) -> TrainingResult:
    test = test if test is not None else run.settings.data.test or None
    held_out = run.choose_validation(source, valid, test)
    settings, folder, monitor = run.settings, run.folder, run.monitor
    predict.slice_slot(source.schema, settings.train.metrics.slices)
    start = LocalStart(settings, source.schema)
    run.begin(start)
    learner, metrics, arrangement = start.learner, start.metrics, start.arrangement
    threads, trainers = arrangement["threads"], arrangement["hogwild"]
    saver = run.saver()
    evaluator, evidence = SavedModel(learner, threads=threads), Evidence()
    sampled = [evaluator.source(each) for each in (held_out, test) if each is not None]
    evaluator.known_names = run.collect_names(source, *sampled)

    def validate_model() -> Results:
        return evidence.gather(evaluator, held_out, "validation", monitor.evaluation())

    def test_model() -> Results:
        return evidence.gather(evaluator, test, "test", monitor.evaluation())

    validate = None if held_out is None else validate_model
    take_test = None if test is None else test_model
    profile = Profile(monitor.tick) if settings.train.profile else None
    report_step = callbacks.reporting(monitor.tick if profile is None else profile.tick)
    monitor.listen = callbacks.listen
    job = Job(learner, source, metrics, report_step, trainers=trainers, threads=threads)
    averages = bool(settings.train.average) and validate is not None and saver is not None
    session = TrainingSession(
        settings,
        job,
        modes.load(settings),
        monitor,
        saver,
        arrangement,
        validate,
        None if averages else take_test,  # an average may become the model of the run
    )
    if profile is not None:
        profile.attach(job)
    if start.state is not None:
        session.restore(start.state)
    callbacks.start(job, session.stop)
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
    run.signal = session.signal
    progress, rows = session.progress, job.rows - first_row
    if averages and rows and session.signal is None:
        _average(run, session, held_out, threads)
    last = saver.last[1] if saver is not None and saver.last is not None else None
    best = None if folder is None else checkpoint.best(run.checkpoints)
    result = TrainingResult(
        learner,
        last,
        threads,
        rows=job.rows,
        steps=job.steps,
        new_rows=rows,
        seconds=session.trained_s + session.last_save_s,
        rows_per_s=rows / session.trained_s if session.trained_s else 0.0,
        train=progress.train or dict(metrics.results()),
        valid=progress.valid,
        test=progress.test,
        last=last,
        signal=session.signal,
        best=best,
        records=callbacks.history,
        files=partial(saving.capture, learner, metrics, session.state()) if folder is None else None,
        model_class=settings.model.passed,
        run=settings,
    )
    writes_report = folder is not None and settings.run.report and rows > 0 and session.signal is None
    if best is not None and best != last and session.signal is None:
        result = replace(result, loaded=None, path=best, valid=progress.best_valid or progress.valid, test=None)
        evaluator, evidence = result, Evidence()
        if test is not None or writes_report:
            refusal = too_large(learner.table.stats()["bytes"])  # the best model is loaded in addition to the last one
            if refusal:
                monitor.log(f"no test and no report: {refusal}; run clickfleet evaluate and report on {folder}")
                return result
            results = evidence.gather(result, *((held_out, "validation") if test is None else (test, "test")))
            if test is not None:
                record(monitor, "test", results, progress.epoch - 1, progress.best_step or job.steps)
                result.test = results
    elif averages and test is not None and session.signal is None:
        result.test = evidence.gather(evaluator, test, "test")
        record(monitor, "test", result.test, progress.epoch - 1, job.steps)
    if folder is not None and writes_report:
        write_report(folder, evaluator, evidence, monitor.log)
    return result


def _average(run: OpenRun[Monitor], session: TrainingSession, held_out: Data, threads: int) -> None:
    """Average the epochs of a run. If that is better on validation data, the run's best model is the average."""
    progress, name = session.progress, run.settings.train.monitor
    evaluate: Callable[[Learner], Any] = lambda learner: SavedModel(learner, threads=threads).evaluate(held_out)  # noqa: E731
    average = averaging.average_epochs(
        run.checkpoints, session.job.metrics, session.state(), run.settings, progress.best_value, evaluate
    )
    if average is not None:
        value, before = average.valid[name], progress.best_value
        run.monitor.log(
            f"the average of epochs {average.first} to {average.last} is the best model: validation {metric_name(name)} "
            f"{value:.4f}; that of one epoch was {before:.4f}"
        )
        progress.best_valid, progress.best_step = average.valid, session.job.steps
        if run.mirror is not None:
            run.mirror.wake()


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
    """Fill in the usual values of what is not given: the rows of a step, the rule of the table, and whatever is still `auto`."""
    kind: type[Model] = find("models", config.model, Model)
    check_model(config, kind)
    config = defaults.fixed(config)
    size = config.data.batch_size or kind.batch_rows(config)
    config = replace(config, data=replace(config.data, batch_size=size), table=table_settings(config))
    return modes.with_shared_error(config) if kind.scores_rows else config


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
