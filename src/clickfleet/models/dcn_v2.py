"""DCN-V2."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clickfleet.layers import by_fan_in, tower
from clickfleet.models import Inputs, Model, Shape


class DCNv2(Model):
    """Crosses with a matrix per layer, of full or low rank (arXiv:2008.13535).

    x₀ = [e, x]; x_{l+1} = x₀ ∘ (W_l x_l + b_l) + x_l, W_l = U_l V_lᵀ where `rank` is given;
    parallel: logit = v·[MLP(x₀), x_L] + c; stacked: logit = MLP(x_L)
    """

    @dataclass(frozen=True)
    class Config(Model.Config):
        layers: int = 3
        """Cross layers."""
        rank: int | None = None
        """Rank of the cross matrices; full by default."""
        structure: Literal["parallel", "stacked"] = "parallel"
        """The MLP beside the crosses, or on top of them."""
        hidden: tuple[int, ...] = (400, 400, 400)
        """Widths of the MLP, input side first."""
        dropout: float = 0.0
        """Share of the hidden values set to zero in training."""

    def __init__(self, config: Config, shape: Shape) -> None:
        super().__init__(config, shape)
        n = shape.width
        self.stacked = config.structure == "stacked"
        self.downs = nn.ParameterList()
        if config.rank is not None:
            self.downs.extend(torch.empty(config.rank, n) for _ in range(config.layers))
        self.ups = nn.ParameterList(torch.empty(n, config.rank or n) for _ in range(config.layers))
        self.biases = nn.ParameterList(torch.zeros(n) for _ in range(config.layers))
        for weight in (*self.downs, *self.ups):
            by_fan_in(0.5)(weight)
        self.deep = tower(
            n, *config.hidden, *((1,) if self.stacked else ()), dropout=config.dropout, relu_last=not self.stacked
        )
        if not self.stacked:
            self.out = nn.Linear(config.hidden[-1] + n, 1)

    def forward(self, x: Inputs) -> Tensor:
        x0 = torch.cat([x.factors.flatten(1), x.dense], 1)
        crossed = x0
        for layer, (up, bias) in enumerate(zip(self.ups, self.biases, strict=True)):
            inner = F.linear(crossed, self.downs[layer]) if len(self.downs) else crossed
            crossed = x0 * F.linear(inner, up, bias) + crossed
        if self.stacked:
            return self.deep(crossed).squeeze(1)
        both = torch.cat([self.deep(x0), crossed], 1)
        return F.linear(both, self.out.weight, self.out.bias).squeeze(1)
