"""Entire space multi-task model."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from clickfleet.errors import ConfigError
from clickfleet.training.layers import OwnColumns, tower
from clickfleet.training.network import NARROW, Inputs, Model, Shape


class ESMM(Model):
    """What happens after a click is learned from all shows, not from clicked ones alone (arXiv:1804.07931).

    logit_t = MLP_t([e, x]) over shared rows. For a label with `given`, σ(logit_t) is the probability after the other label, and
    the loss is that of the product over all rows: P(buy) = P(click)·P(buy | click). The product takes a click without a purchase and no
    click for the same, so `conditional` adds the loss of P(buy | click) in rows with a click, which the paper does not have.
    """

    least_labels = 2
    entire_space = True
    small = NARROW
    unequal_widths = True

    @dataclass(frozen=True)
    class Config(Model.Config):
        hidden: tuple[int, ...] = (400, 400, 400)
        """Widths of the MLP of each label, input side first."""
        dropout: float = 0.0
        """Fraction of hidden values set to zero during training."""
        conditional: float = 1.0
        """Weight of the loss in rows where the label in `given` is 1, beside that of the product. 0: the product alone, as in the paper."""

    @classmethod
    def conditional(cls, config: Any) -> float:
        return float(config.conditional)

    def __init__(self, config: Config, shape: Shape) -> None:
        super().__init__(config, shape)
        self.columns = OwnColumns(shape)
        if config.conditional < 0:
            raise ConfigError(f"model.conditional is {config.conditional:g}, but must not be negative")
        if not any(task.given for task in shape.tasks):
            raise ConfigError(
                "esmm needs a label that has a meaning only after another one",
                "name it in data.schema, such as labels: {click: {}, buy: {given: click}}",
            )
        self.towers = nn.ModuleList(tower(shape.width, *config.hidden, 1, dropout=config.dropout) for _ in shape.tasks)

    def forward(self, x: Inputs) -> Tensor:
        factors = self.columns(x.factors)
        return torch.cat([tower(factors, x.dense) for tower in self.towers], 1)
