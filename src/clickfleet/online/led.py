"""Online learning on a cluster: the same course of passes and days, with a driver and its workers in the place of trainer threads."""

from __future__ import annotations

import copy
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from clickfleet import checkpoint, saving
from clickfleet.cluster.base import adopt_buffers, join_dense
from clickfleet.cluster.driver import Driver
from clickfleet.cluster.fleet import LostError
from clickfleet.cluster.overview import ClusterWatch
from clickfleet.cluster.streams import Assignment, Stream
from clickfleet.config import Config
from clickfleet.errors import ClusterError
from clickfleet.learner import Learner
from clickfleet.metrics import Metrics
from clickfleet.online.ahead import Ahead
from clickfleet.online.freshness import Freshness
from clickfleet.online.passes import Pass, PassSource
from clickfleet.online.release import Release
from clickfleet.online.session import Course, PassJob, PassSession
from clickfleet.online.sharded import ShardedTable
from clickfleet.online.supply import Announced, Supply
from clickfleet.saving import Saver, State
from clickfleet.schema import Schema


class PassDriver(Driver):
    """A driver whose epochs are passes; what a checkpoint needs besides comes from the session."""

    session: LedSession

    def __init__(self, config: Config, schema: Schema, watch: ClusterWatch) -> None:
        super().__init__(config, schema, [], [], watch)
        self.exams.unwanted = lambda: False  # a pass is evaluated before it is saved
        self._reading: Config | None = None

    def train_pass(self, supply: Supply) -> bool:
        """Trains what is left of the pass that has begun; whether it came to its end."""
        begun = self.session.begun
        self.files, self._reading = list(begun.data), supply.reading(begun)
        if self.files:
            self.epoch()
        if self.signal is not None:
            return False
        self.crew.count()
        self.progress.epoch += 1
        return True

    def task(self, epoch: int, streams: tuple[Stream, ...], saved: dict[str, bytes]) -> Assignment:
        progressive = self.config.online.validate == "progressive"
        return Assignment(epoch, streams, saved, reading=self._reading, score_first=progressive)

    def more(self) -> dict[str, Any]:
        return {"online": asdict(self.session.course), "published": self.session.release.state()}


class LedJob(PassJob):
    """What a session asks of a job, asked of the driver."""

    def __init__(self, driver: PassDriver, learner: Learner, fresh: Freshness) -> None:
        self.driver, self.learner, self.fresh = driver, learner, fresh
        self.table = learner.table
        self.metrics = PassMetrics(driver)
        self.epoch_ended = False

    @property
    def steps(self) -> int:
        return self.driver.overview.steps

    @steps.setter
    def steps(self, steps: int) -> None:
        self.driver.overview.base["steps"] += steps - self.driver.overview.steps

    @property
    def rows(self) -> int:
        return self.driver.overview.rows

    @rows.setter
    def rows(self, rows: int) -> None:
        raise AttributeError("the workers count rows")

    @property
    def bad_lines(self) -> int:
        return int(self.driver.overview.source.counters.bad_lines)

    def look_ahead(self) -> None:
        """The driver knows whether a pass has ended."""

    def begin_epoch(self) -> None:
        self.epoch_ended = False

    def position(self) -> dict[str, Any]:
        return self.driver.base.reader


class PassMetrics(Metrics):
    """Those of all workers together."""

    def __init__(self, driver: PassDriver) -> None:
        self._driver = driver

    def results(self) -> dict[str, Any]:
        crew = self._driver.crew
        merged = self._driver.merged(crew.tell(crew.trainers, "metrics").values())
        self.buckets = merged.buckets
        return merged.results()

    def reset(self) -> None:
        self._driver.reset_metrics()


class CutSaver(Saver):
    """Checkpoints of a cluster are cuts."""

    def __init__(self, driver: PassDriver) -> None:
        run = driver.config.run
        super().__init__(driver.folder, run.keep, False, driver.watch.log)
        self._driver = driver

    def save(self, *_: Any, **__: Any) -> None:
        self._driver.cuts.now(None)
        assert self._driver.path is not None
        self.last = (self._driver.base.steps, self._driver.path)

    def wait(self, last: bool = False) -> None:
        self._driver.cuts.wait()


