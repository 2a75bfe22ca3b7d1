"""Why is this item scored so? The score of a row, and what it would be without each of its fields."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from clickfleet import saving, trained
from clickfleet.batch import Batch, concatenate
from clickfleet.errors import DataError
from clickfleet.importance import Importance, Sample, importance
from clickfleet.learner import Learner
from clickfleet.scoring import Scorer
from clickfleet.serve.fields import Fields, overlay
from clickfleet.trained import Trained
from clickfleet.workbench.inspection import Facts, scores


def explain(
    model: str | Path | Trained,
    row: str | Path | Mapping[str, Any],
    line: int = 1,
    form: str | None = None,
    trust: bool = False,
) -> Facts:
    """What each field contributes: the score less the score with that field missing.

    `row` is a mapping of features, its JSON, or files of data, of which row `line` (from 1) is taken.
    """
    loaded = model if isinstance(model, Trained) else trained.load(model, trust)
    learner, fields = loaded.learner, Fields(loaded.schema)
    features = _features(row)
    batch = fields.rows([features]) if features is not None else _take(loaded.reading(form, 1), row, line)
    missing = fields.rows([{}])
    without = [overlay(fields, missing, _bare(batch), {name}) for name in fields.names]
    every = concatenate([_bare(batch), *without])
    ((_, found),) = list(Scorer(learner)([every]))
    chances = found.astype(np.float64)
    logits = np.log(chances) - np.log1p(-chances)
    statistics = _statistics(learner, batch)
    parts = []
    for place, name in enumerate(fields.names, 1):
        change = float(chances[0] - chances[place])
        parts.append(
            {
                "field": name,
                "value": None if features is None else features.get(name),
                "contribution": change,
                "logit": float(logits[0] - logits[place]),
                **_of_field(loaded, batch, name, statistics),
            }
        )
    parts.sort(key=lambda part: -abs(part["logit"]))
    label = None if batch.labels is None else float(batch.labels[0])
    return {
        "score": float(chances[0]),
        "logit": float(logits[0]),
        "label": label,
        "score_of_nothing": _alone(learner, missing),
        "contributions": parts,
    }


def _features(row: Any) -> dict[str, Any] | None:
    if isinstance(row, Mapping):
        return dict(row)
    if not str(row).lstrip().startswith("{"):
        return None
    try:
        return dict(json.loads(str(row)))
    except ValueError as error:
        raise DataError(f"the row is no JSON: {error}", 'write it as \'{"feature": "value", "other": 3}\'') from None


def _take(loaded: Trained, data: Any, line: int) -> Batch:
    left = line
    for batch in loaded.source(str(data), 1000):
        if left <= len(batch):
            return batch[left - 1 : left]
        left -= len(batch)
    raise DataError(f"{data} has only {line - left} rows", f"there is no row {line}")


def _bare(batch: Batch) -> Batch:
    """The row without its label and the like, which the rows made from it do not have."""
    return Batch(batch.dense, batch.keys, batch.slots, batch.offsets, values=batch.values)


def _alone(learner: Learner, missing: Batch) -> float:
    ((_, found),) = list(Scorer(learner)([missing]))
    return float(found[0])


def _statistics(learner: Learner, batch: Batch) -> dict[int, Facts]:
    """The rows of the table behind the keys."""
    found: dict[int, Facts] = {}
    wanted = np.unique(batch.keys)
    with learner.table.snapshot() as rows:
        for columns in rows:
            for i in np.flatnonzero(np.isin(columns["key"], wanted)):
                show, click = float(columns["show"][i]), float(columns["click"][i])
                score = float(scores(learner.table.policy, show, click))
                found[int(columns["key"][i])] = {"show": show, "click": click, "score": score, "full": columns["full"]}
    return found


def _of_field(loaded: Trained, batch: Batch, name: str, statistics: dict[int, Facts]) -> Facts:
    """The keys of a slot and their rows' statistics; nothing of a dense column."""
    for place, slot in enumerate(loaded.schema.slots):
        if slot.bucket is None and (slot.source or slot.name) == name:
            keys = batch.keys[batch.offsets[place] : batch.offsets[place + 1]].tolist()
            known = [statistics[key] for key in keys if key in statistics]
            told = known and (loaded.path is None or saving.entries(loaded.path) is None)  # published rows have none
            return {
                "keys": keys,
                "known": len(known),
                "show": sum(one["show"] for one in known) if told else None,
                "click": sum(one["click"] for one in known) if told else None,
            }
    return {}


def words(found: Facts, top: int = 20) -> list[str]:
    """The same for people, the largest contributions first."""
    label = "" if found["label"] is None else f", its label is {found['label']:g}"
    lines = [f"score {found['score']:.6f} (logit {found['logit']:+.4f}){label}"]
    lines.append(f"a row without any field scores {found['score_of_nothing']:.6f}")
    moved = [part for part in found["contributions"] if part["logit"]]
    for part in moved[:top]:
        value = "" if part["value"] is None else f" = {part['value']}"
        if part["value"] is None and part.get("keys"):  # of a file: `inspect --key` tells more of it
            value = f" (key {', '.join(map(str, part['keys'][:3]))}{', …' if len(part['keys']) > 3 else ''})"
        seen = ""
        if "keys" in part:
            seen = "" if part["known"] else "  unknown to the model"
        if part.get("show") is not None:
            seen = f"  {part['show']:g} shows, {part['click']:g} clicks"
        lines.append(f"{part['contribution']:>+10.6f}  logit {part['logit']:>+8.4f}  {part['field']}{value}{seen}")
    rest = len(found["contributions"]) - len(moved[:top])
    if rest:
        lines.append(f"{rest} other fields change less, or nothing")
    return lines


def weigh(
    model: str | Path,
    data: Any,
    groups: Sequence[Sequence[str]] | None = None,
    form: str | None = None,
    trust: bool = False,
) -> list[Importance]:
    """The importance of fields, or of groups of them shuffled together, on a sample of data with labels."""
    loaded = trained.load(model, trust).reading(form)
    sample = Sample.for_importance(loaded.learner)
    for batch in loaded.source(data, labels=True):
        sample.add(batch)
    if not len(sample):
        raise DataError("there are no rows to shuffle")
    return importance(loaded.learner, sample.rows, groups, threads=loaded.threads)
