"""Load a configuration from any source, reject contradictions, and derive the number of threads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

from clickfleet.config import machine
from clickfleet.config.load import Config, checked, override
from clickfleet.config.load import load as load_config
from clickfleet.errors import ConfigError


def configure(config: Config | Mapping[str, Any] | str | Path | None, overrides: Iterable[str] = ()) -> Config:
    """Return the configuration given as a Config, a mapping, or the path of a file (None: all defaults)."""
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
    if train.hogwild is not None and train.hogwild > cores(config):
        raise ConfigError(
            f"train.hogwild is {train.hogwild}, more than train.threads ({cores(config)})",
            "raise train.threads or lower train.hogwild",
        )


def hogwild(config: Config) -> int:
    """Return the number of trainer threads. On few cores, one core per trainer is faster than parallel operators."""
    if config.train.deterministic:
        return 1
    default = min(cores(config), 8) if config.train.device == "cpu" else 1  # an accelerator runs one step at a time
    return config.train.hogwild or default


def cores(config: Config) -> int:
    """Return the number of threads that compute at the same time."""
    return config.train.threads or machine.cores()
