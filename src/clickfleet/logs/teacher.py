"""A world whose click probabilities are known: a teacher who draws clicks for rows that look like Criteo's.

    logit = bias + Σ w(id) + Σ_{a<b} <v(id_a), v(id_b)> + Σ f_i(log1p(count_i))

w and v depend on the category's value alone. Each of the three parts is scaled to a fixed share of the logit's
variance, and v has mean zero in every slot, so that no linear model can learn the pairs; the best possible AUC is about
0.84 and the click rate 0.25 whatever the seed.

Rows are drawn in blocks, each from its own generator, so row i is the same however rows are cut into files or calls.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from clickfleet.logs import population
from clickfleet.logs.population import BLOCK, CATEGORIES, COUNTS, Features

Floats = NDArray[np.float32]

FACTORS = 4
PATTERNS = 4096  # distinct (w, v) per slot: few enough to stay in the cache, too many for anyone to notice

LINEAR, PAIRS, DENSE = 1.28, 0.82, 0.65
"""Standard deviations of the three parts of the logit."""
CTR = 0.25

_ROWS, _SCALE, _EFFECTS, _SHAPES = 1, 2, 3, 4  # what a random generator is for


@dataclass(frozen=True)
class Teacher:
    """The world of one seed on one day; `drift`: the share of ids that die each day, and of the way to new effects.

    >>> features, labels, probability = Teacher(seed=7).draw(stream=0, block=0)
    >>> features.counts.shape, features.values.shape, labels.shape
    ((13, 16384), (26, 16384), (16384,))
    """

    seed: int
    day: int = 0
    drift: float = 0.0

    def draw(self, stream: int, block: int) -> tuple[Features, NDArray[np.int8], Floats]:
        """Features, labels and true click probabilities of `BLOCK` rows."""
        rng = self._rng(_ROWS, self.day, stream, block)
        features = self._features(rng)
        probability = _sigmoid(self._bias + self._slots(features) + self._dense(features))
        labels = (rng.random(BLOCK, dtype=np.float32) < probability).astype(np.int8)
        return features, labels, probability

    def prepare(self) -> None:
        """Draws the effects and scales them, which the first `draw` would do otherwise."""
        _ = self._bias

    def _rng(self, *purpose: int) -> np.random.Generator:
        return np.random.Generator(np.random.SFC64(np.random.SeedSequence([self.seed, *purpose])))

    def _features(self, rng: np.random.Generator) -> Features:
        return population.draw(rng, self.seed, self.day * self.drift)

    @cached_property
    def _sample(self) -> Features:
        """Rows nobody sees, by which the parts are scaled."""
        return self._features(self._rng(_SCALE, self.day))

    def _slots(self, features: Features) -> Floats:
        return _pooled(self._effects, features)

    @cached_property
    def _effects(self) -> Floats:
        w, v = self._unscaled_effects()
        w *= np.array([category.sway for category in CATEGORIES], np.float32)[:, None]
        v *= np.array([category.mingle for category in CATEGORIES], np.float32)[:, None, None]
        for slot in range(len(CATEGORIES)):  # a mean would be a linear effect in disguise
            v[slot] -= v[slot, _patterns(slot, self._sample)].mean(0)
        linear = _pooled(_table(w, np.zeros_like(v)), self._sample).std()
        pairs = _pooled(_table(np.zeros_like(w), v), self._sample).std()
        return _table(w * (LINEAR / linear), v * np.sqrt(PAIRS / pairs))

    def _unscaled_effects(self) -> tuple[Floats, Floats]:
        """Unit normal w and v that turn, day by day, from one draw to the next."""
        generation, share = divmod(self.day * self.drift, 1.0)
        turn = np.array([np.cos(share * np.pi / 2), np.sin(share * np.pi / 2)], np.float32)
        shape = (1 + FACTORS, len(CATEGORIES), PATTERNS + 1)
        drawn = [self._rng(_EFFECTS, int(generation) + i).standard_normal(shape, dtype=np.float32) for i in (0, 1)]
        effects = turn[0] * drawn[0] + turn[1] * drawn[1]
        return effects[0], np.moveaxis(effects[1:], 0, 2).copy()

    def _dense(self, features: Features) -> Floats:
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
        """The shift that gives the wanted click rate, by bisection."""
        logit = self._slots(self._sample) + self._dense(self._sample)
        low, high = np.float32(-20), np.float32(20)
        for _ in range(30):
            middle = (low + high) / 2
            low, high = (middle, high) if _sigmoid(logit + middle).mean() < CTR else (low, middle)
        return low


def _patterns(slot: int, features: Features) -> NDArray[np.intp]:
    """The row of the effects table for every value of a slot; the last is that of the missing value."""
    pattern = (features.values[slot] & np.uint32(PATTERNS - 1)).astype(np.intp)
    if group := CATEGORIES[slot].group:
        pattern[features.missing[group]] = PATTERNS
    return np.asarray(pattern)


def _table(w: Floats, v: Floats) -> Floats:
    """[slots, patterns + 1, (w − |v|²/2, v)]: summed over a row's slots, it gives single and pair effects at once."""
    return np.concatenate([(w - 0.5 * np.square(v).sum(2))[:, :, None], v], axis=2)


def _pooled(table: Floats, features: Features) -> Floats:
    parts = np.zeros((BLOCK, 1 + FACTORS), np.float32)
    for slot in range(len(CATEGORIES)):
        parts += table[slot].take(_patterns(slot, features), axis=0)
    return np.asarray(parts[:, 0] + 0.5 * np.square(parts[:, 1:]).sum(1))


def _sigmoid(x: Floats) -> Floats:
    return np.asarray(1 / (1 + np.exp(-x)))
