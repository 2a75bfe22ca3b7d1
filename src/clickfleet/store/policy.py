"""The life of rows: how they are initialised, admitted, scored, aged, evicted and published."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from clickfleet.errors import ConfigError

_CALL = re.compile(r"^\s*(\w+)\s*(?:\(([^()]*)\))?\s*$")


def _parse(text: str, what: str, shapes: dict[str, int]) -> tuple[str, list[float]]:
    """Parse `name(number, …)`; `shapes` maps each name to its count of numbers."""
    match = _CALL.match(text)
    try:
        if match and match[1] in shapes:
            numbers = [float(number) for number in match[2].split(",")] if match[2] and match[2].strip() else []
            if len(numbers) == shapes[match[1]] and all(map(math.isfinite, numbers)):
                return match[1], numbers
    except ValueError:
        pass
    known = ", ".join(f"{name}({', '.join('ab'[:count])})" if count else name for name, count in shapes.items())
    raise ConfigError(f"unknown {what} {text!r}", f"choose one of {known}")


@dataclass(frozen=True)
class Init:
    """Initial values of weights: `zero`, `uniform(a, b)`, `normal(s)` or `truncated(s)` (normal, cut off at 2s).

    >>> Init.parse("uniform(-0.1, 0.1)")
    Init(kind='uniform', a=-0.1, b=0.1)
    """

    kind: str = "zero"
    a: float = 0.0
    b: float = 0.0

    @staticmethod
    def parse(text: "str | Init") -> "Init":
        if isinstance(text, Init):
            return text
        kind, numbers = _parse(text, "init", {"zero": 0, "uniform": 2, "normal": 1, "truncated": 1})
        if (kind == "uniform" and numbers[0] > numbers[1]) or (kind in ("normal", "truncated") and numbers[0] < 0):
            raise ConfigError(f"init {text!r}: the bounds must ascend, and a deviation must be at least 0")
        return Init(kind, *numbers)

    def __str__(self) -> str:
        numbers = {"zero": (), "uniform": (self.a, self.b)}.get(self.kind, (self.a,))
        return f"{self.kind}({', '.join(f'{x!r}' for x in numbers)})" if numbers else self.kind


@dataclass(frozen=True)
class Admission:
    """When a row gets its factors: at `birth`, when it reaches `score(s)`, after `count(n)` shows, or at each show with `probability(p)`.

    >>> Admission.parse("score(10)")
    Admission(by='score', threshold=10.0)
    """

    by: str = "birth"
    threshold: float = 0.0

    @staticmethod
    def parse(text: "str | Admission") -> "Admission":
        if isinstance(text, Admission):
            return text
        by, numbers = _parse(text, "admission", {"birth": 0, "score": 1, "count": 1, "probability": 1})
        if by == "probability" and not 0 < numbers[0] < 1:
            raise ConfigError(f"admission {text!r}: the probability must lie between 0 and 1")
        if by == "count" and numbers[0] < 0:
            raise ConfigError(f"admission {text!r}: the count must be at least 0")
        return Admission(by, *numbers)

    def __str__(self) -> str:
        return self.by if self.by == "birth" else f"{self.by}({self.threshold!r})"


@dataclass(frozen=True)
class Policy:
    """The life of a row. score = (show − click)·nonclick_coeff + click·click_coeff."""

    admission: Admission = field(default_factory=Admission)
    nonclick_coeff: float = 0.1
    click_coeff: float = 1.0
    base_threshold: float = 0.0
    """Rows with at least this score are published."""
    delta_threshold: float = 0.0
    """A delta contains a row only after its score grew by this much."""
    delta_keep_days: float = math.inf
    """Rows unseen for longer are not published."""
    decay_rate: float = 1.0
    """`shrink` multiplies show and click by this factor."""
    delete_threshold: float = 0.0
    """`shrink` deletes rows with a lower score."""
    delete_after_unseen_days: float = math.inf
    """`shrink` deletes rows unseen for longer."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name != "admission" and (not isinstance(value, int | float) or math.isnan(value) or value < 0):
                raise ConfigError(f"{name} must be a number of at least 0, not {value!r}")
        if not 0 < self.decay_rate <= 1:
            raise ConfigError(f"decay_rate must lie in (0, 1], not {self.decay_rate!r}")

    def to_dict(self) -> dict[str, object]:
        """Return plain values for JSON; None means no limit."""
        numbers = {
            name: None if value == math.inf else value for name, value in vars(self).items() if name != "admission"
        }
        return {"admission": str(self.admission), **numbers}

    @staticmethod
    def from_dict(saved: Mapping[str, Any]) -> "Policy":
        numbers = {name: math.inf if value is None else value for name, value in saved.items() if name != "admission"}
        return Policy(Admission.parse(saved["admission"]), **numbers)


PRESETS = {
    "plain": Policy(),
    "online": Policy(
        admission=Admission("score", 10.0),
        base_threshold=1.5,
        delta_threshold=0.25,
        delta_keep_days=16,
        decay_rate=0.98,
        delete_threshold=0.8,
        delete_after_unseen_days=30,
    ),
}
"""`plain`: rows get their factors at birth; nothing is filtered or deleted. `online`: rows get factors by score and are deleted again."""
