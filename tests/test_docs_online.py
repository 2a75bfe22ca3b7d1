"""The examples of docs/online.md, in the order of the page."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from clickfleet.cli import build
from clickfleet.cli.frame import run

PAGE = (Path(__file__).parent.parent / "docs/online.md").read_text()


def test_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for kind, block in re.findall(r"```(console|python)\n(.*?)```", PAGE, re.DOTALL):
        if kind == "python":
            exec(block, names)
        else:
            for command in re.findall(r"^\$ clickfleet (.*)$", block, re.MULTILINE):
                assert run(build(), shlex.split(command)) == 0, capsys.readouterr().err
    assert names["learned"].passes == 8
    assert Path("backtest/replay.svg").exists()
    assert Path("copies/LOG.jsonl").exists()
