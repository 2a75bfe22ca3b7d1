"""Building blocks that several models share: MLP, first-order part, field vectors, pairs, initial values."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import reduce
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clickfleet.training.fused import Buffers, FusedTower, Sink, infer

if TYPE_CHECKING:
    from clickfleet.training.network import Shape

Init = Callable[[Tensor], object]
"""Fills a tensor in place."""


def normal(std: float) -> Init:
    return lambda tensor: nn.init.normal_(tensor, std=std)


def truncated(std: float) -> Init:
    """Normal, truncated at two standard deviations."""
    return lambda tensor: nn.init.trunc_normal_(tensor, std=std, a=-2 * std, b=2 * std)


def constant(value: float) -> Init:
    return lambda tensor: nn.init.constant_(tensor, value)


def by_fan_in(gain: float, kind: Callable[[float], Init] = normal) -> Init:
    """`kind` with standard deviation gain/√fan_in of a weight [out, in]."""
    return lambda weight: kind(gain / math.sqrt(weight.shape[1]))(weight)


def factor_std(dim: int) -> float:
    """0.1/√d: the standard deviation of initial factors in PaddleRec."""
    return 0.1 / math.sqrt(dim)


def side_by_side(*parts: Tensor) -> Tensor:
    """Concatenate parts [B, …] to one [B, n]. Skip empty parts: an exported graph must not use an empty axis.

    >>> side_by_side(torch.ones(2, 3, 2), torch.ones(2, 0), torch.ones(2, 1)).shape
    torch.Size([2, 7])
    """
    filled = [part.flatten(1) for part in parts if math.prod(part.shape[1:])]
    return torch.cat(filled, 1) if len(filled) > 1 else filled[0]


def logits(outputs: Tensor) -> Tensor:
    """Return the outputs [B, T] of a network as its logits: [B] if there is one label.

    >>> logits(torch.ones(3, 1)).shape, logits(torch.ones(3, 2)).shape
    (torch.Size([3]), torch.Size([3, 2]))
    """
    return outputs.squeeze(1) if outputs.shape[1] == 1 else outputs


class BatchNorm(nn.BatchNorm1d):
    """Batch norm of [B, n]. A batch of one row, which has no variance, is normalized by the running statistics.

    >>> BatchNorm(3)(torch.ones(1, 3)).shape
    torch.Size([1, 3])
    """

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or len(x) > 1:
            return super().forward(x)
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps)


class Tower(nn.Module):
    """An MLP with ReLU over the concatenated inputs; see `tower`."""

    def __init__(
        self,
        widths: tuple[int, ...],
        dropout: float = 0.0,
        batch_norm: bool = False,
        relu_last: bool = False,
        init: Init | None = None,
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))
        self.relu_last = relu_last
        active = widths[1:] if relu_last else widths[1:-1]
        self.norms = nn.ModuleList(BatchNorm(width) for width in active) if batch_norm else None
        self.dropout = dropout
        self.buffers_ = Buffers()
        self.sink: Sink | None = None  # set by the owner of the gradients, `optimizer.Flat`
        for layer in self.layers:
            assert isinstance(layer, nn.Linear)
            if init is not None:
                init(layer.weight)
            nn.init.zeros_(layer.bias)

    if TYPE_CHECKING:

        def __call__(self, *parts: Tensor) -> Tensor: ...

    def forward(self, *parts: Tensor) -> Tensor:
        fusible = parts[0].device.type == "cpu" and len(parts[0]) > 0 and not torch.compiler.is_compiling()
        if fusible and self.norms is None and not (self.training and self.dropout > 0):
            params: list[Any] = [p for layer in self.layers for p in (layer.weight, layer.bias)]
            if not torch.is_grad_enabled():
                return infer(self.buffers_, self.relu_last, parts, params)
            if self.training:
                return FusedTower.apply(self.buffers_, self.relu_last, self.sink, len(parts), *parts, *params)  # type: ignore[no-any-return, no-untyped-call]
        h = side_by_side(*parts)
        for i, layer in enumerate(self.layers):
            h = F.linear(h, layer.weight, layer.bias)  # type: ignore[arg-type]
            if i < len(self.layers) - 1 or self.relu_last:
                h = F.relu(h)
                if self.norms is not None:
                    h = self.norms[i](h)
                h = F.dropout(h, self.dropout, self.training)
        return h


def tower(
    inputs: int,
    *widths: int,
    dropout: float = 0.0,
    batch_norm: bool = False,
    relu_last: bool = False,
    init: Init | None = None,
) -> Tower:
    """Return an MLP `inputs → widths…` with ReLU, then batch norm, then dropout after every layer but the last.

    It accepts its inputs in parts, [B, …] each, and concatenates them. Training runs as one fused node unless dropout
    or batch norm require plain layers. Scoring reuses buffers. Export uses standard operators.

    >>> tower(7, 4, 1)(torch.ones(2, 3, 2), torch.ones(2, 1)).shape
    torch.Size([2, 1])
    """
    return Tower((inputs, *widths), dropout, batch_norm, relu_last, init)


class DroppedTower(nn.Module):
    """The MLP of some original networks: dropout after each linear layer, each ReLU and each batch norm, if there are any."""

    def __init__(
        self,
        widths: tuple[int, ...],
        dropout: float,
        relu_last: bool = False,
        batch_norm: bool = False,
        init: Init | None = None,
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for i, (a, b) in enumerate(pairwise(widths), start=1):
            linear = nn.Linear(a, b)
            (init or by_fan_in(1.0, normal))(linear.weight)
            nn.init.zeros_(linear.bias)
            layers += [linear, nn.Dropout(dropout)]
            if relu_last or i < len(widths) - 1:
                layers += [nn.ReLU(), nn.Dropout(dropout)]
                if batch_norm:
                    layers += [BatchNorm(b), nn.Dropout(dropout)]
        self.layers = nn.Sequential(*layers)

    def forward(self, *parts: Tensor) -> Tensor:
        out: Tensor = self.layers(side_by_side(*parts))
        return out


class OwnColumns(nn.Module):
    """The factors of slots with unequal widths, [B, S, D] → [B, Σ D_s]: each slot's own columns. Equal widths stay [B, S, D].

    >>> from clickfleet.training.network import Shape
    >>> OwnColumns(Shape(0, 2, 2, 2, widths=(1, 2)))(torch.tensor([[[1.0, 0.0], [2.0, 3.0]]]))
    tensor([[1., 2., 3.]])
    """

    index: Tensor | None

    def __init__(self, shape: Shape, slots: Sequence[int] | None = None) -> None:
        super().__init__()
        columns = shape.columns_of(range(shape.slots) if slots is None else slots)
        self.register_buffer("index", None if columns is None else torch.tensor(columns), persistent=False)

    if TYPE_CHECKING:

        def __call__(self, factors: Tensor) -> Tensor: ...

    def forward(self, factors: Tensor) -> Tensor:
        return factors if self.index is None else factors.flatten(1).index_select(1, self.index)


class Wide(nn.Module):
    """The first-order part Σ_j w_j + a·x + b, [B, T]: w are the first-order weights of the rows, x the dense values.

    With several labels, each has its own a and b, and a factor for the weights of each slot, which starts at 1. The sum leaves
    out what the schema lacks. Without slots and dense columns it is b alone, one row for all.
    """

    def __init__(self, shape: Shape, init: Init | None = None) -> None:
        super().__init__()
        several = (shape.outputs,) if shape.outputs > 1 else ()
        self.weight = nn.Parameter(torch.zeros(shape.dense, *several))
        self.bias = nn.Parameter(torch.zeros(shape.outputs))
        self.slots = nn.Parameter(torch.ones(shape.slots, *several)) if several and shape.slots else None
        if init is not None and shape.dense:
            init(self.weight)

    if TYPE_CHECKING:

        def __call__(self, first: Tensor | None, dense: Tensor) -> Tensor: ...

    def forward(self, first: Tensor | None, dense: Tensor) -> Tensor:
        parts = []
        if first is not None and first.shape[1]:
            parts.append(first.sum(1, keepdim=True) if self.slots is None else first @ self.slots)
        if len(self.weight):
            parts.append(dense @ self.weight if self.weight.ndim == 2 else (dense @ self.weight).unsqueeze(1))
        return reduce(torch.add, [*parts, self.bias])


class Shared(nn.Module):
    """A part of the logit that all labels share, [B] → [B, T]. With several labels, each scales it; the scale starts at 1."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(outputs)) if outputs > 1 else None

    def forward(self, part: Tensor) -> Tensor:
        return part.unsqueeze(1) if self.scale is None else part.unsqueeze(1) * self.scale


