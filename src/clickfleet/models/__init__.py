"""The contract of a model: the inputs of a batch in, one logit per row out; one file per network.

A model is mathematics only: no device, file, optimizer or cluster. It declares how wide a row must be
(`row_factors`), how rows begin (`table_init`) and what it adds to the loss (`extra_loss`). Where the PaddleRec
original was defective, `paddlerec: true` in its Config gives the original's mathematics and initial values back.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from torch import Tensor, nn

from clickfleet.sections import BATCH_ROWS


class Inputs(NamedTuple):
    """What a model sees of a batch; towers see `dense` and `factors`, not `first`, unless the model says so."""

    dense: Tensor  # [B, F]
    first: Tensor  # [B, S] first-order weights, pooled per slot
    factors: Tensor  # [B, S, D] factors, pooled per slot; zeros where a slot has no key


@dataclass(frozen=True)
class Shape:
    """The sizes of `Inputs`, and the names behind them where a model needs them."""

    dense: int
    slots: int
    dim: int
    """The factor width of one field, `table.dim`."""
    factors: int
    """D, the model's `row_factors`."""
    slot_names: tuple[str, ...] = ()
    dense_names: tuple[str, ...] = ()
    bucketed: tuple[int, ...] = ()
    """Positions of the slots that were derived from a dense column."""

    @property
    def width(self) -> int:
        """The width of all factors and dense values side by side."""
        return self.slots * self.factors + self.dense


class TableInit(NamedTuple):
    """Initial values of new rows: `zero`, `uniform(a,b)`, `normal(s)` or `truncated(s)`."""

    embed: str = "zero"
    embedx: str = "uniform(-0.001,0.001)"


SMALL = "small"
"""Stands in a `TableInit` for the initial values of most originals: normal with σ = 0.1/√d, cut off at 2σ."""


class Model(nn.Module):
    """One network; its nested `Config` holds its settings, and `__init__(config, shape)` builds it."""

    rows: ClassVar[TableInit] = TableInit(embedx="uniform(-0.05,0.05)")
    original_rows: ClassVar[TableInit] = TableInit()
    """The same under `paddlerec`, as is the next."""
    original_epsilon: ClassVar[float] = 1e-4
    original_l2_rows: ClassVar[float] = 0.0
    has_wide: ClassVar[bool] = False
    """Whether the formula has a first-order part Σ_j w_j + a·x + b."""

    row_rule: ClassVar[dict[str, Any]] = {}
    """The `table.rule` of this model where the configuration has none."""

    @dataclass(frozen=True)
    class Config:
        wide: bool | None = field(default=None, kw_only=True)
        """true: a first-order part is added to the logit of a model that has none. By default, as its paper has it."""

    def __init__(self, config: Any, shape: Shape) -> None:
        super().__init__()

    @classmethod
    def batch_rows(cls, config: Any) -> int:
        """Rows of a step where the whole configuration does not say."""
        return BATCH_ROWS

    @classmethod
    def row_factors(cls, config: Any, dim: int, slots: int, dense: int) -> int:
        """D: how many factors a row holds for fields of width `dim`."""
        return dim

    @classmethod
    def table_init(cls, config: Any, dim: int) -> TableInit:
        """How rows of this model begin when the configuration does not say."""
        start = cls.original_rows if getattr(config, "paddlerec", False) else cls.rows
        return TableInit(*(f"truncated({0.1 / dim**0.5:.8g})" if part == SMALL else part for part in start))

    @classmethod
    def loss_epsilon(cls, config: Any) -> float:
        """What the log loss adds inside its logarithms unless the configuration says."""
        return cls.original_epsilon if getattr(config, "paddlerec", False) else 0.0

    @classmethod
    def l2_rows(cls, config: Any) -> float:
        """L2 on the rows of a batch unless the configuration says."""
        return cls.original_l2_rows if getattr(config, "paddlerec", False) else 0.0

    def extra_loss(self) -> Tensor | None:
        """Regularisers of the last forward pass, on the scale of the mean loss of a row."""
        return None

    def own_steps(self, learner: Any, flats: list[Any]) -> list[Any] | None:
        """The steps of trainer threads, of a model that is no function of `Inputs`."""
        return None

    def attached(self, config: Any) -> dict[str, bytes]:
        """Files that a checkpoint of this model must hold besides its tensors."""
        return {}

    if TYPE_CHECKING:

        def __call__(self, x: Inputs) -> Tensor: ...

    def forward(self, x: Inputs) -> Tensor:  # logits [B]
        raise NotImplementedError
