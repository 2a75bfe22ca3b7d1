"""DeepFM."""

from dataclasses import dataclass

from torch import Tensor

from clickfleet.training.layers import (
    FieldVectors,
    Shared,
    Wide,
    by_fan_in,
    factor_std,
    fm_pairs,
    logits,
    tower,
    truncated,
)
from clickfleet.training.network import NARROW, SMALL, Inputs, Model, Shape, TableInit


class DeepFM(Model):
    """A factorization machine and an MLP over the same rows (arXiv:1703.04247).

    logit = Σ_j w_j + a·x + b + Σ_{f<g} ⟨e_f, e_g⟩ + MLP([e, x])
    """

    original_rows = TableInit(SMALL, SMALL)
    has_wide = True
    small = NARROW

    @dataclass(frozen=True)
    class Config(Model.Config):
        hidden: tuple[int, ...] = (400, 400, 400)
        """Widths of the MLP, input side first."""
        dropout: float = 0.0
        """Fraction of hidden values set to zero during training."""
        paddlerec: bool = False
        """Dense values become fields x_i·A_i of the pairs and the MLP. No bias. The original's initial values."""

    def __init__(self, config: Config, shape: Shape) -> None:
        super().__init__(config, shape)
        small = truncated(factor_std(shape.dim))
        self.wide, self.shared = Wide(shape, small if config.paddlerec else None), Shared(shape.outputs)
        self.fields: FieldVectors | None = None
        width, start = shape.width, None
        if config.paddlerec:
            self.wide.bias.requires_grad_(False)  # the original has a bias but never adds it
            self.fields = FieldVectors(shape.dense, shape.factors, small)
            width, start = (shape.slots + shape.dense) * shape.factors, by_fan_in(1.0)
        self.deep = tower(width, *config.hidden, shape.outputs, dropout=config.dropout, init=start)

    def forward(self, x: Inputs) -> Tensor:
        wide = self.wide(x.first, x.dense)
        if self.fields is not None:
            fields = self.fields(x.factors, x.dense)
            return logits(wide + self.shared(fm_pairs(fields)) + self.deep(fields))
        pairs = wide + self.shared(fm_pairs(x.factors)) if x.factors.shape[1] else wide
        return logits(pairs + self.deep(x.factors, x.dense))
