"""Load a YAML file and key=value arguments into checked, frozen dataclasses. Errors name the unknown or invalid key.

>>> config = load(None, ["train.epochs=3", "model.hidden=[64, 32]", "run.checkpoint_every=90s"])
>>> config.train.epochs, config.model.settings, config.run.checkpoint_every
(3, {'hidden': [64, 32]}, 90.0)
"""

from __future__ import annotations

import dataclasses
import json
import keyword
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import yaml
from pydantic import BeforeValidator, ConfigDict, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from clickfleet.config import sections, yaml_files
from clickfleet.config.plugins import AUTO, Plugin, as_list, closest
from clickfleet.config.sections import (
    Cluster,
    Data,
    DenseSettings,
    Online,
    Publish,
    Run,
    Serve,
    TableSettings,
    Train,
    Tune,
    Unit,
)
from clickfleet.errors import ConfigError

T = TypeVar("T")
RawConfig = dict[str, Any]
"""A configuration as parsed from YAML, not yet checked."""


@dataclass(frozen=True)
class Config:
    """The configuration of one run. Each field is a section of the file."""

    data: Data = field(default_factory=Data)
    model: Annotated[Plugin, sections.plugin("deepfm")] = field(default_factory=lambda: Plugin("deepfm"))
    table: TableSettings = field(default_factory=TableSettings)
    dense: DenseSettings = field(default_factory=DenseSettings)
    train: Train = field(default_factory=Train)
    mode: Annotated[Plugin, sections.plugin("local")] = field(default_factory=lambda: Plugin("local"))
    cluster: Cluster = field(default_factory=Cluster)
    run: Run = field(default_factory=Run)
    online: Online = field(default_factory=Online)
    publish: Publish = field(default_factory=Publish)
    serve: Serve = field(default_factory=Serve)
    tune: Tune = field(default_factory=Tune)


def load(path: str | Path | None = None, overrides: Iterable[str] = (), base: Path | None = None) -> Config:
    """Load a file and apply `key=value` arguments.

    Relative paths in the file are relative to the file, those in arguments to `base`. Default: the current folder.
    """
    raw: RawConfig = {}
    if path is not None:
        raw = read(yaml_files.read_text(path), str(path))
        raw = with_new_names(raw) if _is_saved(Path(path)) else raw
    for item in overrides:
        override(raw, item, None if path is None else base or Path.cwd())
    if path is not None and isinstance(raw.setdefault("run", {}), dict):
        raw["run"].setdefault("dir", Run.dir)  # set here, the default is resolved against the file too
    return checked(
        Config, raw, source=str(path) if path else "arguments", base=Path(path).parent.absolute() if path else base
    )


RENAMED = {
    "cluster.on_loss": "cluster.on_failure",
    "cluster.max_losses": "cluster.max_failures",
    "cluster.cut_share": "cluster.checkpoint_cpu",
}
"""Old names of settings, which saved configurations may contain, and their new names."""
REMOVED = {
    "async": {"fake_send", "io_threads", "merge_sparse"},
    "sync": {"queue_size", "merge"},
    "half_async": {"queue_size", "merge"},
}
"""Removed settings of modes. Saved configurations may contain them; a resumed run ignores them."""


def _is_saved(path: Path) -> bool:
    """Return whether a run wrote the file: it is the config.yaml of a run folder or of a checkpoint."""
    return path.name == "config.yaml" and any(
        (path.parent / name).exists() for name in ("checkpoints", "manifest.json")
    )


def with_new_names(raw: RawConfig) -> RawConfig:
    """Return a saved configuration with the current names of its settings, without removed settings.

    >>> with_new_names({"cluster": {"max_losses": 3}, "mode": {"name": "sync", "merge": 2}})
    {'cluster': {'max_failures': 3}, 'mode': {'name': 'sync'}}
    """
    mode = raw.get("mode")
    if isinstance(mode, dict):
        removed = REMOVED.get(str(mode.get("name")), set())
        raw = {**raw, "mode": {key: item for key, item in mode.items() if key not in removed}}
    renamed: RawConfig = {}
    for section, part in raw.items():
        renamed[section] = part
        if isinstance(part, dict):
            names = {key: RENAMED.get(f"{section}.{key}", f"{section}.{key}").partition(".")[2] for key in part}
            renamed[section] = {names[key]: item for key, item in part.items()}
    return renamed


