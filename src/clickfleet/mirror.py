"""A run folder on remote storage: written in a folder of this machine, and kept the same at a URL that fsspec knows.

What is complete is put there in an order that leaves nothing half done: the files of a checkpoint, then its manifest, then the names
that point at it. What was removed here is removed there, its manifest first.
"""

from __future__ import annotations

import atexit
import re
import shutil
import tempfile
import threading
from pathlib import Path
from typing import Any

from clickfleet import checkpoint, storage
from clickfleet.errors import CheckpointError, ClickfleetError
from clickfleet.files import filesystem

PUSH_S = 30.0
_URL = re.compile(r"^([a-z][a-z0-9+]+):/+(?=[^/])")
_folders: dict[str, str] = {}  # a folder here -> its URL


def url_of(path: str | Path) -> str | None:
    """The URL that `path` is, also where it has become a Path on its way, or None.

    >>> url_of(Path("s3://logs/run")), url_of("runs/deepfm")
    ('s3://logs/run', None)
    """
    text = str(path)
    found = _URL.match(text)
    return None if found is None or Path(text).exists() else f"{found[1]}://{text[found.end() :]}"


def origin(path: str | Path) -> str | None:
    """The URL of something in a folder that is kept the same elsewhere."""
    for folder, url in _folders.items():
        if Path(path).is_relative_to(folder):
            inner = Path(path).relative_to(folder).as_posix()
            return url if inner == "." else f"{url}/{inner}"
    return None


class Mirror:
    """A folder of this machine, gone with the process, and the URL where its content stays."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._fs, self._root = filesystem(self.url)
        self.folder = Path(tempfile.mkdtemp(prefix="clickfleet-run-"))
        _folders[str(self.folder)] = self.url
        atexit.register(shutil.rmtree, self.folder, ignore_errors=True)
        self._there: dict[str, tuple[int, int]] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Puts what is new every now and then, until `close`."""

        def work() -> None:
            while not self._stop.wait(PUSH_S):
                self.push()

        self._thread = threading.Thread(target=work, name="clickfleet-mirror", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Puts the last of it."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.push()

    def fetch(self, rows: bool = True) -> None:
        """What a run needs to go on: its newest checkpoint, its logs and curves; `rows` says whether row files come too."""
        names = self._names()
        latest = self._read("checkpoints/LATEST").split(" ")[0]
        for name in names:
            old = name.startswith("checkpoints/step-") and not name.startswith(f"checkpoints/{latest}/")
            is_rows = Path(name).name.startswith("rows-")
            if (old and not name.endswith(storage.MANIFEST)) or (is_rows and not rows):
                continue
            self._get(name)

    def fetch_model(self) -> Path:
        """The model at the URL, whole: a checkpoint or a published log or entry as it is, of a run its newest checkpoint."""
        names = self._names()
        prefix = next((p for p in ("", "checkpoints/") if f"{p}{checkpoint.LATEST}" in names), None)
        wanted = names
        if prefix is not None:
            latest = self._read(f"{prefix}{checkpoint.LATEST}").split(" ")[0]
            wanted = [f"{prefix}{checkpoint.LATEST}", *(n for n in names if n.startswith(f"{prefix}{latest}/"))]
        for name in wanted:
            self._get(name)
        return self.folder

    def steps(self) -> bool:
        """Whether there is a checkpoint."""
        return f"checkpoints/{checkpoint.LATEST}" in self._names()

    def push(self) -> None:
        """Makes the URL hold what is complete here."""
        with self._lock, self._plainly("written"):
            here = {}
            for path in self.folder.rglob("*"):
                name = path.relative_to(self.folder).as_posix()
                if path.is_file() and not any(part.startswith(".") for part in Path(name).parts):
                    facts = path.stat()
                    here[name] = (facts.st_size, facts.st_mtime_ns)
            for name in sorted(self._there.keys() - here.keys(), key=lambda name: not name.endswith(storage.MANIFEST)):
                self._remove(name)
            for name in sorted(here, key=_last):
                if self._there.get(name) != here[name]:
                    self._fs.makedirs(f"{self._root}/{Path(name).parent.as_posix()}", exist_ok=True)
                    self._fs.put_file(str(self.folder / name), f"{self._root}/{name}")
                    self._there[name] = here[name]

    def _remove(self, name: str) -> None:
        del self._there[name]
        whole = name.startswith("checkpoints/step-") and name.endswith(storage.MANIFEST)
        try:
            self._fs.rm_file(f"{self._root}/{name}")
            if whole:  # row files may have come from other hosts
                self._fs.rm(f"{self._root}/{Path(name).parent.as_posix()}", recursive=True)
        except FileNotFoundError:
            pass

    def _names(self) -> list[str]:
        with self._plainly("read"):
            self._fs.invalidate_cache()
            found = [str(name) for name in self._fs.find(self._root)] if self._fs.exists(self._root) else []
        if found == [self._root]:
            return []
        return sorted(name[name.index(self._root) + len(self._root) + 1 :] for name in found)

    def _read(self, name: str) -> str:
        try:
            with self._plainly("read"):
                return bytes(self._fs.cat_file(f"{self._root}/{name}")).decode().strip()
        except FileNotFoundError:
            raise CheckpointError(f"{self.url} holds no checkpoint yet") from None

    def _get(self, name: str) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with self._plainly("read"):
            self._fs.get_file(f"{self._root}/{name}", str(path))
        facts = path.stat()
        self._there[name] = (facts.st_size, facts.st_mtime_ns)

    def _plainly(self, what: str) -> _Plainly:
        return _Plainly(self.url, what)


class _Plainly:
    """What the storage refuses, in words; what is not there is for the caller to know."""

    def __init__(self, url: str, what: str) -> None:
        self._url, self._what = url, what

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, Exception) and not isinstance(error, ClickfleetError | FileNotFoundError):
            raise CheckpointError(f"{self._url} cannot be {self._what}: {error}") from error


def _last(name: str) -> tuple[bool, bool, str]:
    inner = Path(name).name
    return checkpoint.is_label(inner) or inner == "LOG.jsonl", inner == storage.MANIFEST, name


def put(files: list[Path], url: str) -> None:
    """Puts some files of this host into a folder at a URL."""
    fs, root = filesystem(url)
    with _Plainly(url, "written"):
        fs.makedirs(root, exist_ok=True)
        for file in files:
            fs.put_file(str(file), f"{root}/{file.name}")
