"""Slices of the processes of a server: asked for in a process of their own, because niceness cannot be taken back."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import json, os
from clickfleet.serve.priority import shorten_slices
taken = shorten_slices(0.0001, nice=7, background=True)
print(json.dumps([taken, os.nice(0), os.sched_getscheduler(0) == os.SCHED_BATCH]))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux has slices")
def test_a_process_is_nicer_and_in_the_background() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    taken, niceness, background = json.loads(done.stdout)
    before = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[16])
    assert niceness == min(19, before + 7), "the niceness holds whatever the system says about slices"
    assert background == taken
