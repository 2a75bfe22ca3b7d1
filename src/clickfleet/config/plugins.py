"""Find plug-ins by name: the one public object of a built-in file or of a user's file.

The name of user code is the path of a file (`./my_model.py`, or `./my_model.py:MyModel` to choose one of several objects) or
`package.module:name`. An object that was passed in Python and cannot be imported is named `python:name`; it must be passed again.

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
from functools import partial
from importlib import import_module
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, cast, get_origin, get_type_hints

import yaml

from clickfleet.errors import ClickfleetError, ConfigError, TrustError

FOLDERS = {
    "formats": "clickfleet.data.formats",
    "models": "clickfleet.models",
    "modes": "clickfleet.training.modes",
}
"""The package of each kind of plug-in."""
EXTENSIONS = ("clickfleet.paddlerec.extension",)
"""Modules that extend the packages below them. They are loaded by name, so that no lower package imports them."""


AUTO = "auto"
"""The name of a format that is recognised from the files."""


@dataclass(frozen=True)
class Plugin:
    """The name of a built-in plug-in, or the path of a user's file, and the settings of its `Config`."""

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    origin: str = field(default="", compare=False)
    """The model, run folder or server that named the plug-in. Empty: the user did. Code from any other origin is not run."""
    given: Mapping[str, Any] | None = field(default=None, compare=False, repr=False)
    """Settings given without a name, which override single settings of the default. None: a name was given."""
    passed: Any = field(default=None, compare=False, repr=False)
    """The object itself, if it was passed in Python. It is not saved."""

    @property
    def is_user_code(self) -> bool:
        """Whether the plug-in is the user's: a file, an object of a module, or an object that was passed in Python."""
        return is_file(self.name) or bool(split_name(self.name)[1]) or self.name.startswith(PASSED)

    @property
    def automatic(self) -> bool:
        """Whether the format is to be recognised from the files."""
        return self.name == AUTO

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


PASSED = "python:"
"""Starts the name of an object that was passed in Python and cannot be imported."""


def reference(item: Any) -> str:
    """Return the name under which a class or function can be found again: of its file, or of its module if that is in a package.

    >>> reference(find)
    'clickfleet.config.plugins:find'
    >>> reference(lambda: 0)
    'python:<lambda>'
    """
    home, name = getattr(item, "__module__", ""), getattr(item, "__qualname__", type(item).__name__)
    source = sys.modules.get(home)
    if home == "__main__" or source is None or getattr(source, name, None) is not item:
        return PASSED + name
    file = getattr(source, "__file__", None)
    return f"{home}:{name}" if "." in home or file is None else f"{Path(file).absolute()}:{name}"


def passed(item: Any, settings: Mapping[str, Any] | None = None) -> Plugin:
    """Return the plug-in for an object that the user passes in Python."""
    return Plugin(reference(item), settings or {}, passed=item)


def split_name(name: str) -> tuple[str, str]:
    """Return the file or module of user code, and the name of the object there; empty if it is the only one.

    >>> split_name("./my.py:Net"), split_name("my.losses:focal"), split_name("deepfm")
    (('./my.py', 'Net'), ('my.losses', 'focal'), ('deepfm', ''))
    """
    source, colon, item = name.rpartition(":")
    return (source, item) if colon and item.isidentifier() else (name, "")


def is_file(name: str) -> bool:
    """Return whether a name is that of code in a user's file."""
    return split_name(name)[0].endswith(".py")


def find(folder: str, name: str | Plugin, kind: Any, base: str | Path = ".") -> Any:
    """Return the object of type `kind`, or the subclass of it, in `<folder>/<name>.py` or in user code.

    Relative paths of files are relative to `base`.
    """
    if isinstance(name, Plugin) and name.passed is not None:
        return name.passed
    source = module(folder, name, base)
    chosen = split_name(name if isinstance(name, str) else name.name)[1]
    if chosen:
        return _named(source, chosen, kind, folder)
    candidates = [
        item for key, item in vars(source).items() if not key.startswith("_") and _fits(item, kind, source.__name__)
    ]
    if len(candidates) != 1:
        raise ConfigError(
            f"{source.__file__}: expected one public {folder.rstrip('s')}, found {len(candidates) or 'none'}",
            "start the names of helpers with an underscore"
            if candidates
            else f"see `{FOLDERS[folder]}` for what it must define",
        )
    return candidates[0]


