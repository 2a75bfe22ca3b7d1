"""Several labels: losses, metrics per label and space, monitors, files of scores, exact resume."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet
from sklearn.metrics import log_loss as reference_loss
from sklearn.metrics import roc_auc_score

import clickfleet
from clickfleet.config.sections import LossSettings
from clickfleet.data.schema import History, Label, Schema, Slot, write_schema
from clickfleet.errors import ConfigError
from clickfleet.training.losses import Loss, predictions
from clickfleet.training.metrics import Metrics, check_monitor, value_of
from clickfleet.training.score_files import write_scores

CLICK, BUY, BACK = Label("click"), Label("buy", given="click", weight=0.5), Label("back", given="buy", weight=2.0)
DWELL, VISITS = Label("dwell", loss="mse", weight=0.02), Label("visits", loss="poisson", given="click")
SCHEMA = Schema(
    slots=(Slot("user"), Slot("item")),
    labels=(CLICK, BUY, DWELL),
    histories=(History("past", ("item",), ("past",), max=4),),
    group="user",
)


def some_labels(rows: int, tasks: tuple[Label, ...], seed: int = 0) -> np.ndarray:
    """Random labels; a fifth of them missing."""
    rng = np.random.default_rng(seed)
    columns = [rng.integers(0, 2, rows) if task.loss == "log" else rng.gamma(1.0, size=rows) for task in tasks]
    labels = np.stack(columns, axis=1).astype(np.float32)
    labels[rng.random(labels.shape) < 0.2] = np.nan
    labels[np.isnan(labels).all(1), 0] = 1
    return labels


def table(rows: int, seed: int) -> pa.Table:
    """Users click what they have in their past; they buy even items."""
    rng = np.random.default_rng(seed)
    item = rng.integers(0, 8, rows)
    past = [rng.integers(0, 8, n).tolist() for n in rng.integers(0, 6, rows)]
    chance = np.array([0.9 if i in some[-4:] else 0.1 for i, some in zip(item, past, strict=True)])
    click = (rng.random(rows) < chance).astype(int)
    buy = [int(rng.random() < (0.9 if i % 2 else 0.1)) if c else None for i, c in zip(item, click, strict=True)]
    dwell = [float(i) if rng.random() < 0.8 else None for i in item]
    return pa.table(
        {"click": click, "buy": buy, "dwell": dwell, "user": rng.integers(0, 20, rows), "item": item, "past": past}
    )


@pytest.mark.parametrize(("entire", "conditional"), [(False, 0.0), (False, 0.7), (True, 0.0), (True, 0.7)])
@pytest.mark.parametrize("weighted", [False, True])
def test_the_loss_is_the_sum_over_labels_that_are_known(entire: bool, conditional: float, weighted: bool) -> None:
    tasks = (CLICK, BUY, BACK, DWELL, VISITS)
    labels = some_labels(200, tasks)
    torch.manual_seed(0)
    logits = torch.randn(200, 5, dtype=torch.float64)
    weights = torch.rand(200, dtype=torch.float64) if weighted else None
    found = Loss(LossSettings(), tasks=tasks, entire_space=entire, conditional=conditional).total(
        logits, torch.from_numpy(labels).double(), weights
    )
    expected = 0.0
    for row, (z, y) in enumerate(zip(logits.numpy(), labels, strict=True)):
        weight = 1.0 if weights is None else float(weights[row])
        p = 1 / (1 + np.exp(-z))
        click, buy, back = p[0], p[0] * p[1], p[0] * p[1] * p[2]
        if not np.isnan(y[0]):
            expected += weight * cross(y[0], click)
        if entire:
            known_buy = 0.0 if y[0] == 0 else y[1] if y[0] == 1 else np.nan
            known_back = 0.0 if known_buy == 0 else y[2] if known_buy == 1 else np.nan
            expected += 0.0 if np.isnan(known_buy) else weight * 0.5 * cross(known_buy, buy)
            expected += 0.0 if np.isnan(known_back) else weight * 2.0 * cross(known_back, back)
        after = weight * conditional if entire else weight
        expected += after * 0.5 * cross(y[1], p[1]) if y[0] == 1 and not np.isnan(y[1]) else 0.0
        expected += after * 2.0 * cross(y[2], p[2]) if y[1] == 1 and not np.isnan(y[2]) else 0.0
        expected += 0.0 if np.isnan(y[3]) else weight * 0.02 * (z[3] - y[3]) ** 2
        expected += weight * (np.exp(z[4]) - y[4] * z[4]) if y[0] == 1 and not np.isnan(y[4]) else 0.0
    assert float(found) == pytest.approx(expected, rel=1e-6)


def cross(y: float, p: float) -> float:
    return float(-y * np.log(p) - (1 - y) * np.log(1 - p))


def test_a_certain_product_has_finite_gradients() -> None:
    logits = torch.tensor([[40.0, 40.0], [-90.0, -90.0]], requires_grad=True)
    labels = torch.tensor([[1.0, 0.0], [1.0, 1.0]])
    Loss(LossSettings(), tasks=(CLICK, BUY), entire_space=True).total(logits, labels).backward()
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()


def test_a_damped_shared_error_leaves_the_optimum_of_each_label() -> None:
    """Where the mean of each label is predicted, nothing is left to correct, whatever the share."""
    labels = torch.from_numpy(some_labels(400, (CLICK, BUY)))
    clicked = labels[:, 0] == 1
    rates = [labels[:, 0].nanmean(), labels[clicked, 1].nanmean()]
    for share in (1.0, 0.2):
        bias = torch.logit(torch.stack(rates)).requires_grad_()
        Loss(LossSettings(shared_error=share), tasks=(CLICK, BUY)).total(bias.expand(400, 2) * 1, labels).backward()
        assert bias.grad is not None
        assert bias.grad.abs().max() < 1e-3


def test_predictions_follow_the_loss_of_each_label() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0]])
    found = predictions(logits, (CLICK, DWELL, VISITS))
    assert found[0].tolist() == pytest.approx([0.5, 2.0, np.e])


@settings(max_examples=20)
@given(st.integers(0, 10**6), st.booleans(), st.integers(1, 3))
def test_metrics_of_every_space_are_those_of_scikit_learn(seed: int, weighted: bool, parts: int) -> None:
    tasks = (CLICK, BUY, BACK, DWELL)
    labels = some_labels(400, tasks, seed)
    rng = np.random.default_rng(seed)
    scores = np.floor(rng.random(labels.shape) * 4096).astype(np.float32) / 4096  # each in a bucket of its own
    weights = rng.uniform(0.5, 2, 400).astype(np.float32) if weighted else None
    metrics, others = Metrics(tasks=tasks), []
    for rows in np.array_split(np.arange(400), parts):  # as workers do
        part = Metrics(tasks=tasks)
        part.update(scores[rows], labels[rows], None if weights is None else weights[rows])
        restored = Metrics(tasks=tasks)
        restored.restore(part.state())
        others.append(restored)
    for part in others:
        metrics.merge(part)
    found = metrics.results()["tasks"]
    spaces = {
        ("click", ""): (labels[:, 0], scores[:, 0]),
        ("buy", "_given"): (np.where(labels[:, 0] == 1, labels[:, 1], np.nan), scores[:, 1]),
        ("back", "_given"): (np.where(labels[:, 1] == 1, labels[:, 2], np.nan), scores[:, 2]),
    }
    buy = np.where(labels[:, 0] == 1, labels[:, 1], np.where(np.isnan(labels[:, 0]), np.nan, 0))
    back = np.where(buy == 1, labels[:, 2], np.where(np.isnan(buy), np.nan, 0))
    spaces["buy", ""] = (buy, scores[:, 0] * scores[:, 1])
    spaces["back", ""] = (back, scores[:, 0] * scores[:, 1] * scores[:, 2])
    for (name, suffix), (label, score) in spaces.items():
        known = ~np.isnan(label)
        of = None if weights is None else weights[known]
        assert found[name][f"rows{suffix}"] == known.sum()
        exact = np.floor(score[known] * 4096)
        auc = roc_auc_score(label[known], exact, sample_weight=of)
        assert found[name][f"auc{suffix}"] == pytest.approx(auc, abs=1e-6)
        clipped = np.clip(score[known].astype(np.float64), 1e-7, 1 - 1e-7)
        loss = reference_loss(label[known], clipped, sample_weight=of, labels=[0, 1])
        assert found[name][f"logloss{suffix}"] == pytest.approx(loss, rel=5e-3)
    error = (scores[:, 3] - labels[:, 3])[~np.isnan(labels[:, 3])]
    of = None if weights is None else weights[~np.isnan(labels[:, 3])]
    assert found["dwell"]["rmse"] == pytest.approx(np.sqrt(np.average(error**2, weights=of)), rel=1e-5)
    assert metrics.results()["auc"] == found["click"]["auc"]


def test_monitors_name_a_label() -> None:
    check_monitor("buy.auc_given", SCHEMA)
    check_monitor("dwell.rmse", SCHEMA)
    for name, message in {
        "bye.auc": "unknown label 'bye'.*buy",
        "click.auc_given": "has no given",
        "dwell.auc": "is a number",
        "buy.acu": "unknown metric",
    }.items():
        with pytest.raises(ConfigError, match=message):
            check_monitor(name, SCHEMA)
    with pytest.raises(ConfigError, match="needs a group column"):
        check_monitor("buy.gauc", replace(SCHEMA, group=None))


def config(folder: Path, **more: Any) -> dict[str, Any]:
    raw: dict[str, Any] = {
        "data": {"batch_size": 50},
        "model": {"name": "din", "hidden": [16], "attention": 8},
        "table": {"dim": 4, "rule": {"name": "adagrad", "lr": 0.3}},
        "dense": {"lr": 0.01},
        "train": {"epochs": 4, "threads": 1, "deterministic": True},
        "run": {"dir": str(folder), "report": True},
    }
    for section, part in more.items():
        raw[section] = {**raw.get(section, {}), **part}
    return raw


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rows")
    parquet.write_table(table(2000, 1), folder / "train.parquet")
    parquet.write_table(table(1000, 2), folder / "test.parquet")
    return folder


def test_all_labels_are_learned_and_early_stopping_follows_one(files: Path, tmp_path: Path) -> None:
    data = {
        "train": str(files / "train.parquet"),
        "valid": str(files / "test.parquet"),
        "test": str(files / "test.parquet"),
    }
    raw = config(tmp_path / "run", data=data, train={"monitor": "buy.auc_given", "patience": 2})
    done = clickfleet.train(raw, schema=SCHEMA, quiet=True)
    assert done.test is not None
    assert done.test["auc"] > 0.65
    assert value_of(done.test, "buy.auc_given") > 0.7  # 0.9 is the best possible
    assert value_of(done.test, "dwell.rmse") < 1.0  # without learning: 2.3
    assert done.to_dict()["tasks"] == done.test["tasks"]
    best = max(record["buy.auc_given"] for record in done.history if record["kind"] == "valid")
    assert value_of(done.evaluate(str(files / "test.parquet")), "buy.auc_given") == best
    report = (tmp_path / "run/report.html").read_text()
    assert "Metrics of the label buy" in report
    assert "AUC of buy" in report


def test_scores_of_all_labels_go_to_files(files: Path, tmp_path: Path) -> None:
    done = clickfleet.train(config(tmp_path / "run"), data=table(500, 3), schema=SCHEMA, quiet=True)
    rows = str(files / "test.parquet")
    scores = done.predict(rows)
    assert scores.shape == (1000, 3)
    write_scores(done, rows, tmp_path / "s.parquet", keep=["click", "item"])
    kept = parquet.read_table(tmp_path / "s.parquet")
    assert kept.column_names == ["click", "item", "score_click", "score_buy", "score_dwell"]
    np.testing.assert_array_equal(kept["score_buy"].to_numpy(), scores[:, 1])
    write_scores(done, rows, tmp_path / "s.npy")
    np.testing.assert_array_equal(np.load(tmp_path / "s.npy"), scores)
    write_scores(done, rows, tmp_path / "s.tsv")
    lines = (tmp_path / "s.tsv").read_text().splitlines()
    assert lines[0] == "score_click\tscore_buy\tscore_dwell"
    np.testing.assert_allclose(np.array([line.split("\t") for line in lines[1:]], np.float32), scores)


def test_killed_runs_end_as_the_uninterrupted_one(files: Path, tmp_path: Path) -> None:
    """The metrics of all labels, rows of histories and dense weights go on where the last checkpoint left them."""
    write_schema(SCHEMA, tmp_path / "schema.yaml")
    data = {"train": str(files / "train.parquet"), "test": str(files / "test.parquet")}
    data |= {"schema": str(tmp_path / "schema.yaml"), "format": "parquet"}
    ends = []
    for name, kills in (("whole", 0), ("cut", 3)):
        folder = tmp_path / name
        folder.mkdir()
        raw = config(folder / "run", data=data, run={"checkpoint_every_steps": 5})
        (folder / "config.yaml").write_text(json.dumps(raw))
        helper = [sys.executable, str(Path(__file__).parents[1] / "support/killed.py"), str(folder / "config.yaml")]
        out = subprocess.run([*helper, str(kills), "5"], capture_output=True, text=True, timeout=290)
        assert out.returncode == 0, out.stdout + out.stderr
        assert int(out.stdout.split()[-1]) >= kills - 1
        ends.append(clickfleet.load(folder / "run"))
    whole, cut = ends
    assert whole.path is not None
    assert cut.path is not None
    assert whole.path.name == cut.path.name
    for file in sorted(whole.path.iterdir()):
        if file.name not in ("config.yaml", "manifest.json"):
            assert (cut.path / file.name).read_bytes() == file.read_bytes(), file.name
    assert whole.evaluate(data["test"]) == cut.evaluate(data["test"])


def test_models_are_refused_by_name_where_data_lacks_what_they_need(tmp_path: Path) -> None:
    plain = replace(SCHEMA, histories=())
    with pytest.raises(ConfigError, match="DIN needs a history, but the schema has none"):
        clickfleet.train(config(tmp_path / "r"), data=table(100, 1), schema=plain, quiet=True)
    raw = config(tmp_path / "r") | {"model": {"name": "deepfm", "paddlerec": True}}
    with pytest.raises(ConfigError, match=r"model\.paddlerec reproduces a network with one label"):
        clickfleet.train(raw, data=table(100, 1), schema=plain, quiet=True)


def test_a_model_of_one_logit_is_told_what_to_return(tmp_path: Path) -> None:
    class OneLogit(clickfleet.Model):
        def forward(self, x: Any) -> Any:
            return x.first.sum(1)

    raw = config(tmp_path / "r")
    del raw["model"]
    with pytest.raises(ConfigError, match=r"expected \[rows, 3\], one logit per label"):
        clickfleet.train(raw, data=table(100, 1), schema=SCHEMA, quiet=True, model=OneLogit)


def test_a_history_the_model_cannot_read_is_pooled(tmp_path: Path) -> None:
    """A pooled history is one more slot: its rows are those of the slot it names."""
    raw = config(tmp_path / "r") | {"model": {"name": "lr"}}
    done = clickfleet.train(raw, data=table(200, 1), schema=SCHEMA, quiet=True)
    assert done.learner.shape.slot_names == ("user", "item", "past.item")
    keys = {key for part in done.learner.table.snapshot() for key in part["key"].tolist()}
    assert len(keys) == 20 + 8  # users and items


def test_one_label_is_one_label_however_it_is_written() -> None:
    one = Schema(slots=(Slot("item"),), label="click")
    assert one.to_dict()["label"] == "click"
    assert Schema.from_dict({**one.to_dict()}) == Schema(slots=(Slot("item"),), labels=(Label("click"),))
    assert one.hash == Schema(slots=(Slot("item"),), labels=(Label("click"),)).hash
