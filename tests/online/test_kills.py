"""kill -9 at any moment: the run that goes on ends like the one that was never stopped."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from clickfleet.store import checkpoint, published
from streams import settings, write_days

OF_THE_PROCESS = (
    "time",
    "seconds",
    "table_bytes",
    "table_disk_rows",
    "table_disk_bytes",
    "table_index_bytes",
    "evicted",
)
SOAK = bool(os.environ.get("CLICKFLEET_SOAK"))


def run(config: Path, kills: int, seed: int) -> int:
    done = subprocess.run(
        [
            sys.executable,
            str(Path(__file__).parents[1] / "support" / "killed.py"),
            str(config),
            str(kills),
            str(seed),
            "online",
        ],
        capture_output=True,
        text=True,
        timeout=3600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return int(done.stdout.split()[-1])


def contents(folder: Path) -> dict[str, object]:
    """All that must be the same: the last checkpoint, the log, the metrics but for times."""
    last = checkpoint.latest(folder / "checkpoints")
    files = {path.name: path.read_bytes() for path in last.iterdir()}
    for name in ("config.yaml", "manifest.json"):
        del files[name]
    state = json.loads(files.pop("state.json"))
    metrics = []
    for text in (folder / "metrics.jsonl").read_text().splitlines():
        line = json.loads(text)
        if line["kind"] not in ("train", "checkpoint"):
            metrics.append({k: v for k, v in line.items() if k not in OF_THE_PROCESS and not k.startswith("event_to")})
    log = published.Log(folder / "published")
    for line in log.lines():
        if (log.folder / line.name).exists():
            log.entry(line).verify()
    return {"files": files, "state": state, "log": log.path.read_bytes(), "metrics": metrics}


CASES = ["progressive", "pass", "evicting", "micro-passes", "at a URL"] if SOAK else ["evicting", "micro-passes"]


def split_files(folder: Path, rows: int) -> None:
    """Divide each file of a stream into files of so many rows."""
    for path in folder.rglob("part-0.csv"):
        header, *rest = path.read_text().splitlines(keepends=True)
        path.unlink()
        for number, first in enumerate(range(0, len(rest), rows)):
            (path.parent / f"part-{number:03d}.csv").write_text(header + "".join(rest[first : first + rows]))


@pytest.mark.parametrize("seed", range(10 if SOAK else 1))
@pytest.mark.parametrize("case", CASES)
def test_killed_anywhere_it_ends_the_same(tmp_path, graph, seed, case):
    """`evicting`: new users all the time; what the memory limit takes, and when, is the same after any restart."""
    evicting = case == "evicting"
    write_days(tmp_path, days=3, splits=2, rows=2500 if evicting else 90, users=10**6 if evicting else 40)
    raw = settings(
        tmp_path,
        data={"batch_size": 256} if evicting else {},
        online={"end_day": 20260103, "validate": "pass" if case == "pass" else "progressive"},
        run={"checkpoint_every_steps": 4},
        table={"memory_limit": "900KB", "snapshot_reserve": "350KB", "delete_threshold": 0.0} if evicting else {},
        publish={"keep_chains": 2, "guard": {"auc_drop": 0.03, "copc": [0.7, 1.6], "min_rows": 10}},
    )
    if case == "micro-passes":
        shutil.rmtree(tmp_path / "logs" / "20260103")
        raw["online"]["end_day"] = 20260102
        split_files(tmp_path / "logs", 15)
        raw["online"]["pass"] = {"rows": 30}
    if case == "at a URL":
        raw["run"]["dir"] = f"file://{tmp_path}/run"
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(raw))
    folder = tmp_path / "run"
    folder.mkdir()
    shutil.copy(graph, folder / "graph.onnx")
    assert run(config, 0, seed) == 0
    wanted = contents(folder)
    days = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines() if '"day"' in line]
    assert (sum(line.get("evicted", 0) for line in days) > 1000) == evicting
    shutil.rmtree(folder)
    folder.mkdir()
    shutil.copy(graph, folder / "graph.onnx")
    assert run(config, 60 if SOAK else 4, seed) > 0
    assert contents(folder) == wanted


def test_killed_with_rows_on_disk_it_ends_like_one_in_memory(tmp_path, graph):
    write_days(tmp_path, days=2, splits=2, rows=6000, users=10**6)
    kept = {"delete_threshold": 0.0, "base_threshold": 0.0}
    on_disk = {"memory_limit": "2MB", "snapshot_reserve": "700KB", "disk": str(tmp_path / "disk")}
    folder, config, ends = tmp_path / "run", tmp_path / "config.yaml", []
    for table, kills in ((kept, 0), ({**kept, **on_disk}, 20 if SOAK else 3)):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        shutil.copy(graph, folder / "graph.onnx")
        raw = settings(tmp_path, data={"batch_size": 256}, run={"checkpoint_every_steps": 8}, table=table)
        config.write_text(yaml.safe_dump(raw))
        assert (run(config, kills, 1) > 0) == (kills > 0)
        ends.append(contents(folder))
    days = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines() if '"day"' in line]
    assert days[-1]["table_disk_rows"] > 1000
    assert ends[0] == ends[1]
    assert len(list((tmp_path / "disk").glob("table-*"))) <= 1  # that of the last process, which also ends at once
