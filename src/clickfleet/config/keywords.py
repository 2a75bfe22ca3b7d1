"""Turn keyword arguments of Python functions into `key=value` settings.

A keyword is the name of a section (`model="dcn_v2"`, `train={"epochs": 3}`), a whole key with `__` for the dot
(`train__epochs=3`, `table__rule__lr=0.1`), or only the last word of a key if no other section has it (`epochs=3`).

>>> as_overrides({"model": "dcn_v2", "epochs": 3, "table": {"dim": 8}, "dense__lr": 0.01})
['model="dcn_v2"', 'train.epochs=3', 'table.dim=8', 'dense.lr=0.01']
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from functools import cache
from os import PathLike
from typing import Any, get_type_hints

from clickfleet.config.load import Config, flatten, is_section
from clickfleet.config.plugins import Plugin, closest
from clickfleet.errors import ConfigError

SECTIONS = ("data", "table", "dense", "train", "run")
"""The sections whose keys can be written without the section."""


def as_overrides(keywords: Mapping[str, Any]) -> list[str]:
    """Return keyword arguments as arguments of the form `section.key=value`."""
    return [
        f"{key}={_text(key, value)}" for name, given in keywords.items() for key, value in _flat(key_of(name), given)
    ]


def key_of(keyword: str) -> str:
    """Return the dotted key that a keyword means.

    >>> key_of("batch_size"), key_of("table__rule__lr"), key_of("train.epochs")
    ('data.batch_size', 'table.rule.lr', 'train.epochs')
    """
    sections = [field.name for field in dataclasses.fields(Config)]
    dotted = keyword.replace("__", ".")
    if dotted.split(".")[0] in sections:
        return dotted
    owners = _owners().get(keyword, [])
    if not owners:
        raise ConfigError(
            f"unknown setting {keyword}{closest(keyword, [*sections, *_owners()])}",
            "write section__key=…, or the argument 'section.key=value'",
        )
    if len(owners) > 1:
        choices = " or ".join(f"{owner}__{keyword}" for owner in owners)
        raise ConfigError(f"{keyword} is a setting of {' and of '.join(owners)}", f"write {choices}")
    return f"{owners[0]}.{keyword}"


@cache
def _owners() -> dict[str, list[str]]:
    """Return the sections that have each key."""
    hints, owners = get_type_hints(Config, include_extras=True), dict[str, list[str]]()
    for section in SECTIONS:
        for kind in (part for part in flatten(hints[section]) if is_section(part) and part is not Plugin):
            for field in dataclasses.fields(kind):
                owners.setdefault(field.name, []).append(section)
    return owners


def _flat(key: str, given: Any) -> Iterator[tuple[str, Any]]:
    """Yield a key and its value, or the keys inside of a section. A name goes first, because it replaces the section."""
    if not isinstance(given, Mapping) or not given:
        yield key, given
        return
    if "name" in given:
        yield key, given["name"]
    for inner, value in given.items():
        if inner != "name":
            yield from _flat(f"{key}.{inner}", value)


def _text(key: str, value: Any) -> str:
    try:
        return json.dumps(value, default=_plain, allow_nan=False, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{key}: a setting cannot hold {type(value).__name__}: {error}") from None


def _plain(value: Any) -> Any:
    """Return what JSON can hold of a path, a NumPy number or array, or a set."""
    if isinstance(value, PathLike):
        return str(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError("use text, numbers, lists and mappings")
