"""No code asks which model, format or mode it works with: a plug-in declares what it needs."""

import ast
from collections.abc import Iterator
from pathlib import Path

import clickfleet
from clickfleet.config.plugins import FOLDERS, names

SOURCE = Path(clickfleet.__file__).parent
SHIPPED = {name for folder in FOLDERS for name in names(folder)}
ALLOWED = {
    "config/plugins.py": "finds plug-ins by name",
    "paddlerec/": "translates the names of PaddleRec",
    "data/recognition.py": "recognises formats by the content of a file; joined rows have no schema of their own",
    "data/logs/": "writes files in these formats; the names are those of its own writers",
    "online/sources/kafka.py": "csv without columns needs a header line, which a record lacks",
    "online/sources/messages.py": "online.kafka.format, which names encodings of a record",
    "serve/uploads.py": "the formats that a client may upload, where no code of a user runs",
    "store/mirror.py": "schemes of a URL",
    "workbench/parity.py": "uploads of csv have a header line of their own",
}
"""Files and folders that compare such words, and why."""


def constants(tree: ast.Module) -> dict[str, set[str]]:
    """Return the shipped names in each constant of a module."""
    return {
        target.id: found
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name) and isinstance(node.value, ast.Constant | ast.Tuple | ast.Set | ast.List)
        if (found := literals(node.value))
    }


def literals(node: ast.AST) -> set[str]:
    return {each.value for each in ast.walk(node) if isinstance(each, ast.Constant) and each.value in SHIPPED}


def comparisons(text: str, known: dict[str, set[str]]) -> Iterator[tuple[int, set[str]]]:
    """Yield the line and the names of each comparison with a shipped name, or with a constant that holds one."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            found = {name for side in sides for name in literals(side) | known.get(getattr(side, "id", ""), set())}
            if found:
                yield node.lineno, found
        elif isinstance(node, ast.match_case) and (found := literals(node.pattern)):
            yield node.pattern.lineno, found


def test_no_code_compares_the_names_of_plug_ins() -> None:
    texts = {path.relative_to(SOURCE).as_posix(): path.read_text() for path in sorted(SOURCE.rglob("*.py"))}
    known = {name: found for text in texts.values() for name, found in constants(ast.parse(text)).items()}
    bad, used = [], set()
    for path, text in texts.items():
        own = {part.removesuffix(".py").rstrip("_") for part in path.split("/")}  # a plug-in may know its own name
        for line, found in comparisons(text, known):
            reason = next((place for place in ALLOWED if path.startswith(place)), None)
            if reason is not None:
                used.add(reason)
            elif found - own:
                bad.append(f"{path}:{line} compares with {', '.join(sorted(found - own))}")
    assert not bad, "let the plug-in declare what it needs, as modes do with NEEDS"
    assert used | {"config/plugins.py"} == set(ALLOWED), "remove places that compare nothing any more"


def test_comparisons_are_found() -> None:
    text = 'if mode.name == "geo": ...\nif name in ROUNDS: ...\nmatch name:\n    case "dnn": ...\nok = x == "sum"\n'
    assert list(comparisons(text, {"ROUNDS": {"sync"}})) == [(1, {"geo"}), (2, {"sync"}), (4, {"dnn"})]
