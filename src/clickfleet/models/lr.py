"""Logistic regression."""

from dataclasses import dataclass

from torch import Tensor

from clickfleet.training.layers import Wide, logits
from clickfleet.training.network import Inputs, Model, Shape


class LR(Model):
    """logit = Σ_j w_j + a·x + b (McMahan et al., "Ad click prediction: a view from the trenches", KDD 2013)."""

    has_wide = True

    @dataclass(frozen=True)
    class Config(Model.Config): ...

    def __init__(self, config: Config, shape: Shape) -> None:
        super().__init__(config, shape)
        self.wide = Wide(shape)

    @classmethod
    def row_factors(cls, config: object, dim: int, slots: int, dense: int) -> int:
        return 0

    def forward(self, x: Inputs) -> Tensor:
        return logits(self.wide(x.first, x.dense))
