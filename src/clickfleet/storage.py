"""Directories that are there whole or not at all, and know when they are broken.

`write(path, kind)` collects files in a hidden directory beside `path`, flushes them, writes `manifest.json` and renames; a crash leaves
nothing under `path`. The manifest is canonical JSON (sorted keys, no blanks, UTF-8):

    {"files": {name: {"bytes": n, "xxh3_128": hex}, …}, "format": "clickfleet/<kind>", "hash": hex, "version": 1, …facts of the writer}

`hash` is the BLAKE2b-256 of the manifest without `hash`. A reader refuses what it does not know: another format, a newer version, a
file that is missing, has another length or another checksum; it names the file and loads nothing.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import xxhash

from clickfleet.appended import FULL
from clickfleet.errors import CheckpointError, ClickfleetError
from clickfleet.paths import inside

MANIFEST = "manifest.json"
Manifest = dict[str, Any]


def canonical(value: Any) -> bytes:
    """
    >>> canonical({"b": 1, "a": [2.5, None]})
    b'{"a":[2.5,null],"b":1}'
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def digest(value: Any) -> str:
    return hashlib.blake2b(canonical(value), digest_size=32).hexdigest()


def checksum(content: bytes) -> dict[str, Any]:
    """What a manifest says of a file with this content."""
    return {"bytes": len(content), "xxh3_128": xxhash.xxh3_128(content).hexdigest()}


def sealed(facts: dict[str, Any]) -> bytes:
    """Facts as JSON with the hash of themselves.

    >>> unsealed(sealed({"time": 1.5}))
    {'time': 1.5}
    """
    return canonical({**facts, "hash": digest(facts)})


def unsealed(content: bytes) -> dict[str, Any]:
    """The facts that `sealed` wrote; ValueError where they are not those."""
    facts = json.loads(content)
    if not isinstance(facts, dict) or facts.pop("hash", None) != digest(facts):
        raise ValueError("its hash does not fit")
    return facts


class HashedFile:
    """A binary file for writing that hashes what passes; flushed to the disk when closed."""

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
        with suppress(OSError):  # what is left in its buffer may not fit on the disk
            self._file.close()

    def facts(self) -> dict[str, Any]:
        return {"bytes": self.bytes, "xxh3_128": self._hash.hexdigest()}


