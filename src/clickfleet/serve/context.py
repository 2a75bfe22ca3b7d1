"""What all routes of a worker share: the batcher with its version, settings, tokens, counters."""

import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clickfleet.serve import meter
from clickfleet.serve.batching import Batcher
from clickfleet.serve.fields import inputs_of
from clickfleet.serve.meter import Meter
from clickfleet.serve.predictor import age
from clickfleet.serve.settings import Settings
from clickfleet.serve.tokens import Tokens
from clickfleet.serve.versions import Status


@dataclass
class Context:
    settings: Settings
    batcher: Batcher
    meter: Meter
    tokens: Tokens
    admin: Tokens
    status: Status
    """What the updater said last."""
    problem: str | None = None
    """Why this worker could not take over what the updater said."""
    draining: bool = False
    started: float = field(default_factory=time.time)
    active: int = 0
    """Requests being answered."""

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
            "lag": self.status.lag(identity.sequence),
            "head": self.status.head,
            "rows": identity.rows,
            "layers": len(self.status.layers),
            "pinned": self.status.pinned,
            "problem": self.problem or self.status.problem,
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
            "counts": facts["counts"],
        }

    def metrics(self) -> bytes:
        facts, _ = meter.together(Path(self.settings.state), self.meter.facts(self.batcher.counts), self.meter.path)
        identity = self.batcher.version.identity
        lag = self.status.lag(identity.sequence)
        return meter.exposition(
            facts,
            {
                "model_sequence": ("Sequence that is served.", identity.sequence),
                "model_age_seconds": ("Time since it was published.", age(identity)),
                "model_lag": (
                    "Published entries not served yet; NaN where the log cannot be read.",
                    float("nan") if lag is None else lag,
                ),
                "model_refused": (
                    "Whether a newer entry was refused.",
                    float(bool(self.problem or self.status.problem)),
                ),
                "active_requests": ("Requests being answered by this worker.", self.active),
            },
        )

    def command(self, **facts: Any) -> None:
        """Tells the updater what is wanted."""
        path = Path(self.settings.state) / "wanted.json"
        hidden = path.with_name(f".wanted-{os.getpid()}")
        hidden.write_text(json.dumps({**facts, "at": time.time()}))
        hidden.replace(path)
