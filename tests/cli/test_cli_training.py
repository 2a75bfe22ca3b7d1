"""The commands about models, in process."""

import gc
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import clickfleet
from clickfleet.cli import build
from clickfleet.cli.frame import run
from clickfleet.config import recipes
from clickfleet.config.recipes import Recipe
from clickfleet.data.logs.synth import SynthOptions, synth
from clickfleet.errors import ConfigError
from clickfleet.store.lock import Lock

SMALL = ["model.hidden=[16]", "table.dim=4", "data.batch_size=100", "train.threads=2", "data.valid_share=0"]


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("log")
    synth(out, SynthOptions(rows=1500, test_rows=500, seed=5))
    return out


def result(capsys: pytest.CaptureFixture[str], *argv: object) -> dict[str, Any]:
    """The `--json` line of a command that succeeds."""
    code = run(build(), [*map(str, argv), "--json"])
    out = capsys.readouterr()
    assert code == 0, out.err
    found: dict[str, Any] = json.loads(out.out.splitlines()[-1])
    return found


def test_train_evaluate_predict_inspect_verify(
    log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    trained = result(capsys, "train", f"data.train={log}/train", f"data.test={log}/test", "train.epochs=2", *SMALL)
    assert list(trained) == [
        "rows",
        "steps",
        "new_rows",
        "seconds",
        "rows_per_s",
        "train_auc",
        "valid_auc",
        "test_auc",
        "checkpoint",
    ]
    assert trained["rows"] == 3000
    assert trained["seconds"] >= trained["rows"] / trained["rows_per_s"]
    assert trained["checkpoint"] == str(tmp_path / "run/checkpoints/step-000000000030")
    tested = result(capsys, "evaluate", "run", log / "test")
    assert tested["auc"] == trained["test_auc"]
    assert {"rows", "auc", "logloss", "accuracy", "calibration"} <= set(tested)
    per_epoch = result(capsys, "evaluate", "run", log / "test", "--epochs", "0:2")
    assert [line["epoch"] for line in per_epoch["epochs"]] == [0, 1]
    assert per_epoch["auc"] == tested["auc"]

    (tmp_path / "rows.tsv").write_text("".join(line.partition("\t")[2] for line in lines(log / "test")))  # no labels
    scored = result(capsys, "predict", "run", "rows.tsv", "--out", "s.txt", "--threads", 1, "--batch-size", 77)
    assert scored["rows"] == 500
    text = np.array((tmp_path / "s.txt").read_text().split(), np.float32)
    for name in ("s.npy", "s.parquet"):
        result(capsys, "predict", "run", log / "test", "--out", name)
    np.testing.assert_allclose(np.load("s.npy"), text, atol=1e-6)
    import pyarrow.parquet

    np.testing.assert_allclose(pyarrow.parquet.read_table("s.parquet")["score"].to_numpy(), text, atol=1e-6)
    labels = [float(line[0]) for line in lines(log / "test")]
    from sklearn.metrics import roc_auc_score

    assert roc_auc_score(labels, text) == pytest.approx(tested["auc"], abs=2e-3)

    made = result(capsys, "inspect", "run")
    assert made["rows"] == sum(made["slots"].values()) > 1000
    assert len(made["slots"]) == 26
    assert result(capsys, "verify", "run")["ok"]
    (tmp_path / "run/checkpoints/step-000000000030/state.json").write_text("{}")
    assert run(build(), ["verify", "run"]) == 1
    assert "state.json is damaged" in capsys.readouterr().err


def test_rows_on_disk_train_the_same_model_and_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from clickfleet.workbench.dashboard import FollowedRun, draw

    monkeypatch.chdir(tmp_path)
    synth(tmp_path / "log", SynthOptions(rows=12_000, test_rows=1000, seed=5))
    common = ["data.train=log/train", "data.test=log/test", "train.deterministic=true", "run.report=false", *SMALL]
    common += ["run.checkpoint_every_steps=50", "train.epochs=1"]
    on_disk = ["table.memory_limit=2400KB", "table.snapshot_reserve=800KB", "table.disk=rows"]
    trained = [
        result(capsys, "train", *common, "run.dir=memory"),
        result(capsys, "train", *common, *on_disk, "run.dir=disk"),
    ]
    assert trained[0]["test_auc"] == trained[1]["test_auc"]
    saved = [Path(one["checkpoint"]) for one in trained]
    for file in [*saved[0].glob("rows-*"), saved[0] / "dense.safetensors"]:
        assert file.read_bytes() == (saved[1] / file.name).read_bytes()
    assert result(capsys, "evaluate", "disk", "log/test")["auc"] == trained[0]["test_auc"]
    tiers = result(capsys, "inspect", "disk")["tiers"]
    assert tiers["disk"]["rows"] > 1000
    assert tiers["memory"]["rows"] > 1000
    assert 2 < tiers["disk"]["index_bytes_per_row"] < 6
    assert tiers["disk"]["bytes_per_row"] > 60
    assert result(capsys, "inspect", "memory")["tiers"] is None
    assert run(build(), ["inspect", "disk"]) == 0
    assert re.search(
        r"in memory [\d,]+ rows, \d+ bytes per row; on disk [\d,]+ rows, \d+ bytes", capsys.readouterr().out
    )
    metrics = [json.loads(line) for line in Path("disk/metrics.jsonl").read_text().splitlines()]
    assert [line["table_disk_rows"] > 1000 for line in metrics if line["kind"] == "epoch"] == [True]
    followed = FollowedRun(tmp_path / "disk")
    followed.read()
    shown = draw([followed])
    assert "bytes per row on disk" in shown
    assert "bytes per row in memory" in shown
    gc.collect()  # tables of this process
    assert [path.name for path in Path("rows").iterdir()] == ["lock"]


def lines(folder: Path) -> list[str]:
    return [line for file in sorted(folder.iterdir()) for line in file.read_text().splitlines(keepends=True)]


def test_a_file_with_settings_over_it_and_resume(log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.yaml").write_text(
        f"data: {{train: {log}/train, batch_size: 100, valid_share: 0}}\nmodel: {{name: lr}}\ntrain: {{threads: 1}}"
    )
    assert result(capsys, "train", tmp_path / "a.yaml")["test_auc"] is None
    assert (tmp_path / "run/config.yaml").exists()
    assert run(build(), ["train", str(tmp_path / "a.yaml")]) == 1
    assert "resume it with --resume" in capsys.readouterr().err
    resumed = result(capsys, "train", tmp_path / "a.yaml", "train.epochs=2", "--resume")
    assert (resumed["rows"], resumed["new_rows"]) == (3000, 1500)


def test_rows_trained_on_are_one_number(
    log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the run has learned from, before a resume too, and not only by the last point of a curve."""
    from clickfleet.workbench.dashboard import FollowedRun

    monkeypatch.chdir(tmp_path)
    for epochs, more in ((2, []), (3, ["--resume"])):
        wanted = 1500 * epochs
        done = result(capsys, "train", f"data.train={log}/train", f"train.epochs={epochs}", *SMALL, *more)
        assert done["rows"] == wanted
        followed = FollowedRun(tmp_path / "run")
        followed.read()
        assert followed.facts()["rows"] == wanted
        assert f"{wanted:,}" in (tmp_path / "run/report.html").read_text()
    assert done["new_rows"] == 1500
    assert run(build(), ["train", f"data.train={log}/train", "train.epochs=4", *SMALL, "--resume"]) == 0
    assert "6,000 rows (1,500 since the resume) in " in capsys.readouterr().out


def test_what_people_read(
    log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(build(), ["train", f"data.train={log}/train", "run.dir=x", *SMALL]) == 0
    shown = capsys.readouterr()
    assert "1,500 rows in" in shown.out
    assert "epoch 0 done: step 15, 1,500 rows, AUC 0." in shown.err
    assert run(build(), ["evaluate", "x", f"{log}/test", "--epochs", "0:3"]) == 1
    assert "no checkpoint of epoch 1\n  kept: 0" in capsys.readouterr().err
    assert run(build(), ["train", "data.train=nowhere/*"]) == 1
    assert "nowhere" in capsys.readouterr().err
    assert run(build(), ["evaluate", "nothing", f"{log}/test"]) == 1
    assert "nothing does not exist" in capsys.readouterr().err


RECIPES = [recipe for recipe in recipes.every() if recipe.model != "word2vec"]
"""Those that read click logs."""


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_every_recipe_trains(
    recipe: Recipe, log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = recipe.text
    assert re.search(r"^#   clickfleet train --recipe (\S+) ", text, re.MULTILINE)[1] == recipe.name  # type: ignore[index]
    assert "run" not in recipe.settings()
    assert not {"train", "valid", "test", "schema"} & set(recipe.settings()["data"])
    expected = (
        r"docs/study\.md lists the AUC"
        if recipe.name == "small"
        else r"Expect a test AUC of 0\.[5-8]\d* after one epoch on `"
    )
    assert re.search(f"^# .*{expected}", text, re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    wide = re.findall(r"^  (hidden\d?|bottom|top|cin|expert): \[", text, re.MULTILINE)
    small = ["data.batch_size=500", "train.epochs=1", *(f"model.{name}=[8]" for name in wide)]
    if made := re.search(r"^#   clickfleet (synth log .*) --rows", text, re.MULTILINE):
        result(capsys, *made[1].split(), "--rows", "1500", "--test-rows", "500")
        log = tmp_path / "log"
        small.append(f"data.schema={log}/schema.yaml")
    done = result(capsys, "train", "--recipe", recipe.name, f"data.train={log}/train", f"data.test={log}/test", *small)
    assert done["checkpoint"].startswith(str(tmp_path / "run/checkpoints"))  # in the current folder
    assert done["rows"] == 1500
    assert 0 < done["test_auc"] < 1


def test_there_is_a_recipe_for_every_model() -> None:
    import clickfleet.models

    models = {path.stem for path in Path(clickfleet.models.__path__[0]).glob("*.py")} - {"__init__"}
    assert models | {"ctr_dnn", "ctr_dnn_quick", "small"} == {recipe.name for recipe in RECIPES}


def test_overwrite_replaces_runs_and_exports_of_ours_only(
    log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = [f"data.train={log}/train", *SMALL]
    first = result(capsys, "train", *settings, "train.epochs=2")
    assert run(build(), ["train", *settings]) == 1
    assert "replace it with --overwrite" in capsys.readouterr().err
    (tmp_path / "run/notes.txt").write_text("mine")
    assert run(build(), ["train", *settings, "model=nothing", "--overwrite"]) == 1  # refused: the old run stays
    assert run(build(), ["train", *settings, "data.train=none", "--overwrite"]) == 1
    assert result(capsys, "verify", "run")["checkpoints"] == 2
    second = result(capsys, "train", *settings, "--overwrite")
    assert (first["rows"], second["rows"]) == (3000, 1500)
    assert [path.name for path in (tmp_path / "run/checkpoints").glob("step-*")] == [Path(second["checkpoint"]).name]
    assert (tmp_path / "run/notes.txt").read_text() == "mine"
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines if line["kind"] == "epoch"] == [0]
    assert not list((tmp_path / "run").glob(".*.removing"))
    assert run(build(), ["train", *settings, "--overwrite", "--resume"]) == 1
    assert "exclude each other" in capsys.readouterr().err
    assert run(build(), ["train", *settings, "--overwrite", "train.init_from=run"]) == 1
    assert "train.init_from is in" in capsys.readouterr().err

    result(capsys, "export", "run", "artifact")
    assert run(build(), ["export", "run", "artifact"]) == 1
    assert "already exists" in capsys.readouterr().err
    assert result(capsys, "export", "run", "artifact", "--overwrite")["step"] == 15
    assert result(capsys, "verify", "artifact")["ok"]
    assert result(capsys, "export", "run", "fresh", "--overwrite")["step"] == 15
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.tex").write_text("years of work")
    (tmp_path / "link").symlink_to("artifact")
    (tmp_path / "linked").symlink_to("run")
    for name in ("mine", "run", "link"):
        assert run(build(), ["export", "run", name, "--overwrite"]) == 1, name
        assert "is not replaced" in capsys.readouterr().err
    assert (tmp_path / "mine/thesis.tex").exists()
    assert run(build(), ["train", *settings, "run.dir=linked", "--overwrite"]) == 1
    assert "is a symbolic link, which is not replaced" in capsys.readouterr().err
    (tmp_path / "run/checkpoints").rename(tmp_path / "elsewhere")
    (tmp_path / "run/checkpoints").symlink_to(tmp_path / "elsewhere")
    assert run(build(), ["train", *settings, "--overwrite"]) == 1
    assert result(capsys, "verify", "run")["ok"]
    (tmp_path / "run/checkpoints").unlink()
    (tmp_path / "elsewhere").rename(tmp_path / "run/checkpoints")
    (tmp_path / "run/published").mkdir()
    assert run(build(), ["train", *settings, "--overwrite"]) == 1
    assert "servers may follow the published log" in capsys.readouterr().err
    (tmp_path / "run/published").rmdir()
    with Lock(tmp_path / "run/.lock", "trains"):
        assert run(build(), ["train", *settings, "--overwrite"]) == 1
    assert "is in use: process" in capsys.readouterr().err
    assert result(capsys, "verify", "run")["ok"]


def test_recipes_are_listed_and_printed(capsys: pytest.CaptureFixture[str]) -> None:
    listed = {row["name"]: row for row in result(capsys, "recipes")["recipes"]}
    assert set(listed) == {recipe.name for recipe in recipes.every()}
    assert listed["deepfm"]["model"] == "deepfm"
    assert all(
        0.5 < row["auc"] < 0.9 for row in listed.values() if row["name"] != "small" and row["model"] != "word2vec"
    )
    assert all(row["about"].endswith(".") for row in listed.values())
    assert run(build(), ["recipes", "small"]) == 0
    assert capsys.readouterr().out == recipes.find("small").text
    assert run(build(), ["recipes", "smal"]) == 1
    assert "unknown recipe 'smal'; did you mean small" in capsys.readouterr().err
    assert run(build(), ["train", "config.yaml", "--recipe", "small"]) == 2
    assert "not both" in capsys.readouterr().err


def test_a_recipe_in_python(log: Path, tmp_path: Path) -> None:
    data = {"train": str(log / "train"), "test": str(log / "test")}
    config = {"data": data, "model": {"hidden": [8]}, "run": {"dir": str(tmp_path / "run")}}
    done = clickfleet.train(config, "train.epochs=1", recipe="small", quiet=True)
    assert done.rows == 1500
    assert done.config.model.settings == {"wide": True, "hidden": [8]}
    assert (done.config.data.batch_size, done.config.table.rule.settings["lr"]) == (100, 0.02)
    with pytest.raises(ConfigError, match="exclude each other"):
        clickfleet.train(tmp_path / "a.yaml", recipe="small")
