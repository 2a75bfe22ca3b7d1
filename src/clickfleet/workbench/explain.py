"""Explain a score: the contribution of each field, and the importance of fields over a data set."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from clickfleet.config.plugins import shown
from clickfleet.data.batch import Batch, concatenate
from clickfleet.data.dataset import Source
from clickfleet.data.names import Names, collect, keys_of, undo
from clickfleet.data.schema import Schema
from clickfleet.errors import DataError
from clickfleet.serve.features import Fields, features_of, overlay
from clickfleet.serve.json_api import logits_of
from clickfleet.store import run_folder
from clickfleet.training.learner import Learner
from clickfleet.training.model import SavedModel, load
from clickfleet.training.predict import Scorer
from clickfleet.training.report.evidence import Importance
from clickfleet.workbench.runner import Facts

Rows = str | Path | Mapping[str, Any] | Sequence[Any]


def explain(
    model: str | Path | SavedModel, row: Rows, line: int = 1, form: str | None = None, trust: bool = False
) -> Facts:
    """Return the contribution of each field to the score of one row; see `explain_rows`."""
    return explain_rows(model, row, line, 1, form, trust)[0]


def explain_rows(
    model: str | Path | SavedModel,
    rows: Rows,
    line: int = 1,
    count: int | None = None,
    form: str | None = None,
    trust: bool = False,
) -> list[Facts]:
    """Return, for each row, the contribution of each field: the score minus the score with that field missing.

    `rows` is a mapping of features or a list of them, the same as JSON, or data files. Of files, `count` rows (default: one)
    from row number `line` (from 1) are explained. Values of file rows are those that the file or the run knows by name.

    A history is one field. With several labels, every score, logit and contribution is a mapping from labels to numbers.
    """
    loaded = model if isinstance(model, SavedModel) else load(model, trust)
    fields = Fields(loaded.schema)
    features = _features(rows)
    if features is not None:
        if count is not None:
            features = features[:count]
        batch, names = fields.rows(features), loaded.names
    else:
        source = loaded.reading(form, 1).source(rows, 1000)
        batch = _read_rows(source, rows, line, count or 1)
        names = _known(loaded, source)
    (missing_score,) = _scores(loaded.learner, fields.rows([{}]))
    statistics = _statistics(loaded.learner, batch)
    explanations = []
    for i in range(len(batch)):
        given = None if features is None else features[i]
        facts = _explain(loaded, fields, batch[i : i + 1], given, names, statistics)
        facts["score_of_nothing"] = _by_label(loaded.schema, missing_score)
        explanations.append(facts if features is not None else {"line": line + i, **facts})
    return explanations


def _explain(
    loaded: SavedModel,
    fields: Fields,
    batch: Batch,
    given: Facts | None,
    names: Names | None,
    statistics: dict[int, tuple[float, float]],
) -> Facts:
    schema, row = loaded.schema, _features_only(batch)
    missing, features = fields.rows([{}]), features_of(fields)
    chances = _scores(
        loaded.learner,
        concatenate([row, *(overlay(fields, missing, row, set(inputs)) for inputs in features.values())]),
    )
    logits = logits_of(chances, schema.tasks)
    parts = []
    for place, (name, inputs) in enumerate(features.items(), 1):
        values = {one: _value(fields, row, one, names) if given is None else given.get(one) for one in inputs}
        parts.append(
            {
                "field": name,
                "value": next(iter(values.values())) if len(values) == 1 else values,
                "contribution": _by_label(schema, chances[0] - chances[place]),
                "logit": _by_label(schema, logits[0] - logits[place]),
                **_field_statistics(loaded, batch, inputs, statistics),
            }
        )
    parts.sort(key=lambda part: -abs(_first(part["logit"])))
    return {
        "score": _by_label(schema, chances[0]),
        "logit": _by_label(schema, logits[0]),
        "label": None if batch.labels is None else _by_label(schema, batch.labels.reshape(len(batch), -1)[0]),
        "contributions": parts,
    }


def _by_label(schema: Schema, values: Any) -> Any:
    """Return the number of one label, or the numbers of several by their names. An unknown label is None."""
    numbers = [None if np.isnan(value) else float(value) for value in values]
    return numbers[0] if len(numbers) == 1 else dict(zip((task.name for task in schema.tasks), numbers, strict=True))


def _first(value: Any) -> float:
    """Return the number of the first label."""
    return float((next(iter(value.values())) if isinstance(value, dict) else value) or 0.0)


def _features(rows: Any) -> list[Facts] | None:
    """Return the rows that are given as features; None if `rows` names files."""
    if isinstance(rows, str) and rows.lstrip()[:1] in ("{", "["):
        try:
            rows = json.loads(rows)
        except (ValueError, RecursionError) as error:
            raise DataError(
                f"the row is not valid JSON: {error}", 'write it as \'{"feature": "value", "other": 3}\''
            ) from None
    if isinstance(rows, Mapping):
        return [dict(rows)]
    if isinstance(rows, Sequence) and not isinstance(rows, str):
        if not rows:
            raise DataError("there are no rows to explain", 'write rows as \'[{"feature": "value"}, …]\'')
        if all(isinstance(row, Mapping) for row in rows):
            return [dict(row) for row in rows]
        if not all(isinstance(row, str | Path) for row in rows):
            raise DataError("a row is not a mapping of features", 'write rows as \'[{"feature": "value"}, …]\'')
    return None


def _read_rows(source: Source, data: Any, line: int, count: int) -> Batch:
    parts, seen = [], 0
    for batch in source:
        first, last = max(line - 1 - seen, 0), min(line - 1 + count - seen, len(batch))
        if first < last:
            parts.append(batch[first:last])
        seen += len(batch)
        if seen >= line - 1 + count:
            break
    if not parts:
        raise DataError(f"{data} has only {seen} rows", f"choose --line between 1 and {seen}")
    return concatenate(parts)


def _known(loaded: SavedModel, source: Source) -> Names | None:
    """Return the names of the run together with those of the data at hand."""
    here, known = collect(source), loaded.names
    return known if here is None else here if known is None else known.merge(here)


def _value(fields: Fields, row: Batch, name: str, names: Names | None) -> Any:
    """Return the value of a field of a row, as in the data; None if it is not known."""
    schema = fields.schema
    if name in fields.dense:
        numbers = [float(f"{undo(schema.dense[i], float(row.dense[0, i])):.6g}") for i in fields.dense[name]]
        return numbers[0] if len(numbers) == 1 else numbers
    for place, slot in enumerate(schema.key_columns):
        if slot.bucket is None and slot.source_name == name and names is not None:
            known = [names.name(slot.rows_of or slot.name, key) for key in keys_of(row, place).tolist()]
            if any(text is None for text in known):
                return None
            return known if slot.multi else known[0] if known else None
    return None


def _features_only(batch: Batch) -> Batch:
    """Return the row without label and other side columns."""
    return Batch(batch.dense, batch.keys, batch.slots, batch.offsets, values=batch.values)


def _scores(learner: Learner, batch: Batch) -> Any:
    """Return the scores [rows, labels]."""
    ((_, output),) = list(Scorer(learner)([batch]))
    return output.astype(np.float64).reshape(len(batch), -1)


def _statistics(learner: Learner, batch: Batch) -> dict[int, tuple[float, float]]:
    """Return shows and clicks of the table rows of a batch, by key."""
    statistics = {}
    wanted = np.unique(batch.keys)
    with learner.table.snapshot() as rows:
        for columns in rows:
            for i in np.flatnonzero(np.isin(columns["key"], wanted)):
                statistics[int(columns["key"][i])] = float(columns["show"][i]), float(columns["click"][i])
    return statistics


def _field_statistics(
    loaded: SavedModel, batch: Batch, inputs: Sequence[str], statistics: dict[int, tuple[float, float]]
) -> Facts:
    """Return the keys of a slot or a history and the statistics of their rows; an empty dictionary for a dense column."""
    columns = [
        place
        for place, slot in enumerate(loaded.schema.key_columns)
        if slot.bucket is None and slot.source_name in inputs
    ]
    if not columns:
        return {}
    if len(inputs) == 1:  # two slots may read one column: show the keys of the first
        columns = columns[:1]
    keys = [key for place in columns for key in keys_of(batch, place).tolist()]
    known = [statistics[key] for key in keys if key in statistics]
    published = loaded.path is not None and run_folder.entries(loaded.path) is not None
    counted = known and not published  # published rows have no statistics
    return {
        "keys": keys,
        "known": len(known),
        "show": sum(shows for shows, _ in known) if counted else None,
        "click": sum(clicks for _, clicks in known) if counted else None,
    }


def explanation_text(explanation: Facts, top: int = 20) -> list[str]:
    """Format the result of `explain`, largest contributions to the first label first."""
    label = "" if explanation["label"] is None else f", label {_numbers(explanation['label'], 'g')}"
    row = f"row {explanation['line']}: " if "line" in explanation else ""
    logit = _numbers(explanation["logit"], "+.4f")
    lines = [f"{row}score {_numbers(explanation['score'], '.6f')} (logit {logit}){label}"]
    lines.append(f"a row without any field scores {_numbers(explanation['score_of_nothing'], '.6f')}")
    moved = [part for part in explanation["contributions"] if _any(part["logit"])]
    for part in moved[:top]:
        text = _text(part["value"])
        value = "" if text is None else f" = {shown(text)}"
        if text is None and part.get("keys"):  # from a file: `inspect --key` shows the row
            value = f" (key {', '.join(map(str, part['keys'][:3]))}{', …' if len(part['keys']) > 3 else ''})"
        seen = ""
        if "keys" in part:
            seen = "" if part["known"] else "  unknown to the model"
        if part.get("show") is not None:
            seen = f"  {part['show']:g} shows, {part['click']:g} clicks"
        amount, logit = _numbers(part["contribution"], ">+10.6f"), _numbers(part["logit"], ">+8.4f")
        lines.append(f"{amount}  logit {logit}  {part['field']}{value}{seen}")
    rest = len(explanation["contributions"]) - len(moved[:top])
    if rest:
        lines.append(f"{rest} other fields contribute less or nothing")
    return lines


def _numbers(value: Any, form: str) -> str:
    """Format the number of one label, or those of several with their names."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {_numbers(one, form)}" for name, one in value.items())
    return "unknown" if value is None else f"{value:{form}}"


def _any(value: Any) -> bool:
    return any(value.values()) if isinstance(value, dict) else bool(value)


def _text(value: Any) -> str | None:
    """Return the value of a field; of a history, those of its inputs that are known."""
    if isinstance(value, dict) and None in value.values():
        known = ", ".join(f"{name} {one}" for name, one in value.items() if one is not None)
        return known or None
    return None if value is None else str(value)


def field_importance(
    model: str | Path,
    data: Any,
    groups: Sequence[Sequence[str]] | None = None,
    form: str | None = None,
    trust: bool = False,
) -> list[Importance]:
    """Return the importance of fields, or of groups of fields shuffled together, on a sample of labelled data."""
    return load(model, trust).reading(form).importance(data, groups)
