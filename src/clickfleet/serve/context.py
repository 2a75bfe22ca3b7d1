"""What all routes of a worker share: the batcher with its version, settings, tokens, counters."""

import math
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clickfleet.errors import hide
from clickfleet.serve import meter
from clickfleet.serve.admission import Admission
from clickfleet.serve.batching import Batcher
from clickfleet.serve.fields import inputs_of
from clickfleet.serve.meter import Meter
from clickfleet.serve.predictor import age
from clickfleet.serve.settings import Settings
from clickfleet.serve.tokens import Tokens
from clickfleet.serve.versions import Status
from clickfleet.serve.watch import Following

BODIES_BYTES = 1 << 28
"""Bodies that one worker holds at a time, or sixteen of the longest if that is more."""


@dataclass
class Context:
    settings: Settings
    batcher: Batcher
    meter: Meter
    tokens: Tokens
    admin: Tokens
    status: Status
    """What the updater told last."""
    admission: Admission
    following: Following
    problem: str | None = None
    """Why this worker could not take over what the updater said."""
    draining: bool = False
    started: float = field(default_factory=time.time)
    active: int = 0
    """Requests being answered."""
    held_bytes: int = 0
    """Bodies that have arrived, at least in part, and are not answered."""
    deaths: dict[str, int] = field(default_factory=dict)
    """How often each process of this server died."""

    connections: Callable[[], int] = int

    def hold(self, size: int) -> None:
        """Counts bytes of a body that has to be kept; many clients with long bodies must not take all memory."""
        if self.held_bytes + size > max(BODIES_BYTES, 16 * self.settings.max_body):
            raise self.admission.refusal()
        self.held_bytes += size

    @asynccontextmanager
    async def admitted(self, size: int) -> AsyncIterator[None]:
        """Holds a body of some bytes and waits until there is time to parse it; refuses what would wait for too long."""
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
        """Published entries that are not served; None if nobody knows."""
        if self.status.following and self.following.broken:
            return None
        return self.status.lag(self.batcher.version.identity.sequence)

    @property
    def trouble(self) -> str | None:
        """Why this worker does not serve the newest entry."""
        told = self.problem or self.following.problem or self.status.problem
        if told is None and self.status.following and self.following.broken:
            told = f"nothing was heard of the updater for {self.following.age_s:.0f} s"
        return None if told is None else hide(told)

    def ready(self) -> tuple[bool, dict[str, bool]]:
        """Whether requests can be answered, with details that hold for strangers."""
        closed = self.tokens.required and self.tokens.closed
        ready = not self.draining and not closed
        return ready, {"ready": ready, "following": not self.following.broken, "tokens": not closed}

    def save_counts(self) -> None:
        self.meter.save(self.batcher.counts)

    def describe(self) -> dict[str, Any]:
        """What is served, for people and monitoring."""
        version = self.batcher.version
        identity = version.identity
        return {
            "name": identity.name,
            "model": identity.model,
            "sequence": identity.sequence,
            "hash": identity.hash,
            "chain": identity.chain,
            "step": identity.step,
            "age_s": round(age(identity), 3),
            "lag": self.lag,
            "head": self.status.head,
            "rows": identity.rows,
            "layers": len(self.status.layers),
            "pinned": self.status.pinned,
            "problem": self.trouble,
            "following": {
                "ok": not self.following.broken,
                "age_s": round(self.following.age_s, 3),
                "failures": self.following.failures,
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
            "format": version.format,
            "inputs": inputs_of(version.schema),
            "outputs": list(version.outputs),
            "rows_in": self.settings.rows if self.settings.rows in ("mapped", "memory") else "redis",
            "pid": os.getpid(),
        }

    def stats(self) -> dict[str, Any]:
        """Latency and throughput of all workers over the last seconds."""
        facts, others = meter.together(
            Path(self.settings.state), self.meter.facts(self.batcher.counts), self.meter.path
        )
        every = [self.meter.summary(), *others]
        busiest = max(every, key=lambda one: one.get("replies_per_s") or 0.0)
        return {
            "replies_per_s": round(sum(one.get("replies_per_s") or 0.0 for one in every), 1),
            "p50_ms": busiest.get("p50_ms"),
            "p99_ms": busiest.get("p99_ms"),
            "workers": len(every),
            "following": not self.following.broken,
            "lag": self.lag,
            "counts": facts["counts"],
        }

    def metrics(self) -> bytes:
        facts, _ = meter.together(Path(self.settings.state), self.meter.facts(self.batcher.counts), self.meter.path)
        identity, lag, following = self.batcher.version.identity, self.lag, self.following
        return meter.exposition(
            facts,
            {
                "model_sequence": ("Sequence that is served.", identity.sequence),
                "model_age_seconds": ("Time since it was published.", age(identity)),
                "model_lag": ("Published entries not served yet; NaN if unknown.", math.nan if lag is None else lag),
                "model_refused": (
                    "Whether a newer entry was refused.",
                    float(bool(self.problem or self.status.problem)),
                ),
                "following_broken": ("Whether this worker lost track of what is published.", float(following.broken)),
                "poll_age_seconds": ("Time since what is published was last known.", following.age_s),
                "tokens_unreadable": (
                    "Whether the token file cannot be read.",
                    float(self.tokens.problem is not None or self.admin.problem is not None),
                ),
                "process_deaths": ("Deaths of the updater and the workers.", sum(self.deaths.values())),
                "updater_deaths": ("Deaths of the updater.", self.deaths.get("updater", 0)),
                "connections": ("Open HTTP connections of this worker.", self.connections()),
                "active_requests": ("Requests being answered by this worker.", self.active),
            },
        )
