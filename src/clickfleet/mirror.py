"""A run folder on remote storage: written in a folder of this machine, and kept the same at a URL that fsspec knows.

What is complete is put there in an order that leaves nothing half done: the files of a checkpoint, then its manifest, then the names
that point at it. What was removed here is removed there after that, its manifest first. So whatever a process that is killed leaves
there can be gone on from, on any machine.
"""

from __future__ import annotations

import atexit
import errno
import hashlib
import os
import re
import shutil
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from clickfleet import checkpoint, storage
from clickfleet.errors import CheckpointError, ClickfleetError
from clickfleet.files import filesystem
from clickfleet.lock import Lock

PUSH_S = 30.0
TRIES = 5
LOG = "published/LOG.jsonl"
PASSING = "spool/"
"""Not kept at the URL: records of passes, which are in their topic."""
_URL = re.compile(r"^([a-z][a-z0-9+]+):/+(?=[^/])")
_folders: dict[str, str] = {}  # a folder here -> its URL


def url_of(path: str | Path) -> str | None:
    """The URL that `path` is, also where it has become a Path on its way, or None.

    >>> url_of(Path("s3://logs/run")), url_of("file:///mnt/run"), url_of("runs/deepfm")
    ('s3://logs/run', 'file:///mnt/run', None)
    """
    text = str(path)
    found = _URL.match(text)
    if found is None or Path(text).exists():
        return None
    root = "/" if found[1] in ("file", "local") else ""
    return f"{found[1]}://{root}{text[found.end() :]}"


def home(url: str) -> Path:
    """Where a run at a URL is written on this machine: the same place on all that have the same temporary folder."""
    name = hashlib.blake2b(url.rstrip("/").encode(), digest_size=8).hexdigest()
    return Path(tempfile.gettempdir()) / f"clickfleet-run-{name}"


def origin(path: str | Path) -> str | None:
    """The URL of something in a folder that is kept the same elsewhere."""
    for folder, url in _folders.items():
        if Path(path).is_relative_to(folder):
            inner = Path(path).relative_to(folder).as_posix()
            return url if inner == "." else f"{url}/{inner}"
    return None


