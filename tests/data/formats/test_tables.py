"""Parquet and Arrow give the rows that text gives."""

import datetime
import io
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from clickfleet import _core
from clickfleet.data.batch import Batch
from clickfleet.data.formats.arrow import Arrow
from clickfleet.data.schema import Bucket, Dense, KeyRule, Schema, Slot, Transform
from clickfleet.errors import DataError
from lines import read

SCHEMA = Schema(
    (Dense("age", Transform("log1p"), missing=-1.0), Dense("v1", source="vector"), Dense("v2", source="vector")),
    (Slot("city"), Slot("id"), Slot("tags", multi=True), Slot("ages", bucket=Bucket("age", high=5.0, buckets=10))),
    show="shown",
    click="clicks",
    weight="w",
    time="at",
    group="user",
)
TABLE = pa.table(
    {
        "unused": [1, 2, 3],
        "label": [1, 0, 1],
        "age": [10, None, 16384],
        "vector": [[1.0, 2.0], None, [3.5, 4.0]],
        "city": ["Bern", None, "Zürich"],
        "id": pa.array([5, -3, None], pa.int32()),
        "tags": [["a", "b"], [], None],
        "shown": [2, None, 1],
        "clicks": [None, 3, 1],
        "w": [0.5, None, 2.0],
        "at": [10, 20, 30],
        "user": ["u", None, "v"],
    }
)
SLOTS_TEXT = """\
label:1 age:10 vector:1 vector:2 city:Bern id:5 tags:a tags:b shown:2 w:0.5 at:10 user:u
label:0 id:-3 clicks:3 at:20
label:1 age:16384 vector:3.5 vector:4 city:Zürich shown:1 clicks:1 w:2 at:30 user:v
"""


def write_table(table: pa.Table, path, form: str) -> str:
    if form == "parquet":
        pq.write_table(table, path, row_group_size=2)
    else:
        make = pa.ipc.new_file if form == "arrow" else pa.ipc.new_stream
        with pa.OSFile(str(path), "wb") as file, make(file, table.schema) as writer:
            writer.write_table(table, max_chunksize=2)
    return str(path)


def same(one: Batch, other: Batch) -> bool:
    names = ("labels", "shows", "clicks", "weights", "times", "groups", "dense", "keys", "offsets")
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in names)


@pytest.mark.parametrize("form", ["parquet", "arrow", "stream"])
def test_reads_what_text_says(form, tmp_path, write):
    path = write_table(TABLE, tmp_path / "t", form)
    (batch,) = read(path, "parquet" if form == "parquet" else "arrow", SCHEMA)
    (text,) = read(write("a.txt", SLOTS_TEXT), "slots", SCHEMA)
    assert same(batch, text)


def variants() -> dict[str, pa.Table]:
    def change(**columns):
        table = TABLE
        for name, column in columns.items():
            table = table.set_column(table.schema.get_field_index(name), name, column)
        return table

    words = TABLE["city"].combine_chunks()
    return {
        "dictionary": change(city=words.dictionary_encode(), user=TABLE["user"].combine_chunks().dictionary_encode()),
        "large": change(city=words.cast(pa.large_string()), tags=TABLE["tags"].cast(pa.large_list(pa.large_string()))),
        "view": change(city=words.cast(pa.string_view())),
        "binary": change(city=words.cast(pa.binary())),
        "fixed list": change(vector=TABLE["vector"].combine_chunks().cast(pa.list_(pa.float64(), 2))),
        "wide id": change(id=TABLE["id"].cast(pa.int64())),
        "times": change(at=pa.array([10, 20, 30], pa.timestamp("s"))),
        "numbers": change(label=pa.array([True, False, True]), age=pa.array([10.0, np.nan, 16384.0])),
    }


@pytest.mark.parametrize("kind", variants())
def test_how_a_value_is_stored_does_not_matter(kind, tmp_path):
    (plain,) = read(write_table(TABLE, tmp_path / "a", "arrow"), "arrow", SCHEMA)
    (other,) = read(write_table(variants()[kind], tmp_path / "b", "arrow"), "arrow", SCHEMA)
    assert same(plain, other)


def test_maps_hold_keys_with_values(tmp_path):
    table = pa.table(
        {"words": pa.array([[("a", 0.5), ("b", 2.0)], [], None], pa.map_(pa.string(), pa.float32())), "one": [7, 8, 9]}
    )
    schema = Schema(slots=(Slot("words", multi=True), Slot("one")), values=True)
    (batch,) = read(write_table(table, tmp_path / "a", "arrow"), "arrow", schema)
    assert batch.values.tolist() == [0.5, 2.0, 1, 1, 1]
    assert batch.keys[:2].tolist() == [_core.hash64("words", b"a"), _core.hash64("words", b"b")]


