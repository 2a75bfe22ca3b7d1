"""The teacher: a known model that draws rows in the shape of Criteo's log, with their labels and true probabilities."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clickfleet.data.batch import Floats
from clickfleet.data.schema import Label, Schema, preset

BLOCK = 16384
"""Rows drawn at once. The rows of a seed depend on it, so it never changes."""


CTR = 0.25
CVR = 0.2
"""Fraction of clicks that are followed by a purchase."""
LABELS = (Label("click"), Label("buy", given="click"))


@dataclass(frozen=True)
class Drawn:
    """`BLOCK` rows: their columns without the labels, the labels [T, B], and P(click), P(buy | click) in the same shape."""

    columns: Any
    labels: NDArray[np.int8]
    probability: Floats

    def table(self) -> Any:
        """Return all columns as an Arrow record batch, labels first."""
        import pyarrow as pa

        named = {label.name: pa.array(values) for label, values in zip(LABELS, self.labels, strict=False)}
        return pa.RecordBatch.from_pydict(
            named | {name: self.columns.column(name) for name in self.columns.schema.names}
        )


@dataclass(frozen=True)
class Count:
    """A heavy-tailed dense column: floor(exp(centre + spread·z)) − shift, at least `least`, sometimes missing."""

    centre: float
    spread: float
    shift: int
    group: int
    least: int = 0


@dataclass(frozen=True)
class Category:
    """A slot with `size` ids. Id r has the weight (r + offset)^-slope."""

    size: int
    slope: float
    offset: float
    group: int
    strength: float
    """Strength of its linear effects, relative to other slots."""

    @property
    def pair_strength(self) -> float:
        """Strength of its pair effects: smaller for many ids, because nothing can be learned from pairs of rare ids."""
        return 1.0 if self.size < 700 else 0.75 if self.size < 20_000 else 0.65


# The columns of a group are missing in the same rows, with this probability. Group 0 is never missing.
MISSING = (0.0, 0.45, 0.21, 0.22, 0.026, 0.22, 0.043, 0.0005, 0.77, 0.034, 0.12, 0.44, 0.76)

COUNTS = (
    Count(0.6, 1.20, 1, 1),
    Count(2.4, 2.10, 2, 0, least=-2),
    Count(2.1, 1.30, 0, 2),
    Count(1.7, 0.95, 1, 3),
    Count(7.3, 2.40, 1, 4),
    Count(3.6, 1.80, 1, 5),
    Count(1.4, 1.45, 1, 6),
    Count(2.1, 1.10, 1, 7),
    Count(3.6, 1.70, 1, 6),
    Count(0.3, 0.50, 1, 1),
    Count(0.8, 0.85, 1, 6),
    Count(0.1, 0.80, 1, 8),
    Count(1.9, 1.05, 1, 3),
)

CATEGORIES = (
    Category(1460, 2.00, 1.10, 0, 1.0),
    Category(583, 1.85, 5.95, 0, 1.4),
    Category(10131227, 1.05, 1.46, 9, 1.1),
    Category(2202608, 1.10, 1.27, 9, 1.1),
    Category(305, 2.55, 0.83, 0, 0.8),
    Category(24, 2.60, 1.60, 10, 0.8),
    Category(12517, 1.20, 27.9, 0, 1.0),
    Category(633, 2.35, 1.10, 0, 0.8),
    Category(3, 2.30, 0.31, 0, 0.6),
    Category(93145, 1.05, 0.05, 0, 1.0),
    Category(5683, 1.30, 18.3, 0, 1.2),
    Category(8351593, 1.05, 1.46, 9, 1.1),
    Category(3194, 1.30, 15.9, 0, 1.2),
    Category(27, 1.75, 1.46, 0, 1.4),
    Category(14992, 1.45, 24.3, 0, 1.2),
    Category(5461306, 1.10, 2.23, 9, 1.1),
    Category(10, 2.30, 2.23, 0, 1.4),
    Category(5652, 1.55, 10.5, 0, 1.4),
    Category(2173, 1.20, 0.05, 11, 0.8),
    Category(4, 0.85, 1.68, 11, 1.1),
    Category(7046547, 1.05, 1.46, 9, 1.1),
    Category(18, 2.30, 1.00, 12, 0.8),
    Category(15, 1.01, 0.13, 0, 1.2),
    Category(286181, 1.25, 2.95, 9, 1.0),
    Category(105, 2.55, 3.39, 11, 1.1),
    Category(142572, 1.15, 1.68, 11, 1.1),
)


@dataclass(frozen=True)
class Features:
    """The features of `BLOCK` rows, one array per column."""

    counts: NDArray[np.int32]  # [13, B]
    values: NDArray[np.uint32]  # [26, B]: the categories, written as eight hexadecimal digits
    missing: NDArray[np.bool_]  # [groups, B]


def draw(rng: np.random.Generator, seed: int, age: float) -> Features:
    """Draw features. `age` is the fraction of ids replaced since day 0; above 1, there were several generations."""
    missing = rng.random((len(MISSING), BLOCK), dtype=np.float32) < np.array(MISSING, np.float32)[:, None]
    activity = rng.standard_normal(BLOCK, dtype=np.float32)  # correlates the counts of a row
    standard = rng.standard_normal((len(COUNTS), BLOCK), dtype=np.float32)
    standard *= np.float32(np.sqrt(1 - 0.3**2))
    standard += np.float32(0.3) * activity
    counts = np.empty((len(COUNTS), BLOCK), np.int32)
    for i, count in enumerate(COUNTS):
        drawn = np.exp(np.float32(count.spread) * standard[i] + np.float32(count.centre))
        counts[i] = np.minimum(drawn, 2e9).astype(np.int32) - count.shift
        np.maximum(counts[i], count.least, out=counts[i])
    values = np.empty((len(CATEGORIES), BLOCK), np.uint32)
    for j, category in enumerate(CATEGORIES):
        values[j] = _names(j, zipf(category, rng.random(BLOCK)), seed, age)
    return Features(counts, values, missing)


def zipf(category: Category, u: NDArray[np.float64]) -> NDArray[np.uint32]:
    """Return ranks from 0 by inverting the continuous distribution function."""
    power = 1 - category.slope
    low, high = category.offset**power, (category.size + category.offset) ** power
    u *= high - low
    u += low
    return (np.minimum(u ** (1 / power) - category.offset, category.size - 1)).astype(np.uint32)


def _names(slot: int, rank: NDArray[np.uint32], seed: int, age: float) -> NDArray[np.uint32]:
    """Return the text of each id as a number. This is a bijection: the ids of a slot have different texts."""
    salt = np.uint32(0x9E3779B9 * (slot + 1) & 0xFFFFFFFF)
    if age:  # each id is replaced at its own moment of a generation
        phase = mix32(rank ^ salt).astype(np.float32) / np.float32(2**32)
        rank = rank + (np.float32(age) + phase).astype(np.uint32) * np.uint32(1 << 24)
    return mix32(mix32(rank ^ np.uint32(seed & 0xFFFFFFFF)) + salt)


def mix32(x: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Apply a bijection of 32 bits (the MurmurHash3 finaliser)."""
    x = x ^ (x >> np.uint32(16))
    x *= np.uint32(0x85EBCA6B)
    x ^= x >> np.uint32(13)
    x *= np.uint32(0xC2B2AE35)
    x ^= x >> np.uint32(16)
    return x


