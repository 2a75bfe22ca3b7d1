"""Facts about this machine and its operating system."""

import os
from contextlib import suppress
from pathlib import Path

WINDOWS = os.name == "nt"


def cores() -> int:
    """Return the number of cores this process may use, or all cores if the system does not report a limit.

    >>> 1 <= cores() <= os.cpu_count()
    True
    """
    affinity = getattr(os, "sched_getaffinity", None)  # absent on macOS and Windows
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def free_memory() -> int:
    """Return the bytes that a process can allocate without swapping, or all memory if the system does not report them.

    >>> free_memory() > 0
    True
    """
    with suppress(OSError, StopIteration, ValueError, IndexError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1])
    with suppress(OSError, ValueError, AttributeError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return 1 << 62
