"""Recipes: complete settings for a model or a size of data, without the data. `clickfleet recipes` lists them.

>>> recipe = find("fm")
>>> recipe.name, recipe.model, recipe.about, recipe.auc
('fm', 'fm', "A factorization machine, on Criteo's columns.", 0.716)
>>> recipe.settings()["table"]
{'dim': 10}
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clickfleet.config import yaml_files
from clickfleet.config.plugins import closest
from clickfleet.errors import ConfigError

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Recipe:
    """A YAML file of this folder. The comment at its head says what it is for, and which AUC to expect on which data."""

    name: str
    text: str

    @property
    def head(self) -> str:
        """The comment at the head, without the commands in it."""
        lines = [line.removeprefix("#") for line in self.text.splitlines() if line.startswith("#")]
        return " ".join(line.strip() for line in lines if not line.startswith("   "))

    @property
    def about(self) -> str:
        """The first sentence of the comment, without what follows a colon."""
        return re.split(r"\.\s|:\s", self.head, maxsplit=1)[0] + "."

    @property
    def model(self) -> str:
        return str(self.settings()["model"]["name"])

    @property
    def expected(self) -> str | None:
        """The sentence on what to expect."""
        found = re.search(r"Expect [^`]*`[^`]*`\.", self.head)
        return found[0] if found else None

    @property
    def auc(self) -> float | None:
        """The AUC to expect."""
        found = re.search(r"test AUC of (\d\.\d+)", self.expected or "")
        return float(found[1]) if found else None

    def settings(self) -> dict[str, Any]:
        """Return the settings, not yet checked."""
        raw: dict[str, Any] = yaml_files.parse(self.text, f"recipe {self.name}")
        return raw


def every() -> list[Recipe]:
    """Return all recipes, by name."""
    return [Recipe(path.stem, path.read_text(encoding="utf-8")) for path in sorted(FOLDER.glob("*.yaml"))]


def find(name: str) -> Recipe:
    """Return a recipe by its name."""
    recipes = {recipe.name: recipe for recipe in every()}
    if name not in recipes:
        raise ConfigError(f"unknown recipe {name!r}{closest(name, recipes)}", "clickfleet recipes lists all")
    return recipes[name]


def under(recipe: str, config: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the settings of a recipe with those of `config` over them. A section of a plug-in with a name replaces the recipe's.

    >>> under("fm", {"table": {"dim": 3}, "model": "lr"})["table"], under("fm", {"model": "lr"})["model"]
    ({'dim': 3}, 'lr')
    """
    return _merged(find(recipe).settings(), config or {})


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, item in above.items():
        both = isinstance(item, Mapping) and isinstance(below.get(key), Mapping) and "name" not in item
        merged[key] = _merged(below[key], item) if both else item
    return merged
