"""Deep interest network."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clickfleet.training.layers import OwnColumns, by_fan_in, logits, tower
from clickfleet.training.network import NARROW, Events, Inputs, Model, Shape, TableInit

START = 0.35
"""Initial factors are uniform in ±START."""


class DIN(Model):
    """Events of the past count by their similarity to the candidate (arXiv:1706.06978).

    q = [e_s of the history's slots], h_l = those of event l; a_l = v·PReLU(Q q + K h_l + P (q ∘ h_l) + c);
    u = Σ_l a_l h_l; logit = MLP([e, x, and u, q ∘ u, Σ_l a_l of every history]).
    The paper's MLP has u alone; with q ∘ u and Σ_l a_l it need not learn to multiply.
    The paper's W [q, h_l, q − h_l, q ∘ h_l] is the same map: Q = W₁ + W₃, K = W₂ − W₃, P = W₄.
    At first, P and c compare the similarity ⟨q_s, h_ls⟩ of one slot with one threshold, in each hidden unit.
    """

    rows = TableInit(embedx=f"uniform(-{START},{START})")  # large and of similar length, so that equal events stand out
    reads_histories = True
    needs_history = True
    small = NARROW
    unequal_widths = True

    @dataclass(frozen=True)
    class Config(Model.Config):
        attention: int = 36
        """Hidden units of the attention."""
        weights: Literal["plain", "softmax"] = "plain"
        """plain: a_l as it is, so that u grows with the number of similar events. softmax: the a_l of a row sum to 1."""
        hidden: tuple[int, ...] = (400, 400, 400)
        """Widths of the MLP, input side first."""
        dropout: float = 0.0
        """Fraction of hidden values set to zero during training."""

    def __init__(self, config: Config, shape: Shape) -> None:
        super().__init__(config, shape)
        self.columns = OwnColumns(shape)
        self.histories = shape.histories
        self.attention = nn.ModuleList(
            Attention(
                [shape.factors_of([slot]) for slot in history.slots], config.attention, config.weights == "softmax"
            )
            for history in shape.histories
        )
        width = shape.width + sum(2 * shape.factors_of(history.slots) + 1 for history in shape.histories)
        self.deep = tower(width, *config.hidden, shape.outputs, dropout=config.dropout)

    def forward(self, x: Inputs) -> Tensor:
        interests: list[Tensor] = []
        for history, attention in zip(self.histories, self.attention, strict=True):
            q = x.candidate(history)
            u = attention(q, x.events(history))
            interests += [u, q * u[:, :-1]]
        return logits(self.deep(self.columns(x.factors), x.dense, *interests))


class Attention(nn.Module):
    """Σ_l a_l [h_l, 1] over the events of a history, [B, K·D + 1], for candidates q [B, K·D]."""

    def __init__(self, widths: Sequence[int], hidden: int, softmax: bool) -> None:
        super().__init__()
        width = sum(widths)
        self.of_candidate = nn.Parameter(torch.empty(hidden, width))
        self.of_event = nn.Parameter(torch.empty(hidden, width))
        self.of_product = nn.Parameter(torch.empty(hidden, width))
        self.bias = nn.Parameter(torch.zeros(hidden))
        self.slope = nn.Parameter(torch.full((1,), 0.25))
        self.out = nn.Parameter(torch.empty(1, hidden))
        for weight in (self.of_candidate, self.of_event, self.out):
            by_fan_in(1.0)(weight)
        self._compare(widths)
        self.softmax = softmax

    @torch.no_grad()
    def _compare(self, widths: Sequence[int]) -> None:
        """Let every hidden unit compare ⟨q_s, h_s⟩ of one slot with a threshold.

        Events equal to the candidate have an expected value of 1, others of 0; the thresholds of a slot are spread from 0 to 1.
        From random weights, attention has to find these sums first. In some runs, most of an epoch passes before it does.
        """
        slots, ends = len(widths), list(itertools.accumulate(widths))
        thresholds = math.ceil(len(self.bias) / slots)
        self.of_product.zero_()
        for unit in range(len(self.bias)):
            for slot in range(unit % slots, slots, len(self.bias)):  # several if there are more slots than units
                equal = widths[slot] * START**2 / 3
                self.of_product[unit, ends[slot] - widths[slot] : ends[slot]] = 1 / equal
            self.bias[unit] = -(unit // slots) / thresholds

    def forward(self, q: Tensor, events: Events) -> Tensor:
        mask = events.mask
        if events.row is not None and torch.compiler.is_compiling():  # a served graph decides by the rows it gets
            given = (q, events.flat, mask, events.row)
            total: Tensor = torch.cond(events.row.sum() == 0, self._one_history, self._histories, given)
            return total
        return self._histories(q, events.flat, mask, events.row)

    def _histories(self, q: Tensor, h: Tensor, mask: Tensor, row: Tensor | None) -> Tensor:
        """Let every row have a history of its own."""
        # What is linear in h becomes one product: z = W(q) [h, 1], and PReLU(z) = s z + (1 - s) max(z, 0).
        h = F.pad(h, (0, 1), value=1.0).transpose(1, 2).contiguous()  # [U, K·D + 1, L]: once per history
        if row is not None:
            h, mask = h.index_select(0, row), mask.index_select(0, row)  # [B, K·D + 1, L]
        weights = q.unsqueeze(1) * self.of_product + self.of_event  # [B, A, K·D]
        bias = F.linear(q, self.of_candidate, self.bias)
        weights = torch.cat([weights, bias.unsqueeze(2)], 2)
        bent = torch.matmul((1 - self.slope) * self.out, torch.relu(torch.bmm(weights, h)))  # [B, 1, L]
        a = bent + torch.bmm(torch.matmul(self.slope * self.out, weights), h)
        return torch.bmm(h, self._masked(a, mask.unsqueeze(1)).transpose(1, 2)).squeeze(2)

    def _one_history(self, q: Tensor, h: Tensor, mask: Tensor, row: Tensor) -> Tensor:
        """Let all rows share the first history, as the candidates of one user do.

        Then z is linear in q with weights that all rows share: z = G(h) q + g(h). They cost little, and z becomes one product.
        """
        h, mask = h[0], mask[:1]  # [L, K·D], [1, L]
        by_event = self.of_product.unsqueeze(1) * h + self.of_candidate.unsqueeze(1)  # [A, L, K·D]
        g = F.linear(self.of_event, h) + self.bias.unsqueeze(1)  # [A, L]
        z = torch.addmm(g.flatten(), q, by_event.flatten(0, 1).t())  # [B, A·L]
        bent = torch.matmul((1 - self.slope) * self.out, torch.relu(z).view(-1, *g.shape)).squeeze(1)  # [B, L]
        plain = (self.slope * self.out).t()
        a = bent + torch.addmm((plain * g).sum(0), q, (plain.unsqueeze(2) * by_event).sum(0).t())
        return torch.matmul(self._masked(a, mask), F.pad(h, (0, 1), value=1.0))

    def _masked(self, a: Tensor, mask: Tensor) -> Tensor:
        if self.softmax:
            a = torch.softmax(a.masked_fill(~mask, -1e9), -1)
        return a * mask
