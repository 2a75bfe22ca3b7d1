"""Comparisons: what is trained, what is told, what survives kills and failures."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from clickfleet.cli import build
from clickfleet.cli.frame import run as command
from clickfleet.config.check import configure
from clickfleet.config.load import dump
from clickfleet.errors import CheckpointError, ConfigError
from clickfleet.workbench.compare import RESULT, compare, fingerprint, grid, plan

BROKEN = """
from clickfleet.training.network import Model
class Broken(Model):
    def __init__(self, config, shape):
        raise ZeroDivisionError("a model that cannot be built")
"""


def quiet(text: str) -> None:
    """Nothing is said."""


def planned(config: dict[str, Any], tmp_path: Path, **more: Any) -> Any:
    given = {"models": [], "sets": [], "seeds": [], **more}
    return plan(configure(config), **given, out=tmp_path, say=quiet)


def test_equal_configurations_are_one_run(config: dict[str, Any], tmp_path: Path) -> None:
    found = planned(config, tmp_path, models=["deepfm", "lr"], sets=["dense.lr=0.001,0.01", "train.epochs=2"])
    # deepfm and lr; each with dense.lr=0.01 (0.001 is the default) and with two epochs
    assert len(found.orders) == 6
    values = [(line.model, line.value) for line in found.studies["train.epochs"]]
    assert values == [("deepfm", "1 (as configured)"), ("deepfm", "2"), ("lr", "1 (as configured)"), ("lr", "2")]
    assert found.studies["dense.lr"][0].orders == found.models[0].orders
    assert [order.config.model.settings for order in found.orders if order.name == "lr-seed7"] == [{}]
    assert len(planned(config, tmp_path, seeds=[1, 2], sets=["model.hidden=[4],[4,4]"]).orders) == 6


def test_what_names_a_run(config: dict[str, Any]) -> None:
    base = configure(config)
    mark = fingerprint(base)
    assert fingerprint(configure(config, ["train.threads=2", "run.dir=elsewhere", "serve.port=9"])) == mark
    assert fingerprint(configure(config, ["dense.lr=0.001"])) == mark  # said, but the default
    for other in ("dense.lr=0.01", "model.hidden=[9]", "table.rule.lr=0.1", "data.batch_size=50", "train.seed=8"):
        assert fingerprint(configure(config, [other])) != mark


def test_settings_are_checked_before_anything_is_trained(config: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"unknown key train.epocs; did you mean epochs"):
        planned(config, tmp_path, sets=["train.epocs=1,2"])
    with pytest.raises(ConfigError, match=r"did you mean deepfm"):
        planned(config, tmp_path, models=["deepfn"])
    with pytest.raises(ConfigError, match=r"none of the models has model.hidden"):
        planned(config, tmp_path, models=["lr"], sets=["model.hidden=[4]"])
    with pytest.raises(ConfigError, match=r"does not have the form key=a,b,c"):
        grid("train.epochs")


def test_a_comparison_with_a_failing_model(
    config: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], browser: Any
) -> None:
    (tmp_path / "broken.py").write_text(BROKEN)
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(config))
    argv = ["compare", str(tmp_path / "c.yaml"), "--models", f"deepfm,{tmp_path}/broken.py,lr"]
    argv += ["--set", "dense.lr=0.02,0.001", "--jobs", "2", "--out", str(tmp_path / "out"), "--json"]
    assert command(build(), argv) == 1  # one failed
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    ranked = sorted(found["rows"][:2], key=lambda row: -row["valid_auc"])
    assert [*ranked, found["rows"][2]] == found["rows"]
    assert {row["model"] for row in ranked} == {"deepfm", "lr"}
    assert found["rows"][2]["model"] == "broken"
    assert all("ZeroDivisionError: a model that cannot be built" in text for text in found["failed"].values())
    assert len(found["failed"]) == 2  # with each rate
    for row in ranked:
        assert 0.4 < row["test_auc"] < 1
        assert row["monitored"] == row["valid_auc"] == row["test_auc"]  # of the same rows here
        assert row["rows_per_s"] > 0
        assert row["parameters"] > 1000
    assert found["rows"][2]["test_auc"] is None
    assert {row["value"] for row in found["studies"]["dense.lr"] if row["model"] == "lr"} >= {"0.02", "0.001"}

    with (tmp_path / "out/compare.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == 9
    assert float(lines[0]["test_auc"]) == found["rows"][0]["test_auc"]
    text = (tmp_path / "out/compare.md").read_text()
    assert (
        "| model | training loss | training AUC | validation AUC | validation log loss | test AUC | test log loss |"
        in text
    )
    assert "## dense.lr" in text

    page = browser.new_page()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto((tmp_path / "out/compare.html").as_uri())
    assert [one.inner_text() for one in page.query_selector_all("h2")] == [
        "Models",
        "Curves",
        "dense.lr",
        "Failed",
        "Environment",
    ]
    assert len(page.query_selector_all("svg")) == 8
    assert len(page.query_selector_all("section:nth-of-type(2) svg >> nth=0 >> polyline")) == 2  # two models learned
    assert all(url.startswith(("file:", "data:")) for url in asked)
    page.close()

    done = tmp_path / "out/runs/lr-seed7" / RESULT
    before = done.stat().st_mtime_ns
    (tmp_path / "broken.py").write_text(BROKEN.replace("raise", "super().__init__(config, shape) #"))
    again = compare(tmp_path / "c.yaml", models=["deepfm", "lr"], out=tmp_path / "out", say=quiet)
    assert not again.failed
    assert done.stat().st_mtime_ns == before  # nothing was trained again
    assert [row["test_auc"] for row in again.rows] == [row["test_auc"] for row in ranked]
    with pytest.raises(ConfigError, match="holds a run with other settings"):
        compare(tmp_path / "c.yaml", "table.dim=2", models=["lr"], out=tmp_path / "out", say=quiet)
    (tmp_path / "out/mine.txt").write_text("mine")
    other = compare(tmp_path / "c.yaml", "table.dim=2", models=["lr"], out=tmp_path / "out", overwrite=True, say=quiet)
    assert [row["model"] for row in other.rows] == ["lr"]
    assert [path.name for path in (tmp_path / "out/runs").iterdir()] == ["lr-seed7"]
    assert (tmp_path / "out/mine.txt").exists()
    (tmp_path / "foreign/runs/marathon").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="is not replaced: it holds no results of this command"):
        compare(tmp_path / "c.yaml", models=["lr"], out=tmp_path / "foreign", overwrite=True, say=quiet)
    assert (tmp_path / "foreign/runs/marathon").is_dir()


def test_killed_and_started_again(config: dict[str, Any], tmp_path: Path) -> None:
    """SIGKILL in the middle of a run: its process writes a checkpoint and ends, and the run goes on from there."""
    slow = {
        **config,
        "train": {"threads": 1, "epochs": 40},
        "run": {"checkpoint_every_steps": 10, "keep_epochs": False},
    }
    (tmp_path / "c.yaml").write_text(dump(configure({**slow, "run": {**slow["run"], "report": False}})))
    out = tmp_path / "out"
    program = (
        "from clickfleet.workbench.compare import compare\n"
        f"compare({str(tmp_path / 'c.yaml')!r}, models=['deepfm'], jobs=1, out={str(out)!r})"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.DEVNULL)
    pointer = out / "runs/deepfm-seed7/checkpoints/LATEST"
    deadline = time.monotonic() + 200
    while not pointer.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    step = int(pointer.read_text().split()[0].removeprefix("step-"))
    assert not (pointer.parents[1] / RESULT).exists()
    with pytest.raises(ConfigError, match="holds a run with other settings"):
        compare(tmp_path / "c.yaml", "dense.lr=0.1", models=["deepfm"], jobs=1, out=out, say=quiet)
    found = compare(tmp_path / "c.yaml", models=["deepfm"], jobs=1, out=out, say=quiet)
    assert found.runs[0]["resumed"]
    assert found.runs[0]["rows"] == 40 * 1200 > 100 * step
    assert "resuming from" in (pointer.parents[1] / "log.txt").read_text()
