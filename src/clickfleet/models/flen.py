"""FLEN."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from clickfleet.errors import ConfigError
from clickfleet.training.layers import (
    BatchNorm,
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
from clickfleet.training.network import Inputs, Model, Shape, TableInit


class FLEN(Model):
    """Slots in groups, such as user, item and context: one weight for each pair of groups (arXiv:1911.04690).

    E_g = Σ_{i∈g} e_i over the fields of group g, dense ones as x_i·A_i in a group of their own;
    h = Σ_{f<g} r_fg (E_f ∘ E_g) + Σ_g s_g (E_g ∘ E_g − Σ_{i∈g} e_i ∘ e_i); logit = Σ_j w_j + a·x + b + v·[h, MLP([e, x])]
    """

    original_rows = TableInit(embedx="uniform(-0.002,0.002)")
    original_epsilon = 0.0
    has_wide = True

    @dataclass(frozen=True)
    class Config(Model.Config):
        groups: tuple[tuple[str, ...], ...] = ()
        """Slots of each group. A slot that is in none is a group of its own."""
        hidden: tuple[int, ...] = (64, 32)
        """Widths of the MLP, input side first."""
        dropout: float = 0.0
        """Fraction of hidden values set to zero during training."""
        paddlerec: bool = False
        """No pairs inside a group, no first-order part. h passes through a layer with ReLU and batch norm. Batch norm in the
        MLP, and dropout 0.2 after each of its linear layers, ReLUs and norms."""

    def __init__(self, config: Config, shape: Shape) -> None:
        super().__init__(config, shape)
        d, original = shape.factors, config.paddlerec
        self.wide = None if original else Wide(shape)
        self.fields = FieldVectors(shape.dense, d, truncated(factor_std(shape.dim)))
        groups = _groups(config.groups, shape)
        members = torch.zeros(len(groups), shape.slots + shape.dense)
        for g, fields in enumerate(groups):
            members[g, fields] = 1.0
        self.members: Tensor
        self.register_buffer("members", members, persistent=False)
        self.pairs = Pairs(len(groups))
        self.between = nn.Parameter(torch.ones(len(self.pairs)))
        self.inside = None if original else nn.Parameter(torch.ones(len(groups)))
        self.deep: Tower | DroppedTower
        self.layer: nn.Sequential | None = None
        if original:
            glorot = nn.init.xavier_uniform_
            self.deep = DroppedTower((shape.width, *config.hidden), 0.2, True, batch_norm=True, init=glorot)
            linear = nn.Linear(d, d)
            glorot(linear.weight)
            constant(0.0)(linear.bias)
            self.layer = nn.Sequential(linear, nn.ReLU(), BatchNorm(d), nn.Dropout(0.2))
            if len(self.pairs):
                glorot(self.between.view(-1, 1))
        else:
            self.deep = tower(shape.width, *config.hidden, relu_last=True, dropout=config.dropout)
        self.out = nn.Linear(d + (config.hidden[-1] if config.hidden else shape.width), shape.outputs, bias=original)
        (nn.init.xavier_uniform_ if original else by_fan_in(1.0))(self.out.weight)

    def forward(self, x: Inputs) -> Tensor:
        e = self.fields(x.factors, x.dense)  # [B, n, d]
        sums = self.members @ e  # [B, groups, d]
        h = e.new_zeros(len(e), e.shape[2])
        if len(self.pairs):
            products = sums[:, self.pairs.left] * sums[:, self.pairs.right]
            h = h + (products * self.between.unsqueeze(1)).sum(1)
        if self.inside is not None:
            h = h + ((sums.square() - self.members @ e.square()) * self.inside.unsqueeze(1)).sum(1)
        if self.layer is not None:
            h = self.layer(h)
        logit = torch.cat([h, self.deep(x.factors, x.dense)], 1) @ self.out.weight.t()
        return logits(logit + (self.out.bias if self.wide is None else self.wide(x.first, x.dense)))


def _groups(names: tuple[tuple[str, ...], ...], shape: Shape) -> list[list[int]]:
    """Return the fields of each group: those named, then single slots, then all dense columns."""
    flat = [name for group in names for name in group]
    for name in flat:
        if name not in shape.slot_names:
            raise ConfigError(f"unknown slot {name!r} in model.groups", f"the schema has {', '.join(shape.slot_names)}")
        if flat.count(name) > 1:
            raise ConfigError(f"slot {name!r} is in model.groups twice", "put each slot into one group")
    groups = [[shape.slot_names.index(name) for name in group] for group in names]
    groups += [[i] for i in range(shape.slots) if i >= len(shape.slot_names) or shape.slot_names[i] not in flat]
    return [*groups, *([list(range(shape.slots, shape.slots + shape.dense))] if shape.dense else [])]
