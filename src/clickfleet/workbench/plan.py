"""Models, settings and seeds -> the runs of a comparison, each trained once however many tables show it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from clickfleet.config import Config, override, plain, read
from clickfleet.configuring import configure
from clickfleet.errors import ConfigError
from clickfleet.find import find
from clickfleet.sections import Plugin
from clickfleet.workbench.crew import Order


@dataclass(frozen=True)
class Line:
    """One line of a table, once for every seed."""

    model: str
    setting: str | None
    """The key that differs from the configuration; None: nothing does."""
    value: str | None
    orders: tuple[Order, ...]


@dataclass(frozen=True)
class Plan:
    """The models as they are configured, and for every setting a study: models under each of its values."""

    models: tuple[Line, ...]
    studies: Mapping[str, tuple[Line, ...]]
    seeds: tuple[int, ...]

    @property
    def orders(self) -> list[Order]:
        """Every run once."""
        lines = [*self.models, *(line for study in self.studies.values() for line in study)]
        return list({order.name: order for line in lines for order in line.orders}.values())


def grid(text: str) -> tuple[str, list[Any]]:
    """A key and its values.

    >>> grid("model.hidden=[400,400],[64]")
    ('model.hidden', [[400, 400], [64]])
    """
    key, equals, values = text.partition("=")
    if not equals or not values.strip():
        raise ConfigError(f"--set {text!r} is not of the form key=a,b,c", "for example --set train.epochs=1,4,10")
    return key, list(read(f"values: [{values}]", f"--set {text!r}")["values"])


def plan(
    base: Config,
    models: Sequence[str],
    sets: Sequence[str],
    seeds: Sequence[int],
    out: Path,
    say: Callable[[str], None],
) -> Plan:
    """What there is to train; settings that nobody knows are refused now."""
    made = _Maker(out, tuple(seeds) or (base.train.seed,))
    names = list(dict.fromkeys(models)) or [base.model.name]
    grids: dict[str, list[Any]] = {}
    for text in sets:
        key, values = grid(text)
        grids[key] = [*grids.get(key, []), *values]
    alone, studies = [], {key: list[Line]() for key in grids}
    for name in names:
        own = with_model(base, name, say)
        first = made.line(own, None, None)
        alone.append(first)
        for key, values in grids.items():
            if not has(own, key):
                say(f"{first.model} has no {key}: not in that study")
                continue
            lines = [made.line(changed(own, key, value), key, value) for value in values]
            if all(line.orders != first.orders for line in lines):
                lines.insert(0, replace(first, setting=key, value=f"{text_of(current(own, key))} (as configured)"))
            studies[key] += lines
    for key, lines in studies.items():
        if not lines:
            raise ConfigError(f"none of the models has {key}", "add one that does, or leave that --set out")
    return Plan(tuple(alone), {key: tuple(lines) for key, lines in studies.items()}, made.seeds)


class _Maker:
    """Gives equal configurations the same run."""

    def __init__(self, out: Path, seeds: tuple[int, ...]) -> None:
        self.out, self.seeds = out, seeds
        self._orders: dict[str, Order] = {}

    def line(self, config: Config, key: str | None, value: Any) -> Line:
        text = None if key is None else text_of(value)
        stem = Path(config.model.name).stem
        name = stem if key is None else f"{stem}-{key}={text}"
        orders = tuple(self._order(config, name, seed) for seed in self.seeds)
        return Line(stem, key, text, orders)

    def _order(self, config: Config, name: str, seed: int) -> Order:
        config = replace(config, train=replace(config.train, seed=seed))
        mark = fingerprint(config)
        if mark not in self._orders:
            slug = re.sub(r"[^\w.=-]+", "_", f"{name}-seed{seed}").strip("_")[:90]
            if any(order.name == slug for order in self._orders.values()):
                slug = f"{slug}-{mark[:8]}"
            folder = replace(config.run, dir=str(self.out / "runs" / slug))
            self._orders[mark] = Order(slug, replace(config, run=folder))
        return self._orders[mark]


def fingerprint(config: Config) -> str:
    """A name for what a run learns: neither where it is written nor by how many threads, nor what is not said."""
    raw, default = plain(config), plain(Config())
    for section in ("run", "online", "publish", "serve", "tune"):
        del raw[section]
    raw["train"] |= {key: default["train"][key] for key in ("threads", "hogwild", "profile")}
    raw["data"]["threads"] = default["data"]["threads"]
    return hashlib.blake2b(json.dumps(_said(raw, default), sort_keys=True).encode(), digest_size=16).hexdigest()


def _said(value: Any, default: Any) -> Any:
    """What differs from the defaults, so that a setting that a later version adds changes nothing."""
    if isinstance(value, dict) and isinstance(default, dict):
        parts = {key: _said(item, default.get(key)) for key, item in value.items() if item != default.get(key)}
        return {key: part for key, part in parts.items() if part != {}}
    return value


def with_model(config: Config, name: str, say: Callable[[str], None]) -> Config:
    """The configuration for another model, with those of the model's settings that the other one has too."""
    if name == config.model.name:
        return config
    if name.endswith(".py"):
        name = str(Path(name).absolute())
    known = settings_of(name)
    kept = {key: value for key, value in config.model.settings.items() if key in known}
    gone = [f"model.{key}" for key in config.model.settings if key not in known]
    if gone:
        say(f"{Path(name).stem} has no {', '.join(gone)}: left out for it")
    return replace(config, model=Plugin(name, kept))


def settings_of(name: str) -> set[str]:
    """The settings that a model knows."""
    from clickfleet.models import Model

    return {field.name for field in dataclasses.fields(find("models", name, Model).Config)}


def has(config: Config, key: str) -> bool:
    """Whether a setting means anything to the model of a configuration."""
    section, _, name = key.partition(".")
    return section != "model" or name == "name" or name in settings_of(config.model.name)


def changed(config: Config, key: str, value: Any) -> Config:
    """The configuration with another value, checked as if it stood in the file."""
    raw = plain(config, as_given=True)
    override(raw, f"{key}={json.dumps(value)}")
    return configure(raw)


def current(config: Config, key: str) -> Any:
    """The value of a dotted key; None where a plug-in's own default holds."""
    found: Any = plain(config)
    for part in key.split("."):
        found = found.get(part) if isinstance(found, dict) else None
    return found


def text_of(value: Any) -> str:
    """A value as a label."""
    if value is None:
        return "default"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def mean(values: Iterable[float | None]) -> float | None:
    """Of what is there."""
    found = [value for value in values if value is not None]
    return sum(found) / len(found) if found else None
