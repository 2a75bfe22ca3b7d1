"""The files by which processes of a host reach its shards; a shard that was killed leaves its own behind."""

from __future__ import annotations

import os
import re
import socket
import stat
import tempfile
import time
from contextlib import suppress
from pathlib import Path

_OURS = re.compile(r"clickfleet-[0-9a-f]+-\d+-\d+")
_YOUNG_S = 60.0
"""Between its making and its first listening a socket refuses too."""


def new(run: int, shard: int) -> str:
    """A place for the socket of a shard of this process; those that nobody listens at any more are cleared away."""
    folder = Path(tempfile.gettempdir())
    for path in folder.glob("clickfleet-*-*-*"):
        if _OURS.fullmatch(path.name) and _is_left(path):
            with suppress(OSError):
                path.unlink()
    return str(folder / f"clickfleet-{run:x}-{shard}-{os.getpid()}")


def _is_left(path: Path) -> bool:
    if not hasattr(socket, "AF_UNIX"):
        return False
    try:
        facts = path.lstat()
        if not stat.S_ISSOCK(facts.st_mode) or time.time() - facts.st_mtime < _YOUNG_S:
            return False
        with socket.socket(socket.AF_UNIX) as asking:
            asking.connect(str(path))
    except ConnectionRefusedError:
        return True
    except OSError:  # gone meanwhile, or another user's
        return False
    return False
