"""Measure the join: events per second on one core, and memory over a simulated week.

    python benchmarks/join.py                  both
    python benchmarks/join.py speed            a million shows with 5% clicks, from logs in files to rows in files
    python benchmarks/join.py week             a week of shows, with the window of a week
    --shows 1000000 --clicks 0.05 --rounds 3 --rate 2 --json

Events are shows and feedback. They are read from Arrow logs as a server writes them, with 39 random features each, and everything that
waits lies on disk. The time is the processor time of the process with all its threads, so a second core does not help. Commits are
flushed to the disk. In the simulated week no time passes but that of the events: memory that no file backs is compared day by day.
"""

import argparse
import json
import re
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from clickfleet.data.events import FEEDBACK, SHOWS, TIME, Feedback, feedback_columns
from clickfleet.online.join_folder import FolderJoin
from clickfleet.online.joiner import EventRound, Joiner, JoinRules
from clickfleet.online.row_join import JoinSettings
from clickfleet.store.event_log import LogWriter

START = 1_767_225_600 * 1_000_000
DAY_US = 86_400 * 1_000_000


def shows(first: int, times: Any, rng: np.random.Generator) -> pa.RecordBatch:
    """Return shows with 13 numbers and 26 categories."""
    count = len(times)
    numbers, values = rng.integers(0, 500, (count, 13)), rng.integers(0, 40_000, (count, 26))
    names = [f'"I{i}":%d' for i in range(1, 14)] + [f'"C{i}":"%08x"' for i in range(1, 27)]
    form = "{" + ",".join(names) + "}"
    columns = {
        "request": pa.array([f"q{first + i:012x}" for i in range(count)]),
        "item": pa.array(["0"] * count),
        "time": pa.array(times, TIME),
        "features": pa.array([form % (*a, *b) for a, b in zip(numbers.tolist(), values.tolist(), strict=True)]),
        "position": pa.array(np.ones(count, np.int32)),
        "model": pa.array(["deepfm"] * count),
        "sequence": pa.array(np.full(count, 7)),
        "score": pa.array(rng.random(count, np.float32)),
        "route": pa.array(["predict"] * count),
        "user": pa.nulls(count, pa.string()),
    }
    return pa.record_batch([columns[field.name] for field in SHOWS], schema=SHOWS)


def clicks(first: int, times: Any, share: float, rng: np.random.Generator) -> list[Feedback]:
    """Return feedback after delays of seconds to hours."""
    which = np.flatnonzero(rng.random(len(times)) < share)
    delays = (rng.lognormal(1.5, 1.5, len(which)) * 1e6).astype(np.int64)
    at = (times[which] + delays).tolist()
    return [
        Feedback(f"q{first + i:012x}", "0", {"click": 1.0}, f"e{first + i}", t, t)
        for i, t in zip(which.tolist(), at, strict=True)
    ]


def write(folder: Path, count: int, share: float) -> int:
    """Write logs with 5,000 shows per second. Return the number of events."""
    rng = np.random.default_rng(1)
    logs = [LogWriter(folder / "shows", SHOWS) for _ in range(2)]
    answers = LogWriter(folder / "feedback", FEEDBACK)
    waiting: list[Feedback] = []
    events = 0
    for number, first in enumerate(range(0, count, 1000)):
        times = START + (np.arange(first, first + 1000) * 200).astype(np.int64)
        logs[number % 2].write(shows(first, times, rng))
        waiting += clicks(first, times, share, rng)
        waiting.sort(key=lambda one: one.received_us)
        due = [one for one in waiting if one.received_us <= times[-1]]
        waiting = waiting[len(due) :]
        if due:
            answers.write(feedback_columns(due))
        events += 1000 + len(due)
    for log in (*logs, answers):
        log.close()
    return events


def speed(given: Any) -> dict[str, float]:
    rates, walls, counts = [], [], {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        events = write(folder, given.shows, given.clicks)
        for _ in range(given.rounds):
            work = FolderJoin(
                JoinSettings(str(folder / "shows"), str(folder / "feedback")), folder / "rows", 3600, 10.0, print
            )
            cpu, wall = time.process_time(), time.perf_counter()
            while not work.step(once=True).ended:
                pass
            work.finish()
            rates.append(events / (time.process_time() - cpu))
            walls.append(events / (time.perf_counter() - wall))
            counts = work.result().to_dict()
            work.close()
            shutil.rmtree(folder / "rows")
    return {
        "events": events,
        "events_per_cpu_s": statistics.median(rates),
        "events_per_s": statistics.median(walls),
        "rows": float(str(counts["rows"])),
        "corrections": float(str(counts["corrections"])),
    }


def anonymous() -> int:
    """Return the memory of this process that no file backs, in bytes."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(r"RssAnon:\s+(\d+)", status)[1])  # type: ignore[index]


def week(given: Any) -> dict[str, float]:
    rng = np.random.default_rng(2)
    step_us = round(1e6 / given.rate)
    per_day, memory, files = int(86_400 * given.rate), list[float](), list[int]()
    with tempfile.TemporaryDirectory() as name:
        join = Joiner(Path(name), JoinRules())
        waiting: list[Feedback] = []
        for day in range(10):  # the last ones are beyond the window of the first
            seen = []
            for start in range(0, per_day, 4096):
                first = day * per_day + start
                times = START + (first + np.arange(min(4096, per_day - start))) * step_us
                waiting += clicks(first, times, given.clicks, rng)
                waiting.sort(key=lambda one: one.received_us)
                due = [one for one in waiting if one.received_us <= times[-1]]
                waiting = waiting[len(due) :]
                join.apply(EventRound([(1, shows(first, times, rng))], [feedback_columns(due)], {1: int(times[-1])}))
                join.commit({})
                seen.append(anonymous())
            memory.append(statistics.median(seen))
            files.append(join.bytes)
            print(
                f"day {day + 1}: {len(join.shows):,} shows kept, {memory[-1] / 2**20:.0f} MiB, {files[-1] >> 20} MiB on disk",
                flush=True,
            )
        kept = len(join.shows)
        join.close()
    return {
        "shows": kept,
        "growth": memory[-1] / memory[1],
        "memory_mib": memory[-1] / 2**20,
        "disk_mib": files[-1] / 2**20,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=[], help="speed week")
    parser.add_argument("--shows", type=int, default=1_000_000)
    parser.add_argument("--clicks", type=float, default=0.05)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rate", type=float, default=2.0, help="shows per second of the simulated week")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    results: dict[str, dict[str, float]] = {}
    parts = given.parts or ["speed", "week"]
    if "speed" in parts:
        found = results["speed"] = speed(given)
        print(
            f"join     {found['events_per_cpu_s']:,.0f} events per second of one core   ≥ 50,000: "
            f"×{found['events_per_cpu_s'] / 50_000:.2f}; {found['events_per_s']:,.0f} per second of time; "
            f"{found['events']:,.0f} events, {found['corrections']:,.0f} corrections",
            flush=True,
        )
    if "week" in parts:
        found = results["week"] = week(given)
        print(
            f"week     memory of day 10 over day 2: ×{found['growth']:.3f}   flat; "
            f"{found['shows']:,.0f} shows, {found['disk_mib']:,.0f} MiB on disk"
        )
    if given.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
