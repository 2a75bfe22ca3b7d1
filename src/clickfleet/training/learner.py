"""Everything that is trained: the rows of the table and the dense network, with their loss and optimizer."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, TypedDict

import numpy as np
import torch
from torch import Tensor

from clickfleet.config import plugins, sections
from clickfleet.config.load import Config, checked
from clickfleet.config.plugins import Plugin, closest, find
from clickfleet.data.schema import Schema
from clickfleet.errors import CheckpointError, ConfigError
from clickfleet.store.calibration import Calibration
from clickfleet.store.policy import Policy
from clickfleet.store.rules import Rule, rule
from clickfleet.store.table import SlotRows, Table
from clickfleet.training import devices
from clickfleet.training.embedding import Embedding
from clickfleet.training.layers import Wide, logits
from clickfleet.training.losses import Loss
from clickfleet.training.network import Inputs, Model, Shape, pooled_columns, shape_of
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
        widths = slot_widths(config, schema)
        self.shape = shape_of(kind, schema, config.table.dim, widths)
        self.config, self.schema = dataclasses.replace(config, table=table_settings(config)), schema
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.train.seed)
            model = build_model(kind, settings, self.shape)  # on the CPU: equal values everywhere
            self.model = model.to(self.device)
        self.table = new_table(config, schema) if table is None else table
        saved = [
            self.table.classes[number].factors
            for number in self.table.class_of(np.arange(len(widths), dtype=np.uint16))
        ]
        if saved != widths:
            raise CheckpointError(
                f"the saved rows have {_text(saved)} factors, but {config.model.name} with this table.dim and table.dims needs "
                f"{_text(widths)}",
                "use the model settings of the saved run",
            )
        self.calibration: Calibration | None = None
        """What maps the scores of the network to those that are published and predicted."""
        self.flat = Flat(self.model)
        self.optimizer = Optimizer(config.dense, self.flat.values)
        self.loss = Loss(
            config.train.loss,
            kind.loss_epsilon(settings),
            schema.tasks,
            kind.entire_space,
            kind.conditional(settings),
        )
        l2_rows = config.train.loss.l2_rows
        self.l2_rows = kind.l2_rows(settings) if l2_rows is None else l2_rows

    @property
    def facts(self) -> LearnerFacts:
        return {"schema": self.schema.to_dict(), "model": model_spec(self.config)}

    def steps(self, threads: int) -> list[Step]:
        """Return one step per trainer thread. All use the same weights."""
        self.loss.load()
        return self.model.steps(self, [self.flat, *(self.flat.replica() for _ in range(threads - 1))])

    def embedding(self) -> Embedding:
        """Return the converter from rows to the inputs of the model, for one thread."""
        return Embedding(self.schema, self.table.factors, self.device, self.model.reads_histories)

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


def slot_widths(config: Config, schema: Schema) -> list[int]:
    """Return how many factors the configured model needs in the rows of each slot. Without slots, one number for all.

    Refuse slots that the schema lacks, and unequal widths if the model does not take them.
    """
    kind, settings = network_of(config)
    table, slots, dense = config.table, pooled_columns(kind, schema), len(schema.dense)
    for name, where in table.named_slots.items():
        _check_slot(name, where, schema)
    names = [slot.name for slot in schema.slots]
    # A slot without rows of its own uses those of another one.
    dims = [table.width(names[schema.slot_numbers[i]]) for i in range(len(names))] or [table.dim]
    if 0 in dims and kind.row_factors(settings, 1, slots, dense):
        empty = "table.dim is 0" if not table.dim else f"the width of slot {names[dims.index(0)]} is 0"
        raise ConfigError(
            f"model {config.model.name} needs factors, but {empty}", "set it to 1 or more, or use the model lr"
        )
    widths = [kind.row_factors(settings, dim, slots, dense) for dim in dims]
    if len(set(widths)) > 1 and not kind.takes_unequal_widths(settings):
        others = [f"{name} {dim}" for name, dim in zip(names, dims, strict=True) if dim != table.dim]
        models = ", ".join(name for name in plugins.names("models") if find("models", name, Model).unequal_widths)
        raise ConfigError(
            f"the model {config.model.name} needs rows of equal width, but not all slots have {table.dim} factors: "
            f"{', '.join(others)}",
            f"remove these widths from table.dims and table.slots, or choose a model that takes each slot's own width: {models}",
        )
    return widths


def _check_slot(name: str, where: str, schema: Schema) -> None:
    names = [slot.name for slot in schema.slots]
    if name not in names:
        column = next((slot for slot in schema.key_columns if slot.name == name), None)
        if column is not None:  # of a history
            raise ConfigError(
                f"{where}.{name} is a column of a history, which has the rows of slot {column.rows_of}",
                f"set {where}.{column.rows_of}",
            )
        raise ConfigError(f"unknown slot {name} in {where}{closest(name, names)}", f"slots: {', '.join(names)}")
    if shared := schema.slots[names.index(name)].rows_of:
        raise ConfigError(f"{where}.{name}: this slot has the rows of slot {shared}", f"set {where}.{shared}")


def _text(widths: Sequence[int]) -> str:
    return str(widths[0]) if len(set(widths)) == 1 else "/".join(map(str, widths))


def model_spec(config: Config) -> dict[str, object]:
    """Return the description of the configured model, as checkpoints and published entries hold it."""
    table = config.table
    dims = {slot: width for slot in table.named_slots if (width := table.width(slot)) != table.dim}
    return {"name": config.model.name, "dim": table.dim, **({"dims": dims} if dims else {}), **config.model.settings}


def table_spec(config: Config, schema: Schema) -> dict[str, Any]:
    """Return the description of the configured table. `Table.like` makes one of it."""
    in_memory = dataclasses.replace(config, table=dataclasses.replace(config.table, disk=None, disk_limit=None))
    return {**new_table(in_memory, schema).describe(), **disk_spec(config.table)}


def disk_spec(table: sections.TableSettings) -> dict[str, Any]:
    """Return the part of a table's description that belongs to this machine; empty without rows on disk."""
    return {} if table.disk is None else {"disk": table.disk, "disk_limit": table.disk_limit}


