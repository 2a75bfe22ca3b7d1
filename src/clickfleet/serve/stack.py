"""The layers of a version: a base and at most four over it; more are merged into new folders, by and by into a new base."""

import os
import shutil
import time
from pathlib import Path
from typing import Any

from clickfleet.published import Entry
from clickfleet.serve import layers

OVERLAYS = 4


class Stack:
    """The layers of a version, newest first, and the entries they hold."""

    def __init__(self, state: Path) -> None:
        self.state = state
        self.folders: list[str] = []
        self.opened: dict[str, Any] = {}
        self._merges = 0
        self._old = [(time.monotonic(), folder) for folder in state.glob("merged-*")]  # of an updater before this one

    def start(self, base: Entry, rows: layers.Rows) -> None:
        self.folders = [str(base.path)]
        self._open(base.path, int(base.manifest["factors"]), rows)

    def push(self, delta: Entry, rows: layers.Rows) -> None:
        factors = int(delta.manifest["factors"])
        self.folders = [str(delta.path), *self.folders]
        for folder in self.folders:
            self._open(Path(folder), factors, rows)
        while len(self.folders) - 1 > OVERLAYS:
            sizes = [layers.size(self.opened[folder]) for folder in self.folders]
            if sum(sizes[:-1]) > sizes[-1] // 2:
                self._merge(0, len(self.folders), factors, rows)
            else:  # the two neighbours that cost least
                at = min(range(len(sizes) - 2), key=lambda i: sizes[i] + sizes[i + 1])
                self._merge(at, at + 2, factors, rows)

    def _open(self, folder: Path, factors: int, rows: layers.Rows) -> None:
        if str(folder) not in self.opened:
            self.opened[str(folder)] = layers.open_layer(folder, factors, rows)

    def _merge(self, first: int, last: int, factors: int, rows: layers.Rows) -> None:
        self._merges += 1
        folder = self.state / f"merged-{os.getpid()}-{self._merges:06d}"
        chosen = self.folders[first:last]
        layers.write_merged(
            [self.opened[one] for one in chosen], factors, folder, keep_deleted=last < len(self.folders)
        )
        self._open(folder, factors, rows)
        self.folders = [*self.folders[:first], str(folder), *self.folders[last:]]
        for one in chosen:
            if Path(one).parent == self.state:
                self._old.append((time.monotonic(), Path(one)))

    def tidy(self, keep_s: float = 30.0) -> None:
        """Removes merged folders that no version has needed for a while; who has them mapped keeps them."""
        now = time.monotonic()
        for at, folder in [item for item in self._old if now - item[0] > keep_s and str(item[1]) not in self.folders]:
            shutil.rmtree(folder, ignore_errors=True)
            self._old.remove((at, folder))
        self.opened = {folder: layer for folder, layer in self.opened.items() if folder in self.folders}
