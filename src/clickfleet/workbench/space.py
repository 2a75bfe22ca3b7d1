"""The section `tune` -> what Optuna may try, and what it tried -> settings."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from clickfleet.config import Config
from clickfleet.errors import ConfigError
from clickfleet.sections import Dimension
from clickfleet.workbench.plan import changed

if TYPE_CHECKING:
    import optuna


def check_space(config: Config) -> None:
    """Refuses a space that is empty, contradicts itself, or holds a value that the configuration would refuse."""
    if not config.tune.space:
        raise ConfigError(
            "tune.space is empty: there is nothing to search for",
            "name settings, e.g. tune: {space: {dense.lr: {low: 1e-4, high: 1e-2, log: true}}}",
        )
    for key, one in config.tune.space.items():
        where = f"tune.space.{key}"
        ranged = (one.low, one.high)
        if (one.choices is None) == (ranged == (None, None)):
            raise ConfigError(f"{where} needs either choices, or low and high")
        if one.choices is not None:
            if not one.choices or one.step is not None or one.log:
                raise ConfigError(f"{where}: choices are a list of at least one value, without step and log")
        elif one.low is None or one.high is None or not one.low < one.high:
            raise ConfigError(f"{where}: low and high must both be given, low below high")
        elif one.log and (one.low <= 0 or one.step is not None):
            raise ConfigError(f"{where}: log needs low above 0, and has no step")
        elif one.step is not None and not 0 < one.step <= one.high - one.low:
            raise ConfigError(f"{where}: step must lie between 0 and high - low")
        for value in one.choices if one.choices is not None else (_number(one, one.low), _number(one, one.high)):
            try:
                changed(config, key, value)
            except ConfigError as error:
                raise ConfigError(f"{where}: {error}") from None


def distribution(one: Dimension) -> optuna.distributions.BaseDistribution:
    """As Optuna has it; choices are told as JSON, since lists are none of its values."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if one.choices is not None:
        return CategoricalDistribution([json.dumps(choice) for choice in one.choices])
    assert one.low is not None
    assert one.high is not None
    if _whole(one):
        return IntDistribution(int(one.low), int(one.high), log=one.log, step=int(one.step or 1))
    return FloatDistribution(one.low, one.high, log=one.log, step=one.step)


def values(space: Mapping[str, Dimension], tried: Mapping[str, Any]) -> dict[str, Any]:
    """The settings behind what Optuna tried."""
    return {key: json.loads(tried[key]) if one.choices is not None else tried[key] for key, one in space.items()}


def applied(config: Config, found: Mapping[str, Any]) -> Config:
    for key, value in found.items():
        config = changed(config, key, value)
    return config


def _whole(one: Dimension) -> bool:
    return all(isinstance(x, int) for x in (one.low, one.high, one.step) if x is not None)


def _number(one: Dimension, value: float | None) -> float | int:
    assert value is not None
    return int(value) if _whole(one) else value
