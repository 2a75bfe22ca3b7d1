"""Sampling-based deep interest modeling: attention by hashing, for long histories."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from clickfleet.errors import ConfigError
from clickfleet.training.layers import OwnColumns, logits, tower
from clickfleet.training.network import NARROW, Events, Inputs, Model, Shape, TableInit


class SDIM(Model):
    """An event counts if it has the same hash as the candidate (arXiv:2205.10249).

    In each of G groups, the signature of a vector is the signs of `bits` fixed random projections. Once per history, events with
    the same signature are summed, s_g; u = 1/G Σ_g s_g/‖s_g‖ of the candidate's signatures; logit = MLP([e, x, q ∘ u, u of
    every history]). A candidate costs G look-ups, however long its history is.
    """

    rows = TableInit(embedx="uniform(-0.35,0.35)")  # large, as in din: q ∘ u shows which events are equal
    reads_histories = True
    needs_history = True
    small = NARROW
    unequal_widths = True

    @dataclass(frozen=True)
    class Config(Model.Config):
        groups: int = 16
        """Number of signatures of a vector. The more, the closer to attention."""
        bits: int = 3
        """Projections in a signature. The more, the fewer events are similar enough."""
        hidden: tuple[int, ...] = (400, 400, 400)
        """Widths of the MLP, input side first."""
        dropout: float = 0.0
        """Fraction of hidden values set to zero during training."""

    def __init__(self, config: Config, shape: Shape) -> None:
        super().__init__(config, shape)
        self.columns = OwnColumns(shape)
        if config.groups < 1 or not 1 <= config.bits <= 10:
            raise ConfigError(
                f"model.groups is {config.groups} and model.bits {config.bits}; at least 1 group and 1 to 10 bits are possible",
                "for example groups: 16, bits: 3",
            )
        self.histories = shape.histories
        self.hashed = nn.ModuleList(
            HashedSums(shape.factors_of(history.slots), config.groups, config.bits, seed)
            for seed, history in enumerate(shape.histories)
        )
        width = shape.width + 2 * sum(shape.factors_of(history.slots) for history in shape.histories)
        self.deep = tower(width, *config.hidden, shape.outputs, dropout=config.dropout)

    def forward(self, x: Inputs) -> Tensor:
        interests: list[Tensor] = []
        for history, sums in zip(self.histories, self.hashed, strict=True):
            q = x.candidate(history)
            u = sums(q, x.events(history))
            interests += [q * u, u]
        return logits(self.deep(self.columns(x.factors), x.dense, *interests))


class HashedSums(nn.Module):
    """The mean over all groups of the normalized sum of the events with the signature of q, [B, K·D].

    Projections have factors ±1, and values are rounded to 1/4096 before. So sums are exact, and ONNX Runtime finds the same signs.
    """

    projections: Tensor
    powers: Tensor

    def __init__(self, width: int, groups: int, bits: int, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        signs = torch.randint(2, (width, groups * bits), generator=generator) * 2.0 - 1.0
        self.register_buffer("projections", signs)
        self.register_buffer("powers", 2 ** torch.arange(bits), persistent=False)
        self.groups, self.size = groups, 2**bits

    def signatures(self, vectors: Tensor) -> Tensor:
        """Return the signature of each vector [N, K·D] in each group, [N, G]."""
        signs = torch.round(vectors.detach() * 4096.0) @ self.projections > 0
        return (signs.view(-1, self.groups, len(self.powers)) * self.powers).sum(2)

    def forward(self, q: Tensor, events: Events) -> Tensor:
        h = events.flat  # [U, L, W]
        signatures = self.signatures(h.flatten(0, 1)).view(len(h), -1, self.groups)  # [U, L, G]
        own = signatures.unsqueeze(3) == torch.arange(self.size, device=h.device)  # [U, L, G, 2^bits]
        own = own.flatten(2) & events.mask.unsqueeze(2)
        sums = torch.bmm(own.to(h.dtype).transpose(1, 2), h)  # [U, G·2^bits, W]
        sums = sums / (sums.square().sum(2, keepdim=True) + 1e-8).sqrt()
        row = torch.arange(len(q), device=q.device) if events.row is None else events.row
        places = (row.unsqueeze(1) * self.groups + torch.arange(self.groups, device=q.device)) * self.size
        picked = sums.flatten(0, 1).index_select(0, (places + self.signatures(q)).flatten())
        return picked.view(-1, self.groups, h.shape[2]).mean(1)
