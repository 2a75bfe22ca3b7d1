"""Deep interest evolution network."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch._higher_order_ops.scan import scan
from torch.nn import functional as F

from clickfleet.errors import ConfigError
from clickfleet.training.layers import OwnColumns, by_fan_in, logits, tower
from clickfleet.training.network import NARROW, Events, HistoryShape, Inputs, Model, Shape, TableInit
from clickfleet.training.recurrence import PackedEvents, attention_gru, gru, next_event_loss, runs_native

START = 0.35
"""Initial factors are uniform in ±START."""
SIMILAR = 8.0
"""Initial similarity of an event to the candidate for each slot in which they are equal."""
COMPARED = 2.0
"""Initial weights of g in the MLP: this many times those of the candidate."""


class DIEN(Model):
    """Interests evolve along the events, and the candidate decides which of them do (arXiv:1809.03672).

    h_l = GRU(h_{l−1}, e_l), once per history; a_l = softmax_l(h_lᵀ W q); g_l = AUGRU(g_{l−1}, h_l, a_l): the GRU whose update
    gate is multiplied by a_l; logit = MLP([e, x, g after the last event of every history]).
    The loss adds that of telling the next event from one of another history: −ln σ(h_l·e_{l+1}) − ln(1 − σ(h_l·ē_{l+1})).
    At first, h_l is close to the event e_l, W favours events equal to the candidate, and the MLP compares g with the candidate.
    """

    rows = TableInit(embedx=f"uniform(-{START},{START})")  # large, as in din, so that equal events stand out
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
        self.similarities = nn.ParameterList(self._similarity(shape, history) for history in shape.histories)
        self.deep = tower(shape.width + sum(widths), *config.hidden, shape.outputs, dropout=config.dropout)
        self._compare(shape)
        self.penalty: Tensor | None = None

    @staticmethod
    def _similarity(shape: Shape, history: HistoryShape) -> Tensor:
        """Return W such that an event and a candidate that are equal in a slot have an expected similarity of SIMILAR, others of 0."""
        widths = [shape.factors_of([slot]) for slot in history.slots]
        return torch.diag(torch.cat([torch.full((width,), SIMILAR / (width * START**2 / 3)) for width in widths]))

    @torch.no_grad()
    def _compare(self, shape: Shape) -> None:
        """Let the hidden units of the MLP add g to the candidate q or subtract it, in turn.

        If g is similar to q, the sums are larger than the differences. From random weights, the MLP has to learn to multiply first.
        """
        layer = self.deep.layers[0]
        assert isinstance(layer, nn.Linear)
        signs = torch.full((len(layer.weight), 1), COMPARED)
        signs[1::2] = -COMPARED
        at = shape.width
        for history in shape.histories:
            for slot in history.slots:
                width, q = shape.factors_of([slot]), shape.factors_of(range(slot))
                layer.weight[:, at : at + width] = signs * layer.weight[:, q : q + width]
                at += width

    def extra_loss(self) -> Tensor | None:
        penalty, self.penalty = self.penalty, None  # a tensor with a graph cannot be copied with the model
        return penalty

    def forward(self, x: Inputs) -> Tensor:
        self.penalty = None
        interests = [
            self.interest(i, x.candidate(history), x.events(history)) for i, history in enumerate(self.histories)
        ]
        return logits(self.deep(self.columns(x.factors), x.dense, *interests))

    def interest(self, i: int, candidate: Tensor, events: Events) -> Tensor:
        """Return the interest at the end of history i, [B, W]."""
        extractor, evolution = self.extractors[i], self.evolutions[i]
        assert isinstance(extractor, GRU)
        assert isinstance(evolution, GRU)
        to_candidate = candidate @ self.similarities[i].t()
        if runs_native(candidate):
            packed = PackedEvents.of(events)
            states = gru(extractor.input(packed.flat), extractor.recurrent, packed.histories)
            if self.training and self.auxiliary:
                self._penalize(next_event_loss(states, packed.flat, packed.histories))
            return attention_gru(evolution.input(states), evolution.recurrent, states, to_candidate, packed.rows)
        states = extractor(extractor.input(events.flat))  # [U, L, W]
        if self.training and self.auxiliary:
            self._penalize(next_events(states, events))
        mask = events.by_row(events.mask)
        a = torch.bmm(events.by_row(states), to_candidate.unsqueeze(2)).squeeze(2)
        a = torch.softmax(a.masked_fill(~mask, -1e9), 1) * mask  # 0 behind the last event, so nothing changes there
        evolved: Tensor = evolution(events.by_row(evolution.input(states)), a)
        return evolved[:, -1]

    def _penalize(self, loss: Tensor) -> None:
        loss = self.auxiliary * loss
        self.penalty = loss if self.penalty is None else self.penalty + loss


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
        by_fan_in(0.3)(self.input.weight)
        by_fan_in(0.3)(self.recurrent)
        nn.init.zeros_(self.input.bias)
        with torch.no_grad():  # so that h is close to tanh(x) at first
            self.input.weight[2 * width :] = torch.eye(width)
            self.input.bias[:width] = 2.0

    def forward(self, gates: Tensor, a: Tensor | None = None) -> Tensor:
        """Return h after every event, [N, L, W], for gates = W x + b of the events, [N, L, 3·W], and their factors a, [N, L]."""
        gates = gates.transpose(0, 1)
        a = torch.ones_like(gates[:, :, :1]) if a is None else a.t().unsqueeze(2)
        if torch.compiler.is_compiling():
            return self._scan(gates, a).transpose(0, 1)
        h, states = torch.zeros_like(gates[0, :, : self.recurrent.shape[1]]), []
        for event in zip(gates, a, strict=True):
            h = self._step(h, *event)
            states.append(h)
        return torch.stack(states, 1)

    def _step(self, h: Tensor, gates: Tensor, a: Tensor) -> Tensor:
        update, reset, proposal = (h @ self.recurrent.t()).chunk(3, 1)
        update_in, reset_in, proposal_in = gates.chunk(3, 1)
        r = torch.sigmoid(reset_in + reset)
        return h + a * torch.sigmoid(update_in + update) * (torch.tanh(proposal_in + r * proposal) - h)

    def _scan(self, gates: Tensor, a: Tensor) -> Tensor:
        """Loop inside an exported graph: the number of events is known only when it runs."""

        def step(h: Tensor, event: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            h = self._step(h, *event)
            return h, h.clone()

        states: Tensor = scan(step, torch.zeros_like(gates[0, :, : self.recurrent.shape[1]]), (gates, a))[1]
        return states
