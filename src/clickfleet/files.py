"""Paths, globs, folders and URLs -> files in a fixed order; a file -> the bytes in it, whatever it is packed in.

>>> split_files(["a", "b", "c", "d", "e"], 0, 2), split_files(["a", "b", "c", "d", "e"], 1, 2)
(['a', 'b', 'c'], ['d', 'e'])
"""

import glob
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import IO, Any, cast

from clickfleet.errors import ClickfleetError, ConfigError, DataError, MissingError

PACKED = {".gz": "gzip", ".zst": "zstd"}
"""Name endings of compressed files and what pyarrow calls them."""


def expand(paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]], base: str = "") -> list[str]:
    """Every data file that `paths` name, sorted within each; a folder stands for the files in it.

    Files whose name starts with a dot or an underscore (.DS_Store, _SUCCESS) are not data unless named themselves.
    """
    given = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    found: list[str] = []
    for item in given:
        path = os.fspath(item)
        if base and "://" not in path:
            path = os.path.join(base, path)
        found += _expand_url(path) if "://" in path else _expand_local(path)
    if not found:
        raise ConfigError("no data files were named")
    return found


def _expand_local(path: str) -> list[str]:
    if os.path.isdir(path):
        files = [os.path.join(path, name) for name in sorted(os.listdir(path)) if not name.startswith((".", "_"))]
        files = [name for name in files if os.path.isfile(name)]
        if not files:
            raise DataError(f"{path}: the folder holds no data files")
        return files
    if os.path.exists(path):
        return [path]
    matches = [name for name in sorted(glob.glob(path, recursive=True)) if os.path.isfile(name)]
    matches = [name for name in matches if not os.path.basename(name).startswith((".", "_"))]
    if not matches:
        what = "no file matches" if glob.has_magic(path) else "there is no file"
        raise DataError(f"{what} {path}", "paths in a configuration are relative to its folder")
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
    kept = [fs.unstrip_protocol(name) for name in sorted(matches) if not name.rsplit("/", 1)[-1].startswith((".", "_"))]
    if not kept:
        raise DataError(f"no file matches {url}")
    return kept


def filesystem(url: str) -> tuple[Any, str]:
    import fsspec

    try:
        fs, path = fsspec.core.url_to_fs(url)
    except ImportError as error:
        if url.startswith(("s3://", "s3a://")):
            raise MissingError("s3fs, which reads s3:// files,", "remote") from None
        raise ConfigError(f"{url}: {error}") from None
    except ValueError as error:
        raise ConfigError(f"{url}: {error}") from None
    return fs, path


def split_files(files: Sequence[str], index: int, count: int) -> list[str]:
    """The files of worker `index` out of `count`: contiguous blocks, the first workers taking one more."""
    if isinstance(files, str) or not isinstance(files, Sequence):
        raise TypeError(f"files must be a list of paths, not {type(files).__name__}")
    if not 0 <= index < count:
        raise ConfigError(f"worker {index} of {count} does not exist")
    share, extra = divmod(len(files), count)
    start = index * share + min(index, extra)
    return list(files[start : start + share + (index < extra)])


def packing(path: str) -> str | None:
    return next((name for ending, name in PACKED.items() if path.endswith(ending)), None)


def open_bytes(path: str) -> IO[bytes]:
    """The file as it is stored."""
    with reading(path):
        if "://" in path:
            fs, inner = filesystem(path)
            return cast(IO[bytes], fs.open(inner, "rb"))
        return open(path, "rb", buffering=0)


class _Gunzip:
    """Members of a gzip file one after the other, in bites larger than the standard library's."""

    BITE = 1 << 18

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._member: Any = None
        self._input = b""

    def read(self, n: int) -> bytes:
        while True:
            if not self._input:
                self._input = self._file.read(self.BITE) or b""
            if self._member is None:
                self._input = self._input.lstrip(b"\0") if self._started else self._input  # padding after a member
                if not self._input:
                    if not (more := self._file.read(self.BITE)):
                        return b""
                    self._input = more
                    continue
                self._member = zlib.decompressobj(wbits=31)
                self._started = True
            if not self._input and not self._member.unconsumed_tail:
                raise EOFError("it ends in the middle")
            data: bytes = self._member.decompress(self._input, n)
            self._input = self._member.unconsumed_tail
            if self._member.eof:
                self._input = self._member.unused_data
                self._member = None
            if data:
                return data

    _started = False

    def close(self) -> None:
        self._input = b""


class Unpacked:
    """A file's content as a stream, unpacked on the way; only an unpacked file can jump."""

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

    def readinto(self, space: memoryview) -> int:
        """Fills `space` and says how much; less than all only at the end."""
        filled = 0
        with reading(self.path):
            while filled < len(space):
                if self.packed is None:
                    got = self._file.readinto(space[filled:])  # type: ignore[attr-defined]
                else:
                    data = self._stream.read(len(space) - filled)
                    got = len(data)
                    space[filled : filled + got] = data
                if not got:
                    break
                filled += got
        return filled

    def skip(self, n: int) -> None:
        """Jumps, or reads and forgets."""
        with reading(self.path):
            if self.packed is None:
                self._stream.seek(n, os.SEEK_CUR)
                return
        space = memoryview(bytearray(1 << 20))
        while n > 0:
            got = self.readinto(space[: min(n, 1 << 20)])
            if not got:
                raise DataError(f"{self.path}: ends {n} bytes before the place to go on from; was it replaced?")
            n -= got

    def close(self) -> None:
        if self._stream is not self._file:
            self._stream.close()
        self._file.close()


@contextmanager
def reading(path: str) -> Iterator[None]:
    """Turns what goes wrong while a file is read into a DataError that names it."""
    try:
        yield
    except ClickfleetError:
        raise
    except Exception as error:
        text = str(getattr(error, "strerror", None) or error)
        foreign = type(error).__module__.split(".")[0] in ("pyarrow", "botocore", "aiohttp")
        if isinstance(error, EOFError | zlib.error) or "truncated" in text.lower() or "zstd" in text.lower():
            raise DataError(
                f"{path}: the compressed data is cut short or damaged ({text})",
                "fetch or write the file again",
            ) from error
        if isinstance(error, MemoryError):
            raise DataError(
                f"{path}: asks for more memory than there is; it is damaged, or too large for this machine"
            ) from error
        if isinstance(error, OSError | UnicodeError) or foreign:
            raise DataError(f"{path}: cannot be read: {text}", "fetch or write the file again") from error
        raise
