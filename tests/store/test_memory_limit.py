from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clickfleet import Table
from clickfleet.store import checkpoint

F = np.float32
LIMIT = 12_000_000


@settings(max_examples=settings.default.max_examples // 5)
@given(data=st.data())
def test_the_limit_is_never_exceeded(data):
    """Ever-growing keys, admission, days, snapshots and publications within one small table."""
    table = Table(factors=8, admission="count(2)", memory_limit=LIMIT)
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    size = data.draw(st.sampled_from([1000, 3000, 20000]))
    top = 0
    for _ in range(300_000 // size):
        top += size
        keys = rng.integers(max(0, top - 3 * size), top, size, dtype=np.uint64)
        table.push(keys, np.ones((size, 9), F))
        match data.draw(st.integers(0, 9)):
            case 0:
                table.shrink()
            case 1:
                for _rows in table.snapshot():
                    pass
            case 2:
                changes = table.cut_changes()
                for _rows in changes:
                    pass
                changes.commit()
        assert table.stats()["peak_bytes"] <= LIMIT


class Drift:
    """A stream of pushes, days and publications over ever-new keys; goes on the same on any table that is the same."""

    def __init__(self, seed: int, size: int) -> None:
        self.seed, self.size = seed, size

    def play(self, table: Table, first: int, last: int) -> None:
        for i in range(first, last):
            rng = np.random.default_rng([self.seed, i])
            keys = rng.integers(max(0, (i - 3) * self.size), (i + 1) * self.size, self.size, dtype=np.uint64)
            grads = rng.standard_normal((self.size, 9)).astype(F)
            table.push(keys, grads, show=rng.integers(1, 4, self.size).astype(F))
            act = rng.integers(0, 12)
            if act == 0:
                table.shrink()
            elif act == 1:
                table.end_day()
            elif act <= 4:
                changes = table.cut_changes(base=act == 2)
                for _rows in changes:
                    pass
                changes.abort() if act == 4 else changes.commit()

    def push(self, table: Table, i: int) -> None:
        """Only pushes: changes cannot be cut while a snapshot is being read."""
        for n in range(8):
            rng = np.random.default_rng([self.seed, i, n])
            keys = rng.integers((i + n) * self.size // 2, (i + n + 1) * self.size, self.size, dtype=np.uint64)
            table.push(keys, np.ones((self.size, 9), F))


def content(table: Table) -> tuple:
    with table.snapshot() as rows:
        parts = [{name: np.asarray(column).tobytes() for name, column in part.items()} for part in rows]
        memory, changed, deleted = rows.memory, rows.changed.tolist(), rows.deleted.tolist()
    return parts, memory, changed, deleted


@settings(max_examples=settings.default.max_examples // 5)
@given(
    seed=st.integers(0, 1000),
    size=st.sampled_from([1000, 3000, 12000]),
    stop=st.integers(1, 40),
    admission=st.sampled_from(["birth", "count(2)"]),
)
def test_after_a_restart_the_same_rows_are_evicted(tmp_path_factory, seed, size, stop, admission):
    """Whatever the table went through before, and whether or not a snapshot is being read meanwhile."""
    settled = {"factors": 8, "admission": admission, "memory_limit": 7_000_000, "decay_rate": 0.9}
    one, drift, steps = Table(**settled, delete_threshold=0.05), Drift(seed, size), 160_000 // size
    stop = stop * steps // 40
    drift.play(one, 0, stop)
    other = checkpoint.load(checkpoint.save(one, tmp_path_factory.mktemp("saved") / "a"))
    assert content(one) == content(other)
    with ThreadPoolExecutor() as pool, other.snapshot(8) as rows:
        reading = pool.submit(list, rows)
        drift.push(other, stop)
        reading.result()
    drift.push(one, stop)
    drift.play(one, stop, steps)
    drift.play(other, stop, steps)
    assert content(one) == content(other)
    if stop > steps // 2:
        assert one.stats()["evicted"] > 0


def fill(table: Table, rows: int, size: int = 5000) -> None:
    for start in range(0, rows, size):
        keys = np.arange(start, start + size, dtype=np.uint64) + np.uint64(10**6)
        table.push(keys, np.ones((size, 1 + table.factors), F))


def test_the_lowest_scores_go_first_and_evictions_are_counted():
    table = Table(factors=8, memory_limit=LIMIT)
    valuable = np.arange(5000, dtype=np.uint64)
    table.push(valuable, np.ones((5000, 9), F), show=np.full(5000, 50, F))
    fill(table, 400_000)
    stats = table.stats()
    assert stats["evicted"] > 200_000
    assert stats["rows"] + stats["evicted"] == 405_000
    assert (table.pull(valuable, training=False)[:, 0] != 0).all()
    assert stats["bytes"] > 0.6 * LIMIT


def test_eviction_is_deterministic():
    one, other = (Table(factors=8, memory_limit=LIMIT) for _ in range(2))
    fill(one, 300_000)
    fill(other, 300_000)
    keys = np.arange(300_000, dtype=np.uint64) + np.uint64(10**6)
    np.testing.assert_array_equal(one.pull(keys, training=False), other.pull(keys, training=False))


def test_short_rows_give_way_to_full_ones():
    table = Table(factors=32, admission="count(2)", memory_limit=LIMIT)
    fill(table, 200_000)
    keep = np.arange(20_000, dtype=np.uint64)
    for _ in range(4):
        for start in range(0, 20_000, 1000):
            table.push(keep[start : start + 1000], np.ones((1000, 33), F))
    assert table.stats()["full_rows"] > 15_000
    assert table.stats()["peak_bytes"] <= LIMIT


def test_a_push_larger_than_the_table_may_hold_keeps_the_limit():
    table = Table(factors=8, memory_limit=LIMIT)
    keys = np.arange(1_000_000, dtype=np.uint64)
    table.push(keys, np.ones((len(keys), 9), F))
    assert table.stats()["peak_bytes"] <= LIMIT
    assert 50_000 < len(table) < 250_000


def test_loading_into_a_smaller_limit_evicts(tmp_path):
    table = Table(factors=8)
    fill(table, 200_000)
    smaller = checkpoint.load(checkpoint.save(table, tmp_path / "a"), memory_limit=LIMIT, snapshot_reserve=LIMIT // 10)
    assert smaller.stats()["peak_bytes"] <= LIMIT
    assert len(smaller) < len(table)


@pytest.mark.parametrize("factors", [0, 1, 10, 64])
def test_memory_per_row_is_little_more_than_the_row(factors):
    table = Table(factors=factors)
    fill(table, 500_000)
    stats = table.stats()
    assert stats["bytes"] <= (1.45 if factors else 1.6) * stats["own_bytes"]  # a row without factors is a short one
