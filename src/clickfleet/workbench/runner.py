"""Train runs in worker processes, one run at a time in each. A run that fails or dies does not affect the others."""

from __future__ import annotations

import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from clickfleet.config.load import Config, checked, dump, read
from clickfleet.errors import CheckpointError, ClickfleetError
from clickfleet.store import atomic
from clickfleet.store.lock import Lock
from clickfleet.store.table import width_facts

Facts = dict[str, Any]
"""A JSON object."""
STOP_S = 60.0
"""Seconds that a stopped process has to write its checkpoint."""


@dataclass(frozen=True)
class Order:
    """A run to train: its folder is config.run.dir."""

    name: str
    config: Config

    @property
    def folder(self) -> Path:
        return Path(self.config.run.dir)


@dataclass(frozen=True)
class RunResult:
    """The metrics of a finished run."""

    train_loss: float | None
    train_auc: float | None
    value: float | None
    """train.monitor on validation data, which ranks runs."""
    valid_auc: float | None
    valid_logloss: float | None
    test_auc: float | None
    logloss: float | None
    """On test data."""
    rows_per_s: float | None
    parameters: int
    """Dense parameters and the weights of all table rows."""
    dense_parameters: int
    table_rows: int
    seconds: float
    rows: int
    resumed: bool
    checkpoint: str | None
    others: Facts = field(default_factory=dict)
    """The AUC (or RMSE) of the labels after the first, on test data."""


@dataclass(frozen=True)
class RunEnd:
    """How a run ended: with a result, with an error, or stopped by a signal."""

    result: RunResult | None = None
    error: str | None = None
    stopped: int | None = None

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> RunEnd:
        raw = json.loads(text)
        return cls(raw["result"] and RunResult(**raw["result"]), raw["error"], raw["stopped"])


Ends = queue.Queue["tuple[_Process, RunEnd | None]"]


