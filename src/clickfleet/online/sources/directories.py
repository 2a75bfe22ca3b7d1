"""Timed folders: <dir>/<YYYYMMDD>/<HHMM>/<files>, each complete when its done file exists.

A day has a folder every `split_interval` from 0000 on; `splits_per_pass` consecutive folders are a pass. Folders at the end of a day
that are too few for a pass are not read. Without a done file, a folder is complete when no file was added, removed or changed for
`quiet` seconds. Files that arrive or change after their folder was read are reported.
"""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple
from zoneinfo import ZoneInfo

from clickfleet.config.plugins import Plugin
from clickfleet.config.sections import Online
from clickfleet.data.files import filesystem, reading
from clickfleet.errors import ConfigError
from clickfleet.online.passes import LateFiles, Pass, Patience, Position, check_files, number_of, parse_day

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


class Directories:
    """The passes of timed folders, in order."""

    format: Plugin | None = None
    backlog: int | None = None

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
        self._watched: tuple[str, Listing, float] | None = None
        """A folder that is not quiet yet, its listing, and when this listing was first seen."""
        self._reported: set[tuple[str, int]] = set()
        if config.start_day is None:
            raise ConfigError("online.start_day is missing", "name the first day of online.dir to read: YYYYMMDD")
        minutes = config.split_interval / 60
        if minutes != int(minutes) or not 1 <= minutes <= 1440:
            raise ConfigError(f"online.split_interval must be 1 to 1440 whole minutes, not {config.split_interval:g} s")
        self.folder, self.config, self.zone, self.warn = config.dir, config, zone, warn
        self.minutes = int(minutes)
        self.passes_per_day = 1440 // self.minutes // config.splits_per_pass
        if not self.passes_per_day:
            raise ConfigError(
                f"online.splits_per_pass is {config.splits_per_pass}, but a day has only {1440 // self.minutes} splits"
            )
        if config.start_pass > self.passes_per_day:
            raise ConfigError(
                f"online.start_pass is {config.start_pass}, but a day has only {self.passes_per_day} passes"
            )
        if config.done_file is None:
            warn(f"without online.done_file, a folder is read after {config.quiet:g} s without changes (online.quiet)")
        if left := 1440 // self.minutes % config.splits_per_pass:
            warn(f"the last {left} folders of each day are too few for a pass and are not read")
        self.first = parse_day(config.start_day, "online.start_day")
        self.end = None if config.end_day is None else parse_day(config.end_day, "online.end_day")

    def after(self, position: Position | None, patience: Patience) -> Pass | None:
        day, number = self.first, self.config.start_pass
        if position is not None:
            day, number = parse_day(position["day"], "the position"), position["pass"] + 1
        if number > self.passes_per_day:
            day, number = day + datetime.timedelta(days=1), 1
        if self.end is not None and day > self.end:
            return None
        return self._read(day, number, patience)

    def again(self, planned: Pass, patience: Patience) -> Pass:
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

    def _folder(self, day: datetime.date, split: int) -> str:
        days, split = divmod(split, 1440 // self.minutes)
        hours, minutes = divmod(split * self.minutes, 60)
        return f"{self.folder}/{number_of(day + datetime.timedelta(days=days))}/{hours:02}{minutes:02}"

    def _read(self, day: datetime.date, number: int, patience: Patience) -> Pass:
        """Wait until all folders of a pass are complete. Return the pass with the files of that moment."""
        files: list[tuple[str, int]] = []
        first = (number - 1) * self.config.splits_per_pass
        for split in range(first, first + self.config.splits_per_pass):
            files += self._files(self._folder(day, split), self._folder(day, split + 1), patience)
        midnight = datetime.datetime.combine(day, datetime.time(), self.zone).timestamp()
        begin = midnight + first * self.minutes * 60
        return Pass(
            number_of(day),
            number,
            tuple(path for path, _ in files),
            last=number == self.passes_per_day,
            span_s=(begin, begin + self.config.splits_per_pass * self.minutes * 60),
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
        names = [name for name in listing.data if name != done]
        for name in sorted(listing.files):
            if name.endswith(UNFINISHED) and not name.startswith((".", "_")):
                self.warn(f"{folder}/{name} looks unfinished and is not read")
        if not names:
            self.warn(f"{folder} holds no data files")
        return [(f"{folder}/{name}", listing.files[name].size) for name in names]

    def _is_quiet(self, folder: str, listing: Listing) -> bool:
        """Return whether nothing changed for `quiet` seconds, by the times of the files or by our own observation."""
        newest_s, now = listing.newest_s, self._elapsed()
        if newest_s is not None and self._clock() - newest_s >= self.config.quiet:
            return True
        if self._watched is None or self._watched[:2] != (folder, listing):
            self._watched = (folder, listing, now)
        return now - self._watched[2] >= self.config.quiet

    def close(self) -> None: ...


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
