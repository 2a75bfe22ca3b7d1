"""What a model is made of: rows per slot, memory, scores, norms; of a published log, its entries."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clickfleet import saving, trained
from clickfleet.learner import Learner
from clickfleet.policy import Policy

Facts = dict[str, Any]
SCORE_EDGES = (0.0, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, float("inf"))


def scores(policy: Policy, show: Any, click: Any) -> Any:
    """The score by which rows are admitted, published and evicted."""
    return (show - click) * policy.nonclick_coeff + click * policy.click_coeff


def removable(policy: Policy, score: Any, unseen_days: Any) -> Any:
    """Whether the next shrink removes a row: it decays the score first."""
    return (score * policy.decay_rate < policy.delete_threshold) | (unseen_days > policy.delete_after_unseen_days)


@dataclass
class _Survey:
    """One pass over all rows."""

    slots: int
    rows: NDArray[np.int64] = field(init=False)
    full: NDArray[np.int64] = field(init=False)
    weights: NDArray[np.float64] = field(init=False)
    norms: NDArray[np.float64] = field(init=False)
    histogram: NDArray[np.int64] = field(default_factory=lambda: np.zeros(len(SCORE_EDGES) - 1, np.int64))
    removable: int = 0
    published: int = 0
    shown: float = 0.0
    sampled: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rows, self.full = np.zeros(self.slots, np.int64), np.zeros(self.slots, np.int64)
        self.weights, self.norms = np.zeros(self.slots), np.zeros(self.slots)

    def add(self, columns: Any, policy: Policy) -> None:
        slot, size = columns["slot"].astype(np.int64), len(columns["key"])
        slot = np.where(slot < self.slots, slot, 0)
        self.rows += np.bincount(slot, minlength=self.slots)
        self.weights += np.bincount(slot, np.abs(columns["embed_w"]), self.slots)
        if columns["full"]:
            norm = np.linalg.norm(columns["embedx"].reshape(size, -1), axis=1)
            self.full += np.bincount(slot, minlength=self.slots)
            self.norms += np.bincount(slot, norm, self.slots)
            self.sampled.append(norm[:: max(1, size // 10_000)])
        score = scores(policy, columns["show"], columns["click"])
        self.histogram += np.histogram(score, SCORE_EDGES)[0]
        self.removable += int(removable(policy, score, columns["unseen_days"]).sum())
        self.published += int((columns["published"] != 0).sum())
        self.shown += float(columns["show"].sum())


def describe(model: str | Path, trust: bool = False) -> Facts:
    """What a saved model is made of, for people and machines; `trust` allows code that it names to run."""
    path = saving.resolve(model)
    learner = saving.load(path, trust)
    return {**trained.facts(path, learner), **survey(learner), **entries(path)}


def survey(learner: Learner) -> Facts:
    """Statistics of the rows; scores are null where a model was published, as readers get none."""
    schema, policy = learner.schema, learner.table.policy
    found = _Survey(max(len(schema.slots), 1))
    with learner.table.snapshot() as rows:
        for columns in rows:
            found.add(columns, policy)
    norms = np.concatenate(found.sampled) if found.sampled else np.empty(0)
    stats = learner.table.stats()
    slots = {
        slot.name: {
            "rows": int(found.rows[i]),
            "full_rows": int(found.full[i]),
            "mean_abs_weight": float(found.weights[i] / max(found.rows[i], 1)),
            "mean_norm": float(found.norms[i] / max(found.full[i], 1)),
        }
        for i, slot in enumerate(schema.slots)
    }
    known = found.shown > 0
    return {
        "per_slot": slots,
        "bytes_per_row": stats["bytes"] / max(stats["rows"], 1),
        "norms": {f"p{p}": float(np.percentile(norms, p)) for p in (50, 90, 99, 100)} if len(norms) else None,
        "scores": {_bin(i): int(n) for i, n in enumerate(found.histogram)} if known else None,
        "removed_at_next_shrink": found.removable if known else None,
        "published_rows": found.published if known else None,
        "policy": policy.to_dict(),
        "memory_limit": learner.table.memory_limit,
    }


def _bin(place: int) -> str:
    low, high = SCORE_EDGES[place : place + 2]
    return f"{low:g}…{high:g}" if high < float("inf") else f"{low:g} and more"


def entries(path: Path) -> Facts:
    """The entries behind a published model, oldest first; nothing of a checkpoint."""
    chain = saving.entries(path)
    if chain is None:
        return {}
    return {
        "entries": [
            {
                "sequence": entry.sequence,
                "kind": entry.manifest["kind"],
                "rows": entry.manifest["rows"],
                "deleted": entry.manifest["deleted"],
                "bytes": sum(file["bytes"] for file in entry.manifest["files"].values()),
                "time": entry.info.get("time"),
            }
            for entry in chain
        ]
    }
