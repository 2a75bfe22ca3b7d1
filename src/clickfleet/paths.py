"""Names that others chose -> paths that stay in a folder; and temporary folders that no other user of the machine can touch."""

from __future__ import annotations

import os
import re
import stat
import tempfile
from pathlib import Path

from clickfleet.errors import TrustError

_DRIVE = re.compile(r"[A-Za-z]:")


def check_name(name: object, where: str | Path) -> str:
    """A relative path below a folder, as manifests, logs, archives and object stores name files; anything else is refused.

    >>> check_name("checkpoints/LATEST", "s3://bucket/run")
    'checkpoints/LATEST'
    >>> check_name("../.bashrc", "s3://bucket/run")
    Traceback (most recent call last):
    clickfleet.errors.TrustError: s3://bucket/run names the file '../.bashrc', which is no relative path inside it
      do not use it: it is damaged, or was made to reach other files
    """
    plain = isinstance(name, str) and not set("\\\0") & set(name) and not _DRIVE.match(name)
    if not plain or any(part in ("", ".", "..") for part in str(name).split("/")):
        raise TrustError(
            f"{where} names the file {name!r:.200}, which is no relative path inside it",
            "do not use it: it is damaged, or was made to reach other files",
        )
    return str(name)


def inside(folder: Path, name: object) -> Path:
    """The file of that name below a folder; neither the name nor a symbolic link may lead outside."""
    path = folder / check_name(name, folder)
    if not path.resolve().is_relative_to(folder.resolve()):
        raise TrustError(
            f"{path} is a link to {path.resolve()}, outside {folder}", "put the file itself there: cp -rL copies it"
        )
    return path


def exposed(path: str | Path) -> str:
    """Why a file with a secret is not one: other users can read or change it. Empty where they cannot, and on Windows."""
    mode = stat.S_IMODE(Path(path).stat().st_mode)
    if not hasattr(os, "getuid") or not mode & 0o027:
        return ""
    return f"other users can {'change' if mode & 0o022 else 'read'} {path} (mode {mode:o}); chmod 600 {path}"


def temporary(short: bool = False) -> Path:
    """A folder for temporary files that only this user can read or write; the same one for all processes of the user.

    `short`: below /tmp whatever TMPDIR says, as the path of a socket has about a hundred bytes at most. Windows keeps temporary files
    per user, so neither owner nor mode is checked there.
    """
    folder = _of_user(short)
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        pass
    except OSError as error:
        raise TrustError(f"{folder} cannot be made: {error.strerror}", "set TMPDIR to a folder of yours") from error
    facts = folder.lstat()
    mode = stat.S_IMODE(facts.st_mode)
    if not stat.S_ISDIR(facts.st_mode):
        raise _unsafe(folder, "it is not a folder")
    if hasattr(os, "getuid") and facts.st_uid != os.getuid():
        raise _unsafe(folder, f"user {facts.st_uid} owns it")
    if hasattr(os, "getuid") and mode & 0o077:
        raise _unsafe(folder, f"others have access to it (mode {mode:o})")
    return folder


def make(folder: Path) -> None:
    """Makes a folder with its parents; where it lies in `temporary()`, that is made private and checked first."""
    if folder.is_relative_to(_of_user()):
        temporary()
    folder.mkdir(parents=True, exist_ok=True)


def _of_user(short: bool = False) -> Path:
    name = f"clickfleet-{os.getuid()}" if hasattr(os, "getuid") else "clickfleet"
    common = Path("/tmp")
    return (common if short and os.access(common, os.W_OK) else Path(tempfile.gettempdir())) / name


def _unsafe(folder: Path, why: str) -> TrustError:
    return TrustError(
        f"{folder} is not safe for temporary files: {why}", "remove it, or set TMPDIR to a folder of yours"
    )
