"""ClickClassifier is an estimator of scikit-learn: it passes its checks, and works in pipelines, searches and pickles."""

import os
import pickle
import signal
import sys
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pytest
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

import clickfleet
from clickfleet import ClickClassifier
from clickfleet.errors import ConfigError
from clicks import click_frame

TINY = {"name": "deepfm", "hidden": [16]}
EXPECTED = {
    "check_sample_weight_equivalence_on_dense_data": "a repeated row is trained in another batch than a weighted one",
    "check_classifier_data_not_an_array": "whole numbers are ids in a frame, and numbers in an array",
    "check_methods_subset_invariance": "the last bits of float32 scores depend on the rows scored together",
}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@parametrize_with_checks([ClickClassifier()], expected_failed_checks=lambda estimator: EXPECTED, xfail_strict=False)
def test_checks_of_scikit_learn(estimator: Any, check: Any) -> None:
    check(estimator)


@pytest.fixture(scope="module")
def frame() -> pd.DataFrame:
    return click_frame(400)


@pytest.fixture(scope="module")
def fitted(frame: pd.DataFrame) -> ClickClassifier:
    model = ClickClassifier(TINY, epochs=10, random_state=0, settings={"data.batch_size": 20})
    return model.fit(frame.drop(columns="clicked"), frame["clicked"])


def test_columns_of_a_frame_have_kinds(fitted: ClickClassifier, frame: pd.DataFrame) -> None:
    X = frame.drop(columns="clicked")  # noqa: N806
    assert fitted.feature_names_in_.tolist() == ["user", "item", "price"]
    assert [slot.name for slot in fitted.model_.schema.slots] == ["user", "item"]
    assert fitted.score(X, frame["clicked"]) > 0.65
    np.testing.assert_array_equal(fitted.predict_proba(X)[:, 1], fitted.model_.predict(X).astype(np.float64))
    assert np.array_equal(fitted.predict(X), fitted.predict_proba(X)[:, 1] > 0.5)
    with pytest.raises(ValueError, match="feature names should match"):
        fitted.predict(X.rename(columns={"user": "person"}))


def test_polars_frames_and_text_classes(fitted: ClickClassifier, frame: pd.DataFrame) -> None:
    other = pl.from_pandas(frame.drop(columns="clicked"))
    names = np.where(frame["clicked"] == 1, "yes", "no")
    again = clone(fitted).fit(other, names)
    assert again.classes_.tolist() == ["no", "yes"]
    assert np.array_equal(again.predict_proba(other), fitted.predict_proba(frame.drop(columns="clicked")))
    assert set(again.predict(other)) == {"no", "yes"}


def test_a_pickle_is_the_same_estimator_and_can_be_pickled_again(fitted: ClickClassifier, frame: pd.DataFrame) -> None:
    X = frame.drop(columns="clicked")  # noqa: N806
    again = pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(fitted))))
    assert np.array_equal(again.predict_proba(X), fitted.predict_proba(X))
    assert again.get_params() == fitted.get_params()


def test_it_works_in_pipelines_and_searches() -> None:
    random = np.random.default_rng(0)
    X = random.normal(size=(240, 3))  # noqa: N806
    y = (X[:, 0] + 0.3 * random.normal(size=240) > 0).astype(int)
    steps = {"data.batch_size": 20}
    pipeline = make_pipeline(StandardScaler(), ClickClassifier(TINY, epochs=20, random_state=0, settings=steps))
    assert cross_val_score(pipeline, X, y, cv=3, scoring="roc_auc").mean() > 0.9
    search = GridSearchCV(
        ClickClassifier(TINY, random_state=0, settings=steps), {"epochs": [1, 20]}, cv=2, scoring="roc_auc"
    ).fit(X, y)
    assert search.best_params_ == {"epochs": 20}


def test_numbers_of_an_array_may_be_categories() -> None:
    ids = np.arange(400) % 8
    y = np.isin(ids, (1, 2, 6)).astype(int)
    X = np.stack([ids, np.zeros(400)], axis=1)  # noqa: N806
    model = ClickClassifier(TINY, categorical_features=[0], random_state=0).fit(X, y)
    assert [slot.name for slot in model.model_.schema.slots] == ["x0"]
    assert model.score(X, y) == 1.0
    words = np.array([["a", "x"], ["b", "x"]] * 100, object)
    assert (
        ClickClassifier(TINY, categorical_features=[0, 1], random_state=0)
        .fit(words, [0, 1] * 100)
        .score(words, [0, 1] * 100)
    )
    with pytest.raises(ValueError, match="names 'city'"):
        ClickClassifier(categorical_features=["city"]).fit(X, y)


@pytest.mark.usefixtures("small_logs")
def test_weights_matter_and_settings_are_obeyed(frame: pd.DataFrame) -> None:
    X, y = frame[["item"]], frame["clicked"]  # noqa: N806
    weights = np.where(y == 1, 5.0, 1.0)
    plain, weighted = (
        ClickClassifier("lr", random_state=0, settings={"train.metrics.sliding": 0}).fit(X, y, sample_weight=given)
        for given in (None, weights)
    )
    assert weighted.predict_proba(X)[:, 1].mean() > plain.predict_proba(X)[:, 1].mean() + 0.1
    assert plain.model_.config.train.metrics.sliding == 0
    with pytest.raises(ConfigError, match="unknown key train"):
        ClickClassifier(settings={"train.metrics.slidin": 0}).fit(X, y)


def test_scikit_learn_is_optional(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "clickfleet.training.estimator")
    monkeypatch.setitem(sys.modules, "sklearn.base", None)
    with pytest.raises(clickfleet.ClickfleetError, match=r"clickfleet\[sklearn\]"):
        _ = clickfleet.ClickClassifier


def test_an_interrupt_ends_the_fit(frame: pd.DataFrame) -> None:
    """A run that is interrupted returns what it has learned; an estimator must not pretend to be fitted."""

    class Interrupt:
        def on_step(self, progress: clickfleet.StepProgress) -> None:
            os.kill(os.getpid(), signal.SIGINT)

    model = ClickClassifier("lr", settings={"callbacks": [Interrupt()]})
    with pytest.raises(KeyboardInterrupt):
        model.fit(frame[["item"]], frame["clicked"])
    assert not hasattr(model, "model_")
