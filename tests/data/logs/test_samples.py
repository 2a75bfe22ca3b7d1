"""`clickfleet read`: for every format, the values of the file beside what training makes of them."""

import io
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clickfleet.cli import build
from clickfleet.cli.frame import run
from clickfleet.config.plugins import Plugin
from clickfleet.data.logs.samples import read_samples
from clickfleet.data.reader import Reader
from clickfleet.data.schema import Dense, History, Label, Schema, Slot, Transform, preset, write_schema
from lines import GOLDEN_LINE, MULTISLOT_LINE, SLOTS_LINE
from originals import QUEUE_READER, READER, project

ONE = Schema((Dense("x", Transform("log1p")),), (Slot("a"), Slot("b", multi=True)), label="click")
TEXTS: dict[str, tuple[dict[str, Any], str]] = {
    "csv": ({"separator": ";"}, "click;x;a;b\n1;3;u;v|w\n0;;;\n"),
    "slots": ({}, "click:1 x:3 a:u b:v b:w\nclick:0\n"),
    "feasign": ({}, "id\t1:click 3:x u:a v:b w:b\n0:click\n"),
    "multislot": ({"order": ["click", "dense", "a", "b"]}, "1 1 1 3 1 u 2 v w\n1 0 1 0 1 u 1 v\n"),
    "pipe": ({"order": ["click", "dense", "a", "b"], "command": "sed s/X/1/"}, "1 X 1 3 1 u 2 v w\n1 0 1 0 1 u 1 v\n"),
}


def found(capsys: pytest.CaptureFixture[str], *argv: object) -> list[dict[str, Any]]:
    code = run(build(), ["read", *map(str, argv), "--json"])
    out = capsys.readouterr()
    assert code == 0, out.err
    samples: list[dict[str, Any]] = json.loads(out.out.splitlines()[-1])["samples"]
    return samples


@pytest.mark.parametrize("name", TEXTS)
def test_values_of_the_file_and_of_training(tmp_path: Path, name: str) -> None:
    settings, text = TEXTS[name]
    (tmp_path / "data").write_text(text)
    plugin = Plugin(name, settings)
    first, second = read_samples([str(tmp_path / "data")], plugin, ONE, 5)
    (batch,) = Reader(tmp_path / "data", ONE, plugin)
    assert (first.label, second.label) == (1, 0)
    assert (first.dense[0].raw, first.dense[0].value) == ("3", np.log1p(np.float32(3)))
    assert [slot.raw for slot in first.slots] == [["u"], ["v", "w"]]
    assert [key for slot in first.slots for key in slot.keys] == batch[:1].keys.tolist()
    assert [key for slot in second.slots for key in slot.keys] == batch[1:].keys.tolist()
    if name in ("csv", "slots", "feasign"):
        assert (second.dense[0].raw, second.dense[0].value, second.slots[1].keys) == (None, 0, [])


def test_criteo_and_libffm_and_tables(tmp_path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    (tmp_path / "criteo").write_text(GOLDEN_LINE + "\n")
    (sample,) = read_samples([str(tmp_path / "criteo")], Plugin("criteo"), preset("criteo"))
    fields = GOLDEN_LINE.split("\t")
    assert [one.raw or "" for one in sample.dense] == fields[1:14]
    assert [(one.raw or [""])[0] for one in sample.slots] == fields[14:]
    weighted = Schema((), (Slot("0", multi=True),), values=True)
    (tmp_path / "libffm").write_text("1 0:14:0.5 0:15:2\n")
    (sample,) = read_samples([str(tmp_path / "libffm")], Plugin("libffm"), weighted)
    assert (sample.slots[0].raw, sample.slots[0].weights) == (["14", "15"], [0.5, 2.0])
    parquet.write_table(pa.table({"click": [1], "x": [3.0], "a": ["u"], "b": [["v", "w"]]}), tmp_path / "table")
    (sample,) = read_samples([str(tmp_path / "table")], Plugin("parquet"), ONE)
    assert (sample.dense[0].raw, sample.slots[0].raw, sample.slots[1].raw) == ("3.0", ["u"], ["v", "w"])


def test_groups_of_dense_values_and_standard_input(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for text, form in ((SLOTS_LINE, "slots"), (MULTISLOT_LINE, "multislot")):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(f"{text}\n{text}\n".encode())))
        one, _ = found(capsys, "-", "--format", form)
        assert one["file"] == "-"
        assert [float(value["raw"]) for value in one["dense"]] == pytest.approx([v["value"] for v in one["dense"]])
        assert len({value["raw"] for value in one["dense"]}) > 5
        assert all([int(slot["raw"][0])] == slot["keys"] for slot in one["slots"])


