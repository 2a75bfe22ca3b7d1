"""Expand paths, patterns, folders and URLs to files in a fixed order. Read their decompressed bytes.

>>> split_files(["a", "b", "c", "d", "e"], 0, 2), split_files(["a", "b", "c", "d", "e"], 1, 2)
(['a', 'b', 'c'], ['d', 'e'])
"""

from __future__ import annotations

import ctypes
import glob
import os
import posixpath
import re
import stat
import sys
import tempfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import accumulate
from pathlib import Path
from typing import IO, Any, cast

from clickfleet.errors import ClickfleetError, ConfigError, DataError, MissingError, TrustError

_DRIVE = re.compile(r"[A-Za-z]:")


def check_name(name: object, where: str | Path) -> str:
    """Return `name` if it is a relative path below a folder. Names come from manifests, logs, archives and object stores.

    >>> check_name("checkpoints/LATEST", "s3://bucket/run")
    'checkpoints/LATEST'
    >>> check_name("../.bashrc", "s3://bucket/run")
    Traceback (most recent call last):
    clickfleet.errors.TrustError: s3://bucket/run names the file '../.bashrc', which is not a relative path inside it
      do not use it: it is damaged, or made to reach other files
    """
    plain = isinstance(name, str) and not set("\\\0") & set(name) and not _DRIVE.match(name)
    if not plain or any(part in ("", ".", "..") for part in str(name).split("/")):
        raise TrustError(
            f"{where} names the file {name!r:.200}, which is not a relative path inside it",
            "do not use it: it is damaged, or made to reach other files",
        )
    return str(name)


def inside(folder: Path, name: object) -> Path:
    """Return the path of a file below a folder. Neither the name nor a symbolic link may lead outside."""
    path = folder / check_name(name, folder)
    links = any(os.path.islink(folder.joinpath(part)) for part in accumulate(str(name).split("/"), posixpath.join))
    if links and not path.resolve().is_relative_to(folder.resolve()):
        raise TrustError(f"{path} is a link to {path.resolve()}, outside {folder}", "copy the file itself: cp -rL")
    return path


def exposed(path: str | Path) -> str:
    """Return a message if other users can read or change a file with a secret, else an empty text (on Windows: always)."""
    mode = stat.S_IMODE(Path(path).stat().st_mode)
    if not hasattr(os, "getuid") or not mode & 0o027:
        return ""
    return f"other users can {'change' if mode & 0o022 else 'read'} {path} (mode {mode:o}); chmod 600 {path}"


def temporary(short: bool = False) -> Path:
    """Return the private folder for temporary files that all processes of this user share. Create it if needed.

    `short` ignores TMPDIR and uses /tmp: the path of a socket is limited to about 100 bytes. Windows keeps temporary files
    per user, so owner and mode are not checked there.
    """
    folder = _user_folder(short)
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        pass
    except OSError as error:
        raise TrustError(f"cannot create {folder}: {error.strerror}", "set TMPDIR to a folder you own") from error
    check_private(folder)
    return folder


def in_memory(name: str) -> Path | None:
    """Return a private folder of that name in memory, which outlives processes and no reboot; None if the system has none."""
    root = Path("/dev/shm")
    folder = root / _user_folder().name
    try:
        if not root.is_mount():
            return None
        folder.mkdir(mode=0o700, exist_ok=True)
        check_private(folder)
        return folder / name
    except (OSError, TrustError):  # another user took the name
        return None


def check_private(folder: Path) -> None:
    """Raise TrustError if a folder is a link, or not only this user's. Windows has other rights, which are not checked."""
    status = folder.lstat()
    mode = stat.S_IMODE(status.st_mode)
    if not stat.S_ISDIR(status.st_mode):
        raise _unsafe(folder, "it is not a folder")
    if hasattr(os, "getuid") and status.st_uid != os.getuid():
        raise _unsafe(folder, f"user {status.st_uid} owns it")
    if hasattr(os, "getuid") and mode & 0o077:
        raise _unsafe(folder, f"other users have access to it (mode {mode:o})")


def make(folder: Path) -> None:
    """Create a folder and its parents. If it is inside `temporary()`, check first that `temporary()` is private."""
    if folder.is_relative_to(_user_folder()):
        temporary()
    folder.mkdir(parents=True, exist_ok=True)


def _user_folder(short: bool = False) -> Path:
    name = f"clickfleet-{os.getuid()}" if hasattr(os, "getuid") else "clickfleet"
    return Path("/tmp" if short and os.access("/tmp", os.W_OK) else tempfile.gettempdir()) / name


def _unsafe(folder: Path, why: str) -> TrustError:
    return TrustError(
        f"{folder} is not safe for temporary files: {why}", "remove it, or set TMPDIR to a folder you own"
    )


PACKED = {".gz": "gzip", ".zst": "zstd"}
"""Extensions of compressed files, and pyarrow's names of their codecs."""


