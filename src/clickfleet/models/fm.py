"""Factorization machine."""

from dataclasses import dataclass

from torch import Tensor

from clickfleet.training.layers import FieldVectors, Shared, Wide, constant, factor_std, fm_pairs, logits, truncated
from clickfleet.training.network import SMALL, Inputs, Model, Shape, TableInit


class FM(Model):
    """logit = Σ_j w_j + a·x + b + Σ_{f<g} ⟨e_f, e_g⟩ over all fields, dense ones as x_i·A_i (Rendle, ICDM 2010)."""

    original_rows = TableInit(SMALL, SMALL)
    has_wide = True

    @dataclass(frozen=True)
    class Config(Model.Config):
        paddlerec: bool = False
        """Start a and A at 1.0 and first-order weights at random."""

    def __init__(self, config: Config, shape: Shape) -> None:
        super().__init__(config, shape)
        self.wide, self.shared = Wide(shape, constant(1.0) if config.paddlerec else None), Shared(shape.outputs)
        start = constant(1.0) if config.paddlerec else truncated(factor_std(shape.dim))
        self.fields = FieldVectors(shape.dense, shape.factors, start)

    def forward(self, x: Inputs) -> Tensor:
        pairs = fm_pairs(self.fields(x.factors, x.dense))
        return logits(self.wide(x.first, x.dense) + self.shared(pairs))
