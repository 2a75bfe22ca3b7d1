"""Group requests into batches without timers: whatever is queued when the scorer is free is scored together.

Everything parsed in one iteration of the event loop is scored in the next. A small batch is scored on the loop itself. A large one
runs on a compute thread, and requests that arrive meanwhile form the next batch. A request with many rows is a batch of its own.
The queue is bounded by the expected scoring time of its rows.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from clickfleet.errors import ClickfleetError, ServeError
from clickfleet.serve.features import Rows, join
from clickfleet.serve.predictor import MAX_HISTORY_KEYS, Outputs, Version

WINDOW_S = 0.02
"""Expected work of the requests parsed and scored concurrently. Further requests wait unparsed."""
CONCURRENT = 2
"""Requests admitted whatever their cost: one is parsed while another is scored."""
REFUSALS_PER_S = 100
MIN_PAUSE_S, MAX_PAUSE_S = 0.1, 1.0
"""How long the server stops reading the connection of a refused request; `Retry-After` asks for a second."""
SMALL_BYTES = 4096
"""Requests up to this size are admitted immediately: parsing them is cheap, and they are batched for scoring."""


class AdmissionControl:
    """Admit requests in order, by their size. Use it from one event loop only.

    >>> gate = AdmissionControl(0.05, Counts())
    >>> ticket = gate.enter(100_000)  # no other request is inside: admitted immediately
    >>> gate.inside
    1
    >>> gate.leave(ticket, 100_000)
    >>> gate.inside
    0
    """

    def __init__(self, max_wait_s: float, counts: Counts, now: Callable[[], float] = time.perf_counter) -> None:
        self.max_wait_s, self.counts = max_wait_s, counts
        self.inside = 0
        self._window_s = min(WINDOW_S, max_wait_s / 2)
        self._inside_s = self._waiting_s = 0.0
        self._waiting: deque[tuple[float, asyncio.Future[float]]] = deque()
        self._byte_s = 1e-8  # seconds per byte, updated by every request
        self._last_leave = 0.0
        self._now = now
        self._pauses: deque[float] = deque()

    def check(self, size: int) -> None:
        """Raise `BusyError` before the body is read if `enter` would raise it afterwards."""
        wait = self._inside_s + self._waiting_s
        if self._waiting and size > SMALL_BYTES and wait > self.max_wait_s:
            raise self.refusal(wait)

    def enter(self, size: int) -> float | asyncio.Future[float]:
        """Return a ticket for `leave`, or a future of one if the request has to wait."""
        if size <= SMALL_BYTES:
            return 0.0
        cost = size * self._byte_s
        if not self._waiting and self._has_room(cost):
            self._admit(cost)
            return cost
        wait = self._inside_s + self._waiting_s
        if wait > self.max_wait_s:
            raise self.refusal(wait)
        future: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._waiting.append((cost, future))
        self._waiting_s += cost
        return future

    async def wait(self, ticket: asyncio.Future[float], size: int) -> float:
        """Wait for a ticket. If the client disconnects meanwhile, give the ticket back."""
        try:
            return await ticket
        except asyncio.CancelledError:
            if ticket.done() and not ticket.cancelled():
                self.leave(ticket.result(), size)
            raise

    def leave(self, ticket: float, size: int) -> None:
        """Update the expected cost by a finished request, and admit waiting ones."""
        if size <= SMALL_BYTES:
            return
        now = self._now()
        took, self._last_leave = now - self._last_leave, now
        self._byte_s += 0.05 * (took / size - self._byte_s)
        self.inside -= 1
        self._inside_s = self._inside_s - ticket if self.inside else 0.0
        while self._waiting and self._has_room(self._waiting[0][0]):
            cost, future = self._waiting.popleft()
            self._waiting_s = self._waiting_s - cost if self._waiting else 0.0
            if not future.done():  # otherwise it was cancelled
                self._admit(cost)
                future.set_result(cost)

    def pause_s(self) -> float:
        """Return how long to stop reading the connection of a refused request: the more refusals, the longer."""
        now = self._now()
        while self._pauses and self._pauses[0] < now:
            self._pauses.popleft()
        pause = min(MAX_PAUSE_S, max(MIN_PAUSE_S, len(self._pauses) / REFUSALS_PER_S))
        self._pauses.append(now + pause)
        return pause

    def _has_room(self, cost: float) -> bool:
        return self.inside < CONCURRENT or self._inside_s + cost <= self._window_s

    def _admit(self, cost: float) -> None:
        if not self.inside:
            self._last_leave = self._now()
        self.inside += 1
        self._inside_s += cost

    def refusal(self, wait: float = 0.0) -> BusyError:
        self.counts.refused += 1
        return BusyError(max(1.0, wait))


MERGED_ROWS = 128
"""Maximum rows of a batch with several requests."""
SEPARATE_ROWS = 64
"""A request with at least this many rows is a batch of its own."""
INLINE_ROWS = 128
"""A batch up to this size (about a millisecond) is scored on the event loop: a thread would cost more than it saves."""
QUIET_ROWS = 256
"""The same limit while no other request waits."""
KEYS_PER_ROW = 256
"""Keys of histories, after padding, whose attention takes about as long as the rest of a row. They count as one more row."""
PADDING, SMALL_PADDING = 2, 4096
"""Requests are scored together if that at most doubles the keys of their histories by padding, or adds only so many."""

_SMALL_ROWS = 16


class BusyError(ClickfleetError):
    """The queue is full; the client may retry after `retry_s`."""

    def __init__(self, retry_s: float, what: str = "the server is busy") -> None:
        super().__init__(what, f"retry in {retry_s:.0f} s")
        self.retry_s = retry_s


class LateError(ClickfleetError):
    """The deadline passed before the request was scored."""

    def __init__(self) -> None:
        super().__init__("the deadline passed before the request was scored")


@dataclass(slots=True)
class ScoreResult:
    """The outputs of one request, and the version that computed them."""

    outputs: Outputs
    version: Version


@dataclass(slots=True)
class _QueuedRequest:
    rows: Rows
    version: Version
    future: asyncio.Future[ScoreResult]
    deadline: float
    history_keys: int
    """Of each row, after padding."""
    work: int
    """Expected work, in rows without a history."""

    @property
    def alone(self) -> bool:
        return self.work >= SEPARATE_ROWS


@dataclass
class Counts:
    """The counters of a batcher."""

    batches: int = 0
    rows: int = 0
    requests: int = 0
    refused: int = 0
    late: int = 0
    compute_s: float = 0.0


class Batcher:
    """Score requests in batches by the newest version. Use it from one event loop only."""

    def __init__(self, version: Version, *, max_queue_s: float = 0.05, merge: bool = True) -> None:
        self.version = version
        self.counts = Counts()
        self.max_queue_s, self.merge = max_queue_s, merge
        self._loop = asyncio.get_running_loop()
        self._queue: deque[_QueuedRequest] = deque()
        self._queued_work = 0
        self._scheduled = False
        self._row_s, self._batch_s = 1e-5, 1e-4  # seconds per row and per small batch, updated by every batch
        self._thread = ThreadPoolExecutor(1, "clickfleet-scorer")
        self._now = time.perf_counter

    @property
    def idle(self) -> bool:
        return not self._queue and not self._scheduled

    def score(self, rows: Rows, version: Version, deadline: float = 0.0) -> asyncio.Future[ScoreResult]:
        """Queue rows that were built for `version`. `deadline` is a time of `time.perf_counter`; 0 means none."""
        future: asyncio.Future[ScoreResult] = self._loop.create_future()
        keys, work = 0, len(rows)
        if version.histories:
            keys = version.history_keys(rows)
            work += work * keys // KEYS_PER_ROW
            if len(rows) * keys > MAX_HISTORY_KEYS:
                future.set_exception(_too_long(len(rows), keys))
                return future
        wait = self._queued_work * self._row_s + (self._queued_work // MERGED_ROWS + 1) * self._batch_s
        if wait > self.max_queue_s and self._queue:
            self.counts.refused += 1
            future.set_exception(BusyError(max(1.0, wait)))
            return future
        self._queue.append(_QueuedRequest(rows, version, future, deadline, keys, work))
        self._queued_work += work
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._flush)
        return future

    def _take(self) -> list[_QueuedRequest]:
        """Return the next requests to score together. Fail those whose deadline has passed."""
        taken: list[_QueuedRequest] = []
        rows = work = longest = keys = 0
        now = self._now()
        while self._queue:
            item = self._queue[0]
            size = len(item.rows)
            if taken and (
                not self.merge
                or item.alone
                or work + item.work > MERGED_ROWS
                or item.version.schema.hash != taken[0].version.schema.hash
                or (rows + size) * max(longest, item.history_keys)
                > max(PADDING * (keys + size * item.history_keys), SMALL_PADDING)
            ):
                break
            self._queue.popleft()
            self._queued_work -= item.work
            if item.future.done():  # the client disconnected
                continue
            if item.deadline and now > item.deadline:
                self.counts.late += 1
                item.future.set_exception(LateError())
                continue
            taken.append(item)
            rows, work = rows + size, work + item.work
            longest, keys = max(longest, item.history_keys), keys + size * item.history_keys
            if item.alone:
                break
        return taken

    def _flush(self) -> None:
        items = self._take()
        if not items:
            self._scheduled = False
            return
        limit = INLINE_ROWS if self._queue else QUIET_ROWS
        if sum(item.work for item in items) <= limit and not self.version.blocking:
            self._finish(items, *self._run(items))
        else:
            self._loop.create_task(self._flush_on_thread(items))

    async def _flush_on_thread(self, items: list[_QueuedRequest]) -> None:
        done = await self._loop.run_in_executor(self._thread, self._run, items)
        self._finish(items, *done)

    def _run(self, items: list[_QueuedRequest]) -> tuple[Any, Version | None, float, float]:
        started = self._now()
        version = self.version
        if version.schema.hash != items[0].version.schema.hash:
            version = items[0].version  # the inputs of the model changed while the requests waited
        try:
            outputs = version.run(join([item.rows for item in items]))
        except Exception as error:
            return error, None, started, self._now()
        return outputs, version, started, self._now()

    def _finish(
        self, items: list[_QueuedRequest], outputs: Any, version: Version | None, started: float, ended: float
    ) -> None:
        counts = self.counts
        rows, work = sum(len(item.rows) for item in items), sum(item.work for item in items)
        took = ended - started
        counts.batches += 1
        counts.rows += rows
        counts.requests += len(items)
        counts.compute_s += took
        if work < _SMALL_ROWS:
            self._batch_s += 0.1 * (took - self._batch_s)
        else:
            self._row_s += 0.1 * (took / work - self._row_s)
        at = 0
        for item in items:
            size = len(item.rows)
            if not item.future.done():
                if version is None:
                    item.future.set_exception(outputs)
                else:
                    part = outputs if len(items) == 1 else {k: v[at : at + size] for k, v in outputs.items()}
                    item.future.set_result(ScoreResult(part, version))
            at += size
        if self._queue:
            self._loop.call_soon(self._flush)
        else:
            self._scheduled = False

    def close(self) -> None:
        self._thread.shutdown(wait=True)


def _too_long(rows: int, keys: int) -> ServeError:
    return ServeError(
        f"{rows:,} rows with histories of {keys:,} values are {rows * keys:,} values, more than the server's limit of "
        f"{MAX_HISTORY_KEYS:,}",
        "send several smaller requests, or the rows with long histories alone",
    )
