"""Recurrences over the events of histories, each as one autograd node of the core.

The events of a batch are packed, [E, …]: histories follow one another without padding. So a history costs what its own
length needs. The loops run in one thread without the GIL, and equal inputs give equal results.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import once_differentiable

from clickfleet import _core
from clickfleet.training.network import Events

Places = NDArray[np.int64]


class Sequences(NamedTuple):
    """Passes over packed events: the first event of each, the first place of its results, and its length."""

    start: Places
    to: Places
    length: Places
    shared: bool = False
    """Several passes may read an event."""

    @property
    def arrays(self) -> tuple[Places, Places, Places]:
        return self.start, self.to, self.length

    @property
    def size(self) -> int:
        """The number of results."""
        return int(self.length.sum())


class PackedEvents(NamedTuple):
    """The events of one history for all rows of a batch."""

    flat: Tensor  # [E, K·D]
    histories: Sequences  # one per history
    rows: Sequences  # one per row of the batch

    @classmethod
    def of(cls, events: Events) -> PackedEvents:
        length = events.length.numpy()
        start = length.cumsum() - length
        histories = Sequences(start, start, length)
        row = None if events.row is None else events.row.numpy()
        own = length if row is None else length[row]
        rows = histories if row is None else Sequences(start[row], own.cumsum() - own, own, shared=True)
        flat: Tensor = Pack.apply(events.flat, torch.from_numpy(np.flatnonzero(events.mask)))  # type: ignore[no-untyped-call]
        return cls(flat, histories, rows)


def runs_native(x: Tensor) -> bool:
    """Return whether the core can compute with a tensor now: an exported graph and other devices need plain operators."""
    return x.is_cpu and x.dtype == torch.float32 and not torch.compiler.is_compiling()


def gru(gates: Tensor, recurrent: Tensor, histories: Sequences) -> Tensor:
    """Return the states after every event, [E, W], for W x + b of the events, [E, 3·W]."""
    states: Tensor = States.apply(gates, recurrent, histories)  # type: ignore[no-untyped-call]
    return states


def attention_gru(gates: Tensor, recurrent: Tensor, states: Tensor, queries: Tensor, rows: Sequences) -> Tensor:
    """Return the last state of every row, [B, W], where a_l = softmax_l(states_l · queries) multiplies the update gates."""
    last: Tensor = LastStates.apply(gates, recurrent, states, queries, rows)  # type: ignore[no-untyped-call]
    return last


def next_event_loss(states: Tensor, events: Tensor, histories: Sequences) -> Tensor:
    """Return the mean log loss of telling the next event from the one at the same place of the history before it in the batch."""
    loss: Tensor = NextEvents.apply(states, events, histories)  # type: ignore[no-untyped-call]
    return loss


class Pack(torch.autograd.Function):
    """The vectors of [U, L, W] at some places, [E, W]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, places: Tensor) -> Tensor:
        ctx.places, ctx.shape = places, x.shape
        return x.reshape(-1, x.shape[2]).index_select(0, places)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        d_x = grad.new_zeros(ctx.shape)
        d_x.view(-1, ctx.shape[2]).index_copy_(0, ctx.places, grad)
        return d_x, None


class States(torch.autograd.Function):
    """See `gru`."""

    @staticmethod
    def forward(ctx: Any, gates: Tensor, recurrent: Tensor, histories: Sequences) -> Tensor:
        states, kept = _run(gates, recurrent, None, histories, any(ctx.needs_input_grad))
        ctx.save_for_backward(gates, recurrent, states, kept)
        ctx.histories = histories
        return states

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_states: Tensor) -> tuple[Tensor, Tensor, None]:
        gates, recurrent, states, kept = ctx.saved_tensors
        d_gates, d_recurrent = torch.empty_like(gates), torch.empty_like(recurrent)
        _core.gru_backward(
            *_arrays(gates, recurrent), None, *ctx.histories.arrays, *_arrays(states, kept, d_states), None,
            *_arrays(d_gates, d_recurrent), None, False,
        )  # fmt: skip
        return d_gates, d_recurrent, None


class LastStates(torch.autograd.Function):
    """See `attention_gru`."""

    @staticmethod
    def forward(ctx: Any, gates: Tensor, recurrent: Tensor, states: Tensor, queries: Tensor, rows: Sequences) -> Tensor:
        weights = gates.new_empty(rows.size)
        _core.attend(*_arrays(states, queries), *rows.arrays, weights.numpy())
        evolved, kept = _run(gates, recurrent, weights, rows, any(ctx.needs_input_grad))
        ctx.save_for_backward(gates, recurrent, states, queries, weights, evolved, kept)
        ctx.rows = rows
        some = torch.from_numpy(np.flatnonzero(rows.length))
        last = gates.new_zeros(len(rows.length), recurrent.shape[1])
        last[some] = evolved[torch.from_numpy(rows.to + rows.length - 1)[some]]
        return last

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_last: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, None]:
        gates, recurrent, states, queries, weights, evolved, kept = ctx.saved_tensors
        d_gates = torch.zeros_like(gates) if ctx.rows.shared else torch.empty_like(gates)
        d_recurrent = torch.empty_like(recurrent)
        d_weights, d_states, d_queries = torch.empty_like(weights), torch.zeros_like(states), torch.empty_like(queries)
        _core.gru_backward(
            *_arrays(gates, recurrent, weights), *ctx.rows.arrays, *_arrays(evolved, kept), None,
            *_arrays(d_last, d_gates, d_recurrent, d_weights), ctx.rows.shared,
        )  # fmt: skip
        _core.attend_backward(
            *_arrays(states, queries), *ctx.rows.arrays, *_arrays(weights, d_weights, d_states, d_queries)
        )
        return d_gates, d_recurrent, d_states, d_queries, None


class NextEvents(torch.autograd.Function):
    """See `next_event_loss`. The gradients are computed with the loss and scaled later."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, events: Tensor, histories: Sequences) -> Tensor:
        d_states, d_events = torch.empty_like(states), torch.empty_like(events)
        loss = _core.next_events(
            *_arrays(states, events), histories.start, histories.length, *_arrays(d_states, d_events)
        )
        ctx.save_for_backward(d_states, d_events)
        return states.new_tensor(loss)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        d_states, d_events = ctx.saved_tensors
        return d_states * grad, d_events * grad, None


def _run(
    gates: Tensor, recurrent: Tensor, factors: Tensor | None, sequences: Sequences, trains: bool
) -> tuple[Tensor, Tensor | None]:
    """Return all states, and what their gradient needs if `trains`."""
    size, width = sequences.size, recurrent.shape[1]
    states = gates.new_empty(size, width)
    kept = gates.new_empty(size, _core.gru_kept(width)) if trains else None
    a, keep = (None if part is None else part.numpy() for part in (factors, kept))
    _core.gru_forward(*_arrays(gates, recurrent), a, *sequences.arrays, states.numpy(), keep)
    return states, kept


def _arrays(*tensors: Tensor) -> list[NDArray[np.float32]]:
    return [tensor.detach().contiguous().numpy() for tensor in tensors]
