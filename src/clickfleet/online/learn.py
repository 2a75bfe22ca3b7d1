"""Learn from a stream: train a model pass by pass and publish it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from clickfleet.config.check import check, configure, cores
from clickfleet.config.load import Config
from clickfleet.config.plugins import Plugin, find
from clickfleet.data.dataset import count_rows, schema_of, settle, with_schema_file
from clickfleet.data.guess import Guess
from clickfleet.data.schema import Schema
from clickfleet.errors import CheckpointError, ConfigError
from clickfleet.online.freshness import Freshness
from clickfleet.online.pass_queue import PassQueue
from clickfleet.online.passes import PassSource, parse_day
from clickfleet.online.prometheus import OnlineMetrics
from clickfleet.online.publisher import PassPublisher
from clickfleet.online.reports import TOGETHER_S, StreamReports
from clickfleet.online.rewind import complete
from clickfleet.online.session import LocalPassSession, PassJob, PassSession
from clickfleet.online.sources.directories import ArrivingFiles, Directories
from clickfleet.online.sources.iterable import IterableSource
from clickfleet.store import run_folder
from clickfleet.store.mirror import origin, url_of
from clickfleet.store.run_folder import local_folder
from clickfleet.training import modes
from clickfleet.training.metrics import make_metrics
from clickfleet.training.model import SavedModel
from clickfleet.training.monitor import Monitor
from clickfleet.training.network import Model
from clickfleet.training.predict import Results
from clickfleet.training.report import write_report
from clickfleet.training.report.evidence import Evidence
from clickfleet.training.run import (
    LocalStart,
    OpenRun,
    not_finite,
    open_run,
    record_guess,
    settled,
    with_saved_format,
)
from clickfleet.training.step import NotFiniteError

if TYPE_CHECKING:
    from clickfleet.cluster.status import ClusterMonitor


Stream = Iterable[tuple[Any, int, int]]
"""Data, day and number of each pass."""


@dataclass(eq=False)
class OnlineResult(SavedModel):
    """The result of online learning: the model, and how far the stream was trained."""

    passes: int = 0
    """Passes since the run began."""
    rows: int = 0
    """Rows trained by this call."""
    total_rows: int = 0
    """Rows trained since the run began."""
    steps: int = 0
    """Steps since the run began. The end of a day counts as one."""
    seconds: float = 0.0
    rows_per_s: float = 0.0
    last: Results = field(default_factory=dict)
    """Metrics of the last pass."""
    validated: Results = field(default_factory=dict)
    """With online.validate=pass: metrics of all passes scored by this call, except those of its first day."""
    last_sequence: int | None = None
    held: int = 0
    """Entries held back since the last release."""
    day: int | None = None
    signal: int | None = None

    def to_dict(self) -> dict[str, object]:
        return {
            "passes": self.passes,
            "last_sequence": self.last_sequence,
            "held": self.held,
            "day": self.day,
            "rows": self.rows,
            "total_rows": self.total_rows,
            "steps": self.steps,
            "seconds": self.seconds,
            "rows_per_s": self.rows_per_s,
            "auc": self.last.get("auc"),
            "checkpoint": None if self.path is None else origin(self.path) or str(self.path),
        }


def learn(
    config: Config | Mapping[str, Any] | str | Path | None = None,
    *overrides: str,
    source: Stream | None = None,
    schema: Schema | None = None,
    quiet: bool = False,
) -> OnlineResult:
    """Learn from a stream until its last day. Resume if the run folder holds a run.

    `source` may be any iterable of (data, day, pass) in place of online.dir, online.kafka or online.join.
    """
    settings = configure(config, overrides)
    check(settings)
    check_online(settings, source is not None)
    settings = with_saved_format(settled(settings), local_folder(settings.run.dir))
    settings, guess = _settle(settings, schema)
    schema = schema or (schema_of(settings) if guess is None else guess.schema)
    settings = with_schema_file(settings, guess, local_folder(settings.run.dir))

    def repair(folder: Path) -> None:
        complete(folder, lambda text: None if quiet else print(text, flush=True))  # a rewind that was interrupted

    if modes.distributed(settings):
        from clickfleet.cluster.status import ClusterMonitor

        with open_run(settings, settings.run.dir, None, ClusterMonitor, quiet, repair=repair) as cluster_run:
            if guess is not None:
                record_guess(guess, cluster_run)
            return _learn_on_cluster(cluster_run, schema, source)
    with open_run(settings, settings.run.dir, None, Monitor, quiet, repair=repair) as run:
        if guess is not None:
            record_guess(guess, run)
        return _learn(run, schema, source)


def _settle(settings: Config, schema: Schema | None) -> tuple[Config, Guess | None]:
    """Recognise the format and guess the schema from the first files of online.dir. Without any, they are Criteo's."""
    online, data = settings.online, settings.data
    if online.dir is None and online.kafka is None and online.join is None:  # the caller passes the stream
        return settings, None
    days: list[Path] = []
    if online.dir is not None and "://" not in online.dir:
        days = sorted(day for day in Path(online.dir).glob("*") if day.name >= str(online.start_day or ""))
    first = next((file for day in days for file in sorted(day.glob("*/[!._]*")) if file.stat().st_size), None)
    if first is not None:
        return settle(settings, [first], schema)
    form = Plugin("criteo", data.format.settings) if data.format.automatic else data.format
    return replace(settings, data=replace(data, format=form)), None


