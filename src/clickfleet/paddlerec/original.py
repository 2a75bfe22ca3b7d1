"""Read a PaddleRec configuration as its tools do: sections flattened to dotted keys, `-o` applied, {workspace} replaced.

>>> flatten({"runner": {"epochs": 3}, "hyper_parameters": {"optimizer": {"class": "Adam"}}})
{'runner.epochs': 3, 'hyper_parameters.optimizer.class': 'Adam'}
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clickfleet.config import yaml_files
from clickfleet.errors import ConfigError

SECTIONS = ("runner", "hyper_parameters", "table_parameters")
Values = dict[str, Any]
"""Keys of PaddleRec and their values, as YAML has them."""


@dataclass
class Original:
    """The content of a file, by dotted key."""

    path: Path
    values: Values
    twice: list[str] = field(default_factory=list)
    """Keys that the file sets more than once. The last value counts, as in PaddleRec."""
    dropped: list[str] = field(default_factory=list)
    """Sections that PaddleRec ignores."""

    @property
    def folder(self) -> Path:
        return self.path.parent

    @property
    def is_online(self) -> bool:
        """Whether the file is for the online trainer, which processes days."""
        return "runner.start_day" in self.values

    @property
    def for_readers(self) -> Values:
        """The dictionary that readers receive."""
        return {**self.values, "config_abs_dir": str(self.folder), "yaml_path": str(self.path)}


class _Loader(yaml_files.YamlLoader):
    """The loader of our configurations, except that it only records duplicate keys and allows numbers as keys."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.twice: list[str] = []

    def given_twice(self, name: Any, node: Any) -> None:
        self.twice.append(str(name))

    def accept_key(self, name: Any, node: Any) -> None:
        pass


def _load(path: Path) -> tuple[Any, list[str]]:
    loader: Any = yaml_files.make(yaml_files.read_text(path), str(path), _Loader)
    return yaml_files.run(loader, str(path)), loader.twice


def is_paddlerec(path: str | Path) -> bool:
    """Return whether a file is a configuration of PaddleRec: it has a section `runner` or `hyper_parameters`, or is of release 1."""
    path = Path(path)
    if path.suffix not in (".yaml", ".yml") or not path.is_file():
        return False
    text = path.read_text(encoding="utf-8", errors="replace")
    if not any(f"{section}:" in text for section in (*SECTIONS[:2], "trainer")):
        return False
    raw, _ = _load(path)
    if not isinstance(raw, dict):
        return False
    return any(isinstance(raw.get(section), dict) for section in SECTIONS[:2]) or _is_of_release_1(raw)


def _is_of_release_1(raw: Values) -> bool:
    """Return whether runners are in a list, or a trainer is inside `train`."""
    train = raw.get("train")
    return isinstance(raw.get("runner"), list) or (isinstance(train, dict) and "trainer" in train)


def read(path: str | Path, overrides: Iterable[str] = ()) -> Original:
    """Read a file and apply `-o key=value`. A value gets the type of the one it replaces; a new one is a string."""
    path = Path(path).absolute()
    raw, twice = _load(path)
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: expected sections such as runner: and hyper_parameters:")
    if _is_of_release_1(raw):
        raise ConfigError(
            f"{path} is a configuration of PaddleRec 1; only those of PaddleRec 2 are supported",
            "convert it to PaddleRec 2 (one map runner: and hyper_parameters:), or write one of ours: docs/migration.md",
        )
    workspace = raw.get("workspace")
    kept = {section: raw[section] for section in SECTIONS if isinstance(raw.get(section), dict)}
    values = flatten(kept)
    if isinstance(workspace, str):
        values = {key: _placed(value, workspace) for key, value in values.items()}
    for item in overrides:
        override(values, item)
    dropped = [str(key) for key in raw if key not in kept and key != "workspace"]
    return Original(path, values, twice, dropped)


def flatten(nested: Values, prefix: str = "") -> Values:
    """Turn nested maps into dotted keys. Lists stay lists."""
    flat: Values = {}
    for key, value in nested.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _placed(value: Any, workspace: str) -> Any:
    if isinstance(value, list):
        return [_placed(item, workspace) for item in value]
    return value.replace("{workspace}", workspace) if isinstance(value, str) else value


def is_override(item: str) -> bool:
    """Return whether an argument sets a key of PaddleRec, not one of ours."""
    return item.partition("=")[0].partition(".")[0] in SECTIONS


def override(values: Values, item: str) -> None:
    """Set one key as PaddleRec's `-o` does.

    >>> values = {"runner.epochs": 3, "runner.use_gpu": False}
    >>> override(values, "runner.epochs=5"), override(values, "runner.use_gpu=True"), override(values, "runner.new=5")
    (None, None, None)
    >>> values
    {'runner.epochs': 5, 'runner.use_gpu': True, 'runner.new': '5'}
    """
    key, equals, text = item.partition("=")
    if not equals or "=" in text or not is_override(item):
        raise ConfigError(f"-o {item!r} is not of the form section.key=value", "for example -o runner.epochs=3")
    before = values.get(key)
    try:
        if isinstance(before, bool):
            values[key] = text.lower() == "true"
        elif isinstance(before, int):
            values[key] = int(text)
        elif isinstance(before, float):
            values[key] = float(text)
        elif isinstance(before, list):  # PaddleRec made it a string, which no model can use
            values[key] = yaml_files.parse(text, f"-o {item!r}")
        else:
            values[key] = text
    except (ValueError, ConfigError):
        raise ConfigError(
            f"-o {item!r}: {text!r} does not have the type of {key} in the file, which is {before!r}"
        ) from None


class YamlHelper:
    """The class that readers import from PaddleRec's helper modules when they run as programs."""

    def load_yaml(self, yaml_file: str, other_part: object = None) -> Values:
        return read(yaml_file).for_readers
