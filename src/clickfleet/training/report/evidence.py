"""Collect what a report shows, from the files of a run and from test data."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from clickfleet.data.batch import Batch, concatenate
from clickfleet.data.dataset import Data
from clickfleet.errors import CheckpointError, ConfigError, DataError
from clickfleet.training import predict
from clickfleet.training.learner import Learner
from clickfleet.training.metrics import Buckets
from clickfleet.training.model import SavedModel
from clickfleet.training.network import Inputs
from clickfleet.training.predict import Results
from clickfleet.training.report.charts import Point
from clickfleet.training.report.stream import Lines, numbered

ROWS_AT_ONCE = 500
SCORED_ROWS = 200_000
"""Rows scored for the importance of all fields together; this takes a second or two."""
SAMPLE_BYTES = 1 << 26


class Importance(NamedTuple):
    """How much worse the metrics become if one field, or several together, are shuffled."""

    name: str
    auc_drop: float
    logloss_rise: float


class EvidenceSample:
    """An even sample of a stream of unknown length: every n-th row, at most twice `limit` rows.

    >>> sample = EvidenceSample(limit=2)
    >>> for i in range(5):
    ...     sample.add(Batch(np.full((2, 1), i, np.float32), np.zeros(2, np.uint64), 1))
    >>> sample.rows.dense.tolist()
    [[0.0], [2.0], [4.0]]
    """

    def __init__(self, limit: int) -> None:
        self.limit, self._every, self._seen, self._size = limit, 1, 0, 0
        self._parts: list[Batch] = []

    @classmethod
    def for_importance(cls, learner: Learner) -> EvidenceSample:
        """Return a sample whose size bounds the time and memory of shuffling every field of a model."""
        slots, fields = len(learner.schema.key_columns), len(learner.schema.key_columns) + len(learner.schema.dense)
        wide = 4 * (slots * (1 + learner.table.factors) + len(learner.schema.dense))
        return cls(max(min(5000, SCORED_ROWS // (2 * fields or 1), SAMPLE_BYTES // (2 * wide or 1)), 200))

    def add(self, batch: Batch) -> None:
        """Add the next rows of the stream."""
        first = -self._seen % self._every
        self._seen += len(batch)
        if first < len(batch):
            self._parts.append(batch.take(np.arange(first, len(batch), self._every)))
            self._size += len(self._parts[-1])
        while self._size > 2 * self.limit:
            self._every *= 2
            kept = self.rows.take(np.arange(0, self._size, 2))
            self._parts, self._size = [kept], len(kept)

    @property
    def rows(self) -> Batch:
        return concatenate(self._parts)

    def __len__(self) -> int:
        return self._size


def importance(
    learner: Learner,
    rows: Batch,
    groups: Sequence[Sequence[str]] | None = None,
    *,
    threads: int = 1,
    seed: int = 0,
) -> list[Importance]:
    """Return the importance of each field, or of each of `groups` of fields shuffled together; the largest first.

    A history that the model reads is one field.
    """
    if rows.labels is None or not len(rows):
        raise DataError("importance needs rows with labels")
    names, dense = list(learner.shape.slot_names), list(learner.shape.dense_names)
    every = [*names, *dense, *(history.name for history in learner.shape.histories)]
    wanted = [[name] for name in every] if groups is None else [list(group) for group in groups]
    unknown = [name for group in wanted for name in group if name not in every]
    if unknown:
        raise ConfigError(f"the model has no field {unknown[0]}", f"fields: {', '.join(every)}")
    order = torch.from_numpy(np.random.default_rng(seed).permutation(len(rows))).to(learner.device)
    x = _inputs(learner, rows)
    starts = range(0, len(rows), ROWS_AT_ONCE)

    @torch.inference_mode()
    def score(group: Sequence[str], start: int) -> NDArray[np.float32]:
        part = slice(start, start + ROWS_AT_ONCE)
        dense_, first, factors = (each[part].clone() for each in (x.dense, x.first, x.factors))
        histories = {}
        for name, events in x.histories.items():
            row = torch.arange(len(rows), device=order.device) if events.row is None else events.row
            histories[name] = events._replace(row=row[order[part] if name in group else part])
        for name in group:
            if name in names:
                field = names.index(name)
                first[:, field], factors[:, field] = x.first[order[part], field], x.factors[order[part], field]
            elif name in dense:
                dense_[:, dense.index(name)] = x.dense[order[part], dense.index(name)]
        scores = learner.loss.scores(learner.model(Inputs(dense_, first, factors, histories)))
        return (scores if scores.ndim == 1 else scores[:, 0]).cpu().numpy()

    was_training = learner.model.training
    learner.model.eval()
    try:
        with ThreadPoolExecutor(threads, "clickfleet-importance", torch.set_num_threads, (1,)) as pool:
            tasks = [[pool.submit(score, group, start) for start in starts] for group in ([], *wanted)]
            base, *shuffled = (_metrics(np.concatenate([task.result() for task in parts]), rows) for parts in tasks)
    finally:
        learner.model.train(was_training)
    ranking = [
        Importance("+".join(group), base[0] - auc, loss - base[1])
        for group, (auc, loss) in zip(wanted, shuffled, strict=True)
    ]
    return sorted(ranking, key=lambda field: -field.auc_drop)


def _inputs(learner: Learner, rows: Batch) -> Inputs:
    embedding = learner.embedding()
    pulled = learner.table.pull(embedding.unique(rows), training=False, out=embedding.room())
    return embedding.inputs(rows, pulled, training=False)


def _metrics(scores: NDArray[np.float32], rows: Batch) -> tuple[float, float]:
    """Return AUC and log loss of the first label."""
    buckets = Buckets()
    assert rows.labels is not None
    labels = rows.labels if rows.corrections is None else rows.corrections.judged()
    labels = labels if labels.ndim == 1 else labels[:, 0]
    known = ~np.isnan(labels)
    weights = None if rows.weights is None else rows.weights[known]
    buckets.update(scores[known], np.ascontiguousarray(labels[known]), weights)
    return buckets.auc, float(buckets.results()["logloss"] or 0.0)


BINS = 20  # of the calibration curve
BARS = 40  # of the histogram of scores


@dataclass
class Evidence:
    """The last evaluation: its metrics, the buckets behind them, and a sample of its rows."""

    results: Results = field(default_factory=dict)
    buckets: Buckets | None = None
    sample: EvidenceSample | None = None
    of: str = "test"
    """The data that was evaluated: test or validation."""

    def gather(
        self, model: SavedModel, data: Data, of: str = "test", report: Callable[[Batch], None] = lambda batch: None
    ) -> Results:
        """Evaluate the model and keep what the report draws. `report` is called with every batch."""
        sample = EvidenceSample.for_importance(model.learner)

        def on_batch(batch: Batch) -> None:
            sample.add(batch)
            report(batch)

        metrics = model.measure(data, on_batch=on_batch)
        results = predict.name_slices(predict.results(metrics), model.names, model.config.train.metrics.slices)
        self.results, self.buckets, self.sample, self.of = results, metrics.buckets, sample, of
        return self.results

    def importance(self, model: SavedModel) -> list[Importance]:
        if self.sample is None or not len(self.sample):
            return []
        return importance(model.learner, self.sample.rows, threads=model.threads)


def read_lines(folder: Path) -> Lines:
    """Return the lines of metrics.jsonl by kind."""
    lines: Lines = {"train": [], "epoch": [], "valid": [], "test": []}
    path = folder / "metrics.jsonl"
    if path.is_file():
        for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            try:
                line = json.loads(text)
                lines.setdefault(line["kind"], []).append(line)
            except (ValueError, KeyError, TypeError) as error:
                raise CheckpointError(
                    f"{path}:{number}: not a line of metrics", "remove the line and try again"
                ) from error
    return lines


def curve(lines: Sequence[Mapping[str, Any]], key: str, limit: int = 200) -> list[Point]:
    """Return the values of a key over the steps, thinned to at most `limit` points."""
    return numbered(lines, key, "step", limit)


def roc(clicks: NDArray[np.float64], others: NDArray[np.float64], limit: int = 200) -> list[Point]:
    """Return the true-positive rate over the false-positive rate, by falling threshold."""
    positives, negatives = (np.concatenate([[0.0], np.cumsum(part[::-1])]) for part in (clicks, others))
    if positives[-1] <= 0 or negatives[-1] <= 0:
        return []
    x, y = negatives / negatives[-1], positives / positives[-1]
    even = np.linspace(0, 1, limit // 2)
    wanted = np.unique(np.concatenate([np.searchsorted(x, even), np.searchsorted(y, even)]))
    wanted = wanted[wanted < len(x)]
    return [(float(a), float(b)) for a, b in zip(x[wanted], y[wanted], strict=True)]


def calibration(
    clicks: NDArray[np.float64], others: NDArray[np.float64]
) -> tuple[list[Point], list[tuple[float, float, float]]]:
    """Return the actual over the predicted click rate in bins of equal weight, and ± two standard errors of each."""
    weight = clicks + others
    total = weight.sum()
    if total <= 0:
        return [], []
    middle = np.minimum((np.arange(len(weight)) + 0.5) / (len(weight) - 1), 1.0)
    bins = np.minimum((np.cumsum(weight) - weight / 2) / total * BINS, BINS - 1).astype(int)
    mass, hits, predicted = (np.bincount(bins, w, BINS) for w in (weight, clicks, weight * middle))
    points, spans = [], []
    for n, clicked, scores in zip(mass, hits, predicted, strict=True):
        if n > 0:
            rate, mean = clicked / n, scores / n
            error = 2 * float(np.sqrt(max(rate * (1 - rate), 0.25 / n) / n))
            points.append((float(mean), float(rate)))
            spans.append((float(mean), float(rate) - error, float(rate) + error))
    return points, spans


def scores(clicks: NDArray[np.float64], others: NDArray[np.float64]) -> tuple[list[float], list[Point], list[Point]]:
    """Return the edges of histogram bars up to the 99.9th percentile, and each class's share of rows per bar."""
    weight = clicks + others
    if weight.sum() <= 0:
        return [], [], []
    thresholds = len(weight) - 1
    last = int(np.searchsorted(np.cumsum(weight), 0.999 * weight.sum())) + 1
    bars = min(BARS, max(last, 1))
    edges = np.linspace(0, min(last / thresholds, 1.0), bars + 1)
    where = np.minimum((np.arange(len(weight)) * bars) // max(last, 1), bars - 1)  # rare high scores in the last bar
    parts = []
    for part in (others, clicks):
        heights = np.bincount(where, part, bars) / (part.sum() or 1.0)
        parts.append([(float(i), float(height)) for i, height in enumerate(heights)])
    return edges.tolist(), parts[0], parts[1]
