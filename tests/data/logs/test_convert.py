"""Conversion: the published line, round trips, and what cannot be converted."""

import gzip
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings

from clickfleet.data.batch import Batch, concatenate
from clickfleet.data.logs.convert import convert
from clickfleet.data.logs.synth import SynthOptions, synth
from clickfleet.data.reader import Reader
from clickfleet.data.schema import History, Label, Schema, Slot, preset, read_schema
from clickfleet.errors import ConfigError, DataError
from event_rows import arrow_stream, as_csv, check_equal, rows, schema, table

RAW = (
    "0|1|1|5|0|1382|4|15|2|181|1|2||2|68fd1e64|80e26c9b|fb936136|7b4723c4|25c83c98|7e0ccccf|de7995b8|1f89b562|a73ee510|a8cd5504"
    "|b2cb9c98|37c9c164|2824a5f6|1adce6ef|8ba8b39a|891b62e7|e5ba7672|f54016b9|21ddcdc9|b1252a9d|07b5194c||3a171ecb|c5c50484"
    "|e8b83407|9727dd16\n"
).replace("|", "\t")
DENSE = "0.05 0.00663349917081 0.05 0.0 0.02159375 0.008 0.15 0.04 0.362 0.1 0.2 0.0 0.04"
IDS = (
    "715353 817085 851010 833725 286835 948614 881652 507110 27346 646986 643076 200960 18464 202774 532679 729573 "
    "342789 562805 880474 984402 666449 26235 700326 452909 884722 787527"
)


@pytest.fixture
def golden(tmp_path: Path) -> Path:
    (tmp_path / "golden").write_text(RAW)
    return tmp_path / "golden"


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("log")
    synth(folder, SynthOptions(rows=9000, test_rows=0, parts=2))
    return folder / "train"


def read(path: Path, kind: str, schema: Schema | None = None) -> Batch:
    return concatenate(list(Reader(path, schema, kind, batch_size=4096)))


def test_the_published_line(golden: Path, tmp_path: Path) -> None:
    convert(golden, tmp_path / "out", "criteo", "multislot", keys="py2")
    assert (tmp_path / "out").read_text() == f"13 {DENSE} " + "".join(f"1 {key} " for key in IDS.split()) + "1 0\n"
    convert(golden, tmp_path / "out", "criteo", "slots", keys="py2")
    dense = " ".join(f"dense_feature:{value}" for value in DENSE.split())
    slots = " ".join(f"{i}:{key}" for i, key in enumerate(IDS.split(), 1))
    assert (tmp_path / "out").read_text() == f"click:0 {dense} {slots}\n"


@pytest.mark.parametrize("kind", ["csv", "parquet", "arrow"])
def test_raw_values_survive_a_round_trip(log: Path, tmp_path: Path, kind: str) -> None:
    made = convert(log, tmp_path / f"log.{kind}", "criteo", kind)
    assert (made["rows"], made["schema"]) == (9000, None)
    for other in ("parquet", "arrow"):
        convert(tmp_path / f"log.{kind}", tmp_path / f"again.{other}", kind, other)
        convert(tmp_path / f"again.{other}", tmp_path / f"log.{kind}", other, kind)
    convert(tmp_path / f"log.{kind}", tmp_path / "back", kind, "criteo")
    assert (tmp_path / "back").read_bytes() == b"".join(path.read_bytes() for path in sorted(log.iterdir()))


@pytest.mark.parametrize("keys", ["py2", "hash64"])
@pytest.mark.parametrize("kind", ["slots", "multislot", "csv", "parquet", "arrow"])
def test_keys_and_dense_values_survive(log: Path, tmp_path: Path, kind: str, keys: str) -> None:
    """What training sees is the same, bit for bit, whether it reads the raw log or what it was converted to."""
    made = convert(log, tmp_path / "out", "criteo", kind, keys=keys)
    schema = read_schema(made["schema"]) if made["schema"] else None
    got = read(tmp_path / "out", kind, schema)
    wanted = read(log, "criteo", preset("criteo-paddle" if keys == "py2" else "criteo"))
    assert (got.keys == wanted.keys).all()
    assert got.labels is not None
    assert wanted.labels is not None
    assert (got.labels == wanted.labels).all()
    np.testing.assert_allclose(
        got.dense, wanted.dense, rtol=2e-7
    )  # 12 digits of a double round to the same float or its neighbour


