"""CTR-DNN."""

from dataclasses import dataclass

from torch import Tensor

from clickfleet.training.layers import OwnColumns, by_fan_in, logits, tower
from clickfleet.training.network import NARROW, Inputs, Model, Shape, TableInit


class DNN(Model):
    """logit = MLP([e, x]): the deep part of Wide & Deep alone (arXiv:1606.07792)."""

    original_rows = TableInit(embedx="uniform(-1,1)")
    original_epsilon = 0.0  # softmax cross-entropy
    small = NARROW
    unequal_widths = True

    @dataclass(frozen=True)
    class Config(Model.Config):
        hidden: tuple[int, ...] = (400, 400, 400)
        """Widths of the MLP, input side first."""
        dropout: float = 0.0
        """Fraction of hidden values set to zero during training."""
        batch_norm: bool = False
        """Normalise each hidden layer over the batch."""
        paddlerec: bool = False
        """Two outputs with softmax; rows start uniform in ±1."""

    def __init__(self, config: Config, shape: Shape) -> None:
        super().__init__(config, shape)
        self.columns = OwnColumns(shape)
        start = by_fan_in(1.0) if config.paddlerec else None
        outputs = 2 if config.paddlerec else shape.outputs
        self.original = config.paddlerec
        self.deep = tower(
            shape.width, *config.hidden, outputs, dropout=config.dropout, batch_norm=config.batch_norm, init=start
        )

    def forward(self, x: Inputs) -> Tensor:
        out = self.deep(self.columns(x.factors), x.dense)
        # Softmax over two logits is the sigmoid of their difference, so the difference is our logit.
        return out[:, 1] - out[:, 0] if self.original else logits(out)
