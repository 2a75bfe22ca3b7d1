"""The columns of a synthetic log, after Criteo's: how large its counts are, how many ids it has, what is missing."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

BLOCK = 16384
"""Rows drawn at once; part of what a seed means, so it never changes."""


@dataclass(frozen=True)
class Count:
    """A dense column: floor(exp(centre + spread·z)) − shift, never under `least`: heavy-tailed, sometimes missing."""

    centre: float
    spread: float
    shift: int
    group: int
    least: int = 0


@dataclass(frozen=True)
class Category:
    """A slot: id r of `size` with weight (r + offset)^-slope."""

    size: int
    slope: float
    offset: float
    group: int
    sway: float
    """How much its ids matter, relative to other slots."""

    @property
    def mingle(self) -> float:
        """How much its ids interact: the fewer there are, the more, because pairs of rare ids teach nobody anything."""
        return 1.0 if self.size < 700 else 0.75 if self.size < 20_000 else 0.65


# Columns of one group are missing in the same rows, with this probability; group 0 is never missing.
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
    """What is known of `BLOCK` rows before anyone clicks, one array per column."""

    counts: NDArray[np.int32]  # [13, B]
    values: NDArray[np.uint32]  # [26, B]: the categories, eight hexadecimal digits each
    missing: NDArray[np.bool_]  # [groups, B]


def draw(rng: np.random.Generator, seed: int, age: float) -> Features:
    """Features at `age`: the share of ids that died and were replaced since day 0 (over 1: several generations)."""
    missing = rng.random((len(MISSING), BLOCK), dtype=np.float32) < np.array(MISSING, np.float32)[:, None]
    activity = rng.standard_normal(
        BLOCK, dtype=np.float32
    )  # shared by the counts of a row: busy users are busy everywhere
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
        values[j] = _names(j, _zipf(category, rng.random(BLOCK)), seed, age)
    return Features(counts, values, missing)


def _zipf(category: Category, u: NDArray[np.float64]) -> NDArray[np.uint32]:
    """Ranks from 0, by inverting the law's continuous distribution function."""
    power = 1 - category.slope
    low, high = category.offset**power, (category.size + category.offset) ** power
    u *= high - low
    u += low
    return (np.minimum(u ** (1 / power) - category.offset, category.size - 1)).astype(np.uint32)


def _names(slot: int, rank: NDArray[np.uint32], seed: int, age: float) -> NDArray[np.uint32]:
    """The text of each id, as a number: a bijection, so two ids of a slot never share one."""
    salt = np.uint32(0x9E3779B9 * (slot + 1) & 0xFFFFFFFF)
    if age:  # each id dies at its own moment of a generation, and another takes its place
        phase = _mix32(rank ^ salt).astype(np.float32) / np.float32(2**32)
        rank = rank + (np.float32(age) + phase).astype(np.uint32) * np.uint32(1 << 24)
    return _mix32(_mix32(rank ^ np.uint32(seed & 0xFFFFFFFF)) + salt)


def _mix32(x: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """A bijection of 32 bits (the MurmurHash3 finaliser)."""
    x = x ^ (x >> np.uint32(16))
    x *= np.uint32(0x85EBCA6B)
    x ^= x >> np.uint32(13)
    x *= np.uint32(0xC2B2AE35)
    x ^= x >> np.uint32(16)
    return x
