"""Which format files have, by their content first and their ending second."""

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest

from clickfleet.config.plugins import Plugin
from clickfleet.data.guess import guess
from clickfleet.data.reader import Reader
from clickfleet.data.schema import Schema, Slot, preset
from clickfleet.errors import ClickfleetError, ConfigError, DataError
from lines import GOLDEN_LINE, MULTISLOT_LINE, SLOTS_LINE, criteo_line

ROWS = [(i % 2, f"city{i % 3}", i % 4 + 0.5) for i in range(40)]


def delimited(separator: str, header: bool = True) -> str:
    names = [separator.join(("clicked", "city", "price")) + "\n"] if header else []
    return "".join([*names, *(f"{y}{separator}{city}{separator}{price}\n" for y, city, price in ROWS)])


CONTENTS: dict[str, tuple[str, Plugin]] = {
    "comma": (delimited(","), Plugin("csv")),
    "tab": (delimited("\t"), Plugin("csv", {"separator": "tab"})),
    "semicolon": (delimited(";"), Plugin("csv", {"separator": ";"})),
    "pipe": (delimited("|"), Plugin("csv", {"separator": "|", "list_separator": ";"})),
    "space": (delimited(" "), Plugin("csv", {"separator": "space"})),
    "hive": (delimited("\x01"), Plugin("csv", {"separator": "\x01"})),
    "no header": (delimited(",", header=False), Plugin("csv", {"columns": ["c1", "c2", "c3"]})),
    "criteo": ("\n".join(criteo_line(i) for i in range(50)), Plugin("criteo")),
    "criteo with blanks": ("\n".join(criteo_line(i).replace("\t\t", "\t \t") for i in range(50)), Plugin("criteo")),
    "slots": (SLOTS_LINE + "\n", Plugin("slots")),
    "multislot": (MULTISLOT_LINE + "\n", Plugin("multislot")),
    "feasign": ("0:1 4351255118977467729:3 16543128959394097760:29\n1:1 5:2\n", Plugin("feasign")),
    "libffm": ("1 0:3:0.5 1:7:1\n0 0:4:0.5 1:7:1\n", Plugin("libffm")),
    "libsvm": ("1 3:0.5 7:1\n-1 4:0.5 9:1 # text\n", Plugin("libsvm")),
    "libfm": ("1 3:1 7:1\n-1 4:1 9:1\n", Plugin("libsvm", {"positions": True})),
    "vw": ("1 |user u1 |ad a b:0.5\n-1 2.0 'tag |user u2\n", Plugin("vw")),
    "jsonl": ("".join(json.dumps({"clicked": y, "city": city}) + "\n" for y, city, _ in ROWS), Plugin("jsonl")),
}


@pytest.mark.parametrize("packed", ["", ".gz", ".zst"])
@pytest.mark.parametrize("name", CONTENTS)
def test_the_lines_tell_the_format(name: str, packed: str, tmp_path: Path) -> None:
    text, form = CONTENTS[name]
    path = tmp_path / f"log{packed}"
    data = text.encode()
    path.write_bytes(
        {"": bytes, ".gz": gzip.compress, ".zst": lambda b: pa.compress(b, "zstd", asbytes=True)}[packed](data)
    )
    found = guess(str(path))
    assert found.format == form
    rows = sum(len(batch) for batch in Reader(path, found.schema, found.format, 100, require_labels=True))
    assert rows == text.rstrip("\n").count("\n") + 1 - (form.name == "csv" and "columns" not in form.settings)


@pytest.mark.parametrize("stream", [False, True])
def test_binary_files_by_their_first_bytes(stream: bool, tmp_path: Path) -> None:
    rows = pa.table({"clicked": [y for y, _, _ in ROWS], "city": [city for _, city, _ in ROWS]})
    pa.parquet.write_table(rows, tmp_path / "a")
    with (
        pa.OSFile(str(tmp_path / "b"), "wb") as sink,
        (pa.ipc.new_stream if stream else pa.ipc.new_file)(sink, rows.schema) as writer,
    ):
        writer.write_table(rows)
    assert guess(tmp_path / "a").format == Plugin("parquet")
    assert guess(tmp_path / "b").format == Plugin("arrow")


def test_criteo_lines_keep_the_schema_of_the_format(tmp_path: Path) -> None:
    for labelled in (True, False):
        lines = [criteo_line(i) if labelled else criteo_line(i).partition("\t")[2] for i in range(30)]
        (tmp_path / "log").write_text("\n".join(["bad", *lines, "worse"]))  # a few bad lines change nothing
        found = guess(str(tmp_path / "log"))
        assert (found.format, found.schema, found.of_format) == (Plugin("criteo"), preset("criteo"), True)


