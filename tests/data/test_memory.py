"""Whatever the rows come in, they become the same batches."""

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from clickfleet.data.batch import Batch, concatenate
from clickfleet.data.memory import Feed
from clickfleet.data.schema import Dense, KeyRule, Schema, Slot
from clickfleet.errors import ConfigError, DataError

SCHEMA = Schema((Dense("age", missing=-1.0),), (Slot("city"), Slot("tags", multi=True)), group="user")
ROWS = [
    {"label": 0, "age": 3.5, "city": "Bern", "tags": ["a", "b"], "user": "u"},
    {"label": 1, "age": None, "city": None, "tags": [], "user": "v"},
    {"label": 1, "age": 2.5, "city": "Oslo", "tags": ["b"], "user": "u"},
]
TABLE = pa.Table.from_pylist(ROWS)


def same(one: Batch, other: Batch) -> bool:
    return all(
        np.array_equal(getattr(one, name), getattr(other, name))
        for name in ("labels", "dense", "keys", "offsets", "groups")
    )


@pytest.mark.parametrize(
    "make",
    [
        lambda: TABLE,
        lambda: TABLE.to_batches()[0],
        lambda: TABLE.to_reader(),
        lambda: pd.DataFrame(ROWS),
        lambda: pl.DataFrame(ROWS),
        lambda: ROWS,
        lambda: iter(ROWS),
        lambda: next(iter(Feed(TABLE, SCHEMA))),
        lambda: list(Feed(TABLE, SCHEMA, batch_size=1)),
    ],
)
def test_all_kinds_of_rows_are_the_same(make):
    (expected,) = Feed(TABLE, SCHEMA)
    (batch,) = Feed(make(), SCHEMA)
    assert same(batch, expected)
    assert batch.dense.tolist() == [[3.5], [-1], [2.5]]
    assert same(concatenate(list(Feed(make(), SCHEMA, batch_size=2))), expected)


WIDE = Schema((Dense("a"), Dense("b")), (Slot("c"), Slot("d", multi=True)), keys=KeyRule("raw"))
ARRAYS = {
    "dense": np.arange(20, dtype=np.float32).reshape(10, 2),
    "c": np.arange(10),
    "d": np.arange(20).reshape(10, 2),
    "label": np.ones(10),
}


class Items(Dataset):
    def __len__(self):
        return 10

    def __getitem__(self, i):
        return {"dense": torch.tensor([2.0 * i, 2.0 * i + 1]), "c": i, "d": [2 * i, 2 * i + 1], "label": 1.0}


@pytest.mark.parametrize(
    ("data", "names"),
    [
        (ARRAYS, None),
        ({name: torch.from_numpy(array) for name, array in ARRAYS.items()}, None),
        (
            {**{k: v for k, v in ARRAYS.items() if k != "dense"}, "a": np.arange(0, 20, 2), "b": np.arange(1, 20, 2)},
            None,
        ),
        (
            DataLoader(TensorDataset(*(torch.from_numpy(array) for array in ARRAYS.values())), batch_size=4),
            list(ARRAYS),
        ),
        (DataLoader(Items(), batch_size=3), None),
    ],
)
def test_arrays_and_loaders(data, names):
    batches = list(Feed(data, WIDE, batch_size=4, names=names))
    assert [len(batch) for batch in batches] == [4, 4, 2]
    whole = concatenate(batches)
    assert whole.dense.tolist() == ARRAYS["dense"].tolist()
    assert whole.keys.reshape(10, 3).tolist() == [[i, 2 * i, 2 * i + 1] for i in range(10)]


def test_rows_without_a_label():
    (batch,) = Feed(TABLE.drop_columns("label"), SCHEMA)
    assert batch.labels is None


def test_restores_at_every_batch():
    feed = Feed(ARRAYS, WIDE, batch_size=3)
    seen, states = [], []
    for batch in feed:
        seen.append(batch.keys.tolist())
        states.append(feed.state())
    for i, state in enumerate(states):
        again = Feed(ARRAYS, WIDE, batch_size=3)
        again.restore(state)
        assert [batch.keys.tolist() for batch in again] == seen[i + 1 :]
        assert again.counters == feed.counters
    with pytest.raises(DataError, match="a different schema"):
        Feed(TABLE, SCHEMA).restore(states[0])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (7, "cannot read rows from int"),
        ("text", "cannot read rows from str"),
        ([7], "an item of the data is a int"),
        ([(1, 2)], "tuples, which have no names"),
        (TABLE.drop_columns("city"), "there is no column 'city'"),
        ([{**ROWS[0], "label": None}], "row 0 of the data: label: the label is missing"),
        ([{**ROWS[0], "city": "x"}, {**ROWS[0], "city": 5}], "rows 0 to 1 of the data: a column mixes types"),
        ([{**ROWS[0], "city": 0.5}], "city: 0.5 is not an id; expected text or integers"),
        ({"label": np.ones(3), "age": np.ones(2)}, "the arrays have different lengths"),
        ({"label": 1, "age": np.ones(2)}, "'label' is a single value"),
        ({"label": np.ones((2, 2, 2))}, "has 3 dimensions"),
        (
            Batch(np.zeros((1, 0), np.float32), np.zeros(1, np.uint64), 1),
            "a batch has 0 dense columns and 1 slots, the schema has 1 and 2",
        ),
    ],
)
def test_refuses(data, message):
    with pytest.raises(DataError) as refusal:
        list(Feed(data, SCHEMA))
    assert message in str(refusal.value)


def test_refuses_names_that_do_not_fit():
    with pytest.raises(DataError, match="tuples of 2 entries, but there are 1 names"):
        list(Feed([(np.ones(2), np.ones(2))], SCHEMA, names=["a"]))
    with pytest.raises(DataError, match="dense has 3 columns, the schema has 2"):
        list(Feed({**ARRAYS, "dense": np.ones((10, 3))}, WIDE))
    with pytest.raises(ConfigError, match="batch_size"):
        Feed(TABLE, SCHEMA, batch_size=0)


def test_nothing_is_no_batch():
    assert list(Feed([], SCHEMA)) == []
    assert list(Feed(TABLE.slice(0, 0), SCHEMA)) == []