class OnlineStart(LocalStart):
    """The learner of a stream in this process."""

    def resume(self, path: Path) -> int:
        if "online" not in run_folder.read_state(path):
            raise ConfigError(
                f"{self.settings.run.dir} holds a run of `train`",
                "start from it with train.init_from in another run.dir",
            )
        return super().resume(path)


def _learn(run: OpenRun[Monitor], schema: Schema, stream: Stream | None) -> OnlineResult:
    config, monitor = run.settings, run.monitor
    assert run.folder is not None
    folder = run.folder
    start = OnlineStart(config, schema)
    run.begin(start)
    learner, arrangement = start.learner, start.arrangement
    saver = run.saver()
    assert saver is not None
    fresh = Freshness(time.time)
    monitor.listen = OnlineMetrics(folder, fresh, config.publish.freshness_slo).take
    queue = PassQueue(config, schema, make_source(config, folder, stream, monitor), folder, monitor.log)
    publisher = PassPublisher(config, learner, folder, monitor, fresh, reports=make_reports(config, schema, monitor))
    publisher.mirror = run.mirror
    trainers, threads = arrangement["hogwild"], arrangement["threads"]
    job = PassJob(learner, start.metrics, monitor.tick, fresh, trainers=trainers, threads=threads)
    job.calibrator = publisher.calibrator
    session = LocalPassSession(config, job, modes.load(config), monitor, saver, queue, publisher, arrangement)
    if config.online.validate == "progressive":
        for trainer in job.trainers:
            trainer.step.score_first = trainer.step.is_noisy()
    if start.state is not None:
        session.restore(start.state)
    before = job.rows
    try:
        with session.interruptible():
            session.run()
    except NotFiniteError as problem:
        saver.wait()
        raise not_finite(problem, job.steps, folder, saver) from None
    finally:
        job.close()
        with suppress(CheckpointError):  # the run is ending, and what was not published is in its last checkpoint
            publisher.close()
        saver.wait()  # complete the checkpoint in progress even if training failed
        if session.now is not None:
            session.now[1].close()
        queue.close()
        monitor.close()
    run.signal = session.signal
    rows = job.rows - before
    path = None if saver.last is None else saver.last[1]
    result = OnlineResult(learner, path, threads, rows=rows, **_outcome(session, rows))
    if config.run.report and rows and session.signal is None:
        write_report(folder, result, Evidence(), monitor.log)
    return result


def _learn_on_cluster(run: OpenRun[ClusterMonitor], schema: Schema, stream: Stream | None) -> OnlineResult:
    from clickfleet.online import on_cluster

    config, monitor = run.settings, run.monitor
    assert run.folder is not None
    folder = run.folder
    reports = make_reports(config, schema, monitor)
    session = on_cluster.open_session(run, schema, make_source(config, folder, stream, monitor), reports)
    monitor.listen = OnlineMetrics(folder, session.publisher.fresh, config.publish.freshness_slo).take
    driver = session.driver
    before = driver.start_state.rows
    on_cluster.train_stream(session)
    run.signal = session.signal
    rows = driver.start_state.rows - before
    result = OnlineResult(None, driver.path, cores(config), rows=rows, **_outcome(session, rows))
    if config.run.report and rows and session.signal is None:
        table_bytes = driver.overview.table_stats()["bytes"]
        write_report(folder, result, Evidence(), monitor.log, table_bytes=table_bytes)
    return result


def _outcome(session: PassSession[Any], rows: int) -> dict[str, Any]:
    return {
        "passes": session.course.passes,
        "total_rows": session.job.rows,
        "steps": session.job.steps,
        "seconds": session.trained_s + session.last_save_s,
        "rows_per_s": rows / session.trained_s if session.trained_s else 0.0,
        "last": session.last,
        "validated": dict(session.validated.results()),
        "last_sequence": session.publisher.last_sequence,
        "held": session.publisher.held,
        "day": None if session.course.position is None else session.course.position["day"],
        "signal": session.signal,
    }


