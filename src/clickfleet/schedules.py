"""Learning-rate schedules: the factor of the base rate at a step, a pure function, so that resuming needs no state."""

from __future__ import annotations

import math

from clickfleet import sections
from clickfleet.errors import ConfigError

Config = sections.Schedule
NEEDS = {"constant": (), "step": ("every", "decay"), "cosine": ("steps",), "exponential": ("every", "decay")}


def check(config: Config) -> None:
    """Refuses a schedule whose settings are missing, foreign to it or out of range."""
    needs = NEEDS[config.name]
    for key in ("every", "decay", "steps"):
        value = getattr(config, key)
        if key in needs and (value is None or value <= 0):
            raise ConfigError(f"schedule {config.name} needs {key} above 0, found {value}", f"set dense.schedule.{key}")
        if key not in needs and value is not None:
            raise ConfigError(f"schedule {config.name} has no {key}", f"remove dense.schedule.{key}")
    if config.floor and config.name != "cosine":
        raise ConfigError(f"schedule {config.name} has no floor", "remove dense.schedule.floor")
    if config.decay is not None and config.decay > 1:
        raise ConfigError(
            f"schedule {config.name} has a decay of {config.decay}", "set dense.schedule.decay to at most 1"
        )
    if config.warmup < 0:
        raise ConfigError(f"schedule warmup is {config.warmup}, and cannot be negative", "set dense.schedule.warmup")


def factor(config: Config, step: int) -> float:
    """The factor for `step`, the first being 0.

    >>> [factor(Config("step", warmup=2, every=2, decay=0.1), n) for n in range(6)]
    [0.5, 1.0, 1.0, 1.0, 0.1, 0.1]
    """
    if step < config.warmup:
        return (step + 1) / config.warmup
    n = step - config.warmup
    match config.name:
        case "step":
            assert config.decay is not None
            assert config.every is not None
            return float(config.decay ** (n // config.every))
        case "exponential":
            assert config.decay is not None
            assert config.every is not None
            return float(config.decay ** (n / config.every))
        case "cosine":
            assert config.steps is not None
            wave = (1 + math.cos(math.pi * min(n / config.steps, 1.0))) / 2
            return config.floor + (1 - config.floor) * wave
        case "constant":
            return 1.0
