"""The examples of docs/serving.md: the commands, then curl and Python against the server they start."""

import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from clickfleet.cli import build
from clickfleet.cli.frame import run
from served import running

PAGE = (Path(__file__).parents[2] / "docs/serving.md").read_text()


def test_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    consoles = re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL)
    before, after = (re.findall(r"^\$ clickfleet (.*)$", block, re.MULTILINE) for block in consoles)
    for command in before:
        if not command.startswith("serve "):
            assert run(build(), shlex.split(command)) == 0, capsys.readouterr().err
    with running(tmp_path / "artifact", tmp_path / "state") as served:
        examples = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
        for block in examples:
            for command in re.findall(r"^(?:head|curl) .*?(?=^head|^curl|^#|\Z)", block, re.DOTALL | re.MULTILINE):
                done = subprocess.run(
                    ["bash", "-euo", "pipefail", "-c", command],
                    capture_output=True,
                    text=True,
                    env={"URL": served.url, "PATH": "/usr/bin:/bin"},
                    check=True,
                )
                assert "error" not in json.loads(done.stdout), command
        assert len(examples) == 4
        (python,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
        exec(python, {"URL": served.url})
        for command in after:
            assert run(build(), shlex.split(command.replace("$URL", served.url))) == 0, capsys.readouterr().err