def expand(paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]], base: str = "") -> list[str]:
    """Return all data files for `paths`, sorted within each path. A folder stands for the files in it.

    Files whose name starts with a dot or an underscore (.DS_Store, _SUCCESS) are skipped unless named explicitly.
    """
    files: list[str] = []
    for item in [paths] if isinstance(paths, str | os.PathLike) else paths:
        path = os.fspath(item)
        files += _expand_url(path) if "://" in path else _expand_local(os.path.join(base, path))
    if not files:
        raise ConfigError("no data files given")
    return files


def _expand_local(path: str) -> list[str]:
    if os.path.isdir(path):
        files = [os.path.join(path, name) for name in sorted(os.listdir(path)) if not name.startswith((".", "_"))]
        files = [name for name in files if os.path.isfile(name)]
        if not files:
            raise DataError(f"{path}: the folder contains no data files")
        return files
    if os.path.exists(path):
        return [path]
    matches = [name for name in sorted(glob.glob(path, recursive=True)) if os.path.isfile(name)]
    matches = [name for name in matches if not os.path.basename(name).startswith((".", "_"))]
    if not matches:
        what = "no file matches" if glob.has_magic(path) else "there is no file"
        raise DataError(
            f"{what} {path}",
            "a path in a configuration file is relative to the folder of the file, any other to the current folder",
        )
    return matches


def _expand_url(url: str) -> list[str]:
    with reading(url):
        fs, path = filesystem(url)
        if glob.has_magic(path):
            matches = sorted(cast(list[str], fs.glob(path)))
        elif fs.isdir(path):
            matches = [entry["name"] for entry in fs.ls(path, detail=True) if entry["type"] == "file"]
        else:
            return [url]
    names = [name for name in sorted(matches) if not name.rsplit("/", 1)[-1].startswith((".", "_"))]
    if not names:
        raise DataError(f"no file matches {url}")
    before = url.rstrip("/").removesuffix(path.rstrip("/"))
    if before.endswith("://") or ("://" in before and before != url.rstrip("/")):
        return [before + name for name in names]  # with the user, host and port, which the names lack
    return [cast(str, fs.unstrip_protocol(name)) for name in names]


def filesystem(url: str) -> tuple[Any, str]:
    """Return the file system of a URL, and the path in it."""
    import fsspec

    scheme = url.partition("://")[0]
    try:
        fs, path = fsspec.core.url_to_fs(url)
    except ImportError as error:
        if scheme in ("s3", "s3a"):
            raise MissingError("s3fs, which reads s3:// files,", "remote") from None
        raise ConfigError(f"{url}: {error}", _ADVICE.get(scheme, "")) from None
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and scheme not in _ADVICE:
            raise
        raise ConfigError(f"{url}: {str(error).partition(chr(10))[0]}", _ADVICE.get(scheme, "")) from None
    return fs, path


_ADVICE = {
    "hdfs": "install Java and a Hadoop client, and set JAVA_HOME, HADOOP_HOME and CLASSPATH=$(hadoop classpath --glob); "
    "or name the file by webhdfs://HOST:9870/PATH, which needs only pip install requests: docs/data.md",
    "viewfs": "name the file by the URL of its own cluster: hdfs:// or webhdfs://",
    "webhdfs": "run pip install requests",
    "afs": "no library reads afs://; mount it, copy the files with your client, or read them by a pipe command: docs/data.md",
}
"""What to do if a kind of URL cannot be opened."""


def split_files(files: Sequence[str], index: int, count: int) -> list[str]:
    """Return the files of worker `index` of `count`: contiguous blocks. The first workers take one file more."""
    if isinstance(files, str) or not isinstance(files, Sequence):
        raise TypeError(f"files must be a list of paths, not {type(files).__name__}")
    if not 0 <= index < count:
        raise ConfigError(f"worker {index} of {count} does not exist")
    share, extra = divmod(len(files), count)
    start = index * share + min(index, extra)
    return list(files[start : start + share + (index < extra)])


def packing(path: str) -> str | None:
    """Return pyarrow's name of the codec of a file, or None if the file is not compressed."""
    return next((name for ending, name in PACKED.items() if path.endswith(ending)), None)


def decompressed_size(files: Sequence[str]) -> int | None:
    """Return the size of all files together, or None if a file is compressed or not on this machine."""
    if any("://" in path or packing(path) or path.endswith(".parquet") for path in files):
        return None
    return sum(map(os.path.getsize, files))


def open_bytes(path: str) -> IO[bytes]:
    """Open a file without decompressing it."""
    with reading(path):
        if "://" in path:
            fs, inner = filesystem(path)
            return cast(IO[bytes], fs.open(inner, "rb"))
        return open(path, "rb", buffering=0)


class _Gunzip:
    """Reads the members of a gzip file in larger chunks than the standard library."""

    CHUNK = 1 << 18

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._member: Any = None
        self._started = False
        self._input = b""

    def read(self, n: int) -> bytes:
        while True:
            if not self._input:
                self._input = self._file.read(self.CHUNK) or b""
            if self._member is None:
                self._input = self._input.lstrip(b"\0") if self._started else self._input  # padding after a member
                if not self._input:
                    if not (more := self._file.read(self.CHUNK)):
                        return b""
                    self._input = more
                    continue
                self._member = zlib.decompressobj(wbits=31)
                self._started = True
            if not self._input and not self._member.unconsumed_tail:
                raise EOFError("unexpected end of file")
            data: bytes = self._member.decompress(self._input, n)
            self._input = self._member.unconsumed_tail
            if self._member.eof:
                self._input = self._member.unused_data
                self._member = None
            if data:
                return data

    def close(self) -> None:
        self._input = b""


