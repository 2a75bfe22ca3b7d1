"""Column statistics in bounded memory: number of distinct values, frequent values, and quantiles.

Each sketch is updated block by block, and can be merged with another of its kind.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from clickfleet import _core
from clickfleet.data.batch import Keys


@dataclass
class Distinct:
    """HyperLogLog (Flajolet et al. 2007) with 2^14 registers: the number of distinct 64-bit hashes to about 0.8%.

    >>> sketch = Distinct()
    >>> sketch.add(np.arange(1000, dtype=np.uint64))
    >>> sketch.add(np.arange(1000, dtype=np.uint64))
    >>> abs(sketch.estimate() - 1000) < 20
    True
    """

    BITS = 14
    registers: NDArray[np.uint8] = field(default_factory=lambda: np.zeros(1 << Distinct.BITS, np.uint8))

    def add(self, values: Keys) -> None:
        if not len(values):
            return
        mixed = np.empty(len(values), np.uint64)
        _core.mix64(np.ascontiguousarray(values), mixed)
        register = (mixed >> np.uint64(64 - self.BITS)).astype(np.intp)
        rest = (mixed & np.uint64((1 << (64 - self.BITS)) - 1)).astype(np.float64)  # 50 bits, so exact
        # The exponent of a float is the position of its highest bit.
        highest = np.maximum((rest.view(np.int64) >> 52) - 1023, -1)
        np.maximum.at(self.registers, register, (64 - self.BITS - highest).astype(np.uint8))

    def merge(self, other: "Distinct") -> None:
        np.maximum(self.registers, other.registers, out=self.registers)

    def estimate(self) -> int:
        m = len(self.registers)
        empty = int((self.registers == 0).sum())
        raw = 0.7213 / (1 + 1.079 / m) * m * m / np.exp2(-self.registers.astype(np.float64)).sum()
        return int(m * np.log(m / empty) + 0.5) if raw <= 2.5 * m and empty else int(raw + 0.5)


@dataclass
class Frequent:
    """The most frequent values (Misra-Gries, mergeable: Agarwal et al. 2012).

    The true count of a value is between its count here and that plus `slack`, which is at most total / size. A value that is
    not listed occurred at most `slack` times.
    """

    size: int = 1024
    slack: int = 0
    counts: dict[bytes, int] = field(default_factory=dict)

    def add(self, values: list[bytes], counts: NDArray[np.int64]) -> None:
        """Add distinct `values` and their counts."""
        values, counts = self._cut(values, counts)  # drops most values before the slow loop
        for value, count in zip(values, counts.tolist(), strict=True):
            self.counts[value] = self.counts.get(value, 0) + count
        self._shrink()

    def _cut(self, values: list[bytes], counts: NDArray[np.int64]) -> tuple[list[bytes], NDArray[np.int64]]:
        """Drop the rare values of a block, as if the block were a sketch of its own."""
        if len(values) <= self.size:
            return values, counts
        order = np.argpartition(-counts, self.size)
        cut = int(counts[order[self.size]])
        kept = order[: self.size][counts[order[: self.size]] > cut]
        self.slack += cut
        return [values[i] for i in kept.tolist()], counts[kept] - cut

    def merge(self, other: "Frequent") -> None:
        for value, count in other.counts.items():
            self.counts[value] = self.counts.get(value, 0) + count
        self.slack += other.slack
        self._shrink()

    def _shrink(self) -> None:
        if len(self.counts) <= self.size:
            return
        cut = sorted(self.counts.values(), reverse=True)[self.size]
        self.counts = {value: count - cut for value, count in self.counts.items() if count > cut}
        self.slack += cut

    def top(self, n: int) -> list[tuple[bytes, int]]:
        """Return the n most frequent values with a lower bound of their counts. Ties are ordered by value."""
        return sorted(self.counts.items(), key=lambda item: (-item[1], item[0]))[:n]


@dataclass
class Quantiles:
    """The distribution of numbers: exact for up to `size` distinct numbers, in clusters of equal weight beyond."""

    size: int = 8192
    values: NDArray[np.float64] = field(default_factory=lambda: np.empty(0))
    weights: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    low: float = np.inf
    high: float = -np.inf
    mean: float = 0.0
    _squares: float = 0.0  # of the distances from the mean

    def add(self, numbers: NDArray[np.floating]) -> None:
        """Add numbers. Ignore those that are not finite."""
        numbers = numbers[np.isfinite(numbers)].astype(np.float64)
        if not len(numbers):
            return
        values, weights = np.unique(numbers, return_counts=True)
        self.low, self.high = min(self.low, float(values[0])), max(self.high, float(values[-1]))
        mean = float(numbers.mean())
        self._join(values, weights, mean, float(np.square(numbers - mean).sum()))

    def merge(self, other: "Quantiles") -> None:
        self.low, self.high = min(self.low, other.low), max(self.high, other.high)
        self._join(other.values, other.weights, other.mean, other._squares)

    def _join(self, values: NDArray[np.float64], weights: NDArray[np.int64], mean: float, squares: float) -> None:
        ours, theirs = self.count, int(weights.sum())
        if not theirs:
            return
        gap = mean - self.mean
        self.mean += gap * theirs / (ours + theirs)
        self._squares += squares + gap * gap * ours * theirs / (ours + theirs)
        both, where = np.unique(np.concatenate([self.values, values]), return_inverse=True)
        joined = np.bincount(where, np.concatenate([self.weights, weights]), len(both)).astype(np.int64)
        if len(both) > self.size:  # merge neighbours into at most size / 2 clusters of equal weight, each at its mean
            cluster = (np.cumsum(joined) - joined) * (self.size // 2) // joined.sum()
            _, cluster = np.unique(cluster, return_inverse=True)
            weight = np.bincount(cluster, joined).astype(np.int64)
            both, joined = np.bincount(cluster, both * joined) / weight, weight
        self.values, self.weights = both, joined

    @property
    def count(self) -> int:
        return int(self.weights.sum())

    @property
    def deviation(self) -> float:
        return float(np.sqrt(self._squares / self.count)) if self.count else np.nan

    def quantile(self, share: float) -> float:
        """Return the smallest value that is not exceeded by a fraction `share` of the numbers."""
        if not self.count:
            return np.nan
        reached = np.cumsum(self.weights)
        return float(self.values[min(int(np.searchsorted(reached, share * self.count)), len(self.values) - 1)])

    def histogram(self, bars: int = 24) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Return edges and counts. The edges are equidistant in sign(x)·log1p(|x|), because counts are heavy-tailed."""
        if not self.count:
            return np.zeros(1), np.empty(0, np.int64)
        ends = np.sign([self.low, self.high]) * np.log1p(np.abs([self.low, self.high]))
        even = np.linspace(ends[0], ends[1], bars + 1)
        edges = np.sign(even) * np.expm1(np.abs(even))
        edges[0], edges[-1] = self.low, self.high
        edges = np.unique(edges)
        if len(edges) < 2:
            return np.array([self.low, self.low]), np.array([self.count])
        bar = np.clip(np.searchsorted(edges, self.values, side="right") - 1, 0, len(edges) - 2)
        return edges, np.bincount(bar, self.weights, len(edges) - 1).astype(np.int64)
