"""Cuts while others write: never torn, and nothing waits for ever."""

import threading

import numpy as np
import pytest

from clickfleet import Table
from clickfleet.errors import TableError
from clickfleet.store import checkpoint
from clickfleet.store.rules import rule
from reference import rows_of

F = np.float32
COUNTING = rule("sgd", lr=1.0, scale="none", bounds=(-1e9, 1e9))


def counting_table(**settings) -> Table:
    """Every push lowers all weights of its keys by one: a row tells how many pushes it has seen."""
    return Table(factors=3, rule=COUNTING, init="zero", **settings)


def test_a_restored_snapshot_is_a_prefix_of_every_threads_pushes(tmp_path):
    table = counting_table()
    threads, keys_each, rounds = 3, 700, 40
    done = threading.Event()

    def work(thread: int) -> None:
        mine = np.arange(keys_each, dtype=np.uint64) * threads + thread
        for _ in range(rounds):
            table.push(mine, np.ones((keys_each, 4), F))

    workers = [threading.Thread(target=work, args=(i,)) for i in range(threads)]
    for worker in workers:
        worker.start()
    saved = []
    while any(worker.is_alive() for worker in workers) or not saved:
        saved.append(checkpoint.save(table, tmp_path / str(len(saved))))
    done.set()
    for path in saved:
        restored = checkpoint.load(path)
        for thread in range(threads):
            mine = np.arange(keys_each, dtype=np.uint64) * threads + thread
            rows = restored.pull(mine, training=False)
            assert (rows == rows[0, 0]).all(), "a push was cut in two"
            assert -rounds <= rows[0, 0] <= 0


def test_rows_deleted_or_admitted_after_the_cut_are_as_they_were_at_the_cut():
    table = Table(factors=2, admission="count(2)", delete_threshold=0.15)
    some = np.arange(5000, dtype=np.uint64)
    table.push(some, np.ones((5000, 3), F))
    before = rows_of(table.snapshot())
    cut = table.snapshot(4)
    table.push(some[:1000], np.ones((1000, 3), F))
    table.push(some + np.uint64(100_000), np.ones((5000, 3), F))
    table.end_day()
    assert table.shrink() == 9000
    assert rows_of(cut) == before
    assert len(table) == 1000


def test_one_snapshot_at_a_time_and_closing_frees_it():
    table = counting_table()
    table.push(np.arange(10, dtype=np.uint64), np.ones((10, 4), F))
    cut = table.snapshot()
    with pytest.raises(TableError, match="another snapshot of this table is still open"):
        table.snapshot()
    cut.close()
    assert len(rows_of(table.snapshot())) == 10


def test_a_full_undo_log_makes_pushes_wait_for_the_reader():
    table = counting_table(memory_limit=20_000_000, snapshot_reserve=800_000)
    some = np.arange(40_000, dtype=np.uint64)
    table.push(some, np.ones((len(some), 4), F))
    cut = table.snapshot(2)
    pusher = threading.Thread(target=lambda: table.push(some, np.ones((len(some), 4), F)))
    pusher.start()
    pusher.join(0.2)
    assert pusher.is_alive(), "40,000 images of 64 bytes fit into 800 kB?"
    rows = rows_of(cut)
    pusher.join(60)
    assert not pusher.is_alive()
    assert table.stats()["undo_waits"] > 0
    assert {row["embed_w"] for row in rows.values()} == {(-1.0,)}
    assert len(rows) == len(some)
    assert (table.pull(some) == -2).all()


def test_a_thousand_snapshots_do_not_confuse_epochs():
    table = counting_table()
    some = np.arange(64, dtype=np.uint64)
    for n in range(1, 600):
        table.push(some[n % 64 : n % 64 + 1], np.ones((1, 4), F))
        cut = table.snapshot()
        table.push(some, np.ones((64, 4), F))
        before = rows_of(cut)
        assert len(before) == 1 if n == 1 else 64
        assert -sum(row["embed_w"][0] for row in before.values()) == n + 64 * (n - 1)