def checked(
    cls: type[T],
    raw: Mapping[str, Any],
    where: str = "",
    source: str = "",
    base: Path | None = None,
    origin: str = "",
) -> T:
    """Return `raw` as an instance of `cls`. `where` is its path in the file (for plug-ins: `model`, `mode`).

    `origin` names the author if that is not the user. Plug-ins keep it for `check_trusted`.

    >>> from clickfleet.config.sections import Schedule
    >>> checked(Schedule, {"warmpu": 5}, "dense.schedule", "a.yaml")
    Traceback (most recent call last):
    clickfleet.errors.ConfigError: a.yaml: unknown key dense.schedule.warmpu; did you mean warmup?
    """
    try:
        # In JSON, strict mode accepts a list as a tuple, but neither "3" nor true as 3.
        types: TypeAdapter[T] = adapter(cls)  # type: ignore[arg-type]  # every type is hashable
        return types.validate_json(json.dumps(with_lists(cls, raw)), context={"base": base, "origin": origin})
    except TypeError as error:
        raise ConfigError(f"{source}: {where or 'the file'} contains an unsupported YAML value: {error}") from error
    except ValidationError as error:
        prefix = f"{source}: " if source else ""
        raise ConfigError("\n".join(prefix + explain(one, cls, where) for one in error.errors())) from None


def with_lists(cls: Any, raw: Any) -> Any:
    """Return `raw` with a list for every field of several values that is given as `a,b,c`. Paths may contain commas."""
    if not isinstance(raw, Mapping) or not is_section(cls):
        return raw
    hints = get_type_hints(cls, include_extras=True)
    listed: RawConfig = {}
    for key, value in raw.items():
        name = field_of(key)
        parts = flatten(hints.get(name))
        section = next((part for part in parts if is_section(part) and part is not Plugin), None)
        if section is not None and is_mapping(hints.get(name)) and isinstance(value, Mapping):
            value = {each: with_lists(section, item) for each, item in value.items()}
        elif section is not None:
            value = with_lists(section, value)
        elif any(get_origin(part) is tuple for part in parts) and not any(
            isinstance(p, BeforeValidator) for p in parts
        ):
            value = as_list(value)
        listed[name] = value
    return listed


def field_of(key: Any) -> Any:
    """Return the field of a key. One that is a word of Python, such as `pass`, has an underscore at its end."""
    return f"{key}_" if isinstance(key, str) and keyword.iskeyword(key.rstrip("_")) else key


def key_of(field: str) -> str:
    """Return the key of a field.

    >>> key_of("pass_"), key_of("splits_per_pass")
    ('pass', 'splits_per_pass')
    """
    return field.removesuffix("_")


@cache
def adapter(cls: Any) -> TypeAdapter[Any]:
    for part in (cls, *nested(cls)):
        part.__pydantic_config__ = ConfigDict(extra="forbid", strict=True)
    return TypeAdapter(cls)


def is_section(part: Any) -> bool:
    return isinstance(part, type) and dataclasses.is_dataclass(part)


def nested(cls: Any) -> list[Any]:
    """Return the dataclasses nested in a dataclass."""
    sections_inside: list[Any] = []
    for hint in get_type_hints(cls, include_extras=True).values():
        for part in flatten(hint):
            if is_section(part):
                sections_inside += [part, *nested(part)]
    return sections_inside


def flatten(hint: Any) -> list[Any]:
    """Return a type and all its parts, including the metadata of Annotated."""
    metadata = hint.__metadata__ if get_origin(hint) is Annotated else ()
    return [hint, *metadata, *(part for arg in get_args(hint) for part in flatten(arg))]


