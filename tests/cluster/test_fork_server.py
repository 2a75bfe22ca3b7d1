"""The fork server: its forks are what Ray would have started, and none outlives the driver."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from clickfleet.cluster.fork_server import SUPPORTED, ForkServer

pytestmark = pytest.mark.skipif(not SUPPORTED, reason="the fork server is for Linux")

SCRIPT = """
import json, os, sys, time
facts = {"arguments": sys.argv[1:], "folder": os.getcwd(), "mark": os.environ["MARK"], "torch": "torch" in sys.modules, "pid": os.getpid()}
print("to stdout", flush=True)
with open("facts.part", "w") as file:
    json.dump(facts, file)
os.rename("facts.part", "facts.json")
time.sleep(float(sys.argv[1]))
"""
DRIVER = """
import subprocess, sys
from pathlib import Path
from clickfleet.cluster.fork_server import ForkServer
server = ForkServer(Path(sys.argv[1]))
subprocess.run([*server.command("setup.py"), sys.argv[2], "600"], check=True)
sys.stdin.read()
"""


def until(true: Callable[[], bool]) -> None:
    limit = time.monotonic() + 60
    while not true():
        assert time.monotonic() < limit
        time.sleep(0.02)


def test_a_fork_is_what_the_client_asks_for(tmp_path: Path) -> None:
    script, facts = tmp_path / "script.py", tmp_path / "facts.json"
    script.write_text(SCRIPT)
    server = ForkServer(tmp_path)
    try:
        assert server.folder.stat().st_mode & 0o077 == 0  # whoever reaches the socket runs programs as this user
        command = [*server.command("setup.py"), str(script), "0", "--language=PYTHON", "x"]
        environment = {"MARK": "here", "PATH": os.environ["PATH"]}
        with (tmp_path / "out").open("wb") as out:
            subprocess.run(command, cwd=tmp_path, env=environment, stdout=out, check=True, timeout=60)
        until(facts.exists)
        found = json.loads(facts.read_text())
        assert found["arguments"] == ["0", "x"]  # without those of Ray's set-up script
        assert (found["folder"], found["mark"], found["torch"]) == (str(tmp_path), "here", True)
        assert (tmp_path / "out").read_text() == "to stdout\n"
    finally:
        server.end()
    assert not server.folder.exists()


def test_without_the_server_the_script_of_ray_runs(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    server = ForkServer(tmp_path)
    server.end()
    command = [*server.command(str(script)), "0"]
    subprocess.run(command, cwd=tmp_path, env={**os.environ, "MARK": "here"}, check=True, timeout=60)
    assert json.loads((tmp_path / "facts.json").read_text())["torch"] is False


def test_forks_end_with_a_killed_driver(tmp_path: Path) -> None:
    script, facts = tmp_path / "script.py", tmp_path / "facts.json"
    script.write_text(SCRIPT)
    command = [sys.executable, "-c", DRIVER, str(tmp_path), str(script)]
    with subprocess.Popen(command, cwd=tmp_path, env={**os.environ, "MARK": ""}, stdin=subprocess.PIPE) as driver:
        until(facts.exists)
        fork = psutil.Process(json.loads(facts.read_text())["pid"])
        driver.send_signal(signal.SIGKILL)
    until(lambda: not fork.is_running() or fork.status() == psutil.STATUS_ZOMBIE)
    until(lambda: not list(tmp_path.glob("fork-*")))
