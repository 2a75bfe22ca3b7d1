"""Bad input: a clear error, or counted, or kept; never a crash and never silence."""

import gzip
import json
import random

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clickfleet.config.plugins import names
from clickfleet.data.formats import load
from clickfleet.data.formats.sentences import Sentences
from clickfleet.data.parsing import lines
from clickfleet.data.reader import Reader
from clickfleet.data.schema import Dense, KeyRule, Schema, Slot, preset
from clickfleet.errors import DataError
from lines import GOLDEN_LINE, MULTISLOT_LINE, SLOTS_LINE, criteo_text, read

BAD = GOLDEN_LINE.replace("1382", "many")


def refusal(path, form="criteo", schema=None, **options) -> str:
    with pytest.raises(DataError) as error:
        read(path, form, schema, **options)
    return str(error.value)


def test_an_error_says_where_what_and_what_to_do(write):
    assert refusal(write("day_0", f"{GOLDEN_LINE}\n{GOLDEN_LINE}\n{BAD}\n")).endswith(
        "day_0:3: I5: 'many' is not a number\n"
        '  check data.format (now "criteo") and the schema, or set data.bad_lines=skip to count and skip such lines'
    )


def test_line_numbers_count_over_blocks_and_threads(write, small_blocks):
    text = criteo_text(50) + BAD.encode() + b"\n" + criteo_text(50)
    for threads in (0, 1, 3):
        assert "a:51: I5" in refusal(write("a", text), threads=threads)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("\t".join(GOLDEN_LINE.split("\t")[:31]), "expected 40 tab-separated fields (39 without a label), found 31"),
        (GOLDEN_LINE + "\t", "found 41"),
        ("", "the line is empty"),
        (GOLDEN_LINE.replace("68fd1e64", "68fd\x0064"), "the line contains a NUL byte"),
        (GOLDEN_LINE.replace("1382", "1e999"), "I5: '1e999' is not a number"),
        (GOLDEN_LINE.replace("1382", "nan"), "I5: 'nan' is not a number"),
        (GOLDEN_LINE.replace("1382", "0x1F"), "I5: '0x1F' is not a number"),
        (GOLDEN_LINE.replace("1382", " 1382"), "I5: ' 1382' is not a number"),
        (GOLDEN_LINE.replace("1382", "9" * 400), "is not a number"),
        ("yes" + GOLDEN_LINE[1:], "click: 'yes' is not a number"),
        (GOLDEN_LINE[1:], "click: the label is missing"),
    ],
)
def test_each_kind_of_bad_line(write, line, message):
    assert message in refusal(write("a", f"{GOLDEN_LINE}\n{line}\n{GOLDEN_LINE}\n"))
    (batch,) = read(
        write("a", f"{GOLDEN_LINE}\n{line}\n{GOLDEN_LINE}\n"), "criteo", bad_lines="skip", max_bad_fraction=0.5
    )
    assert len(batch) == 2


def test_large_numbers_are_numbers(write):
    (batch,) = read(write("a", GOLDEN_LINE.replace("1382", "1" + "0" * 30)), "criteo")
    assert 69 < batch.dense[0, 4] < 70
    message = refusal(write("a", GOLDEN_LINE.replace("1382", "1e300")), schema=preset("criteo-paddle"))
    assert "I5: '1e300' is out of range" in message


def test_bytes_that_are_not_utf8_are_values_like_others(write):
    (batch,) = read(write("a", GOLDEN_LINE.encode().replace(b"68fd1e64", b"\xff\xfe")), "criteo")
    assert len(batch) == 1


def test_skipped_lines_are_counted_and_shown(write, small_blocks):
    path = write("a", b"".join(criteo_text(9, i) + b"oh\n" for i in range(30)))
    reader = Reader(path, batch_size=7, bad_lines="skip")
    assert sum(map(len, reader)) == 270
    assert (reader.counters.rows, reader.counters.lines, reader.counters.bad_lines) == (270, 300, 30)
    assert reader.counters.examples[0].endswith("a:10: expected 40 tab-separated fields (39 without a label), found 1")
    assert len(reader.counters.examples) == 10
    assert reader.counters.bytes == path.stat().st_size


