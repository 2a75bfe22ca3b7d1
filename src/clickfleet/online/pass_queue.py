"""Passes -> sources of batches, in order. While one pass is trained on, the next is found, recorded in the plan and read."""

from __future__ import annotations

import hashlib
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from clickfleet.config.load import Config
from clickfleet.data.batch import Batch, SourceState
from clickfleet.data.dataset import Source, open_source
from clickfleet.data.memory import Feed
from clickfleet.data.reader import Reader
from clickfleet.data.schema import Schema
from clickfleet.errors import DataError
from clickfleet.online.passes import (
    GatheredItems,
    LateFiles,
    Pass,
    PassPlan,
    PassSource,
    Patience,
    Place,
    Position,
    StopWaitingError,
)

AHEAD_BATCHES = 128


class PassReader:
    """Read batches ahead into memory. `whole` reads all of them, so that they can be scored before they are trained on."""

    def __init__(self, source: Source, *, whole: bool = False) -> None:
        self.source, self.schema, self.whole = source, source.schema, whole
        self.epoch = 0
        self.split, self.validation = source.split, source.validation
        self.counters = source.counters
        self._state = source.state()
        self._ready: deque[tuple[Batch, SourceState]] = deque()
        self._change = threading.Condition()
        self._ended = self._stop = False
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start reading. Otherwise reading starts when the first batch is requested."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._read, name="clickfleet-pass", daemon=True)
            self._thread.start()

    def _read(self) -> None:
        stream = iter(self.source)
        try:
            for batch in stream:
                with self._change:
                    while not (self.whole or self._stop) and len(self._ready) >= AHEAD_BATCHES:
                        self._change.wait()
                    if self._stop:
                        return
                    self._ready.append((batch, self.source.state()))
                    self._change.notify_all()
        except BaseException as error:
            self._error = error
        finally:
            if hasattr(stream, "close"):
                stream.close()
            with self._change:
                self._ended = True
                self._change.notify_all()

    def all(self) -> list[Batch]:
        """Wait until all batches are read. Return those that were not handed out yet; iterating still yields them."""
        assert self.whole
        self.start()
        with self._change:
            while not self._ended:
                self._change.wait()
        if self._error is not None:
            raise self._error
        return [batch for batch, _ in self._ready]

    def __iter__(self) -> Iterator[Batch]:
        self.start()
        while True:
            with self._change:
                while not self._ready and not self._ended:
                    self._change.wait()
                if not self._ready:
                    break
                batch, self._state = self._ready.popleft()
                self._change.notify_all()
            yield batch
        if self._error is not None:
            raise self._error

    def state(self) -> SourceState:
        """Return the state of the source after the last batch handed out."""
        return self._state

    def restore(self, state: SourceState, /) -> None:
        """Restore a state. Call this before reading starts."""
        assert self._thread is None
        self.source.restore(state)
        self.counters, self._state = self.source.counters, self.source.state()

    def close(self) -> None:
        with self._change:
            self._stop = True
            self._change.notify_all()
        if self._thread is not None:
            self._thread.join()


Supplied = tuple[Pass, PassReader]
LATE_CHECKED = 8
"""Number of recent passes whose folders are checked for late files."""


