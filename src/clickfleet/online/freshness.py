"""Measure the age of events when they are trained on and when they are published.

The time of an event is the one in its row, by the clock of whoever wrote it. All other times are of this machine's clock. An entry
carries the times of its events, so that a server can measure their age when it serves them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clickfleet.store.published import EventTimes

TICKS = 100
"""Times are rounded to this fraction of a second."""
MOST = 1 << 16
"""Largest number of distinct times; beyond it, times are rounded more coarsely."""
POINTS = 50
"""Number of times that an entry carries for all its events."""
_UNITS = (1, 1_000, 1_000_000, 1_000_000_000)
_FIRST_S, _LAST_S = 3e8, 4.2e9
"""1979 to 2103: a number is in the first unit in which it lies between them."""


def seconds(times: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return times in seconds since 1970, whatever their unit: seconds, milliseconds, microseconds or nanoseconds.

    The result is empty if the times are not of such a unit, because nothing can be said about their age.

    >>> seconds(np.array([1767225600, 1767225601])).tolist(), seconds(np.array([1767225600250])).tolist()
    ([1767225600.0, 1767225601.0], [1767225600.25])
    >>> seconds(np.array([20260101])).tolist()
    []
    """
    newest = float(times.max(initial=0))
    for unit in _UNITS:
        if _FIRST_S < newest / unit < _LAST_S:
            known = times > _FIRST_S * unit  # a missing time is 0
            return times[known] / unit
    return np.empty(0)


@dataclass
class TrainedEvents:
    """The events of an entry: how many happened at each time, and how old they were when they were trained on."""

    counts: Counter[int] = field(default_factory=Counter)
    """By time, in units of `unit` ticks."""
    ages: Counter[int] = field(default_factory=Counter)
    """By age in ticks."""
    unit: int = 1

    def add(self, times: NDArray[np.float64], now: float, rows: float | None = None) -> None:
        """Add events of these times. With `rows`, spread that many events evenly over them."""
        ticks = np.floor(times * TICKS).astype(np.int64)
        distinct, counts = np.unique(ticks // self.unit, return_counts=True)
        share = 1.0 if rows is None else rows / max(len(times), 1)
        here = int(now * TICKS)
        for place, count in zip(distinct.tolist(), (counts * share).tolist(), strict=True):
            self.counts[place] += count
            self.ages[max(0, here - place * self.unit)] += count
        while len(self.counts) > MOST:
            self._round(self.unit * 10)
        if len(self.ages) > MOST:
            coarse: Counter[int] = Counter()
            for age, count in self.ages.items():
                coarse[age // TICKS * TICKS] += count
            self.ages = coarse

    def merge(self, other: TrainedEvents) -> None:
        """Add the events of another entry."""
        self._round(max(self.unit, other.unit))
        for place, count in other.counts.items():
            self.counts[place * other.unit // self.unit] += count
        self.ages.update(other.ages)

    def _round(self, unit: int) -> None:
        coarse: Counter[int] = Counter()
        for place, count in self.counts.items():
            coarse[place * self.unit // unit] += count
        self.counts, self.unit = coarse, unit

    def times(self) -> EventTimes | None:
        """Return what an entry carries; None if there are no events."""
        if not self.counts:
            return None
        scale = self.unit / TICKS
        rows = sum(self.counts.values())
        known = sorted(self.counts)
        reached = np.cumsum([self.counts[place] for place in known])
        points = min(POINTS, max(1, round(rows)))
        chosen = np.searchsorted(reached, (np.arange(points) + 0.5) / points * rows)
        return {
            "rows": round(rows),
            "oldest": round(known[0] * scale, 3),
            "newest": round(known[-1] * scale, 3),
            "times": [round(known[min(place, len(known) - 1)] * scale, 3) for place in chosen.tolist()],
        }

    def ages_at(self, published_at: float) -> dict[str, Counter[float]]:
        """Return the ages of the events, in ticks, when they were trained on and when they were published."""
        if not self.counts:
            return {}
        here = published_at * TICKS
        waited = Counter({max(0.0, here - place * self.unit): count for place, count in self.counts.items()})
        return {"trained": Counter(self.ages), "published": waited}

    def facts(self, published_at: float) -> dict[str, float]:
        """Return quantiles of these ages, in seconds."""
        return {
            f"event_to_{what}_p{percent}": round(quantile(ages, percent / 100) / TICKS, 3)
            for what, ages in self.ages_at(published_at).items()
            for percent in (50, 99)
        }


class Freshness:
    """Counts events by their time until they are published.

    >>> now = 1767225700.0
    >>> fresh = Freshness(clock=lambda: now)
    >>> fresh.trained(np.array([1767225690, 1767225690, 1767225640]))
    True
    >>> events = fresh.take()
    >>> events.facts(published_at=1767225710.0)
    {'event_to_trained_p50': 10.0, 'event_to_trained_p99': 60.0, 'event_to_published_p50': 20.0, 'event_to_published_p99': 70.0}
    >>> events.times()
    {'rows': 3, 'oldest': 1767225640.0, 'newest': 1767225690.0, 'times': [1767225640.0, 1767225690.0, 1767225690.0]}
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.events = TrainedEvents()
        self.newest_s: float | None = None
        """Time of the newest event."""

    def trained(self, times: NDArray[np.int64]) -> bool:
        """Record that events of these times were trained on now. Return whether the times can be told."""
        known = seconds(times)
        self._add(known)
        return len(known) > 0

    def trained_between(self, span_s: tuple[float, float], rows: int) -> None:
        """Record that `rows` events between two times were trained on now."""
        self._add(np.linspace(*span_s, 16), rows)

    def _add(self, known: NDArray[np.float64], rows: int | None = None) -> None:
        if len(known):
            self.newest_s = max(self.newest_s or 0.0, float(known.max()))
            self.events.add(known, self.clock(), rows)

    def take(self) -> TrainedEvents:
        """Return the events since the last call, which are about to be published."""
        events, self.events = self.events, TrainedEvents()
        return events

    def give_back(self, events: TrainedEvents) -> None:
        """Take back events that were not published after all."""
        self.events.merge(events)


def quantile(counts: Counter[Any], share: float) -> float:
    """Return the smallest value that at least a fraction `share` of the events do not exceed."""
    wanted, seen = share * sum(counts.values()), 0.0
    for value in sorted(counts):
        seen += counts[value]
        if seen >= wanted - 1e-9:
            return float(value)
    raise ValueError("there are no events")
