"""What a person sees of a run on a cluster: one line for all of it, and a table at its end."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from clickfleet.job import PHASES, Job
from clickfleet.metrics import TOTALS, Buckets
from clickfleet.progress import amount
from clickfleet.watch import Mark, Watch, describe


class Moment(NamedTuple):
    """How many rows were trained on at some time."""

    time: float
    rows: int

    def speed_until(self, later: Moment) -> float:
        """Rows per second; 0 if nothing was heard in between."""
        return (later.rows - self.rows) / (later.time - self.time) if later.time > self.time else 0.0


class Overview:
    """All workers and shards together, with the attributes of a Job that a Watch looks at."""

    def __init__(self, thresholds: int) -> None:
        self.thresholds = thresholds
        self.workers: dict[str, dict[str, Any]] = {}
        self.shards: dict[str, dict[str, Any]] = {}
        self.base: dict[str, Any] = {"steps": 0, "rows": 0, "buckets": None}
        """Numbers of the state that the workers started from."""
        self.epoch = 0
        self.losses = 0
        self.idle_workers = 0
        """Workers without a file to train on in this epoch."""
        self.heard = time.monotonic()
        """When a worker last told how far it is."""

    def restart(self, steps: int, rows: int, buckets: Any) -> None:
        """The workers count from here."""
        self.base = {"steps": steps, "rows": rows, "buckets": buckets}
        self.workers = {}
        self.heard = time.monotonic()

    @property
    def moment(self) -> Moment:
        """What was heard last."""
        return Moment(self.heard, self.rows)

    def _sum(self, key: str) -> Any:
        return sum(facts.get(key, 0) for facts in self.workers.values())

    @property
    def steps(self) -> int:
        return int(self.base["steps"] + self._sum("steps"))

    @property
    def rows(self) -> int:
        return int(self.base["rows"] + self._sum("rows"))

    @property
    def loss(self) -> float:
        return float(self._sum("loss"))

    @property
    def weight(self) -> float:
        return float(self._sum("weight"))

    @property
    def table(self) -> Any:
        keys = ("rows", "bytes", "full_rows")
        total = {key: sum(facts.get(key, 0) for facts in self.shards.values()) for key in keys}
        return SimpleNamespace(stats=lambda: total)

    @property
    def source(self) -> Any:
        counters = SimpleNamespace(bytes=self._sum("bytes"), bad_lines=self._sum("bad_lines"))
        return SimpleNamespace(counters=counters, epoch=self.epoch)

    @property
    def metrics(self) -> Any:
        buckets = Buckets(self.thresholds)
        parts = [facts["buckets"] for facts in self.workers.values() if "buckets" in facts]
        if self.base["buckets"] is not None:
            parts.append(self.base["buckets"])
        if parts:
            buckets.restore({"buckets": np.sum(parts, axis=0)})
        return SimpleNamespace(buckets=buckets, sliding=self._sliding())

    def _sliding(self) -> Buckets | None:
        """The last batches of every worker together."""
        windows = [facts["sliding"] for facts in self.workers.values() if facts.get("sliding") is not None]
        if not windows:
            return None
        together = Buckets(self.thresholds)
        together.restore({"buckets": np.sum(windows, axis=0)})
        return together

    def shares(self) -> dict[str, float]:
        found = [facts["shares"] for facts in self.workers.values() if "shares" in facts]
        return {phase: float(np.mean([each[phase] for each in found])) if found else 0.0 for phase in PHASES}

    def extra(self) -> dict[str, Any]:
        """What only a cluster has."""
        late = [facts.get("staleness", 0.0) for facts in self.shards.values()]
        return {
            "staleness": float(np.mean(late)) if late else 0.0,
            "queued": self._sum("queued") + sum(facts.get("held", 0) for facts in self.shards.values()),
            "wire_bytes": self._sum("sent") + self._sum("received"),
            "losses": self.losses,
            "dropped_messages": sum(facts.get("dropped", 0) for facts in self.shards.values()) + self._sum("dropped"),
            "idle_workers": self.idle_workers,
            "worker_rows": {name: facts.get("rows", 0) for name, facts in self.workers.items()},
        }


class ClusterWatch(Watch):
    """A Watch that also shows what only a cluster has."""

    def tick(self, job: Job) -> None:
        self._steps = job.steps - 1  # a look is no step
        if job.metrics.buckets.state()["buckets"][
            TOTALS.index("rows")
        ]:  # else an epoch has begun, and nothing is known of it
            super().tick(job)

    def facts(self, job: Job, now: float, since: Mark) -> dict[str, Any]:
        facts = super().facts(job, now, since)
        assert isinstance(job, Overview)
        extra = job.extra()
        mine = extra.pop("worker_rows")
        elapsed = max(now - self._begin.time, 1e-9)
        return {**facts, **extra, "each": {name: rows / elapsed for name, rows in mine.items()}}

    def record(self, kind: str, facts: dict[str, Any]) -> None:
        if kind == "train" and "each" in facts:
            facts = {**facts, **{f"{name} rows_per_s": rate for name, rate in facts["each"].items()}}
            del facts["each"]
        super().record(kind, facts)

    def words(self, facts: dict[str, Any]) -> str:
        each = " ".join(f"{rate:,.0f}" for rate in facts["each"].values())
        names = {"losses": "losses", "idle_workers": "idle workers", "dropped_messages": "foreign messages dropped"}
        more = "".join(f"  {facts[key]:,} {name}" for key, name in names.items() if facts[key])
        return (
            f"{describe(facts)}  each {each}  staleness {facts['staleness']:.1f}  queued {facts['queued']}"
            f"  wire {amount(int(facts['wire_bytes']), 'bytes')}{more}"
        )


def closing_table(overview: Overview, facts: dict[str, dict[str, Any]], seconds: float) -> str:
    """One line per process: what it did and what it cost."""
    lines = [
        f"{'process':>10}  {'host':<16} {'pid':>7} {'rows':>12} {'steps':>8} {'rows/s':>9} {'wire':>9} {'CPU s':>7}  latency ms (p50 p99)"
    ]
    for name, found in overview.workers.items():
        where = facts.get(name, {})
        times = found.get("latencies", {})
        late = "  ".join(f"{kind} {values[0]:.1f} {values[1]:.1f}" for kind, values in times.items() if values)
        lines.append(
            f"{name:>10}  {where.get('host', '?'):<16} {where.get('pid', 0):>7} {found.get('rows', 0):>12,} "
            f"{found.get('steps', 0):>8,} {found.get('rows', 0) / max(seconds, 1e-9):>9,.0f} "
            f"{amount(found.get('sent', 0) + found.get('received', 0), 'bytes'):>9} {found.get('cpu_s', 0):>7.1f}  {late}"
        )
    for name, found in overview.shards.items():
        where = facts.get(name, {})
        lines.append(
            f"{name:>10}  {where.get('host', '?'):<16} {where.get('pid', 0):>7} {found.get('rows', 0):>12,} "
            f"{found.get('pushes', 0):>8,} {'':>9} {amount(found.get('sent', 0) + found.get('received', 0), 'bytes'):>9} "
            f"{found.get('cpu_s', 0):>7.1f}  staleness {found.get('staleness', 0):.2f}, at most {found.get('staleness_most', 0)}"
        )
    return "\n".join(lines)


def closing_facts(overview: Overview, seconds: float) -> dict[str, Any]:
    """The same in numbers, per step and per row: what training cost, without start, evaluation and the last checkpoint."""
    workers, shards = list(overview.workers.values()), list(overview.shards.values())
    steps = max(1, sum(found.get("steps", 0) for found in workers))
    rows = max(1, sum(found.get("rows", 0) for found in workers))
    wire = sum(found.get("sent", 0) + found.get("received", 0) for found in workers)
    late = {
        f"{kind}_{name}_ms": float(
            np.mean([f["latencies"][kind][i] for f in workers if f.get("latencies", {}).get(kind)] or [0])
        )
        for kind in ("pull", "push")
        for i, name in enumerate(("p50", "p99"))
    }
    return {
        "step": overview.steps,
        "seconds": seconds,
        "worker_cpu_ms_per_step": 1e3 * sum(found.get("trained_cpu_s", 0.0) for found in workers) / steps,
        **{
            f"{phase}_cpu_ms_per_step": 1e3
            * sum(found["cpu_by_phase"][phase] for found in workers if found["steps"])
            / steps
            for phase in PHASES
        },
        "shard_cpu_ms_per_step": 1e3 * sum(found.get("trained_cpu_s", 0.0) for found in shards) / steps,
        "wire_bytes_per_row": wire / rows,
        "staleness": overview.extra()["staleness"],
        "losses": overview.losses,
        "dropped_messages": overview.extra()["dropped_messages"],
        **late,
    }
