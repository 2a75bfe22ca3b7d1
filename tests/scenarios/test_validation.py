"""Whole runs with validation data: what it decides, and that test data decides nothing."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import clickfleet
from clickfleet.cli import build
from clickfleet.cli.frame import run as command
from clickfleet.data.logs.synth import SynthOptions, synth
from clickfleet.data.schema import Dense, Schema, Slot
from clickfleet.errors import ConfigError
from clickfleet.store import checkpoint, run_folder

SCHEMA = Schema(dense=(Dense("age"),), slots=(Slot("city"),))


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("log")
    synth(out, SynthOptions(rows=1500, test_rows=400, seed=5, parts=3))
    return out


def settings(log: Path, folder: Path | str, **sections: Any) -> dict[str, Any]:
    """Learns by heart soon, so that the best is not the last."""
    config: dict[str, Any] = {
        "data": {"train": str(log / "train"), "test": str(log / "test"), "batch_size": 100, "shuffle": 300},
        "model": {"name": "lr"},
        "table": {"rule": {"name": "adagrad", "lr": 1.0}},
        "train": {"threads": 1, "deterministic": True, "epochs": 6, "patience": 2},
        "run": {"dir": str(folder), "report": False},
    }
    for section, part in sections.items():
        config[section] = {**config.get(section, {}), **part}
    return config


def lines(run: Path, kind: str) -> list[dict[str, Any]]:
    every = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "time"} for line in every if line["kind"] == kind]


def model_files(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir() if file.suffix in (".arrow", ".safetensors")}


def test_test_data_never_influences_the_model(log: Path, tmp_path: Path) -> None:
    """With all labels of the test data turned round, every byte of the model stays the same."""
    other = tmp_path / "other"
    other.mkdir()
    for path in (log / "test").iterdir():
        text = "".join(
            f"{1 - int(line[0])}{line[1:]}" if line[0] in "01" else line
            for line in path.read_text().splitlines(keepends=True)
        )
        (other / path.name).write_text(text)
    runs = {}
    for name, test in (("as it is", str(log / "test")), ("turned", str(other)), ("none", ())):
        done = clickfleet.train(settings(log, tmp_path / name, data={"test": test}), quiet=True)
        assert done.path == done.best
        assert done.best is not None
        runs[name] = done
    first, turned, none = runs.values()
    assert first.test is not None
    assert turned.test is not None
    assert first.test["auc"] == pytest.approx(1 - turned.test["auc"], abs=1e-6)
    assert none.test is None
    for other_run in (turned, none):
        assert other_run.best.name == first.best.name
        assert model_files(other_run.best) == model_files(first.best)
        assert model_files(other_run.last) == model_files(first.last)
    assert lines(tmp_path / "turned", "valid") == lines(tmp_path / "as it is", "valid")
    assert len(lines(tmp_path / "turned", "test")) == 1


def test_the_run_folder_means_the_best_and_test_is_of_it(
    log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    (tmp_path / "c.yaml").write_text(json.dumps(settings(log, run, run={"report": True})))
    assert command(build(), ["train", str(tmp_path / "c.yaml"), "--json"]) == 0
    said = capsys.readouterr()
    done = json.loads(said.out.splitlines()[-1])
    assert "validation: 10% of the rows (" in said.err
    assert ", chosen at random" in said.err
    assert "stopped: no better validation AUC than" in said.err
    best, newest = checkpoint.best(run / "checkpoints"), checkpoint.latest(run / "checkpoints")
    assert best != newest
    assert done["checkpoint"] == str(best)
    valid, tests = lines(run, "valid"), lines(run, "test")
    assert done["valid_auc"] == max(line["auc"] for line in valid) > valid[-1]["auc"]
    assert [line["step"] for line in tests] == [run_folder.step(run_folder.resolve(run))]
    assert done["test_auc"] == tests[0]["auc"] == clickfleet.load(run).evaluate(str(log / "test"))["auc"]
    assert f"{done['test_auc']:.4f}" in (run / "report.html").read_text()
    assert 1500 - valid[0]["rows"] == lines(run, "epoch")[0]["epoch_rows"]
    again = clickfleet.train(tmp_path / "c.yaml", resume=True, quiet=True)  # a run that has ended
    assert again.test is not None
    assert (again.test["auc"], again.path) == (done["test_auc"], best)


def test_test_data_alone_is_evaluated_after_each_epoch(log: Path, tmp_path: Path) -> None:
    config = settings(log, tmp_path / "run", train={"patience": None, "epochs": 2})
    done = clickfleet.train(config, quiet=True)
    assert done.rows == 3000  # nothing is set aside
    assert done.valid is None
    assert done.test is not None
    assert [line["auc"] for line in lines(tmp_path / "run", "test")][-1] == done.test["auc"]
    assert len(lines(tmp_path / "run", "test")) == 2
    with pytest.raises(ConfigError, match=r"train\.patience needs validation data, and the run began without"):
        clickfleet.train(settings(log, tmp_path / "run"), resume=True, quiet=True)
    with pytest.raises(ConfigError, match=r"data\.valid_share is 0\.1, but the run began with 0\.0"):
        clickfleet.train(settings(log, tmp_path / "run", data={"valid_share": 0.1}), resume=True, quiet=True)


def test_without_test_data_rows_are_set_aside(log: Path, tmp_path: Path) -> None:
    config = settings(log, tmp_path / "run", train={"patience": None, "epochs": 1}, data={"test": ()})
    done = clickfleet.train(config, quiet=True)
    assert done.valid is not None
    assert done.rows + done.valid["rows"] == 1500
    assert done.test is None
    assert "valid_share: 0.1" in (tmp_path / "run/config.yaml").read_text()
    more = settings(log, tmp_path / "run", train={"patience": None, "epochs": 2}, data={"test": ()})
    assert clickfleet.train(more, resume=True, quiet=True).rows == 2 * done.rows
    off = settings(log, tmp_path / "off", train={"patience": None, "epochs": 1}, data={"test": (), "valid_share": 0})
    assert clickfleet.train(off, quiet=True).rows == 1500


@pytest.mark.parametrize("metric", ["logloss", "calibration", "accuracy", "ne"])
def test_any_metric_is_the_monitor(log: Path, tmp_path: Path, metric: str) -> None:
    done = clickfleet.train(settings(log, tmp_path / "run", train={"monitor": metric, "patience": 6}), quiet=True)
    values = {line["step"]: line[metric] for line in lines(tmp_path / "run", "valid")}
    assert len(values) == 6
    best = {
        "logloss": min(values, key=lambda step: values[step]),
        "ne": min(values, key=lambda step: values[step]),
        "accuracy": max(values, key=lambda step: values[step]),
        "calibration": min(values, key=lambda step: abs(values[step] - 1)),
    }[metric]
    assert done.path is not None
    assert run_folder.step(done.path) == best
    assert done.valid is not None
    assert done.valid[metric] == values[best]


def frame(rows: int, seed: int = 3) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    city = rng.integers(0, 400, rows)
    return {
        "label": (rng.random(rows) < 0.2 + 0.6 * (city % 2)).astype(np.int64),
        "age": rng.normal(size=rows),
        "city": city,
        "when": 1_400_000_000 + rng.integers(0, 10**7, rows),
    }


def in_memory(**sections: Any) -> dict[str, Any]:
    config: dict[str, Any] = {
        "data": {"batch_size": 100, "shuffle": 1},
        "model": {"name": "lr"},
        "table": {"rule": {"name": "adagrad", "lr": 1.0}},
        "train": {"threads": 1, "deterministic": True, "epochs": 5},
    }
    for section, part in sections.items():
        config[section] = {**config[section], **part} if section in config else part
    return config


def test_data_in_memory_is_validated_on_its_newest_rows(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    schema, data = Schema(dense=SCHEMA.dense, slots=SCHEMA.slots, time="when"), frame(2000)
    done = clickfleet.train(in_memory(), data=data, schema=schema)
    said = capsys.readouterr().err
    since = np.sort(data["when"])[1800]
    assert "validation: the newest 10% of the rows (200) by `when`, from 2014-" in said
    assert done.valid is not None
    assert done.valid["rows"] == 200
    newest = {name: column[data["when"] >= since] for name, column in data.items()}
    assert done.evaluate(newest)["auc"] == done.valid["auc"]
    same_time = {**data, "when": np.full(2000, 5)}
    clickfleet.train(in_memory(train={"epochs": 1}), data=same_time, schema=schema)
    assert ", chosen at random" in capsys.readouterr().err


def test_the_best_model_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a run folder, what is returned is the best model too, and nothing is left on the disk."""
    monkeypatch.chdir(tmp_path)
    data, valid = frame(1500), frame(500, 4)
    done = clickfleet.train(in_memory(run={"keep_best": True}), data=data, valid=valid, schema=SCHEMA, quiet=True)
    each = [
        clickfleet.train(in_memory(train={"epochs": n}), data=data, valid=valid, schema=SCHEMA, quiet=True)
        for n in range(1, 6)
    ]
    aucs = [one.valid["auc"] for one in each if one.valid is not None]
    assert done.valid is not None
    assert done.valid["auc"] == max(aucs) > aucs[-1]
    assert done.evaluate(valid)["auc"] == max(aucs)
    assert done.path is None
    assert not list(tmp_path.iterdir())


