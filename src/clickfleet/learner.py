"""All that learns: the table's rows and the dense network, with the loss and the optimizer that move them."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from clickfleet import devices, sections
from clickfleet.config import Config, checked
from clickfleet.errors import CheckpointError, ConfigError
from clickfleet.find import find
from clickfleet.layers import Wide
from clickfleet.losses import Loss
from clickfleet.models import Inputs, Model, Shape
from clickfleet.optimizers import Flat, Optimizer
from clickfleet.policy import Policy
from clickfleet.rules import Rule, rule
from clickfleet.schema import Schema
from clickfleet.step import RowDecay, Step
from clickfleet.table import Table


class Learner:
    """Built from a configuration for data of a schema; the same seed gives the same initial values."""

    def __init__(
        self, config: Config, schema: Schema, table: Table | None = None, device: torch.device | None = None
    ) -> None:
        self.device = devices.find(config.train.device) if device is None else device
        kind: type[Model] = find("models", config.model.name, Model)
        settings = checked(kind.Config, config.model.settings, "model", config.model.name)
        dim, slots, dense = config.table.dim, len(schema.slots), len(schema.dense)
        factors = kind.row_factors(settings, dim, slots, dense)
        if not dim and kind.row_factors(settings, 1, slots, dense):
            raise ConfigError(
                f"table.dim is 0, and model {config.model.name} needs factors", "set it to 1 or more, or use model lr"
            )
        self.shape = Shape(
            dense,
            slots,
            dim,
            factors,
            tuple(slot.name for slot in schema.slots),
            tuple(column.name for column in schema.dense),
            tuple(i for i, slot in enumerate(schema.slots) if slot.bucket is not None),
        )
        rows = config.table.with_rule(kind.row_rule) if kind.row_rule else config.table
        self.config, self.schema = dataclasses.replace(config, table=rows), schema
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.train.seed)
            self.model = widened(kind, settings, self.shape).to(self.device)  # made on the CPU: equal values everywhere
        init = kind.table_init(settings, dim)
        self.table = table or make_table(rows, factors, init.embed, init.embedx, config.train.seed)
        if self.table.factors != factors:
            raise CheckpointError(
                f"the saved rows have {self.table.factors} factors, and {config.model.name} with table.dim {dim} has {factors}",
                "use the model settings of the saved run",
            )
        self.flat = Flat(self.model)
        self.optimizer = Optimizer(config.dense, self.flat.values)
        self.loss = Loss(config.train.loss, kind.loss_epsilon(settings))
        given = config.train.loss.l2_rows
        self.l2_rows = kind.l2_rows(settings) if given is None else given

    @property
    def facts(self) -> dict[str, Any]:
        """What a reader of the model must know besides its files."""
        model = {"name": self.config.model.name, "dim": self.config.table.dim, **self.config.model.settings}
        return {"schema": self.schema.to_dict(), "model": model}

    def steps(self, threads: int) -> list[Step]:
        """One step per trainer thread, all on the same weights."""
        flats = [self.flat, *(self.flat.replica() for _ in range(threads - 1))]
        own: list[Step] | None = self.model.own_steps(self, flats)
        if own is not None:
            return own
        scales = (self.table.embed_rule.scale, self.table.rule.scale)
        decay = RowDecay(self.l2_rows, *scales) if self.l2_rows else None
        return [Step(flat, self.loss, self.schema, self.table.factors, self.device, decay) for flat in flats]

    def dense(self) -> dict[str, Tensor]:
        """A copy of the network's parameters and buffers, by name."""
        return {name: _copy(tensor) for name, tensor in self.model.state_dict().items()}

    def restore_dense(self, saved: dict[str, Tensor]) -> None:
        """Puts saved parameters and buffers in; names and shapes must be the same."""
        mine = self.model.state_dict()
        if mine.keys() != saved.keys() or any(mine[name].shape != saved[name].shape for name in mine):
            raise CheckpointError(
                "the saved dense part has other tensors than this model",
                "use the model settings of the saved run, or start from it with train.init_from",
            )
        with torch.no_grad():
            for name, tensor in mine.items():
                tensor.copy_(saved[name])  # in place: the parameters are views of one vector

    def adopt_dense(self, saved: dict[str, Tensor]) -> list[str]:
        """Takes over tensors of equal name and shape; the names of those that stay as they were initialised."""
        mine = self.model.state_dict()
        fit = {name for name in mine if name in saved and saved[name].shape == mine[name].shape}
        self.restore_dense({name: saved[name] if name in fit else mine[name] for name in mine})
        return [name for name in mine if name not in fit]

    def optimizer_state(self) -> dict[str, Tensor]:
        """What the optimizer remembers, by its name for it and the parameter's."""
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


def widened(kind: type[Model], settings: Any, shape: Shape) -> Model:
    """The model, with a first-order part beside it where the settings want one that its formula has not."""
    wide = getattr(settings, "wide", None)  # settings of a user's own model may not have it
    if wide is False and kind.has_wide:
        raise ConfigError("model.wide: the model has a first-order part by its formula", "take a model without one")
    model = kind(settings, shape)
    return Widened(model, shape) if wide and not kind.has_wide else model


class Widened(Model):
    """logit = that of a model + Σ_j w_j + a·x + b."""

    has_wide = True

    def __init__(self, model: Model, shape: Shape) -> None:
        super().__init__(None, shape)
        self.model, self.wide = model, Wide(shape.dense)

    def extra_loss(self) -> Tensor | None:
        return self.model.extra_loss()

    def forward(self, x: Inputs) -> Tensor:
        return self.model(x) + self.wide(x.first, x.dense)


def _copy(tensor: Tensor) -> Tensor:
    """On the CPU, and not touched by the next step."""
    return tensor.detach().clone().contiguous().cpu()


def make_table(config: sections.Table, factors: int, embed: str, embedx: str, seed: int) -> Table:
    """An empty table as the section says; `embed` and `embedx` are the model's own initial values."""
    policy = {field.name for field in dataclasses.fields(Policy)} - {"admission"}
    return Table(
        factors,
        rule=_rule(config.rule),
        embed_rule=None if config.embed_rule is None else _rule(config.embed_rule),
        init=config.init.embedx or embedx,
        embed_init=config.init.embed or embed,
        preset=config.preset,
        admission=config.admission,
        seed=seed,
        padding_key=config.padding_key,
        memory_limit=config.memory_limit,
        snapshot_reserve=config.snapshot_reserve,
        **{name: value for name in policy if (value := getattr(config, name)) is not None},
    )


def _rule(plugin: sections.Plugin) -> Rule:
    return rule(plugin.name, **plugin.settings)
