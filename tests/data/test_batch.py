import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from clickfleet.data.batch import Batch, concatenate
from clickfleet.errors import DataError

Rows = list[tuple[float, list[list[int]]]]  # label, keys per slot


def build(rows: Rows, slots: int = 3) -> Batch:
    counts = [len(keys) for _, row in rows for keys in row]
    flat = [key for _, row in rows for keys in row for key in keys]
    return Batch(
        dense=np.array([[label] for label, _ in rows], np.float32).reshape(-1, 1),
        keys=np.array(flat, np.uint64),
        slots=slots,
        offsets=np.cumsum([0, *counts]),
        labels=np.array([label for label, _ in rows], np.float32),
        groups=np.array([int(label) for label, _ in rows], np.uint64),
        values=np.array(flat, np.float32) / 2,
    )


def unbuild(batch: Batch) -> Rows:
    assert batch.labels is not None
    assert batch.values is not None
    assert batch.groups is not None
    assert (batch.values == batch.keys.astype(np.float32) / 2).all()
    assert (batch.groups == batch.dense[:, 0]).all()
    parts = np.split(batch.keys, batch.offsets[1:-1])
    return [
        (float(label), [parts[b * batch.slots + s].tolist() for s in range(batch.slots)])
        for b, label in enumerate(batch.labels)
    ]


keys = st.lists(st.integers(0, 9), max_size=3)
ragged = st.lists(
    st.tuples(st.integers(0, 100).map(float), st.tuples(keys, keys, keys).map(list)), min_size=1, max_size=8
)
single = st.integers(0, 9).map(lambda key: [key])
flat = st.lists(
    st.tuples(st.integers(0, 100).map(float), st.tuples(single, single, single).map(list)), min_size=1, max_size=8
)


@given(ragged | flat, st.data())
def test_slices_take_and_concatenate_as_lists_do(rows: Rows, data: st.DataObject) -> None:
    batch = build(rows)
    cut = data.draw(st.integers(0, len(rows)))
    assert cut == 0 or unbuild(batch[:cut]) == rows[:cut]
    assert unbuild(concatenate([part for part in (batch[:cut], batch[cut:]) if len(part)])) == rows
    order = data.draw(st.lists(st.integers(0, len(rows) - 1), min_size=1, max_size=10))
    assert unbuild(batch.take(np.array(order))) == [rows[i] for i in order]


@given(flat, st.data())
def test_one_key_each_needs_no_offsets(rows: Rows, data: st.DataObject) -> None:
    with_offsets = build(rows)
    without = Batch(
        with_offsets.dense,
        with_offsets.keys,
        3,
        labels=with_offsets.labels,
        groups=with_offsets.groups,
        values=with_offsets.values,
    )
    assert without.one_each
    assert (without.offsets == with_offsets.offsets).all()
    order = np.array(data.draw(st.lists(st.integers(0, len(rows) - 1), min_size=1)))
    for one, other in (
        (without, with_offsets),
        (without.take(order), with_offsets.take(order)),
        (without[1:], with_offsets[1:]),
    ):
        assert not len(one) or unbuild(one) == unbuild(other)
    assert unbuild(concatenate([without, with_offsets])) == rows * 2


@settings(max_examples=50)
@given(
    st.lists(
        st.sampled_from([0, 1, 2, 7, 1 << 32, 5 << 32, (1 << 64) - 1]) | st.integers(0, (1 << 64) - 1), max_size=300
    )
)
def test_unique_is_each_key_once_in_order_of_appearance(many: list[int]) -> None:
    batch = Batch(np.zeros((1, 0), np.float32), np.array(many, np.uint64), 1, np.array([0, len(many)]))
    distinct, where = batch.unique()
    assert distinct.tolist() == list(dict.fromkeys(many))
    assert distinct[where].tolist() == many


def test_unique_of_many() -> None:
    many = np.random.default_rng(7).integers(0, 50_000, 200_000).astype(np.uint64) << np.uint64(40)
    distinct, where = Batch(np.zeros((1, 0), np.float32), many, 1, np.array([0, len(many)])).unique()
    assert len(distinct) == len(np.unique(many))
    assert (distinct[where] == many).all()


def test_torch_takes_every_array() -> None:
    batch = build([(1.0, [[1], [2, 3], []])])
    for array in (*batch.unique(), batch.keys, batch.offsets, batch.dense, batch.labels, batch.groups, batch.values):
        assert array is not None
        torch.from_numpy(array)


def test_a_batch_must_be_whole() -> None:
    dense, keys = np.zeros((2, 1), np.float32), np.zeros(4, np.uint64)
    with pytest.raises(DataError, match=r"inconsistent batch: dense \(2, 1\), 1 slots, 3 offsets, 4 keys"):
        Batch(dense, keys, 1)
    with pytest.raises(DataError, match="a batch of 2 rows has 3 labels"):
        Batch(dense, keys, 2, labels=np.zeros(3, np.float32))
    with pytest.raises(DataError, match="a batch has 1 values for 4 keys"):
        Batch(dense, keys, 2, values=np.zeros(1, np.float32))


def test_a_slice_has_no_step() -> None:
    with pytest.raises(IndexError, match="consecutive rows"):
        build([(1.0, [[1], [2], [3]])])[::2]


def test_labelled_and_unlabelled_rows_do_not_mix() -> None:
    labelled = Batch(np.zeros((1, 0), np.float32), np.zeros(1, np.uint64), 1, labels=np.zeros(1, np.float32))
    bare = Batch(np.zeros((1, 0), np.float32), np.zeros(1, np.uint64), 1)
    with pytest.raises(DataError, match="some rows have labels, others do not"):
        concatenate([labelled, bare])