class _Process:
    """A worker process and the run it trains."""

    def __init__(self, ends: Ends) -> None:
        self.order: Order | None = None
        self.process = subprocess.Popen(
            [sys.executable, "-m", "clickfleet.workbench.runner"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C reaches only the parent, which then stops its processes
            env={**os.environ, "PYTHONWARNINGS": "ignore"},
        )
        threading.Thread(target=self._listen, args=(ends,), name="clickfleet-runner", daemon=True).start()

    def _listen(self, ends: Ends) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                ends.put((self, RunEnd.from_json(line)))
        ends.put((self, None))  # the process has exited

    def begin(self, order: Order) -> None:
        assert self.process.stdin is not None
        self.order = order
        self.process.stdin.write(json.dumps({"config": dump(order.config)}).encode() + b"\n")
        self.process.stdin.flush()


class TrialRunner:
    """Train runs in up to `jobs` processes: `start` a run, poll those `finished`, `stop` one early."""

    def __init__(self, jobs: int) -> None:
        self.jobs = jobs
        self._processes: list[_Process] = []
        self._ends: Ends = queue.Queue()

    @property
    def busy(self) -> list[Order]:
        return [one.order for one in self._processes if one.order is not None]

    @property
    def free(self) -> int:
        return self.jobs - len(self.busy)

    def start(self, order: Order) -> None:
        """Train a run now, from its newest checkpoint if it has one."""
        assert self.free
        while True:
            idle = next((one for one in self._processes if one.order is None), None)
            if idle is None:
                idle = _Process(self._ends)
                self._processes.append(idle)
            try:
                return idle.begin(order)
            except OSError:  # the idle process died
                self._processes.remove(idle)
                idle.order = None

    def finished(self, timeout_s: float) -> Iterator[tuple[Order, RunEnd]]:
        """Yield the runs that have ended. Wait at most `timeout_s` for the first."""
        wait = timeout_s
        while True:
            try:
                process, end = self._ends.get(timeout=wait) if wait else self._ends.get_nowait()
            except queue.Empty:
                return
            order, process.order = process.order, None
            if end is None:
                code = process.process.wait()
                if process in self._processes:
                    self._processes.remove(process)
                end = RunEnd(error=f"its process {_exit_text(code)}; see {order.folder}/log.txt" if order else "")
            if order is not None:
                wait = 0.0
                yield order, end

    def stop(self, order: Order) -> None:
        """Make a run write a checkpoint and end."""
        for one in self._processes:
            if one.order == order:
                one.process.send_signal(signal.SIGTERM)

    def stop_all(self) -> list[tuple[Order, RunEnd]]:
        """Stop all runs. Return how they ended."""
        ends: list[tuple[Order, RunEnd]] = []
        deadline = time.monotonic() + STOP_S
        while self.busy and time.monotonic() < deadline:
            for order in self.busy:  # repeatedly: a run that is starting ignores the signal
                self.stop(order)
            ends += self.finished(1.0)
        return ends

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.busy:
            self.stop_all()
        for one in self._processes:
            assert one.process.stdin is not None
            one.process.stdin.close()  # the end of its input ends the process
        for one in self._processes:
            try:
                one.process.wait(5 if one.order is None else 0)
            except subprocess.TimeoutExpired:
                one.process.kill()
                one.process.wait()


def _exit_text(code: int) -> str:
    return f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"


def count(n: int, noun: str) -> str:
    """
    >>> count(1, "run"), count(2, "run")
    ('1 run', '2 runs')
    """
    return f"{n:,} {noun}{'' if n == 1 else 's'}"


def share_cores(config: Config, runs: int, jobs: int | None, distributed: bool = False) -> tuple[int, int]:
    """Return how many runs train at a time, and the threads of each."""
    cores = len(os.sched_getaffinity(0))
    each = config.train.threads
    if jobs is None:
        jobs = 1 if distributed else max(1, min(runs, cores // (each or 1), 8))
    return jobs, each or max(1, cores // jobs)


def remove_results(folder: Path, mark: str, names: Sequence[str]) -> None:
    """Remove the results of an earlier call from a folder. Files of others stay. `mark` is a pattern of files that only we write."""
    if not any(os.path.lexists(folder / name) for name in names):
        return
    if any((folder / name).is_symlink() for name in names) or not any(folder.glob(mark)):
        raise CheckpointError(f"{folder} is not replaced: it holds no results of this command", "choose another --out")
    for name in names:
        if (folder / name).exists():
            atomic.remove(folder / name)


POLL_S = 0.5
LOCK_S = 60.0
"""Seconds to wait for a process of a killed comparison that still writes its last checkpoint."""


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # keep the output of a model out of the answers
    signal.signal(signal.SIGTERM, lambda *_: None)  # SIGTERM stops only training; the end of the input ends the process
    threading.Thread(target=_stop_without_parent, args=(os.getppid(),), daemon=True).start()
    for line in sys.stdin:
        config = checked(Config, read(json.loads(line)["config"], "the order"), source="the order")
        answers.write(attempt(config).to_json() + "\n")
        answers.flush()


def _stop_without_parent(parent: int) -> None:
    """Stop training, with a checkpoint, when the parent process has died."""
    while True:
        time.sleep(POLL_S)
        if os.getppid() != parent:  # repeatedly: a run that is starting ignores the signal
            os.kill(os.getpid(), signal.SIGTERM)


def attempt(config: Config) -> RunEnd:
    """Train a run; turn an exception into an error."""
    folder = Path(config.run.dir)
    try:
        with Lock(folder / ".lock", "trains", patience_s=LOCK_S):
            pass  # wait until no other process trains in the folder
        return train(config, folder)
    except ClickfleetError as error:
        return RunEnd(error=str(error))
    except Exception as error:
        (folder / "error.txt").write_text(traceback.format_exc())
        return RunEnd(error=f"{type(error).__name__}: {error}; see {folder / 'error.txt'}")


def train(config: Config, folder: Path) -> RunEnd:
    from clickfleet.store import checkpoint
    from clickfleet.training import run
    from clickfleet.training.metrics import of_other_labels, value_of
    from clickfleet.training.report.evidence import read_lines

    checkpoints = folder / "checkpoints"
    resume = (checkpoints / checkpoint.LATEST).is_file()
    if not resume:
        shutil.rmtree(checkpoints, ignore_errors=True)  # left by a run killed before its first checkpoint was complete
    done = run.train(config, resume=resume, quiet=True)
    if done.signal is not None:
        return RunEnd(stopped=int(done.signal))
    epochs = read_lines(folder)["epoch"]
    speed = done.rows_per_s or (epochs[-1]["rows_per_s"] if epochs else None)
    table = done.learner.table
    stats = table.stats()
    dense = sum(p.numel() for p in done.learner.model.parameters())
    factors = sum(width * int(one["rows"] + one.get("disk_rows", 0)) for width, one in width_facts(stats).items())
    result = RunResult(
        train_loss=done.train.get("logloss"),
        train_auc=done.train.get("auc"),
        value=None if done.valid is None else value_of(done.valid, config.train.monitor),
        valid_auc=None if done.valid is None else done.valid["auc"],
        valid_logloss=None if done.valid is None else done.valid["logloss"],
        test_auc=None if done.test is None else done.test["auc"],
        logloss=None if done.test is None else done.test["logloss"],
        others={} if done.test is None else of_other_labels(done.test),
        rows_per_s=speed,
        parameters=dense + stats["rows"] + factors,
        dense_parameters=dense,
        table_rows=stats["rows"],
        # For a resumed run: the time of all rows at its last speed.
        seconds=done.rows / speed if resume and speed else done.seconds,
        rows=done.rows,
        resumed=resume,
        checkpoint=None if done.path is None else str(done.path),
    )
    return RunEnd(result)


if __name__ == "__main__":
    main()
