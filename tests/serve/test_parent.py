"""A process of a server ends with its supervisor, even with one that dies before the child has begun."""

import subprocess
import sys
import time
from pathlib import Path

CHILD = """
import pathlib, sys, time
said, go = map(pathlib.Path, sys.argv[1:])
while not go.exists():
    time.sleep(0.01)
from clickfleet.serve import parent
said.write_text(str(parent.is_gone()))
"""
SUPERVISOR = """
import sys
from clickfleet.serve.supervisor import ChildProcess
child = ChildProcess([sys.executable, "-c", *sys.argv[2:]])
child.start()
if sys.argv[1] == "wait":
    child.process.wait()
"""


def answer(tmp_path: Path, supervisor: str) -> str:
    """Return what a child says of its supervisor, which waits for it or ends at once."""
    said, go = tmp_path / "said.txt", tmp_path / "go"
    if supervisor == "wait":
        go.touch()
    subprocess.run([sys.executable, "-c", SUPERVISOR, supervisor, CHILD, str(said), str(go)], check=True, timeout=60)
    go.touch()
    end = time.monotonic() + 60
    while not said.exists() or not said.read_text():
        assert time.monotonic() < end
        time.sleep(0.05)
    return said.read_text()


def test_a_child_knows_that_its_supervisor_died_before_it_began(tmp_path: Path) -> None:
    assert answer(tmp_path, "end") == "True"


def test_a_child_knows_that_its_supervisor_lives(tmp_path: Path) -> None:
    assert answer(tmp_path, "wait") == "False"
