import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clickfleet import _core

F = np.float32


@st.composite
def ragged(draw):
    batch, slots, factors, unique = (draw(st.integers(*r)) for r in ((0, 6), (1, 4), (0, 9), (1, 7)))
    counts = draw(st.lists(st.integers(0, 3), min_size=batch * slots, max_size=batch * slots))
    offsets = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]).astype(np.int64)
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    where = rng.integers(0, unique, offsets[-1]).astype(np.uint32)
    rows = rng.normal(size=(unique, 1 + factors)).astype(F)
    values = rng.normal(size=len(where)).astype(F) if draw(st.booleans()) else None
    mean = rng.integers(0, 2, slots).astype(np.uint8) if draw(st.booleans()) else None
    return batch, slots, factors, offsets, where, rows, values, mean


def weight(values, mean, slots, cell, i, count):
    value = 1.0 if values is None else float(values[i])
    return value / count if mean is not None and mean[cell % slots] else value


@given(ragged())
def test_pool_and_its_gradient_agree_with_plain_loops(case):
    batch, slots, factors, offsets, where, rows, values, mean = case
    first, out = np.full((batch, slots), 9, F), np.full((batch, slots, factors), 9, F)
    _core.pool(offsets, where, values, mean, slots, rows, first, out)
    expected = np.zeros((batch * slots, 1 + factors))
    rng = np.random.default_rng(0)
    d_first, d_out = rng.normal(size=first.shape).astype(F), rng.normal(size=out.shape).astype(F)
    grads, expected_grads = np.zeros_like(rows), np.zeros(rows.shape)
    for cell in range(batch * slots):
        begin, end = offsets[cell], offsets[cell + 1]
        for i in range(begin, end):
            w = weight(values, mean, slots, cell, i, end - begin)
            expected[cell] += w * rows[where[i]]
            expected_grads[where[i]] += w * np.concatenate(
                [[d_first.reshape(-1)[cell]], d_out.reshape(-1, factors)[cell] if factors else []]
            )
    np.testing.assert_allclose(first.ravel(), expected[:, 0], atol=1e-5)
    np.testing.assert_allclose(out.reshape(batch * slots, factors), expected[:, 1:], atol=1e-5)
    _core.unpool(offsets, where, values, mean, slots, d_first, d_out, grads)
    np.testing.assert_allclose(grads, expected_grads, atol=1e-5)


@given(ragged(), st.booleans())
def test_statistics_are_summed_over_occurrences(case, given_show):
    batch, slots, _, offsets, where, rows, _, _ = case
    rng = np.random.default_rng(1)
    show = rng.integers(0, 5, batch).astype(F) if given_show else None
    click = rng.integers(0, 2, batch).astype(F)
    shows, clicks, slot = np.zeros(len(rows), F), np.zeros(len(rows), F), np.full(len(rows), 0xFFFF, np.uint16)
    _core.count(offsets, where, slots, show, click, None, shows, clicks, slot)
    for u in range(len(rows)):
        at = [cell for cell in range(batch * slots) for i in range(offsets[cell], offsets[cell + 1]) if where[i] == u]
        assert shows[u] == sum(1 if show is None else show[cell // slots] for cell in at)
        assert clicks[u] == sum(click[cell // slots] for cell in at)
        assert slot[u] in ([cell % slots for cell in at] or [0xFFFF])


@st.composite
def with_histories(draw):
    """A batch whose last columns are a history: equal lengths in a row, often the same as in the row before."""
    batch, slots, columns, factors, unique = (draw(st.integers(*r)) for r in ((0, 6), (0, 2), (1, 3), (1, 5), (1, 7)))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    cells, events = [], np.empty((columns, 0), np.uint32)
    for row in range(batch):
        if row == 0 or draw(st.booleans()):
            events = rng.integers(0, unique, (columns, draw(st.integers(0, 3)))).astype(np.uint32)
        cells += [rng.integers(0, unique, draw(st.integers(0, 2))).astype(np.uint32) for _ in range(slots)]
        cells += list(events)
    offsets = np.concatenate([[0], np.cumsum([len(cell) for cell in cells])]).astype(np.int64)
    where = np.concatenate([np.empty(0, np.uint32), *cells]).astype(np.uint32)
    rows = rng.normal(size=(unique, 1 + factors)).astype(F)
    return batch, slots, columns, factors, offsets, where, rows, cells


@given(with_histories())
def test_histories_are_gathered_once_and_their_gradient_agrees_with_plain_loops(case):
    batch, slots, columns, factors, offsets, where, rows, cells = case
    every = slots + columns
    row, origin, length = (np.full(batch, -1, np.int64) for _ in range(3))
    distinct, longest = _core.find_events(offsets, where, None, every, slots, columns, row, origin, length)
    out = np.full((distinct, max(longest, 1), columns, factors), 9, F)
    _core.gather(offsets, where, None, every, slots, origin[:distinct], rows, out)
    rng = np.random.default_rng(0)
    d_out = rng.normal(size=out.shape).astype(F)
    grads, expected_grads, pushed = np.zeros_like(rows), np.zeros(rows.shape), set()
    changes = 0
    for b in range(batch):
        events = cells[b * every + slots : (b + 1) * every]
        before = cells[(b - 1) * every + slots : b * every] if b else None
        changes += before is None or any(not np.array_equal(x, y) for x, y in zip(events, before, strict=True))
        h = row[b]
        assert length[h] == len(events[0])
        for c, column in enumerate(events):
            np.testing.assert_array_equal(out[h, : len(column), c], rows[column, 1:])
            assert not out[h, len(column) :, c].any()
            if h not in pushed:
                for event, key in enumerate(column):
                    expected_grads[key, 1:] += d_out[h, event, c]
        pushed.add(h)
    assert distinct == changes  # consecutive rows with the same history share it
    _core.scatter(offsets, where, None, every, slots, origin[:distinct], d_out, grads)
    np.testing.assert_allclose(grads, expected_grads, atol=1e-5)
    first, pooled = np.full((batch, slots), 9, F), np.full((batch, slots, factors), 9, F)
    _core.pool(offsets, where, None, None, every, rows, first, pooled)
    for b, s in np.ndindex(batch, slots):
        np.testing.assert_allclose(first[b, s], rows[cells[b * every + s], 0].sum(), atol=1e-5)
        np.testing.assert_allclose(pooled[b, s], rows[cells[b * every + s], 1:].sum(0), atol=1e-5)


def test_events_count_for_the_slot_whose_rows_they_use():
    offsets, where = np.array([0, 1, 3], np.int64), np.array([0, 1, 1], np.uint32)
    shows, clicks, slot = np.zeros(2, F), np.zeros(2, F), np.zeros(2, np.uint16)
    _core.count(offsets, where, 2, None, np.ones(1, F), np.array([4, 3], np.uint16), shows, clicks, slot)
    assert (shows.tolist(), clicks.tolist(), slot.tolist()) == ([1, 2], [1, 2], [4, 3])


def test_wrong_dtypes_are_refused():
    with pytest.raises(TypeError):
        _core.pool(
            np.zeros(2, np.int64),
            np.zeros(1, np.uint32),
            None,
            None,
            1,
            np.zeros((1, 2), F),
            np.zeros((1, 1)),
            np.zeros((1, 1, 1), F),
        )
