"""AUC, log loss, calibration and their kin: streaming, mergeable, in bounded memory.

Scores fall into buckets floor(p·thresholds), 4097 of them by default, so AUC is exact but for ties inside a bucket.
A score that is no number in [0, 1] is counted as invalid and in nothing else. Updates are native and leave the GIL.
"""

from __future__ import annotations

import math
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from clickfleet import _core
from clickfleet.errors import CheckpointError, ConfigError

State = dict[str, NDArray[Any]]

TOTALS = ("rows", "invalid", "weight", "clicks", "predicted", "absolute", "squared", "correct", "loss")
assert len(TOTALS) == _core.BUCKET_TOTALS


class Buckets:
    """The metrics that sums and buckets give.

    >>> scores, labels = np.array([0.9, 0.8, 0.4, 0.1], np.float32), np.array([1, 0, 1, 0], np.float32)
    >>> buckets = Buckets()
    >>> buckets.update(scores, labels)
    >>> buckets.results()["auc"], buckets.results()["accuracy"]
    (0.75, 0.5)
    """

    def __init__(self, thresholds: int = 4096) -> None:
        if thresholds < 1:
            raise ConfigError(f"metrics: thresholds is {thresholds}, and must be at least 1", "4096 is the default")
        self.thresholds = thresholds
        self.core = _core.Buckets(thresholds)

    def update(
        self, scores: NDArray[np.float32], labels: NDArray[np.float32], weights: NDArray[np.float32] | None = None
    ) -> None:
        """Adds the rows of a batch; a label above 0 is a click."""
        self.core.update(scores, labels, weights)

    def merge(self, other: Buckets) -> None:
        """Adds what another worker has seen."""
        same("thresholds", other.thresholds, self.thresholds)
        self.core.merge(other.core)

    def reset(self) -> None:
        self.core.reset()

    @property
    def auc(self) -> float:
        """0.5 while one of the two classes has not been seen."""
        return cast(float, self.core.auc())

    def counts(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Weight of clicks and of other rows per bucket: ROC, calibration curve and histogram are drawn from it."""
        numbers = self.state()["buckets"][len(TOTALS) :]
        return numbers[: self.thresholds + 1], numbers[self.thresholds + 1 :]

    def results(self) -> dict[str, float | int | None]:
        """Every metric by name; None where no row allows it.

        `ne` is the log loss over that of always predicting the mean CTR, `calibration` is COPC: actual over predicted.
        """
        sums = dict(zip(TOTALS, self.state()["buckets"].tolist(), strict=False))
        rows, n = {"rows": int(sums["rows"]), "invalid": int(sums["invalid"])}, sums["weight"]
        if n <= 0:
            names = [
                "logloss",
                "ne",
                "accuracy",
                "calibration",
                "bucket_error",
                "actual_ctr",
                "predicted_ctr",
                "mae",
                "rmse",
            ]
            return {**rows, "auc": self.auc, **dict.fromkeys(names)}
        actual, predicted, loss = sums["clicks"] / n, sums["predicted"] / n, sums["loss"] / n
        entropy = -sum(p * math.log(p) for p in (actual, 1 - actual) if p > 0)
        return {
            **rows,
            "auc": self.auc,
            "logloss": loss,
            "ne": loss / entropy if entropy else None,
            "accuracy": sums["correct"] / n,
            "calibration": actual / predicted if predicted > 1e-6 else 0.0,
            "bucket_error": self.core.bucket_error(),
            "actual_ctr": actual,
            "predicted_ctr": predicted,
            "mae": sums["absolute"] / n,
            "rmse": math.sqrt(sums["squared"] / n),
        }

    def state(self) -> State:
        out = np.empty(len(TOTALS) + 2 * (self.thresholds + 1))
        self.core.write(out)
        return {"buckets": out}

    def restore(self, state: State) -> None:
        fits("buckets", state, len(TOTALS) + 2 * (self.thresholds + 1))
        self.core.read(state["buckets"])


class Sliding:
    """AUC over the last `size` batches."""

    def __init__(self, size: int = 20, thresholds: int = 4096) -> None:
        if size < 1:
            raise ConfigError(
                f"metrics: the sliding AUC spans {size} batches, and needs at least 1", "20 is the default"
            )
        self.size = size
        self.numbers = size * (len(TOTALS) + 2 * (thresholds + 1))
        self.core = _core.Window(thresholds, size)

    def update(
        self, scores: NDArray[np.float32], labels: NDArray[np.float32], weights: NDArray[np.float32] | None = None
    ) -> None:
        self.core.update(scores, labels, weights)

    @property
    def auc(self) -> float:
        return cast(float, self.core.auc())

    def state(self) -> State:
        out = np.empty(self.numbers)
        self.core.write(out)
        return {"window": out, "next": np.array([self.core.next])}

    def restore(self, state: State) -> None:
        fits("window", state, self.numbers)
        fits("next", state, 1)
        self.core.read(state["window"], int(state["next"][0]))


class Groups:
    """GAUC: the AUC inside each group of rows (a user's), averaged by weight over groups that have both classes.

    Exact up to `limit` rows (16 bytes each); beyond it a fair sample of whole groups, the same one on every worker.
    """

    def __init__(self, limit: int = 10_000_000) -> None:
        self.core = _core.Groups(limit)

    def update(
        self,
        groups: NDArray[np.uint64],
        scores: NDArray[np.float32],
        labels: NDArray[np.float32],
        weights: NDArray[np.float32] | None = None,
    ) -> None:
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
            fits(key, state, len(state["groups"]))
        self.core.reset()
        self.core.append(state["groups"], state["scores"], state["weights"], int(state["level"][0]))


class Slices:
    """The metrics of each value of a column, for the first `limit` values seen; later ones together as None."""

    def __init__(self, limit: int = 1000, thresholds: int = 1024) -> None:
        self.limit, self.thresholds = limit, thresholds
        self.core = _core.Slices(thresholds, limit)

    def update(
        self,
        values: NDArray[np.uint64],
        scores: NDArray[np.float32],
        labels: NDArray[np.float32],
        weights: NDArray[np.float32] | None = None,
    ) -> None:
        self.core.update(values, scores, labels, weights)

    def merge(self, other: Slices) -> None:
        same("thresholds", other.thresholds, self.thresholds)
        self.core.merge(other.core)

    def reset(self) -> None:
        self.core = _core.Slices(self.thresholds, self.limit)

    def results(self) -> dict[int | None, dict[str, float | int | None]]:
        """The metrics by value, in the order the values came; None holds the rest where there is one."""
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
                f"saved slices have shape {slices.shape}, which {self.thresholds} thresholds and "
                f"{self.limit} slices do not give",
                "resume with the metric settings of the saved run",
            )
        self.reset()
        for row, value in zip(slices, values.tolist(), strict=False):
            self.core.read(value, False, row)
        self.core.read(0, True, slices[-1])


class Metrics:
    """All of them over one stream of batches.

    >>> metrics = Metrics(sliding=2)
    >>> metrics.update(np.array([0.2, 0.9], np.float32), np.array([0, 1], np.float32))
    >>> metrics.results()["auc"], metrics.results()["sliding_auc"]
    (1.0, 1.0)
    """

    def __init__(
        self, thresholds: int = 4096, sliding: int | None = None, groups: bool = False, slices: bool = False
    ) -> None:
        self.buckets = Buckets(thresholds)
        self.sliding = Sliding(sliding, thresholds) if sliding else None
        self.groups = Groups() if groups else None
        self.slices = Slices() if slices else None

    def update(
        self,
        scores: NDArray[np.float32],
        labels: NDArray[np.float32],
        weights: NDArray[np.float32] | None = None,
        groups: NDArray[np.uint64] | None = None,
        slices: NDArray[np.uint64] | None = None,
    ) -> None:
        """Adds a batch; `groups` and `slices` are keys, needed where those metrics were asked for."""
        self.buckets.update(scores, labels, weights)
        if self.sliding is not None:
            self.sliding.update(scores, labels, weights)
        for name, metric, keys in (("groups", self.groups, groups), ("slices", self.slices, slices)):
            if metric is not None:
                if keys is None:
                    raise ConfigError(f"metrics by {name} need a key per row, and the batch has none", "name a column")
                metric.update(keys, scores, labels, weights)

    def merge(self, other: Metrics) -> None:
        """Adds another worker's rows; sliding AUC stays each worker's own, as their batches have no common order."""
        self.buckets.merge(other.buckets)
        for mine, theirs in ((self.groups, other.groups), (self.slices, other.slices)):
            if mine is not None and theirs is not None:
                mine.merge(theirs)  # type: ignore[arg-type]

    def reset(self) -> None:
        """Forgets all rows but those of the sliding window."""
        for metric in (self.buckets, self.groups, self.slices):
            if metric is not None:
                metric.reset()

    def results(self) -> dict[str, float | int | None]:
        out = self.buckets.results()
        if self.sliding is not None:
            out["sliding_auc"] = self.sliding.auc
        if self.groups is not None:
            out["gauc"] = self.groups.gauc
        return out

    def state(self) -> State:
        """Arrays by dotted name, e.g. `buckets.buckets`."""
        return {f"{part}.{key}": array for part, m in self.parts().items() for key, array in m.state().items()}

    def restore(self, state: State) -> None:
        for part, metric in self.parts().items():
            own = {key.split(".", 1)[1]: array for key, array in state.items() if key.startswith(part + ".")}
            if not own:
                raise CheckpointError(
                    f"the saved metrics have no {part}", "resume with the metric settings of that run"
                )
            metric.restore(own)

    def parts(self) -> dict[str, Any]:
        parts = {"buckets": self.buckets, "sliding": self.sliding, "groups": self.groups, "slices": self.slices}
        return {name: part for name, part in parts.items() if part is not None}


def same(what: str, found: int, expected: int) -> None:
    if found != expected:
        raise ConfigError(f"metrics with {what} {found} and {expected} cannot be merged", f"use the same {what}")


def fits(key: str, state: State, numbers: int) -> None:
    if key not in state or state[key].shape != (numbers,):
        found = "none" if key not in state else str(state[key].size)
        raise CheckpointError(
            f"the saved metric holds {found} numbers as {key}, expected {numbers}",
            "resume with the metric settings of the saved run",
        )
