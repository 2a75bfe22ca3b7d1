"""Update rules of the table's rows, as the core declares them: sgd, adagrad, std_adagrad, adagrad_v2, adam, shared_adam, ftrl.

>>> from clickfleet.store.rules import Adagrad, rule
>>> Adagrad(lr=0.02) == rule("adagrad", lr=0.02)
True
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial

from clickfleet import _core
from clickfleet.config.plugins import closest
from clickfleet.errors import ConfigError

SCALES = ("show", "batch", "none")


@dataclass(frozen=True)
class Rule:
    name: str
    settings: tuple[tuple[str, float], ...]
    scale: str
    """What a gradient is divided by: the key's shows, the batch's weight, or nothing."""
    bounds: tuple[float, float] = (-10.0, 10.0)
    """Every weight is clipped to this range."""

    def to_dict(self) -> dict[str, object]:
        return {"name": self.name, **dict(self.settings), "scale": self.scale, "bounds": list(self.bounds)}


@dataclass(frozen=True)
class Spec:
    """The core's declaration of a rule."""

    name: str
    scale: str
    fields: tuple[tuple[str, float, str], ...]


@cache
def specs() -> Mapping[str, Spec]:
    """Return every rule by name."""
    return {
        spec["name"]: Spec(
            spec["name"], spec["scale"], tuple((name, _short(value), text) for name, value, text in spec["fields"])
        )
        for spec in _core.rules()
    }


def rule(
    name: str, *, scale: str | None = None, bounds: tuple[float, float] | list[float] = (-10.0, 10.0), **settings: float
) -> Rule:
    """Return the rule of that name; settings that are not given have their defaults.

    >>> rule("adam").settings
    (('lr', 0.001), ('beta1', 0.9), ('beta2', 0.999), ('epsilon', 1e-08))
    """
    spec = specs().get(name)
    if spec is None:
        raise ConfigError(f"unknown rule {name!r}{closest(name, specs())}")
    known = {field: value for field, value, _ in spec.fields}
    for key, value in settings.items():
        if key not in known:
            raise ConfigError(f"unknown key {key} for {name}{closest(key, [*known, 'scale', 'bounds'])}")
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
            raise ConfigError(f"{key} of {name} must be a number of at least 0, not {value!r}")
    if scale is not None and scale not in SCALES:
        raise ConfigError(f"scale of {name} must be one of {', '.join(SCALES)}, not {scale!r}")
    if len(bounds) != 2 or not bounds[0] < bounds[1]:
        raise ConfigError(f"bounds of {name} must be two ascending numbers, not {bounds!r}")
    full = tuple((key, float(settings.get(key, default))) for key, default in known.items())
    return Rule(name, full, scale or spec.scale, (float(bounds[0]), float(bounds[1])))


def __getattr__(name: str) -> Callable[..., Rule]:
    for known in specs():
        if name == "".join(word.capitalize() for word in known.split("_")):
            return partial(rule, known)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _short(value: float) -> float:
    return float(f"{value:.7g}")  # the decimal in the header, not the nearest float32
