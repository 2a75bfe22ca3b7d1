"""Progressive layered extraction."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, cast

import torch
from torch import Tensor, nn

from clickfleet.errors import ConfigError
from clickfleet.training.layers import OwnColumns, side_by_side, tower
from clickfleet.training.network import Inputs, Model, Shape


class PLE(Model):
    """Each label has experts of its own beside the shared ones, in several levels (Tang et al., RecSys 2020).

    Level n: label t mixes its own and the shared experts of the level by softmax(G_t h_t), the shared part mixes all experts
    by softmax(G_s h_s); every expert is an MLP of its part's result of the level below, at first [e, x]. The last level has no
    shared mix. logit_t = MLP_t(h_t).
    """

    least_labels = 2
    small: ClassVar[Mapping[str, object]] = {"expert": [64], "hidden": [32]}
    unequal_widths = True

    @dataclass(frozen=True)
    class Config(Model.Config):
        levels: int = 2
        """Number of levels; 1 is customized gate control, CGC."""
        shared: int = 2
        """Shared experts of a level."""
        own: int = 2
        """Experts of each label in a level."""
        expert: tuple[int, ...] = (128,)
        """Widths of an expert, input side first."""
        hidden: tuple[int, ...] = (64,)
        """Widths of the tower of each label."""
        dropout: float = 0.0
        """Fraction of hidden values set to zero during training."""

    def __init__(self, config: Config, shape: Shape) -> None:
        super().__init__(config, shape)
        self.columns = OwnColumns(shape)
        if min(config.levels, config.shared, config.own) < 1 or not config.expert:
            raise ConfigError(
                "ple needs at least one level, one shared expert, one expert per label and one layer in each",
                "for example levels: 2, shared: 2, own: 2, expert: [128]",
            )
        self.levels = nn.ModuleList(
            Level(config, shape.outputs, shape.width if n == 0 else config.expert[-1], n == config.levels - 1)
            for n in range(config.levels)
        )
        self.towers = nn.ModuleList(
            tower(config.expert[-1], *config.hidden, 1, dropout=config.dropout) for _ in shape.tasks
        )

    def forward(self, x: Inputs) -> Tensor:
        parts = [side_by_side(self.columns(x.factors), x.dense)] * (len(self.towers) + 1)
        for level in self.levels:
            parts = level(parts)
        return torch.cat([tower(part) for tower, part in zip(self.towers, parts, strict=True)], 1)


class Level(nn.Module):
    """One level: from a part [B, n] for each label and a shared one to the same, without the shared one in the last level."""

    def __init__(self, config: PLE.Config, labels: int, width: int, last: bool) -> None:
        super().__init__()

        def experts(count: int) -> nn.ModuleList:
            return nn.ModuleList(
                tower(width, *config.expert, dropout=config.dropout, relu_last=True) for _ in range(count)
            )

        self.own = nn.ModuleList(experts(config.own) for _ in range(labels))
        self.shared = experts(config.shared)
        counts = [config.own + config.shared] * labels + ([] if last else [config.own * labels + config.shared])
        self.gates = nn.ModuleList(nn.Linear(width, count) for count in counts)
        for gate in self.gates:
            assert isinstance(gate, nn.Linear)
            nn.init.zeros_(gate.weight)  # all experts count alike at first
            nn.init.zeros_(gate.bias)

    def forward(self, parts: list[Tensor]) -> list[Tensor]:
        own = [
            [expert(part) for expert in cast(nn.ModuleList, experts)]
            for experts, part in zip(self.own, parts[:-1], strict=True)
        ]
        shared = [expert(parts[-1]) for expert in self.shared]
        mixes = [*([*mine, *shared] for mine in own), [*(expert for mine in own for expert in mine), *shared]]
        return [
            torch.bmm(torch.softmax(gate(part), 1).unsqueeze(1), torch.stack(mix, 1)).squeeze(1)
            for gate, part, mix in zip(self.gates, parts, mixes, strict=False)  # the last level has no shared gate
        ]
