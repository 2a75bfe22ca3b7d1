"""Statistics against plain counting on a synthetic log."""

import re
import xml.etree.ElementTree as ET
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from clickfleet.data.logs.convert import convert
from clickfleet.data.logs.stats import page, stats, table
from clickfleet.data.logs.synth import SynthOptions, synth
from clickfleet.data.schema import Dense, History, Label, Schema, Slot, read_schema
from clickfleet.errors import ConfigError


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("log")
    synth(folder, SynthOptions(rows=20_000, test_rows=0, parts=2))
    return folder / "train"


@pytest.fixture(scope="module")
def fields(log: Path) -> list[tuple[bytes, ...]]:
    lines = [line.split(b"\t") for path in sorted(log.iterdir()) for line in path.read_bytes().splitlines()]
    return list(zip(*lines, strict=True))


def test_raw_columns_are_described(log: Path, fields: list[tuple[bytes, ...]]) -> None:
    summary = stats(log)
    assert summary.rows == 20_000
    assert summary.ctr == pytest.approx(fields[0].count(b"1") / 20_000)
    for column, values in zip(summary.dense, fields[1:14], strict=True):
        numbers = np.array([float(value) for value in values if value])
        assert column.missing == values.count(b"")
        assert (column.spread.low, column.spread.high) == (numbers.min(), numbers.max())
        assert column.spread.mean == pytest.approx(numbers.mean())
        assert sum(column.to_dict()["counts"]) == len(numbers)
    for slot, values in zip(summary.slots, fields[14:], strict=True):
        counts = Counter(value for value in values if value)
        assert slot.missing == values.count(b"")
        assert slot.values == sum(counts.values())
        assert abs(slot.distinct.estimate() - len(counts)) <= 0.03 * len(counts) + 1
        for value, count in slot.frequent.top(3):
            assert count <= counts[value] <= count + slot.frequent.slack


@pytest.mark.parametrize("kind", ["csv", "parquet", "arrow"])
def test_every_format_of_columns_gives_the_same(log: Path, tmp_path: Path, kind: str) -> None:
    convert(log, tmp_path / f"log.{kind}", "criteo", kind)
    ours, theirs = stats(tmp_path / f"log.{kind}", kind).to_dict(), stats(log).to_dict()
    assert (ours["rows"], ours["ctr"]) == (theirs["rows"], theirs["ctr"])
    for mine, other in zip(
        ours["columns"], theirs["columns"], strict=True
    ):  # summation and clumps depend on the blocks
        same = ("name", "missing", "min", "max", "values", "distinct")
        assert {key: mine.get(key) for key in same} == {key: other.get(key) for key in same}
        if mine["kind"] == "dense":
            assert [mine["mean"], mine["p95"]] == pytest.approx([other["mean"], other["p95"]], rel=0.02)
        else:
            assert mine["top"][0][0] == other["top"][0][0]


@pytest.mark.parametrize("kind", ["slots", "multislot", "feasign", "libffm"])
def test_keys_are_described(tmp_path: Path, kind: str) -> None:
    synth(tmp_path / "log", SynthOptions(rows=2000, test_rows=0, format=kind))
    schema = read_schema(tmp_path / "log/schema.yaml")
    summary = stats(tmp_path / "log/train", kind, schema)
    assert summary.rows == 2000
    assert 0.2 < (summary.ctr or 0) < 0.3
    assert len(summary.slots) == len(schema.slots)
    assert all(slot.values <= 2000 for slot in summary.slots)
    if kind == "slots":
        assert summary.dense[0].missing is None
        assert summary.slots[0].frequent.top(1)[0][1] > 800  # the first id of C1 is in half of the rows


def test_missing_keys_are_counted(log: Path, tmp_path: Path, fields: list[tuple[bytes, ...]]) -> None:
    """Rows of a single-valued slot without a value, and of a multi-valued one without any."""
    (tmp_path / "schema.yaml").write_text("slots: [a, {name: b, multi: true}]\nlabel: click\nkeys: raw\n")
    (tmp_path / "log").write_text("click:1 a:5 b:1 b:2\nclick:0 b:1\nclick:0 a:6\n")
    summary = stats(tmp_path / "log", "slots", read_schema(tmp_path / "schema.yaml"))
    assert [(slot.missing, slot.values) for slot in summary.slots] == [(1, 2), (1, 3)]
    assert summary.slots[1].frequent.top(1) == [(b"1", 2)]


def test_rows_without_a_label_have_no_click_rate(log: Path, tmp_path: Path) -> None:
    lines = (log / "part-0").read_bytes().splitlines()[:50]
    (tmp_path / "test").write_bytes(b"".join(line.split(b"\t", 1)[1] + b"\n" for line in lines))
    summary = stats(tmp_path / "test")
    assert (summary.rows, summary.ctr) == (50, None)
    assert "no labels" in table(summary)