class Writer:
    """The files of a directory in the making; `facts` go into its manifest."""

    def __init__(self, path: Path, kind: str) -> None:
        self.path, self.kind = path, kind
        self.facts: dict[str, Any] = {}
        self.hidden = path.parent / f".{path.name}.writing"
        self._files: dict[str, HashedFile] = {}
        self._adopted: dict[str, dict[str, Any]] = {}
        self._beside: dict[str, dict[str, Any]] = {}

    def file(self, name: str) -> HashedFile:
        self._files[name] = HashedFile(self.hidden / name)
        return self._files[name]

    def adopt(self, name: str, facts: dict[str, Any]) -> None:
        """Counts a file that another process wrote into `hidden`, flushed, among those of the directory."""
        self._adopted[name] = facts

    def put(self, name: str, content: bytes) -> None:
        """A whole file at once."""
        sink = self.file(name)
        sink.write(content)
        sink.close()

    def beside(self, name: str, facts: dict[str, Any]) -> None:
        """A JSON file that may differ between equal directories: it names the manifest's hash and carries its own."""
        self._beside[name] = facts

    def __enter__(self) -> Self:
        if self.path.exists():
            raise CheckpointError(f"{self.path} exists already", "choose another name, or remove it first")
        shutil.rmtree(self.hidden, ignore_errors=True)  # of a writer that was killed
        with plainly(self.path):
            self.hidden.mkdir(parents=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._finish()
        except OSError as failure:
            error = failure
        for file in self._files.values():
            file.abandon()
        if error is not None:
            shutil.rmtree(self.hidden, ignore_errors=True)
            if isinstance(error, OSError):
                raise refusal(error, self.path) from error

    def _finish(self) -> None:
        for file in self._files.values():
            file.close()
        manifest = {
            "format": f"clickfleet/{self.kind}",
            "version": 1,
            "files": {**{name: file.facts() for name, file in self._files.items()}, **self._adopted},
            **self.facts,
        }
        whole = digest(manifest)
        for name, facts in self._beside.items():
            self.put(name, sealed({**facts, "entry": whole}))
        self.put(MANIFEST, canonical({**manifest, "hash": whole}))
        _flush_directory(self.hidden)
        self.hidden.rename(self.path)
        _flush_directory(self.path.parent)


def write(path: Path | str, kind: str) -> Writer:
    """A directory of that kind; it appears under `path` when the `with` block ends without an error."""
    return Writer(Path(path), kind)


def read_kind(path: Path | str) -> str:
    """What kind of directory this is, whatever its version."""
    return str(read_manifest(path, None, None)["format"]).removeprefix("clickfleet/")


def read_manifest(path: Path | str, kind: str | None, version: int | None = 1) -> Manifest:
    """The manifest of a directory, checked, but not its files; it must be of that kind and at most of that version where they are given."""
    path = Path(path)
    try:
        with sound(path / MANIFEST):
            manifest = json.loads((path / MANIFEST).read_bytes())
    except FileNotFoundError:
        what = f"{path} has no {MANIFEST}" if path.is_dir() else f"there is no {path}"
        raise CheckpointError(what, f"expected a saved {kind or 'model'}") from None
    except OSError as error:
        raise CheckpointError(f"{path / MANIFEST} is broken: {error}") from error
    if not isinstance(manifest, dict) or not str(manifest.get("format", "")).startswith("clickfleet/"):
        raise CheckpointError(f"{path / MANIFEST} was not written by clickfleet")
    if version is not None and isinstance(manifest.get("version"), int) and manifest["version"] > version:
        raise CheckpointError(
            f"{path} has format {manifest['version']} and this version reads up to {version}",
            "upgrade clickfleet to load it",
        )
    with sound(path / MANIFEST):
        if manifest.pop("hash", None) != digest(manifest):
            raise CheckpointError(f"{path / MANIFEST} is broken: its hash does not fit")
    if not isinstance(manifest.get("files"), dict):
        raise CheckpointError(f"{path / MANIFEST} is broken: it names no files")
    for name in manifest["files"]:
        inside(path, name)
    if kind is not None and manifest["format"] != f"clickfleet/{kind}":
        raise CheckpointError(f"{path} is a {manifest['format'].removeprefix('clickfleet/')}, not a {kind}")
    return manifest


def verify_files(path: Path | str, manifest: Manifest) -> None:
    """Reads every file the manifest names and compares lengths and checksums."""
    with sound(Path(path) / MANIFEST):
        named = {str(name): (facts["bytes"], facts["xxh3_128"]) for name, facts in manifest["files"].items()}
    for name, (size, checksum) in named.items():
        file = Path(path) / name
        try:
            found = file.stat().st_size
            if found != size:
                raise CheckpointError(f"{file} is broken: {size} bytes were written, {found} are there")
            with file.open("rb", buffering=0) as source:
                state = xxhash.xxh3_128()
                while chunk := source.read(1 << 22):
                    state.update(chunk)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{file} cannot be read: {getattr(error, 'strerror', error)}") from error
        if state.hexdigest() != checksum:
            raise CheckpointError(f"{file} is broken: its checksum does not fit", "use another checkpoint")


@contextmanager
def sound(path: Path | str) -> Iterator[None]:
    """Turns what a file's content cannot mean into a CheckpointError that names the file.

    Hashes say that a file is as somebody wrote it, not that it is ours: facts may be missing, or of another type.
    """
    try:
        yield
    except (ClickfleetError, OSError):
        raise
    except MemoryError as error:
        raise CheckpointError(f"{path} needs more memory than there is") from error
    except Exception as error:
        reason = f"it has no {error}" if isinstance(error, KeyError) else str(error).partition("\n")[0][:200]
        raise CheckpointError(
            f"{path} is broken: {reason or type(error).__name__}", "use another copy of it"
        ) from error


def write_pointer(path: Path, text: str) -> None:
    """Replaces a small file at once: readers see the old text or the new one."""
    replace(path, f"{text}\n".encode())


def replace(path: Path, content: bytes) -> None:
    """Replaces a whole file at once, or leaves it as it was."""
    hidden = path.parent / f".{path.name}.writing"
    with plainly(path):
        try:
            with hidden.open("wb") as out:
                out.write(content)
                out.flush()
                os.fsync(out.fileno())
            hidden.replace(path)
        except OSError:
            with suppress(OSError):
                hidden.unlink(missing_ok=True)
            raise
        _flush_directory(path.parent)


@contextmanager
def plainly(path: Path) -> Iterator[None]:
    """What the system refuses while `path` is written, in words."""
    try:
        yield
    except OSError as error:
        raise refusal(error, path) from error


def refusal(error: OSError, path: Path) -> CheckpointError:
    """Why `path` could not be written, and what to do."""
    if error.errno in FULL:
        return CheckpointError(
            f"the disk is full: {path} was not written, what was there before is as it was",
            "free space and try again; a run that ended goes on from its newest checkpoint",
        )
    return CheckpointError(f"{path} was not written: {error.strerror or error}")


def _flush_directory(path: Path) -> None:
    if os.name == "nt":  # a directory cannot be opened there; renames are durable enough
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove(path: Path) -> None:
    """Removes a directory so that a crash in between leaves nothing that looks whole."""
    hidden = path.parent / f".{path.name}.removing"
    shutil.rmtree(hidden, ignore_errors=True)
    path.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)
