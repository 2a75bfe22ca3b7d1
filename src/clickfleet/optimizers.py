"""Dense optimizers: torch's, run over all parameters as one vector, so that a step is one fused call."""

from __future__ import annotations

import copy
import threading
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from clickfleet import schedules
from clickfleet.errors import CheckpointError, ConfigError

ALIGN = 16  # floats: every parameter starts on a cache line


@dataclass(frozen=True)
class Config:
    optimizer: Literal["sgd", "adam", "adamw", "adagrad"] = "adam"
    lr: float = 0.001
    schedule: schedules.Config = field(default_factory=schedules.Config)
    clip_norm: float | None = None
    """Gradients are scaled down to this norm, taken over all of them."""
    clip_value: float | None = None
    """Every gradient is cut off at ± this."""
    weight_decay: float | None = None
    """As each optimizer has it: added to the gradient, or in adamw (0.01 by default) to the step."""
    momentum: float | None = None
    """sgd only."""
    betas: tuple[float, float] | None = None
    """adam and adamw only."""
    eps: float | None = None
    """adam, adamw and adagrad only."""
    initial_sum: float | None = None
    """adagrad only: where the sums of squares begin."""


class Flat:
    """All trainable parameters of a model as one vector, and their gradients as another; the model's are views of them.

    >>> flat = Flat(nn.Linear(3, 1))
    >>> flat.values.shape, [name for name in flat.spans]
    (torch.Size([32]), ['weight', 'bias'])
    """

    def __init__(self, model: nn.Module, values: Tensor | None = None) -> None:
        self.model = model
        self.spans: dict[str, tuple[int, int]] = {}
        end = 0
        params = {name: p for name, p in model.named_parameters() if p.requires_grad}
        for name, p in params.items():
            self.spans[name] = (end, p.numel())
            end += -(-p.numel() // ALIGN) * ALIGN
        like = next(iter(params.values()), torch.empty(0))
        self.values = torch.zeros(end, dtype=like.dtype, device=like.device) if values is None else values
        self.grads = torch.zeros_like(self.values)
        for name, p in params.items():
            start, size = self.spans[name]
            view = self.values[start : start + size].view(p.shape)
            if values is None:
                view.copy_(p.data)
            p.data = view  # not a version-counted alias: another thread may step while this one is in backward
            p.grad = self.grads[start : start + size].view(p.shape)

    def zero_grads(self) -> None:
        self.grads.zero_()

    def replica(self) -> Flat:
        """A copy of the model on the same values, with gradients of its own: one for each hogwild thread."""
        for p in self.model.parameters():  # grads are not copied with the model
            p.grad = None
        twin = Flat(copy.deepcopy(self.model), self.values)
        self.attach()
        return twin

    def attach(self) -> None:
        """Points the model's gradients at `grads` again, e.g. after a `zero_grad` that set them to None."""
        for name, p in self.model.named_parameters():
            if name in self.spans:
                start, size = self.spans[name]
                p.grad = self.grads[start : start + size].view(p.shape)


class Optimizer:
    """One optimizer over one vector; threads and shards may share it.

    >>> values = torch.ones(2)
    >>> Optimizer(Config("sgd", lr=0.5), values).step(torch.tensor([1.0, 0.0]))
    >>> values
    tensor([0.5000, 1.0000])
    """

    def __init__(self, config: Config, values: Tensor) -> None:
        check(config)
        self.config = config
        self.steps = 0
        self.vector = nn.Parameter(values, requires_grad=True)
        self.torch = build(config, self.vector)
        self.lock = threading.Lock()

    @property
    def lr(self) -> float:
        """The rate of the next step."""
        return self.config.lr * schedules.factor(self.config.schedule, self.steps)

    def step(self, grads: Tensor, scale: float = 1.0, lr: float | None = None) -> None:
        """Moves the values by `grads`, which are first multiplied by `scale` and clipped, in place."""
        if scale != 1.0:
            grads.mul_(scale)
        clip(self.config, grads)
        with self.lock:
            self.torch.param_groups[0]["lr"] = self.lr if lr is None else lr
            self.vector.grad = grads
            self.torch.step()
            self.vector.grad = None
            self.steps += 1

    def state(self) -> dict[str, Tensor]:
        """Everything a resumed run needs, as tensors."""
        with self.lock:
            state = {"steps": torch.tensor(self.steps)}
            for key, value in self.torch.state.get(self.vector, {}).items():
                if isinstance(value, Tensor):  # absent until the first step; momentum_buffer is None without momentum
                    state[key] = value.clone()
            return state

    def restore(self, state: dict[str, Tensor]) -> None:
        """The exact inverse of `state`, for the same optimizer over a vector of the same length."""
        fresh = build(self.config, nn.Parameter(torch.zeros_like(self.vector)))
        known = state_keys(fresh)
        saved = {key: value for key, value in state.items() if key != "steps"}
        if "steps" not in state or (saved and set(saved) != known):
            raise CheckpointError(
                f"the saved optimizer state holds {sorted(state)}, and {self.config.optimizer} keeps {sorted(known)}",
                "resume with the dense.optimizer of the saved run, or start one with train.init_from",
            )
        for key, value in saved.items():
            if value.ndim and value.shape != self.vector.shape:
                raise CheckpointError(
                    f"the saved {key} has {value.numel()} values and the model has {self.vector.numel()}",
                    "resume with the model settings of the saved run",
                )
        with self.lock:
            self.steps = int(state["steps"])
            self.torch.state.clear()
            if saved:
                self.torch.state[self.vector] = {key: value.clone() for key, value in saved.items()}


def state_keys(optimizer: torch.optim.Optimizer) -> set[str]:
    """The names of the tensors an optimizer keeps, learnt by letting a fresh one make a step."""
    (vector,) = optimizer.param_groups[0]["params"]
    vector.grad = torch.zeros_like(vector)
    optimizer.step()
    return {key for key, value in optimizer.state[vector].items() if isinstance(value, Tensor)}


def build(config: Config, vector: nn.Parameter) -> torch.optim.Optimizer:
    lr, decay = config.lr, config.weight_decay
    match config.optimizer:
        case "sgd":
            return torch.optim.SGD([vector], lr, momentum=config.momentum or 0.0, weight_decay=decay or 0.0, fused=True)
        case "adam":
            return torch.optim.Adam([vector], lr, weight_decay=decay or 0.0, fused=True, **adam(config))
        case "adamw":
            return torch.optim.AdamW(
                [vector], lr, weight_decay=0.01 if decay is None else decay, fused=True, **adam(config)
            )
        case "adagrad":
            return torch.optim.Adagrad(
                [vector],
                lr,
                weight_decay=decay or 0.0,
                initial_accumulator_value=config.initial_sum or 0.0,
                eps=1e-10 if config.eps is None else config.eps,
                fused=vector.device.type == "cpu",
            )


def adam(config: Config) -> dict[str, Any]:
    return {"betas": config.betas or (0.9, 0.999), "eps": 1e-8 if config.eps is None else config.eps}


TAKES = {
    "sgd": {"momentum"},
    "adam": {"betas", "eps"},
    "adamw": {"betas", "eps"},
    "adagrad": {"eps", "initial_sum"},
}


def check(config: Config) -> None:
    """Refuses settings that the chosen optimizer would not obey."""
    for key in ("momentum", "betas", "eps", "initial_sum"):
        if getattr(config, key) is not None and key not in TAKES[config.optimizer]:
            fit = " and ".join(name for name, keys in TAKES.items() if key in keys)
            raise ConfigError(
                f"dense.{key} belongs to {fit}, and dense.optimizer is {config.optimizer}", f"remove {key}"
            )
    for key in ("lr", "clip_norm", "clip_value"):
        value = getattr(config, key)
        if value is not None and value <= 0:
            raise ConfigError(f"dense.{key} is {value:g}, and must be above 0", "leave it out for its default")
    schedules.check(config.schedule)


def clip(config: Config, grads: Tensor) -> None:
    if config.clip_value is not None:
        grads.clamp_(-config.clip_value, config.clip_value)
    if config.clip_norm is not None:
        norm = float(torch.linalg.vector_norm(grads))
        if norm > config.clip_norm:
            grads.mul_(config.clip_norm / norm)
