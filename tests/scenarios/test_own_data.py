"""A stranger's file, one command: trained without a schema, then evaluated, predicted, exported, served; one score per row everywhere."""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import clickfleet
from clickfleet import cli
from clickfleet.config.load import load as load_config
from clickfleet.config.plugins import Plugin
from clickfleet.data.schema import read_schema
from clickfleet.errors import ConfigError
from clickfleet.serve.client import Client
from served import running

SMALL = [
    "model.hidden=8,4",
    "table.dim=4",
    "data.batch_size=50",
    "train.threads=1",
    "train.deterministic=true",
    "run.report=false",
]


def rows(count: int, seed: int) -> list[dict[str, Any]]:
    draw = np.random.default_rng(seed)
    found = []
    for i in range(count):
        user, price = int(draw.integers(40)), float(np.round(draw.lognormal(2, 1), 2))
        click = draw.random() < (0.8 if user % 2 else 0.2)
        found.append(
            {
                "row": f"{seed}-{i}",
                "user_id": user,
                "city": ["Bern; old \"town\"", "Oslo", "São Paulo", ""][draw.integers(4)],
                "price": "" if i % 11 == 0 else price,
                "tags": "|".join(draw.choice(["a", "b", "c d", "é"], draw.integers(1, 4), replace=False)),
                "when": f"2026-01-{1 + i * 28 // count:02d} 10:{i % 60:02d}:00",
                "clicked": 1 if click else -1,
            }
        )  # fmt: skip
    return found


def write(path: Path, data: list[dict[str, Any]], leave_out: tuple[str, ...] = ()) -> Path:
    names = [name for name in data[0] if name not in leave_out]
    with gzip.open(path, "wt", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, names, delimiter=";", extrasaction="ignore", lineterminator="\r\n")
        writer.writeheader()
        writer.writerows(data)
    return path


def run(*argv: object) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main([str(word) for word in argv])
    assert not stop.value.code


def result(capsys: pytest.CaptureFixture[str], *argv: object) -> Any:
    capsys.readouterr()
    run(*argv, "--json")
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def features(row: dict[str, Any]) -> dict[str, Any]:
    """What a request says about a row."""
    plain = {"user_id": row["user_id"], "city": row["city"], "tags": row["tags"].split("|")}
    return plain if row["price"] == "" else {**plain, "price": row["price"]}


