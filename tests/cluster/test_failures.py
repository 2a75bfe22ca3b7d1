"""Real processes, really killed: whatever is lost, every row is learned exactly once and the run ends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import clickfleet
from clickfleet.cluster.checkpoints import ClusterCheckpoints
from fleet import LONG, ROWS, SLOTS, TEST_ROWS, kill, shows, when_saved
from soak import only_in_soak

pytestmark = pytest.mark.xdist_group("cluster")


@pytest.mark.parametrize(
    ("mode", "victim"), [("async", "worker 1"), ("sync", "shard 0"), only_in_soak("geo", "worker 0")]
)
def test_a_killed_process_costs_nothing_but_time(ray: Any, config: dict[str, Any], mode: str, victim: str) -> None:
    config["mode"], config["run"]["checkpoint_every_steps"] = {"name": mode}, 100
    config["data"]["batch_size"] = LONG
    run = Path(config["run"]["dir"])
    watcher = when_saved(run, lambda: kill(run, victim))
    done = clickfleet.train(config, quiet=True)
    watcher.join(60)
    log = (run / "log.txt").read_text()
    assert f"{victim} failed: " in log
    assert "back to step" in log
    assert done.rows == ROWS
    assert shows(run) == ROWS * SLOTS
    assert done.test is not None
    assert done.test["rows"] == TEST_ROWS
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    last = {line["kind"]: line for line in lines}
    # One number of rows, whatever was trained on again; the last batches of all workers, which began anew after the loss.
    assert [last[kind]["rows"] for kind in ("epoch", "cut", "cluster")] == [ROWS] * 3
    assert last["epoch"]["sliding_auc"] not in (0.5, last["epoch"]["auc"])
    assert f"last batches {last['epoch']['sliding_auc']:.4f}" in log
    assert last["cluster"]["dropped_messages"] == 0


@pytest.mark.parametrize(("mode", "victim"), [("sync", "shard 0"), only_in_soak("async", "worker 1")])
def test_a_process_killed_in_the_last_cut(
    ray: Any, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch, mode: str, victim: str
) -> None:
    """The workers have ended their training then, and wait for a shard that may be no more."""
    config["mode"] = {"name": mode}
    run = Path(config["run"]["dir"])
    begin = ClusterCheckpoints.begin

    def kill_after(self: ClusterCheckpoints, *arguments: Any, **options: Any) -> None:
        begin(self, *arguments, **options)
        if self.number == 1:
            kill(run, victim)

    monkeypatch.setattr(ClusterCheckpoints, "begin", kill_after)
    done = clickfleet.train(config, quiet=True)
    assert f"{victim} failed: " in (run / "log.txt").read_text()
    assert done.rows == ROWS
    assert shows(run) == ROWS * SLOTS
    # The epoch had ended. Its line was after the checkpoint to which the run was rolled back, so only the second one is left.
    kinds = [json.loads(line)["kind"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert kinds.count("epoch") == 1
