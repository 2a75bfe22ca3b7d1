"""Feedback: what followed a scored row. An event is acknowledged when it is in the log, so a client may forget it then."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import orjson
import pyarrow as pa

from clickfleet.data.events import FEEDBACK, Feedback, feedback_columns, feedback_of
from clickfleet.errors import ServeError
from clickfleet.serve.batching import BusyError
from clickfleet.serve.counters import Meter
from clickfleet.serve.event_queue import EventQueue, EventSink, LogTarget

MAX_EVENTS = 10_000
"""Maximum events of one request."""
QUEUE_BYTES = 16 << 20
EVENT_BYTES = 300
"""What a queued event takes besides its text."""
GROUP_EVENTS = 4096

_decoder = msgspec.json.Decoder()
_SHAPE = '{"request": "…", "item": "…", "label": {"click": 1}} or {"events": [ … ]}'


class _Sent(NamedTuple):
    """The events of one request, and what waits for them."""

    events: list[Feedback]
    stored: asyncio.Future[None]


def read_feedback(body: bytes) -> list[Feedback]:
    """Return the events of a request: a single one, or a list."""
    try:
        raw = _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ServeError(f"cannot parse the request: {error}", f"send {_SHAPE}") from None
    several = isinstance(raw, dict) and "events" in raw
    if several and (len(raw) > 1 or not isinstance(raw["events"], list)):
        raise ServeError("events must be a list, and the only member", f"send {_SHAPE}")
    given: list[Any] = raw["events"] if several else [raw]
    if not 0 < len(given) <= MAX_EVENTS:
        raise ServeError(f"a request has from 1 to {MAX_EVENTS:,} events, not {len(given):,}")
    now_us, made = time.time_ns() // 1000, secrets.token_urlsafe(12)
    events = []
    for place, one in enumerate(given):
        try:
            events.append(feedback_of(one, now_us, f"{made}-{place}"))
        except ValueError as error:
            raise ServeError(f"event {place}: {error}" if several else str(error), f"send {_SHAPE}") from None
    return events


class FeedbackLog:
    """Stores the feedback that one worker receives. Use it from one event loop only."""

    def __init__(self, target: LogTarget, meter: Meter) -> None:
        self.meter = meter
        self._loop = asyncio.get_running_loop()
        self.queue: EventQueue[_Sent] = EventQueue(
            "feedback",
            lambda: self._open(target),
            self._encode,
            self._written,
            max_bytes=QUEUE_BYTES,
            group_work=GROUP_EVENTS,
        )

    def _open(self, target: LogTarget) -> EventSink:
        return target.open(FEEDBACK, durable=True, lost=lambda rows: None)

    @staticmethod
    def _encode(group: Sequence[_Sent]) -> pa.RecordBatch:
        return feedback_columns(event for sent in group for event in sent.events)

    async def store(self, events: list[Feedback], size: int, timeout_s: float) -> bytes:
        """Wait until events are in the log, and return the reply. Raise `BusyError` if they cannot be stored now."""
        stored: asyncio.Future[None] = self._loop.create_future()
        if not self.queue.put(_Sent(events, stored), len(events), size + EVENT_BYTES * len(events)):
            self.meter.count("feedback_refused", len(events))
            raise BusyError(1.0)
        try:
            async with asyncio.timeout(timeout_s):
                await stored
        except (TimeoutError, OSError):
            self.meter.count("feedback_refused", len(events))
            raise StorageError from None
        self.meter.count("feedback_logged", len(events))
        return orjson.dumps({"accepted": len(events)})

    def _written(self, group: Sequence[_Sent], error: OSError | None) -> None:
        self._loop.call_soon_threadsafe(_finish, group, error)

    def close(self) -> None:
        self.queue.close()


class StorageError(BusyError):
    """The log did not take the events. The client may send them again."""

    def __init__(self) -> None:
        super().__init__(5.0, "the feedback cannot be stored at the moment")


def _finish(group: Sequence[_Sent], error: OSError | None) -> None:
    for sent in group:
        if sent.stored.done():  # the client disconnected, or waited too long
            continue
        if error is None:
            sent.stored.set_result(None)
        else:
            sent.stored.set_exception(OSError(str(error)))
