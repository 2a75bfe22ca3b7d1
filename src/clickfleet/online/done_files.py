"""The original's done files, for consumers that wait for them: a line per base, delta and checkpoint.

    <run>/model/base_donefile.txt  patch_donefile.txt     {"id", "key", "input", "monitor_data"} per line
    <run>/model/donefile.txt                              day, base key, path, pass (-1: the day's end), 0
    <run>/model/<day>/delta-<pass>/000, <day>/<pass>                         links to entries and checkpoints
    <run>/model/<next day>/base/000, <day>/base-<pass>/000                   to bases of a day's end and within a day

`key` is the second in which the base was made that a delta belongs to.
"""

from __future__ import annotations

import datetime
import json
import os
import time
from pathlib import Path
from typing import Any

from clickfleet import mirror, storage
from clickfleet.appended import Appended
from clickfleet.machine import WINDOWS
from clickfleet.online.passes import Position, number_of, parse_day
from clickfleet.published import Entry


class DoneFiles:
    """Appends lines that are newer than those there."""

    def __init__(self, folder: Path, first_day: int | None) -> None:
        self.folder, self.first_day = folder, first_day
        self._pending: tuple[int, int, Path] | None = None
        self._waiting: list[tuple[str, Path, str, str]] = []
        """What a full disk did not take: a link, where it points, a file and its line."""
        self._known: dict[str, list[str]] = {}
        """The lines of each file, read once."""
        self._inputs: dict[str, set[str]] = {}

    def published(
        self, entry: Entry, position: Position | None, results: dict[str, Any] | None, day_over: bool = False
    ) -> None:
        """An entry was published after the pass of a position (None: before the first), which ended its day or did not."""
        now = int(time.time())
        if entry.base:
            today = self.first_day or number_of(datetime.date.today())
            day = today if position is None else _next(position["day"])
            path = f"{day}/base" if position is None or day_over else f"{position['day']}/base-{position['pass']}"
            name, key = "base_donefile.txt", now
        else:
            assert position is not None
            day = position["day"]
            name, path = "patch_donefile.txt", f"{day}/delta-{position['pass']}"
            key = self._base_key() or now
        facts = {
            "id": key if entry.base else now,
            "key": key,
            "input": mirror.origin(entry.path) or f"{self.folder / path}/000",
            "monitor_data": "" if results is None else _monitor(results),
        }
        known = facts["input"] in self._told(name) and self._points(f"{path}/000", entry.path)
        self._waiting.append((f"{path}/000", entry.path, name, "" if known else json.dumps(facts)))
        self._settle()
        if entry.base:
            self._tidy()

    def checkpointed(self, position: Position, end_of_day: bool, path: Path) -> None:
        """A checkpoint is being written; its line follows once it is there, which is when the next one begins."""
        self._due()
        day, number = position["day"], position["pass"]
        self._pending = (_next(day), -1, path) if end_of_day else (day, number, path)
        self._settle()

    def flush(self) -> None:
        """The line of the last checkpoint, which is there."""
        self._due()
        self._settle()

    def _due(self) -> None:
        if self._pending is None:
            return
        (day, number, path), self._pending = self._pending, None
        if path.exists() and f"{day}/{number}" not in self._told("donefile.txt"):
            line = f"{day}\t{self._base_key() or 0}\t{mirror.origin(path) or path}\t{number}\t0"
            self._waiting.append((f"{day}/{max(number, 0)}", path, "donefile.txt", line))

    def _base_key(self) -> int | None:
        lines = self._lines("base_donefile.txt")
        return int(json.loads(lines[-1])["key"]) if lines else None

    def _lines(self, name: str) -> list[str]:
        if name not in self._known:
            file = self.folder / name
            self._known[name] = file.read_text().splitlines() if file.exists() else []
            self._inputs[name] = {_told(line) for line in self._known[name]}
        return self._known[name]

    def _told(self, name: str) -> set[str]:
        """What the lines of a file are about."""
        self._lines(name)
        return self._inputs[name]

    def _points(self, link: str, path: Path) -> bool:
        """Whether a link is one to that entry: a pass that was learned again is told again."""
        place = self.folder / link
        return not place.is_symlink() or place.resolve() == path.resolve()

    def _settle(self) -> None:
        """Writes what waits, in order; what the disk has no space for waits on, and is told."""
        with storage.plainly(self.folder):
            while self._waiting:
                link, path, name, line = self._waiting[0]
                self._link(link, path)
                if line:
                    file = Appended(self.folder / name)
                    file.add(line.encode() + b"\n")
                    if file.problem is not None:
                        raise file.problem
                    self._lines(name).append(line)
                    self._told(name).add(_told(line))
                del self._waiting[0]

    def _tidy(self) -> None:
        """Takes away links to entries and checkpoints that are no longer kept."""
        for place in self.folder.glob("*/*"):
            for link in (place, place / "000"):
                if link.is_symlink() and not link.exists():
                    link.unlink(missing_ok=True)

    def _link(self, name: str, path: Path) -> None:
        link = self.folder / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.unlink(missing_ok=True)
        try:
            link.symlink_to(os.path.relpath(path, link.parent))
        except OSError:
            if not WINDOWS:  # where links need a right that few have, a file says where
                raise
            link.write_text(f"{path}\n")


def _told(line: str) -> str:
    """What a line is about: the input of a base or patch, the day and pass of a checkpoint."""
    if line.startswith("{"):
        return str(json.loads(line)["input"])
    return "/".join(line.split("\t")[::3])


def _next(day: int) -> int:
    return number_of(parse_day(day, "the day") + datetime.timedelta(days=1))


def _monitor(results: dict[str, Any]) -> str:
    names = {"auc": "AUC", "actual_ctr": "Actual_CTR", "predicted_ctr": "Predicted_CTR", "calibration": "COPC"}
    return " ".join(f"{text}={results[key]:.6f}" for key, text in names.items() if results.get(key) is not None)
