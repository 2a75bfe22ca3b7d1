"""Passes: the parts of a stream that are loaded, scored and trained on one after another. A day consists of passes."""

from __future__ import annotations

import datetime
import json
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, TypedDict

from clickfleet.config.plugins import Plugin
from clickfleet.config.sections import PassLimits
from clickfleet.errors import ConfigError
from clickfleet.store import atomic

Position = TypedDict(
    "Position",
    {
        "day": int,
        "pass": int,
        "day_over": bool,
        "offsets": dict[str, int],
        "ranges": dict[str, list[int]],
        "end_s": float,
        "aside": list[list[Any]],
        "join": int,
        "split": int,
        "items": int,
    },
    total=False,
)
"""Where a source resumes: `day` and `pass`. `join` counts the passes of a join. Micro-passes of folders add the first folder that may get
more files, those of an iterable their number of items. The other keys belong to a topic: its offsets by partition, and bad records."""


Place = tuple[int, int]
"""Day and number of a pass."""


@dataclass(frozen=True)
class Pass:
    """One pass; `data` holds files, or anything a Feed accepts."""

    day: int
    """YYYYMMDD."""
    number: int
    """Starts at 1 each day."""
    data: Any
    last: bool = False
    """Whether it is known to be the last of its day."""
    span_s: tuple[float, float] | None = None
    """First and last time of its events, for rows without times."""
    position: Position = field(default_factory=Position)
    """Where its source resumes after it."""
    sizes: tuple[int, ...] = ()
    """Sizes of its files in bytes."""
    bad_records: int = 0
    """Records of a topic that were rejected when the files were written."""
    skipped: bool = False
    """Whether a rewind left it out."""

    @property
    def name(self) -> str:
        return f"{self.day} pass {self.number}"

    @property
    def place(self) -> Place:
        return self.day, self.number

    @property
    def in_files(self) -> bool:
        return isinstance(self.data, tuple)

    @property
    def is_planned(self) -> bool:
        """Whether the plan must hold it: its files, or what it was gathered from, may be others the next time."""
        return self.in_files or "items" in self.position

    def to_dict(self) -> dict[str, object]:
        """Return plain values for JSON; data in memory is left out."""
        data = list(self.data) if self.in_files else None
        return {**vars(self), "data": data, "span_s": self.span_s and list(self.span_s)}

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> Pass:
        span = saved["span_s"]
        return cls(
            **{
                **saved,
                "data": None if saved["data"] is None else tuple(saved["data"]),
                "sizes": tuple(saved["sizes"]),
                "span_s": None if span is None else tuple(span),
            }
        )


@dataclass(frozen=True)
class GatheredItems:
    """Data in memory that arrived in parts. Each is anything a Feed accepts."""

    items: tuple[Any, ...]


