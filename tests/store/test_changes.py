"""What is published: base plus deltas is always the base of that moment."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clickfleet import Table
from clickfleet.errors import TableError
from clickfleet.store import checkpoint
from reference import rows_of

F = np.float32
actions = st.lists(
    st.one_of(
        st.tuples(st.just("push"), st.lists(st.integers(0, 60), min_size=1, max_size=40), st.integers(0, 2)),
        st.tuples(
            st.sampled_from(
                [
                    "shrink",
                    "day",
                    "publish",
                    "take",
                    "take",
                    "taken, lost",
                    "publish base",
                    "hold",
                    "held base",
                    "reload",
                ]
            )
        ),
    ),
    min_size=5,
    max_size=60,
)


def weights(rows: dict) -> dict:
    return {key: (row["slot"], row["embed_w"], row["embedx"]) for key, row in rows.items()}


@given(actions=actions)
def test_base_plus_deltas_is_the_base_of_that_moment(actions, tmp_path_factory):
    folder = tmp_path_factory.mktemp("changes")
    table = Table(
        factors=2,
        admission="count(2)",
        base_threshold=0.25,
        delta_keep_days=1,
        decay_rate=0.8,
        delete_threshold=0.12,
        delete_after_unseen_days=2,
    )
    reader: dict = {}

    def apply(changes) -> None:
        if changes.base:
            reader.clear()
        reader.update(weights(rows_of(changes)))
        for key in changes.deleted.tolist():
            reader.pop(key, None)

    for n, (what, *more) in enumerate([*actions, ("publish",)]):
        if what == "push":
            keys = np.array(more[0], np.uint64)
            table.push(keys, np.full((len(keys), 3), n % 5 - 2, F), click=np.full(len(keys), more[1], F))
        elif what == "shrink":
            table.shrink()
        elif what == "day":
            table.end_day()
        elif what == "reload":
            table = checkpoint.load(checkpoint.save(table, folder / str(n), files=1))
        elif what.startswith("take"):
            if not table.tracking:
                continue
            taken = table.take_changes()
            table.push(np.array([n % 60, 62], np.uint64), np.ones((2, 3), F))
            if what == "take":
                apply(taken)
            else:  # it could not be published: the next changes have it
                table.restore_readers(taken.keys)
        elif what in ("hold", "held base"):
            changes = table.cut_changes(base=what == "held base")
            rows_of(changes)
            table.push(np.array([n % 60], np.uint64), np.ones((1, 3), F))
            changes.abort()
        else:
            changes = table.cut_changes(base=what == "publish base")
            apply(changes)
            if n % 3 == 0:  # life goes on between the cut and the commit; the next changes carry it
                table.push(np.array([n % 60, 61], np.uint64), np.ones((2, 3), F))
                table.shrink()
            changes.commit()
    changes = table.cut_changes()
    apply(changes)
    changes.commit()
    now = table.cut_changes(base=True)
    assert weights(rows_of(now)) == reader
    now.abort()


def content(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


@given(seed=st.integers(0, 1000), limited=st.booleans())
def test_changes_are_taken_while_a_checkpoint_is_written(seed, limited, tmp_path_factory):
    """The checkpoint is of its moment, byte for byte, whatever is taken and pushed before it is read."""
    folder, rng = tmp_path_factory.mktemp("taken"), np.random.default_rng(seed)
    memory = {"memory_limit": 5_000_000, "snapshot_reserve": 1_500_000} if limited else {}
    table = Table(factors=2, admission="count(2)", base_threshold=0.25, decay_rate=0.8, delete_threshold=0.12, **memory)

    def train() -> None:
        keys = rng.integers(0, 3000, 400).astype(np.uint64)
        table.push(keys, np.ones((len(keys), 3), F), click=rng.integers(0, 3, len(keys)).astype(F))

    def take() -> None:
        taken = table.take_changes()
        reader.update(weights(rows_of(taken)))
        for key in taken.deleted.tolist():
            reader.pop(key, None)
        assert table.stats()["changed"] == 0

    train()
    base = table.cut_changes(base=True)
    reader = weights(rows_of(base))
    base.commit()
    train()
    table.shrink()
    wanted = content(checkpoint.save(table, folder / "wanted", files=2))
    with table.snapshot(2) as snapshot:
        for _ in range(3):
            take()
            train()
        found = content(checkpoint.save(table, folder / "found", files=2, snapshot=snapshot))
    assert found == wanted
    take()
    now = table.cut_changes(base=True)
    assert weights(rows_of(now)) == reader
    with pytest.raises(TableError, match="commit or abort them first"):
        table.take_changes()
    now.abort()


def test_nothing_is_taken_before_a_base():
    with pytest.raises(TableError, match="nothing was published yet"):
        Table(factors=1).take_changes()


def test_delta_threshold_postpones_and_a_held_delta_is_not_postponed_again():
    table = Table(factors=1, delta_threshold=0.25)
    table.push(np.array([1, 2], np.uint64), np.ones((2, 2), F))
    first = table.cut_changes()
    assert rows_of(first).keys() == {1, 2}
    first.commit()
    table.push(np.array([1], np.uint64), np.ones((1, 2), F))  # 0.1
    for _ in range(2):
        small = table.cut_changes()
        assert not rows_of(small)
        small.commit()
    table.push(np.array([1], np.uint64), np.ones((1, 2), F), show=np.array([2], F))  # 0.3 in all
    held = table.cut_changes()
    assert rows_of(held).keys() == {1}
    held.abort()
    again = table.cut_changes()
    assert rows_of(again).keys() == {1}
    again.commit()


def test_changes_cost_what_changed_not_what_is_there():
    table = Table(factors=2)
    many = np.arange(50_000, dtype=np.uint64)
    table.push(many, np.ones((len(many), 3), F))
    base = table.cut_changes()
    assert len(rows_of(base)) == len(many)
    base.commit()
    table.push(many[:10], np.ones((10, 3), F))
    delta = table.cut_changes()
    assert len(rows_of(delta)) == 10
    delta.commit()
    assert table.stats()["changed"] == 0


def test_misuse_is_named():
    table = Table(factors=1)
    table.push(np.array([1], np.uint64), np.ones((1, 2), F))
    changes = table.cut_changes()
    with pytest.raises(TableError, match="not read to the end"):
        changes.commit()
    rows_of(changes)
    with pytest.raises(TableError, match="commit or abort them first"):
        table.cut_changes()
    changes.commit()
    with pytest.raises(TableError, match="already"):
        changes.commit()
    with pytest.raises(TableError, match="already"):
        changes.abort()


def test_changes_that_are_dropped_are_aborted():
    table = Table(factors=1)
    table.push(np.array([1], np.uint64), np.ones((1, 2), F))
    changes = table.cut_changes()
    next(iter(changes))
    del changes
    assert rows_of(table.cut_changes()).keys() == {1}
