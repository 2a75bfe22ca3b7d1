"""Counters and latencies of a worker. Small files keep them across restarts and let any worker add them up over all workers."""

import json
import os
import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar

from clickfleet.data.files import replacing
from clickfleet.serve.batching import Counts
from clickfleet.store.published import EventTimes

EDGES = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
"""Upper bounds of the latency buckets, in seconds."""
RECORDER = "recorder.json"
"""File with the counters of the recorder."""
AGES = (0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0, 60.0, 300.0, 3600.0)
"""Upper bounds of the buckets for the ages of events, in seconds."""
FRESH_S = 60.0
"""Seconds over which the freshness is summarised."""
_RECENT = 512
_Number = TypeVar("_Number", int, float)


@dataclass
class Totals:
    """Counters since the first start, of one worker or of several."""

    replies: dict[str, int] = field(default_factory=dict)
    """By "route status"."""
    latency: dict[str, list[float]] = field(default_factory=dict)
    """By route: one count per edge, the count above all edges, the sum of seconds."""
    counts: dict[str, float] = field(default_factory=dict)
    ages: list[float] = field(default_factory=lambda: [0.0] * (len(AGES) + 2))
    """Ages of events when they were first served: one count per edge, the count above all edges, the sum of seconds."""

    def __add__(self, other: "Totals") -> "Totals":
        latency = dict(self.latency)
        for route, row in other.latency.items():
            before = latency.get(route, [0.0] * len(row))
            latency[route] = [x + y for x, y in zip(before, row, strict=True)]
        ages = [x + y for x, y in zip(self.ages, other.ages, strict=True)]
        return Totals(_sums(self.replies, other.replies), latency, _sums(self.counts, other.counts), ages)


def _sums(a: dict[str, _Number], b: dict[str, _Number]) -> dict[str, _Number]:
    return a | {key: a.get(key, 0) + n for key, n in b.items()}


@dataclass(frozen=True)
class RecentSummary:
    """Throughput and latency of the last replies, and the ages of the events that were first served in the last minute."""

    replies_per_s: float = 0.0
    p50_ms: float | None = None
    p99_ms: float | None = None
    events: float = 0.0
    fresh_p50_s: float | None = None
    fresh_p99_s: float | None = None