class Mirror:
    """A folder of this machine, gone with the process, and the URL where its content stays."""

    def __init__(self, url: str, folder: Path | None = None) -> None:
        self.url = url.rstrip("/")
        self._fs, self._root = filesystem(self.url)
        self._shared = folder is not None
        self.folder = folder or Path(tempfile.mkdtemp(prefix="clickfleet-run-"))
        _folders[str(self.folder)] = self.url
        atexit.register(self._discard)
        self._there: dict[str, tuple[int, int]] = {}
        self._lock = threading.Lock()
        self._stop, self._woken = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None

    def _discard(self) -> None:
        if not self._shared:
            shutil.rmtree(self.folder, ignore_errors=True)
            return
        with suppress(CheckpointError, OSError), Lock(self.folder / ".lock", "trains"):  # not while another one trains
            self.empty()

    def empty(self) -> None:
        """Removes what an earlier process left here: what counts is at the URL."""
        for path in self.folder.iterdir():
            if path.name != ".lock":
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()

    def start(self, say: Callable[[str], None], apart: bool = False) -> None:
        """Puts what is new every now and then, until `close`; says why where it cannot, and tries again later.

        `apart`: not checkpoints, whose rows come from other hosts; who knows that they are there calls `push`.
        """

        def work() -> None:
            while not self._stop.is_set():
                self._woken.wait(PUSH_S)
                self._woken.clear()
                try:
                    self.push(apart)
                except CheckpointError as error:
                    say(f"warning: {error}")

        self._thread = threading.Thread(target=work, name="clickfleet-mirror", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Something is complete: it is put soon."""
        self._woken.set()

    def close(self) -> None:
        """Puts the last of it; what cannot be put stays here."""
        self._stop.set()
        self._woken.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        try:
            self.push()
        except CheckpointError as error:
            atexit.unregister(self._discard)
            raise CheckpointError(f"{error}", f"the whole run is in {self.folder}: copy it there") from error

    def fetch(self, rows: bool = True, must: bool = True) -> None:
        """What a run needs to go on: its newest checkpoint, its logs and curves; `rows` says whether row files come too.

        Without a checkpoint it is an error, unless there need not be one.
        """
        names = self._names()
        begun = f"checkpoints/{checkpoint.LATEST}" in names
        latest = self._read("checkpoints/LATEST").split(" ")[0] if begun or must else ""
        for name in names:
            if not begun and name.startswith("checkpoints/"):  # of one that never became whole
                continue
            old = name.startswith("checkpoints/step-") and not name.startswith(f"checkpoints/{latest}/")
            is_rows = Path(name).name.startswith("rows-")
            if (old and not name.endswith(storage.MANIFEST)) or (is_rows and not rows):
                continue
            self._get(name)

    def fetch_model(self, label: str | None = None) -> Path:
        """The model at the URL, whole: a checkpoint or a published log or entry as it is.

        Of a run, the checkpoint that a label names; by default its best where that is kept, else its newest.
        """
        names = self._names()
        labels = (checkpoint.BEST, checkpoint.LATEST) if label is None else (label,)
        pointers = (f"{prefix}{name}" for name in labels for prefix in ("", "checkpoints/"))
        pointer = next((one for one in pointers if one in names), None)
        wanted = names
        if pointer is not None:
            inner = Path(pointer).with_name(self._read(pointer).split(" ")[0]).as_posix()
            wanted = [pointer, *(name for name in names if name.startswith(f"{inner}/"))]
        elif label is not None:
            raise CheckpointError(f"{self.url} has no {label}", "name a run, and a checkpoint that it keeps")
        for name in wanted:
            self._get(name)
        return self.folder

    def steps(self) -> bool:
        """Whether there is a checkpoint."""
        return f"checkpoints/{checkpoint.LATEST}" in self._names()

    def push(self, apart: bool = False) -> None:
        """Makes the URL hold what is complete here, or all of it but checkpoints."""
        with self._lock, self._plainly("written"):
            for attempt in range(TRIES):
                try:
                    self._push("checkpoints/" if apart else PASSING)
                    break
                except FileNotFoundError:  # a file went while it was put: look again at what is there
                    if attempt == TRIES - 1:
                        raise CheckpointError(
                            f"{self.url} cannot be written: files vanish from {self.folder}"
                        ) from None

    def _push(self, but: str) -> None:
        # What names point at is there before they are: read now, they name nothing that is not put below.
        left_out = (PASSING, but)
        names = {n: (self.folder / n).read_bytes() for n in self._pointers() if not n.startswith(left_out)}
        here = {}
        for path in self.folder.rglob("*"):
            name = path.relative_to(self.folder).as_posix()
            if (
                path.is_file()
                and not name.startswith(left_out)
                and not any(p.startswith(".") for p in Path(name).parts)
            ):
                facts = path.stat()
                here[name] = (facts.st_size, facts.st_mtime_ns)
        for name in sorted((name for name in here if not _points(name)), key=_last):
            if self._there.get(name) != here[name]:
                self._whole(name, partial(self._fs.put_file, str(self.folder / name)))
                self._there[name] = here[name]
        for name, content in reversed(names.items()):
            facts_of = (len(content), hash(content))
            if self._there.get(name) != facts_of:
                self._whole(name, partial(self._pipe, content))
                self._there[name] = facts_of
        gone = {name for name in self._there if not name.startswith(left_out)} - here.keys() - names.keys()
        for name in sorted(gone, key=lambda name: not name.endswith(storage.MANIFEST)):
            self._remove(name)

    def _whole(self, name: str, put: Callable[[str], Any]) -> None:
        """Puts a file so that it is there whole or as it was: a store does that by itself, a folder does not."""
        folder, _, inner = f"{self._root}/{name}".rpartition("/")
        self._fs.makedirs(folder, exist_ok=True)
        if "file" not in self._fs.protocol:
            put(f"{folder}/{inner}")
            return
        put(f"{folder}/.{inner}.writing")
        os.replace(f"{folder}/.{inner}.writing", f"{folder}/{inner}")

    def _pipe(self, content: bytes, to: str) -> None:
        self._fs.pipe_file(to, content)

    def _pointers(self) -> list[str]:
        """Names of checkpoints, then the log: read in this order, put in the other, a checkpoint never knows of more entries."""
        labels = sorted(path.name for path in (self.folder / "checkpoints").glob("*") if checkpoint.is_label(path.name))
        return [f"checkpoints/{name}" for name in labels] + [LOG] * (self.folder / LOG).exists()

    def _remove(self, name: str) -> None:
        del self._there[name]
        whole = name.startswith("checkpoints/step-") and name.endswith(storage.MANIFEST)
        try:
            self._fs.rm_file(f"{self._root}/{name}")
            if whole:  # row files may have come from other hosts
                self._fs.rm(f"{self._root}/{Path(name).parent.as_posix()}", recursive=True)
            elif "file" in self._fs.protocol:  # elsewhere a folder is no more than its files
                self._fs.rmdir(f"{self._root}/{Path(name).parent.as_posix()}")
        except OSError as error:
            if not isinstance(error, FileNotFoundError) and error.errno != errno.ENOTEMPTY:
                raise

    def _names(self) -> list[str]:
        with self._plainly("read"):
            self._fs.invalidate_cache()
            found = [str(name) for name in self._fs.find(self._root)] if self._fs.exists(self._root) else []
        if found == [self._root]:
            return []
        names = sorted(name[name.index(self._root) + len(self._root) + 1 :] for name in found)
        return [name for name in names if not Path(name).name.startswith(".")]  # those were not whole

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


def _points(name: str) -> bool:
    folder, _, inner = name.rpartition("/")
    return name == LOG or (folder == "checkpoints" and checkpoint.is_label(inner))


def _last(name: str) -> tuple[bool, str]:
    return Path(name).name == storage.MANIFEST, name


def put(files: list[Path], url: str) -> None:
    """Puts some files of this host into a folder at a URL."""
    fs, root = filesystem(url)
    with _Plainly(url, "written"):
        fs.makedirs(root, exist_ok=True)
        for file in files:
            fs.put_file(str(file), f"{root}/{file.name}")
