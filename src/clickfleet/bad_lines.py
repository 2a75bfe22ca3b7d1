"""What happens to lines that cannot be read: an error, or counted and dropped, or kept in a file with the reason."""

import base64
import json
import os
from dataclasses import asdict, dataclass, field, replace
from typing import IO, Any, Final, Literal, get_args

from clickfleet.errors import ConfigError, DataError
from clickfleet.formats import Bad, OnBad, Parsed
from clickfleet.line_places import Origin, Origins

Policy = Literal["error", "skip", "quarantine"]

ENOUGH_LINES: Final = 1000  # before that many, a fraction says little
_EXAMPLES: Final = 10


@dataclass(slots=True)
class Counters:
    """What a reader has done so far; `rows` counts rows handed out, the rest what was read for them."""

    rows: int = 0
    lines: int = 0
    bad_lines: int = 0
    bytes: int = 0
    examples: list[str] = field(default_factory=list)
    """The first few bad lines, in words."""

    def copy(self) -> "Counters":
        return replace(self, examples=list(self.examples))

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class BadLines:
    """Applies the policy to the bad lines of each block."""

    def __init__(self, policy: Policy, max_fraction: float, quarantine: str | None) -> None:
        if policy not in get_args(Policy):
            raise ConfigError(f"unknown data.bad_lines {policy!r}", "choose error, skip or quarantine")
        if not 0 <= max_fraction <= 1:
            raise ConfigError(f"data.max_bad_fraction must lie between 0 and 1, not {max_fraction}")
        if (policy == "quarantine") != (quarantine is not None):
            raise ConfigError("data.bad_lines=quarantine and the file to put them into need each other")
        self.policy = policy
        self.max_fraction = max_fraction
        self._path = quarantine
        self._file: IO[bytes] | None = None

    @property
    def on_bad(self) -> OnBad:
        """How far the parsers need to go."""
        return {"error": "stop", "skip": "some", "quarantine": "all"}[self.policy]  # type: ignore[return-value]

    def handle(self, path: str, lines_before: int, parsed: Parsed, counters: Counters, format_name: str) -> None:
        """Counts a block's lines and deals with the bad ones among them."""
        origins = Origins(path) if parsed.bad else None
        for bad in parsed.bad:
            line = lines_before + bad.line + 1
            origin = None if origins is None else origins.of(line)
            what = f"{origin or f'{path}:{line}'}: {describe(bad)}"
            if self.policy == "error":
                raise DataError(
                    what,
                    f'check data.format (now "{format_name}") and the schema, '
                    "or set data.bad_lines=skip to count and drop such lines",
                )
            if len(counters.examples) < _EXAMPLES:
                counters.examples.append(what)
            if self.policy == "quarantine":
                self._keep(path, line, bad, origin)
        counters.lines += parsed.lines
        counters.bad_lines += parsed.bad_lines
        self.check(counters, ENOUGH_LINES)

    def check(self, counters: Counters, enough: int = 1) -> None:
        """Stops a run that is reading garbage."""
        if counters.lines >= enough and counters.bad_lines > self.max_fraction * counters.lines:
            shown = "".join(f"\n  {line}" for line in counters.examples[:3])
            raise too_many(counters.bad_lines, counters.lines, self.max_fraction, shown)

    def _keep(self, path: str, line: int, bad: Bad, origin: Origin | None) -> None:
        entry: dict[str, Any] = {"file": path, "line": line} if origin is None else origin._asdict()
        self._open().write(quarantined({**entry, "field": bad.field, "reason": bad.reason}, bad.text))

    def _open(self) -> IO[bytes]:
        if self._file is None:
            assert self._path is not None
            os.makedirs(os.path.dirname(self._path) or ".", exist_ok=True)
            self._file = open(self._path, "ab")  # noqa: SIM115
        return self._file

    def mark(self) -> int:
        """How long the quarantine file is."""
        if self._path is None:
            return 0
        return self._file.tell() if self._file else os.path.getsize(self._path) if os.path.exists(self._path) else 0

    def forget_after(self, mark: int) -> None:
        """Cuts what a run that did not survive has written: its lines come again."""
        self.close()
        if self._path is not None and os.path.exists(self._path) and os.path.getsize(self._path) > mark:
            os.truncate(self._path, mark)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def too_many(bad: int, lines: int, max_fraction: float, shown: str = "") -> DataError:
    """The error of data that is garbage."""
    return DataError(
        f"{bad} of {lines} lines are bad, more than data.max_bad_fraction={max_fraction:g} allows{shown and ':' + shown}",
        "check data.format and the schema, or raise data.max_bad_fraction",
    )


def quarantined(facts: dict[str, Any], text: bytes) -> bytes:
    """The line of a quarantine file: facts as JSON, and the bytes as text or, where they are none, in base64.

    >>> quarantined({"reason": "is no text"}, bytes([255]))
    b'{"reason": "is no text", "base64": "/w=="}\\n'
    """
    try:
        raw = {"text": text.decode()}
    except UnicodeDecodeError:
        raw = {"base64": base64.b64encode(text).decode()}
    return json.dumps({**facts, **raw}, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"


def describe(bad: Bad) -> str:
    """A bad line in words, with a little of its text."""
    if not bad.field:
        return bad.reason
    return f"{bad.field}: {bad.reason}"
