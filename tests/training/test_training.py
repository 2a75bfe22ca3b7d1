"""Training on one machine: it learns, resumes exactly, refuses what does not fit."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import clickfleet
from clickfleet.data.logs.synth import SynthOptions, synth
from clickfleet.data.reader import Reader
from clickfleet.data.schema import preset
from clickfleet.errors import CheckpointError, ConfigError, DataError, TrainingError
from clickfleet.store import checkpoint
from clickfleet.training import saving
from clickfleet.training.monitor import last_on_curve

SMALL = {
    "model": {"name": "dnn", "hidden": [16]},
    "table": {"dim": 4, "rule": {"name": "adagrad", "lr": 0.2}},
    "data": {"batch_size": 100},
    "dense": {"lr": 0.01},
}


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("log")
    synth(out, SynthOptions(rows=2400, test_rows=600, parts=2, seed=5))
    return out


def settings(log: Path, folder: Path, **more: Any) -> dict[str, Any]:
    """A small run; `more` is merged into its sections."""
    raw: dict[str, Any] = {key: dict(part) for key, part in SMALL.items()}
    raw["data"] |= {"train": str(log / "train"), "test": str(log / "test")}
    raw["run"] = {"dir": str(folder)}
    raw["train"] = {"deterministic": True, "threads": 1}
    for section, part in more.items():
        raw[section] = {**raw.get(section, {}), **part}
    return raw


def content(path: Path) -> dict[str, Any]:
    """Everything in a checkpoint but paths and sizes of logs."""
    files: dict[str, Any] = {file.name: file.read_bytes() for file in path.iterdir()}
    del files["config.yaml"], files["manifest.json"]
    return files


def test_it_learns_and_writes_the_run_folder(log: Path, tmp_path: Path) -> None:
    done = clickfleet.train(settings(log, tmp_path / "r", train={"epochs": 3, "deterministic": False}), quiet=True)
    assert done.rows == 7200
    assert done.train["auc"] > 0.65
    assert done.test is not None
    assert done.test["rows"] == 600
    assert set(done.to_dict()) == {
        *("rows", "steps", "new_rows", "seconds", "rows_per_s", "train_auc", "valid_auc", "test_auc", "checkpoint")
    }
    assert {"config.yaml", "log.txt", "metrics.jsonl", "checkpoints"} <= {
        entry.name for entry in (tmp_path / "r").iterdir()
    }
    lines = [json.loads(line) for line in (tmp_path / "r/metrics.jsonl").read_text().splitlines()]
    assert [line["kind"] for line in lines if line["kind"] in ("epoch", "test")] == ["epoch", "test"] * 3
    steps = [line["step"] for line in lines if line["kind"] == "train"]
    assert (steps[0], steps[-1], len(set(steps))) == (1, 72, len(steps))
    assert sorted(checkpoint.epochs(tmp_path / "r/checkpoints")) == [0, 1, 2]
    again = clickfleet.load(tmp_path / "r")
    assert again.evaluate(str(log / "test")) == done.test
    assert np.array_equal(again.predict(str(log / "test")), done.predict(str(log / "test")))


def test_several_trainers_learn_the_same_data(log: Path, tmp_path: Path) -> None:
    more = {"epochs": 3, "deterministic": False, "threads": 3, "hogwild": 3}
    done = clickfleet.train(settings(log, tmp_path / "r", train=more), quiet=True)
    assert done.rows == 7200
    assert done.train["auc"] > 0.65
    assert done.learner.optimizer.steps == 72


def test_equal_seeds_give_equal_bytes(log: Path, tmp_path: Path) -> None:
    paths = []
    for name, threads in (("a", 0), ("b", 3)):
        more = settings(log, tmp_path / name, data={"threads": threads, "shuffle": 500}, model={"dropout": 0.2})
        done = clickfleet.train(more, quiet=True)
        assert done.path is not None
        paths.append(done.path)
    assert content(paths[0]) == content(paths[1])


def test_killed_runs_end_as_the_uninterrupted_one(log: Path, tmp_path: Path) -> None:
    kills = 50 if os.environ.get("CLICKFLEET_SOAK") else 6
    more: dict[str, Any] = {
        "data": {"shuffle": 500},
        "model": {"dropout": 0.2, "batch_norm": True},
        "dense": {"schedule": {"name": "cosine", "steps": 90, "warmup": 5}, "clip_norm": 1.0},
        "train": {"epochs": 3, "eval_every": 10},
    }
    more["train"] |= {"deterministic": True, "threads": 1}
    whole = clickfleet.train(settings(log, tmp_path / "whole", **more), quiet=True)
    assert whole.path is not None
    (tmp_path / "cut").mkdir()
    cut = settings(
        log, tmp_path / "cut/run", **more, run={"dir": str(tmp_path / "cut/run"), "checkpoint_every_steps": 2}
    )
    (tmp_path / "cut/config.yaml").write_text(json.dumps(cut))
    helper = [
        sys.executable,
        str(Path(__file__).parents[1] / "support" / "killed.py"),
        str(tmp_path / "cut/config.yaml"),
        str(kills),
        "3",
    ]
    out = subprocess.run(helper, capture_output=True, text=True, timeout=290)
    assert out.returncode == 0, out.stdout + out.stderr
    assert int(out.stdout.split()[-1]) >= min(kills, 3)
    assert content(checkpoint.latest(tmp_path / "cut/run/checkpoints")) == content(whole.path)
    assert points(tmp_path / "cut/run") == points(tmp_path / "whole")


KILLED = """
import os, signal, sys
from clickfleet.store import checkpoint
from clickfleet.training import run, saving
{module}.{name} = lambda *given, **more: os.kill(os.getpid(), signal.SIGKILL)
run.train(sys.argv[1], quiet=True)
"""


@pytest.mark.parametrize("moment", ["saving.Saver.save", "checkpoint.register"])
def test_killed_before_the_first_checkpoint_it_starts_again(
    log: Path, tmp_path: Path, moment: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every byte of the checkpoint is that of a run that was not killed; bad lines are kept once."""
    (tmp_path / "train.tsv").write_text("bad\n" + next((log / "train").iterdir()).read_text())
    more = settings(log, tmp_path / "run", train={"deterministic": True, "threads": 1, "epochs": 1})
    more["data"] |= {"train": str(tmp_path / "train.tsv"), "bad_lines": "quarantine", "shuffle": 0}
    whole = clickfleet.train(more, quiet=True)
    assert whole.path is not None
    (tmp_path / "run").rename(tmp_path / "whole")
    (tmp_path / "a.yaml").write_text(json.dumps(more))
    module, _, name = moment.partition(".")
    code = KILLED.format(module=module, name=name)
    out = subprocess.run([sys.executable, "-c", code, str(tmp_path / "a.yaml")], capture_output=True, timeout=100)
    assert out.returncode == -signal.SIGKILL, out.stderr
    assert (tmp_path / "run/metrics.jsonl").stat().st_size
    assert not (tmp_path / "run/checkpoints/LATEST").exists()
    (tmp_path / "run/config.yaml").unlink()  # as if killed still earlier
    again = clickfleet.train(tmp_path / "a.yaml", resume=True)
    said = capsys.readouterr().err
    assert ("starting from the beginning" in said) == (module == "saving")
    assert (again.rows, again.path) == (whole.rows, whole.path)
    files = {file.name: file.read_bytes() for file in again.path.iterdir()}
    assert files == {
        file.name: file.read_bytes() for file in (tmp_path / "whole/checkpoints" / again.path.name).iterdir()
    }
    for name in ("run", "whole"):
        assert len((tmp_path / name / "quarantine.txt").read_text().splitlines()) == 1
    assert points(tmp_path / "run") == points(tmp_path / "whole")


