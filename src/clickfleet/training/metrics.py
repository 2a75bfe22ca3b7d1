"""AUC, log loss, calibration and related metrics: streaming, mergeable, in bounded memory.

Scores fall into buckets floor(p·thresholds), 4097 by default. AUC is exact except for ties within a bucket.
A score outside [0, 1] counts only as invalid. Updates run in the native core without the GIL.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NotRequired, TypedDict, cast

import numpy as np
from numpy.typing import NDArray

from clickfleet import _core
from clickfleet.config.load import Config
from clickfleet.config.plugins import closest
from clickfleet.data.batch import Floats, Keys
from clickfleet.data.schema import Label, Schema
from clickfleet.errors import CheckpointError, ConfigError

State = dict[str, NDArray[Any]]


class MetricResults(TypedDict):
    """Every metric by name; None if the rows do not determine it."""

    rows: int
    invalid: int
    auc: float
    logloss: float | None
    ne: float | None
    accuracy: float | None
    calibration: float | None
    bucket_error: float | None
    actual_ctr: float | None
    predicted_ctr: float | None
    mae: float | None
    rmse: float | None
    sliding_auc: NotRequired[float]
    gauc: NotRequired[float]
    tasks: NotRequired[dict[str, dict[str, Any]]]
    """The metrics of every label, if there are several. Those with the suffix `_given` count only the rows where the label in
    `given` is 1; the others count all rows."""


MONITORS: dict[str, float] = {
    "auc": math.inf,
    "gauc": math.inf,
    "accuracy": math.inf,
    "logloss": -math.inf,
    "ne": -math.inf,
    "mae": -math.inf,
    "rmse": -math.inf,
    "bucket_error": -math.inf,
    "calibration": 1.0,
}
"""Metrics that tell which model is better, each with its best value."""
NAMES = {"auc": "AUC", "gauc": "GAUC", "logloss": "log loss", "bucket_error": "bucket error"}


GIVEN = "_given"
"""Suffix of metrics over the rows where the label in `given` is 1."""
NUMBER_MONITORS = ("rmse", "mae", "calibration")
"""Metrics of a label that is not 0 or 1."""


def check_monitor(name: str, schema: Schema | None, key: str = "train.monitor", own: Iterable[str] = ()) -> None:
    """Refuse a metric that evaluation does not return. `own`: the user's metrics. `buy.auc` is a metric of the label buy.

    Without a schema, check only the name of the metric.
    """
    if name in own:
        return
    label, _, metric = name.rpartition(".")
    tasks = {} if schema is None else {task.name: task for task in schema.tasks}
    if label and schema is None:
        metric = metric.removesuffix(GIVEN)
    elif label:
        if label not in tasks:
            raise ConfigError(f"unknown label {label!r} in {key}={name}{closest(label, tasks)}")
        if metric.endswith(GIVEN) and not tasks[label].given:
            raise ConfigError(f"{key}={name}: the label {label} has no given", f"use {name.removesuffix(GIVEN)}")
        metric = metric.removesuffix(GIVEN)
        if tasks[label].loss != "log" and metric not in NUMBER_MONITORS:
            raise ConfigError(f"{key}={name}: the label {label} is a number", f"use {', '.join(NUMBER_MONITORS)}")
    if metric not in MONITORS:
        raise ConfigError(f"unknown metric {name!r} in {key}{closest(metric, [*own, *MONITORS])}")
    if metric == "gauc" and schema is not None and schema.group is None:
        raise ConfigError(f"{key}={name} needs a group column", "name one in the schema, such as group: user")


def value_of(results: Mapping[str, Any], name: str) -> float | None:
    """Return a metric of some results by its name.

    >>> results = {"auc": 0.7, "tasks": {"click": {"auc": 0.7}, "buy": {"auc": 0.8}}}
    >>> value_of(results, "auc"), value_of(results, "buy.auc"), value_of({"auc": 0.7}, "click.auc")
    (0.7, 0.8, 0.7)
    """
    label, _, metric = name.rpartition(".")
    if not label or name in results:
        return cast(float | None, results.get(name))
    part = results["tasks"].get(label, {}) if "tasks" in results else results
    return cast(float | None, part.get(metric))


def by_label(results: Mapping[str, Any]) -> dict[str, Any]:
    """Return all metrics of several labels by their full names; nothing for one label.

    >>> by_label({"auc": 0.7, "tasks": {"click": {"auc": 0.7}, "buy": {"auc": 0.8, "rows": 3}}})
    {'click.auc': 0.7, 'buy.auc': 0.8, 'buy.rows': 3}
    """
    tasks = cast(Mapping[str, Mapping[str, Any]], results.get("tasks") or {})
    return {f"{label}.{metric}": value for label, part in tasks.items() for metric, value in part.items()}


def of_other_labels(results: Mapping[str, Any]) -> dict[str, float | None]:
    """Return the most important metric of each label but the first: AUC, or RMSE of a number.

    >>> of_other_labels({"auc": 0.7, "tasks": {"click": {"auc": 0.7}, "buy": {"auc": 0.8, "rmse": 0.1}}})
    {'buy.auc': 0.8}
    """
    others = list((results.get("tasks") or {}).items())[1:]
    return {
        f"{label}.{metric}": part[metric] for label, part in others for metric in ["auc" if "auc" in part else "rmse"]
    }


def metric_name(name: str) -> str:
    """Return the name of a metric for people.

    >>> metric_name("auc"), metric_name("logloss"), metric_name("rmse"), metric_name("buy.auc_given")
    ('AUC', 'log loss', 'rmse', 'AUC of buy given')
    """
    label, _, metric = name.rpartition(".")
    plain = metric.removesuffix(GIVEN)
    return NAMES.get(plain, plain) + (f" of {label}" if label else "") + (" given" if plain != metric else "")


def distance(name: str, value: float | None) -> float:
    """Return how far a value of a metric is from its best value, for comparisons: smaller is better.

    >>> distance("auc", 0.8) < distance("auc", 0.7), distance("logloss", 0.3) < distance("logloss", 0.4)
    (True, True)
    >>> distance("calibration", 0.95) < distance("calibration", 1.1), distance("ne", None)
    (True, inf)
    """
    name = name.rpartition(".")[2].removesuffix(GIVEN)
    best = MONITORS.get(name, math.inf)  # of the user's own metrics, the largest value is the best
    if value is None or not math.isfinite(value):
        return math.inf
    return -value if best == math.inf else value if best == -math.inf else abs(value - best)


TOTALS = ("rows", "invalid", "weight", "clicks", "predicted", "absolute", "squared", "correct", "loss")
assert len(TOTALS) == _core.BUCKET_TOTALS
LARGE_ENOUGH = 0.05
"""Highest relative standard error of the expected clicks at which a group of rows is used to judge calibration."""


class Buckets:
    """The metrics that follow from sums and buckets.

    >>> scores, labels = np.array([0.9, 0.8, 0.4, 0.1], np.float32), np.array([1, 0, 1, 0], np.float32)
    >>> buckets = Buckets()
    >>> buckets.update(scores, labels)
    >>> buckets.results()["auc"], buckets.results()["accuracy"]
    (0.75, 0.5)
    """

    def __init__(self, thresholds: int = 4096) -> None:
        if thresholds < 1:
            raise ConfigError(f"train.metrics.thresholds must be at least 1, not {thresholds}", "the default is 4096")
        self.thresholds = thresholds
        self.core = _core.Buckets(thresholds)

    def update(self, scores: Floats, labels: Floats, weights: Floats | None = None) -> None:
        """Add the rows of a batch. A label above 0 is a click."""
        self.core.update(scores, labels, weights)

    def merge(self, other: Buckets) -> None:
        """Add the rows of another worker."""
        check_thresholds(other.thresholds, self.thresholds)
        self.core.merge(other.core)

    def reset(self) -> None:
        self.core.reset()

    @property
    def auc(self) -> float:
        """The AUC; 0.5 if one of the two classes is missing."""
        return cast(float, self.core.auc())

    def counts(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the weight of clicks and of other rows per bucket, for ROC, calibration curve and histogram."""
        numbers = self.state()["buckets"][len(TOTALS) :]
        return numbers[: self.thresholds + 1], numbers[self.thresholds + 1 :]

    def results(self) -> MetricResults:
        """Return every metric by name; None if the rows do not determine it.

        `ne` is the log loss divided by that of always predicting the mean CTR. `calibration` is COPC: actual clicks over
        predicted clicks. `bucket_error` is None until there are enough rows to judge it; 0 would mean a perfect model.
        """
        sums = dict(zip(TOTALS, self.state()["buckets"].tolist(), strict=False))
        rows, invalid, n = int(sums["rows"]), int(sums["invalid"]), sums["weight"]
        if n <= 0:
            return {
                "rows": rows,
                "invalid": invalid,
                "auc": self.auc,
                "logloss": None,
                "ne": None,
                "accuracy": None,
                "calibration": None,
                "bucket_error": None,
                "actual_ctr": None,
                "predicted_ctr": None,
                "mae": None,
                "rmse": None,
            }
        actual, predicted, loss = sums["clicks"] / n, sums["predicted"] / n, sums["loss"] / n
        entropy = -sum(p * math.log(p) for p in (actual, 1 - actual) if p > 0)
        return {
            "rows": rows,
            "invalid": invalid,
            "auc": self.auc,
            "logloss": loss,
            "ne": loss / entropy if entropy else None,
            "accuracy": sums["correct"] / n,
            "calibration": actual / predicted if predicted > 1e-6 else 0.0,
            "bucket_error": self._bucket_error(sums),
            "actual_ctr": actual,
            "predicted_ctr": predicted,
            "mae": sums["absolute"] / n,
            "rmse": math.sqrt(sums["squared"] / n),
        }

    def _bucket_error(self, sums: dict[str, float]) -> float | None:
        """Return the mean relative error of the predicted CTR over groups of similar scores; None if most rows cannot be judged.

        If most rows are in groups that are too small, such as those with scores near 0, these groups are judged as one.
        """
        error, shown, expected, clicked = self.core.calibration_groups()
        left = sums["weight"] - shown
        if left > shown:
            blur = shown / (2 * (self.thresholds + 1))  # groups use the lower edge of each score's bucket
            predicted = sums["predicted"] - expected - blur
            if not (0 < predicted < left and blur < LARGE_ENOUGH * predicted):
                return None
            if math.sqrt((1 - predicted / left) / predicted) >= LARGE_ENOUGH:
                return None
            error += abs((sums["clicks"] - clicked) / predicted - 1) * left
            shown += left
        return error / shown if shown > 0 else None

    def state(self) -> State:
        out = np.empty(len(TOTALS) + 2 * (self.thresholds + 1))
        self.core.write(out)
        return {"buckets": out}

    def restore(self, state: State) -> None:
        check_size("buckets", state, len(TOTALS) + 2 * (self.thresholds + 1))
        self.core.read(state["buckets"])


