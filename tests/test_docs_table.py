"""README and the guide to the table: every program runs, every command exists and prints what is shown, times and rates aside."""

import re
import shlex
from pathlib import Path

import pytest

from clickfleet.cli import build
from clickfleet.cli.frame import run

ROOT = Path(__file__).parent.parent
NUMBER = re.compile(r"[\d,]*\d(?:\.\d+)?")


@pytest.mark.parametrize("page", ["README.md", "docs/table.md"])
def test_programs(page):
    programs = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    assert programs
    scope: dict = {}
    for program in programs:
        exec(program, scope)


def test_the_run_of_the_readme(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "README.md").read_text()
    (block,) = (block for block in re.findall(r"```console\n(.*?)```", page, re.DOTALL) if "synth" in block)
    for example in block.split("$ clickfleet ")[1:]:
        command, _, shown = example.partition("\n")
        assert run(build(), shlex.split(command)) == 0, capsys.readouterr().err
        printed = NUMBER.sub("#", "".join(capsys.readouterr()).replace(f"{tmp_path}/", "")).splitlines()
        assert not set(NUMBER.sub("#", shown).splitlines()) - set(printed)


def test_links_lead_somewhere():
    for page in [ROOT / "README.md", *ROOT.glob("docs/*.md")]:
        for link in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            if "://" not in link:
                assert (page.parent / link).exists(), f"{page.name}: {link}"
