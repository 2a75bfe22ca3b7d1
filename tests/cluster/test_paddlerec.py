"""A PaddleRec configuration on a cluster, as fleetrun started it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from clickfleet.cli import build
from clickfleet.cli.frame import run
from originals import ONLINE, READER, project, slot_lines, write_slot_days

pytestmark = pytest.mark.xdist_group("cluster")


def test_launch_obeys_the_file_and_names_the_logs(
    ray: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    path = project(tmp_path, "dnn", sync_mode="geo", geo_step=2)
    (path.parent / "reader.py").write_text(READER)
    (path.parent / "data" / "train" / "part-1").write_text(slot_lines(40, 9))
    argv = ["launch", "--json", "--server_num", "2", "--worker_num", "2", str(path)]
    argv += ["-o", "runner.epochs=1", "cluster.start_timeout=250s"]
    assert run(build(), argv) == 0, capsys.readouterr().err
    done = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert done["rows"] == 80
    assert done["test_auc"] is not None
    for name, says in (
        ("serverlog.1", "shard 1 of 2"),
        ("workerlog.0", "worker 0 of 2"),
        ("workerlog.1", "worker 1 of 2"),
    ):
        assert says in (tmp_path / "log" / name).read_text()


def test_launch_of_a_file_with_days_learns_them(
    ray: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The real config_online.yaml has epochs too."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "slot_dnn" / "config_online.yaml"
    path.parent.mkdir()
    runner = {**ONLINE["runner"], "epochs": 3, "sync_mode": "geo", "data_donefile": "data.done"}
    path.write_text(yaml.safe_dump({**ONLINE, "runner": runner}))
    write_slot_days(tmp_path / "days", ["20190720"], rows=15, parts=2, done="data.done")
    argv = ["launch", "--json", "--server_num", "2", "--worker_num", "2", str(path), "-o", "cluster.start_timeout=250s"]
    assert run(build(), argv) == 0, capsys.readouterr().err
    done = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (done["passes"], done["rows"], done["day"]) == (2, 60, 20190720)
    assert "worker 1 of 2" in (tmp_path / "log" / "workerlog.1").read_text()
    assert (tmp_path / "stream" / "model" / "base_donefile.txt").exists()
