"""One column of the files with several uses: requests name it once, and every use gets it."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from clickfleet import _core
from clickfleet.data.memory import Feed
from clickfleet.data.reader import Reader
from clickfleet.data.schema import Dense, Schema, Slot, Transform
from clickfleet.errors import ConfigError, DataError, ServeError
from clickfleet.online.sources.messages import columns_of
from clickfleet.serve.features import Fields, inputs_of, overlay

SCHEMA = Schema(
    dense=(Dense("age", Transform("log1p"), missing=0.5), Dense("n")),
    slots=(
        Slot("years", source="age"),
        Slot("city"),
        Slot("town", source="city"),
        Slot("near", source="city", multi=True),
    ),
)
CSV = "label,age,n,city\n1,30,2.5,Bern\n0,007.50,-1,\n1,,3,Oslo\n"
ROWS: list[dict[str, Any]] = [
    {"age": 30, "n": 2.5, "city": "Bern"},
    {"age": "007.50", "n": -1, "city": ""},
    {"n": 3, "city": "Oslo"},
]


def same(a: Any, b: Any) -> None:
    np.testing.assert_array_equal(a.dense, b.dense)
    np.testing.assert_array_equal(a.keys, b.keys)
    np.testing.assert_array_equal(a.offsets, b.offsets)


def test_rows_columns_and_files_agree(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(CSV)
    (wanted,) = list(Reader([str(tmp_path / "a.csv")], SCHEMA, {"name": "csv"}, 10))
    fields = Fields(SCHEMA)
    assert fields.names == ["age", "n", "city"]
    same(fields.rows(ROWS), wanted)
    texts = [_core.RequestColumn.of_list([str(row.get(name, "")) for row in ROWS], 1) for name in ("age", "city")]
    n = _core.RequestColumn.of_numbers(np.array([2.5, -1, 3]), 1)
    same(fields.columns({"age": texts[0], "n": n, "city": texts[1]}, 3), wanted)
    frame = {"age": ["30", "007.50", None], "n": [2.5, -1, 3], "city": ["Bern", None, "Oslo"]}
    (fed,) = list(Feed(pa.table({"label": [1, 0, 1], **frame}), SCHEMA))
    same(fed, wanted)
    assert columns_of(SCHEMA).field("age").type == pa.string()


def test_integers_as_numbers_feed_both() -> None:
    fields = Fields(SCHEMA)
    age, city = np.array([30, 31], np.int64), _core.RequestColumn.of_list(["a", "b"], 1)
    n = _core.RequestColumn.of_numbers(np.array([1.0, 2.0], np.float32), 1)
    found = fields.columns({"age": _core.RequestColumn.of_numbers(age, 1), "n": n, "city": city}, 2)
    same(found, fields.rows([{"age": 30, "n": 1, "city": "a"}, {"age": 31, "n": 2, "city": "b"}]))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"age": 30.5}, "age: expected text or integers; write a fractional number as text"),
        ({"age": "old"}, "age: expected an integer, or a number as text"),
        ({"age": "nan"}, "age: expected an integer, or a number as text"),
        ({"age": 30, "years": 30}, "no input 'years'"),
        ({"age": 30, "more": 1}, "no input 'more'"),
        ({"more": 1}, "no input 'more'"),
        ({"n": "5"}, "n: expected a number"),
    ],
)
def test_what_suits_only_one_use_is_refused(row: dict[str, Any], message: str) -> None:
    with pytest.raises(ServeError, match=message):
        Fields(SCHEMA).rows([row])


def test_a_user_gives_it_for_all_candidates() -> None:
    fields = Fields(SCHEMA)
    user, candidates = fields.rows([{"age": 30}]), fields.rows([{"city": "Bern"}, {"city": "Oslo"}])
    whole = fields.rows([{"age": 30, "city": "Bern"}, {"age": 30, "city": "Oslo"}])
    same(overlay(fields, user, candidates, {"age"}), whole)


def test_metadata_names_it_once() -> None:
    assert inputs_of(SCHEMA) == [
        {"name": "age", "kind": "number and key", "values": 1, "missing": 0.5},
        {"name": "n", "kind": "number", "values": 1, "missing": 0.0},
        {"name": "city", "kind": "key", "values": 1},
    ]


def test_tables_and_blocks_of_another_kind_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="row 1 of the data: age: 'x' is not a number"):
        list(Feed(pa.table({"age": ["1", "x"], "n": [1, 2], "city": ["a", "b"]}), SCHEMA))
    (tmp_path / "a").write_text("2 1 2 1 5 1 1\n")
    with pytest.raises(ConfigError, match=r"(?s)'age' is both a dense column and a slot.*order: age, n, city, label"):
        list(Reader([str(tmp_path / "a")], SCHEMA, {"name": "multislot"}, 10))
