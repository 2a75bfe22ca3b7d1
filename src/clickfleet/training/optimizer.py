"""Dense optimizers: torch's kernels over all parameters as one vector, so that a step is one fused call."""

from __future__ import annotations

import copy
import math
import threading
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adagrad import adagrad
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from clickfleet.config import sections
from clickfleet.config.sections import Schedule
from clickfleet.errors import CheckpointError, ConfigError
from clickfleet.training.fused import Sink
from clickfleet.training.layers import Tower

ALIGN = 16  # floats: every parameter starts on a cache line
Config = sections.DenseSettings


class Flat:
    """All trainable parameters of a model as one vector, and their gradients as another.

    The model's tensors become views of `values`. Fused MLPs write their gradients directly into the vector; `grads`
    collects those that autograd left elsewhere. Call `backward()` on such a model, not `torch.autograd.grad`.

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
        self.vector = torch.zeros_like(self.values)
        for name, view in self.views(self.values).items():
            if values is None:
                view.copy_(params[name].data)
            params[name].data = view  # without a version counter: a thread may step during another's backward pass
        grads = self.views(self.vector)
        self.sinks: list[Sink] = []
        self.written: list[tuple[nn.Parameter, Tensor]] = []  # by fused MLPs, into their sinks
        self.added: list[tuple[nn.Parameter, Tensor]] = []  # by autograd, where .grad points
        for prefix, module in model.named_modules():
            if isinstance(module, Tower):
                layers = f"{prefix}.layers" if prefix else "layers"
                names = [f"{layers}.{i}.{part}" for i in range(len(module.layers)) for part in ("weight", "bias")]
                module.sink = None
                if all(name in grads for name in names):  # neither frozen nor shared with another MLP
                    module.sink = Sink([grads[name] for name in names])
                    self.sinks.append(module.sink)
                    self.written += [(params[name], grads.pop(name)) for name in names]
        for p, _ in self.written:
            p.grad = None
        for name, view in grads.items():
            params[name].grad = view
            self.added.append((params[name], view))

    def views(self, vector: Tensor) -> dict[str, Tensor]:
        """Return the parts of a vector of this layout, by parameter name and in the parameter's shape."""
        shapes = {name: p.shape for name, p in self.model.named_parameters()}
        return {name: vector[start : start + n].view(shapes[name]) for name, (start, n) in self.spans.items()}

    @property
    def grads(self) -> Tensor:
        for sink in self.sinks:
            sink.zero_if_fresh()
        for p, view in self.written:
            if p.grad is not None:  # the MLP ran as plain layers: dropout, evaluation mode, another device
                view.add_(p.grad)
                p.grad = None
        for p, view in self.added:
            if p.grad is not view:  # it was set to None or replaced
                view.zero_() if p.grad is None else view.copy_(p.grad)
                p.grad = view
        return self.vector

    def zero_grads(self) -> None:
        for sink in self.sinks:
            sink.fresh = True
        for p, _ in self.written:
            p.grad = None
        for p, view in self.added:
            view.zero_()
            p.grad = view

    def replica(self) -> Flat:
        """Return a copy of the model with the same values and its own gradients, for another trainer thread."""
        return Flat(copy.deepcopy(self.model), self.values)


class Optimizer:
    """One optimizer over one vector; threads and shards may share it.

    >>> values = torch.ones(2)
    >>> Optimizer(Config("sgd", lr=0.5), values).step(torch.tensor([1.0, 0.0]))
    >>> values
    tensor([0.5000, 1.0000])
    """

    def __init__(self, config: Config, values: Tensor) -> None:
        check(config)
        self.config, self.values = config, values
        self.clips = config.clip_norm is not None or config.clip_value is not None
        self.steps = 0
        self.fused = values.device.type == "cpu"  # other devices lack some of the fused kernels
        self.kept = {key: torch.full_like(values, start) for key, start in initial_state(config).items()}
        self.lock = threading.Lock()

    @property
    def lr(self) -> float:
        """The learning rate of the next step."""
        return self.config.lr * factor(self.config.schedule, self.steps)

    @torch.no_grad()
    def step(self, grads: Tensor, scale: float = 1.0, lr: float | None = None) -> None:
        """Update the values. First multiply `grads` by `scale` and clip them, in place."""
        if self.clips:
            clip(self.config, grads.mul_(scale))
            scale = 1.0
        self.step_clipped(grads, scale, lr)

    @torch.no_grad()
    def step_clipped(self, grads: Tensor, scale: float = 1.0, lr: float | None = None) -> None:
        """Update the values by gradients that are already clipped."""
        if not self.fused and scale != 1.0:
            grads.mul_(scale)
            scale = 1.0
        divisor = None if scale == 1.0 else torch.tensor(1.0 / scale)
        with self.lock:
            rate = self.lr if lr is None else lr
            apply(self.config, self.values, grads, self.kept, self.steps, rate, divisor, self.fused)
            self.steps += 1

    def state(self) -> dict[str, Tensor]:
        """Return everything that a resumed run needs, as tensors."""
        with self.lock:
            return {"steps": torch.tensor(self.steps), **{key: value.clone() for key, value in self.kept.items()}}

    def restore(self, state: dict[str, Tensor]) -> None:
        """Load what `state` returned, for the same optimizer over a vector of the same length."""
        expected = {"steps", *self.kept}
        if set(state) != expected:
            raise CheckpointError(
                f"the saved optimizer state holds {sorted(state)}, but {self.config.optimizer} needs {sorted(expected)}",
                "resume with the dense.optimizer of the saved run, or start a new run with train.init_from",
            )
        for key, kept in self.kept.items():
            if state[key].shape != kept.shape:
                raise CheckpointError(
                    f"the saved {key} has {state[key].numel()} values, but the model has {kept.numel()}",
                    "resume with the model settings of the saved run",
                )
        with self.lock:
            self.steps = int(state["steps"])
            for key, kept in self.kept.items():
                kept.copy_(state[key])


