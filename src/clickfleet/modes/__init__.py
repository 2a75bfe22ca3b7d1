"""Training modes, one file each: when to pull and when to push. This is their contract.

A mode is a file with a `Config` dataclass, whose fields are the keys of the section `mode`, and `train(job, config)`,
which trains until the job is over.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from clickfleet.config import Config, checked
from clickfleet.errors import ConfigError
from clickfleet.find import module
from clickfleet.job import Job


def load(config: Config) -> Callable[[Job], None]:
    """The mode a configuration names, with its settings, ready to train a job."""
    found: Any = module("modes", config.mode.name)
    for name in ("Config", "train"):
        if not hasattr(found, name):
            raise ConfigError(f"{found.__file__} has no {name}", "a mode is a Config and train(job, config)")
    settings = checked(found.Config, config.mode.settings, "mode", config.mode.name)

    def train(job: Job) -> None:
        found.train(job, settings)

    return train
