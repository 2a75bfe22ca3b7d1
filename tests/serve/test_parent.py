"""A process of a server ends with its supervisor, even with one that dies before the child has begun."""

import subprocess
import sys
import time
from pathlib import Path

CHILD = """
import pathlib, sys, time
time.sleep(1)  # the supervisor is gone by now
from clickfleet.serve import parent
pathlib.Path(sys.argv[1]).write_text(str(parent.is_gone()))
"""
SUPERVISOR = """
import sys, time
from clickfleet.serve.supervisor import ChildProcess
ChildProcess([sys.executable, "-c", sys.argv[1], sys.argv[2]]).start()
time.sleep(float(sys.argv[3]))
"""


def answer(tmp_path: Path, supervisor_s: float) -> str:
    said = tmp_path / "said.txt"
    subprocess.run([sys.executable, "-c", SUPERVISOR, CHILD, str(said), str(supervisor_s)], check=True, timeout=60)
    end = time.monotonic() + 60
    while not said.exists() or not said.read_text():
        assert time.monotonic() < end
        time.sleep(0.05)
    return said.read_text()


def test_a_child_knows_that_its_supervisor_died_before_it_began(tmp_path: Path) -> None:
    assert answer(tmp_path, supervisor_s=0) == "True"


def test_a_child_knows_that_its_supervisor_lives(tmp_path: Path) -> None:
    assert answer(tmp_path, supervisor_s=8) == "False"