def initial_state(config: Config) -> dict[str, float]:
    """Return the names and initial values of what an optimizer keeps per parameter."""
    match config.optimizer:
        case "sgd":
            return {"momentum": 0.0} if config.momentum else {}
        case "adagrad":
            return {"sum": config.initial_sum or 0.0}
        case "adam" | "adamw":
            return {"mean": 0.0, "square": 0.0}


def apply(
    config: Config,
    values: Tensor,
    grads: Tensor,
    kept: dict[str, Tensor],
    steps: int,
    lr: float,
    divisor: Tensor | None = None,
    fused: bool = True,
) -> None:
    """Call torch's kernel through its functional interface, which has less overhead than its optimizer objects.

    Only fused kernels support a `divisor` of the gradients.
    """
    step, decay, eps = torch.tensor(float(steps)), config.weight_decay, config.eps
    common: dict[str, Any] = {"fused": fused, "foreach": False, "grad_scale": divisor, "lr": lr, "maximize": False}
    match config.optimizer:
        case "sgd":
            sgd(
                [values],
                [grads],
                [kept.get("momentum")],
                weight_decay=decay or 0.0,
                momentum=config.momentum or 0.0,
                dampening=0.0,
                nesterov=False,
                **common,
            )
        case "adagrad":
            adagrad(
                [values],
                [grads],
                [kept["sum"]],
                [step],
                weight_decay=decay or 0.0,
                lr_decay=0.0,
                eps=1e-10 if eps is None else eps,
                **common,
            )
        case "adam" | "adamw":
            decoupled = config.optimizer == "adamw"
            beta1, beta2 = config.betas or (0.9, 0.999)
            adam(
                [values],
                [grads],
                [kept["mean"]],
                [kept["square"]],
                [],
                [step],
                decoupled_weight_decay=decoupled,
                amsgrad=False,
                beta1=beta1,
                beta2=beta2,
                weight_decay=(0.01 if decoupled else 0.0) if decay is None else decay,
                eps=1e-8 if eps is None else eps,
                **common,
            )


TAKES = {
    "sgd": {"momentum"},
    "adam": {"betas", "eps"},
    "adamw": {"betas", "eps"},
    "adagrad": {"eps", "initial_sum"},
}


def check(config: Config) -> None:
    """Reject settings that the chosen optimizer does not use."""
    for key in ("momentum", "betas", "eps", "initial_sum"):
        if getattr(config, key) is not None and key not in TAKES[config.optimizer]:
            fit = " and ".join(name for name, keys in TAKES.items() if key in keys)
            raise ConfigError(
                f"dense.{key} belongs to {fit}, but dense.optimizer is {config.optimizer}", f"remove dense.{key}"
            )
    for key in ("lr", "clip_norm", "clip_value"):
        value = getattr(config, key)
        if value is not None and value <= 0:
            raise ConfigError(f"dense.{key} must be above 0, not {value:g}", "remove it to use the default")
    check_schedule(config.schedule)


def clip(config: Config, grads: Tensor) -> None:
    if config.clip_value is not None:
        grads.clamp_(-config.clip_value, config.clip_value)
    if config.clip_norm is not None:
        norm = float(torch.linalg.vector_norm(grads))
        if norm > config.clip_norm:
            grads.mul_(config.clip_norm / norm)


NEEDS = {"constant": (), "step": ("every", "decay"), "cosine": ("steps",), "exponential": ("every", "decay")}


def check_schedule(config: Schedule) -> None:
    """Reject a schedule with missing, unknown or out-of-range settings."""
    needs = NEEDS[config.name]
    for key in ("every", "decay", "steps"):
        value = getattr(config, key)
        if key in needs and (value is None or value <= 0):
            raise ConfigError(f"schedule {config.name} needs {key} above 0, not {value}", f"set dense.schedule.{key}")
        if key not in needs and value is not None:
            raise ConfigError(f"schedule {config.name} has no {key}", f"remove dense.schedule.{key}")
    if config.floor and config.name != "cosine":
        raise ConfigError(f"schedule {config.name} has no floor", "remove dense.schedule.floor")
    if config.decay is not None and config.decay > 1:
        raise ConfigError(f"dense.schedule.decay must be at most 1, not {config.decay}")
    if config.warmup < 0:
        raise ConfigError(f"dense.schedule.warmup must not be negative, found {config.warmup}")


def factor(config: Schedule, step: int) -> float:
    """Return the factor of the learning rate at `step`, counted from 0.

    >>> [factor(Schedule("step", warmup=2, every=2, decay=0.1), n) for n in range(6)]
    [0.5, 1.0, 1.0, 1.0, 0.1, 0.1]
    """
    if step < config.warmup:
        return (step + 1) / config.warmup
    n = step - config.warmup
    match config.name:
        case "step" | "exponential":
            assert config.decay is not None
            assert config.every is not None
            periods = n // config.every if config.name == "step" else n / config.every
            return float(config.decay**periods)
        case "cosine":
            assert config.steps is not None
            wave = (1 + math.cos(math.pi * min(n / config.steps, 1.0))) / 2
            return config.floor + (1 - config.floor) * wave
        case "constant":
            return 1.0
