"""Write events to a log from a thread of their own, so that no request waits for a disk or a broker.

The queue is bounded by bytes. Whoever fills it faster than the log takes them loses events, which are counted, or is told to retry.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import pyarrow as pa

from clickfleet.data.events import shows_of, topic_of
from clickfleet.errors import ConfigError, MissingError, hide
from clickfleet.store.event_log import LogWriter, as_message

IDLE_S = 1.0
"""How often a thread without events looks whether a file is old enough to be completed."""
REPORT_S = 60.0
"""Time between two messages about the same problem."""
Entry = TypeVar("Entry")


class EventSink(Protocol):
    """Where events go: record batches, or what else `encode` makes. `write` raises OSError for events that cannot be stored."""

    def write(self, batch: Any, /) -> int: ...
    def settle(self) -> bool:
        """Return whether everything that was written is stored: a broker may still have to take it."""
        ...

    def rotate(self) -> None: ...
    def close(self) -> None: ...


class ConversionError(OSError):
    """Entries could not be turned into columns: a fault of ours."""


class EventQueue(Generic[Entry]):
    """A bounded queue and the thread that writes it. `put` never blocks; call it from one thread only.

    `encode` turns entries into what the sink takes. `done` is called for each group of entries with the error, or None if they are stored.
    """

    def __init__(
        self,
        name: str,
        open_sink: Callable[[], EventSink],
        encode: Callable[[Sequence[Entry]], Any],
        done: Callable[[Sequence[Entry], OSError | None], None],
        *,
        max_bytes: int,
        group_work: int,
    ) -> None:
        self.name, self.max_bytes, self.group_work = name, max_bytes, group_work
        self._encode, self._done, self._open_sink = encode, done, open_sink
        self._waiting: deque[tuple[Entry, int, int]] = deque()
        self._put_bytes = self._taken_bytes = 0
        """Bytes ever put and taken: each is written by one thread only."""
        self._sink: EventSink | None = None
        self._wake = threading.Event()
        self._stopping = False
        self._reported_at = -REPORT_S
        self._thread = threading.Thread(target=self._run, name=f"clickfleet-{name}", daemon=True)
        self._thread.start()

    @property
    def waiting_bytes(self) -> int:
        return self._put_bytes - self._taken_bytes

    def put(self, entry: Entry, work: int, size: int) -> bool:
        """Queue an entry of about `size` bytes. Return False if the queue is full. `work` is compared with `group_work`."""
        if self._put_bytes - self._taken_bytes + size > self.max_bytes:
            return False
        self._put_bytes += size
        self._waiting.append((entry, work, size))
        if not self._wake.is_set():
            self._wake.set()
        return True

    def close(self) -> None:
        """Write what is queued, and close the log."""
        self._stopping = True
        self._wake.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            self._wake.wait(IDLE_S)
            self._wake.clear()
            self._drain()
            if self._stopping and not self._waiting:
                break
        if self._sink is not None:
            self._sink.close()

    def _drain(self) -> None:
        if not self._waiting and self._sink is not None:
            self._guarded(self._sink.rotate)
        while self._waiting:
            group: list[Entry] = []
            work = size = 0
            while self._waiting and (not group or work + self._waiting[0][1] <= self.group_work):
                entry, entry_work, entry_size = self._waiting.popleft()
                group.append(entry)
                work, size = work + entry_work, size + entry_size
            self._write(group)
            self._taken_bytes += size
            time.sleep(0)  # let the event loop run before the next group

    def _write(self, group: Sequence[Entry]) -> None:
        """Write a group of entries. If they cannot be converted, write each alone, so that one does not cost the others."""

        def work() -> None:
            if self._sink is None:
                self._sink = self._open_sink()
            self._sink.write(self._encode(group))

        error = self._guarded(work)
        if isinstance(error, ConversionError) and len(group) > 1:
            for entry in group:
                self._write([entry])
        else:
            self._done(group, error)

    def _guarded(self, work: Callable[[], object]) -> OSError | None:
        """Do some work. Report and return what goes wrong: the server answers whatever happens to its logs."""
        try:
            work()
        except OSError as error:
            self._report(error.strerror or str(error))
            return error
        except Exception as error:
            self._report(f"{type(error).__name__}: {error}")
            return ConversionError(str(error))
        return None

    def _report(self, reason: str) -> None:
        if (now := time.monotonic()) >= self._reported_at + REPORT_S:
            self._reported_at = now
            print(f"{self.name}: cannot write the log: {hide(reason)[:500]}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class LogTarget:
    """Where a log is written and how: a folder, or kafka://BROKERS/TOPIC."""

    where: str
    rotate_bytes: int
    rotate_s: float
    kafka_options: dict[str, str | int | float | bool]

    def open(self, schema: pa.Schema, *, durable: bool, lost: Callable[[int], None]) -> EventSink:
        """Open the log. `lost` is told how many rows a broker did not take in the end."""
        topic = topic_of(self.where)
        if topic is not None:
            return TopicWriter(*topic, self.kafka_options, durable, lost)
        return LogWriter(self.where, schema, rotate_bytes=self.rotate_bytes, rotate_s=self.rotate_s, durable=durable)

    def check(self) -> None:
        """Raise ConfigError if the log cannot be written, before the server starts."""
        if topic_of(self.where) is not None:
            try:
                import confluent_kafka  # noqa: F401
            except ImportError:
                raise MissingError("confluent-kafka, which writes Kafka topics,", "kafka") from None
            return
        if "://" in self.where:
            raise ConfigError(f"cannot write a log to {self.where}", "name a folder, or kafka://BROKERS/TOPIC")
        try:
            Path(self.where).mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"cannot create the folder {self.where} for a log: {error.strerror or error}") from None