def test_quarantine_keeps_the_line_and_the_reason(write, tmp_path, small_blocks):
    path = write("a", b"".join(criteo_text(30, i) + (b"\xff\n" if i == 1 else BAD.encode() + b"\n") for i in range(3)))
    out = tmp_path / "bad" / "lines.jsonl"
    options = {"bad_lines": "quarantine", "quarantine": str(out), "batch_size": 20}
    reader = Reader(path, **options)
    states = [reader.state() for _ in reader]
    entries = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(entry["line"], entry["field"]) for entry in entries] == [(31, "I5"), (62, ""), (93, "I5")]
    assert entries[0] == {"file": str(path), "line": 31, "field": "I5", "reason": "'many' is not a number", "text": BAD}
    assert entries[1]["base64"] == "/w=="
    for state in states:  # a restart writes no line twice
        again = Reader(path, **options)
        again.restore(state)
        list(again)
        assert [json.loads(line) for line in out.read_text().splitlines()] == entries


def test_too_many_bad_lines_stop_the_run(write, small_blocks):
    path = write("a", b"".join(criteo_text(1, i) + b"oh\n" for i in range(2000)))
    reader = Reader(path, bad_lines="skip", max_bad_fraction=0.4, batch_size=10)
    with pytest.raises(DataError, match=r"lines are bad, more than data\.max_bad_fraction=0\.4 allows"):
        list(reader)
    assert reader.counters.lines < 1100  # long before the end
    assert "5 of 10 lines are bad" in refusal(
        write("b", b"".join(criteo_text(1, i) + b"oh\n" for i in range(5))), bad_lines="skip"
    )


def test_an_endless_line(write, monkeypatch, small_blocks):
    monkeypatch.setattr(lines, "MAX_LINE_BYTES", 20_000)
    good = GOLDEN_LINE.encode() + b"\n"
    for junk in (b"x" * 50_000 + b"\n", b"x" * 50_000):
        path = write("a", good + junk + (good if junk.endswith(b"\n") else b""))
        message = refusal(path)
        assert "a:2: the line is longer than" in message
        assert f"({len(junk)} bytes)" in message
        rows = sum(map(len, read(path, "criteo", bad_lines="skip", max_bad_fraction=0.5)))
        assert rows == 1 + junk.endswith(b"\n")


def test_a_line_longer_than_a_block_is_fine(write, small_blocks):
    long = GOLDEN_LINE.replace("68fd1e64", "z" * 7000)
    (batch,) = read(write("a", f"{GOLDEN_LINE}\n{long}\n{GOLDEN_LINE}\n{long}"), "criteo")
    assert len(batch) == 4
    assert batch.keys[26] == batch.keys[78] != batch.keys[0]


def test_empty_files_are_no_rows(write):
    for name, content in {"a": b"", "b.gz": b"", "c.gz": gzip.compress(b""), "d": b""}.items():
        for form in ("criteo", "slots", "multislot", "feasign"):
            assert read(write(name, content), form) == []


