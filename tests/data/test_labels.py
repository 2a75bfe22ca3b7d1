"""A label is 0 or 1. Anything else is a bad line: it trains no model and counts in no metric unnoticed."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

import clickfleet
from clickfleet.data.batch import Batch
from clickfleet.data.memory import Feed
from clickfleet.data.reader import Reader
from clickfleet.data.schema import KeyRule, Schema, Slot, preset
from clickfleet.errors import ConfigError, DataError
from lines import GOLDEN_LINE

SCHEMA = Schema(slots=(Slot("a"),), keys=KeyRule("raw"))
WORDS = "is not a label; labels must be 1 (click) or 0 (no click)"

OWN = """
import numpy as np
from clickfleet.data.batch import Batch
from clickfleet.data.schema import KeyRule, Schema, Slot

class Mine:
    schema = Schema(slots=(Slot("a"),), keys=KeyRule("raw"))

    def parse(self, block):
        rows = [line.split() for line in block.decode().splitlines()]
        keys = np.array([int(row[1]) for row in rows], np.uint64)
        return Batch(np.empty((len(rows), 0), np.float32), keys, 1, labels=np.array([float(row[0]) for row in rows], np.float32))
"""
GENERATOR = """
from clickfleet.paddlerec.generator import Generator

class Mine(Generator):
    def generate_sample(self, line):
        label, a = line.split()
        yield [("a", [int(a)]), ("label", [float(label)])]
"""
REC_DATASET = """
from pathlib import Path

import numpy as np

class RecDataset:
    def __init__(self, file_list, config):
        self.files = file_list

    def __iter__(self):
        for file in self.files:
            for line in Path(file).read_text().splitlines():
                label, a = line.split()
                yield np.array(float(label), np.float32), np.array([int(a)], np.int64)
