"""Messages between the processes of a server: small JSON files in its state folder, each replaced atomically.

version.json      updater to workers: the version to serve, named by immutable folders
next.json         updater to workers: the version that is about to be published, or the entry that is being written
updater.json      updater to workers: the time of its last successful poll of the log
commands/         worker to updater: commands of an administrator, one file each, executed in order
answers/          updater to the worker that sent the command
children.json     supervisor to workers: how often each process died
trainer.json      trainer of a loop to workers: why it ended
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from clickfleet.data.files import replacing
from clickfleet.errors import CheckpointError, ClickfleetError
from clickfleet.serve.connection import log_fault
from clickfleet.store.file_events import FileEvents
from clickfleet.store.published import EventTimes

if TYPE_CHECKING:
    from clickfleet.serve.context import Context
    from clickfleet.serve.predictor import Version

WATCH_S = 0.05
ACTIVE_WATCH_S = 0.5
"""Time between two looks where the system tells of a new version."""
SAVE_S = 1.0
MAX_PAUSE_S = 5.0


@dataclass
class UpdaterHealth:
    """What a worker knows about the updater, and how old that knowledge is."""

    stale_s: float = 10.0
    checked_at: float = field(default_factory=time.monotonic)
    """When this worker last checked for a new version."""
    polled_at: float = field(default_factory=time.monotonic)
    """When the updater last polled the log."""
    failures: int = 0
    problem: str | None = None
    """The fault of this worker's watch, until it works again."""

    @property
    def age_s(self) -> float:
        """Return the seconds since the state of the log was last known."""
        return max(0.0, time.monotonic() - min(self.checked_at, self.polled_at))

    @property
    def broken(self) -> bool:
        return self.problem is not None or self.age_s > self.stale_s


class VersionWatch:
    """The background tasks of a worker. A fault in one is reported, and the task is retried."""

    def __init__(
        self,
        context: Context,
        open_version: Callable[[Status], Version],
        prepare: Callable[[Coming], None],
        state: Path,
        stamp: Any,
    ) -> None:
        self.context, self.state = context, state
        self._open, self._prepare, self._stamp = open_version, prepare, stamp
        self._next_stamp: Any = None

    async def run(self) -> None:
        """Run until cancelled."""
        with FileEvents([self.state], [VERSION, NEXT]) as events:
            woken = asyncio.Event()

            def wake() -> None:
                if events.take():
                    woken.set()

            loop, period_s = asyncio.get_running_loop(), WATCH_S
            if events.active:
                period_s = ACTIVE_WATCH_S
                loop.add_reader(events.fileno(), wake)
            try:
                await asyncio.gather(
                    self._supervise(self._follow, period_s, woken), self._supervise(self._refresh, SAVE_S)
                )
            finally:
                if events.active:
                    loop.remove_reader(events.fileno())

    async def _supervise(
        self, step: Callable[[], Awaitable[None]], period_s: float, woken: asyncio.Event | None = None
    ) -> None:
        """Repeat a step: periodically, and when it is woken. After a fault, only periodically."""
        health, pause, fault = self.context.updater, period_s, None
        while True:
            if woken is None or fault is not None:
                await asyncio.sleep(pause)
            else:
                with suppress(TimeoutError):
                    await asyncio.wait_for(woken.wait(), pause)
                woken.clear()
            try:
                await step()
            except Exception:
                fault = f"the watch of worker {os.getpid()} failed: {log_fault()}"
                health.failures += 1
                health.problem = fault
                self.context.meter.count("watch_failures")
                pause = min(MAX_PAUSE_S, 2 * pause)
            else:
                if fault is not None and health.problem == fault:
                    health.problem = None
                fault, pause = None, period_s

    async def _follow(self) -> None:
        """Switch to a new version, and prepare for the next one. Retry a version that cannot be opened."""
        coming = stamp(self.state, NEXT)
        if coming != self._next_stamp:
            self._next_stamp = coming
            await self._prepare_next()
        newest = stamp(self.state)
        if newest != self._stamp and await self._switch():
            self._stamp = newest
        self.context.updater.checked_at = time.monotonic()

    async def _prepare_next(self) -> None:
        coming = read_next(self.state)
        if coming is not None and coming.entry != self.context.status.entry:
            with suppress(Exception):  # it is opened again when it is published, and what is wrong with it is told then
                await asyncio.to_thread(self._prepare, coming)

    async def _switch(self) -> bool:
        context, status = self.context, read_status(self.state)
        if status is None:
            raise ClickfleetError(f"{self.state / VERSION} is missing")
        if not status.same_model(context.status) or context.problem is not None:
            try:
                version = await asyncio.to_thread(self._open, status)
            except ClickfleetError as error:
                if context.problem != str(error):
                    print(f"worker {os.getpid()}: {error}", file=sys.stderr, flush=True)
                context.problem = str(error)
                await asyncio.sleep(SAVE_S)
                return False
            served = context.batcher.version.identity.sequence
            context.batcher.version = version
            context.problem = None
            context.meter.count("switches")
            if status.following and not status.pinned:
                context.meter.serve_events(
                    events for sequence, events in status.events.items() if int(sequence) > served
                )
        context.status = status
        return True

    async def _refresh(self) -> None:
        context = self.context
        polled_at = read_heartbeat(self.state)
        if polled_at is not None:
            context.updater.polled_at = polled_at
        context.tokens.refresh()
        context.admin.refresh()
        deaths = read_json(self.state / CHILDREN)
        if isinstance(deaths, dict):
            context.deaths = {str(name): int(n) for name, n in deaths.items()}
        context.save_counts()


