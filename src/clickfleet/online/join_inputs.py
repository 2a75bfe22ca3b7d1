"""Read show logs and feedback for the join, in folders or Kafka topics, from the place where the last commit stopped.

Every writer of a folder, every file of another program and every partition of a topic is a stream. Each has a clock of its own: the time
of its newest event. A backlog is read in the order of time, a short span after another, and so the same events come to the same rows as if
they had been joined at their time. When everything was read, the clock of a stream without events goes on at the pace of this machine's. So
it does not matter whether the clocks of several servers agree, and neither time in which nobody joined nor time to catch up counts as
waiting.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from clickfleet.config.sections import Kafka
from clickfleet.data.arrow_ipc import numbers
from clickfleet.data.events import FEEDBACK, SHOWS, EventsRead, read_message, topic_of
from clickfleet.errors import ConfigError, DataError
from clickfleet.online.joiner import EventRound, Joiner
from clickfleet.online.passes import Patience
from clickfleet.online.sources.broker import Broker
from clickfleet.store.event_log import EventFolder, LogPlace, StreamReader

READ_ROWS = 8192
"""Rows read ahead of every stream."""
SPANS = 10
"""Events of a backlog are taken in spans of this part of the wait."""
MIN_SPAN_S = 0.1
SKEW_S = 3600.0
"""The clocks of servers may differ by this much: no stream stays further behind the others."""
MAX_AHEAD_S = 86400.0
"""An event is bad if its time is further than this ahead of this machine's clock."""
TOPIC_MESSAGES = 2000
"""Messages of a topic taken at once."""
ALARM_S = 60.0
"""Time between two messages about bad events."""


class _Chunk(NamedTuple):
    """Events read together. `place` is where reading them again begins; `skip` of them were taken."""

    batch: pa.RecordBatch
    clocks: NDArray[np.int64]
    """The clock of the stream at each event; 0 for an event whose time cannot be."""
    place: LogPlace
    skip: int


@dataclass
class EventStream:
    """One stream: what was read of it and not taken yet."""

    name: str
    number: int
    place: LogPlace
    taken: int = 0
    """Everything before the place was taken, and so many events from it on."""
    to_skip: int = 0
    """Events to read again and leave out, because they were taken before a restart."""
    clock_us: int = 0
    """0: there was no event yet."""
    ahead: deque[_Chunk] = field(default_factory=deque)
    rows: int = 0
    """Rows read ahead."""
    ended: bool = False
    """There is nothing more to read at the moment."""
    base: tuple[int, float] | None = None
    """The clock at a time of this machine, from which it goes on while nothing arrives."""

    def add(self, batch: pa.RecordBatch, times: NDArray[np.int64], place: LogPlace, after: LogPlace) -> None:
        skip = min(self.to_skip, len(batch))
        self.to_skip -= skip
        if skip < len(batch):
            self.ahead.append(_Chunk(batch.slice(skip), times[skip:], place, skip))
            self.rows += len(batch) - skip
        elif not self.ahead:
            self.place, self.taken = after, self.to_skip

    @property
    def newest_us(self) -> int:
        """The latest time of the events read ahead."""
        return max(int(chunk.clocks.max()) for chunk in self.ahead)

    @property
    def next_us(self) -> int:
        """The time of the next event read ahead."""
        return int(self.ahead[0].clocks[0])

    def take(self, until_us: int | None) -> list[pa.RecordBatch]:
        """Return the events up to a time, in the order of the stream."""
        taken: list[pa.RecordBatch] = []
        while self.ahead:
            batch, clocks, place, skip = self.ahead[0]
            count, rising = len(batch), np.maximum.accumulate(clocks)
            if until_us is not None:
                count = int(np.searchsorted(rising, until_us, "right"))
            if not count:
                break
            self.clock_us = max(self.clock_us, int(rising[count - 1]))
            good = clocks[:count] > 0
            taken.append(batch.slice(0, count) if good.all() else batch.slice(0, count).filter(pa.array(good)))
            self.rows -= count
            self.place, self.taken = place, skip + count
            if count < len(batch):
                self.ahead[0] = _Chunk(batch.slice(count), clocks[count:], place, skip + count)
                break
            self.ahead.popleft()
        return [batch for batch in taken if len(batch)]


