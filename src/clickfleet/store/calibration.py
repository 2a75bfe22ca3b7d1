"""Calibration: a monotone map from the scores of a network to click probabilities, part of a published entry.

    score = sigmoid(curve(logit(raw score)) + shift of the row's slice)

Of several labels, the first is calibrated.
The curve is piecewise linear and strictly increasing; beyond its ends its slope is 1. A slice is one value of a slot, or one
combination of values of several slots. Rows of an unknown slice have no shift. So the order of scores within a slice never changes.

`calibration.json` holds `slots`, `curve` (pairs of raw and calibrated log-odds) and `slices` (key of a slice -> shift of the log-odds).
The key of a slice is the key of its slot's value, 0 if it is missing; those of several slots are mixed (`slice_keys`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from clickfleet.data.batch import Batch, Floats, Integers, Keys
from clickfleet.data.schema import Schema
from clickfleet.errors import CheckpointError, ConfigError
from clickfleet.store import atomic
from clickfleet.store.table import mix64

FILE = "calibration.json"
Doubles = NDArray[np.float64]
EDGE = 1e-7
"""Scores are at least this far from 0 and 1 before their log-odds are taken."""
DIGITS = 6


def log_odds(scores: NDArray[Any]) -> Doubles:
    """Return the log-odds of scores; NaN stays NaN.

    >>> log_odds(np.array([0.5, 0.0])).round(2).tolist()
    [0.0, -16.12]
    """
    p = np.clip(scores.astype(np.float64), EDGE, 1 - EDGE)
    out: Doubles = np.log(p) - np.log1p(-p)
    return out


def probability(logits: Doubles) -> Doubles:
    """Return the probabilities of log-odds."""
    out: Doubles = 0.5 * (1.0 + np.tanh(0.5 * logits))
    return out


def slot_places(schema: Schema, slots: Sequence[str], key: str = "publish.calibrate.by") -> tuple[int, ...]:
    """Return the places of slots in a schema. Raise ConfigError for an unknown one, or one with several values per row."""
    names = [slot.name for slot in schema.slots]
    for name in slots:
        if name not in names:
            raise ConfigError(f"unknown slot {name!r} in {key}", f"the schema has {', '.join(names)}")
        if schema.slots[names.index(name)].multi:
            raise ConfigError(f"slot {name!r} in {key} has several values per row", "choose single-valued slots")
    return tuple(names.index(name) for name in slots)


class SharedRows(Protocol):
    """Rows that share keys, as a ranking has them."""

    keys: Keys
    slots: int
    starts: Integers
    ends: Integers

    def __len__(self) -> int: ...


def slice_keys(rows: Batch | SharedRows, places: Sequence[int]) -> Keys:
    """Return the key of every row's slice."""
    mixed: Keys | None = None
    starts, ends = (rows.offsets[:-1], rows.offsets[1:]) if isinstance(rows, Batch) else (rows.starts, rows.ends)
    for place in places:
        if isinstance(rows, Batch) and rows.one_each:
            keys = rows.keys[place :: rows.slots]
        else:
            begin, end = starts[place :: rows.slots], ends[place :: rows.slots]
            keys = np.zeros(len(rows), np.uint64)
            held = begin < end
            keys[held] = rows.keys[begin[held]]
        mixed = keys if mixed is None else mix64(mixed) ^ keys
    return np.zeros(len(rows), np.uint64) if mixed is None else np.ascontiguousarray(mixed)


