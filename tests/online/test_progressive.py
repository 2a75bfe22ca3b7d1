"""Scores taken while training are those of evaluation, also where training adds noise."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from clickfleet.config.check import configure
from clickfleet.data.batch import Batch
from clickfleet.online.freshness import MOST, POINTS, Freshness
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


NOW = 1767225600


def test_ages_are_never_negative_when_the_clock_goes_back():
    now = [NOW + 10.0]
    fresh = Freshness(lambda: now[0])
    fresh.trained(np.array([NOW + 10, NOW + 15]))
    assert set(fresh.take().facts(NOW - 100.0).values()) == {0.0}
    assert fresh.take().facts(NOW) == {}


def test_many_different_times_are_counted_in_bounded_memory():
    fresh = Freshness(lambda: NOW + 3.0 * MOST)
    fresh.trained(NOW + np.arange(2 * MOST))
    events = fresh.take()
    assert len(events.counts) <= MOST
    assert events.facts(NOW + 3.0 * MOST)["event_to_published_p50"] == pytest.approx(2 * MOST, rel=0.01)


@given(
    parts=st.lists(st.lists(st.integers(0, 5000), min_size=1, max_size=40), min_size=1, max_size=5),
    unit=st.sampled_from([1000, 10**6, 10**9]),
)
def test_quantiles_are_those_of_all_events_to_a_hundredth_of_a_second(parts, unit):
    """Whatever the unit of the times, and however often an entry was given back."""
    fresh = Freshness(lambda: NOW + 7.0)
    for part in parts:
        assert fresh.trained(NOW * unit + np.array(part) * (unit // 1000))
        fresh.give_back(fresh.take())
    events = fresh.take()
    ages = np.sort(8.0 - np.concatenate([np.array(part) for part in parts]) / 1000)
    found = events.facts(NOW + 8.0)
    for percent in (50, 99):
        wanted = ages[int(np.ceil(percent / 100 * len(ages) - 1e-9)) - 1]
        assert found[f"event_to_published_p{percent}"] == pytest.approx(wanted, abs=0.011)
    times = events.times()
    assert times is not None
    assert (times["rows"], len(times["times"])) == (len(ages), min(len(ages), POINTS))
    assert NOW + 8.0 - times["oldest"] == pytest.approx(ages[-1], abs=0.011)
    assert NOW + 8.0 - times["newest"] == pytest.approx(ages[0], abs=0.011)
    assert times["times"] == sorted(times["times"])


def test_times_that_are_no_moments_are_not_measured():
    fresh = Freshness(lambda: NOW)
    assert not fresh.trained(np.array([20260101, 17]))
    assert fresh.trained(np.array([0, NOW - 5]))  # a row without a time
    assert fresh.take().facts(NOW)["event_to_trained_p99"] == 5
