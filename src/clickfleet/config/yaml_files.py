"""Parse YAML written by people. Ambiguous or unbounded input is rejected; every error names the file and the line.

>>> parse("a: 5e-6", "x.yaml")
{'a': 5e-06}
>>> parse("a: 1\\na: 2", "x.yaml")
Traceback (most recent call last):
    ...
clickfleet.errors.ConfigError: x.yaml:2: duplicate key a
  check the indentation and the quotes
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from clickfleet.errors import ConfigError

MAX_CHARACTERS = 4 << 20
MAX_DEPTH = 64
MAX_REPEATED = 10_000
"""Maximum number of values that aliases may repeat. Ten lines of nested aliases can expand to billions."""


class YamlLoader(yaml.SafeLoader):
    """Reads 5e-6 as a number, and rejects duplicate keys and keys that are not text."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = self._repeated = 0
        self._sizes: dict[int, int] = {}

    def compose_node(self, parent: Any, index: Any) -> Any:
        mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
        alias = self.check_event(yaml.AliasEvent)
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise yaml.composer.ComposerError(None, None, f"more than {MAX_DEPTH} levels of nesting", mark)
        node: Any = super().compose_node(parent, index)
        self._depth -= 1
        if not alias:
            sizes = [self._sizes.get(id(part), 0) for part in _parts(node)]
            self._sizes[id(node)] = 1 + sum(sizes)
        elif (size := self._sizes.get(id(node))) is None:
            raise yaml.composer.ComposerError(None, None, "an alias refers to the value that contains it", mark)
        else:
            self._repeated += size
        if self._repeated > MAX_REPEATED:
            raise yaml.composer.ComposerError(None, None, f"aliases repeat more than {MAX_REPEATED} values", mark)
        return node

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except yaml.YAMLError:
            raise
        except Exception as error:  # a date of month 13, an integer of 5000 digits, !!int of a word
            text = str(getattr(node, "value", ""))[:40]
            kind = node.tag.rpartition(":")[2]
            raise _wrong(f"{text!r} is not a valid {kind}; if it is text, put it in quotes", node) from error

    def given_twice(self, name: Any, node: yaml.Node) -> None:
        """Handle a duplicate key of a mapping: raise. Subclasses may accept it."""
        raise _wrong(f"duplicate key {name}", node)

    def accept_key(self, name: Any, node: yaml.Node) -> None:
        """Reject keys that are not text."""
        if not isinstance(name, str):
            raise _wrong(f"the key {name} is not text; put it in quotes", node)


YamlLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d[\d_]*)(\.\d*)?[eE][-+]?\d+$|^[-+]?\.\d+[eE][-+]?\d+$"),
    list("-+.0123456789"),
)


def _parts(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [part for pair in node.value for part in pair]
    return node.value if isinstance(node, yaml.SequenceNode) else []


def _wrong(problem: str, node: yaml.Node) -> yaml.constructor.ConstructorError:
    return yaml.constructor.ConstructorError(None, None, problem, node.start_mark)


def _mapping(loader: YamlLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[Any] = set()
    for key, _ in node.value:
        if key.tag == "tag:yaml.org,2002:merge":
            continue
        if not isinstance(key, yaml.ScalarNode):
            raise _wrong("a list or mapping cannot be a key", key)
        name = loader.construct_object(key)
        loader.accept_key(name, key)
        if name in seen:
            loader.given_twice(name, key)
        seen.add(name)
    return yaml.SafeLoader.construct_mapping(loader, node, True)


YamlLoader.add_constructor("tag:yaml.org,2002:map", _mapping)


def parse(text: str, source: str) -> Any:
    """Return the content of a YAML text. Errors name it `source`."""
    return run(make(text, source), source)


def make(text: str, source: str, loader: type[YamlLoader] = YamlLoader) -> YamlLoader:
    """Return a loader for a text."""
    if len(text) > MAX_CHARACTERS:
        raise ConfigError(f"{source} has {len(text)} characters; the limit is {MAX_CHARACTERS}")
    try:
        return loader(text)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ConfigError(f"{source}:{line}: not a text file: it contains the character {error.character!r}") from None


def run(loader: YamlLoader, source: str) -> Any:
    """Return the content of a loader's text, and close the loader."""
    try:
        return loader.get_single_data()
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError(f"{source}{line}: {error.problem}", "check the indentation and the quotes") from error
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{source} is not valid YAML: {error}") from error
    finally:
        loader.dispose()


def read_text(path: str | Path) -> str:
    """Return the content of a UTF-8 text file."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}", "name an existing configuration file") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not a text file: byte {error.start} is not UTF-8") from None
