"""The contract of a model: it maps the inputs of a batch to one logit per row, or to one per row and label.

A model contains only mathematics: no device, file, optimizer or cluster. It declares the width of its rows
(`row_factors`), their initial values (`table_init`) and its addition to the loss (`extra_loss`). Where our formula
corrects a defect of PaddleRec's, `paddlerec: true` in the Config restores the original formula and initial values.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from clickfleet.config.sections import BATCH_ROWS
from clickfleet.data.schema import Label, Schema
from clickfleet.errors import ConfigError

if TYPE_CHECKING:
    from clickfleet.training.learner import Learner
    from clickfleet.training.optimizer import Flat
    from clickfleet.training.step import Step


class Events(NamedTuple):
    """The events of one history. Consecutive rows with the same history share it: row b has the history `row[b]` of U."""

    factors: Tensor  # [U, L, K, D] of K slots; zeros behind the last event
    length: Tensor  # [U] number of events
    row: Tensor | None = None  # [B]; None: row b has the history b
    columns: tuple[int, ...] | None = None  # of K·D, if slots have unequal widths: those that belong to them

    @property
    def flat(self) -> Tensor:
        """All factors of each event, [U, L, K·D], without those beyond the width of a slot."""
        factors = self.factors.flatten(2)
        return factors if self.columns is None else factors[:, :, list(self.columns)]

    @property
    def mask(self) -> Tensor:
        """Where there is an event, [U, L]."""
        return torch.arange(self.factors.shape[1], device=self.length.device) < self.length.unsqueeze(1)

    def by_row(self, x: Tensor) -> Tensor:
        """Return values of each history [U, …] for every row of the batch, [B, …]."""
        return x if self.row is None else x.index_select(0, self.row)


class Inputs(NamedTuple):
    """The inputs of a model for one batch. MLPs usually see `dense` and `factors` but not `first`."""

    dense: Tensor  # [B, F]
    first: Tensor  # [B, S] first-order weights, pooled per slot
    factors: Tensor  # [B, S, D] factors, pooled per slot; zeros for a slot without keys
    histories: Mapping[str, Events] = MappingProxyType({})
    """By name, if the model reads histories. Otherwise each column of a history is one more slot, pooled by its mean."""

    def candidate(self, history: HistoryShape) -> Tensor:
        """Return the factors that the slots of a history have in the row itself, [B, K·D]."""
        factors = self.factors[:, list(history.slots)].flatten(1)
        return factors if history.columns is None else factors[:, list(history.columns)]

    def events(self, history: HistoryShape) -> Events:
        """Return the events of a history."""
        events = self.histories[history.name]
        return events if history.columns is None else events._replace(columns=history.columns)

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors by the names that an exported graph uses."""
        named = {"dense": self.dense, "first": self.first, "factors": self.factors}
        for name, events in self.histories.items():
            rows = torch.arange(len(self.dense)) if events.row is None else events.row
            named |= {f"{name}.factors": events.factors, f"{name}.length": events.length, f"{name}.row": rows}
        return named

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Inputs:
        """Return the inputs that `tensors` returned."""
        names = [name.removesuffix(".length") for name in tensors if name.endswith(".length")]
        histories = {
            name: Events(tensors[f"{name}.factors"], tensors[f"{name}.length"], tensors[f"{name}.row"])
            for name in names
        }
        return cls(tensors["dense"], tensors["first"], tensors["factors"], histories)


@dataclass(frozen=True)
class HistoryShape:
    """The sizes of a history."""

    name: str
    slots: tuple[int, ...]
    """Positions of the slots whose rows its events use, in `Inputs.factors`: there is the candidate."""
    max: int
    """The most events of a row."""
    columns: tuple[int, ...] | None = None
    """The places of its slots' own columns in their factors [K, D], flattened, if slots have unequal widths."""


