"""Run folders on remote storage: a cluster run writes to S3, goes on from there, and its model is read from there."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import clickfleet
from clickfleet.cluster.shard import Rules
from clickfleet.cluster.shard_server import CheckpointOrigin, ShardActor
from clickfleet.config.load import load
from clickfleet.errors import CheckpointError
from clickfleet.store import checkpoint, mirror
from clickfleet.store.mirror import Mirror
from fleet import ROWS, SLOTS, shows

pytestmark = [
    pytest.mark.xdist_group("cluster"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


def test_a_run_on_s3_is_saved_resumed_and_evaluated(ray: Any, config: dict[str, Any], bucket: Any) -> None:
    config["mode"] = {"name": "sync"}
    config["run"] = {"dir": "s3://models/run", "checkpoint_every_steps": 100, "checkpoint_every": None}
    config["cluster"] = {"shards": 2, "workers": 1}
    config["train"] = {"epochs": 1}
    done = clickfleet.train(config, quiet=True)
    assert done.to_dict()["checkpoint"] == f"s3://models/run/checkpoints/step-{ROWS // 60:012d}"
    names = {name.removeprefix("models/run/") for name in bucket.find("models/run")}
    assert {
        "log.txt",
        "metrics.jsonl",
        "config.yaml",
        "checkpoints/LATEST",
        "report.html",
        "logs/serverlog.0",
        "logs/workerlog.0",
    } <= names
    assert any(name.startswith("tensorboard/") for name in names)
    assert not any(".writing" in name for name in names)
    steps = {name.split("/")[1] for name in names if name.startswith("checkpoints/step-")}
    assert 1 <= len(steps) <= 4  # old ones went
    assert "dir: s3://models/run" in bucket.cat_file(f"models/run/checkpoints/{max(steps)}/config.yaml").decode()

    with pytest.raises(CheckpointError, match="holds a run"):
        clickfleet.train(config, quiet=True)
    config["train"] = {"epochs": 2}
    again = clickfleet.train(config, resume=True, quiet=True)
    assert (again.rows, again.new_rows) == (2 * ROWS, ROWS)
    assert shows("s3://models/run") == 2 * ROWS * SLOTS
    assert clickfleet.load("s3://models/run").evaluate(config["data"]["test"])["auc"] == pytest.approx(
        again.test["auc"]
    )  # type: ignore[index]
    log = bucket.cat_file("models/run/log.txt").decode()
    assert "epoch 0 done" in log
    assert "epoch 1 done" in log
    kinds = [json.loads(line)["kind"] for line in bucket.cat_file("models/run/metrics.jsonl").decode().splitlines()]
    assert kinds.count("test") == 2


def test_shards_of_other_hosts_put_their_rows_and_get_them_back(
    ray: Any, bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a shard does where the driver's folder is not its own."""
    import numpy as np

    monkeypatch.chdir(tmp_path)  # the shard writes its log where it is

    table = clickfleet.Table(factors=2)
    keys = np.arange(1, 500, dtype=np.uint64)
    table.move(keys, np.ones((len(keys), 3), np.float32), add=False)
    checkpoint.save(table, tmp_path / "all", files=8, step=1)
    url = "s3://models/apart/checkpoints/step-000000000001"
    mirror.put(list((tmp_path / "all").iterdir()), url)
    base = load(None, ["mode.name=async", "cluster.shards=2"])
    actor = ShardActor(1, replace(base), Rules(), (1, 2, 3), "")
    import torch

    origin = CheckpointOrigin(url, {"memory_limit": None}, {"values": torch.zeros(10)})
    actor.load(origin, (1, 2, 3), [0])
    assert actor.shard is not None
    assert 150 < len(actor.shard.table) < 350
    mine = tmp_path / "rows.arrow"
    mine.write_bytes(b"rows")
    actor.files.written = [mine]
    actor.deliver(1, "s3://models/apart/there")
    assert bucket.cat_file("models/apart/there/rows.arrow") == b"rows"
    assert not mine.exists()
    actor.close()


def test_a_mirror_holds_what_is_complete(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/there"
    one = Mirror(url)
    assert not one.has_checkpoint()
    with pytest.raises(CheckpointError, match="holds no checkpoint yet"):
        Mirror(url).fetch()
    table, folder = clickfleet.Table(factors=2), one.folder / "checkpoints"
    for step in (1, 2, 3):
        checkpoint.write(table, folder, step, keep=1)
        (folder / ".cut-9.writing").mkdir(exist_ok=True)
        (folder / ".cut-9.writing" / "rows").touch()
        one.push()
    there = tmp_path / "there" / "checkpoints"
    assert sorted(path.name for path in there.iterdir()) == ["LATEST", "step-000000000003"]
    two = Mirror(url)
    two.fetch()
    assert checkpoint.steps(two.folder / "checkpoints") == [3]
    assert mirror.origin(two.folder / "checkpoints") == f"{url}/checkpoints"
    assert len(checkpoint.load(checkpoint.latest(two.folder / "checkpoints"))) == 0
