"""Labels that come late: what a correction adds to the loss, to the statistics of rows and to the metrics."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from clickfleet.config.load import load
from clickfleet.config.plugins import Plugin
from clickfleet.config.sections import LossSettings
from clickfleet.data.batch import Batch
from clickfleet.data.memory import Feed
from clickfleet.data.schema import Label, Schema, Slot
from clickfleet.errors import ConfigError
from clickfleet.training.learner import Learner
from clickfleet.training.losses import LateLabels, Loss, real_negatives
from clickfleet.training.metrics import Metrics
from clickfleet.training.predict import ScoredRows, evaluate

NAN = float("nan")
CLICK, BUY, DWELL = Label("click"), Label("buy", given="click", weight=0.5), Label("dwell", loss="mse")


def gradient(loss: Loss, logits: Any, labels: Any, previous: Any = None, on_time: Any = None) -> torch.Tensor:
    leaf = torch.tensor(logits, dtype=torch.float64, requires_grad=True)
    late = [None if one is None else torch.tensor(one, dtype=torch.float64) for one in (previous, on_time)]
    value = loss.total(
        leaf * 1, torch.tensor(labels, dtype=torch.float64), late=LateLabels(*late) if previous or on_time else None
    )
    value.backward()  # type: ignore[no-untyped-call]
    assert leaf.grad is not None
    return leaf.grad


def test_a_corrected_negative_and_its_correction_are_one_positive() -> None:
    loss = Loss(LossSettings())
    early = gradient(loss, [0.3, -1.0], [0, 0])
    late = gradient(loss, [0.3, -1.0], [1, 1], [0, 0])
    assert torch.allclose(early + late, gradient(loss, [0.3, -1.0], [1, 1]))
    assert late.tolist() == pytest.approx([-1, -1])


def test_a_correction_is_one_more_row_without_a_method() -> None:
    loss = Loss(LossSettings(), tasks=(Label("click", late="none"),))
    found = gradient(loss, [0.3, 0.3], [1, 1], [0, 1])
    assert found[0] == gradient(loss, [0.3], [1])[0]
    assert found[1] == 0, "this label did not change"


@given(
    after=st.lists(st.tuples(*[st.sampled_from([0.0, 1.0, NAN])] * 2, st.sampled_from([0.0, 2.5, NAN])), min_size=1),
    data=st.data(),
    entire=st.booleans(),
)
@settings(max_examples=100, deadline=None)
def test_all_rows_of_a_show_together_teach_its_last_labels(after: Any, data: Any, entire: bool) -> None:
    """Of several labels, with conditions and numbers: whatever was known at first, and whichever space a label is learned in."""
    loss = Loss(LossSettings(), tasks=(CLICK, BUY, DWELL), entire_space=entire, conditional=0.5)
    before = [data.draw(st.tuples(*[st.sampled_from([0.0, 1.0, NAN])] * 2, st.just(row[2]))) for row in after]
    logits = np.random.default_rng(1).normal(size=(len(after), 3)).tolist()
    first = gradient(loss, logits, before)
    known = [any(value == value for value in row) for row in before]
    previous = [row if seen else (NAN,) * 3 for row, seen in zip(before, known, strict=True)]
    then = gradient(loss, logits, after, previous)
    assert torch.allclose(first + then, gradient(loss, logits, after), atol=1e-9)


@pytest.mark.parametrize("on_time", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("entire", [None, False, True])
def test_weighted_rows_of_a_show_have_the_expected_gradient_of_its_label(on_time: float, entire: bool | None) -> None:
    """At the true probability, the gradient is 0 on average, although late positives are learned as negatives at first."""
    count, positives = 1000, 300
    early = round(on_time * positives)
    logit, sure = float(np.log(3 / 7)), 40.0  # of a click that always comes
    labels = [1.0] * early + [0.0] * (count - early) + [1.0] * (positives - early)
    previous = [NAN] * count + [0.0] * (positives - early)
    rows = len(labels)
    if entire is None:
        loss = Loss(LossSettings(), tasks=(Label("click", late="weight"),))
        found = gradient(loss, [logit] * rows, labels, previous, [on_time] * rows).sum()
    else:
        tasks = (Label("click"), Label("buy", given="click", late="weight"))
        loss = Loss(LossSettings(), tasks=tasks, entire_space=entire, conditional=0.5)
        before = [[1.0 if y == y else NAN, y] for y in previous]
        shares = [[1.0, on_time]] * rows
        found = gradient(loss, [[sure, logit]] * rows, [[1.0, y] for y in labels], before, shares)[:, 1].sum()
    assert abs(float(found)) / count < 1e-6


def test_negatives_count_by_the_chance_that_they_stay() -> None:
    assert real_negatives(torch.tensor(0.2), torch.tensor(1.0)) == 1, "nothing comes late"
    assert real_negatives(torch.tensor(0.2), torch.tensor(0.0)) == pytest.approx(0.8)
    mine = LossSettings(function=Plugin("mine.py:loss"))
    with pytest.raises(ConfigError, match="defined for the log loss only"):
        Loss(mine, tasks=(Label("click", late="weight"),))


def test_a_shared_error_counts_a_correction_without_its_curvature() -> None:
    loss = Loss(LossSettings(shared_error=0.5))
    whole = gradient(loss, [0.0, 0.0], [1, 0], [NAN, NAN])
    assert torch.allclose(whole, gradient(loss, [0.0, 0.0], [1, 0])), "no correction: as ever"
    alone = gradient(loss, [0.0, 0.0], [1, 1], [0, 0])
    assert alone.tolist() == pytest.approx([-1, -1]), "nothing is shared by rows without curvature"


# Rows of a table

SCHEMA = Schema(slots=(Slot("user"), Slot("ad")), label="click")


def shown(users: list[int], labels: list[float], previous: list[float] | None = None) -> Batch:
    keys = np.array([[user, 100 + user % 2] for user in users], np.uint64).reshape(-1)
    late = None if previous is None else np.array(previous, np.float32)
    return Batch(np.zeros((len(users), 0), np.float32), keys, 2, labels=np.array(labels, np.float32), previous=late)


def learner(rule: str) -> Learner:
    return Learner(load(None, ["model.name=lr", f"table.rule={{name: {rule}, lr: 0.1}}"]), SCHEMA)


def learn(into: Learner, *batches: Batch) -> dict[int, tuple[float, float]]:
    """Train, and return shows and clicks by key."""
    (step,) = into.steps(1)
    for batch in batches:
        step.train(batch, into.table, into.optimizer, lambda phase: None)
    with into.table.snapshot() as rows:
        return {
            key: (show, click)
            for part in rows
            for key, show, click in zip(*(part[name].tolist() for name in ("key", "show", "click")), strict=True)
        }


@pytest.mark.parametrize("rule", ["adagrad", "sgd", "adam"])
def test_a_show_is_counted_once_and_its_click_too(rule: str) -> None:
    found = learn(learner(rule), shown([1, 2, 3], [0, 1, 0]), shown([3, 4], [1, 0], [0, NAN]), shown([2], [0], [1]))
    assert found == learn(learner(rule), shown([1, 2, 3, 4], [0, 0, 1, 0]))


def test_rows_that_are_only_corrected_move_as_by_one_row_each() -> None:
    """A rule that divides by shows divides by corrections too: a batch of many does not move a common row by their sum."""
    single, many = learner("adagrad"), learner("adagrad")
    before = float(single.table.pull(np.array([101], np.uint64))[0, 0])
    learn(single, shown([1], [1], [0]))
    learn(many, shown([1, 3, 5, 7], [1] * 4, [0] * 4))
    moved = [float(one.table.pull(np.array([101], np.uint64))[0, 0]) - before for one in (single, many)]
    assert moved[0] > 0
    assert moved[1] == pytest.approx(moved[0], rel=1e-4)


# Metrics


def test_metrics_count_a_show_once() -> None:
    scores = np.array([0.9, 0.2, 0.6], np.float32)
    once, twice = Metrics(sliding=2, groups=True), Metrics(sliding=2, groups=True)
    groups = np.array([1, 1, 1], np.uint64)
    once.update(scores, np.array([1, 0, 0], np.float32), None, groups)
    twice.update(scores, np.array([1, 0, 0], np.float32), None, groups)
    late = np.array([NAN, 0.0], np.float32)[1:]
    twice.update(scores[:1], np.array([1], np.float32), None, groups[:1], previous=late)
    assert twice.results() == once.results()


def test_metrics_count_every_label_when_it_is_first_known() -> None:
    tasks = (CLICK, BUY)
    found, wanted = Metrics(tasks=tasks), Metrics(tasks=tasks)
    scores = np.array([[0.9, 0.4], [0.3, 0.2], [0.5, 0.7]], np.float32)
    first = np.array([[1, NAN], [0, 0], [1, NAN]], np.float32)
    last = np.array([[1, 0], [1, 0], [1, 1]], np.float32)
    found.update(scores, first)
    found.update(scores, last, previous=first)
    results = found.results()
    assert results["rows"] == 3
    assert results["tasks"]["click"]["rows"] == results["tasks"]["buy"]["rows"] == 3
    assert results["tasks"]["buy"]["rows_given"] == 3, "the late click made the second show one of them"
    wanted.update(scores, np.array([[1, 0], [0, 0], [1, 1]], np.float32))
    assert results["tasks"]["buy"]["auc"] == wanted.results()["tasks"]["buy"]["auc"]
    assert results["auc"] == wanted.results()["auc"]


def test_an_evaluation_counts_a_show_once() -> None:
    model = learner("sgd")
    plain, late = shown([1, 2, 3], [0, 1, 0]), shown([3], [1], [0])
    found = evaluate(model, Feed([plain, late], SCHEMA))
    assert found == evaluate(model, Feed([plain], SCHEMA))
    rows = ScoredRows()
    rows.add(late, np.array([0.5], np.float32))
    assert len(rows.columns()[0]) == 0
