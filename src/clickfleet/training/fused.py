"""A whole ReLU MLP as one autograd node.

Eager autograd allocates every activation and its gradient again in each step. Here they live in buffers that a step
borrows and returns. ReLU works in place, and its mask is read from the activation. The gradients of parameters are
returned to autograd as usual, so hooks and `torch.autograd.grad` work. If `optimizer.Flat` owns the gradients, the
backward pass writes them directly into its vector.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from clickfleet import _core

threshold = torch.ops.aten.threshold_backward.grad_input


def bias_relu_(x: Tensor, bias: Tensor) -> Tensor:
    """max(x + bias, 0), in place."""
    if not _native(x, bias):
        return x.add_(bias).relu_()
    _core.add_bias_relu(x.numpy(), bias.detach().numpy())
    return x


def relu_backward(g: Tensor, row: Tensor | None, h: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
    """Propagate g (with `row`: g·row) through the ReLU that returned h. Return the gradient, in `out`, and its sum over rows."""
    if _native(g, h, out) and (row is not None or g is out):
        d_bias = torch.empty_like(h[0])
        if row is None:
            _core.relu_backward(out.numpy(), h.numpy(), d_bias.numpy())
        else:
            _core.relu_backward_of_product(g.numpy(), row.detach().numpy(), out.numpy(), h.numpy(), d_bias.numpy())
        return out, d_bias
    threshold(g if row is None else torch.mul(g, row), h, 0.0, grad_input=out)
    return out, out.sum(0)


def _native(*tensors: Tensor) -> bool:
    return all(tensor.dtype == torch.float32 and tensor.is_cpu and tensor.is_contiguous() for tensor in tensors)


class Workspace(NamedTuple):
    """The working memory of one forward and backward pass."""

    inputs: Tensor  # the concatenated parts [rows, in]
    hidden: list[Tensor]  # after each ReLU
    grads: list[Tensor]  # of the loss by each of those


class Buffers:
    """Unused spaces. Each pass takes one out, so threads and repeated forward passes never share one."""

    def __init__(self) -> None:
        self.free: list[Workspace] = []  # append and pop of a list are atomic

    def take(self, rows: int, widths: list[int], like: Tensor) -> Workspace:
        """Return a space of at least `rows` rows for layers of `widths`, the width of the input first."""
        try:
            space = self.free.pop()
        except IndexError:
            space = None
        if space is None or len(space.inputs) < rows or space.inputs.dtype != like.dtype:
            with torch.inference_mode(False):  # training may reuse what scoring allocated
                return Workspace(
                    like.new_empty(rows, widths[0]),
                    [like.new_empty(rows, width) for width in widths[1:]],
                    [like.new_empty(rows, width) for width in widths[1:]],
                )
        return space

    def give(self, space: Workspace) -> None:
        if len(self.free) < 64:  # bounds the memory of callers that run many forward passes before a backward pass
            self.free.append(space)

    def __deepcopy__(self, memo: dict[int, Any]) -> Buffers:
        return Buffers()  # buffers are never copied or saved with a model

    def __reduce__(self) -> tuple[type[Buffers], tuple[()]]:
        return Buffers, ()


class Sink:
    """The vectors into which the backward pass adds the gradients of the parameters. While `fresh`, they count as zeros."""

    def __init__(self, grads: list[Tensor]) -> None:
        self.grads = grads  # weight, bias, weight, bias, …
        self.fresh = False

    def add(self, layer: int, g: Tensor, below: Tensor, d_bias: Tensor) -> None:
        weight, bias = self.grads[2 * layer], self.grads[2 * layer + 1]
        if self.fresh:  # overwriting saves a pass over the memory to zero it
            torch.mm(g.t(), below, out=weight)
            bias.copy_(d_bias)
        else:
            torch.addmm(weight, g.t(), below, out=weight)
            bias.add_(d_bias)

    def zero_if_fresh(self) -> None:
        """Write the zeros of fresh gradients."""
        if self.fresh:
            self.fresh = False
            for grad in self.grads:
                grad.zero_()


def infer(buffers: Buffers, relu_last: bool, parts: Sequence[Tensor], params: Sequence[Tensor]) -> Tensor:
    """Run only the forward pass, in borrowed buffers. Use it only where no gradients are needed."""
    weights, biases = params[0::2], params[1::2]
    rows, last = len(parts[0]), len(weights) if relu_last else len(weights) - 1
    space = buffers.take(rows, [weights[0].shape[1], *(len(weight) for weight in weights[:last])], weights[0])
    h = torch.cat([part.reshape(rows, -1) for part in parts], 1, out=space.inputs[:rows])
    for layer in range(last):
        h = bias_relu_(torch.mm(h, weights[layer].t(), out=space.hidden[layer][:rows]), biases[layer])
    out = h.clone() if relu_last else torch.addmm(biases[-1], h, weights[-1].t())
    buffers.give(space)
    return out


class FusedTower(torch.autograd.Function):
    """ReLU(…ReLU(x W₁ᵀ + b₁)…) Wₙᵀ + bₙ, with a ReLU after the last layer if `relu_last`."""

    @staticmethod
    def forward(ctx: Any, buffers: Buffers, relu_last: bool, sink: Sink | None, count: int, *tensors: Tensor) -> Tensor:
        parts, params = tensors[:count], tensors[count:]
        weights, biases = params[0::2], params[1::2]
        rows = len(parts[0])
        last = len(weights) if relu_last else len(weights) - 1  # layers followed by a ReLU
        widths = [weights[0].shape[1], *(len(weight) for weight in weights[:last])]
        space = buffers.take(rows, widths, weights[0])
        if count == 1 and parts[0].is_contiguous():
            x = parts[0].view(rows, -1)
        else:
            x = torch.cat([part.reshape(rows, -1) for part in parts], 1, out=space.inputs[:rows])
        hidden: list[Tensor] = []
        for layer, h in enumerate(space.hidden):
            a = hidden[-1] if hidden else x
            hidden.append(bias_relu_(torch.mm(a, weights[layer].t(), out=h[:rows]), biases[layer]))
        # save_for_backward lets autograd detect a buffer that was reused before a second backward pass.
        ctx.save_for_backward(x, *weights, *hidden)
        ctx.buffers, ctx.space, ctx.last, ctx.given = buffers, space, last, False
        ctx.shapes, ctx.sink = [part.shape for part in parts], sink
        if relu_last:
            return hidden[-1].clone()
        return torch.addmm(biases[-1], hidden[-1] if hidden else x, weights[-1].t())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        saved, last, shapes = ctx.saved_tensors, ctx.last, ctx.shapes
        n = len(saved) - 1 - last
        x, weights, hidden = saved[0], saved[1 : 1 + n], saved[1 + n :]
        rows, g = len(x), grad
        grads = [torch.empty_like(h) for h in hidden] if ctx.given else ctx.space.grads  # retain_graph
        needed, sink = ctx.needs_input_grad[4 + len(shapes) :], ctx.sink
        of_params: list[Tensor | None] = [None] * (2 * n)
        row: Tensor | None = None  # if set, the gradient is the product of the column g and this row
        for layer in reversed(range(n)):
            if layer < last:
                space = grads[layer][:rows] if layer == n - 1 or row is not None else g
                g, d_bias = relu_backward(g, row, hidden[layer], space)
            else:
                d_bias = g.sum(0)
            below = hidden[layer - 1] if layer else x
            if sink is not None:
                sink.add(layer, g, below, d_bias)
            else:
                of_params[2 * layer] = torch.mm(g.t(), below) if needed[2 * layer] else None
                of_params[2 * layer + 1] = d_bias if needed[2 * layer + 1] else None
            row = weights[layer] if layer and g.shape[1] == 1 else None  # one output: avoids a matrix product
            if layer and row is None:
                g = torch.mm(g, weights[layer], out=grads[layer - 1][:rows])
        if sink is not None:
            sink.fresh = False
        of_parts: list[Tensor | None] = []
        start = 0
        for part, shape in enumerate(shapes):  # new and contiguous, so that a leaf adopts it without a copy
            width = shape[1:].numel()
            wanted = ctx.needs_input_grad[4 + part]
            of_parts.append(torch.mm(g, weights[0][:, start : start + width]).view(shape) if wanted else None)
            start += width
        if not ctx.given:
            ctx.given = True
            ctx.buffers.give(ctx.space)
        return (None, None, None, None, *of_parts, *of_params)
