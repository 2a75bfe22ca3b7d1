"""Requests -> batches without timers: what has arrived when the scorer is free goes together.

Everything parsed in one turn of the event loop is scored in the next. Few rows are scored at once, on the loop itself; many go to
one compute thread while the loop reads on, and what arrives meanwhile is the next batch. A request with many rows travels alone.
The queue is bounded by the time its rows are expected to take.
"""

import asyncio
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from clickfleet.batch import Batch, concatenate
from clickfleet.errors import ClickfleetError
from clickfleet.serve.predictor import Outputs, Version

MERGED_ROWS = 128
"""Most rows of several requests in one batch."""
ALONE_ROWS = 64
"""A request of this size or more is a batch of its own."""
INLINE_ROWS = 128
"""A batch up to this size (a millisecond) is scored on the event loop: handing it over would cost more than it gains."""
QUIET_ROWS = 256
"""The same while nobody else waits."""

_SMALL_ROWS = 16


class BusyError(ClickfleetError):
    """The queue is full; the client may come again after `retry_s`."""

    def __init__(self, retry_s: float) -> None:
        super().__init__("the server is busy", f"come again in {retry_s:.0f} s")
        self.retry_s = retry_s


class LateError(ClickfleetError):
    """The deadline passed before the request was scored."""

    def __init__(self) -> None:
        super().__init__("the deadline passed before the request was scored")


@dataclass(slots=True)
class Scored:
    """The outputs of one request, by which version, and how long it took on this side."""

    outputs: Outputs
    version: Version
    rows: int
    queue_s: float
    compute_s: float


@dataclass(slots=True)
class _Waiting:
    batch: Batch
    version: Version
    future: "asyncio.Future[Scored]"
    arrived: float
    deadline: float


@dataclass
class Counts:
    """What a batcher has done."""

    batches: int = 0
    rows: int = 0
    requests: int = 0
    refused: int = 0
    late: int = 0
    compute_s: float = 0.0


class Batcher:
    """Scores batches of requests by the newest version; lives on one event loop."""

    def __init__(self, version: Version, *, max_queue_s: float = 0.05, merge: bool = True) -> None:
        self.version = version
        self.counts = Counts()
        self.max_queue_s, self.merge = max_queue_s, merge
        self._loop = asyncio.get_running_loop()
        self._queue: deque[_Waiting] = deque()
        self._queued_rows = 0
        self._armed = False
        self._row_s, self._batch_s = 1e-5, 1e-4  # what a row and what a small batch take, learned from every batch
        self._thread = ThreadPoolExecutor(1, "clickfleet-scorer")
        self._now = time.perf_counter

    @property
    def idle(self) -> bool:
        return not self._queue and not self._armed

    def score(self, batch: Batch, version: Version, deadline: float = 0.0) -> "asyncio.Future[Scored]":
        """The outputs of a batch that was made for `version`; `deadline` is a time of `time.perf_counter`, 0: none."""
        future: asyncio.Future[Scored] = self._loop.create_future()
        wait = self._queued_rows * self._row_s + (self._queued_rows // MERGED_ROWS + 1) * self._batch_s
        if wait > self.max_queue_s and self._queue:
            self.counts.refused += 1
            future.set_exception(BusyError(max(1.0, wait)))
            return future
        self._queue.append(_Waiting(batch, version, future, self._now(), deadline))
        self._queued_rows += len(batch)
        if not self._armed:
            self._armed = True
            self._loop.call_soon(self._flush)
        return future

    def _take(self) -> list[_Waiting]:
        """The next requests to be scored together; those too late are told so."""
        taken: list[_Waiting] = []
        rows = 0
        now = self._now()
        while self._queue:
            item = self._queue[0]
            size = len(item.batch)
            if taken and (
                not self.merge
                or size >= ALONE_ROWS
                or rows + size > MERGED_ROWS
                or item.version.schema.hash != taken[0].version.schema.hash
            ):
                break
            self._queue.popleft()
            self._queued_rows -= size
            if item.future.done():  # the client is gone
                continue
            if item.deadline and now > item.deadline:
                self.counts.late += 1
                item.future.set_exception(LateError())
                continue
            taken.append(item)
            rows += size
            if size >= ALONE_ROWS:
                break
        return taken

    def _flush(self) -> None:
        items = self._take()
        if not items:
            self._armed = False
            return
        most = INLINE_ROWS if self._queue else QUIET_ROWS
        if sum(len(item.batch) for item in items) <= most and not self.version.blocking:
            self._finish(items, *self._try(items))
        else:
            self._loop.create_task(self._flush_on_thread(items))

    async def _flush_on_thread(self, items: list[_Waiting]) -> None:
        done = await self._loop.run_in_executor(self._thread, self._try, items)
        self._finish(items, *done)

    def _try(self, items: list[_Waiting]) -> tuple[Any, Version | None, float, float]:
        started = self._now()
        version = self.version
        if version.schema.hash != items[0].version.schema.hash:
            version = items[0].version  # the model changed its inputs while they waited
        try:
            outputs = version.run(concatenate([item.batch for item in items]))
        except Exception as error:
            return error, None, started, self._now()
        return outputs, version, started, self._now()

    def _finish(
        self, items: list[_Waiting], outputs: Any, version: Version | None, started: float, ended: float
    ) -> None:
        rows, counts = sum(len(item.batch) for item in items), self.counts
        took = ended - started
        counts.batches += 1
        counts.rows += rows
        counts.requests += len(items)
        counts.compute_s += took
        if rows < _SMALL_ROWS:
            self._batch_s += 0.1 * (took - self._batch_s)
        else:
            self._row_s += 0.1 * (took / rows - self._row_s)
        at = 0
        for item in items:
            size = len(item.batch)
            if not item.future.done():
                if version is None:
                    item.future.set_exception(outputs)
                else:
                    part = outputs if len(items) == 1 else {k: v[at : at + size] for k, v in outputs.items()}
                    item.future.set_result(Scored(part, version, size, started - item.arrived, took))
            at += size
        if self._queue:
            self._loop.call_soon(self._flush)
        else:
            self._armed = False

    def close(self) -> None:
        self._thread.shutdown(wait=True)
