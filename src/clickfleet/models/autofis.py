"""AutoFIS."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from clickfleet.errors import ConfigError
from clickfleet.training.layers import (
    BatchNorm,
    FieldVectors,
    Pairs,
    Shared,
    Tower,
    Wide,
    constant,
    factor_std,
    logits,
    tower,
    truncated,
)
from clickfleet.training.network import Inputs, Model, Shape, TableInit


class AutoFIS(Model):
    """DeepFM that learns which pairs of fields matter: a gate for every pair, most of which close (arXiv:2003.11235).

    logit = Σ_j w_j + a·x + b + Σ_{i<j} α_ij·norm(⟨e_i, e_j⟩)/√P + MLP([e, x]), dense fields being x_i·A_i, P pairs;
    norm is batch norm without scale and shift; α = sign(γ)·max(|γ| − 0.01, 0), with L1 on γ, which starts at 0.1.
    """

    original_rows = TableInit("uniform(-0.00226,0.00226)", "uniform(-0.00226,0.00226)")
    original_epsilon = 0.0
    has_wide = True

    @dataclass(frozen=True)
    class Config(Model.Config):
        hidden: tuple[int, ...] = (400, 400, 400)
        """Widths of the MLP, input side first."""
        dropout: float = 0.0
        """Fraction of hidden values set to zero during training."""
        pairs: tuple[str, ...] = ()
        """Pairs of fields to keep, such as `C1*C2`, for training after the search. Default: all."""
        l1: float | None = None
        """L1 on the gates, which closes those that do not help. Default: 2e-4; 0 with `pairs` or `paddlerec`."""
        paddlerec: bool = False
        """α = γ, starting at 0.6 and not divided by √P. Batch norm in the MLP, before its ReLU; batch norm of pairs with scale and
        shift. No bias in the first-order part. First-order weights start at random."""

    def __init__(self, config: Config, shape: Shape) -> None:
        super().__init__(config, shape)
        original = config.paddlerec
        self.names = [*shape.slot_names, *shape.dense_names]
        self.wide, self.shared = Wide(shape), Shared(shape.outputs)
        self.wide.bias.requires_grad_(not original)
        self.fields = FieldVectors(shape.dense, shape.factors, truncated(factor_std(shape.dim)))
        self.pairs = Pairs(shape.slots + shape.dense)
        if config.pairs:
            self._keep(config.pairs)
        self.gates = nn.Parameter(torch.full((len(self.pairs),), 0.6 if original else 0.1))
        self.threshold = 0.0 if original else 0.01
        self.scale = 1.0 if original else max(len(self.pairs), 1) ** -0.5
        self.norm = BatchNorm(len(self.pairs), affine=original) if len(self.pairs) else None
        self.l1 = (0.0 if config.pairs or original else 2e-4) if config.l1 is None else config.l1
        self.deep: Tower | nn.Sequential
        if original:
            layers: list[nn.Module] = []
            for a, b in zip((shape.width, *config.hidden), (*config.hidden, 1), strict=True):
                linear = nn.Linear(a, b)
                nn.init.xavier_uniform_(linear.weight)
                constant(0.0)(linear.bias)
                layers += [linear, BatchNorm(b), nn.ReLU()]
            self.deep = nn.Sequential(*layers[:-2])
        else:
            self.deep = tower(shape.width, *config.hidden, shape.outputs, dropout=config.dropout)

    def _keep(self, pairs: tuple[str, ...]) -> None:
        places = []
        for pair in pairs:
            found = [(i, j) for i, j in self._all() if pair in (self._name(i, j), self._name(j, i))]
            if not found:
                raise ConfigError(
                    f"unknown pair {pair!r} in model.pairs",
                    f"write two fields, such as {self._name(0, 1)}" if len(self.names) > 1 else "remove it",
                )
            places.append(found[0])
        left, right = zip(*sorted(set(places)), strict=True)
        self.pairs.left, self.pairs.right = torch.tensor(left), torch.tensor(right)

    def _all(self) -> list[tuple[int, int]]:
        return [(i, j) for i in range(len(self.names)) for j in range(i + 1, len(self.names))]

    def _name(self, i: int, j: int) -> str:
        return f"{self.names[i]}*{self.names[j]}"

    def alpha(self) -> Tensor:
        """Return the weight of each pair; zero for a closed gate."""
        return torch.sign(self.gates) * torch.relu(self.gates.abs() - self.threshold)

    def findings(self) -> dict[str, float]:
        """Return the pairs with an open gate and their weights, largest first."""
        weights = self.alpha().detach().tolist()
        places = zip(self.pairs.left.tolist(), self.pairs.right.tolist(), strict=True)
        found = {self._name(i, j): weight for (i, j), weight in zip(places, weights, strict=True) if weight}
        return dict(sorted(found.items(), key=lambda item: -abs(item[1])))

    def extra_loss(self) -> Tensor | None:
        return self.gates.abs().sum() * self.l1 if self.l1 and len(self.pairs) else None

    def forward(self, x: Inputs) -> Tensor:
        parts = [part.flatten(1) for part in (x.factors, x.dense) if part.shape[1]]
        logit = self.wide(x.first, x.dense) + self.deep(torch.cat(parts, 1))
        if self.norm is None:
            return logits(logit)
        e = self.fields(x.factors, x.dense)
        products = (e @ e.transpose(1, 2))[:, self.pairs.left, self.pairs.right]
        gated: Tensor = self.norm(products) * self.alpha()
        return logits(logit + self.shared(gated.sum(1) * self.scale))