def test_one_file_one_command_one_score(tmp_path: Path, monkeypatch: Any, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    held_out = rows(60, 2)
    write(tmp_path / "clicks.csv.gz", rows(600, 1))
    test = write(tmp_path / "test.csv.gz", held_out)
    bare = write(
        tmp_path / "bare.csv.gz", held_out, ("clicked", "when", "row")
    )  # what a model does not use may be missing

    run("train", "clicks.csv.gz", "run.dir=run", "train.epochs=2", *SMALL)
    text = capsys.readouterr()
    assert "labels -1 and 1 are read as 0 and 1" in text.out + text.err
    saved = load_config(tmp_path / "run" / "config.yaml").data
    assert (saved.format, saved.schema) == (Plugin("csv", {"separator": ";"}), str(tmp_path / "run" / "schema.yaml"))
    schema = read_schema(tmp_path / "run" / "schema.yaml")
    assert (schema.label, schema.negative, schema.time, schema.group) == ("clicked", -1, "when", "user_id")
    assert [slot.name for slot in schema.read_columns] == ["user_id", "city", "tags"]
    assert [column.name for column in schema.dense] == ["price"]

    model = clickfleet.load(tmp_path / "run")
    scores = model.predict(str(test))
    assert len(scores) == 60
    assert np.array_equal(model.predict(str(bare)), scores)
    run("predict", "run", bare, "--out", "scores.txt")
    np.testing.assert_allclose(np.loadtxt("scores.txt"), scores, rtol=1e-6)
    measured = result(capsys, "evaluate", "run", test)
    labels = np.array([row["clicked"] == 1 for row in held_out])
    logloss = -np.mean(np.where(labels, np.log(scores), np.log1p(-scores)))
    assert (measured["rows"], measured["logloss"]) == (60, pytest.approx(logloss, rel=1e-4))
    assert measured["auc"] > 0.7

    frame = pd.read_csv(test, sep=";")
    frame["tags"] = frame["tags"].str.split("|")
    np.testing.assert_allclose(model.predict(frame), scores, atol=1e-6)

    run("export", "run", "artifact")
    with running(tmp_path / "artifact", tmp_path / "state") as served, Client(served.url) as client:
        answers = client.predict([features(row) for row in held_out])
        np.testing.assert_allclose(answers, scores, atol=1e-5)
        content = gzip.decompress(bare.read_bytes())
        np.testing.assert_allclose(client.upload(content, "csv").scores, scores, atol=1e-5)


def test_a_resumed_run_never_guesses_again(tmp_path: Path) -> None:
    """The data grows by rows that would change the guess; the schema of the run stays."""
    data = rows(300, 1)
    write(tmp_path / "clicks.csv.gz", data)
    settings = {
        "data": {"train": str(tmp_path / "clicks.csv.gz"), "batch_size": 50},
        "run": {"dir": str(tmp_path / "run")},
    }
    extra = ["model=lr", "run.report=false", "train.threads=1"]
    clickfleet.train(settings, "train.epochs=1", *extra, quiet=True)
    before = (tmp_path / "run" / "schema.yaml").read_text()
    write(tmp_path / "clicks.csv.gz", [{**row, "price": 7} for row in data])
    done = clickfleet.train(settings, "train.epochs=2", *extra, resume=True, quiet=True)
    assert done.rows == 600
    assert (tmp_path / "run" / "schema.yaml").read_text() == before


def test_what_the_user_says_wins(tmp_path: Path) -> None:
    write(tmp_path / "clicks.csv.gz", rows(200, 1))
    schema = {"label": "clicked", "negative": -1, "slots": ["user_id"]}
    (tmp_path / "schema.yaml").write_text(json.dumps(schema))
    base = {"train": str(tmp_path / "clicks.csv.gz"), "schema": str(tmp_path / "schema.yaml")}
    done = clickfleet.train(
        {"data": base, "run": {"dir": str(tmp_path / "a")}}, "model=lr", "run.report=false", quiet=True
    )
    assert [slot.name for slot in done.schema.slots] == ["user_id"]
    assert not (tmp_path / "a" / "schema.yaml").exists()
    with pytest.raises(ConfigError, match=r"data\.label is for a guessed schema"):
        clickfleet.train({"data": {**base, "label": "clicked"}}, quiet=True)
    with pytest.raises(ConfigError, match="there is no column 'click' for the label; did you mean clicked"):
        clickfleet.train({"data": {"train": base["train"], "label": "click"}}, quiet=True)


def test_frames_need_no_schema(tmp_path: Path) -> None:
    data = pd.DataFrame(rows(300, 1)).replace("", np.nan)
    data["price"] = data["price"].astype(float)
    done = clickfleet.train(None, "model=lr", "train.epochs=2", data=data, test=data, quiet=True)
    assert done.test is not None
    assert done.test["auc"] > 0.7
    assert done.schema.negative == -1
    kept = clickfleet.train(None, "model=lr", f"run.dir={tmp_path / 'run'}", "run.report=false", data=data, quiet=True)
    assert read_schema(tmp_path / "run" / "schema.yaml") == kept.schema == done.schema
    data.to_parquet(tmp_path / "rows.parquet")
    again = clickfleet.load(tmp_path / "run")  # trained in memory: the format of files is recognised
    np.testing.assert_allclose(again.predict(str(tmp_path / "rows.parquet")), kept.predict(data), atol=1e-6)


@pytest.mark.parametrize("command", ["compare", "tune"])
def test_many_runs_share_one_guess(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "clicks.csv.gz", rows(200, 1))
    write(tmp_path / "test.csv.gz", rows(60, 2))
    out = tmp_path / "out"
    given = [f"data.valid={tmp_path / 'test.csv.gz'}", "model=lr", "data.batch_size=50", "--jobs", 1, "--out", out]
    space = ['tune.space={"dense.lr": {"low": 0.001, "high": 0.1}}', "--trials", 1] if command == "tune" else []
    run(command, tmp_path / "clicks.csv.gz", *given, *space)
    assert capsys.readouterr().out.count("schema guessed from") == 1
    assert read_schema(out / "schema.yaml").label == "clicked"
    saved = [
        load_config(path).data.schema for path in out.rglob("config.yaml") if (path.parent / "checkpoints").exists()
    ]
    assert set(saved) == {str(out / "schema.yaml")}


def test_the_guess_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "clicks.csv.gz", rows(200, 1))
    found = result(capsys, "schema", tmp_path / "clicks.csv.gz", "--out", tmp_path / "schema.yaml")
    assert found["format"] == {"name": "csv", "separator": ";"}
    roles = {column["name"]: column["role"] for column in found["columns"]}
    assert roles == {
        "row": "ignored", "user_id": "user", "city": "slot", "price": "dense", "tags": "list", "when": "time", "clicked": "label",
    }  # fmt: skip
    assert read_schema(tmp_path / "schema.yaml").to_dict() == found["schema"]
    run("stats", tmp_path / "clicks.csv.gz")
    assert "200 rows, click rate" in capsys.readouterr().out
    run("prepare", tmp_path / "clicks.csv.gz", "--out", tmp_path / "parts")
    run(
        "train",
        tmp_path / "parts" / "train",
        f"data.schema={tmp_path / 'parts' / 'schema.yaml'}",
        "model=lr",
        f"run.dir={tmp_path / 'run'}",
    )
    run("convert", tmp_path / "clicks.csv.gz", "--to", "parquet", "--out", tmp_path / "clicks.parquet")
    again = result(capsys, "schema", tmp_path / "clicks.parquet")
    assert again["schema"]["label"] == "clicked"
