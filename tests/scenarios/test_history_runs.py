"""Histories and several labels: every model that scores rows trains, evaluates, exports and publishes the same scores."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.metrics import log_loss, mean_squared_error, roc_auc_score

import shapes
from clickfleet.serve.predictor import open_version
from clickfleet.store.onnx import Engine
from clickfleet.store.published import Log
from clickfleet.training import export
from clickfleet.training.export import Publisher
from clickfleet.training.model import TrainingResult, load
from clickfleet.training.report.evidence import importance
from scenarios.test_matrix import Case, close, files, learn_more, trained
from shapes import HISTORIES, MODELS

QUICK = ("din", "deepfm")
CASES = [(shape, model) for shape in HISTORIES for model in (MODELS if os.environ.get("CLICKFLEET_SOAK") else QUICK)]


@pytest.fixture(scope="module", params=[pytest.param(case, id="-".join(case)) for case in CASES])
def case(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Case:
    name, model = request.param
    if model == "dlrm" and not HISTORIES[name].schema.dense:
        pytest.skip("dlrm needs dense columns")
    folder: Path = tmp_path_factory.mktemp(f"{name}-{model}")
    rows = files(HISTORIES[name], folder)
    done: TrainingResult = trained(HISTORIES[name], model, rows, folder / "run")
    wanted = shapes.scores(done.learner, rows["test"])
    return Case(HISTORIES[name], model, rows["test"], folder, folder / "run", done, wanted)


def test_predictions_are_those_of_plain_loops(case: Case) -> None:
    model = load(case.run)
    close(model.predict(case.test, batch_size=7), case.wanted)
    close(model.reading(engine=Engine()).predict(case.test, batch_size=5), case.wanted)


def bucketed_auc(labels: np.ndarray, scores: np.ndarray) -> float:
    """The AUC of scores as the metric sees them; rounding may move one to the next bucket."""
    return float(roc_auc_score(labels, np.floor(4096 * scores)))


def test_metrics_are_those_of_scikit_learn(case: Case) -> None:
    found = load(case.run).evaluate(case.test)
    tasks = case.shape.schema.tasks
    labels = np.array([[np.nan if (v := row[t.source_name]) is None else v for t in tasks] for row in case.rows], float)
    scores = case.wanted.reshape(len(labels), -1)
    assert found["auc"] == pytest.approx(bucketed_auc(labels[:, 0], scores[:, 0]), abs=0.02)
    if len(tasks) == 1:
        assert "tasks" not in found
        return
    buy, seconds = found["tasks"]["buy"], found["tasks"]["seconds"]
    clicked = labels[:, 0] == 1
    known = clicked & ~np.isnan(labels[:, 1])
    assert buy["rows_given"] == known.sum()
    assert buy["auc_given"] == pytest.approx(bucketed_auc(labels[known, 1], scores[known, 1]), abs=0.02)
    assert buy["logloss_given"] == pytest.approx(log_loss(labels[known, 1], scores[known, 1], labels=[0, 1]), abs=1e-5)
    every = known | ~clicked  # without a click, nothing was bought
    both, bought = scores[every, 0] * scores[every, 1], np.where(clicked, labels[:, 1], 0)[every]
    assert buy["rows"] == every.sum()
    assert buy["auc"] == pytest.approx(bucketed_auc(bought, both), abs=0.02)
    assert buy["logloss"] == pytest.approx(log_loss(bought, both, labels=[0, 1]), abs=1e-5)
    known = clicked & ~np.isnan(labels[:, 2])
    assert seconds["rows_given"] == known.sum()
    assert seconds["rmse_given"] == pytest.approx(
        mean_squared_error(labels[known, 2], scores[known, 2]) ** 0.5, abs=1e-5
    )


def test_an_artifact_and_a_published_log_have_the_same_scores(case: Case) -> None:
    entry = export.export(case.done.learner, case.folder / "artifact", 1)
    entry.verify()
    close(open_version(entry).run(case.batch())["score"], case.wanted)
    publisher = Publisher(case.done.learner, case.folder / "log", cache=case.folder / "graph.onnx")
    publisher.publish("base", step=1)
    learn_more(case)
    publisher.publish("delta", step=2)
    wanted = shapes.scores(case.done.learner, case.rows)
    close(load(case.folder / "log").predict(case.test), wanted)
    newest = Log(case.folder / "log")
    for line in newest.lines():
        newest.entry(line).verify()


def test_every_field_has_an_importance(case: Case) -> None:
    learner = load(case.run).learner
    fields = [field.name for field in importance(learner, case.batch())]
    shape = learner.shape
    assert sorted(fields) == sorted([*shape.slot_names, *shape.dense_names, *(one.name for one in shape.histories)])