class FieldVectors(nn.Module):
    """Every field as a vector, [B, S+F, d]: the pooled factors of a slot, or x_i·A_i for a dense value x_i."""

    def __init__(self, dense: int, width: int, init: Init) -> None:
        super().__init__()
        self.vectors = nn.Parameter(torch.zeros(dense, width))
        if dense and width:
            init(self.vectors)

    if TYPE_CHECKING:

        def __call__(self, factors: Tensor, dense: Tensor) -> Tensor: ...

    def forward(self, factors: Tensor, dense: Tensor) -> Tensor:
        if not len(self.vectors):
            return factors
        vectors = dense.unsqueeze(2) * self.vectors
        return torch.cat([factors, vectors], 1) if factors.shape[1] else vectors


def fm_pairs(fields: Tensor) -> Tensor:
    """Return Σ_{f<g} ⟨e_f, e_g⟩ of field vectors [B, n, d] in O(n·d): half of squared sum minus sum of squares.

    >>> fm_pairs(torch.tensor([[[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]]))  # 11 + 17 + 39
    tensor([67.])
    """
    return (fields.sum(1).square() - fields.square().sum(1)).sum(1) / 2


class Pairs(nn.Module):
    """All index pairs i < j of n items, row by row: (0,1), (0,2), …, (1,2), …"""

    left: Tensor
    right: Tensor

    def __init__(self, n: int) -> None:
        super().__init__()
        left, right = torch.triu_indices(n, n, 1)
        self.register_buffer("left", left, persistent=False)
        self.register_buffer("right", right, persistent=False)

    def __len__(self) -> int:
        return len(self.left)
