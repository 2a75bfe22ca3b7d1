"""FinalMLP."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clickfleet.errors import ConfigError
from clickfleet.training.layers import OwnColumns, Shared, by_fan_in, logits, side_by_side, tower
from clickfleet.training.network import Inputs, Model, Shape, TableInit


class FinalMLP(Model):
    """Two MLPs that see the input through different gates, combined by a bilinear product (arXiv:2304.00902).

    x₀ = [e, x]; o_i = MLP_i(x₀ ∘ 2σ(gate_i)); logit = u·o₁ + v·o₂ + c + Σ_h o₁_hᵀ W_h o₂_h.
    A gate is an MLP over its slots, or over a learned vector if it has no slots.
    """

    rows = TableInit(embedx="normal(0.01)")
    unequal_widths = True

    @dataclass(frozen=True)
    class Config(Model.Config):
        hidden1: tuple[int, ...] = (400, 400, 400)
        """Widths of the first MLP, input side first."""
        hidden2: tuple[int, ...] = (400, 400)
        """Widths of the second MLP. The last width of both must be a multiple of `heads`."""
        heads: int = 2
        """Pieces into which o₁ and o₂ are split for the bilinear product."""
        gate_hidden: int = 64
        """Width of the hidden layer of the gates."""
        gate1_slots: tuple[str, ...] = ()
        """Slots that control the first gate. Default: a learned vector."""
        gate2_slots: tuple[str, ...] = ()
        """Slots that control the second gate. Default: a learned vector."""
        dropout: float = 0.0
        """Fraction of hidden values set to zero during training."""

    def __init__(self, config: Config, shape: Shape) -> None:
        super().__init__(config, shape)
        self.columns = OwnColumns(shape)
        a, b = config.hidden1[-1], config.hidden2[-1]
        if a % config.heads or b % config.heads:
            raise ConfigError(
                f"the last widths of model.hidden1 ({a}) and model.hidden2 ({b}) must be multiples of "
                f"model.heads ({config.heads})",
                "change the widths or the number of heads",
            )
        n = shape.width
        self.gate1 = Gate(config.gate1_slots, config.gate_hidden, shape)
        self.gate2 = Gate(config.gate2_slots, config.gate_hidden, shape)
        self.deep1 = tower(n, *config.hidden1, relu_last=True, dropout=config.dropout)
        self.deep2 = tower(n, *config.hidden2, relu_last=True, dropout=config.dropout)
        self.out, self.shared = nn.Linear(a + b, shape.outputs), Shared(shape.outputs)
        self.heads = config.heads
        self.bilinear = nn.Parameter(torch.empty(config.heads, a // config.heads, b // config.heads))
        nn.init.normal_(self.bilinear, std=(a // config.heads) ** -0.5)

    def forward(self, x: Inputs) -> Tensor:
        x0 = side_by_side(self.columns(x.factors), x.dense)
        o1 = self.deep1(x0 * self.gate1(x.factors))
        o2 = self.deep2(x0 * self.gate2(x.factors))
        linear = F.linear(torch.cat([o1, o2], 1), self.out.weight, self.out.bias)
        left, right = (torch.unflatten(o, 1, (self.heads, 1, -1)) for o in (o1, o2))  # [B, heads, 1, w]
        return logits(linear + self.shared((left @ self.bilinear * right).sum((1, 2, 3))))


class Gate(nn.Module):
    """2σ(MLP(c)) over the width of the input; 1 is a neutral gate."""

    def __init__(self, slots: tuple[str, ...], hidden: int, shape: Shape) -> None:
        super().__init__()
        for name in slots:
            if name not in shape.slot_names:
                raise ConfigError(
                    f"unknown slot {name!r} in a gate of final_mlp",
                    f"the schema has {', '.join(shape.slot_names)}",
                )
        self.slots = [shape.slot_names.index(name) for name in slots]
        self.columns = OwnColumns(shape, self.slots)
        width = shape.factors_of(self.slots) if slots else shape.factors
        self.context = None if slots else nn.Parameter(torch.zeros(1, width))
        self.inner, self.outer = nn.Linear(width, hidden), nn.Linear(hidden, shape.width)
        by_fan_in(0.1)(self.outer.weight)
        nn.init.zeros_(self.outer.bias)

    def forward(self, factors: Tensor) -> Tensor:
        c = self.columns(factors[:, self.slots]).flatten(1) if self.context is None else self.context
        return 2 * torch.sigmoid(self.outer(F.relu(self.inner(c))))
