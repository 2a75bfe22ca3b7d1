"""train.profile: a table of layers and a trace, and the same model as without."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import clickfleet
from clickfleet.data.schema import Dense, Schema, Slot
from clickfleet.training.model import TrainingResult

SCHEMA = Schema(dense=(Dense("age"),), slots=(Slot("city"), Slot("shop")))


def train(folder: Path, rows: int = 4000, **more: Any) -> TrainingResult:
    rng = np.random.default_rng(0)
    data = {"label": rng.integers(0, 2, rows), "age": rng.normal(size=rows)}
    data |= {name: rng.integers(0, 50, rows) for name in ("city", "shop")}
    config = {
        "model": {"name": "dcn", "hidden": [16, 8]},
        "data": {"batch_size": 100},
        "train": {"threads": 1, **more},
        "run": {"dir": str(folder), "report": False},
    }
    return clickfleet.train(config, data=data, schema=SCHEMA, quiet=True)


@pytest.mark.parametrize("trainers", [1, 2])
def test_every_layer_has_its_line_and_the_trace_its_phases(tmp_path: Path, trainers: int) -> None:
    done = train(tmp_path, profile=True, threads=trainers, hogwild=trainers)
    text = (tmp_path / "profile/layers.txt").read_text()
    assert text.strip() in (tmp_path / "log.txt").read_text()
    assert text.startswith("layers, mean of 20 steps")
    lines = {line.split()[4]: [float(x.rstrip("%")) for x in line.split()[:3]] for line in text.splitlines()[2:5]}
    assert set(lines) == {"(whole", "columns", "deep"}
    whole, deep = lines["(whole"], lines["deep"]
    assert 0 < deep[0] <= whole[0]
    assert 0 < deep[1] <= whole[1]
    assert "heaviest operations" in text
    events = json.loads((tmp_path / "profile/trace.json").read_text())["traceEvents"]
    phases = [event for event in events if event.get("cat") == "phase"]
    assert {event["name"] for event in phases} == {"read", "pull", "compute", "push", "wait"}
    inside = 0
    for event in events:
        if event.get("name") == "layer (whole model)":
            inside += any(
                p["name"] == "compute" and p["tid"] == event["tid"] and p["ts"] <= event["ts"] + 1 < p["ts"] + p["dur"]
                for p in phases
            )
    assert inside >= 15  # all but those at the ends
    model: Any = done.learner.model
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_profiling_changes_nothing(tmp_path: Path) -> None:
    one, other = (train(tmp_path / str(on), profile=on, deterministic=True) for on in (True, False))
    assert all(a.equal(b) for a, b in zip(one.learner.dense().values(), other.learner.dense().values(), strict=True))


def test_a_run_too_short_says_so(tmp_path: Path) -> None:
    train(tmp_path, rows=500, profile=True)
    assert (tmp_path / "profile/layers.txt").read_text() == "no profile: the run ended before step 11\n"
