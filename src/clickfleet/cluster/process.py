"""A process of a run as the others know it: who it is, where its log goes, what CPU it used for training."""

from __future__ import annotations

import ctypes
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

KEPT_BYTES = 32 << 20
"""Freed memory that a process keeps for its next messages."""


def describe_process() -> dict[str, Any]:
    return {"pid": os.getpid(), "host": socket.gethostname(), "address": own_address()}


def own_address() -> str:
    """The address by which other hosts of the cluster reach this one."""
    import ray.util

    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]


def log_to(folder: str, name: str) -> None:
    """All that this process prints goes to a file of the run folder; without one it stays with Ray."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        out = open(Path(folder) / f"{name}.log", "a", buffering=1)  # noqa: SIM115  (for the life of the process)
    except OSError:
        return
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.dup2(out.fileno(), 1)
    os.dup2(out.fileno(), 2)


def said() -> str:
    """What this process has written to its log so far."""
    try:
        return Path("/proc/self/fd/1").read_text(errors="replace")
    except OSError:
        return ""


def log(text: str) -> None:
    print(time.strftime("%Y-%m-%d %H:%M:%S "), text, sep="", flush=True)


def keep_memory() -> None:
    """Messages of a megabyte come and go with every step: glibc is not to fetch their pages from the kernel each time."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # elsewhere than in glibc there is none
        mallopt(-3, KEPT_BYTES)  # M_MMAP_THRESHOLD
        mallopt(-1, 2 * KEPT_BYTES)  # M_TRIM_THRESHOLD


class Stopwatch:
    """CPU seconds of this process, of all its threads, while it is running."""

    def __init__(self) -> None:
        self._spent, self._since = 0.0, -1.0

    def start(self) -> None:
        if self._since < 0:
            self._since = time.process_time()

    def stop(self) -> None:
        self._spent, self._since = self.seconds, -1.0

    @property
    def seconds(self) -> float:
        return self._spent + (time.process_time() - self._since if self._since >= 0 else 0.0)
