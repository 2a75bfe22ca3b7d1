"""A lock file: one process at a time in a folder.

The `filelock` library takes the lock (flock, or LockFileEx on Windows), and the system releases it when its holder dies, even by
`kill -9`. On a file system without locks, such as NFS mounted with `nolock`, taking the lock fails; it never degrades to a marker
file that would outlive its holder.
"""

from __future__ import annotations

import os
import re
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Self

from filelock import FileLock, Timeout

from clickfleet.errors import CheckpointError

POLL_S = 0.02


class Lock:
    """Held inside a `with` block. If another process holds it, wait up to `patience_s`, then raise CheckpointError.

    `what` is the verb of the holder's activity, for the error: "trains", "publishes".
    """

    def __init__(self, path: Path, what: str, patience_s: float = 0.0) -> None:
        self.path, self.what = path, what
        self._lock = FileLock(
            path,
            timeout=patience_s,
            poll_interval=POLL_S,
            thread_local=False,  # may be released by another thread
            fallback_to_soft=False,
            on_acquired=_write_holder,
        )

    def __enter__(self) -> Self:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._lock.acquire()
        except Timeout:
            raise CheckpointError(
                f"{self.path.parent} is in use: {self._holder()} {self.what} there", "wait for it, or stop it first"
            ) from None
        except OSError as error:
            raise CheckpointError(
                f"cannot lock {self.path}: {error.strerror or error}", "check the free space and the permissions there"
            ) from error
        return self

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def _holder(self) -> str:
        with suppress(OSError), self.path.open("rb", buffering=0) as file:
            file.seek(1)
            return file.read(200).decode(errors="replace").strip() or "another process"
        return "another process"


def is_held(path: Path) -> bool | None:
    """Return whether a process of this machine holds a lock, without touching it; None if there is no lock file.

    A lock that is taken to find out could make a run fail that starts at this moment.
    """
    try:
        facts = path.stat()
        holder = re.search(r"process (\d+) on (\S+)", path.read_text(errors="replace"))
    except OSError:
        return None
    with suppress(OSError):
        here = f"{os.major(facts.st_dev):02x}:{os.minor(facts.st_dev):02x}:{facts.st_ino}"
        locks = Path("/proc/locks").read_text()
        if any(here in line.split() for line in locks.splitlines()):
            return True
    if holder is None or holder[2] != socket.gethostname():
        return False if holder is None else None
    return _is_locked_by(int(holder[1]), path)


def _is_locked_by(process: int, path: Path) -> bool:
    """Return whether a process is alive and has the lock file open."""
    try:
        opened = [os.path.realpath(one) for one in Path(f"/proc/{process}/fd").iterdir()]
        return os.path.realpath(path) in opened
    except OSError:  # not Linux, or a process of another user
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            return False
        except OSError:
            return True
        return not Path(f"/proc/{process}").exists()


def _write_holder(handle: int) -> None:
    """Write who holds the lock. The text begins at byte 1, because Windows does not let others read byte 0, which is locked."""
    since = time.strftime("%Y-%m-%d %H:%M:%S %z")
    with suppress(OSError):  # on a full disk the lock is held without a name
        os.ftruncate(handle, 0)
        os.lseek(handle, 0, os.SEEK_SET)
        os.write(handle, f"\nprocess {os.getpid()} on {socket.gethostname()} (since {since})\n".encode())
