"""Only `data/files.py` renames files: everything else writes through `replacing`, `writing` or `move`."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src/clickfleet"
WRITER = SOURCE / "data/files.py"
CALLS = {"os.replace", "os.rename", "os.renames", "shutil.move", "tempfile.NamedTemporaryFile"}
OTHERS = {"processes"}
"""Objects that have a `replace` of their own."""


def renames(text: str) -> Iterator[int]:
    """Yield the lines of calls that rename a file: those of the standard library, and `Path.replace` and `Path.rename`."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom):
            if any(f"{node.module}.{name.name}" in CALLS for name in node.names):
                yield node.lineno
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            whole = ast.unparse(node.func)
            alone = (
                len(node.args) == 1 and not node.keywords
            )  # str.replace takes two, dataclasses and dates take keywords
            of = whole.split(".")[-2]
            if whole in CALLS or (alone and node.func.attr in ("replace", "rename") and of not in OTHERS):
                yield node.lineno


@pytest.mark.parametrize(
    "call",
    ["os.replace(a, b)", "hidden.replace(path)", "Path(a).rename(b)", "shutil.move(a, b)", "from os import replace"],
)
def test_a_rename_is_found(call: str) -> None:
    assert list(renames(call)) == [1]


@pytest.mark.parametrize("call", ["text.replace('a', 'b')", "replace(config, seed=1)", "when.replace(tzinfo=UTC)"])
def test_other_calls_are_not(call: str) -> None:
    assert list(renames(call)) == []


def test_one_module_renames_files() -> None:
    found = [
        f"{path.relative_to(SOURCE)}:{line}"
        for path in sorted(SOURCE.rglob("*.py"))
        for line in renames(path.read_text(encoding="utf-8"))
        if path != WRITER
    ]
    assert not found, "write the file with clickfleet.data.files.replacing"
    assert len(list(renames(WRITER.read_text()))) == 1
