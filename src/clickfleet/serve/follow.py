"""The updater: one process that verifies what is published and tells the workers which folders make the next version.

Deltas become layers over the base, at most four; more are merged into new folders, by and by into a new base. An entry that does not
follow the one served (a gap or a fork), whose bytes or golden scores are wrong, is refused: the last good version stays, with the reason.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from clickfleet.errors import CheckpointError, ClickfleetError, hide
from clickfleet.published import LOG, Entry, Line
from clickfleet.serve import layers, versions
from clickfleet.serve.faults import log_fault
from clickfleet.serve.predictor import open_version
from clickfleet.serve.settings import Settings
from clickfleet.serve.stack import Stack
from clickfleet.serve.tail import Tail
from clickfleet.serve.versions import Status

RETRY_S, LONGEST_RETRY_S = 2.0, 60.0
"""When to try an entry again that was refused: it may have been copied only in part, or lie on a disk that was away."""


class Updater:
    """Follows a published log, or serves one entry."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.state = Path(settings.state)
        self.folder = Path(settings.model)
        self.following = (self.folder / LOG).is_file()
        self.tail = Tail(self.folder)
        self.stack = Stack(self.state)
        self.rows: layers.Rows = "memory" if settings.rows == "memory" else "mapped"
        self.redis = None if settings.rows in ("mapped", "memory") else settings.rows
        self.serving: Line | None = None
        self.status: Status | None = None
        self.looked = 0.0
        """When it last saw what is published."""
        self._told = 0
        self._retry_at, self._retry_s = 0.0, RETRY_S
        self._client: Any = None

    def start(self) -> Status:
        """The first version; without one there is nothing to serve."""
        before = self._before()
        self._told = 0 if before is None else before.told
        if self.following:
            self.tail.refresh()
            if before is not None and before.pinned:
                self._jump(int(Path(before.entry).name.partition("-")[0]))
                return self._tell(None, pinned=True)
            problem = self._to_head()
            if self.serving is None:
                raise CheckpointError(problem or f"{self.folder} holds no published base")
            return self._tell(problem)
        entry = Entry(self.folder)
        entry.verify()
        if not entry.base:
            raise CheckpointError(f"{self.folder} is a delta", "serve the folder with the log it belongs to, or a base")
        if self.redis is None:
            self.stack.start(entry, self.rows)
            self._check(entry)
        return self._write(Status(str(entry.path), list(self.stack.folders), entry.sequence))

    def _before(self) -> Status | None:
        """What an updater before this one told last: this one stays where it was pinned."""
        try:
            found = versions.read(self.state)
        except ClickfleetError:
            return None
        return found if found is not None and Path(found.entry).parent == self.folder else None

    def turn(self) -> bool:
        """Looks once; whether anything was told to the workers."""
        commands = versions.commands(self.state)
        for name, wanted in commands:
            versions.answer(self.state, name, **self._obey(wanted))
        if commands or not self.following:
            self.looked = time.monotonic()
            return bool(commands)
        pinned = self.status is not None and self.status.pinned
        try:
            news = self.tail.refresh() or self._redis_moved()
            if not self.tail.lines:
                raise CheckpointError(f"{self.tail.log.path} is gone or holds no entries")
            self.looked = time.monotonic()
            if not news and not self._again():
                return False
            self._tell(None, pinned=True) if pinned else self._tell(self._to_head())
        except ClickfleetError as error:
            return self.complain(str(error), lost=True)
        return True

    def _again(self) -> bool:
        """Whether to try what was refused once more."""
        return self.status is not None and self.status.problem is not None and time.monotonic() > self._retry_at

    def _redis_moved(self) -> bool:
        if self.redis is None or self.serving is None:
            return False
        found = self._redis_head()
        return found is not None and found["hash"] != self.serving.hash

    def _redis_head(self) -> dict[str, Any] | None:
        from redis import RedisError

        from clickfleet import redis_rows

        assert self.redis is not None
        try:
            if self._client is None:
                self._client = redis_rows.connect(self.redis)
            return redis_rows.head(self._client)
        except RedisError as error:
            raise CheckpointError(f"cannot read {self.redis}: {error}") from None

    def _obey(self, wanted: dict[str, Any]) -> dict[str, Any]:
        """Goes back to a sequence and stays there, or follows again; what came of it."""
        sequence, refused = wanted.get("sequence"), None
        try:
            if not self.following:
                raise CheckpointError("there is one entry and no log: nothing to go back to")
            self.tail.refresh()
            if sequence is None:
                self._tell(self._to_head(anew=True))
            else:
                self._jump(int(sequence))
                self._tell(None, pinned=True)
        except ClickfleetError as error:
            refused = str(error)
        status = self.status
        assert status is not None
        return {
            "sequence": self.serving.sequence if self.serving is not None else status.head,
            "hash": None if self.serving is None else self.serving.hash,
            "pinned": status.pinned,
            "head": status.head,
            "problem": refused or status.problem,
            "told": status.told,
        }

    def _to_head(self, anew: bool = False) -> str | None:
        """Applies all that can be; the reason where something cannot. `anew` takes a log whose past changed as it is."""
        lines = self.tail.lines
        if self.redis is not None:
            return self._to_redis_head(lines)
        if self.serving is not None and self.serving not in lines:
            compacted = bool(lines) and lines[0].sequence > self.serving.sequence  # retention dropped its line
            if not anew and not compacted:
                return (
                    f"{self.tail.log.path} no longer holds entry {self.serving.sequence}, which is served (a fork); "
                    "POST /admin/follow takes the log as it is now"
                )
            return self._apply(self._from_base(lines))
        at = -1 if self.serving is None else lines.index(self.serving)
        newer = lines[at + 1 :]
        return self._apply(self._from_base(newer) or newer)

    def _to_redis_head(self, lines: Sequence[Line]) -> str | None:
        """Rows are in Redis already: the version is the entry whose rows are there."""
        found = self._redis_head()
        there = [line for line in lines if found is not None and line.hash == found["hash"]]
        if not there:
            held = "nothing" if found is None else f"entry {found['sequence']} of another log"
            return f"{self.redis} holds {held}; fill it: clickfleet publish … --to {self.redis}"
        self.tail.log.entry(there[0]).verify()
        self.serving = there[0]
        return None

    @staticmethod
    def _from_base(lines: Sequence[Line]) -> Sequence[Line]:
        """From the last base on."""
        bases = [i for i, line in enumerate(lines) if line.kind == "base"]
        return lines[bases[-1] :] if bases else []

    def _apply(self, lines: Sequence[Line]) -> str | None:
        """Adds entries one by one; stops at the first that is not sound."""
        for line in lines:
            before, served = list(self.stack.folders), self.serving
            try:
                entry = self.tail.log.entry(line)
                entry.verify()
                if entry.base:
                    self.stack.start(entry, self.rows)
                elif served is None or line.parent != served.hash or line.chain != served.chain:
                    raise CheckpointError(f"entry {line.sequence} does not follow the one that is served")
                else:
                    self.stack.push(entry, self.rows)
                self.serving = line
                if line is lines[-1]:
                    self._check(entry)
            except Exception as error:  # files from elsewhere can be wrong in ways that no check of ours names
                reason = str(error) if isinstance(error, ClickfleetError) else f"{line.name}: {log_fault()}"
                self.stack.folders, self.serving = before, served
                return f"entry {line.sequence} was refused: {reason}"
        return None

    def _check(self, entry: Entry) -> None:
        """Golden requests, in this process, before any worker sees the version."""
        open_version(entry, self.stack.folders, self.rows, opened=dict(self.stack.opened))

    def _jump(self, sequence: int) -> None:
        """The model as it was at a sequence."""
        lines = self.tail.lines
        upto = [i for i, line in enumerate(lines) if line.sequence == sequence]
        if not upto:
            known = f"{lines[0].sequence} to {lines[-1].sequence}" if lines else "none"
            raise CheckpointError(f"the log has no entry {sequence}", f"entries: {known}")
        if self.redis is not None:
            raise CheckpointError("rows in Redis are of one entry", "publish --rollback and fill it again")
        keep = list(self.stack.folders), self.serving
        problem = self._apply(self._from_base(lines[: upto[0] + 1]))
        if problem is not None:
            self.stack.folders, self.serving = keep
            raise CheckpointError(problem)

    def _tell(self, problem: str | None, pinned: bool = False) -> Status:
        assert self.serving is not None
        head = self.tail.lines[-1].sequence if self.tail.lines else None
        path = str(self.folder / self.serving.name)
        self._write(Status(path, list(self.stack.folders), head, problem, pinned, following=True))
        self.stack.tidy()
        assert self.status is not None
        return self.status

    def complain(self, problem: str, lost: bool = False) -> bool:
        """Tells a problem, which does not change what is served; whether it is a new one.

        `lost`: the log cannot be read, so nobody knows how far behind this version is.
        """
        assert self.status is not None
        if self.status.problem == hide(problem):
            self._wait_longer()
            return False
        self._write(replace(self.status, problem=problem, head=None if lost else self.status.head))
        return True

    def _write(self, status: Status) -> Status:
        status = replace(status, problem=None if status.problem is None else hide(status.problem))
        if status.problem is None:
            self._retry_at, self._retry_s = 0.0, RETRY_S
        else:
            self._wait_longer()
        if self.status is None or replace(status, told=self._told) != self.status:
            self._told += 1
            self.status = replace(status, told=self._told)
            versions.write(self.status, self.state)
        return self.status

    def _wait_longer(self) -> None:
        self._retry_at = time.monotonic() + self._retry_s
        self._retry_s = min(LONGEST_RETRY_S, 2 * self._retry_s)
