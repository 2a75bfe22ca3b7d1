"""Counters and latencies of a worker. Small files keep them across restarts and let any worker add them up over all workers."""

import json
import os
import time
from bisect import bisect_left
from collections import deque
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from clickfleet.data.files import replacing
from clickfleet.serve.batching import Counts

EDGES = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
"""Upper bounds of the latency buckets, in seconds."""
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

    def __add__(self, other: "Totals") -> "Totals":
        latency = dict(self.latency)
        for route, row in other.latency.items():
            before = latency.get(route, [0.0] * len(row))
            latency[route] = [x + y for x, y in zip(before, row, strict=True)]
        return Totals(_sums(self.replies, other.replies), latency, _sums(self.counts, other.counts))


def _sums(a: dict[str, _Number], b: dict[str, _Number]) -> dict[str, _Number]:
    return a | {key: a.get(key, 0) + n for key, n in b.items()}


@dataclass(frozen=True)
class RecentSummary:
    """Throughput and latency of the last replies."""

    replies_per_s: float = 0.0
    p50_ms: float | None = None
    p99_ms: float | None = None


class Meter:
    """The counters of one worker. `path` keeps them for the other workers and for its successor."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.replies: dict[tuple[str, int], int] = {}
        self.latency: dict[str, list[float]] = {}
        self.recent: deque[tuple[float, float]] = deque(maxlen=_RECENT)  # time of the reply, its duration
        self.extra: dict[str, float] = {}
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
        self.extra[name] = self.extra.get(name, 0) + by

    def totals(self, counts: Counts) -> Totals:
        """Return everything counted by this worker and its predecessors."""
        replies = {f"{route} {status}": n for (route, status), n in self.replies.items()}
        return Totals(replies, self.latency, asdict(counts) | self.extra) + self._previous

    def save(self, counts: Counts) -> None:
        facts = asdict(self.totals(counts)) | {"pid": os.getpid(), "recent": asdict(self.recent_summary())}
        with replacing(self.path) as temporary:
            temporary.write_text(json.dumps(facts))

    def recent_summary(self) -> RecentSummary:
        """Return throughput and latency of the last ten seconds."""
        now = time.monotonic()
        window = [(at, seconds) for at, seconds in self.recent if now - at < 10]
        if not window:
            return RecentSummary()
        durations = sorted(seconds for _, seconds in window)
        span = max(now - window[0][0], 0.5)
        return RecentSummary(
            len(window) / span,
            1e3 * durations[len(durations) // 2],
            1e3 * durations[min(len(durations) - 1, len(durations) * 99 // 100)],
        )


def _load(path: Path) -> tuple[Totals, RecentSummary] | None:
    """Return what a worker saved, or None if the file is missing or broken."""
    try:
        facts = json.loads(path.read_text())
        return Totals(facts["replies"], facts["latency"], facts["counts"]), RecentSummary(**facts["recent"])
    except (OSError, ValueError, TypeError, KeyError):
        return None


def over_workers(state: Path, totals: Totals, path: Path) -> tuple[Totals, list[RecentSummary]]:
    """Return the sums over all workers and the recent summaries of the others; `totals` and `path` are this worker's."""
    summaries = []
    for other in sorted(state.glob("worker-*.json")):
        if other != path and (saved := _load(other)) is not None:
            totals += saved[0]
            summaries.append(saved[1])
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
                below, buckets = 0.0, []
                for edge, count in zip([*map(str, EDGES), "+Inf"], row[:-1], strict=True):
                    below += count
                    buckets.append((edge, below))
                times.add_metric([route], buckets, row[-1])
            yield times
            for name, total in sorted(totals.counts.items()):
                family = CounterMetricFamily(f"clickfleet_{name}", _COUNTS.get(name, name))
                family.add_metric([], total)
                yield family
            for name, (text, value) in gauges.items():
                yield GaugeMetricFamily(f"clickfleet_{name}", text, value)

    registry = CollectorRegistry(auto_describe=False)
    registry.register(All())
    return generate_latest(registry)


_COUNTS = {
    "batches": "Batches scored.",
    "rows": "Rows scored.",
    "requests": "Requests scored.",
    "refused": "Requests refused because the queue was full.",
    "late": "Requests whose deadline passed in the queue.",
    "compute_s": "Seconds spent scoring.",
    "switches": "Switches to a new version.",
}
