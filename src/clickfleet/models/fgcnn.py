"""FGCNN."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from clickfleet.errors import ConfigError
from clickfleet.training.layers import (
    BatchNorm,
    FieldVectors,
    Pairs,
    Tower,
    constant,
    factor_std,
    logits,
    normal,
    tower,
    truncated,
)
from clickfleet.training.network import Inputs, Model, Shape, TableInit


class FGCNN(Model):
    """Convolutions over neighbouring fields make new fields; all products feed an MLP (arXiv:1904.04447).

    A row holds two vectors, e for the network and g for the convolutions. C⁰ = g; C^l = pool(tanh(conv(C^{l−1})));
    N^l = tanh(W_l C^l), maps_l new fields for every field left after the pooling; F = [e, N¹, N², …];
    logit = MLP([F, ⟨F_i, F_j⟩ for i<j]). Dense fields are x_i·A_i. Layers end where fewer fields remain than a pool needs.
    """

    rows = TableInit(embedx="normal(0.05)")
    original_rows = TableInit(embedx="uniform(-0.00245,0.00245)")

    @dataclass(frozen=True)
    class Config(Model.Config):
        kernels: tuple[int, ...] = (7, 7, 7, 7)
        """Height of the convolution of each layer, in fields; odd numbers."""
        filters: tuple[int, ...] = (14, 16, 18, 20)
        """Feature maps of each convolution."""
        maps: tuple[int, ...] = (1, 1, 1, 1)
        """New fields of each layer for every field left after its pooling."""
        pooling: tuple[int, ...] = (2, 2, 2, 2)
        """Fields that each layer pools into one."""
        hidden: tuple[int, ...] = (400, 400)
        """Widths of the MLP, input side first."""
        dropout: float = 0.0
        """Fraction of hidden values set to zero during training."""
        paddlerec: bool = False
        """Batch norm after each convolution and each layer of the MLP, before its activation. The weights of the MLP start at
        N(1e-4)."""

    def __init__(self, config: Config, shape: Shape) -> None:
        super().__init__(config, shape)
        _check(config)
        d, original = shape.dim, config.paddlerec
        self.dim, n = d, shape.slots + shape.dense
        self.fields = FieldVectors(shape.dense, shape.factors, truncated(factor_std(shape.dim)))
        self.convolutions, self.combinations = nn.ModuleList(), nn.ModuleList()
        left, below, count = n, 1, n
        for kernel, filters, maps, pooling in zip(
            config.kernels, config.filters, config.maps, config.pooling, strict=True
        ):
            if left < pooling:
                break
            conv = nn.Conv2d(below, filters, (kernel, 1), padding=(kernel // 2, 0))
            norm: list[nn.Module] = [nn.BatchNorm2d(filters)] if original else []
            self.convolutions.append(nn.Sequential(conv, *norm, nn.Tanh(), nn.MaxPool2d((pooling, 1))))
            left, below = left // pooling, filters
            linear = nn.Linear(filters * left * d, left * d * maps)
            nn.init.xavier_uniform_(linear.weight)
            constant(0.0)(linear.bias)
            self.combinations.append(linear)
            count += left * maps
        self.pairs = Pairs(count)
        width = count * d + len(self.pairs)
        self.deep: Tower | nn.Sequential
        if original:
            layers: list[nn.Module] = []
            for a, b in zip((width, *config.hidden), config.hidden, strict=False):
                linear = nn.Linear(a, b)
                normal(1e-4)(linear.weight)
                constant(0.0)(linear.bias)
                layers += [linear, BatchNorm(b), nn.ReLU(), nn.Dropout(config.dropout)]
            last = nn.Linear(config.hidden[-1] if config.hidden else width, 1)
            nn.init.xavier_uniform_(last.weight)
            constant(0.0)(last.bias)
            self.deep = nn.Sequential(*layers, last)
        else:
            self.deep = tower(width, *config.hidden, shape.outputs, dropout=config.dropout)

    @classmethod
    def row_factors(cls, config: object, dim: int, slots: int, dense: int) -> int:
        return 2 * dim

    def forward(self, x: Inputs) -> Tensor:
        e, g = self.fields(x.factors, x.dense).chunk(2, 2)  # [B, n, d] each
        parts, maps = [e], g.unsqueeze(1)  # [B, 1, n, d]
        for convolution, combination in zip(self.convolutions, self.combinations, strict=True):
            maps = convolution(maps)
            parts.append(torch.unflatten(torch.tanh(combination(maps.flatten(1))), 1, (-1, self.dim)))
        fields = torch.cat(parts, 1)
        inputs = [fields.flatten(1)]
        if len(self.pairs):
            inputs.append((fields @ fields.transpose(1, 2))[:, self.pairs.left, self.pairs.right])
        out: Tensor = self.deep(torch.cat(inputs, 1))
        return logits(out)


def _check(config: FGCNN.Config) -> None:
    counts = {len(config.kernels), len(config.filters), len(config.maps), len(config.pooling)}
    if len(counts) > 1:
        raise ConfigError(
            "model.kernels, filters, maps and pooling must have the same length", "give one number for each layer"
        )
    if any(kernel % 2 == 0 or kernel < 1 for kernel in config.kernels):
        raise ConfigError(f"model.kernels must be odd numbers, not {list(config.kernels)}", "add 1 to the even ones")
