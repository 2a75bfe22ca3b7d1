"""Measure what one more entry costs as the published log grows.

python benchmarks/publish.py [--entries 2000] [--json]

A tiny model publishes deltas of 20 rows through the code of online learning: entry, log, done files, retention. A log
of 10 entries and a long log get one more entry in turn, so that both see the same disk and the same load. `ratio`
compares their median wall-clock times, `cpu_ratio` their CPU times. The long log is first a single chain, then one with
a base after every 500 deltas, which is the default. `starting_s` is the time a new consumer needs to apply it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from clickfleet.config.check import configure
from clickfleet.data.schema import Dense, Schema, Slot
from clickfleet.online.freshness import Freshness
from clickfleet.online.publisher import PassPublisher
from clickfleet.online.session import OnlinePosition
from clickfleet.serve.supervisor import Settings
from clickfleet.serve.updater import Updater
from clickfleet.training.learner import Learner
from clickfleet.training.monitor import Monitor

EARLY, ROUNDS = 10, 20
SCHEMA = Schema(dense=(Dense("price"),), slots=(Slot("user"), Slot("ad")))


class Trainer:
    """A model that publishes on request."""

    def __init__(self, folder: Path, every: int | None) -> None:
        raw = {"model": {"name": "deepfm", "hidden": [4]}, "table": {"dim": 4}, "run": {"dir": str(folder)}}
        config = configure({**raw, "publish": {"base_every_deltas": every}})
        self.learner, self.folder = Learner(config, SCHEMA), folder
        folder.mkdir(parents=True)
        for made in folder.parent.parent.glob("*/*/graph.onnx"):  # export the network only once
            shutil.copy(made, folder)
            break
        self.release = PassPublisher(config, self.learner, folder, Monitor(folder, quiet=True), Freshness(time.time))
        self.release.prepare()
        self.course, self.entries, self._rng = OnlinePosition(), 0, np.random.default_rng(1)

    def publish(self) -> tuple[float, float]:
        """Publish one more delta. Return its wall-clock and CPU milliseconds."""
        self.course.position = {"day": 20260101 + self.entries // 1000, "pass": self.entries % 1000 + 1}
        self.entries += 1
        keys = np.unique(self._rng.integers(0, 5000, 20)).astype(np.uint64)
        self.learner.table.push(keys, np.ones((len(keys), 5), np.float32))
        begin, used = time.perf_counter(), time.process_time()
        self.release.release("delta", self.entries, self.course, judged=False)
        return 1e3 * (time.perf_counter() - begin), 1e3 * (time.process_time() - used)


def grow(trainer: Trainer, entries: int) -> None:
    """Publish without waiting for the disk."""
    real, os.fsync = os.fsync, lambda handle: None  # type: ignore[assignment]
    try:
        while trainer.entries < entries:
            trainer.publish()
    finally:
        os.fsync = real


def compare(folder: Path, entries: int, every: int | None) -> dict[str, Any]:
    short, long = Trainer(folder / "short", every), Trainer(folder / "long", every)
    grow(short, EARLY)
    grow(long, entries)
    times = [(short.publish(), long.publish()) for _ in range(ROUNDS)]
    early, late, early_cpu, late_cpu = (
        statistics.median([one[which][kind] for one in times]) for kind, which in ((0, 0), (0, 1), (1, 0), (1, 1))
    )
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as state:
        Updater(Settings(str(long.folder / "published"), state)).start()
    return {
        "base_every_deltas": every,
        f"ms_at_{EARLY}": round(early, 2),
        f"ms_at_{entries}": round(late, 2),
        "ratio": round(late / early, 2),
        "cpu_ratio": round(late_cpu / early_cpu, 2),
        "log_bytes": (long.folder / "published/LOG.jsonl").stat().st_size,
        "starting_s": round(time.perf_counter() - begin, 2),
    }


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    arguments.add_argument("--entries", type=int, default=2000)
    arguments.add_argument("--json", action="store_true")
    given = arguments.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = [compare(Path(folder) / str(every), given.entries, every) for every in (None, 500)]
    for one in found:
        print(json.dumps(one) if given.json else "  ".join(f"{key} {value}" for key, value in one.items()), flush=True)


if __name__ == "__main__":
    main()