class Sliding:
    """AUC over the last `size` batches."""

    def __init__(self, size: int = 20, thresholds: int = 4096) -> None:
        if size < 1:
            raise ConfigError(f"train.metrics.sliding must be at least 1, not {size}", "the default is 20")
        self.size = size
        self.numbers = size * (len(TOTALS) + 2 * (thresholds + 1))
        self.core = _core.Window(thresholds, size)

    def update(self, scores: Floats, labels: Floats, weights: Floats | None = None) -> None:
        self.core.update(scores, labels, weights)

    @property
    def auc(self) -> float:
        return cast(float, self.core.auc())

    def state(self) -> State:
        out = np.empty(self.numbers)
        self.core.write(out)
        return {"window": out, "next": np.array([self.core.next])}

    def restore(self, state: State) -> None:
        check_size("window", state, self.numbers)
        check_size("next", state, 1)
        self.core.read(state["window"], int(state["next"][0]))


class Groups:
    """GAUC: the AUC within each group of rows, such as those of a user, averaged by weight over groups with both classes.

    It is exact up to `limit` rows (16 bytes each). Beyond that it uses a fair sample of whole groups, the same on every worker.
    """

    def __init__(self, limit: int = 10_000_000) -> None:
        self.core = _core.Groups(limit)

    def update(self, groups: Keys, scores: Floats, labels: Floats, weights: Floats | None = None) -> None:
        self.core.update(groups, scores, labels, weights)

    def merge(self, other: Groups) -> None:
        self.core.merge(other.core)

    def reset(self) -> None:
        self.core.reset()

    @property
    def gauc(self) -> float:
        return cast(float, self.core.gauc())

    def state(self) -> State:
        n = len(self.core)
        groups, scores, weights = np.empty(n, np.uint64), np.empty(n, np.float32), np.empty(n, np.float32)
        self.core.write(groups, scores, weights)
        return {"groups": groups, "scores": scores, "weights": weights, "level": np.array([self.core.level])}

    def restore(self, state: State) -> None:
        for key in ("scores", "weights"):
            check_size(key, state, len(state["groups"]))
        self.core.reset()
        self.core.append(state["groups"], state["scores"], state["weights"], int(state["level"][0]))


