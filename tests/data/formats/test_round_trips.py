"""The same rows, written in every format, are the same batch."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from clickfleet.data.schema import Dense, KeyRule, Schema, Slot, Transform
from lines import read

DENSE, SINGLE, MULTI = ("x", "y"), ("s", "t"), ("m",)
word = st.text("abcXYZ019_é", min_size=1, max_size=20)
number = st.none() | st.integers(-5000, 50_000) | st.floats(-1e6, 1e6, width=32).map(lambda x: float(f"{x:.9g}"))
row = st.fixed_dictionaries(
    {
        "label": st.integers(0, 1),
        **dict.fromkeys(DENSE, number),
        **dict.fromkeys(SINGLE, st.none() | word),
        **dict.fromkeys(MULTI, st.lists(word, max_size=4)),
    }
)


def schema(rule: str) -> Schema:
    dense = (Dense("x", Transform("log1p")), Dense("y", Transform("minmax", -1.0, 7.0), missing=0.5))
    slots = tuple(Slot(name, multi=name in MULTI) for name in (*SINGLE, *MULTI))
    return Schema(dense, slots, keys=KeyRule.parse(rule))


def text(value) -> str:
    return "" if value is None else repr(value) if isinstance(value, float) else str(value)


def as_csv(rows) -> str:
    columns = ["label", *DENSE, *SINGLE, *MULTI]
    values = [[row[name] for name in columns] for row in rows]
    lines = [",".join("|".join(v) if isinstance(v, list) else text(v) for v in row) for row in values]
    return "\n".join([",".join(columns), *lines]) + "\n"


def as_slots(rows) -> str:
    return "".join(
        " ".join(
            f"{name}:{text(v)}" for name, value in row.items() for v in (value if isinstance(value, list) else [value])
        )
        + "\n"
        for row in rows
    )


def as_feasign(rows) -> str:
    lines = []
    for row in rows:
        values = [(name, v) for name, value in row.items() for v in (value if isinstance(value, list) else [value])]
        lines.append("id\t" + " ".join(f"{text(v)}:{name}" for name, v in values) + "\n")
    return "".join(lines)


@pytest.mark.parametrize("rule", ["hash64", "py2 mod 1000003"])
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.lists(row, min_size=1, max_size=6))
def test_every_format_reads_the_same(rule, rows, write, tmp_path):
    types = {
        **dict.fromkeys(DENSE, pa.float64()),
        **dict.fromkeys(SINGLE, pa.string()),
        **dict.fromkeys(MULTI, pa.list_(pa.string())),
    }
    table = pa.table({name: pa.array([row[name] for row in rows], types.get(name)) for name in rows[0]})
    pq.write_table(table, tmp_path / "a.parquet")
    batches = [
        *read(write("a.csv", as_csv(rows)), "csv", schema(rule)),
        *read(write("a.slots", as_slots(rows)), "slots", schema(rule)),
        *read(write("a.feasign", as_feasign(rows)), "feasign", schema(rule)),
        *read(tmp_path / "a.parquet", "parquet", schema(rule)),
    ]
    assert len(batches) == 4
    for batch in batches[1:]:
        for name in ("labels", "dense", "keys", "offsets"):
            np.testing.assert_array_equal(getattr(batch, name), getattr(batches[0], name), name)
