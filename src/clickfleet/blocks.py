"""Files -> parsed blocks in an order that depends on nothing but the files: the threads only decide how soon they come.

Files are dealt to lanes like cards; a lane reads its files one after the other, and blocks are taken from the lanes by
turns.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from clickfleet.formats import Block, Format, OnBad, Parsed
from clickfleet.schema import Schema


@dataclass(frozen=True, slots=True)
class Place:
    """Where a lane stands: which of its files, the position in it, and the number of the line there."""

    file: int = 0
    at: int = 0
    line: int = 0  # lines before it


@dataclass(slots=True)
class Taken:
    """A parsed block, with where it came from; `parsed` is None when its lane has no more."""

    lane: int
    file: int
    path: str
    at: int
    end: int
    size: int
    parsed: Parsed | None
    error: BaseException | None = None


class _Lane:
    def __init__(self, files: Sequence[str], form: Format, schema: Schema, place: Place) -> None:
        self.lock = threading.Lock()
        self.files = files
        self._blocks = self._read(form, schema, place)

    def _read(self, form: Format, schema: Schema, place: Place) -> Iterator[tuple[int, Block]]:
        for file in range(place.file, len(self.files)):
            at = place.at if file == place.file else 0
            for block in form.blocks(self.files[file], schema, at):
                yield file, block

    def next(self) -> tuple[int, Block] | None:
        return next(self._blocks, None)

    def close(self) -> None:
        self._blocks.close()  # type: ignore[attr-defined]


class Blocks:
    """The blocks of all lanes by turns, read and parsed ahead by `threads` threads (0: none, on demand)."""

    def __init__(
        self,
        lanes: Sequence[Sequence[str]],
        form: Format,
        schema: Schema,
        places: Sequence[Place],
        *,
        turn: int,
        threads: int,
        on_bad: OnBad,
        ahead_rows: int = 0,
    ) -> None:
        self._lanes = [_Lane(files, form, schema, place) for files, place in zip(lanes, places, strict=True)]
        self._on_bad = on_bad
        self._ahead_rows = ahead_rows
        self._ahead_blocks = threads + 2
        self._ticket = self._wanted = turn
        self._ready: dict[int, Taken] = {}
        self._rows_ready = 0
        self._order = threading.Lock()  # held while taking a ticket, so that a lane is read in the order of tickets
        self._change = threading.Condition()
        self._stop = False
        self._threads = [
            threading.Thread(target=self._work, name=f"clickfleet-reader-{i}", daemon=True) for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def __iter__(self) -> Iterator[Taken]:
        """Blocks in turn; a lane's end is reported once, as a Taken without rows."""
        ended: set[int] = set()
        try:
            while len(ended) < len(self._lanes):
                if self._wanted % len(self._lanes) in ended and not self._threads:
                    self._wanted += 1
                    continue
                taken = self._take()
                if taken.error is not None:
                    raise taken.error
                if taken.parsed is None:
                    if taken.lane in ended:
                        continue
                    ended.add(taken.lane)
                yield taken
        finally:
            self.close()

    def _take(self) -> Taken:
        ticket = self._wanted
        if not self._threads:
            self._wanted += 1
            return self._fetch(ticket, lambda: None)
        with self._change:
            while ticket not in self._ready:
                self._change.wait()
            taken = self._ready.pop(ticket)
            self._rows_ready -= _rows(taken)
            self._wanted += 1
            self._change.notify_all()
            return taken

    def _work(self) -> None:
        while True:
            self._order.acquire()
            with self._change:
                while not self._stop and not self._may_go():
                    self._change.wait()
                if self._stop:
                    self._order.release()
                    return
            ticket = self._ticket
            self._ticket += 1
            taken = self._fetch(ticket, self._order.release)
            with self._change:
                self._ready[ticket] = taken
                self._rows_ready += _rows(taken)
                self._change.notify_all()

    def _may_go(self) -> bool:
        return self._ticket < self._wanted + self._ahead_blocks or self._rows_ready < self._ahead_rows

    def _fetch(self, ticket: int, let_others: Callable[[], None]) -> Taken:
        index = ticket % len(self._lanes)
        lane = self._lanes[index]
        with lane.lock:
            let_others()
            taken = Taken(index, len(lane.files), "", 0, 0, 0, None)
            try:
                found = lane.next()
            except BaseException as error:
                taken.error = error
                return taken
        if found is None:
            return taken
        taken.file, block = found
        taken.path, taken.at, taken.end, taken.size = lane.files[taken.file], block.at, block.end, block.size
        try:
            taken.parsed = block.parse(self._on_bad)
        except BaseException as error:
            taken.error = error
        return taken

    def close(self) -> None:
        """Stops the threads and closes the files."""
        with self._change:
            self._stop = True
            self._change.notify_all()
        for thread in self._threads:
            thread.join()
        for lane in self._lanes:
            lane.close()


def _rows(taken: Taken) -> int:
    return 0 if taken.parsed is None else len(taken.parsed.batch)
