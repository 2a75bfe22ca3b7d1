"""What the processes of shards and workers have in common: identity, log, memory, CPU time of training."""

from __future__ import annotations

import ctypes
import os
import socket
import sys
import time
from pathlib import Path
from typing import NotRequired, TypedDict

KEPT_BYTES = 32 << 20
"""Freed memory that a process keeps for later messages."""


class ProcessFacts(TypedDict):
    """Where a process runs, as processes.json lists it."""

    pid: int
    host: str
    address: str
    endpoints: NotRequired[list[str]]
    """The addresses of a shard's server, once it has loaded its rows."""


def describe_process() -> ProcessFacts:
    return {"pid": os.getpid(), "host": socket.gethostname(), "address": own_address()}


def own_address() -> str:
    """Return the address at which other hosts of the cluster reach this one."""
    import ray.util

    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]


def log_name(process: str) -> str:
    """Return the name of a process's log, which is the same in every way of launching.

    >>> log_name("shard 0"), log_name("server-1"), log_name("worker 2")
    ('serverlog.0', 'serverlog.1', 'workerlog.2')
    """
    kind, number = process.replace("-", " ").split()
    return f"{'workerlog' if kind == 'worker' else 'serverlog'}.{number}"


def log_to(folder: str, name: str) -> None:
    """Redirect the output of this process to its log in `folder`. If that fails, leave it to Ray."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        out = open(Path(folder) / log_name(name), "a", buffering=1)  # noqa: SIM115  (for the life of the process)
    except OSError:
        return
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.dup2(out.fileno(), 1)
    os.dup2(out.fileno(), 2)


def read_log() -> str:
    """Return what this process has written to its log so far."""
    try:
        return Path("/proc/self/fd/1").read_text(errors="replace")
    except OSError:
        return ""


def log(text: str) -> None:
    print(time.strftime("%Y-%m-%d %H:%M:%S "), text, sep="", flush=True)


def keep_memory() -> None:
    """Keep freed memory. Every step allocates messages of a megabyte, and glibc would return their pages to the kernel."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # only glibc has it
        mallopt(-3, KEPT_BYTES)  # M_MMAP_THRESHOLD
        mallopt(-1, 2 * KEPT_BYTES)  # M_TRIM_THRESHOLD


class Stopwatch:
    """CPU seconds of all threads of this process while the stopwatch runs."""

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
