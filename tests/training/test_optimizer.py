from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from clickfleet.config.sections import Schedule
from clickfleet.errors import CheckpointError, ConfigError
from clickfleet.training.optimizer import Config, Flat, Optimizer, factor

KINDS: list[tuple[Config, Any]] = [
    (Config("sgd", lr=0.1, momentum=0.9), lambda p: torch.optim.SGD(p, 0.1, momentum=0.9)),
    (Config("sgd", lr=0.1), lambda p: torch.optim.SGD(p, 0.1)),
    (Config("adam", lr=0.1), lambda p: torch.optim.Adam(p, 0.1)),
    (Config("adam", lr=0.1, betas=(0.8, 0.9), eps=1e-3), lambda p: torch.optim.Adam(p, 0.1, (0.8, 0.9), 1e-3)),
    (Config("adamw", lr=0.1, weight_decay=0.3), lambda p: torch.optim.AdamW(p, 0.1, weight_decay=0.3)),
    (Config("adagrad", lr=0.1, initial_sum=0.5), lambda p: torch.optim.Adagrad(p, 0.1, initial_accumulator_value=0.5)),
]


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))


def loss(model: nn.Module, seed: int) -> torch.Tensor:
    x = torch.randn(8, 3, generator=torch.Generator().manual_seed(seed))
    out: torch.Tensor = (model(x) - x.sum(1, keepdim=True)).square().mean()
    return out


def step(flat: Flat, optimizer: Optimizer, seed: int) -> None:
    flat.zero_grads()
    loss(flat.model, seed).backward()
    optimizer.step(flat.grads)


@pytest.mark.parametrize(("config", "reference"), KINDS)
def test_one_vector_moves_as_torchs_optimizer_moves_the_parameters(config: Config, reference: Any) -> None:
    theirs, ours = net(), Flat(net())
    torchs, optimizer = reference(theirs.parameters()), Optimizer(config, ours.values)
    for seed in range(10):
        torchs.zero_grad()
        loss(theirs, seed).backward()
        torchs.step()
        step(ours, optimizer, seed)
    for a, b in zip(ours.model.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(("config", "_reference"), KINDS)
@pytest.mark.parametrize("before", [0, 4])
def test_a_run_restored_from_safetensors_goes_on_bit_for_bit(
    config: Config, _reference: Any, before: int, tmp_path: Path
) -> None:
    flat = Flat(net())
    optimizer = Optimizer(config, flat.values)
    for seed in range(before):
        step(flat, optimizer, seed)
    save_file(optimizer.state(), tmp_path / "optimizer.safetensors")
    values = flat.values.clone()
    for seed in range(before, 8):
        step(flat, optimizer, seed)

    other = Flat(net())
    other.values.copy_(values)
    resumed = Optimizer(config, other.values)
    step(other, Optimizer(config, other.values.clone()), 99)  # a stranger's step leaves nothing behind
    resumed.restore(load_file(tmp_path / "optimizer.safetensors"))
    for seed in range(before, 8):
        step(other, resumed, seed)
    assert torch.equal(other.values, flat.values)
    assert resumed.steps == 8


def test_foreign_states_are_refused() -> None:
    values = torch.ones(4)
    adam = Optimizer(Config("adam"), values)
    adam.step(torch.ones(4))
    with pytest.raises(CheckpointError, match="but adagrad needs"):
        Optimizer(Config("adagrad"), values).restore(adam.state())
    with pytest.raises(CheckpointError, match="has 4 values, but the model has 5"):
        Optimizer(Config("adam"), torch.ones(5)).restore(adam.state())


def test_flat_values_and_gradients_are_the_models_own() -> None:
    flat = Flat(net())
    assert list(flat.spans) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert all(start % 16 == 0 for start, _ in flat.spans.values())
    loss(flat.model, 1).backward()
    assert flat.grads.abs().sum() > 0
    flat.values.zero_()
    assert all(not p.any() for p in flat.model.parameters())


def test_a_replica_shares_values_and_keeps_its_own_gradients() -> None:
    flat = Flat(net())
    twin = flat.replica()
    loss(twin.model, 1).backward()
    assert twin.grads.any()
    assert not flat.grads.any()
    flat.values.fill_(2.0)
    assert all((p == 2).all() for p in twin.model.parameters())
    loss(flat.model, 1).backward()
    assert flat.grads.any()


def test_frozen_parameters_stay_out_of_the_vector() -> None:
    model = nn.Linear(2, 1)
    model.bias.requires_grad_(False)
    assert list(Flat(model).spans) == ["weight"]


def test_clipping_by_norm_and_by_value() -> None:
    values = torch.zeros(2)
    Optimizer(Config("sgd", lr=1.0, clip_norm=1.0), values).step(torch.tensor([3.0, 4.0]))
    assert values.tolist() == pytest.approx([-0.6, -0.8])
    values.zero_()
    Optimizer(Config("sgd", lr=1.0, clip_value=1.0), values).step(torch.tensor([3.0, -0.5]))
    assert values.tolist() == [-1.0, 0.5]
    values.zero_()
    Optimizer(Config("sgd", lr=1.0, clip_norm=1.0), values).step(torch.tensor([8.0, 0.0]), scale=1 / 16)
    assert values.tolist() == [-0.5, 0.0]


def test_the_learning_rate_follows_the_schedule_or_the_caller() -> None:
    values = torch.zeros(1)
    optimizer = Optimizer(Config("sgd", lr=1.0, schedule=Schedule("constant", warmup=4)), values)
    for expected in (-0.25, -0.75, -1.5, -2.5, -3.5):
        optimizer.step(torch.ones(1))
        assert values.item() == expected
    optimizer.step(torch.ones(1), lr=0.125)
    assert values.item() == -3.625


def test_schedules() -> None:
    cosine = Schedule("cosine", warmup=1, steps=4, floor=0.2)
    rates = [factor(cosine, n) for n in range(7)]
    assert rates == pytest.approx([1.0, *(0.2 + 0.8 * (1 + math.cos(math.pi * n / 4)) / 2 for n in range(5)), 0.2])
    halving = Schedule("exponential", every=10, decay=0.25)
    assert factor(halving, 5) == pytest.approx(0.5)
    assert factor(Schedule("step", every=10, decay=0.25), 19) == 0.25


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (Config("adam", momentum=0.9), "dense.momentum belongs to sgd, but dense.optimizer is adam"),
        (Config("sgd", eps=1e-3), "dense.eps belongs to adam and adamw and adagrad"),
        (Config(lr=0.0), "dense.lr must be above 0, not 0"),
        (Config(schedule=Schedule("cosine")), "schedule cosine needs steps above 0"),
        (Config(schedule=Schedule("constant", every=3)), "schedule constant has no every"),
        (Config(schedule=Schedule("step", every=3, decay=0.5, floor=0.1)), "schedule step has no floor"),
        (Config(schedule=Schedule(warmup=-1)), "dense.schedule.warmup must not be negative"),
    ],
)
def test_settings_that_would_not_be_obeyed_are_refused(config: Config, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Optimizer(config, torch.zeros(1))
