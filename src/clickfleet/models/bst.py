"""Behavior sequence transformer."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clickfleet.errors import ConfigError
from clickfleet.training.layers import OwnColumns, by_fan_in, logits, tower
from clickfleet.training.network import NARROW, Events, Inputs, Model, Shape


class BST(Model):
    """The candidate stands behind the events and attends to them in a transformer (arXiv:1905.06874).

    s = e + position, counted from the candidate backwards. A block: s ← norm(s + heads of softmax(Q s (K s)ᵀ/√d) V s),
    s ← norm(s + MLP(s)). logit = MLP([e, x, s of the candidate for every history]).
    Events attend to events only, so all but the candidate's part is computed once per history.
    """

    reads_histories = True
    needs_history = True
    small = NARROW
    unequal_widths = True

    @dataclass(frozen=True)
    class Config(Model.Config):
        blocks: int = 1
        """Number of blocks of the transformer."""
        heads: int = 2
        """Heads of the attention."""
        width: int = 16
        """Width of a head."""
        inner: int = 64
        """Hidden units of the MLP in a block."""
        hidden: tuple[int, ...] = (400, 400, 400)
        """Widths of the MLP above, input side first."""
        dropout: float = 0.0
        """Fraction of hidden values set to zero during training."""

    def __init__(self, config: Config, shape: Shape) -> None:
        super().__init__(config, shape)
        self.columns = OwnColumns(shape)
        if min(config.blocks, config.heads, config.width, config.inner) < 1:
            raise ConfigError(
                "model.blocks, heads, width and inner must be at least 1",
                "for example blocks: 1, heads: 2, width: 16, inner: 64",
            )
        self.histories = shape.histories
        widths = [shape.factors_of(history.slots) for history in shape.histories]
        self.transformers = nn.ModuleList(
            Transformer(config, width, history.max) for width, history in zip(widths, shape.histories, strict=True)
        )
        self.deep = tower(shape.width + sum(widths), *config.hidden, shape.outputs, dropout=config.dropout)

    def forward(self, x: Inputs) -> Tensor:
        interests = [
            transformer(x.candidate(history), x.events(history))
            for history, transformer in zip(self.histories, self.transformers, strict=True)
        ]
        return logits(self.deep(self.columns(x.factors), x.dense, *interests))


class Transformer(nn.Module):
    """The candidate [B, W] after all blocks over the events of its history."""

    def __init__(self, config: BST.Config, width: int, most: int) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.empty(most + 1, width))  # of the candidate, of the last event, …
        nn.init.normal_(self.positions, std=0.02)
        self.blocks = nn.ModuleList(TransformerBlock(config, width) for _ in range(config.blocks))

    def forward(self, q: Tensor, events: Events) -> Tensor:
        places = events.length.unsqueeze(1) - torch.arange(events.factors.shape[1], device=events.length.device)
        s = events.flat + self.positions[places.clamp(0, len(self.positions) - 1)]
        mask = events.mask
        q = q + self.positions[0]
        for i, block in enumerate(self.blocks):
            assert isinstance(block, TransformerBlock)
            key, value = block.key(s), block.value(s)  # once per history
            seen = torch.cat([events.by_row(mask), torch.ones_like(q[:, :1]).bool()], 1)
            keys = torch.cat([events.by_row(key), block.key(q).unsqueeze(1)], 1)
            values = torch.cat([events.by_row(value), block.value(q).unsqueeze(1)], 1)
            q = block(q.unsqueeze(1), keys, values, seen).squeeze(1)
            if i < len(self.blocks) - 1:
                s = block(s, key, value, mask)
        return q


class TransformerBlock(nn.Module):
    """One block of a transformer, normalized after each half."""

    def __init__(self, config: BST.Config, width: int) -> None:
        super().__init__()
        all_heads = config.heads * config.width
        self.query, self.key, self.value = (nn.Linear(width, all_heads, bias=False) for _ in range(3))
        self.out, self.inner, self.outer = (
            nn.Linear(all_heads, width),
            nn.Linear(width, config.inner),
            nn.Linear(config.inner, width),
        )
        for layer in (self.query, self.key, self.value, self.out, self.inner, self.outer):
            by_fan_in(1.0)(layer.weight)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.heads, self.scale, self.dropout = config.heads, 1 / math.sqrt(config.width), config.dropout

    def forward(self, s: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        """Return s [N, M, W] after attention to keys and values [N, L, heads·width], of which mask [N, L] says which exist."""
        q, k, v = (self._by_head(part) for part in (self.query(s), keys, values))  # [N, heads, …, width]
        a = (q @ k.transpose(2, 3) * self.scale).masked_fill(~mask[:, None, None], -1e9)
        found = (torch.softmax(a, 3) @ v).transpose(1, 2).flatten(2)
        s = self.first(s + self._dropped(self.out(found)))
        return self.second(s + self._dropped(self.outer(F.leaky_relu(self.inner(s)))))  # type: ignore[no-any-return]

    def _by_head(self, x: Tensor) -> Tensor:
        return x.view(len(x), -1, self.heads, x.shape[2] // self.heads).transpose(1, 2)

    def _dropped(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training)
