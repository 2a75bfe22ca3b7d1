"""Learn the calibration of a stream from scores that were given before training.

For the whole stream, and for each slice, the calibrator counts shows, clicks and predicted clicks by score, in periods of time: the
older, the longer. A world that changes makes old counts wrong. So each estimate uses the longest window, from now back, that no
shorter one contradicts (Lepski, 1991). A slice without drift has little noise, and one that drifts is followed within minutes.

Time is that of the stream: of the events, where they have one.
"""

from __future__ import annotations

import base64
import math
import threading
import zlib
from dataclasses import dataclass, field
from typing import Any, NotRequired, TypedDict

import numpy as np
from numpy.typing import NDArray

from clickfleet.config.sections import Calibrate
from clickfleet.data.batch import Batch, Floats
from clickfleet.data.names import Names
from clickfleet.data.schema import Schema
from clickfleet.store.calibration import Calibration, Doubles, log_odds, probability, slice_keys, slot_places
from clickfleet.store.erasure import WantedKeys

PERIODS = 72
"""The newest period lasts this fraction of the half-life."""
SAME = 2
"""Periods of one length. One more, and the two oldest of them become one of twice the length."""
FORGOTTEN = 4
"""Half-lives after which a period is forgotten."""
LOW, HIGH = -12.0, 6.0
"""Log-odds between which scores are told apart."""
FINE, COARSE = 216, 24
"""Bins of scores, for the curve and for a slice."""
SHOWS, CLICKS, PREDICTED = range(3)
MOST_SLICES = 1000
"""Slices with a shift: the first values that occur. A slice that no longer occurs makes room for another."""
SPREAD = 0.5
"""Standard deviation of the shifts of slices that is assumed before anything was seen: little data moves a slice little."""
BLOCK_CLICKS, MOST_BLOCKS = 400.0, 16
"""Least clicks, and other rows, between two knots of the curve; and most knots."""
LEAST_SLOPE = 0.02
"""So that different scores stay different."""
SIGMAS = 2.5
"""Difference, in standard errors, at which a shorter window contradicts a longer one."""
REFIT = 0.02
"""New rows, as a fraction of those in the newest period, after which the calibration is fitted again."""


@dataclass
class _Period:
    """What was counted in a period of time."""

    begin_s: float
    units: int
    """Its length, in lengths of the newest period."""
    whole: Doubles = field(default_factory=lambda: np.zeros((FINE, 3)))
    cells: Doubles = field(default_factory=lambda: np.zeros((0, COARSE, 3)))
    """By slice; slices that came later may be missing at the end."""
    squares: Doubles = field(default_factory=lambda: np.zeros(2))
    """Sums of the weights of rows, and of their squares."""

    def grow(self, slices: int) -> None:
        if missing := slices - len(self.cells):
            self.cells = np.concatenate([self.cells, np.zeros((missing, COARSE, 3))])

    def merge(self, older: _Period) -> None:
        older.grow(len(self.cells))
        self.grow(len(older.cells))
        self.begin_s, self.units = older.begin_s, self.units + older.units
        self.whole += older.whole
        self.cells += older.cells
        self.squares += older.squares


class SliceResults(TypedDict):
    """COPC of a slice in about the last quarter of the half-life: clicks over predicted clicks of the scores that were served."""

    slice: str
    shows: float
    copc: float
    error: float
    """Standard error of the COPC."""
    raw: NotRequired[float]
    """COPC of the same rows without calibration."""


class CalibratorState(TypedDict):
    """The state of a calibrator in a checkpoint."""

    counts: str
    keys: list[int]
    periods: list[tuple[float, int]]
    now: float
    new: float
    calibration: str


