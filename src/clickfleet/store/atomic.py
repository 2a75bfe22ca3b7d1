"""Write files and folders atomically, and detect damage when they are read.

`write_file` replaces a file, and `append` extends one. `write_folder(path, kind)` collects files in a hidden folder beside `path`,
flushes them to the disk, writes `manifest.json` and renames the folder to `path`; a crash leaves nothing under `path`. The manifest is
canonical JSON (sorted keys, no blanks, UTF-8):

    {"files": {name: {"bytes": n, "xxh3_128": hex}, …}, "format": "clickfleet/<kind>", "hash": hex, "version": 1, …facts of the writer}

`hash` is the BLAKE2b-256 of the manifest without `hash`. Reading fails on an unknown format, a newer version, and a file that is
missing or has a different length or checksum. The error names the file, and nothing is loaded.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Self, TypedDict

import xxhash

from clickfleet.data.files import exchange, flush, inside, move, replacing
from clickfleet.errors import CheckpointError, ClickfleetError

MANIFEST = "manifest.json"
Manifest = dict[str, Any]


class FileFacts(TypedDict):
    """A file's entry in a manifest."""

    bytes: int
    xxh3_128: str


def canonical(value: Any) -> bytes:
    """Return `value` as canonical JSON.

    >>> canonical({"b": 1, "a": [2.5, None]})
    b'{"a":[2.5,null],"b":1}'
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def digest(value: Any) -> str:
    return hashlib.blake2b(canonical(value), digest_size=32).hexdigest()


def checksum(content: bytes) -> FileFacts:
    """Return the manifest's entry for a file with this content."""
    return {"bytes": len(content), "xxh3_128": xxhash.xxh3_128(content).hexdigest()}


def seal(facts: Mapping[str, object], key: str = "hash") -> bytes:
    """Return facts as canonical JSON, with their hash added under `key`.

    >>> unseal(seal({"time": 1.5}))
    {'time': 1.5}
    """
    return canonical({**facts, key: digest(facts)})


def unseal(content: bytes, key: str = "hash") -> dict[str, Any]:
    """Return the facts that `seal` wrote. Raise ValueError if a byte was changed."""
    facts = json.loads(content)
    if not isinstance(facts, dict) or not facts.pop(key, None) or seal(facts, key) != content:
        raise ValueError("its hash does not match")
    return facts


class HashedFile:
    """A binary file that hashes what is written to it. `close` flushes it to the disk."""

    def __init__(self, path: Path) -> None:
        self._file: IO[bytes] = path.open("xb")
        self._hash = xxhash.xxh3_128()
        self.bytes = 0
        self.closed = False

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self._hash.update(view)
        self._file.write(view)
        self.bytes += len(view)
        return len(view)

    def tell(self) -> int:
        return self.bytes

    def writable(self) -> bool:
        return True

    def readable(self) -> bool:
        return False

    def seekable(self) -> bool:
        return False

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()

    def abandon(self) -> None:
        with suppress(OSError):  # closing writes the rest of the buffer, and the disk may be full
            self._file.close()

    def facts(self) -> FileFacts:
        return {"bytes": self.bytes, "xxh3_128": self._hash.hexdigest()}


def hidden(path: Path) -> Path:
    """Return where a folder is written before it gets its name."""
    return path.parent / f".{path.name}.writing"


