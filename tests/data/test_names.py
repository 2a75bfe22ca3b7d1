"""The values behind keys, from every kind of data."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from clickfleet.data import names as module
from clickfleet.data.memory import Feed
from clickfleet.data.names import MISSING, Names, collect, keys_of, undo
from clickfleet.data.reader import Reader
from clickfleet.data.schema import Bucket, Dense, History, Schema, Slot, Transform

SCHEMA = Schema(
    dense=(Dense("age", Transform("log1p")),), slots=(Slot("city"), Slot("tags", multi=True)), label="clicked"
)
CITIES = ("Zürich, CH", "<script>alert(1)</script>", 'say "hi"', "東京", "1", "")
TAGS = (["a"], ["b", "c"], [], ["a", "d"], ["e"], ["f"])


def table(repeat: int = 3) -> pa.Table:
    n = len(CITIES) * repeat
    return pa.table(
        {
            "clicked": [i % 2 for i in range(n)],
            "city": [CITIES[i % len(CITIES)] or None for i in range(n)],
            "tags": [TAGS[i % len(TAGS)] for i in range(n)],
            "age": [float(i % 50) for i in range(n)],
        }
    )


def csv_file(path: Path) -> Path:
    lines = ["clicked,city,tags,age"]
    for row in table().to_pylist():
        city = (row["city"] or "").replace('"', '""')
        lines.append(f'{row["clicked"]},"{city}",{"|".join(row["tags"])},{row["age"]:g}')
    path.write_text("\n".join(lines) + "\n")
    return path


def named(names: Names, source: Any, place: int) -> set[str | None]:
    """Return the names of all keys of a slot."""
    slot = names.schema.slots[place].name
    return {names.name(slot, key) for batch in source for key in keys_of(batch, place).tolist()}


@pytest.mark.parametrize("kind", ["csv", "parquet", "pandas", "polars", "arrow table", "mapping", "rows"])
def test_every_key_of_the_data_has_its_value_as_name(kind: str, tmp_path: Path) -> None:
    data: Any = table()
    if kind == "csv":
        source: Any = Reader(csv_file(tmp_path / "a.csv"), SCHEMA, "csv")
    elif kind == "parquet":
        pq.write_table(data, tmp_path / "a.parquet")
        source = Reader(tmp_path / "a.parquet", SCHEMA, "parquet")
    elif kind == "mapping":
        schema = Schema(dense=SCHEMA.dense, slots=(Slot("city"),), label="clicked")
        columns = {name: np.array(data[name].to_pylist()) for name in ("clicked", "age")}
        source = Feed({**columns, "city": np.array([c or "" for c in data["city"].to_pylist()])}, schema)
        assert named(collect(source) or Names(schema), source, 0) == {*filter(None, CITIES), MISSING}
        return
    else:
        frame = {"pandas": data.to_pandas(), "polars": pl.from_arrow(data), "rows": data.to_pylist()}.get(kind, data)
        source = Feed(frame, SCHEMA)
    names = collect(source)
    assert names is not None
    assert named(names, source, 0) == {*filter(None, CITIES), MISSING}
    assert named(names, source, 1) == {*"abcdef"}
    assert names.values["city"]["東京"] == 3
    assert names.ranges["age"].low == 0
    assert names.ranges["age"].whole


def test_text_formats_without_columns_are_named_by_their_keys(tmp_path: Path) -> None:
    schema = Schema(slots=(Slot("1"), Slot("user")), label="click")
    (tmp_path / "a").write_text("".join(f"click:{i % 2} 1:v{i % 3} user:ü{i % 5}\n" for i in range(50)))
    source = Reader(tmp_path / "a", schema, "slots")
    names = collect(source)
    assert names is not None
    assert named(names, source, 0) == {"v0", "v1", "v2"}
    assert named(names, source, 1) == {f"ü{i}" for i in range(5)}
    assert "v0" not in names.values["user"]  # a token of another slot

    schema = Schema(slots=(Slot("0"), Slot("2")), label="click", values=True)
    (tmp_path / "b").write_text("".join(f"{i % 2} 0:{i % 7}:0.5 2:x{i % 4}:1\n" for i in range(50)))
    source = Reader(tmp_path / "b", schema, "libffm")
    names = collect(source)
    assert names is not None
    assert named(names, source, 1) == {f"x{i}" for i in range(4)}


def test_other_key_rules(tmp_path: Path) -> None:
    raw = Schema(slots=(Slot("city"),), label="clicked").with_keys("raw")
    source = Feed({"clicked": np.array([0, 1]), "city": np.array([7, 8])}, raw)
    names = collect(source)
    assert names is not None
    assert named(names, source, 0) == {"7", "8"}
    assert len(names) == 0  # a key is its own name
    paddle = Schema(slots=(Slot("city"),), label="clicked").with_keys("py2 mod 1000001")
    (tmp_path / "a.csv").write_text("clicked,city\n0,Bern\n1,Oslo\n")
    source = Reader(tmp_path / "a.csv", paddle, "csv")
    names = collect(source)
    assert names is not None
    assert named(names, source, 0) == {"Bern", "Oslo"}


def test_buckets_are_named_by_their_interval_in_the_data() -> None:
    schema = Schema(
        dense=(Dense("age", Transform("log1p")),),
        slots=(Slot("young", bucket=Bucket("age", 0, 4, 4)), Slot("old", bucket=Bucket("age", boundaries=(1.0, 3.0)))),
        label="clicked",
    )
    source = Feed({"clicked": np.array([0, 1, 1]), "age": np.array([0.0, 5.0, 40.0])}, schema)
    names = Names(schema)
    assert named(names, source, 0) == {"0 to 1.718", "1.718 to 6.389", "19.09 to 53.6"}
    assert named(names, source, 1) == {"below 1.718", "1.718 to 19.09", "19.09 and more"}


@pytest.mark.parametrize("transform", ["none", "log1p", "minmax(2, 12)", "standard(3, 2)"])
def test_undo_returns_the_value_in_the_data(transform: str) -> None:
    column = Dense("x", Transform.parse(transform))
    (batch,) = list(Feed({"label": np.array([0.0]), "x": np.array([5.0])}, Schema(dense=(column,))))
    assert undo(column, float(batch.dense[0, 0])) == pytest.approx(5.0, rel=1e-5)


def test_names_are_bounded_and_the_most_frequent_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    schema = Schema(slots=(Slot("a"), Slot("b")))
    counts = {f"v{i}": 1000 - i for i in range(1000)}
    names = Names(schema, {"a": counts, "b": {"long" * 100: 5, "x": 1}})
    few = names.limited(values=20)
    assert list(few.values["a"]) == [f"v{i}" for i in range(10)]
    assert sum(len(text.encode()) for slot in names.limited(size=100).values.values() for text in slot) <= 100
    assert names.merge(Names(schema, {"a": {"new": 5000}})).limited(values=2).values["a"] == {"new": 5000}
    frame = pd.DataFrame({"label": [0, 1] * 500, "a": ["x" * 500] * 1000, "b": [f"u{i}" for i in range(1000)]})
    monkeypatch.setattr(module, "SAMPLE_ROWS", 100)
    found = collect(Feed(frame, schema))
    assert found is not None
    assert found.values["a"] == {}  # too long to show
    assert len(found.values["b"]) == 100


def test_names_survive_writing_and_refuse_damage() -> None:
    names = collect(Feed(table(), SCHEMA))
    assert names is not None
    again = Names.from_dict(names.to_dict(), SCHEMA)
    assert (again.values, again.ranges) == (names.values, names.ranges)
    for wrong in (
        {},
        {"version": 2},
        {"version": 1, "values": 3, "ranges": {}},
        {**names.to_dict(), "ranges": {"age": {}}},
    ):
        with pytest.raises(ValueError, match=r"version|names"):
            Names.from_dict(wrong, SCHEMA)


def test_what_can_be_read_only_once_is_left_alone(tmp_path: Path) -> None:
    import os

    rows = iter(table().to_pylist())
    assert collect(Feed(rows, SCHEMA)) is None
    assert next(rows)["city"] == CITIES[0]
    os.mkfifo(tmp_path / "pipe")
    reader = Reader(csv_file(tmp_path / "a.csv"), SCHEMA, "csv")
    reader.files = [str(tmp_path / "pipe")]  # reading it would wait for ever
    names = collect(reader)
    assert names is not None
    assert len(names) == 0


def test_bad_lines_and_missing_files_leave_the_rest(tmp_path: Path) -> None:
    path = csv_file(tmp_path / "a.csv")
    path.write_bytes(path.read_bytes() + b"not,enough\n1,\xff\xfe,a,2\n")
    names = collect(Reader(path, SCHEMA, "csv", bad_lines="skip"))
    assert names is not None
    assert "東京" in names.values["city"]
    reader = Reader(path, SCHEMA, "csv")
    path.unlink()
    assert len(collect(reader) or Names(SCHEMA)) == 0


def test_events_name_the_values_of_their_slot(tmp_path: Path) -> None:
    """A value that is only in the past has a name too, under its slot and under the column of the history."""
    schema = Schema(slots=(Slot("item"),), histories=(History("past", ("item",), ("items",)),), label="click")
    rows = [{"click": i % 2, "item": f"i{i % 3}", "items": ["old", f"i{i % 5}"]} for i in range(30)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    (tmp_path / "a.csv").write_text(
        "click,item,items\n" + "".join(f"{row['click']},{row['item']},{'|'.join(row['items'])}\n" for row in rows)
    )
    for source in (Feed(rows, schema, 100), *(Reader(tmp_path / f"a.{k}", schema, k) for k in ("parquet", "csv"))):
        names = collect(source)
        assert names is not None
        assert list(names.values) == ["item"]
        key = int(names.keys("item", ["old"])[0])
        assert names.name("item", key) == names.name("past.item", key) == "old"
        assert names.values["item"]["old"] == 30
