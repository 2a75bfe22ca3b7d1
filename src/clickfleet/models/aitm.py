"""Adaptive information transfer multi-task model."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from clickfleet.errors import ConfigError
from clickfleet.training.layers import OwnColumns, by_fan_in, tower
from clickfleet.training.network import Inputs, Model, Shape


class AITM(Model):
    """Labels are steps of one path, and each step learns how much it takes over from the one before (arXiv:2105.08489).

    q_t = MLP_t([e, x]); z_1 = q_1; z_t = Σ_u softmax_u(⟨K u, Q u⟩/√k)·V u over u ∈ {p_t, q_t}, p_t = ReLU(T_t z_{t−1});
    logit_t = w_t·z_t + c_t. A label with `given` is learned from all rows by the product of probabilities, so a later step is
    never likelier. For other neighbours in the list of labels, the loss adds the mean of max(σ(logit_t) − σ(logit_{t−1}), 0).
    """

    least_labels = 2
    entire_space = True
    small: ClassVar[Mapping[str, object]] = {"hidden": [64, 32]}
    unequal_widths = True

    @dataclass(frozen=True)
    class Config(Model.Config):
        hidden: tuple[int, ...] = (256, 128)
        """Widths of the MLP of each label, input side first. The last is the width of what is passed on."""
        order: float = 0.6
        """Weight in the loss of a later step that is likelier than the one before it."""
        dropout: float = 0.0
        """Fraction of hidden values set to zero during training."""

    def __init__(self, config: Config, shape: Shape) -> None:
        super().__init__(config, shape)
        self.columns = OwnColumns(shape)
        if not config.hidden:
            raise ConfigError("model.hidden has no layers", "for example hidden: [256, 128]")
        if config.order < 0:
            raise ConfigError(f"model.order is {config.order:g}, but must not be negative")
        width = config.hidden[-1]
        self.towers = nn.ModuleList(
            tower(shape.width, *config.hidden, dropout=config.dropout, relu_last=True) for _ in shape.tasks
        )
        self.transfers = nn.ModuleList(Transfer(width) for _ in shape.tasks[1:])
        self.heads = nn.ModuleList(nn.Linear(width, 1) for _ in shape.tasks)
        self.order = config.order
        both = list(zip(shape.tasks, shape.tasks[1:], strict=False))
        self.pairs = [i for i, (a, b) in enumerate(both, 1) if a.loss == b.loss == "log" and not b.given]
        """Labels whose probability should not exceed that of the label before them."""
        self.penalty: Tensor | None = None

    def extra_loss(self) -> Tensor | None:
        penalty, self.penalty = self.penalty, None  # a tensor with a graph cannot be copied with the model
        return penalty

    def forward(self, x: Inputs) -> Tensor:
        factors = self.columns(x.factors)
        found = [part(factors, x.dense) for part in self.towers]
        for t, transfer in enumerate(self.transfers, 1):
            found[t] = transfer(found[t - 1], found[t])
        logits = torch.cat([head(z) for head, z in zip(self.heads, found, strict=True)], 1)
        self.penalty = None
        if self.training and self.order and self.pairs:
            later, earlier = (torch.sigmoid(logits[:, [t - back for t in self.pairs]]) for back in (0, 1))
            self.penalty = self.order * torch.relu(later - earlier).sum(1).mean()
        return logits


class Transfer(nn.Module):
    """Attention over what the step before passes on and what this step has found."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.passed = nn.Linear(width, width)
        self.key, self.query, self.value = (nn.Linear(width, width) for _ in range(3))
        for layer in (self.passed, self.key, self.query, self.value):
            by_fan_in(1.0)(layer.weight)
            nn.init.zeros_(layer.bias)
        self.scale = 1 / math.sqrt(width)

    def forward(self, before: Tensor, q: Tensor) -> Tensor:
        both = torch.stack([torch.relu(self.passed(before)), q], 1)  # [B, 2, k]
        weights = torch.softmax((self.key(both) * self.query(both)).sum(2) * self.scale, 1)
        return torch.bmm(weights.unsqueeze(1), self.value(both)).squeeze(1)