VERSION, NEXT, HEARTBEAT = "version.json", "next.json", "updater.json"
CHILDREN, TRAINER = "children.json", "trainer.json"
COMMANDS, ANSWERS = "commands", "answers"
MAX_ANSWER_AGE_S = 60.0
"""Age at which an answer that was not fetched is removed."""


@dataclass(frozen=True)
class Status:
    """The version to serve: an entry for its network and golden requests, and its row folders, newest first."""

    entry: str
    layers: list[str]
    head: int | None
    """The newest published sequence, served or not; None: the log cannot be read."""
    problem: str | None = None
    """Why the newest entry was refused."""
    pinned: bool = False
    """Rolled back by command: newer entries are not applied."""
    revision: int = 0
    """Increases with every status that the updater writes (`told` in the file)."""
    following: bool = False
    """Whether it is from a log that may grow."""
    events: dict[str, EventTimes] = field(default_factory=dict)
    """By sequence: the times of the events in the entries applied last."""
    hash: str = ""
    """Hash of the entry: another one may have had its name. Empty if unknown."""

    def lag(self, sequence: int) -> int | None:
        """Return how many entries were published after `sequence`, or None if unknown."""
        return None if self.head is None else max(0, self.head - sequence)

    def same_model(self, other: Status | None) -> bool:
        return other is not None and (self.entry, self.layers) == (other.entry, other.layers)


@dataclass(frozen=True)
class Coming:
    """The version that is expected next, so that workers can open it before it is published. They do not serve it yet."""

    entry: str
    layers: list[str] = field(default_factory=list)
    """Its row folders, newest first, all verified. Empty: the entry is being written, and has only its network."""


@dataclass(frozen=True)
class Command:
    """An order of an administrator: roll back to a sequence and stay there, or follow the log again."""

    sequence: int | None = None
    """The sequence to roll back to; None: follow the log."""


@dataclass(frozen=True)
class CommandResult:
    sequence: int | None
    hash: str | None
    pinned: bool
    head: int | None
    problem: str | None
    revision: int
    """Revision of the status after the command (`told` in the file)."""