class Calibrator:
    """Counts shows and clicks by score and slice, and fits the calibration to them. Threads may use it concurrently."""

    def __init__(self, settings: Calibrate, schema: Schema) -> None:
        self.settings = settings
        self.places = slot_places(schema, settings.by)
        self._unit_s = settings.half_life / PERIODS
        self.calibration = Calibration(settings.by)
        """The newest one."""
        self._periods: list[_Period] = []
        """Newest first."""
        self._served = np.zeros((1, 5))
        """Shows, clicks, predicted clicks, their variance, and raw predicted clicks: of all rows, then by slice."""
        self._rows: dict[int, int] = {}
        """Slice -> its place."""
        self._now = 0.0
        self._new = 0.0
        """Rows since the last fit."""
        self._lock = threading.Lock()

    def learn(self, batch: Batch, scores: Floats, labels: Floats, weights: Floats | None, now_s: float) -> Floats:
        """Count rows that were scored before training on them. Return the calibrated scores, by the newest calibration.

        `now_s` is the time of the stream.
        """
        with self._lock:
            served = self.calibration.apply(scores, batch, self.places)
            first, labels = _first(scores), _first(labels)
            valid = np.isfinite(first) & (first >= 0) & (first <= 1) & ~np.isnan(labels)
            shows, clicks = np.ones(len(labels)), (labels > 0).astype(np.float64)
            if batch.previous is not None:  # a correction is no new show; it adds what has changed
                before = _first(batch.previous)
                shows[~np.isnan(before)] = 0
                clicks -= before > 0
            self._pass_time(now_s)
            self._count(batch, first, _first(served), shows, clicks, weights, valid)
            return served

    def _pass_time(self, now_s: float) -> None:
        """Begin a new period if the newest is over. Time never goes back."""
        if not self._periods:
            self._now = now_s
            self._periods.append(_Period(now_s, 1))
        passed = now_s - self._now
        if passed > self._unit_s / 16:
            self._now = now_s
            self._served *= 0.5 ** (4 * passed / self.settings.half_life)
        if self._now < self._periods[0].begin_s + self._unit_s:
            return
        self._periods.insert(0, _Period(self._now, 1))
        oldest = self._now - FORGOTTEN * self.settings.half_life
        while self._periods[-1].begin_s + self._periods[-1].units * self._unit_s < oldest:
            self._periods.pop()
        units = 1
        while len(same := [i for i, period in enumerate(self._periods[1:], 1) if period.units == units]) > SAME:
            newer, older = same[-2:]
            self._periods[newer].merge(self._periods.pop(older))
            units *= 2

    def _count(
        self,
        batch: Batch,
        scores: Floats,
        served: Floats,
        shows: Doubles,
        clicks: Doubles,
        weights: Floats | None,
        valid: Any,
    ) -> None:
        p, mine = scores[valid].astype(np.float64), served[valid].astype(np.float64)
        w = np.ones(len(p)) if weights is None else weights[valid].astype(np.float64)
        clicked, w = w * clicks[valid], w * shows[valid]
        spot = (np.clip(log_odds(p), LOW, HIGH - 1e-9) - LOW) / (HIGH - LOW)
        columns = (w, clicked, w * p)
        fine = (spot * FINE).astype(np.int64)
        period = self._periods[0]
        period.whole += np.stack([np.bincount(fine, column, FINE) for column in columns], 1)
        period.squares += [w.sum(), (w * w).sum()]
        self._new += w.sum()
        sums = (w, clicked, w * mine, w * w * mine * (1 - mine), w * p)
        self._served[0] += [column.sum() for column in sums]
        if not self.places:
            return
        rows = self._places_of(slice_keys(batch, self.places))[valid]
        known = rows >= 0
        rows = rows[known]
        cells = rows * COARSE + (spot[known] * COARSE).astype(np.int64)
        size = len(self._rows)
        counts = [np.bincount(cells, column[known], size * COARSE).reshape(size, COARSE) for column in columns]
        period.grow(size)
        period.cells += np.stack(counts, 2)
        self._served[1:] += np.stack([np.bincount(rows, column[known], size) for column in sums], 1)

    def _places_of(self, keys: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Return the place of each row's slice; -1 if there is no room for it."""
        distinct, where = np.unique(keys, return_inverse=True)
        found = np.empty(len(distinct), np.int64)
        for i, key in enumerate(distinct.tolist()):
            place = self._rows.get(key, -1)
            if place < 0 and len(self._rows) < MOST_SLICES:
                place = self._rows[key] = len(self._rows)
            found[i] = place
        if missing := 1 + len(self._rows) - len(self._served):
            self._served = np.concatenate([self._served, np.zeros((missing, 5))])
        return found[where]

    def fit_if_due(self) -> Calibration:
        """Fit the calibration again if enough was counted since the last time. Return the newest."""
        with self._lock:
            newest = sum(period.squares[0] for period in self._periods[:2])
            if self._new > 0 and self._new >= REFIT * newest:
                self._new = 0.0
                self._forget_faded()
                curve = self._fit_curve()
                fitted = Calibration(self.settings.by, curve.curve, self._fit_shifts(curve))
                self.calibration = Calibration.from_bytes(fitted.to_bytes(), "the fitted map")  # as consumers read it
            return self.calibration

    def _forget_faded(self) -> None:
        for period in self._periods:
            period.grow(len(self._rows))
        shows = sum(period.cells[:, :, SHOWS].sum(1) for period in self._periods)
        kept = [key for key, place in self._rows.items() if shows[place] > 0]
        if len(kept) < len(self._rows):
            places = np.array([self._rows[key] for key in kept], np.int64)
            for period in self._periods:
                period.cells = period.cells[places]
            self._served = self._served[np.concatenate([[0], places + 1])]
            self._rows = {key: place for place, key in enumerate(kept)}

    def _windows(self, parts: list[Doubles]) -> Doubles:
        """Return the counts of the windows from now back over one period, two periods and so on. Old rows count less."""
        ages = np.array([self._now - period.begin_s - period.units * self._unit_s / 2 for period in self._periods])
        weights = 0.5 ** (np.maximum(ages, 0.0) / self.settings.half_life)
        out: Doubles = np.cumsum([weight * part for weight, part in zip(weights, parts, strict=True)], 0)
        return out

    @property
    def _inflation(self) -> Doubles:
        """Return, by window, the variance of a weighted sum of clicks over that of as many clicks."""
        squares = self._windows([period.squares for period in self._periods])
        return np.divide(squares[:, 1], squares[:, 0], out=np.ones(len(squares)), where=squares[:, 0] > 0)

    def _fit_curve(self) -> Calibration:
        """Return the curve of the longest window that no shorter one contradicts."""
        shows, clicks, logits = _columns(self._windows([period.whole for period in self._periods]))
        inflation, found = self._inflation, Calibration()
        for window in reversed(range(len(shows))):
            found = self._curve(shows[window], clicks[window], logits[window])
            p = probability(found.bend(logits[:window]))
            groups = np.eye(GROUPS + 1)[_groups(shows[window])]  # [bins, groups]
            groups[:, GROUPS] = 1.0  # and all bins together
            off = np.abs((clicks[:window] - shows[:window] * p) @ groups)
            spread = np.sqrt((shows[:window] * p * (1 - p)) @ groups * inflation[:window, None])
            if (off <= SIGMAS * spread + 1e-9).all():
                break
        return found

    def _curve(self, shows: Doubles, clicks: Doubles, logits: Doubles) -> Calibration:
        knots = _isotonic(shows, clicks, logits) if self.settings.method == "isotonic" else []
        curve = Calibration((), tuple(knots) or ((0.0, 0.0),))
        bent = curve.bend(logits)
        shift = float(_shifts(shows[None], clicks[None], bent[None], None)[0][0])
        return Calibration((), tuple((x, y + shift) for x, y in curve.curve))

    def _fit_shifts(self, curve: Calibration) -> dict[int, float]:
        """Return the shift of every slice, of the longest window that no shorter one contradicts."""
        if not self._rows:
            return {}
        shows, clicks, logits = _columns(self._windows([period.cells for period in self._periods]))
        windows, slices, _ = shows.shape
        flat = (shows.reshape(-1, COARSE), clicks.reshape(-1, COARSE), curve.bend(logits).reshape(-1, COARSE))
        shifts, known = (part.reshape(windows, slices) for part in _shifts(*flat, SPREAD))
        errors = SIGMAS * np.sqrt(self._inflation[:, None] / known)
        low, high = np.maximum.accumulate(shifts - errors), np.minimum.accumulate(shifts + errors)
        low, high = np.roll(low, 1, 0), np.roll(high, 1, 0)
        low[0], high[0] = -np.inf, np.inf
        agree = (low <= shifts) & (shifts <= high)
        last = windows - 1 - np.argmax(agree[::-1], 0)
        chosen = shifts[last, np.arange(slices)]
        return {key: float(chosen[place]) for key, place in self._rows.items()}

    def results(self, names: Names | None = None, top: int = 20) -> list[SliceResults]:
        """Return the COPC of all rows, then of the slices with the most shows."""
        with self._lock:
            served, keys = self._served.copy(), list(self._rows)
        order = sorted(range(len(keys)), key=lambda i: -served[1 + i, 0])[:top]
        slot = self.settings.by[0] if len(self.settings.by) == 1 else None
        out = []
        for name, (shows, clicks, predicted, variance, raw) in [
            ("all", served[0].tolist()),
            *((_name(keys[i], slot, names), served[1 + i].tolist()) for i in order),
        ]:
            if predicted > 0:
                error = math.sqrt(variance) / predicted
                out.append(
                    SliceResults(
                        slice=name, shows=round(shows, 1), copc=clicks / predicted, error=error, raw=clicks / raw
                    )
                )
        return out

    def state(self) -> CalibratorState:
        with self._lock:
            for period in self._periods:
                period.grow(len(self._rows))
            parts = [self._served, *(part for one in self._periods for part in (one.whole, one.cells, one.squares))]
            return {
                "counts": _packed(parts),
                "keys": list(self._rows),
                "periods": [(period.begin_s, period.units) for period in self._periods],
                "now": self._now,
                "new": self._new,
                "calibration": self.calibration.to_bytes().decode(),
            }

    def restore(self, state: CalibratorState) -> None:
        keys, parts = [int(key) for key in state["keys"]], _parts(state)
        self._served = np.reshape(parts[0], (-1, 5))
        self._periods = [
            _Period(float(begin_s), int(units), *parts[3 * i + 1 : 3 * i + 4])
            for i, (begin_s, units) in enumerate(state["periods"])
        ]
        self._rows = {key: place for place, key in enumerate(keys)}
        self._now, self._new = state["now"], state["new"]
        self.calibration = Calibration.from_bytes(state["calibration"].encode(), "the calibration of the checkpoint")


def _parts(state: CalibratorState) -> list[Doubles]:
    """Return the counts of a state: those that were served, then three arrays per period."""
    numbers = np.frombuffer(zlib.decompress(base64.b64decode(state["counts"])), "<f8").astype(np.float64)
    size = len(state["keys"])
    shapes = [(1 + size, 5)] + [(FINE, 3), (size, COARSE, 3), (2,)] * len(state["periods"])
    ends = np.cumsum([math.prod(shape) for shape in shapes]).tolist()
    return [numbers[a:b].reshape(shape).copy() for a, b, shape in zip([0, *ends], ends, shapes, strict=False)]


def _packed(parts: list[Doubles]) -> str:
    packed = zlib.compress(b"".join(np.ascontiguousarray(part, "<f8").tobytes() for part in parts), 1)
    return base64.b64encode(packed).decode()


def forget_slices(state: CalibratorState, keys: WantedKeys) -> None:
    """Remove the slices of these keys from the state of a checkpoint.

    A slice of several slots has a key of its own, from which its values cannot be told; it stays until it fades.
    """
    calibration = Calibration.from_bytes(state["calibration"].encode(), "the calibration of the checkpoint")
    if len(calibration.slots) != 1:
        return
    stays = ~keys.mask(np.array(state["keys"], np.uint64))
    if not stays.all():
        served, *periods = _parts(state)
        parts = [np.concatenate([served[:1], served[1:][stays]])]
        parts += [part[stays] if at % 3 == 1 else part for at, part in enumerate(periods)]
        state["counts"] = _packed(parts)
        state["keys"] = [key for key, stay in zip(state["keys"], stays.tolist(), strict=True) if stay]
    state["calibration"] = calibration.without(keys.mask).to_bytes().decode()


def forget_state(state: dict[str, Any], keys: WantedKeys) -> None:
    """Remove what a run's state.json holds of these keys."""
    known = (state.get("published") or {}).get("calibrator")
    if known is not None:
        forget_slices(known, keys)


def _name(key: int, slot: str | None, names: Names | None) -> str:
    known = None if slot is None or names is None else names.name(slot, key)
    return str(key) if known is None else known


def _columns(counts: Doubles) -> tuple[Doubles, Doubles, Doubles]:
    """Return shows, clicks and the log-odds of the mean score, by bin; 0 where there are no shows."""
    shows, clicks = counts[..., SHOWS], counts[..., CLICKS]
    mean = np.divide(counts[..., PREDICTED], shows, out=np.full(shows.shape, 0.5), where=shows > 0)
    return shows, clicks, log_odds(mean)


GROUPS = 6
"""Groups of scores in which windows are compared."""


def _groups(shows: Doubles) -> NDArray[np.int64]:
    """Return the number of each bin's group: groups of neighbours with about equally many shows."""
    reached = np.cumsum(shows)
    places: NDArray[np.int64] = np.minimum((reached / max(reached[-1], 1e-9) * GROUPS).astype(np.int64), GROUPS - 1)
    return places


def _shifts(shows: Doubles, clicks: Doubles, logits: Doubles, spread: float | None) -> tuple[Doubles, Doubles]:
    """Return, for each row of bins, the shift of the log-odds at which as many clicks are expected as there were, and its precision.

    `spread` is the standard deviation of the shifts that is assumed before; None assumes nothing but a hundredth of a click.
    """
    shift, slope = np.zeros(len(shows)), np.ones(len(shows))
    wanted = clicks.sum(1)
    precision = 0.01 if spread is None else 1 / spread**2
    for _ in range(20):
        p = probability(logits + shift[:, None])
        slope = (shows * p * (1 - p)).sum(1) + precision
        move = np.clip((wanted - (shows * p).sum(1) - precision * shift) / slope, -1.0, 1.0)
        shift += move
        if np.abs(move).max(initial=0.0) < 1e-7:
            break
    return np.clip(shift, -8.0, 8.0), slope


def _isotonic(shows: Doubles, clicks: Doubles, logits: Doubles) -> list[tuple[float, float]]:
    """Return the knots of the increasing curve that fits best: raw and actual log-odds of blocks of scores; none for too few clicks."""
    least = max(BLOCK_CLICKS, clicks.sum() / MOST_BLOCKS)
    others = max(BLOCK_CLICKS, (shows - clicks).sum() / MOST_BLOCKS)
    blocks: list[list[float]] = []  # shows, clicks, predicted clicks
    block = [0.0, 0.0, 0.0]
    for n, c, p in zip(shows.tolist(), clicks.tolist(), (shows * probability(logits)).tolist(), strict=True):
        block = [block[0] + n, block[1] + c, block[2] + p]
        if min(block[1], block[0] - block[1]) >= BLOCK_CLICKS and (block[1] >= least or block[0] - block[1] >= others):
            blocks.append(block)
            block = [0.0, 0.0, 0.0]
    if not blocks:
        return []
    blocks[-1] = [a + b for a, b in zip(blocks[-1], block, strict=True)]
    pooled: list[list[float]] = []
    for block in blocks:  # pool adjacent violators
        pooled.append(block)
        while len(pooled) > 1 and pooled[-2][1] * pooled[-1][0] >= pooled[-1][1] * pooled[-2][0]:
            last = pooled.pop()
            pooled[-1] = [a + b for a, b in zip(pooled[-1], last, strict=True)]
    if len(pooled) < 2:
        return []
    n, c, p = np.array(pooled).T
    x, y = log_odds(p / n), log_odds(c / n)
    knots = [(float(x[0]), float(y[0]))]
    for a, b in zip(x[1:].tolist(), y[1:].tolist(), strict=True):
        if a - knots[-1][0] > 1e-3:
            knots.append((a, max(b, knots[-1][1] + LEAST_SLOPE * (a - knots[-1][0]))))
    return knots


def _first(values: Floats) -> Floats:
    """Return the values of the first of several labels."""
    return values if values.ndim == 1 else values[:, 0]
