"""Timed folders: <dir>/<YYYYMMDD>/<HHMM>/<files>, each complete when its done file exists.

A day has a folder every `split_interval` from 0000 on; `splits_per_pass` consecutive folders are a pass. Folders at the end of a day
that are too few for a pass are not read. Without a done file, a folder is complete when no file was added, removed or changed for
`quiet` seconds. Files that arrive or change after their folder was read are reported.

Micro-passes (`online.pass`) do not wait for complete folders: a file is complete when it appears under its name, so its writer must
rename it into the folder. A pass is the files that arrive within some seconds, or those with enough rows. The done file, or files in
the next folder and a quiet time, end a folder.
"""

from __future__ import annotations

import datetime
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple
from zoneinfo import ZoneInfo

from clickfleet.config.plugins import Plugin
from clickfleet.config.sections import Online
from clickfleet.data.files import filesystem, reading
from clickfleet.errors import ConfigError, DataError
from clickfleet.online.passes import LateFiles, Pass, PassEnd, Patience, Position, check_files, number_of, parse_day
from clickfleet.store.file_events import FileEvents

DAY_S = 86400
UNFINISHED = (".tmp", ".temp", ".part", ".partial", ".filepart", ".inprogress", ".writing", "_COPYING_", "~")
"""Endings that copying tools give to the names of unfinished files."""


class File(NamedTuple):
    """A file in a listing."""

    size: int
    changed_s: float | None
    """When it last changed, by the store's clock; None if the store does not tell."""


class Listing(NamedTuple):
    """A folder at one moment."""

    files: dict[str, File]
    changed_s: float | None = None
    """When a file was last added or removed."""

    @property
    def data(self) -> list[str]:
        """Names of data files, in order."""
        return sorted(name for name in self.files if not name.startswith((".", "_")) and not name.endswith(UNFINISHED))

    @property
    def newest_s(self) -> float | None:
        """Time of the last change; None if it is unknown for any file."""
        times = [file.changed_s for file in self.files.values()]
        known = [when for when in times if when is not None]
        if len(known) < len(times):
            return None
        return max([*known, self.changed_s or 0.0])


class TimedFolders:
    """The folders of days: their names, and what is the same for whole folders and for single files."""

    format: Plugin | None = None
    backlog: int | None = None
    status: dict[str, Any] | None = None

    def __init__(
        self,
        config: Online,
        zone: ZoneInfo,
        warn: Callable[[str], None],
        clock: Callable[[], float] = time.time,
        elapsed: Callable[[], float] = time.monotonic,
    ) -> None:
        assert config.dir is not None
        self._clock, self._elapsed = clock, elapsed
        self._watched: dict[str, tuple[Listing, float]] = {}
        """Folders that are not quiet yet, their listings, and when each listing was first seen."""
        self._reported: set[tuple[str, int]] = set()
        if config.start_day is None:
            raise ConfigError("online.start_day is missing", "name the first day of online.dir to read: YYYYMMDD")
        interval = config.split_interval
        if interval != int(interval) or not 1 <= interval <= DAY_S:
            raise ConfigError(f"online.split_interval must be 1 s to 1 d, in whole seconds, not {interval:g} s")
        self.folder, self.config, self.zone, self.warn = config.dir, config, zone, warn
        self.interval_s = int(interval)
        self.splits_per_day = DAY_S // self.interval_s
        self.first = parse_day(config.start_day, "online.start_day")
        self.end = None if config.end_day is None else parse_day(config.end_day, "online.end_day")

    def _folder(self, day: datetime.date, split: int) -> str:
        days, split = divmod(split, self.splits_per_day)
        minutes, seconds = divmod(split * self.interval_s, 60)
        name = f"{minutes // 60:02}{minutes % 60:02}" + (f"{seconds:02}" if self.interval_s % 60 else "")
        return f"{self.folder}/{number_of(day + datetime.timedelta(days=days))}/{name}"

    def _midnight(self, day: datetime.date) -> float:
        return datetime.datetime.combine(day, datetime.time(), self.zone).timestamp()

    def _is_quiet(self, folder: str, listing: Listing) -> bool:
        """Return whether nothing changed for `quiet` seconds, by the times of the files or by our own observation."""
        newest_s, now = listing.newest_s, self._elapsed()
        if newest_s is not None and self._clock() - newest_s >= self.config.quiet:
            return True
        if folder not in self._watched or self._watched[folder][0] != listing:
            self._watched[folder] = listing, now
        return now - self._watched[folder][1] >= self.config.quiet

    def _data_files(self, folder: str, listing: Listing) -> list[str]:
        """Return the names of data files. Warn of those that look unfinished."""
        for name in sorted(listing.files):
            if name.endswith(UNFINISHED) and not name.startswith((".", "_")):
                self.warn(f"{folder}/{name} looks unfinished and is not read")
        return [name for name in listing.data if name != self.config.done_file]

    def recall(self, planned: Sequence[Pass]) -> None: ...

    def close(self) -> None: ...