def write_json(path: Path, facts: Any) -> None:
    """Write a file atomically; several processes may write the same file."""
    with replacing(path, mark=str(os.getpid())) as temporary:
        temporary.write_bytes(orjson.dumps(facts))


def read_json(path: Path) -> Any:
    """Return the content of a file, or None if it is missing or incomplete."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def _to_facts(message: Status | CommandResult) -> dict[str, object]:
    values = {one.name: getattr(message, one.name) for one in fields(message)}  # asdict would copy thousands of times
    return {"told" if name == "revision" else name: value for name, value in values.items()}


def _from_facts(facts: Any) -> Any:
    return {"revision" if name == "told" else name: value for name, value in dict(facts).items()}


def write_status(status: Status, state: Path) -> None:
    write_json(state / VERSION, _to_facts(status))


def read_status(state: Path) -> Status | None:
    try:
        return Status(**_from_facts(json.loads((state / VERSION).read_text())))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"cannot read {state / VERSION}: {error}") from None


def write_next(coming: Coming, state: Path) -> None:
    write_json(state / NEXT, asdict(coming))


def read_next(state: Path) -> Coming | None:
    facts = read_json(state / NEXT)
    return Coming(str(facts["entry"]), list(facts["layers"])) if isinstance(facts, dict) else None


def stamp(state: Path, name: str = VERSION) -> tuple[int, int] | None:
    """Return a value that changes whenever version.json, or another file, is replaced."""
    try:
        facts = os.stat(state / name)
    except FileNotFoundError:
        return None
    return facts.st_mtime_ns, facts.st_ino


def write_heartbeat(state: Path) -> None:
    """Record that the updater polled the log successfully."""
    write_json(state / HEARTBEAT, {"pid": os.getpid(), "at": time.monotonic()})


def read_heartbeat(state: Path) -> float | None:
    """Return when the updater last polled the log successfully, by `time.monotonic`."""
    facts = read_json(state / HEARTBEAT)
    at = facts.get("at") if isinstance(facts, dict) else None
    return float(at) if isinstance(at, int | float) and at <= time.monotonic() else None


_commands_sent = 0


def send_command(state: Path, command: Command) -> str:
    """Hand a command to the updater. Return its name, which the answer will have too."""
    global _commands_sent
    _commands_sent += 1
    name = f"{time.time_ns():020d}-{os.getpid()}-{_commands_sent}.json"
    commands(state)
    write_json(state / COMMANDS / name, {} if command.sequence is None else asdict(command))
    return name


def commands(state: Path) -> Path:
    """Return the folder of the commands."""
    (state / COMMANDS).mkdir(exist_ok=True)
    return state / COMMANDS


def withdraw_command(state: Path, name: str) -> bool:
    """Take a command back. Return False if the updater already has it."""
    try:
        (state / COMMANDS / name).unlink()
    except FileNotFoundError:
        return False
    return True


def take_commands(state: Path) -> list[tuple[str, Command]]:
    """Remove the waiting commands and return them, oldest first: each is executed at most once."""
    commands = []
    for path in sorted((state / COMMANDS).glob("[0-9]*.json")):
        facts = read_json(path)
        if withdraw_command(state, path.name) and isinstance(facts, dict):
            commands.append((path.name, Command(facts.get("sequence"))))
    return commands


def write_answer(state: Path, name: str, answer: CommandResult) -> None:
    folder = state / ANSWERS
    folder.mkdir(exist_ok=True)
    for path in folder.glob("[0-9]*.json"):
        if time.time() - path.stat().st_mtime > MAX_ANSWER_AGE_S:
            path.unlink(missing_ok=True)
    write_json(folder / name, _to_facts(answer))


def take_answer(state: Path, name: str) -> CommandResult | None:
    """Remove and return the answer to a command; None if there is none yet."""
    path = state / ANSWERS / name
    facts = read_json(path)
    if not isinstance(facts, dict):
        return None
    path.unlink(missing_ok=True)
    return CommandResult(**_from_facts(facts))
