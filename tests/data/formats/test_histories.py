"""Histories and several labels: the same rows are the same batch in every format, in memory, in a message and in a request."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from clickfleet.config.plugins import Plugin
from clickfleet.data.batch import Batch
from clickfleet.data.formats import load
from clickfleet.data.memory import Feed
from clickfleet.data.schema import History, KeyRule, Label, Schema, Slot
from clickfleet.errors import ConfigError, DataError, ServeError
from clickfleet.online.sources.messages import columns_of, fits_of, read_arrow, read_json
from clickfleet.serve.features import Fields
from event_rows import (
    arrow_stream,
    as_csv,
    as_feasign,
    as_jsonl,
    as_multislot,
    as_slots,
    check_equal,
    expected,
    rows,
    schema,
    table,
    whole,
)
from lines import read

quickly = settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None)
RULES = ("hash64", "py2 mod 1000003")


def feed(data: Any, plan: Schema) -> Batch:
    (batch,) = Feed(data, plan, 1000)
    return batch


@pytest.mark.parametrize("rule", RULES)
@quickly
@given(drawn=rows())
def test_every_text_format_reads_the_same(rule: str, drawn: list, write: Callable[..., Path]) -> None:
    plan = schema(rule)
    for name, form, content in (
        ("a.csv", "csv", as_csv(drawn)),
        ("b.csv", {"name": "csv", "separator": ";", "list_separator": "^"}, as_csv(drawn, ";", "^", quote=True)),
        ("c.csv", {"name": "csv", "separator": "tab", "list_separator": "space"}, as_csv(drawn, "\t", " ")),
        ("a.slots", "slots", as_slots(drawn)),
        ("a.feasign", "feasign", as_feasign(drawn)),
        ("a.jsonl", "jsonl", as_jsonl(drawn)),
    ):
        (batch,) = read(write(name, content), form, plan)
        check_equal(batch, expected(drawn, plan))


@quickly
@given(drawn=rows(whole, blanks=False))
def test_raw_keys(drawn: list, write: Callable[..., Path], tmp_path: Path) -> None:
    plan = schema("raw")
    wanted = expected(drawn, plan)
    blocks = [{**row, "x": row["x"] or 0, **{n: row[n] or "0" for n in ("item", "category", "twin")}} for row in drawn]
    blocks = [{**row, "tags": row["tags"] or ["5"]} for row in blocks]
    (batch,) = read(write("a.multislot", as_multislot(blocks, plan)), "multislot", plan)
    check_equal(batch, expected(blocks, plan))
    (piped,) = read(tmp_path / "a.multislot", "multislot", plan)
    check_equal(piped, expected(blocks, plan))
    numbers = {
        name: [None if v is None else [int(x) for x in v] if isinstance(v, list) else int(v) for v in column]
        for name, column in table(drawn).to_pydict().items()
        if name not in ("click", "buy", "dwell", "visits", "x")
    }
    kinds = {name: pa.list_(pa.uint64()) if name in ("tags", *HISTORY_LISTS) else pa.uint64() for name in numbers}
    typed = table(drawn)
    for name, column in numbers.items():
        typed = typed.set_column(typed.column_names.index(name), name, pa.array(column, kinds[name]))
    check_equal(feed(typed, plan), wanted)
    (text,) = read(write("a.csv", as_csv(drawn)), "csv", plan)
    check_equal(text, wanted)


HISTORY_LISTS = ("past_items", "past_categories", "seen_item")


@pytest.mark.parametrize("rule", RULES)
@quickly
@given(drawn=rows())
def test_tables_and_data_in_memory_read_the_same(rule: str, drawn: list, tmp_path: Path) -> None:
    plan = schema(rule)
    wanted = expected(drawn, plan)
    pq.write_table(table(drawn, packed=True), tmp_path / "a.parquet", row_group_size=2)
    (tmp_path / "a.arrow").write_bytes(arrow_stream(table(drawn, large=True)))
    for form in ("parquet", "arrow"):
        (batch,) = read(tmp_path / f"a.{form}", form, plan)
        check_equal(batch, wanted)
    plain = table(drawn)
    for data in (
        plain,
        table(drawn, packed=True),
        plain.to_batches()[0],
        plain.to_pandas(),
        pl.from_arrow(plain),
        plain.to_pydict(),
        {name: pd.Series(column) for name, column in plain.to_pydict().items()},
        drawn,
        (row for row in drawn),
        [wanted],
    ):
        check_equal(feed(data, plan), wanted)


@pytest.mark.parametrize("rule", RULES)
@quickly
@given(drawn=rows())
def test_messages_and_requests_read_the_same(rule: str, drawn: list) -> None:
    plan = schema(rule)
    wanted = expected(drawn, plan)
    columns = columns_of(plan)
    fits = fits_of(columns, HISTORY_LISTS)
    parsed = [read_json(line, fits) for line in as_jsonl(drawn).encode().splitlines()]
    check_equal(feed(pa.Table.from_pylist(parsed, columns), plan), wanted)
    check_equal(feed(read_arrow(arrow_stream(table(drawn)), columns), plan), wanted)
    inputs = [name for name in drawn[0] if name not in plan.label_columns]
    request = Fields(plan).rows([{name: row[name] for name in inputs} for row in drawn])
    request.labels = wanted.labels
    check_equal(request, wanted)


@quickly
@given(drawn=rows(st.text('ab,;"\\ |é\tN', min_size=1, max_size=5).filter(lambda text: text.strip(" \t"))))
def test_odd_values_between_quotes(drawn: list, write: Callable[..., Path]) -> None:
    """Whatever the values hold, a quoted field is split only at the separator of lists."""
    form = {"name": "csv", "separator": ",", "list_separator": "^"}
    (batch,) = read(write("a.csv", as_csv(drawn, ",", "^", quote=True)), form, schema())
    check_equal(batch, expected(drawn, schema()))


def test_words_for_missing_values(write: Callable[..., Path]) -> None:
    """NA is a missing label or number, but a value of a slot or a history. Only an empty field has no events."""
    content = "click,buy,x,item,seen_item\n1,NA,NULL,NA,NA|NULL\n\\N,0,,NULL,NA\n0,,?,,\n"
    plan = Schema((schema().dense[0],), (Slot("item"),), labels=LABELS[:2], histories=(History("seen", ("item",)),))
    (batch,) = read(write("a.csv", content), "csv", plan)
    drawn = [
        {"click": 1, "buy": None, "x": None, "item": "NA", "seen_item": ["NA", "NULL"]},
        {"click": None, "buy": 0, "x": None, "item": "NULL", "seen_item": ["NA"]},
        {"click": 0, "buy": None, "x": None, "item": None, "seen_item": []},
    ]
    assert np.diff(batch.offsets).tolist() == [1, 2, 1, 1, 1, 0]
    check_equal(feed(drawn, plan), batch)


LABELS = (Label("click"), Label("buy", given="click"))
ONE = Schema(slots=(Slot("item"),), histories=(History("seen", ("item",), max=2),), label="click")
EVENTS: dict[str, Any] = {
    "slots": "click:1 item:a seen_item:\nclick:0 item:a\n",
    "feasign": "1:click a:item :seen_item\n0:click a:item\n",
    "jsonl": '{"click": 1, "item": "a", "seen_item": [null]}\n{"click": 0, "item": "a", "seen_item": null}\n',
    "parquet": [[None], None],
    "arrow": [[""], []],
}


@pytest.mark.parametrize("form", EVENTS)
def test_an_event_without_a_value_is_an_event(form: str, tmp_path: Path) -> None:
    path = tmp_path / "data"
    if isinstance(EVENTS[form], str):
        path.write_text(EVENTS[form])
    else:
        seen = pa.array(EVENTS[form], pa.list_(pa.string()))
        content = pa.table({"click": [1, 0], "item": ["a", "a"], "seen_item": seen})
        pq.write_table(content, path) if form == "parquet" else path.write_bytes(arrow_stream(content))
    (batch,) = read(path, form, ONE)
    assert np.diff(batch.offsets).tolist() == [1, 1, 1, 0]
    request = Fields(ONE).rows([{"item": "a", "seen_item": [None]}, {"item": "a", "seen_item": None}])
    request.labels = batch.labels
    check_equal(request, batch)


TWO = Schema(
    slots=(Slot("item"), Slot("category")),
    histories=(History("past", ("item", "category"), ("items", "cats"), max=2),),
    label="click",
    keys=KeyRule("raw"),
)
UNEQUAL: dict[str, str] = {
    "csv": "click,item,category,items,cats\n1,1,2,3|4,5|6\n0,1,2,3|4,5\n1,1,2,,5\n",
    "slots": "click:1 item:1 items:3 items:4 cats:5 cats:6\nclick:0 items:3 cats:5 items:4\nclick:1 cats:5\n",
    "feasign": "1:click 1:item 3:items 4:items 5:cats 6:cats\n0:click 3:items 4:items 5:cats\n1:click 5:cats\n",
    "multislot": "1 1 1 2 2 3 4 2 5 6 1 1\n1 1 1 2 2 3 4 1 5 1 0\n1 1 1 2 0 1 5 1 1\n",
    "jsonl": '{"click": 1, "items": [3, 4], "cats": [5, 6]}\n{"click": 0, "items": [3, 4], "cats": [5]}\n'
    '{"click": 1, "cats": [5]}\n',
}


@pytest.mark.parametrize("form", [*UNEQUAL, "parquet", "arrow"])
def test_columns_of_unequal_length_are_a_bad_line(form: str, tmp_path: Path) -> None:
    path = tmp_path / "data"
    if form in UNEQUAL:
        path.write_text(UNEQUAL[form])
    else:
        lists = pa.list_(pa.int64())
        columns = {"items": pa.array([[3, 4], [3, 4], None], lists), "cats": pa.array([[5, 6], [5], [5]], lists)}
        content = pa.table({"click": [1, 0, 1], "item": [1, 1, 1], "category": [2, 2, 2], **columns})
        pq.write_table(content, path) if form == "parquet" else path.write_bytes(arrow_stream(content))
    header = form == "csv"
    reasons = ["the history past has 2 values in items, but 1 in cats", "the history past has 0 values in items, but 1"]
    for line, reason in enumerate(reasons, 2 + header):
        found = next(iter(load(form).blocks(str(path), TWO, 0))).parse("all").bad
        assert found[line - 2 - header].reason.startswith(reason)
        assert found[line - 2 - header].line == line - 1 - header
    with pytest.raises(DataError, match=rf"data:{2 + header}: {reasons[0]}"):
        read(path, form, TWO)
    (batch,) = read(path, form, TWO, bad_lines="skip", max_bad_fraction=1.0)
    assert len(batch) == 1
    assert batch.keys[2:].tolist() == [3, 4, 5, 6]


def test_unequal_columns_elsewhere() -> None:
    row = {"items": [3, 4], "cats": [5]}
    with pytest.raises(DataError, match="row 1 of the data: the history past has 2 values in items, but 1 in cats"):
        feed(
            [
                {"click": 1, "item": 1, "category": 2, **row, "cats": [5, 6]},
                {"click": 1, "item": 1, "category": 2, **row},
            ],
            TWO,
        )
    with pytest.raises(ServeError, match="row 0: cats: expected 2 values, one per event of items, found 1"):
        Fields(TWO).rows([row])
    ragged = Batch(np.zeros((1, 0), np.float32), np.arange(5, dtype=np.uint64), 4, np.array([0, 1, 2, 4, 5]))
    with pytest.raises(DataError, match="row 0 of a batch"):
        feed([replace(ragged, labels=np.ones(1, np.float32))], TWO)


@pytest.mark.parametrize("value", ["3", 3, {"a": 1}, True])
def test_a_history_is_a_list(value: Any, write: Callable[..., Path]) -> None:
    """A single value, such as text that was never split, would be one event without a word."""
    row = {"click": 1, "item": 1, "category": 2, "items": [3], "cats": value}
    path = write("a.jsonl", json.dumps({**row, "cats": [5]}) + "\n" + json.dumps(row) + "\n")
    with pytest.raises(DataError, match=r"a.jsonl:2: cats: .* is not a list, as a history needs"):
        read(path, "jsonl", TWO)
    with pytest.raises(ValueError, match="is not a list, as a history needs"):
        read_json(json.dumps(row).encode(), fits_of(columns_of(TWO), ("items", "cats")))
    if not isinstance(value, dict):
        with pytest.raises(DataError, match="expected a list, as a history needs"):
            feed([row], TWO)
        with pytest.raises(ServeError, match="cats: expected a list, with one value per event"):
            Fields(TWO).rows([{"items": [3], "cats": value}])


def test_libffm_and_vw_hold_histories(write: Callable[..., Path]) -> None:
    fields = Schema(
        slots=(Slot("0"), Slot("1", multi=True)),
        histories=(History("past", ("0",), ("2",), max=2),),
        values=True,
        keys=KeyRule("raw"),
    )
    (batch,) = read(write("a.ffm", "1 0:7:1 1:8:0.5 2:9:2 2:10:3 2:11:4\n0 0:7:1\n"), "libffm", fields)
    assert batch.keys.tolist() == [7, 8, 10, 11, 7]
    assert batch.values.tolist() == [1, 0.5, 3, 4, 1]
    spaces = Schema(slots=(Slot("ad", multi=True),), histories=(History("past", ("ad",), ("seen",), max=2),))
    (batch,) = read(write("a.vw", "1 |ad a3 |seen a1 a2 a3\n0 |ad a1\n"), "vw", spaces)
    assert np.diff(batch.offsets).tolist() == [1, 2, 1, 0]
    assert batch.keys[0] == batch.keys[2]


@pytest.mark.parametrize(
    ("form", "line"), [("criteo", "1\t" + "\t" * 38), ("libsvm", "1 3:1"), ("sentences", "a b"), ("libffm", "1 0:1:1")]
)
def test_formats_that_cannot_hold_them_say_so(form: str, line: str, write: Callable[..., Path]) -> None:
    path = write("data", line + "\n")
    plan = load(form).schema or Schema(slots=(Slot("0", multi=True),), values=True)
    first = plan.slots[0].name
    if form != "libffm":
        with pytest.raises((ConfigError, DataError), match=r"history past|no lists, as the history past needs"):
            read(path, form, replace(plan, histories=(History("past", (first,)),)))
    with pytest.raises(
        (ConfigError, DataError), match=r"label buy|one label per line, but the schema has 2: click, buy"
    ):
        read(path, form, replace(plan, labels=LABELS))


@pytest.mark.parametrize("form", ["csv", "slots", "feasign", "multislot", "jsonl", "parquet"])
def test_missing_labels(form: str, write: Callable[..., Path], tmp_path: Path) -> None:
    """A row needs one of its labels. An unknown one is NaN."""
    plan = Schema(slots=(Slot("a"),), labels=LABELS, keys=KeyRule("raw"))
    labels: list[tuple[int | None, int | None]] = [(1, 1), (0, None), (None, 1), (None, None)]

    def token(name: str, value: int | None) -> str:
        return "" if value is None else {"slots": f"{name}:{value} ", "feasign": f"{value}:{name} "}[form]

    path = tmp_path / "data"
    if form == "csv":
        path.write_text("click,buy,a\n" + "".join(f"{text(c)},{text(b)},7\n" for c, b in labels))
    elif form in ("slots", "feasign"):
        end = "a:7" if form == "slots" else "7:a"
        path.write_text("".join(token("click", c) + token("buy", b) + end + "\n" for c, b in labels))
    elif form == "multislot":
        path.write_text("".join(f"1 7 {block(c)} {block(b)}\n" for c, b in labels))
    elif form == "jsonl":
        path.write_text("".join(json.dumps({"click": c, "buy": b, "a": 7}) + "\n" for c, b in labels))
    else:
        pq.write_table(pa.table({"click": [c for c, _ in labels], "buy": [b for _, b in labels], "a": [7] * 4}), path)
    (batch,) = read(path, form, plan, bad_lines="skip", max_bad_fraction=1.0)
    np.testing.assert_array_equal(batch.labels, np.array([[1, 1], [0, np.nan], [np.nan, 1]], np.float32))
    with pytest.raises(DataError, match=rf"data:{4 + (form == 'csv')}: the label is missing"):
        read(path, form, plan)


def text(value: int | None) -> str:
    return "" if value is None else str(value)


def block(value: int | None) -> str:
    return "0" if value is None else f"1 {value}"


@pytest.mark.parametrize("loss", ["mse", "poisson"])
def test_labels_that_are_numbers(loss: Any, write: Callable[..., Path]) -> None:
    plan = Schema(slots=(Slot("a"),), labels=(Label("click"), Label("n", loss=loss)))
    (batch,) = read(write("a.csv", "click,n,a\n1,2.5,x\n0,7,x\n"), "csv", plan)
    assert batch.labels[:, 1].tolist() == [2.5, 7]
    for form, bad in (("csv", "click,n,a\n1,-2.5,x\n"), ("jsonl", '{"click": 1, "n": -2.5, "a": "x"}\n')):
        path = write(f"b.{form}", bad)
        if loss == "mse":
            assert read(path, form, plan)[0].labels[0, 1] == -2.5
        else:
            with pytest.raises(DataError, match=r"-2\.5'? is out of range"):
                read(path, form, plan)


def test_a_file_with_some_labels_has_rows_to_score(write: Callable[..., Path]) -> None:
    plan = Schema(slots=(Slot("a"),), labels=LABELS)
    path = write("a.csv", "click,a\n1,x\n")
    assert read(path, "csv", plan)[0].labels is None
    with pytest.raises(DataError, match="every file needs the columns click, buy"):
        read(path, "csv", plan, require_labels=True)


def test_pipes_and_readers_of_users(write: Callable[..., Path], tmp_path: Path) -> None:
    """A command prints a history as a counted block, which may be empty; a format gives it as further columns of a batch."""
    path = write("words.txt", "1 7 8,9,10\n0 7\n")
    plan = replace(ONE, keys=KeyRule("raw"))
    command = 'awk \'{n = split($3, v, ","); printf "1 %s %d", $2, n; for (i = 1; i <= n; i++) printf " %s", v[i]; print " 1 " $1}\''
    (piped,) = read(path, {"name": "pipe", "command": command}, plan)
    assert piped.keys.tolist() == [7, 9, 10, 7]
    write(
        "own.py",
        """
