"""Splitting and fitting."""

import gzip
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from clickfleet.data.logs.convert import convert
from clickfleet.data.logs.prepare import PrepareOptions, prepare
from clickfleet.data.logs.source import LineRows, shuffled
from clickfleet.data.logs.synth import SynthOptions as Synth
from clickfleet.data.logs.synth import synth
from clickfleet.data.reader import Reader
from clickfleet.data.schema import read_schema
from clickfleet.errors import ConfigError, DataError


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("log")
    synth(folder, Synth(rows=12_345, test_rows=0, parts=3))
    return folder / "train"


def text(*folders: Path) -> bytes:
    files = [path for folder in folders for path in sorted(folder.iterdir(), key=lambda p: int(p.stem.split("-")[1]))]
    return b"".join(path.read_bytes() for path in files)


def test_the_first_nine_tenths_are_for_training(log: Path, tmp_path: Path) -> None:
    made = prepare(log, tmp_path / "p", PrepareOptions(part_rows=5000))
    assert (made["rows"], made["train_rows"], made["test_rows"]) == (12_345, 11_110, 1_235)
    assert made["parts"] == {"train": 3, "test": 1}
    assert text(tmp_path / "p/train", tmp_path / "p/test") == text(log)
    counts = [path.read_bytes().count(b"\n") for path in sorted((tmp_path / "p/train").iterdir())]
    assert counts == [5000, 5000, 1110]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["p"]


def test_transforms_are_fitted_to_the_training_part(log: Path, tmp_path: Path) -> None:
    prepare(log, tmp_path / "p")
    lines = [line.split(b"\t") for line in text(tmp_path / "p/train").splitlines()]
    for i, dense in enumerate(read_schema(tmp_path / "p/schema.yaml").dense, start=1):
        numbers = np.array([float(line[i]) for line in lines if line[i]])
        assert dense.transform.name == "minmax"
        assert dense.transform.a == numbers.min()
        high = np.quantile(numbers, 0.95, method="inverted_cdf")
        assert dense.transform.b == pytest.approx(high, rel=0.01)  # exact but for I5, which has too many values
    batch = next(iter(Reader(tmp_path / "p/train", read_schema(tmp_path / "p/schema.yaml"), batch_size=10_000)))
    assert batch.dense.max() > 1  # extremes are kept


@pytest.mark.parametrize("kind", ["standard", "log1p", "none"])
def test_other_transforms(log: Path, tmp_path: Path, kind: str) -> None:
    prepare(log, tmp_path / "p", PrepareOptions(transform=kind))  # type: ignore[arg-type]
    schema = read_schema(tmp_path / "p/schema.yaml")
    assert {dense.transform.name for dense in schema.dense} == {kind}
    if kind == "standard":
        batch = next(iter(Reader(tmp_path / "p/train", schema, batch_size=20_000)))
        present = batch.dense[:, 1]  # I2 is never missing
        assert abs(present.mean()) < 1e-3
        assert abs(present.std() - 1) < 1e-3


