"""AutoInt."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clickfleet.errors import ConfigError
from clickfleet.training.layers import FieldVectors, by_fan_in, factor_std, logits, tower, truncated
from clickfleet.training.network import NARROW, Inputs, Model, Shape, TableInit


class AutoInt(Model):
    """Layers of self-attention over the fields, beside an MLP if `hidden` is not empty (arXiv:1810.11921).

    H⁰ = the field vectors, dense ones as x_i·A_i; for each head α = softmax(Q Kᵀ), H^{l+1} = ReLU([α V…] + R H^l);
    logit = v·H^L + c + MLP([e, x])
    """

    rows = TableInit(embedx="normal(0.01)")
    small = NARROW

    @dataclass(frozen=True)
    class Config(Model.Config):
        layers: int = 3
        """Attention layers."""
        heads: int = 2
        """Attention heads per layer."""
        width: int = 32
        """Width of a field after each layer, over all heads."""
        hidden: tuple[int, ...] = (400, 400)
        """Widths of the MLP, input side first; empty for attention alone."""
        dropout: float = 0.0
        """Fraction of hidden values set to zero during training."""

    def __init__(self, config: Config, shape: Shape) -> None:
        super().__init__(config, shape)
        if config.width % config.heads:
            raise ConfigError(
                f"model.width ({config.width}) must be a multiple of model.heads ({config.heads})",
                "change the width or the number of heads",
            )
        self.heads = config.heads
        self.fields = FieldVectors(shape.dense, shape.factors, truncated(factor_std(shape.dim)))
        widths = [shape.factors, *[config.width] * config.layers]
        self.maps = nn.ParameterList(torch.empty(4 * config.width, below) for below in widths[:-1])  # Q, K, V, R
        for weight in self.maps:
            by_fan_in(1.0)(weight)
        self.out = nn.Linear((shape.slots + shape.dense) * widths[-1], shape.outputs)
        self.deep = tower(shape.width, *config.hidden, shape.outputs, dropout=config.dropout) if config.hidden else None

    def forward(self, x: Inputs) -> Tensor:
        h = self.fields(x.factors, x.dense)  # [B, n, d]
        for weight in self.maps:
            q, k, v, residual = F.linear(h, weight).chunk(4, 2)
            q, k, v = (
                torch.unflatten(m, 2, (self.heads, -1)).transpose(1, 2) for m in (q, k, v)
            )  # [B, heads, n, w/heads]
            attention = torch.softmax(q @ k.transpose(2, 3), 3)
            h = F.relu((attention @ v).transpose(1, 2).flatten(2) + residual)
        out = F.linear(h.flatten(1), self.out.weight, self.out.bias)
        return logits(out if self.deep is None else out + self.deep(x.factors, x.dense))
