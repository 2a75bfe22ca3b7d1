"""The process that started this one. Processes of a server end with their supervisor, however early it dies."""

from __future__ import annotations

import os

_PARENT = "CLICKFLEET_PARENT"


def child_environment() -> dict[str, str]:
    """Return the environment for a child of this process, which tells it its parent."""
    return {**os.environ, _PARENT: str(os.getpid())}


def is_gone() -> bool:
    """Return whether the process that started this one with `child_environment` has ended."""
    return os.getppid() != int(os.environ[_PARENT])
