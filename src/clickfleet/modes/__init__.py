"""Training modes, one file each: when to pull and when to push. This is their contract.

A mode is a file with a `Config` dataclass, whose fields are the keys of the section `mode`, and `train(job, config)`,
which trains until the job is over. With `DISTRIBUTED = True` in it, the mode runs in the workers of a cluster, and its job is a `Share`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from clickfleet.config import Config, checked
from clickfleet.errors import ConfigError
from clickfleet.find import module
from clickfleet.job import Job
from clickfleet.modes._settings import from_environment


def load(config: Config) -> Callable[[Job], None]:
    """The mode a configuration names, with its settings, ready to train a job."""
    found, settings = _found(config), resolve(config)

    def train(job: Job) -> None:
        found.train(job, settings)

    return train


def resolve(config: Config) -> Any:
    """The settings of the mode: those of the configuration over those of the environment over its own."""
    found = _found(config)
    known = {field.name for field in dataclasses.fields(found.Config)}
    return checked(found.Config, {**from_environment(known), **config.mode.settings}, "mode", config.mode.name)


def settled(config: Config) -> Config:
    """The configuration with every setting of its mode written out, whatever the environment says elsewhere."""
    settings = dataclasses.asdict(resolve(config))
    plain = {key: value for key, value in settings.items() if value is not None and key != "replica_limit"}
    plain |= {key: config.mode.settings[key] for key in ("replica_limit",) if key in config.mode.settings}
    return dataclasses.replace(config, mode=dataclasses.replace(config.mode, settings=plain))


def distributed(config: Config) -> bool:
    """Whether the mode runs on a cluster."""
    return bool(getattr(_found(config), "DISTRIBUTED", False))


def _found(config: Config) -> Any:
    found: Any = module("modes", config.mode)
    for name in ("Config", "train"):
        if not hasattr(found, name):
            raise ConfigError(f"{found.__file__} has no {name}", "a mode is a Config and train(job, config)")
    return found
