"""Where the best checkpoint is kept, the run folder stands for it, whoever reads it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import clickfleet
from clickfleet.cli import build
from clickfleet.cli.frame import run as command
from clickfleet.data.logs.synth import SynthOptions, synth
from clickfleet.store import checkpoint, run_folder
from clickfleet.store.published import Entry


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("log")
    synth(out, SynthOptions(rows=600, test_rows=300, seed=5))
    return out


def settings(log: Path, folder: Path | str, **train: Any) -> dict[str, Any]:
    """Learns by heart soon, so that the best is not the last."""
    return {
        "data": {"train": str(log / "train"), "valid": str(log / "test"), "test": str(log / "test"), "batch_size": 100},
        "model": {"name": "lr"},
        "table": {"rule": {"name": "adagrad", "lr": 1.0}},
        "train": {"threads": 1, "deterministic": True, "epochs": 9, "patience": 1, **train},
        "run": {"dir": str(folder)},
    }


@pytest.fixture(scope="module")
def run(log: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("best") / "run"
    clickfleet.train(settings(log, folder), quiet=True)
    return folder


def result(capsys: pytest.CaptureFixture[str], *argv: object) -> dict[str, Any]:
    capsys.readouterr()
    assert command(build(), [*map(str, argv), "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return found


def aucs(run: Path) -> list[float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["auc"] for line in lines if line["kind"] == "valid"]


def test_every_command_takes_the_best(run: Path, log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    best, newest = checkpoint.best(run / "checkpoints"), checkpoint.latest(run / "checkpoints")
    assert best is not None
    assert best != newest
    assert run_folder.resolve(run) == run_folder.resolve(run / "BEST") == best
    assert run_folder.resolve(run / "LATEST") == run_folder.resolve(run / "checkpoints/LATEST") == newest
    tested = result(capsys, "evaluate", run, log / "test")
    assert (tested["auc"], tested["checkpoint"]) == (max(aucs(run)), str(best))
    assert result(capsys, "evaluate", run / "LATEST", log / "test")["auc"] == aucs(run)[-1] < max(aucs(run))
    assert result(capsys, "inspect", run)["checkpoint"] == str(best)
    assert result(capsys, "predict", run, log / "test", "--out", tmp_path / "s.npy")["checkpoint"] == str(best)
    wanted = clickfleet.load(best).predict(str(log / "test"))
    assert np.array_equal(np.load(tmp_path / "s.npy"), wanted)
    assert result(capsys, "export", run, tmp_path / "artifact")["step"] == run_folder.step(best)
    found = result(capsys, "parity", run, log / "test", "--artifact", tmp_path / "artifact")
    assert found["ok"]
    assert found["model"] == f"{best} (the best on validation data)"
    assert command(build(), ["report", str(run)]) == 0
    assert f"model: {best} (the best on validation data)" in capsys.readouterr().out
    assert f"{max(aucs(run)):.4f}" in (run / "report.html").read_text()
    assert command(build(), ["verify", str(run)]) == 0
    kept = {path.resolve() for path in (run / "checkpoints").glob("step-*")}
    assert {best.resolve(), newest.resolve()} <= kept
    assert f"{run}: {len(kept)} checkpoints" in capsys.readouterr().out


def test_publish_takes_the_best_and_a_resume_goes_on_from_the_newest(
    log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    clickfleet.train(settings(log, folder), quiet=True)
    best, newest = checkpoint.best(folder / "checkpoints"), checkpoint.latest(folder / "checkpoints")
    assert best is not None
    for kind in ("base", "delta"):  # a delta since another model than the best is all of it
        done = result(capsys, "publish", folder, kind)
        assert Entry(Path(done["entry"])).manifest["step"] == run_folder.step(best)
    published = clickfleet.load(folder / "published").predict(str(log / "test"))
    np.testing.assert_allclose(published, clickfleet.load(best).predict(str(log / "test")), atol=1e-6)
    assert checkpoint.latest(folder / "checkpoints") == newest
    more = settings(log, folder, patience=99, epochs=len(aucs(folder)) + 1)
    done = clickfleet.train(more, resume=True, quiet=True)
    assert f"resuming from {newest}" in (folder / "log.txt").read_text()
    assert done.path == done.best
    assert done.last is not None
    assert run_folder.step(done.last) == run_folder.step(newest) + 6


def test_what_training_made_is_the_best_too(run: Path, log: Path, tmp_path: Path) -> None:
    done = clickfleet.train(settings(log, tmp_path / "run"), quiet=True)
    assert done.test is not None
    assert done.test["auc"] == max(aucs(tmp_path / "run"))
    assert done.evaluate(str(log / "test"))["auc"] == done.test["auc"]
    assert done.to_dict()["test_auc"] == done.test["auc"]
    assert done.to_dict()["checkpoint"] == str(checkpoint.best(tmp_path / "run/checkpoints"))
    from clickfleet.config.load import Config, checked
    from clickfleet.workbench.runner import train

    again = train(checked(Config, settings(log, tmp_path / "trial")), tmp_path / "trial").result  # of compare and tune
    assert again is not None
    assert again.test_auc == done.test["auc"]
    assert again.rows == done.rows
    begun = settings(log, tmp_path / "next", patience=None, epochs=1, init_from=str(run))
    clickfleet.train(begun, quiet=True)
    same = settings(log, tmp_path / "same", patience=None, epochs=1, init_from=str(run / "BEST"))
    clickfleet.train(same, quiet=True)
    assert aucs(tmp_path / "next") == aucs(tmp_path / "same")


def test_who_no_longer_keeps_the_best_means_the_newest(log: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    clickfleet.train(settings(log, folder), quiet=True)
    assert run_folder.read_state(run_folder.resolve(folder / "LATEST"))["progress"]["stopped_early"]
    clickfleet.train(settings(log, folder, patience=None, epochs=len(aucs(folder)) + 1), resume=True, quiet=True)
    assert run_folder.resolve(folder) == checkpoint.latest(folder / "checkpoints")
    assert "the best checkpoint is no longer kept" in (folder / "log.txt").read_text()


def test_a_run_at_a_url(log: Path, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/there"
    done = clickfleet.train(settings(log, url), quiet=True)
    assert done.test is not None
    for model, auc in ((url, done.test["auc"]), (f"{url}/LATEST", aucs(tmp_path / "there")[-1])):
        assert clickfleet.load(model).evaluate(str(log / "test"))["auc"] == auc