class PassEnd:
    """Tells when a micro-pass ends: some seconds after its first row arrived, or after a number of rows.

    >>> now = 5.0
    >>> end = PassEnd(PassLimits(seconds=1, rows=100), clock=lambda: now)
    >>> end.left_s, end.reached
    (None, False)
    >>> end.add(60)
    >>> now = 5.25
    >>> end.left_s, end.reached
    (0.75, False)
    >>> end.add(40)
    >>> end.reached
    True
    """

    def __init__(self, limits: PassLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits, self._clock = limits, clock
        self._end_s: float | None = None
        self._closed = False
        self.rows = 0

    def close(self) -> None:
        """End the pass now."""
        self._closed = True

    def add(self, rows: int) -> None:
        """Count rows that have arrived."""
        if not self.rows and self._limits.seconds is not None:
            self._end_s = self._clock() + self._limits.seconds
        self.rows += rows

    @property
    def left_s(self) -> float | None:
        """Seconds until the pass ends; None while it is not known."""
        return None if self._end_s is None else max(0.0, self._end_s - self._clock())

    @property
    def reached(self) -> bool:
        full = self._limits.rows is not None and self.rows >= self._limits.rows
        return self._closed or full or (self._end_s is not None and self._clock() >= self._end_s)


class StopWaitingError(Exception):
    """Raised when the run ends while a source waits."""


class Patience:
    """Wait for the data of a source, and log from time to time what is missing. A wait can be cancelled."""

    def __init__(self, log: Callable[[str], None], every_s: float, remind_s: float = 600.0) -> None:
        self._log, self.every_s, self.remind_s = log, every_s, remind_s
        self._cancelled = threading.Event()
        self._awaited, self._told_s = "", 0.0

    def wait(self, what: str) -> None:
        """Wait one polling interval. Raise StopWaitingError when the run ends."""
        self.tell(what)
        if self._cancelled.wait(self.every_s):
            raise StopWaitingError

    def pause(self, seconds: float) -> None:
        """Wait a short time without logging. Raise StopWaitingError when the run ends."""
        if self._cancelled.wait(seconds):
            raise StopWaitingError

    def tell(self, what: str) -> None:
        """Log what is waited for, unless this was logged recently."""
        again, now = self._awaited == what, time.monotonic()
        if not again or now - self._told_s >= self.remind_s:
            self._awaited, self._told_s = what, now
            self._log(f"{'still ' if again else ''}waiting for {what}")

    def check(self) -> None:
        """Raise StopWaitingError when the run ends."""
        if self.cancelled:
            raise StopWaitingError

    def cancel(self) -> None:
        self._cancelled.set()

    @property
    def cancelled(self) -> bool:
        return self._cancelled.is_set()


@dataclass(frozen=True)
class LateFiles:
    """Files that arrived or changed after their pass was read."""

    day: int
    number: int
    folder: str
    files: int
    bytes: int

    @property
    def words(self) -> str:
        return (
            f"{self.files:,} files ({self.bytes:,} bytes) of {self.folder} arrived or changed after {self.day} pass {self.number} "
            "was read; they are not trained on"
        )


class PassSource(Protocol):
    """Where passes come from."""

    format: Plugin | None
    """Format of its files; None: data.format."""
    backlog: int | None
    """Number of records waiting in it, if known."""
    status: dict[str, Any] | None
    """What it has counted, for the metrics of the run."""

    def after(self, position: Position | None, patience: Patience) -> Pass | None:
        """Wait for the pass after a position (None: the first). Return None if there will be no more."""

    def again(self, planned: Pass, patience: Patience, before: Position | None = None) -> Pass:
        """Return a pass that was planned before a restart, after checking that its files exist and have the same sizes.

        `before` is the position before it.
        """

    def late_files(self, read: Sequence[Pass]) -> list[LateFiles]:
        """Return files that arrived or changed after their passes were read; each file once."""

    def recall(self, planned: Sequence[Pass]) -> None:
        """Take note of the passes that were planned before a restart, oldest first."""

    def close(self) -> None: ...


class PassPlan:
    """The passes that a run has begun, in a file. A pass is on disk before it is trained on, so a crash does not change it.

    Passes before the oldest checkpoint are forgotten, so the file does not grow with the age of the run.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._passes: list[Pass] = []
        self._places: dict[Place, int] = {}
        whole = 0
        if path.exists():
            for line in path.read_bytes().splitlines(keepends=True):
                if not line.endswith(b"\n"):  # truncated by a crash
                    break
                self._note(Pass.from_dict(json.loads(line)))
                whole += len(line)
            with path.open("r+b") as out:
                out.truncate(whole)

    def _note(self, planned: Pass) -> None:
        self._places[planned.place] = len(self._passes)
        self._passes.append(planned)

    def after(self, position: Position | None) -> Pass | None:
        """Return the planned pass after a position, if there is one."""
        with self._lock:
            index = 0
            if position is not None:
                index = self._places.get((position["day"], position["pass"]), len(self._passes)) + 1
            return self._passes[index] if index < len(self._passes) else None

    def passes(self) -> list[Pass]:
        """Return all passes, in order."""
        return list(self._passes)

    def places(self) -> list[Place]:
        """Return the days and numbers of all passes, in order."""
        return list(self._places)

    def rewind(self, place: Place, skip: int = 0) -> None:
        """Drop the passes from a day and number on, so that they are listed again.

        Passes of a topic or a join stay, because their rows do not change. The first `skip` passes stay too, and are skipped.
        """
        first = sum(each < place for each in self.places())
        skipped = [replace(one, skipped=True) for one in self._passes[first : first + skip]]
        fixed = [
            replace(one, skipped=False)
            for one in self._passes[first + skip :]
            if {"ranges", "join"} & set(one.position)
        ]
        self._keep([*self._passes[:first], *skipped, *fixed])

    def _keep(self, passes: list[Pass]) -> None:
        if passes != self._passes:
            atomic.write_file(self.path, b"".join(map(_line, passes)))
            self._passes, self._places = [], {}
            for one in passes:
                self._note(one)

    def last(self, count: int) -> list[Pass]:
        """Return the newest passes."""
        return self._passes[-count:]

    def add(self, planned: Pass) -> None:
        """Add a pass to the plan. If one of the same day and number was planned before, drop it and all after it."""
        with self._lock:
            if planned.place in self._places:
                self._keep(self._passes[: self._places[planned.place]])
            with atomic.write_errors(self.path):
                atomic.append(self.path, _line(planned), durable=True)
            self._note(planned)

    def forget(self, oldest: Place, at_least: int = 1000) -> None:
        """Forget the passes before a place, which no checkpoint needs, once there are many of them.

        Those of the same folders stay: the files that were read are known by them.
        """
        with self._lock:
            at = self._places.get(oldest)
            if at is None:
                return
            split = self._passes[at].position.get("split")
            while split is not None and at > 0 and self._in_folder(at - 1, oldest[0], split):
                at -= 1
            if at >= at_least:
                self._keep(self._passes[at:])

    def _in_folder(self, at: int, day: int, split: int) -> bool:
        one = self._passes[at]
        return one.day == day and one.position.get("split", 0) >= split - 1


def _line(planned: Pass) -> bytes:
    return json.dumps(planned.to_dict()).encode() + b"\n"


def check_files(planned: Pass) -> list[str]:
    """Return the files of a planned pass that are missing or have another size."""
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
    """Parse a day written as YYYYMMDD.

    >>> parse_day(20260228, "online.start_day") + datetime.timedelta(1)
    datetime.date(2026, 3, 1)
    """
    try:
        return datetime.datetime.strptime(f"{day:08d}", "%Y%m%d").date()
    except ValueError:
        raise ConfigError(f"{key} is {day}, which is not a day written as YYYYMMDD") from None


def number_of(day: datetime.date) -> int:
    return int(day.strftime("%Y%m%d"))
