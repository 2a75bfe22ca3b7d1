"""Models of data in memory: trained, scored, saved, exported and explained from Python."""

import copy
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

import clickfleet
from clickfleet.cli import build
from clickfleet.cli.frame import run
from clickfleet.data.schema import Dense, Schema, Slot
from clickfleet.errors import CheckpointError, ConfigError, DataError
from clicks import click_frame

SMALL: dict[str, Any] = {
    "model": {"name": "deepfm", "hidden": [8]},
    "dim": 4,
    "batch_size": 50,
    "epochs": 3,
    "train__threads": 1,
    "deterministic": True,
    "quiet": True,
}


@pytest.fixture(scope="module")
def frame() -> pd.DataFrame:
    return click_frame()


@pytest.fixture(scope="module")
def model(frame: pd.DataFrame) -> clickfleet.TrainingResult:
    return clickfleet.fit(frame, "clicked", test=click_frame(300, 1), **SMALL)


def test_a_frame_is_learned(model: clickfleet.TrainingResult) -> None:
    assert model.test is not None
    assert model.test["auc"] > 0.65
    assert [slot.name for slot in model.schema.slots] == ["user", "item"]
    assert [column.name for column in model.schema.dense] == ["price"]


def kinds(frame: pd.DataFrame) -> dict[str, Any]:
    return {
        "polars": pl.from_pandas(frame),
        "arrow": pa.Table.from_pandas(frame, preserve_index=False),
        "category": frame.assign(user=frame["user"].astype("category")),
    }


@pytest.mark.parametrize("kind", ["polars", "arrow", "category"])
def test_every_kind_of_frame_gives_the_same_model(
    kind: str, frame: pd.DataFrame, model: clickfleet.TrainingResult
) -> None:
    data = kinds(frame)[kind]
    other = clickfleet.fit(data, "clicked", **SMALL)
    assert np.array_equal(other.predict(data), model.predict(frame))


def test_a_mapping_of_arrays_is_data(frame: pd.DataFrame) -> None:
    arrays = {name: frame[name].to_numpy() for name in ("item", "price", "clicked")}
    model = clickfleet.train(arrays, label="clicked", **SMALL)
    as_argument = clickfleet.train(data=frame.drop(columns="user"), label="clicked", **SMALL)
    assert np.array_equal(model.predict(arrays), as_argument.predict(frame))
    with pytest.raises(ConfigError, match="given twice"):
        clickfleet.train(arrays, data=arrays)


def test_a_row_may_lack_the_label_and_others_that_the_model_does_not_use(model: clickfleet.TrainingResult) -> None:
    rows = click_frame(20, 3)
    assert np.array_equal(model.predict(rows.drop(columns="clicked")), model.predict(rows))
    schema = Schema((Dense("price"),), (Slot("user"),), label="clicked", weight="item", time=None, group="user")
    weighted = clickfleet.fit(rows, schema=schema, **SMALL)
    assert len(weighted.predict(rows[["user", "price"]])) == 20
    with pytest.raises(DataError, match="no column 'item'"):
        weighted.evaluate(rows.drop(columns="item"))


def test_the_label_is_named_or_guessed(frame: pd.DataFrame, model: clickfleet.TrainingResult) -> None:
    assert np.array_equal(clickfleet.fit(frame, **SMALL).predict(frame), model.predict(frame))
    with pytest.raises(ConfigError, match=r"did you mean clicked"):
        clickfleet.fit(frame, "clickd", quiet=True)
    with pytest.raises(ConfigError, match="pass one of schema and label"):
        clickfleet.fit(frame, "user", schema=model.schema, quiet=True)


def test_history_is_a_table(model: clickfleet.TrainingResult) -> None:
    table = pd.DataFrame(model.history)
    assert table["kind"].tolist() == ["epoch", "test"] * 3
    assert table["step"].tolist() == [12, 12, 24, 24, 36, 36]
    assert model.test is not None
    assert table["auc"].iloc[-1] == model.test["auc"]