def table_settings(config: Config) -> sections.TableSettings:
    """Return the section `table`, with the default rule of the model unless the user named a rule."""
    kind, _ = network_of(config)
    return config.table.with_rule(kind.row_rule) if kind.row_rule else config.table


def new_table(config: Config, schema: Schema) -> Table:
    """Return the configured table, empty. The initial values are the model's unless the section sets others."""
    kind, settings = network_of(config)
    init, table = kind.table_init(settings, config.table.dim), table_settings(config)
    widths = slot_widths(config, schema)
    names = [slot.name for slot in schema.slots]
    usual = kind.row_factors(settings, table.dim, pooled_columns(kind, schema), len(schema.dense))
    usual = usual if usual in widths else widths[0]  # no row is wider than the widest slot
    policy = {field.name for field in dataclasses.fields(Policy)} - {"admission"}
    return Table(
        usual,
        slots={names.index(name): _slot_rows(table, name, widths[names.index(name)]) for name in table.named_slots},
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
        disk=table.disk,
        disk_limit=table.disk_limit,
        **{name: value for name in policy if (value := getattr(table, name)) is not None},
    )


def _slot_rows(table: sections.TableSettings, name: str, width: int) -> SlotRows:
    own = table.slots.get(name, sections.SlotSettings())
    first = _changed_rule(own.embed_rule, table.embed_rule or own.rule or table.rule)
    return SlotRows(width, _changed_rule(own.rule, table.rule), first, own.admission)


def _changed_rule(own: Plugin | None, usual: Plugin | None) -> Rule | None:
    """Return the rule of a slot. Settings without a name override single settings of the usual rule."""
    if own is not None and not own.name and usual is not None:
        return rule(usual.name, **{**usual.settings, **own.settings})
    return None if own is None else _rule(own)


def _rule(plugin: Plugin) -> Rule:
    return rule(plugin.name, **plugin.settings)


def build_model(kind: type[Model], settings: Any, shape: Shape) -> Model:
    """Build the model, and add a first-order part if the settings ask for one that its formula lacks."""
    wide = getattr(settings, "wide", None)  # the Config of a user's model may lack it
    if wide is False and kind.has_wide:
        raise ConfigError(
            "model.wide is false, but the formula of the model contains a first-order part", "choose another model"
        )
    if shape.outputs > 1 and getattr(settings, "paddlerec", False) and not kind.least_labels > 1:
        raise ConfigError(
            f"model.paddlerec reproduces a network with one label, but the schema has {shape.outputs}",
            "remove model.paddlerec",
        )
    model = kind(settings, shape)
    return WideModel(model, shape) if wide and not kind.has_wide else model


class WideModel(Model):
    """logit = logit of the model + Σ_j w_j + a·x + b."""

    has_wide = True

    def __init__(self, model: Model, shape: Shape) -> None:
        super().__init__(None, shape)
        self.model, self.wide = model, Wide(shape)
        self.reads_histories = model.reads_histories  # type: ignore[misc]
        self.entire_space = model.entire_space  # type: ignore[misc]

    def extra_loss(self) -> Tensor | None:
        return self.model.extra_loss()

    def forward(self, x: Inputs) -> Tensor:
        return self.model(x) + logits(self.wide(x.first, x.dense))


def _copy(tensor: Tensor) -> Tensor:
    """Return a copy on the CPU that the next step does not change."""
    return tensor.detach().clone().contiguous().cpu()
