"""The examples of docs/words.md, in the order of the page."""

import re
import shlex
from pathlib import Path
from typing import Any

from clickfleet.cli import build
from clickfleet.cli.frame import run

PAGE = (Path(__file__).parents[2] / "docs/words.md").read_text()


def test_the_page(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for kind, block in re.findall(r"```(console|python)\n(.*?)```", PAGE, re.DOTALL):
        if kind == "python":
            exec(block, names)
        else:
            for command in re.findall(r"^\$ clickfleet (.*)$", block, re.MULTILINE):
                assert run(build(), shlex.split(command)) == 0, capsys.readouterr().err
    shown = capsys.readouterr().out
    assert "400,008 words in 33,334 sentences, 380 questions in made" in shown
    assert float(re.search(r"accuracy (\d\.\d+) of 380 analogies", shown)[1]) > 0.9  # type: ignore[index]
