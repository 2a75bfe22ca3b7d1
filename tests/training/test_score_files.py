"""Files of scores: headers, kept columns of every row in order, bad lines, compression, columns that may be missing."""

import csv
import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import feather

import clickfleet
from clickfleet.cli import build
from clickfleet.cli.frame import run
from clickfleet.data.schema import Dense, Schema, Slot
from clickfleet.training.score_files import write_scores
from clicks import click_frame

SCHEMA = Schema((Dense("price"),), (Slot("user"), Slot("item")), label="clicked", weight="weight", group="user")
ROWS = click_frame(500, 4).assign(
    note=[f'said "{i}", then left' if i % 3 else "grüße\t" for i in range(500)], weight=1.0, number=np.arange(500)
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("models") / "model")


def train(folder: Path, **more: Any) -> Path:
    rows = click_frame(400).assign(weight=1.0)
    small: dict[str, Any] = {"model": "lr", "batch_size": 64, "epochs": 2, "deterministic": True, "quiet": True}
    return clickfleet.fit(rows, schema=SCHEMA, **small, **more).save(folder)


def predict(*arguments: object) -> int:
    return run(build(), ["predict", *map(str, arguments)])


def write_csv(path: Path, rows: pd.DataFrame, **more: Any) -> Path:
    rows.to_csv(path, index=False, **more)
    return path


def expected(model: Path) -> Any:
    return clickfleet.load(model).predict(ROWS)


@pytest.mark.parametrize("out", ["scores.csv", "scores.csv.gz", "scores.tsv"])
def test_csv_has_a_header_and_the_kept_columns(out: str, model: Path, tmp_path: Path) -> None:
    rows = write_csv(tmp_path / "rows.csv", ROWS)
    assert predict(model, rows, "--out", tmp_path / out, "--keep", "number,note", "--batch-size", 64) == 0
    content = (tmp_path / out).read_bytes()
    text = (gzip.decompress(content) if out.endswith(".gz") else content).decode()
    header, *lines = csv.reader(text.splitlines(), delimiter="\t" if "tsv" in out else ",")
    assert header == ["number", "note", "score"]
    assert [line[0] for line in lines] == [str(i) for i in range(500)]
    assert [line[1] for line in lines] == ROWS["note"].tolist()
    assert np.array_equal(np.array([line[2] for line in lines], np.float32), expected(model))


def test_scores_alone(model: Path, tmp_path: Path) -> None:
    rows = write_csv(tmp_path / "rows.csv", ROWS)
    for name in ("s.csv", "s.txt", "s.txt.gz", "s.parquet", "s.npy", "bare"):
        assert predict(model, rows, "--out", tmp_path / name) == 0
    plain = (tmp_path / "s.txt").read_text()
    assert np.array_equal(np.array(plain.split(), np.float32), expected(model))
    assert (tmp_path / "s.csv").read_text() == "score\n" + plain
    assert gzip.decompress((tmp_path / "s.txt.gz").read_bytes()).decode() == (tmp_path / "bare").read_text() == plain
    assert np.array_equal(pq.read_table(tmp_path / "s.parquet")["score"].to_numpy(), expected(model))
    assert np.array_equal(np.load(tmp_path / "s.npy"), expected(model))


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_parquet_keeps_types(kind: str, model: Path, tmp_path: Path) -> None:
    table = pa.Table.from_pandas(ROWS, preserve_index=False).append_column("tags", pa.array([["a", "b"], None] * 250))
    if kind == "parquet":
        pq.write_table(table, tmp_path / "rows.parquet", row_group_size=70)
    else:
        feather.write_feather(table, tmp_path / "rows.arrow", compression="uncompressed")
    data = ["--format", kind, "--keep", "tags,number,price"]
    assert predict(model, tmp_path / f"rows.{kind}", "--out", tmp_path / "scores.parquet", *data) == 0
    scores = pq.read_table(tmp_path / "scores.parquet")
    assert scores.column_names == ["tags", "number", "price", "score"]
    assert scores.select(["tags", "number", "price"]).equals(table.select(["tags", "number", "price"]))
    assert np.array_equal(scores["score"].to_numpy(), expected(model))
    assert predict(model, tmp_path / f"rows.{kind}", "--out", tmp_path / "scores.csv", *data) == 0
    with (tmp_path / "scores.csv").open() as file:
        lines = list(csv.reader(file))
    assert lines[1][:2] == ['["a", "b"]', "0"]
    assert lines[2][:2] == ["", "1"]
    assert lines[1][2] == "", "a missing price"


