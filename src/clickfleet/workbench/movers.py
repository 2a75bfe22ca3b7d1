"""What changed between two models: rows that moved most, rows that came and went, tensors of the network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from clickfleet import saving
from clickfleet.errors import ConfigError
from clickfleet.learner import Learner
from clickfleet.workbench.inspection import Facts


def movers(model: str | Path, against: str | Path, top: int = 20, trust: bool = False) -> Facts:
    """From `against` to `model`: the rows with the longest way, and how many there are of which kind."""
    now, before = (saving.load(saving.resolve(one), trust) for one in (model, against))
    if now.table.factors != before.table.factors or now.schema.keys != before.schema.keys:
        raise ConfigError(
            f"{model} and {against} have rows of other widths or keys of another kind", "compare models of one kind"
        )
    kept, moved, born = 0, 0, 0
    statistics = saving.entries(saving.resolve(model)) is None  # published rows have none
    best: list[tuple[float, Facts]] = []
    with now.table.snapshot() as rows:
        for columns in rows:
            keys, size = columns["key"], len(columns["key"])
            mine = np.zeros((size, 1 + now.table.factors), np.float32)
            mine[:, 0] = columns["embed_w"]
            if columns["full"]:
                mine[:, 1:] = columns["embedx"].reshape(size, now.table.factors)
            known = before.table.known(keys)
            way = np.linalg.norm(mine - before.table.pull(keys, training=False), axis=1)
            born += int((~known).sum())
            kept += int(known.sum())
            moved += int((known & (way > 0)).sum())
            way[~known] = -1.0  # that it came is another matter
            far = [int(i) for i in np.argsort(-way)[:top] if way[i] > 0]
            best += [(float(way[i]), _mover(now, columns, i, float(way[i]), statistics)) for i in far]
            best = sorted(best, key=lambda item: -item[0])[:top]
    return {
        "rows": kept + born,
        "moved": moved,
        "born": born,
        "gone": len(before.table) - kept,
        "movers": [facts for _, facts in best],
        "dense": _dense(now, before),
    }


def _mover(learner: Learner, columns: Any, i: int, way: float, statistics: bool) -> Facts:
    slot = int(columns["slot"][i])
    names = [one.name for one in learner.schema.slots]
    return {
        "key": int(columns["key"][i]),
        "slot": names[slot] if slot < len(names) else None,
        "moved": way,
        "show": float(columns["show"][i]) if statistics else None,
        "click": float(columns["click"][i]) if statistics else None,
        "embed_w": float(columns["embed_w"][i]),
    }


def _dense(now: Learner, before: Learner) -> dict[str, float | None]:
    """The change of every tensor, as a share of its norm; null where it is not in both."""
    old, found = before.dense(), {}
    for name, tensor in now.dense().items():
        other = old.get(name)
        same = other is not None and other.shape == tensor.shape and tensor.is_floating_point()
        if same and other is not None:
            found[name] = float((tensor - other).norm() / other.norm().clamp_min(1e-12))
        elif other is None or other.shape != tensor.shape:
            found[name] = None  # type: ignore[assignment]
    return dict(found)
