"""metrics.jsonl of a run that is being written: what is new in it each time one looks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Line = dict[str, Any]
KEPT = 256


class Tail:
    """Reads whole lines as they come; a file that became shorter (a resumed run) is read anew."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.restarts = 0
        """How often the file was cut, so that what was read before no longer counts."""
        self._at = 0
        self._before = b""
        """What stood before that place, by which a file that was cut and grew again is known."""

    def lines(self) -> list[Line]:
        """Those since the last look."""
        try:
            with self.path.open("rb") as file:
                size = file.seek(0, 2)
                file.seek(self._at - len(self._before))
                if size < self._at or file.read(len(self._before)) != self._before:
                    self._at, self._before, self.restarts = 0, b"", self.restarts + 1
                file.seek(self._at)
                found = file.read(size - self._at)
        except FileNotFoundError:
            return []
        whole = found.rfind(b"\n") + 1  # the last one may be half written
        self._at += whole
        self._before = (self._before + found[:whole])[-KEPT:]
        return [line for text in found[:whole].splitlines() if (line := _parsed(text)) is not None]


def _parsed(text: bytes) -> Line | None:
    try:
        line = json.loads(text)
    except ValueError:
        return None
    return line if isinstance(line, dict) and "kind" in line else None
