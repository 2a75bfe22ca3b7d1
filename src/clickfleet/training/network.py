"""The contract of a model: it maps the inputs of a batch to one logit per row.

A model contains only mathematics: no device, file, optimizer or cluster. It declares the width of its rows
(`row_factors`), their initial values (`table_init`) and its addition to the loss (`extra_loss`). Where our formula
corrects a defect of PaddleRec's, `paddlerec: true` in the Config restores the original formula and initial values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from torch import Tensor, nn

from clickfleet.config.sections import BATCH_ROWS

if TYPE_CHECKING:
    from clickfleet.training.learner import Learner
    from clickfleet.training.optimizer import Flat
    from clickfleet.training.step import Step


class Inputs(NamedTuple):
    """The inputs of a model for one batch. MLPs usually see `dense` and `factors` but not `first`."""

    dense: Tensor  # [B, F]
    first: Tensor  # [B, S] first-order weights, pooled per slot
    factors: Tensor  # [B, S, D] factors, pooled per slot; zeros for a slot without keys


@dataclass(frozen=True)
class Shape:
    """The sizes of `Inputs` and the names of the columns."""

    dense: int
    slots: int
    dim: int
    """Factors per field: `table.dim`."""
    factors: int
    """Factors per row: D, the model's `row_factors`."""
    slot_names: tuple[str, ...] = ()
    dense_names: tuple[str, ...] = ()
    bucketed: tuple[int, ...] = ()
    """Positions of the slots that are derived from a dense column."""

    @property
    def width(self) -> int:
        """The width of all factors and dense values, concatenated."""
        return self.slots * self.factors + self.dense


class TableInit(NamedTuple):
    """Initial values of new rows: `zero`, `uniform(a,b)`, `normal(s)` or `truncated(s)`."""

    embed: str = "zero"
    embedx: str = "uniform(-0.001,0.001)"


SMALL = "small"
"""In a `TableInit`: the initial values of most originals, normal with σ = 0.1/√d, truncated at 2σ."""


NARROW: Mapping[str, object] = MappingProxyType({"hidden": [128, 64]})
"""Settings for small logs of models whose MLP has several hundred units per layer."""


class Model(nn.Module):
    """Base class of networks. The nested `Config` holds the settings; `__init__(config, shape)` builds the network."""

    rows: ClassVar[TableInit] = TableInit(embedx="uniform(-0.05,0.05)")
    original_rows: ClassVar[TableInit] = TableInit()
    """Initial values of rows with `paddlerec: true`."""
    original_epsilon: ClassVar[float] = 1e-4
    """Default of `train.loss.epsilon` with `paddlerec: true`."""
    original_l2_rows: ClassVar[float] = 0.0
    """Default of `train.loss.l2_rows` with `paddlerec: true`."""
    has_wide: ClassVar[bool] = False
    """Whether the formula contains a first-order part Σ_j w_j + a·x + b."""

    scores_rows: ClassVar[bool] = True
    """Whether the model scores rows of data. If not, it cannot be evaluated on test rows, exported or published."""
    reads_vocabulary: ClassVar[bool] = False
    """Whether the model needs `data.vocabulary`."""
    small: ClassVar[Mapping[str, object]] = {}
    """Settings of the model for small logs that differ from its defaults."""
    row_rule: ClassVar[Mapping[str, object]] = {}
    """The default of `table.rule` for this model."""

    @dataclass(frozen=True)
    class Config:
        wide: bool | None = field(default=None, kw_only=True)
        """true: add a first-order part to the logit of a model without one. Default: as in the model's paper."""

    def __init__(self, config: Any, shape: Shape) -> None:
        super().__init__()

    @classmethod
    def batch_rows(cls, config: Any) -> int:
        """Return the default of `data.batch_size`. `config` is the whole configuration."""
        return BATCH_ROWS

    @classmethod
    def row_factors(cls, config: Any, dim: int, slots: int, dense: int) -> int:
        """Return D, the number of factors of a row, for fields of width `dim`."""
        return dim

    @classmethod
    def table_init(cls, config: Any, dim: int) -> TableInit:
        """Return the default initial values of rows."""
        start = cls.original_rows if getattr(config, "paddlerec", False) else cls.rows
        return TableInit(*(f"truncated({0.1 / dim**0.5:.8g})" if part == SMALL else part for part in start))

    @classmethod
    def loss_epsilon(cls, config: Any) -> float:
        """Return the default of the number that the log loss adds inside its logarithms."""
        return cls.original_epsilon if getattr(config, "paddlerec", False) else 0.0

    @classmethod
    def l2_rows(cls, config: Any) -> float:
        """Return the default strength of L2 on the rows of a batch."""
        return cls.original_l2_rows if getattr(config, "paddlerec", False) else 0.0

    def extra_loss(self) -> Tensor | None:
        """Return the regularisers of the last forward pass, on the scale of the mean loss of a row."""
        return None

    def findings(self) -> dict[str, float]:
        """Return what training has found out, as named numbers, most important first. `clickfleet inspect` shows them."""
        return {}

    def steps(self, learner: Learner, flats: list[Flat]) -> list[Step]:
        """Return one step per trainer thread; each has its own `Flat`. Override it if the model is not a function of `Inputs`."""
        from clickfleet.training.step import Step

        return [Step.of(learner, flat) for flat in flats]

    @classmethod
    def checkpoint_files(cls, config: Any) -> dict[str, bytes]:
        """Return the files that a checkpoint of this model must hold besides its tensors."""
        return {}

    if TYPE_CHECKING:

        def __call__(self, x: Inputs) -> Tensor: ...

    def forward(self, x: Inputs) -> Tensor:  # logits [B]
        """Return one logit per row. Every model defines it."""
        raise NotImplementedError