def _fits(item: Any, kind: Any, home: str) -> bool:
    """Return whether an object of the module `home` is a plug-in of that kind. Imported classes and functions are not."""
    if isinstance(item, type):
        return issubclass(item, kind) and item is not kind and item.__module__ == home
    if isinstance(item, FunctionType):
        return isinstance(item, kind) and item.__module__ == home
    return isinstance(item, kind) and not isinstance(item, ModuleType)


def _named(source: ModuleType, name: str, kind: Any, folder: str) -> Any:
    item = getattr(source, name, None)
    if not (issubclass(item, kind) if isinstance(item, type) else isinstance(item, kind)):
        known = [key for key, other in vars(source).items() if _fits(other, kind, source.__name__)]
        raise ConfigError(f"{source.__file__}: there is no {folder.rstrip('s')} {name!r}{closest(name, known)}")
    return item


def find_function(what: str, plugin: Plugin) -> Callable[..., Any]:
    """Return the function that a plug-in names, with its settings as keyword arguments. `what` names its purpose, for messages."""
    source, item = split_name(plugin.name)
    if plugin.passed is None and not item and not source.endswith(".py") and not source.startswith(PASSED):
        raise ConfigError(
            f"{plugin.name!r} does not name a {what}", "write ./my_file.py, ./my_file.py:name or package.module:name"
        )
    function = find(what, plugin, FunctionType)
    return partial(function, **plugin.settings) if plugin.settings else cast("Callable[..., Any]", function)


def module(folder: str, name: str | Plugin, base: str | Path = ".") -> ModuleType:
    """Import the built-in plug-in of that name, a user's file, or a user's module."""
    plugin = Plugin(name) if isinstance(name, str) else name
    source, item = split_name(plugin.name)
    if plugin.name.startswith(PASSED):
        raise ConfigError(
            f"the {folder.rstrip('s')} {item or plugin.name.removeprefix(PASSED)} was passed in Python and is not saved with the model",
            "pass it again (model_class=…, loss=… or metrics=…), or define it in a file of its own",
        )
    if not is_file(plugin.name):
        if not item:
            return _shipped(folder, plugin.name)
        check_trusted(plugin, f"import {shown(source)}")
        try:
            return import_module(source)
        except ImportError as error:
            raise ConfigError(f"cannot import {shown(source)}: {error}", "check PYTHONPATH") from error
    path = Path(base) / source
    check_trusted(plugin, f"import {shown(str(path.absolute()))}")
    return _user_file(path, folder)


def as_list(value: Any) -> Any:
    """Return the list that a single value or a text such as `a,b,c` stands for. Lists stay as they are.

    >>> as_list("400,400"), as_list("user, ad"), as_list(400), as_list([1])
    ([400, 400], ['user', 'ad'], [400], [1])
    """
    if isinstance(value, str):
        try:
            items = yaml.safe_load(f"[{value}]")
        except yaml.YAMLError:
            items = value.split(",")
        return items if all(isinstance(item, str | int | float) for item in items) else value.split(",")
    return [value] if isinstance(value, int | float) and not isinstance(value, bool) else value


def build(item: Any, options: Mapping[str, Any], where: str) -> Any:
    """Apply options to a plug-in: call a class with them, or copy an instance with them. Reject unknown options."""
    known = [field.name for field in fields(item) if field.init] if is_dataclass(item) else []
    for key in options:
        if key not in known:
            raise ConfigError(f"unknown key {where}.{key}{closest(key, known)}")
    hints = get_type_hints(item if isinstance(item, type) else type(item)) if options and known else {}
    options = {key: as_list(value) if get_origin(hints.get(key)) is tuple else value for key, value in options.items()}
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
