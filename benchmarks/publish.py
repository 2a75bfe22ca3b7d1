"""What one more entry costs as the published log grows; all ratios of one run.

python benchmarks/publish.py [--entries 2000] [--json]

A tiny model publishes a delta of 20 rows again and again through the code of online learning: guard, entry, log, done
files, retention. The time of an entry early in the log is compared with that of one late in it, in one chain and with
a base after every 500 deltas, which is the default. `starting` is the time in which a consumer that starts then reads
the log and applies its newest chain.
"""

from __future__ import annotations

import argparse
import json
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

EARLY, WINDOW = 10, 20
SCHEMA = Schema(dense=(Dense("price"),), slots=(Slot("user"), Slot("ad")))


def publish(folder: Path, entries: int, every: int | None) -> dict[str, Any]:
    raw = {"model": {"name": "deepfm", "hidden": [4]}, "table": {"dim": 4}, "run": {"dir": str(folder)}}
    config = configure({**raw, "publish": {"base_every_deltas": every}})
    learner = Learner(config, SCHEMA)
    release = Release(config, learner, folder, Watch(folder, quiet=True), Freshness(time.time))
    release.prepare()
    job = Job(learner, Feed([], SCHEMA), Metrics(), lambda job: False, lambda job: None)
    course, rng, took = Course(), np.random.default_rng(1), []
    for n in range(entries + WINDOW // 2):
        course.position = {"day": 20260101 + n // 1000, "pass": n % 1000 + 1}
        keys = np.unique(rng.integers(0, 5000, 20)).astype(np.uint64)
        learner.table.push(keys, np.ones((len(keys), 5), np.float32))
        job.steps = n
        begin = time.perf_counter()
        release.release("delta", job, course, judged=False)
        took.append(1e3 * (time.perf_counter() - begin))
    early, late = (statistics.median(took[n - WINDOW // 2 : n + WINDOW // 2]) for n in (EARLY + 1, entries))
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as state:
        Updater(Settings(str(folder / "published"), state)).start()
    return {
        "base_every_deltas": every,
        "ms_at_10": round(early, 2),
        f"ms_at_{entries}": round(late, 2),
        "ratio": round(late / early, 2),
        "log_bytes": (folder / "published/LOG.jsonl").stat().st_size,
        "starting_s": round(time.perf_counter() - begin, 2),
    }


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    arguments.add_argument("--entries", type=int, default=2000)
    arguments.add_argument("--json", action="store_true")
    given = arguments.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = [publish(Path(folder) / str(every), given.entries, every) for every in (None, 500)]
    for one in found:
        print(json.dumps(one) if given.json else "  ".join(f"{key} {value}" for key, value in one.items()), flush=True)


if __name__ == "__main__":
    main()
