"""Everything that is trained: the rows of the table and the dense network, with their loss and optimizer."""

from __future__ import annotations

import dataclasses
from typing import Any, TypedDict

import torch
from torch import Tensor

from clickfleet.config import plugins, sections
from clickfleet.config.load import Config, checked
from clickfleet.config.plugins import find
from clickfleet.data.schema import Schema
from clickfleet.errors import CheckpointError, ConfigError
from clickfleet.store.policy import Policy
from clickfleet.store.rules import Rule, rule
from clickfleet.store.table import Table
from clickfleet.training import devices
from clickfleet.training.layers import Wide
from clickfleet.training.losses import Loss
from clickfleet.training.network import Inputs, Model, Shape
from clickfleet.training.optimizer import Flat, Optimizer
from clickfleet.training.step import Step


class LearnerFacts(TypedDict):
    """Schema and model settings, which every saved copy of the model carries."""

    schema: dict[str, object]
    model: dict[str, object]


class Learner:
    """Table, network, loss and optimizer of a configuration and a schema. Equal seeds give equal initial values."""

    def __init__(
        self, config: Config, schema: Schema, table: Table | None = None, device: torch.device | None = None
    ) -> None:
        self.device = devices.find(config.train.device) if device is None else device
        kind, settings = network_of(config)
        dim, factors = config.table.dim, row_factors(config, schema)
        self.shape = Shape(
            len(schema.dense),
            len(schema.slots),
            dim,
            factors,
            tuple(slot.name for slot in schema.slots),
            tuple(column.name for column in schema.dense),
            tuple(i for i, slot in enumerate(schema.slots) if slot.bucket is not None),
        )
        self.config, self.schema = dataclasses.replace(config, table=table_settings(config)), schema
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.train.seed)
            model = build_model(kind, settings, self.shape)  # on the CPU: equal values everywhere
            self.model = model.to(self.device)
        self.table = table or new_table(config, schema)
        if self.table.factors != factors:
            raise CheckpointError(
                f"the saved rows have {self.table.factors} factors, but {config.model.name} with table.dim {dim} needs {factors}",
                "use the model settings of the saved run",
            )
        self.flat = Flat(self.model)
        self.optimizer = Optimizer(config.dense, self.flat.values)
        self.loss = Loss(config.train.loss, kind.loss_epsilon(settings))
        l2_rows = config.train.loss.l2_rows
        self.l2_rows = kind.l2_rows(settings) if l2_rows is None else l2_rows

    @property
    def facts(self) -> LearnerFacts:
        return {"schema": self.schema.to_dict(), "model": model_spec(self.config)}

    def steps(self, threads: int) -> list[Step]:
        """Return one step per trainer thread. All use the same weights."""
        self.loss.load()
        return self.model.steps(self, [self.flat, *(self.flat.replica() for _ in range(threads - 1))])

    def dense(self) -> dict[str, Tensor]:
        """Return a copy of the network's parameters and buffers, by name."""
        return {name: _copy(tensor) for name, tensor in self.model.state_dict().items()}

    def restore_dense(self, saved: dict[str, Tensor]) -> None:
        """Load saved parameters and buffers. Names and shapes must match."""
        tensors = self.model.state_dict()
        if tensors.keys() != saved.keys() or any(tensors[name].shape != saved[name].shape for name in tensors):
            raise CheckpointError(
                "the saved dense weights do not match the names or shapes of this model's",
                "use the model settings of the saved run, or start a new run from it with train.init_from",
            )
        with torch.no_grad():
            for name, tensor in tensors.items():
                tensor.copy_(saved[name])  # in place: the parameters are views of one vector

    def adopt_dense(self, saved: dict[str, Tensor]) -> list[str]:
        """Load the tensors with equal name and shape. Return the names of the others, which keep their initial values."""
        tensors = self.model.state_dict()
        fit = {name for name in tensors if name in saved and saved[name].shape == tensors[name].shape}
        self.restore_dense({name: saved[name] if name in fit else tensors[name] for name in tensors})
        return [name for name in tensors if name not in fit]

    def optimizer_state(self) -> dict[str, Tensor]:
        """Return the state of the optimizer, as `state/parameter`, and its number of steps."""
        state = self.optimizer.state()
        named = {"steps": state.pop("steps")}
        for kept, vector in state.items():
            named |= {f"{kept}/{name}": _copy(view) for name, view in self.flat.views(vector).items()}
        return named

    def restore_optimizer(self, named: dict[str, Tensor]) -> None:
        state = {kept: torch.zeros_like(self.flat.values) for kept in self.optimizer.kept}
        expected = {"steps", *(f"{kept}/{name}" for kept in state for name in self.flat.spans)}
        if expected != named.keys():
            raise CheckpointError(
                f"the saved optimizer state does not fit {self.config.dense.optimizer} over this model",
                "resume with the dense.optimizer and model of the saved run, or start a new run with train.init_from",
            )
        for kept, vector in state.items():
            for name, view in self.flat.views(vector).items():
                view.copy_(named[f"{kept}/{name}"])
        self.optimizer.restore({"steps": named["steps"], **state})