class Slices:
    """The metrics per value of a column, for the first `limit` values seen. Later values are counted together as None."""

    def __init__(self, limit: int = 1000, thresholds: int = 1024) -> None:
        self.limit, self.thresholds = limit, thresholds
        self.core = _core.Slices(thresholds, limit)

    def update(self, values: Keys, scores: Floats, labels: Floats, weights: Floats | None = None) -> None:
        self.core.update(values, scores, labels, weights)

    def merge(self, other: Slices) -> None:
        check_thresholds(other.thresholds, self.thresholds)
        self.core.merge(other.core)

    def reset(self) -> None:
        self.core = _core.Slices(self.thresholds, self.limit)

    def results(self) -> dict[int | None, MetricResults]:
        """Return the metrics by value, in order of appearance. None holds the values beyond the limit, if any."""
        state, out = self.state(), {}
        for value, numbers in zip([*state["values"].tolist(), None], state["slices"], strict=True):
            buckets = Buckets(self.thresholds)
            buckets.restore({"buckets": numbers})
            out[value] = buckets.results()
        if not out[None]["rows"] and not out[None]["invalid"]:
            del out[None]
        return out

    def state(self) -> State:
        values = np.empty(len(self.core), np.uint64)
        self.core.ids(values)
        slices = np.empty((len(values) + 1, len(TOTALS) + 2 * (self.thresholds + 1)))
        for row, value in zip(slices, values.tolist(), strict=False):
            self.core.write(value, False, row)
        self.core.write(0, True, slices[-1])
        return {"values": values, "slices": slices}

    def restore(self, state: State) -> None:
        values, slices = state["values"], state["slices"]
        if slices.shape != (len(values) + 1, len(TOTALS) + 2 * (self.thresholds + 1)) or len(values) > self.limit:
            raise CheckpointError(
                f"the saved slices have shape {slices.shape}, which does not match {self.thresholds} thresholds and "
                f"at most {self.limit} slices",
                "resume with the metric settings of the saved run",
            )
        self.reset()
        for row, value in zip(slices, values.tolist(), strict=False):
            self.core.read(value, False, row)
        self.core.read(0, True, slices[-1])


