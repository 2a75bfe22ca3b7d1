"""A program that runs in every worker of a cluster. Worker 0 leads the job; all workers get its results."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, cast

from clickfleet.cluster import Role, nodes
from clickfleet.cluster.assignments import Share
from clickfleet.cluster.driver import Driver
from clickfleet.cluster.evaluate import HeldOutFiles
from clickfleet.cluster.feed_folder import FeedFolder
from clickfleet.cluster.processes import ProcessFailedError, StoppedError, call_result
from clickfleet.cluster.ray_runtime import ray_module
from clickfleet.cluster.status import ClusterMonitor
from clickfleet.config.load import Config
from clickfleet.data import files as file_tools
from clickfleet.data.batch import Batch
from clickfleet.data.dataset import Data
from clickfleet.data.files import expand
from clickfleet.data.guess import is_files
from clickfleet.data.memory import Feed
from clickfleet.data.reader import Reader
from clickfleet.data.schema import Schema
from clickfleet.errors import ClusterError, ConfigError
from clickfleet.online import manual
from clickfleet.online.program import Kind, ProgramEpoch, ProgramJob, check_kind
from clickfleet.store import checkpoint, mirror
from clickfleet.training.predict import Results
from clickfleet.training.run import open_run
from clickfleet.training.signals import leave

TICK_S, CHECK_S = 0.05, 10.0
"""Time between two polls for the values of a collective call, and between two checks for workers that have left."""
POLL_S = 0.5
"""Time between two polls of all processes while a program trains batch by batch."""
T = TypeVar("T")


@contextmanager
def join_cluster(config: Config, schema: Schema, role: Role | None, resume: bool, quiet: bool) -> Iterator[ProgramJob]:
    """Yield this worker's job. In a server process, serve and do not return."""

    def log(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    if role is None:
        alone = replace(config, cluster=replace(config.cluster, workers=1))
        with _running_driver(alone, schema, resume, quiet) as driver, _feeds(alone, 0) as feeds:
            yield JointJob(0, 1, alone, schema, feeds, None, driver)
        return
    config = nodes.settled(config, role)
    if role.kind == "server":
        nodes.serve(role, config, log)
        raise SystemExit(0)
    if not role.drives:
        with nodes.following(role, config, log) as watcher, _feeds(config, role.index) as feeds:
            yield JointJob(role.index, role.workers, config, schema, feeds, watcher, None)
        return
    with (
        nodes.driving(role, config, log) as watcher,
        _running_driver(config, schema, resume, quiet) as driver,
        _feeds(config, 0) as feeds,
    ):
        yield JointJob(0, role.workers, config, schema, feeds, watcher, driver)


def _feeds(config: Config, worker: int) -> FeedFolder:
    """Return where a worker puts the rows that it feeds: into the run folder or, for a run at a URL, on its own host."""
    url = mirror.url_of(config.run.dir)
    folder = Path(config.run.dir) if url is None else mirror.local_folder(url)
    if url is not None:
        file_tools.make(folder)
    return FeedFolder(folder, config, owner=f"worker-{worker}")


@contextmanager
def _running_driver(config: Config, schema: Schema, resume: bool, quiet: bool) -> Iterator[Driver]:
    """Yield a driver whose processes run until the block ends."""
    with open_run(config, config.run.dir, resume, ClusterMonitor, quiet) as run:
        valid, test = (tuple(expand(paths)) if paths else () for paths in (config.data.valid, config.data.test))
        driver = Driver(run.settings, schema, [], run.monitor, HeldOutFiles(valid, test))
        driver.mirror = run.mirror
        driver.resizing.fixed = (
            driver.resizing.fixed or "a program of its own has as many workers as it was started with"
        )
        run.begin(driver)
        with driver.interruptible():
            try:
                driver.start()
                run.monitor.start(driver.overview)
                driver.idle = True
                yield driver
            except ProcessFailedError as failure:
                raise ClusterError(str(failure), f"see {driver.logs}") from None
            finally:
                driver.idle = False
                driver.close()


class JointJob(ProgramJob):
    """One worker's view of a job on a cluster."""

    def __init__(
        self,
        index: int,
        workers: int,
        config: Config,
        schema: Schema,
        feeds: FeedFolder,
        watcher: Any,
        driver: Driver | None,
    ) -> None:
        super().__init__(index, workers, config, schema)
        self._feeds, self._watcher, self._driver = feeds, watcher, driver
        self._name = f"worker {index}"
        self._meetings = 0
        self._inside = False
        """Whether the program is in the block of an epoch, or has left it with an error."""

    def _share(self, data: Data) -> Share:
        """Return the data of this worker as files."""
        if is_files(data):
            return expand(data)
        if isinstance(data, list | tuple) and not data:
            return []
        source = self.source(data)
        return self._feeds.write("rows", source.parts()) if isinstance(source, Feed) else cast(Reader, source).files

    def train(self, data: Data) -> Results:
        shares = self._meet(self._share(data))

        def lead(driver: Driver) -> Results:
            driver.advance(shares)
            if driver.signal is not None:
                driver.end_early("resume=True")
            return _results(driver)

        results = self._on_driver(lead)
        self._feeds.clear()
        return results

    @contextmanager
    def epoch(self) -> Iterator[ProgramEpoch]:
        number = self._on_driver(lambda driver: driver.open_epoch())
        workers = None if self._driver is None else self._driver.processes.trainers
        actor = self._meet(workers)[0][self._name]
        epoch = JointEpoch(self, number, actor, self._driver)
        self._inside = True  # also after an error: the workers still wait for its batches
        yield epoch
        epoch.close()
        self._inside = False

        def lead(driver: Driver) -> Results:
            driver.close_epoch()
            return _results(driver)

        epoch.results = self._on_driver(lead)

    def evaluate(self, data: Data) -> Results:
        share = self._share(data)
        if is_files(data):
            return self._on_driver(lambda driver: driver.evaluations.evaluate(share))
        shares = self._meet(share)
        results = self._on_driver(lambda driver: driver.evaluations.evaluate(None, shares))
        self._feeds.clear()
        return results

    def save(self, kind: Kind = "checkpoint") -> str:
        check_kind(kind)

        def lead(driver: Driver) -> str:
            driver.checkpoints.last()
            if kind == "checkpoint":
                return mirror.origin(str(driver.path)) or str(driver.path)
            done = manual.publish(driver.folder.parent, kind, locked=True, trust=True)
            driver.resume(checkpoint.latest(driver.folder))  # rows that were published no longer count as changed
            driver.processes.generation += 1
            driver.begin()
            if driver.mirror is not None:
                driver.mirror.push()
            return str(done["entry"])

        return self._on_driver(lead)

    def shrink(self) -> int:
        return self._on_driver(lambda driver: driver.shrink())

    def _on_driver(self, lead: Callable[[Driver], T]) -> T:
        """Call `lead` on worker 0 and return its result to all workers. If it fails, all fail."""
        self._meet(None)
        if self._driver is None:
            result, problem = self._meet(None)[0]
            if problem:
                raise ClusterError(f"worker 0 failed: {problem}")
            return cast(T, result)
        self._driver.idle = False
        try:
            try:
                result = lead(self._driver)
            except StoppedError as stopped:
                self._driver.end_early("resume=True", str(stopped))
        except BaseException as error:
            by_signal = isinstance(error, KeyboardInterrupt | SystemExit)
            self._bring((None, "stopped by a signal" if by_signal else f"{type(error).__name__}: {error}"))
            raise
        finally:
            self._driver.idle = True
        if self._driver.signal is not None:  # it came too late to stop this call
            leave(self._driver.signal)
        self._meet((result, ""))
        return result

    def _bring(self, value: Any) -> None:
        if self._inside:
            raise ConfigError(
                "this call is not possible in the block of an epoch, or after an error in it",
                "end the block of `with job.epoch():` first",
            )
        self._meetings += 1
        if self._watcher is not None:
            nodes.bring(self._watcher, self._meetings, self.worker_index, value)

    def _meet(self, value: Any) -> list[Any]:
        """Exchange a value with all workers; return all values. Raise an error that names workers that have left."""
        self._bring(value)
        if self._watcher is None:
            return [value]
        checked_at = time.monotonic()
        while True:
            values, missing = nodes.brought(self._watcher, self._meetings, self._name)
            if not missing:
                return list(values)
            if time.monotonic() - checked_at > CHECK_S:
                checked_at = time.monotonic()
                if gone := [worker for worker in nodes.gone(self.worker_num) if worker in missing]:
                    names = ", ".join(f"worker {worker}" for worker in gone)
                    raise ClusterError(f"{names} left the job while worker {self.worker_index} waited for it")
            time.sleep(TICK_S)


def _results(driver: Driver) -> Results:
    return {**(driver.progress.train or {}), "step": driver.start_state.steps, "test": driver.progress.test}


class JointEpoch(ProgramEpoch):
    """An epoch of a job on a cluster. The process of this worker trains the batches that the program hands to it."""

    def __init__(self, job: JointJob, number: int, actor: Any, driver: Driver | None) -> None:
        super().__init__(job, number)
        self._actor, self._driver, self._name = actor, driver, f"worker {job.worker_index}"
        self._workers, self._polled = job.worker_num, time.monotonic()

    def _train(self, batch: Batch) -> tuple[float, float]:
        loss, weight = self._wait(self._actor.train_batch.remote(batch, self.number))
        return loss, weight

    def metrics(self) -> Results:
        return cast(Results, self._wait(self._actor.results.remote()))

    def close(self) -> None:
        super().close()
        self._wait(self._actor.end_batches.remote(self.number))

    def _wait(self, call: Any) -> Any:
        """Return the result of a call of this worker's process. Meanwhile worker 0 polls all processes."""
        ray = ray_module()
        while True:
            ready, _ = ray.wait([call], timeout=POLL_S)
            try:
                if self._driver is not None and time.monotonic() - self._polled > POLL_S:
                    self._polled = time.monotonic()
                    self._driver.poll_epoch()
                if ready:
                    return self._result(call)
            except ProcessFailedError as failure:
                raise ClusterError(
                    f"{failure}; what was trained since the last checkpoint is lost",
                    "start the program again with resume=True: it continues from the last checkpoint",
                ) from None
            if self._driver is None and time.monotonic() - self._polled > CHECK_S:
                self._polled = time.monotonic()
                if gone := nodes.gone(self._workers):
                    names = ", ".join(f"worker {worker}" for worker in gone)
                    raise ClusterError(f"{names} left the job while {self._name} trained a batch")

    def _result(self, call: Any) -> Any:
        return call_result(ray_module(), self._name, call)
