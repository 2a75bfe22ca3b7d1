"""One Ray on this machine for all tests of the cluster, and small data to train on.

Tests of the group `cluster` share it, one after the other. Those of `own clusters` start their own, beside it, on the other worker.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clickfleet.config.sections import Cluster
from clickfleet.data.logs.synth import SynthOptions, synth
from fleet import ROWS, TEST_ROWS


@pytest.fixture(scope="session")
def ray() -> Iterator[Any]:
    from clickfleet.cluster.ray_start import RayStart

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        start = RayStart(Cluster(shards=2, workers=14))  # a private one, as a run starts it
        start.done.wait()
    if start.problem is not None:
        raise start.problem
    yield start.ray
    start.end()


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    synth(folder, SynthOptions(rows=ROWS, test_rows=TEST_ROWS, parts=4, seed=3))
    return folder


@pytest.fixture
def config(data: Path, tmp_path: Path) -> dict[str, Any]:
    return {
        "data": {"train": [str(data / "train" / "*")], "test": [str(data / "test" / "*")], "batch_size": 60},
        "model": {"name": "dnn", "hidden": [16]},
        "table": {"dim": 4},
        "train": {"epochs": 1},  # also in processes of their own, which know nothing of large logs
        "run": {"dir": str(tmp_path / "run"), "checkpoint_every": None, "report": False},
        "cluster": {"shards": 2, "workers": 2, "start_timeout": "250s"},
    }
