"""A YAML file and key=value arguments -> frozen dataclasses, checked; what is unknown or wrong is refused by name.

>>> config = load(None, ["train.epochs=3", "model.hidden=[64, 32]", "run.checkpoint_every=90s"])
>>> config.train.epochs, config.model.settings, config.run.checkpoint_every
(3, {'hidden': [64, 32]}, 90.0)
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import yaml
from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from clickfleet import sections
from clickfleet.errors import ConfigError
from clickfleet.sections import (
    Cluster,
    Data,
    Dense,
    Online,
    Plugin,
    Publish,
    Run,
    Serve,
    Table,
    Train,
    Tune,
    Unit,
)

T = TypeVar("T")

ADAPTERS: dict[Any, TypeAdapter[Any]] = {}


@dataclass(frozen=True)
class Config:
    """One run: each field is a section of the file."""

    data: Data = field(default_factory=Data)
    model: Annotated[Plugin, sections.plugin("deepfm")] = field(default_factory=lambda: Plugin("deepfm"))
    table: Table = field(default_factory=Table)
    dense: Dense = field(default_factory=Dense)
    train: Train = field(default_factory=Train)
    mode: Annotated[Plugin, sections.plugin("local")] = field(default_factory=lambda: Plugin("local"))
    cluster: Cluster = field(default_factory=Cluster)
    run: Run = field(default_factory=Run)
    online: Online = field(default_factory=Online)
    publish: Publish = field(default_factory=Publish)
    serve: Serve = field(default_factory=Serve)
    tune: Tune = field(default_factory=Tune)


def load(path: str | Path | None = None, overrides: Iterable[str] = (), base: Path | None = None) -> Config:
    """The configuration of a file with `key=value` arguments over it.

    Relative paths are relative to the file, or to `base` where there is none.
    """
    raw: dict[str, Any] = {}
    if path is not None:
        try:
            raw = read(Path(path).read_text(encoding="utf-8"), str(path))
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}", "name an existing configuration file") from error
    for item in overrides:
        override(raw, item)
    if path is not None and isinstance(raw.setdefault("run", {}), dict):
        raw["run"].setdefault("dir", Run.dir)  # given, so that it too is relative to the file
    return checked(
        Config, raw, source=str(path) if path else "arguments", base=Path(path).parent.absolute() if path else base
    )


def checked(cls: type[T], raw: Mapping[str, Any], where: str = "", source: str = "", base: Path | None = None) -> T:
    """`raw` as the dataclass `cls`; `where` is its place in the file (for plug-ins: `model`, `mode`).

    >>> from clickfleet.sections import Schedule
    >>> checked(Schedule, {"warmpu": 5}, "dense.schedule", "a.yaml")
    Traceback (most recent call last):
    clickfleet.errors.ConfigError: a.yaml: unknown key dense.schedule.warmpu; did you mean warmup?
    """
    try:
        # As JSON, strict takes a list for a tuple, but neither "3" nor true for 3.
        value: T = adapter(cls).validate_json(json.dumps(raw), context={"base": base})
        return value
    except TypeError as error:
        raise ConfigError(f"{source}: {where or 'the file'} holds a value that is no plain YAML: {error}") from error
    except ValidationError as error:
        prefix = f"{source}: " if source else ""
        raise ConfigError("\n".join(prefix + explain(one, cls, where) for one in error.errors())) from None


def adapter(cls: Any) -> TypeAdapter[Any]:
    if cls not in ADAPTERS:
        for part in (cls, *nested(cls)):
            part.__pydantic_config__ = ConfigDict(extra="forbid", strict=True)
        ADAPTERS[cls] = TypeAdapter(cls)
    return ADAPTERS[cls]


def is_section(part: Any) -> bool:
    return isinstance(part, type) and dataclasses.is_dataclass(part)


def nested(cls: Any) -> list[Any]:
    """The dataclasses inside a dataclass."""
    found: list[Any] = []
    for hint in get_type_hints(cls, include_extras=True).values():
        for part in flatten(hint):
            if is_section(part):
                found += [part, *nested(part)]
    return found


def flatten(hint: Any) -> list[Any]:
    """A type and all it is made of, the marks of Annotated included."""
    marks = list(hint.__metadata__) if get_origin(hint) is Annotated else []
    return [hint, *marks, *(part for arg in get_args(hint) for part in flatten(arg))]


def explain(error: ErrorDetails, cls: Any, where: str) -> str:
    names = [str(part) for part in error["loc"]]
    if error["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        owner = inside(cls, names[:-1])
        known = [f.name for f in dataclasses.fields(owner)] if owner else []
        near = difflib.get_close_matches(names[-1], known, 1)
        hint = (
            f"did you mean {near[0]}?" if near else f"keys are {', '.join(known)}" if known else "there are none here"
        )
        return f"unknown key {dotted(where, names)}; {hint}"
    fields_ = path_of_fields(cls, names)
    message = error["msg"][:1].lower() + error["msg"][1:]
    if error["type"] == "missing":
        return f"{dotted(where, fields_)} is missing"
    found = json.dumps(error["input"], ensure_ascii=False, default=str)
    return f"{dotted(where, fields_)}: {message}, found {found}"


def inside(cls: Any, names: list[str]) -> Any:
    """The dataclass at a path below another."""
    for name in names:
        hints = get_type_hints(cls, include_extras=True)
        if name in hints:
            cls = next((part for part in flatten(hints[name]) if is_section(part)), None)
        if cls is None:
            return None
    return cls


def path_of_fields(cls: Any, names: list[str]) -> list[str]:
    """The path without the names of types that pydantic adds for unions."""
    kept: list[str] = []
    for name in names:
        known = get_type_hints(cls) if is_section(cls) else {}
        if name in known or name.isdigit():
            kept.append(name)
            cls = inside(cls, [name]) if name in known else None
    return kept


def dotted(where: str, names: list[str]) -> str:
    return ".".join([where, *names] if where else names)


class Loader(yaml.SafeLoader):
    """YAML, with 5e-6 a number and a key written twice an error."""


Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d[\d_]*)(\.\d*)?[eE][-+]?\d+$|^[-+]?\.\d+[eE][-+]?\d+$"),
    list("-+.0123456789"),
)


def _mapping(loader: Loader, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
    seen: set[Any] = set()
    for key, _ in node.value:
        name = loader.construct_object(key)
        if name in seen:
            raise yaml.constructor.ConstructorError(None, None, f"key {name} is given twice", key.start_mark)
        seen.add(name)
    return yaml.SafeLoader.construct_mapping(loader, node, True)


Loader.add_constructor("tag:yaml.org,2002:map", _mapping)


def read(text: str, source: str) -> dict[str, Any]:
    """The mapping that a YAML text holds."""
    try:
        raw = yaml.load(text, Loader)
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError(f"{source}{line}: {error.problem}", "check the indentation and the quotes") from error
    if raw is None:
        return {}
    if not isinstance(raw, dict):
        raise ConfigError(f"{source}: expected sections such as data: and model:, found {type(raw).__name__}")
    return raw


def override(raw: dict[str, Any], item: str) -> None:
    """Sets `a.b=value` in a nested mapping; the value is read as YAML."""
    key, equals, text = item.partition("=")
    if not equals or not re.fullmatch(r"[\w-]+(\.[\w-]+)*", key):
        raise ConfigError(f"argument {item!r} is not of the form section.key=value", "for example train.epochs=3")
    *parents, last = key.split(".")
    for parent in parents:
        inner = raw.get(parent)
        if isinstance(inner, str):  # `model: deepfm` is short for {name: deepfm}
            inner = {"name": inner}
        raw[parent] = inner = {} if inner is None else inner
        if not isinstance(inner, dict):
            raise ConfigError(f"argument {item!r}: {parent} is a value, not a section")
        raw = inner
    raw[last] = read(f"value: {text}", f"argument {item!r}")["value"]


def dump(config: Config) -> str:
    """The whole configuration as YAML, defaults included, which loads to an equal one."""
    return yaml.safe_dump(plain(config), sort_keys=False, allow_unicode=True)


def plain(value: Any, as_given: bool = False) -> Any:
    """A configuration as plain values; `as_given` leaves out the names and settings of plug-ins that are only the default."""
    if isinstance(value, Plugin):
        return dict(value.given) if as_given and value.given is not None else {"name": value.name, **value.settings}
    if isinstance(value, dict):
        return {key: plain(item, as_given) for key, item in value.items()}
    if not dataclasses.is_dataclass(value):
        return [plain(item, as_given) for item in value] if isinstance(value, tuple) else value
    out = {}
    for name, hint in get_type_hints(type(value), include_extras=True).items():
        item = getattr(value, name)
        unit = next((part for part in flatten(hint) if isinstance(part, Unit)), None)
        out[name] = unit.text(item) if unit and item is not None else plain(item, as_given)
    return out
