"""The folder in which a table keeps the rows that do not fit into memory.

Several tables may share a directory: each has a folder `table-…` of its own in it, locked while the table exists. The folder
holds scratch files only and goes with its table. What a killed process left is removed when the next table is opened there.
"""

import os
import shutil
import tempfile
import weakref
from contextlib import suppress
from pathlib import Path

from clickfleet.errors import CheckpointError, TableError
from clickfleet.store.lock import Lock, is_held

LOCK = "lock"
PATIENCE_S = 30.0
"""How long to wait for other processes that open tables in the same directory."""


class DiskFolder:
    """A new, empty folder in `directory`, which is created if only its last part is missing.

    >>> with tempfile.TemporaryDirectory() as directory:
    ...     folder = DiskFolder(directory)
    ...     folder.path.parent == Path(directory), sorted(file.name for file in folder.path.iterdir())
    (True, ['lock'])
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        parent = Path(directory)
        try:
            parent.mkdir(exist_ok=True)
        except FileNotFoundError:
            raise TableError(
                f"cannot create the directory {parent} of table.disk: {parent.parent} does not exist",
                "create it, or mount the disk it should be on",
            ) from None
        except OSError as error:
            raise TableError(
                f"cannot create the directory {parent} of table.disk: {error.strerror}", "check table.disk"
            ) from error
        with Lock(parent / LOCK, "opens a table", PATIENCE_S):
            _remove_unused(parent)
            try:
                self.path = Path(tempfile.mkdtemp(prefix="table-", dir=parent))
            except OSError as error:
                raise TableError(
                    f"cannot create a folder in {parent}: {error.strerror}", "check table.disk and its free space"
                ) from error
            lock = Lock(self.path / LOCK, "keeps rows").__enter__()
        weakref.finalize(self, _remove, self.path, lock)


def unused_folders(directory: str | os.PathLike[str]) -> list[Path]:
    """Return the folders of tables that killed processes left in a directory."""
    return [path for path in sorted(Path(directory).glob("table-*")) if not is_held(path / LOCK)]


def remove_unused(directory: str | os.PathLike[str]) -> None:
    """Remove the folders of tables that killed processes left in a directory, if it exists."""
    if Path(directory).is_dir():
        with Lock(Path(directory) / LOCK, "opens a table", PATIENCE_S):
            _remove_unused(Path(directory))


def _remove_unused(parent: Path) -> None:
    for folder in parent.glob("table-*"):
        with suppress(CheckpointError), Lock(folder / LOCK, "keeps rows"):  # nobody uses it
            shutil.rmtree(folder, ignore_errors=True)


def _remove(path: Path, lock: Lock) -> None:
    shutil.rmtree(path, ignore_errors=True)
    lock.__exit__()