def test_a_saved_model_is_the_same_for_python_and_the_command_line(
    model: clickfleet.TrainingResult, frame: pd.DataFrame, tmp_path: Path
) -> None:
    saved = model.save(tmp_path / "model")
    again = clickfleet.load(saved)
    assert np.array_equal(again.predict(frame), model.predict(frame))
    assert (again.step, again.history) == (36, [])
    frame.to_csv(tmp_path / "rows.csv", index=False)
    assert run(build(), ["predict", str(saved), str(tmp_path / "rows.csv"), "--out", str(tmp_path / "scores.npy")]) == 0
    assert np.array_equal(np.load(tmp_path / "scores.npy"), model.predict(frame))
    twice = again.save(tmp_path / "twice")
    assert {file.name: file.read_bytes() for file in twice.iterdir()} == {
        file.name: file.read_bytes() for file in saved.iterdir()
    }
    with pytest.raises(CheckpointError, match="already exists"):
        model.save(saved)
    assert np.array_equal(clickfleet.load(model.save(saved, overwrite=True)).predict(frame), model.predict(frame))
    (tmp_path / "other").mkdir()
    with pytest.raises(CheckpointError, match=r"no manifest\.json"):
        model.save(tmp_path / "other", overwrite=True)


def test_an_exported_model_scores_the_same(
    model: clickfleet.TrainingResult, frame: pd.DataFrame, tmp_path: Path
) -> None:
    artifact = model.export(tmp_path / "artifact")
    np.testing.assert_allclose(clickfleet.load(artifact).predict(frame), model.predict(frame), atol=1e-6)
    with pytest.raises(CheckpointError, match="published"):
        clickfleet.load(artifact).save(tmp_path / "model")


@pytest.mark.parametrize("copied", [lambda model: pickle.loads(pickle.dumps(model)), copy.deepcopy])
def test_a_pickle_holds_the_saved_model(copied: Any, model: clickfleet.TrainingResult, frame: pd.DataFrame) -> None:
    again = copied(copied(model))
    assert np.array_equal(again.predict(frame), model.predict(frame))
    assert again.step == model.step
    assert b"torch" not in pickle.dumps(model).replace(b"clickfleet.training", b"")[:2000]


def test_importance_and_explanations(model: clickfleet.TrainingResult, frame: pd.DataFrame) -> None:
    ranking = model.importance(frame)
    assert {field.name for field in ranking} == {"user", "item", "price"}
    assert ranking[0].auc_drop > 0.02
    row = {"user": "u3", "item": 4, "price": 1.5}
    explanation = model.explain(row)
    assert explanation["score"] == pytest.approx(float(model.predict([row])[0]), abs=1e-6)
    assert {part["field"] for part in explanation["contributions"]} == {"user", "item", "price"}


def test_a_run_folder_keeps_the_history(frame: pd.DataFrame, tmp_path: Path) -> None:
    model = clickfleet.fit(frame, "clicked", test=frame, run__dir=tmp_path / "run", **SMALL)
    assert [record["kind"] for record in model.history] == ["epoch", "test"] * 3
    assert clickfleet.load(tmp_path / "run").history == model.history
    more = clickfleet.fit(
        frame, "clicked", test=frame, resume=True, run__dir=tmp_path / "run", **{**SMALL, "epochs": 4}
    )
    assert len(more.history) == 8
    assert np.array_equal(clickfleet.load(more.save(tmp_path / "model")).predict(frame), more.predict(frame))


def test_settings_are_keywords(frame: pd.DataFrame) -> None:
    few = frame[:50]
    model = clickfleet.fit(
        few, "clicked", "dense.lr=0.1", model="lr", train={"epochs": 2}, table__rule__lr=0.2, quiet=True
    )
    assert (model.config.model.name, model.config.train.epochs, model.config.dense.lr) == ("lr", 2, 0.1)
    assert model.config.table.rule.settings["lr"] == 0.2
    with pytest.raises(ConfigError, match="epochs"):
        clickfleet.fit(few, "clicked", epoch=2)
    with pytest.raises(ConfigError, match=r"data__threads or train__threads"):
        clickfleet.fit(few, "clicked", threads=2)
    with pytest.raises(ConfigError, match=r"train\.epochs"):
        clickfleet.fit(few, "clicked", epochs="many")


def test_the_api_is_listed() -> None:
    assert {"fit", "train", "load", "ClickClassifier", "Model", "Callback"} <= set(dir(clickfleet))
    for name in dir(clickfleet):
        assert getattr(clickfleet, name) is not None