FACTORS = 4
PATTERNS = 4096  # distinct (w, v) per slot: few enough for the cache, enough to look random
LINEAR, PAIRS, DENSE = 1.28, 0.82, 0.65
"""Standard deviations of the three parts of the logit."""
_ROWS, _SCALE, _EFFECTS, _SHAPES = 1, 2, 3, 4  # purposes of random generators


@dataclass(frozen=True)
class Teacher:
    """The true model of one seed on one day. `drift` is the fraction of ids, and of all effects, replaced per day.

    >>> features, labels, probability = Teacher(seed=7).draw(stream=0, block=0)
    >>> features.counts.shape, features.values.shape, labels.shape
    ((13, 16384), (26, 16384), (16384,))
    """

    seed: int
    day: int = 0
    drift: float = 0.0

    def draw(self, stream: int, block: int) -> tuple[Features, NDArray[np.int8], Floats]:
        """Return features, labels and true click probabilities of `BLOCK` rows."""
        rng = self._rng(_ROWS, self.day, stream, block)
        features = self._features(rng)
        probability = sigmoid(self._bias + self._slots(features) + self.dense(features))
        labels = (rng.random(BLOCK, dtype=np.float32) < probability).astype(np.int8)
        return features, labels, probability

    def prepare(self) -> None:
        """Draw and scale the effects now instead of in the first `draw`."""
        _ = self._bias

    def _rng(self, *purpose: int) -> np.random.Generator:
        return np.random.Generator(np.random.SFC64(np.random.SeedSequence([self.seed, *purpose])))

    def _features(self, rng: np.random.Generator) -> Features:
        return draw(rng, self.seed, self.day * self.drift)

    @cached_property
    def _sample(self) -> Features:
        """Rows used only to scale the parts of the logit."""
        return self._features(self._rng(_SCALE, self.day))

    def _slots(self, features: Features) -> Floats:
        return pooled(self.effects, features)

    @cached_property
    def effects(self) -> Floats:
        w, v = self._unscaled_effects()
        w *= np.array([category.strength for category in CATEGORIES], np.float32)[:, None]
        v *= np.array([category.pair_strength for category in CATEGORIES], np.float32)[:, None, None]
        for slot in range(len(CATEGORIES)):  # a mean would act as a linear effect
            v[slot] -= v[slot, _patterns(slot, self._sample)].mean(0)
        linear = pooled(_table(w, np.zeros_like(v)), self._sample).std()
        pairs = pooled(_table(np.zeros_like(w), v), self._sample).std()
        return _table(w * (LINEAR / linear), v * np.sqrt(PAIRS / pairs))

    def _unscaled_effects(self) -> tuple[Floats, Floats]:
        """Return unit normal w and v that rotate, day by day, from one draw to the next."""
        generation, share = divmod(self.day * self.drift, 1.0)
        turn = np.array([np.cos(share * np.pi / 2), np.sin(share * np.pi / 2)], np.float32)
        shape = (1 + FACTORS, len(CATEGORIES), PATTERNS + 1)
        drawn = [self._rng(_EFFECTS, int(generation) + i).standard_normal(shape, dtype=np.float32) for i in (0, 1)]
        effects = turn[0] * drawn[0] + turn[1] * drawn[1]
        return effects[0], np.moveaxis(effects[1:], 0, 2).copy()

    def dense(self, features: Features) -> Floats:
        return self._dense_scale * self._unscaled_dense(features)

    @cached_property
    def _dense_scale(self) -> np.float32:
        return np.float32(DENSE / self._unscaled_dense(self._sample).std())

    def _unscaled_dense(self, features: Features) -> Floats:
        total = np.zeros(BLOCK, np.float32)
        shapes = self._rng(_SHAPES).standard_normal((len(COUNTS), 3), dtype=np.float32)
        for count, values, (slope, bend, absent) in zip(COUNTS, features.counts, shapes, strict=True):
            x = np.log1p(np.abs(values), dtype=np.float32)
            np.copysign(x, values.astype(np.float32), out=x)
            z = (x - np.float32(count.centre)) / np.float32(count.spread)
            effect = slope * z + bend / 4 * np.cos(2 * z)
            total += np.where(features.missing[count.group], absent / 2, effect)
        return total

    @cached_property
    def _bias(self) -> np.float32:
        """The bias that yields the click rate `CTR`."""
        return bias_for(self.effect(self._sample), CTR)

    def rows(self, stream: int, block: int, labels: int = 1) -> Drawn:
        """Return `BLOCK` rows. They have clicks only."""
        assert labels == 1
        features, clicks, probability = self.draw(stream, block)
        return Drawn(columns(features), clicks[None], probability[None])

    def schema(self, labels: int = 1) -> Schema:
        return replace(preset("criteo"), labels=LABELS[:labels])

    def effect(self, features: Features) -> Floats:
        """Return the logit without its bias."""
        return self._slots(features) + self.dense(features)


