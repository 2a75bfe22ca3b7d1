"""Load a configuration from any source, reject contradictions, and derive the number of threads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

from clickfleet.config import machine, recipes
from clickfleet.config.load import Config, checked, override
from clickfleet.config.load import load as load_config
from clickfleet.errors import ConfigError


def configure(
    config: Config | Mapping[str, Any] | str | Path | None, overrides: Iterable[str] = (), recipe: str | None = None
) -> Config:
    """Return the configuration given as a Config, a mapping, or the path of a file (None: all defaults).

    With a recipe, a mapping and overrides apply over its settings.
    """
    if recipe is not None:
        if config is not None and not isinstance(config, Mapping):
            raise ConfigError(
                f"the recipe {recipe} and a configuration exclude each other",
                f"name one of them; clickfleet recipes {recipe} prints the recipe, to be changed",
            )
        config = recipes.under(recipe, config)
    if isinstance(config, Config):
        if overrides:
            raise ConfigError("key=value arguments cannot change a Config object", "use dataclasses.replace")
        return config
    if isinstance(config, Mapping):
        raw = deepcopy({key: dict(part) if isinstance(part, Mapping) else part for key, part in config.items()})
        for item in overrides:
            override(raw, item)
        return checked(Config, raw, source="the configuration", base=Path.cwd())
    return load_config(config, overrides, Path.cwd())


def check(config: Config) -> None:
    """Reject contradictory settings before any work is done."""
    train = config.train
    if train.deterministic and (train.hogwild or 1) > 1:
        raise ConfigError(
            f"train.deterministic allows one trainer thread, but train.hogwild is {train.hogwild}", "remove one of them"
        )
    if config.data.schema is not None and config.data.preset is not None:
        raise ConfigError("data.schema and data.preset exclude each other", "remove one of them")
    if config.data.label is not None and (config.data.schema or config.data.preset):
        raise ConfigError(
            "data.label is for a guessed schema, but data.schema or data.preset names the label already",
            "remove data.label, or change the label in the schema",
        )
    if config.publish.text_parts is not None and not done_files(config):
        raise ConfigError(
            "publish.text_parts needs done files, but publish.done_files is false",
            "remove publish.text_parts, or turn done files on",
        )
    if train.hogwild is not None and train.hogwild > cores(config):
        raise ConfigError(
            f"train.hogwild is {train.hogwild}, more than train.threads ({cores(config)})",
            "raise train.threads or lower train.hogwild",
        )


def done_files(config: Config) -> bool:
    """Return whether done files are written. Nobody polls files for entries that come every second."""
    given = config.publish.done_files
    return config.online.pass_ is None if given is None else given


def hogwild(config: Config) -> int:
    """Return the number of trainer threads. On few cores, one core per trainer is faster than parallel operators."""
    if config.train.deterministic:
        return 1
    default = min(cores(config), 8) if config.train.device == "cpu" else 1  # an accelerator runs one step at a time
    return config.train.hogwild or default


def cores(config: Config) -> int:
    """Return the number of threads that compute at the same time."""
    return config.train.threads or machine.cores()
