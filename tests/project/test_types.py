"""Programs of users pass mypy in strict mode: the package is typed, and its public names are known."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = """
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import clickfleet
from clickfleet import Callback, ClickClassifier, Dense, Schema, Slot, StepProgress


class Watch(Callback):
    def on_step(self, progress: StepProgress) -> bool | None:
        return progress.step < 10 and progress.rows < 1000

    def on_evaluation(self, results: dict[str, Any]) -> None:
        print(results["auc"])


class Linear(clickfleet.Model):
    def forward(self, x: clickfleet.Inputs) -> Tensor:
        return x.first.sum(1)


def loss(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    return torch.nn.functional.binary_cross_entropy_with_logits(logits, labels, reduction="none")


def metric(labels: NDArray[np.float32], scores: NDArray[np.float32], weights: NDArray[np.float32]) -> float:
    return float(scores.mean())


data = {"clicked": np.zeros(3), "city": np.zeros(3)}
schema = Schema(dense=(Dense("price"),), slots=(Slot("city"),), label="clicked")
model = clickfleet.fit(data, "clicked", model=Linear, loss=loss, metrics={"mine": metric}, callbacks=[Watch()], epochs=3)
other = clickfleet.train(data, schema=schema, callbacks=[lambda progress: progress.step < 3])
scores: NDArray[np.float32] = model.predict(data)
auc: float = model.evaluate(data)["auc"]
names: list[str] = [field.name for field in model.importance(data)]
steps: list[int] = [record["step"] for record in model.history]
loaded: clickfleet.SavedModel = clickfleet.load(model.save("model"), model_class=Linear)
score: float = loaded.explain({"city": "Bern"})["score"]
proba: NDArray[np.float64] = ClickClassifier("lr", epochs=3).fit(data, [0, 1, 0]).predict_proba(data)
"""
WRONG = "model.predict()", 'clickfleet.load("model", model_class=3)', "clickfleet.fitt", "ClickClassifier(epochs=None)"


def check(folder: Path, program: str) -> str:
    (folder / "program.py").write_text(program)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(ROOT / ".mypy_cache"), "program.py"],
        cwd=folder,
        capture_output=True,
        text=True,
    )
    return done.stdout + done.stderr


@pytest.mark.timeout(600)
def test_a_program_of_a_user_is_typed(tmp_path: Path) -> None:
    lines = PROGRAM.count("\n")
    said = check(tmp_path, PROGRAM + "\n".join(WRONG))
    assert said.count("error:") == len(WRONG), said
    assert [f"program.py:{lines + i}:" in said for i in range(1, 1 + len(WRONG))] == [True] * len(WRONG), said
