"""Scoring keeps the order of the rows, whatever order the model was trained in."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import clickfleet
from clickfleet.cli import build
from clickfleet.cli.frame import run as command
from clickfleet.cluster.worker import files_to_score
from clickfleet.data.logs.synth import SynthOptions, synth
from clickfleet.data.reader import Reader
from clickfleet.training import model
from clickfleet.training.metrics import Buckets
from clickfleet.training.model import SavedModel, load
from clickfleet.workbench import parity
from clickfleet.workbench.explain import explain

ORDERS: list[dict[str, Any]] = [{"shuffle": 500}, {"shuffle": "global"}, {"interleave": 2}]


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("log")
    synth(out, SynthOptions(rows=1200, test_rows=400, parts=2, seed=5))
    return out


@pytest.fixture(scope="module", params=ORDERS, ids=json.dumps)
def run(log: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    folder = tmp_path_factory.mktemp("run")
    settings = {
        "data": {"train": str(log / "train"), "batch_size": 100, "bad_lines": "quarantine", **request.param},
        "model": {"name": "lr"},
        "train": {"threads": 1, "deterministic": True},
        "run": {"dir": str(folder), "report": False},
    }
    clickfleet.train(settings, quiet=True)
    return folder


@pytest.fixture(scope="module")
def rows(log: Path) -> Any:
    """The test rows as one batch, in the order of the files."""
    (batch,) = list(Reader(str(log / "test"), batch_size=400))
    return batch


def one_by_one(model: SavedModel, rows: Any) -> Any:
    """Scores without a source."""
    return np.concatenate([scores for _, scores in model.scores([rows])])


def test_predict_writes_scores_in_the_order_of_the_rows(run: Path, log: Path, rows: Any, tmp_path: Path) -> None:
    wanted = one_by_one(model.load(run), rows)
    assert command(build(), ["predict", str(run), str(log / "test"), "--out", str(tmp_path / "s.npy")]) == 0
    np.testing.assert_allclose(np.load(tmp_path / "s.npy"), wanted, atol=1e-6)  # other batches: sums in another order
    measured = Buckets()
    measured.update(np.load(tmp_path / "s.npy"), rows.labels)
    assert measured.auc == model.load(run).evaluate(str(log / "test"))["auc"]


def test_data_in_memory_can_be_scored(run: Path, rows: Any) -> None:
    model = load(run)
    assert np.array_equal(model.predict(rows), one_by_one(model, rows))


def test_explain_and_parity_take_the_row_that_was_named(run: Path, log: Path, rows: Any) -> None:
    model = load(run)
    wanted = one_by_one(model, rows)
    files = sorted(str(path) for path in (log / "test").iterdir())
    for line in (1, 150):
        found = explain(model, files[0], line)
        assert found["score"] == pytest.approx(float(wanted[line - 1]), abs=1e-6)
        assert found["label"] == rows.labels[line - 1]
    batches = list(parity.read_batches(model.learner, files, 400))
    assert np.array_equal(np.concatenate([batch.keys for batch in batches]), rows.keys)


def test_a_worker_scores_in_order(run: Path, log: Path, rows: Any) -> None:
    model = load(run)
    batches = list(files_to_score(model.config, model.schema, [str(log / "test")], labels=False))
    assert np.array_equal(np.concatenate([batch.keys for batch in batches]), rows.keys)


def test_a_format_that_is_named_keeps_its_settings_and_another_does_not_stay(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("label;city\n1;Bern\n0;Oslo\n")
    (tmp_path / "a.slots").write_text("label:1 city:Bern\nlabel:0 city:Oslo\n")
    (tmp_path / "schema.yaml").write_text("label: label\nslots: [{name: city}]\n")
    data = {"train": str(tmp_path / "a.csv"), "format": {"name": "csv", "separator": ";"}}
    settings = {"data": {**data, "schema": str(tmp_path / "schema.yaml")}, "model": {"name": "lr"}}
    model = clickfleet.train({**settings, "run": {"dir": str(tmp_path / "run"), "report": False}}, quiet=True)
    wanted = model.predict(data["train"])
    assert np.array_equal(model.reading("csv").predict(data["train"]), wanted)
    assert np.array_equal(model.reading("slots").predict(str(tmp_path / "a.slots")), wanted)
    assert np.array_equal(model.predict(data["train"]), wanted)


def test_lines_without_a_score_are_told(
    run: Path, log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = sorted((log / "test").iterdir())[0].read_text()
    (tmp_path / "rows.tsv").write_text(first + "what\n")
    assert command(build(), ["predict", str(run), str(tmp_path / "rows.tsv"), "--out", str(tmp_path / "s.txt")]) == 0
    assert "warning: skipped 1 bad lines" in capsys.readouterr().out
    assert len((tmp_path / "s.txt").read_text().splitlines()) == len(first.splitlines())
    assert not (Path.cwd() / "quarantine.txt").exists()