def explain(error: ErrorDetails, cls: Any, where: str) -> str:
    names = [str(part) for part in error["loc"]]
    if error["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        owner = inside(cls, names[:-1])
        known = [key_of(f.name) for f in dataclasses.fields(owner)] if owner else []
        names = [key_of(name) for name in names]
        key = dotted(where, names)
        if key in RENAMED:
            return f"unknown key {key}; it is now {RENAMED[key]}"
        return f"unknown key {key}{closest(names[-1], known) or '; this section has no keys'}"
    key = dotted(where, path_of_fields(cls, names))
    if error["type"] == "missing":
        return f"{key} is missing"
    message = error["msg"][:1].lower() + error["msg"][1:]
    return f"{key}: {message}, found {json.dumps(error['input'], ensure_ascii=False, default=str)}"


def inside(cls: Any, names: list[str]) -> Any:
    """Return the dataclass at a path inside `cls`, or None."""
    for name in names:
        hints = get_type_hints(cls, include_extras=True)
        if name in hints:
            cls = next((part for part in flatten(hints[name]) if is_section(part)), None)
        if cls is None:
            return None
    return cls


def path_of_fields(cls: Any, names: list[str]) -> list[str]:
    """Return the path without the type names that pydantic adds for unions."""
    kept: list[str] = []
    is_key = False  # of a mapping
    for name in names:
        known = get_type_hints(cls) if is_section(cls) else {}
        if is_key:
            kept.append(name)
            is_key = False
        elif name in known or name.isdigit():
            kept.append(key_of(name))
            is_key = is_mapping(known.get(name))
            cls = inside(cls, [name]) if name in known else None
    return kept


def is_mapping(hint: Any) -> bool:
    """Return whether a setting has keys that the user chooses."""
    return any(get_origin(part) is dict for part in flatten(hint))


def dotted(where: str, names: list[str]) -> str:
    return ".".join([where, *names] if where else names)


def read(text: str, source: str) -> RawConfig:
    """Return the mapping in a YAML text."""
    raw = yaml_files.parse(text, source)
    if raw is None:
        return {}
    if not isinstance(raw, dict):
        raise ConfigError(f"{source}: expected sections such as data: and model:, found {type(raw).__name__}")
    return raw


def override(raw: RawConfig, item: str, base: Path | None = None) -> None:
    """Apply `a.b=value` to a nested mapping. The value is parsed as YAML. Relative paths in it are relative to `base`, if given."""
    key, equals, text = item.partition("=")
    if not equals or not re.fullmatch(r"[\w-]+(\.[\w-]+)*", key):
        raise ConfigError(f"argument {item!r} does not have the form section.key=value", "for example train.epochs=3")
    *parents, last = key.split(".")
    for parent in parents:
        inner = raw.get(parent)
        if isinstance(inner, str):  # `model: deepfm` is short for {name: deepfm}
            inner = {"name": inner}
        raw[parent] = inner = {} if inner is None else inner
        if not isinstance(inner, dict):
            raise ConfigError(f"argument {item!r}: {parent} is a value, not a section")
        raw = inner
    is_sign = len(text) == 1 and not text.isalnum() and text != "~"  # such as a separator, which is not YAML
    value = text if is_sign else read(f"value: {text}", f"argument {item!r}")["value"]
    raw[last] = value if base is None else anchored(value, Config, key.split("."), base)


def anchored(value: Any, hint: Any, names: Sequence[str], base: Path) -> Any:
    """Return the value of the setting `names` inside `hint` with its relative paths resolved against `base`."""
    parts = flatten(hint)
    if Plugin in parts:
        if names:  # a setting of a plug-in
            return sections.plugin_path(names[0], value, base)
        if isinstance(value, dict):
            return {key: sections.plugin_path(key, item, base) for key, item in value.items()}
        return sections.plugin_path("name", value, base)
    if (section := next((part for part in parts if is_section(part)), None)) is not None:
        hints = get_type_hints(section, include_extras=True)
        if names:
            name = field_of(names[0])
            return anchored(value, hints[name], names[1:], base) if name in hints else value
        if isinstance(value, dict):
            fields = {key: hints.get(field_of(key)) for key in value}
            return {key: anchored(item, fields[key], (), base) if fields[key] else item for key, item in value.items()}
    if sections.PATH in parts:
        many = isinstance(value, list)
        each = [sections.beside(item, base) if isinstance(item, str) else item for item in (value if many else [value])]
        return each if many else each[0]
    return value


def dump(config: Config) -> str:
    """Return the configuration as YAML, including defaults. Loading it gives an equal Config."""
    return yaml.safe_dump(plain(config), sort_keys=False, allow_unicode=True)


def plain(value: Any, as_given: bool = False) -> Any:
    """Return a configuration as plain values. `as_given` omits names and settings of plug-ins that are defaults."""
    if isinstance(value, sections.AutoInt | sections.AutoFloat):
        return AUTO
    if isinstance(value, sections.WorkerRange):
        return str(value)
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
        out[key_of(name)] = unit.text(item) if unit and item is not None else plain(item, as_given)
    return out
