"""Data in memory trains on a cluster: every row once, as on one machine."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

import clickfleet
from clickfleet.data.schema import Dense, Schema, Slot
from clickfleet.errors import ClusterError, ConfigError, DataError
from fleet import kill, shows, tables, when_saved
from soak import only_in_soak

pytestmark = pytest.mark.xdist_group("cluster")

ROWS, TEST_ROWS, SLOTS = 3_001, 500, 2
SCHEMA = Schema(dense=(Dense("age"),), slots=(Slot("city"), Slot("tags", multi=True)), label="clicked")


def clicks(rows: int = ROWS, seed: int = 1) -> pa.Table:
    draw = np.random.default_rng(seed)
    city = draw.integers(0, 40, rows)
    return pa.table(
        {
            "clicked": (draw.random(rows) < np.where(city < 10, 0.7, 0.2)).astype(np.int64),
            "age": draw.random(rows),
            "city": [f"city {one}" for one in city],
            "tags": [[int(one)] for one in draw.integers(0, 9, rows)],
        }
    )


@pytest.fixture
def feeding(tmp_path: Path) -> dict[str, Any]:
    return {
        "data": {"batch_size": 50},
        "model": {"name": "dnn", "hidden": [8]},
        "table": {"dim": 4},
        "train": {"epochs": 2},
        "run": {"dir": str(tmp_path / "run"), "checkpoint_every": None, "report": False},
        "cluster": {"shards": 2, "workers": 2, "start_timeout": "250s"},
    }


def top(labels: Any, scores: Any, weights: Any) -> float:
    """The share of clicks among the rows with the highest scores."""
    return float(labels[np.argsort(scores, kind="stable")[-50:]].mean())


def test_sync_with_one_worker_equals_local_bit_for_bit(ray: Any, feeding: dict[str, Any], tmp_path: Path) -> None:
    """Shuffled anew in both epochs, with rows set aside for validation, and with test data in memory."""
    feeding["data"] |= {"shuffle": "global", "valid_share": 0.2}
    feeding["cluster"]["workers"] = 1
    given = {"data": clicks(), "test": clicks(TEST_ROWS, 2), "schema": SCHEMA, "quiet": True, "metrics": {"top": top}}
    done = clickfleet.train({**feeding, "mode": {"name": "sync"}}, **given)
    feeding["run"]["dir"] = str(tmp_path / "local")
    alone = clickfleet.train(feeding, "train.deterministic=true", "train.threads=1", **given)
    assert tables(alone.learner, done.learner) == (0.0, 0.0)
    assert (done.rows, done.steps) == (alone.rows, alone.steps)
    assert done.valid is not None
    assert alone.valid is not None
    assert (done.valid["auc"], done.valid["rows"]) == (alone.valid["auc"], alone.valid["rows"])
    assert done.valid["top"] == alone.valid["top"] > 0
    assert done.test is not None
    assert alone.test is not None
    assert done.test["auc"] == alone.test["auc"]
    assert not (tmp_path / "run" / "feed").exists()


def rows_of(table: pa.Table) -> Iterator[dict[str, Any]]:
    yield from table.to_pylist()


@pytest.mark.parametrize("mode", ["sync", only_in_soak("half_async"), "async", only_in_soak("geo")])
def test_every_row_is_learned_in_every_mode(ray: Any, feeding: dict[str, Any], mode: str) -> None:
    """A generator has rows for both epochs: they are written down once."""
    data = rows_of(clicks()) if mode == "async" else clicks().to_pandas()
    done = clickfleet.train(
        {**feeding, "mode": {"name": mode}}, data=data, schema=SCHEMA, quiet=True, valid=clicks(200, 5)
    )
    assert done.rows == 2 * ROWS
    assert shows(feeding["run"]["dir"]) == 2 * ROWS * SLOTS
    assert done.train["rows"] == ROWS


def test_the_same_data_continues_and_other_data_is_refused(ray: Any, feeding: dict[str, Any], tmp_path: Path) -> None:
    """Stopped in the middle of an epoch and resumed with another number of workers: every row once."""
    rows = 40_000
    data, run = clicks(rows), Path(feeding["run"]["dir"])
    feeding |= {"mode": {"name": "async"}, "train": {"epochs": 1}}
    feeding["data"] = {"batch_size": 10, "valid_share": 0.0}
    feeding["run"]["checkpoint_every_steps"] = 200
    when_saved(run, lambda: os.kill(os.getpid(), signal.SIGTERM))
    stopped = clickfleet.train(feeding, data=data, schema=SCHEMA, quiet=True)
    assert stopped.signal == signal.SIGTERM
    assert 0 < stopped.rows < rows
    feeding["cluster"]["workers"] = 1
    with pytest.raises(DataError, match="other data in memory"):
        clickfleet.train(feeding, data=clicks(rows, 7), schema=SCHEMA, quiet=True, resume=True)
    done = clickfleet.train(feeding, data=data, schema=SCHEMA, quiet=True, resume=True)
    assert (done.rows, done.new_rows) == (rows, rows - stopped.rows)
    assert shows(run) == rows * SLOTS


class Heard(clickfleet.Callback):
    """Ends the run after its first evaluation."""

    def __init__(self) -> None:
        self.kinds: list[str] = []

    def on_epoch(self, results: dict[str, Any]) -> None:
        self.kinds.append(f"epoch {results['epoch']}")

    def on_evaluation(self, results: dict[str, Any]) -> bool:
        self.kinds.append(f"evaluation of {results['rows']} rows")
        return False

    def on_end(self, result: Any) -> None:
        self.kinds.append("end")


def test_without_a_folder_the_model_stays_in_memory(
    ray: Any, feeding: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver calls callbacks and metric functions. A callback ends the run after its first epoch."""
    monkeypatch.chdir(tmp_path)
    del feeding["run"]["dir"]
    heard, given = Heard(), {"data": clicks(), "valid": clicks(TEST_ROWS, 2), "schema": SCHEMA, "quiet": True}
    feeding |= {"mode": {"name": "half_async"}, "train": {"epochs": 3}}
    own = {"seen": lambda labels, scores, weights: len(labels), "clicks": lambda labels, scores, weights: labels.sum()}
    done = clickfleet.train(feeding, callbacks=[heard], metrics=own, **given)
    assert done.valid is not None
    assert (done.valid["seen"], done.valid["clicks"]) == (TEST_ROWS, pc.sum(clicks(TEST_ROWS, 2)["clicked"]).as_py())
    assert heard.kinds == ["epoch 0", f"evaluation of {TEST_ROWS} rows", "end"]
    assert done.rows == ROWS
    assert done.path is None
    assert [record["kind"] for record in done.history] == ["epoch", "valid"]
    assert len(done.predict(clicks(10, 3))) == 10
    assert list(tmp_path.iterdir()) == []


