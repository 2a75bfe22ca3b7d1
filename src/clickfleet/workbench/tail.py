"""metrics.jsonl of a run that is being written: what is new in it each time one looks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Line = dict[str, Any]


class Tail:
    """Reads whole lines as they come; a file that became shorter (a resumed run) is read anew."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.restarts = 0
        """How often the file was cut, so that what was read before no longer counts."""
        self._at = 0

    def lines(self) -> list[Line]:
        """Those since the last look."""
        try:
            with self.path.open("rb") as file:
                size = file.seek(0, 2)
                if size < self._at:
                    self._at, self.restarts = 0, self.restarts + 1
                file.seek(self._at)
                found = file.read(size - self._at)
        except FileNotFoundError:
            return []
        whole = found.rfind(b"\n") + 1  # the last one may be half written
        self._at += whole
        return [line for text in found[:whole].splitlines() if (line := _parsed(text)) is not None]


def _parsed(text: bytes) -> Line | None:
    try:
        line = json.loads(text)
    except ValueError:
        return None
    return line if isinstance(line, dict) and "kind" in line else None