"""


def text(line: str) -> Callable[[Path, list[str]], Path]:
    """Writes one line per label."""

    def write(path: Path, labels: list[str]) -> Path:
        path.write_text("".join(line.format(label=label, a=i) + "\n" for i, label in enumerate(labels)))
        return path

    return write


def csv(path: Path, labels: list[str]) -> Path:
    path.write_text("label,a\n" + "".join(f"{label},{i}\n" for i, label in enumerate(labels)))
    return path


def table(path: Path, labels: list[str]) -> Path:
    rows = pa.table({"label": [float(label) for label in labels], "a": range(len(labels))})
    if path.name == "parquet":
        pa.parquet.write_table(rows, path)
    else:
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, rows.schema) as writer:
            writer.write_table(rows)
    return path


FORMATS: dict[str, tuple[Callable[[Path, list[str]], Path], Any, Schema | None]] = {
    "criteo": (text("{label}\t" + GOLDEN_LINE.partition("\t")[2]), "criteo", None),
    "csv": (csv, "csv", SCHEMA),
    "slots": (text("label:{label} a:{a}"), "slots", SCHEMA),
    "feasign": (text("{label}:label {a}:a"), "feasign", SCHEMA),
    "libffm": (text("{label} a:{a}:0.5"), "libffm", Schema(slots=(Slot("a"),), keys=KeyRule("raw"), values=True)),
    "multislot": (text("1 {a} 1 {label}"), "multislot", SCHEMA),
    "libsvm": (text("{label} {a}:1"), {"name": "libsvm", "positions": True}, SCHEMA),
    "vw": (text("{label} |a {a}"), "vw", SCHEMA),
    "jsonl": (text('{{"label": {label}, "a": {a}}}'), "jsonl", SCHEMA),
    "pipe": (text("1 {a} 1 {label}"), {"name": "pipe", "command": "cat"}, SCHEMA),
    "arrow": (table, "arrow", SCHEMA),
    "parquet": (table, "parquet", SCHEMA),
    "own": (text("{label} {a}"), OWN, None),
    "generator": (text("{label} {a}"), GENERATOR, SCHEMA),
    "recdataset": (text("{label} {a}"), REC_DATASET, SCHEMA),
}


def reader(name: str, folder: Path, labels: list[str], **options: Any) -> Reader:
    write, form, schema = FORMATS[name]
    path = write(folder / name, labels)
    if isinstance(form, str) and "\n" in form:
        (folder / f"{name}.py").write_text(form)
        form = str(folder / f"{name}.py")
    return Reader(path, schema, form, 100, threads=0, require_labels=True, **options)


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_refuses_other_labels(name: str, tmp_path: Path) -> None:
    (batch,) = list(reader(name, tmp_path, ["1", "0", "1.0", "0.0"]))
    assert batch.labels.tolist() == [1, 0, 1, 0]
    for label in ("-1", "2", "0.5", "5", "1.0001"):
        line = 3 + (name == "csv")
        with pytest.raises(DataError) as refusal:
            list(reader(name, tmp_path, ["1", "0", label]))
        assert f"{name}:{line}: " in str(refusal.value)
        assert label in str(refusal.value)
        assert WORDS in str(refusal.value)
    skipping = reader(name, tmp_path, ["1", "-1", "0", "7"], bad_lines="skip", max_bad_fraction=0.5)
    (batch,) = list(skipping)
    assert batch.labels.tolist() == [1, 0]
    assert skipping.counters.bad_lines == 2
    with pytest.raises(DataError, match="3 of 4 lines are bad"):
        list(reader(name, tmp_path, ["1", "-1", "5", "7"], bad_lines="skip", max_bad_fraction=0.5))


def test_no_number_is_no_label(tmp_path: Path) -> None:
    for name in FORMATS:
        with pytest.raises(DataError, match=f"{name}:{3 if name == 'csv' else 2}: "):
            list(reader(name, tmp_path, ["1", "nan", "0"]))


@pytest.mark.parametrize("label", [-1, 0.5, 5, np.nan])
def test_data_in_memory(label: float) -> None:
    batch = Batch(
        np.empty((2, 0), np.float32), np.arange(2, dtype=np.uint64), 1, labels=np.array([1, label], np.float32)
    )
    whole = {"label": np.array([1, label]), "a": np.arange(2)}
    for data in (whole, batch, [batch], pa.table(whole), [{"label": 1, "a": 1}, {"label": label, "a": 2}]):
        with pytest.raises(DataError, match="label"):
            list(Feed(data, SCHEMA))


def test_train_and_evaluate_stop_and_clicks_of_several_shows_stay(tmp_path: Path) -> None:
    settings = {
        "data": {"format": "csv", "schema": str(tmp_path / "schema.yaml")},
        "model": "lr",
        "train": {"threads": 1, "epochs": 1},
    }
    (tmp_path / "schema.yaml").write_text("label: label\nshow: shows\nclick: clicks\nslots: [{name: a}]\n")
    (tmp_path / "good.csv").write_text("label,shows,clicks,a\n1,10,3,x\n0,5,0,y\n")
    (tmp_path / "bad.csv").write_text("label,shows,clicks,a\n1,10,3,x\n3,10,3,y\n")
    done = clickfleet.train(settings, f"data.train={tmp_path}/good.csv", f"run.dir={tmp_path}/run", quiet=True)
    assert done.rows == 2
    with done.learner.table.snapshot() as rows:
        assert sorted((s, c) for part in rows for s, c in zip(part["show"], part["click"], strict=True)) == [
            (5, 0),
            (10, 3),
        ]
    with pytest.raises(DataError, match=r"bad.csv:3: label: '3' is not a label"):
        done.evaluate(str(tmp_path / "bad.csv"))
    with pytest.raises(DataError, match=r"bad.csv:3: label: '3' is not a label"):
        clickfleet.train(settings, f"data.train={tmp_path}/bad.csv", f"run.dir={tmp_path}/other", quiet=True)


AMOUNTS = Schema(slots=(Slot("a"),), keys=KeyRule("raw"), show="show", click="click", weight="weight")


@pytest.mark.parametrize("column", ["show", "click", "weight"])
def test_negative_amounts_are_refused(column: str, tmp_path: Path) -> None:
    good = {"label": 1.0, "a": 7, "show": 1.0, "click": 1.0, "weight": 1.0}
    rows = [good, {**good, column: -1.0}]
    frame = {name: [row[name] for row in rows] for name in good}
    (tmp_path / "rows.csv").write_text("\n".join([",".join(good), *(",".join(map(str, row.values())) for row in rows)]))
    pa.parquet.write_table(pa.table(frame), tmp_path / "rows.parquet")
    for form in ("csv", "parquet"):
        with pytest.raises(DataError, match=r"-1(.0'?)? is out of range"):
            list(Reader(tmp_path / f"rows.{form}", AMOUNTS, form, 100, threads=0))
    with pytest.raises(DataError, match="-1 is out of range"):
        list(Feed(frame, AMOUNTS))
    ready = Batch(np.empty((1, 0), np.float32), np.array([7], np.uint64), 1, weights=np.array([-1], np.float32))
    with pytest.raises(DataError, match="-1 in weights is out of range"):
        list(Feed([ready], AMOUNTS))


@pytest.mark.parametrize("name", [name for name in FORMATS if name not in ("own", "generator", "recdataset")])
def test_a_schema_may_say_that_minus_one_is_no_click(name: str, tmp_path: Path) -> None:
    write, form, schema = FORMATS[name]
    signed = replace(schema or preset("criteo"), negative=-1)
    (batch,) = list(Reader(write(tmp_path / name, ["1", "-1", "1.0", "-1.0"]), signed, form, 100, threads=0))
    assert batch.labels.tolist() == [1, 0, 1, 0]
    assert signed.hash != replace(signed, negative=0).hash
    assert Schema.from_dict(signed.to_dict()) == signed
    for label in ("0", "2", "-2", "0.5"):
        with pytest.raises(DataError) as refusal:
            list(Reader(write(tmp_path / name, ["1", "-1", label]), signed, form, 100, threads=0))
        assert f"{name}:{3 + (name == 'csv')}: " in str(refusal.value)
        assert "labels must be 1 (click) or -1 (no click), as the schema says (negative)" in str(refusal.value)


def test_other_pairs_of_labels_are_no_schema() -> None:
    for negative in (1, 2, -2, False):
        with pytest.raises(ConfigError, match="labels are 0 and 1, or -1 and 1"):
            replace(SCHEMA, negative=negative)
