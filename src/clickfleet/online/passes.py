"""Passes: the parts of a stream that are loaded, scored and trained on one after another. A day consists of passes."""

from __future__ import annotations

import datetime
import json
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, TypedDict

from clickfleet.config.plugins import Plugin
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
    },
    total=False,
)
"""Where a source resumes: `day` and `pass`. The other keys belong to a topic: its offsets by partition, and bad records."""


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
    def in_files(self) -> bool:
        return isinstance(self.data, tuple)

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


class StopWaitingError(Exception):
    """Raised when the run ends while a source waits."""


class Patience:
    """Wait for the data of a source, and log from time to time what is missing. A wait can be cancelled."""

    def __init__(self, log: Callable[[str], None], every_s: float, remind_s: float = 600.0) -> None:
        self._log, self.every_s, self.remind_s = log, every_s, remind_s
        self._cancelled = threading.Event()
        self._awaited, self._waits = "", 0

    def wait(self, what: str) -> None:
        """Wait one polling interval. Raise StopWaitingError when the run ends."""
        again = self._awaited == what
        self._awaited, self._waits = what, self._waits + 1 if again else 0
        if not again or self._waits * self.every_s >= self.remind_s:
            self._waits = 0
            self._log(f"{'still ' if again else ''}waiting for {what}")
        if self._cancelled.wait(self.every_s):
            raise StopWaitingError

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

    def after(self, position: Position | None, patience: Patience) -> Pass | None:
        """Wait for the pass after a position (None: the first). Return None if there will be no more."""

    def again(self, planned: Pass, patience: Patience) -> Pass:
        """Return a pass that was planned before a restart, after checking that its files exist and have the same sizes."""

    def late_files(self, read: Sequence[Pass]) -> list[LateFiles]:
        """Return files that arrived or changed after their passes were read; each file once."""

    def close(self) -> None: ...


class PassPlan:
    """The passes that a run has begun, in a file. A pass is on disk before it is trained on, so a crash does not change it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._passes: list[Pass] = []
        whole = 0
        if path.exists():
            for line in path.read_bytes().splitlines(keepends=True):
                if not line.endswith(b"\n"):  # truncated by a crash
                    break
                self._passes.append(Pass.from_dict(json.loads(line)))
                whole += len(line)
            with path.open("r+b") as out:
                out.truncate(whole)

    def after(self, position: Position | None) -> Pass | None:
        """Return the planned pass after a position, if there is one."""
        places, index = self.places(), 0
        if position is not None:
            here = (position["day"], position["pass"])
            index = places.index(here) + 1 if here in places else len(places)
        return self._passes[index] if index < len(places) else None

    def places(self) -> list[tuple[int, int]]:
        """Return the days and numbers of all passes, in order."""
        return [(one.day, one.number) for one in self._passes]

    def rewind(self, place: tuple[int, int], skip: int = 0) -> None:
        """Drop the passes from a day and number on, so that they are listed again.

        Passes of a topic stay, because their records do not change. The first `skip` passes stay too, and are skipped.
        """
        first = sum(each < place for each in self.places())
        skipped = [replace(one, skipped=True) for one in self._passes[first : first + skip]]
        of_topic = [replace(one, skipped=False) for one in self._passes[first + skip :] if "ranges" in one.position]
        self._keep([*self._passes[:first], *skipped, *of_topic])

    def _keep(self, passes: list[Pass]) -> None:
        if passes != self._passes:
            atomic.write_file(self.path, b"".join(map(_line, passes)))
            self._passes = passes

    def last(self, count: int) -> list[Pass]:
        """Return the newest passes."""
        return self._passes[-count:]

    def add(self, planned: Pass) -> None:
        """Add a pass to the plan. If one of the same day and number was planned before, drop it and all after it."""
        places, place = self.places(), (planned.day, planned.number)
        if place in places:
            self._keep(self._passes[: places.index(place)])
        with atomic.write_errors(self.path):
            atomic.append(self.path, _line(planned), durable=True)
        self._passes.append(planned)


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
