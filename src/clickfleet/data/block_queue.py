"""Read and parse the blocks of files in parallel. Their order depends on the files only, not on the number of threads.

Files are distributed round-robin over lanes. A lane reads its files one after another; the lanes take turns.
"""

import os
import threading
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass

from clickfleet.config.machine import cores
from clickfleet.data.formats import Block, Format, OnBad, Parsed
from clickfleet.data.schema import Schema


@dataclass(frozen=True, slots=True)
class Place:
    """The position of a lane: the index of its file, the offset in it, and the number of lines before that offset."""

    file: int = 0
    at: int = 0
    line: int = 0


@dataclass(slots=True)
class BlockResult:
    """A parsed block and its origin. `parsed` is None at the end of a lane."""

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
        self.files = files
        self.busy = self.ended = False
        self.blocks = self._read(form, schema, place)
        """Every block, with the index of its file."""

    def _read(self, form: Format, schema: Schema, place: Place) -> Generator[tuple[int, Block]]:
        for file in range(place.file, len(self.files)):
            at = place.at if file == place.file else 0
            for block in form.blocks(self.files[file], schema, at):
                yield file, block


class Blocks:
    """Yields the blocks of all lanes in turn. `threads` threads read and parse ahead; with 0, the caller does it on demand.

    Every block has a ticket: ticket t belongs to lane t mod n, and blocks are returned in the order of tickets. If a core is
    free, a caller that would have to wait fetches a block itself.
    """

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
        self._form = form
        self._on_bad = on_bad
        self._ahead_rows = ahead_rows
        self._ahead_blocks = threads + 2
        self._ahead = 0  # tickets drawn whose block is not yet taken
        self._next_ticket = self._wanted = turn
        self._ready: dict[int, BlockResult] = {}
        self._rows_ready = 0
        self._state = threading.Lock()
        self._work_left = threading.Condition(self._state)  # the fetching threads wait for this
        self._arrived = threading.Condition(self._state)  # the caller waits for this
        self._stop = False
        local = all(os.path.isfile(path) for files in lanes for path in files)  # other files may be slow
        self._helps = local and threads < cores()
        self._threads = [
            threading.Thread(target=self._work, name=f"clickfleet-reader-{i}", daemon=True) for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def __iter__(self) -> Iterator[BlockResult]:
        """Yield blocks in turn. The end of a lane is reported once, as a result without rows."""
        ended: set[int] = set()
        try:
            while len(ended) < len(self._lanes):
                ticket = self._wanted
                self._wanted += 1
                if ticket % len(self._lanes) in ended:
                    continue
                result = self._take(ticket) if self._threads else self._fetch(ticket)
                if result.error is not None:
                    raise result.error
                if result.parsed is None:
                    ended.add(result.lane)
                yield result
        finally:
            self.close()

    def _take(self, ticket: int) -> BlockResult:
        while True:
            with self._state:
                result = self._ready.pop(ticket, None)
                if result is not None:
                    self._rows_ready -= _rows(result)
                    self._ahead -= 1
                    self._work_left.notify()
                    return result
                other = self._draw() if self._helps else None
                if other is None:
                    self._arrived.wait()
            if other is not None:
                self._put(other, self._fetch(other))

    def _work(self) -> None:
        while True:
            with self._state:
                while (ticket := self._draw()) is None:
                    if self._stop or all(lane.ended for lane in self._lanes):
                        self._work_left.notify_all()
                        return
                    self._work_left.wait()
            self._put(ticket, self._fetch(ticket))

    def _put(self, ticket: int, result: BlockResult) -> None:
        with self._state:
            self._ready[ticket] = result
            self._rows_ready += _rows(result)
            self._arrived.notify()

    def _draw(self) -> int | None:
        """Draw the next ticket and reserve its lane. Return None if the lane is busy or the queue is full."""
        full = self._ahead >= self._ahead_blocks and self._rows_ready >= self._ahead_rows
        if self._stop or full or all(lane.ended for lane in self._lanes):
            return None
        while self._lanes[self._next_ticket % len(self._lanes)].ended:
            self._next_ticket += 1
        lane = self._lanes[self._next_ticket % len(self._lanes)]
        if lane.busy:
            return None
        lane.busy = True
        self._ahead += 1
        self._next_ticket += 1
        return self._next_ticket - 1

    def _fetch(self, ticket: int) -> BlockResult:
        index = ticket % len(self._lanes)
        lane = self._lanes[index]
        result = BlockResult(index, len(lane.files), "", 0, 0, 0, None)
        following: tuple[int, Block] | None = None
        try:
            following = next(lane.blocks, None)
        except BaseException as error:
            result.error = error
        with self._state:
            lane.busy, lane.ended = False, following is None and result.error is None
            self._work_left.notify()
            if self._helps:
                self._arrived.notify()
        if following is None:
            return result
        result.file, block = following
        result.path, result.at, result.end, result.size = lane.files[result.file], block.at, block.end, block.size
        try:
            result.parsed = block.parse(self._on_bad)
        except BaseException as error:
            result.error = error
        return result

    def close(self) -> None:
        """Stop the threads and close the files."""
        with self._state:
            self._stop = True
            self._work_left.notify_all()
        for thread in self._threads:
            while thread.is_alive():
                thread.join(timeout=1)
                self._form.cancel({path for lane in self._lanes for path in lane.files})
        for lane in self._lanes:
            lane.blocks.close()


def _rows(result: BlockResult) -> int:
    return 0 if result.parsed is None else len(result.parsed.batch)
