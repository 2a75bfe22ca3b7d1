"""Settings in pairs: predict equals evaluate equals the server, in the order of the rows; a resumed run equals a whole one."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import clickfleet
import shapes
from clickfleet import cli
from clickfleet.config.plugins import names
from clickfleet.data.schema import write_schema
from clickfleet.serve.client import Client
from clickfleet.training.export import Publisher
from clickfleet.training.model import load
from clickfleet.training.step import Step
from covering import Choice, pairwise
from scenarios.test_matrix import Server, auc
from served import running
from shapes import SHAPES, Row, Shape
from soak import SOAK

FACTORS: dict[str, list[Any]] = {
    "shape": ["no_dense", "no_slots", "only_multi", "twice", "ids", "one_slot", "sides", "criteo"],
    "shuffle": [0, 20, "global"],
    "parsers": [0, 1, 2],
    "interleave": [None, 1, 3],
    "trainers": [
        {"threads": 1, "deterministic": True},
        {"threads": 2, "deterministic": True},
        {"threads": 1},
        {"threads": 2, "hogwild": 2},
    ],
    "bad_lines": ["error", "skip", "quarantine"],
    "patience": [None, 1],
    "init_from": [False, True],
    "scored_by": ["torch", "onnx", "server"],
    "batch_size": [7, 16, 1000],
    "preset": ["plain", "online"],
    "rule": ["adagrad_v2", "adam", "ftrl"],
    "memory_limit": [None, "4MB"],
    "model": ["wide_deep", "dnn"],
}
CHOICES = pairwise(FACTORS)[: None if SOAK else 16]
"""All pairs of values in `make soak`; in `make test` the choices with the most of them, which hold every value."""
MODES = [name for name in names("modes") if name != "local"]
TEXT = ("txt", "csv", "tsv")
ROWS = {"train-0": 25, "train-1": 13, "train-2": 8, "test-0": 11, "test-1": 14}


def name_of(choice: Choice) -> str:
    return "-".join(str(choice[key]) for key in ("shape", "shuffle", "bad_lines", "scored_by", "rule"))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("settings")
    first = clickfleet.train(config(CHOICES[0] | {"init_from": False}, folder), quiet=True)
    Publisher(first.learner, folder / "log").publish("base", step=1)
    with running(folder / "log", folder / "state") as served:
        yield Server(folder / "log", served)


def config(choice: Choice, folder: Path, run: str = "run", start: str | None = None) -> dict[str, Any]:
    shape = SHAPES[choice["shape"]]
    written(shape, folder, bad=choice["bad_lines"] != "error")
    rule = {"name": choice["rule"], "lr": 0.05}
    return {
        "data": {
            "train": str(folder / "train-*"),
            "valid": str(folder / "test-*") if choice["patience"] else (),
            "test": str(folder / "test-*"),
            "schema": str(folder / "schema.yaml"),
            "format": shape.form,
            "batch_size": choice["batch_size"],
            "shuffle": choice["shuffle"],
            "threads": choice["parsers"],
            "interleave": choice["interleave"],
            "bad_lines": choice["bad_lines"],
        },
        "model": shapes.settings(choice["model"]),
        "table": {"dim": 2, "rule": rule, "preset": choice["preset"], "memory_limit": choice["memory_limit"]},
        "dense": {"lr": 0.01},
        "train": {"epochs": 3, "patience": choice["patience"], "init_from": start, **choice["trainers"]},
        "run": {"dir": str(folder / run), "report": False, "checkpoint_every_steps": 2},
    }


def written(shape: Shape, folder: Path, bad: bool) -> None:
    folder.mkdir(exist_ok=True)
    write_schema(shape.schema, folder / "schema.yaml")
    for number, (name, count) in enumerate(ROWS.items()):
        path = folder / f"{name}.{shape.ending}"
        shape.write(path, shape.rows(number, count))
        if bad and shape.ending in TEXT and name.endswith("0"):
            lines = path.read_text().splitlines(keepends=True)
            path.write_text("".join([*lines[:5], "no;line\tof data\n", *lines[5:]]))


def rows_to_score(shape: Shape) -> list[Row]:
    return [
        row
        for number, (name, count) in enumerate(ROWS.items())
        if name.startswith("test")
        for row in shape.rows(number, count)
    ]


def call(capsys: Any, *arguments: str) -> dict[str, Any]:
    with pytest.raises(SystemExit) as stop:
        cli.main([*arguments, "--json"])
    said = capsys.readouterr()
    assert stop.value.code == 0, said.err
    answer: dict[str, Any] = json.loads(said.out.splitlines()[-1])
    return answer


@pytest.mark.parametrize("choice", CHOICES, ids=map(name_of, CHOICES))
def test_scores_agree_and_runs_go_on(
    choice: Choice, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    start = None
    if choice["init_from"]:
        begun = config(choice | {"shuffle": 0, "patience": None}, tmp_path / "before")
        start = str(clickfleet.train(begun, quiet=True).path)
    settings = config(choice, tmp_path / "data", start=start)
    done = clickfleet.train(settings, quiet=True)
    shape, run, test = SHAPES[choice["shape"]], tmp_path / "data" / "run", str(tmp_path / "data" / "test-*")
    check_scores(choice, shape, run, test, tmp_path / "scores.npy", capsys)
    if choice["scored_by"] == "server":
        check_server(shape, run, request.getfixturevalue("server"))
    if choice["trainers"].get("deterministic"):
        settings["run"]["dir"] = str(tmp_path / "data" / "again")
        check_resumed(settings, done.path, monkeypatch)


def check_scores(choice: Choice, shape: Shape, run: Path, test: str, out: Path, capsys: Any) -> None:
    rows = rows_to_score(shape)
    engine = ["--engine", "onnx"] if choice["scored_by"] == "onnx" else []
    assert call(capsys, "predict", str(run), test, "--out", str(out), *engine)["rows"] == len(rows)
    found = np.load(out).astype(np.float64)
    np.testing.assert_allclose(found, shapes.scores(load(run).learner, rows), rtol=0, atol=3e-6)
    labels = np.array([row[shape.schema.label] for row in rows], np.float64)
    weights = np.array([row[shape.schema.weight] if shape.schema.weight else 1.0 for row in rows])
    measured = call(capsys, "evaluate", str(run), test)
    losses = -np.log(np.where(labels == 1, found, 1 - found))
    assert measured["rows"] == len(rows)
    assert measured["logloss"] == pytest.approx(np.average(losses, weights=weights), abs=1e-5)
    assert measured["auc"] == pytest.approx(auc(np.floor(4096 * found), labels, weights), abs=0.01)


def check_server(shape: Shape, run: Path, server: Server) -> None:
    learner, rows = load(run).learner, rows_to_score(shape)
    server.wait(Publisher(learner, server.log).publish("base", step=1))
    with Client(server.served.url) as client:
        found = client.predict([shape.features(row) for row in rows])
    np.testing.assert_allclose(found, shapes.scores(learner, rows), rtol=0, atol=3e-6)


def check_resumed(settings: dict[str, Any], whole: Path | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupted by signals, first in its first epoch and again later; each time it goes on."""
    steps, usual = 0, Step.__call__

    def counted(self: Step, *arguments: Any, **named: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps in (1, 4):
            os.kill(os.getpid(), signal.SIGTERM)
        return usual(self, *arguments, **named)

    with monkeypatch.context() as patch:
        patch.setattr(Step, "__call__", counted)
        done = clickfleet.train(settings, quiet=True)
        interrupted = 0
        while done.signal is not None:
            interrupted += 1
            done = clickfleet.train(settings, resume=True, quiet=True)
    assert interrupted
    assert whole is not None
    assert done.path is not None
    assert files(done.path) == files(whole)


def files(checkpoint: Path) -> dict[str, bytes]:
    """All but what names the run folder."""
    named = ("manifest.json", "config.yaml")
    return {path.name: path.read_bytes() for path in checkpoint.iterdir() if path.name not in named}


@pytest.mark.skipif(not os.environ.get("CLICKFLEET_SOAK"), reason="Ray takes ten seconds a run")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", ["no_dense", "no_slots", "one_slot", "sides"])
def test_clusters_too(shape: str, mode: str, tmp_path: Path, capsys: Any) -> None:
    choice = CHOICES[0] | {"shape": shape, "trainers": {}, "memory_limit": None, "shuffle": 20, "scored_by": "torch"}
    settings = config(choice | {"patience": None, "init_from": False, "preset": "plain"}, tmp_path / "data")
    settings |= {"mode": {"name": mode}, "cluster": {"shards": 2, "workers": 2}}
    clickfleet.train(settings, quiet=True)
    run, test = tmp_path / "data" / "run", str(tmp_path / "data" / "test-*")
    check_scores(choice, SHAPES[shape], run, test, tmp_path / "scores.npy", capsys)
