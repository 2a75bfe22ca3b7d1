"""The services of deploy/compose.yaml as processes of this machine: there is no Docker engine here, but their commands are real."""

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from clickfleet.serve.client import Client

DEPLOY = Path(__file__).parents[2] / "deploy"
PROGRAM = [sys.executable, "-c", "from clickfleet.cli import main; main()"]


@pytest.fixture
def commands(tmp_path: Path) -> dict[str, list[str]]:
    """The command of each service, with the volume in a folder of the test, free ports and a small network."""
    shared, config = str(tmp_path / "shared"), tmp_path / "online.yaml"
    config.write_text((DEPLOY / "online.yaml").read_text().replace("/shared", shared))
    services: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    there = {"/config/online.yaml": str(config), "8080": "0", "8081": "0", "0.0.0.0": "127.0.0.1"}
    found = {
        name: [there.get(word, word).replace("/shared", shared) for word in service["command"]]
        for name, service in services.items()
    }
    found["trainer"] += ["model.hidden=[8]", "online.poll=50ms"]
    return found


def start(command: list[str]) -> "subprocess.Popen[str]":
    return subprocess.Popen([*PROGRAM, *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def heard(process: "subprocess.Popen[str]", text: str) -> str:
    """Wait for a line of a process. Return it."""
    said = []
    assert process.stdout is not None
    for line in process.stdout:
        said.append(line)
        if text in line:
            return line
    raise AssertionError("".join(said))


def test_the_server_follows_the_trainer(commands: dict[str, list[str]], tmp_path: Path) -> None:
    assert set(commands) == {"log", "trainer", "server"}
    subprocess.run([*PROGRAM, *commands["log"]], check=True)
    server = start(commands["server"])
    trainer = None
    try:
        heard(server, "waiting for the first base")
        trainer = start(commands["trainer"])
        url = heard(server, "ready: ").split()[1].rstrip(",")
        with Client(url) as client:
            assert client.predict([{"I1": 5, "C1": "68fd1e64"}]).shape == (1,)
        trainer.send_signal(signal.SIGTERM)  # docker stop
        said, _ = trainer.communicate(timeout=120)
        assert trainer.returncode == 128 + signal.SIGTERM, said
        assert "the same command resumes" in said
        assert (tmp_path / "shared/run/checkpoints/LATEST").is_file()
        trainer = start(commands["trainer"])  # docker compose up
        heard(trainer, "resum")
    finally:
        for process in (server, trainer):
            if process is not None:
                process.terminate()
                process.communicate(timeout=120)