class Meter:
    """The counters of one worker. `path` keeps them for the other workers and for its successor.

    Any thread may read them while the worker counts: what it iterates over are copies, each made in one call that holds the interpreter.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.replies: dict[tuple[str, int], int] = {}
        self.latency: dict[str, list[float]] = {}
        self.recent: deque[tuple[float, float]] = deque(maxlen=_RECENT)  # time of the reply, its duration
        self.extra: dict[str, float] = {}
        self._counting = threading.Lock()
        self.ages = [0.0] * (len(AGES) + 2)
        self.fresh: deque[tuple[float, float, float]] = deque()  # when events were first served, their age and number
        self.newest_event_s: float | None = None
        """Time of the newest event that is served."""
        saved = _load(path)
        self._previous = Totals() if saved is None else saved[0]

    def reply(self, route: str, status: int, seconds: float) -> None:
        key = (route, status)
        self.replies[key] = self.replies.get(key, 0) + 1
        row = self.latency.get(route)
        if row is None:
            row = self.latency[route] = [0.0] * (len(EDGES) + 2)
        row[bisect_left(EDGES, seconds)] += 1
        row[-1] += seconds
        self.recent.append((time.monotonic(), seconds))

    def count(self, name: str, by: float = 1) -> None:
        """Add to a counter, from any thread."""
        with self._counting:
            self.extra[name] = self.extra.get(name, 0) + by

    def serve_events(self, entries: Iterable[EventTimes], now: float | None = None) -> None:
        """Note that entries with these events are served from now on. Ages are by this machine's clock, and never negative."""
        now, moment = time.time() if now is None else now, time.monotonic()
        for events in entries:
            share = events["rows"] / max(len(events["times"]), 1)
            for happened in events["times"]:
                age = max(0.0, now - happened)
                self.fresh.append((moment, age, share))
                self.ages[bisect_left(AGES, age)] += share
                self.ages[-1] += age * share
            self.newest_event_s = max(self.newest_event_s or 0.0, events["newest"])
        while self.fresh and moment - self.fresh[0][0] > FRESH_S:
            self.fresh.popleft()

    def totals(self, counts: Counts) -> Totals:
        """Return everything counted by this worker and its predecessors."""
        replies = {f"{route} {status}": n for (route, status), n in self.replies.copy().items()}
        return Totals(replies, self.latency, asdict(counts) | self.extra, self.ages) + self._previous

    def save(self, counts: Counts) -> None:
        facts = asdict(self.totals(counts)) | {"pid": os.getpid(), "recent": asdict(self.recent_summary())}
        with replacing(self.path) as temporary:
            temporary.write_text(json.dumps(facts))

    def recent_summary(self) -> RecentSummary:
        """Return throughput and latency of the last ten seconds, and the freshness of the last minute."""
        now = time.monotonic()
        window = [(at, seconds) for at, seconds in self.recent.copy() if now - at < 10]
        fresh = sorted((age, events) for at, age, events in self.fresh.copy() if now - at < FRESH_S)
        ages = sum(events for _, events in fresh), _quantile(fresh, 0.5), _quantile(fresh, 0.99)
        if not window:
            return RecentSummary(0.0, None, None, *ages)
        durations = sorted(seconds for _, seconds in window)
        span = max(now - window[0][0], 0.5)
        return RecentSummary(
            len(window) / span,
            1e3 * durations[len(durations) // 2],
            1e3 * durations[min(len(durations) - 1, len(durations) * 99 // 100)],
            *ages,
        )


def _quantile(weighted: list[tuple[float, float]], share: float) -> float | None:
    """Return the smallest of sorted values that a fraction `share` of the weights does not exceed."""
    wanted, reached = share * sum(weight for _, weight in weighted), 0.0
    for value, weight in weighted:
        reached += weight
        if reached >= wanted - 1e-9:
            return round(value, 4)
    return None


def _load(path: Path) -> tuple[Totals, RecentSummary] | None:
    """Return what a worker saved, or None if the file is missing or broken."""
    try:
        facts = json.loads(path.read_text())
        totals = Totals(facts["replies"], facts["latency"], facts["counts"])
        if len(facts.get("ages", ())) == len(totals.ages):  # other versions have other edges, or none
            totals.ages = facts["ages"]
        return totals, RecentSummary(**facts["recent"])
    except (OSError, ValueError, TypeError, KeyError):
        return None


def over_workers(state: Path, totals: Totals, path: Path) -> tuple[Totals, list[RecentSummary]]:
    """Return the sums over all workers and the recent summaries of the others; `totals` and `path` are this worker's."""
    summaries = []
    for other in sorted(state.glob("worker-*.json")):
        if other != path and (saved := _load(other)) is not None:
            totals += saved[0]
            summaries.append(saved[1])
    if (saved := _load(state / RECORDER)) is not None:
        totals += saved[0]
    return totals, summaries


def exposition(totals: Totals, gauges: dict[str, tuple[str, float]]) -> bytes:
    """Return the metrics in the text format of Prometheus."""
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

    class All:
        def collect(self) -> Any:
            replies = CounterMetricFamily(
                "clickfleet_replies", "Replies by route and status.", labels=["route", "status"]
            )
            for key, n in sorted(totals.replies.items()):
                route, _, status = key.rpartition(" ")
                replies.add_metric([route, status], n)
            yield replies
            times = HistogramMetricFamily("clickfleet_reply_seconds", "Time from request to reply.", labels=["route"])
            for route, row in sorted(totals.latency.items()):
                times.add_metric([route], *_cumulated(EDGES, row))
            yield times
            if totals.ages[-1]:
                fresh = HistogramMetricFamily(
                    "clickfleet_event_to_served_seconds",
                    "Time from an event until the first entry that has learned it is served.",
                )
                fresh.add_metric([], *_cumulated(AGES, totals.ages))
                yield fresh
            for name, total in sorted(totals.counts.items()):
                family = CounterMetricFamily(f"clickfleet_{name}", _COUNTS.get(name, name))
                family.add_metric([], total)
                yield family
            for name, (text, value) in gauges.items():
                yield GaugeMetricFamily(f"clickfleet_{name}", text, value)

    registry = CollectorRegistry(auto_describe=False)
    registry.register(All())
    return generate_latest(registry)


def _cumulated(edges: Sequence[float], row: Sequence[float]) -> tuple[list[tuple[str, float]], float]:
    """Return the buckets of a histogram as Prometheus counts them, and the sum of its values."""
    counts = accumulate(row[:-1])
    return list(zip([*map(str, edges), "+Inf"], counts, strict=True)), row[-1]


_COUNTS = {
    "batches": "Batches scored.",
    "rows": "Rows scored.",
    "requests": "Requests scored.",
    "refused": "Requests refused because the queue was full.",
    "late": "Requests whose deadline passed in the queue.",
    "compute_s": "Seconds spent scoring.",
    "switches": "Switches to a new version.",
    "shows_logged": "Scored rows written to the show log.",
    "shows_dropped": "Scored rows missing in the show log: the disk was full, or the log too slow.",
    "feedback_logged": "Events of feedback acknowledged, and in the log.",
    "feedback_refused": "Events of feedback refused, because they could not be stored.",
}
