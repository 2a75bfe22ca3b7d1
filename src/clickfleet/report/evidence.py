"""What a report draws, from the files of a run and from test data."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clickfleet import scoring
from clickfleet.errors import ClickfleetError
from clickfleet.importance import Importance, Sample, importance
from clickfleet.metrics import Buckets
from clickfleet.opening import Data
from clickfleet.report.charts import Point
from clickfleet.scoring import Results
from clickfleet.trained import Trained

BINS = 20
FACES = 40


@dataclass
class Evidence:
    """What the last evaluation saw: its metrics, the buckets behind them, and some of its rows."""

    results: Results = field(default_factory=dict)
    buckets: Buckets | None = None
    sample: Sample | None = None

    def gather(self, model: Trained, data: Data) -> Results:
        """Evaluates, and keeps what it takes to draw."""
        sample = Sample.for_importance(model.learner)
        metrics = model.measure(data, look=sample.add)
        self.results, self.buckets, self.sample = scoring.results(metrics), metrics.buckets, sample
        return self.results

    def importance(self, model: Trained) -> list[Importance]:
        if self.sample is None or not len(self.sample):
            return []
        return importance(model.learner, self.sample.rows, threads=model.threads)


def read_lines(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """The lines of metrics.jsonl by their kind."""
    found: dict[str, list[dict[str, Any]]] = {"train": [], "epoch": [], "test": []}
    path = folder / "metrics.jsonl"
    if path.is_file():
        for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            try:
                line = json.loads(text)
                found.setdefault(line["kind"], []).append(line)
            except (ValueError, KeyError, TypeError) as error:
                raise ClickfleetError(f"{path}:{number}: not a line of metrics", "remove it, and try again") from error
    return found


def curve(lines: list[dict[str, Any]], key: str, limit: int = 200) -> list[Point]:
    """The values of a key over the steps, thinned to at most `limit`."""
    points = [(float(line["step"]), float(line[key])) for line in lines if line.get(key) is not None]
    every = -(-len(points) // limit) or 1
    return points[::-1][::every][::-1]  # the last one stays


def roc(clicks: NDArray[np.float64], others: NDArray[np.float64], limit: int = 200) -> list[Point]:
    """True over false positives, as the threshold falls."""
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
    """Actual over predicted click rate in bins of equal weight, and the span of two standard errors of each."""
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
    """Edges of bars up to the highest score that is not rare, and each class's share of its rows in them."""
    weight = clicks + others
    if weight.sum() <= 0:
        return [], [], []
    thresholds = len(weight) - 1
    last = int(np.searchsorted(np.cumsum(weight), 0.999 * weight.sum())) + 1
    faces = min(FACES, max(last, 1))
    edges = np.linspace(0, min(last / thresholds, 1.0), faces + 1)
    where = np.minimum((np.arange(len(weight)) * faces) // max(last, 1), faces - 1)  # the rare ones in the last bar
    parts = []
    for part in (others, clicks):
        heights = np.bincount(where, part, faces) / (part.sum() or 1.0)
        parts.append([(float(i), float(height)) for i, height in enumerate(heights)])
    return edges.tolist(), parts[0], parts[1]
