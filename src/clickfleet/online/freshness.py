"""Measure the age of events when they are trained on and when they are published."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

MOST = 1 << 16
"""Largest number of distinct seconds; beyond it, times are rounded more coarsely."""


class Freshness:
    """Counts events by the second they happened in, until they are published.

    >>> now = 1000.0
    >>> fresh = Freshness(clock=lambda: now)
    >>> fresh.trained(np.array([990, 990, 940]))
    >>> now = 1010.0
    >>> fresh.published()
    {'event_to_trained_p50': 10.0, 'event_to_trained_p99': 60.0, 'event_to_published_p50': 20.0, 'event_to_published_p99': 70.0}
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.counts: Counter[int] = Counter()
        self._ages: Counter[int] = Counter()
        self._unit = 1
        self.newest_s: int | None = None
        """Time of the newest event."""

    def trained(self, times: NDArray[np.int64], rows: int | None = None) -> None:
        """Record that events of these times were trained on now. With `rows`, spread that many events evenly over the times."""
        now = self.clock()
        if len(times):
            self.newest_s = max(self.newest_s or 0, int(times.max()))
        seconds, counts = np.unique(times // self._unit * self._unit, return_counts=True)
        share = 1.0 if rows is None else rows / max(len(times), 1)
        for second, count in zip(seconds.tolist(), (counts * share).tolist(), strict=True):
            self.counts[second] += count
            self._ages[max(0, int(now - second))] += count
        if len(self.counts) > MOST:
            self._unit *= 60
            coarse: Counter[int] = Counter()
            for second, count in self.counts.items():
                coarse[second // self._unit * self._unit] += count
            self.counts = coarse

    def published(self) -> dict[str, float]:
        """Record a publication. Return quantiles of the ages, in seconds, of all events since the last one."""
        now = self.clock()
        waited = Counter({max(0.0, now - second): count for second, count in self.counts.items()})
        quantiles = {
            f"event_to_{what}_p{percent}": quantile(counts, percent / 100)
            for what, counts in (("trained", self._ages), ("published", waited))
            for percent in (50, 99)
            if counts
        }
        self.counts.clear()
        self._ages.clear()
        return quantiles


def quantile(counts: Counter[Any], share: float) -> float:
    """Return the smallest value that at least a fraction `share` of the events do not exceed."""
    wanted, seen = share * sum(counts.values()), 0.0
    for value in sorted(counts):
        seen += counts[value]
        if seen >= wanted - 1e-9:
            return float(value)
    raise ValueError("there are no events")
