"""DLRM."""

from dataclasses import dataclass

import torch
from torch import Tensor

from clickfleet.errors import ConfigError
from clickfleet.training.layers import Pairs, by_fan_in, logits, tower, truncated
from clickfleet.training.network import Inputs, Model, Shape, TableInit


class DLRM(Model):
    """Products of all pairs of slot vectors and of an MLP over the dense values (arXiv:1906.00091).

    u = MLP_bottom(x) ∈ R^d; T = [e_1, …, e_S, u]; logit = MLP_top([u, ⟨T_i, T_j⟩ for i < j])
    """

    rows = TableInit(embedx="normal(0.01)")
    original_rows = TableInit(embedx="truncated(1)")
    original_epsilon = 0.0  # softmax cross-entropy

    @dataclass(frozen=True)
    class Config(Model.Config):
        bottom: tuple[int, ...] = (512, 256, 64)
        """Widths of the MLP over the dense values. A last layer of width d follows."""
        top: tuple[int, ...] = (512, 256)
        """Widths of the MLP over the products."""
        paddlerec: bool = False
        """ReLU and batch norm after every layer, including the two output logits: a defect of the original."""

    def __init__(self, config: Config, shape: Shape) -> None:
        super().__init__(config, shape)
        if not shape.dense:
            raise ConfigError(
                "model dlrm needs dense columns for its bottom MLP, but the schema has none", "use dcn_v2 instead"
            )
        self.pairs = Pairs(shape.slots + 1)
        self.original = original = config.paddlerec
        start = by_fan_in(1.0, truncated) if original else None
        width = shape.factors
        self.bottom = tower(shape.dense, *config.bottom, width, relu_last=True, batch_norm=original, init=start)
        outputs = 2 if original else shape.outputs
        self.top = tower(
            width + len(self.pairs), *config.top, outputs, relu_last=original, batch_norm=original, init=start
        )

    def forward(self, x: Inputs) -> Tensor:
        u = self.bottom(x.dense)
        if len(self.pairs):
            t = torch.cat([x.factors, u.unsqueeze(1)], 1)
            out = self.top(u, (t @ t.transpose(1, 2))[:, self.pairs.left, self.pairs.right])
        else:
            out = self.top(u)
        # Softmax over two logits is the sigmoid of their difference, so the difference is our logit.
        return out[:, 1] - out[:, 0] if self.original else logits(out)
