"""A random order that is a pure function of its seeds, for ever: not even NumPy's next version may change it."""

import numpy as np
from numpy.typing import NDArray

from clickfleet import _core


def order(n: int, *seeds: int) -> NDArray[np.int64]:
    """A permutation of n rows.

    >>> order(5, 7, 0).tolist()
    [0, 1, 3, 2, 4]
    """
    state = np.uint64(0)
    mixed = np.empty(1, np.uint64)
    for seed in seeds:
        _core.mix64(
            np.array([int(state) ^ (seed & 0xFFFFFFFFFFFFFFFF)], np.uint64) + np.uint64(0x9E3779B97F4A7C15), mixed
        )
        state = mixed[0]
    draws = np.arange(1, n + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + state
    _core.mix64(draws, draws)
    return np.argsort(draws, kind="stable")
