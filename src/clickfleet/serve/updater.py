"""The updater: a process that follows a published log and tells the workers which version to serve.

It is woken by the line of a new entry (inotify), and looks at the log every `poll_ms` where the system does not tell.

python -m clickfleet.serve.updater STATE
"""

import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from clickfleet.errors import CheckpointError, ClickfleetError, hide
from clickfleet.serve import overlays, parent, state_folder
from clickfleet.serve.connection import log_fault
from clickfleet.serve.overlays import Stack
from clickfleet.serve.predictor import Version, open_version
from clickfleet.serve.priority import UPDATER_SLICE_S, shorten_slices
from clickfleet.serve.state_folder import Coming, Command, CommandResult, Status
from clickfleet.serve.supervisor import Settings
from clickfleet.store import atomic
from clickfleet.store.file_events import FileEvents
from clickfleet.store.published import LOG, Entry, EventTimes, Line, Log, has_network, name_of
from clickfleet.store.redis_rows import RedisHead

HEARTBEAT_S = 0.5
MAX_PAUSE_S = 5.0
NICENESS = 5
"""Requests have priority, but a new entry must not wait for all of them. Large merges have a lower priority still."""
CHECK_AFTER_S = 0.03
"""Pause before the updater checks the network of an entry that it has announced: the workers, which check it too, need the cores first."""
ENTRIES_TOLD = 16
"""Entries whose event times are part of a status, so that a worker that skips a status misses none."""


def main() -> None:
    settings = Settings.read(sys.argv[1])
    stopped = False

    def stop(*_: object) -> None:
        nonlocal stopped
        stopped = True

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    updater = Updater(settings)
    try:
        updater.start()
    except ClickfleetError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(1)
    shorten_slices(UPDATER_SLICE_S, nice=NICENESS)
    logged, heartbeat_at, pause = None, 0.0, settings.poll_ms / 1e3
    commands = state_folder.commands(updater.state)
    events = FileEvents([updater.folder, commands])
    while not (stopped or parent.is_gone()):
        try:
            updater.poll()
            pause = settings.poll_ms / 1e3
        except Exception:  # whatever happens, the workers keep the last good version
            with suppress(OSError):  # a full disk, perhaps the reason itself
                updater.report_problem(f"the updater failed: {log_fault()}", log_unreadable=True)
            pause = min(MAX_PAUSE_S, 2 * pause)
        if updater.polled_at > heartbeat_at + HEARTBEAT_S:
            heartbeat_at = updater.polled_at
            with suppress(OSError):
                state_folder.write_heartbeat(updater.state)
        problem = updater.status.problem if updater.status else None
        if problem != logged and problem is not None:
            print(f"updater: {problem}", file=sys.stderr, flush=True)
        logged = problem
        writing = updater.writing
        fresh = writing is not None and not events.watches(writing)
        events.keep_only([updater.folder, commands, *([] if writing is None else [writing])])
        events.add(updater.folder)  # it may have been replaced
        if writing is not None and events.add(writing) and fresh:
            continue  # what was written before it was watched caused no event
        events.wait(pause)
    updater.close()


RETRY_S, MAX_RETRY_S = 2.0, 60.0
"""Pause before a refused entry is retried: it may have been copied only in part, or its disk may have been unavailable."""


