"""One run on a cluster: epochs over the data, cuts, and going back to the last cut when a process is lost.

The driver hands every worker streams (shares of the files), watches, and asks for cuts: checkpoints of all shards at instants that lie
between the same batches. Whatever is lost, the run goes on from the last cut in a new epoch; messages of the old one are refused.
"""

from __future__ import annotations

import json
import math
import signal
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from clickfleet import checkpoint, cluster, modes
from clickfleet.cluster import base as bases
from clickfleet.cluster import process_tree
from clickfleet.cluster.crew import Crew
from clickfleet.cluster.cuts import TICK_S, Cuts
from clickfleet.cluster.exams import Exams
from clickfleet.cluster.fleet import LostError, StoppedError
from clickfleet.cluster.overview import ClusterWatch, closing_facts, closing_table
from clickfleet.cluster.recovery import Recovery
from clickfleet.cluster.streams import ROUNDS, Assignment, Stream
from clickfleet.config import Config
from clickfleet.errors import ClusterError, DataError
from clickfleet.exchange import Spread
from clickfleet.files import split_files
from clickfleet.interrupts import interruptible, leave
from clickfleet.learner import Learner
from clickfleet.metrics import Metrics
from clickfleet.mirror import Mirror, origin
from clickfleet.schema import Schema
from clickfleet.session import Progress, words

Calls = dict[str, Any]
START_LIMIT_S = 6.0
"""A signal while processes start is obeyed within so long, or all are killed."""
END_LIMIT_S = 4.0
"""The same after the last checkpoint."""


