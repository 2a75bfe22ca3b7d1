"""The user's own losses, metrics and model classes: used, named in what is saved, and trusted only if the user says so."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch import Tensor

import clickfleet
from clickfleet.cli import build
from clickfleet.cli.frame import run
from clickfleet.errors import ConfigError, TrustError
from clicks import click_frame

FRAME = click_frame(400)
SMALL: dict[str, Any] = {
    "epochs": 1,
    "batch_size": 50,
    "dim": 4,
    "train__threads": 1,
    "deterministic": True,
    "quiet": True,
}
LR = {**SMALL, "model": "lr"}


class Linear(clickfleet.Model):
    """A first-order model."""

    def __init__(self, config: Any, shape: clickfleet.Shape) -> None:
        super().__init__(config, shape)
        self.dense = torch.nn.Linear(shape.dense, 1)

    def forward(self, x: clickfleet.Inputs) -> Tensor:
        return x.first.sum(1) + self.dense(x.dense)[:, 0]


def each(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    return torch.nn.functional.binary_cross_entropy_with_logits(logits, labels, reduction="none")


def total(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    return (each(logits, labels, weights) * weights).sum()


def positives(labels: Any, scores: Any, weights: Any) -> float:
    return float(scores[labels == 1].mean())


@pytest.mark.parametrize("loss", [each, total, f"{__file__}:each"])
def test_a_loss_function_replaces_the_log_loss(loss: Any) -> None:
    from clickfleet.data.schema import Dense, Schema, Slot

    weighted = FRAME.assign(weight=np.arange(400) % 3 + 0.5)
    schema = Schema((Dense("price"),), (Slot("user"), Slot("item")), label="clicked", weight="weight")
    usual = clickfleet.fit(weighted, schema=schema, **LR)
    own = clickfleet.fit(weighted, schema=schema, loss=loss, **LR)
    np.testing.assert_allclose(own.predict(FRAME), usual.predict(FRAME), atol=1e-6)
    other = clickfleet.fit(weighted, schema=schema, loss=lambda z, y, w: 3 * each(z, y, w), **LR)
    assert not np.allclose(other.predict(FRAME), usual.predict(FRAME), atol=1e-4)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda logits, labels, weights: 1.0, "returned float"),
        (lambda logits, labels, weights: logits[:3], r"returned \(3,\)"),
        (3, "is not a function"),
        ("focal", "does not name a loss function"),
    ],
)
def test_a_wrong_loss_is_refused(loss: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        clickfleet.fit(FRAME, "clicked", loss=loss, **LR)


def test_metric_functions_are_part_of_evaluations(tmp_path: Path) -> None:
    seen: list[float] = []

    class Diary:
        def on_evaluation(self, results: dict[str, Any]) -> None:
            seen.append(results["mine"])

    model = clickfleet.fit(
        FRAME, "clicked", test=FRAME, metrics={"mine": positives}, callbacks=[Diary()], run__dir=tmp_path / "run", **LR
    )
    labels = FRAME["clicked"].to_numpy()
    assert model.test is not None
    assert seen == [model.test["mine"]] == [pytest.approx(model.predict(FRAME)[labels == 1].mean())]
    assert model.history[-1]["mine"] == model.test["mine"]
    with pytest.raises(TrustError, match="test_own_code"):
        clickfleet.load(tmp_path / "run").evaluate(FRAME)
    assert clickfleet.load(tmp_path / "run", trust=True).evaluate(FRAME) == model.test
    with pytest.raises(ConfigError, match="auc is a built-in name"):
        clickfleet.fit(FRAME, "clicked", metrics={"auc": positives}, **LR)


def test_functions_that_cannot_be_imported_are_named_and_asked_for(tmp_path: Path) -> None:
    def local(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
        return each(logits, labels, weights)

    keywords = {**LR, "label": "clicked", "run__dir": tmp_path / "run"}
    model = clickfleet.train(FRAME, loss=local, metrics={"mine": lambda y, s, w: 1.0}, **keywords)
    saved = yaml.safe_load((tmp_path / "run/config.yaml").read_text())["train"]
    assert saved["loss"]["function"]["name"].startswith("python:")
    assert saved["metrics"]["functions"]["mine"]["name"].startswith("python:")
    loaded = clickfleet.load(tmp_path / "run")
    assert np.array_equal(loaded.predict(FRAME), model.predict(FRAME))
    assert "mine" not in loaded.evaluate(FRAME)
    with pytest.raises(ConfigError, match=r"passed in Python(.|\n)*pass it again"):
        clickfleet.train(tmp_path / "run/config.yaml", data=FRAME, schema=model.schema, resume=True, quiet=True)
    more = clickfleet.train(FRAME, loss=local, resume=True, **{**keywords, "epochs": 2})
    assert more.rows == 800


def test_a_file_gives_the_command_line_a_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "focal.py").write_text(
        "from torch import sigmoid\nfrom torch.nn.functional import binary_cross_entropy_with_logits as log_loss\n\n"
        "def focal(logits, labels, weights, gamma=0.0):\n"
        "    p = sigmoid(logits)\n"
        "    right = p * labels + (1 - p) * (1 - labels)\n"
        "    return (1 - right) ** gamma * log_loss(logits, labels, reduction='none')\n"
    )
    FRAME.dropna().to_csv(tmp_path / "rows.csv", index=False)
    clickfleet.data.schema.write_schema(clickfleet.fit(FRAME, "clicked", **LR).schema, tmp_path / "schema.yaml")
    scores = []
    for name, more in (
        ("plain", []),
        ("same", ["train.loss.function=focal.py"]),
        ("focal", ["train.loss.function={name: focal.py, gamma: 2.0}"]),
    ):
        (tmp_path / "config.yaml").write_text("data: {format: csv, train: rows.csv, schema: schema.yaml}\nmodel: lr\n")
        arguments = [str(tmp_path / "config.yaml"), f"run.dir={tmp_path / name}", "train.deterministic=true", *more]
        assert run(build(), ["train", *arguments]) == 0, capsys.readouterr().err
        scores.append(clickfleet.load(tmp_path / name).predict(FRAME))
    np.testing.assert_allclose(scores[0], scores[1], atol=1e-6)
    assert not np.allclose(scores[0], scores[2], atol=1e-4)


def test_a_model_class_is_trained_and_loaded_by_its_file(tmp_path: Path) -> None:
    model = clickfleet.fit(FRAME, "clicked", model=Linear, run__dir=tmp_path / "run", **SMALL)
    assert isinstance(model.learner.model, Linear)
    assert model.config.model.name == f"{__file__}:Linear"
    with pytest.raises(TrustError, match="test_own_code"):
        clickfleet.load(tmp_path / "run")
    for loaded in (
        clickfleet.load(tmp_path / "run", trust=True),
        clickfleet.load(tmp_path / "run", model_class=Linear),
    ):
        assert np.array_equal(loaded.predict(FRAME), model.predict(FRAME))
    with pytest.raises(ConfigError, match="derive it from clickfleet"):
        clickfleet.fit(FRAME, "clicked", model=dict, **SMALL)


def test_a_class_without_a_file_must_be_passed_to_load(tmp_path: Path) -> None:
    class Local(Linear):
        pass

    model = clickfleet.fit(FRAME, "clicked", model=Local, **SMALL)
    saved = model.save(tmp_path / "model")
    with pytest.raises(ConfigError, match=r"Local was passed in Python(.|\n)*model_class"):
        clickfleet.load(saved, trust=True)
    assert np.array_equal(clickfleet.load(saved, model_class=Local).predict(FRAME), model.predict(FRAME))


def test_a_class_has_settings() -> None:
    from dataclasses import dataclass

    class Scaled(Linear):
        @dataclass(frozen=True)
        class Config:
            factor: float = 1.0

        def __init__(self, config: Any, shape: clickfleet.Shape) -> None:
            super().__init__(config, shape)
            self.factor = config.factor

    model = clickfleet.fit(FRAME, "clicked", model={"name": Scaled, "factor": 2.0}, **SMALL)
    assert model.learner.model.factor == 2.0
    assert clickfleet.fit(FRAME, "clicked", "model.factor=3.0", model=Scaled, **SMALL).learner.model.factor == 3.0
    with pytest.raises(ConfigError, match=r"model\.facto; did you mean factor"):
        clickfleet.fit(FRAME, "clicked", model={"name": Scaled, "facto": 2.0}, **SMALL)


def test_a_class_of_a_script_is_not_imported_again(tmp_path: Path) -> None:
    """A script that trains would train again."""
    (tmp_path / "script.py").write_text(
        "import sys\nimport clickfleet\nfrom test_own_code import FRAME, SMALL, Linear\n\n"
        "class Mine(Linear):\n    pass\n\n"
        "model = clickfleet.fit(FRAME, 'clicked', model=Mine, **SMALL)\n"
        "print(model.config.model.name, len(clickfleet.load(model.save('model'), model_class=Mine).predict(FRAME)))\n"
    )
    tests = Path(__file__).parent
    path = f"{tests}:{tests.parent / 'support'}"
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, env={"PYTHONPATH": path}, capture_output=True, text=True
    )
    assert done.stdout == "python:Mine 400\n", done.stderr


def test_a_metric_function_chooses_the_best_model() -> None:
    """The larger, the better: here the first of five evaluations."""
    values = iter([5.0, 4.0, 3.0, 2.0, 1.0])
    keywords = {**LR, "epochs": 5, "monitor": "mine", "patience": 2}
    model = clickfleet.fit(FRAME, "clicked", valid=FRAME, metrics={"mine": lambda y, s, w: next(values)}, **keywords)
    assert [record["mine"] for record in model.history if record["kind"] == "valid"] == [5.0, 4.0, 3.0]
    first = clickfleet.fit(FRAME, "clicked", valid=FRAME, **LR)
    assert np.array_equal(model.predict(FRAME), first.predict(FRAME))
    assert model.step == first.step
    with pytest.raises(ConfigError, match="unknown metric 'mine'"):
        clickfleet.fit(FRAME, "clicked", **keywords)


def test_rows_are_shuffled_in_every_epoch() -> None:
    ordered = FRAME.sort_values("clicked")
    seen: list[float | None] = []
    clickfleet.fit(ordered, "clicked", callbacks=[lambda progress: seen.append(progress.loss)], **{**LR, "epochs": 2})
    rates = clickfleet.fit(ordered, "clicked", data__shuffle=0, **LR)
    assert rates.config.data.shuffle == 0
    assert clickfleet.fit(ordered, "clicked", **LR).config.data.shuffle == "global"
    assert max(loss for loss in seen[:5] if loss is not None) < 0.9


@pytest.mark.usefixtures("small_logs")
def test_code_of_a_notebook_survives_early_stopping_and_averages() -> None:
    class Local(Linear):
        pass

    rows = click_frame(1500)
    model = clickfleet.fit(
        rows,
        "clicked",
        model=Local,
        loss=lambda logits, labels, weights: each(logits, labels, weights),
        metrics={"mine": lambda labels, scores, weights: float(scores[labels == 1].mean())},
        monitor="mine",
        train__threads=1,
        quiet=True,
    )
    assert model.config.train.patience is not None
    assert model.valid is not None
    assert 0 < model.valid["mine"] < 1
    assert model.evaluate(rows)["mine"] == pytest.approx(model.predict(rows)[rows["clicked"] == 1].mean())