def test_libffm_makes_fields_of_everything(log: Path, tmp_path: Path) -> None:
    made = convert(log, tmp_path / "out", "criteo", "libffm", keys="py2")
    schema = read_schema(made["schema"])
    assert (len(schema.slots), schema.values) == (39, True)
    got = read(tmp_path / "out", "libffm", schema)
    wanted = read(log, "criteo", preset("criteo-paddle"))
    assert got.values is not None
    counts = np.diff(got.offsets).reshape(-1, 39)
    assert (counts[:, 13:] == 1).all()
    assert (counts[:, :13] == (wanted.dense != 0)).all()
    again = convert(tmp_path / "out", tmp_path / "again", "libffm", "libffm", schema=schema)
    assert again["rows"] == 9000
    with pytest.raises(DataError, match="values other than 1"):
        convert(tmp_path / "out", tmp_path / "no", "libffm", "slots", schema=schema)


def test_feasign_has_no_dense_values(log: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--drop-dense"):
        convert(log, tmp_path / "out", "criteo", "feasign")
    made = convert(log, tmp_path / "out", "criteo", "feasign", drop_dense=True)
    got = read(tmp_path / "out", "feasign", read_schema(made["schema"]))
    assert (got.keys == read(log, "criteo").keys).all()
    assert (tmp_path / "out").read_text().splitlines()[0].split()[1].endswith(":2")


def test_keyed_text_to_keyed_text(log: Path, tmp_path: Path) -> None:
    convert(log, tmp_path / "slots", "criteo", "slots", keys="py2")
    convert(tmp_path / "slots", tmp_path / "multi", "slots", "multislot")
    convert(tmp_path / "multi", tmp_path / "slots2", "multislot", "slots")
    assert (read(tmp_path / "slots2", "slots").keys == read(tmp_path / "slots", "slots").keys).all()
    assert (read(tmp_path / "slots2", "slots").dense == read(tmp_path / "slots", "slots").dense).all()


def test_multi_valued_slots_and_row_columns(tmp_path: Path) -> None:
    (tmp_path / "schema.yaml").write_text(
        "label: y\nweight: w\nkeys: raw\ndense: [x]\nslots: [a, {name: b, multi: true, pooling: mean}]\n"
    )
    schema = read_schema(tmp_path / "schema.yaml")
    (tmp_path / "log").write_text("y:1 w:2 x:0.5 a:7 b:8 b:9\ny:0 w:0.5 a:1\n")
    wanted = read(tmp_path / "log", "slots", schema)
    for kind in ("csv", "parquet", "arrow"):
        made = convert(tmp_path / "log", tmp_path / kind, "slots", kind, schema=schema)
        got = read(tmp_path / kind, kind, read_schema(made["schema"]))
        for name in ("keys", "offsets", "dense", "labels", "weights"):
            assert (getattr(got, name) == getattr(wanted, name)).all(), (kind, name)
    assert (tmp_path / "csv").read_text() == "y,w,x,a,b\n1,2,0.5,7,8|9\n0,0.5,0,1,\n"


def test_any_columns_by_a_schema(tmp_path: Path) -> None:
    (tmp_path / "schema.yaml").write_text(
        "label: clicked\ndense: [{name: age, transform: log1p}]\nslots: [{name: city, source: town}]\n"
    )
    schema = read_schema(tmp_path / "schema.yaml")
    rows = pa.table({"town": ["Bonn", None], "age": [31.5, None], "clicked": [1, 0], "more": ["x", "y"]})
    lists = pa.table({"town": [["Bonn", "Kiel"], None], "age": [31.5, None], "clicked": [1, 0]})
    pq.write_table(lists, tmp_path / "lists.parquet")
    many = replace(schema, slots=(replace(schema.slots[0], multi=True),))
    convert(tmp_path / "lists.parquet", tmp_path / "lists.arrow", "parquet", "arrow", schema=many)
    convert(tmp_path / "lists.arrow", tmp_path / "lists.csv", "arrow", "csv", schema=many)
    assert (tmp_path / "lists.csv").read_text() == "clicked,age,town\n1,31.5,Bonn|Kiel\n0,,\n"
    pq.write_table(rows, tmp_path / "log.parquet")
    convert(tmp_path / "log.parquet", tmp_path / "log.csv", "parquet", "csv", schema=schema)
    assert (tmp_path / "log.csv").read_text() == "clicked,age,town\n1,31.5,Bonn\n0,,\n"
    made = convert(tmp_path / "log.csv", tmp_path / "log.slots", "csv", "slots", schema=schema)
    first = (tmp_path / "log.slots").read_text().splitlines()[0]
    assert first.startswith("clicked:1 age:3.48124008934 town:")  # log1p(31.5)
    assert (
        read(tmp_path / "log.slots", "slots", read_schema(made["schema"])).keys
        == read(tmp_path / "log.csv", "csv", schema).keys
    ).all()


def test_rows_without_a_label(log: Path, tmp_path: Path) -> None:
    lines = (log / "part-0").read_bytes().splitlines()[:20]
    (tmp_path / "test").write_bytes(b"".join(line.split(b"\t", 1)[1] + b"\n" for line in lines))
    for kind in ("csv", "multislot", "slots", "libffm"):
        assert convert(tmp_path / "test", tmp_path / kind, "criteo", kind, keys="py2")["rows"] == 20
    assert (tmp_path / "csv").read_text().startswith("I1,")
    convert(tmp_path / "test", tmp_path / "raw.csv", "criteo", "csv")
    convert(tmp_path / "raw.csv", tmp_path / "back", "csv", "criteo")
    assert (tmp_path / "back").read_bytes() == (tmp_path / "test").read_bytes()


def test_a_folder_takes_one_file_per_input_and_names_may_pack(log: Path, tmp_path: Path) -> None:
    made = convert(log, f"{tmp_path}/many/", "criteo", "csv")
    assert [Path(path).name for path in made["files"]] == ["part-0.csv", "part-1.csv"]
    for ending in ("gz", "zst"):
        convert(log, tmp_path / f"log.{ending}", "criteo", "slots", keys="py2")
        assert len(read(tmp_path / f"log.{ending}", "slots")) == 9000
    with gzip.open(tmp_path / "log.gz") as file:
        assert file.readline().startswith(b"click:")


def test_bad_lines_are_told_or_skipped(golden: Path, tmp_path: Path) -> None:
    lines = [RAW] * 30
    lines[3] = RAW.replace("1382", "x")
    lines[9] = "1\t2\n"
    golden.write_text("".join(lines))
    for target, keys in (("csv", None), ("slots", "py2")):
        with pytest.raises(DataError, match="golden:4: I5"):
            convert(golden, tmp_path / "out", "criteo", target, keys=keys)
        assert not (tmp_path / "out").exists()
        made = convert(golden, tmp_path / "out", "criteo", target, keys=keys, bad_lines="skip")
        assert (made["rows"], made["bad_lines"]) == (28, 2)
        (tmp_path / "out").unlink()


@pytest.mark.parametrize(
    ("source", "target", "keys", "message"),
    [
        ("criteo", "criteo", "py2", "cannot be recovered from keys"),
        ("criteo", "tfrecord", None, "cannot write the format 'tfrecord'"),
        ("tfrecord", "criteo", None, "unknown format 'tfrecord'"),
        ("criteo", "slots", "md5", "cannot read the key rule|unknown key rule"),
        ("slots", "criteo", None, "criteo stores raw values"),
        ("libffm", "csv", None, "--schema"),
    ],
)
def test_what_cannot_be_converted(
    golden: Path, tmp_path: Path, source: str, target: str, keys: str | None, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        convert(golden, tmp_path / "out", source, target, keys=keys)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["golden"]


def test_raw_words_are_not_raw_keys(golden: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="C1"):
        convert(golden, tmp_path / "out", "criteo", "slots", keys="raw")
    assert not (tmp_path / "out").exists()


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None, max_examples=40
)
@given(drawn=rows())
def test_histories_and_labels_survive(drawn: list, tmp_path: Path) -> None:
    """Raw or as keys, in every format that can hold them, and with two histories of the same column."""
    plan = schema()
    (tmp_path / "log.csv").write_text(as_csv(drawn))
    (tmp_path / "log.arrow").write_bytes(arrow_stream(table(drawn)))
    wanted = read(tmp_path / "log.csv", "csv", plan)
    for source in ("csv", "arrow"):
        log = tmp_path / f"log.{source}"
        for kind in ("csv", "parquet", "arrow"):
            raw = tmp_path / f"raw.{kind}"
            assert convert(log, raw, source, kind, schema=plan)["schema"] is None
            check_equal(read(raw, kind, plan), wanted)
        for kind in ("csv", "parquet", "slots", "multislot"):
            made = convert(log, tmp_path / f"keys.{kind}", source, kind, schema=plan, keys="hash64")
            again = read(tmp_path / f"keys.{kind}", kind, read_schema(made["schema"]))
            np.testing.assert_allclose(again.dense, wanted.dense, rtol=1e-6)
            if kind == "multislot":  # an empty slot is a 0
                assert again.labels is not None
                np.testing.assert_array_equal(again.labels, wanted.labels)
            else:
                check_equal(replace(again, dense=wanted.dense), wanted)


def test_feasign_numbers_slots_and_histories(tmp_path: Path) -> None:
    plan = Schema(
        slots=(Slot("item"), Slot("twin", rows_of="item")),
        histories=(History("seen", ("item",), max=2),),
        labels=(Label("click"), Label("buy", given="click")),
        group="item",
    )
    (tmp_path / "a.csv").write_text("click,buy,item,twin,seen_item\n1,,a,b,a|b|c\n0,0,b,a,\n")
    made = convert(tmp_path / "a.csv", tmp_path / "a.feasign", "csv", "feasign", schema=plan)
    found = read_schema(made["schema"])
    assert [slot.name for slot in found.slots] == ["2", "3"]
    assert (found.slots[1].rows_of, found.histories[0].slots, found.label_columns) == ("2", ("2",), ("1", "buy"))
    again, wanted = read(tmp_path / "a.feasign", "feasign", found), read(tmp_path / "a.csv", "csv", plan)
    check_equal(again, wanted)
    np.testing.assert_array_equal(np.argsort(again.groups), np.argsort(wanted.groups))


def test_formats_without_histories_and_labels_refuse_them(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("click,buy,item,seen_item\n1,1,a,b|c\n")
    history = Schema(slots=(Slot("item"),), histories=(History("seen", ("item",)),), label="click")
    labels = Schema(slots=(Slot("item"),), labels=(Label("click"), Label("buy")))
    for kind in ("criteo", "libffm"):
        with pytest.raises(ConfigError, match=f"{kind} cannot store histories"):
            convert(tmp_path / "a.csv", tmp_path / "out", "csv", kind, schema=history)
        with pytest.raises(ConfigError, match=f"{kind} cannot store several labels"):
            convert(tmp_path / "a.csv", tmp_path / "out", "csv", kind, schema=labels)


def test_a_single_event_without_a_value_is_not_lost_in_csv(tmp_path: Path) -> None:
    plan = Schema(slots=(Slot("item"),), histories=(History("seen", ("item",)),), label="click")
    for events in ([None], [""]):
        lists = pa.array([["a"], events], pa.list_(pa.string()))
        pq.write_table(pa.table({"click": [1, 0], "item": ["a", "b"], "seen_item": lists}), tmp_path / "a.parquet")
        with pytest.raises(DataError, match="seen_item has a history of one event without a value"):
            convert(tmp_path / "a.parquet", tmp_path / "a.csv", "parquet", "csv", schema=plan)
        assert not (tmp_path / "a.csv").exists()
    numbers = pa.array([[1, None], [2]], pa.list_(pa.int64()))
    pq.write_table(pa.table({"click": [1, 0], "item": ["a", "b"], "seen_item": numbers}), tmp_path / "a.parquet")
    convert(tmp_path / "a.parquet", tmp_path / "a.csv", "parquet", "csv", schema=plan)
    assert (tmp_path / "a.csv").read_text() == "click,item,seen_item\n1,a,1|\n0,b,2\n"
    check_equal(read(tmp_path / "a.csv", "csv", plan), read(tmp_path / "a.parquet", "parquet", plan))
