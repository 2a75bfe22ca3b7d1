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
from clickfleet.workbench.compare import RESULT, compare, fingerprint, plan
from clickfleet.workbench.studies import grid

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


def test_settings_that_vary_together(config: dict[str, Any], tmp_path: Path) -> None:
    key = "dense.optimizer+table.rule.name"
    found = planned(config, tmp_path, sets=[f"{key}=sgd,[adam,shared_adam]"])
    assert [line.value for line in found.studies[key]] == [
        "adam, adagrad_v2 (as configured)",
        "sgd",
        "adam, shared_adam",
    ]
    trained = [line.orders[0].config for line in found.studies[key]]
    assert [(one.dense.optimizer, one.table.rule.name) for one in trained] == [
        ("adam", "adagrad_v2"),
        ("sgd", "sgd"),
        ("adam", "shared_adam"),
    ]
    with pytest.raises(ConfigError, match=r"\[\"a\", \"b\", \"c\"\] has 3 values for 2 settings"):
        planned(config, tmp_path, sets=[f"{key}=[a,b,c]"])


def test_the_studies_of_the_course(config: dict[str, Any], tmp_path: Path) -> None:
    found = planned(config, tmp_path, models=["deepfm", "lr"], course=True)
    rates = "dense.lr+table.rule.lr+table.embed_rule.lr"
    assert list(found.studies) == [
        *("train.epochs", "data.batch_size", rates, "model.hidden"),
        "dense.optimizer+table.rule",
    ]
    assert {line.model for line in found.studies["model.hidden"]} == {"deepfm"}  # lr has no layers
    slow = found.studies[rates][3].orders[0].config
    assert slow.table.embed_rule is not None
    assert (slow.dense.lr, slow.table.rule.settings["lr"], slow.table.embed_rule.settings["lr"]) == (1e-4, 1e-4, 1e-4)
    for line in found.studies["dense.optimizer+table.rule"][1:4]:
        one = line.orders[0].config
        assert one.table.rule.name == {"adagrad": "adagrad_v2"}.get(one.dense.optimizer, one.dense.optimizer)
        assert one.table.embed_rule is None
        assert one.dense.lr == one.table.rule.settings["lr"] == 0.001

    mine = planned(config, tmp_path, course=True, sets=["model.dropout=0.5", "train.epochs=2,3", "dense.optimizer=sgd"])
    assert [line.value for line in mine.studies["train.epochs"]] == ["1 (as configured)", "2", "3"]
    assert list(mine.studies) == [
        *("train.epochs", "data.batch_size", rates, "model.hidden"),
        *("dense.optimizer", "model.dropout"),
    ]
    named = {**config, "table": {"dim": 4, "rule": "adam"}}
    assert "dense.lr+table.rule.lr" in planned(named, tmp_path, course=True).studies
    assert "model.top" in planned({**config, "model": "dlrm"}, tmp_path, course=True).studies
    assert list(planned({**config, "model": "lr"}, tmp_path, course=True).studies)[2:] == [
        rates,
        "dense.optimizer+table.rule",
    ]


def test_the_tables_of_the_course_in_chinese(
    config: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One command makes all five tables. A failed cell is marked in its table, and a second call trains only what is missing."""
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(config))
    argv = ["compare", str(tmp_path / "c.yaml"), "--course", "--jobs", "1", "--out", str(tmp_path / "out"), "--json"]
    argv += ["--set", "train.epochs=1,2", "--set", "data.batch_size=200,300", "--set", "model.hidden=[4],[3,2]"]
    argv += ["--set", "dense.lr+table.rule.lr=0.001,1.0e+30"]  # a rate that no run survives
    assert command(build(), [*argv, "--language", "zh"]) == 1
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert len(found["studies"]) == 5
    assert len(found["failed"]) == 1
    assert [row["without_result"] for row in found["studies"]["dense.lr+table.rule.lr"]] == [None, None, "1 failed"]
    text = (tmp_path / "out/compare.md").read_text()
    assert [line for line in text.splitlines() if line.startswith("## ")] == [
        "## 模型",
        "## 训练轮数：train.epochs",
        "## 批次大小：data.batch_size",
        "## 学习率：dense.lr+table.rule.lr",
        "## 网络层：model.hidden",
        "## 稀疏参数与网络的优化器：dense.optimizer+table.rule",
        "## 失败的训练",
    ]
    assert "| 模型 | 训练损失 | 训练集 AUC | 验证集 AUC | 验证集对数损失 | 测试集 AUC |" in text
    assert "| 100（当前配置） |" in text
    assert "| 1 失败 |" in text
    html = (tmp_path / "out/compare.html").read_text()
    assert '<html lang="zh">' in html
    assert "测试集 AUC（train.epochs）" in html

    trained = {one: one.stat().st_mtime_ns for one in (tmp_path / "out/runs").glob(f"*/{RESULT}")}
    assert len(trained) == len(found["runs"]) == 10
    assert command(build(), argv) == 1
    assert {one: one.stat().st_mtime_ns for one in (tmp_path / "out/runs").glob(f"*/{RESULT}")} == trained
    text = (tmp_path / "out/compare.md").read_text()
    assert "## Epochs: train.epochs" in text
    assert "| 1 failed |" in text
    assert command(build(), [*argv, "--language", "fr"]) == 1
    assert "unknown language 'fr'; choose from en, zh" in capsys.readouterr().err