MESSAGE_BYTES = 900_000
"""Brokers refuse messages of a megabyte by default."""
DELIVERY_S = 5.0
"""How long an acknowledged event may take to reach the broker."""
PATIENCE_S = 300.0
"""How long other events may take. Beyond it, or beyond the buffer, they are dropped and counted."""
SETTLE_S = 0.2
"""How long the recorder waits at a time for messages to be delivered, before it reads on."""
BUFFER_KIB = 64 << 10


class TopicWriter:
    """A Kafka topic as a log: one message per record batch, shows with a row each. `durable` waits until the brokers have it."""

    def __init__(
        self,
        brokers: str,
        topic: str,
        options: dict[str, str | int | float | bool],
        durable: bool,
        lost: Callable[[int], None],
    ) -> None:
        from confluent_kafka import Producer

        self.topic, self.durable, self._lost = topic, durable, lost
        self._failed = ""
        self._producer: Any = Producer(
            {
                "client.id": "clickfleet",
                "linger.ms": 5,
                "message.timeout.ms": 1000 * (DELIVERY_S if durable else PATIENCE_S),
                "queue.buffering.max.kbytes": BUFFER_KIB,
                "log_level": 0,
                **options,
                "bootstrap.servers": brokers,
            }
        )

    def write(self, batch: pa.RecordBatch) -> int:
        batch = shows_of(batch)
        message = as_message(batch)
        if len(message) > MESSAGE_BYTES and len(batch) > 1:
            half = len(batch) // 2
            return self.write(batch.slice(0, half)) + self.write(batch.slice(half))
        rows = len(batch)
        self._failed = ""

        def delivered(error: Any, _: Any) -> None:
            if error is not None:
                self._failed = str(error.str())
                if not self.durable:
                    self._lost(rows)

        try:
            self._producer.produce(self.topic, value=message, on_delivery=delivered)
        except BufferError:
            self._producer.poll(0)
            raise OSError("Kafka does not take messages, and the buffer for them is full") from None
        if not self.durable:
            self._producer.poll(0)
        elif self._producer.flush(2 * DELIVERY_S) or self._failed:
            raise OSError(f"Kafka did not take the message: {self._failed or 'no answer'}")
        return len(message)

    def settle(self) -> bool:
        return not self._producer.flush(SETTLE_S)

    def rotate(self) -> None:
        self._producer.poll(0)

    def close(self) -> None:
        if waiting := self._producer.flush(DELIVERY_S):
            self._lost(waiting)
