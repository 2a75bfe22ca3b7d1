"""What the tests of the cluster share."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from clickfleet.store import checkpoint, run_folder
from clickfleet.training import saving
from ports import free_ports

ROWS, TEST_ROWS, SLOTS = 24_000, 4_000, 26
LONG = 20
"""Rows of a batch in a run that is long enough for something to happen on the way: the driver looks twice a second."""


def shows(path: Path | str) -> float:
    """How often rows were shown in training, by the counts of the table."""
    table = saving.load(run_folder.resolve(path)).table
    with table.snapshot() as rows:
        return float(sum(part["show"].sum() for part in rows))


def processes(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "processes.json").read_text())
    return found


def when_saved(run: Path, act: Callable[[], None], checkpoints: int = 1) -> threading.Thread:
    """Acts in another thread once there are so many checkpoints."""

    def wait() -> None:
        while len(checkpoint.steps(run / "checkpoints")) < checkpoints:
            time.sleep(0.02)
        act()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread


def kill(run: Path, name: str, number: int = signal.SIGKILL) -> None:
    os.kill(processes(run)[name]["pid"], number)


def tables(a: Any, b: Any) -> tuple[float, float]:
    """The largest difference between two models' dense weights, and between their rows."""
    keys = [part["key"] for part in a.table.snapshot()]
    distinct = np.unique(np.concatenate(keys))
    rows = np.abs(a.table.pull(distinct) - b.table.pull(distinct)).max()
    return float((a.flat.values - b.flat.values).abs().max()), float(rows)


ALL = ("server 0", "server 1", "worker 0", "worker 1")


class Processes:
    """Two servers and two workers, each a process of the same command that knows its role by its environment alone."""

    def __init__(self, *words: str, folder: Path, names: tuple[str, ...] = ALL) -> None:
        self._command, self._folder = [str(Path(sys.executable).with_name("clickfleet")), *words], folder
        self.ports = free_ports(3)
        first, second, head = map(str, self.ports)
        self._job = {
            **{name: value for name, value in os.environ.items() if not name.startswith("RAY_")},
            "PADDLE_PSERVERS_IP_PORT_LIST": f"127.0.0.1:{first},127.0.0.1:{second}",
            "PADDLE_TRAINERS_NUM": "2",
            "POD_IP": "127.0.0.1",
            "CPU_NUM": "2",
            "CLICKFLEET_RAY_PORT": head,
        }
        self._roles = {
            "server 0": {"TRAINING_ROLE": "PSERVER", "PADDLE_PORT": first},
            "server 1": {"TRAINING_ROLE": "PSERVER", "PADDLE_PORT": second},
            "worker 0": {"TRAINING_ROLE": "TRAINER", "PADDLE_TRAINER_ID": "0"},
            "worker 1": {"TRAINING_ROLE": "TRAINER", "PADDLE_TRAINER_ID": "1"},
            "worker 2": {"TRAINING_ROLE": "TRAINER", "PADDLE_TRAINER_ID": "2", "PADDLE_TRAINERS_NUM": "3"},
        }
        self.running: dict[str, subprocess.Popen[str]] = {}
        for name in names:
            self.start(name)

    def start(self, name: str) -> None:
        env = {**self._job, **self._roles[name]}
        self.running[name] = subprocess.Popen(
            self._command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=self._folder
        )

    def kill(self, *names: str) -> None:
        for name in names:
            self.running[name].kill()
        for name in names:
            self.running[name].communicate()

    def ends(self) -> dict[str, str]:
        """What each said, once all have ended well."""
        try:
            said = {name: process.communicate(timeout=500)[0] for name, process in self.running.items()}
        finally:
            for process in self.running.values():
                process.kill()
        assert {name: process.returncode for name, process in self.running.items()} == dict.fromkeys(said, 0), said
        return said