class EventInput(ABC):
    """The streams of one log. `schema` is SHOWS or FEEDBACK."""

    def __init__(self, where: str, schema: pa.Schema, warn: Callable[[str], None], clock: Callable[[], float]) -> None:
        self.where, self.schema, self.warn, self.clock = where, schema, warn, clock
        self.times = "time" if schema is SHOWS else "received"
        """The column with the clock of the server that wrote the log."""
        self.streams: dict[str, EventStream] = {}
        self.bad = 0
        self._alarm_at = 0.0

    @abstractmethod
    def fill(self, number: Callable[[], int]) -> None:
        """Read ahead, and find new streams, which get the next number."""

    @abstractmethod
    def is_gone(self, name: str) -> bool:
        """Return whether a stream can be forgotten: nothing of it can be read again."""

    @abstractmethod
    def close(self) -> None: ...

    def restore(self, saved: Mapping[str, Any]) -> None:
        for name, (number, file, offset, taken, clock_us) in saved.items():
            self.streams[name] = EventStream(name, number, LogPlace(file, offset), taken, taken, clock_us)

    def state(self) -> dict[str, list[int]]:
        """Return the places of all streams, and their clocks."""
        return {
            stream.name: [stream.number, *stream.place, stream.taken, stream.clock_us]
            for stream in self.streams.values()
        }

    def add(self, stream: EventStream, read: EventsRead, place: LogPlace, after: LogPlace) -> None:
        """Read events ahead. Count those that cannot be used."""
        batch, bad, reason = read
        times = numbers(batch.column(self.times), np.int64)
        wrong = (times > (self.clock() + MAX_AHEAD_S) * 1e6) | (times <= 0)
        if wrong.any():
            times = np.where(wrong, 0, times)
            bad, reason = bad + int(wrong.sum()), reason or "its time is in the far future, or before 1970"
        stream.add(batch, times, place, after)
        if bad:
            self.bad += bad
            if time.monotonic() >= self._alarm_at:
                self._alarm_at = time.monotonic() + ALARM_S
                self.warn(f"{self.where}: {self.bad:,} events cannot be used, the last of {stream.name}: {reason}")


class FolderInput(EventInput):
    """A log in a folder."""

    def __init__(self, where: str, schema: pa.Schema, warn: Callable[[str], None], clock: Callable[[], float]) -> None:
        super().__init__(where, schema, warn, clock)
        self.folder = EventFolder(where)
        self._readers: dict[str, StreamReader] = {}
        self._listed: Mapping[str, Any] = {}

    def fill(self, number: Callable[[], int]) -> None:
        self._listed = listed = self.folder.streams()
        for name in listed:
            if name not in self.streams:
                self.streams[name] = EventStream(name, number(), LogPlace())
        for name, stream in self.streams.items():
            if name not in self._readers:
                self._readers[name] = StreamReader(self.folder, name, self.schema, stream.place, self.warn)
            reader = self._readers[name]
            stream.ended = False
            while stream.rows < READ_ROWS:
                before = reader.place
                read = reader.read(listed)
                if read is None:
                    stream.ended = True
                    if not stream.ahead:
                        stream.place, stream.taken = reader.place, stream.to_skip
                    break
                if reader.place.number != before.number and reader.place.offset:  # the first rows of the next file
                    before = LogPlace(reader.place.number)
                self.add(stream, read, before, reader.place)

    def is_gone(self, name: str) -> bool:
        return name not in self._listed

    def close(self) -> None:
        for reader in self._readers.values():
            reader.close()


class TopicInput(EventInput):
    """A log in a Kafka topic. Offsets are kept by the join, not by the broker."""

    def __init__(
        self,
        where: str,
        schema: pa.Schema,
        warn: Callable[[str], None],
        clock: Callable[[], float],
        patience: Callable[[], Patience],
        options: Mapping[str, str | int | float | bool],
    ) -> None:
        super().__init__(where, schema, warn, clock)
        topic = topic_of(where)
        assert topic is not None
        self.patience = patience
        self.broker = Broker(Kafka(*topic, options=dict(options)))
        self._assigned = False

    def fill(self, number: Callable[[], int]) -> None:
        if not self._assigned:
            self._assign(number)
        if sum(stream.rows for stream in self.streams.values()) >= READ_ROWS * len(self.streams):
            return
        records = self.broker.records(self.patience(), within_s=0.0, most=TOPIC_MESSAGES)
        for record in records:
            stream = self.streams[str(record.partition)]
            received = record.time_s if record.time_s > 0 else self.clock()
            read = read_message(record.value, self.schema, round(received * 1e6))
            self.add(stream, read, LogPlace(0, record.offset), LogPlace(0, record.offset + 1))
        for name, stream in self.streams.items():
            stream.ended = not records and self.broker.is_idle(int(name))

    def _assign(self, number: Callable[[], int]) -> None:
        patience = self.patience()
        known = bool(self.streams)
        for partition in self.broker.partitions(patience, known=known):
            name = str(partition)
            low, high = self.broker.held(partition, patience)
            if name not in self.streams:
                self.streams[name] = EventStream(name, number(), LogPlace(0, low))
            stream = self.streams[name]
            if not low <= stream.place.offset <= high:
                raise DataError(
                    f"partition {name} of {self.where} holds offsets {low} to {high}, but the join continues at "
                    f"{stream.place.offset}: retention removed the records, or the topic was created again",
                    "raise the topic's retention; a new store starts from the records that exist",
                )
        self.broker.assign({int(name): stream.place.offset for name, stream in self.streams.items()})
        self._assigned = True

    def is_gone(self, name: str) -> bool:
        return False

    def close(self) -> None:
        self.broker.close()