def points(folder: Path) -> list[tuple[str, int]]:
    """Kind and step of every line of metrics.jsonl but those of checkpoints and those that a slow machine adds every ten seconds."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [
        (line["kind"], line["step"])
        for line in lines
        if line["kind"] != "checkpoint" and (line["kind"] != "train" or last_on_curve(line["step"]) == line["step"])
    ]


def test_a_signal_saves_and_stops_and_resume_goes_on(log: Path, tmp_path: Path) -> None:
    more = settings(log, tmp_path / "r", train={"epochs": 40, "deterministic": True, "threads": 1})
    more["run"]["checkpoint_every_steps"] = 5
    ended = threading.Event()

    def stop() -> None:
        while not (tmp_path / "r/checkpoints/LATEST").exists():
            if ended.wait(0.001):
                return
        os.kill(os.getpid(), signal.SIGTERM)

    stopper = threading.Thread(target=stop)
    stopper.start()
    try:
        done = clickfleet.train(more, quiet=True)
    finally:
        ended.set()
        stopper.join()
    assert done.signal == signal.SIGTERM
    assert 0 < done.rows < 40 * 2400
    state = json.loads(checkpoint.read(checkpoint.latest(tmp_path / "r/checkpoints"), "state.json"))
    assert state["rows"] == done.rows
    more["train"]["epochs"] = state["progress"]["epoch"] + 1
    rest = clickfleet.train(more, resume=True, quiet=True)
    assert rest.new_rows + done.rows == rest.rows == (state["progress"]["epoch"] + 1) * 2400


def test_a_loss_that_is_no_number_stops_and_keeps_the_last_checkpoint(log: Path, tmp_path: Path) -> None:
    more = settings(log, tmp_path / "r", run={"dir": str(tmp_path / "r"), "checkpoint_every_steps": 5})
    more["dense"] = {"optimizer": "sgd", "lr": 1e30}
    with pytest.raises(TrainingError, match=r"step \d+: the loss is (nan|inf).*bad-batch") as caught:
        clickfleet.train(more, quiet=True)
    (saved,) = (tmp_path / "r").glob("bad-batch-*.npz")
    assert str(saved) in str(caught.value)
    with np.load(saved) as batch:
        assert batch["dense"].shape == (100, 13)


def test_data_of_another_schema_is_refused_with_a_diff(log: Path, tmp_path: Path) -> None:
    done = clickfleet.train(settings(log, tmp_path / "r"), quiet=True)
    other = settings(log, tmp_path / "r", data={"preset": "criteo-paddle"})
    with pytest.raises(DataError, match="keys: hash64 here, py2 mod 1000001 there"):
        clickfleet.train(other, resume=True, quiet=True)
    with pytest.raises(DataError, match="different schemas"):
        done.evaluate(Reader(str(log / "test"), preset("criteo-paddle")))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": {"hidden": [8]}}, "model.hidden is"),
        ({"table": {"dim": 5}}, "table.factors is 5|model.dim is 5"),
        ({"table": {"dim": 4, "rule": "adam"}}, "table.rule|table.embed_rule"),
        ({"train": {"deterministic": True, "threads": 2}}, "threads was 1 and is now 2"),
        ({"dense": {"optimizer": "sgd"}}, "optimizer state does not fit sgd"),
    ],
)
def test_resume_refuses_other_settings(log: Path, tmp_path: Path, change: dict[str, Any], message: str) -> None:
    clickfleet.train(settings(log, tmp_path / "r"), quiet=True)
    with pytest.raises((ConfigError, CheckpointError), match=message):
        clickfleet.train(settings(log, tmp_path / "r", **change), resume=True, quiet=True)


def test_contradictions_are_refused(log: Path, tmp_path: Path) -> None:
    for more, message in (
        ({"train": {"deterministic": True, "hogwild": 2}}, "allows one trainer"),
        ({"train": {"device": "gpu"}}, "unknown device 'gpu'"),
        ({"train": {"patience": 1}, "data": {"valid_share": 0}}, "train.patience needs validation data"),
        ({"train": {"monitor": "acu"}}, "unknown metric 'acu' in train.monitor; did you mean auc"),
        ({"train": {"monitor": "gauc"}}, "needs a group column"),
        ({"data": {"valid_share": 0.2, "valid": str(log / "test")}}, "exclude each other"),
        ({"mode": {"name": "local", "pull_every": 3}}, "unknown key mode.pull_every"),
        ({"mode": {"name": "lokal"}}, "did you mean local"),
        ({"table": {"dim": 0}}, "model dnn needs factors, but table.dim is 0"),
    ):
        raw = {**SMALL, "run": {"dir": str(tmp_path / "r")}, **more}
        raw["data"] = {"train": str(log / "train"), **more.get("data", {})}  # type: ignore[dict-item]
        with pytest.raises(ConfigError, match=message):
            clickfleet.train(raw, quiet=True)
    with pytest.raises(ConfigError, match=r"data\.train is missing"):
        clickfleet.train({"run": {"dir": str(tmp_path / "r")}}, quiet=True)
    clickfleet.train(settings(log, tmp_path / "r"), quiet=True)
    with pytest.raises(CheckpointError, match="holds a run already"):
        clickfleet.train(settings(log, tmp_path / "r"), quiet=True)


def test_early_stopping_ends_after_patience(log: Path, tmp_path: Path) -> None:
    more = settings(log, tmp_path / "r", train={"epochs": 50, "patience": 2, "deterministic": True, "threads": 1})
    more["data"]["valid"] = str(log / "test")
    more["dense"] = {"lr": 0.05}
    done = clickfleet.train(more, quiet=True)
    lines = [json.loads(line) for line in (tmp_path / "r/metrics.jsonl").read_text().splitlines()]
    aucs = [line["auc"] for line in lines if line["kind"] == "valid"]
    assert len(aucs) < 50
    assert max(aucs) == aucs[-3]
    assert done.rows == len(aucs) * 2400

    assert done.best == tmp_path / f"r/checkpoints/step-{24 * (len(aucs) - 2):012d}"
    assert done.valid is not None
    assert done.valid["auc"] == max(aucs)
    for name in ("r/BEST", "r/checkpoints/BEST", f"r/EPOCH-{len(aucs) - 3:04d}"):
        assert clickfleet.load(tmp_path / name).evaluate(str(log / "test"))["auc"] == max(aucs)
    for name in ("r/LATEST", "r/checkpoints/LATEST"):
        assert clickfleet.load(tmp_path / name).evaluate(str(log / "test"))["auc"] == aucs[-1]
    assert clickfleet.load(tmp_path / "r").evaluate(str(log / "test"))["auc"] == max(aucs)
    with pytest.raises(CheckpointError, match="does not exist"):
        clickfleet.load(tmp_path / "r/EPOCH-0099")


def test_the_best_is_kept_between_epochs_and_through_a_kill(log: Path, tmp_path: Path) -> None:
    more = settings(log, tmp_path / "r", train={"eval_every": 8, "epochs": 2})
    more["run"] |= {"keep_best": True, "keep": 1, "keep_epochs": False}
    more["data"]["valid"] = str(log / "test")
    done = clickfleet.train(more, quiet=True)
    lines = [json.loads(line) for line in (tmp_path / "r/metrics.jsonl").read_text().splitlines()]
    aucs = {line["step"]: line["auc"] for line in lines if line["kind"] == "valid"}
    assert list(aucs) == [8, 16, 24, 32, 40, 48]
    best = max(aucs, key=lambda step: aucs[step])
    assert best == 48  # so few steps only make it better
    assert done.best == tmp_path / "r/checkpoints/step-000000000048"
    assert checkpoint.steps(tmp_path / "r/checkpoints") == [48]
    (tmp_path / "r/checkpoints/BEST").unlink()  # as if killed between the two labels
    assert clickfleet.train(more, resume=True, quiet=True).best == done.best
    alone = {"train": str(log / "train"), "valid_share": 0}
    with pytest.raises(ConfigError, match=r"run\.keep_best needs validation data"):
        clickfleet.train({"data": alone, "run": more["run"] | {"dir": str(tmp_path / "x")}})


def test_starting_from_an_old_model(log: Path, tmp_path: Path) -> None:
    old = clickfleet.train(settings(log, tmp_path / "old", train={"epochs": 2}), quiet=True)
    more = settings(log, tmp_path / "new", train={"init_from": str(tmp_path / "old")}, model={"hidden": [16, 8]})
    new = clickfleet.train(more, quiet=True)
    assert new.train["auc"] > old.train["auc"]
    text = (tmp_path / "new/log.txt").read_text()
    assert "initialised anew: deep.layers.1.weight" in text
    assert "deep.layers.0.weight" not in text
    with pytest.raises(ConfigError, match=r"trained with adagrad, but table\.rule is sgd"):
        clickfleet.train(
            settings(log, tmp_path / "x", train={"init_from": str(tmp_path / "old")}, table={"rule": "sgd"})
        )


def test_keep_and_keep_epochs(log: Path, tmp_path: Path) -> None:
    more = {"dir": str(tmp_path / "r"), "checkpoint_every_steps": 5, "keep": 2}
    clickfleet.train(settings(log, tmp_path / "r", run=more, train={"epochs": 2}), quiet=True)
    assert checkpoint.steps(tmp_path / "r/checkpoints") == [24, 45, 48]
    assert {epoch: path.name for epoch, path in checkpoint.epochs(tmp_path / "r/checkpoints").items()} == {
        0: "step-000000000024",
        1: "step-000000000048",
    }


def test_data_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from clickfleet.data.schema import Dense, Schema, Slot

    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(3)
    city = rng.integers(0, 20, 3000)
    frame = {"label": (city % 2).astype(np.int64), "age": rng.normal(size=3000), "city": city}
    schema = Schema(dense=(Dense("age"),), slots=(Slot("city"),))
    config = {
        **SMALL,
        "train": {"epochs": 3},
        "data": {"batch_size": 50},
        "table": {"dim": 4, "init": {"embedx": "normal(0.1)"}},
    }
    done = clickfleet.train(config, data=frame, test=frame, schema=schema, quiet=True)
    assert done.test is not None
    assert done.test["auc"] > 0.99
    assert done.path is None
    assert list(tmp_path.iterdir()) == []
    assert done.predict({"age": np.zeros(2), "city": np.array([4, 5])}).round().tolist() == [0.0, 1.0]


def test_weights_count_as_copies(tmp_path: Path) -> None:
    """A row of weight 2 trains like two rows of weight 1 in the same batch."""
    from clickfleet.data.schema import Dense, Schema, Slot

    rng = np.random.default_rng(1)
    rows = {"label": rng.integers(0, 2, 40), "age": rng.normal(size=40), "city": rng.integers(0, 5, 40)}
    twice = {name: np.repeat(column, 2) for name, column in rows.items()}
    config: dict[str, Any] = {
        "model": {"name": "deepfm", "hidden": [8]},
        "table": {"dim": 2, "rule": {"name": "adam", "lr": 0.1}},
    }
    config["train"] = {"epochs": 5, "deterministic": True, "threads": 1}
    scores = []
    for data, size, weight in ((twice, 80, None), ({**rows, "w": np.full(40, 2.0)}, 40, "w")):
        schema = Schema(dense=(Dense("age"),), slots=(Slot("city"),), weight=weight)
        done = clickfleet.train({**config, "data": {"batch_size": size}}, data=data, schema=schema, quiet=True)
        scores.append(done.predict({**rows, **({"w": np.ones(40)} if weight else {})}))
    np.testing.assert_allclose(scores[0], scores[1], rtol=1e-4, atol=1e-5)


def test_slices_and_groups_in_evaluation(log: Path, tmp_path: Path) -> None:
    more = settings(log, tmp_path / "r", train={"metrics": {"slices": "C9"}})
    done = clickfleet.train(more, quiet=True)
    results = done.evaluate(str(log / "test"))
    assert sum(part["rows"] for part in results["slices"].values()) == 600
    with pytest.raises(ConfigError, match="unknown slot 'nope'"):
        clickfleet.train(settings(log, tmp_path / "x", train={"metrics": {"slices": "nope"}}), quiet=True)


def test_a_broken_checkpoint_is_refused_by_name(log: Path, tmp_path: Path) -> None:
    clickfleet.train(settings(log, tmp_path / "r"), quiet=True)
    path = checkpoint.latest(tmp_path / "r/checkpoints")
    data = bytearray((path / "dense.safetensors").read_bytes())
    data[-1] ^= 1
    (path / "dense.safetensors").write_bytes(data)
    with pytest.raises(CheckpointError, match=r"dense\.safetensors is damaged"):
        clickfleet.load(tmp_path / "r")
    with pytest.raises(CheckpointError, match="holds no model"):
        clickfleet.load(tmp_path)
    with pytest.raises(CheckpointError, match="checkpoint of a table"):
        saving.load(checkpoint.save(clickfleet.Table(2), tmp_path / "t"))


OWN_MODE = """
from dataclasses import dataclass

