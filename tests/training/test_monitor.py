"""What a person sees of training: a bar on a terminal, a line per interval elsewhere, and the same in files."""

import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import clickfleet
from clickfleet.cli import build
from clickfleet.cli.frame import run
from clickfleet.cluster.status import ClusterMonitor, ClusterProgress
from clickfleet.data.schema import Dense, Schema, Slot
from clickfleet.errors import DataError
from clickfleet.training import monitor
from clickfleet.training.metrics import Buckets
from clickfleet.workbench.dashboard import FollowedRun

SCHEMA = Schema(dense=(Dense("age"),), slots=(Slot("city"),))
LINE = (
    r"epoch 0  step [\d,]+  [\d,]+ rows  [\d,]+ rows/s  loss \d\.\d{4}  AUC \d\.\d{4}  last batches \d\.\d{4}  "
    r"table [\d,]+ rows [\d.]+ [kM]?B  (\d+:\d\d left  )?read \d+% pull \d+% compute \d+% push \d+% wait \d+%"
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stream: io.StringIO, **more: Any) -> str:
    monkeypatch.setattr(monitor, "INTERVAL_S", 0.0)
    monkeypatch.setattr(monitor, "BAR_INTERVAL_S", 0.0)
    monkeypatch.setattr(sys, "stderr", stream)
    lines = "".join(f"{i % 2}\t" + "\t".join(["1"] * 13 + [f"v{i % 7}"] * 26) + "\n" for i in range(600))
    (tmp_path / "a.tsv").write_text(lines)
    config = {
        "data": {"train": str(tmp_path / "a.tsv"), "batch_size": 50, "valid_share": 0},
        "model": {"name": "fm"},
        "train": {"threads": 1},
        "run": {"dir": str(tmp_path / "run"), "report": False, **more},
    }
    clickfleet.train(config)
    return stream.getvalue()


def test_a_line_per_interval_without_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = train(tmp_path, monkeypatch, io.StringIO()).splitlines()
    assert shown.pop(0).startswith("format criteo")
    assert shown.pop(0) == "600 rows: 1 epoch, in the order of the files"
    assert "only 12 steps" in shown.pop()
    assert len(shown) == 13  # twelve steps and the end of the epoch
    assert all(re.fullmatch(LINE, line) for line in shown[:12]), shown[0]
    assert "left" in shown[0]
    assert (tmp_path / "run/log.txt").read_text().count("rows/s") == 12
    points = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    train_points = [point for point in points if point["kind"] == "train"]
    assert [point["step"] for point in train_points] == list(range(1, 13))
    keys = {"rows_per_s", "loss", "auc", "sliding_auc", "table_rows", "table_bytes", "seconds_left", "shares"}
    assert keys <= train_points[0].keys()
    assert [point["kind"] for point in points[-3:]] == ["epoch", "checkpoint", "end"]
    assert points[-3]["rows_per_s"] > 0


def test_a_bar_on_a_terminal_shows_everything_at_any_width(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for columns in ("60", "200"):
        monkeypatch.setenv("COLUMNS", columns)
        folder = tmp_path / columns
        folder.mkdir()
        shown = train(folder, monkeypatch, Terminal())
        plain = re.sub(r"\s+", " ", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown))
        assert "━" in shown
        for words in ("rows/s", "loss 0.", "AUC 0.", "last batches", "table 182 rows", " left", "compute", "wait"):
            assert words in plain, (words, columns)
        assert "epoch 0 done: step 12" in plain
        assert "rows/s" in (folder / "run/log.txt").read_text()


def test_time_left_is_known_after_an_epoch_where_sizes_tell_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor, "INTERVAL_S", 0.0)
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    rng = np.random.default_rng(0)
    data = {"label": rng.integers(0, 2, 500), "age": rng.normal(size=500), "city": rng.integers(0, 9, 500)}
    config = {"data": {"batch_size": 50}, "model": {"name": "fm"}, "train": {"epochs": 3, "threads": 1}}
    clickfleet.train(config, data=data, schema=SCHEMA)
    lines = [line for line in stream.getvalue().splitlines() if "rows/s" in line]
    assert ["left" in line for line in lines] == [False] * 10 + [True] * 20
    assert "0:00 left" in lines[-1]