def test_bad_lines_tell_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "data").write_text(f"{GOLDEN_LINE}\nno line\n{GOLDEN_LINE}\n")
    assert run(build(), ["read", str(tmp_path / "data"), "--format", "criteo"]) == 0
    out = capsys.readouterr().out
    assert "data:2: bad line: " in out
    assert out.count("log1p") == 26
    assert run(build(), ["read"]) == 2


def test_readers_of_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The readers of a PaddleRec file, by iteration and as a command."""
    path = project(tmp_path / "one", "deepfm")
    (path.parent / "reader.py").write_text(READER)
    by_iteration = found(capsys, "-m", path, "--rows", 2)
    path = project(tmp_path / "two", "deepfm", reader_type="QueueDataset", pipe_command="python reader.py")
    (path.parent / "reader.py").write_text(QUEUE_READER)
    piped = found(capsys, "-m", path, "--rows", 2)
    for a, b in zip(by_iteration, piped, strict=True):
        assert a["label"] == b["label"]
        assert [slot["keys"] for slot in a["slots"]] == [slot["keys"] for slot in b["slots"]]
        assert [one["value"] for one in a["dense"]] == [one["value"] for one in b["dense"]]
        assert [int(slot["raw"][0]) for slot in b["slots"]] == [slot["keys"][0] for slot in b["slots"]]


def test_blanks_of_criteo_text_do_not_stop_the_tools(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fields = GOLDEN_LINE.split("\t")
    fields[2] = fields[20] = " "
    (tmp_path / "data").write_text("\t".join(fields) + "\n")
    assert run(build(), ["stats", str(tmp_path / "data")]) == 0
    assert (
        run(
            build(),
            ["convert", str(tmp_path / "data"), "--from", "criteo", "--to", "csv", "--out", str(tmp_path / "csv")],
        )
        == 0
    )
    sample = found(capsys, tmp_path / "data")[0]
    assert (sample["dense"][1]["raw"], sample["dense"][1]["value"], sample["slots"][6]["raw"]) == (None, 0, [])


def test_format_and_columns_are_guessed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "log.csv").write_text("click,age,city\n" + "".join(f"{i % 2},{i + 20},c{i % 3}\n" for i in range(50)))
    sample = found(capsys, tmp_path / "log.csv", "--rows", 1)[0]
    assert sample["label"] == 0
    raw = {one["name"]: one["raw"] for one in [*sample["dense"], *sample["slots"]]}
    assert raw["city"] == ["c0"]
    (tmp_path / "criteo").write_text(GOLDEN_LINE + "\n")
    assert len(found(capsys, tmp_path / "criteo")[0]["slots"]) == 26


def test_histories_and_labels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = Schema(
        slots=(Slot("item"),),
        histories=(History("past", ("item",), ("items",), max=2),),
        labels=(Label("click"), Label("buy", given="click")),
    )
    write_schema(plan, tmp_path / "schema.yaml")
    (tmp_path / "a.csv").write_text("click,buy,item,items\n1,,a,a||b\n0,0,b,\n")
    (tmp_path / "a.slots").write_text("click:1 item:a items:a items: items:b\nclick:0 buy:0 item:b\n")
    for name in ("csv", "slots"):
        first, second = found(capsys, tmp_path / f"a.{name}", "--format", name, "--schema", tmp_path / "schema.yaml")
        (batch,) = Reader(tmp_path / f"a.{name}", plan, name)
        assert (first["label"], first["labels"], second["labels"]) == (
            1,
            {"click": 1, "buy": None},
            {"click": 0, "buy": 0},
        )
        (past,) = first["histories"]
        assert (past["name"], past["raw"], past["keys"]) == ("past.item", ["a", "", "b"], batch.keys[1:3].tolist())
        assert (second["histories"][0]["raw"], second["histories"][0]["keys"]) == ([], [])
        assert (
            run(
                build(),
                ["read", str(tmp_path / f"a.{name}"), "--format", name, "--schema", str(tmp_path / "schema.yaml")],
            )
            == 0
        )
        text = capsys.readouterr().out
        assert "buy        missing\n" in text
        assert "a - b -> " in text
        assert "(2 events, the last 2 of 3)" in text
        assert "- -> no events  (0 events)" in text
