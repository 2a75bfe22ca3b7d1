"""The folder of a run: on this machine, locked, and kept the same at a URL where it belongs to one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from clickfleet import mirror, saving, storage
from clickfleet.config import Config, dump
from clickfleet.errors import CheckpointError
from clickfleet.lock import Lock
from clickfleet.mirror import Mirror

NO_CHECKPOINT = "there is no checkpoint in {} yet: starting from the beginning"


def home_of(where: str | Path) -> Path:
    """The folder of a run on this machine."""
    url = mirror.url_of(where)
    return Path(where).absolute() if url is None else mirror.home(url)


@contextmanager
def at_home(where: str | Path, resume: bool | None = None, rows: bool = True) -> Iterator[tuple[Path, Mirror | None]]:
    """The folder of a run, which no other process has meanwhile; of one at a URL, with what it needs to go on, and kept the same there.

    `resume` says whether there must or must not be a checkpoint (None: either), `rows` whether this machine needs its rows.
    """
    url, folder = mirror.url_of(where), home_of(where)
    with Lock(folder / ".lock", "trains" if url is None else f"trains {url}"):
        if url is None:
            yield folder, None
            return
        copy = Mirror(url, folder)
        copy.empty()
        if resume is False and copy.steps():
            raise CheckpointError(f"{url} holds a run already", "go on with --resume, or choose another run.dir")
        if resume is not False:
            copy.fetch(rows, must=resume is True)
        try:
            yield folder, copy
        finally:
            copy.close()


def write_config(folder: Path, config: Config) -> None:
    """Puts the configuration into a run folder, whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    storage.replace(folder / "config.yaml", dump(saving.at_origin(config)).encode())
