"""How long the system lets a process run before another one gets its turn.

A process of low priority that has just started to run keeps its core for a slice of a millisecond or two, and a request that arrives
meanwhile waits. Since Linux 6.12 a process may ask for shorter slices: it is then run sooner, and for a shorter time. Elsewhere nothing
happens.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys
from contextlib import suppress

WORKER_SLICE_S = 0.0005
"""Slice of a worker: a request does not wait for the whole slice of a trainer on the same core."""
UPDATER_SLICE_S = 0.0002
"""Slice of the updater: a new entry is noticed at once."""
RECORDER_SLICE_S = 0.0002
"""Slice of the recorder: a request waits at most so long for it. The shortest that the system allows is half of it."""

_SETATTR = {"x86_64": 314, "aarch64": 274, "arm64": 274, "riscv64": 274}
"""Numbers of the system call sched_setattr."""
_ATTRIBUTES = struct.Struct("=IIQiIQQQ")
"""Size, policy, flags, niceness, priority, slice in ns, and two fields of real-time processes."""
_OTHER, _BATCH = 0, 3


def shorten_slices(slice_s: float, *, nice: int = 0, background: bool = False) -> bool:
    """Ask for shorter slices for the calling thread and those it starts. Return whether the system took it.

    `nice` is added to the niceness. With `background`, a process that wakes up does not interrupt another one.
    """
    niceness = os.nice(nice)
    number = _SETATTR.get(platform.machine()) if sys.platform.startswith("linux") else None
    if number is None:
        return False
    policy = _BATCH if background else _OTHER
    attributes = _ATTRIBUTES.pack(_ATTRIBUTES.size, policy, 0, niceness, 0, round(slice_s * 1e9), 0, 0)
    with suppress(OSError, AttributeError):
        return bool(ctypes.CDLL(None).syscall(number, 0, ctypes.create_string_buffer(attributes), 0) == 0)
    return False
