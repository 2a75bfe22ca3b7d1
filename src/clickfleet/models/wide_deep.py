"""Wide & Deep."""

from dataclasses import dataclass

from torch import Tensor

from clickfleet.training.layers import OwnColumns, Wide, by_fan_in, logits, tower, truncated
from clickfleet.training.network import NARROW, Inputs, Model, Shape, TableInit


class WideDeep(Model):
    """logit = Σ_j w_j + a·x + b + MLP([e, x]): memorisation beside generalisation (arXiv:1606.07792)."""

    original_rows = TableInit(embedx="uniform(-1,1)")
    has_wide = True
    small = NARROW
    unequal_widths = True

    @dataclass(frozen=True)
    class Config(Model.Config):
        hidden: tuple[int, ...] = (400, 400, 400)
        """Widths of the MLP, input side first."""
        dropout: float = 0.0
        """Fraction of hidden values set to zero during training."""
        paddlerec: bool = False
        """Leave the slots out of the first-order part."""

    def __init__(self, config: Config, shape: Shape) -> None:
        super().__init__(config, shape)
        self.columns = OwnColumns(shape)
        self.dense_only = config.paddlerec
        std = max(shape.dense, 1) ** -0.5
        self.wide = Wide(shape, truncated(std) if config.paddlerec else None)
        start = by_fan_in(1.0) if config.paddlerec else None
        self.deep = tower(shape.width, *config.hidden, shape.outputs, dropout=config.dropout, init=start)

    def forward(self, x: Inputs) -> Tensor:
        wide = self.wide(None if self.dense_only else x.first, x.dense)
        return logits(wide + self.deep(self.columns(x.factors), x.dense))
