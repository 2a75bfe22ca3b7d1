"""Decides whether a model may be released: what it scored before it was trained on must look like what it scored before.

AUC and COPC are judged over a window of the newest passes, as a small pass says little. What chance explains is no alarm: a number must lie
outside of its bound by more than four standard errors of the window.
"""

from __future__ import annotations

import base64
import math
import zlib
from typing import Any

import numpy as np

from clickfleet import sections
from clickfleet.metrics import Buckets

Results = dict[str, Any]

SIGMAS = 4.0
"""Standard errors beyond which chance explains nothing: once in 30,000 windows."""
PIECES = 8
"""Small passes are put together until a piece is this part of a window."""


class Window:
    """The metrics of the newest passes, the fewest that have `min_rows` rows together."""

    def __init__(self, min_rows: int, thresholds: int) -> None:
        self.min_rows, self.thresholds = min_rows, thresholds
        self._pieces: list[Buckets] = []

    def add(self, seen: Buckets) -> None:
        """Adds a pass, and drops the oldest ones that are not needed any more."""
        rows = _rows(seen)
        if not self._pieces or (_rows(self._pieces[-1]) + rows) * PIECES > self.min_rows:
            self._pieces.append(Buckets(self.thresholds))
        self._pieces[-1].merge(seen)
        while len(self._pieces) > 1 and self.rows - _rows(self._pieces[0]) >= max(self.min_rows, 1):
            del self._pieces[0]

    @property
    def rows(self) -> int:
        return sum(map(_rows, self._pieces))

    def results(self) -> Results:
        whole = Buckets(self.thresholds)
        for piece in self._pieces:
            whole.merge(piece)
        found = whole.results()
        return {key: found[key] for key in ("rows", "auc", "calibration", "actual_ctr", "predicted_ctr")}

    def clear(self) -> None:
        self._pieces.clear()

    def state(self) -> list[str]:
        return [pack(piece) for piece in self._pieces]

    def restore(self, state: list[str]) -> None:
        self._pieces = [unpack(text, self.thresholds) for text in state]