class Updater:
    """Follow a published log, or serve one entry."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.state = Path(settings.state)
        self.folder = Path(settings.model)
        self.following = (self.folder / LOG).is_file()
        self.log = Log(self.folder)
        self.stack = Stack(self.state)
        self.rows: overlays.Rows = "memory" if settings.rows == "memory" else "mapped"
        self.redis = None if settings.rows in ("mapped", "memory") else settings.rows
        self.serving: Line | None = None
        self.status: Status | None = None
        self.polled_at = 0.0
        """Time of the last successful poll of the log."""
        self._revision = 0
        self._retry_at, self._retry_s = 0.0, RETRY_S
        self._unwritten = False
        """Whether the last status could not be written: the disk was full."""
        self._client: Any = None
        self._checked: Version | None = None
        """The version whose golden requests were tried last."""
        self._factors = 0
        self.writing: Path | None = None
        """The folder of a delta that is being written and has no network yet."""
        self._next: Path | None = None
        """The delta that was announced last, before it had a line: its folder, hidden while it is being written."""
        self._coming: Entry | None = None
        """That delta once it was complete and its rows were verified."""
        self._events: dict[int, EventTimes] = {}
        """By sequence: the events of the entries applied last."""

    def start(self) -> Status:
        """Announce the first version. Raise `CheckpointError` if there is none."""
        before = self._previous_status()
        self._revision = 0 if before is None else before.revision
        if self.following:
            self.log.refresh()
            if before is not None and before.pinned:
                self._load_sequence(int(Path(before.entry).name.partition("-")[0]))
                return self._announce(None, pinned=True)
            problem = self._to_head()
            if self.serving is None:
                raise CheckpointError(problem or f"{self.folder} has no published base")
            self._events.clear()  # they were published before this server was there to serve them
            return self._announce(problem)
        entry = Entry(self.folder)
        entry.verify()
        if not entry.base:
            raise CheckpointError(f"{self.folder} is a delta", "serve a base, or the folder of the published log")
        if self.redis is None:
            self.stack.start(entry, self.rows)
            self._check_golden(entry)
        return self._write(Status(str(entry.path), list(self.stack.folders), entry.sequence))

    def _previous_status(self) -> Status | None:
        """Return the last status of an earlier updater of this log, whose pin stays in force."""
        try:
            status = state_folder.read_status(self.state)
        except ClickfleetError:
            return None
        return status if status is not None and Path(status.entry).parent == self.folder else None

    def poll(self) -> bool:
        """Execute waiting commands, or check the log. Return whether a status was announced."""
        commands = state_folder.take_commands(self.state)
        for name, command in commands:
            state_folder.write_answer(self.state, name, self._execute(command))
        if commands or not self.following:
            self.polled_at = time.monotonic()
            return bool(commands)
        pinned = self.status is not None and self.status.pinned
        try:
            changed = self.log.refresh() or self._redis_moved()
            if self.log.head is None:
                raise CheckpointError(f"{self.log.path} is missing or has no entries")
            self.polled_at = time.monotonic()
            if changed or self._retry_due():
                self._follow(pinned)
            elif self.stack.take_merged():
                self._announce(None if self.status is None else self.status.problem, pinned)
            else:
                self._announce_next(pinned)
                return False
        except ClickfleetError as error:
            return self.report_problem(str(error), log_unreadable=True)
        return True

    def _announce_next(self, pinned: bool) -> None:
        """Tell the workers which delta is about to be published, so that they can open it.

        They open its network while its writer still writes the rows, and all of it while its writer flushes it and adds its line.
        They serve nothing of it before its line is there.
        """
        head, served, self.writing = self.log.head, self.serving, None
        if pinned or self.redis is not None or head is None or served is None or served.hash != head.hash:
            return
        path = self.folder / name_of(head.sequence + 1, "delta")
        hidden = atomic.hidden(path)
        if self._next not in (hidden, path) and hidden.is_dir():
            if has_network(hidden):
                self._write_next(hidden, Coming(str(hidden)))
            else:
                self.writing = hidden
        if self._next != path and path.is_dir():
            self._next, self._coming = path, None
            with suppress(Exception):  # what is wrong with it is told when it has a line
                entry = Entry(path)
                entry.verify(rows_only=True)
                self._write_next(path, Coming(str(path), [str(path), *self.stack.folders]))
                self.stack.prepare(entry, self.rows)
                self._coming = entry

    def _write_next(self, path: Path, coming: Coming) -> None:
        self._next = path
        with suppress(OSError):  # a full disk; the entry is then opened a little later
            state_folder.write_next(coming, self.state)

    def _follow(self, pinned: bool) -> None:
        """Announce the head of the log, unless an earlier version is pinned.

        Every worker tries the golden requests of a version before it serves it. So an entry is announced as soon as its rows are
        verified, and its network is checked here while the workers open it. If it does not fit, what is before it is announced.
        """
        refused = self.status is not None and self.status.problem is not None
        before = list(self.stack.folders), self.serving
        lines = [] if pinned or self.redis is not None else self._missing()
        if isinstance(lines, str) or refused or not lines:
            self._announce(None if pinned else self._to_head(), pinned)
            return
        self._announce(self._apply(lines, check=False))
        served = self.serving
        if served is None or served is before[1]:
            return
        time.sleep(CHECK_AFTER_S)
        try:
            self._check(self.log.entry(served))
        except Exception as error:  # a foreign file can be broken in ways that no check anticipates
            problem = _refusal(served, error)
            self.stack.folders, self.serving = before
            self._events.pop(served.sequence, None)
            self._apply([line for line in lines if line.sequence < served.sequence])
            self._announce(problem)
            return
        self.stack.tidy(self._factors, self.rows)

    def _retry_due(self) -> bool:
        """Return whether it is time to retry a refused entry, or a status that could not be written."""
        if self._unwritten:
            return True
        return self.status is not None and self.status.problem is not None and time.monotonic() > self._retry_at

    def _redis_moved(self) -> bool:
        if self.redis is None or self.serving is None:
            return False
        head = self._redis_head()
        return head is not None and head["hash"] != self.serving.hash

    def _redis_head(self) -> RedisHead | None:
        from redis import RedisError

        from clickfleet.store import redis_rows

        assert self.redis is not None
        try:
            if self._client is None:
                self._client = redis_rows.connect(self.redis)
            return redis_rows.head(self._client)
        except RedisError as error:
            raise CheckpointError(f"cannot read {self.redis}: {error}") from None

    def _execute(self, command: Command) -> CommandResult:
        """Roll back to a sequence and stay there, or follow the log again."""
        refusal = None
        try:
            if not self.following:
                raise CheckpointError("this server serves a single entry, not a log: it cannot roll back or follow")
            self.log.refresh()
            if command.sequence is None:
                self._announce(self._to_head(accept_fork=True))
            else:
                self._load_sequence(int(command.sequence))
                self._announce(None, pinned=True)
        except ClickfleetError as error:
            refusal = str(error)
        status = self.status
        assert status is not None
        return CommandResult(
            sequence=self.serving.sequence if self.serving is not None else status.head,
            hash=None if self.serving is None else self.serving.hash,
            pinned=status.pinned,
            head=status.head,
            problem=refusal or status.problem,
            revision=status.revision,
        )

    def _to_head(self, accept_fork: bool = False) -> str | None:
        """Apply every entry up to the head. Return why one was refused, or None. `accept_fork` allows a log whose past changed."""
        if self.redis is not None:
            return self._to_redis_head()
        lines = self._missing(accept_fork)
        return lines if isinstance(lines, str) else self._apply(lines)

    def _missing(self, accept_fork: bool = False) -> list[Line] | str:
        """Return the entries to apply: those after the served one, or from the last base on. A text tells why there are none."""
        served, head = self.serving, self.log.head
        newer = None if served is None else self.log.after(served.sequence, served.hash)
        if served is not None and newer is None:
            first = self.log.first
            compacted = first is not None and first.sequence > served.sequence  # retention dropped its line
            if not accept_fork and not compacted:
                return (
                    f"{self.log.path} no longer contains the served entry {served.sequence} (a fork); "
                    "POST /admin/follow accepts the log as it is now"
                )
        chain = self.log.chain()
        if newer is None or (chain and head is not None and chain[0].sequence > head.sequence - len(newer)):
            return chain
        return newer

    def _to_redis_head(self) -> str | None:
        """Serve the entry whose rows Redis holds."""
        head = self._redis_head()
        line = None if head is None else self.log.find(head["sequence"])
        if line is None or head is None or line.hash != head["hash"]:
            held = "nothing" if head is None else f"entry {head['sequence']} of another log"
            return f"{self.redis} holds {held}; fill it with clickfleet publish … --to {self.redis}"
        self.log.entry(line).verify()
        self.serving = line
        return None

    def _apply(self, lines: Sequence[Line], check: bool = True) -> str | None:
        """Add entries one by one. Stop at the first invalid one and return why it was refused.

        Of all but the last, only the rows matter: their networks are not even read. Without `check`, nor is that of the last.
        """
        for line in lines:
            before, served = list(self.stack.folders), self.serving
            try:
                entry = self._verified(line)
                if entry.base:
                    self.stack.start(entry, self.rows)
                elif served is None or line.parent != served.hash or line.chain != served.chain:
                    raise CheckpointError(f"entry {line.sequence} does not follow the served entry")
                else:
                    self.stack.push(entry, self.rows)
                self.serving, self._factors = line, int(entry.manifest["factors"])
                self._note_events(entry)
                if line is not lines[-1]:
                    self.stack.tidy(self._factors, self.rows)
                elif check:
                    self._check(entry)
                    self.stack.tidy(self._factors, self.rows)
            except Exception as error:  # a foreign file can be broken in ways that no check anticipates
                self.stack.folders, self.serving = before, served
                self._events.pop(line.sequence, None)
                return _refusal(line, error)
        return None

    def _verified(self, line: Line) -> Entry:
        """Open the entry of a line and verify its rows, unless that was done before it had its line."""
        coming, self._coming = self._coming, None
        if coming is not None and coming.hash == line.hash and coming.path == self.folder / line.name:
            return coming
        entry = self.log.entry(line)
        entry.verify(rows_only=True)
        return entry

    def _check(self, entry: Entry) -> None:
        """Check every byte of an entry, and try its golden requests in this process."""
        entry.verify()
        self._check_golden(entry)

    def _check_golden(self, entry: Entry) -> None:
        opened = dict(self.stack.opened)
        self._checked = open_version(entry, self.stack.folders, self.rows, opened=opened, like=self._checked)

    def _note_events(self, entry: Entry) -> None:
        """Remember the times of the events that an entry has learned."""
        events = entry.info.get("events")
        if events is not None:
            self._events[entry.sequence] = events
        for sequence in sorted(self._events)[:-ENTRIES_TOLD]:
            del self._events[sequence]

    def _load_sequence(self, sequence: int) -> None:
        """Load the model as it was at a sequence."""
        if self.log.find(sequence) is None:
            first, last = self.log.first, self.log.head
            known = "none" if first is None or last is None else f"{first.sequence} to {last.sequence}"
            raise CheckpointError(f"the log has no entry {sequence}", f"entries: {known}")
        if self.redis is not None:
            raise CheckpointError(
                "cannot roll back rows in Redis, which holds a single entry", "run publish --rollback and fill it again"
            )
        before = list(self.stack.folders), self.serving
        problem = self._apply(self.log.chain(sequence))
        if problem is not None:
            self.stack.folders, self.serving = before
            raise CheckpointError(problem)

    def _announce(self, problem: str | None, pinned: bool = False) -> Status:
        assert self.serving is not None
        head = None if self.log.head is None else self.log.head.sequence
        path, events = str(self.folder / self.serving.name), {str(key): value for key, value in self._events.items()}
        status = Status(
            path, list(self.stack.folders), head, problem, pinned, following=True, events=events, hash=self.serving.hash
        )
        status = self._write(status)
        self.stack.remove_unused()
        return status

    def report_problem(self, problem: str, log_unreadable: bool = False) -> bool:
        """Announce a problem, which does not change what is served. Return whether it is a new one.

        `log_unreadable`: the head of the log, and thus the lag, is unknown.
        """
        assert self.status is not None
        if self.status.problem == hide(problem):
            self._back_off()
            return False
        self._write(replace(self.status, problem=problem, head=None if log_unreadable else self.status.head))
        return True

    def _write(self, status: Status) -> Status:
        status = replace(status, problem=None if status.problem is None else hide(status.problem))
        if status.problem is None:
            self._retry_at, self._retry_s = 0.0, RETRY_S
        else:
            self._back_off()
        if self.status is None or replace(status, revision=self._revision) != self.status:
            new = replace(status, revision=self._revision + 1)
            self._unwritten = True
            state_folder.write_status(new, self.state)
            self._revision, self.status, self._unwritten = new.revision, new, False
        return self.status

    def close(self) -> None:
        self.stack.close()

    def _back_off(self) -> None:
        self._retry_at = time.monotonic() + self._retry_s
        self._retry_s = min(MAX_RETRY_S, 2 * self._retry_s)


def _refusal(line: Line, error: Exception) -> str:
    reason = str(error) if isinstance(error, ClickfleetError) else f"{line.name}: {log_fault()}"
    return f"entry {line.sequence} was refused: {reason}"


if __name__ == "__main__":
    main()
