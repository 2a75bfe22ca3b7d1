"""Timed folders: <dir>/<YYYYMMDD>/<HHMM>/<files>, each complete once its done file is there.

A day has a folder every `split_interval` from 0000 on; `splits_per_pass` of them in a row are a pass. Folders left over at the end of a
day, too few for a pass, are not read.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable
from typing import Any
from zoneinfo import ZoneInfo

from clickfleet.errors import ConfigError
from clickfleet.files import filesystem, reading
from clickfleet.online.passes import Pass, Patience, Position, check_files, number_of, parse_day
from clickfleet.sections import Online, Plugin

UNFINISHED = (".tmp", ".part", ".writing", "._COPYING_")
"""Ends of names that copying tools give to files they have not finished."""


class Directories:
    """The passes of a folder of days, in order."""

    format: Plugin | None = None

    def __init__(self, config: Online, zone: ZoneInfo, warn: Callable[[str], None]) -> None:
        assert config.dir is not None
        if config.start_day is None:
            raise ConfigError("online.start_day is missing", "name the first day of online.dir to read: YYYYMMDD")
        minutes = config.split_interval / 60
        if minutes != int(minutes) or not 1 <= minutes <= 1440:
            raise ConfigError(
                f"online.split_interval is {config.split_interval:g} s, and must be whole minutes, 1 to 1440"
            )
        self.folder, self.config, self.zone, self.warn = config.dir, config, zone, warn
        self.minutes = int(minutes)
        self.passes_per_day = 1440 // self.minutes // config.splits_per_pass
        if not self.passes_per_day:
            raise ConfigError(
                f"online.splits_per_pass is {config.splits_per_pass}, and a day has {1440 // self.minutes} splits"
            )
        if left := 1440 // self.minutes % config.splits_per_pass:
            warn(f"the last {left} folders of each day are too few for a pass and are not read")
        self.first = parse_day(config.start_day, "online.start_day")
        self.end = None if config.end_day is None else parse_day(config.end_day, "online.end_day")

    def after(self, position: Position | None, patience: Patience) -> Pass | None:
        day, number = self.first, 1
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
        self.warn(f"{planned.name} is read as it is now: {wrong[0]} changed since it was first listed")
        return self._read(parse_day(planned.day, "the plan"), planned.number, patience)

    def _read(self, day: datetime.date, number: int, patience: Patience) -> Pass:
        """The pass, once all its folders are complete; its files are those there at that moment."""
        found: list[tuple[str, int]] = []
        first = (number - 1) * self.config.splits_per_pass
        for split in range(first, first + self.config.splits_per_pass):
            hours, minutes = divmod(split * self.minutes, 60)
            found += self._files(f"{self.folder}/{number_of(day)}/{hours:02}{minutes:02}", patience)
        midnight = datetime.datetime.combine(day, datetime.time(), self.zone).timestamp()
        return Pass(
            number_of(day),
            number,
            tuple(path for path, _ in found),
            last=number == self.passes_per_day,
            span_s=(
                midnight + first * self.minutes * 60,
                midnight + (first + self.config.splits_per_pass) * self.minutes * 60,
            ),
            position={"day": number_of(day), "pass": number},
            sizes=tuple(size for _, size in found),
        )

    def _files(self, folder: str, patience: Patience) -> list[tuple[str, int]]:
        done = self.config.done_file
        while True:
            entries = _list(folder)
            if entries is None:
                patience.wait(f"{folder}/{done}" if done else folder)
            elif done is not None and done not in entries:
                patience.wait(f"{folder}/{done}")
            else:
                break
        names = sorted(name for name in entries if not name.startswith((".", "_")) and name != done)
        for name in [name for name in names if name.endswith(UNFINISHED)]:
            self.warn(f"{folder}/{name} looks unfinished and is not read")
            names.remove(name)
        if not names:
            self.warn(f"{folder} holds no data files")
        return [(f"{folder}/{name}", entries[name]) for name in names]

    def close(self) -> None: ...


def _list(folder: str) -> dict[str, int] | None:
    """The files of a folder with their sizes; None where there is no such folder."""
    if "://" in folder:
        with reading(folder):
            fs, path = filesystem(folder)
            fs.invalidate_cache(path)
            try:
                entries: list[Any] = fs.ls(path, detail=True)
            except FileNotFoundError:
                return None
        return {
            entry["name"].rstrip("/").rsplit("/", 1)[-1]: entry["size"] for entry in entries if entry["type"] == "file"
        }
    try:
        with os.scandir(folder) as scan:
            return {entry.name: entry.stat().st_size for entry in scan if entry.is_file()}
    except FileNotFoundError:
        return None
