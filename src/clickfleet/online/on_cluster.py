"""Online learning on a cluster: the same passes and days, with a driver and its workers in place of trainer threads."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import numpy as np

from clickfleet.cluster.assignments import AssignedStream, Assignment
from clickfleet.cluster.driver import Driver
from clickfleet.cluster.processes import ProcessFailedError, ProcessGroup, StoppedError
from clickfleet.cluster.start_state import adopt_buffers, join_dense
from clickfleet.cluster.status import ClusterMonitor
from clickfleet.config.load import Config
from clickfleet.data.schema import Schema
from clickfleet.errors import ClickfleetError, ClusterError
from clickfleet.online.freshness import Freshness
from clickfleet.online.pass_queue import AnnouncedPasses, PassQueue, PassReader
from clickfleet.online.passes import Pass, PassSource
from clickfleet.online.publisher import PassPublisher, PublisherState
from clickfleet.online.reports import StreamReports
from clickfleet.online.session import OnlinePosition, PassSession
from clickfleet.store.run_folder import State
from clickfleet.store.table import Columns, Keys, PublishableTable, TakenChanges, mix64, sort_by_hash
from clickfleet.training import modes
from clickfleet.training.loop import Arrangement
from clickfleet.training.metrics import Metrics
from clickfleet.training.monitor import Progress
from clickfleet.training.run import OpenRun


class PassDriver(Driver):
    """A driver whose epochs are passes. Its session supplies the part of a checkpoint that describes the stream."""

    session: ClusterPassSession

    def __init__(self, config: Config, schema: Schema, monitor: ClusterMonitor) -> None:
        super().__init__(config, schema, [], monitor)
        self.evaluations.unwanted = lambda: False  # a pass is evaluated before it is saved
        self._reading: Config | None = None

    def train_pass(self, files: Sequence[str], reading: Config) -> bool:
        """Train the rest of a pass; return whether it came to its end."""
        self.data, self._reading = list(files), reading
        if files:
            self.train_epoch(self.progress.epoch)
        if self.signal is not None:
            return False
        self.processes.count()
        self.progress.epoch += 1
        return True

    def task(self, epoch: int, streams: tuple[AssignedStream, ...], saved: dict[str, bytes]) -> Assignment:
        progressive = self.config.online.validate == "progressive"
        return Assignment(epoch, streams, saved, reading=self._reading, score_first=progressive)

    def before_checkpoint(self) -> None:
        self.session.publisher.settle()

    def more(self) -> State:
        return {"online": asdict(self.session.course), "published": self.session.publisher.state()}


class ClusterPassJob:
    """The workers of a cluster as the job of a session."""

    def __init__(self, driver: PassDriver, fresh: Freshness) -> None:
        self.driver, self.fresh = driver, fresh
        self.learner = driver.learner
        self.table: PublishableTable = ShardedTable(driver.processes)
        self.epoch_ended = False
        self.stop_at: int | None = None
        self.stop_when: Callable[[], bool] = lambda: False
        self.span_s: tuple[float, float] | None = None

    @property
    def steps(self) -> int:
        return self.driver.overview.steps

    @steps.setter
    def steps(self, steps: int) -> None:
        self.driver.overview.start.steps += steps - self.driver.overview.steps

    @property
    def rows(self) -> int:
        return self.driver.overview.rows

    @property
    def bad_lines(self) -> int:
        return self.driver.overview.bad_lines

    def look_ahead(self) -> None:
        """Do nothing: the driver knows whether a pass has ended."""

    def begin_pass(self, source: PassReader, span_s: tuple[float, float] | None) -> None:
        self.epoch_ended, self.span_s = False, span_s

    def train(self, files: Sequence[str], reading: Config) -> None:
        """Let the workers train the rest of a pass."""
        before = self.rows
        self.epoch_ended = self.driver.train_pass(files, reading)
        if self.span_s is not None:
            self.fresh.trained_between(self.span_s, self.rows - before)

    def position(self) -> dict[str, Any]:
        return cast(State, self.driver.start_state.reader)

    def seen(self) -> Metrics:
        """Return the metrics of all workers together."""
        processes = self.driver.processes
        return self.driver.merged(processes.call(processes.trainers, "metrics").values())

    def forget_seen(self) -> None:
        self.driver.reset_metrics()


class ClusterPassPublisher(PassPublisher):
    """Publishes the rows of the shards."""

    overlaps_bases = False  # the shards are asked for its rows, which only one thread may do

    def __init__(
        self,
        driver: PassDriver,
        job: ClusterPassJob,
        folder: Path,
        monitor: ClusterMonitor,
        reports: StreamReports | None = None,
    ) -> None:
        super().__init__(driver.config, driver.learner, folder, monitor, job.fresh, job.table, reports)
        self._driver = driver

    def refresh(self) -> None:
        processes = self._driver.processes
        parts = processes.call(processes.shards, "dense")
        self.learner.flat.values.copy_(join_dense([parts[name] for name in processes.shards])["values"])
        name, actor = next(iter(processes.trainers.items()))
        adopt_buffers(self.learner, processes.call({name: actor}, "buffers")[name])


class ClusterPassSession(PassSession[ClusterPassJob]):
    """Passes and days, with workers and shards in place of trainer threads and a table."""

    def __init__(self, driver: PassDriver, job: ClusterPassJob, queue: PassQueue, publisher: PassPublisher) -> None:
        arrangement: Arrangement = {"mode": driver.config.mode.name}
        super().__init__(
            driver.config, job, self._train_on_workers, driver.monitor, None, queue, publisher, arrangement
        )
        self.driver = driver
        driver.session = self

    @property
    def saves(self) -> bool:
        return True

    @property
    def current_pass(self) -> Pass:
        assert self.now is not None
        return self.now[0]

    def _train_on_workers(self, job: ClusterPassJob) -> None:
        """Serve as the mode of this session. The workers run the mode of the configuration."""
        job.train(self.current_pass.data, self.queue.reading(self.current_pass))

    def adopt(self, more: State) -> None:
        """Resume from what a checkpoint holds of the stream; start from the beginning if it holds nothing."""
        self.course = OnlinePosition(**more["online"]) if "online" in more else OnlinePosition()
        self._reader = {}
        fresh: PublisherState = {"head": None, "aucs": [], "due": False, "held": 0, "verdict": []}
        self.publisher.restore(more.get("published", fresh))

    def roll_back(self) -> None:
        """Return to the last checkpoint, as the driver has done after a failure."""
        self._waited_s = -self._elapsed() if self._start_s else 0.0
        if self.now is not None:
            self.now[1].close()
            self.now = None
        self.queue.forget()
        self.publisher.drop()
        self.adopt(self.driver.start_state.more)

    def _stops_waiting(self) -> bool:
        self.driver.resizing.tick()
        return super()._stops_waiting()

    def _write(self, state: State, epoch: int | None) -> None:
        self.driver.checkpoints.now(None)

    def _wait(self, last: bool = False) -> None:
        self.driver.checkpoints.wait()

    @property
    def watched(self) -> Progress:
        return self.driver.overview

    def _measure(self, source: PassReader) -> Metrics:
        return self.driver.evaluations.measure(self.current_pass.data, self.queue.reading(self.current_pass))

    def _end_day(self) -> None:
        super()._end_day()
        if modes.needs(self.config).replicates_rows:  # the workers' copies have rows that the shards have just removed
            self.driver.start_state.saved = {}
            self.driver.begin()


def open_session(
    run: OpenRun[ClusterMonitor], schema: Schema, source: PassSource, reports: StreamReports
) -> ClusterPassSession:
    """Return the session of a stream, started or resumed."""
    assert run.folder is not None
    driver = PassDriver(run.settings, schema, run.monitor)
    job = ClusterPassJob(driver, Freshness(time.time))
    publisher = ClusterPassPublisher(driver, job, run.folder, run.monitor, reports)
    queue = AnnouncedPasses(driver.config, schema, source, run.folder, run.monitor.log)
    session = ClusterPassSession(driver, job, queue, publisher)
    driver.mirror = publisher.mirror = run.mirror
    run.begin(driver)
    return session


def train_stream(session: ClusterPassSession) -> None:
    """Start the processes and train the stream to its end. After a failure, resume from the last checkpoint."""
    driver = session.driver
    session.adopt(driver.start_state.more)

    def stop(number: int) -> None:
        session.signal = number

    with driver.interruptible(stop):
        try:
            driver.start()
            while True:
                try:
                    session.run()
                    return
                except ProcessFailedError as failure:
                    try:
                        driver.recovery.roll_back(failure)
                    except StoppedError as stopped:
                        driver.monitor.log(f"no last checkpoint: {stopped}")
                        return
                    session.roll_back()
        except ProcessFailedError as failure:
            raise ClusterError(str(failure), f"see {driver.logs}") from None
        finally:
            with suppress(ClickfleetError):  # the run is ending, and what was not published is in its last checkpoint
                session.publisher.close()
            driver.close()
            session.queue.close()


LONG_S = 3600.0
"""Limit for calls that take long on a large table, such as shrink."""
LAST_HASH = 2**64 - 1


class ShardedTable:
    """The rows of all shards, as far as publishing needs them."""

    def __init__(self, processes: ProcessGroup) -> None:
        self._processes = processes

    def __len__(self) -> int:
        return self.stats()["rows"]

    def stats(self) -> dict[str, int]:
        total: dict[str, int] = {}
        for status in self._ask("status").values():
            for name, value in status.items():
                total[name] = total.get(name, 0) + value
        return total

    def shrink(self) -> int:
        return sum(self._ask("shrink").values())

    def end_day(self) -> None:
        self._ask("end_day")

    def restore_readers(self, keys: Keys) -> None:
        split = self._processes.spread.split(keys)
        for (name, actor), span in zip(self._processes.shards.items(), split.spans, strict=True):
            self._processes.call({name: actor}, "restore_readers", split.keys[span], timeout_s=LONG_S)

    @property
    def tracking(self) -> bool:
        """Whether all shards record changes. One that has never been published needs a base."""
        return all(self._ask("tracking").values())

    def take_changes(self) -> TakenChanges:
        taken = self._ask("take_changes")
        parts = [taken[name] for name in self._processes.shards]
        deleted = sort_by_hash(np.concatenate([part.deleted for part in parts]))
        return TakenChanges(list(merged([iter(part) for part in parts])), deleted)

    def cut_changes(self, *, base: bool = False) -> ShardChanges:
        are_bases = self._ask("cut_changes", base)
        if len(set(are_bases.values())) > 1:  # some shards have never been published: all start with a base
            self._ask("end_changes", False)
            are_bases = self._ask("cut_changes", True)
        return ShardChanges(self._processes, all(are_bases.values()))

    def _ask(self, verb: str, *arguments: Any) -> dict[str, Any]:
        return self._processes.call(self._processes.shards, verb, *arguments, timeout_s=LONG_S)


class ShardChanges:
    """The changes of all shards, merged. Shards split keys by the low bits of mix64; an entry is sorted by all bits."""

    def __init__(self, processes: ProcessGroup, base: bool) -> None:
        self._processes, self.base = processes, base

    def __iter__(self) -> Iterator[Columns]:
        return merged([self._parts(name) for name in self._processes.shards])

    def _parts(self, name: str) -> Iterator[Columns]:
        actor = {name: self._processes.shards[name]}
        while (part := self._processes.call(actor, "next_changes", timeout_s=LONG_S)[name]) is not None:
            yield part

    @property
    def deleted(self) -> Keys:
        keys = self._processes.call(self._processes.shards, "deleted")
        return sort_by_hash(np.concatenate([keys[name] for name in self._processes.shards]))

    def commit(self) -> None:
        self._processes.call(self._processes.shards, "end_changes", True)

    def abort(self) -> None:
        self._processes.call(self._processes.shards, "end_changes", False)


def merged(shards: Sequence[Iterator[Columns]]) -> Iterator[Columns]:
    """Merge the changes of several tables with distinct keys. Only a few parts of each are in memory at a time."""
    feeds = [_Feed(parts) for parts in shards]
    while True:
        done = min(feed.done for feed in feeds)
        for kind in sorted({kind for feed in feeds for kind in feed.held}):
            parts = [part for feed in feeds for part in feed.take(kind, done)]
            if parts:
                yield _joined(parts, kind)
        if done > LAST_HASH:
            return
        for feed in feeds:
            if feed.done == done:
                feed.pull()


class _Feed:
    """The parts of one table: ascending ranges of hashes; in each range one part for each width, by ascending kind."""

    def __init__(self, parts: Iterator[Columns]) -> None:
        self._parts = parts
        self.held: dict[int, list[tuple[Keys, Columns]]] = {}
        """Kind -> hashes and rows."""
        self._kind = -1
        """Of the last part."""
        self._seen = -1
        """The largest hash so far."""
        self.done = -1
        """All rows up to this hash have arrived."""

    def pull(self) -> None:
        part = next(self._parts, None)
        if part is None:
            self.done = LAST_HASH + 1
            return
        hashes = mix64(part["key"])
        if part["kind"] <= self._kind:
            self.done = self._seen  # a range begins: the ranges before it are complete
        self._kind, self._seen = part["kind"], max(self._seen, int(hashes[-1]))
        self.held.setdefault(part["kind"], []).append((hashes, part))

    def take(self, kind: int, upto: int) -> list[tuple[Keys, Columns]]:
        """Remove and return the rows of a kind with hashes up to a value."""
        out, rest = [], []
        for hashes, part in self.held.get(kind, ()):
            width = len(part["embedx"]) // len(hashes)
            n = int(np.searchsorted(hashes, np.uint64(min(upto, LAST_HASH)), "right")) if upto >= 0 else 0
            if n:
                out.append((hashes[:n], _cut(part, slice(None, n), slice(None, n * width))))
            if n < len(hashes):
                rest.append((hashes[n:], _cut(part, slice(n, None), slice(n * width, None))))
        self.held[kind] = rest
        return out


def _cut(part: Columns, rows: slice, values: slice) -> Columns:
    return {**{name: part[name][rows] for name in ("key", "slot", "embed_w")}, "embedx": part["embedx"][values]}


def _joined(parts: list[tuple[Keys, Columns]], kind: int) -> Columns:
    """Return the rows of several tables sorted by hash."""
    order = np.argsort(np.concatenate([hashes for hashes, _ in parts]), kind="stable")
    columns = {name: np.concatenate([part[name] for _, part in parts])[order] for name in ("key", "slot", "embed_w")}
    embedx = np.concatenate([part["embedx"] for _, part in parts])
    width = len(embedx) // len(order)
    return {
        **columns,
        "embedx": embedx.reshape(len(order), width)[order].reshape(-1),
        "kind": kind,
        "full": bool(kind % 2),
    }
