"""A client of one Kafka topic: partitions by assignment, so that no group's rebalance or poll interval concerns it."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from clickfleet.errors import DataError, MissingError
from clickfleet.line_places import Origin
from clickfleet.online.passes import Patience
from clickfleet.sections import Kafka

POLL_S = 0.2
LOOK_S = 5.0
"""After so long without a record the broker is asked whether the topic is still there: a client is not told for minutes."""
SURE = 3
"""Answers that a topic is not there until it is believed: a broker that has just started may not know yet."""
_NOISE = re.compile(r" \(after \d+ms in state .*\)$")


class Record(NamedTuple):
    """What is kept of a message."""

    topic: str
    partition: int
    offset: int
    time_s: float
    """Below 0 where the record has no timestamp."""
    value: bytes
    """Empty for a tombstone too."""

    @property
    def origin(self) -> Origin:
        return Origin(self.topic, self.partition, self.offset)

    @property
    def place(self) -> str:
        return str(self.origin)


class Broker:
    """Reads records of assigned partitions; what is down is waited for, what is gone is an error."""

    def __init__(self, config: Kafka) -> None:
        self.config = config
        self._ended: set[int] = set()
        self._consumer: Any = None
        self._down: str | None = None
        self._looked = time.monotonic()
        self._missed = 0
        """Answers in a row that the topic is not there."""

    @property
    def client(self) -> Any:
        if self._consumer is None:
            try:
                from confluent_kafka import Consumer
            except ImportError:
                raise MissingError("confluent-kafka, which reads Kafka topics,", "kafka") from None
            settings = {
                "client.id": "clickfleet",
                **self.config.options,
                "bootstrap.servers": self.config.brokers,
                "group.id": "clickfleet",  # librdkafka wants one; nothing is ever committed to it
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
        """The numbers of the topic's partitions; one that is not there is waited for, unless it is known to have been."""
        name = self.config.topic
        self._missed = 0

        def ask() -> list[int] | str:
            found = self.client.list_topics(name, timeout=5).topics[name]
            if found.error is None and found.partitions:
                return sorted(found.partitions)
            self._note(found.error, known)
            return f"topic {name}: {'no partitions' if found.error is None else _plain(found.error)}"

        return list(self._insist(ask, patience))

    def _note(self, error: Any, known: bool = True) -> None:
        """Counts answers that a topic is gone, and believes them at last."""
        from confluent_kafka import KafkaError

        gone = error is not None and error.code() in (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC)
        self._missed = self._missed + 1 if gone else 0
        if known and self._missed >= SURE:
            raise DataError(
                f"the topic {self.config.topic} is gone from Kafka at {self.config.brokers}",
                "what was trained on is in the run folder; start a new run on another topic, "
                "or on this one once it is made again",
            )

    def _look(self) -> None:
        """Asks whether the topic is still there."""
        from confluent_kafka import KafkaException

        name = self.config.topic
        try:
            error = self.client.list_topics(name, timeout=5).topics[name].error
            self._down = None if error is None else f"topic {name}: {_plain(error)}"
            self._note(error)
        except KafkaException as failure:
            self._down = self._down or _plain(failure.args[0])

    def held(self, partition: int, patience: Patience) -> tuple[int, int]:
        """The offsets that a partition holds: the first, and the one after the last."""

        def ask() -> tuple[int, int]:
            from confluent_kafka import TopicPartition

            low, high = self.client.get_watermark_offsets(TopicPartition(self.config.topic, partition), timeout=5)
            return low, high

        low, high = self._insist(ask, patience)
        return low, high

    def _insist(self, ask: Any, patience: Patience) -> Any:
        """The answer, once there is one that is no text."""
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
        """Reading goes on at these offsets."""
        from confluent_kafka import TopicPartition

        self._ended.clear()
        self.client.assign([TopicPartition(self.config.topic, p, offset) for p, offset in offsets.items()])

    def is_idle(self, partition: int) -> bool:
        """Whether a partition has nothing more to read just now; of a broker that is down nobody knows."""
        return partition in self._ended and self._down is None

    def waiting(self, offsets: Mapping[int, int]) -> int:
        """How many records the topic holds from these offsets on, as far as the client was told."""
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

    def records(self, patience: Patience) -> list[Record]:
        """What has arrived in a short time."""
        from confluent_kafka import KafkaError

        patience.check()
        got = self.client.consume(10_000, POLL_S)
        found = []
        for message in got:
            error, partition = message.error(), message.partition()
            if error is None:
                self._down = None
                self._ended.discard(partition)
                place = message.topic(), partition, message.offset()
                found.append(Record(*place, message.timestamp()[1] / 1000, message.value() or b""))
            elif error.code() == KafkaError._PARTITION_EOF:
                self._ended.add(partition)
            elif error.code() in (KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE):
                raise DataError(
                    f"partition {partition} of {self.config.topic} lost the next offset ({_plain(error)}): "
                    "records were lost to the topic's retention, or the topic was made anew",
                    "raise the topic's retention; a new run starts from what is there",
                )
            else:
                self._down = _plain(error)
        now = time.monotonic()
        if found:
            self._looked = now
        elif now - self._looked >= LOOK_S:
            self._looked = now
            self._look()
        if not got and self._down is not None:
            patience.wait(f"Kafka at {self.config.brokers}: {self._down}")
        return found

    def close(self) -> None:
        if self._consumer is not None:
            self._consumer.close()
            self._consumer = None


def _plain(error: Any) -> str:
    """An error of librdkafka without the parts that change each time."""
    return _NOISE.sub("", str(error.str()))
