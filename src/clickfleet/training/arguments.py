"""What `clickfleet.train` and `fit` are given in Python: data in memory, settings as keywords, the user's classes and functions."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from clickfleet.config.check import configure
from clickfleet.config.keywords import as_overrides
from clickfleet.config.load import Config
from clickfleet.config.plugins import Plugin, passed, reference
from clickfleet.data.schema import Schema
from clickfleet.errors import ConfigError
from clickfleet.training.losses import LossFunction
from clickfleet.training.network import Model
from clickfleet.training.predict import MetricFunction

Settings = Config | Mapping[str, Any] | str | Path | None
"""A configuration: an object, the content of a file, or the path of a file."""


def is_data(given: object) -> bool:
    """Return whether an argument is data in memory rather than a configuration or the path of one."""
    if given is None or isinstance(given, Config | str | Path):
        return False
    return not (isinstance(given, Mapping) and given.keys() <= {field.name for field in fields(Config)})


def configured(
    config: Settings,
    overrides: Sequence[str],
    keywords: Mapping[str, Any],
    recipe: str | None = None,
    label: str | None = None,
    schema: Schema | None = None,
    loss: LossFunction | str | None = None,
    metrics: Mapping[str, MetricFunction | str] | None = None,
) -> Config:
    """Return the configuration of a call: of its file or mapping, `key=value` strings, keywords, and the user's classes and functions."""
    arguments, keywords = list(overrides), dict(keywords)
    given = keywords.pop("model", {})
    model = dict(given) if isinstance(given, Mapping) else {"name": given}
    network = model.pop("name") if isinstance(model.get("name"), type) else None
    if network is not None:
        if not issubclass(network, Model):
            raise ConfigError(f"{network.__name__} is not a model", "derive it from clickfleet.Model")
        arguments.append(f"model.name={json.dumps(reference(network))}")
    if model:
        keywords["model"] = model
    if label is not None and schema is None:
        arguments.append(f"data.label={json.dumps(label)}")
    elif schema is not None and label not in (None, schema.label):
        raise ConfigError(f"the label of the schema is {schema.label!r}, not {label!r}", "pass one of schema and label")
    settings = configure(config, [*arguments, *as_overrides(keywords)], recipe)
    if network is not None:
        settings = with_class(settings, network)
    train = settings.train
    if loss is not None:
        train = replace(train, loss=replace(train.loss, function=_plugin(loss)))
    if metrics:
        functions = {**train.metrics.functions, **{name: _plugin(function) for name, function in metrics.items()}}
        train = replace(train, metrics=replace(train.metrics, functions=functions))
    return replace(settings, train=train)


def with_class(config: Config, model_class: type[Model]) -> Config:
    """Return the configuration with the class of its model, which then needs no import."""
    return replace(config, model=replace(config.model, passed=model_class))


def _plugin(function: Callable[..., Any] | str) -> Plugin:
    if isinstance(function, str):
        return Plugin(function)
    if not callable(function):
        raise ConfigError(f"{function!r:.80} is not a function")
    return passed(function)