def test_shuffling_keeps_every_row(log: Path, tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        prepare(log, tmp_path / name, PrepareOptions(shuffle=True, seed=seed))
    a, b, c = (text(tmp_path / name / "train", tmp_path / name / "test") for name in "abc")
    assert a == b != c
    assert sorted(a.splitlines()) == sorted(text(log).splitlines())
    assert a != text(log)


def test_a_shuffle_larger_than_memory_deals_to_files(tmp_path: Path) -> None:
    blocks = [LineRows(b"".join(b"%d\n" % i for i in range(start, start + 100))) for start in range(0, 2000, 100)]
    got = list(shuffled(iter(blocks), 8000, 5, tmp_path / "x", bucket_bytes=1000))
    assert len(got) == 9
    numbers = [int(line) for rows in got for line in rows.content.splitlines()]
    assert sorted(numbers) == list(range(2000))
    places = np.argsort(numbers)
    assert abs(np.corrcoef(places, np.arange(2000))[0, 1]) < 0.1
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("kind", ["csv", "parquet", "arrow"])
@pytest.mark.parametrize("shuffle", [False, True])
def test_formats_of_columns(log: Path, tmp_path: Path, kind: str, shuffle: bool) -> None:
    convert(log, tmp_path / f"log.{kind}", "criteo", kind)
    made = prepare(
        tmp_path / f"log.{kind}", tmp_path / "p", PrepareOptions(format=kind, shuffle=shuffle, part_rows=4000)
    )
    assert (made["rows"], made["parts"]) == (12_345, {"train": 3, "test": 1})
    schema = read_schema(tmp_path / "p/schema.yaml")
    rows = sum(len(batch) for batch in Reader(tmp_path / "p/train", schema, kind))
    assert rows == made["train_rows"] == 11_110
    if not shuffle:
        convert(sorted((tmp_path / "p/train").iterdir()), tmp_path / "back", kind, "criteo")
        assert text(log).startswith((tmp_path / "back").read_bytes())
    if kind == "parquet":
        assert pq.ParquetFile(tmp_path / "p/test/part-0.parquet").metadata.num_rows == 1_235


def test_keyed_text_is_split_and_not_fitted(log: Path, tmp_path: Path) -> None:
    convert(log, tmp_path / "slots", "criteo", "slots", keys="py2")
    prepare(tmp_path / "slots", tmp_path / "p", PrepareOptions(format="slots"))
    assert {dense.transform.name for dense in read_schema(tmp_path / "p/schema.yaml").dense} == {"none"}
    assert text(tmp_path / "p/train", tmp_path / "p/test") == (tmp_path / "slots").read_bytes()


def test_packed_files_and_a_last_line_without_an_end(log: Path, tmp_path: Path) -> None:
    lines = text(log).splitlines()[:1000]
    with gzip.open(tmp_path / "log.gz", "wb") as file:
        file.write(b"\n".join(lines))
    made = prepare(tmp_path / "log.gz", tmp_path / "p")
    assert (made["train_rows"], made["test_rows"]) == (900, 100)
    assert text(tmp_path / "p/train", tmp_path / "p/test").splitlines() == lines


def test_bad_lines(log: Path, tmp_path: Path) -> None:
    lines = text(log).splitlines()[:1000]
    lines[500] = b"0\toops"
    (tmp_path / "log").write_bytes(b"\n".join(lines) + b"\n")
    with pytest.raises(DataError, match="log:501: expected 40"):
        prepare(tmp_path / "log", tmp_path / "p")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log"]  # nothing half done
    made = prepare(tmp_path / "log", tmp_path / "p", PrepareOptions(bad_lines="skip"))
    assert (made["rows"], made["bad_lines"]) == (999, 1)
    assert b"oops" not in text(tmp_path / "p/train")


def test_keys_and_refusals(log: Path, tmp_path: Path) -> None:
    prepare(log, tmp_path / "p", PrepareOptions(keys="py2"))
    assert str(read_schema(tmp_path / "p/schema.yaml").keys) == "py2 mod 1000001"
    with pytest.raises(DataError, match="already exists"):
        prepare(log, tmp_path / "p")
    for wrong in ({"test_share": 1.0}, {"part_rows": 0}, {"transform": "rank"}):
        with pytest.raises(ConfigError):
            PrepareOptions(**wrong)  # type: ignore[arg-type]


def test_rows_with_histories_and_labels_are_split(tmp_path: Path) -> None:
    synth(tmp_path / "log", Synth(rows=2000, test_rows=0, histories=True, labels=("click", "buy"), format="parquet"))
    schema = read_schema(tmp_path / "log/schema.yaml")
    convert(tmp_path / "log/train", tmp_path / "log.csv", "parquet", "csv", schema=schema)
    (whole,) = Reader(tmp_path / "log/train", schema, "parquet", batch_size=2000)
    for source, kind in ((tmp_path / "log/train", "parquet"), (tmp_path / "log.csv", "csv")):
        prepare(source, tmp_path / kind, PrepareOptions(kind, transform="none"), schema)
        fitted = read_schema(tmp_path / kind / "schema.yaml")
        assert (fitted.histories, fitted.labels) == (schema.histories, schema.labels)
        (train,) = Reader(tmp_path / kind / "train", fitted, kind, batch_size=2000)
        (test,) = Reader(tmp_path / kind / "test", fitted, kind, batch_size=2000)
        np.testing.assert_array_equal(np.concatenate([train.keys, test.keys]), whole.keys)
        np.testing.assert_array_equal(np.concatenate([train.labels, test.labels]), whole.labels)
    shuffled_log = PrepareOptions("csv", transform="none", shuffle=True)
    prepare(tmp_path / "log.csv", tmp_path / "shuffled", shuffled_log, schema)
    mixed = [
        next(iter(Reader(tmp_path / f"shuffled/{name}", schema, "csv", batch_size=2000))) for name in ("train", "test")
    ]
    np.testing.assert_array_equal(np.sort(np.concatenate([part.keys for part in mixed])), np.sort(whole.keys))
