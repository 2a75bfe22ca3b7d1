"""Corrections: rows that change the labels of an earlier row of the same show, because feedback came late.

A correction has the features of the show, its labels as they are known now, and `previous`: the labels of the earlier row, NaN where
that had none. All rows of a show together count as one show with its last labels, in the statistics of rows and in the metrics.

>>> labels, previous = np.array([1, 1, 0], np.float32), np.array([np.nan, 0, np.nan], np.float32)
>>> late = Corrections(labels, previous)  # the second row corrects an earlier negative
>>> late.rows, late.shows(None), late.clicks(None)
(array([False,  True, False]), array([1., 0., 1.], dtype=float32), array([1., 1., 0.], dtype=float32))
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]


class Corrections:
    """Which rows of a batch are corrections, and what they add to what the earlier rows of their shows added.

    `labels` and `previous` are [B], or [B, T] of several labels.
    """

    def __init__(self, labels: Floats, previous: Floats) -> None:
        self.labels, self.previous = labels, previous
        known = ~np.isnan(previous)
        self.rows: NDArray[np.bool_] = np.asarray(known.reshape(len(known), -1).any(1))

    def shows(self, given: Floats | None) -> Floats:
        """Return the shows to count: none for a correction. `given` are those of the rows; None: 1 each."""
        shows: Floats = np.where(self.rows, np.float32(0), np.float32(1) if given is None else given)
        return shows

    def clicks(self, given: Floats | None) -> Floats:
        """Return the clicks to count: of a correction, what changed. `given` are those of the rows; None: the first label."""
        now, before = (np.nan_to_num(_first(column)) for column in (self.labels, self.previous))
        clicks: Floats = np.where(self.rows, now - before, now if given is None else given)
        return clicks

    def judged(self) -> Floats:
        """Return the labels that no earlier row had: NaN instead of the others, so that each is judged once."""
        judged: Floats = np.where(np.isnan(self.previous), self.labels, np.float32(np.nan))
        return judged


def _first(column: Any) -> Any:
    return column if column.ndim == 1 else column[:, 0]