def test_what_a_cluster_cannot_do_is_refused_before_it_starts(feeding: dict[str, Any]) -> None:
    feeding["mode"] = {"name": "async"}
    with pytest.raises(ConfigError, match="on_step cannot be called in mode async"):
        clickfleet.train(feeding, data=clicks(), schema=SCHEMA, callbacks=[lambda progress: None])
    del feeding["run"]["dir"]
    feeding["cluster"]["address"] = "auto"
    with pytest.raises(ConfigError, match="several hosts need a run folder"):
        clickfleet.train(feeding, data=clicks(), schema=SCHEMA)


def program(config: dict[str, Any], *overrides: str) -> dict[str, Any]:
    """One epoch batch by batch, and one in one go: the same program in every mode."""
    with clickfleet.join(config, *overrides, schema=SCHEMA, quiet=True) as job:
        with job.epoch() as epoch:
            losses = [epoch.step(batch) for batch in epoch.batches(clicks())]
            so_far = epoch.metrics()
        trained = job.train(rows_of(clicks()))
        tested = job.evaluate(clicks(TEST_ROWS, 2))
    return {"losses": losses, "so_far": so_far, "epoch": epoch.results, "trained": trained, "tested": tested}


def test_a_program_on_a_cluster_is_that_of_one_machine(ray: Any, feeding: dict[str, Any], tmp_path: Path) -> None:
    there = program(feeding, "mode.name=sync")
    run, here = Path(feeding["run"]["dir"]), {**feeding, "run": {**feeding["run"], "dir": str(tmp_path / "local")}}
    alone = program(here, "train.deterministic=true", "train.threads=1")
    assert there["losses"] == alone["losses"]
    for name in ("so_far", "epoch", "trained", "tested"):
        assert (there[name]["auc"], there[name]["rows"]) == (alone[name]["auc"], alone[name]["rows"]), name
    assert tables(clickfleet.load(tmp_path / "local").learner, clickfleet.load(run).learner) == (0.0, 0.0)
    assert not (run / "feed").exists()


@pytest.mark.parametrize("mode", [only_in_soak("half_async"), "async", only_in_soak("geo")])
def test_a_program_learns_every_row_in_every_mode(ray: Any, feeding: dict[str, Any], mode: str) -> None:
    done = program(feeding, f"mode.name={mode}")
    steps = -(-ROWS // 50)
    assert len(done["losses"]) == steps
    assert np.mean(done["losses"][-20:]) < np.mean(done["losses"][:20])
    assert (done["so_far"]["rows"], done["epoch"]["rows"], done["trained"]["rows"]) == (ROWS, ROWS, ROWS)
    assert (done["epoch"]["step"], done["trained"]["step"]) == (steps, 2 * steps)
    assert shows(feeding["run"]["dir"]) == 2 * ROWS * SLOTS
    assert done["tested"]["auc"] > 0.6


def test_a_failure_in_an_epoch_by_hand_ends_the_program_at_its_last_checkpoint(
    ray: Any, feeding: dict[str, Any]
) -> None:
    run = Path(feeding["run"]["dir"])
    feeding |= {"mode": {"name": "async"}, "table": {"dim": 4, "preset": "online"}}

    def failing() -> None:
        with clickfleet.join(feeding, schema=SCHEMA, quiet=True) as job:
            job.train(clicks())
            with job.epoch() as epoch:
                epoch.step(clicks(50, 4))
                with pytest.raises(ConfigError, match="not possible in the block of an epoch"):
                    job.barrier()
                kill(run, "worker 0")
                for i in range(100):
                    epoch.step(clicks(50, i))

    with pytest.raises(ClusterError, match=r"worker 0 failed: .*(?s:.)*resume=True"):
        failing()
    assert shows(run) == ROWS * SLOTS
    with clickfleet.join(feeding, schema=SCHEMA, quiet=True, resume=True) as job:
        with job.epoch() as epoch:
            epoch.step(clicks(50, 4))
        assert (epoch.number, epoch.results["rows"]) == (1, 50)
        assert shows(run) == (ROWS + 50) * SLOTS
        job.shrink()
        decayed = shows(job.save())  # a checkpoint of its own, although no step was made
        assert decayed < (ROWS + 50) * SLOTS
        job.save("base")  # which loads the rows again
    assert shows(run) == decayed
