"""The files by which processes of a host reach its shards; a shard that was killed leaves its own behind.

Each lies in a folder that only its user may enter, under a name that says nothing of the run.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import stat
import tempfile
import time
from contextlib import suppress
from pathlib import Path

PREFIX, NAME = "clickfleet-wire-", "shard"
_OURS = re.compile(PREFIX + r"\w+")
_YOUNG_S = 60.0
"""Between its making and its first listening a socket refuses too."""


def new() -> str:
    """A place for the socket of a shard of this process; those that nobody listens at any more are cleared away."""
    for folder in Path(tempfile.gettempdir()).glob(PREFIX + "*"):
        if _OURS.fullmatch(folder.name) and is_ours(str(folder / NAME)) and _is_left(folder / NAME):
            shutil.rmtree(folder, ignore_errors=True)
    return str(Path(tempfile.mkdtemp(prefix=PREFIX)) / NAME)


def remove(path: str) -> None:
    """Clears a socket away with its folder."""
    with suppress(OSError):
        os.unlink(path)
    with suppress(OSError):
        os.rmdir(os.path.dirname(path))


def is_ours(path: str) -> bool:
    """Whether there is such a socket, in a folder of this user that nobody else may enter."""
    try:
        folder, found = os.lstat(os.path.dirname(path)), os.lstat(path)
    except OSError:
        return False
    private = stat.S_ISDIR(folder.st_mode) and not folder.st_mode & 0o077
    return private and stat.S_ISSOCK(found.st_mode) and folder.st_uid == found.st_uid == os.getuid()


def _is_left(path: Path) -> bool:
    if not hasattr(socket, "AF_UNIX"):
        return False
    try:
        if time.time() - path.lstat().st_mtime < _YOUNG_S:
            return False
        with socket.socket(socket.AF_UNIX) as asking:
            asking.connect(str(path))
    except ConnectionRefusedError:
        return True
    except OSError:  # gone meanwhile
        return False
    return False