def test_the_page_stands_alone_and_has_a_plot_per_column(log: Path) -> None:
    text = page(stats(log), 'a <b> & "c"')
    assert "&lt;b&gt; &amp;" in text
    for foreign in ("http:", "https:", "src=", "href=", "@import", "url("):
        assert foreign not in text
    plots = [part.split("</svg>")[0] + "</svg>" for part in text.split("<svg")[1:]]
    assert len(plots) == 39
    for plot in plots:
        ET.fromstring("<svg" + plot)
    HTMLParser().feed(text)


def test_strange_values_are_escaped(tmp_path: Path) -> None:
    (tmp_path / "schema.yaml").write_text("slots: ['<s>']\nlabel: y\n")
    (tmp_path / "log.csv").write_text('y,<s>\n1,"<script>,""x"""\n0,\n')
    summary = stats(tmp_path / "log.csv", "csv", read_schema(tmp_path / "schema.yaml"))
    assert summary.slots[0].frequent.top(1) == [(b'<script>,"x"', 1)]
    assert "<script>" not in page(summary, "t")


def test_an_empty_file_is_no_rows(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"")
    summary = stats(tmp_path / "log")
    assert (summary.rows, summary.ctr) == (0, None)
    assert "0 rows" in table(summary)
    assert "all missing" in page(summary, "t")


def test_what_cannot_be_described(log: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--schema"):
        stats(log, "libffm")
    (tmp_path / "x.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ConfigError, match="a: all rows have the same value"):
        stats(tmp_path / "x.csv", "csv")


EVENTS = Schema(
    slots=(Slot("item"), Slot("category")),
    histories=(History("past", ("item", "category"), ("items", "cats"), max=2),),
    labels=(Label("click"), Label("buy", given="click"), Label("dwell", loss="mse")),
    negative=-1,
)
LINES = """click,buy,dwell,item,category,items,cats
1,1,2.5,a,u,a|b|c,u|v|u
1,-1,NA,a,v,b,
-1,,7,b,v,,
1,,,b,u,a|,u|v
"""


def test_labels_and_histories_are_described(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(LINES.replace("b,\n", "b,v\n"))
    convert(tmp_path / "a.csv", tmp_path / "a.parquet", "csv", "parquet", schema=EVENTS)
    made = convert(tmp_path / "a.csv", tmp_path / "a.slots", "csv", "slots", schema=EVENTS)
    keys = replace(read_schema(made["schema"]), histories=EVENTS.histories)
    for name, plan in (("a.csv", EVENTS), ("a.parquet", EVENTS), ("a.slots", keys)):
        kind = name.partition(".")[2]
        found = stats(tmp_path / name, kind, plan).to_dict()
        assert (found["rows"], found["ctr"]) == (4, 0.75)
        click, buy, dwell = found["labels"]
        assert click == {"name": "click", "missing": 0, "mean": 0.75}
        assert buy == {"name": "buy", "missing": 2, "mean": 0.5, "given": "click", "mean_given": 0.5}
        assert (dwell["missing"], dwell["mean"]) == (2, 4.75)
        (past,) = found["histories"]
        cut = 0 if kind == "slots" else 1  # keys were written after max was applied
        assert [past[name] for name in ("empty", "cut", "p50", "max")] == [1, cut, 1, 2 + cut]
        items, cats = past["columns"]
        assert (items["name"], cats["name"]) == ("past.item", "past.category")
        if kind != "slots":
            assert (items["values"], items["missing"], items["top"][0]) == (5, 1, ["a", 2])
            assert (cats["values"], cats["missing"], cats["top"][0][1]) == (6, 0, 3)
    summary = stats(tmp_path / "a.csv", "csv", EVENTS)
    text = table(summary)
    assert re.search(r"^buy +50.0% +0.5000 +0.5000  given click$", text, re.MULTILINE)
    assert re.search(r"^past +25.0% +1 +1.5 +3 +3 +25.0%$", text, re.MULTILINE)
    _check_page(page(summary, "events"), ["past.item", "dwell", "where click is 1"])


def _check_page(html: str, texts: list[str]) -> None:
    HTMLParser().feed(html)
    for text in texts:
        assert text in html


def test_lists_of_a_csv_file_are_split(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("click,tags\n1,a|b\n0,b\n0,\n")
    found = stats(tmp_path / "a.csv", "csv", Schema(slots=(Slot("tags", multi=True),), label="click")).to_dict()
    (tags,) = found["columns"]
    assert (tags["missing"], tags["values"], tags["top"][0]) == (1, 3, ["b", 2])


def test_words_for_missing_numbers_are_missing(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("click,x,a\n1,NA,NA\n0,3,b\n0,\\N,b\n")
    found = stats(tmp_path / "a.csv", "csv", Schema((Dense("x"),), (Slot("a"),), label="click")).to_dict()
    x, a = found["columns"]
    assert (x["missing"], x["min"], x["max"]) == (2, 3, 3)
    assert (a["missing"], a["values"]) == (0, 3)
