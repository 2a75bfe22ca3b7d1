"""What the updater tells the workers: a small file that is replaced at once, naming a version by immutable folders."""

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

NAME = "version.json"


@dataclass(frozen=True)
class Status:
    """A version: an entry for its network and golden requests, and folders of rows, newest first."""

    entry: str
    layers: list[str]
    head: int | None
    """The newest sequence that was published, served or not; None: the log cannot be read."""
    problem: str | None = None
    """Why the newest was refused."""
    pinned: bool = False
    """Rolled back by command: newer entries are not applied."""
    answered: float = 0.0
    """The time of the last command that was obeyed."""
    facts: dict[str, Any] = field(default_factory=dict)

    def lag(self, sequence: int) -> int | None:
        """How many entries were published after one; None where that is not known."""
        return None if self.head is None else max(0, self.head - sequence)

    def same_model(self, other: "Status | None") -> bool:
        return other is not None and (self.entry, self.layers) == (other.entry, other.layers)


def write(status: Status, state: Path) -> None:
    hidden = state / f".{NAME}.writing"
    hidden.write_text(json.dumps(asdict(status)))
    hidden.replace(state / NAME)


def read(state: Path) -> Status | None:
    try:
        return Status(**json.loads((state / NAME).read_text()))
    except FileNotFoundError:
        return None


def stamp(state: Path) -> tuple[int, int] | None:
    """Differs whenever the file was replaced."""
    try:
        found = os.stat(state / NAME)
    except FileNotFoundError:
        return None
    return found.st_mtime_ns, found.st_ino
