"""Deep match to rank."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clickfleet.errors import ConfigError
from clickfleet.training.layers import OwnColumns, by_fan_in, logits, tower
from clickfleet.training.network import NARROW, Events, Inputs, Model, Shape


class DMR(Model):
    """A matching model inside the ranking model tells how close user and candidate are (Lyu et al., AAAI 2020).

    p_l = position, counted backwards from the last event. User to item: c_l = z·tanh(P p_l + E e_l + b),
    u = PReLU(G Σ_l softmax_l(c) e_l + g), r = u·(V q). Item to item: ĉ_l = ẑ·tanh(Q q + P̂ p_l + Ê e_l + b̂),
    û = Σ_l softmax_l(ĉ) e_l, r̂ = Σ_l ĉ_l. logit = MLP([e, x, û, r, r̂ of every history]).
    The loss adds that of finding the last event: softmax of u without it against the last events of all histories in the batch.
    """

    reads_histories = True
    needs_history = True
    small = NARROW
    unequal_widths = True

    @dataclass(frozen=True)
    class Config(Model.Config):
        attention: int = 36
        """Hidden units of both attentions."""
        position: int = 8
        """Width of the vector of a position."""
        auxiliary: float = 0.1
        """Weight of the loss of the last event. 0: leave it out."""
        hidden: tuple[int, ...] = (400, 400, 400)
        """Widths of the MLP, input side first."""
        dropout: float = 0.0
        """Fraction of hidden values set to zero during training."""

    def __init__(self, config: Config, shape: Shape) -> None:
        super().__init__(config, shape)
        self.columns = OwnColumns(shape)
        if min(config.attention, config.position) < 1 or config.auxiliary < 0:
            raise ConfigError(
                "model.attention and model.position must be at least 1, and model.auxiliary not negative",
                "for example attention: 36, position: 8, auxiliary: 0.1",
            )
        self.histories, self.auxiliary = shape.histories, config.auxiliary
        widths = [shape.factors_of(history.slots) for history in shape.histories]
        self.matches = nn.ModuleList(
            Match(config, width, history.max) for width, history in zip(widths, shape.histories, strict=True)
        )
        width = shape.width + sum(widths) + 2 * len(widths)
        self.deep = tower(width, *config.hidden, shape.outputs, dropout=config.dropout)
        self.penalty: Tensor | None = None

    def extra_loss(self) -> Tensor | None:
        penalty, self.penalty = self.penalty, None  # a tensor with a graph cannot be copied with the model
        return penalty

    def forward(self, x: Inputs) -> Tensor:
        self.penalty = None
        interests: list[Tensor] = []
        for history, match in zip(self.histories, self.matches, strict=True):
            assert isinstance(match, Match)
            events = x.events(history)
            interests += match(x.candidate(history), events)
            if self.training and self.auxiliary:
                loss = self.auxiliary * match.last_event(events)
                self.penalty = loss if self.penalty is None else self.penalty + loss
        return logits(self.deep(self.columns(x.factors), x.dense, *interests))


class Match(nn.Module):
    """Both relations of a history to the candidate."""

    def __init__(self, config: DMR.Config, width: int, most: int) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.empty(most, config.position))  # of the last event, the one before, …
        nn.init.normal_(self.positions, std=0.02)
        self.user_event, self.item_event = nn.Linear(width, config.attention), nn.Linear(width, config.attention)
        self.user_position, self.item_position, self.item_candidate = (
            nn.Linear(n, config.attention, bias=False) for n in (config.position, config.position, width)
        )
        self.user_out, self.item_out = (
            nn.Linear(config.attention, 1, bias=False),
            nn.Linear(config.attention, 1, bias=False),
        )
        self.user, self.target = nn.Linear(width, width), nn.Linear(width, width, bias=False)
        for layer in self.children():
            assert isinstance(layer, nn.Linear)
            by_fan_in(1.0)(layer.weight)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
        self.slope = nn.Parameter(torch.full((1,), 0.25))

    def forward(self, q: Tensor, events: Events) -> tuple[Tensor, Tensor, Tensor]:
        """Return û [B, W], r [B, 1] and r̂ [B, 1]."""
        positions, mask = self._positions(events.length, events), events.by_row(events.mask)
        u = self._user(positions, events.mask, events)  # once per history
        r = (events.by_row(u) * self.target(q)).sum(1, keepdim=True)
        per_event = self.item_event(events.flat) + self.item_position(positions)  # once per history
        c = self.item_out(torch.tanh(events.by_row(per_event) + self.item_candidate(q).unsqueeze(1))).squeeze(2)
        found = torch.bmm(_softmax(c, mask).unsqueeze(1), events.by_row(events.flat)).squeeze(1)
        return found, r, (c * mask).sum(1, keepdim=True)

    def last_event(self, events: Events) -> Tensor:
        """Return the mean loss of finding the last event of each history among those of all histories in the batch."""
        several = events.length > 1
        last = (events.length - 1).clamp_min(0)
        mask = torch.arange(events.factors.shape[1], device=last.device) < last.unsqueeze(1)
        u = self._user(self._positions(last, events), mask, events)
        targets = events.flat.gather(1, last[:, None, None].expand(-1, 1, events.flat.shape[2])).squeeze(1)
        scores = (u @ self.target(targets).t()).masked_fill(~several, -1e9)
        losses: Tensor = (scores.logsumexp(1) - scores.diagonal()) * several
        return losses.sum() / several.sum().clamp_min(1)

    def _positions(self, length: Tensor, events: Events) -> Tensor:
        """Return the vector of each event's position, [U, L, P], if only the first `length` events had happened."""
        places = length.unsqueeze(1) - 1 - torch.arange(events.factors.shape[1], device=length.device)
        return self.positions[places.clamp(0, len(self.positions) - 1)]

    def _user(self, positions: Tensor, mask: Tensor, events: Events) -> Tensor:
        c = self.user_out(torch.tanh(self.user_position(positions) + self.user_event(events.flat))).squeeze(2)
        return F.prelu(self.user(torch.bmm(_softmax(c, mask).unsqueeze(1), events.flat).squeeze(1)), self.slope)


def _softmax(scores: Tensor, mask: Tensor) -> Tensor:
    """Return the softmax over the events that exist, [N, L]; zeros if there are none."""
    return torch.softmax(scores.masked_fill(~mask, -1e9), 1) * mask
