"""An MLP for online learning over many multi-valued slots."""

from dataclasses import dataclass

from torch import Tensor

from clickfleet.training.layers import OwnColumns, by_fan_in, logits, tower
from clickfleet.training.network import NARROW, Inputs, Model, Shape


class SlotDNN(Model):
    """logit = MLP([w, e, x]): the MLP sees the whole row of each slot, including the first-order weight.

    The network of PaddleRec's streaming example, after the deep part of arXiv:1606.07792.
    """

    small = NARROW
    unequal_widths = True

    @dataclass(frozen=True)
    class Config(Model.Config):
        hidden: tuple[int, ...] = (512, 256, 128)
        """Widths of the MLP, input side first."""
        dropout: float = 0.0
        """Fraction of hidden values set to zero during training."""
        paddlerec: bool = False
        """Clip the logit at ±15. Weights start as N(0, (0.2/√fan_in)²)."""

    def __init__(self, config: Config, shape: Shape) -> None:
        super().__init__(config, shape)
        self.columns = OwnColumns(shape)
        start = by_fan_in(0.2) if config.paddlerec else None
        self.deep = tower(shape.slots + shape.width, *config.hidden, shape.outputs, dropout=config.dropout, init=start)
        self.bound = 15.0 if config.paddlerec else None

    def forward(self, x: Inputs) -> Tensor:
        out = logits(self.deep(x.first, self.columns(x.factors), x.dense))
        return out if self.bound is None else out.clamp(-self.bound, self.bound)
