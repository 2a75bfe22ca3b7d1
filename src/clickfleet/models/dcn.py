"""Deep & Cross Network."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from clickfleet.training.layers import OwnColumns, by_fan_in, factor_std, logits, normal, side_by_side, tower, truncated
from clickfleet.training.losses import l2
from clickfleet.training.network import NARROW, SMALL, Inputs, Model, Shape, TableInit


class DCN(Model):
    """Explicit feature crosses of growing degree beside an MLP (arXiv:1708.05123).

    x₀ = [e, x]; x_{l+1} = x₀·(x_l·w_l) + b_l + x_l; logit = v·[MLP(x₀), x_L] + c
    """

    original_rows = TableInit(embedx=SMALL)
    small = NARROW
    unequal_widths = True

    @dataclass(frozen=True)
    class Config(Model.Config):
        layers: int = 2
        """Cross layers."""
        hidden: tuple[int, ...] = (512, 256, 128)
        """Widths of the MLP, input side first."""
        dropout: float = 0.0
        """Fraction of hidden values set to zero during training."""
        l2: float = 0.0
        """L2 on the cross weights."""
        paddlerec: bool = False
        """One w and b for all layers, and the unscaled regulariser Σ_l Σ_batch Σ_k (x_lk·w_k)²; ignores `l2`."""

    def __init__(self, config: Config, shape: Shape) -> None:
        super().__init__(config, shape)
        self.columns = OwnColumns(shape)
        n, self.config = shape.width, config
        count = 1 if config.paddlerec else config.layers
        self.weights = nn.Parameter(torch.zeros(count, n))
        self.biases = nn.Parameter(torch.zeros(count, n))
        self.deep = tower(
            n, *config.hidden, dropout=config.dropout, relu_last=True, init=by_fan_in(1.0) if config.paddlerec else None
        )
        self.out = nn.Linear(config.hidden[-1] + n, shape.outputs)
        if config.paddlerec:
            small = truncated(factor_std(shape.dim))
            small(self.weights)
            small(self.biases)
            normal((config.hidden[-1] + shape.slots + shape.dense) ** -0.5)(self.out.weight)
        else:
            by_fan_in(1.0)(self.weights)
        nn.init.zeros_(self.out.bias)
        self.penalty: Tensor | None = None

    def extra_loss(self) -> Tensor | None:
        if self.config.paddlerec:
            penalty, self.penalty = self.penalty, None  # a tensor with a graph cannot be copied with the model
            return penalty
        return l2([self.weights], self.config.l2) if self.config.l2 else None

    def forward(self, x: Inputs) -> Tensor:
        x0 = side_by_side(self.columns(x.factors), x.dense)
        crossed, penalty = x0, x0.new_zeros(())
        for layer in range(self.config.layers):
            w, b = (p[0 if self.config.paddlerec else layer] for p in (self.weights, self.biases))
            if self.config.paddlerec and self.training:
                penalty = penalty + (crossed * w).square().sum()
            crossed = x0 * (crossed @ w).unsqueeze(1) + b + crossed
        self.penalty = penalty if self.config.paddlerec and self.training else None
        both = torch.cat([self.deep(x0), crossed], 1)
        return logits(nn.functional.linear(both, self.out.weight, self.out.bias))