class PassQueue:
    """Hand out passes in order, each with a reader that has already started."""

    def __init__(
        self, config: Config, schema: Schema, source: PassSource, folder: Path, log: Callable[[str], None]
    ) -> None:
        self.config, self.schema, self.source, self.folder = config, schema, source, folder
        self._log = log
        self.patience = Patience(log, config.online.poll)
        self._plan = PassPlan(folder / "passes.jsonl")
        source.recall(self._plan.passes())
        self._supplied: Supplied | None = None
        self._late: list[LateFiles] = []
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def after(self, position: Position | None, stop: Callable[[], bool]) -> Supplied | None:
        """Return the pass after a position; None if there are no more, or if `stop` returned True while waiting."""
        self._begin(position)
        assert self._thread is not None
        while self._thread.is_alive():
            self._thread.join(0.1)  # with a timeout: Python handles signals only between bytecodes
            if stop():
                self.patience.cancel()
        self._thread = None
        supplied, self._supplied = self._supplied, None
        error, self._error = self._error, None
        if isinstance(error, StopWaitingError):
            return None
        if error is not None:
            raise error
        return supplied

    def prefetch(self, position: Position) -> None:
        """Start to find the pass after a position, in the background."""
        if self.config.online.prefetch:
            self._begin(position)

    def _begin(self, position: Position | None) -> None:
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._find_next, args=(position,), name="clickfleet-next", daemon=True
            )
            self._thread.start()

    def resume(self, begun: Pass, before: Position | None, state: SourceState) -> Supplied:
        """Reopen a pass that was partly trained on; `before` is the position before it."""
        if begun.is_planned:
            pass_ = self.source.again(begun, self.patience, before)
            if begun.in_files and pass_ != begun:
                raise DataError(
                    f"the files of {begun.name} changed after it was partly trained on",
                    "restore them, or remove the checkpoints written since that pass began",
                )
        else:
            following = self.source.after(before, self.patience)
            if following is None or following.place != begun.place:
                raise DataError(f"the stream does not return {begun.name} again, which was partly trained on")
            pass_ = following
        reader = self.open(pass_)
        self.restore(reader, state)
        reader.start()
        return pass_, reader

    def restore(self, reader: PassReader, state: SourceState) -> None:
        reader.restore(state)

    @property
    def backlog(self) -> int | None:
        """Number of records waiting in the source, if known."""
        return self.source.backlog

    def _find_next(self, position: Position | None) -> None:
        try:
            planned = self._plan.after(position)
            pass_: Pass | None
            if planned is None:
                pass_ = self.source.after(position, self.patience)
            elif planned.skipped:
                pass_ = planned = replace(planned, data=(), sizes=())
            else:
                pass_ = self.source.again(planned, self.patience, position)
            self._late += self.source.late_files([one for one in self._plan.last(LATE_CHECKED) if not one.skipped])
            if pass_ is None:
                return
            # Remove what a run that was killed in this pass left behind: the pass starts again.
            self._quarantine_file(pass_).unlink(missing_ok=True)
            if pass_.is_planned and (planned is None or (pass_.in_files and pass_ != planned)):
                self._plan.add(pass_)
            reader = self.open(pass_)
            reader.start()
            self._supplied = pass_, reader
        except BaseException as error:
            self._error = error

    def open(self, pass_: Pass) -> PassReader:
        """Open the rows of a pass. Its name seeds the shuffling."""
        whole = self.config.online.validate == "pass"
        if pass_.in_files and not pass_.data:
            return PassReader(Feed([], self.schema, self.config.data.batch_rows), whole=whole)
        if isinstance(pass_.data, GatheredItems):
            size = self.config.data.batch_rows
            parts = [part for item in pass_.data.items for part in Feed(item, self.schema, size).parts()]
            return PassReader(Feed(parts, self.schema, size), whole=whole)
        rows = list(pass_.data) if pass_.in_files else pass_.data
        source = open_source(self.reading(pass_), rows, self.schema, labels=True, folder=self.folder)
        if isinstance(source, Reader):
            source.whole = False  # a pass of a stream may have only a few lines
        return PassReader(source, whole=whole)

    def reading(self, pass_: Pass) -> Config:
        """Return the configuration for reading a pass."""
        config, data = self.config, self.config.data
        shuffle = (data.shuffle or "global") if pass_.in_files and config.online.shuffle else 0
        if data.bad_lines == "quarantine" and data.quarantine is None:
            path = self._quarantine_file(pass_)
            data = replace(data, quarantine=str(path))
            path.parent.mkdir(exist_ok=True)
        named = f"{config.train.seed}/{pass_.day}/{pass_.number}".encode()
        seed = int.from_bytes(hashlib.blake2b(named, digest_size=7).digest())
        return replace(
            config,
            data=replace(data, shuffle=shuffle, format=self.source.format or data.format),
            train=replace(config.train, seed=seed),
        )

    def _quarantine_file(self, pass_: Pass) -> Path:
        """Return the file for the bad lines of a pass, if data.quarantine is not set."""
        return self.folder / "quarantine" / f"{pass_.day}-{pass_.number}.txt"

    def forget_before(self, oldest: Place) -> None:
        """Forget the plan of passes that no checkpoint needs."""
        self._plan.forget(oldest)

    def take_late(self) -> list[LateFiles]:
        """Return the late files found since the last call."""
        late, self._late = self._late, []
        return late

    def forget(self) -> None:
        """Drop the prefetched pass, because the stream continues from an earlier position."""
        self._drop()
        self.patience = Patience(self._log, self.config.online.poll)

    def _drop(self) -> None:
        self.patience.cancel()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._supplied is not None:
            self._supplied[1].close()
        self._supplied = self._error = None

    def close(self) -> None:
        self._drop()
        self.source.close()


class AnnouncedPasses(PassQueue):
    """Passes whose files are read by the workers of a cluster."""

    def open(self, pass_: Pass) -> PassReader:
        if not pass_.in_files:
            raise DataError(
                f"{pass_.name} is in memory, but the workers of a cluster read files", "give paths, or use mode local"
            )
        return PassReader(Feed([], self.schema, self.config.data.batch_rows))

    def restore(self, reader: PassReader, state: SourceState) -> None:
        """Do nothing: the workers restore their own positions."""

    def reading(self, pass_: Pass) -> Config:
        """Return the workers' configuration for reading a pass. Each worker writes bad lines to its own file."""
        config = super().reading(pass_)
        return replace(config, data=replace(config.data, quarantine=self.config.data.quarantine))