class LedRelease(Release):
    """Publishes what the shards hold."""

    def __init__(self, driver: PassDriver, learner: Learner, folder: Path, watch: ClusterWatch, fresh: Freshness):
        super().__init__(driver.config, learner, folder, watch, fresh)
        self._driver = driver

    def refresh(self) -> None:
        crew = self._driver.crew
        found = crew.tell(crew.shards, "dense")
        self.learner.flat.values.copy_(join_dense([found[name] for name in crew.shards])["values"])
        name, actor = next(iter(crew.trainers.items()))
        adopt_buffers(self.learner, crew.tell({name: actor}, "buffers")[name])


class LedSession(PassSession):
    """The course of passes and days, led from the driver's process."""

    driver: PassDriver

    @property
    def begun(self) -> Pass:
        assert self.now is not None
        return self.now[0]

    def adopt(self, more: State) -> None:
        """Goes on from what a checkpoint says; from the beginning where there is none."""
        self.course = Course(**more["online"]) if "online" in more else Course()
        self._reader = {}
        fresh: State = {"head": None, "aucs": [], "due": False, "held": 0, "verdict": []}
        self.release.restore(more.get("published", fresh))

    def go_back(self) -> None:
        """After a loss: the driver is at its last cut, and so is the course from now on."""
        spent = 0.0 if self._mark is None else self._elapsed()
        self._mark, self._waited_s = None, -spent
        if self.now is not None:
            self.now[1].close()
            self.now = None
        self.supply.forget()
        self.adopt(self.driver.base.more)

    def _show(self, job: PassJob) -> None:
        self.watch.start(self.driver.overview)  # type: ignore[arg-type]

    def _measure(self, job: PassJob, source: Ahead) -> Metrics:
        return self.driver.exams.measure(self.begun.data, self.supply.reading(self.begun))

    def _end_day(self, job: PassJob) -> None:
        super()._end_day(job)
        if self.config.mode.name == "geo":  # the workers' copies have rows that the shards have just removed
            self.driver.base.saved = {}
            self.driver.begin()


def prepare(config: Config, schema: Schema, folder: Path, watch: ClusterWatch, source: PassSource) -> LedSession:
    """A stream's session and driver, where the last checkpoint or train.init_from leaves them."""
    driver = PassDriver(config, schema, watch)
    learner = copy.copy(driver.learner)  # the same network, with the shards' table
    learner.table = ShardedTable(driver.crew, driver.learner.table.factors)
    release = LedRelease(driver, learner, folder, watch, Freshness(time.time))
    supply = Announced(driver.config, schema, source, folder, watch.log)
    session = LedSession(driver.config, watch, CutSaver(driver), supply, release, {"mode": config.mode.name})
    driver.session, session.driver = session, driver
    if checkpoint.steps(driver.folder):
        path = checkpoint.latest(driver.folder)
        driver.resume(path)
        checkpoint.forget_after(driver.folder, driver.base.steps)
        watch.log(f"going on from {path}")
    else:
        driver.folder.mkdir(parents=True, exist_ok=True)
        watch.forget_after(0)  # of a run killed before its first checkpoint
        if config.train.init_from is not None:
            anew = driver.start_from(saving.resolve(config.train.init_from))
            watch.log(f"starting from {config.train.init_from}")
            for what in anew:
                watch.log(f"initialised anew: {what}")
    return session


def lead(session: LedSession) -> None:
    """Starts the processes and follows the stream to its end, whatever is lost meanwhile."""
    driver, fresh = session.driver, session.release.fresh
    job = LedJob(driver, session.release.learner, fresh)
    session.adopt(driver.base.more)

    def stop(number: int) -> None:
        session.signal = number

    with driver.interruptible(stop):
        try:
            driver.start()
            while True:
                try:
                    if not session.attend(job):
                        return
                    before = job.rows
                    job.epoch_ended = driver.train_pass(session.supply)
                    if job.span_s is not None:
                        fresh.trained(np.linspace(*job.span_s, 16).astype(np.int64), job.rows - before)
                except LostError as loss:
                    driver.recovery.roll_back(loss)
                    session.go_back()
        except LostError as loss:
            raise ClusterError(f"lost {loss}", f"see {driver.logs}") from None
        finally:
            driver.close()
            session.supply.close()
