"""Engines: what is chosen is what runs; and the inference matrix."""

import csv
import json
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from clickfleet.cli import build
from clickfleet.cli.frame import run as command
from clickfleet.errors import ConfigError
from clickfleet.store.onnx import Engine
from clickfleet.training import model, predict
from clickfleet.workbench.inference import measure


@pytest.fixture(scope="module")
def loaded(run: Path) -> model.SavedModel:
    return model.load(run)


def test_an_engine_is_what_it_says(loaded: model.SavedModel) -> None:
    graph = predict.exported(loaded.learner)
    session = Engine("onnx", threads=2, graph="basic", arena=False).session(graph)
    options = session.get_session_options()
    assert options.intra_op_num_threads == 2
    assert options.graph_optimization_level == onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    assert options.enable_cpu_mem_arena is False
    assert session.get_providers() == ["CPUExecutionProvider"]
    assert Engine().session(graph).get_session_options().enable_cpu_mem_arena is True
    with pytest.raises(ConfigError, match="engine 'CUDA' is not available"):
        Engine("CUDA").session(graph)
    with pytest.raises(ConfigError, match="at least one thread"):
        Engine(threads=0)


def test_predict_by_every_engine(
    run: Path, loaded: model.SavedModel, log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = str(log / "test")
    exact = loaded.predict(data)
    plain = loaded.reading(threads=2, engine=Engine("onnx", graph="off", arena=False))
    assert plain.reading(threads=1).engine is plain.engine
    assert loaded.engine is None
    np.testing.assert_allclose(plain.predict(data), exact, atol=1e-6)
    assert plain.evaluate(data)["auc"] == pytest.approx(loaded.evaluate(data)["auc"], abs=1e-3)
    argv = ["predict", str(run), data, "--out", str(tmp_path / "int8.npy"), "--engine", "int8", "--no-arena"]
    assert command(build(), [*argv, "--graph-optimization", "off", "--threads", "2"]) == 0, capsys.readouterr().err
    assert 1e-6 < np.abs(np.load(tmp_path / "int8.npy") - exact).max() < 0.05  # it was quantised for real
    argv = ["predict", str(run), str(log / "test"), "--out", str(tmp_path / "x.npy")]
    assert command(build(), [*argv, "--no-arena"]) == 1
    assert "add --engine onnx" in capsys.readouterr().err
    assert command(build(), [*argv, "--engine", "onnx", "--graph-optimization", "most"]) == 1
    assert "choose off, basic, extended or all" in capsys.readouterr().err
    assert command(build(), ["serve", str(tmp_path), "--engine", "torch"]) == 1
    capsys.readouterr()


def test_the_inference_matrix(run: Path, log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["bench", "infer", str(run), str(log / "test"), "--batch-sizes", "1,50", "--threads", "1"]
    argv += ["--batches", "10", "--graph", "all,off", "--out", str(tmp_path), "--json"]
    assert command(build(), argv) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    cells = {(row["engine"], row["batch_size"], row["graph"]) for row in found["rows"]}
    assert cells == {("torch", n, None) for n in (1, 50)} | {
        (name, n, level) for name in ("onnx", "int8") for n in (1, 50) for level in ("all", "off")
    }
    for row in found["rows"]:
        assert row["batches"] == 10
        assert 0 < row["p50_ms"] <= row["p99_ms"]
        parts = [row[f"{stage}_ms"] for stage in ("preparing", "running", "collecting")]
        assert all(part > 0 for part in parts)
        assert row["total_s"] > 0
    assert found["accuracy"]["onnx"]["max_drift"] < 1e-6 < found["accuracy"]["int8"]["max_drift"] < 0.05
    wanted = model.load(run).evaluate(str(log / "test"))["auc"]
    assert found["accuracy"]["torch"]["auc"] == pytest.approx(wanted, abs=1e-9)
    assert "CUDAExecutionProvider" in found["skipped"]
    assert found["environment"]["cores"] >= 1
    with (tmp_path / "infer.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 10
    assert "| engine | threads | batch |" in (tmp_path / "infer.md").read_text()
    text = (tmp_path / "infer.html").read_text()
    assert text.count("<svg") == 2
    assert "http" not in text
    with pytest.raises(ConfigError, match="unknown graph optimisation 'more'"):
        measure(run, str(log / "test"), graph=["more"])
    assert command(build(), ["bench", "infer", str(run), str(log / "test"), "--threads", "0"]) == 2
