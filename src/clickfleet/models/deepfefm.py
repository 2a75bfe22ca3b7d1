"""DeepFEFM."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from clickfleet.training.layers import DroppedTower, Pairs, Shared, Tower, Wide, factor_std, logits, tower, truncated
from clickfleet.training.losses import l2
from clickfleet.training.network import NARROW, SMALL, Inputs, Model, Shape, TableInit


class DeepFEFM(Model):
    """A symmetric matrix for every pair of fields; the products also feed an MLP (arXiv:2009.09931).

    z_ij = e_iᵀ (M_ij + M_ijᵀ) e_j for i < j; logit = Σ_j w_j + a·x + b + Σ z_ij + MLP([e, x, z]).
    A dense column takes part in pairs if the schema also declares it as a bucketed slot.
    """

    original_rows = TableInit(SMALL, SMALL)
    original_l2_rows = 1e-6
    has_wide = True
    small = NARROW

    @dataclass(frozen=True)
    class Config(Model.Config):
        hidden: tuple[int, ...] = (400, 400, 400)
        """Widths of the MLP, input side first."""
        dropout: float = 0.0
        """Fraction of hidden values set to zero during training."""
        l2_matrices: float | None = None
        """L2 on the matrices M. Default: none; 1e-7 with `paddlerec`."""
        l2_deep: float | None = None
        """L2 on the weights of the MLP. Default: none; 1e-7 with `paddlerec`."""
        paddlerec: bool = False
        """Dropout 0.2 after every linear layer, including the output, and every ReLU. The MLP sees a∘x instead of x and no
        bucketed slots. No bias. L2 of 1e-6 on rows."""

    def __init__(self, config: Config, shape: Shape) -> None:
        super().__init__(config, shape)
        d, small, original = shape.factors, truncated(factor_std(shape.dim)), config.paddlerec
        self.wide, self.shared = Wide(shape, small if original else None), Shared(shape.outputs)
        self.pairs = Pairs(shape.slots)
        self.matrices = nn.Parameter(torch.zeros(len(self.pairs), d, d))
        if len(self.pairs):
            small(self.matrices)
        plain = [slot for slot in range(shape.slots) if not original or slot not in shape.bucketed]
        self.plain: list[int] | None = plain if len(plain) < shape.slots else None
        width = len(plain) * d + shape.dense + len(self.pairs)
        self.original = original
        self.deep: Tower | DroppedTower
        if original:
            self.wide.bias.requires_grad_(False)
            self.deep = DroppedTower((width, *config.hidden, 1), 0.2)
        else:
            self.deep = tower(width, *config.hidden, shape.outputs, dropout=config.dropout)
        default = 1e-7 if original else 0.0
        self.l2_matrices = default if config.l2_matrices is None else config.l2_matrices
        self.l2_deep = default if config.l2_deep is None else config.l2_deep

    def extra_loss(self) -> Tensor | None:
        loss = l2([self.matrices], self.l2_matrices) if self.l2_matrices else None
        if self.l2_deep:
            deep = l2([p for p in self.deep.parameters() if p.ndim == 2], self.l2_deep)
            loss = deep if loss is None else loss + deep
        if self.original:
            loss = l2([self.wide.weight], 1e-6) if loss is None else loss + l2([self.wide.weight], 1e-6)
        return loss

    def forward(self, x: Inputs) -> Tensor:
        first, parts = self.wide(self._plain(x.first), x.dense), []
        if (factors := self._plain(x.factors)) is not None:
            parts.append(factors)
        if x.dense.shape[1]:
            parts.append(x.dense * self.wide.weight if self.original else x.dense)
        if len(self.pairs):
            e = x.factors.transpose(0, 1)  # [S, B, d]: one batched matrix product for all pairs
            symmetric = self.matrices + self.matrices.transpose(1, 2)
            z = (torch.bmm(e[self.pairs.left], symmetric) * e[self.pairs.right]).sum(2).t()  # [B, pairs]
            first = first + self.shared(z.sum(1))
            parts.append(z)
        return logits(first + self.deep(*parts))

    def _plain(self, slots: Tensor) -> Tensor | None:
        """Return the slots that the MLP and the first-order part see; None if there are none."""
        if self.plain is None:
            return slots if slots.shape[1] else None
        return slots[:, self.plain] if self.plain else None