class Numbers:
    """The metrics of a label that is a number or a count.

    >>> numbers = Numbers()
    >>> numbers.update(np.array([1, 2], np.float32), np.array([1, 4], np.float32))
    >>> numbers.results()["rmse"], numbers.results()["mean_label"]
    (1.4142135623730951, 2.5)
    """

    SUMS = ("rows", "invalid", "weight", "labels", "predicted", "absolute", "squared")

    def __init__(self) -> None:
        self._sums = np.zeros(len(self.SUMS))

    def update(self, scores: Floats, labels: Floats, weights: Floats | None = None) -> None:
        good = np.isfinite(scores)
        score, label = scores[good].astype(np.float64), labels[good].astype(np.float64)
        weight = np.ones(len(score)) if weights is None else weights[good].astype(np.float64)
        error = score - label
        parts = (weight, weight * label, weight * score, weight * np.abs(error), weight * error**2)
        self._sums += [len(score), len(scores) - len(score), *(part.sum() for part in parts)]

    def merge(self, other: Numbers) -> None:
        self._sums += other._sums

    def reset(self) -> None:
        self._sums[:] = 0

    def results(self) -> dict[str, float | int | None]:
        """Return the metrics; `calibration` is the mean label over the mean prediction."""
        rows, invalid, n, labels, predicted, absolute, squared = self._sums.tolist()
        known = n > 0
        return {
            "rows": int(rows),
            "invalid": int(invalid),
            "rmse": math.sqrt(squared / n) if known else None,
            "mae": absolute / n if known else None,
            "mean_label": labels / n if known else None,
            "mean_score": predicted / n if known else None,
            "calibration": labels / predicted if known and abs(predicted) > 1e-9 else None,
        }

    def state(self) -> State:
        return {"sums": self._sums.copy()}

    def restore(self, state: State) -> None:
        check_size("sums", state, len(self.SUMS))
        self._sums[:] = state["sums"]


