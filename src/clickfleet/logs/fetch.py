"""Public click logs, ready to use: archives fetched, checked and unpacked, with small folders for a quick run."""

import json
import os
import shutil
import tarfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import IO, Any, cast

from clickfleet.errors import ConfigError, DataError
from clickfleet.logs.download import download
from clickfleet.paths import inside
from clickfleet.progress import Bar, amount, progress

_UNPACKED = 4.0  # disk needed for an archive and what is in it, as a multiple of the archive
_BITE = 1 << 20


@dataclass(frozen=True)
class Archive:
    """A tar file, and which of its folders (* for any) becomes which of ours."""

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
    """Small folders and the files they take from the full folder of the same name."""


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
                "https://paddlerec.bj.bcebos.com/datasets/criteo/slot_train_data_full.tar.gz", {"*": "train_data_full"}
            ),
            Archive(
                "https://paddlerec.bj.bcebos.com/datasets/criteo/slot_test_data_full.tar.gz", {"*": "test_data_full"}
            ),
        ),
    ),
}


def dataset(name: str, urls: Sequence[str] = (), mirror: str = "") -> Dataset:
    """A dataset by name, from its own source, from `urls` (one per archive) or from a `mirror` of the same names."""
    if name not in DATASETS:
        raise ConfigError(f"there is no dataset {name!r}", f"choose one of {', '.join(DATASETS)}")
    known = DATASETS[name]
    archives = known.archives
    if urls and mirror:
        raise ConfigError("--url and --mirror both say where to fetch from; give one of them")
    if urls:
        if len(urls) != len(archives):
            files = " and ".join(archive.name for archive in archives)
            raise ConfigError(f"{name} consists of {files}: give --url {len(archives)} times, not {len(urls)}")
        archives = tuple(Archive(url, archive.folders) for url, archive in zip(urls, archives, strict=True))
    elif mirror:
        base = mirror.rstrip("/")
        archives = tuple(Archive(f"{base}/{archive.name}", archive.folders, archive.size) for archive in archives)
    return Dataset(known.name, known.about, archives, known.quick)


def fetch(data: Dataset, out: Path, say: Callable[[str], None] = lambda _: None, **options: Any) -> dict[str, Any]:
    """Brings a dataset to the folder `out`; what is there is not fetched again. `options` are those of `download`."""
    rows: dict[str, int] = {}
    for archive in data.archives:
        where = out / archive.name
        note = out / f".{archive.name}.json"
        if found := _noted(note, out):
            say(f"{archive.name}: unpacked before")
        else:
            size = download(archive.url, where, archive.size, room=_UNPACKED, **options)
            say(f"{archive.name}: {amount(size, 'bytes')} in {where}")
            found = _unpack(where, archive, out)
            note.write_text(json.dumps(found))
        rows |= found
    for folder, parts in data.quick.items():
        rows[folder] = _quick(out / f"{folder}_full", out / folder, parts)
    for folder, lines in rows.items():
        files = sum(1 for _ in (out / folder).iterdir())
        say(f"{folder}: {lines:,} rows in {files} files in {out / folder}")
    full = [lines for folder, lines in rows.items() if folder not in data.quick]
    return {
        "rows": sum(full),
        "out": str(out),
        "folders": rows,
        "archives": [archive.name for archive in data.archives],
    }


def clean(data: Dataset, out: Path, say: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Removes what `fetch` made, and the folder itself if nothing else is in it."""
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
        say(f"removed {path}")
    if out.is_dir() and not any(out.iterdir()):
        out.rmdir()
    return {"rows": 0, "out": str(out), "removed": removed}


def _noted(note: Path, out: Path) -> dict[str, int]:
    """Rows per folder of an archive unpacked before; nothing if a folder is gone."""
    if not note.exists():
        return {}
    rows: dict[str, int] = json.loads(note.read_text())
    return rows if all((out / folder).is_dir() for folder in rows) else {}


def _unpack(path: Path, archive: Archive, out: Path) -> dict[str, int]:
    """Writes the archive's files into our folders, which appear only when all of it is there; returns their rows."""
    rows: dict[str, int] = {}
    for folder in archive.folders.values():
        shutil.rmtree(_beside(out, folder), ignore_errors=True)
    try:
        with (
            path.open("rb") as raw,
            progress(f"unpacking {path.name}", path.stat().st_size, "bytes") as bar,
            tarfile.open(fileobj=cast(IO[bytes], _Watched(raw, bar)), mode="r|*") as tar,
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
        raise DataError(f"{path} is damaged: {error}", f"remove it and fetch again: rm {path}") from None
    if set(rows) != set(archive.folders.values()):
        missing = ", ".join(sorted(set(archive.folders.values()) - set(rows)))
        raise DataError(f"{path} holds no files for {missing}", "is it the right archive?")
    for folder in rows:
        shutil.rmtree(out / folder, ignore_errors=True)
        os.replace(_beside(out, folder), out / folder)
    return rows


def _place(member: tarfile.TarInfo, archive: Archive, path: Path) -> tuple[str, PurePosixPath]:
    """Our folder for a member and its path inside; refuses names that would leave the folder."""
    inner = PurePosixPath(member.name)
    if inner.is_absolute() or ".." in inner.parts or member.issym() or member.islnk() or member.isdev():
        raise DataError(f"{path}: refuses to unpack {member.name!r}: a link, a device or a path that leads outside")
    parts = inner.parts
    if not parts or parts[-1].startswith("."):  # what file managers leave behind
        return "", inner
    for i, part in enumerate(parts[:-1]):
        if part in archive.folders:
            return archive.folders[part], PurePosixPath(*parts[i + 1 :])
    return archive.folders.get("*", ""), PurePosixPath(parts[-1])


def _copy(source: IO[bytes], target: Path) -> int:
    rows, last = 0, b"\n"
    with target.open("wb") as file:
        while data := source.read(_BITE):
            file.write(data)
            rows += data.count(b"\n")
            last = data[-1:]
    return rows + (last != b"\n")


def _quick(full: Path, quick: Path, parts: tuple[str, ...]) -> int:
    """Links (or copies) a few parts; where they have other names, as many of the first."""
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
            rows += sum(data.count(b"\n") for data in iter(lambda: file.read(_BITE), b""))
    return rows


def _beside(out: Path, folder: str) -> Path:
    return out / f"{folder}.unpacking"


class _Watched:
    """A file that tells a bar how much of it was read."""

    def __init__(self, file: IO[bytes], bar: Bar) -> None:
        self._file, self._bar = file, bar

    def read(self, n: int = -1) -> bytes:
        data = self._file.read(n)
        self._bar.advance(len(data))
        return data
