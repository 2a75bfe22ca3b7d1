"""A run folder on remote storage: written to a local folder, and mirrored at a URL that fsspec supports.

Files are uploaded in an order that keeps the URL consistent: the files of a checkpoint, then its manifest, then the labels that point
at it. Files removed here are removed there afterwards, the manifest first. So a run can resume on any machine from whatever a killed
process left at the URL.
"""

from __future__ import annotations

import atexit
import errno
import hashlib
import re
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from clickfleet.data import files
from clickfleet.data.files import filesystem, replacing
from clickfleet.errors import CheckpointError, ClickfleetError, ConfigError
from clickfleet.store import atomic, checkpoint
from clickfleet.store.lock import Lock

PUSH_S = 30.0
TRIES = 5
LOG = "published/LOG.jsonl"
NAMES = "names.json"
"""The values behind frequent keys, in the run folder. It holds raw values of the data."""
DONE_FILES = "model/*donefile.txt"
"""Files that name published entries and checkpoints."""
SPOOL = "spool/"
FEED = "feed/"
CONTROL = "cluster/"
LOCAL = (SPOOL, FEED, CONTROL)
"""Not uploaded: records of passes, which are in their topic; rows of data in memory, and requests, which only the run needs."""
_URL = re.compile(r"^([a-z][a-z0-9+]+):/+(?=[^/])")
_LATEST = f"checkpoints/{checkpoint.LATEST}"
_folders: dict[str, str] = {}  # local folder -> URL


def url_of(path: str | Path) -> str | None:
    """Return the URL if `path` is one, even after a conversion to Path; else None.

    >>> url_of(Path("s3://logs/run")), url_of("file:///mnt/run"), url_of("runs/deepfm")
    ('s3://logs/run', 'file:///mnt/run', None)
    """
    text = str(path)
    match = _URL.match(text)
    if match is None or Path(text).exists():
        return None
    root = "/" if match[1] in ("file", "local") else ""
    return f"{match[1]}://{root}{text[match.end() :]}"


def local_folder(url: str) -> Path:
    """Return the local folder of a run at a URL. It is the same for all processes of a user, and private to that user."""
    name = hashlib.blake2b(url.rstrip("/").encode(), digest_size=8).hexdigest()
    return files.temporary() / f"run-{name}"


def origin(path: str | Path) -> str | None:
    """Return the URL of a path inside a mirrored folder, or None."""
    for folder, url in _folders.items():
        if Path(path).is_relative_to(folder):
            inner = Path(path).relative_to(folder).as_posix()
            return url if inner == "." else f"{url}/{inner}"
    return None