class Space:
    """The metrics of one label over the rows of one space: all rows, or those where the label in `given` is 1."""

    def __init__(self, task: Label, thresholds: int, groups: bool) -> None:
        self.sums: Buckets | Numbers = Buckets(thresholds) if task.loss == "log" else Numbers()
        self.groups = Groups() if groups and task.loss == "log" else None

    def update(self, scores: Floats, labels: Floats, weights: Floats | None, groups: Keys | None) -> None:
        self.sums.update(scores, labels, weights)
        if self.groups is not None and groups is not None:
            self.groups.update(groups, scores, labels, weights)

    def results(self) -> dict[str, Any]:
        out: dict[str, Any] = dict(self.sums.results())
        if self.groups is not None:
            out["gauc"] = self.groups.gauc
        return out


class Tasks:
    """The metrics of several labels. `scores` and `labels` are [B, T]; NaN is an unknown label.

    Over all rows, the score of a label with `given` is the product of both scores, and its label is 1 if both are. A label counts when
    it becomes known: without a click nothing was bought; if feedback turns that into a click, a purchase is unknown again and counts
    once more when it is known.
    """

    def __init__(self, tasks: tuple[Label, ...], thresholds: int, groups: bool) -> None:
        self.tasks = tasks
        self._parent = {task.name: [other.name for other in tasks].index(task.given) for task in tasks if task.given}
        self.spaces: dict[tuple[str, str], Space] = {}
        for task in tasks:
            self.spaces[task.name, ""] = Space(task, thresholds, groups)
            if task.given:
                self.spaces[task.name, GIVEN] = Space(task, thresholds, groups)

    def update(
        self,
        scores: Floats,
        labels: Floats,
        weights: Floats | None = None,
        groups: Keys | None = None,
        previous: Floats | None = None,
    ) -> None:
        before = None if previous is None else {space: label for space, _, label in self._by_space(scores, previous)}
        for space, score, label in self._by_space(scores, labels):
            if before is not None:  # an earlier row of the same show counted there
                label = np.where(np.isnan(before[space]), label, np.nan)
            self._add(space, score, label, weights, groups)

    def _by_space(self, scores: Floats, labels: Floats) -> Iterator[tuple[tuple[str, str], Floats, Any]]:
        """Yield the scores and labels of every space; NaN where a row does not count in it."""
        everywhere: list[tuple[Floats, Floats]] = []  # score and label of each task over all rows
        for i, task in enumerate(self.tasks):
            score, label = np.ascontiguousarray(scores[:, i]), np.ascontiguousarray(labels[:, i])
            if task.given:
                parent = self._parent[task.name]
                yield (task.name, GIVEN), score, np.where(labels[:, parent] == 1, label, np.nan)
                before_score, before = everywhere[parent]
                label = np.where(before == 1, label, np.where(np.isnan(before), np.nan, 0)).astype(np.float32)
                score = score * before_score  # of a number, this is its expectation
            everywhere.append((score, label))
            yield (task.name, ""), score, label

    def _add(
        self, space: tuple[str, str], scores: Floats, labels: Any, weights: Floats | None, groups: Keys | None
    ) -> None:
        known = ~np.isnan(labels)
        if known.all():
            self.spaces[space].update(scores, labels.astype(np.float32), weights, groups)
            return
        weights, groups = (None if column is None else column[known] for column in (weights, groups))
        self.spaces[space].update(scores[known], labels[known].astype(np.float32), weights, groups)

    def results(self) -> dict[str, dict[str, Any]]:
        """Return the metrics of each label by name."""
        out: dict[str, dict[str, Any]] = {task.name: {} for task in self.tasks}
        for (name, suffix), space in self.spaces.items():
            out[name] |= {f"{metric}{suffix}": value for metric, value in space.results().items()}
        return out

    def parts(self) -> dict[str, Buckets | Numbers | Groups]:
        parts: dict[str, Buckets | Numbers | Groups] = {}
        for (name, suffix), space in self.spaces.items():
            parts[f"label {name}{suffix}"] = space.sums
            if space.groups is not None:
                parts[f"groups of {name}{suffix}"] = space.groups
        return parts