@dataclass(frozen=True, eq=False)
class Calibration:
    """A curve and a shift per slice.

    >>> batch = Batch(np.zeros((2, 0), np.float32), np.array([7, 8], np.uint64), 1)
    >>> halves = np.array([0.5, 0.5], np.float32)
    >>> Calibration(("ad",), ((0.0, 0.0),), {7: 1.0}).apply(halves, batch, (0,)).astype(float).round(3).tolist()
    [0.731, 0.5]
    """

    slots: tuple[str, ...] = ()
    curve: tuple[tuple[float, float], ...] = ((0.0, 0.0),)
    """Raw log-odds and calibrated log-odds, both strictly ascending."""
    shifts: dict[int, float] | None = None
    """Slice -> shift of the log-odds."""

    @cached_property
    def _knots(self) -> tuple[Doubles, Doubles]:
        x, y = np.array(self.curve, np.float64).T
        return np.ascontiguousarray(x), np.ascontiguousarray(y)

    @cached_property
    def _slices(self) -> tuple[Keys, Doubles]:
        shifts = self.shifts or {}
        keys = sorted(shifts)
        return np.array(keys, np.uint64), np.array([shifts[key] for key in keys], np.float64)

    def bend(self, logits: Doubles) -> Doubles:
        """Return the curve at raw log-odds."""
        x, y = self._knots
        out: Doubles = np.interp(logits, x, y) + (logits - np.clip(logits, x[0], x[-1]))
        return out

    def apply(self, scores: Floats, rows: Batch | SharedRows, places: Sequence[int] | None) -> Floats:
        """Return the calibrated scores of rows. `places` are those of the slots; None: no row has a known slice."""
        if scores.ndim == 2 and scores.shape[1] > 1:
            return np.column_stack([self.apply(scores[:, 0], rows, places), scores[:, 1:]])
        logits = self.bend(log_odds(scores.reshape(-1)))
        keys, shifts = self._slices
        if len(keys) and places:
            wanted = slice_keys(rows, places)
            at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
            logits += np.where(keys[at] == wanted, shifts[at], 0.0)
        return probability(logits).astype(np.float32).reshape(scores.shape)

    def of(self, schema: Schema) -> Callable[[Floats, Batch | SharedRows], Floats]:
        """Return `apply` for batches of a schema. If it lacks a slot (an export with fewer inputs), no slice is known."""
        names = [slot.name for slot in schema.slots]
        known = all(name in names for name in self.slots)
        places = tuple(names.index(name) for name in self.slots) if known else None
        return lambda scores, rows: self.apply(scores, rows, places)

    def without(self, gone: Callable[[Keys], NDArray[np.bool_]]) -> Calibration:
        """Return it without the slices of one slot that a mask selects. Slices of several slots stay: their keys name no value."""
        if len(self.slots) != 1 or not self.shifts:
            return self
        keys = list(self.shifts)
        mask = gone(np.array(keys, np.uint64)).tolist()
        return replace(self, shifts={key: self.shifts[key] for key, out in zip(keys, mask, strict=True) if not out})

    def to_bytes(self) -> bytes:
        shifts = {str(key): round(shift, DIGITS) for key, shift in sorted((self.shifts or {}).items())}
        curve = [[round(x, DIGITS), round(y, DIGITS)] for x, y in self.curve]
        return atomic.canonical({"slots": list(self.slots), "curve": curve, "slices": shifts})

    @classmethod
    def from_bytes(cls, content: bytes, where: object) -> Calibration:
        """Parse the file of an entry. Raise CheckpointError if it is not a strictly increasing map."""
        try:
            facts = json.loads(content)
            slots = tuple(str(name) for name in facts["slots"])
            curve = tuple((float(x), float(y)) for x, y in facts["curve"])
            shifts = {int(key): float(shift) for key, shift in facts["slices"].items()}
            found = cls(slots, curve, shifts)
            x, y = found._knots
            _, values = found._slices
            if not (np.isfinite(x).all() and np.isfinite(y).all() and np.isfinite(values).all()):
                raise ValueError("it has values that are not finite")
            if not ((np.diff(x) > 0).all() and (np.diff(y) > 0).all()):
                raise ValueError("its curve does not increase")
            return found
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
            raise CheckpointError(f"{where} is not a calibration: {error}", "publish a base again") from error
