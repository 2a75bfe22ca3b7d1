"""Two towers: one over the slots named in `left`, one over the rest and the dense columns; their product is the logit."""

from dataclasses import dataclass

import torch
from torch import Tensor

from clickfleet.training.layers import tower
from clickfleet.training.network import Inputs, Model, Shape


class TwoTowers(Model):
    @dataclass(frozen=True)
    class Config(Model.Config):
        left: tuple[str, ...] = ("C1",)
        """Slots of the left tower."""
        hidden: int = 32
        """Width of each tower's hidden layer."""
        width: int = 8
        """Width of the output of each tower."""

    def __init__(self, config: Config, shape: Shape) -> None:
        super().__init__(config, shape)
        names = shape.slot_names
        self.left_slots = [i for i, name in enumerate(names) if name in config.left]
        self.right_slots = [i for i, name in enumerate(names) if name not in config.left]
        self.left = tower(len(self.left_slots) * shape.factors, config.hidden, config.width)
        self.right = tower(len(self.right_slots) * shape.factors + shape.dense, config.hidden, config.width)

    def forward(self, x: Inputs) -> Tensor:  # logits [B]
        left = self.left(x.factors[:, self.left_slots].flatten(1))
        right = self.right(torch.cat([x.factors[:, self.right_slots].flatten(1), x.dense], 1))
        return x.first.sum(1) + (left * right).sum(1)
