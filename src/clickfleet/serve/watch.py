"""The watch of a worker: takes over what the updater tells, keeps tokens and counters fresh, and survives every fault.

A fault is logged, counted and shown; the watch tries again, more and more slowly. A worker does not claim what it no longer knows.
"""

import asyncio
import os
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clickfleet.errors import ClickfleetError
from clickfleet.serve import versions
from clickfleet.serve.faults import log_fault

if TYPE_CHECKING:
    from clickfleet.serve.context import Context
    from clickfleet.serve.predictor import Version
    from clickfleet.serve.versions import Status

WATCH_S = 0.05
SAVE_S = 1.0
LONGEST_PAUSE_S = 5.0


@dataclass
class Following:
    """What a worker knows about the process that follows the log, and how old that knowledge is."""

    stale_s: float = 10.0
    looked: float = field(default_factory=time.monotonic)
    """When this worker last looked at what the updater tells."""
    updated: float = field(default_factory=time.monotonic)
    """When the updater last looked at the log."""
    failures: int = 0
    problem: str | None = None
    """The fault of the watch, until it works again."""

    @property
    def age_s(self) -> float:
        """Seconds since what is published was last known."""
        return max(0.0, time.monotonic() - min(self.looked, self.updated))

    @property
    def broken(self) -> bool:
        return self.problem is not None or self.age_s > self.stale_s


class Watch:
    """The tasks of a worker that must never end."""

    def __init__(
        self, context: "Context", open_version: "Callable[[Status], Version]", state: Path, stamp: Any
    ) -> None:
        self.context, self.state = context, state
        self._open, self._stamp = open_version, stamp

    async def run(self) -> None:
        """Until it is cancelled."""
        await asyncio.gather(self._supervise(self._follow, WATCH_S), self._supervise(self._keep, SAVE_S))

    async def _supervise(self, turn: Callable[[], Awaitable[None]], period_s: float) -> None:
        following, pause, mine = self.context.following, period_s, None
        while True:
            await asyncio.sleep(pause)
            try:
                await turn()
            except Exception:
                mine = f"the watch of worker {os.getpid()} failed: {log_fault()}"
                following.failures += 1
                following.problem = mine
                self.context.meter.count("watch_failures")
                pause = min(LONGEST_PAUSE_S, 2 * pause)
            else:
                if mine is not None and following.problem == mine:
                    following.problem = None
                mine, pause = None, period_s

    async def _follow(self) -> None:
        """Takes over a new version; one that cannot be opened is tried again."""
        found = versions.stamp(self.state)
        if found != self._stamp and await self._take_over():
            self._stamp = found
        self.context.following.looked = time.monotonic()

    async def _take_over(self) -> bool:
        context, status = self.context, versions.read(self.state)
        if status is None:
            raise ClickfleetError(f"{self.state / versions.NAME} is gone")
        if not status.same_model(context.status) or context.problem is not None:
            try:
                version = await asyncio.to_thread(self._open, status)
            except ClickfleetError as error:
                if context.problem != str(error):
                    print(f"worker {os.getpid()}: {error}", file=sys.stderr, flush=True)
                context.problem = str(error)
                await asyncio.sleep(SAVE_S)
                return False
            context.batcher.version = version
            context.problem = None
            context.meter.count("switches")
        context.status = status
        return True

    async def _keep(self) -> None:
        context = self.context
        beat = versions.last_beat(self.state)
        if beat is not None:
            context.following.updated = beat
        context.tokens.refresh()
        context.admin.refresh()
        deaths = versions.get(self.state / versions.CHILDREN)
        if isinstance(deaths, dict):
            context.deaths = {str(name): int(n) for name, n in deaths.items()}
        context.save_counts()
