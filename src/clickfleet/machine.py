"""What differs between operating systems, in one place."""

import os

WINDOWS = os.name == "nt"


def cores() -> int:
    """Cores this process may use; where the system does not say, all there are.

    >>> 1 <= cores() <= os.cpu_count()
    True
    """
    mine = getattr(os, "sched_getaffinity", None)  # neither macOS nor Windows has it
    return len(mine(0)) if mine else os.cpu_count() or 1