from clickfleet.training.modes import Needs, local

NEEDS = Needs(distributed=False)


@dataclass(frozen=True)
class Config:
    greeting: str = "hello"


def train(job, config):
    print(config.greeting)
    local.train(job, local.Config())
"""


def test_one_file_adds_a_mode(log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "own.py").write_text(OWN_MODE)
    mode = {"name": str(tmp_path / "own.py"), "greeting": "good morning"}
    once = {"deterministic": False, "hogwild": 1}
    done = clickfleet.train(settings(log, tmp_path / "a", mode=mode, train=once), quiet=True)
    assert capsys.readouterr().out.count("good morning\n") >= 1
    shipped = clickfleet.train(settings(log, tmp_path / "b", train=once), quiet=True)
    assert done.train == shipped.train
    with pytest.raises(ConfigError, match=r"train.deterministic is not supported in mode .*own.py"):
        clickfleet.train(settings(log, tmp_path / "c", mode=mode), quiet=True)
    with pytest.raises(ConfigError, match=r"unknown key mode.greetings; did you mean greeting\?"):
        clickfleet.train(settings(log, tmp_path / "d", mode={"name": mode["name"], "greetings": ""}), quiet=True)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("NEEDS = Needs(distributed=False)", "", r"lacking.py: a mode needs NEEDS\n  add NEEDS = Needs\("),
        ("NEEDS = Needs(distributed=False)", "NEEDS = {}", r"lacking.py: NEEDS is a dict\n  add NEEDS = Needs\("),
        ("Needs(distributed=False)", "Needs()", "missing 1 required keyword-only argument: 'distributed'"),
        ("Needs(distributed=False)", "Needs(distributed=False, shards_wait=True)", "needs shards_wait, which only dis"),
        ("class Config", "class Settings", "lacking.py: a mode needs Config\n"),
        ("def train", "def learn", "lacking.py: a mode needs train\n"),
    ],
)
def test_a_mode_that_lacks_a_declaration(log: Path, tmp_path: Path, before: str, after: str, message: str) -> None:
    (tmp_path / "lacking.py").write_text(OWN_MODE.replace(before, after))
    with pytest.raises(ConfigError, match=message):
        clickfleet.train(settings(log, tmp_path / "r", mode={"name": str(tmp_path / "lacking.py")}), quiet=True)
