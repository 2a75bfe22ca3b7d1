"""Show the changes between two models: rows that changed most, rows added and removed, tensors of the network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from clickfleet.errors import ConfigError
from clickfleet.store import run_folder
from clickfleet.training import saving
from clickfleet.training.learner import Learner
from clickfleet.workbench.runner import Facts


def diff(model: str | Path, against: str | Path, top: int = 20, trust: bool = False) -> Facts:
    """Compare `against` (before) with `model` (now): counts of rows, the `top` rows that changed most, and dense tensors."""
    now, before = (saving.load(run_folder.resolve(one), trust) for one in (model, against))
    if now.table.factors != before.table.factors or now.schema.keys != before.schema.keys:
        raise ConfigError(
            f"{model} and {against} differ in the width of rows or the key rule", "compare models of the same kind"
        )
    kept, moved, born = 0, 0, 0
    statistics = run_folder.entries(run_folder.resolve(model)) is None  # published rows have none
    names = run_folder.read_names(run_folder.resolve(model), now.schema)
    best: list[tuple[float, Facts]] = []
    with now.table.snapshot() as rows:
        for columns in rows:
            keys, size = columns["key"], len(columns["key"])
            weights = np.zeros((size, 1 + now.table.factors), np.float32)
            weights[:, 0] = columns["embed_w"]
            own = columns["embedx"].reshape(size, -1)
            weights[:, 1 : 1 + own.shape[1]] = own
            known = before.table.known(keys)
            distance = np.linalg.norm(weights - before.table.pull(keys, training=False), axis=1)
            born += int((~known).sum())
            kept += int(known.sum())
            moved += int((known & (distance > 0)).sum())
            distance[~known] = -1.0  # new rows are counted, not ranked
            far = [int(i) for i in np.argsort(-distance)[:top] if distance[i] > 0]
            best += [(float(distance[i]), _changed_row(now, columns, i, float(distance[i]), statistics)) for i in far]
            best = sorted(best, key=lambda item: -item[0])[:top]
    for _, facts in best:
        facts["value"] = None if names is None or facts["slot"] is None else names.name(facts["slot"], facts["key"])
    return {
        "rows": kept + born,
        "moved": moved,
        "born": born,
        "gone": len(before.table) - kept,
        "movers": [facts for _, facts in best],
        "dense": _changed_tensors(now, before),
    }


def _changed_row(learner: Learner, columns: Any, i: int, distance: float, statistics: bool) -> Facts:
    slot = int(columns["slot"][i])
    names = [one.name for one in learner.schema.slots]
    return {
        "key": int(columns["key"][i]),
        "slot": names[slot] if slot < len(names) else None,
        "moved": distance,
        "show": float(columns["show"][i]) if statistics else None,
        "click": float(columns["click"][i]) if statistics else None,
        "embed_w": float(columns["embed_w"][i]),
    }


def _changed_tensors(now: Learner, before: Learner) -> dict[str, float | None]:
    """Return the change of every tensor relative to its norm; None for a new tensor or another shape."""
    old = before.dense()
    changes: dict[str, float | None] = {}
    for name, tensor in now.dense().items():
        other = old.get(name)
        if other is None or other.shape != tensor.shape:
            changes[name] = None
        elif tensor.is_floating_point():
            changes[name] = float((tensor - other).norm() / other.norm().clamp_min(1e-12))
    return changes
