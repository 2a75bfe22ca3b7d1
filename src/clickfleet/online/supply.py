"""Passes -> sources of batches, one after the other; the next one is found, written down and read while this one is trained on."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from clickfleet.config import Config
from clickfleet.errors import DataError
from clickfleet.feeds import Feed
from clickfleet.online.ahead import Ahead
from clickfleet.online.passes import (
    LateFiles,
    Pass,
    PassSource,
    Patience,
    Plan,
    Position,
    StopWaitingError,
)
from clickfleet.opening import open_source
from clickfleet.reader import Reader
from clickfleet.schema import Schema

Supplied = tuple[Pass, Ahead]
LOOK_BACK = 8
"""Passes whose folders are looked at again."""


class Supply:
    """Hands out passes in order, each with its rows on their way."""

    def __init__(
        self, config: Config, schema: Schema, source: PassSource, folder: Path, say: Callable[[str], None]
    ) -> None:
        self.config, self.schema, self.source, self.folder = config, schema, source, folder
        self._say = say
        self.patience = Patience(say, config.online.poll)
        self._plan = Plan(folder / "passes.jsonl")
        self._found: Supplied | None = None
        self._late: list[LateFiles] = []
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def after(self, position: Position | None, stop: Callable[[], bool]) -> Supplied | None:
        """The pass that follows; None when there are no more, or when `stop` said that waiting is over."""
        self._begin(position)
        assert self._thread is not None
        while self._thread.is_alive():
            self._thread.join(0.1)  # not for ever: a signal reaches Python only between two of its steps
            if stop():
                self.patience.call_off()
        self._thread = None
        found, self._found = self._found, None
        error, self._error = self._error, None
        if isinstance(error, StopWaitingError):
            return None
        if error is not None:
            raise error
        return found

    def prefetch(self, position: Position) -> None:
        """Begins to look for the pass after a position in the background."""
        if self.config.online.prefetch:
            self._begin(position)

    def _begin(self, position: Position | None) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._look, args=(position,), name="clickfleet-next", daemon=True)
            self._thread.start()

    def resume(self, begun: Pass, before: Position | None, reader: dict[str, Any]) -> Supplied:
        """A pass that was partly trained on; `before` is the position it followed."""
        if begun.in_files:
            found: Pass | None = self.source.again(begun, self.patience)
            if found != begun:
                raise DataError(
                    f"the files of {begun.name} are not as they were, and it is partly trained on",
                    "put them back; or remove the checkpoints made since that pass began",
                )
        else:
            found = self.source.after(before, self.patience)
            if found is None or (found.day, found.number) != (begun.day, begun.number):
                raise DataError(f"the stream does not give {begun.name} again, which is partly trained on")
        ahead = self.open(found)
        self.restore(ahead, reader)
        ahead.start()
        return found, ahead

    def restore(self, ahead: Ahead, reader: dict[str, Any]) -> None:
        ahead.restore(reader)

    @property
    def backlog(self) -> int | None:
        """Records that wait in the source, where it knows."""
        return self.source.backlog

    def _look(self, position: Position | None) -> None:
        try:
            planned = self._plan.after(position)
            if planned is not None:
                found: Pass | None = self.source.again(planned, self.patience)
            else:
                found = self.source.after(position, self.patience)
            self._late += self.source.late_files(self._plan.last(LOOK_BACK))
            if found is None:
                return
            self._aside(found).unlink(missing_ok=True)  # of a run that was killed in this pass: it begins again
            if found.in_files and found != planned:
                self._plan.add(found)
            ahead = self.open(found)
            ahead.start()
            self._found = found, ahead
        except BaseException as error:
            self._error = error

    def open(self, found: Pass) -> Ahead:
        """The rows of a pass, shuffled by its name."""
        whole = self.config.online.validate == "pass"
        if found.in_files and not found.data:
            return Ahead(Feed([], self.schema, self.config.data.batch_size), whole=whole)
        rows = list(found.data) if found.in_files else found.data
        source = open_source(self.reading(found), rows, self.schema, labels=True, folder=self.folder)
        if isinstance(source, Reader):
            source.whole = False  # of a stream: a pass may be a few lines
        return Ahead(source, whole=whole)

    def reading(self, found: Pass) -> Config:
        """How the rows of a pass are read."""
        config, data = self.config, self.config.data
        shuffle = (data.shuffle or "global") if found.in_files and config.online.shuffle else 0
        if data.bad_lines == "quarantine" and data.quarantine is None:
            aside = self._aside(found)
            data = replace(data, quarantine=str(aside))
            aside.parent.mkdir(exist_ok=True)
        named = f"{config.train.seed}/{found.day}/{found.number}".encode()
        seed = int.from_bytes(hashlib.blake2b(named, digest_size=7).digest())
        return replace(
            config,
            data=replace(data, shuffle=shuffle, format=self.source.format or data.format),
            train=replace(config.train, seed=seed),
        )

    def _aside(self, found: Pass) -> Path:
        """Where the bad lines of a pass are kept, unless data.quarantine says."""
        return self.folder / "quarantine" / f"{found.day}-{found.number}.txt"

    def take_late(self) -> list[LateFiles]:
        """Files that came or changed after they were read, as far as they were not told yet."""
        late, self._late = self._late, []
        return late

    def forget(self) -> None:
        """Drops what was found ahead: the stream is to be followed from an earlier position."""
        self._drop()
        self.patience = Patience(self._say, self.config.online.poll)

    def _drop(self) -> None:
        self.patience.call_off()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._found is not None:
            self._found[1].close()
        self._found = self._error = None

    def close(self) -> None:
        self._drop()
        self.source.close()


class Announced(Supply):
    """Passes in files that others read."""

    def open(self, found: Pass) -> Ahead:
        if not found.in_files:
            raise DataError(
                f"{found.name} is in memory, and the workers of a cluster read files", "give paths, or use mode local"
            )
        return Ahead(Feed([], self.schema, self.config.data.batch_size))

    def restore(self, ahead: Ahead, reader: dict[str, Any]) -> None:
        """The workers know how far they are."""

    def reading(self, found: Pass) -> Config:
        """How the workers read a pass; each keeps bad lines in a file of its own."""
        given = self.config.data.quarantine
        config = super().reading(found)
        return replace(config, data=replace(config.data, quarantine=given))
