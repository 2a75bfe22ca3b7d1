"""The updater: one process that verifies what is published and tells the workers which folders make the next version.

Deltas become layers over the base, at most four; more are merged into new folders, by and by into a new base. An entry that does not
follow the one served (a gap or a fork), whose bytes or golden scores are wrong, is refused: the last good version stays, with the reason.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from clickfleet.errors import CheckpointError, ClickfleetError
from clickfleet.published import LOG, Entry, Line
from clickfleet.serve import layers, versions
from clickfleet.serve.predictor import open_version
from clickfleet.serve.settings import Settings
from clickfleet.serve.stack import Stack
from clickfleet.serve.tail import Tail
from clickfleet.serve.versions import Status


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
        self._wanted = 0.0
        self._client: Any = None

    def start(self) -> Status:
        """The first version; without one there is nothing to serve."""
        if self.following:
            self.tail.refresh()
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
        status = self.status = Status(str(entry.path), list(self.stack.folders), entry.sequence)
        versions.write(status, self.state)
        return status

    def turn(self) -> bool:
        """Looks once; whether anything was told to the workers."""
        pinned = self.status is not None and self.status.pinned
        command = self._command()
        if command is not None:
            return self._obey(command)
        if not self.following:
            return False
        try:
            if not self.tail.refresh() and not self._redis_moved():
                return False
        except ClickfleetError as error:
            return self._complain(str(error), lost=True)
        if pinned:
            self._tell(None, pinned=True)
            return True
        self._tell(self._to_head())
        return True

    def _redis_moved(self) -> bool:
        if self.redis is None or self.serving is None:
            return False
        found = self._redis_head()
        return found is not None and found["hash"] != self.serving.hash

    def _redis_head(self) -> dict[str, Any] | None:
        from clickfleet import redis_rows

        assert self.redis is not None
        if self._client is None:
            self._client = redis_rows.connect(self.redis)
        return redis_rows.head(self._client)

    def _command(self) -> dict[str, Any] | None:
        try:
            facts: dict[str, Any] = json.loads((self.state / "wanted.json").read_text())
        except (OSError, ValueError):
            return None
        if facts["at"] == self._wanted:
            return None
        self._wanted = facts["at"]
        return facts

    def _obey(self, command: dict[str, Any]) -> bool:
        sequence = command.get("sequence")
        if not self.following:
            return self._complain("there is one entry and no log: nothing to go back to", answered=self._wanted)
        try:
            self.tail.refresh()
            if sequence is None:
                self._tell(self._to_head(anew=True), answered=self._wanted)
            else:
                self._jump(int(sequence))
                self._tell(None, pinned=True, answered=self._wanted)
        except ClickfleetError as error:
            return self._complain(str(error), answered=self._wanted)
        return True

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
            except ClickfleetError as error:
                self.stack.folders, self.serving = before, served
                return f"entry {line.sequence} was refused: {error}"
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

    def _tell(self, problem: str | None, pinned: bool = False, answered: float | None = None) -> Status:
        assert self.serving is not None
        status = Status(
            str(self.folder / self.serving.name),
            list(self.stack.folders),
            self.tail.lines[-1].sequence if self.tail.lines else None,
            problem,
            pinned,
            self.status.answered if answered is None and self.status is not None else answered or 0.0,
        )
        versions.write(status, self.state)
        self.status = status
        self.stack.tidy()
        return status

    def _complain(self, problem: str, answered: float | None = None, lost: bool = False) -> bool:
        """Tells a problem; `lost`: the log cannot be read, so nobody knows how far behind this version is."""
        assert self.status is not None
        if self.status.problem == problem and answered is None:
            return False
        self.status = Status(
            self.status.entry,
            self.status.layers,
            None if lost else self.status.head,
            problem,
            self.status.pinned,
            self.status.answered if answered is None else answered,
        )
        versions.write(self.status, self.state)
        return True
