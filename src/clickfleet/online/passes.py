"""A pass: the part of a stream that is loaded, scored and trained on at once; passes make days."""

from __future__ import annotations

import datetime
import errno
import json
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from clickfleet import storage
from clickfleet.errors import ConfigError
from clickfleet.sections import Plugin

Position = dict[str, Any]
"""Where a source goes on: plain values for JSON, at least `day` and `pass`."""


@dataclass(frozen=True)
class Pass:
    """Rows that belong together; `data` are files, or anything a Feed takes."""

    day: int
    """YYYYMMDD."""
    number: int
    """From 1, anew each day."""
    data: Any
    last: bool = False
    """It is known to be the last of its day."""
    span_s: tuple[float, float] | None = None
    """When its events happened, where rows do not say."""
    position: Position = field(default_factory=dict)
    """Where its source goes on after it."""
    sizes: tuple[int, ...] = ()
    """Bytes of its files."""
    bad_records: int = 0
    """Records of a topic that became no rows when the files were written."""

    @property
    def name(self) -> str:
        return f"{self.day} pass {self.number}"

    @property
    def in_files(self) -> bool:
        return isinstance(self.data, tuple)

    def to_dict(self) -> dict[str, Any]:
        """Plain values; data in memory are left out."""
        data = list(self.data) if self.in_files else None
        return {**vars(self), "data": data, "span_s": self.span_s and list(self.span_s)}

    @classmethod
    def from_dict(cls, saved: dict[str, Any]) -> Pass:
        span = saved["span_s"]
        return cls(
            **{
                **saved,
                "data": None if saved["data"] is None else tuple(saved["data"]),
                "sizes": tuple(saved["sizes"]),
                "span_s": None if span is None else tuple(span),
            }
        )


class StopWaitingError(Exception):
    """The run ends: whatever was awaited is not wanted any more."""


class Patience:
    """How a source waits for what is not there yet: it says for what, once in a while, and can be called off."""

    def __init__(self, say: Callable[[str], None], every_s: float, remind_s: float = 600.0) -> None:
        self._say, self.every_s, self.remind_s = say, every_s, remind_s
        self._called_off = threading.Event()
        self._for, self._waits = "", 0

    def wait(self, what: str) -> None:
        """Some time passes; raises StopWaitingError when the run ends."""
        again = self._for == what
        self._for, self._waits = what, self._waits + 1 if again else 0
        if not again or self._waits * self.every_s >= self.remind_s:
            self._waits = 0
            self._say(f"{'still ' if again else ''}waiting for {what}")
        if self._called_off.wait(self.every_s):
            raise StopWaitingError

    def check(self) -> None:
        """Raises StopWaitingError when the run ends."""
        if self.called_off:
            raise StopWaitingError

    def call_off(self) -> None:
        self._called_off.set()

    @property
    def called_off(self) -> bool:
        return self._called_off.is_set()


@dataclass(frozen=True)
class LateFiles:
    """Files that came or changed after the pass they belong to was read."""

    day: int
    number: int
    folder: str
    files: int
    bytes: int

    @property
    def words(self) -> str:
        return (
            f"{self.files:,} files ({self.bytes:,} bytes) of {self.folder} came or changed after {self.day} pass {self.number} "
            "was read, and are not learned from"
        )


class PassSource(Protocol):
    """Where passes come from."""

    format: Plugin | None
    """Of its files; None: data.format."""
    backlog: int | None
    """Records that wait in it, where that is known."""

    def after(self, position: Position | None, patience: Patience) -> Pass | None:
        """The pass after a position (None: the first); waits for it; None when there will be no more."""

    def again(self, planned: Pass, patience: Patience) -> Pass:
        """The same pass as it was planned before a restart, its files there and as long as they were."""

    def late_files(self, read: Sequence[Pass]) -> list[LateFiles]:
        """What came or changed after passes were read, each once."""

    def close(self) -> None: ...


class Plan:
    """The passes a run has begun, in a file that is flushed before any is trained on: after a crash they are the same again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._passes: list[Pass] = []
        whole = 0
        if path.exists():
            for line in path.read_bytes().splitlines(keepends=True):
                if not line.endswith(b"\n"):  # cut short by a crash
                    break
                self._passes.append(Pass.from_dict(json.loads(line)))
                whole += len(line)
            with path.open("r+b") as out:
                out.truncate(whole)

    def after(self, position: Position | None) -> Pass | None:
        """What was planned to follow, if anything was."""
        begun = [(one.day, one.number) for one in self._passes]
        if position is None:
            return self._passes[0] if self._passes else None
        here = (position["day"], position["pass"])
        at = begun.index(here) + 1 if here in begun else len(begun)
        return self._passes[at] if at < len(begun) else None

    def last(self, count: int) -> list[Pass]:
        """The newest ones."""
        return self._passes[-count:]

    def add(self, planned: Pass) -> None:
        """Writes a pass down; one of the same day and number, planned before, is replaced with all after it."""
        names = [(one.day, one.number) for one in self._passes]
        if (planned.day, planned.number) in names:
            kept = self._passes[: names.index((planned.day, planned.number))]
            storage.replace(self.path, b"".join(map(_line, kept)))
            self._passes = kept
        with storage.plainly(self.path), self.path.open("ab", buffering=0) as out:
            size, line = out.tell(), _line(planned)
            try:
                if out.write(line) < len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                os.fsync(out.fileno())
            except OSError:
                out.truncate(size)
                raise
        self._passes.append(planned)


def _line(planned: Pass) -> bytes:
    return json.dumps(planned.to_dict()).encode() + b"\n"


def check_files(planned: Pass) -> list[str]:
    """The files of a planned pass that are gone or have another length now."""
    return [
        path
        for path, size in zip(planned.data, planned.sizes, strict=True)
        if "://" not in path and _size(path) != size
    ]


def _size(path: str) -> int:
    try:
        return os.path.getsize(path)
    except OSError:
        return -1


def parse_day(day: int, key: str) -> datetime.date:
    """A day written as YYYYMMDD.

    >>> parse_day(20260228, "online.start_day") + datetime.timedelta(1)
    datetime.date(2026, 3, 1)
    """
    try:
        return datetime.datetime.strptime(f"{day:08d}", "%Y%m%d").date()
    except ValueError:
        raise ConfigError(f"{key} is {day}, which is no day written as YYYYMMDD") from None


def number_of(day: datetime.date) -> int:
    return int(day.strftime("%Y%m%d"))
