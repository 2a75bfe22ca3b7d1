from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import clickfleet
from clickfleet.data.schema import Dense, Schema, Slot
from clickfleet.errors import ConfigError
from clickfleet.store import checkpoint
from clickfleet.training import saving

SCHEMA = Schema(dense=(Dense("x"),), slots=(Slot("a"), Slot("b")))
SETTINGS = (
    "model.hidden=[8]",
    "train.epochs=4",
    "train.patience=9",
    "train.average=true",
    "data.batch_size=50",
    "data.shuffle=global",
)


def log(rows: int, seed: int = 0) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    a, b, x = rng.integers(0, 300, rows), rng.integers(0, 6, rows), rng.normal(size=rows)
    logit = 1.5 * np.sin(a) + 0.7 * (b % 2) + 0.3 * x - 0.8
    return pd.DataFrame({"label": (rng.random(rows) < 1 / (1 + np.exp(-logit))).astype(int), "x": x, "a": a, "b": b})


def averaged(folder: Path, *settings: str, resume: bool = False) -> clickfleet.TrainingResult:
    config = {"run": {"dir": str(folder), "report": False}}
    return clickfleet.train(
        config,
        *SETTINGS,
        *settings,
        data=log(1500),
        valid=log(1000, 1),
        test=log(1000, 2),
        schema=SCHEMA,
        resume=resume,
        quiet=True,
    )


def test_the_average_is_the_mean_of_its_epochs_and_the_model_of_the_run(tmp_path: Path) -> None:
    done = averaged(tmp_path / "run")
    folder = tmp_path / "run/checkpoints"
    best = checkpoint.best(folder)
    assert best == done.path
    assert checkpoint.latest(folder) != best
    text = (tmp_path / "run/log.txt").read_text()
    line = next(line for line in text.splitlines() if "the average of epochs" in line)
    words = line.split("epochs ")[1].split()
    first, last = int(words[0]), int(words[2])
    epochs = [saving.load(checkpoint.epochs(folder)[epoch]) for epoch in range(first, last + 1)]
    mean = saving.load(best)
    keys = np.concatenate([columns["key"] for columns in mean.table.snapshot()])
    rows = np.mean([one.table.pull(keys, training=False) for one in epochs], 0)
    np.testing.assert_allclose(mean.table.pull(keys, training=False), rows, rtol=1e-5, atol=1e-7)
    for name, tensor in mean.dense().items():
        np.testing.assert_allclose(tensor, np.mean([one.dense()[name] for one in epochs], 0), rtol=1e-4, atol=1e-7)
    model = clickfleet.load(tmp_path / "run")
    assert done.test is not None
    assert model.evaluate(log(1000, 2))["auc"] == done.test["auc"]
    np.testing.assert_array_equal(model.predict(log(1000, 2)), done.predict(log(1000, 2)))


def test_a_resumed_run_continues_from_its_last_epoch(tmp_path: Path) -> None:
    averaged(tmp_path / "whole", "train.epochs=6", "train.deterministic=true")
    averaged(tmp_path / "parts", "train.deterministic=true")
    averaged(tmp_path / "parts", "train.epochs=6", "train.deterministic=true", resume=True)
    whole, parts = (tmp_path / name / "checkpoints" for name in ("whole", "parts"))
    assert checkpoint.latest(whole).name == checkpoint.latest(parts).name
    for label in (checkpoint.LATEST, checkpoint.BEST):
        one, other = (saving.load(checkpoint.labelled(folder, label)) for folder in (whole, parts))
        for name, tensor in one.dense().items():
            np.testing.assert_array_equal(tensor, other.dense()[name])


def test_data_in_memory_needs_no_folder() -> None:
    done = clickfleet.train(
        None, *SETTINGS, data=log(1500), valid=log(1000, 1), test=log(1000, 2), schema=SCHEMA, quiet=True
    )
    assert done.test is not None
    assert done.evaluate(log(1000, 2))["auc"] == done.test["auc"]


@pytest.mark.parametrize("setting", ["run.keep_epochs=false", "train.patience=null", "table.admission=count(3)"])
def test_an_average_without_what_it_needs_is_refused(setting: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"train\.average"):
        averaged(tmp_path / "run", setting)
