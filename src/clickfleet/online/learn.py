"""A configuration and a stream -> a model that is trained pass by pass and published as it goes."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import torch

from clickfleet import checkpoint, modes, saving
from clickfleet.config import Config
from clickfleet.configuring import check, check_arrangement, configure, cpu_class, hogwild, settled
from clickfleet.errors import ConfigError
from clickfleet.feeds import Feed
from clickfleet.home import at_home, write_config
from clickfleet.learner import Learner
from clickfleet.metrics import Metrics
from clickfleet.mirror import Mirror, origin
from clickfleet.online.directories import Directories
from clickfleet.online.freshness import Freshness
from clickfleet.online.gauges import Gauges
from clickfleet.online.own import Own
from clickfleet.online.passes import PassSource, parse_day
from clickfleet.online.release import Release
from clickfleet.online.rewind import complete
from clickfleet.online.session import PassJob, PassSession
from clickfleet.online.supply import Supply
from clickfleet.opening import schema_of
from clickfleet.outcome import LoadedLater
from clickfleet.report.ending import write_led_report, write_report
from clickfleet.report.evidence import Evidence
from clickfleet.run import not_finite
from clickfleet.schema import Schema
from clickfleet.scoring import Results
from clickfleet.step import NotFiniteError
from clickfleet.trained import Trained, cores
from clickfleet.watch import Watch


@dataclass
class Learned(Trained):
    """What online learning made, and how far it came."""

    learner: Learner
    path: Path | None
    threads: int
    passes: int = 0
    """Since the run began."""
    rows: int = 0
    """Rows trained on by this call."""
    seconds: float = 0.0
    rows_per_s: float = 0.0
    last: Results = field(default_factory=dict)
    """Metrics of the last pass."""
    validated: Results = field(default_factory=dict)
    """With online.validate=pass: metrics of all passes scored by this call, but those of its first day."""
    last_sequence: int | None = None
    held: int = 0
    """Entries held back since the last one released."""
    day: int | None = None
    signal: int | None = None

    def to_dict(self) -> dict[str, Any]:
        return {
            "passes": self.passes,
            "last_sequence": self.last_sequence,
            "held": self.held,
            "day": self.day,
            "rows": self.rows,
            "seconds": self.seconds,
            "rows_per_s": self.rows_per_s,
            "auc": self.last.get("auc"),
            "checkpoint": None if self.path is None else origin(self.path) or str(self.path),
        }


def learn(
    config: Config | Mapping[str, Any] | str | Path | None = None,
    *overrides: str,
    source: Iterable[tuple[Any, int, int]] | None = None,
    schema: Schema | None = None,
    quiet: bool = False,
) -> Learned:
    """Learns from a stream until its last day; a run folder that holds a run goes on where that one stopped.

    `source` may be any iterable of (data, day, pass) instead of online.dir or online.kafka.
    """
    settings = configure(config, overrides)
    check(settings)
    check_online(settings, source is not None)
    settings = settled(settings)
    schema = schema or schema_of(settings)
    with at_home(settings.run.dir, rows=settings.cluster.address is None) as (folder, copy):
        settings = replace(settings, run=replace(settings.run, dir=str(folder)))
        complete(folder, lambda text: None if quiet else print(text, flush=True))  # a rewind that was cut short
        work = _lead if modes.distributed(settings) else _learn
        return work(settings, schema, folder, copy, source, quiet)


def _learn(
    config: Config,
    schema: Schema,
    folder: Path,
    copy: Mirror | None,
    stream: Iterable[tuple[Any, int, int]] | None,
    quiet: bool,
) -> Learned:
    metrics = make_metrics(config, schema)
    arrangement = arrange(config)
    checkpoints = folder / "checkpoints"
    watch = Watch(folder, quiet=quiet)
    saver = saving.Saver(checkpoints, config.run.keep, False, watch.log)
    if copy is not None:
        saver.written = copy.wake
        copy.start(watch.log)
    state: saving.State | None = None
    if checkpoint.steps(checkpoints):
        path = checkpoint.latest(checkpoints)
        learner, state = saving.resume(path, config, schema, metrics)
        if "online" not in state:
            raise ConfigError(
                f"{folder} holds a run of `train`", "start from it with train.init_from in another run.dir"
            )
        check_arrangement(state["arrangement"], arrangement)
        checkpoint.forget_after(checkpoints, state["step"])
        saver.last = (state["step"], path)
        watch.log(f"going on from {path}")
    else:
        torch.manual_seed(config.train.seed)
        learner = start(config, schema, watch)
    write_config(folder, config)
    fresh = Freshness(time.time)
    watch.listen = Gauges(folder, fresh, config.publish.freshness_slo).take
    source = make_source(config, folder, stream, watch)
    supply = Supply(config, schema, source, folder, watch.log)
    release = Release(config, learner, folder, watch, fresh)
    release.copy = copy
    session = PassSession(config, watch, saver, supply, release, arrangement)
    nothing = Feed([], schema)
    trainers, threads = arrangement["hogwild"], arrangement["threads"]
    job = PassJob(learner, nothing, metrics, session.attend, watch.tick, trainers=trainers, threads=threads)
    job.fresh = fresh
    if config.online.validate == "progressive":
        for trainer in job.trainers:
            trainer.step.score_first = trainer.step.is_noisy()
    if state is not None:
        session.restore(job, state)
    else:
        watch.forget_after(0, size=0)  # of a run killed before its first checkpoint
    before = job.rows
    try:
        with session.interruptible():
            modes.load(config)(job)
    except NotFiniteError as problem:
        saver.wait()
        raise not_finite(problem, job.steps, folder, saver) from None
    finally:
        job.close()
        saver.wait()  # a checkpoint under way is finished even if training failed
        if session.now is not None:
            session.now[1].close()
        supply.close()
        watch.close()
    rows = job.rows - before
    learned = Learned(
        learner,
        None if saver.last is None else saver.last[1],
        threads,
        rows=rows,
        **_outcome(session, release, rows),
    )
    if config.run.report and rows and session.signal is None:
        write_report(folder, learned, Evidence(), watch.log)
    return learned


class Distant(LoadedLater, Learned):
    """What a cluster learned."""


def _lead(
    config: Config,
    schema: Schema,
    folder: Path,
    copy: Mirror | None,
    stream: Iterable[tuple[Any, int, int]] | None,
    quiet: bool,
) -> Learned:
    from clickfleet.cluster.overview import ClusterWatch
    from clickfleet.online import led

    watch = ClusterWatch(folder, quiet=quiet)
    session = led.prepare(config, schema, folder, watch, make_source(config, folder, stream, watch))
    session.driver.copy = session.release.copy = copy
    if copy is not None:
        copy.start(watch.log, apart=config.cluster.address is not None)
    write_config(folder, config)
    watch.listen = Gauges(folder, session.release.fresh, config.publish.freshness_slo).take
    before = session.driver.base.rows
    led.lead(session)
    rows = session.driver.base.rows - before
    learned = Distant.__new__(Distant)
    vars(learned).update(
        path=session.driver.path, threads=cores(config), rows=rows, **_outcome(session, session.release, rows)
    )
    if config.run.report and rows and session.signal is None:
        write_led_report(folder, learned, Evidence(), session.driver, watch)
    return learned


def _outcome(session: PassSession, release: Release, rows: int) -> dict[str, Any]:
    return {
        "passes": session.course.passes,
        "seconds": session.trained_s + session.last_save_s,
        "rows_per_s": rows / session.trained_s if session.trained_s else 0.0,
        "last": session.last,
        "validated": dict(session.validated.results()),
        "last_sequence": release.last_sequence,
        "held": release.held,
        "day": None if session.course.position is None else session.course.position["day"],
        "signal": session.signal,
    }


def make_metrics(config: Config, schema: Schema) -> Metrics:
    of = config.train.metrics
    return Metrics(of.thresholds, of.sliding or None, groups=schema.group is not None)


def arrange(config: Config) -> dict[str, Any]:
    return {
        "deterministic": config.train.deterministic,
        "threads": cores(config),
        "hogwild": hogwild(config),
        "cpu": cpu_class(),
    }


def start(config: Config, schema: Schema, watch: Watch) -> Learner:
    """A new learner, or one that starts from an older model."""
    if config.train.init_from is None:
        return Learner(config, schema)
    learner, anew = saving.start_from(saving.resolve(config.train.init_from), config, schema)
    watch.log(f"starting from {config.train.init_from}")
    for what in anew:
        watch.log(f"initialised anew: {what}")
    return learner


def check_online(config: Config, own: bool) -> None:
    """Refuses settings that contradict each other or would have no effect."""
    if config.model.name == "word2vec":
        raise ConfigError("word2vec has nothing to publish, so it does not learn online", "clickfleet train takes it")
    online = config.online
    if own + (online.dir is not None) + (online.kafka is not None) != 1:
        raise ConfigError(
            "online learning needs one stream", "set online.dir (timed folders) or online.kafka, and not both"
        )
    for key, given in {
        "data.train": config.data.train,
        "data.test": config.data.test,
        "train.eval_every": config.train.eval_every,
        "train.patience": config.train.patience,
        "run.keep_best": config.run.keep_best,
        "train.epochs": config.train.epochs > 1,
        "train.metrics.slices": config.train.metrics.slices,
    }.items():
        if given:
            raise ConfigError(f"{key} is for training on files, not for a stream", "remove it")
    for key in ("start_day", "end_day"):
        if (day := getattr(online, key)) is not None:
            parse_day(day, f"online.{key}")
    if online.end_day is not None and online.start_day is not None and online.end_day < online.start_day:
        raise ConfigError(f"online.end_day {online.end_day} lies before online.start_day {online.start_day}")


def zone_of(config: Config) -> ZoneInfo:
    try:
        return ZoneInfo(config.online.timezone)
    except (ZoneInfoNotFoundError, ValueError):
        raise ConfigError(
            f"online.timezone {config.online.timezone!r} is not known", "name one such as Europe/Zurich"
        ) from None


def make_source(
    config: Config, folder: Path, stream: Iterable[tuple[Any, int, int]] | None, watch: Watch
) -> PassSource:
    """The stream that the configuration names."""

    def warn(text: str) -> None:
        watch.log(f"warning: {text}")

    if stream is not None:
        return Own(stream, config.online.end_day)
    if config.online.dir is not None:
        return Directories(config.online, zone_of(config), warn)
    from clickfleet.online.kafka import Topic

    return Topic(config, zone_of(config), folder / "spool", warn)
