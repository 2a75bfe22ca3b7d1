"""Where the network computes: any device that torch can use, with the same code for all of them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import clickfleet
from clickfleet.data.schema import Dense, Schema, Slot
from clickfleet.errors import ConfigError
from clickfleet.training import devices
from clickfleet.training.optimizer import Config, Optimizer

SCHEMA = Schema(dense=(Dense("age"),), slots=(Slot("city"),), weight="w")
HAVE_CUDA = torch.cuda.is_available()


def frame(rows: int = 2000) -> dict[str, Any]:
    rng = np.random.default_rng(1)
    city = rng.integers(0, 20, rows)
    return {"label": city % 2, "age": rng.normal(size=rows), "city": city, "w": rng.integers(1, 3, rows).astype(float)}


def train(device: str, folder: Path, resume: bool = False, **more: Any) -> Any:
    config = {
        "model": {"name": "deepfm", "hidden": [16], "dropout": 0.1},
        "data": {"batch_size": 50},
        "train": {"device": device, "threads": 2, **more},
        "dense": {"clip_norm": 5.0},
        "run": {"dir": str(folder)},
    }
    return clickfleet.train(config, data=frame(), test=frame(), schema=SCHEMA, resume=resume, quiet=True)


@pytest.mark.parametrize(
    ("name", "message"),
    [("gpu", "unknown device"), ("meta", "cannot use this device"), ("cuda:77", "cannot use this device")],
)
def test_what_is_not_there_is_refused(name: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        train(name, tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(HAVE_CUDA, reason="there is one")
def test_cuda_that_is_absent_is_refused_with_advice(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"train\.device is 'cuda'.*\n.*train\.device=cpu"):
        train("cuda", tmp_path)


@pytest.mark.skipif(not HAVE_CUDA, reason="there is no CUDA device")
def test_cuda_learns_like_the_cpu(tmp_path: Path) -> None:
    done = train("cuda", tmp_path / "cuda", epochs=2)
    assert done.test["auc"] > 0.99
    assert clickfleet.load(tmp_path / "cuda").evaluate(frame())["auc"] == pytest.approx(done.test["auc"], abs=1e-6)
    assert train("cuda", tmp_path / "cuda", resume=True, epochs=3).test["auc"] > 0.99


def test_a_model_trained_elsewhere_scores_on_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:  # as on a machine with such a device
        patch.setattr(devices, "find", lambda name: devices.CPU)
        done = train("cuda", tmp_path, epochs=2)
    assert done.learner.optimizer.steps == 80
    model = clickfleet.load(tmp_path)
    assert model.config.train.device == "cuda"
    assert model.learner.device == (torch.device("cuda") if HAVE_CUDA else devices.CPU)
    assert np.allclose(model.predict(frame()), done.predict(frame()), atol=1e-6)


@pytest.mark.parametrize(
    "config",
    [
        Config("sgd", lr=0.1),
        Config("sgd", lr=0.1, momentum=0.9, weight_decay=0.01),
        Config("adagrad", lr=0.1),
        Config("adam", lr=0.1, weight_decay=0.01),
        Config("adamw", lr=0.1),
        Config("adam", lr=0.1, clip_norm=0.5),
    ],
    ids=lambda config: config.optimizer,
)
def test_optimizers_without_fused_kernels_do_the_same(config: Config) -> None:
    """On other devices gradients are scaled and torch's plain implementations run."""
    torch.manual_seed(0)
    fused, plain = (Optimizer(config, torch.full((40,), 0.5)) for _ in range(2))
    plain.fused = False
    for _ in range(5):
        grads = torch.randn(40)
        fused.step(grads.clone(), scale=0.25)
        plain.step(grads.clone(), scale=0.25)
    torch.testing.assert_close(fused.values, plain.values, rtol=1e-5, atol=1e-6)