class ByteStream(ABC):
    """A stream of bytes: a file, or the output of a command."""

    path: str

    @abstractmethod
    def _read_some(self, space: memoryview) -> int:
        """Read at least one byte, or none at the end. Return the number of bytes."""

    @abstractmethod
    def _too_short(self, missing: int) -> DataError:
        """Return the error that the stream ends `missing` bytes before the end of a `skip`."""

    @abstractmethod
    def close(self) -> None: ...

    def readinto(self, space: memoryview) -> int:
        """Fill `space` and return the number of bytes; it is smaller than `space` only at the end."""
        filled = 0
        while filled < len(space) and (got := self._read_some(space[filled:])):
            filled += got
        return filled

    def skip(self, n: int) -> None:
        """Read and discard `n` bytes."""
        space = memoryview(bytearray(1 << 18))
        while n > 0:
            got = self.readinto(space[: min(n, len(space))])
            if not got:
                raise self._too_short(n)
            n -= got


class Unpacked(ByteStream):
    """The decompressed content of a file as a stream. Only uncompressed files can seek."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.packed = packing(path)
        self._file = open_bytes(path)
        self._stream: Any = self._file
        if self.packed == "gzip":
            self._stream = _Gunzip(self._file)
        elif self.packed == "zstd":
            import pyarrow as pa

            self._stream = pa.CompressedInputStream(pa.PythonFile(self._file, mode="r"), "zstd")

    def _read_some(self, space: memoryview) -> int:
        with reading(self.path):
            if self.packed is None:
                return self._file.readinto(space) or 0  # type: ignore[attr-defined]
            data = self._stream.read(len(space))
            space[: len(data)] = data
            return len(data)

    def _too_short(self, missing: int) -> DataError:
        return DataError(f"{self.path}: ends {missing} bytes before the position to resume from; was it replaced?")

    def skip(self, n: int) -> None:
        if self.packed is not None:
            super().skip(n)
            return
        with reading(self.path):
            self._stream.seek(n, os.SEEK_CUR)

    def close(self) -> None:
        if self._stream is not self._file:
            self._stream.close()
        self._file.close()


@contextmanager
def reading(path: str) -> Iterator[None]:
    """Turn exceptions raised while reading a file into a DataError that names it."""
    try:
        yield
    except ClickfleetError:
        raise
    except Exception as error:
        text = str(getattr(error, "strerror", None) or error)
        foreign = type(error).__module__.split(".")[0] in ("pyarrow", "botocore", "aiohttp")
        if isinstance(error, EOFError | zlib.error) or "truncated" in text.lower() or "zstd" in text.lower():
            raise DataError(
                f"{path}: the compressed data is truncated or damaged ({text})",
                "download or write the file again",
            ) from error
        if isinstance(error, MemoryError):
            raise DataError(
                f"{path}: needs more memory than this machine has; the file is damaged or too large"
            ) from error
        if isinstance(error, OSError | UnicodeError) or foreign or ("://" in path and isinstance(error, RuntimeError)):
            raise DataError(f"{path}: cannot be read: {text}", "download or write the file again") from error
        raise


@contextmanager
def replacing(path: Path, *, durable: bool = False, mark: str = "writing") -> Iterator[Path]:
    """Yield a temporary path beside `path` to write to; rename it to `path` when the block ends without an error.

    Other processes see the old file or the new one, never a part. After an error the old file is unchanged and the temporary
    one is removed. A killed process leaves a file whose name starts with a dot; the next writer overwrites it.
    `durable` flushes the file and the rename to the disk. Processes that may write `path` at the same time need different marks.
    """
    temporary = path.with_name(f".{path.name}.{mark}")
    try:
        yield temporary
        if durable:
            flush(temporary)
        move(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    if durable:
        flush(path.parent)


@contextmanager
def writing(path: Path) -> Iterator[Path]:
    """Like `replacing`, for a file that the user asked for: create its folder, and report what goes wrong as a DataError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            yield temporary
    except OSError as error:
        raise DataError(f"cannot write {path}: {error.strerror or error}") from error


def move(source: Path, target: Path) -> None:
    """Give a finished file or folder its final name, atomically. Nothing else in the package renames files."""
    os.replace(source, target)


EXCHANGE = 2
"""The flag of renameat2 that exchanges two names."""


def exchange(one: Path, other: Path) -> bool:
    """Exchange two names in one step. Return False if this system or file system cannot."""
    if not sys.platform.startswith("linux"):
        return False
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    here = -100  # paths are relative to the current folder
    return call is not None and call(here, os.fsencode(one), here, os.fsencode(other), EXCHANGE) == 0


def flush(path: Path) -> None:
    """Force a file, or the names in a folder, to the disk."""
    if os.name == "nt" and path.is_dir():  # Windows cannot open a folder; renames are durable enough there
        return
    handle = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
