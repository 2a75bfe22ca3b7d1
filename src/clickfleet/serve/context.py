"""The state that all routes of a worker share: batcher and version, settings, tokens, counters."""

import math
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from clickfleet.errors import hide
from clickfleet.serve import counters
from clickfleet.serve.auth import Tokens
from clickfleet.serve.batching import AdmissionControl, Batcher
from clickfleet.serve.counters import Meter
from clickfleet.serve.features import inputs_of
from clickfleet.serve.feedback import FeedbackLog
from clickfleet.serve.show_log import ShowLog
from clickfleet.serve.state_folder import Status, UpdaterHealth
from clickfleet.serve.supervisor import Settings

BODIES_BYTES = 1 << 28
"""Maximum bytes of request bodies held by one worker, or sixteen bodies of the maximum length if that is more."""


@dataclass
class Context:
    settings: Settings
    batcher: Batcher
    meter: Meter
    tokens: Tokens
    admin: Tokens
    status: Status
    """The last status written by the updater."""
    admission: AdmissionControl
    updater: UpdaterHealth
    problem: str | None = None
    """Why this worker could not open the version named by the updater."""
    draining: bool = False
    started: float = field(default_factory=time.time)
    active: int = 0
    """Requests being answered."""
    held_bytes: int = 0
    """Bytes of complete or partial bodies whose requests are not answered yet."""
    deaths: dict[str, int] = field(default_factory=dict)
    """Number of deaths of each process of this server."""

    shows: ShowLog | None = None
    feedback: FeedbackLog | None = None
    connections: Callable[[], int] = int

    def hold(self, size: int) -> None:
        """Count bytes of a body, and raise `BusyError` before many long bodies exhaust the memory."""
        if self.held_bytes + size > max(BODIES_BYTES, 16 * self.settings.max_body):
            raise self.admission.refusal()
        self.held_bytes += size

    @asynccontextmanager
    async def admitted(self, size: int) -> AsyncIterator[None]:
        """Hold a body and wait until it may be parsed. Raise `BusyError` if the wait would be too long."""
        self.hold(size)
        try:
            ticket = self.admission.enter(size)
            if not isinstance(ticket, float):
                ticket = await self.admission.wait(ticket, size)
            try:
                yield
            finally:
                self.admission.leave(ticket, size)
        finally:
            self.held_bytes -= size

    @property
    def lag(self) -> int | None:
        """Return the number of published entries not served yet, or None if unknown."""
        if self.status.following and self.updater.broken:
            return None
        return self.status.lag(self.batcher.version.identity.sequence)

    @property
    def reported_problem(self) -> str | None:
        """Return why this worker does not serve the newest entry, or None."""
        problem = self.problem or self.updater.problem or self.status.problem
        if problem is None and self.status.following and self.updater.broken:
            problem = f"no heartbeat of the updater for {self.updater.age_s:.0f} s"
        return None if problem is None else hide(problem)

    def ready(self) -> tuple[bool, dict[str, bool]]:
        """Return whether requests can be answered, and details that may be shown without a token."""
        closed = self.tokens.required and self.tokens.closed
        ready = not self.draining and not closed
        return ready, {"ready": ready, "following": not self.updater.broken, "tokens": not closed}

    def save_counts(self) -> None:
        self.meter.save(self.batcher.counts)

    def describe(self) -> dict[str, object]:
        """Return the reply of `/v1/model`."""
        version = self.batcher.version
        identity = version.identity
        return {
            "name": identity.name,
            "model": identity.model,
            "sequence": identity.sequence,
            "hash": identity.hash,
            "chain": identity.chain,
            "step": identity.step,
            "age_s": round(identity.age_s, 3),
            "lag": self.lag,
            "freshness": self._freshness([self.meter.recent_summary()]),
            "head": self.status.head,
            "rows": identity.rows,
            "layers": len(self.status.layers),
            "pinned": self.status.pinned,
            "problem": self.reported_problem,
            "following": {
                "ok": not self.updater.broken,
                "age_s": round(self.updater.age_s, 3),
                "failures": self.updater.failures,
                "tokens": self.tokens.problem,
                "deaths": self.deaths,
            },
            "precision": "int8" if version.engine.int8 else "fp32",
            "int8_drift": version.drift,
            "keys": str(version.schema.keys),
            "schema_hash": version.schema.hash,
            "schema": version.schema.to_dict(),
            "engine": version.engine.name,
            "threads": version.engine.threads,
            "graph_optimisation": version.engine.graph,
            "arena": version.engine.arena,
            "factors": version.factors,
            "row_formats": list(version.rows.row_formats),
            "format": version.format,
            "inputs": inputs_of(version.schema),
            "outputs": list(version.output_names),
            "labels": [
                {"name": task.name, "loss": task.loss, "given": task.given or None} for task in version.schema.tasks
            ],
            "aliases": version.aliases.to_dict(),
            "rows_in": self.settings.rows if self.settings.rows in ("mapped", "memory") else "redis",
            "pid": os.getpid(),
        }

    def stats(self) -> dict[str, object]:
        """Return the reply of `/v1/stats`: latency and throughput of all workers over the last seconds."""
        totals, others = self._over_workers()
        summaries = [self.meter.recent_summary(), *others]
        busiest = max(summaries, key=lambda summary: summary.replies_per_s)
        return {
            "replies_per_s": round(sum(summary.replies_per_s for summary in summaries), 1),
            "p50_ms": busiest.p50_ms,
            "p99_ms": busiest.p99_ms,
            "workers": len(summaries),
            "following": not self.updater.broken,
            "lag": self.lag,
            "freshness": self._freshness(summaries),
            "counts": totals.counts,
        }

    def _freshness(self, summaries: list[counters.RecentSummary]) -> dict[str, float | None]:
        """Return the ages of the events that were first served in the last minute, by the slowest worker."""
        slowest = max(summaries, key=lambda summary: summary.fresh_p99_s or 0.0)
        newest = self.meter.newest_event_s
        return {
            "p50_s": slowest.fresh_p50_s,
            "p99_s": slowest.fresh_p99_s,
            "events": round(slowest.events),
            "newest_event_age_s": None if newest is None else round(max(0.0, time.time() - newest), 3),
        }

    def totals(self) -> counters.Totals:
        """Return everything counted by all workers and the recorder."""
        return self._over_workers()[0]

    def _over_workers(self) -> tuple[counters.Totals, list[counters.RecentSummary]]:
        return counters.over_workers(Path(self.settings.state), self.meter.totals(self.batcher.counts), self.meter.path)

    def metrics(self) -> bytes:
        """Return the reply of `/metrics`."""
        identity, lag = self.batcher.version.identity, self.lag
        totals, others = self._over_workers()
        fresh = self._freshness([self.meter.recent_summary(), *others])
        ages = {
            "freshness_p50_seconds": ("Median age of the events first served in the last minute.", fresh["p50_s"]),
            "freshness_p99_seconds": ("99th percentile of these ages.", fresh["p99_s"]),
            "newest_event_age_seconds": (
                "Time since the newest event that the served model has learned.",
                fresh["newest_event_age_s"],
            ),
        }
        return counters.exposition(
            totals,
            {name: (text, value) for name, (text, value) in ages.items() if value is not None}
            | {
                "model_sequence": ("Sequence of the served entry.", identity.sequence),
                "model_age_seconds": ("Time since the served entry was published.", identity.age_s),
                "model_lag": ("Published entries not served yet; NaN if unknown.", math.nan if lag is None else lag),
                "model_refused": (
                    "Whether a newer entry was refused.",
                    float(bool(self.problem or self.status.problem)),
                ),
                "following_broken": (
                    "Whether the state of the published log is unknown to this worker.",
                    float(self.updater.broken),
                ),
                "poll_age_seconds": ("Time since the state of the published log was last known.", self.updater.age_s),
                "tokens_unreadable": (
                    "Whether a token file cannot be read.",
                    float(self.tokens.problem is not None or self.admin.problem is not None),
                ),
                "process_deaths": (
                    "Deaths of the processes of this server, or of its loop.",
                    sum(self.deaths.values()),
                ),
                "updater_deaths": ("Deaths of the updater.", self.deaths.get("updater", 0)),
                "connections": ("Open HTTP connections of this worker.", self.connections()),
                "active_requests": ("Requests being answered by this worker.", self.active),
                **self._log_gauges(),
            },
        )

    def _log_gauges(self) -> dict[str, tuple[str, float]]:
        if self.shows is None:
            return {}
        text = "Bytes of requests that wait for the show log of this worker."
        return {"show_log_waiting_bytes": (text, self.shows.waiting_bytes)}
