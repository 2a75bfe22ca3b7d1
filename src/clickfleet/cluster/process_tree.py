"""Processes of this machine and their descendants: find them, kill them, end with a parent."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

PARENT_POLL_S = 0.5
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


class ProcessEntry(NamedTuple):
    """One process of this machine."""

    pid: int
    parent: int
    began: str
    """Its start time: distinguishes it from a later process with the same id."""


def _all() -> Iterator[ProcessEntry]:
    if not sys.platform.startswith("linux"):
        listed = subprocess.run(["ps", "-A", "-o", "pid=,ppid=,lstart="], capture_output=True, text=True, check=False)
        for line in listed.stdout.splitlines():
            pid, parent, began = line.split(maxsplit=2)
            yield ProcessEntry(int(pid), int(parent), began)
        return
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError, IndexError, ValueError):  # the process has ended meanwhile
                after_name = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
                yield ProcessEntry(int(folder.name), int(after_name[1]), after_name[19])


def own_children() -> set[int]:
    """Return the children of this process."""
    return {entry.pid for entry in _all() if entry.parent == os.getpid()}


def tree(roots: Iterable[int]) -> list[ProcessEntry]:
    """Return these processes and all their descendants."""
    entries = list(_all())
    children: dict[int, list[ProcessEntry]] = {}
    for entry in entries:
        children.setdefault(entry.parent, []).append(entry)
    wanted = set(roots)
    members = [entry for entry in entries if entry.pid in wanted]
    for entry in members:
        members.extend(children.get(entry.pid, ()))
    return members


def kill(entries: Iterable[ProcessEntry]) -> None:
    """Kill those of the processes that still run."""
    running = {(entry.pid, entry.began) for entry in _all()}
    for entry in entries:
        if (entry.pid, entry.began) in running:
            with suppress(OSError):
                os.kill(entry.pid, signal.SIGKILL)


def force(number: int, roots: Iterable[int]) -> None:
    """Kill the descendants of `roots` and exit, because the run did not stop in time after a signal."""
    name = signal.Signals(number).name
    with suppress(OSError, ValueError):
        print(f"the run did not stop in time after {name}: killing all its processes", file=sys.stderr, flush=True)
    kill(tree(roots))
    os._exit(128 + number)


def end_with_parent() -> None:
    """Send SIGTERM to this process when its parent ends (Linux). For `preexec_fn` of a child."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


@contextmanager
def adopting_orphans() -> Iterator[None]:
    """Become the parent of descendants whose own parent ends, so that none escapes (Linux)."""
    if not sys.platform.startswith("linux"):
        yield
        return
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 0)


def watch_parent(parent: int, act: Callable[[], None]) -> None:
    """Call `act` in a new thread when `parent` is no longer the parent of this process."""

    def monitor() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_POLL_S)
        act()

    threading.Thread(target=monitor, daemon=True, name="clickfleet-parent").start()
