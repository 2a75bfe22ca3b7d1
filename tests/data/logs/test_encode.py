"""The line printer against Python's own formatting, and rows of every shape."""

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clickfleet._core import PrintColumn, print_rows
from clickfleet.data.batch import Batch
from clickfleet.data.logs.target import LINES, key_columns, raw_lines, slot_keys
from clickfleet.data.schema import Dense, KeyRule, Schema, Slot
from clickfleet.errors import DataError


def python2_text(x: float) -> str:
    """A float as the published files show it: 12 significant digits, always with a point or an exponent."""
    text = f"{x:.12g}"
    return text if any(c in text for c in ".en") else text + ".0"


@settings(max_examples=300, deadline=None)
@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=20))
def test_doubles_have_twelve_digits(numbers: list[float]) -> None:
    lines = print_rows([PrintColumn(np.array(numbers), digits=12)], " ").decode()
    assert lines == "".join(python2_text(x) + "\n" for x in numbers)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=20))
def test_floats_read_back_the_same(numbers: list[float]) -> None:
    given_ = np.array(numbers, np.float32)
    for bare in (False, True):
        lines = print_rows([PrintColumn(given_, bare=bare)], " ").decode().split()
        assert (np.array([np.float32(text) for text in lines]) == given_).all()


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**64 - 1), st.booleans()), min_size=1, max_size=9
    )
)
def test_integers_and_missing_ones(rows: list[tuple[int, int, bool]]) -> None:
    signed, unsigned, there = zip(*rows, strict=True)
    columns = [
        PrintColumn(np.array(signed, np.int64), present=np.array(there, np.uint8), absent="-"),
        PrintColumn(np.array(unsigned, np.uint64), prefix="<", suffix=">"),
    ]
    wanted = "".join(f"{a if t else '-'},<{b}>\n" for a, b, t in rows)
    assert print_rows(columns, ",").decode() == wanted


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: PrintColumn(np.zeros(3, np.int16)),
        lambda: PrintColumn(np.zeros(6)[::2]),
        lambda: PrintColumn(np.zeros(3), starts=np.array([0, 3], np.int32)),
        lambda: PrintColumn(np.zeros(3, np.uint8), ends=np.array([0, 9], np.int32)),
        lambda: PrintColumn(np.zeros(3, np.uint8), ends=np.array([2, 1], np.int32)),
        lambda: PrintColumn(np.zeros(3, np.uint8), ends=np.empty(0, np.int32)),
        lambda: PrintColumn(np.zeros(3), starts=np.array([0, 4])),
        lambda: PrintColumn(np.zeros(3), starts=np.array([3, 0])),
        lambda: PrintColumn(np.zeros(3), present=np.ones(2, np.uint8)),
        lambda: PrintColumn(np.zeros(3), weights=np.ones(2, np.float32)),
        lambda: PrintColumn(np.zeros(3), digits=18),
        lambda: print_rows([PrintColumn(np.zeros(3)), PrintColumn(np.zeros(2))], " "),
        lambda: print_rows([PrintColumn(np.zeros(3))], "ab"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(wrong: object) -> None:
    with pytest.raises(ValueError, match=r"must|outside|differ"):
        wrong()  # type: ignore[operator]


RAGGED = Batch(
    dense=np.array([[0.5], [0.0]], np.float32),
    keys=np.array([7, 8, 9, 2**64 - 1], np.uint64),
    slots=2,
    offsets=np.array([0, 1, 3, 4, 4]),
    labels=np.array([1, 0], np.float32),
    weights=np.array([2, 0.5], np.float32),
)
SCHEMA = Schema(slots=(Slot("a"), Slot("b", multi=True)), label="y", weight="w", keys=KeyRule("raw"))


def test_ragged_rows_in_every_text_format() -> None:
    schema = replace(SCHEMA, dense=(Dense("x"),))
    dense = RAGGED.dense
    assert (
        LINES["slots"](RAGGED, dense, schema) == b"y:1 w:2 x:0.5 a:7 b:8 b:9\ny:0 w:0.5 x:0.0 a:18446744073709551615\n"
    )
    assert LINES["multislot"](RAGGED, dense, schema) == (
        b"1 0.5 1 7 2 8 9 1 2 1 1\n1 0.0 1 18446744073709551615 1 0 1 0.5 1 0\n"
    )
    nothing = np.empty((2, 0), np.float32)
    assert LINES["feasign"](RAGGED, nothing, schema) == b"1:y 2:w 7:a 8:b 9:b\n0:y 0.5:w 18446744073709551615:a\n"
    assert LINES["libffm"](RAGGED, dense, schema) == b"1 0:0:0.5 1:7:1 2:8:1 2:9:1\n0 1:18446744073709551615:1\n"


def test_ragged_rows_as_columns() -> None:
    columns = key_columns(RAGGED, np.empty((2, 0), np.float32), SCHEMA)
    assert columns.to_pydict() == {"y": [1, 0], "w": [2, 0.5], "a": [7, 2**64 - 1], "b": [[8, 9], []]}
    assert raw_lines(columns, ",", quote=True) == b"1,2,7,8|9\n0,0.5,18446744073709551615,\n"
    assert slot_keys(RAGGED, 1)[1].tolist() == [0, 2, 2]


def test_csv_quotes_what_needs_it() -> None:
    columns = pa.RecordBatch.from_pydict({"a": ["x,y", 'he said "no"', None, ""], "b": [True, None, False, True]})
    assert raw_lines(columns, ",", quote=True) == b'"x,y",1\n"he said ""no""",\n,0\n"",1\n'
    assert raw_lines(columns.slice(2), ",", quote=True) == b",0\n,1\n"  # what was sliced off asks for nothing
    with pytest.raises(DataError, match="column a contains a value with a separator"):
        raw_lines(pa.RecordBatch.from_pydict({"a": ["x\ty"]}), "\t", quote=False)
    with pytest.raises(DataError, match="line ending"):
        raw_lines(pa.RecordBatch.from_pydict({"a": ["x\ny"]}), ",", quote=True)
    with pytest.raises(DataError, match="lists"):
        raw_lines(pa.RecordBatch.from_pydict({"a": [["x"]]}), "\t", quote=False)
    with pytest.raises(DataError, match="struct"):
        raw_lines(pa.RecordBatch.from_pydict({"a": [{"b": 1}]}), ",", quote=True)
