"""FAT-DeepFFM."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clickfleet.training.layers import (
    DroppedTower,
    FieldVectors,
    Pairs,
    Tower,
    Wide,
    by_fan_in,
    constant,
    factor_std,
    logits,
    tower,
    truncated,
)
from clickfleet.training.losses import l2
from clickfleet.training.network import SMALL, Inputs, Model, Shape, TableInit


class FATDeepFFM(Model):
    """The vectors of a field-aware machine, weighted by attention; their products feed an MLP (arXiv:1905.06336).

    D_fg = u_fg·e_f^(g); A = ReLU(W₂ ReLU(W₁ D + b₁) + b₂), one number per vector, starting near 1; h_f^(g) = A_fg e_f^(g);
    logit = Σ_j w_j + a·x + b + MLP([h_f^(g) ∘ h_g^(f) for f<g]). Fields and rows are those of `ffm`.
    """

    original_rows = TableInit(embedx=SMALL)
    has_wide = True

    @dataclass(frozen=True)
    class Config(Model.Config):
        hidden: tuple[int, ...] = (400, 400)
        """Widths of the MLP, input side first."""
        reduction: int | None = None
        """Number by which W₁ divides the number of vectors. Default: 8; with `paddlerec`: 1."""
        product: Literal["hadamard", "inner"] = "hadamard"
        """What the MLP sees of a pair: the products of all elements, or their sum."""
        dropout: float = 0.0
        """Fraction of hidden values set to zero during training."""
        paddlerec: bool = False
        """D_fg is the largest element of e_f^(g). The first-order part is the sum of all elements of h. A starts at random.
        Dropout 0.5 after every linear layer of the MLP, including the output, and every ReLU; L2 of 1e-7 on its weights."""

    def __init__(self, config: Config, shape: Shape) -> None:
        super().__init__(config, shape)
        original, n, d = config.paddlerec, shape.slots + shape.dense, shape.dim
        self.original, self.count, self.dim, self.product = original, n, d, config.product
        self.wide = None if original else Wide(shape)
        self.bias = nn.Parameter(torch.zeros(1)) if original else None
        self.pairs = Pairs(n)
        self.deep: Tower | DroppedTower | None = None
        if not original and not len(self.pairs):
            return  # weights that nothing depends on are not exported
        self.fields = FieldVectors(
            shape.dense, shape.factors, constant(1.0) if original else truncated(factor_std(shape.dim))
        )
        self.compose = None if original else nn.Parameter(torch.empty(n * n, d))
        if self.compose is not None:
            by_fan_in(1.0)(self.compose)
        narrow = max(n * n // (config.reduction or (1 if original else 8)), 1)
        self.inner, self.outer = nn.Linear(n * n, narrow), nn.Linear(narrow, n * n)
        for layer in (self.inner, self.outer):
            nn.init.xavier_uniform_(layer.weight)
            constant(0.0)(layer.bias)
        if not original:
            constant(1.0)(self.outer.bias)
        width = len(self.pairs) * (d if config.product == "hadamard" else 1)
        if width:
            self.deep = (
                DroppedTower((width, *config.hidden, 1), 0.5)
                if original
                else tower(width, *config.hidden, shape.outputs, dropout=config.dropout)
            )

    @classmethod
    def row_factors(cls, config: object, dim: int, slots: int, dense: int) -> int:
        return (slots + dense) * dim

    def extra_loss(self) -> Tensor | None:
        if not self.original or self.deep is None:
            return None
        return l2([p for p in self.deep.parameters() if p.ndim == 2], 1e-7)

    def forward(self, x: Inputs) -> Tensor:
        if self.deep is None and self.wide is not None:
            return logits(self.wide(x.first, x.dense))
        e = torch.unflatten(self.fields(x.factors, x.dense).flatten(1), 1, (-1, self.dim))  # [B, n², d]
        descriptors = e.amax(2) if self.compose is None else (e * self.compose).sum(2)
        attention = F.relu(self.outer(F.relu(self.inner(descriptors))))
        h = e * attention.unsqueeze(2)
        logit = h.sum((1, 2)).unsqueeze(1) if self.wide is None else self.wide(x.first, x.dense)
        if self.bias is not None:
            logit = logit + self.bias
        if self.deep is None:
            return logits(logit)
        there, back = self.pairs.left * self.count + self.pairs.right, self.pairs.right * self.count + self.pairs.left
        products = h[:, there] * h[:, back]
        if self.product == "inner":
            products = products.sum(2)
        return logits(logit + self.deep(products))
