"""Importance by shuffling: what decides comes first."""

import numpy as np
import pyarrow as pa
import pytest

import clickfleet
from clickfleet.data.batch import Batch
from clickfleet.data.schema import Dense, Schema, Slot
from clickfleet.errors import ConfigError, DataError
from clickfleet.training.model import TrainingResult
from clickfleet.training.report.evidence import EvidenceSample, importance

SCHEMA = Schema(dense=(Dense("age"),), slots=(Slot("city"), Slot("tags", multi=True), Slot("noise")))


def frame(rows: int) -> pa.Table:
    rng = np.random.default_rng(1)
    city, age = rng.integers(0, 20, rows), rng.normal(size=rows)
    chance = 1 / (1 + np.exp(-3 * (city % 2 - 0.5) - age))
    tags = [rng.integers(0, 9, n) for n in rng.integers(0, 4, rows)]
    label, noise = (rng.random(rows) < chance).astype(np.int64), rng.integers(0, 50, rows)
    return pa.table({"label": label, "age": age, "city": city, "tags": tags, "noise": noise})


@pytest.fixture(scope="module")
def model() -> TrainingResult:
    config = {"model": {"name": "fm"}, "data": {"batch_size": 100}, "train": {"epochs": 3, "threads": 1}}
    return clickfleet.train(config, data=frame(4000), schema=SCHEMA, quiet=True)


def rows(model: TrainingResult, n: int = 1500) -> Batch:
    sample = EvidenceSample(n)
    for batch in model.source(frame(n), 97, labels=True):
        sample.add(batch)
    return sample.rows


def test_what_decides_comes_first(model: TrainingResult) -> None:
    before = model.predict(frame(100))
    found = importance(model.learner, rows(model), threads=2)
    assert [one.name for one in found[:2]] == ["city", "age"]
    drops = {one.name: one.auc_drop for one in found}
    assert drops["city"] > 0.1
    assert abs(drops["noise"]) < 0.02
    assert abs(drops["tags"]) < 0.02
    assert found[0].logloss_rise > 0.05
    assert found == importance(model.learner, rows(model), threads=1)
    assert np.array_equal(model.predict(frame(100)), before)


def test_fields_shuffled_together(model: TrainingResult) -> None:
    (both,) = importance(model.learner, rows(model), [["city", "age"]])
    alone = {one.name: one.auc_drop for one in importance(model.learner, rows(model))}
    assert both.name == "city+age"
    assert both.auc_drop > max(alone.values())
    with pytest.raises(ConfigError, match="no field town"):
        importance(model.learner, rows(model), [["town"]])
    unlabelled = rows(model)
    unlabelled.labels = None
    with pytest.raises(DataError, match="labels"):
        importance(model.learner, unlabelled)


@pytest.mark.parametrize("total", [0, 3, 100, 101, 977])
def test_a_sample_is_even_whatever_the_batches(total: int) -> None:
    found = []
    for size in (1, 7, 1000):
        sample = EvidenceSample(50)
        for first in range(0, total, size):
            n = min(size, total - first)
            sample.add(Batch(np.arange(first, first + n, dtype=np.float32)[:, None], np.zeros(n, np.uint64), 1))
        found.append([] if not total else sample.rows.dense[:, 0].tolist())
        assert len(sample) == len(found[-1]) <= 100
    gaps = set(np.diff(found[0]).tolist())
    assert found[0] == found[1] == found[2]
    assert len(gaps) <= 1
    assert len(found[0]) == min(total, len(found[0])) >= min(total, 51)
