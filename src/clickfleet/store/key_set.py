"""A set of keys: which rows somebody has."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from clickfleet import _core
from clickfleet.store.table import Keys


class KeySet:
    """A set of keys, 16 to 32 bytes each. Not thread-safe.

    >>> held = KeySet()
    >>> held.add(np.array([5, 7, 5], np.uint64))
    >>> held.has(np.array([6, 7], np.uint64)).tolist(), len(held)
    ([False, True], 2)
    """

    def __init__(self) -> None:
        self._core = _core.KeySet()

    def __len__(self) -> int:
        return len(self._core)

    def add(self, keys: Keys) -> None:
        self._core.add(np.ascontiguousarray(keys, np.uint64))

    def insert(self, keys: Keys) -> NDArray[np.bool_]:
        """Add keys. Return which of them were new."""
        out = np.empty(len(keys), np.uint8)
        self._core.insert(np.ascontiguousarray(keys, np.uint64), out)
        return out.view(np.bool_)

    def has(self, keys: Keys) -> NDArray[np.bool_]:
        out = np.empty(len(keys), np.uint8)
        self._core.has(np.ascontiguousarray(keys, np.uint64), out)
        return out.view(np.bool_)

    def keys(self) -> Keys:
        """Return all keys, in no particular order."""
        out = np.empty(len(self), np.uint64)
        self._core.copy(out)
        return out
