"""A file system of a few megabytes, to fill."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


class Disk:
    """A small file system and a balloon that leaves only so much of it free."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._balloon = folder, folder / "balloon"

    def leave(self, free: int) -> None:
        found = os.statvfs(self.folder)
        wanted = found.f_bavail * found.f_frsize - free
        with self._balloon.open("ab", buffering=0) as out:
            for _ in range(max(wanted, 0) // 4096):
                out.write(bytes(4096))

    def free(self) -> None:
        self._balloon.unlink(missing_ok=True)

    @property
    def used(self) -> int:
        found = os.statvfs(self.folder)
        return (found.f_blocks - found.f_bfree) * found.f_frsize


@contextmanager
def small_disk(folder: Path, size: int) -> Iterator[Disk]:
    """Mount it at a folder. Skip the test where that is not allowed."""
    folder.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], capture_output=True, text=True
    )
    if made.returncode:
        pytest.skip(f"a small file system cannot be mounted here: {made.stderr.strip()}")
    try:
        yield Disk(folder)
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
