"""What the processes of a server tell each other through small files in its folder, each replaced at once.

version.json      the updater to the workers: a version, named by immutable folders
updater.json      the updater to the workers: when it last looked at the log with success
commands/         the workers to the updater: what an administrator wants, one file each, obeyed in order
answers/          the updater to the worker that asked
children.json     the launcher to the workers: how often a process died
"""

import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from clickfleet.errors import CheckpointError

NAME, PULSE, CHILDREN = "version.json", "updater.json", "children.json"
COMMANDS, ANSWERS = "commands", "answers"
OLD_S = 60.0
"""Age of an answer that nobody fetched."""


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
    told: int = 0
    """Counts what the updater told."""
    following: bool = False
    """Whether it is from a log that may grow."""

    def lag(self, sequence: int) -> int | None:
        """How many entries were published after one; None where that is not known."""
        return None if self.head is None else max(0, self.head - sequence)

    def same_model(self, other: "Status | None") -> bool:
        return other is not None and (self.entry, self.layers) == (other.entry, other.layers)


def put(path: Path, facts: Any) -> None:
    """A file that is there whole or not at all."""
    hidden = path.with_name(f".{path.name}.{os.getpid()}")
    hidden.write_text(json.dumps(facts))
    hidden.replace(path)


def get(path: Path) -> Any:
    """What a file says; None if it is not there or not whole."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def write(status: Status, state: Path) -> None:
    put(state / NAME, asdict(status))


def read(state: Path) -> Status | None:
    try:
        return Status(**json.loads((state / NAME).read_text()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{state / NAME} cannot be read: {error}") from None


def stamp(state: Path) -> tuple[int, int] | None:
    """Differs whenever the file was replaced."""
    try:
        found = os.stat(state / NAME)
    except FileNotFoundError:
        return None
    return found.st_mtime_ns, found.st_ino


def beat(state: Path) -> None:
    """The updater has looked, with success."""
    put(state / PULSE, {"pid": os.getpid(), "at": time.monotonic()})


def last_beat(state: Path) -> float | None:
    """When the updater last looked with success, by `time.monotonic`."""
    facts = get(state / PULSE)
    at = facts.get("at") if isinstance(facts, dict) else None
    return float(at) if isinstance(at, int | float) and at <= time.monotonic() else None


_count = 0


def command(state: Path, **wanted: Any) -> str:
    """Hands a command to the updater; its name, under which the answer will be."""
    global _count
    _count += 1
    name = f"{time.time_ns():020d}-{os.getpid()}-{_count}.json"
    (state / COMMANDS).mkdir(exist_ok=True)
    put(state / COMMANDS / name, wanted)
    return name


def withdraw(state: Path, name: str) -> bool:
    """Takes a command back; False if the updater has it already."""
    try:
        (state / COMMANDS / name).unlink()
    except FileNotFoundError:
        return False
    return True


def commands(state: Path) -> list[tuple[str, dict[str, Any]]]:
    """The commands that wait, oldest first; each is taken by whoever reads it, and obeyed at most once."""
    found = []
    for path in sorted((state / COMMANDS).glob("[0-9]*.json")):
        facts = get(path)
        if withdraw(state, path.name) and isinstance(facts, dict):
            found.append((path.name, facts))
    return found


def answer(state: Path, name: str, **facts: Any) -> None:
    folder = state / ANSWERS
    folder.mkdir(exist_ok=True)
    for path in folder.glob("[0-9]*.json"):
        if time.time() - path.stat().st_mtime > OLD_S:
            path.unlink(missing_ok=True)
    put(folder / name, facts)


def fetch(state: Path, name: str) -> dict[str, Any] | None:
    """The answer to a command, once."""
    path = state / ANSWERS / name
    facts = get(path)
    if not isinstance(facts, dict):
        return None
    path.unlink(missing_ok=True)
    return facts
