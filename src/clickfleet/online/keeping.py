"""What becomes of entries once they are published: old chains go, copies are made elsewhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from clickfleet import redis_rows, storage
from clickfleet.files import filesystem, reading
from clickfleet.published import LOG, Log, directories
from clickfleet.verification import check_rows

SPARE = 2
"""Chains whose lines stay in the log after their directories went: a run that restarts behind them compares hashes."""


def prune(log: Log, keep: int) -> list[str]:
    """Keeps the newest `keep` bases and their deltas; the names of the entries that were removed.

    First the log says where its kept part begins, then the directories go. A consumer that still follows one of them keeps the
    files it has mapped, and finds the newest base when it looks again. The caller holds the lock of the log.
    """
    lines = log.lines()
    bases = [line.sequence for line in lines if line.kind == "base"]
    if len(bases) < keep:
        return []
    kept = bases[-keep]
    log.begin(bases[-keep - SPARE] if len(bases) >= keep + SPARE else lines[0].sequence, kept)
    gone = [path for number, path in directories(log.folder) if number < kept]
    for path in gone:
        storage.remove(path)
    return [path.name for path in gone]


class Copies:
    """Entries of a log at a folder or URL; what is there is asked once. A Redis gets their rows."""

    def __init__(self, log: Log, url: str) -> None:
        self.log, self.url = log, url
        self._there: set[str] | None = None
        self._text = b""

    def bring(self) -> int:
        """Copies entries that are not there yet, each manifest last and then the log; how many."""
        if self.url.startswith(("redis://", "rediss://")):
            return int(redis_rows.fill(self.url, self.log, check=check_rows)["entries"])
        fs, root = filesystem(self.url)
        copied = 0
        with reading(self.url):
            if self._there is None:
                fs.makedirs(root, exist_ok=True)
                self._there, self._text = _hashes(fs, f"{root}/{LOG}")
            for line in self.log.kept():
                if line.hash not in self._there:
                    _copy(fs, self.log.folder / line.name, f"{root}/{line.name}")
                    self._there.add(line.hash)
                    copied += 1
            if (text := self.log.text()) != self._text:
                fs.pipe_file(f"{root}/{LOG}", text)
                self._text = text
        return copied


def copy_to(log: Log, url: str) -> int:
    """Copies entries that are not there yet to a folder or URL; how many."""
    return Copies(log, url).bring()


def _hashes(fs: Any, path: str) -> tuple[set[str], bytes]:
    """Of the entries that a log elsewhere names, and that log."""
    try:
        text = bytes(fs.cat_file(path))
    except FileNotFoundError:
        return set(), b""
    return {facts["hash"] for facts in map(json.loads, text.splitlines()) if "hash" in facts}, text


def _copy(fs: Any, folder: Path, to: str) -> None:
    fs.makedirs(to, exist_ok=True)
    names = sorted((path.name for path in folder.iterdir()), key=lambda name: (name == storage.MANIFEST, name))
    for name in names:
        fs.put_file(str(folder / name), f"{to}/{name}")
