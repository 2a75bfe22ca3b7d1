"""Write PaddleRec's done files, for consumers that poll them: a line per base, delta and checkpoint.

    <run>/model/base_donefile.txt  patch_donefile.txt     {"id", "key", "input", "monitor_data"} per line
    <run>/model/donefile.txt                              day, base key, path, pass (-1: the end of the day), 0
    <run>/model/<day>/delta-<pass>/000, <day>/<pass>                         links to entries and checkpoints
    <run>/model/<next day>/base/000, <day>/base-<pass>/000                   links to bases, at the end of a day and within it

With `publish.text_parts`, bases and deltas are folders in PaddleRec's layout instead of links: `000/part-000-00000`, `dnn_plugin/`.
`key` is the time, in seconds, at which the base of the chain was written.
"""

from __future__ import annotations

import datetime
import json
import os
import time
from pathlib import Path

from clickfleet.config.machine import WINDOWS
from clickfleet.online.passes import Position, number_of, parse_day
from clickfleet.paddlerec.exporting import TextLayout, source_of, write_entry
from clickfleet.store import atomic, mirror
from clickfleet.store.atomic import Appender
from clickfleet.store.published import Entry, Log, since_base
from clickfleet.training.predict import Results

CHECKPOINTS = "donefile.txt"


class DoneFiles:
    """Appends lines for new entries and checkpoints."""

    def __init__(self, folder: Path, first_day: int | None, layout: TextLayout | None = None) -> None:
        self.folder, self.first_day, self.layout = folder, first_day, layout
        self._pending: tuple[int, int, Path, int] | None = None
        """The checkpoint that is being written: day, pass, path, and the key of its base."""
        self._key: int | None = None
        """The key of the newest base, even if its line is not written yet."""
        self._waiting: list[tuple[str, Path, str, str]] = []
        """What a full disk did not accept yet: a link, its target, a file and its line."""
        self._known: dict[str, list[str]] = {}
        """The lines of each file, read once."""
        self._subjects: dict[str, set[str]] = {}

    def published(
        self, entry: Entry, position: Position | None, results: Results | None, day_over: bool = False
    ) -> None:
        """Add the line of an entry, published after the pass at `position` (None: before the first pass)."""
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
            "input": self._input(entry, path),
            "monitor_data": "" if results is None else _monitor(results),
        }
        known = facts["input"] in self._listed(name) and self._leads_to(path, entry)
        if entry.base and not known:
            self._key = key
        self._waiting.append((f"{path}/000", entry.path, name, "" if known else json.dumps(facts)))
        self._write()
        if entry.base:
            self._tidy(entry.path.parent)

    def _input(self, entry: Entry, path: str) -> str:
        """Return what a line names: the table in a folder of the text layout, or the entry, through a link."""
        if self.layout is None:
            return mirror.origin(entry.path) or f"{self.folder / path}/000"
        return f"{mirror.origin(self.folder / path) or self.folder / path}/000"

    def checkpointed(self, position: Position, end_of_day: bool, path: Path) -> None:
        """Register a checkpoint that is being written. Its line follows when the next one begins, or with `flush`."""
        self._queue_pending()
        day, number = position["day"], position["pass"]
        key = self._base_key() or 0
        self._pending = (_next(day), -1, path, key) if end_of_day else (day, number, path, key)
        self._write()

    def flush(self) -> None:
        """Write the line of the last checkpoint, which is complete."""
        self._queue_pending()
        self._write()

    def _queue_pending(self) -> None:
        if self._pending is None:
            return
        (day, number, path, key), self._pending = self._pending, None
        target = mirror.origin(path) or path
        if path.exists() and f"{day}/{number}/{target}" not in self._listed(CHECKPOINTS):
            line = f"{day}\t{key}\t{target}\t{number}\t0"
            self._waiting.append((f"{day}/{max(number, 0)}", path, CHECKPOINTS, line))

    def _base_key(self) -> int | None:
        if self._key is None and (lines := self._lines("base_donefile.txt")):
            self._key = int(json.loads(lines[-1])["key"])
        return self._key

    def _lines(self, name: str) -> list[str]:
        if name not in self._known:
            file = self.folder / name
            self._known[name] = file.read_text().splitlines() if file.exists() else []
            self._subjects[name] = {_subject(line) for line in self._known[name]}
        return self._known[name]

    def _listed(self, name: str) -> set[str]:
        """Return the subjects of all lines of a file."""
        self._lines(name)
        return self._subjects[name]

    def _leads_to(self, path: str, entry: Entry) -> bool:
        """Return whether a path leads to that entry. A pass that was trained again gets another line."""
        if self.layout is not None:
            return _is_text_of(self.folder / path, entry)
        link = self.folder / path / "000"
        return not link.is_symlink() or link.resolve() == entry.path.resolve()

    def _write(self) -> None:
        """Write the queued links and lines in order. Report a full disk; what does not fit stays in the queue."""
        with atomic.write_errors(self.folder):
            while self._waiting:
                link, path, name, line = self._waiting[0]
                if self.layout is not None and name != CHECKPOINTS:
                    line = line if self._write_text(link, path) else ""
                else:
                    self._link(link, path)
                if line:
                    file = Appender(self.folder / name)
                    file.add(line.encode() + b"\n")
                    if file.problem is not None:
                        raise file.problem
                    self._lines(name).append(line)
                    self._listed(name).add(_subject(line))
                del self._waiting[0]

    def _write_text(self, link: str, path: Path) -> bool:
        """Write an entry in PaddleRec's layout, unless it is there. Return whether it is; the entry may have been pruned."""
        assert self.layout is not None
        folder = self.folder / Path(link).parent
        if not path.exists():
            return False
        entry = Entry(path)
        if _is_text_of(folder, entry):
            return True
        before = _earlier_deltas(folder, entry)
        if folder.is_dir() and not (folder / atomic.MANIFEST).exists():  # from a run without this layout
            (folder / "000").unlink(missing_ok=True)
            folder.rmdir()
        folder.parent.mkdir(parents=True, exist_ok=True)
        write_entry(self.layout, entry, folder, replaces=True, before=before)
        return True

    def _tidy(self, log: Path) -> None:
        """Remove links to entries and checkpoints that no longer exist, and the text of such entries."""
        for place in self.folder.glob("*/*"):
            for link in (place, place / "000"):
                if link.is_symlink() and not link.exists():
                    link.unlink(missing_ok=True)
            if not place.is_symlink() and (source := source_of(place)) and not (log / source.name).exists():
                atomic.remove(place)

    def _link(self, name: str, path: Path) -> None:
        link = self.folder / name
        if source_of(link.parent):  # from a run with the text layout
            atomic.remove(link.parent)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.unlink(missing_ok=True)
        try:
            link.symlink_to(os.path.relpath(path, link.parent))
        except OSError:
            if not WINDOWS:  # there links need a privilege; a file with the path replaces the link
                raise
            link.write_text(f"{path}\n")