class Directories(TimedFolders):
    """Passes of whole folders, in order."""

    def __init__(
        self, config: Online, zone: ZoneInfo, warn: Callable[[str], None], **clocks: Callable[[], float]
    ) -> None:
        super().__init__(config, zone, warn, **clocks)
        self.passes_per_day = self.splits_per_day // config.splits_per_pass
        if not self.passes_per_day:
            raise ConfigError(
                f"online.splits_per_pass is {config.splits_per_pass}, but a day has only {self.splits_per_day} splits"
            )
        if config.start_pass > self.passes_per_day:
            raise ConfigError(
                f"online.start_pass is {config.start_pass}, but a day has only {self.passes_per_day} passes"
            )
        if config.done_file is None:
            warn(f"without online.done_file, a folder is read after {config.quiet:g} s without changes (online.quiet)")
        if left := self.splits_per_day % config.splits_per_pass:
            warn(f"the last {left} folders of each day are too few for a pass and are not read")

    def after(self, position: Position | None, patience: Patience) -> Pass | None:
        day, number = self.first, self.config.start_pass
        if position is not None and "split" in position:
            raise ConfigError(
                "this run has read folders in micro-passes, and one may be read in part", "set online.pass as before"
            )
        if position is not None:
            day, number = parse_day(position["day"], "the position"), position["pass"] + 1
        if number > self.passes_per_day:
            day, number = day + datetime.timedelta(days=1), 1
        if self.end is not None and day > self.end:
            return None
        return self._read(day, number, patience)

    def again(self, planned: Pass, patience: Patience, before: Position | None = None) -> Pass:
        if not (wrong := check_files(planned)):
            return planned
        self.warn(f"{planned.name} is listed again: {wrong[0]} changed since it was first listed")
        return self._read(parse_day(planned.day, "the plan"), planned.number, patience)

    def late_files(self, read: Sequence[Pass]) -> list[LateFiles]:
        """Return what arrived or changed in the folders of passes after they were read; each file and size once."""
        reports = []
        for one in read:
            known = dict(zip(one.data, one.sizes, strict=True))
            for folder in self._folders(parse_day(one.day, "the plan"), one.number):
                listing = _list(folder) or Listing({})
                names = [name for name in listing.data if name != self.config.done_file]
                files = {f"{folder}/{name}": listing.files[name].size for name in names}
                late = {item for item in files.items() if known.get(item[0]) != item[1]} - self._reported
                if late:
                    self._reported |= late
                    reports.append(LateFiles(one.day, one.number, folder, len(late), sum(size for _, size in late)))
        return reports

    def _folders(self, day: datetime.date, number: int) -> list[str]:
        """Return the folders of a pass."""
        first = (number - 1) * self.config.splits_per_pass
        return [self._folder(day, split) for split in range(first, first + self.config.splits_per_pass)]

    def _read(self, day: datetime.date, number: int, patience: Patience) -> Pass:
        """Wait until all folders of a pass are complete. Return the pass with the files of that moment."""
        files: list[tuple[str, int]] = []
        first = (number - 1) * self.config.splits_per_pass
        for split in range(first, first + self.config.splits_per_pass):
            files += self._files(self._folder(day, split), self._folder(day, split + 1), patience)
        begin = self._midnight(day) + first * self.interval_s
        return Pass(
            number_of(day),
            number,
            tuple(path for path, _ in files),
            last=number == self.passes_per_day,
            span_s=(begin, begin + self.config.splits_per_pass * self.interval_s),
            position={"day": number_of(day), "pass": number},
            sizes=tuple(size for _, size in files),
        )

    def _files(self, folder: str, following: str, patience: Patience) -> list[tuple[str, int]]:
        done = self.config.done_file
        while True:
            listing = _list(folder)
            if listing is None:
                patience.wait(f"{folder}/{done}" if done else folder)
            elif done is not None:
                if done in listing.files:
                    break
                patience.wait(f"{folder}/{done}")
            elif not listing.data and not ((after := _list(following)) and after.data):
                patience.wait(f"files in {folder}, or in {following}")
            elif not self._is_quiet(folder, listing):
                patience.wait(f"{self.config.quiet:g} s without changes in {folder} (online.quiet)")
            else:
                break
        names = self._data_files(folder, listing)
        if not names:
            self.warn(f"{folder} holds no data files")
        self._watched.pop(folder, None)
        return [(f"{folder}/{name}", listing.files[name].size) for name in names]


