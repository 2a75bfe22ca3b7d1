"""DIFM."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clickfleet.errors import ConfigError
from clickfleet.training.layers import (
    FieldVectors,
    Shared,
    Tower,
    by_fan_in,
    constant,
    factor_std,
    fm_pairs,
    logits,
    side_by_side,
    tower,
    truncated,
)
from clickfleet.training.network import Inputs, Model, Shape, TableInit


class DIFM(Model):
    """A factorization machine whose weights and vectors are scaled for every row of data (Lu et al., IJCAI 2020).

    E = the field vectors, dense ones as x_i·A_i; H = [softmax(Q Kᵀ/√k) V…] + R E over the heads, k wide each;
    m = P H + MLP(E), one factor per field, starting near 1;
    logit = Σ_i m_i w_i + b + Σ_{i<j} m_i m_j ⟨E_i, E_j⟩, where w_i = a_i x_i for a dense field.
    """

    original_rows = TableInit("uniform(-1,1)", "uniform(-1,1)")
    has_wide = True

    @dataclass(frozen=True)
    class Config(Model.Config):
        hidden: tuple[int, ...] = (256, 256)
        """Widths of the MLP over all field vectors, input side first."""
        heads: int = 2
        """Attention heads."""
        width: int = 32
        """Width of a field after the attention, over all heads."""
        dense_hidden: tuple[int, ...] | None = None
        """Widths of an MLP that makes one field of all dense columns. Default: each column is a field; with `paddlerec`: (256)."""
        dropout: float = 0.0
        """Fraction of hidden values set to zero during training."""
        paddlerec: bool = False
        """m is the softmax over the fields. ReLU and batch norm follow every layer, including the outputs of both parts of m.
        The dense field also adds a logit of its own. First-order weights start at random."""

    def __init__(self, config: Config, shape: Shape) -> None:
        super().__init__(config, shape)
        if config.width % config.heads:
            raise ConfigError(
                f"model.width ({config.width}) must be a multiple of model.heads ({config.heads})",
                "change the width or the number of heads",
            )
        self.original, self.heads = config.paddlerec, config.heads
        original, d = config.paddlerec, shape.factors
        hidden = config.dense_hidden if config.dense_hidden is not None else (256,) if original else ()
        self.dense_field: Tower | None = None
        if hidden and shape.dense:
            start = by_fan_in(1.0, truncated)
            self.dense_field = tower(shape.dense, *hidden, d, batch_norm=original, relu_last=original, init=start)
        else:
            self.fields = FieldVectors(shape.dense, d, truncated(factor_std(shape.dim)))
        self.weight = nn.Parameter(torch.zeros(shape.dense))
        self.bias = nn.Parameter(torch.zeros(shape.outputs))
        n = shape.slots + (1 if self.dense_field else shape.dense)
        self.firsts = nn.Parameter(torch.ones(n, shape.outputs)) if shape.outputs > 1 else None
        self.shared = Shared(shape.outputs)
        self.maps = nn.Parameter(torch.empty(4 * config.width, d))  # Q, K, V, R
        (truncated(1.0) if original else by_fan_in(1.0))(self.maps)
        begin = by_fan_in(1.0, truncated) if original else None
        self.bits = tower(
            n * d, *config.hidden, n, batch_norm=original, relu_last=original, dropout=config.dropout, init=begin
        )
        self.vectors = tower(n * config.width, n, batch_norm=original, relu_last=original, init=begin)
        self.dense_logit: Tower | None = None
        if original and self.dense_field:
            self.dense_bias = nn.Parameter(torch.zeros(1))
            self.dense_logit = tower(d, 1, batch_norm=True, relu_last=True, init=begin)
            nn.init.xavier_uniform_(self.weight.view(1, -1))
        elif not original:
            for part in (self.bits, self.vectors):
                last = part.layers[-1]
                assert isinstance(last, nn.Linear)
                by_fan_in(0.1)(last.weight)
            assert isinstance(last.bias, Tensor)
            constant(1.0)(last.bias)

    def forward(self, x: Inputs) -> Tensor:
        logit: Tensor = self.bias
        if self.dense_field is not None:
            field = self.dense_field(x.dense)
            vectors = torch.cat([field.unsqueeze(1), x.factors], 1) if x.factors.shape[1] else field.unsqueeze(1)
            dense = (x.dense @ self.weight).unsqueeze(1)
            if self.dense_logit is not None:
                dense = dense + self.dense_bias
                logit = logit + self.dense_logit(field)
            weights = side_by_side(dense, x.first)
        else:
            vectors = self.fields(x.factors, x.dense)
            weights = side_by_side(x.first, x.dense * self.weight if len(self.weight) else x.dense)
        m = self.bits(vectors) + self.vectors(self._attention(vectors))
        if self.original:
            m = torch.softmax(m, 1)
        first = (m * weights).sum(1, keepdim=True) if self.firsts is None else (m * weights) @ self.firsts
        return logits(logit + first + self.shared(fm_pairs(m.unsqueeze(2) * vectors)))

    def _attention(self, vectors: Tensor) -> Tensor:
        q, k, v, residual = F.linear(vectors, self.maps).chunk(4, 2)
        q, k, v = (torch.unflatten(part, 2, (self.heads, -1)).transpose(1, 2) for part in (q, k, v))  # [B, heads, n, k]
        attention = torch.softmax(q @ k.transpose(2, 3) / k.shape[3] ** 0.5, 3)
        return (attention @ v).transpose(1, 2).flatten(2) + residual