class Mirror:
    """A local folder that is removed when the process ends, and the URL where its content stays."""

    def __init__(self, url: str, folder: Path | None = None) -> None:
        self.url = url.rstrip("/")
        self.fs, self._root = filesystem(self.url)
        self._shared = folder is not None
        self.folder = folder or Path(tempfile.mkdtemp(prefix="clickfleet-run-"))
        _folders[str(self.folder)] = self.url
        atexit.register(self._discard)
        self._uploaded: dict[str, tuple[int, int]] = {}
        """Files at the URL, with the stamp that each had here."""
        self._lock = threading.Lock()
        self._stop, self._woken = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None

    def _discard(self) -> None:
        if not self._shared:
            shutil.rmtree(self.folder, ignore_errors=True)
            return
        with suppress(CheckpointError, OSError), Lock(self.folder / ".lock", "trains"):
            self.empty()  # the lock ensures that no other process trains there

    def empty(self) -> None:
        """Remove what an earlier process left in the local folder; the URL is authoritative."""
        for path in self.folder.iterdir():
            if path.name != ".lock":
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()

    def start(self, log: Callable[[str], None], skip_checkpoints: bool = False) -> None:
        """Upload new files periodically in the background until `close`. Log errors and retry later.

        Pass `skip_checkpoints` if row files come from other hosts. The caller then uploads a checkpoint with `push` when it is complete.
        """

        def work() -> None:
            while not self._stop.is_set():
                self._woken.wait(PUSH_S)
                self._woken.clear()
                try:
                    self.push(skip_checkpoints)
                except CheckpointError as error:
                    log(f"warning: {error}")

        self._thread = threading.Thread(target=work, name="clickfleet-mirror", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Upload soon, because something is complete."""
        self._woken.set()

    def close(self) -> None:
        """Upload the rest. If that fails, keep the local folder."""
        self._stop.set()
        self._woken.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        try:
            self.push()
        except CheckpointError as error:
            atexit.unregister(self._discard)
            raise CheckpointError(f"{error}", f"the whole run is in {self.folder}: copy it to the URL") from error

    def fetch(self, rows: bool = True, required: bool = True) -> None:
        """Download what a run needs to resume: its newest checkpoint, logs and metrics; row files only with `rows`.

        Raise CheckpointError if a checkpoint is `required` and there is none.
        """
        names = self._names()
        has_latest = _LATEST in names
        latest = self._read(_LATEST).split(" ")[0] if has_latest or required else ""
        for name in names:
            if not has_latest and name.startswith("checkpoints/"):  # incomplete: no label points at it
                continue
            old = name.startswith("checkpoints/step-") and not name.startswith(f"checkpoints/{latest}/")
            is_rows = Path(name).name.startswith("rows-")
            if (old and not name.endswith(atomic.MANIFEST)) or (is_rows and not rows):
                continue
            self._get(name)

    def fetch_model(self, label: str | None = None) -> Path:
        """Download the model at the URL: a checkpoint, or a published log or entry. Return the local folder.

        Of a run, download the checkpoint that `label` names. Default: the best if it is kept, else the newest.
        """
        names = self._names()
        labels = (checkpoint.BEST, checkpoint.LATEST) if label is None else (label,)
        pointers = (f"{prefix}{name}" for name in labels for prefix in ("", "checkpoints/"))
        pointer = next((name for name in pointers if name in names), None)
        needed = names
        if pointer is not None:
            folder, slash, _ = pointer.rpartition("/")
            inner = f"{folder}{slash}{self._read(pointer).split(' ')[0]}/"
            saved = [name for name in names if name.startswith(inner)]
            if not saved:
                raise CheckpointError(f"{self.url}/{pointer} is damaged: it names no valid checkpoint")
            needed = [pointer, *saved, *(name for name in (NAMES,) if name in names)]
        elif label is not None:
            raise CheckpointError(f"{self.url} has no {label}", "name the URL of a run that keeps this checkpoint")
        for name in needed:
            self._get(name)
        return self.folder

    def has_checkpoint(self) -> bool:
        """Return whether the URL has a complete checkpoint."""
        return _LATEST in self._names()

    def push(self, skip_checkpoints: bool = False) -> None:
        """Bring the URL up to date with what is complete here."""
        with self._lock, self._errors("write"):
            for attempt in range(TRIES):
                try:
                    self._push((*LOCAL, "checkpoints/") if skip_checkpoints else LOCAL)
                    break
                except FileNotFoundError:  # a file was removed during its upload: list the folder again
                    if attempt == TRIES - 1:
                        raise CheckpointError(
                            f"cannot write {self.url}: files keep disappearing from {self.folder}"
                        ) from None

    def _push(self, excluded: tuple[str, ...]) -> None:
        # Pointers are written after what they point at. Read first, they name only files that are uploaded below.
        pointers = {n: (self.folder / n).read_bytes() for n in self._pointers() if not n.startswith(excluded)}
        stamps = {}
        for path in self.folder.rglob("*"):
            name = path.relative_to(self.folder).as_posix()
            hidden = any(part.startswith(".") for part in Path(name).parts)
            if path.is_file() and not hidden and not name.startswith(excluded):
                stamps[name] = _stamp(path)
        for name in sorted((name for name in stamps if not _is_pointer(name)), key=_manifests_last):
            if self._uploaded.get(name) != stamps[name]:
                self._upload(name, partial(self.fs.put_file, str(self.folder / name)))
                self._uploaded[name] = stamps[name]
        for name, content in reversed(pointers.items()):
            stamp = (len(content), hash(content))
            if self._uploaded.get(name) != stamp:
                self._upload(name, partial(self._pipe, content))
                self._uploaded[name] = stamp
        removed = {name for name in self._uploaded if not name.startswith(excluded)} - stamps.keys() - pointers.keys()
        for name in sorted(removed, key=lambda name: not name.endswith(atomic.MANIFEST)):
            self._remove(name)

    def _upload(self, name: str, put: Callable[[str], Any]) -> None:
        folder = f"{self._root}/{name}".rpartition("/")[0]
        self.fs.makedirs(folder, exist_ok=True)
        replace_file(self.fs, f"{self._root}/{name}", put)

    def _pipe(self, content: bytes, to: str) -> None:
        self.fs.pipe_file(to, content)

    def _pointers(self) -> list[str]:
        """Return the done files, the checkpoints' labels, then the log.

        They are read in this order and uploaded in reverse, so that no checkpoint knows entries that the log lacks.
        """
        done = sorted(path.relative_to(self.folder).as_posix() for path in self.folder.glob(DONE_FILES))
        labels = sorted(path.name for path in (self.folder / "checkpoints").glob("*") if checkpoint.is_label(path.name))
        return done + [f"checkpoints/{name}" for name in labels] + [LOG] * (self.folder / LOG).exists()

    def _remove(self, name: str) -> None:
        del self._uploaded[name]
        folder = f"{self._root}/{Path(name).parent.as_posix()}"
        try:
            self.fs.rm_file(f"{self._root}/{name}")
            if name.startswith("checkpoints/step-") and name.endswith(atomic.MANIFEST):
                self.fs.rm(folder, recursive=True)  # other hosts may have uploaded row files
            elif "file" in self.fs.protocol:  # object stores have no empty folders
                self.fs.rmdir(folder)
        except OSError as error:
            if not isinstance(error, FileNotFoundError) and error.errno != errno.ENOTEMPTY:
                raise

    def _names(self) -> list[str]:
        with self._errors("read"):
            self.fs.invalidate_cache()
            paths = [str(path) for path in self.fs.find(self._root)] if self.fs.exists(self._root) else []
        if paths == [self._root]:
            return []
        names = sorted(path[path.index(self._root) + len(self._root) + 1 :] for path in paths if path[-1:] != "/")
        for name in names:
            files.check_name(name, self.url)
        return [name for name in names if not Path(name).name.startswith(".")]  # incomplete uploads

    def _read(self, name: str) -> str:
        try:
            with self._errors("read"):
                return bytes(self.fs.cat_file(f"{self._root}/{name}")).decode().strip()
        except FileNotFoundError:
            raise CheckpointError(f"{self.url} holds no checkpoint yet") from None

    def _get(self, name: str) -> None:
        path = files.inside(self.folder, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        with self._errors("read"):
            self.fs.get_file(f"{self._root}/{name}", str(path))
        self._uploaded[name] = _stamp(path)

    def _errors(self, action: str) -> AbstractContextManager[None]:
        return _storage_errors(self.url, action)


@contextmanager
def _storage_errors(url: str, action: str) -> Iterator[None]:
    """Turn errors of the storage into CheckpointErrors. FileNotFoundError is left to the caller."""
    try:
        yield
    except (ClickfleetError, FileNotFoundError):
        raise
    except Exception as error:
        raise CheckpointError(f"cannot {action} {url}: {error}") from error


def _stamp(path: Path) -> tuple[int, int]:
    facts = path.stat()
    return facts.st_size, facts.st_mtime_ns


def _is_pointer(name: str) -> bool:
    folder, _, inner = name.rpartition("/")
    return name == LOG or Path(name).match(DONE_FILES) or (folder == "checkpoints" and checkpoint.is_label(inner))


def _manifests_last(name: str) -> tuple[bool, str]:
    return Path(name).name == atomic.MANIFEST, name


def check_writable(url: str) -> None:
    """Refuse a URL at which a file cannot be replaced in one step. A killed process would leave a run that cannot resume."""
    if url.startswith(("hdfs://", "viewfs://")):
        raise ConfigError(
            f"{url}: runs and published entries cannot be written to hdfs:// URLs, whose client cannot replace a file in one step",
            "use webhdfs://HOST:9870/PATH for the same folder, or a mounted folder; hdfs:// data can be read",
        )


def replace_file(fs: Any, path: str, put: Callable[[str], Any]) -> None:
    """Write or replace a file in one step. Object stores do that; folders and HDFS need a temporary file beside it."""
    folder, _, name = path.rpartition("/")
    if "file" in fs.protocol:
        with replacing(Path(path)) as temporary:
            put(str(temporary))
    elif "webhdfs" in fs.protocol:
        hidden = f"{folder}/.{name}.uploading"
        put(hidden)
        # The plain RENAME of HDFS does not replace a file, and its client ignores the answer.
        answer = fs._call("RENAME", method="put", path=hidden, destination=path, renameoptions="OVERWRITE")
        if answer.content and not answer.json().get("boolean"):
            raise CheckpointError(
                f"cannot replace {path}: the gateway ignores renameoptions=OVERWRITE",
                "use the URL of the name node itself",
            )
    else:
        put(path)


def put(files: list[Path], url: str) -> None:
    """Upload files of this host into a folder at a URL."""
    fs, root = filesystem(url)
    with _storage_errors(url, "write"):
        fs.makedirs(root, exist_ok=True)
        for file in files:
            fs.put_file(str(file), f"{root}/{file.name}")
