"""Rows trained on and steps are the same number wherever they are shown."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

import clickfleet
from clickfleet.cli import build
from clickfleet.cli.frame import run as command
from clickfleet.store import checkpoint
from clickfleet.store.lock import Lock, is_held
from clickfleet.training.report.evidence import read_lines
from clickfleet.workbench import compare
from clickfleet.workbench.dashboard import FollowedRun, folders
from numbers_shown import shown_numbers
from served import until


@pytest.mark.parametrize("trainers", [1, 2])
def test_epochs_with_a_partial_last_batch(
    trainers: int, config: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    more = {**config, "data": {**config["data"], "batch_size": 70}, "run": {"dir": str(folder)}}
    more["train"] = {"epochs": 3, "threads": trainers, "hogwild": trainers, "eval_every": 7}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(more))
    assert command(build(), ["train", str(tmp_path / "c.yaml"), "--json"]) == 0
    said = capsys.readouterr()
    result = json.loads(said.out.splitlines()[-1])
    rows, steps = 3 * 1200, 3 * 18  # 17 batches of 70 rows, and one of 10
    assert (result["rows"], result["steps"]) == (rows, steps)
    assert "3,600 rows in" in said.out + said.err
    assert set(shown_numbers(folder).values()) == {(rows, steps)}
    lines = read_lines(folder)
    assert [line["trained_rows"] for line in lines["valid"] if line["step"] == 7] == [490]
    assert lines["test"][-1]["trained_rows"] == rows


def test_after_a_resume(config: dict[str, Any], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    first = {**config, "run": {"dir": str(folder)}, "train": {"epochs": 1, "threads": 1}}
    assert clickfleet.train(first, quiet=True).rows == 1200
    done = clickfleet.train({**first, "train": {"epochs": 2, "threads": 1}}, resume=True, quiet=True)
    assert (done.rows, done.new_rows, done.steps) == (2400, 1200, 24)
    assert set(shown_numbers(folder).values()) == {(2400, 24)}
    assert len(read_lines(folder)["end"]) == 1


def test_of_a_stream(stream: Path) -> None:
    found = shown_numbers(stream)
    assert {rows for rows, _ in found.values()} == {240}
    assert len({found[where] for where in ("end", "dashboard", "report")}) == 1


def test_comparisons_draw_over_the_rows_that_were_trained_on(config: dict[str, Any], tmp_path: Path) -> None:
    base = {**config, "data": {**config["data"], "batch_size": 70}}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(base))
    done = compare.compare(tmp_path / "c.yaml", models=["lr"], out=tmp_path / "out", say=lambda text: None)
    (line,) = done.plan.models
    for kind, key in (("train", "auc"), ("test", "auc")):
        points = compare.points(line.orders[0], kind, key)
        assert points[-1][0] == 1200  # not 18 steps of 70 rows


def states(folder: Path) -> tuple[str, str, str | None]:
    run = FollowedRun(folder)
    run.read()
    return run.status, run.state, run.resume


@contextmanager
def started(argv: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """A process that does not outlive the test."""
    with subprocess.Popen(argv, stdout=subprocess.DEVNULL) as process:
        try:
            yield process
        finally:
            process.kill()


def test_a_killed_run_is_told_from_a_finished_and_a_running_one(
    run: Path, stream: Path, config: dict[str, Any], tmp_path: Path
) -> None:
    assert states(run)[:2] == ("finished", "finished at step 12")
    assert states(stream)[0] == "finished"
    folder = tmp_path / "a run"
    more = {**config, "run": {"dir": str(folder), "checkpoint_every_steps": 4}}
    more["train"] = {"epochs": 100_000, "threads": 1}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(more))
    argv = [sys.executable, "-c", "from clickfleet.cli import main; main()", "train", str(tmp_path / "c.yaml")]
    with started(argv) as process:
        until(lambda: (folder / "checkpoints" / "LATEST").exists() and states(folder)[1] == "running")
        assert is_held(folder / ".lock")
        process.kill()
    assert not is_held(folder / ".lock")
    status, state, resume = states(folder)
    assert status == "crashed"
    assert re.fullmatch(r"crashed at step [\d,]+", state)
    assert resume == f"clickfleet train '{folder}/config.yaml' --resume"
    newest = checkpoint.steps(folder / "checkpoints")[-1]
    argv = [*argv[:4], str(folder / "config.yaml"), "--resume"]  # what it says works
    with started(argv) as process:
        until(lambda: checkpoint.steps(folder / "checkpoints")[-1] > newest)
        assert states(folder)[0] == "running"
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 128 + signal.SIGTERM
    assert states(folder)[0] == "stopped"
    assert states(folder)[2] is not None


def test_a_failed_run_says_why(config: dict[str, Any], tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.write_text("1\tnot\tenough\n" * 300)
    source = {"train": str(data), "format": "criteo", "batch_size": 100, "shuffle": 0, "valid_share": 0}
    more = {**config, "data": source, "table": {"rule": "adagrad"}, "run": {"dir": str(tmp_path / "run")}}
    with pytest.raises(clickfleet.errors.DataError):
        clickfleet.train({**more, "train": {"epochs": 1}}, quiet=True)
    status, state, _ = states(tmp_path / "run")
    assert status == "failed"
    assert "expected 40 tab-separated fields" in state


def test_run_folders_are_found_at_any_depth(run: Path, tmp_path: Path) -> None:
    for name in ("a/b/one", "a/two", "three"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "metrics.jsonl").write_text("")
    (tmp_path / "a/two/checkpoints/step-1").mkdir(parents=True)
    (tmp_path / "a/two/inner").mkdir()
    (tmp_path / "a/two/inner/metrics.jsonl").write_text("")  # inside a run
    (tmp_path / "loop").symlink_to(tmp_path)
    assert folders([tmp_path]) == [tmp_path / name for name in ("a/b/one", "a/two", "three")]
    assert folders([run, run]) == [run]
    assert folders([tmp_path / "a/b/one", tmp_path / "a"]) == [tmp_path / "a/b/one", tmp_path / "a/two"]


def test_looking_at_a_lock_does_not_take_it(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    assert is_held(path) is None
    with Lock(path, "trains"):
        assert is_held(path) is True
    assert is_held(path) is False
    path.write_text(f"\nprocess {os.getpid()} on another.host (since today)\n")
    assert is_held(path) is None  # nobody here can know
