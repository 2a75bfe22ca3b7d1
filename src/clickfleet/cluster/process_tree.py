"""The processes below this one: found, ended by force, and told to end when their parent does."""

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


class Entry(NamedTuple):
    """One process of this machine."""

    pid: int
    parent: int
    began: str
    """Tells a process from a later one with the same number."""


def _all() -> Iterator[Entry]:
    if not sys.platform.startswith("linux"):
        listed = subprocess.run(["ps", "-A", "-o", "pid=,ppid=,lstart="], capture_output=True, text=True, check=False)
        for line in listed.stdout.splitlines():
            pid, parent, began = line.split(maxsplit=2)
            yield Entry(int(pid), int(parent), began)
        return
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError, IndexError, ValueError):  # it has ended meanwhile
                after_name = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
                yield Entry(int(folder.name), int(after_name[1]), after_name[19])


def own_children() -> set[int]:
    """The children of this process."""
    return {entry.pid for entry in _all() if entry.parent == os.getpid()}


def tree(roots: Iterable[int]) -> list[Entry]:
    """These processes and all below them."""
    everyone = list(_all())
    below: dict[int, list[Entry]] = {}
    for entry in everyone:
        below.setdefault(entry.parent, []).append(entry)
    wanted = set(roots)
    found = [entry for entry in everyone if entry.pid in wanted]
    for entry in found:
        found.extend(below.get(entry.pid, ()))
    return found


def kill(entries: Iterable[Entry]) -> None:
    """Ends those of these processes that are still there, at once."""
    left = {(entry.pid, entry.began) for entry in _all()}
    for entry in entries:
        if (entry.pid, entry.began) in left:
            with suppress(OSError):
                os.kill(entry.pid, signal.SIGKILL)


def force(number: int, roots: Iterable[int]) -> None:
    """Ends this process and those below `roots`, after a signal that was not obeyed in time."""
    name = signal.Signals(number).name
    with suppress(OSError, ValueError):
        print(f"{name} was not obeyed in time: all processes of the run are killed", file=sys.stderr, flush=True)
    kill(tree(roots))
    os._exit(128 + number)


def end_with_parent() -> None:
    """For `preexec_fn` of a child: SIGTERM when its parent ends (Linux)."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


@contextmanager
def adopting_orphans() -> Iterator[None]:
    """Meanwhile a process below this one whose parent ends becomes its child, so that none gets out of sight (Linux)."""
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
    """Calls `act` in a thread of its own once the parent of this process is another one than `parent`."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_POLL_S)
        act()

    threading.Thread(target=watch, daemon=True, name="clickfleet-parent").start()
