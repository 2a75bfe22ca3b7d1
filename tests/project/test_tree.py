"""The root of the repository holds what belongs there, and the Makefile calls scripts that exist."""

import ast
import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src/clickfleet"
FOLDERS = {".ci", "benchmarks", "deploy", "docs", "examples", "native", "scripts", "src", "tests"}
FILES = {
    ".clang-format",
    ".clang-tidy",
    ".dockerignore",
    ".gitignore",
    "CHANGELOG.md",
    "CMakeLists.txt",
    "CONTRIBUTING.md",
    "Dockerfile",
    "LICENSE",
    "Makefile",
    "README.md",
    "README.zh.md",
    "SECURITY.md",
    "constraints.txt",
    "mkdocs.yml",
    "pyproject.toml",
}


def listed(*options: str) -> list[str]:
    if not (ROOT / ".git").exists():
        pytest.skip("not in a clone")
    done = subprocess.run(["git", "ls-files", *options], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_the_root_has_no_stray_entry() -> None:
    """Neither committed nor left behind by a command; what .gitignore names may be there."""
    entries = {path.partition("/")[0] for path in listed("--cached", "--others", "--exclude-standard")}
    stray = {entry for entry in entries - FOLDERS - FILES if (ROOT / entry).exists()}
    assert not stray, "move it into a folder, delete it, or add it to this test"


def test_the_root_has_all_its_entries() -> None:
    assert {path.partition("/")[0] for path in listed()} >= FOLDERS | FILES


@pytest.mark.parametrize("caller", ["Makefile", ".ci/run", "scripts/test", "scripts/check"])
def test_scripts_that_are_called_exist(caller: str) -> None:
    for name in re.findall(r"\bscripts/[\w-]+", (ROOT / caller).read_text()):
        assert os.access(ROOT / name, os.X_OK), f"{caller} calls {name}"


def test_make_targets_that_are_named_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for caller in (".ci/run", "CONTRIBUTING.md", "README.md", "docs/quickstart.md"):
        named = set(re.findall(r"(?:^|[$] |`)make ([a-z]+)", (ROOT / caller).read_text(), re.MULTILINE))
        assert named <= targets, caller


@pytest.mark.parametrize("readme", ["README.md", "README.zh.md"])
def test_the_map_shows_every_entry_of_the_package(readme: str) -> None:
    block = (ROOT / readme).read_text(encoding="utf-8").partition("src/clickfleet/ ")[2].partition("\nnative/")[0]
    shown = [line.split()[0].rstrip("/") for line in block.splitlines()[1:]]
    compiled = {"__pycache__", *(path.name for path in PACKAGE.glob("_core.*") if path.suffix != ".pyi")}
    there = {path.name for path in PACKAGE.iterdir()} - compiled
    assert sorted(shown) == sorted(there)
    assert len(there - {"__init__.py", "py.typed", "_core.pyi"}) <= 12


def test_private_modules_stay_in_their_package() -> None:
    strangers = []
    for path in PACKAGE.rglob("*.py"):
        package = ".".join(path.relative_to(PACKAGE.parent).parts[:-1])
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("clickfleet."):
                continue
            for name in {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}:
                owner, _, last = str(name).rpartition(".")
                file = PACKAGE.parent / Path(*str(name).split("."))
                if last.startswith("_") and file.with_suffix(".py").exists() and owner != package:
                    strangers.append(f"{path.name}: {name}")
    assert strangers == []