def test_points_of_a_curve_get_rarer() -> None:
    steps = [step for step in range(1, 100_001) if monitor.last_on_curve(step) == step]
    assert steps[:15] == list(range(1, 16))
    assert len(steps) < 130
    gaps = np.diff(steps)
    assert (gaps <= np.array(steps[1:]) / 7).all() or (gaps[:15] == 1).all()


def test_a_curve_of_a_run_that_is_looked_at_now_and_then(tmp_path: Path) -> None:
    """Looks at a cluster fall on any step: each that has passed a point of the curve makes one."""
    seen = ClusterMonitor(tmp_path, quiet=True)
    overview: Any = ClusterProgress(100)
    learned = Buckets(100)
    learned.update(np.array([0.2, 0.7], np.float32), np.array([0.0, 1.0], np.float32))
    seen.start(overview)
    for steps in (0, 5, 37, 37, 38, 43, 1000):
        overview.workers = {"worker 0": {"steps": steps, "rows": steps * 10, "buckets": learned.state()["buckets"]}}
        seen.tick(overview)
    seen.close()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [5, 37, 43, 1000]


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_a_line_every_so_many_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stream: type[io.StringIO], capsys: pytest.CaptureFixture[str]
) -> None:
    """Of training and of evaluation, on a terminal too."""
    shown = stream()
    monkeypatch.setattr(sys, "stderr", shown)
    lines = "".join(f"{i % 2}\t" + "\t".join(["1"] * 13 + [f"v{i % 7}"] * 26) + "\n" for i in range(600))
    (tmp_path / "a.tsv").write_text(lines)
    config = {
        "data": {"train": str(tmp_path / "a.tsv"), "test": str(tmp_path / "a.tsv"), "batch_size": 50},
        "model": {"name": "fm"},
        "train": {"threads": 1, "print_every": 5},
        "run": {"dir": str(tmp_path / "run"), "report": False},
    }
    clickfleet.train(config)
    log = (tmp_path / "run/log.txt").read_text()
    assert re.findall(r"epoch 0  step (\d+)", log) == ["5", "10"]
    assert re.findall(r"evaluating: batch (\d+)  ([\d,]+) rows", log) == [("5", "250"), ("10", "500")]
    text = shown.getvalue()
    assert [text.count(f"step {n}  ") >= 1 for n in (5, 10)] == [True, True]
    assert "evaluating: batch 10" in text
    assert run(build(), ["evaluate", str(tmp_path / "run"), str(tmp_path / "a.tsv")]) == 0
    assert shown.getvalue().count("evaluating: batch 10") == 2


@pytest.mark.parametrize("settings", [[], ["data.batch_size=50", "data.shuffle=0", "train.epochs=1", "table.rule=sgd"]])
def test_a_run_that_fails_before_it_begins_says_so(tmp_path: Path, settings: list[str]) -> None:
    """While the automatic settings are chosen, and when nothing is left to choose but validation rows."""
    rows = "".join(f"{i % 2},{i % 7}\n" for i in range(3_000))
    (tmp_path / "rows.csv").write_text("clicked,city\n" + rows + "7,7\n" + rows)
    data = {"train": [str(tmp_path / "rows.csv")], "format": "csv"}
    config = {"data": data, "run": {"dir": str(tmp_path / "run")}}
    schema = Schema(slots=(Slot("city"),), label="clicked")
    with pytest.raises(DataError, match="not a label"):
        clickfleet.train(config, *settings, schema=schema, quiet=True)
    followed = FollowedRun(tmp_path / "run")
    followed.read()
    assert followed.status == "failed"
    assert "not a label" in followed.state
    (tmp_path / "rows.csv").write_text("clicked,city\n" + rows)
    clickfleet.train(config, *settings, "train.epochs=1", schema=schema, quiet=True)
    again = FollowedRun(tmp_path / "run")
    again.read()
    assert again.status == "finished"
