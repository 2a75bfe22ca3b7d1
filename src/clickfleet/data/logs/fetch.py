"""Download public data sets: fetch, check and unpack their archives, and create small folders for quick runs."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import tarfile
import time
import urllib.request
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import IO, Any, cast
from urllib.parse import urlsplit

from clickfleet.config.plugins import closest
from clickfleet.data.files import inside, move
from clickfleet.data.logs.source import LogReport
from clickfleet.data.progress import Bar, amount, progress
from clickfleet.errors import ConfigError, DataError

_DOWNLOAD_CHUNK = 1 << 18
_NETWORK_ERRORS = (http.client.HTTPException, OSError)  # URLError, timeouts and resets are OSErrors


def download(
    url: str, to: Path, size: int | None = None, *, room: float = 1.0, retries: int = 5, pause_s: float = 1.0
) -> int:
    """Download `url` to the file `to` and return its size, which must equal `size` if that is given.

    A partial download is kept in `to` + ".part", and a later call continues it. `room` is the disk space needed, as a
    multiple of the file size. `retries` counts attempts in a row that receive nothing.
    """
    if urlsplit(url).scheme not in ("http", "https"):
        raise DataError(f"{url} is not an http or https URL")
    if to.exists() and (size is None or to.stat().st_size == size):
        return to.stat().st_size
    to.parent.mkdir(parents=True, exist_ok=True)
    part = to.with_name(to.name + ".part")
    tries = 0
    with progress(f"fetching {to.name}", size, "bytes") as bar:
        while True:
            before = _size(part)
            try:
                whole = _continue(url, part, size, room, bar)
                break
            except urllib.error.HTTPError as error:
                error.close()
                if error.code < 500:
                    raise DataError(f"{url}: the server replied {error.code} {error.reason}", "check the URL") from None
                reason: Exception = error
            except _NETWORK_ERRORS as error:
                reason = error
            tries = 0 if _size(part) > before else tries + 1
            if tries >= retries:
                raise _unreachable(url, to, part, reason) from None
            time.sleep(pause_s * 2 ** max(tries - 1, 0))
    move(part, to)
    _tag(part).unlink(missing_ok=True)
    return whole


def _continue(url: str, part: Path, size: int | None, room: float, bar: Bar) -> int:
    """Continue a download over one connection. Raise if it breaks before the end."""
    have = _size(part)
    request = urllib.request.Request(url, headers={"User-Agent": "clickfleet", "Accept-Encoding": "identity"})
    tag = _tag(part).read_text() if _tag(part).exists() else ""
    if have and (tag or size is not None):
        request.add_header("Range", f"bytes={have}-")
        if tag:
            request.add_header("If-Range", tag)  # if the file was replaced, the server sends all of it
    try:
        reply = urllib.request.urlopen(request, timeout=30)
    except urllib.error.HTTPError as error:
        if error.code != 416:
            raise
        error.close()
        if error.headers.get("Content-Range") == f"bytes */{have}" and size in (None, have):
            return have  # already complete
        part.unlink()
        raise ConnectionError("the file changed on the server") from None
    with reply:
        have = have if reply.status == 206 else 0
        whole = _whole(reply, have)
        if size is not None and whole is not None and whole != size:
            raise DataError(
                f"{url}: the server offers {whole:,} bytes, expected {size:,}",
                "the file was replaced, or a proxy replied instead; name another source with --mirror or --url",
            )
        whole = size if whole is None else whole
        _tag(part).write_text(reply.headers.get("ETag", ""))
        _check_room(part, whole, have, room)
        bar.expect(whole)
        bar.advance(have - bar.done)
        with part.open("ab" if have else "wb") as file:
            while data := reply.read(_DOWNLOAD_CHUNK):
                file.write(data)
                bar.advance(len(data))
    got = _size(part)
    if whole is not None and got != whole:
        if got > whole:
            part.unlink()
            raise DataError(f"{url}: the server sent more than the announced {whole:,} bytes")
        raise ConnectionError(f"the connection closed after {got:,} of {whole:,} bytes")
    return got


def _whole(reply: Any, have: int) -> int | None:
    """Return the size of the whole file according to the server, or None."""
    if reply.status == 206:
        start, _, total = reply.headers.get("Content-Range", "").removeprefix("bytes ").partition("/")
        if start.split("-")[0] != str(have):
            raise ConnectionError(f"requested bytes from {have}, but the server sent {start!r}")
        return _size_of(total)
    return _size_of(reply.headers.get("Content-Length", ""))


def _size_of(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 18 else None


def _check_room(part: Path, whole: int | None, have: int, room: float) -> None:
    if whole is None:
        return
    need, free = int(whole * room) - have, shutil.disk_usage(part.parent).free
    if need > free:
        raise DataError(
            f"{part.parent} has {amount(free, 'bytes')} free, but {amount(need, 'bytes')} are needed",
            "free some space, or choose another disk with --out",
        )


def _unreachable(url: str, to: Path, part: Path, reason: Exception) -> DataError:
    host = urlsplit(url).netloc
    why = getattr(reason, "reason", None) or reason
    kept = f" ({amount(_size(part), 'bytes')} are kept; the next call continues from there)" if _size(part) else ""
    return DataError(
        f"cannot fetch {url} from {host}: {why}{kept}",
        f"check the internet connection; set https_proxy to use a proxy; name another source with --mirror; "
        f"or copy the file to {to}",
    )


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _tag(part: Path) -> Path:
    return part.with_name(part.name + ".tag")


_UNPACKED = 4.0  # disk space for an archive and its content, as a multiple of the archive
_CHUNK = 1 << 20


@dataclass(frozen=True)
class Archive:
    """A tar file. `folders` maps its folders (*: any) to ours."""

    url: str
    folders: dict[str, str]
    size: int | None = None

    @property
    def name(self) -> str:
        return self.url.rsplit("/", 1)[-1]


@dataclass(frozen=True)
class Dataset:
    name: str
    about: str
    archives: tuple[Archive, ...]
    quick: dict[str, tuple[str, ...]] = field(
        default_factory=lambda: {"train_data": ("part-0", "part-1"), "test_data": ("part-220",)}
    )
    """Folders for quick runs, and the files of the full folders that they link to."""


DATASETS = {
    "criteo": Dataset(
        "criteo",
        "Criteo's display advertising log as raw text (45,840,617 rows)",
        (
            Archive(
                "https://fleet.bj.bcebos.com/ctr_data.tar.gz",
                {"raw_data": "train_data_full", "test_data": "test_data_full"},
                4_041_125_592,
            ),
        ),
    ),
    "criteo-slots": Dataset(
        "criteo-slots",
        "the same log as slot text, scaled and hashed",
        (
            Archive(
                "https://paddlerec.bj.bcebos.com/datasets/criteo/slot_train_data_full.tar.gz",
                {"*": "slot_train_data_full"},
            ),
            Archive(
                "https://paddlerec.bj.bcebos.com/datasets/criteo/slot_test_data_full.tar.gz",
                {"*": "slot_test_data_full"},
            ),
        ),
        {"slot_train_data": ("part-0", "part-1"), "slot_test_data": ("part-220",)},
    ),
    "one-billion-words": Dataset(
        "one-billion-words",
        "the one billion word benchmark as plain text, and the analogies that PaddleRec evaluates word2vec on",
        (
            Archive(
                "https://www.statmt.org/lm-benchmark/1-billion-word-language-modeling-benchmark-r13output.tar.gz",
                {
                    "training-monolingual.tokenized.shuffled": "training",
                    "heldout-monolingual.tokenized.shuffled": "heldout",
                },
                1_792_209_805,
            ),
            Archive("https://paddlerec.bj.bcebos.com/word2vec/test_dir.tar", {"test_dir": "questions"}),
        ),
        {},
    ),
}


def dataset(name: str, urls: Sequence[str] = (), mirror: str = "") -> Dataset:
    """Return a dataset by name: from its original source, from `urls` (one per archive) or from a `mirror`."""
    if name not in DATASETS:
        raise ConfigError(f"unknown dataset {name!r}{closest(name, DATASETS)}")
    known = DATASETS[name]
    archives = known.archives
    if urls and mirror:
        raise ConfigError("--url and --mirror exclude each other", "remove one of them")
    if urls:
        if len(urls) != len(archives):
            files = " and ".join(archive.name for archive in archives)
            raise ConfigError(f"{name} consists of {files}: pass --url {len(archives)} times, not {len(urls)}")
        archives = tuple(Archive(url, archive.folders) for url, archive in zip(urls, archives, strict=True))
    elif mirror:
        base = mirror.rstrip("/")
        archives = tuple(Archive(f"{base}/{archive.name}", archive.folders, archive.size) for archive in archives)
    return Dataset(known.name, known.about, archives, known.quick)


def fetch(data: Dataset, out: Path, log: Callable[[str], None] = lambda _: None, **options: Any) -> LogReport:
    """Download and unpack a dataset to the folder `out`. Skip what is complete. `options` are those of `download`."""
    rows: dict[str, int] = {}
    for archive in data.archives:
        where = out / archive.name
        note = out / f".{archive.name}.json"
        if unpacked := _unpacked_before(note, archive, out):
            log(f"{archive.name}: already unpacked")
        else:
            size = download(archive.url, where, archive.size, room=_UNPACKED, **options)
            log(f"{archive.name}: {amount(size, 'bytes')} in {where}")
            unpacked = _unpack(where, archive, out)
            note.write_text(json.dumps(unpacked))
        rows |= unpacked
    for folder, parts in data.quick.items():
        rows[folder] = _quick(out / f"{folder}_full", out / folder, parts)
    for folder, lines in rows.items():
        files = sum(1 for _ in (out / folder).iterdir())
        log(f"{folder}: {lines:,} rows in {files} files in {out / folder}")
    full = [lines for folder, lines in rows.items() if folder not in data.quick]
    return {
        "rows": sum(full),
        "out": str(out),
        "folders": rows,
        "archives": [archive.name for archive in data.archives],
    }


def clean(data: Dataset, out: Path, log: Callable[[str], None] = lambda _: None) -> LogReport:
    """Remove the files of `fetch`, and the folder if it is then empty."""
    names = [folder for archive in data.archives for folder in archive.folders.values()] + list(data.quick)
    names += [f"{name}.unpacking" for name in names]
    for archive in data.archives:
        names += [archive.name, f"{archive.name}.part", f"{archive.name}.part.tag", f".{archive.name}.json"]
    removed = []
    for path in (out / name for name in names):
        if path.is_dir():
            shutil.rmtree(path)
        elif path.exists():
            path.unlink()
        else:
            continue
        removed.append(str(path))
        log(f"removed {path}")
    if out.is_dir() and not any(out.iterdir()):
        out.rmdir()
    return {"rows": 0, "out": str(out), "removed": removed}


def _unpacked_before(note: Path, archive: Archive, out: Path) -> dict[str, int]:
    """Return the rows per folder of an archive that was unpacked before. Empty: a folder is missing."""
    if not note.exists():
        return {}
    rows: dict[str, int] = json.loads(note.read_text())
    complete = set(rows) == set(archive.folders.values()) and all((out / folder).is_dir() for folder in rows)
    return rows if complete else {}


def _unpack(path: Path, archive: Archive, out: Path) -> dict[str, int]:
    """Unpack an archive into our folders, which appear when they are complete. Return the rows of each."""
    rows: dict[str, int] = {}
    for folder in archive.folders.values():
        shutil.rmtree(_beside(out, folder), ignore_errors=True)
    try:
        with (
            path.open("rb") as raw,
            progress(f"unpacking {path.name}", path.stat().st_size, "bytes") as bar,
            tarfile.open(fileobj=cast(IO[bytes], _FileWithProgress(raw, bar)), mode="r|*") as tar,
        ):
            for member in tar:
                folder, inner = _place(member, archive, path)
                if not member.isfile() or not folder:
                    continue
                target = inside(_beside(out, folder), inner.as_posix())
                target.parent.mkdir(parents=True, exist_ok=True)
                source = tar.extractfile(member)
                assert source is not None
                rows[folder] = rows.get(folder, 0) + _copy(source, target)
    except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise DataError(f"cannot unpack {path}: {error.strerror}") from None
        raise DataError(f"{path} is damaged: {error}", f"remove it and fetch it again: rm {path}") from None
    if set(rows) != set(archive.folders.values()):
        missing = ", ".join(sorted(set(archive.folders.values()) - set(rows)))
        raise DataError(f"{path} contains no files for {missing}", "check that it is the right archive")
    for folder in rows:
        shutil.rmtree(out / folder, ignore_errors=True)
        move(_beside(out, folder), out / folder)
    return rows


def _place(member: tarfile.TarInfo, archive: Archive, path: Path) -> tuple[str, PurePosixPath]:
    """Return our folder for a member and its path inside. Reject names that lead outside the folder."""
    inner = PurePosixPath(member.name)
    if inner.is_absolute() or ".." in inner.parts or member.issym() or member.islnk() or member.isdev():
        raise DataError(f"{path}: cannot unpack {member.name!r}: it is a link, a device or a path that leads outside")
    parts = inner.parts
    if any(part.startswith(".") for part in parts) or not parts:  # such as .DS_Store, .svn/entries
        return "", inner
    for i, part in enumerate(parts[:-1]):
        if part in archive.folders:
            return archive.folders[part], PurePosixPath(*parts[i + 1 :])
    return archive.folders.get("*", ""), PurePosixPath(parts[-1])


def _copy(source: IO[bytes], target: Path) -> int:
    rows, last = 0, b"\n"
    with target.open("wb") as file:
        while data := source.read(_CHUNK):
            file.write(data)
            rows += data.count(b"\n")
            last = data[-1:]
    return rows + (last != b"\n")


def _quick(full: Path, quick: Path, parts: tuple[str, ...]) -> int:
    """Link or copy some parts. If the names do not exist, take as many of the first files."""
    names = [name for name in parts if (full / name).exists()]
    if not names:
        names = sorted((path.name for path in full.iterdir() if path.is_file()), key=lambda n: (len(n), n))[
            : len(parts)
        ]
    shutil.rmtree(quick, ignore_errors=True)
    quick.mkdir()
    rows = 0
    for name in names:
        try:
            os.link(full / name, quick / name)
        except OSError:  # no hard links on this file system
            shutil.copyfile(full / name, quick / name)
        with (quick / name).open("rb") as file:
            rows += sum(data.count(b"\n") for data in iter(lambda: file.read(_CHUNK), b""))
    return rows


def _beside(out: Path, folder: str) -> Path:
    return out / f"{folder}.unpacking"


class _FileWithProgress:
    """A file that reports to a bar how much of it was read."""

    def __init__(self, file: IO[bytes], bar: Bar) -> None:
        self._file, self._bar = file, bar

    def read(self, n: int = -1) -> bytes:
        data = self._file.read(n)
        self._bar.advance(len(data))
        return data
