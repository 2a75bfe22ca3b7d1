"""A client of one Kafka topic. It assigns partitions itself, so group rebalances and poll intervals do not affect it."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from clickfleet.config.sections import Kafka
from clickfleet.data.bad_lines import RecordOrigin
from clickfleet.errors import DataError, MissingError
from clickfleet.online.passes import Patience

POLL_S = 0.2
MOST_RECORDS = 10_000
PROMPT_MS = 50
"""Longest time that a broker waits for more records before it answers, where passes are short."""
CHECK_S = 5.0
"""Seconds without a record after which the client asks whether the topic still exists. The broker reports a deletion only after minutes."""
SURE = 3
"""Consecutive answers that a topic does not exist before it counts as deleted. A broker that just started may not know it yet."""
_NOISE = re.compile(r" \(after \d+ms in state .*\)$")


class Record(NamedTuple):
    """The parts of a message that are used."""

    topic: str
    partition: int
    offset: int
    time_s: float
    """Negative if the record has no timestamp."""
    value: bytes
    """Also empty for a tombstone."""

    @property
    def origin(self) -> RecordOrigin:
        return RecordOrigin(self.topic, self.partition, self.offset)

    @property
    def place(self) -> str:
        return str(self.origin)


class Broker:
    """Read records of assigned partitions. Wait for a broker that is down; raise DataError if the topic was deleted."""

    def __init__(self, config: Kafka, prompt: bool = False) -> None:
        self.config, self.prompt = config, prompt
        """`prompt`: a broker answers soon even if there are only a few records."""
        self._ended: set[int] = set()
        self._consumer: Any = None
        self._down: str | None = None
        self._checked_s = time.monotonic()
        self._missed = 0
        """Consecutive answers that the topic does not exist."""

    @property
    def client(self) -> Any:
        if self._consumer is None:
            try:
                from confluent_kafka import Consumer
            except ImportError:
                raise MissingError("confluent-kafka, which reads Kafka topics,", "kafka") from None
            settings = {
                "client.id": "clickfleet",
                **({"fetch.wait.max.ms": PROMPT_MS} if self.prompt else {}),
                **self.config.options,
                "bootstrap.servers": self.config.brokers,
                "group.id": "clickfleet",  # required by librdkafka; nothing is committed to it
                "enable.auto.commit": False,
                "enable.auto.offset.store": False,
                "enable.partition.eof": True,
                "auto.offset.reset": "error",
                "allow.auto.create.topics": False,
                "error_cb": self._on_error,
            }
            silent = logging.getLogger("clickfleet.kafka")
            silent.addHandler(logging.NullHandler())
            silent.propagate = False
            self._consumer = Consumer(settings, logger=silent)
        return self._consumer

    def _on_error(self, error: Any) -> None:
        self._down = _plain(error)

    def partitions(self, patience: Patience, known: bool = False) -> list[int]:
        """Return the numbers of the topic's partitions. Wait for a missing topic, unless it is `known` to have existed."""
        name = self.config.topic
        self._missed = 0

        def ask() -> list[int] | str:
            topic = self.client.list_topics(name, timeout=5).topics[name]
            if topic.error is None and topic.partitions:
                return sorted(topic.partitions)
            self._note(topic.error, known)
            return f"topic {name}: {'no partitions' if topic.error is None else _plain(topic.error)}"

        return list(self._ask(ask, patience))

    def _note(self, error: Any, known: bool = True) -> None:
        """Count consecutive answers that the topic does not exist. Raise DataError after `SURE` of them."""
        from confluent_kafka import KafkaError

        gone = error is not None and error.code() in (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC)
        self._missed = self._missed + 1 if gone else 0
        if known and self._missed >= SURE:
            raise DataError(
                f"the topic {self.config.topic} no longer exists in Kafka at {self.config.brokers}",
                "the run folder keeps what was trained; start a new run on another topic, "
                "or on this one after it was created again",
            )

    def _check_topic(self) -> None:
        """Ask whether the topic still exists."""
        from confluent_kafka import KafkaException

        name = self.config.topic
        try:
            error = self.client.list_topics(name, timeout=5).topics[name].error
            self._down = None if error is None else f"topic {name}: {_plain(error)}"
            self._note(error)
        except KafkaException as failure:
            self._down = self._down or _plain(failure.args[0])

    def held(self, partition: int, patience: Patience) -> tuple[int, int]:
        """Return the first offset of a partition, and the one after the last."""

        def ask() -> tuple[int, int]:
            from confluent_kafka import TopicPartition

            low, high = self.client.get_watermark_offsets(TopicPartition(self.config.topic, partition), timeout=5)
            return low, high

        low, high = self._ask(ask, patience)
        return low, high

    def _ask(self, ask: Any, patience: Patience) -> Any:
        """Repeat a question until it has an answer. A string is a reason to wait."""
        client = self.client
        from confluent_kafka import KafkaException

        assert client is not None
        while True:
            try:
                if not isinstance(answer := ask(), str):
                    return answer
            except KafkaException as error:
                answer = _plain(error.args[0])
            patience.wait(f"Kafka at {self.config.brokers}: {answer}")

    def assign(self, offsets: Mapping[int, int]) -> None:
        """Continue reading at these offsets."""
        from confluent_kafka import TopicPartition

        self._ended.clear()
        self.client.assign([TopicPartition(self.config.topic, p, offset) for p, offset in offsets.items()])

    def is_idle(self, partition: int) -> bool:
        """Return whether a partition has nothing to read at the moment. This is unknown, hence False, while the broker is down."""
        return partition in self._ended and self._down is None

    def waiting(self, offsets: Mapping[int, int]) -> int:
        """Return how many records the topic holds from these offsets on, as far as the client knows."""
        from confluent_kafka import KafkaException, TopicPartition

        total = 0
        for partition, offset in offsets.items():
            try:
                known = self.client.get_watermark_offsets(TopicPartition(self.config.topic, partition), cached=True)
            except KafkaException:
                continue
            if known is not None:
                total += max(0, known[1] - offset)
        return total

    def records(self, patience: Patience, within_s: float | None = None, most: int = MOST_RECORDS) -> list[Record]:
        """Return the records that arrive within a short time, at most so many. With `within_s`, return as soon as there are any."""
        from confluent_kafka import KafkaError

        patience.check()
        if within_s is None:
            messages = self.client.consume(most, POLL_S)
        else:
            messages = self.client.consume(1, min(within_s, POLL_S))
            messages += self.client.consume(most - 1, 0) if messages else []
        records = []
        for message in messages:
            error, partition = message.error(), message.partition()
            if error is None:
                self._down = None
                self._ended.discard(partition)
                place = message.topic(), partition, message.offset()
                records.append(Record(*place, message.timestamp()[1] / 1000, message.value() or b""))
            elif error.code() == KafkaError._PARTITION_EOF:
                self._ended.add(partition)
            elif error.code() in (KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE):
                raise DataError(
                    f"partition {partition} of {self.config.topic} no longer has the next offset ({_plain(error)}): "
                    "retention removed the records, or the topic was created again",
                    "raise the topic's retention; a new run starts from the records that exist",
                )
            else:
                self._down = _plain(error)
        now = time.monotonic()
        if records:
            self._checked_s = now
        elif now - self._checked_s >= CHECK_S:
            self._checked_s = now
            self._check_topic()
        if not messages and self._down is not None:
            patience.wait(f"Kafka at {self.config.brokers}: {self._down}")
        return records

    def close(self) -> None:
        if self._consumer is not None:
            self._consumer.close()
            self._consumer = None


def _plain(error: Any) -> str:
    """Return an error of librdkafka without the parts that change each time."""
    return _NOISE.sub("", str(error.str()))
