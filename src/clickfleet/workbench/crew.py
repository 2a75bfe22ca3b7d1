"""Processes that train, each one run after another; a run that fails or dies takes no other with it."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from clickfleet.config import Config, dump

Facts = dict[str, Any]
STOP_S = 60.0
"""How long a process that was told to stop may take to write its checkpoint."""


@dataclass(frozen=True)
class Order:
    """A run to train: its folder is config.run.dir."""

    name: str
    config: Config

    @property
    def folder(self) -> Path:
        return Path(self.config.run.dir)


class _Member:
    """One process and what it works on."""

    def __init__(self, told: queue.Queue[tuple[_Member, Facts | None]]) -> None:
        self.order: Order | None = None
        self.process = subprocess.Popen(
            [sys.executable, "-m", "clickfleet.workbench.trainee"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for us, who then tell it
            env={**os.environ, "PYTHONWARNINGS": "ignore"},
        )
        threading.Thread(target=self._listen, args=(told,), name="clickfleet-crew", daemon=True).start()

    def _listen(self, told: queue.Queue[tuple[_Member, Facts | None]]) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                told.put((self, json.loads(line)))
        told.put((self, None))  # it is gone

    def begin(self, order: Order) -> None:
        assert self.process.stdin is not None
        self.order = order
        self.process.stdin.write(json.dumps({"config": dump(order.config)}).encode() + b"\n")
        self.process.stdin.flush()


class Crew:
    """`start` gives a run to a free process, `finished` tells of those that ended, `stop` ends one early."""

    def __init__(self, jobs: int) -> None:
        self.jobs = jobs
        self._members: list[_Member] = []
        self._told: queue.Queue[tuple[_Member, Facts | None]] = queue.Queue()

    @property
    def busy(self) -> list[Order]:
        return [member.order for member in self._members if member.order is not None]

    @property
    def free(self) -> int:
        return self.jobs - len(self.busy)

    def start(self, order: Order) -> None:
        """Trains it now, from its newest checkpoint where it has one."""
        assert self.free
        while True:
            idle = next((member for member in self._members if member.order is None), None)
            if idle is None:
                idle = _Member(self._told)
                self._members.append(idle)
            try:
                return idle.begin(order)
            except OSError:  # it died while it had nothing to do
                self._members.remove(idle)
                idle.order = None

    def finished(self, timeout_s: float) -> Iterator[tuple[Order, Facts]]:
        """Runs that ended by now, waiting for the first at most that long; facts have an `error` where one failed."""
        wait = timeout_s
        while True:
            try:
                member, facts = self._told.get(timeout=wait) if wait else self._told.get_nowait()
            except queue.Empty:
                return
            order, member.order = member.order, None
            if facts is None:
                code = member.process.wait()
                if member in self._members:
                    self._members.remove(member)
                facts = {"error": f"its process {_words(code)}; see {order.folder}/log.txt" if order else ""}
            if order is not None:
                wait = 0.0
                yield order, facts

    def stop(self, order: Order) -> None:
        """Lets a run write a checkpoint and end."""
        for member in self._members:
            if member.order == order:
                member.process.send_signal(signal.SIGTERM)

    def stop_all(self) -> list[tuple[Order, Facts]]:
        """The same for all; what they told."""
        told: list[tuple[Order, Facts]] = []
        deadline = time.monotonic() + STOP_S
        while self.busy and time.monotonic() < deadline:
            for order in self.busy:  # again and again: one that only starts does not listen yet
                self.stop(order)
            told += self.finished(1.0)
        return told

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.busy:
            self.stop_all()
        for member in self._members:
            assert member.process.stdin is not None
            member.process.stdin.close()  # no more orders: it ends
        for member in self._members:
            try:
                member.process.wait(5 if member.order is None else 0)
            except subprocess.TimeoutExpired:
                member.process.kill()
                member.process.wait()


def _words(code: int) -> str:
    return f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"


def count(n: int, noun: str) -> str:
    """
    >>> count(1, "run"), count(2, "run")
    ('1 run', '2 runs')
    """
    return f"{n:,} {noun}{'' if n == 1 else 's'}"


def share_cores(config: Config, runs: int, jobs: int | None, distributed: bool = False) -> tuple[int, int]:
    """How many runs train at a time, and how many threads each has."""
    cores = len(os.sched_getaffinity(0))
    each = config.train.threads
    if jobs is None:
        jobs = 1 if distributed else max(1, min(runs, cores // (each or 1), 8))
    return jobs, each or max(1, cores // jobs)
