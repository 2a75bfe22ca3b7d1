"""The guide from PaddleRec: its blocks run in their order, it names every key, and the Chinese page has the same code."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from clickfleet.cli import build
from clickfleet.cli.frame import run
from clickfleet.migrate.networks import NETWORKS
from clickfleet.migrate.reasons import KNOWN
from clickfleet.migrate.rows import POLICY, RULES

DOCS = Path(__file__).parent.parent / "docs"
PAGE, CHINESE = ((DOCS / name).read_text() for name in ("migration.md", "zh/migration.md"))
NUMBER = re.compile(r"[\d,]*\d(?:\.\d+)?(?:e-?\d+)?")


def blocks(page: str) -> list[tuple[str, str]]:
    return re.findall(r"^```(\w+)\n(.*?)^```", page, re.DOTALL | re.MULTILINE)


def test_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for kind, block in blocks(PAGE):
        file = re.match(r"# ([\w./]+\.(?:py|yaml))\n", block)
        if file:
            Path(file[1]).write_text(block)
        elif kind == "python":
            exec(block, names)
        else:
            for example in block.split("$ clickfleet ")[1:]:
                command, _, shown = example.partition("\n")
                assert run(build(), shlex.split(command)) == 0, capsys.readouterr().err
                printed = NUMBER.sub("#", "".join(capsys.readouterr()).replace(f"{tmp_path}/", "")).splitlines()
                assert not set(NUMBER.sub("#", shown).splitlines()) - set(printed), printed
    assert len(Path("scores.txt").read_text().split()) == 500


def test_every_key_and_network_is_named() -> None:
    for key in KNOWN:
        section, _, name = key.partition(".")
        assert f"`{name}`" in PAGE, key
        assert f"`{section}" in PAGE or f"### {section}" in PAGE
    for name in (*NETWORKS, *RULES):
        assert f"`{name}`" in PAGE, name
    for name in POLICY:
        assert name in PAGE


def test_the_chinese_page_has_the_same_code() -> None:
    assert blocks(CHINESE) == blocks(PAGE)
