"""Deep interest evolution network."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._higher_order_ops.scan import scan
from torch.nn import functional as F

from clickfleet.errors import ConfigError
from clickfleet.training.layers import OwnColumns, by_fan_in, logits, tower
from clickfleet.training.network import NARROW, Events, Inputs, Model, Shape


class DIEN(Model):
    """Interests evolve along the events, and the candidate decides which of them do (arXiv:1809.03672).

    h_l = GRU(h_{l−1}, e_l), once per history; a_l = softmax_l(h_lᵀ W q); g_l = AUGRU(g_{l−1}, h_l, a_l): the GRU whose update
    gate is multiplied by a_l; logit = MLP([e, x, g after the last event of every history]).
    The loss adds that of telling the next event from one of another history: −ln σ(h_l·e_{l+1}) − ln(1 − σ(h_l·ē_{l+1})).
    """

    reads_histories = True
    needs_history = True
    small = NARROW
    unequal_widths = True

    @dataclass(frozen=True)
    class Config(Model.Config):
        auxiliary: float = 0.1
        """Weight of the loss of the next events. 0: leave it out."""
        hidden: tuple[int, ...] = (400, 400, 400)
        """Widths of the MLP, input side first."""
        dropout: float = 0.0
        """Fraction of hidden values set to zero during training."""

    def __init__(self, config: Config, shape: Shape) -> None:
        super().__init__(config, shape)
        self.columns = OwnColumns(shape)
        if config.auxiliary < 0:
            raise ConfigError(f"model.auxiliary is {config.auxiliary:g}, but must not be negative")
        self.histories, self.auxiliary = shape.histories, config.auxiliary
        widths = [shape.factors_of(history.slots) for history in shape.histories]
        self.extractors = nn.ModuleList(GRU(width) for width in widths)
        self.evolutions = nn.ModuleList(GRU(width) for width in widths)
        self.similarities = nn.ParameterList(torch.empty(width, width) for width in widths)
        for weight in self.similarities:
            by_fan_in(1.0)(weight)
        self.deep = tower(shape.width + sum(widths), *config.hidden, shape.outputs, dropout=config.dropout)
        self.penalty: Tensor | None = None

    def extra_loss(self) -> Tensor | None:
        penalty, self.penalty = self.penalty, None  # a tensor with a graph cannot be copied with the model
        return penalty

    def forward(self, x: Inputs) -> Tensor:
        self.penalty = None
        interests = []
        for i, history in enumerate(self.histories):
            events = x.events(history)
            extractor, evolution = self.extractors[i], self.evolutions[i]
            assert isinstance(extractor, GRU)
            assert isinstance(evolution, GRU)
            states = extractor(extractor.input(events.flat))  # [U, L, W]
            if self.training and self.auxiliary:
                loss = self.auxiliary * next_events(states, events)
                self.penalty = loss if self.penalty is None else self.penalty + loss
            mask = events.by_row(events.mask)
            to_candidate = (x.candidate(history) @ self.similarities[i].t()).unsqueeze(2)
            a = torch.bmm(events.by_row(states), to_candidate).squeeze(2)
            a = torch.softmax(a.masked_fill(~mask, -1e9), 1) * mask  # 0 behind the last event, so nothing changes there
            interests.append(evolution(events.by_row(evolution.input(states)), a)[:, -1])
        return logits(self.deep(self.columns(x.factors), x.dense, *interests))


def next_events(states: Tensor, events: Events) -> Tensor:
    """Return the mean log loss of telling the next event from the one at the same place of the history before it in the batch."""
    known = events.mask[:, 1:]
    others = known & known.roll(1, 0) & (len(known) > 1)
    h, e = states[:, :-1], events.flat[:, 1:]
    positive = F.softplus(-(h * e).sum(2)) * known
    negative = F.softplus((h * e.roll(1, 0)).sum(2)) * others
    return positive.sum() / known.sum().clamp_min(1) + negative.sum() / others.sum().clamp_min(1)


class GRU(nn.Module):
    """u = σ(W₀ x + U₀ h + b₀), r = σ(W₁ x + U₁ h + b₁), p = tanh(W₂ x + r ∘ (U₂ h) + b₂), h ← h + a·u ∘ (p − h), from h = 0."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.input = nn.Linear(width, 3 * width)
        self.recurrent = nn.Parameter(torch.empty(3 * width, width))
        by_fan_in(1.0)(self.input.weight)
        by_fan_in(1.0)(self.recurrent)
        nn.init.zeros_(self.input.bias)

    def forward(self, gates: Tensor, a: Tensor | None = None) -> Tensor:
        """Return h after every event, [N, L, W], for gates = W x + b of the events, [N, L, 3·W], and their factors a, [N, L]."""
        gates = gates.transpose(0, 1)
        a = torch.ones_like(gates[:, :, :1]) if a is None else a.t().unsqueeze(2)
        if torch.compiler.is_compiling():
            states = self._scan(gates, a)
        elif torch.is_grad_enabled():
            states = Recurrence.apply(gates, a, self.recurrent)  # type: ignore[no-untyped-call]
        else:
            states = recurrence(gates, a, self.recurrent)[0]
        return states.transpose(0, 1)

    def _scan(self, gates: Tensor, a: Tensor) -> Tensor:
        """Loop inside an exported graph: the number of events is known only when it runs."""
        recurrent = self.recurrent.t()

        def step(h: Tensor, event: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            gates, a = event
            update, reset, proposal = (h @ recurrent).chunk(3, 1)
            update_in, reset_in, proposal_in = gates.chunk(3, 1)
            r = torch.sigmoid(reset_in + reset)
            h = h + a * torch.sigmoid(update_in + update) * (torch.tanh(proposal_in + r * proposal) - h)
            return h, h.clone()

        states: Tensor = scan(step, torch.zeros_like(gates[0, :, : self.recurrent.shape[1]]), (gates, a))[1]
        return states


def recurrence(gates: Tensor, a: Tensor, recurrent: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return h [L, N, W], σ of the update and reset gates [L, N, 2·W], the proposals and U₂ h [L, N, W]."""
    length, rows, width = gates.shape[0], gates.shape[1], recurrent.shape[1]
    states, ur = gates.new_empty(length, rows, width), gates.new_empty(length, rows, 2 * width)
    proposals, before = torch.empty_like(states), torch.empty_like(states)
    h = gates.new_zeros(rows, width)
    for x, factor, state, gate, p, c in zip(gates, a, states, ur, proposals, before, strict=True):
        z = h @ recurrent.t()
        torch.sigmoid(torch.add(x[:, : 2 * width], z[:, : 2 * width], out=gate), out=gate)
        c.copy_(z[:, 2 * width :])
        torch.tanh(torch.addcmul(x[:, 2 * width :], gate[:, width:], c, out=p), out=p)
        h = torch.addcmul(h, factor * gate[:, :width], p - h, out=state)
    return states, ur, proposals, before


class Recurrence(torch.autograd.Function):
    """`recurrence` with its gradient, as one node: a graph of all steps would cost more than the steps."""

    @staticmethod
    def forward(ctx: Any, gates: Tensor, a: Tensor, recurrent: Tensor) -> Tensor:
        states, ur, proposals, before = recurrence(gates, a, recurrent)
        ctx.save_for_backward(a, recurrent, states, ur, proposals, before)
        return states

    @staticmethod
    def backward(ctx: Any, d_states: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        a, recurrent, states, ur, proposals, before = ctx.saved_tensors
        width = recurrent.shape[1]
        earlier = torch.cat([torch.zeros_like(states[:1]), states[:-1]])
        u, r = ur[..., :width], ur[..., width:]
        # what does not depend on later gradients, for all steps at once
        by_proposal = a * u * (1 - proposals.square())
        by_reset = by_proposal * before * r * (1 - r)
        moved = proposals - earlier
        by_update = a * moved * u * (1 - u)
        kept = 1 - a * u
        factors = torch.cat([by_update, by_reset, by_proposal * r], 2)
        d_h, d_z = torch.empty_like(states), torch.empty_like(factors)
        later = torch.zeros_like(states[0])
        for i in range(len(states) - 1, -1, -1):
            d = torch.add(d_states[i], later, out=d_h[i])
            z = torch.mul(factors[i].view(-1, 3, width), d.unsqueeze(1), out=d_z[i].view(-1, 3, width)).view_as(d_z[i])
            later = torch.addmm(d * kept[i], z, recurrent)
        d_a = (d_h * moved * u).sum(2, keepdim=True) if ctx.needs_input_grad[1] else None
        d_recurrent = d_z.flatten(0, 1).t() @ earlier.flatten(0, 1)
        d_gates = d_z
        torch.mul(d_h, by_proposal, out=d_gates[..., 2 * width :])
        return d_gates, d_a, d_recurrent