def test_criteo_columns_by_name(tmp_path: Path) -> None:
    names = ["click", *(column.name for column in preset("criteo").columns)]
    (tmp_path / "log.csv").write_text(",".join(names) + "\n" + GOLDEN_LINE.replace("\t", ",") + "\n")
    assert guess(tmp_path / "log.csv").schema == preset("criteo")


def test_a_header_like_criteo_is_a_header(tmp_path: Path) -> None:
    names = ["label", *(f"a{i}" for i in range(39))]
    (tmp_path / "log").write_text("\t".join(names) + "\n" + "\n".join(criteo_line(i) for i in range(30)))
    found = guess(tmp_path / "log")
    assert found.format == Plugin("csv", {"separator": "tab"})
    assert found.schema.label == "label"


@pytest.mark.parametrize(
    ("lines", "header"),
    [
        (["clicked,x", "0,a", "1,b"], True),
        (["y;x", "0;a", "1;b"], True),
        (["1,a", "0,b", "1,a"], False),
        (["a,b,c", "1,2,x", "0,3,y"], True),
        (["name,town", "ann,bern", "bob,oslo"], True),
        (["ann,bern", "bob,oslo", "ann,rome"], False),
        (["a,a", "1,2", "0,3"], False),
        ([",clicked,x", "0,1,a", "1,0,b"], True),
    ],
)
def test_header_or_none(lines: list[str], header: bool, tmp_path: Path) -> None:
    (tmp_path / "log").write_text("\n".join(lines))
    from clickfleet.data.recognition import sample

    found = sample([str(tmp_path / "log")], Plugin("auto"))
    assert found.has_header is header
    assert found.table.num_rows == len(lines) - header


def test_settings_without_a_name_are_those_of_csv(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("".join(f"{i % 2}^{i % 5}x^{i % 7 + 0.5}\n" for i in range(60)))
    form = Plugin("auto", {"separator": "^", "columns": "clicked,city,price"})
    found = guess(tmp_path / "log", format=form)
    assert found.format == Plugin("csv", {"separator": "^", "columns": "clicked,city,price"})
    assert [slot.name for slot in found.schema.read_columns] == ["city"]
    assert len(next(iter(Reader(tmp_path / "log", found.schema, found.format, 100)))) == 60


def test_a_known_schema_needs_the_format_only(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("a;b\n1;2\n")
    (batch,) = list(Reader(tmp_path / "log", Schema(slots=(Slot("b"),)), "auto", 10))
    assert (len(batch), batch.labels) == (1, None)


REFUSED: dict[str, tuple[bytes, str]] = {
    "log.json": (b'[{"a": 1}]\n', "is a JSON array"),
    "plain": (gzip.compress(b"a,b\n"), "its name does not end in .gz"),
    "zipped": (b"PK\x03\x04 and so on", "is an archive"),
    "wide.csv": ("a,b\n1,2\n".encode("utf-16"), "text in UTF-16"),
    "log.parquet": (b"a,b\n1,2\n", "is not a file of the format parquet"),
    "random": (bytes(range(256)), "is not a text file"),
    "words": (b"one\ntwo\n", "cannot recognise the format"),
    "ratings.dat": (b"1::2::3\n4::5::6\n", "the separator :: must be one character"),
    "header.csv": (b"clicked,x\n", "has a header line but no rows"),
    "twice.csv": (b"clicked,x,x\n1,a,b\n0,b,c\n", "two columns are named 'x'|which column is the label"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses(name: str, tmp_path: Path) -> None:
    content, message = REFUSED[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ClickfleetError, match=message) as refusal:
        guess(str(tmp_path / name))
    assert isinstance(refusal.value, ConfigError | DataError)


def test_an_empty_file_is_taken_for_criteo(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"")
    found = guess(tmp_path / "log")
    assert found.format == Plugin("criteo")
    assert "is empty" in found.text()


def test_a_sample_is_bounded_and_looks_everywhere(tmp_path: Path, monkeypatch: Any) -> None:
    """A column that becomes a number only late in the file is still text."""
    from clickfleet.data import recognition

    monkeypatch.setattr(recognition, "HEAD_BYTES", 4000)
    monkeypatch.setattr(recognition, "PIECE_BYTES", 1000)
    lines = [f"{i % 2},{i % 9}\n" for i in range(20_000)] + [f"{i % 2},word{i % 9}\n" for i in range(20_000)]
    (tmp_path / "log.csv").write_text("clicked,x\n" + "".join(lines))
    found = guess(tmp_path / "log.csv")
    assert 1000 < found.rows < 4000
    assert [(column.name, column.type) for column in found.columns] == [("clicked", "integer"), ("x", "text")]
