"""A log, a run of `train` and a run of `online`, made once for all tests of the workbench."""

from pathlib import Path
from typing import Any

import pytest

import clickfleet
from clickfleet.data.logs.synth import SynthOptions, synth
from clickfleet.online.learn import learn
from streams import settings, write_days


@pytest.fixture(scope="session")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("workbench-log")
    synth(out, SynthOptions(rows=1200, test_rows=400, seed=5))
    return out


@pytest.fixture(scope="session")
def config(log: Path) -> dict[str, Any]:
    """Small, with its run folder left to the test, and nothing left to be chosen: runs in other processes would see a small log."""
    return {
        "data": {
            "train": [str(log / "train")],
            "valid": [str(log / "test")],
            "test": [str(log / "test")],
            "batch_size": 100,
            "shuffle": 0,
        },
        "model": {"name": "deepfm", "hidden": [8]},
        "table": {"dim": 4},
        "dense": {"lr": 0.001},
        "train": {"epochs": 1, "eval_every": 6, "threads": 1},
    }


@pytest.fixture(scope="session")
def run(config: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("workbench") / "trained"
    clickfleet.train({**config, "run": {"dir": str(folder), "checkpoint_every_steps": 4}}, quiet=True)
    return folder


@pytest.fixture(scope="session")
def stream(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two days of two passes: rows that are admitted late, forgotten, published."""
    folder = tmp_path_factory.mktemp("workbench-stream")
    write_days(folder, days=2, splits=2, rows=60)
    table = {"admission": "score(2)", "delete_threshold": 0.3}
    learn(settings(folder, 2, table=table, run={"dir": str(folder / "run"), "keep": 9}), quiet=True)
    return folder / "run"
