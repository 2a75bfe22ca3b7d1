"""Take part in a cluster run from a program of your own, as every worker does.

import clickfleet

with clickfleet.join("config.yaml", "mode.name=async") as job:
    for day in days:
        job.train(job.split_files(files_of(day)))
        clicks = job.all_reduce(count_clicks(day))
        job.save("delta")
        if job.is_first_worker:
            print(job.evaluate(tests)["auc"], clicks)

`clickfleet launch --server_num 2 --worker_num 4 program.py` runs the program in every role on this machine. On several hosts,
start it on each with its role in the environment. A server does not return from `join`: it serves until the job ends. Without roles,
the program is the only worker and starts its own shards.

All workers must call `train`, `evaluate`, `save`, `shrink`, `barrier` and `all_reduce` in the same order.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import numpy as np

from clickfleet.cluster import nodes
from clickfleet.cluster.driver import Driver
from clickfleet.cluster.evaluate import HeldOutFiles
from clickfleet.cluster.processes import ProcessFailedError, StoppedError
from clickfleet.cluster.status import ClusterMonitor
from clickfleet.config import check
from clickfleet.config.load import Config
from clickfleet.config.plugins import extensions
from clickfleet.data import dataset
from clickfleet.data.files import expand, split_files
from clickfleet.errors import ClusterError, ConfigError
from clickfleet.online import manual
from clickfleet.store import checkpoint, mirror
from clickfleet.training import modes
from clickfleet.training.loop import leave
from clickfleet.training.predict import Results
from clickfleet.training.run import open_run

Kind = Literal["checkpoint", "base", "delta"]
TICK_S, CHECK_S = 0.05, 10.0
"""Time between two polls for the values of a collective call, and between two checks for workers that have left."""
_REDUCE: dict[str, Callable[..., Any]] = {"sum": np.sum, "max": np.max, "min": np.min}
T = TypeVar("T")


@contextmanager
def join(
    config: Config | Mapping[str, Any] | str | Path | None = None,
    *overrides: str,
    resume: bool = False,
    quiet: bool = False,
) -> Iterator[JointJob]:
    """Join the job of a configuration as one of its workers. In a server process, serve and do not return."""
    settings, role = check.configure(config, overrides), next((role() for role in extensions("role")), None)
    if not modes.distributed(settings):
        raise ConfigError(
            f"mode {settings.mode.name} runs in one process", "set mode.name=async, sync, half_async or geo"
        )
    if mirror.url_of(settings.run.dir) is None:
        settings = replace(settings, run=replace(settings.run, dir=str(Path(settings.run.dir).absolute())))

    def log(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    if role is None:
        alone = replace(settings, cluster=replace(settings.cluster, workers=1))
        with _running_driver(alone, resume, quiet) as driver:
            yield JointJob(0, 1, None, driver)
        return
    settings = nodes.settled(settings, role)
    if role.kind == "server":
        nodes.serve(role, settings, log)
        raise SystemExit(0)
    if not role.drives:
        with nodes.following(role, settings, log) as watcher:
            yield JointJob(role.index, role.workers, watcher, None)
        return
    with nodes.driving(role, settings, log) as watcher, _running_driver(settings, resume, quiet) as driver:
        yield JointJob(0, role.workers, watcher, driver)


@contextmanager
def _running_driver(config: Config, resume: bool, quiet: bool) -> Iterator[Driver]:
    """Yield a driver whose processes run until the block ends."""
    with open_run(config, config.run.dir, resume, ClusterMonitor, quiet) as run:
        valid, test = (tuple(expand(paths)) if paths else () for paths in (config.data.valid, config.data.test))
        driver = Driver(run.settings, dataset.schema_of(run.settings), [], run.monitor, HeldOutFiles(valid, test))
        driver.mirror = run.mirror
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


class JointJob:
    """One worker's view of a job. Worker 0 leads it; all workers get its results."""

    def __init__(self, index: int, workers: int, watcher: Any, driver: Driver | None) -> None:
        self.worker_index, self.worker_num = index, workers
        self._watcher, self._driver = watcher, driver
        self._name = f"worker {index}"
        self._meetings = 0

    @property
    def is_first_worker(self) -> bool:
        return self.worker_index == 0

    def split_files(self, files: Sequence[str]) -> list[str]:
        """Return the files of this worker: a contiguous block of the list, which must be the same for all workers."""
        return split_files(files, self.worker_index, self.worker_num)

    def train(self, data: str | Path | Sequence[str | Path]) -> Results:
        """Train one epoch and save a checkpoint. Every worker passes its own files. Return the metrics of all workers.

        Every row is trained once, even after failures.
        """
        shares = self._meet(expand(data) if data else [])

        def lead(driver: Driver) -> Results:
            driver.advance(shares)
            if driver.signal is not None:
                driver.end_early("resume=True")
            return {**(driver.progress.train or {}), "step": driver.start_state.steps, "test": driver.progress.test}

        return self._on_driver(lead)

    def evaluate(self, data: str | Path | Sequence[str | Path]) -> Results:
        """Return the metrics of the model on files. All workers pass the same list and share the work."""
        files = expand(data)
        return self._on_driver(lambda driver: driver.evaluations.evaluate(files))

    def save(self, kind: Kind = "checkpoint") -> str:
        """Save a checkpoint, or a checkpoint and a published entry; return its path."""
        if kind not in ("checkpoint", "base", "delta"):
            raise ConfigError(f"cannot save a {kind!r}", "use checkpoint, base or delta")

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
        """Decay the statistics of the rows and remove old and rare ones; return how many were removed."""
        return self._on_driver(
            lambda driver: int(sum(driver.processes.call(driver.processes.shards, "shrink", timeout_s=3600.0).values()))
        )

    def barrier(self) -> None:
        """Wait for all workers."""
        self._meet(None)

    def all_reduce(self, value: Any, how: Literal["sum", "max", "min"] = "sum") -> Any:
        """Combine a number or array of all workers."""
        if how not in _REDUCE:
            raise ConfigError(f"unknown all_reduce operation {how!r}", "use sum, max or min")
        values = np.stack([np.asarray(each) for each in self._meet(value)])
        reduced = np.asarray(_REDUCE[how](values, axis=0))
        return reduced if reduced.ndim else reduced.item()

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
