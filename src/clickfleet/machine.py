"""What differs between operating systems, in one place."""

import os
from contextlib import suppress
from pathlib import Path

WINDOWS = os.name == "nt"


def cores() -> int:
    """Cores this process may use; where the system does not say, all there are.

    >>> 1 <= cores() <= os.cpu_count()
    True
    """
    mine = getattr(os, "sched_getaffinity", None)  # neither macOS nor Windows has it
    return len(mine(0)) if mine else os.cpu_count() or 1


def free_memory() -> int:
    """Bytes that a process may take without others being swapped out; all there are where the system does not say.

    >>> free_memory() > 0
    True
    """
    with suppress(OSError, StopIteration, ValueError, IndexError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1])
    with suppress(OSError, ValueError, AttributeError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return 1 << 62