class Metrics:
    """All metrics over one stream of batches. With several labels, those without a name are of the first.

    >>> metrics = Metrics(sliding=2)
    >>> metrics.update(np.array([0.2, 0.9], np.float32), np.array([0, 1], np.float32))
    >>> metrics.results()["auc"], metrics.results()["sliding_auc"]
    (1.0, 1.0)
    """

    def __init__(
        self,
        thresholds: int = 4096,
        sliding: int | None = None,
        groups: bool = False,
        slices: bool = False,
        tasks: tuple[Label, ...] = (),
    ) -> None:
        self.buckets = Buckets(thresholds)
        self.tasks = Tasks(tasks, thresholds, groups) if len(tasks) > 1 else None
        self.sliding = Sliding(sliding, thresholds) if sliding else None
        self.groups = Groups() if groups else None
        self.slices = Slices() if slices else None
        self.own: dict[str, float] = {}
        """Results of the user's metric functions."""

    def update(
        self,
        scores: Floats,
        labels: Floats,
        weights: Floats | None = None,
        groups: Keys | None = None,
        slices: Keys | None = None,
        previous: Floats | None = None,
    ) -> None:
        """Add a batch. `groups` and `slices` hold a key per row; they are required if these metrics are on.

        With several labels, `scores` and `labels` are [B, T]. `previous` are labels that an earlier row of the same show had; they
        were counted then, and so the values that replace them are not.
        """
        if self.tasks is not None:
            self.tasks.update(scores, labels, weights, groups, previous)
        if self.tasks is not None or previous is not None:
            scores, labels = (column.reshape(len(column), -1)[:, 0] for column in (scores, labels))
            known = ~np.isnan(labels)
            if previous is not None:
                known &= np.isnan(previous.reshape(len(previous), -1)[:, 0])
            scores, labels = np.ascontiguousarray(scores[known]), np.ascontiguousarray(labels[known])
            columns = (weights, groups, slices)
            weights, groups, slices = (None if column is None else column[known] for column in columns)  # type: ignore[assignment]
        self.buckets.update(scores, labels, weights)
        if self.sliding is not None:
            self.sliding.update(scores, labels, weights)
        for name, metric, keys in (("groups", self.groups, groups), ("slices", self.slices, slices)):
            if metric is not None:
                if keys is None:
                    raise ConfigError(f"metrics by {name} need a key per row, but the batch has none", "name a column")
                metric.update(keys, scores, labels, weights)

    def merge(self, other: Metrics) -> None:
        """Add the rows of another worker, except for the sliding AUC: batches of two workers have no common order."""
        self.buckets.merge(other.buckets)
        if self.tasks is not None and other.tasks is not None:
            for part, theirs in zip(self.tasks.parts().values(), other.tasks.parts().values(), strict=True):
                part.merge(theirs)  # type: ignore[arg-type]
        if self.groups is not None and other.groups is not None:
            self.groups.merge(other.groups)
        if self.slices is not None and other.slices is not None:
            self.slices.merge(other.slices)

    def reset(self) -> None:
        """Discard all rows except those of the sliding window."""
        for metric in (self.buckets, self.groups, self.slices, *(self.tasks.parts().values() if self.tasks else ())):
            if metric is not None:
                metric.reset()

    def results(self) -> MetricResults:
        out = self.buckets.results()
        if self.sliding is not None:
            out["sliding_auc"] = self.sliding.auc
        if self.groups is not None:
            out["gauc"] = self.groups.gauc
        if self.tasks is not None:
            out["tasks"] = self.tasks.results()
        return out

    def buckets_of(self, name: str) -> Buckets:
        """Return the buckets behind a metric such as `auc`, `buy.auc` or `buy.auc_given`."""
        label, _, metric = name.rpartition(".")
        if not label or self.tasks is None:
            return self.buckets
        sums = self.tasks.spaces[label, GIVEN if metric.endswith(GIVEN) else ""].sums
        assert isinstance(sums, Buckets), "the label is 0 or 1"
        return sums

    def state(self) -> State:
        """Return arrays by dotted name, such as `buckets.buckets`."""
        return {f"{part}.{key}": array for part, m in self.parts().items() for key, array in m.state().items()}

    def restore(self, state: State) -> None:
        for part, metric in self.parts().items():
            saved = {key[len(part) + 1 :]: array for key, array in state.items() if key.startswith(part + ".")}
            if not saved:
                raise CheckpointError(
                    f"the saved metrics have no {part}", "resume with the metric settings of the saved run"
                )
            metric.restore(saved)

    def parts(self) -> dict[str, Buckets | Numbers | Sliding | Groups | Slices]:
        parts = {"buckets": self.buckets, "sliding": self.sliding, "groups": self.groups, "slices": self.slices}
        return {name: part for name, part in parts.items() if part is not None} | (
            self.tasks.parts() if self.tasks else {}
        )


def check_thresholds(other: int, expected: int) -> None:
    if other != expected:
        raise ConfigError(f"cannot merge metrics with thresholds {other} and {expected}", "use the same thresholds")


def check_size(key: str, state: State, numbers: int) -> None:
    if key not in state or state[key].shape != (numbers,):
        size = state[key].size if key in state else "no"
        raise CheckpointError(
            f"the saved metrics hold {size} numbers for {key}, expected {numbers}",
            "resume with the metric settings of the saved run",
        )


def make_metrics(config: Config, schema: Schema) -> Metrics:
    """Return the metrics that a configuration asks for."""
    settings = config.train.metrics
    return Metrics(settings.thresholds, settings.sliding or None, groups=schema.group is not None, tasks=schema.tasks)
