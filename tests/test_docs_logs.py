"""The examples of docs/logs.md: every command works, and prints what the page shows."""

import re
import shlex
from pathlib import Path

import pytest

from clickfleet.cli import build
from clickfleet.cli.frame import run

RATE = re.compile(r"\b0\.\d{4}\b")
PAGE = (Path(__file__).parent.parent / "docs/logs.md").read_text()


def test_the_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    for block in re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL):
        for example in block.split("$ clickfleet ")[1:]:
            command, _, shown = example.partition("\n")
            assert run(build(), shlex.split(command)) == 0, capsys.readouterr().err
            printed = capsys.readouterr().out
            if shown:  # the last digits of a rate may depend on the CPU's vector mathematics
                assert RATE.sub("#", printed) == RATE.sub("#", shown)
                assert [float(x) for x in RATE.findall(printed)] == pytest.approx(
                    [float(x) for x in RATE.findall(shown)], abs=0.002
                )
    assert (tmp_path / "days/20260102/1800/_DONE").exists()
    assert (tmp_path / "stats.html").exists()


def test_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (program,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(program, {})