def test_truncated_and_damaged_archives(write, tmp_path):
    packed = gzip.compress(criteo_text(500))
    assert "the compressed data is truncated or damaged (unexpected end of file)" in refusal(
        write("a.gz", packed[:-500])
    )
    assert "truncated or damaged" in refusal(write("b.gz", packed[:300] + b"\0" * 50 + packed[350:]))
    assert "truncated or damaged" in refusal(write("c.gz", b"this is not gzip"))
    assert "truncated or damaged" in refusal(write("d.gz", packed + b"trailing garbage"))
    assert sum(map(len, read(write("e.gz", packed + b"\0" * 512), "criteo"))) == 500  # padding is allowed
    with pa.CompressedOutputStream(str(tmp_path / "f.zst"), "zstd") as file:
        file.write(criteo_text(500))
    whole = (tmp_path / "f.zst").read_bytes()
    assert sum(map(len, read(write("two.zst", whole + whole), "criteo"))) == 1000
    assert "truncated or damaged" in refusal(write("g.zst", whole[: len(whole) // 2]))
    assert "truncated or damaged" in refusal(write("h.zst", b"this is not zstd"))
    for bad_lines in ("skip", "error"):  # a lost half of a file is never just a bad line
        assert "truncated" in refusal(write("a.gz", packed[:-500]), bad_lines=bad_lines, max_bad_fraction=1)


@pytest.mark.parametrize("form", ["criteo", "slots", "feasign", "multislot"])
def test_binary_garbage(write, form):
    garbage = random.Random(7).randbytes(300_000)
    path = write("model.bin", garbage)
    assert "model.bin:1: " in refusal(path, form)
    assert "lines are bad, more than data.max_bad_fraction=0.1" in refusal(path, form, bad_lines="skip")
    reader = Reader(path, format=form, bad_lines="skip", max_bad_fraction=1)
    assert sum(map(len, reader)) + reader.counters.bad_lines == reader.counters.lines


def test_missing_and_unreadable_files(write, tmp_path):
    with pytest.raises(DataError, match="there is no file"):
        read(tmp_path / "nothing", "criteo")
    with pytest.raises(DataError, match="no file matches"):
        read(str(tmp_path / "*.nothing"), "criteo")
    path = write("gone", GOLDEN_LINE)
    reader = Reader(path, threads=1)
    path.unlink()
    with pytest.raises(DataError, match="gone: cannot be read: No such file or directory"):
        list(reader)


# Every text parser takes any bytes: each line becomes a row or a bad line, and the rows are within their arrays.

EXAMPLES = {
    "criteo": (preset("criteo"), GOLDEN_LINE),
    "criteo-paddle": (preset("criteo-paddle"), GOLDEN_LINE),
    "slots": (preset("criteo-slots"), SLOTS_LINE),
    "feasign": (preset("feasign"), "id\t0:1 4351255118977467729:3 5:29"),
    "multislot": (preset("criteo-slots"), MULTISLOT_LINE),
    "libffm": (
        Schema(slots=(Slot("0", multi=True), Slot("1")), keys=KeyRule("raw"), values=True),
        "1 0:5:0.5 1:7:2 0:9:-1",
    ),
    "libsvm": (Schema(slots=(Slot("features", multi=True),), group="qid", values=True), "1 qid:3 5:0.5 7:2 # text"),
    "vw": (
        Schema(slots=(Slot("features", multi=True), Slot("ad", multi=True)), weight="w", values=True),
        "1 0.5 'tag | x y:2 |ad:3 a3 price:0.5",
    ),
    "jsonl": (
        Schema((Dense("n"),), (Slot("a"), Slot("b", multi=True)), time="t", group="g"),
        '{"label": 1, "n": 0.5, "a": "x", "b": ["p", 3], "t": "2026-01-31T10:20:30", "g": "u"}',
    ),
    "sentences": (Sentences.schema, "words of any language"),
    "csv": (Schema(slots=(Slot("a"), Slot("b", multi=True)), time="t", group="g"), '1,"x,""y",p|q,5,u'),
    "paired": (Schema(slots=(Slot("a"), Slot("b"))), "1 x y"),
}
"""A schema and a good line of each kind. A format without an example is fuzzed from a short line."""
COLUMNS = {"csv": ["label", "a", "b", "t", "g"], "paired": ["label", "a", "b"]}
TEXT = [name for name in names("formats") if isinstance(load(name), lines.Lines) and name != "pipe"]  # reads multislot


@pytest.mark.parametrize("kind", [*EXAMPLES, *(name for name in TEXT if name not in EXAMPLES)])
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_bytes_are_rows_or_bad_lines(kind, data):
    schema, line = EXAMPLES.get(kind) or (load(kind).schema or Schema(slots=(Slot("a"),)), "1")
    good = line.encode()
    piece = st.binary(max_size=30) | st.sampled_from(
        [b"\n", b"\t", b" ", b":", b'"', b",", b"|", b"\r\n", b"\0", b"-", b"99999999999"]
    )

    def damaged(draw):
        at, length = draw(st.integers(0, len(good))), draw(st.integers(0, 20))
        return good[:at] + draw(piece) + good[at + length :]

    lines = data.draw(st.lists(st.just(good) | piece | st.composite(damaged)(), max_size=8))
    block = b"\n".join(lines) + b"\n"
    name = kind.removesuffix("-paddle")
    form = load({"name": name, "columns": COLUMNS[name]} if name in COLUMNS else name)
    parser = form.parser(schema, good, "fuzz")
    for on_bad in ("all", "some", "stop"):
        parsed = parser(block, on_bad)
        batch = parsed.batch
        assert len(batch) + parsed.bad_lines == parsed.lines
        assert parsed.lines == block.count(b"\n") or (on_bad == "stop" and parsed.bad_lines == 1)
        assert len(batch.keys) == batch.offsets[-1]
        if kind in EXAMPLES:  # whose lines have a label
            assert len(batch.labels) == len(batch)
        assert (batch.offsets[1:] >= batch.offsets[:-1]).all()
        if on_bad == "all":
            assert [bad.text for bad in parsed.bad] == [block.split(b"\n")[bad.line] for bad in parsed.bad]
            assert all(bad.reason for bad in parsed.bad)
            good_lines = [x for i, x in enumerate(block.split(b"\n")[:-1]) if i not in {bad.line for bad in parsed.bad}]
            again = parser(b"".join(x + b"\n" for x in good_lines), "stop")  # a bad line leaves no trace in the others
            assert again.bad == []
            assert (again.batch.keys == batch.keys).all()
            assert (again.batch.dense == batch.dense).all()
            assert (again.batch.offsets == batch.offsets).all()