def test_a_shuffled_run_in_memory_resumes_bit_for_bit(tmp_path: Path) -> None:
    data = frame(1500)

    def train(name: str, epochs: int, resume: bool = False) -> Any:
        config = in_memory(train={"epochs": epochs, "patience": 9}, run={"dir": str(tmp_path / name), "report": False})
        return clickfleet.train(config, data=data, schema=SCHEMA, resume=resume, quiet=True)

    whole = train("whole", 4)
    train("parts", 2)
    parts = train("parts", 4, resume=True)
    assert model_files(parts.last) == model_files(whole.last)
    assert lines(tmp_path / "parts", "valid") == lines(tmp_path / "whole", "valid")


def test_too_few_rows_and_rows_read_once(capsys: pytest.CaptureFixture[str]) -> None:
    done = clickfleet.train(in_memory(), data=frame(100), schema=SCHEMA)
    assert done.valid is None
    assert done.rows == 500
    assert "no validation: 10% of the rows would hold" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"train\.patience needs validation data; no validation: 10% of the rows"):
        clickfleet.train(in_memory(train={"patience": 1}), data=frame(100), schema=SCHEMA, quiet=True)

    def rows() -> Iterator[dict[str, Any]]:
        whole = frame(1000)
        for i in range(1000):
            yield {name: column[i] for name, column in whole.items()}

    once = in_memory(train={"epochs": 1}, data={"shuffle": 0})
    assert clickfleet.train(once, data=rows(), schema=SCHEMA, quiet=True).rows == 1000
    with pytest.raises(ConfigError, match=r"data\.valid_share cannot split a generator"):
        clickfleet.train(in_memory(data={"shuffle": 0, "valid_share": 0.2}), data=rows(), schema=SCHEMA, quiet=True)


def test_words_are_not_validated(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a b c\n" * 50)
    with pytest.raises(ConfigError, match="does not score rows"):
        clickfleet.train(
            {"data": {"train": str(tmp_path / "a.txt"), "format": "sentences"}, "model": {"name": "word2vec"}},
            "train.patience=1",
            f"run.dir={tmp_path / 'run'}",
            quiet=True,
        )