def test_jsonl_is_kept_as_text(model: Path, tmp_path: Path) -> None:
    lines = ROWS.assign(tags=[["a", 1]] * 500).to_json(orient="records", lines=True).splitlines()
    lines[3] = lines[3].replace('"number":3', '"n":3')
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    keep = ["--format", "jsonl", "--keep", "number,tags,note"]
    assert predict(model, tmp_path / "rows.jsonl", "--out", tmp_path / "scores.parquet", *keep) == 0
    scores = pq.read_table(tmp_path / "scores.parquet").to_pydict()
    assert scores["number"] == ["0", "1", "2", None, *map(str, range(4, 500))]
    assert set(scores["tags"]) == {'["a", 1]'}
    assert scores["note"] == ROWS["note"].tolist()
    np.testing.assert_allclose(scores["score"], expected(model), atol=1e-6)


def test_a_bad_line_does_not_shift_the_columns(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = write_csv(tmp_path / "rows.csv", ROWS).read_text().splitlines()
    bad = {3: "only,two", 100: "", 250: text[250].replace(text[250].split(",")[2], "dear", 1), 499: 'a,"b'}
    spoiled = [bad.get(i, line) for i, line in enumerate(text)]
    (tmp_path / "rows.csv").write_text("\n".join(spoiled))
    rows, out = tmp_path / "rows.csv", tmp_path / "scores.csv"
    keep = ["--keep", "number", "--batch-size", 50]
    assert predict(model, rows, "--out", out, *keep) == 1
    assert not out.exists()
    lenient = train(tmp_path / "lenient", bad_lines="skip")
    assert predict(lenient, rows, rows, "--out", out, *keep) == 0
    assert "skipped 8 bad lines" in capsys.readouterr().out
    written = pd.read_csv(out, dtype={"score": np.float32})
    good = [i - 1 for i in range(1, 501) if i not in bad]
    assert written["number"].tolist() == good * 2
    np.testing.assert_allclose(written["score"], np.tile(expected(model)[good], 2), atol=1e-6)


def test_columns_that_are_no_inputs_may_be_missing(model: Path, tmp_path: Path) -> None:
    few = ROWS[["number", "item", "user", "price"]]
    rows = write_csv(tmp_path / "rows.csv", few)
    pl.from_pandas(few).write_parquet(tmp_path / "rows.parquet")
    for data in ([rows], [tmp_path / "rows.parquet", "--format", "parquet"]):
        assert predict(model, *data, "--out", tmp_path / "scores.npy") == 0
        assert np.array_equal(np.load(tmp_path / "scores.npy"), expected(model))
    for frame in (few, pl.from_pandas(few), pa.Table.from_pandas(few)):
        assert np.array_equal(clickfleet.load(model).predict(frame), expected(model))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--out", "s.csv", "--keep", "numbr"], "no column 'numbr' to keep; did you mean number?"),
        (["--out", "s.txt", "--keep", "number"], "cannot hold columns"),
        (["--out", "s.npy", "--keep", "number"], "cannot hold columns"),
        (["--out", "s.parquet.gz"], "not compressed again"),
        (["--out", "s.csv", "--keep", "number,number"], "named twice"),
        (["--out", "s.csv", "--keep", "score"], "the column 'score'"),
    ],
)
def test_what_cannot_be_written_is_refused(
    arguments: list[str],
    message: str,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert predict(model, write_csv(tmp_path / "rows.csv", ROWS), *arguments) == 1
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["rows.csv"]


def test_formats_without_names_are_refused(tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rows.txt").write_text("1 1:2:3\n")
    assert (
        predict(model, tmp_path / "rows.txt", "--format", "libffm", "--out", tmp_path / "s.csv", "--keep", "user") == 1
    )
    assert "libffm files have no names" in capsys.readouterr().err


def test_no_rows_and_odd_files(model: Path, tmp_path: Path) -> None:
    write_csv(tmp_path / "none.csv", ROWS[:0])
    for name in ("s.csv", "s.parquet"):
        out = ["--out", tmp_path / name, "--keep", "user"]
        assert predict(model, tmp_path / "none.csv", "--format", "csv", *out) == 0
    assert (tmp_path / "s.csv").read_text() == "user,score\n"
    assert pq.read_table(tmp_path / "s.parquet").column_names == ["user", "score"]
    odd = write_csv(tmp_path / "odd.csv.gz", ROWS[:3], lineterminator="\r\n", encoding="utf-8-sig")
    latin = write_csv(tmp_path / "latin.csv", ROWS[:3].assign(note="é"), encoding="latin-1")
    assert predict(model, odd, latin, "--out", tmp_path / "s.csv", "--keep", "number,note") == 0
    with (tmp_path / "s.csv").open() as file:
        lines = list(csv.reader(file))
    assert [line[0] for line in lines] == ["number", "0", "1", "2", "0", "1", "2"]
    assert lines[1][1] == ROWS["note"][0]
    assert lines[4][1] == "\\xe9"


def test_columns_of_frames_are_not_kept(model: Path, tmp_path: Path) -> None:
    with pytest.raises(clickfleet.ClickfleetError, match="of files only"):
        write_scores(clickfleet.load(model), ROWS, tmp_path / "s.csv", keep=["user"])
