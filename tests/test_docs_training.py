"""The examples of docs/training.md, in the order of the page."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from clickfleet.cli import build
from clickfleet.cli.frame import run

PAGE = (Path(__file__).parent.parent / "docs/training.md").read_text()


def test_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for kind, block in re.findall(r"```(console|python)\n(.*?)```", PAGE, re.DOTALL):
        if block.startswith("# my_model.py"):
            Path("my_model.py").write_text(block)
        elif kind == "python":
            exec(block, names)
        else:
            for command in re.findall(r"^\$ clickfleet (.*)$", block, re.MULTILINE):
                assert run(build(), shlex.split(command)) == 0, capsys.readouterr().err
    assert len(Path("scores.txt").read_text().split()) == 5000
    assert Path("third/checkpoints/LATEST").exists()
