"""Multi-gate mixture of experts."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from clickfleet.errors import ConfigError
from clickfleet.training.layers import OwnColumns, side_by_side, tower
from clickfleet.training.network import Inputs, Model, Shape


class MMoE(Model):
    """Each label weighs the same experts by its own gate (Ma et al., KDD 2018).

    f_k = MLP_k([e, x]); g_t = softmax(G_t [e, x]); logit_t = MLP_t(Σ_k g_tk f_k).
    """

    least_labels = 2
    small: ClassVar[Mapping[str, object]] = {"expert": [64], "hidden": [32]}
    unequal_widths = True

    @dataclass(frozen=True)
    class Config(Model.Config):
        experts: int = 4
        """Number of experts."""
        expert: tuple[int, ...] = (256, 128)
        """Widths of an expert, input side first."""
        hidden: tuple[int, ...] = (64,)
        """Widths of the tower of each label."""
        dropout: float = 0.0
        """Fraction of hidden values set to zero during training."""

    def __init__(self, config: Config, shape: Shape) -> None:
        super().__init__(config, shape)
        self.columns = OwnColumns(shape)
        if config.experts < 1 or not config.expert:
            raise ConfigError(
                "mmoe needs at least one expert with a layer", "for example experts: 4, expert: [256, 128]"
            )
        self.experts = nn.ModuleList(
            tower(shape.width, *config.expert, dropout=config.dropout, relu_last=True) for _ in range(config.experts)
        )
        self.gates = nn.Linear(shape.width, shape.outputs * config.experts)
        nn.init.zeros_(self.gates.weight)  # all experts count alike at first
        nn.init.zeros_(self.gates.bias)
        self.towers = nn.ModuleList(
            tower(config.expert[-1], *config.hidden, 1, dropout=config.dropout) for _ in shape.tasks
        )

    def forward(self, x: Inputs) -> Tensor:
        factors = self.columns(x.factors)
        experts = torch.stack([expert(factors, x.dense) for expert in self.experts], 1)  # [B, E, H]
        gates = self.gates(side_by_side(factors, x.dense)).unflatten(1, (len(self.towers), -1))  # [B, T, E]
        mixed = torch.bmm(torch.softmax(gates, 2), experts)
        return torch.cat([tower(mixed[:, t]) for t, tower in enumerate(self.towers)], 1)
