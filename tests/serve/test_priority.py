"""Slices of the processes of a server: asked for in a process of their own, because niceness cannot be taken back."""

import json
import os
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest

from clickfleet.serve.priority import renice_session
from clickfleet.serve.supervisor import ChildProcess
from served import WAIT_S

SCRIPT = """
import json, os, sys
from clickfleet.serve.priority import shorten_slices
taken = shorten_slices(0.0001, nice=7, policy=sys.argv[1])
print(json.dumps([taken, os.nice(0), os.sched_getscheduler(0) == getattr(os, f"SCHED_{sys.argv[1].upper()}")]))
"""
STARVED = """
import json, os, time
from clickfleet.serve import recorder
recorder.LATE_S, recorder.RELIEF_S = 0.05, 0.3
names = {os.SCHED_IDLE: "idle", os.SCHED_BATCH: "batch"}
polls, closed, slow = [], [], []
def policy():
    return names.get(os.sched_getscheduler(0))
class Recorder:
    def poll(self):
        polls.append((time.monotonic(), policy()))
        if not slow and [name for _, name in polls].count("idle") == 5:
            slow.append(len(polls) - 1)
            time.sleep(0.2)  # as if all cores were busy
    def hurries(self): return False
    def save(self): pass
    def close(self): closed.append(policy())
def ended():
    if polls and polls[0][1] != "idle":
        return True  # this system does not take the policy
    return bool(slow) and "idle" in [name for _, name in polls[slow[0] + 1:]]
schedule = recorder.RecorderLoop(Recorder(), ended, 0.02)
schedule.run()
print(json.dumps([polls, slow, closed, schedule.late]))
"""

HURRIED = """
from clickfleet.serve import recorder
polls = []
class Recorder:
    def poll(self): polls.append("poll")
    def hurries(self): return len(polls) < 3
    def save(self): pass
    def close(self): pass
recorder.RecorderLoop(Recorder(), lambda: len(polls) >= 3, 3600.0).run()
print(len(polls))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux has slices")
@pytest.mark.parametrize("policy", ["batch", "idle"])
def test_a_process_is_nicer_and_in_the_background(policy: str) -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT, policy], capture_output=True, text=True, check=True)
    taken, niceness, background = json.loads(done.stdout)
    before = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[16])
    assert niceness == min(19, before + 7), "the niceness holds whatever the system says about slices"
    assert background == taken


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux has such policies")
def test_a_recorder_that_falls_behind_gets_more_priority_for_a_while() -> None:
    done = subprocess.run([sys.executable, "-c", STARVED], capture_output=True, text=True, check=True)
    polls, slow, closed, late = json.loads(done.stdout)
    if not any(policy == "idle" for _, policy in polls):
        pytest.skip("this system does not take the policy")
    assert polls[0][1] == "idle"
    assert polls[slow[0] + 1][1] == "batch"
    assert "idle" in [policy for _, policy in polls[slow[0] + 1 :]], "the cores are left to others again"
    for (began, policy), (later, after) in pairwise(polls[:-1]):
        if (policy, after) == ("idle", "batch"):
            assert later - began > 0.07, "only one that is late gets more"
    assert (polls[-1][1], closed) == ("batch", ["batch"]), "the end waits for nobody"
    assert late >= 1


def test_a_recorder_with_much_to_log_does_not_wait_for_its_time() -> None:
    done = subprocess.run([sys.executable, "-c", HURRIED], capture_output=True, text=True, check=True, timeout=WAIT_S)
    assert int(done.stdout) == 4, "three, and the last one at the end"


def session_of(pid: int) -> str:
    """Return the group of a session and its niceness, as the kernel prints them."""
    path = Path(f"/proc/{pid}/autogroup")
    text = path.read_text().strip() if path.exists() else ""
    if not text:
        pytest.skip("this system does not divide the cores among sessions")
    return text


def test_the_session_of_a_child_gets_its_niceness() -> None:
    before = session_of(os.getpid())
    child = ChildProcess([sys.executable, "-c", "import time; time.sleep(60)"], session=7)
    child.start()
    assert child.process is not None
    try:
        assert session_of(child.process.pid).endswith("nice 7")
        time.sleep(0.15)  # the kernel lets users change it ten times per second
        assert renice_session(3, child.process.pid), "a session may also be raised again"
        assert session_of(child.process.pid).endswith("nice 3")
        assert session_of(os.getpid()) == before
    finally:
        child.process.kill()
        child.process.wait()


def test_a_session_that_others_share_is_left_alone() -> None:
    before = session_of(os.getpid())
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as child:
        try:
            assert not renice_session(7, child.pid)
            assert session_of(child.pid) == before
        finally:
            child.kill()