import numpy as np
from clickfleet import Batch
from clickfleet.data.schema import History, KeyRule, Schema, Slot

class Own:
    schema = Schema(slots=(Slot("item"),), histories=(History("seen", ("item",), max=2),), label="click", keys=KeyRule("raw"))

    def parse(self, block):
        rows = [line.split() for line in block.decode().splitlines()]
        events = [row[2].split(",") if len(row) > 2 else [] for row in rows]
        keys = [int(key) for row, past in zip(rows, events) for key in (row[1], *past)]
        offsets = np.concatenate([[0], np.cumsum([n for past in events for n in (1, len(past))])])
        labels = np.array([float(row[0]) for row in rows], np.float32)
        return Batch(np.zeros((len(rows), 0), np.float32), np.array(keys, np.uint64), 2, offsets, labels)
""",
    )
    (own,) = read(path, load(Plugin(str(tmp_path / "own.py"))), plan)
    check_equal(own, piped)


def test_text_generators(write: Callable[..., Path], tmp_path: Path) -> None:
    path = write("words.txt", "1 7 8,9,10\n0 7\n")
    write(
        "reader.py",
        """
from clickfleet.paddlerec.generator import TextGenerator

class Mine(TextGenerator):
    def generate_sample(self, line):
        label, item, *past = line.split()
        yield [("item", [item]), ("seen_item", past[0].split(",") if past else []), ("click", [label])]
