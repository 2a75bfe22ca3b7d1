"""Immutable layers of rows against a dictionary, and the features of a request against the reader of files."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clickfleet import _core

FACTORS = 3


def by_hash(keys: np.ndarray) -> np.ndarray:
    keys = np.asarray(keys, np.uint64)
    hashes = np.empty_like(keys)
    _core.mix64(keys, hashes)
    return keys[np.argsort(hashes)]


def layer(random: np.random.Generator, truth: dict[int, np.ndarray], universe: int) -> _core.FrozenLayer:
    keys = by_hash(random.permutation(universe)[: universe // 2] * 7)
    kind = random.integers(0, 3, len(keys))
    full, brief, gone = (np.ascontiguousarray(keys[kind == k]) for k in range(3))
    rows = random.random((len(full), 1 + FACTORS), np.float32)
    weights = random.random(len(brief), np.float32)
    truth |= dict(zip(full.tolist(), rows, strict=True))
    truth |= {key: np.array([w, 0, 0, 0], np.float32) for key, w in zip(brief.tolist(), weights, strict=True)}
    for key in gone.tolist():
        truth.pop(key, None)
    whole = (full, np.ascontiguousarray(rows[:, 0]), np.ascontiguousarray(rows[:, 1:]))
    return _core.FrozenLayer([whole], [(brief, weights)], gone, (whole, brief, weights, gone))


@given(st.integers(0, 300), st.integers(1, 5), st.integers(0, 2**32))
def test_layers_answer_like_a_dictionary(universe: int, layers: int, seed: int) -> None:
    random, truth = np.random.default_rng(seed), {}
    stack = [layer(random, truth, universe) for _ in range(layers)][::-1]
    keys = np.arange(0, universe * 7 + 14, 7, dtype=np.uint64)
    expected = np.stack([truth.get(int(key), np.zeros(1 + FACTORS, np.float32)) for key in keys])
    rows = _core.FrozenRows(tuple(stack), FACTORS)
    out = np.empty_like(expected)
    rows.read(keys, out)
    np.testing.assert_array_equal(out, expected)
    known = np.empty(len(keys), np.uint8)
    rows.known(keys, known)
    assert known.tolist() == [int(key) in truth for key in keys]

    *full, brief, weights, deleted = _core.merge_frozen(stack, FACTORS, 0, 2**64 - 1, False)
    assert not len(deleted)
    merged = _core.FrozenRows(
        (_core.FrozenLayer([tuple(full)], [(brief, weights)], deleted, (full, brief, weights)),), 3
    )
    merged.read(keys, out)
    np.testing.assert_array_equal(out, expected)


def test_reading_and_pooling_in_one_call() -> None:
    random, truth = np.random.default_rng(1), {}
    rows = _core.FrozenRows((layer(random, truth, 50),), FACTORS)
    for size in (3, 400):  # few keys are looked up as they are, many once each
        keys = (random.integers(0, 50, size) * 7).astype(np.uint64)
        offsets = np.array([0, 1, 1, size - 1, size], np.int64)
        values, mean = random.random(size, np.float32), np.array([0, 1], np.uint8)
        pulled = np.empty((size, 1 + FACTORS), np.float32)
        rows.read(keys, pulled)
        expected = np.empty((2, 2), np.float32), np.empty((2, 2, FACTORS), np.float32)
        _core.pool(offsets, np.arange(size, dtype=np.uint32), values, mean, pulled, *expected)
        got = np.empty((2, 2), np.float32), np.empty((2, 2, FACTORS), np.float32)
        rows.inputs(keys, offsets, values, mean, *got)
        np.testing.assert_array_equal(got[0], expected[0])
        np.testing.assert_array_equal(got[1], expected[1])
        with pytest.raises(ValueError, match="do not match"):
            rows.inputs(keys, offsets[:-1], values, mean, *got)


def test_rows_out_of_order_are_refused() -> None:
    keys = by_hash(np.arange(5))[::-1].copy()
    with pytest.raises(ValueError, match="sorted by the hash of their keys"):
        _core.FrozenLayer([], [(keys, np.zeros(5, np.float32))], np.empty(0, np.uint64), None)
