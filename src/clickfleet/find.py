"""A name -> the one public object of that plug-in file, or of a user's own file.

A user's own file is code, and so is the command of a format. Names from the command line and from a configuration that the user
names are trusted. Names from a saved model, a run folder or a server carry their `origin`, and `check_trusted` refuses to run them.

>>> from clickfleet.formats import Format
>>> find("formats", "criteo", Format).separator
'\\t'
"""

import difflib
import hashlib
import importlib.util
import pkgutil
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from clickfleet.errors import ClickfleetError, ConfigError, TrustError

ELSEWHERE = {("models", "word2vec"): "clickfleet.words.model"}
"""Plug-ins that stand apart from those of their folder: word2vec has a step of its own and no score of a row."""


@dataclass(frozen=True)
class Plugin:
    """A file of a plug-in folder (or a user's own, by its path), and the settings of its `Config`."""

    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    origin: str = field(default="", compare=False)
    """The model, run folder or server that named it; empty if the user did. Code of another origin is not run."""
    given: dict[str, Any] | None = field(default=None, compare=False, repr=False)
    """The settings that were given without a name: they change only themselves in the default. None: the name was given."""

    @classmethod
    def parse(cls, given: Any, origin: str = "") -> "Plugin":
        """A plug-in from `{name: …, setting: …}`, as JSON files and replies hold it."""
        if not isinstance(given, Mapping) or not isinstance(given.get("name"), str):
            raise ConfigError(f"{origin or 'data.format'}: the name of the format is missing: {given!r:.80}")
        return cls(given["name"], {str(key): item for key, item in given.items() if key != "name"}, origin)


def check_trusted(plugin: Plugin, action: str) -> None:
    """Refuses `action`, which runs code, unless the user named the plug-in or trusts whoever did."""
    if plugin.origin:
        raise TrustError(
            f"{shown(plugin.origin)} names code that would run on this machine, and you have not allowed it:\n    {action}",
            "if you trust its author, add --trust (trust=True in Python)",
        )


def shown(text: str) -> str:
    """Text of others for a terminal: control characters, which could hide a part of it, are escaped.

    >>> shown("cat \\x1b[8m; rm -rf ~")
    "'cat \\\\x1b[8m; rm -rf ~'"
    """
    return text if text.isprintable() else repr(text)


def closest(name: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: a suggestion, or all there is."""
    choices = list(known)
    near = difflib.get_close_matches(name, choices, n=1, cutoff=0.6)
    if near:
        return f"; did you mean {near[0]}?"
    return f"; there is {', '.join(choices)}" if choices else ""


def names(folder: str) -> list[str]:
    """The plug-ins of a folder: its files, but for helpers whose name starts with an underscore."""
    package = import_module(f"clickfleet.{folder}")
    return sorted(
        module.name.rstrip("_") for module in pkgutil.iter_modules(package.__path__) if not module.name.startswith("_")
    )


def find(folder: str, name: str | Plugin, kind: Any, base: str | Path = ".") -> Any:
    """The object of type `kind` (or class derived from it) in `clickfleet/<folder>/<name>.py` or in a user's file.

    A user's file is named by a path that ends in .py; `base` is what a relative path is relative to.
    """
    home = module(folder, name, base)
    mine = [
        item
        for key, item in vars(home).items()
        if not key.startswith("_")
        and not isinstance(item, ModuleType)
        and (
            issubclass(item, kind) and item is not kind and item.__module__ == home.__name__
            if isinstance(item, type)
            else isinstance(item, kind)
        )
    ]
    if len(mine) != 1:
        found = f"{len(mine)} of them" if mine else "none"
        raise ConfigError(
            f"{home.__file__}: expected one public {folder.rstrip('s')}, found {found}",
            "start the names of helpers with an underscore"
            if mine
            else f"see `clickfleet.{folder}` for what it must have",
        )
    return mine[0]


def module(folder: str, name: str | Plugin, base: str | Path = ".") -> ModuleType:
    """The plug-in file of that name in a folder, or a user's own, imported."""
    plugin = Plugin(name) if isinstance(name, str) else name
    if not plugin.name.endswith(".py"):
        return _shipped(folder, plugin.name)
    path = Path(base) / plugin.name
    check_trusted(plugin, f"import {shown(str(path.absolute()))}")
    return _user_file(path, folder)


def build(item: Any, options: dict[str, Any], where: str) -> Any:
    """`item` with options: a class is called with them, an instance is copied with them; unknown ones are refused."""
    known = [field.name for field in fields(item) if field.init] if is_dataclass(item) else []
    for key in options:
        if key not in known:
            raise ConfigError(f"unknown key {where}.{key}{closest(key, known)}")
    if isinstance(item, type):
        return item(**options)
    return replace(item, **options) if options else item


def _shipped(folder: str, name: str) -> ModuleType:
    if (folder, name) in ELSEWHERE:
        return import_module(ELSEWHERE[folder, name])
    known = names(folder)
    if name not in known:
        raise ConfigError(
            f"there is no {folder.rstrip('s')} {name!r}{closest(name, known)}",
            f"your own file works too: name it by its path, ./{name}.py",
        )
    package = f"clickfleet.{folder}."
    return import_module(package + (name if importlib.util.find_spec(package + name) else name + "_"))


def _user_file(path: Path, folder: str) -> ModuleType:
    if not path.is_file():
        raise ConfigError(f"there is no file {path} (named as a {folder.rstrip('s')})")
    # One module object per path: classes of a file loaded twice would not be the same classes.
    name = f"_clickfleet_{path.stem}_{hashlib.blake2b(str(path.resolve()).encode(), digest_size=6).hexdigest()}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, str(path.resolve().parent))  # its own helpers, beside it
    from clickfleet.paddle_names import provided

    try:
        with provided(path):
            spec.loader.exec_module(module)
    except ClickfleetError:
        del sys.modules[name]
        raise
    except Exception as error:
        del sys.modules[name]
        raise ConfigError(f"{path} cannot be imported: {type(error).__name__}: {error}") from error
    finally:
        sys.path.remove(str(path.resolve().parent))
    return module
