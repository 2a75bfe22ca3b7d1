"""Apply the policy for bad lines: raise an error, count and skip them, or store them with the reason in a quarantine file."""

from __future__ import annotations

import base64
import bisect
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import IO, Any, Final, Literal, NamedTuple, get_args

from clickfleet.data.formats import Bad, OnBad, Parsed
from clickfleet.errors import ConfigError, DataError


class RecordOrigin(NamedTuple):
    """The place of a record in a Kafka topic."""

    topic: str
    partition: int
    offset: int

    def __str__(self) -> str:
        return f"{self.topic} partition {self.partition} offset {self.offset}"


def write_origins(path: Path, topic: str, records: Iterable[tuple[int, int, int]]) -> None:
    """Record the origin of the lines of a file: its records in order, as (partition, offset, lines)."""
    line, runs = 1, list[list[int]]()
    here = following = each = -1
    for partition, offset, lines in records:
        if offset != following or lines != each or partition != here:
            runs.append([line, partition, offset, lines])
        here, following, each, line = partition, offset + 1, lines, line + lines
    places_of(path).write_text(json.dumps({"topic": topic, "runs": runs}))


def places_of(path: Path) -> Path:
    """Return the path of the file that `write_origins` writes for `path`."""
    return path.with_name(f".{path.name}.places")


class Origins:
    """Finds the Kafka records that the lines of a file came from.

    >>> Origins("/no/such/file").of(1) is None
    True
    """

    def __init__(self, path: str) -> None:
        self._topic, self._runs = "", list[list[int]]()
        places = places_of(Path(path)) if "://" not in path else None
        if places is not None and os.path.exists(places):
            saved = json.loads(places.read_text())
            self._topic, self._runs = saved["topic"], saved["runs"]

    def of(self, line: int) -> RecordOrigin | None:
        """Return the record of a line, counted from 1, or None if the file did not come from a topic."""
        at = bisect.bisect_right(self._runs, line, key=lambda run: run[0]) - 1
        if at < 0:
            return None
        first, partition, offset, lines = self._runs[at]
        return RecordOrigin(self._topic, partition, offset + (line - first) // max(lines, 1))


Policy = Literal["error", "skip", "quarantine"]

ENOUGH_LINES: Final = 1000  # a fraction of fewer lines is not significant
_EXAMPLES: Final = 10


@dataclass(slots=True)
class Counters:
    """Counters of a reader: `rows` returned so far, and the lines and bytes read for them."""

    rows: int = 0
    lines: int = 0
    bad_lines: int = 0
    bytes: int = 0
    examples: list[str] = field(default_factory=list)
    """Descriptions of the first few bad lines."""

    def copy(self) -> Counters:
        return replace(self, examples=list(self.examples))

    def to_dict(self) -> Mapping[str, Any]:
        return asdict(self)


class BadLines:
    """Applies `data.bad_lines` to the bad lines of each block."""

    def __init__(self, policy: Policy, max_fraction: float, quarantine: str | None) -> None:
        if policy not in get_args(Policy):
            raise ConfigError(f"unknown policy {policy!r} in data.bad_lines", "choose error, skip or quarantine")
        if not 0 <= max_fraction <= 1:
            raise ConfigError(f"data.max_bad_fraction must be between 0 and 1, not {max_fraction}")
        if (policy == "quarantine") != (quarantine is not None):
            raise ConfigError("data.bad_lines=quarantine and data.quarantine require each other")
        self.policy = policy
        self.max_fraction = max_fraction
        self._path = quarantine
        self._file: IO[bytes] | None = None

    @property
    def on_bad(self) -> OnBad:
        """What the parsers must do at a bad line."""
        return {"error": "stop", "skip": "some", "quarantine": "all"}[self.policy]  # type: ignore[return-value]

    def handle(self, path: str, lines_before: int, parsed: Parsed, counters: Counters, format_name: str) -> None:
        """Count the lines of a block and apply the policy to its bad lines."""
        origins = Origins(path) if parsed.bad else None
        for bad in parsed.bad:
            line = lines_before + bad.line + 1
            origin = None if origins is None else origins.of(line)
            what = f"{origin or f'{path}:{line}'}: {describe(bad)}"
            if self.policy == "error":
                raise DataError(
                    what,
                    f'check data.format (now "{format_name}") and the schema, '
                    "or set data.bad_lines=skip to count and skip such lines",
                )
            if len(counters.examples) < _EXAMPLES:
                counters.examples.append(what)
            if self.policy == "quarantine":
                self._keep(path, line, bad, origin)
        counters.lines += parsed.lines
        counters.bad_lines += parsed.bad_lines
        self.check(counters, ENOUGH_LINES)

    def check(self, counters: Counters, enough: int = 1) -> None:
        """Raise DataError if too many lines are bad."""
        if counters.lines >= enough and counters.bad_lines > self.max_fraction * counters.lines:
            shown = "".join(f"\n  {line}" for line in counters.examples[:3])
            raise too_many(counters.bad_lines, counters.lines, self.max_fraction, shown)

    def _keep(self, path: str, line: int, bad: Bad, origin: RecordOrigin | None) -> None:
        if self._file is None:
            assert self._path is not None
            os.makedirs(os.path.dirname(self._path) or ".", exist_ok=True)
            self._file = open(self._path, "ab")  # noqa: SIM115
        place = {"file": path, "line": line} if origin is None else origin._asdict()
        self._file.write(quarantined({**place, "field": bad.field, "reason": bad.reason}, bad.text))

    def mark(self) -> int:
        """Return the size of the quarantine file."""
        if self._path is None:
            return 0
        return self._file.tell() if self._file else os.path.getsize(self._path) if os.path.exists(self._path) else 0

    def forget_after(self, mark: int) -> None:
        """Truncate the quarantine file to an earlier size. After a resume, the lines beyond it are read again."""
        self.close()
        if self._path is not None and os.path.exists(self._path) and os.path.getsize(self._path) > mark:
            os.truncate(self._path, mark)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def too_many(bad: int, lines: int, max_fraction: float, shown: str = "") -> DataError:
    """Return the error for too many bad lines."""
    return DataError(
        f"{bad} of {lines} lines are bad, more than data.max_bad_fraction={max_fraction:g} allows{shown and ':' + shown}",
        "check data.format and the schema, or raise data.max_bad_fraction",
    )


def quarantined(facts: Mapping[str, Any], text: bytes) -> bytes:
    """Return a line of a quarantine file: JSON with `facts`, and the raw line as text or, if it is not UTF-8, in base64.

    >>> quarantined({"reason": "is not text"}, bytes([255]))
    b'{"reason": "is not text", "base64": "/w=="}\\n'
    """
    try:
        raw = {"text": text.decode()}
    except UnicodeDecodeError:
        raw = {"base64": base64.b64encode(text).decode()}
    return json.dumps({**facts, **raw}, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"


def describe(bad: Bad) -> str:
    """Return the reason why a line is bad, after the name of its field."""
    return f"{bad.field}: {bad.reason}" if bad.field else bad.reason
