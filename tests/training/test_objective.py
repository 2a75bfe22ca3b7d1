"""Losses end to end: down-sampled negatives, L2 on the network and on rows, sample weights."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import clickfleet
from clickfleet.data.schema import Dense, Schema, Slot
from clickfleet.training.embedding import Push
from clickfleet.training.learner import Learner
from clickfleet.training.step import TableDecay

SCHEMA = Schema(dense=(Dense("age"),), slots=(Slot("city"), Slot("shop")))


def frame(rows: int, seed: int = 0) -> dict[str, Any]:
    """A click rate of about a tenth that depends on the city."""
    rng = np.random.default_rng(seed)
    city = rng.integers(0, 10, rows)
    chance = 0.02 + 0.018 * city
    return {
        "label": (rng.random(rows) < chance).astype(np.int64),
        "age": rng.normal(size=rows),
        "city": city,
        "shop": rng.integers(0, 5, rows),
    }


def train(rows: dict[str, Any], schema: Schema = SCHEMA, **sections: Any) -> Any:
    config: dict[str, Any] = {
        "model": {"name": "deepfm", "hidden": [8]},
        "table": {"dim": 4},
        "data": {"batch_size": 100, "valid_share": 0},
        "train": {"deterministic": True, "threads": 1},
    }
    for section, part in sections.items():
        config[section] = {**config.get(section, {}), **part}
    return clickfleet.train(config, data=rows, schema=schema, quiet=True)


def test_down_sampled_negatives_keep_the_calibration() -> None:
    whole = frame(40_000)
    kept = (whole["label"] == 1) | (np.random.default_rng(9).random(40_000) < 0.2)
    thinned = {name: column[kept] for name, column in whole.items()}
    test = frame(20_000, seed=5)
    corrected = train(thinned, train={"epochs": 2, "loss": {"negatives_kept": 0.2}})
    plain = train(thinned, train={"epochs": 2})
    assert corrected.evaluate(test)["calibration"] == pytest.approx(1.0, abs=0.08)
    assert plain.evaluate(test)["calibration"] < 0.4  # it has learned the odds of the thinned data
    assert corrected.evaluate(test)["auc"] == pytest.approx(plain.evaluate(test)["auc"], abs=0.02)
    # what training itself shows is about the data it has seen
    assert corrected.train["calibration"] == pytest.approx(1.0, abs=0.08)


def test_l2_adds_strength_times_weight_to_the_gradient() -> None:
    """One step of SGD on one batch; biases are left alone."""
    one = {name: column[:100] for name, column in frame(200).items()}
    sgd = {"optimizer": "sgd", "lr": 0.5}
    plain, decayed = (train(one, dense=sgd, train={"loss": {"l2": l2}, "threads": 1}) for l2 in (0.0, 0.1))
    start = Learner(plain.config, plain.schema)
    for name, weight in plain.learner.dense().items():
        change = decayed.learner.dense()[name] - weight
        if weight.ndim == 1:
            torch.testing.assert_close(change, torch.zeros_like(change))
        else:
            torch.testing.assert_close(change, -0.5 * 0.1 * start.dense()[name], rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(("rule", "scale"), [("sgd", "batch"), ("sgd", "show"), ("sgd", "none")])
def test_l2_on_rows_is_added_after_the_division(rule: str, scale: str) -> None:
    one = {name: column[:100] for name, column in frame(200).items()}
    rows = {
        "dim": 4,
        "rule": {"name": rule, "lr": 0.5, "scale": scale},
        "init": {"embed": "normal(0.1)", "embedx": "normal(0.1)"},
    }
    plain, decayed = (train(one, table=rows, train={"loss": {"l2_rows": l2}, "threads": 1}) for l2 in (0.0, 0.2))
    with plain.learner.table.snapshot() as found:
        keys = np.concatenate([columns["key"] for columns in found])
    before = Learner(plain.config, plain.schema).table.pull(keys)
    change = decayed.learner.table.pull(keys) - plain.learner.table.pull(keys)
    np.testing.assert_allclose(change, -0.5 * 0.2 * before, rtol=1e-3, atol=1e-5)


def test_l2_on_rows_keeps_them_small_and_is_the_originals_in_deepfefm() -> None:
    data, rows = frame(4000), {"dim": 4, "rule": {"name": "adagrad", "lr": 0.1, "initial_g2sum": 0.3}}
    norms = [
        float(np.square(done.learner.table.pull(np.unique(_keys(done)))).sum())
        for done in (train(data, table=rows, train={"loss": {"l2_rows": l2}}) for l2 in (0.0, 0.3))
    ]
    assert norms[1] < 0.7 * norms[0]
    original = train(frame(200), model={"name": "deepfefm", "paddlerec": True})
    assert original.learner.l2_rows == 1e-6
    assert train(frame(200), model={"name": "deepfefm"}).learner.l2_rows == 0.0
    assert len(original.learner.steps(1)[0].row_decays) == 1


def test_l2_on_the_table_is_the_same_for_frequent_and_rare_keys() -> None:
    """Over an epoch, it adds strength·rows·w to the gradient of every key, however many batches hold the key."""
    strength, batches, size = 0.01, 40, 50
    decay = TableDecay(strength)
    spans = {1: range(batches), 2: range(0, batches, 4), 3: range(7, batches, 20)}  # in every batch, in 10, in 2
    for epoch in range(6):
        total = dict.fromkeys(spans, 0.0)
        for batch in range(batches):
            keys = np.array([key for key, span in spans.items() if batch in span] + [100 + batch], np.uint64)
            show = np.where(keys == 1, size - len(keys) + 1, 1).astype(np.float32)
            grads = np.zeros((len(keys), 3), np.float32)
            none = np.zeros(len(keys), np.float32)
            decay.add(Push(keys, grads, show, none, none.astype(np.uint16), float(size)), np.ones_like(grads))
            for key, grad in zip(keys.tolist(), grads, strict=True):
                assert grad[0] == grad[1] == grad[2]
                total[key] = total.get(key, 0.0) + float(grad[0])
        if epoch:
            for key in spans:
                assert total[key] == pytest.approx(strength * batches * size, rel=0.2), (epoch, key)


def test_one_step_of_l2_on_the_table_is_bounded() -> None:
    decay = TableDecay(1.0)
    decay.count(np.array([1], np.uint64), np.array([1e7], np.float32))
    grads, one = np.zeros((1, 2), np.float32), np.ones(1, np.float32)
    decay.add(Push(np.array([2], np.uint64), grads, one, one, one.astype(np.uint16), 100.0), np.ones_like(grads))
    assert grads.tolist() == [[TableDecay.MOST, TableDecay.MOST]]


def test_l2_on_the_table_keeps_rows_small() -> None:
    rows = {"dim": 4, "rule": {"name": "adagrad", "lr": 0.1, "initial_g2sum": 0.3}}
    norms = [
        float(np.square(done.learner.table.pull(np.unique(_keys(done)))).sum())
        for done in (train(frame(4000), table=rows, train={"loss": {"l2_table": l2}}) for l2 in (0.0, 0.1))
    ]
    assert norms[1] < 0.7 * norms[0]


def test_a_resumed_run_continues_l2_on_the_table(tmp_path: Path) -> None:
    """The rows of the table tell how often their keys occurred, so nothing else has to be saved."""

    def rows(name: str, epochs: int, resume: bool = False) -> Any:
        config = {
            "model": {"name": "deepfm", "hidden": [8]},
            "data": {"batch_size": 100, "valid_share": 0},
            "train": {"deterministic": True, "threads": 1, "epochs": epochs, "loss": {"l2_table": 0.01}},
            "run": {"dir": str(tmp_path / name), "report": False},
        }
        done = clickfleet.train(config, data=frame(2000), schema=SCHEMA, resume=resume, quiet=True)
        keys = np.unique(_keys(done))
        return done.learner.table.pull(keys)

    at_once = rows("whole", 2)
    rows("parts", 1)
    np.testing.assert_array_equal(rows("parts", 2, resume=True), at_once)


def _keys(done: Any) -> Any:
    with done.learner.table.snapshot() as found:
        return np.concatenate([columns["key"] for columns in found])


def test_rows_of_weight_zero_teach_nothing() -> None:
    """Wrong labels under weight 0 leave the model as it is without those rows."""
    data = frame(4000)
    wrong = {**data, "label": 1 - data["label"]}
    both = {name: np.stack([data[name], wrong[name]], 1).reshape(-1) for name in data}
    schema = Schema(dense=SCHEMA.dense, slots=SCHEMA.slots, weight="w")
    weighted = train(
        {**both, "w": np.tile([1.0, 0.0], 4000)}, schema, data={"batch_size": 200}, table={"dim": 4, "rule": "adam"}
    )
    alone = train(data, data={"batch_size": 100}, table={"dim": 4, "rule": "adam"})
    mine = weighted.predict({**frame(500, 3), "w": np.ones(500)})
    np.testing.assert_allclose(mine, alone.predict(frame(500, 3)), rtol=1e-3, atol=1e-4)
    assert weighted.train["auc"] == pytest.approx(alone.train["auc"], abs=1e-6)
