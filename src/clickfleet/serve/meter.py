"""Counters and latencies of a worker, cheap to update; added up over the workers and over restarts through small files."""

import json
import os
import time
from bisect import bisect_left
from collections import deque
from pathlib import Path
from typing import Any

from clickfleet.serve.batching import Counts

EDGES = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
"""Upper ends of the latency buckets, in seconds."""

Facts = dict[str, Any]
_RECENT = 512


class Meter:
    """What one worker counted; `path` keeps it for the others and for its successor."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.replies: dict[tuple[str, int], int] = {}
        self.latency: dict[str, list[float]] = {}  # per route: one count per edge, one above all, the sum
        self.recent: deque[tuple[float, float]] = deque(maxlen=_RECENT)  # when, how long
        self.extra: dict[str, float] = {}
        self._before = _load(path)

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

    def facts(self, counts: Counts) -> Facts:
        """Everything counted so far in this worker's place."""
        mine: Facts = {
            "replies": {f"{route} {status}": n for (route, status), n in self.replies.items()},
            "latency": self.latency,
            "counts": {
                "batches": counts.batches,
                "rows": counts.rows,
                "requests": counts.requests,
                "refused": counts.refused,
                "late": counts.late,
                "compute_s": counts.compute_s,
                **self.extra,
            },
        }
        return add(mine, self._before)

    def save(self, counts: Counts) -> None:
        hidden = self.path.with_suffix(".writing")
        hidden.write_text(json.dumps(self.facts(counts) | {"pid": os.getpid(), "recent": self.summary()}))
        hidden.replace(self.path)

    def summary(self) -> Facts:
        """Latency and throughput of the last replies."""
        now = time.monotonic()
        window = [(at, took) for at, took in self.recent if now - at < 10]
        if not window:
            return {"replies_per_s": 0.0, "p50_ms": None, "p99_ms": None}
        taken = sorted(took for _, took in window)
        span = max(now - window[0][0], 0.5)
        return {
            "replies_per_s": len(window) / span,
            "p50_ms": 1e3 * taken[len(taken) // 2],
            "p99_ms": 1e3 * taken[min(len(taken) - 1, len(taken) * 99 // 100)],
        }


def _load(path: Path) -> Facts:
    try:
        facts: Facts = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return facts


def add(a: Facts, b: Facts) -> Facts:
    """The sums of two workers' facts."""
    sums: Facts = {"replies": dict(a["replies"]), "latency": dict(a["latency"]), "counts": dict(a["counts"])}
    for name in ("replies", "counts"):
        for key, n in b.get(name, {}).items():
            sums[name][key] = sums[name].get(key, 0) + n
    for route, row in b.get("latency", {}).items():
        mine = sums["latency"].get(route, [0.0] * len(row))
        sums["latency"][route] = [x + y for x, y in zip(mine, row, strict=True)]
    return sums


def together(state: Path, mine: Facts, my_path: Path) -> tuple[Facts, list[Facts]]:
    """The sums over all workers, and what each of the others told about its last replies."""
    recent = []
    for path in sorted(state.glob("worker-*.json")):
        if path == my_path:
            continue
        other = _load(path)
        if other:
            mine = add(mine, other)
            recent.append(other.get("recent", {}))
    return mine, recent


def exposition(facts: Facts, gauges: dict[str, tuple[str, float]]) -> bytes:
    """The text that Prometheus reads."""
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

    class All:
        def collect(self) -> Any:
            replies = CounterMetricFamily(
                "clickfleet_replies", "Replies by route and status.", labels=["route", "status"]
            )
            for key, n in sorted(facts["replies"].items()):
                route, _, status = key.rpartition(" ")
                replies.add_metric([route, status], n)
            yield replies
            times = HistogramMetricFamily("clickfleet_reply_seconds", "Time from request to reply.", labels=["route"])
            for route, row in sorted(facts["latency"].items()):
                below, buckets = 0.0, []
                for edge, n in zip([*map(str, EDGES), "+Inf"], row[:-1], strict=True):
                    below += n
                    buckets.append((edge, below))
                times.add_metric([route], buckets, row[-1])
            yield times
            for name, n in sorted(facts["counts"].items()):
                total = CounterMetricFamily(f"clickfleet_{name}", _COUNTS.get(name, name))
                total.add_metric([], n)
                yield total
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
    "switches": "Times a new version was taken over.",
}
