"""Find plug-ins by name: the one public object of a built-in file or of a user's file.

A user's file is code, and so is the command of a format. Names from the command line and from the user's own configuration are trusted.
Names from a saved model, a run folder or a server carry their `origin`, and `check_trusted` refuses to run them.

>>> from clickfleet.data.formats import Format
>>> find("formats", "criteo", Format).separator
'\\t'
"""

import difflib
import hashlib
import importlib.util
import pkgutil
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, fields, is_dataclass, replace
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from clickfleet.errors import ClickfleetError, ConfigError, TrustError

FOLDERS = {
    "formats": "clickfleet.data.formats",
    "models": "clickfleet.models",
    "modes": "clickfleet.training.modes",
}
"""The package of each kind of plug-in."""
EXTENSIONS = ("clickfleet.paddlerec.extension",)
"""Modules that extend the packages below them. They are loaded by name, so that no lower package imports them."""


@dataclass(frozen=True)
class Plugin:
    """The name of a built-in plug-in, or the path of a user's file, and the settings of its `Config`."""

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    origin: str = field(default="", compare=False)
    """The model, run folder or server that named the plug-in. Empty: the user did. Code from any other origin is not run."""
    given: Mapping[str, Any] | None = field(default=None, compare=False, repr=False)
    """Settings given without a name, which override single settings of the default. None: a name was given."""

    @classmethod
    def parse(cls, given: Any, origin: str = "") -> "Plugin":
        """Return the plug-in described by `{name: …, setting: …}`."""
        if not isinstance(given, Mapping) or not isinstance(given.get("name"), str):
            raise ConfigError(f"{origin or 'data.format'}: the format has no name: {given!r:.80}")
        return cls(given["name"], {str(key): item for key, item in given.items() if key != "name"}, origin)


def check_trusted(plugin: Plugin, action: str) -> None:
    """Raise TrustError for `action`, which runs code, unless the user named the plug-in or trusts its origin."""
    if plugin.origin:
        raise TrustError(
            f"{shown(plugin.origin)} would run code on this machine without your permission:\n    {action}",
            "if you trust its author, add --trust (trust=True in Python)",
        )


def shown(text: str) -> str:
    """Return untrusted text for a terminal. Escape control characters, which could hide a part of it.

    >>> shown("cat \\x1b[8m; rm -rf ~")
    "'cat \\\\x1b[8m; rm -rf ~'"
    """
    return text if text.isprintable() else repr(text)


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the known name most similar to `name`, or None if no similarity (0 to 1) reaches `cutoff`."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)), None)


def closest(name: str, known: Iterable[str]) -> str:
    """Return the end of a message about an unknown name: a suggestion, or the list of known names.

    >>> closest("citeo", ["criteo", "csv"])
    '; did you mean criteo?'
    """
    choices = list(known)
    if near := nearest(name, choices):
        return f"; did you mean {near}?"
    return f"; choose from {', '.join(choices)}" if choices else ""


def extensions(hook: str) -> list[Callable[..., Any]]:
    """Return the functions named `hook` of all extensions."""
    modules = map(import_module, EXTENSIONS)
    return [getattr(module, hook) for module in modules if hasattr(module, hook)]


def names(folder: str) -> list[str]:
    """Return the names of the plug-ins in a folder: its files, except those that start with an underscore."""
    package = import_module(FOLDERS[folder])
    return sorted(
        module.name.rstrip("_") for module in pkgutil.iter_modules(package.__path__) if not module.name.startswith("_")
    )


def find(folder: str, name: str | Plugin, kind: Any, base: str | Path = ".") -> Any:
    """Return the object of type `kind`, or the subclass of it, in `<folder>/<name>.py` or in a user's file.

    The name of a user's file is a path that ends in .py. Relative paths are relative to `base`.
    """
    source = module(folder, name, base)
    candidates = [
        item
        for key, item in vars(source).items()
        if not key.startswith("_")
        and not isinstance(item, ModuleType)
        and (
            issubclass(item, kind) and item is not kind and item.__module__ == source.__name__
            if isinstance(item, type)
            else isinstance(item, kind)
        )
    ]
    if len(candidates) != 1:
        raise ConfigError(
            f"{source.__file__}: expected one public {folder.rstrip('s')}, found {len(candidates) or 'none'}",
            "start the names of helpers with an underscore"
            if candidates
            else f"see `{FOLDERS[folder]}` for what it must define",
        )
    return candidates[0]


def module(folder: str, name: str | Plugin, base: str | Path = ".") -> ModuleType:
    """Import the built-in plug-in of that name, or a user's file."""
    plugin = Plugin(name) if isinstance(name, str) else name
    if not plugin.name.endswith(".py"):
        return _shipped(folder, plugin.name)
    path = Path(base) / plugin.name
    check_trusted(plugin, f"import {shown(str(path.absolute()))}")
    return _user_file(path, folder)


def build(item: Any, options: Mapping[str, Any], where: str) -> Any:
    """Apply options to a plug-in: call a class with them, or copy an instance with them. Reject unknown options."""
    known = [field.name for field in fields(item) if field.init] if is_dataclass(item) else []
    for key in options:
        if key not in known:
            raise ConfigError(f"unknown key {where}.{key}{closest(key, known)}")
    if isinstance(item, type):
        return item(**options)
    return replace(item, **options) if options else item


def _shipped(folder: str, name: str) -> ModuleType:
    known = names(folder)
    if name not in known:
        raise ConfigError(
            f"unknown {folder.rstrip('s')} {name!r}{closest(name, known)}",
            f"to use your own file, give its path: ./{name}.py",
        )
    package = f"{FOLDERS[folder]}."
    return import_module(package + (name if importlib.util.find_spec(package + name) else name + "_"))


def _user_file(path: Path, folder: str) -> ModuleType:
    if not path.is_file():
        raise ConfigError(f"there is no file {path} (given as a {folder.rstrip('s')})")
    # One module object per path: a file loaded twice would define every class twice.
    name = f"_clickfleet_{path.stem}_{hashlib.blake2b(str(path.resolve()).encode(), digest_size=6).hexdigest()}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, str(path.resolve().parent))  # for helpers in the same folder
    try:
        with ExitStack() as around:
            for provide in extensions("stand_ins"):
                around.enter_context(provide(path))
            spec.loader.exec_module(module)
    except ClickfleetError:
        del sys.modules[name]
        raise
    except Exception as error:
        del sys.modules[name]
        raise ConfigError(f"cannot import {path}: {type(error).__name__}: {error}") from error
    finally:
        sys.path.remove(str(path.resolve().parent))
    return module
