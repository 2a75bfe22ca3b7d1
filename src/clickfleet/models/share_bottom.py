"""Shared bottom: one network below, a tower per label above."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from clickfleet.errors import ConfigError
from clickfleet.training.layers import OwnColumns, tower
from clickfleet.training.network import Inputs, Model, Shape


class ShareBottom(Model):
    """All labels share the lower layers, and each has its own tower above them (Caruana, Machine Learning 28, 1997).

    h = MLP_bottom([e, x]); logit_t = MLP_t(h).
    """

    least_labels = 2
    small: ClassVar[Mapping[str, object]] = {"bottom": [128], "hidden": [64]}
    unequal_widths = True

    @dataclass(frozen=True)
    class Config(Model.Config):
        bottom: tuple[int, ...] = (400, 400)
        """Widths of the shared layers, input side first."""
        hidden: tuple[int, ...] = (128,)
        """Widths of the tower of each label."""
        dropout: float = 0.0
        """Fraction of hidden values set to zero during training."""

    def __init__(self, config: Config, shape: Shape) -> None:
        super().__init__(config, shape)
        self.columns = OwnColumns(shape)
        if not config.bottom:
            raise ConfigError(
                "model.bottom has no layers", "for example bottom: [400, 400]; dnn has one head per label"
            )
        self.bottom = tower(shape.width, *config.bottom, dropout=config.dropout, relu_last=True)
        self.towers = nn.ModuleList(
            tower(config.bottom[-1], *config.hidden, 1, dropout=config.dropout) for _ in shape.tasks
        )

    def forward(self, x: Inputs) -> Tensor:
        h = self.bottom(self.columns(x.factors), x.dense)
        return torch.cat([tower(h) for tower in self.towers], 1)