def test_raw_keys_from_integers_and_digits(tmp_path):
    table = pa.table({"a": pa.array([2**64 - 1, None], pa.uint64()), "b": ["7", None]})
    schema = Schema(slots=(Slot("a"), Slot("b")), keys=KeyRule("raw"))
    for form in ("arrow", "parquet"):
        (batch,) = read(write_table(table, tmp_path / form, form), form, schema)
        assert batch.keys.tolist() == [2**64 - 1, 7, 0, 0]
        assert batch.labels is None


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"label": [1, None], "a": ["1", "2"]}, "t:2: label: the label is missing"),
        ({"label": [1, 1], "a": ["1", "x"]}, "t:2: a: x is not an unsigned 64-bit integer"),
        ({"label": [1, 1], "a": [1, -2]}, "t:2: a: -2 is negative"),
        ({"label": [1, 1e300], "a": [1, 2]}, "t:2: label: 1e+300 is out of range"),
        ({"label": [1, 1], "a": [0.5, 1.5]}, "a: 0.5 is not an id; expected text or integers"),
        ({"label": ["x", "y"], "a": [1, 2]}, "column 'label' has type string; expected a number"),
        ({"label": [1, 1], "a": [[1], [2, 3]]}, "t:2: a: has several values, but the slot is single-valued"),
        ({"label": [1, 1], "b": [1, 1]}, "there is no column 'a'"),
        ({"label": [1, 1], "a": [datetime.date(2026, 1, 1)] * 2}, "has type date32"),
    ],
)
def test_refuses(columns, message, tmp_path):
    path = write_table(pa.table(columns), tmp_path / "t", "arrow")
    with pytest.raises(DataError) as refusal:
        read(path, "arrow", Schema(slots=(Slot("a"),), keys=KeyRule("raw")))
    assert message in str(refusal.value)


def test_bad_rows_can_be_skipped(tmp_path):
    table = pa.table({"label": [1, None, 0, 1], "a": ["1", "2", "x", "4"]})
    path = write_table(table, tmp_path / "t", "parquet")
    (batch,) = read(
        path, "parquet", Schema(slots=(Slot("a"),), keys=KeyRule("raw")), bad_lines="skip", max_bad_fraction=1
    )
    assert batch.keys.tolist() == [1, 4]


@pytest.mark.parametrize("form", ["parquet", "arrow"])
@pytest.mark.parametrize("content", [b"", b"garbage", b"PAR1" + b"\0" * 50 + b"PAR1", b"ARROW1\0\0" + b"\xff" * 50])
def test_what_is_not_a_table_is_an_error(form, content, write):
    with pytest.raises(DataError, match="cannot be read"):
        read(write("t", content), form, SCHEMA)


@pytest.mark.parametrize("nested", [False, True])
def test_a_view_behind_a_missing_value_must_fit_too(write: Callable[..., Path], nested: bool) -> None:
    """Arrow does not validate it, and reads it when it casts the column."""
    table = pa.table({"click": [0.0, 1.0, 1.0], "s": pa.array(["a" * 20, None, "b"], pa.string_view())})
    valid, views, *data = table["s"].chunk(0).buffers()
    wild = np.frombuffer(views, np.int32).copy()
    wild[4:8] = (-(2**24), 0, 7, 2**31 - 1)  # of the missing one: a length below zero, in a buffer that is not there
    column: pa.Array = pa.Array.from_buffers(pa.string_view(), 3, [valid, pa.py_buffer(wild), *data])
    if nested:
        column = pa.ListArray.from_arrays(pa.array([0, 1, 2, 3], pa.int32()), column)
    sink = io.BytesIO()
    wrong = pa.table({"click": table["click"], "s": column})
    with pa.ipc.new_file(sink, wrong.schema) as writer:
        writer.write_table(wrong)
    schema = Schema(slots=(Slot("s"),), label="click")
    path = write("x.arrow", sink.getvalue())
    with pytest.raises(DataError, match=r"x\.arrow: cannot be read: a view points outside its data"):
        list(Arrow().blocks(str(path), schema, 0))


def test_texts_as_views_are_read(write: Callable[..., Path]) -> None:
    texts = pa.array(["a" * 20, None, "b"], pa.string_view())
    sink = io.BytesIO()
    table = pa.table({"click": [0.0, 1.0, 1.0], "s": texts})
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    (block,) = Arrow().blocks(str(write("x.arrow", sink.getvalue())), Schema(slots=(Slot("s"),), label="click"), 0)
    expected = [_core.hash64("s", b"a" * 20), _core.hash64("s", b""), _core.hash64("s", b"b")]
    assert block.parse("all").batch.keys.tolist() == expected


@pytest.mark.parametrize("stream", [False, True])
def test_a_damaged_arrow_file_is_refused_by_name_and_never_crashes(write: Callable[..., Path], stream: bool) -> None:
    """In a process of its own, as pyarrow ends the whole process where it believes a damaged number."""
    sink = io.BytesIO()
    columns = {"click": [0.0, 1.0] * 20, "s": ["a", None] * 20, "m": [["x"], []] * 20, "d": ["u", "v"] * 20}
    table = pa.table(columns).set_column(3, "d", pa.array(["u", "v"] * 20).dictionary_encode())
    with (pa.ipc.new_stream if stream else pa.ipc.new_file)(sink, table.schema) as writer:
        writer.write_table(table)
    path = write("x.arrow", sink.getvalue())
    program = """
import struct, sys
from clickfleet.errors import DataError
from clickfleet.data.formats.arrow import Arrow
from clickfleet.data.schema import Schema, Slot
schema, path = Schema(slots=(Slot("s"), Slot("m", multi=True), Slot("d")), label="click"), sys.argv[1]
whole, refused = open(path, "rb").read(), 0
for at in range(0, len(whole) - 8, 4):
    for wrong in (-1, 2**31 - 1, 77):
        with open(path, "wb") as file:
            file.write(whole[:at] + struct.pack("<i", wrong) + whole[at + 4 :])
        try:
            for block in Arrow().blocks(path, schema, 0):
                block.parse("all")
        except DataError as error:
            assert path in str(error), error
            refused += 1
print(refused)
"""
    done = subprocess.run([sys.executable, "-c", program, str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout) > 500
