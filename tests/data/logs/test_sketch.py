"""Sketches against plain counting."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clickfleet.data.logs.sketch import Distinct, Frequent, Quantiles


@pytest.mark.parametrize("n", [0, 1, 10, 1000, 20_000, 60_000, 300_000])
def test_distinct_is_within_three_percent(n: int) -> None:
    sketch = Distinct()
    values = np.arange(n, dtype=np.uint64) * np.uint64(2654435761)
    for part in np.array_split(values, 7):
        sketch.add(part)
        sketch.add(part[: len(part) // 2])  # again: repeats change nothing
    assert abs(sketch.estimate() - n) <= 0.03 * n + 1


def test_distinct_merges_into_the_same_registers() -> None:
    left, right, both = Distinct(), Distinct(), Distinct()
    values = np.random.default_rng(1).integers(0, 2**63, 5000).astype(np.uint64)
    left.add(values[:3000])
    right.add(values[2000:])
    both.add(values)
    left.merge(right)
    assert (left.registers == both.registers).all()


Blocks = st.lists(st.lists(st.integers(0, 30), max_size=60), max_size=8)


@settings(max_examples=200, deadline=None)
@given(Blocks, st.integers(2, 12))
def test_frequent_bounds_every_count(blocks: list[list[int]], size: int) -> None:
    sketch = Frequent(size)
    for block in blocks:
        counts = Counter(block)
        sketch.add([b"%d" % value for value in counts], np.array(list(counts.values()), np.int64))
    truth = Counter(value for block in blocks for value in block)
    assert len(sketch.counts) <= size
    assert sketch.slack * (size + 1) <= sum(truth.values())
    for value in range(31):
        low = sketch.counts.get(b"%d" % value, 0)
        assert low <= truth[value] <= low + sketch.slack


@settings(max_examples=50, deadline=None)
@given(Blocks, Blocks, st.integers(2, 12))
def test_frequent_bounds_survive_a_merge(first: list[list[int]], second: list[list[int]], size: int) -> None:
    sketches = []
    for blocks in (first, second):
        sketch = Frequent(size)
        for block in blocks:
            counts = Counter(block)
            sketch.add([b"%d" % value for value in counts], np.array(list(counts.values()), np.int64))
        sketches.append(sketch)
    sketches[0].merge(sketches[1])
    truth = Counter(value for block in first + second for value in block)
    for value in range(31):
        low = sketches[0].counts.get(b"%d" % value, 0)
        assert low <= truth[value] <= low + sketches[0].slack


def test_frequent_ranks_by_count_then_value() -> None:
    sketch = Frequent()
    sketch.add([b"b", b"a", b"c"], np.array([2, 2, 5]))
    assert sketch.top(2) == [(b"c", 5), (b"a", 2)]


Numbers = st.lists(st.floats(-1e6, 1e6) | st.just(float("nan")), max_size=80)


@settings(max_examples=200, deadline=None)
@given(st.lists(Numbers, max_size=5), st.floats(0.01, 1))
def test_spread_is_exact_while_values_are_few(blocks: list[list[float]], share: float) -> None:
    sketch = Quantiles()
    for block in blocks:
        sketch.add(np.array(block, np.float64))
    numbers = np.array([x for block in blocks for x in block if np.isfinite(x)])
    assert sketch.count == len(numbers)
    if not len(numbers):
        assert np.isnan(sketch.quantile(share))
        return
    assert (sketch.low, sketch.high) == (numbers.min(), numbers.max())
    assert sketch.quantile(share) == np.quantile(numbers, share, method="inverted_cdf")
    np.testing.assert_allclose(sketch.mean, numbers.mean(), rtol=1e-9, atol=1e-6)
    np.testing.assert_allclose(sketch.deviation, numbers.std(), rtol=1e-6, atol=1e-6)
    edges, counts = sketch.histogram(7)
    assert counts.sum() == len(numbers)
    assert (np.diff(edges) >= 0).all()


def test_spread_of_many_values_keeps_ranks_within_a_percent() -> None:
    numbers = np.random.default_rng(3).lognormal(3, 2, 200_000)
    sketch, half = Quantiles(1024), Quantiles(1024)
    for part in np.array_split(numbers[:100_000], 10):
        sketch.add(part)
    for part in np.array_split(numbers[100_000:], 10):
        half.add(part)
    sketch.merge(half)
    assert len(sketch.values) <= 1024
    assert sketch.count == len(numbers)
    for share in (0.05, 0.5, 0.95, 0.99):
        assert abs((numbers <= sketch.quantile(share)).mean() - share) < 0.01
    np.testing.assert_allclose([sketch.mean, sketch.deviation], [numbers.mean(), numbers.std()], rtol=1e-9)
