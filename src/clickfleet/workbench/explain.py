"""Explain a score: the contribution of each field, and the importance of fields over a data set."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from clickfleet.data.batch import Batch, concatenate
from clickfleet.errors import DataError
from clickfleet.serve.features import Fields, overlay
from clickfleet.store import run_folder
from clickfleet.training.learner import Learner
from clickfleet.training.model import SavedModel, load
from clickfleet.training.predict import Scorer
from clickfleet.training.report.evidence import EvidenceSample, Importance, importance
from clickfleet.workbench.runner import Facts


def explain(
    model: str | Path | SavedModel,
    row: str | Path | Mapping[str, Any],
    line: int = 1,
    form: str | None = None,
    trust: bool = False,
) -> Facts:
    """Return the contribution of each field: the score minus the score with that field missing.

    `row` is a mapping of features, the same as JSON, or data files, whose row number `line` (from 1) is explained.
    """
    loaded = model if isinstance(model, SavedModel) else load(model, trust)
    learner, fields = loaded.learner, Fields(loaded.schema)
    features = _features(row)
    batch = fields.rows([features]) if features is not None else _read_row(loaded.reading(form, 1), row, line)
    missing = fields.rows([{}])
    without = [overlay(fields, missing, _features_only(batch), {name}) for name in fields.names]
    every = concatenate([_features_only(batch), *without])
    ((_, output),) = list(Scorer(learner)([every]))
    chances = output.astype(np.float64)
    logits = np.log(chances) - np.log1p(-chances)
    statistics = _statistics(learner, batch)
    parts = []
    for place, name in enumerate(fields.names, 1):
        parts.append(
            {
                "field": name,
                "value": None if features is None else features.get(name),
                "contribution": float(chances[0] - chances[place]),
                "logit": float(logits[0] - logits[place]),
                **_field_statistics(loaded, batch, name, statistics),
            }
        )
    parts.sort(key=lambda part: -abs(part["logit"]))
    return {
        "score": float(chances[0]),
        "logit": float(logits[0]),
        "label": None if batch.labels is None else float(batch.labels[0]),
        "score_of_nothing": _score(learner, missing),
        "contributions": parts,
    }


def _features(row: Any) -> Facts | None:
    if isinstance(row, Mapping):
        return dict(row)
    if not str(row).lstrip().startswith("{"):
        return None
    try:
        return dict(json.loads(str(row)))
    except ValueError as error:
        raise DataError(
            f"the row is not valid JSON: {error}", 'write it as \'{"feature": "value", "other": 3}\''
        ) from None


def _read_row(loaded: SavedModel, data: Any, line: int) -> Batch:
    left = line
    for batch in loaded.source(str(data), 1000):
        if left <= len(batch):
            return batch[left - 1 : left]
        left -= len(batch)
    raise DataError(f"{data} has only {line - left} rows", f"choose --line between 1 and {line - left}")


def _features_only(batch: Batch) -> Batch:
    """Return the row without label and other side columns."""
    return Batch(batch.dense, batch.keys, batch.slots, batch.offsets, values=batch.values)


def _score(learner: Learner, missing: Batch) -> float:
    ((_, output),) = list(Scorer(learner)([missing]))
    return float(output[0])


def _statistics(learner: Learner, batch: Batch) -> dict[int, tuple[float, float]]:
    """Return shows and clicks of the table rows of a batch, by key."""
    statistics = {}
    wanted = np.unique(batch.keys)
    with learner.table.snapshot() as rows:
        for columns in rows:
            for i in np.flatnonzero(np.isin(columns["key"], wanted)):
                statistics[int(columns["key"][i])] = float(columns["show"][i]), float(columns["click"][i])
    return statistics


def _field_statistics(loaded: SavedModel, batch: Batch, name: str, statistics: dict[int, tuple[float, float]]) -> Facts:
    """Return the keys of a slot and the statistics of their rows; an empty dictionary for a dense column."""
    for place, slot in enumerate(loaded.schema.slots):
        if slot.bucket is None and (slot.source or slot.name) == name:
            keys = batch.keys[batch.offsets[place] : batch.offsets[place + 1]].tolist()
            known = [statistics[key] for key in keys if key in statistics]
            published = loaded.path is not None and run_folder.entries(loaded.path) is not None
            counted = known and not published  # published rows have no statistics
            return {
                "keys": keys,
                "known": len(known),
                "show": sum(shows for shows, _ in known) if counted else None,
                "click": sum(clicks for _, clicks in known) if counted else None,
            }
    return {}


def explanation_text(explanation: Facts, top: int = 20) -> list[str]:
    """Format the result of `explain`, largest contributions first."""
    label = "" if explanation["label"] is None else f", label {explanation['label']:g}"
    lines = [f"score {explanation['score']:.6f} (logit {explanation['logit']:+.4f}){label}"]
    lines.append(f"a row without any field scores {explanation['score_of_nothing']:.6f}")
    moved = [part for part in explanation["contributions"] if part["logit"]]
    for part in moved[:top]:
        value = "" if part["value"] is None else f" = {part['value']}"
        if part["value"] is None and part.get("keys"):  # from a file: `inspect --key` shows the row
            value = f" (key {', '.join(map(str, part['keys'][:3]))}{', …' if len(part['keys']) > 3 else ''})"
        seen = ""
        if "keys" in part:
            seen = "" if part["known"] else "  unknown to the model"
        if part.get("show") is not None:
            seen = f"  {part['show']:g} shows, {part['click']:g} clicks"
        lines.append(f"{part['contribution']:>+10.6f}  logit {part['logit']:>+8.4f}  {part['field']}{value}{seen}")
    rest = len(explanation["contributions"]) - len(moved[:top])
    if rest:
        lines.append(f"{rest} other fields contribute less or nothing")
    return lines


def field_importance(
    model: str | Path,
    data: Any,
    groups: Sequence[Sequence[str]] | None = None,
    form: str | None = None,
    trust: bool = False,
) -> list[Importance]:
    """Return the importance of fields, or of groups of fields shuffled together, on a sample of labelled data."""
    loaded = load(model, trust).reading(form)
    sample = EvidenceSample.for_importance(loaded.learner)
    for batch in loaded.source(data, labels=True):
        sample.add(batch)
    if not len(sample):
        raise DataError("the data holds no rows")
    return importance(loaded.learner, sample.rows, groups, threads=loaded.threads)
