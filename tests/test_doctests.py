"""The examples in the docstrings of the data modules."""

import doctest
from importlib import import_module

import pytest

MODULES = [
    "batch",
    "embedding",
    "events",
    "feeds",
    "files",
    "find",
    "formats._native",
    "generator",
    "schema",
    "shuffling",
]


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name: str) -> None:
    found = doctest.testmod(import_module(f"clickfleet.{name}"))
    assert found.attempted > 0
    assert found.failed == 0