class Judge:
    """Compares windows of passes with bounds and with those whose model was released; its state is part of every checkpoint.

    >>> judge = Judge(sections.Guard(auc_drop=0.02, copc=None, min_rows=1000, warmup_rows=0))
    >>> labels = (np.arange(500) % 2).astype(np.float32)
    >>> def found(scores):  # in a pass of 500 rows: what stands against the release of its model
    ...     seen = Buckets()
    ...     seen.update(scores.astype(np.float32), labels)
    ...     passes = [{**seen.results(), "window": judge.add(seen)}]
    ...     if not (reasons := judge.reasons(passes, 10, 100)):
    ...         judge.released(passes)
    ...     return reasons
    >>> good = 0.4 + 0.2 * labels
    >>> [found(good) for _ in range(4)]
    [[], [], [], []]
    >>> print(found(1 - good)[0])
    AUC 0.5000 is 0.5000 below the mean 1.0000 of the last 2 windows released (1,000 rows; publish.guard.auc_drop is 0.02)
    """

    def __init__(self, guard: sections.Guard, thresholds: int = 4096, warm: bool = False) -> None:
        self.guard = guard
        self.window = Window(guard.min_rows, thresholds)
        self.warmup_rows = 0 if warm else guard.warmup_rows
        self.aucs: list[float] = []
        """Of windows released, none of which shares rows with another."""
        self._variances: list[float] = []
        self._trained = self._since = 0
        """Rows in all, and since the last window that shares none with those before."""

    def add(self, seen: Buckets) -> Results:
        """Adds the scores of a pass, made before it was trained on; the window that it completes, to be judged by."""
        self.window.add(seen)
        rows = _rows(seen)
        self._trained, self._since = self._trained + rows, self._since + rows
        apart = self._since >= max(self.guard.min_rows, 1)
        if apart:
            self._since = 0
        found = self.window.results()
        judged = found["rows"] >= self.guard.min_rows and self._trained - found["rows"] >= self.warmup_rows
        return {**found, "judged": judged, "apart": apart, "warmup_rows": max(0, self.warmup_rows - self._trained)}

    def reasons(self, passes: list[Results], changed: int, rows: int) -> list[str]:
        """Why an entry with these passes and `changed` of the table's rows must be held; none to release it."""
        found = [reason for results in passes for reason in self._of(results)]
        share = self.guard.delta_share
        if share is not None and changed > share * rows:
            found.append(
                f"{changed:,} of {rows:,} rows change, more than publish.guard.delta_share {share:g} of the table"
            )
        return found

    def _of(self, results: Results) -> list[str]:
        guard, found = self.guard, []
        rows, invalid = results["rows"], results["invalid"]
        if guard.nan_share is not None and invalid > guard.nan_share * (rows + invalid):
            found.append(f"{invalid:,} of {rows + invalid:,} scores are no numbers")
        window = results.get("window")
        if window is None or not window["judged"]:
            return found
        return [*found, *filter(None, (self._auc(window), self._copc(window)))]

    def _auc(self, window: Results) -> str | None:
        limit, auc, variance = self.guard.auc_drop, window["auc"], auc_variance(window)
        if limit is None or not self.aucs or variance is None:
            return None
        mean = sum(self.aucs) / len(self.aucs)
        error = math.sqrt(variance + sum(self._variances) / len(self.aucs) ** 2)
        if mean - auc <= limit + SIGMAS * error:
            return None
        return (
            f"AUC {auc:.4f} is {mean - auc:.4f} below the mean {mean:.4f} of the last {len(self.aucs)} windows released "
            f"({window['rows']:,} rows; publish.guard.auc_drop is {limit:g})"
        )

    def _copc(self, window: Results) -> str | None:
        copc, rows = window["calibration"], window["rows"]
        if self.guard.copc is None or copc is None:
            return None
        low, high = self.guard.copc
        clicks, predicted = rows * window["actual_ctr"], rows * window["predicted_ctr"]
        if _below(clicks, low * predicted, rows) or _below(-clicks, -high * predicted, rows):
            return f"COPC {copc:.4f} lies outside of publish.guard.copc {low:g} to {high:g} ({rows:,} rows)"
        return None

    def released(self, passes: list[Results]) -> None:
        """These passes' model is out: it is what later ones are compared with."""
        for window in (results.get("window") for results in passes):
            variance = None if window is None else auc_variance(window)
            if window is not None and variance is not None and window["judged"] and window["apart"]:
                self.aucs.append(window["auc"])
                self._variances.append(variance)
        del self.aucs[: -self.guard.window], self._variances[: -self.guard.window]

    def forget(self) -> None:
        """A person has decided: later models are compared with those from now on."""
        self.aucs, self._variances, self._since = [], [], 0
        self.window.clear()

    def state(self) -> dict[str, Any]:
        return {
            "window": self.window.state(),
            "variances": list(self._variances),
            "trained": self._trained,
            "since": self._since,
        }

    def restore(self, aucs: list[float], state: dict[str, Any] | None) -> None:
        """Goes on from a checkpoint; those of earlier versions know only the AUCs, of a model that is warm by now."""
        self.aucs = list(aucs)
        if state is None:
            state = {"window": [], "variances": [], "trained": self.warmup_rows if aucs else 0, "since": 0}
        self.window.restore(state["window"])
        self._variances = list(state["variances"]) or [0.0] * len(aucs)
        self._trained, self._since = state["trained"], state["since"]


def auc_variance(window: Results) -> float | None:
    """The variance of an AUC over so many rows (Hanley and McNeil, 1982); None where one class is missing.

    >>> round(auc_variance({"rows": 1000, "auc": 0.75, "actual_ctr": 0.2}) ** 0.5, 4)
    0.0212
    """
    rows, auc, rate = window["rows"], window["auc"], window["actual_ctr"]
    if not rate or rate >= 1:
        return None
    clicks, others = max(1.0, rows * rate), max(1.0, rows * (1 - rate))
    first, second = auc / (2 - auc), 2 * auc * auc / (1 + auc)
    spread = auc * (1 - auc) + (clicks - 1) * (first - auc * auc) + (others - 1) * (second - auc * auc)
    return max(0.0, float(spread / (clicks * others)))


def _below(clicks: float, bound: float, rows: int) -> bool:
    """Whether fewer clicks came than a bound says, and chance does not explain it (for an upper bound both are negative)."""
    rate = min(1.0, abs(bound) / rows)
    return clicks < bound - SIGMAS * math.sqrt(abs(bound) * (1 - rate))


def _rows(seen: Buckets) -> int:
    return int(seen.state()["buckets"][0])


def pack(seen: Buckets) -> str:
    """Metrics as text for JSON, exactly."""
    return base64.b64encode(zlib.compress(seen.state()["buckets"].astype("<f8").tobytes())).decode()


def unpack(text: str, thresholds: int) -> Buckets:
    """The metrics of `pack`."""
    seen = Buckets(thresholds)
    seen.restore({"buckets": np.frombuffer(zlib.decompress(base64.b64decode(text)), "<f8").astype(np.float64)})
    return seen