@dataclass(frozen=True)
class Shape:
    """The sizes of `Inputs` and the names of the columns."""

    dense: int
    slots: int
    dim: int
    """Factors per field: `table.dim`."""
    factors: int
    """Factors per row: D, the model's `row_factors`. If slots have rows of unequal widths, that of the widest."""
    slot_names: tuple[str, ...] = ()
    dense_names: tuple[str, ...] = ()
    bucketed: tuple[int, ...] = ()
    """Positions of the slots that are derived from a dense column."""
    histories: tuple[HistoryShape, ...] = ()
    """The histories in `Inputs.histories`."""
    tasks: tuple[Label, ...] = (Label("label"),)
    widths: tuple[int, ...] | None = None
    """Factors per row of each slot, if they are not all equal. The factors of a slot end with zeros beyond its width."""

    @property
    def outputs(self) -> int:
        """The number of labels, for each of which the model returns a logit."""
        return len(self.tasks)

    @property
    def width(self) -> int:
        """The width of all factors and dense values, concatenated."""
        return self.factors_of(range(self.slots)) + self.dense

    def factors_of(self, slots: Iterable[int]) -> int:
        """Return the width of the factors of these slots, concatenated."""
        return sum(self.factors if self.widths is None else self.widths[slot] for slot in slots)

    def columns_of(self, slots: Sequence[int]) -> tuple[int, ...] | None:
        """Return the places of the slots' own columns in their factors [K, D], flattened; None if the widths are equal.

        >>> Shape(0, 2, 3, 3, widths=(1, 3)).columns_of((0, 1))
        (0, 3, 4, 5)
        """
        if self.widths is None:
            return None
        return tuple(i * self.factors + k for i, slot in enumerate(slots) for k in range(self.widths[slot]))


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
    reads_histories: ClassVar[bool] = False
    """Whether the model gets `Inputs.histories`. If not, every column of a history is one more slot, pooled by its mean."""
    needs_history: ClassVar[bool] = False
    """Whether the model is defined only for data with a history."""
    unequal_widths: ClassVar[bool] = False
    """Whether slots may have rows of unequal widths (`table.dims`). Such a model reads the factors through `OwnColumns`. Models that
    multiply the factors of two slots need equal widths."""
    least_labels: ClassVar[int] = 1
    """The fewest labels for which the model is defined."""
    entire_space: ClassVar[bool] = False
    """Whether a label with `given` is learned from all rows, by the product of the probabilities, and not only from rows where the
    other label is 1."""

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
    def takes_unequal_widths(cls, config: Any) -> bool:
        """Return whether slots may have rows of unequal widths with these settings."""
        return cls.unequal_widths

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
    def conditional(cls, config: Any) -> float:
        """Return the weight of the loss of a label in rows where that in `given` is 1, beside the loss in all rows (`entire_space`)."""
        return 0.0

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

    def forward(self, x: Inputs) -> Tensor:  # logits [B], or [B, T] for T labels
        """Return one logit per row, or one per row and label. Every model defines it."""
        raise NotImplementedError


def pooled_columns(kind: type[Model], schema: Schema) -> int:
    """Return the number of key columns that a model sees pooled: the slots, and the columns of histories it does not read."""
    return len(schema.slots) if kind.reads_histories else len(schema.key_columns)


def shape_of(kind: type[Model], schema: Schema, dim: int, widths: Sequence[int]) -> Shape:
    """Return the sizes of a model's inputs. Refuse data for which the model is not defined. `widths` are the factors of each slot."""
    name = kind.__name__
    if kind.needs_history and not schema.histories:
        raise ConfigError(
            f"the model {name} needs a history, but the schema has none",
            "describe one in data.schema, such as histories: [{name: clicked, slots: [item], columns: [clicked_items]}]",
        )
    if len(schema.tasks) < kind.least_labels:
        raise ConfigError(
            f"the model {name} needs {kind.least_labels} labels, but the schema has {len(schema.tasks)}",
            "name them in data.schema, such as labels: {click: {}, buy: {given: click}}",
        )
    columns = schema.key_columns[: pooled_columns(kind, schema)]
    places = {slot.name: i for i, slot in enumerate(schema.slots)}
    own = tuple(widths[schema.slot_numbers[column]] for column in range(len(columns)))
    factors = max(widths)
    shape = Shape(
        len(schema.dense),
        len(columns),
        dim,
        factors,
        tuple(slot.name for slot in columns),
        tuple(column.name for column in schema.dense),
        tuple(i for i, slot in enumerate(columns) if slot.bucket is not None),
        (),
        schema.tasks,
        own if any(width != factors for width in widths) else None,
    )
    if not kind.reads_histories:
        return shape
    histories = [(history, tuple(places[slot] for slot in history.slots)) for history in schema.histories]
    shapes = (HistoryShape(each.name, slots, each.max, shape.columns_of(slots)) for each, slots in histories)
    return replace(shape, histories=tuple(shapes))
