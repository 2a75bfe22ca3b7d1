"""One process at a time in a folder; the system gives the lock back when its holder dies, however it dies."""

from __future__ import annotations

import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from clickfleet.errors import CheckpointError

if os.name == "nt":
    import msvcrt

    def _take(handle: int) -> None:
        os.lseek(handle, 1 << 30, os.SEEK_SET)  # far behind the text: locked bytes cannot be read there
        msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined,unused-ignore]
else:
    import fcntl

    def _take(handle: int) -> None:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)


class Lock:
    """Held inside a `with` block; refused while another process holds it, or awaited for `patience_s`."""

    def __init__(self, path: Path, what: str, patience_s: float = 0.0) -> None:
        self.path, self.what, self.patience_s = path, what, patience_s
        self._handle: int | None = None

    def __enter__(self) -> Self:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            handle = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise CheckpointError(
                f"{self.path} cannot be made: {error.strerror}", "is there space, and the right to write there?"
            ) from error
        deadline = time.monotonic() + self.patience_s
        while True:
            try:
                _take(handle)
                break
            except (BlockingIOError, PermissionError):  # the latter on Windows
                if time.monotonic() < deadline:
                    time.sleep(0.02)
                    continue
                os.lseek(handle, 0, os.SEEK_SET)
                holder = os.read(handle, 200).decode(errors="replace").strip() or "another process"
                os.close(handle)
                raise CheckpointError(
                    f"{self.path.parent} is in use: {holder} {self.what} there", "wait for it, or stop it first"
                ) from None
        self._handle = handle
        os.ftruncate(handle, 0)
        os.lseek(handle, 0, os.SEEK_SET)
        with suppress(OSError):  # the disk is full: the lock holds without a name
            os.write(handle, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None
