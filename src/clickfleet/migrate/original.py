"""A PaddleRec configuration as its tools read it: sections flattened to dotted keys, `-o` applied, paths as they meant them.

>>> flatten({"runner": {"epochs": 3}, "hyper_parameters": {"optimizer": {"class": "Adam"}}})
{'runner.epochs': 3, 'hyper_parameters.optimizer.class': 'Adam'}
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clickfleet import yaml_files
from clickfleet.errors import ConfigError

SECTIONS = ("runner", "hyper_parameters", "table_parameters")


@dataclass
class Original:
    """What a file says, by dotted key."""

    path: Path
    values: dict[str, Any]
    twice: list[str] = field(default_factory=list)
    """Keys that the file gives more than once: the last one counted, and counts."""
    dropped: list[str] = field(default_factory=list)
    """Sections that no tool ever read."""

    @property
    def folder(self) -> Path:
        return self.path.parent

    @property
    def is_online(self) -> bool:
        """Whether it works through days, as the online trainer's do."""
        return "runner.start_day" in self.values

    @property
    def for_readers(self) -> dict[str, Any]:
        """The dictionary that readers are given."""
        return {**self.values, "config_abs_dir": str(self.folder), "yaml_path": str(self.path)}


class _Loader(yaml_files.Loader):
    """As the configuration's loader, but a key given twice is only noted, and keys may be numbers."""

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
    """Whether a file is a configuration of PaddleRec: it has a section `runner` or `hyper_parameters`, or is one of release 1."""
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


def _is_of_release_1(raw: dict[str, Any]) -> bool:
    """Runners in a list, or a trainer inside `train`."""
    train = raw.get("train")
    return isinstance(raw.get("runner"), list) or (isinstance(train, dict) and "trainer" in train)


def read(path: str | Path, overrides: Iterable[str] = ()) -> Original:
    """The file with `-o key=value` over it: a value takes the type of the one it replaces, a new one is text."""
    path = Path(path).absolute()
    raw, twice = _load(path)
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: expected sections such as runner: and hyper_parameters:")
    if _is_of_release_1(raw):
        raise ConfigError(
            f"{path} is a configuration of PaddleRec 1, and those of release 2 are read",
            "bring it into the form of release 2 (one map runner:, and hyper_parameters:), or write one of ours: docs/migration.md",
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


def flatten(nested: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested maps as dotted keys; lists stay lists."""
    flat: dict[str, Any] = {}
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
    """Whether an argument sets a key of PaddleRec's rather than one of ours."""
    return item.partition("=")[0].partition(".")[0] in SECTIONS


def override(values: dict[str, Any], item: str) -> None:
    """Sets one key as `-o` did.

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
        elif isinstance(before, list):  # the tools made it a text, which no model could use
            values[key] = yaml_files.parse(text, f"-o {item!r}")
        else:
            values[key] = text
    except (ValueError, ConfigError):
        raise ConfigError(f"-o {item!r}: {key} is {before!r} in the file, and {text!r} is not of that kind") from None


class YamlHelper:
    """What readers import from the old tools' helper modules, where they run as programs of their own."""

    def load_yaml(self, yaml_file: str, other_part: object = None) -> dict[str, Any]:
        return read(yaml_file).for_readers
