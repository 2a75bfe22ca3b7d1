"""Field-aware factorization machine."""

from dataclasses import dataclass

import torch
from torch import Tensor

from clickfleet.training.layers import FieldVectors, Shared, Wide, constant, factor_std, logits, truncated
from clickfleet.training.network import SMALL, Inputs, Model, Shape, TableInit


class FFM(Model):
    """logit = Σ_j w_j + a·x + b + Σ_{f<g} ⟨e_f^(g), e_g^(f)⟩, with a vector per field and partner (Juan, RecSys 2016).

    Fields are the slots, then the dense columns. A row holds one vector of width d for every field.
    """

    original_rows = TableInit(SMALL, SMALL)
    has_wide = True

    @dataclass(frozen=True)
    class Config(Model.Config):
        paddlerec: bool = False
        """Start a and A at 1.0 and first-order weights at random."""

    def __init__(self, config: Config, shape: Shape) -> None:
        super().__init__(config, shape)
        self.count, self.dim = shape.slots + shape.dense, shape.dim
        self.wide, self.shared = Wide(shape, constant(1.0) if config.paddlerec else None), Shared(shape.outputs)
        start = constant(1.0) if config.paddlerec else truncated(factor_std(shape.dim))
        self.fields = FieldVectors(shape.dense, shape.factors, start)

    @classmethod
    def row_factors(cls, config: object, dim: int, slots: int, dense: int) -> int:
        return (slots + dense) * dim

    def forward(self, x: Inputs) -> Tensor:
        e = torch.unflatten(self.fields(x.factors, x.dense), 2, (self.count, self.dim))  # [B, f, g, d]
        diagonal = torch.diagonal(e, dim1=1, dim2=2)  # e_f^(f), which is not a pair
        both = (e * e.transpose(1, 2)).sum((1, 2, 3)) - diagonal.square().sum((1, 2))  # each pair twice
        return logits(self.wide(x.first, x.dense) + self.shared(both / 2))