class FolderWriter:
    """Writes the files of a folder; `facts` go into its manifest."""

    def __init__(self, path: Path, kind: str, replaces: bool = False) -> None:
        self.path, self.kind, self.replaces = path, kind, replaces
        self.facts: dict[str, object] = {}
        self.ready: Callable[[str], None] = lambda manifest_hash: None
        """Called with the hash of the manifest before the folder gets its name."""
        self.hidden = hidden(path)
        self._files: dict[str, HashedFile] = {}
        self._adopted: dict[str, FileFacts] = {}
        self._beside: dict[str, Mapping[str, object]] = {}

    def file(self, name: str) -> HashedFile:
        self._files[name] = HashedFile(self.hidden / name)
        return self._files[name]

    def adopt(self, name: str, facts: FileFacts) -> None:
        """Add a file that another process wrote into `hidden` and flushed."""
        self._adopted[name] = facts

    def put(self, name: str, content: bytes) -> None:
        """Write a whole file."""
        sink = self.file(name)
        sink.write(content)
        sink.close()

    def beside(self, name: str, facts: Mapping[str, object]) -> None:
        """Add a JSON file that the manifest does not list, so that equal folders may differ in it.

        It holds the hash of the manifest and its own.
        """
        self._beside[name] = facts

    def __enter__(self) -> Self:
        if self.replaces and os.path.lexists(self.path):
            check_ours(self.path, self.kind)
        elif self.path.exists():
            raise CheckpointError(f"{self.path} already exists", "choose another name, or remove it first")
        shutil.rmtree(self.hidden, ignore_errors=True)  # left by a killed process
        with write_errors(self.path):
            self.hidden.mkdir(parents=True)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if error is None:
                self._finish()
        except OSError as failure:
            error = failure
        finally:
            for file in self._files.values():
                file.abandon()
        if error is not None:
            shutil.rmtree(self.hidden, ignore_errors=True)
            if isinstance(error, OSError):
                raise write_error(error, self.path) from error

    def _finish(self) -> None:
        for file in self._files.values():
            file.close()
        manifest = {
            "format": f"clickfleet/{self.kind}",
            "version": 1,
            "files": {**{name: file.facts() for name, file in self._files.items()}, **self._adopted},
            **self.facts,
        }
        manifest_hash = digest(manifest)
        for name, facts in self._beside.items():
            self.put(name, seal({**facts, "entry": manifest_hash}))
        sink = self.file(MANIFEST)
        flush(self.hidden)  # all names, so that nothing but the manifest itself is left to flush
        sink.write(canonical({**manifest, "hash": manifest_hash}))
        sink.close()
        self.ready(manifest_hash)
        if self.replaces and os.path.lexists(self.path):
            check_ours(self.path, self.kind)
            remove(self.path, self.hidden)
        else:
            move(self.hidden, self.path)
        flush(self.path.parent)


def write_folder(path: Path | str, kind: str, replaces: bool = False) -> FolderWriter:
    """Return a writer for a folder that appears under `path` when its `with` block ends without an error.

    With `replaces`, it takes the place of a folder of the same kind. The old one stays until the new one is complete.
    """
    return FolderWriter(Path(path), kind, replaces)


def check_ours(path: Path, kind: str) -> None:
    """Refuse to replace anything but a real folder that clickfleet wrote as this kind."""
    if path.is_symlink() or not path.is_dir():
        raise CheckpointError(f"{path} is not replaced: it is not a folder", "choose another name, or remove it first")
    try:
        read_manifest(path, kind, None)
    except CheckpointError as error:
        raise CheckpointError(
            f"{path} is not replaced: {error}", "only what clickfleet wrote is; choose another name"
        ) from None


def read_kind(path: Path | str) -> str:
    """Return the kind of a folder, whatever its version."""
    return str(read_manifest(path, None, None)["format"]).removeprefix("clickfleet/")


def read_manifest(path: Path | str, kind: str | None, version: int | None = 1) -> Manifest:
    """Read and check the manifest of a folder, but not its files.

    Raise CheckpointError if the folder has another kind, or a newer version, than those given.
    """
    path = Path(path)
    try:
        with damage_errors(path / MANIFEST):
            content = (path / MANIFEST).read_bytes()
            manifest = json.loads(content)
    except FileNotFoundError:
        problem = f"{path} has no {MANIFEST}" if path.is_dir() else f"{path} does not exist"
        raise CheckpointError(problem, f"expected a saved {kind or 'model'}") from None
    except OSError as error:
        raise CheckpointError(f"cannot read {path / MANIFEST}: {error.strerror or error}") from error
    if not isinstance(manifest, dict) or not str(manifest.get("format", "")).startswith("clickfleet/"):
        raise CheckpointError(f"{path / MANIFEST} was not written by clickfleet")
    if version is not None and isinstance(manifest.get("version"), int) and manifest["version"] > version:
        raise CheckpointError(
            f"{path} has format {manifest['version']} and this version reads up to {version}",
            "upgrade clickfleet to load it",
        )
    with damage_errors(path / MANIFEST):
        if not manifest.pop("hash", None) or seal(manifest) != content:
            raise CheckpointError(f"{path / MANIFEST} is damaged: its hash does not match")
    if not isinstance(manifest.get("files"), dict):
        raise CheckpointError(f"{path / MANIFEST} is damaged: it lists no files")
    for name in manifest["files"]:
        inside(path, name)
    if kind is not None and manifest["format"] != f"clickfleet/{kind}":
        raise CheckpointError(f"{path} is a {manifest['format'].removeprefix('clickfleet/')}, not a {kind}")
    return manifest


