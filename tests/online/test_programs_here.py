"""A program with a loop of its own on one machine: what it trains, saves and refuses."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import clickfleet
from clickfleet.data.schema import Dense, Schema, Slot
from clickfleet.errors import CheckpointError, ConfigError, DataError
from fleet import shows, tables

ROWS, SLOTS = 1_000, 1
SCHEMA = Schema(dense=(Dense("age"),), slots=(Slot("city"),), label="clicked")


def clicks(rows: int = ROWS, seed: int = 1) -> pa.Table:
    draw = np.random.default_rng(seed)
    city = draw.integers(0, 40, rows)
    clicked = (draw.random(rows) < np.where(city < 10, 0.7, 0.2)).astype(np.int64)
    return pa.table({"clicked": clicked, "age": draw.random(rows), "city": city})


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    return {
        "data": {"batch_size": 50, "shuffle": 0, "valid_share": 0.0},
        "model": {"name": "dnn", "hidden": [8]},
        "table": {"dim": 4},
        "train": {"epochs": 2, "deterministic": True, "threads": 1},
        "run": {"dir": str(tmp_path / "run"), "report": False},
    }


def test_epochs_by_hand_are_those_of_train(config: dict[str, Any], tmp_path: Path) -> None:
    with clickfleet.join(config, schema=SCHEMA, quiet=True) as job:
        with job.epoch() as epoch:
            losses = [epoch.step(batch) for batch in epoch.batches(clicks())]
            so_far = epoch.metrics()
        assert (epoch.number, epoch.steps, epoch.rows) == (0, 20, ROWS)
        assert so_far["auc"] == epoch.results["auc"]
        assert epoch.results["step"] == 20
        assert np.mean(losses[-5:]) < np.mean(losses[:5])  # type: ignore[arg-type]
        again = job.train(clicks())  # the second epoch in one go
        assert (again["rows"], again["step"]) == (ROWS, 40)
        tested = job.evaluate(clicks(300, 9))["auc"]
        assert (job.is_first_worker, job.worker_num, job.all_reduce(3), job.split_files(["a"])) == (True, 1, 3, ["a"])
        job.barrier()
    here = clickfleet.load(config["run"]["dir"])
    config["run"]["dir"] = str(tmp_path / "other")
    other = clickfleet.train(config, data=clicks(), schema=SCHEMA, quiet=True)
    assert tables(here.learner, other.learner) == (0.0, 0.0)
    assert tested == other.evaluate(clicks(300, 9))["auc"]
    assert shows(tmp_path / "run") == 2 * ROWS * SLOTS


def test_a_step_takes_whatever_a_feed_takes(config: dict[str, Any]) -> None:
    table = clicks(30)
    with clickfleet.join(config, schema=SCHEMA, quiet=True) as job:
        with job.epoch() as epoch:
            for rows in (table, table.to_pandas(), table.to_pylist(), table.to_pydict()):
                loss = epoch.step(rows)
                assert loss is not None
            assert epoch.step(table.slice(0, 0)) is None
            with pytest.raises(DataError, match=r"no label \(clicked\)"):
                epoch.step(table.drop_columns("clicked"))
            with pytest.raises(DataError, match="the schema has 1 and 1"):
                epoch.step(
                    clickfleet.Batch(np.zeros((1, 2), np.float32), np.zeros(1, np.uint64), 1, labels=np.zeros(1))
                )
        assert (epoch.steps, epoch.rows, epoch.results["rows"]) == (4, 120, 120)
        with pytest.raises(ConfigError, match="the epoch has ended"):
            epoch.step(table)


def test_a_program_saves_publishes_and_resumes(config: dict[str, Any], tmp_path: Path) -> None:
    config["table"]["preset"] = "online"
    with clickfleet.join(config, schema=SCHEMA, quiet=True) as job:
        job.train(clicks(100))
        assert Path(job.save("base")).name == "000001-base"
        job.train(clicks())
        assert Path(job.save("delta")).name == "000002-delta"
        assert shows(tmp_path / "run") == (ROWS + 100) * SLOTS
        job.shrink()
        decayed = shows(job.save())
        assert decayed < (ROWS + 100) * SLOTS
        assert Path(job.save("base")).name == "000003-base"
        with pytest.raises(ConfigError, match="cannot save a 'cut'"):
            job.save("cut")  # type: ignore[arg-type]
    with clickfleet.join(config, schema=SCHEMA, quiet=True, resume=True) as job:
        with job.epoch() as epoch:
            epoch.step(clicks(10))
        assert epoch.number == 2
    assert shows(tmp_path / "run") == pytest.approx(decayed + 10)
    with pytest.raises(CheckpointError, match="holds a run already"), clickfleet.join(config, schema=SCHEMA):
        pass


def test_a_signal_stops_training_and_the_same_data_continues(config: dict[str, Any], tmp_path: Path) -> None:
    def rows() -> Any:
        for i, row in enumerate(clicks(20_000).to_pylist()):
            if i == 9_000:
                os.kill(os.getpid(), signal.SIGTERM)
            yield row

    with pytest.raises(SystemExit), clickfleet.join(config, schema=SCHEMA, quiet=True) as job:
        job.train(rows())
    stopped = shows(tmp_path / "run")
    assert 0 < stopped < 20_000
    with clickfleet.join(config, schema=SCHEMA, quiet=True, resume=True) as job:
        with pytest.raises(CheckpointError, match="in the middle of an epoch"), job.epoch():
            pass
        assert job.train(clicks(20_000).to_pylist())["rows"] == 20_000
    assert shows(tmp_path / "run") == 20_000


def test_an_error_in_the_block_leaves_the_last_checkpoint(config: dict[str, Any], tmp_path: Path) -> None:
    def program() -> None:
        with clickfleet.join(config, schema=SCHEMA, quiet=True) as job:
            job.train(clicks())
            with job.epoch() as epoch:
                epoch.step(clicks(50))
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        program()
    assert shows(tmp_path / "run") == ROWS