class Driver:
    """Leads the processes of one run."""

    def __init__(
        self, config: Config, schema: Schema, files: Sequence[str], test: Sequence[str], watch: ClusterWatch
    ) -> None:
        self.config = config = modes.settled(config)
        cluster.check(config)
        self.schema, self.files, self.watch = schema, list(files), watch
        plain = replace(config, table=replace(config.table, memory_limit=None, snapshot_reserve=None))
        self.learner = Learner(plain, schema)
        self.table = Learner(config, schema).table.describe()
        self.folder = Path(config.run.dir) / "checkpoints"
        self.logs = self.folder.parent / "logs"
        spread = Spread(config.cluster.shards, 1 + self.learner.table.factors, len(self.learner.flat.values))
        self.crew = Crew(config, schema, spread, row_files(config.cluster.shards), str(self.logs), watch.log)
        self.overview = self.crew.overview
        self.exams = Exams(self.crew, self.learner, test, watch)
        self.cuts, self.recovery = Cuts(self), Recovery(self)
        self.base = bases.fresh(config, schema, self.learner)
        self.progress = Progress()
        self.path: Path | None = None
        """The last checkpoint."""
        self.copy: Mirror | None = None
        """Where the run folder is also kept."""
        self.carried: dict[str, Any] = {}
        """State of a checkpoint that only others read: how far its run had published."""
        self.signal: int | None = None
        """What asked the run to end."""
        self.waits = False
        """For processes that start: a signal ends that at once, as nothing is lost by it."""
        self.idle = False
        """Nothing of the run is under way: a signal ends the program where it is."""
        self._stop_by = math.inf
        self.crew.fleet.check = self._check
        self.exams.unwanted = lambda: self.signal is not None
        self.trained_s = self.last_save_s = 0.0
        self.streams_of, self.finished = 0, set[str]()
        """Into how many streams the files were split, and which of them are done."""
        self.shares: list[list[str]] | None = None
        """The files of each stream of an epoch, where they are not just a split of all files."""
        self._started: dict[str, Any] = {}
        self._idle_told = 0

    def start_from(self, path: Path) -> list[str]:
        """A new run with what fits of an old model; what does not, in words."""
        self.base, anew = bases.start_from(path, self.config, self.schema, self.learner)
        self.base.path = self._seen_by_all(self.base.path)
        return anew

    def resume(self, path: Path) -> None:
        """Goes on from a checkpoint."""
        self.base, state = bases.resume(path, self.config, self.schema, self.learner, self.watch.log)
        self.base.path = self._seen_by_all(self.base.path)
        self.progress, self.path = Progress.resumed(state["progress"], self.config), path
        self.carried = {key: state[key] for key in ("published", "online") if key in state}
        self.watch.forget_after(state["step"], state.get("metrics_bytes"))

    def _seen_by_all(self, path: str | None) -> str | None:
        """How hosts other than this one know a checkpoint."""
        apart = path is not None and self.config.cluster.address is not None
        return (origin(str(path)) or path) if apart else path

    def start(self) -> None:
        """Starts all processes together and waits until they are there."""
        begin = time.monotonic()
        mode, threads = self.config.mode, self.config.cluster.threads
        for name, value in mode.settings.items():
            self.watch.log(f"mode {mode.name}: {name} = {value}")
        for name in ("merge", "queue_size"):
            if mode.name in ROUNDS and mode.settings.get(name, threads) != threads:
                self.watch.log(f"warning: mode {mode.name} has mode.{name} = cluster.threads = {threads}")
        with interruptible(self.stop, lambda: START_LIMIT_S, self._force):
            self.waits = True
            try:
                self.crew.start()
                self.begin()
                if self.signal is not None:
                    raise StoppedError("stopped by a signal")
            except StoppedError:
                assert self.signal is not None
                self.watch.log(f"stopped by {signal.Signals(self.signal).name} before training began")
                leave(self.signal)
            finally:
                self.waits = False
        self.watch.log(
            f"{self.config.cluster.shards} shards and {len(self.crew.workers)} workers are there "
            f"after {time.monotonic() - begin:.1f} s"
        )

    def begin(self) -> None:
        """Puts shards and workers into the state of the base."""
        self.crew.begin(self.base)
        (self.folder.parent / "processes.json").write_text(json.dumps(self.crew.fleet.facts, indent=1))
        self._started = self.base.metrics.state()
        self.overview.restart(self.base.steps, self.base.rows, self._started["buckets.buckets"])

    def train(self) -> None:
        """All epochs that are left, whatever is lost meanwhile, and a last checkpoint."""
        self.watch.start(self.overview)  # type: ignore[arg-type]
        self.cuts.saved_at = time.monotonic()
        while True:
            begin = time.monotonic()
            try:
                if self._over() or self.signal is not None:
                    if self.signal is None:
                        self._last_exam()
                    self.cuts.last()
                    if self.signal is not None:  # the workers stand still: what they have learned is what was saved
                        with suppress(LostError):
                            self.crew.count()
                    self.last_save_s = time.monotonic() - begin
                    return
                self.epoch()
                self.trained_s += time.monotonic() - begin
                if self.signal is None and not self.progress.stopped_early:
                    self._end_epoch()
            except StoppedError as stopped:  # an evaluation; a last checkpoint can still be written
                self.watch.log(str(stopped))
            except LostError as loss:
                self.trained_s += time.monotonic() - begin
                try:
                    self.recovery.roll_back(loss)
                except StoppedError as stopped:
                    self.watch.log(f"no last checkpoint: {stopped}")
                    return

    def end_early(self, how: str, lost: str = "") -> NoReturn:
        """After a signal: a last checkpoint, if there can be one in time, and the end of the program."""
        assert self.signal is not None
        try:
            if not lost:
                self.cuts.last()
        except LostError as loss:
            lost = f"lost {loss}"
        if lost:
            self.watch.log(f"no last checkpoint: {lost}")
        name = signal.Signals(self.signal).name
        self.watch.log(f"stopped by {name}; the newest checkpoint is of step {self.base.steps:,}; go on with {how}")
        leave(self.signal)

    def _last_exam(self) -> None:
        """The evaluation after the last epoch, where a signal had ended it."""
        steps = self.crew.count()
        if self.exams.files and self.progress.epoch and self.progress.evaluated_at != steps:
            self.exams.take(self.progress, self.progress.epoch - 1, steps)

    def _over(self) -> bool:
        return self.progress.epoch >= self.config.train.epochs or self.progress.stopped_early

    def _assign(self) -> dict[str, Assignment]:
        """What is left of the present epoch, in shares."""
        epoch, reader = self.progress.epoch, self.base.reader
        if reader["epoch"] != epoch:
            count = len(self.crew.workers)
            if self.shares is not None:
                count = len(self.shares)
            left = [Stream(i, self._files_of(i, count)) for i in range(count)]
            self.streams_of, self.finished = count, set()
        else:
            count, states = reader["of"], reader["streams"]
            files = {number: self._files_of(int(number), count) for number in states}
            left = [Stream(int(n), files[n], state) for n, state in states.items() if state is not None]
            self.streams_of, self.finished = count, {n for n, state in states.items() if state is None}
        left = [stream for stream in left if stream.files]
        shares: dict[int, list[Stream]] = {worker: [] for worker in self.crew.workers}
        for i, stream in enumerate(left):
            shares[self.crew.workers[i % len(self.crew.workers)]].append(stream)
        self._count_idle(sum(not mine for mine in shares.values()))
        saved = self.base.saved
        return {f"worker {w}": self.task(epoch, tuple(mine), saved.get(w, {})) for w, mine in shares.items()}

    def _count_idle(self, idle: int) -> None:
        """Says, once for each number of them, that workers have no files."""
        if idle and idle != self._idle_told:
            self._idle_told = idle
            self.watch.log(
                f"warning: {idle} of {len(self.crew.workers)} workers have nothing to do: a file is read by one worker; "
                f"there are {len(self.files)} for them, so split the data into more files or use fewer workers"
            )
        self.overview.idle_workers = idle

    def task(self, epoch: int, streams: tuple[Stream, ...], saved: dict[str, bytes]) -> Assignment:
        """What a worker is told."""
        return Assignment(epoch, streams, saved)

    def more(self) -> dict[str, Any]:
        """What a checkpoint keeps besides what every run has."""
        return {}

    def _files_of(self, stream: int, count: int) -> tuple[str, ...]:
        if self.shares is not None and len(self.shares) == count:
            return tuple(self.shares[stream])
        return tuple(split_files(self.files, stream, count))

    def advance(self, shares: list[list[str]]) -> None:
        """One epoch over these files, worker i taking share i, and a checkpoint; whatever is lost meanwhile, it is trained once."""
        self.shares, self.files = shares, [file for share in shares for file in share]
        aim = self.progress.epoch + 1
        while self.progress.epoch < aim:
            begin = time.monotonic()
            try:
                self.epoch()
                self.trained_s += time.monotonic() - begin
                if self.signal is not None:
                    return
                self._end_epoch()
                self.cuts.now(aim - 1)
            except LostError as loss:
                self.recovery.roll_back(loss)

    def epoch(self) -> None:
        """Trains what is left of an epoch."""
        self.overview.epoch = self.progress.epoch
        tasks = self._assign()
        self.crew.tell(self.crew.shards, "next_epoch")
        self.base.saved = {}  # the workers have it
        self.cuts.note()
        calls = {name: self.crew.fleet.actors[name].train.remote(task) for name, task in tasks.items()}
        while calls and self.signal is None and not self.progress.stopped_early:
            try:
                self._attend(calls)
            except LostError as loss:
                if self.config.cluster.on_loss == "rollback" or self.signal is not None:
                    raise
                self.recovery.go_on_without(loss, calls, tasks)

    def _attend(self, calls: Calls) -> None:
        """One look at everything: who has ended, how far the others are, whether a cut is due or complete."""
        ready, _ = self.crew.fleet.ray.wait(list(calls.values()), timeout=TICK_S)
        for name in [name for name, call in calls.items() if call in ready]:
            self.overview.workers[name] = self.crew.result(name, calls[name])
            del calls[name]
        self.crew.feel()
        self.watch.tick(self.overview)  # type: ignore[arg-type]
        if self.cuts.work is not None:
            self.cuts.collect()
        elif calls and self.cuts.due():
            self.cuts.begin(None)

    def _end_epoch(self) -> None:
        self.crew.tell(self.crew.shards, "end_epoch")
        epoch, steps = self.progress.epoch, self.crew.count()
        if self.overview.rows == 0:
            raise DataError("there are no rows to train on", "check data.train: the files are empty")
        found = self.merged(self.crew.tell(self.crew.trainers, "metrics").values())
        self.progress.train = dict(found.results())
        facts = {"epoch": epoch, "step": steps, **self.progress.train}
        self.watch.end_epoch(self.overview, facts, self.trained_s)  # type: ignore[arg-type]
        self.watch.log(f"epoch {epoch} done: step {steps:,}, {words(self.progress.train)}")
        self.progress.epoch += 1
        if not self.config.train.metrics.continuous:
            self.reset_metrics()
        if self.exams.files and self.progress.evaluated_at != steps:
            self.exams.take(self.progress, epoch, steps)
        if self.shares is None and not self._over() and self.config.run.keep_epochs:
            self.cuts.now(epoch)

    def reset_metrics(self) -> None:
        self.crew.tell(self.crew.trainers, "reset_metrics")
        self._started = bases.metrics_of(self.config, self.schema).state()
        self.overview.base["buckets"] = None

    def deliver(self, number: int, final: Path) -> str:
        """Sees to it that a checkpoint is there for all hosts, and at the URL of the run; how they know it."""
        if self.copy is None:
            return str(final)
        url = self._seen_by_all(str(final))
        if self.config.cluster.address is not None:
            self.crew.tell(self.crew.shards, "deliver", number, url, timeout_s=3600.0)
            self.crew.gather_logs(self.logs)
        self.copy.push()
        return str(url)

    def merged(self, states: Iterable[dict[str, Any]]) -> Metrics:
        """The metrics that workers started from, with what they have seen since; the sliding AUC is of the last batches of each."""
        total = bases.metrics_of(self.config, self.schema)
        total.restore(self._started)
        windows = []
        for state in states:
            mine = bases.metrics_of(self.config, self.schema)
            mine.restore(state)
            total.merge(mine)
            windows.append(bases.last_batches(mine))
        seen = [window for window in windows if window is not None]
        if seen:
            bases.set_last_batches(total, np.sum(seen, axis=0))
        return total

    def stop(self, number: int) -> None:
        """Asks the run to end, as a signal does."""
        self.signal, self._stop_by = number, time.monotonic() + self.config.cluster.stop_timeout
        if self.idle:
            leave(number)

    def _check(self) -> None:
        """Ends waiting that a signal has made pointless."""
        if self.signal is None:
            return
        if self.waits:
            raise StoppedError("stopped by a signal")
        if time.monotonic() > self._stop_by:
            limit = self.config.cluster.stop_timeout
            raise LostError("the last checkpoint", f"not there {limit:.0f} s after the signal (cluster.stop_timeout)")

    def close(self) -> None:
        """Ends all processes of the run; within a few seconds, where a signal asked for it."""
        limit = None
        if self.signal is not None:
            limit = threading.Timer(END_LIMIT_S, self._force, [self.signal])
            limit.daemon = True
            limit.start()
        try:
            self.crew.stop()
        finally:
            if limit is not None:
                limit.cancel()
            self.watch.close()

    def _force(self, number: int) -> None:
        process_tree.force(number, self.crew.fleet.roots())

    def interruptible(self, tell: Callable[[int], None] = lambda number: None) -> AbstractContextManager[None]:
        """The first SIGTERM, SIGINT or SIGHUP leads to a checkpoint and the end; the second does what it always does."""

        def stop(number: int) -> None:
            tell(number)
            self.stop(number)

        return interruptible(stop, lambda: self.config.cluster.stop_timeout + END_LIMIT_S, self._force)


def row_files(shards: int) -> int:
    """Row files of a checkpoint: the fewest, from 8 on, of which each shard has whole ones.

    >>> row_files(2), row_files(3), row_files(16)
    (8, 32, 16)
    """
    edges = [checkpoint.span(shard, shards)[0] for shard in range(shards)]
    return next(n for n in (8, 16, 32) if all(edge * n % 1024 == 0 for edge in edges))


def run(
    config: Config,
    schema: Schema,
    files: Sequence[str],
    test: Sequence[str],
    watch: ClusterWatch,
    prepare: Callable[[Driver], None],
) -> Driver:
    """Trains; `prepare` says where from. The driver that did it, with its processes ended."""
    driver = Driver(config, schema, files, test, watch)
    prepare(driver)
    with driver.interruptible():
        try:
            driver.start()
            driver.train()
            watch.log(closing_table(driver.overview, driver.crew.fleet.facts, driver.trained_s))
            ended = closing_facts(driver.overview, driver.trained_s)
            watch.record("cluster", {"epoch": driver.overview.epoch, "rows": driver.base.rows, **ended})
        except LostError as loss:
            raise ClusterError(f"lost {loss}", f"see {driver.logs}") from None
        finally:
            driver.close()
    return driver
