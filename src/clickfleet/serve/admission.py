"""Who is let in: a request waits or is refused before its body is parsed, by what the requests before it are expected to take.

Parsing is most of the work of a large request. A server that parses first and refuses afterwards spends its time on what it refuses.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable

from clickfleet.serve.batching import BusyError, Counts

WINDOW_S = 0.02
"""Expected work that is parsed and scored at once; more waits as bytes."""
AT_ONCE = 2
"""Requests that are let in whatever they take: one is parsed while another is scored."""
REFUSALS_PER_S = 100
LEAST_PAUSE_S, MOST_PAUSE_S = 0.1, 1.0
"""How long the connection of a refused request is not read: `Retry-After` asks for a second."""

SMALL_BYTES = 4096
"""Requests up to this size go in at once: parsing them costs little, and those that wait together are scored together."""


class Admission:
    """Lets requests in by their size, in order; lives on one event loop.

    >>> gate = Admission(0.05, Counts())
    >>> ticket = gate.enter(100_000)  # nobody is inside: at once
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
        self._inside_s = self._line_s = 0.0
        self._line: deque[tuple[float, asyncio.Future[float]]] = deque()
        self._byte_s = 1e-8  # what a byte takes, learned from every request
        self._since = 0.0
        self._now = now
        self._pauses: deque[float] = deque()

    def check(self, size: int) -> None:
        """Refuses before a body is read, where it would be refused after it."""
        wait = self._inside_s + self._line_s
        if self._line and size > SMALL_BYTES and wait > self.max_wait_s:
            raise self.refusal(wait)

    def enter(self, size: int) -> "float | asyncio.Future[float]":
        """A ticket to give back by `leave`; a future of it where the request has to wait."""
        if size <= SMALL_BYTES:
            return 0.0
        cost = size * self._byte_s
        if not self._line and self._has_room(cost):
            self._let_in(cost)
            return cost
        wait = self._inside_s + self._line_s
        if wait > self.max_wait_s:
            raise self.refusal(wait)
        future: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._line.append((cost, future))
        self._line_s += cost
        return future

    async def wait(self, ticket: "asyncio.Future[float]", size: int) -> float:
        """The ticket of a request that had to wait; one whose client is gone is given back."""
        try:
            return await ticket
        except asyncio.CancelledError:
            if ticket.done() and not ticket.cancelled():
                self.leave(ticket.result(), size)
            raise

    def leave(self, ticket: float, size: int) -> None:
        """Learns from a request that is done, and lets in those that wait."""
        if size <= SMALL_BYTES:
            return
        now = self._now()
        took, self._since = now - self._since, now
        self._byte_s += 0.05 * (took / size - self._byte_s)
        self.inside -= 1
        self._inside_s = self._inside_s - ticket if self.inside else 0.0
        while self._line and self._has_room(self._line[0][0]):
            cost, future = self._line.popleft()
            self._line_s = self._line_s - cost if self._line else 0.0
            if not future.done():  # else it was cancelled
                self._let_in(cost)
                future.set_result(cost)

    def pause_s(self) -> float:
        """How long to leave the connection of a refused request unread: the more are refused, the longer."""
        now = self._now()
        while self._pauses and self._pauses[0] < now:
            self._pauses.popleft()
        pause = min(MOST_PAUSE_S, max(LEAST_PAUSE_S, len(self._pauses) / REFUSALS_PER_S))
        self._pauses.append(now + pause)
        return pause

    def _has_room(self, cost: float) -> bool:
        return self.inside < AT_ONCE or self._inside_s + cost <= self._window_s

    def _let_in(self, cost: float) -> None:
        if not self.inside:
            self._since = self._now()
        self.inside += 1
        self._inside_s += cost

    def refusal(self, wait: float = 0.0) -> BusyError:
        self.counts.refused += 1
        return BusyError(max(1.0, wait))