def network_of(config: Config) -> tuple[type[Model], Any]:
    """Return the class of the configured model, and its settings."""
    kind: type[Model] = find("models", config.model, Model)
    return kind, checked(kind.Config, config.model.settings, "model", config.model.name)


def row_factors(config: Config, schema: Schema) -> int:
    """Return how many factors the configured model needs in each row."""
    kind, settings = network_of(config)
    dim, slots, dense = config.table.dim, len(schema.slots), len(schema.dense)
    if not dim and kind.row_factors(settings, 1, slots, dense):
        raise ConfigError(
            f"model {config.model.name} needs factors, but table.dim is 0",
            "set table.dim to 1 or more, or use the model lr",
        )
    return kind.row_factors(settings, dim, slots, dense)


def model_spec(config: Config) -> dict[str, object]:
    """Return the description of the configured model, as checkpoints and published entries hold it."""
    return {"name": config.model.name, "dim": config.table.dim, **config.model.settings}


def table_spec(config: Config, schema: Schema) -> dict[str, Any]:
    """Return the description of the configured table. `Table.like` makes one of it."""
    return new_table(config, schema).describe()


def table_settings(config: Config) -> sections.TableSettings:
    """Return the section `table`, with the default rule of the model unless the user named a rule."""
    kind, _ = network_of(config)
    return config.table.with_rule(kind.row_rule) if kind.row_rule else config.table


def new_table(config: Config, schema: Schema) -> Table:
    """Return the configured table, empty. The initial values are the model's unless the section sets others."""
    kind, settings = network_of(config)
    init, table = kind.table_init(settings, config.table.dim), table_settings(config)
    policy = {field.name for field in dataclasses.fields(Policy)} - {"admission"}
    return Table(
        row_factors(config, schema),
        rule=_rule(table.rule),
        embed_rule=None if table.embed_rule is None else _rule(table.embed_rule),
        init=table.init.embedx or init.embedx,
        embed_init=table.init.embed or init.embed,
        preset=table.preset,
        admission=table.admission,
        seed=config.train.seed,
        padding_key=table.padding_key,
        memory_limit=table.memory_limit,
        snapshot_reserve=table.snapshot_reserve,
        **{name: value for name in policy if (value := getattr(table, name)) is not None},
    )


def _rule(plugin: plugins.Plugin) -> Rule:
    return rule(plugin.name, **plugin.settings)


def build_model(kind: type[Model], settings: Any, shape: Shape) -> Model:
    """Build the model, and add a first-order part if the settings ask for one that its formula lacks."""
    wide = getattr(settings, "wide", None)  # the Config of a user's model may lack it
    if wide is False and kind.has_wide:
        raise ConfigError(
            "model.wide is false, but the formula of the model contains a first-order part", "choose another model"
        )
    model = kind(settings, shape)
    return WideModel(model, shape) if wide and not kind.has_wide else model


class WideModel(Model):
    """logit = logit of the model + Σ_j w_j + a·x + b."""

    has_wide = True

    def __init__(self, model: Model, shape: Shape) -> None:
        super().__init__(None, shape)
        self.model, self.wide = model, Wide(shape.dense)

    def extra_loss(self) -> Tensor | None:
        return self.model.extra_loss()

    def forward(self, x: Inputs) -> Tensor:
        return self.model(x) + self.wide(x.first, x.dense)


def _copy(tensor: Tensor) -> Tensor:
    """Return a copy on the CPU that the next step does not change."""
    return tensor.detach().clone().contiguous().cpu()
