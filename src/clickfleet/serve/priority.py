"""How long the system lets a process run before another one gets its turn, and which one goes first.

A process of low priority that has just started to run keeps its core for a slice of a millisecond or two, and a request that arrives
meanwhile waits. Since Linux 6.12 a process may ask for shorter slices: it is then run sooner, and for a shorter time. Elsewhere nothing
happens.

A thread of the policy `idle` runs while nothing else wants its core, and gives it up at once. Where all cores are always busy, it gets
next to nothing. Without privileges it cannot leave this policy.

Many systems divide the cores among sessions first (`autogroup`), and only then among the processes of a session by policy, niceness and
slice. So a process with a session of its own, as all children of a server, must lower the session too. Otherwise those of other sessions
may wait for it until the next tick of the clock, which is 4 ms.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys
from contextlib import suppress
from pathlib import Path
from typing import Literal

WORKER_SLICE_S = 0.0005
"""Slice of a worker: a request does not wait for the whole slice of a trainer on the same core."""
TRAINER_SESSION = 10
"""Niceness of the session of a trainer beside a server. From about 5 on, a process that wakes up in another session runs at once."""
UPDATER_SLICE_S = 0.0002
"""Slice of the updater: a new entry is noticed at once."""
RECORDER_SLICE_S = 0.0002
"""Slice of the recorder: a request waits at most so long for it. The shortest that the system allows is half of it."""

_SETATTR = {"x86_64": 314, "aarch64": 274, "arm64": 274, "riscv64": 274}
"""Numbers of the system call sched_setattr."""
_ATTRIBUTES = struct.Struct("=IIQiIQQQ")
"""Size, policy, flags, niceness, priority, slice in ns, and two fields of real-time processes."""
Policy = Literal["other", "batch", "idle"]
_POLICIES = {"other": 0, "batch": 3, "idle": 5}


def shorten_slices(slice_s: float, *, nice: int = 0, policy: Policy = "other") -> bool:
    """Ask for shorter slices for the calling thread and those it starts. Return whether the system took it.

    `nice` is added to the niceness. A thread of the policy `batch` does not interrupt another one when it wakes up.
    """
    niceness = os.nice(nice)
    number = _SETATTR.get(platform.machine()) if sys.platform.startswith("linux") else None
    if number is None:
        return False
    attributes = _ATTRIBUTES.pack(_ATTRIBUTES.size, _POLICIES[policy], 0, niceness, 0, round(slice_s * 1e9), 0, 0)
    with suppress(OSError, AttributeError):
        return bool(ctypes.CDLL(None).syscall(number, 0, ctypes.create_string_buffer(attributes), 0) == 0)
    return False


def renice_session(niceness: int, pid: int | None = None) -> bool:
    """Set the niceness of the session of this or another process, if the process leads it. Return whether the system took it."""
    leader = os.getpid() if pid is None else pid
    if not sys.platform.startswith("linux"):
        return False
    with suppress(OSError):  # no such process, no sessions, or set again within 100 ms
        if os.getsid(leader) == leader:
            Path(f"/proc/{leader}/autogroup").write_text(str(niceness))
            return True
    return False
