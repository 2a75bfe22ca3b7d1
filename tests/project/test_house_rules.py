"""Rules of the source tree that no linter knows."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "clickfleet"
PLUGINS = {"models", "training/modes", "data/formats", "online/sources"}
"""Folders of plug-ins, whose files are named by users."""
REPEATED_FILES = {"__init__.py", "__main__.py"}
ALLOCATED_BARE = {("data/batch.py", "Batch")}
"""Objects made without their checks, because a part of something checked needs none."""


@cache
def modules() -> dict[str, ast.Module]:
    return {str(path.relative_to(SOURCE)): ast.parse(path.read_text()) for path in sorted(SOURCE.rglob("*.py"))}


def room(path: str) -> str:
    return path.partition("/")[0]


def is_plugin(path: str) -> bool:
    return path.startswith("cli/") or any(path.startswith(f"{folder}/") for folder in PLUGINS)


def classes() -> Iterator[tuple[str, ast.ClassDef]]:
    for path, tree in modules().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                yield path, node


def bases(node: ast.ClassDef) -> list[str]:
    """The names of the bases of a class: `Loop` for both `loop.Loop` and `Loop[int]`."""
    found = []
    for base in node.bases:
        inner = base.value if isinstance(base, ast.Subscript) else base
        found.append(inner.attr if isinstance(inner, ast.Attribute) else getattr(inner, "id", ""))
    return found


def initialiser(node: ast.ClassDef) -> ast.FunctionDef | None:
    found = [part for part in node.body if isinstance(part, ast.FunctionDef) and part.name == "__init__"]
    return found[0] if found else None


def is_dataclass(node: ast.ClassDef) -> bool:
    marks = [mark.func if isinstance(mark, ast.Call) else mark for mark in node.decorator_list]
    return any(getattr(mark, "id", getattr(mark, "attr", "")) == "dataclass" for mark in marks)


def calls_super(function: ast.FunctionDef) -> bool:
    return any(
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "__init__"
        and isinstance(node.func.value, ast.Call)
        and getattr(node.func.value.func, "id", "") == "super"
        for node in ast.walk(function)
    )


def test_no_subclass_skips_the_initialiser_of_its_base() -> None:
    """Neither by an `__init__` of its own nor, as a dataclass, by a generated one."""
    own = defaultdict(list)
    for _, node in classes():
        own[node.name].append(node)

    def initialised(name: str, plainly: bool) -> bool:
        """Whether a class of ours, or a base of it, has an `__init__`; `plainly`: a written one."""
        return any(
            initialiser(node) is not None
            or (is_dataclass(node) and not plainly)
            or any(initialised(base, plainly) for base in bases(node) if base != name)
            for node in own[name]
        )

    wrong = []
    for path, node in classes():
        function = initialiser(node)
        if function is not None and not calls_super(function) and any(initialised(base, False) for base in bases(node)):
            wrong.append(f"{path}: {node.name}")
        if is_dataclass(node) and any(initialised(base, True) for base in bases(node)):
            wrong.append(f"{path}: {node.name}, a dataclass")
    assert not wrong, "call super().__init__(), or derive from a Protocol"


def test_no_namespace_plays_an_object() -> None:
    wrong = [
        path
        for path, tree in modules().items()
        for node in ast.walk(tree)
        if (isinstance(node, ast.Name) and node.id == "SimpleNamespace")
        or (isinstance(node, ast.Attribute) and node.attr == "SimpleNamespace")
    ]
    assert not wrong, "write a class"


def test_no_object_is_made_around_its_initialiser() -> None:
    wrong = []
    for path, tree in modules().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "__new__":
                of_super = isinstance(node.func.value, ast.Call)  # in a __new__ of its own
                made = getattr(node.args[0], "id", "") if node.args else ""
                if not of_super and (path, made) not in ALLOCATED_BARE:
                    wrong.append(f"{path}:{node.lineno}")
    assert not wrong, "call the class"


def test_no_two_rooms_share_a_file_name() -> None:
    rooms = defaultdict(set)
    for path in modules():
        if not is_plugin(path) and Path(path).name not in REPEATED_FILES:
            rooms[Path(path).name].add(room(path))
    assert not {name: found for name, found in rooms.items() if len(found) > 1}, "name one of them by what it does"


def test_no_two_rooms_share_a_class_name() -> None:
    rooms = defaultdict(set)
    for path, tree in modules().items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_") and not is_plugin(path):
                rooms[node.name].add(room(path))
    assert not {name: found for name, found in rooms.items() if len(found) > 1}, "name one of them by what it does"
