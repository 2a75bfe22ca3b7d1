"""What one more entry costs as the published log grows; all ratios of one run.

python benchmarks/publish.py [--entries 2000] [--json]

A tiny model publishes deltas of 20 rows through the code of online learning: entry, log, done files, retention. Two logs,
one of 10 entries and one of many, get one more entry in turn, so that both see the same disk and the same other work;
`ratio` is of their medians, `cpu_ratio` that of the processor's time. The long log is one chain, then one with a base
after every 500 deltas, which is the default. `starting_s` is the time in which a consumer that starts then has applied it.
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

from clickfleet.configuring import configure
from clickfleet.feeds import Feed
from clickfleet.job import Job
from clickfleet.learner import Learner
from clickfleet.metrics import Metrics
from clickfleet.online.freshness import Freshness
from clickfleet.online.release import Release
from clickfleet.online.session import Course
from clickfleet.schema import Dense, Schema, Slot
from clickfleet.serve.follow import Updater
from clickfleet.serve.settings import Settings
from clickfleet.watch import Watch

EARLY, ROUNDS = 10, 20
SCHEMA = Schema(dense=(Dense("price"),), slots=(Slot("user"), Slot("ad")))


class Trainer:
    """A model that publishes whenever it is told to."""

    def __init__(self, folder: Path, every: int | None) -> None:
        raw = {"model": {"name": "deepfm", "hidden": [4]}, "table": {"dim": 4}, "run": {"dir": str(folder)}}
        config = configure({**raw, "publish": {"base_every_deltas": every}})
        self.learner, self.folder = Learner(config, SCHEMA), folder
        folder.mkdir(parents=True)
        for made in folder.parent.parent.glob("*/*/graph.onnx"):  # exported once for all
            shutil.copy(made, folder)
            break
        self.release = Release(config, self.learner, folder, Watch(folder, quiet=True), Freshness(time.time))
        self.release.prepare()
        self.job = Job(self.learner, Feed([], SCHEMA), Metrics(), lambda job: False, lambda job: None)
        self.course, self.entries, self._rng = Course(), 0, np.random.default_rng(1)

    def publish(self) -> tuple[float, float]:
        """One more delta; milliseconds by the clock and of the processor."""
        self.course.position = {"day": 20260101 + self.entries // 1000, "pass": self.entries % 1000 + 1}
        self.entries += 1
        keys = np.unique(self._rng.integers(0, 5000, 20)).astype(np.uint64)
        self.learner.table.push(keys, np.ones((len(keys), 5), np.float32))
        self.job.steps = self.entries
        begin, used = time.perf_counter(), time.process_time()
        self.release.release("delta", self.job, self.course, judged=False)
        return 1e3 * (time.perf_counter() - begin), 1e3 * (time.process_time() - used)


def grow(trainer: Trainer, entries: int) -> None:
    """Publishes without waiting for the disk."""
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
