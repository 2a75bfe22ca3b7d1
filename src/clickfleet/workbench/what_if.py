"""What the formats of published rows would cost and change: bytes, drift of scores, and AUC."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from clickfleet.data.logs.synth import auc
from clickfleet.errors import CheckpointError, ConfigError
from clickfleet.store import row_format
from clickfleet.store.row_format import FORMATS, RowFormat
from clickfleet.training.learner import Learner
from clickfleet.training.model import SavedModel
from clickfleet.training.predict import Scorer
from clickfleet.workbench.parity import first_rows

SCORED_ROWS = 50_000


@dataclass(frozen=True)
class FormatFacts:
    """What a format of rows costs and changes."""

    format: RowFormat
    bytes: int
    """Of a base's rows in its files."""
    bytes_per_row: float
    memory_per_row: float
    """What a server reads to find rows: keys, numbers and index."""
    ratio: float
    """Bytes, compared with float32."""
    drift: float | None
    """Largest change of a score."""
    mean_drift: float | None
    auc: float | None
    auc_change: float | None
    problem: str | None = None
    """Why rows cannot be published in this format."""


@dataclass(frozen=True)
class WhatIf:
    """What each format would cost and change."""

    rows: int
    short_rows: int
    scored: int
    """Rows of the data that were scored."""
    formats: list[FormatFacts]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def what_if(model: SavedModel, data: Sequence[str], limit: int = SCORED_ROWS) -> WhatIf:
    """Compare the formats: their bytes for all rows of the model, drift and AUC on the first `limit` rows of `data`."""
    learner = model.learner
    full, short, problems = _count(learner)
    found = _score(model, data, limit, [form for form in FORMATS if form not in problems])
    exact = found["float32"]
    rows, slots, factors = full + short, len(learner.schema.slots), learner.table.factors

    def total(size: Callable[[int], int]) -> int:
        return full * size(factors) + short * size(0)

    plain = total(lambda width: row_format.file_bytes("float32", width, slots))
    out = []
    for form in FORMATS:
        in_files = total(lambda width, form=form: row_format.file_bytes(form, width, slots))  # type: ignore[misc]
        memory = total(lambda width, form=form: row_format.memory_bytes(form, width))  # type: ignore[misc]
        memory += sum(row_format.index_bytes(count) for count in (full, short) if count)
        scored = found.get(form)
        out.append(
            FormatFacts(
                form,
                in_files,
                in_files / max(1, rows),
                memory / max(1, rows),
                in_files / max(1, plain),
                None if scored is None else scored.drift(exact).max(initial=0.0).item(),
                None if scored is None else scored.drift(exact).mean().item(),
                None if scored is None else scored.auc,
                None if scored is None or scored.auc is None or exact.auc is None else scored.auc - exact.auc,
                problems.get(form),
            )
        )
    return WhatIf(rows, short, len(exact.scores), out)


def _count(learner: Learner) -> tuple[int, int, dict[RowFormat, str]]:
    """Return the numbers of full and short rows of a base, and why some formats cannot hold them."""
    counts, problems = [0, 0], dict[RowFormat, str]()
    changes = learner.table.cut_changes(base=True)
    try:
        for columns in changes:
            width = learner.table.factors if columns["full"] else 0
            counts[width == 0] += len(columns["key"])
            for form in FORMATS[1:]:
                try:
                    row_format.pack(form, columns, width)
                except CheckpointError as error:
                    problems.setdefault(form, str(error))
    finally:
        changes.abort()
    return counts[0], counts[1], problems


@dataclass(frozen=True)
class _Scored:
    scores: Any
    """Of the first label."""
    auc: float | None

    def drift(self, other: _Scored) -> Any:
        return np.abs(self.scores - other.scores) if len(self.scores) else np.zeros(1, np.float32)


def _score(
    model: SavedModel, data: Sequence[str], limit: int, formats: Sequence[RowFormat]
) -> dict[RowFormat, _Scored]:
    """Score the data once per format, batch by batch."""
    if not data:
        raise ConfigError("there is no data to score", "give --data FILES, or set data.test")
    learner = model.learner
    labels: list[Any] = []
    scores: dict[RowFormat, list[Any]] = {form: [] for form in formats}
    scorers = {form: Scorer(learner, rows=form) for form in formats}
    for batch in first_rows(model.source(list(data), labels=True), limit):
        assert batch.labels is not None
        labels.append(batch.labels.reshape(len(batch), -1)[:, 0].copy())
        for form, scorer in scorers.items():
            ((_, found),) = list(scorer([batch]))
            scores[form].append(found.reshape(len(batch), -1)[:, 0].copy())
    label = np.concatenate([np.empty(0, np.float32), *labels])
    known = np.isfinite(label)
    clicks = (label[known] > 0).astype(np.int8)
    binary = learner.schema.tasks[0].loss == "log" and 0 < clicks.sum() < len(clicks)
    out = {}
    for form in formats:
        joined = np.concatenate([np.empty(0, np.float32), *scores[form]])
        out[form] = _Scored(joined, auc(joined[known], clicks) if binary else None)
    return out