def _is_text_of(folder: Path, entry: Entry) -> bool:
    source = source_of(folder)
    return source is not None and source.hash == entry.hash


def _earlier_deltas(folder: Path, entry: Entry) -> list[Entry]:
    """Return the deltas since the one that a folder begins with. A second delta of a pass must not lose the rows of the first."""
    source = source_of(folder)
    if source is None or entry.base:
        return []
    log = Log(entry.path.parent)
    deltas = since_base([line for line in log.lines() if line.sequence < entry.sequence])[1:]
    place = next((i for i, line in enumerate(deltas) if line.name == source.first), len(deltas))
    return [log.entry(line) for line in deltas[place:]]


def _subject(line: str) -> str:
    """Return the subject of a line: the input of a base or patch, or day, pass and path of a checkpoint."""
    if line.startswith("{"):
        return str(json.loads(line)["input"])
    words = line.split("\t")
    return "/".join((*words[::3], *words[2:3]))


def _next(day: int) -> int:
    return number_of(parse_day(day, "the day") + datetime.timedelta(days=1))


def _monitor(results: Results) -> str:
    names = {"auc": "AUC", "actual_ctr": "Actual_CTR", "predicted_ctr": "Predicted_CTR", "calibration": "COPC"}
    return " ".join(f"{text}={results[key]:.6f}" for key, text in names.items() if results.get(key) is not None)