class JoinInputs:
    """Both logs of a join. `clock` is this machine's, for events of the far future; `elapsed` measures idle time."""

    def __init__(
        self,
        shows: str,
        feedback: str,
        saved: Mapping[str, Any],
        *,
        warn: Callable[[str], None],
        patience: Callable[[], Patience],
        options: Mapping[str, str | int | float | bool] | None = None,
        start_us: int = 0,
        wait_s: float = 30.0,
        clock: Callable[[], float] = time.time,
        elapsed: Callable[[], float] = time.monotonic,
    ) -> None:
        if shows == feedback:
            raise ConfigError("shows and feedback cannot be the same log", "name a folder or topic for each")
        self.start_us, self._elapsed = start_us, elapsed
        self._span_us = round(max(wait_s / SPANS, MIN_SPAN_S) * 1e6)
        self._next = int(saved.get("next", 1))
        self._live = False
        """Whether everything was read the last time."""
        self.skipped = 0
        """Shows from before the start."""
        self.shows, self.feedback = (
            TopicInput(where, schema, warn, clock, patience, options or {})
            if topic_of(where)
            else FolderInput(where, schema, warn, clock)
            for where, schema in ((shows, SHOWS), (feedback, FEEDBACK))
        )
        self.shows.restore(saved.get("shows", {}))
        self.feedback.restore(saved.get("feedback", {}))

    def state(self) -> dict[str, Any]:
        """Return the places of what was taken, for a commit."""
        return {"next": self._next, "shows": self.shows.state(), "feedback": self.feedback.state()}

    def _number(self) -> int:
        self._next += 1
        return self._next - 1

    @property
    def caught_up(self) -> bool:
        """Whether everything that there is was taken."""
        return self._live and not any(stream.ahead for stream in self._streams())

    def take(self) -> EventRound:
        """Return the next events, and the clocks after them. Without new events, the clocks go on if nothing is unread.

        There are no clocks, and so nothing is decided, while feedback cannot be read because a broker is down.
        """
        both = (self.shows, self.feedback)
        for one in both:
            one.fill(self._number)
        until = self._until()
        found = EventRound()
        for stream in self.shows.streams.values():
            for batch in stream.take(until):
                kept = self._after_start(batch)
                if len(kept):
                    found.shows.append((stream.number, kept))
        for stream in self.feedback.streams.values():
            found.feedback += stream.take(until)
        self._follow(until)
        self._advance(all(stream.ended for stream in self._streams()))
        if not any(stream.rows == 0 and not stream.ended for stream in self.feedback.streams.values()):
            found.clocks = {one.number: one.clock_us for one in self.shows.streams.values() if one.clock_us}
        return found

    def _until(self) -> int | None:
        """Return the time up to which events are taken now; None: all that were read.

        No stream is read further than others whose next events are not known, and none by more than a short span.
        """
        ahead = [stream for stream in self._streams() if stream.ahead]
        if not ahead:
            return None
        limit = min(stream.next_us for stream in ahead) + self._span_us
        limit = min([limit, *(stream.newest_us for stream in ahead if not stream.ended)])
        all_ended = all(stream.ended for stream in ahead)
        return None if all_ended and limit >= max(stream.newest_us for stream in ahead) else limit

    def _follow(self, until: int | None) -> None:
        """Move the clocks of streams that have no event up to the time that was taken; if nothing more was read, close to it."""
        if until is None:
            until = max((stream.clock_us for stream in self._streams()), default=0)
        for stream in self._streams():
            if stream.clock_us:
                reached = until if stream.ahead else until - round(SKEW_S * 1e6)
                stream.clock_us = max(stream.clock_us, reached)

    def _after_start(self, shows: pa.RecordBatch) -> pa.RecordBatch:
        if not self.start_us:
            return shows
        kept = numbers(shows.column("time"), np.int64) >= self.start_us
        self.skipped += int((~kept).sum())
        return shows if kept.all() else shows.filter(pa.array(kept))

    def _advance(self, live: bool) -> None:
        """Let the clocks of streams without events go on, while there is nothing to read."""
        now = self._elapsed()
        for stream in self._streams():
            if not stream.clock_us:
                continue
            clock_us, since = stream.base or (stream.clock_us, now)
            if not live or not self._live or stream.base is None or stream.clock_us > clock_us + (now - since) * 1e6:
                stream.base = (stream.clock_us, now)
            else:
                stream.clock_us = max(stream.clock_us, clock_us + round((now - since) * 1e6))
        self._live = live

    def _streams(self) -> Iterable[EventStream]:
        return (*self.shows.streams.values(), *self.feedback.streams.values())

    def forget_gone(self, joiner: Joiner) -> None:
        """Forget streams whose files are gone and whose shows are all decided."""
        for one in (self.shows, self.feedback):
            for name in [name for name in one.streams if one.is_gone(name)]:
                stream = one.streams[name]
                if not stream.ahead and (one is self.feedback or joiner.drop_stream(stream.number)):
                    del one.streams[name]

    def close(self) -> None:
        self.shows.close()
        self.feedback.close()