def check_online(config: Config, has_stream: bool) -> None:
    """Reject settings that contradict each other or have no effect. `has_stream`: the caller passes the stream."""
    kind: type[Model] = find("models", config.model, Model)
    if not kind.scores_rows:
        raise ConfigError(
            f"{config.model.name} cannot learn online: it has nothing to publish", "train it with clickfleet train"
        )
    online = config.online
    if has_stream + sum(one is not None for one in (online.dir, online.kafka, online.join)) != 1:
        raise ConfigError(
            "online learning needs exactly one stream",
            "set either online.dir (timed folders), online.kafka, or online.join (shows and feedback)",
        )
    if online.join is not None and url_of(config.run.dir) is not None:
        raise ConfigError(
            "online.join needs a run folder on this machine: the shows that wait for feedback are in it",
            "set run.dir to a folder; publish.to copies the entries elsewhere",
        )
    if online.pass_ is not None:
        check_pass(config)
    if config.publish.calibrate is not None:
        check_calibrate(config)
    if online.start_pass > 1 and online.dir is None:
        raise ConfigError("online.start_pass needs timed folders", "set online.dir, or remove online.start_pass")
    for key, value in {
        "data.train": config.data.train,
        "data.valid": config.data.valid,
        "data.valid_share": config.data.valid_share,
        "data.test": config.data.test,
        "train.eval_every": config.train.eval_every,
        "train.patience": config.train.patience,
        "run.keep_best": config.run.keep_best,
        "train.epochs": config.train.epochs > 1,
        "train.metrics.slices": config.train.metrics.slices,
    }.items():
        if value:
            raise ConfigError(f"{key} is for training on files, not for a stream", "remove it")
    for key in ("start_day", "end_day"):
        if (day := getattr(online, key)) is not None:
            parse_day(day, f"online.{key}")
    if online.end_day is not None and online.start_day is not None and online.end_day < online.start_day:
        raise ConfigError(f"online.end_day {online.end_day} is before online.start_day {online.start_day}")


def check_pass(config: Config) -> None:
    """Reject settings that contradict online.pass."""
    online = config.online
    assert online.pass_ is not None
    if online.pass_.seconds is None and online.pass_.rows is None:
        raise ConfigError("online.pass has neither seconds nor rows", "set one or both, such as online.pass=1s")
    if online.splits_per_pass > 1:
        raise ConfigError("online.pass and online.splits_per_pass exclude each other", "remove one of them")
    for section, source in {"kafka": online.kafka, "join": online.join}.items():
        for key in ("rows_per_pass", "interval"):
            if getattr(source, key, None) is not None:
                raise ConfigError(f"online.pass and online.{section}.{key} exclude each other", "remove one of them")


def check_calibrate(config: Config) -> None:
    """Reject settings under which there are no scores to calibrate by."""
    if modes.distributed(config):
        raise ConfigError("publish.calibrate is not available on a cluster", "use mode local, or remove it")
    if config.online.validate != "progressive":
        raise ConfigError(
            f"publish.calibrate learns from scores made before training, but online.validate is {config.online.validate}",
            "set online.validate=progressive",
        )
    if config.train.loss.negatives_kept != 1.0:
        raise ConfigError(
            "publish.calibrate counts clicks, but train.loss.negatives_kept says that shows without one are missing",
            "remove one of them",
        )


def make_reports(config: Config, schema: Schema, monitor: Monitor) -> StreamReports:
    """Return what records passes and entries. Those of micro-passes are recorded together, unless the run must be reproducible."""
    together = config.online.pass_ is not None and not config.train.deterministic
    return StreamReports(monitor, lambda: make_metrics(config, schema), TOGETHER_S if together else 0.0)


def zone_of(config: Config) -> ZoneInfo:
    try:
        return ZoneInfo(config.online.timezone)
    except (ZoneInfoNotFoundError, ValueError):
        raise ConfigError(
            f"unknown time zone {config.online.timezone!r} in online.timezone", "use a name such as Europe/Zurich"
        ) from None


def make_source(config: Config, folder: Path, stream: Stream | None, monitor: Monitor) -> PassSource:
    """Return the source of passes: the given stream, or the configured one."""

    def warn(text: str) -> None:
        monitor.log(f"warning: {text}")

    def count(path: str) -> int:
        return count_rows(path, config.data.format)

    online = config.online
    if stream is not None:
        return IterableSource(stream, online.end_day, online.pass_, count)
    if online.dir is not None and online.pass_ is not None:
        return ArrivingFiles(online, zone_of(config), warn, count)
    if online.dir is not None:
        return Directories(online, zone_of(config), warn)
    if online.join is not None:
        from clickfleet.online.sources.joined_passes import JoinedPasses

        return JoinedPasses(config, zone_of(config), folder, warn)
    from clickfleet.online.sources.kafka import Topic

    return Topic(config, zone_of(config), folder / "spool", warn)