def _patterns(slot: int, features: Features) -> NDArray[np.intp]:
    """Return the row of the effects table for every value of a slot. The last row is for a missing value."""
    pattern = (features.values[slot] & np.uint32(PATTERNS - 1)).astype(np.intp)
    if group := CATEGORIES[slot].group:
        pattern[features.missing[group]] = PATTERNS
    return np.asarray(pattern)


def _table(w: Floats, v: Floats) -> Floats:
    """Return [slots, patterns + 1, (w − |v|²/2, v)]. Its sum over the slots of a row yields linear and pair effects."""
    return np.concatenate([(w - 0.5 * np.square(v).sum(2))[:, :, None], v], axis=2)


def pooled(table: Floats, features: Features) -> Floats:
    parts = np.zeros((BLOCK, 1 + FACTORS), np.float32)
    for slot in range(len(CATEGORIES)):
        parts += table[slot].take(_patterns(slot, features), axis=0)
    return np.asarray(parts[:, 0] + 0.5 * np.square(parts[:, 1:]).sum(1))


def sigmoid(x: Floats) -> Floats:
    return np.asarray(1 / (1 + np.exp(-x)))


def bias_for(logit: Floats, rate: float, weight: Floats | None = None) -> np.float32:
    """Return the bias that makes `rate` the mean probability, found by bisection."""
    low, high = np.float32(-20), np.float32(20)
    for _ in range(30):
        middle = (low + high) / 2
        mean = np.average(sigmoid(logit + middle), weights=weight)
        low, high = (middle, high) if mean < rate else (low, middle)
    return low


