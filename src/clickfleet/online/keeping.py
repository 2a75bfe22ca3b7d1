"""What becomes of entries once they are published: old chains go, copies are made elsewhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from clickfleet import redis_rows, storage
from clickfleet.files import filesystem, reading
from clickfleet.published import LOG, Log


def prune(log: Log, keep: int) -> list[str]:
    """Removes all but the newest `keep` bases and their deltas; the log keeps its lines. The names that went.

    A reader that still follows one of them keeps the files it has mapped, and finds the newest base when it looks again.
    """
    lines = log.lines()
    bases = [i for i, line in enumerate(lines) if line.kind == "base"]
    old = lines[: bases[-keep]] if len(bases) >= keep else []
    gone = [line.name for line in old if (log.folder / line.name).exists()]
    for name in gone:
        storage.remove(log.folder / name)
    return gone


def copy_to(log: Log, url: str) -> int:
    """Copies entries that are not there yet to a folder or URL, each manifest last and then the log; how many.

    A Redis gets their rows.
    """
    if url.startswith(("redis://", "rediss://")):
        return int(redis_rows.fill(url, log.folder)["entries"])
    fs, root = filesystem(url)
    lines = log.lines()
    with reading(url):
        fs.makedirs(root, exist_ok=True)
        try:
            there = {json.loads(line)["hash"] for line in fs.cat_file(f"{root}/{LOG}").splitlines()}
        except FileNotFoundError:
            there = set()
        copied = 0
        for line in lines:
            folder = log.folder / line.name
            if line.hash not in there and folder.exists():
                _copy(fs, folder, f"{root}/{line.name}")
                copied += 1
        if copied or len(there) != len(lines):
            fs.pipe_file(f"{root}/{LOG}", b"".join(line.text() for line in lines))
    return copied


def _copy(fs: Any, folder: Path, to: str) -> None:
    fs.makedirs(to, exist_ok=True)
    names = sorted((path.name for path in folder.iterdir()), key=lambda name: (name == storage.MANIFEST, name))
    for name in names:
        fs.put_file(str(folder / name), f"{to}/{name}")
