"""DCN-V2."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clickfleet.errors import ConfigError
from clickfleet.training.layers import DroppedTower, OwnColumns, Tower, by_fan_in, logits, side_by_side, tower
from clickfleet.training.losses import l2
from clickfleet.training.network import NARROW, SMALL, Inputs, Model, Shape, TableInit


class DCNv2(Model):
    """Feature crosses with a matrix per layer, of full or low rank (arXiv:2008.13535).

    x₀ = [e, x]; x_{l+1} = x₀ ∘ (W_l x_l + b_l) + x_l, with W_l = U_l V_lᵀ if `rank` is set;
    parallel: logit = v·[MLP(x₀), x_L] + c; stacked: logit = MLP(x_L)
    """

    original_rows = TableInit(embedx=SMALL)
    small = NARROW
    unequal_widths = True

    @dataclass(frozen=True)
    class Config(Model.Config):
        layers: int = 3
        """Cross layers."""
        rank: int | None = None
        """Rank of the cross matrices. Default: full rank."""
        structure: Literal["parallel", "stacked"] = "parallel"
        """Whether the MLP is beside the crosses or on top of them."""
        hidden: tuple[int, ...] = (400, 400, 400)
        """Widths of the MLP, input side first."""
        dropout: float = 0.0
        """Fraction of hidden values set to zero during training."""
        experts: int | None = None
        """Experts per layer, with `paddlerec` and `rank`. Default: 4."""
        paddlerec: bool = False
        """Dense values enter as A·x + c of width F·d. A low rank is a gated mixture of experts with tanh. Dropout 0.5 after
        every linear layer and every ReLU of the MLP, and L2 of 1e-7 on its weights."""

    @classmethod
    def takes_unequal_widths(cls, config: Any) -> bool:
        return not config.paddlerec  # the original gives dense values the width of a slot

    def __init__(self, config: Config, shape: Shape) -> None:
        super().__init__(config, shape)
        self.columns = OwnColumns(shape)
        if config.experts is not None and not (config.paddlerec and config.rank):
            raise ConfigError("model.experts needs model.paddlerec and model.rank", "remove it, or set both")
        self.original, self.stacked = config.paddlerec, config.structure == "stacked"
        n = (shape.slots + shape.dense) * shape.factors if self.original else shape.width
        self.dense_vectors: nn.Module | None = None
        if self.original:
            inputs = shape.dense
            self.dense_vectors = nn.Linear(inputs, inputs * shape.factors) if inputs else NoVectors()
        self.mixture = (
            Mixture(n, config.layers, config.rank, config.experts or 4) if self.original and config.rank else None
        )
        self.downs, self.ups, self.biases = nn.ParameterList(), nn.ParameterList(), nn.ParameterList()
        if self.mixture is None:
            if config.rank is not None:
                self.downs.extend(torch.empty(config.rank, n) for _ in range(config.layers))
            self.ups.extend(torch.empty(n, config.rank or n) for _ in range(config.layers))
            self.biases.extend(torch.zeros(n) for _ in range(config.layers))
        for weight in (*self.downs, *self.ups):
            by_fan_in(0.5)(weight)
        self.deep: Tower | DroppedTower
        if self.original:
            self.deep = DroppedTower((n, *config.hidden), 0.5, relu_last=True)
        else:
            widths = (*config.hidden, *((shape.outputs,) if self.stacked else ()))
            self.deep = tower(n, *widths, dropout=config.dropout, relu_last=not self.stacked)
        self.out: nn.Linear | None = None
        if self.original or not self.stacked:
            self.out = nn.Linear(config.hidden[-1] + (0 if self.stacked else n), shape.outputs)
            if self.original:
                by_fan_in(1.0)(self.out.weight)
                nn.init.zeros_(self.out.bias)

    def extra_loss(self) -> Tensor | None:
        return l2([p for p in self.deep.parameters() if p.ndim == 2], 1e-7) if self.original else None

    def forward(self, x: Inputs) -> Tensor:
        vectors = self.dense_vectors if x.dense.shape[1] else None
        x0 = side_by_side(self.columns(x.factors), x.dense if vectors is None else vectors(x.dense))
        crossed = x0 if self.mixture is None else self.mixture(x0)
        for layer, (up, bias) in enumerate(zip(self.ups, self.biases, strict=True)):
            inner = F.linear(crossed, self.downs[layer]) if len(self.downs) else crossed
            crossed = x0 * F.linear(inner, up, bias) + crossed
        last = self.deep(crossed) if self.stacked else torch.cat([self.deep(x0), crossed], 1)
        return logits(last if self.out is None else F.linear(last, self.out.weight, self.out.bias))


class NoVectors(nn.Module):
    """The empty tensors of a linear layer without inputs. Checkpoints hold them by name."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.zeros(0, 0)), nn.Parameter(torch.zeros(0))


class Mixture(nn.Module):
    """x_{l+1} = Σ_k π_k x₀ ∘ (U_lk tanh(C_lk tanh(V_lkᵀ x_l)) + b_l) + x_l, π = softmax of one linear gate per expert."""

    def __init__(self, n: int, layers: int, rank: int, experts: int) -> None:
        super().__init__()
        self.ups = nn.ParameterList(torch.empty(experts, n, rank) for _ in range(layers))
        self.downs = nn.ParameterList(torch.empty(experts, n, rank) for _ in range(layers))
        self.middles = nn.ParameterList(torch.empty(experts, rank, rank) for _ in range(layers))
        self.biases = nn.ParameterList(torch.zeros(n) for _ in range(layers))
        self.gates = nn.Linear(n, experts)
        for weight in (*self.ups, *self.downs, *self.middles):
            nn.init.xavier_normal_(weight)
        by_fan_in(1.0)(self.gates.weight)
        nn.init.zeros_(self.gates.bias)

    def forward(self, x0: Tensor) -> Tensor:
        x = x0
        for up, down, middle, bias in zip(self.ups, self.downs, self.middles, self.biases, strict=True):
            inner = torch.tanh(torch.matmul(x, down))  # [K, B, r]
            inner = torch.tanh(torch.matmul(inner, middle.transpose(1, 2)))
            each = x0 * (torch.matmul(inner, up.transpose(1, 2)) + bias)  # [K, B, n]
            share = torch.softmax(F.linear(x, self.gates.weight, self.gates.bias), 1)  # [B, K]
            x = (each * share.t().unsqueeze(2)).sum(0) + x
        return x