def with_buys(drawn: Drawn, logit: Floats, rng: np.random.Generator) -> Drawn:
    """Add purchases: after a click, with the probability of `logit`."""
    probability = sigmoid(logit)
    bought = (rng.random(len(logit), dtype=np.float32) < probability) & (drawn.labels[0] == 1)
    return Drawn(
        drawn.columns,
        np.stack([drawn.labels[0], bought.astype(np.int8)]),
        np.stack([drawn.probability[0], probability]),
    )


def columns(features: Features) -> Any:
    """Return drawn rows as an Arrow record batch with Criteo's columns, without the label."""
    import pyarrow as pa

    arrays: dict[str, Any] = {}
    for i, count in enumerate(COUNTS):
        mask = features.missing[count.group] if count.group else None
        arrays[f"I{i + 1}"] = pa.array(features.counts[i], mask=mask)
    ends = pa.py_buffer(np.arange(0, 8 * (BLOCK + 1), 8, dtype=np.int32))
    present = [pa.py_buffer(np.packbits(~absent, bitorder="little")) for absent in features.missing]
    for j, category in enumerate(CATEGORIES):
        values = features.values[j]
        text = np.stack([_hex()[values >> np.uint32(16)], _hex()[values & np.uint32(0xFFFF)]], axis=1)
        flags = present[category.group] if category.group else None
        arrays[f"C{j + 1}"] = pa.StringArray.from_buffers(BLOCK, ends, pa.py_buffer(text), flags)
    return pa.RecordBatch.from_pydict(arrays)


@cache
def _hex() -> NDArray[np.uint32]:
    """Return the four hexadecimal digits of every 16-bit number, packed into one 32-bit number."""
    return np.frombuffer("".join(f"{i:04x}" for i in range(1 << 16)).encode(), np.uint32)