OPEN_FOLDERS = 2
"""Folders that may get files at the same time: one, and the next, whose writers may begin before the others end."""
REMEMBERED_FOLDERS = 8
"""Folders that are checked for late files after they have ended."""
MOST_BYTES = 64 << 20
"""Size of files beyond which a pass gets no more of them, however little time has passed: the run is behind."""
SLICE_S = 0.2
"""Longest wait in one piece: the run may end meanwhile."""
LOOK_S = 1.0
"""Longest time until folders are listed even without an event, which the system may have lost."""


class ArrivingFiles(TimedFolders):
    """Micro-passes: the files of folders as they arrive, wherever their folder is complete or not."""

    def __init__(
        self,
        config: Online,
        zone: ZoneInfo,
        warn: Callable[[str], None],
        count_rows: Callable[[str], int] = lambda path: 1,
        **clocks: Callable[[], float],
    ) -> None:
        super().__init__(config, zone, warn, **clocks)
        assert config.pass_ is not None
        self.limits, self._count_rows = config.pass_, count_rows
        if config.start_pass > self.splits_per_day:
            raise ConfigError(
                f"online.start_pass is {config.start_pass}, but a day has only {self.splits_per_day} folders"
            )
        self._read: dict[str, dict[str, int]] = {}
        """Folder -> the files that were read, with their sizes. Those of old folders are forgotten."""
        self._events = FileEvents()
        self._late_s = -math.inf
        remote, seconds = "://" in self.folder, self.limits.seconds
        self._poll_s = config.poll if remote else min(config.poll, max(0.05, (seconds or 1.0) / 4))

    def recall(self, planned: Sequence[Pass]) -> None:
        for one in planned:
            self._note(one)

    def _note(self, planned: Pass) -> None:
        for path, size in zip(planned.data, planned.sizes, strict=True):
            folder, _, name = path.rpartition("/")
            self._read.setdefault(folder, {})[name] = size
        for folder in sorted(self._read)[: -OPEN_FOLDERS - REMEMBERED_FOLDERS]:
            del self._read[folder]

    def after(self, position: Position | None, patience: Patience) -> Pass | None:
        day, split, number = self.first, self.config.start_pass - 1, 1
        if position is not None:  # passes of whole folders have no split
            day, number = parse_day(position["day"], "the position"), position["pass"] + 1
            split = position.get("split", position["pass"] * self.config.splits_per_pass)
        end, files = PassEnd(self.limits, self._elapsed), list[tuple[str, File]]()
        while True:
            if split >= self.splits_per_day:
                if files:
                    break
                day, split, number = day + datetime.timedelta(days=1), 0, 1
            if self.end is not None and day > self.end:
                return None
            patience.check()
            self._watch(day, split)
            split = self._gather(day, split, files, end)
            if end.reached or (files and split >= self.splits_per_day):
                break
            if split < self.splits_per_day:
                self._wait(day, split, end, patience)
        return self._pass(day, number, split, files)

    def _pass(self, day: datetime.date, number: int, split: int, files: list[tuple[str, File]]) -> Pass:
        times = [file.changed_s for _, file in files if file.changed_s is not None]
        made = Pass(
            number_of(day),
            number,
            tuple(path for path, _ in files),
            last=split >= self.splits_per_day,
            span_s=(min(times), max(times)) if times else None,
            position={"day": number_of(day), "pass": number, "split": split},
            sizes=tuple(file.size for _, file in files),
        )
        self._note(made)
        return made

    def _gather(self, day: datetime.date, split: int, files: list[tuple[str, File]], end: PassEnd) -> int:
        """Add files that were not read yet until the pass ends. Return the first folder that may get more."""
        taken = {path for path, _ in files}
        last = min(split + OPEN_FOLDERS, self.splits_per_day)
        listings = {place: _list(self._folder(day, place)) for place in range(split, last)}
        for place, listing in listings.items():
            folder = self._folder(day, place)
            read = self._read.get(folder, {})
            for name in () if listing is None else self._data_files(folder, listing):
                path = f"{folder}/{name}"
                if name in read or path in taken:
                    continue
                if end.reached:
                    return split
                if sum(file.size for _, file in files) >= MOST_BYTES:
                    end.close()
                    return split
                files.append((path, listing.files[name]))  # type: ignore[union-attr]
                end.add(self._count_rows(path) if self.limits.rows is not None else 1)
        following = listings.get(split + 1)
        if split + 1 >= self.splits_per_day:
            following = _list(self._folder(day, split + 1))
        listing = listings.get(split)
        return split + 1 if self._is_over(self._folder(day, split), listing, following) else split

    def _is_over(self, folder: str, listing: Listing | None, following: Listing | None) -> bool:
        """Return whether a folder, all of whose files were taken, gets no more."""
        if self.config.done_file is not None:
            return listing is not None and self.config.done_file in listing.files
        return bool(following and following.data) and (listing is None or self._is_quiet(folder, listing))

    def _watch(self, day: datetime.date, split: int) -> None:
        """Be woken by files in the open folders, and by the folders themselves when they are created."""
        if "://" in self.folder:
            return
        folders = [self._folder(day, place) for place in range(split, split + OPEN_FOLDERS)]
        wanted = dict.fromkeys([self.folder, *(folder.rpartition("/")[0] for folder in folders), *folders])
        self._events.keep_only(wanted)
        for folder in wanted:
            self._events.add(folder)

    def _wait(self, day: datetime.date, split: int, end: PassEnd, patience: Patience) -> None:
        """Wait for a file, or until the pass ends."""
        left = end.left_s
        if left is None:
            folder, done = self._folder(day, split), self.config.done_file
            patience.tell(
                f"files in {folder}" + (f", or {done}" if done else f", or in {self._folder(day, split + 1)}")
            )
        poll_s = LOOK_S if self._events.watches(self.folder) else self._poll_s
        until = time.monotonic() + min(poll_s if left is None else left, poll_s)
        while (rest := until - time.monotonic()) > 0:
            patience.check()
            if self._events.wait(min(rest, SLICE_S)):
                return

    def again(self, planned: Pass, patience: Patience, before: Position | None = None) -> Pass:
        if wrong := check_files(planned):
            raise DataError(
                f"{wrong[0]} is missing or has changed since {planned.name} was planned",
                "restore it; or leave the pass out with --rewind and --skip",
            )
        return planned

    def late_files(self, read: Sequence[Pass]) -> list[LateFiles]:
        """Return what changed in folders after it was read, and what arrived after they had ended. Checked once per `poll`."""
        if not read or self._elapsed() - self._late_s < self.config.poll:
            return []
        self._late_s = self._elapsed()
        reports, last = [], read[-1]
        for folder, known in self._read.items():
            listing = _list(folder) or Listing({})
            place = self._place(folder)
            is_open = place >= (last.day, last.position.get("split", 0))
            files = {name: listing.files[name].size for name in listing.data if name != self.config.done_file}
            late = {
                (f"{folder}/{name}", size)
                for name, size in files.items()
                if (name in known or not is_open) and known.get(name) != size
            } - self._reported
            if late:
                self._reported |= late
                size = sum(size for _, size in late)
                reports.append(LateFiles(last.day, last.number, folder, len(late), size))
        return reports

    def _place(self, folder: str) -> tuple[int, int]:
        """Return the day and number of a folder."""
        day, name = folder.rsplit("/", 2)[1:]
        seconds = int(name[:2]) * 3600 + int(name[2:4]) * 60 + int(name[4:] or 0)
        return int(day), seconds // self.interval_s

    def close(self) -> None:
        self._events.close()


