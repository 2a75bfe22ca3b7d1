"""What docs/migration.md says about devices and precision: every word is tried."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from clickfleet.cli import build
from clickfleet.cli.frame import run
from clickfleet.paddlerec.report import DEVICES
from originals import project

NO_CUDA = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return project(tmp_path, "dnn", epochs=1)


def warnings(capsys: pytest.CaptureFixture[str]) -> list[str]:
    shown = capsys.readouterr()
    return [line for line in (shown.out + shown.err).splitlines() if line.startswith("warning: runner.")]


def set_in(config: Path, **words: Any) -> None:
    raw = yaml.safe_load(config.read_text())
    raw["runner"] |= words
    config.write_text(yaml.safe_dump(raw))


def test_words_without_effect_are_said_before_training(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = {"device": "gpu", "precision": "fp16", "amp_level": "O1", "scale_loss": 128.0}
    words = {name.removeprefix("runner."): asked.get(name.removeprefix("runner."), True) for name in DEVICES}
    set_in(config, **words)
    assert run(build(), ["train", "-m", str(config)]) == 0
    said = warnings(capsys)
    assert [line.split()[1].partition("=")[0].removeprefix("runner.") for line in said] == sorted(words)
    assert all("has no effect: " in line for line in said)
    nothing = {name: {"precision": "fp32", "device": "cpu"}.get(name, False) for name in words}
    set_in(config, **nothing)
    assert run(build(), ["train", "-m", str(config), "-o", "runner.model_save_path=second"]) == 0
    assert warnings(capsys) == []
    page = Path(__file__).parents[2] / "docs/migration.md"
    assert all(f"`{name}`" in page.read_text() for name in words)


@NO_CUDA
def test_a_gpu_that_is_not_there(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(build(), ["train", "-m", str(config), "-o", "runner.use_gpu=true", "--json"]) == 0
    assert warnings(capsys) == [
        "warning: runner.use_gpu: torch finds no CUDA device here; the network trains on the CPU"
    ]
    assert yaml.safe_load(Path("output/config.yaml").read_text())["train"]["device"] == "cpu"
    for name, said in (
        ("cuda", "cannot use this device here"),
        ("cuda:1", "cannot use"),
        ("gpu", "unknown device 'gpu'"),
    ):
        assert run(build(), ["train", "-m", str(config), "-o", f"train.device={name}", "--overwrite"]) == 1
        assert said in capsys.readouterr().err


def test_engines_and_options(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import onnxruntime

    assert run(build(), ["train", "-m", str(config)]) == 0
    assert run(build(), ["export", "output", "artifact"]) == 0
    present = onnxruntime.get_available_providers()
    for name, provider in (("TensorRT", "TensorrtExecutionProvider"), ("CUDA", "CUDAExecutionProvider")):
        if provider not in present:
            capsys.readouterr()
            assert run(build(), ["predict", "output", "dnn/data/test", "--out", "s.txt", "--engine", name]) == 1
            assert run(build(), ["serve", "artifact", "--engine", name, "--port", "0"]) == 1
            assert (
                capsys.readouterr().err.count(f"engine {name!r} is not available\n  choose onnx, int8 or one of") == 2
            )
    scored = ["predict", "output", "dnn/data/test", "--out", "s.txt"]
    assert (
        run(build(), [*scored, "--engine", "int8", "--threads", "1", "--graph-optimization", "off", "--no-arena"]) == 0
    )
    for option in ("--enable_mkldnn", "--enable_tensorRT", "--use_gpu", "--cpu_threads", "--precision"):
        assert run(build(), [*scored, option, "1"]) == 2
    assert run(build(), ["train", "-m", str(config), "-bf16"]) == 2


@pytest.mark.parametrize("mode", ["heter", "gpubox"])
def test_gpu_servers_become_async(config: Path, mode: str, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["migrate", "paddlerec", str(config), f"runner.sync_mode={mode}", "--purpose", "launch", "--json"]
    assert run(build(), argv) == 0
    keys = {line["key"]: line for line in json.loads(capsys.readouterr().out.splitlines()[-1])["keys"]}
    assert keys["runner.sync_mode"]["became"] == 'mode.name="async"'
    assert "not supported" in keys["runner.sync_mode"]["note"]
