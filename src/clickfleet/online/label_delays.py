"""Count, for every label of a join, how many came on time, how many late, and how many may still change.

>>> delays = LabelDelays(("click",), window_us=3600)
>>> delays.learned(np.array([0, 10, 20]), np.array([[1.0], [0.0], [0.0]]), None)
>>> delays.learned(np.array([10]), np.array([[1.0]]), np.array([[0.0]]))  # the second show was clicked after all
>>> delays.on_time, delays.open
({'click': 0.6666666666666666}, {'click': 0.3333333333333333})
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

UNITS = 64
"""Parts of the window by which open labels are counted."""
MOST = 200_000
"""Labels after which older ones count half."""
Labels = NDArray[np.float64]  # [rows, labels], NaN: unknown


class LabelDelays:
    """See the module. A label is open while it is 0 and feedback within the window may change it."""

    def __init__(self, labels: Sequence[str], window_us: int, state: Mapping[str, Any] | None = None) -> None:
        self.labels, saved = tuple(labels), state or {}
        self._unit = max(1, window_us // UNITS)
        nothing = [0] * len(labels)
        self._on_time, self._late, self._known = (
            np.array(saved.get(name, nothing), np.int64) for name in ("on_time", "late", "known")
        )
        self._open: dict[int, NDArray[np.int64]] = {
            int(part): np.array(counts, np.int64) for part, counts in saved.get("open", {}).items()
        }

    def learned(self, shown_us: NDArray[np.int64], values: Labels, previous: Labels | None) -> None:
        """Count rows. `previous` are the labels of earlier rows of the same shows, NaN where there are none."""
        before = np.full_like(values, np.nan) if previous is None else previous
        first = np.isnan(before)
        self._known += (first & ~np.isnan(values)).sum(0)
        came = ~np.isnan(values) & (values != 0)
        self._on_time += (came & first).sum(0)
        self._late += (came & (before == 0)).sum(0)
        if int((self._on_time + self._late).max()) > MOST:
            self._on_time, self._late = self._on_time // 2, self._late // 2
        opened = (values == 0).astype(np.int64) - (before == 0)
        parts, where = np.unique(shown_us // self._unit, return_inverse=True)
        counts = np.zeros((len(parts), len(self.labels)), np.int64)
        np.add.at(counts, where, opened)
        for part, count in zip(parts.tolist(), counts, strict=True):
            self._open[part] = self._open.get(part, 0) + count

    def forget(self, before_us: int) -> None:
        """Close the labels of shows from before a time."""
        for part in [part for part in self._open if (part + 1) * self._unit <= before_us]:
            del self._open[part]

    @property
    def on_time(self) -> dict[str, float]:
        """By label, the share of positives that were known when their rows were first learned."""
        shares = (self._on_time + 1) / (self._on_time + self._late + 1)
        return dict(zip(self.labels, shares.tolist(), strict=True))

    @property
    def open(self) -> dict[str, float]:
        """By label, the share of all values that may still change."""
        still = sum(self._open.values(), np.zeros(len(self.labels), np.int64))
        shares = np.clip(still / np.maximum(self._known, 1), 0.0, 1.0)
        return dict(zip(self.labels, shares.tolist(), strict=True))

    def state(self) -> dict[str, Any]:
        return {
            "on_time": self._on_time.tolist(),
            "late": self._late.tolist(),
            "known": self._known.tolist(),
            "open": {str(part): counts.tolist() for part, counts in self._open.items()},
        }
