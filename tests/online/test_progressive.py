"""Scores taken while training are those of evaluation, also where training adds noise."""

import numpy as np
import pytest
import torch

from clickfleet.config.check import configure
from clickfleet.data.batch import Batch
from clickfleet.online.freshness import MOST, Freshness
from clickfleet.training.learner import Learner
from streams import SCHEMA


@pytest.mark.parametrize(("model", "noisy"), [({"name": "dcn_v2", "dropout": 0.5}, True), ({"name": "deepfm"}, False)])
def test_a_noisy_step_scores_in_evaluation_first(model, noisy):
    learner = Learner(configure({"model": {**model, "hidden": [8]}, "table": {"dim": 2}}), SCHEMA)
    (step,) = learner.steps(1)
    assert step.is_noisy() == noisy
    step.score_first = True
    batch = Batch(
        np.ones((4, 1), np.float32), np.arange(12, dtype=np.uint64), 3, labels=np.array([0, 1, 0, 1], np.float32)
    )
    rows = np.array(learner.table.pull(step.embedding.unique(batch)))
    learner.model.eval()
    with torch.no_grad():
        wanted = torch.sigmoid(learner.model(step.embedding.inputs(batch, rows))).numpy()
    learner.model.train()
    assert step(batch, rows).scores == pytest.approx(wanted, abs=1e-6)
    assert learner.model.training


def test_ages_are_never_negative_when_the_clock_goes_back():
    now = [1000.0]
    fresh = Freshness(lambda: now[0])
    fresh.trained(np.array([1000, 1005]))
    now[0] = 10.0
    assert set(fresh.published().values()) == {0.0}
    assert fresh.published() == {}


def test_many_different_times_are_counted_in_bounded_memory():
    fresh = Freshness(lambda: 3.0 * MOST)
    fresh.trained(np.arange(2 * MOST))
    assert len(fresh.counts) <= MOST
    assert fresh.published()["event_to_published_p50"] == pytest.approx(2 * MOST, rel=0.01)