def verify_files(path: Path | str, manifest: Manifest) -> None:
    """Read every file that the manifest lists and compare lengths and checksums."""
    with damage_errors(Path(path) / MANIFEST):
        listed = {str(name): (facts["bytes"], facts["xxh3_128"]) for name, facts in manifest["files"].items()}
    for name, (size, checksum) in listed.items():
        file = Path(path) / name
        try:
            actual_size = file.stat().st_size
            if actual_size != size:
                raise CheckpointError(f"{file} is damaged: expected {size} bytes, found {actual_size}")
            with file.open("rb", buffering=0) as source:
                state = xxhash.xxh3_128()
                while chunk := source.read(1 << 22):
                    state.update(chunk)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"cannot read {file}: {getattr(error, 'strerror', error)}") from error
        if state.hexdigest() != checksum:
            raise CheckpointError(f"{file} is damaged: its checksum does not match", "use another checkpoint")


@contextmanager
def damage_errors(path: Path | str) -> Iterator[None]:
    """Turn errors from interpreting a file's content into a CheckpointError that names the file.

    A matching hash proves that a file is unchanged, not that clickfleet wrote it: facts may be missing or have another type.
    """
    try:
        yield
    except (ClickfleetError, OSError):
        raise
    except MemoryError as error:
        raise CheckpointError(f"{path} needs more memory than this machine has") from error
    except Exception as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else str(error).partition("\n")[0][:200]
        raise CheckpointError(
            f"{path} is damaged: {reason or type(error).__name__}", "use another copy of it"
        ) from error


def write_file(path: Path, content: bytes) -> None:
    """Replace a whole file durably, or leave it as it was."""
    with write_errors(path), replacing(path, durable=True) as temporary:
        temporary.write_bytes(content)


def append(path: Path, content: bytes, *, durable: bool = False) -> None:
    """Append to a file, or leave it as it was. `durable` flushes it to the disk."""
    with path.open("ab", buffering=0) as out:  # unbuffered: closing the file must not write what failed before
        size, rest = out.tell(), memoryview(content)
        try:
            while rest:
                rest = rest[out.write(rest) :]
            if durable:
                os.fsync(out.fileno())
        except OSError:
            out.truncate(size)
            raise


@contextmanager
def write_errors(path: Path) -> Iterator[None]:
    """Turn an OSError raised while `path` is written into a CheckpointError."""
    try:
        yield
    except OSError as error:
        raise write_error(error, path) from error


def write_error(error: OSError, path: Path) -> CheckpointError:
    """Return the error for a failed write of `path`: the reason, and what to do."""
    if error.errno in FULL:
        return CheckpointError(
            f"the disk is full: cannot write {path}; existing files are unchanged",
            "free space and try again; a run that ended resumes from its newest checkpoint",
        )
    return CheckpointError(f"cannot write {path}: {error.strerror or error}")


def remove(folder: Path, successor: Path | None = None) -> None:
    """Remove a folder or file, and move its successor to its place. Hide it first, so that a crash never leaves a part of it.

    Where the system can exchange two names, one of both is there at any moment. A symbolic link is removed, not what it leads to.
    """
    hidden = folder.parent / f".{folder.name}.removing"
    _discard(hidden)
    if successor is not None and exchange(successor, folder):
        move(successor, hidden)
    else:
        move(folder, hidden)
        if successor is not None:
            move(successor, folder)
    _discard(hidden)


def _discard(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of a file that cannot grow: a full disk, or a quota or size limit."""


class Appender:
    """Appends lines to a file from any number of threads. Never leaves a part of a line in the file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.waiting = b""
        """Lines that are not in the file yet."""
        self.problem: OSError | None = None
        """Why they are not: the disk is full."""
        self._lock = threading.Lock()

    def add(self, lines: bytes) -> None:
        """Append lines, or keep them for later if the disk is full."""
        with self._lock:
            self.waiting += lines
        self.flush()

    def flush(self) -> bool:
        """Try to write the waiting lines. Return whether all of them are in the file."""
        with self._lock:
            if self.waiting:
                try:
                    self.path.parent.mkdir(parents=True, exist_ok=True)
                    append(self.path, self.waiting)
                    self.waiting, self.problem = b"", None
                except OSError as error:
                    if error.errno not in FULL:
                        raise
                    self.problem = error
            return not self.waiting
