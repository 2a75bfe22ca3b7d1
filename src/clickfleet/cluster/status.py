"""The progress of a run on a cluster: one line while it trains, and a table at its end."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, NotRequired, TypedDict, cast

import numpy as np
from numpy.typing import NDArray

from clickfleet.cluster.process import ProcessFacts
from clickfleet.data.progress import amount
from clickfleet.training.metrics import TOTALS, Buckets
from clickfleet.training.monitor import PHASES, Mark, Monitor, Progress, describe


class WorkerStatus(TypedDict):
    """What a worker reports to the driver. Before its first assignment it reports only the required keys."""

    rows: int
    steps: int
    training: bool
    idle_s: float
    loss: NotRequired[float]
    weight: NotRequired[float]
    shares: NotRequired[dict[str, float]]
    buckets: NotRequired[NDArray[np.float64]]
    sliding: NotRequired[NDArray[np.float64] | None]
    queued: NotRequired[int]
    streams: NotRequired[int]
    bytes: NotRequired[int]
    bad_lines: NotRequired[int]
    sent: NotRequired[int]
    received: NotRequired[int]
    dropped: NotRequired[int]
    latencies: NotRequired[dict[str, list[float]]]
    """Median and 99th percentile in milliseconds, of pulls and of pushes."""
    cpu_s: NotRequired[float]
    trained_cpu_s: NotRequired[float]
    cpu_by_phase: NotRequired[dict[str, float]]


class ShardStatus(TypedDict):
    """What a shard reports to the driver. The other counts of `Table.stats` are in it too."""

    rows: int
    bytes: int
    full_rows: int
    pushes: int
    held: int
    staleness: float
    staleness_most: int
    dropped: int
    refused: int
    received: int
    sent: int
    cpu_s: float
    trained_cpu_s: float


class ClusterFacts(TypedDict):
    """The numbers that only a cluster has."""

    staleness: float
    queued: int
    wire_bytes: int
    losses: int
    dropped_messages: int
    refused_connections: int
    idle_workers: int


Count = Literal["steps", "rows", "bytes", "bad_lines", "queued", "sent", "received", "dropped"]
"""A number of every worker that adds up over all workers."""


class Moment(NamedTuple):
    """The number of rows trained at some time."""

    time: float
    rows: int

    def speed_until(self, later: Moment) -> float:
        """Return rows per second; 0 if no worker reported in between."""
        return (later.rows - self.rows) / (later.time - self.time) if later.time > self.time else 0.0


@dataclass
class StartCounts:
    """Counts of the state that the workers started from."""

    steps: int = 0
    rows: int = 0
    buckets: NDArray[np.float64] | None = None
    loss: float = 0.0
    weight: float = 0.0
    bytes: int = 0
    bad_lines: int = 0
    """Of streams of this epoch that ended before."""


class ClusterProgress:
    """The progress of a cluster: the sums over all workers and shards."""

    def __init__(self, thresholds: int) -> None:
        self.thresholds = thresholds
        self.workers: dict[str, WorkerStatus] = {}
        self.shards: dict[str, ShardStatus] = {}
        self.start = StartCounts()
        self.epoch = 0
        self.failures = 0
        self.idle_workers = 0
        """Workers without a file to train on in this epoch."""
        self.reported_at = time.monotonic()
        """When a worker last reported its progress."""
        self.began = self.reported_at
        """When the workers began, or began again after a change or a failure."""

    def restart(self, steps: int, rows: int, buckets: NDArray[np.float64] | None) -> None:
        """Set the counts that the workers start from."""
        self.start = StartCounts(steps, rows, buckets, self.loss, self.weight)
        self.workers = {}
        self.reported_at = self.began = time.monotonic()

    @property
    def moment(self) -> Moment:
        """The last report."""
        return Moment(self.reported_at, self.rows)

    def _sum(self, key: Count) -> int:
        return sum(facts.get(key, 0) for facts in self.workers.values())

    @property
    def steps(self) -> int:
        return int(self.start.steps + self._sum("steps"))

    @property
    def rows(self) -> int:
        return int(self.start.rows + self._sum("rows"))

    @property
    def loss(self) -> float:
        return self.start.loss + float(sum(facts.get("loss", 0) for facts in self.workers.values()))

    @property
    def weight(self) -> float:
        return self.start.weight + float(sum(facts.get("weight", 0) for facts in self.workers.values()))

    @property
    def bytes_read(self) -> int:
        return int(self.start.bytes + self._sum("bytes"))

    @property
    def bad_lines(self) -> int:
        return int(self.start.bad_lines + self._sum("bad_lines"))

    @property
    def buckets(self) -> Buckets:
        """What all workers have scored since the epoch began."""
        buckets = Buckets(self.thresholds)
        parts = [facts["buckets"] for facts in self.workers.values() if "buckets" in facts]
        if self.start.buckets is not None:
            parts.append(self.start.buckets)
        if parts:
            buckets.restore({"buckets": np.sum(parts, axis=0)})
        return buckets

    @property
    def auc(self) -> float:
        return self.buckets.auc

    @property
    def sliding_auc(self) -> float | None:
        """The AUC of the last batches of all workers together."""
        windows = [window for facts in self.workers.values() if (window := facts.get("sliding")) is not None]
        if not windows:
            return None
        together = Buckets(self.thresholds)
        together.restore({"buckets": np.sum(windows, axis=0)})
        return together.auc

    def table_stats(self) -> dict[str, int]:
        reports = list(self.shards.values())
        on_disk = ("disk_rows", "disk_bytes", "index_bytes") if any("disk_rows" in facts for facts in reports) else ()
        by_width = sorted({key for facts in reports for key in facts if key.startswith("width_")})
        return {
            key: sum(cast(dict[str, int], facts).get(key, 0) for facts in reports)
            for key in ("rows", "bytes", "full_rows", *on_disk, *by_width)
        }

    def shares(self) -> dict[str, float]:
        shares = [facts["shares"] for facts in self.workers.values() if "shares" in facts]
        return {phase: float(np.mean([share[phase] for share in shares])) if shares else 0.0 for phase in PHASES}

    def extra(self) -> ClusterFacts:
        """Return the numbers that only a cluster has."""
        late = [facts.get("staleness", 0.0) for facts in self.shards.values()]
        return {
            "staleness": float(np.mean(late)) if late else 0.0,
            "queued": self._sum("queued") + sum(facts.get("held", 0) for facts in self.shards.values()),
            "wire_bytes": self._sum("sent") + self._sum("received"),
            "losses": self.failures,
            "dropped_messages": sum(facts.get("dropped", 0) for facts in self.shards.values()) + self._sum("dropped"),
            "refused_connections": sum(facts.get("refused", 0) for facts in self.shards.values()),
            "idle_workers": self.idle_workers,
        }


class ClusterMonitor(Monitor):
    """A Monitor that also shows what only a cluster has."""

    def tick(self, run: Progress) -> None:
        assert isinstance(run, ClusterProgress)
        self._steps = run.steps - 1  # a poll is not a step
        if run.buckets.state()["buckets"][TOTALS.index("rows")]:  # none before the first report of an epoch
            super().tick(run)

    def point(self, run: Progress) -> None:
        self._steps = run.steps
        super().point(run)

    def facts(self, run: Progress, now: float, since: Mark) -> dict[str, Any]:
        facts = super().facts(run, now, since)
        assert isinstance(run, ClusterProgress)
        elapsed = max(now - max(self._begin.time, run.began), 1e-9)
        each = {name: status.get("rows", 0) / elapsed for name, status in run.workers.items()}
        return {**facts, **run.extra(), "each": each}

    def record(self, kind: str, facts: dict[str, Any]) -> None:
        if kind == "train" and "each" in facts:
            facts = {**facts, **{f"{name} rows_per_s": rate for name, rate in facts["each"].items()}}
            del facts["each"]
        super().record(kind, facts)

    def words(self, facts: dict[str, Any]) -> str:
        each = " ".join(f"{rate:,.0f}" for rate in facts["each"].values())
        names = {
            "losses": "failures",
            "idle_workers": "idle workers",
            "dropped_messages": "foreign messages dropped",
            "refused_connections": "connections refused",
        }
        more = "".join(f"  {facts[key]:,} {name}" for key, name in names.items() if facts[key])
        return (
            f"{describe(facts)}  each {each}  staleness {facts['staleness']:.1f}  queued {facts['queued']}"
            f"  wire {amount(int(facts['wire_bytes']), 'bytes')}{more}"
        )


def closing_table(overview: ClusterProgress, facts: Mapping[str, ProcessFacts], seconds: float) -> str:
    """Return a table with one line per process: its work and its costs, since the last change or failure if there was one."""
    seconds = min(seconds, time.monotonic() - overview.began)
    lines = [
        f"{'process':>10}  {'host':<16} {'pid':>7} {'rows':>12} {'steps':>8} {'rows/s':>9} {'wire':>9} {'CPU s':>7}  latency ms (p50 p99)"
    ]
    for name, worker in overview.workers.items():
        where: Mapping[str, object] = facts.get(name, {})
        latencies = worker.get("latencies", {}).items()
        late = "  ".join(f"{kind} {values[0]:.1f} {values[1]:.1f}" for kind, values in latencies if values)
        lines.append(
            f"{name:>10}  {where.get('host', '?'):<16} {where.get('pid', 0):>7} {worker.get('rows', 0):>12,} "
            f"{worker.get('steps', 0):>8,} {worker.get('rows', 0) / max(seconds, 1e-9):>9,.0f} "
            f"{amount(worker.get('sent', 0) + worker.get('received', 0), 'bytes'):>9} {worker.get('cpu_s', 0):>7.1f}  {late}"
        )
    for name, shard in overview.shards.items():
        where = facts.get(name, {})
        rejected = "".join(
            f", {count:,} {what}"
            for count, what in (
                (shard.get("dropped", 0), "foreign messages dropped"),
                (shard.get("refused", 0), "connections refused"),
            )
            if count
        )
        lines.append(
            f"{name:>10}  {where.get('host', '?'):<16} {where.get('pid', 0):>7} {shard.get('rows', 0):>12,} "
            f"{shard.get('pushes', 0):>8,} {'':>9} {amount(shard.get('sent', 0) + shard.get('received', 0), 'bytes'):>9} "
            f"{shard.get('cpu_s', 0):>7.1f}  staleness {shard.get('staleness', 0):.2f}, at most {shard.get('staleness_most', 0)}{rejected}"
        )
    return "\n".join(lines)


def closing_facts(overview: ClusterProgress, seconds: float) -> dict[str, float]:
    """Return the costs of training per step and per row, without start, evaluation and the last checkpoint."""
    workers, shards = list(overview.workers.values()), list(overview.shards.values())
    steps = max(1, sum(worker["steps"] for worker in workers))
    rows = max(1, sum(worker["rows"] for worker in workers))
    wire = sum(worker.get("sent", 0) + worker.get("received", 0) for worker in workers)
    late = {
        f"{kind}_{name}_ms": float(
            np.mean([w["latencies"][kind][i] for w in workers if w.get("latencies", {}).get(kind)] or [0])
        )
        for kind in ("pull", "push")
        for i, name in enumerate(("p50", "p99"))
    }
    return {
        "step": overview.steps,
        "seconds": seconds,
        "worker_cpu_ms_per_step": 1e3 * sum(worker.get("trained_cpu_s", 0.0) for worker in workers) / steps,
        **{
            f"{phase}_cpu_ms_per_step": 1e3
            * sum(worker["cpu_by_phase"][phase] for worker in workers if worker["steps"])
            / steps
            for phase in PHASES
        },
        "shard_cpu_ms_per_step": 1e3 * sum(shard.get("trained_cpu_s", 0.0) for shard in shards) / steps,
        "wire_bytes_per_row": wire / rows,
        "staleness": overview.extra()["staleness"],
        "losses": overview.failures,
        "dropped_messages": overview.extra()["dropped_messages"],
        "refused_connections": overview.extra()["refused_connections"],
        **late,
    }
