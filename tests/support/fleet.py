"""What the tests of the cluster share."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from clickfleet.store import checkpoint, run_folder
from clickfleet.training import saving

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
