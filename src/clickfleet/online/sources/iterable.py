"""A user's own stream: any iterable of (data, day, pass)."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from clickfleet.config.plugins import Plugin
from clickfleet.data.files import expand
from clickfleet.errors import DataError
from clickfleet.online.passes import LateFiles, Pass, Patience, Position, check_files, parse_day


class IterableSource:
    """The passes of an iterable. Days must not decrease, and numbers must increase within a day.

    After a restart, the iterable must return the same items; those already trained on are skipped. If it has a method
    `seek(day, pass)`, this is called instead, with the last pass trained on.
    """

    format: Plugin | None = None
    backlog: int | None = None

    def __init__(self, stream: Iterable[tuple[Any, int, int]], end_day: int | None = None) -> None:
        self.stream, self.end_day = stream, end_day
        self._items: Iterator[tuple[Any, int, int]] | None = None

    def after(self, position: Position | None, patience: Patience) -> Pass | None:
        here = (0, 0) if position is None else (position["day"], position["pass"])
        seeking = self._items is None and position is not None
        if self._items is None:
            if position is not None and hasattr(self.stream, "seek"):
                self.stream.seek(*here)
            self._items = iter(self.stream)
        for item in self._items:
            try:
                data, day, number = item
                parse_day(day, "a pass of the stream")
            except (TypeError, ValueError):
                raise DataError(
                    f"the stream returned {type(item).__name__} {item!r:.80}",
                    "return (data, day, pass), with the day as YYYYMMDD",
                ) from None
            if (day, number) <= here:
                if seeking:
                    continue
                raise DataError(
                    f"the stream returned {day} pass {number} after {here[0]} pass {here[1]}",
                    "days and passes must increase: a completed day cannot be trained on again",
                )
            if self.end_day is not None and day > self.end_day:
                return None
            return self._pass(data, day, number)
        return None

    def _pass(self, data: Any, day: int, number: int) -> Pass:
        position: Position = {"day": day, "pass": number}
        several = isinstance(data, list | tuple) and all(isinstance(item, str | Path) for item in data)
        if isinstance(data, str | Path) or several:
            files = tuple(expand(data)) if data else ()
            sizes = tuple(-1 if "://" in path else os.path.getsize(path) for path in files)
            return Pass(day, number, files, position=position, sizes=sizes)
        return Pass(day, number, data, position=position)

    def again(self, planned: Pass, patience: Patience) -> Pass:
        if wrong := check_files(planned):
            raise DataError(f"{wrong[0]} changed after {planned.name} had begun", "restore it")
        return planned

    def late_files(self, read: Sequence[Pass]) -> list[LateFiles]:
        return []

    def close(self) -> None:
        if self._items is not None and hasattr(self._items, "close"):
            self._items.close()
