"""The examples of docs/workbench.md, in the order of the page."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from clickfleet.cli import build
from clickfleet.cli.frame import run

PAGE = (Path(__file__).parents[2] / "docs/workbench.md").read_text()


def test_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for kind, block in re.findall(r"```(console|python|yaml)\n(.*?)```", PAGE, re.DOTALL):
        if kind == "yaml":
            Path("bench.yaml").write_text(block)
        elif kind == "python":
            exec(block, names)
        else:
            for command in re.findall(r"^\$ clickfleet (.*)$", block, re.MULTILINE):
                assert run(build(), shlex.split(command)) == 0, capsys.readouterr().err
    for made in (
        "compare/compare.html",
        "compare/compare.md",
        "tune/tune.html",
        "infer/infer.html",
        "tune/best/config.yaml",
    ):
        assert Path(made).exists()