def _list(folder: str) -> Listing | None:
    """List the files of a folder with their sizes and times; None if it does not exist."""
    if "://" in folder:
        with reading(folder):
            fs, path = filesystem(folder)
            fs.invalidate_cache(path)
            try:
                entries: list[Any] = fs.ls(path, detail=True)
            except FileNotFoundError:
                return None
        return Listing(
            {
                entry["name"].rstrip("/").rsplit("/", 1)[-1]: File(entry["size"], _changed(entry))
                for entry in entries
                if entry["type"] == "file"
            }
        )
    files: dict[str, File] = {}
    try:
        status = os.stat(folder)
        with os.scandir(folder) as scan:
            for entry in scan:
                with suppress(FileNotFoundError):  # renamed in the meantime
                    if entry.is_file():
                        facts = entry.stat()
                        files[entry.name] = File(facts.st_size, max(facts.st_mtime, facts.st_ctime))
    except FileNotFoundError:
        return None
    return Listing(files, max(status.st_mtime, status.st_ctime))


def _changed(entry: Mapping[str, object]) -> float | None:
    """Return when an object was written, if its store tells."""
    for key in ("LastModified", "last_modified", "mtime", "updated", "created"):
        when = entry.get(key)
        if isinstance(when, datetime.datetime):
            return (when if when.tzinfo else when.replace(tzinfo=datetime.UTC)).timestamp()
        if isinstance(when, int | float):
            return float(when)
    milliseconds = entry.get("modificationTime")  # WebHDFS
    return milliseconds / 1000 if isinstance(milliseconds, int | float) else None
