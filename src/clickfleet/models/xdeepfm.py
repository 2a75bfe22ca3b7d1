"""xDeepFM."""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from clickfleet.training.layers import FieldVectors, Wide, by_fan_in, constant, factor_std, logits, tower, truncated
from clickfleet.training.losses import l2
from clickfleet.training.network import NARROW, SMALL, Inputs, Model, Shape, TableInit


class XDeepFM(Model):
    """A compressed interaction network (CIN), an MLP and a linear part (arXiv:1803.05170).

    X⁰ = the field vectors, dense ones as x_i·A_i; X^k_h = Σ_{i,j} W^{k,h}_{ij} (X⁰_i ∘ X^{k−1}_j);
    logit = Σ_j w_j + a·x + b + v·[Σ_d X¹, Σ_d X², …] + MLP(X⁰)
    """

    original_rows = TableInit(SMALL, SMALL)
    has_wide = True
    small = NARROW

    @dataclass(frozen=True)
    class Config(Model.Config):
        cin: tuple[int, ...] = (128, 32)
        """Feature maps of each CIN layer."""
        hidden: tuple[int, ...] = (400, 400)
        """Widths of the MLP, input side first."""
        dropout: float = 0.0
        """Fraction of hidden values set to zero during training."""
        l2: float | None = None
        """L2 on the weights of CIN, CIN output and MLP. Default: none; 1e-4 with `paddlerec`."""
        paddlerec: bool = False
        """Start a and A at 1.0 and first-order weights at random; L2 of 1e-4."""

    def __init__(self, config: Config, shape: Shape) -> None:
        super().__init__(config, shape)
        n = shape.slots + shape.dense
        original = config.paddlerec
        one, small = constant(1.0), truncated(factor_std(shape.dim))
        self.wide = Wide(shape, one if original else None)
        self.fields = FieldVectors(shape.dense, shape.factors, one if original else small)
        self.cin = nn.ParameterList(torch.empty(h, n * below) for below, h in pairwise((n, *config.cin)))
        for weight in self.cin:
            by_fan_in(1.0)(weight)
        self.out = nn.Linear(sum(config.cin), shape.outputs, bias=False)
        by_fan_in(0.1)(self.out.weight)
        start = by_fan_in(1.0) if original else None
        self.deep = tower(n * shape.factors, *config.hidden, shape.outputs, dropout=config.dropout, init=start)
        if original:
            last = self.deep.layers[-1]
            assert isinstance(last, nn.Linear)
            by_fan_in(0.1)(last.weight)
        self.l2 = (1e-4 if original else 0.0) if config.l2 is None else config.l2

    def extra_loss(self) -> Tensor | None:
        matrices = (p for p in self.deep.parameters() if p.ndim == 2)
        return l2([*self.cin, self.out.weight, *matrices], self.l2) if self.l2 else None

    def forward(self, x: Inputs) -> Tensor:
        x0 = self.fields(x.factors, x.dense)  # [B, n, d]
        maps, sums = x0, []
        for weight in self.cin:
            products = (x0.unsqueeze(2) * maps.unsqueeze(1)).flatten(1, 2)  # X⁰_i ∘ X^{k−1}_j: [B, n·h, d]
            maps = weight @ products  # [B, h', d]
            sums.append(maps.sum(2))
        cin = torch.cat(sums, 1) @ self.out.weight.t()
        return logits(self.wide(x.first, x.dense) + cin + self.deep(x0))