""",
    )
    (batch,) = read(path, load(Plugin(str(tmp_path / "reader.py"))), replace(ONE, keys=KeyRule("raw")))
    assert batch.keys.tolist() == [7, 9, 10, 7]


def test_empty_values_in_a_list_of_a_slot_have_no_key(write: Callable[..., Path], tmp_path: Path) -> None:
    """A multi-valued slot has no key for a missing value, in a list of a table as in a csv file and in a request."""
    plan = Schema(slots=(Slot("a"), Slot("m", multi=True)), label="click")
    (csv,) = read(write("a.csv", "click,a,m\n1,x,u||v\n0,y,|\n"), "csv", plan)
    lists = [["u", None, "v"], ["", None]]
    for kind in (pa.list_(pa.string()), pa.list_(pa.dictionary(pa.int32(), pa.string()))):
        check_equal(feed(pa.table({"click": [1, 0], "a": ["x", "y"], "m": pa.array(lists, kind)}), plan), csv)
    request = Fields(plan).rows([{"a": a, "m": m} for a, m in zip("xy", lists, strict=True)])
    request.labels = csv.labels
    check_equal(request, csv)
    weighted = replace(plan, values=True)
    pairs = pa.array([[("u", 2.0), ("", 3.0), ("v", 4.0)], []], pa.map_(pa.string(), pa.float32()))
    batch = feed(pa.table({"click": [1, 0], "a": ["x", "y"], "m": pairs}), weighted)
    assert batch.values.tolist() == [1, 2, 4, 1]


def test_long_histories_keep_their_ends(write: Callable[..., Path]) -> None:
    """Lists of many lengths, around the 64 bytes that are searched at once."""
    for keep in ("last", "first"):
        plan = Schema(slots=(Slot("a"),), histories=(History("h", ("a",), ("h",), max=40, keep=keep),), label="click")
        lists = [[f"{'v' * (i % 11)}{j}" for j in range(i % 130)] for i in range(300)]
        lists += [[text, *[""] * 70, text] for text in ("a" * 63, "b" * 64, "c" * 200)]
        content = "click,a,h\n" + "".join(f"1,x,{'|'.join(events)}\n" for events in lists)
        (csv,) = read(write("a.csv", content), "csv", plan)
        feeding = feed({"click": [1] * len(lists), "a": ["x"] * len(lists), "h": lists}, plan)
        check_equal(csv, feeding)
