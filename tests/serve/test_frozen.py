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

    widths, brief, weights, deleted = _core.merge_frozen(stack, FACTORS, 0, 2**64 - 1, False)
    full = [tuple(columns) for _, *columns in widths]
    assert not len(deleted)
    merged = _core.FrozenRows((_core.FrozenLayer(full, [(brief, weights)], deleted, (full, brief, weights)),), 3)
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
        _core.pool(offsets, np.arange(size, dtype=np.uint32), values, mean, 2, pulled, *expected)
        got = np.empty((2, 2), np.float32), np.empty((2, 2, FACTORS), np.float32)
        assert rows.inputs(keys, offsets[:-1], offsets[1:], values, mean, [], 0, *got) == []
        np.testing.assert_array_equal(got[0], expected[0])
        np.testing.assert_array_equal(got[1], expected[1])
        with pytest.raises(ValueError, match="do not match"):
            rows.inputs(keys, offsets[:-2], offsets[1:], values, mean, [], 0, *got)


def test_histories_are_gathered_once_per_row_that_differs() -> None:
    random, truth = np.random.default_rng(2), {}
    rows = _core.FrozenRows((layer(random, truth, 50),), FACTORS)
    user = (random.integers(0, 50, 200) * 7).astype(np.uint64)  # 100 events of two columns, the same in three rows
    keys = np.concatenate([[7], user, [14], user, [21], user[:2]]).astype(np.uint64)
    offsets = np.cumsum([0, 1, 100, 100, 1, 100, 100, 1, 1, 1])
    first, factors = np.empty((3, 1), np.float32), np.empty((3, 1, FACTORS), np.float32)
    starts, ends = offsets[:-1], offsets[1:]
    ((events, length, row),) = rows.inputs(keys, starts, ends, None, None, [(1, 2)], 1 << 20, first, factors)
    assert (events.shape, length.tolist(), row.tolist()) == ((2, 100, 2, FACTORS), [100, 1], [0, 0, 1])
    pulled = np.empty((len(keys), 1 + FACTORS), np.float32)
    rows.read(keys, pulled)
    np.testing.assert_array_equal(events[0, :, 0], pulled[1:101, 1:])
    np.testing.assert_array_equal(events[0, :, 1], pulled[101:201, 1:])
    np.testing.assert_array_equal(events[1, 0], pulled[-2:, 1:])
    assert not events[1, 1:].any()
    np.testing.assert_array_equal(first[:, 0], pulled[[0, 201, 402], 0])
    with pytest.raises(ValueError, match="exceeds the limit of 399 events"):
        rows.inputs(keys, starts, ends, None, None, [(1, 2)], 399, first, factors)


@given(st.integers(0, 2**32), st.integers(1, 9), st.integers(0, 2), st.integers(0, 3), st.booleans())
def test_rows_that_share_cells_are_those_with_keys_of_their_own(
    seed: int, batch: int, slots: int, columns: int, weighted: bool
) -> None:
    """Cells point anywhere into the keys; each row written out gives the same."""
    random, truth = np.random.default_rng(seed), {}
    rows = _core.FrozenRows((layer(random, truth, 50),), FACTORS)
    keys = (random.integers(0, 60, 20) * 7).astype(np.uint64)
    values = random.random(20, np.float32) if weighted else None
    starts = random.integers(0, 15, (batch, slots + columns))
    lengths = random.integers(0, 5, (batch, slots + columns))
    lengths[:, slots:] = lengths[:, slots : slots + 1]  # the columns of a history
    for b in range(1, batch):  # some rows share all cells, some only those of a user
        shared = slice(None) if random.random() < 0.3 else slice(0, random.integers(0, slots + columns + 1))
        starts[b, shared], lengths[b, shared] = starts[b - 1, shared], lengths[b - 1, shared]
        lengths[b, slots:] = lengths[b, slots : slots + 1]
    starts, ends = starts.reshape(-1), (starts + lengths).reshape(-1)
    where = np.concatenate([np.empty(0, int), *(np.arange(a, z) for a, z in zip(starts, ends, strict=True))])
    offsets = np.concatenate([[0], np.cumsum(ends - starts)])
    mean = random.integers(0, 2, slots).astype(np.uint8)
    histories = [(slots, columns)] if columns else []
    found = []
    for cells in (
        (keys, starts, ends, values),
        (keys[where], offsets[:-1], offsets[1:], None if values is None else values[where]),
    ):
        first, factors = np.empty((batch, slots), np.float32), np.empty((batch, slots, FACTORS), np.float32)
        events = rows.inputs(*cells, mean, histories, 1 << 20, first, factors)
        distinct, places = np.unique(cells[0], return_inverse=True)
        pulled = np.empty((len(distinct), 1 + FACTORS), np.float32)
        rows.read(distinct, pulled)
        again = np.empty_like(first), np.empty_like(factors)
        assembled = _core.assemble(places.astype(np.uint32), pulled, *cells[1:], mean, histories, 1 << 20, *again)
        assert len(assembled) == len(events)
        by_row, other = ([(e[row], length[row]) for e, length, row in part] for part in (events, assembled))
        for one, two in zip((first, factors, *sum(by_row, ())), (*again, *sum(other, ())), strict=True):
            np.testing.assert_array_equal(one, two)
        found.append((first, factors, by_row))
    (first, factors, events), (own_first, own_factors, own_events) = found
    np.testing.assert_array_equal(first, own_first)
    np.testing.assert_array_equal(factors, own_factors)
    for (one, length), (other, own_length) in zip(events, own_events, strict=True):
        np.testing.assert_array_equal(one, other)
        np.testing.assert_array_equal(length, own_length)


def test_rows_out_of_order_are_refused() -> None:
    keys = by_hash(np.arange(5))[::-1].copy()
    with pytest.raises(ValueError, match="sorted by the hash of their keys"):
        _core.FrozenLayer([], [(keys, np.zeros(5, np.float32))], np.empty(0, np.uint64), None)
