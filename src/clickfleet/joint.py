"""A job that a program of one's own takes part in, as every worker of it does.

import clickfleet

with clickfleet.join("config.yaml", "mode.name=async") as job:
    for day in days:
        job.train(job.split_files(files_of(day)))
        clicks = job.all_reduce(count_clicks(day))
        job.save("delta")
        if job.is_first_worker:
            tell(job.evaluate(tests)["auc"], clicks)

`clickfleet launch --server_num 2 --worker_num 4 program.py` runs it in every role on this machine; elsewhere start it on every host
with the roles in the environment. A server never gets past `join`: it serves, and ends with the job. Without roles the program is the
only worker, with shards of its own.

What all workers must call, in the same order: `train`, `evaluate`, `save`, `shrink`, `barrier`, `all_reduce`.
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

from clickfleet import checkpoint, configuring, home, mirror, modes, opening
from clickfleet.cluster import joining, roles
from clickfleet.cluster.driver import Driver
from clickfleet.cluster.fleet import LostError, StoppedError
from clickfleet.cluster.overview import ClusterWatch
from clickfleet.config import Config
from clickfleet.errors import CheckpointError, ClusterError, ConfigError
from clickfleet.files import expand, split_files
from clickfleet.interrupts import leave
from clickfleet.online import by_hand

Kind = Literal["checkpoint", "base", "delta"]
TICK_S, LOOK_S = 0.05, 10.0
_JOINED: dict[str, Any] = {"sum": np.sum, "max": np.max, "min": np.min}
T = TypeVar("T")


@contextmanager
def join(
    config: Config | Mapping[str, Any] | str | Path | None = None,
    *overrides: str,
    resume: bool = False,
    quiet: bool = False,
) -> Iterator[JointJob]:
    """The job of this configuration, with this process as one of its workers; a server serves here and does not return."""
    settings, role = configuring.configure(config, overrides), roles.read()
    if not modes.distributed(settings):
        raise ConfigError(
            f"mode {settings.mode.name} runs in one process", "set mode.name=async, sync, half_async or geo"
        )
    if mirror.url_of(settings.run.dir) is None:
        settings = replace(settings, run=replace(settings.run, dir=str(Path(settings.run.dir).absolute())))

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    if role is None:
        alone = replace(settings, cluster=replace(settings.cluster, workers=1))
        with _led(alone, resume, quiet) as driver:
            yield JointJob(0, 1, None, driver)
        return
    settings = joining.settled(settings, role)
    if role.kind == "server":
        joining.serve(role, settings, say)
        raise SystemExit(0)
    if not role.drives:
        with joining.following(role, settings, say) as watcher:
            yield JointJob(role.index, role.workers, watcher, None)
        return
    with joining.driving(role, settings, say) as watcher, _led(settings, resume, quiet) as driver:
        yield JointJob(0, role.workers, watcher, driver)


@contextmanager
def _led(config: Config, resume: bool, quiet: bool) -> Iterator[Driver]:
    """A driver with its processes there, until the block ends."""
    with home.at_home(config.run.dir, resume, rows=config.cluster.address is None) as (folder, copy):
        settings = replace(config, run=replace(config.run, dir=str(folder)))
        with _led_in(settings, folder, copy, resume, quiet) as driver:
            yield driver


@contextmanager
def _led_in(config: Config, folder: Path, copy: mirror.Mirror | None, resume: bool, quiet: bool) -> Iterator[Driver]:
    checkpoints = folder / "checkpoints"
    if not resume and checkpoint.steps(checkpoints):
        raise CheckpointError(f"{folder} holds a run already", "go on with resume=True, or choose another run.dir")
    checkpoints.mkdir(parents=True, exist_ok=True)
    home.write_config(folder, config)
    test = expand(config.data.test) if config.data.test else []
    watch = ClusterWatch(folder, quiet=quiet)
    driver = Driver(config, opening.schema_of(config), [], test, watch)
    driver.copy = copy
    if copy is not None:
        copy.start(watch.log, apart=config.cluster.address is not None)
    if resume:
        driver.resume(checkpoint.latest(checkpoints))
        checkpoint.forget_after(checkpoints, driver.base.steps)
    with driver.interruptible():
        try:
            driver.start()
            watch.start(driver.overview)  # type: ignore[arg-type]
            driver.idle = True
            yield driver
        except LostError as loss:
            raise ClusterError(f"lost {loss}", f"see {driver.logs}") from None
        finally:
            driver.idle = False
            driver.close()


class JointJob:
    """One worker's view of a job; worker 0 leads it, and what it finds all workers get."""

    def __init__(self, index: int, workers: int, watcher: Any, driver: Driver | None) -> None:
        self.worker_index, self.worker_num = index, workers
        self._watcher, self._driver = watcher, driver
        self._name = f"worker {index}"
        self._meetings = 0

    @property
    def is_first_worker(self) -> bool:
        return self.worker_index == 0

    def split_files(self, files: Sequence[str]) -> list[str]:
        """The files of this worker: contiguous blocks, the first workers taking one more; give all workers the same list."""
        return split_files(files, self.worker_index, self.worker_num)

    def train(self, data: str | Path | Sequence[str | Path]) -> dict[str, Any]:
        """One pass over the files of every worker, each giving its own, and a checkpoint; metrics of all of them.

        Whatever is lost meanwhile, every row is trained on once."""
        mine = expand(data) if data else []
        shares = self._meet(mine)

        def lead(driver: Driver) -> dict[str, Any]:
            driver.advance(shares)
            if driver.signal is not None:
                driver.end_early("resume=True")
            return {**(driver.progress.train or {}), "step": driver.base.steps, "test": driver.progress.test}

        return self._led(lead)

    def evaluate(self, data: str | Path | Sequence[str | Path]) -> dict[str, Any]:
        """The metrics of the model on files, the same list for all workers, who share the work."""
        files = expand(data)
        return self._led(lambda driver: driver.exams.evaluate(files))

    def save(self, kind: Kind = "checkpoint") -> str:
        """A checkpoint of this moment, or one and a published entry; its path."""
        if kind not in ("checkpoint", "base", "delta"):
            raise ConfigError(f"there is no {kind!r} to save", "checkpoint, base or delta")

        def lead(driver: Driver) -> str:
            driver.cuts.last()
            if kind == "checkpoint":
                return mirror.origin(str(driver.path)) or str(driver.path)
            done = by_hand.publish(driver.folder.parent, kind, alone=True)
            driver.resume(checkpoint.latest(driver.folder))  # what was published is no longer changed
            driver.crew.run_epoch += 1
            driver.begin()
            if driver.copy is not None:
                driver.copy.push()
            return str(done["entry"])

        return self._led(lead)

    def shrink(self) -> int:
        """Decay of the rows' statistics, and removal of old and rare rows; how many went."""
        return self._led(
            lambda driver: int(sum(driver.crew.tell(driver.crew.shards, "shrink", timeout_s=3600.0).values()))
        )

    def barrier(self) -> None:
        """Waits for all workers."""
        self._meet(None)

    def all_reduce(self, value: Any, how: Literal["sum", "max", "min"] = "sum") -> Any:
        """One number or array out of those of all workers."""
        if how not in _JOINED:
            raise ConfigError(f"there is no all_reduce by {how!r}", "sum, max or min")
        found = np.asarray(_JOINED[how](np.stack([np.asarray(each) for each in self._meet(value)]), axis=0))
        return found if found.ndim else found.item()

    def _led(self, lead: Callable[[Driver], T]) -> T:
        """What worker 0 makes of it, for all; its failure is everyone's."""
        self._meet(None)
        if self._driver is None:
            found, problem = self._meet(None)[0]
            if problem:
                raise ClusterError(f"worker 0, which leads: {problem}")
            return cast(T, found)
        self._driver.idle = False
        try:
            try:
                made = lead(self._driver)
            except StoppedError as stopped:
                self._driver.end_early("resume=True", str(stopped))
        except BaseException as error:
            by_signal = isinstance(error, KeyboardInterrupt | SystemExit)
            self._bring((None, "stopped by a signal" if by_signal else f"{type(error).__name__}: {error}"))
            raise
        finally:
            self._driver.idle = True
        if self._driver.signal is not None:  # it came too late to end this
            leave(self._driver.signal)
        self._meet((made, ""))
        return made

    def _bring(self, value: Any) -> None:
        self._meetings += 1
        if self._watcher is not None:
            import ray

            joining.ask(ray, self._watcher.bring.remote(self._meetings, self.worker_index, value), self._name)

    def _meet(self, value: Any) -> list[Any]:
        """What all workers bring, once all are there; who is gone is named."""
        self._bring(value)
        if self._watcher is None:
            return [value]
        import ray

        looked = time.monotonic()
        while True:
            values, missing = joining.ask(ray, self._watcher.brought.remote(self._meetings), self._name)
            if not missing:
                return list(values)
            if time.monotonic() - looked > LOOK_S:
                looked = time.monotonic()
                if lost := [worker for worker in joining.gone(ray, self.worker_num) if worker in missing]:
                    names = ", ".join(f"worker {worker}" for worker in lost)
                    raise ClusterError(f"{names} left the job while worker {self.worker_index} waited for it")
            time.sleep(TICK_S)
