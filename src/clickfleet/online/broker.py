"""A client of one Kafka topic: partitions by assignment, so that no group's rebalance or poll interval concerns it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

from clickfleet.errors import DataError, MissingError
from clickfleet.online.passes import Patience
from clickfleet.sections import Kafka

POLL_S = 0.2


class Record(NamedTuple):
    """What is kept of a message."""

    topic: str
    partition: int
    offset: int
    time_s: float
    value: bytes

    @property
    def place(self) -> str:
        return f"{self.topic} partition {self.partition} offset {self.offset}"


class Broker:
    """Reads records of assigned partitions; what is down is waited for, what is gone is an error."""

    def __init__(self, config: Kafka) -> None:
        self.config = config
        self.ended: set[int] = set()
        """Partitions with nothing more to read just now."""
        self._consumer: Any = None
        self._down: str | None = None

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
        self._down = str(error.str())

    def partitions(self, patience: Patience) -> list[int]:
        """The numbers of the topic's partitions."""
        name = self.config.topic

        def ask() -> list[int] | str:
            found = self.client.list_topics(name, timeout=5).topics[name]
            return (
                sorted(found.partitions) if found.error is None and found.partitions else f"topic {name}: {found.error}"
            )

        return list(self._insist(ask, patience))

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
                answer = error.args[0].str()
            patience.wait(f"Kafka at {self.config.brokers}: {answer}")

    def assign(self, offsets: Mapping[int, int]) -> None:
        """Reading goes on at these offsets."""
        from confluent_kafka import TopicPartition

        self.ended.clear()
        self.client.assign([TopicPartition(self.config.topic, p, offset) for p, offset in offsets.items()])

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
                self.ended.discard(partition)
                place = message.topic(), partition, message.offset()
                found.append(Record(*place, message.timestamp()[1] / 1000, message.value() or b""))
            elif error.code() == KafkaError._PARTITION_EOF:
                self.ended.add(partition)
            elif error.code() in (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC):
                raise DataError(
                    f"the topic {self.config.topic} is gone", "make it again, or start a new run on another"
                )
            elif error.code() == KafkaError._AUTO_OFFSET_RESET:
                raise DataError(f"partition {partition} of {self.config.topic} lost the next offset: {error.str()}")
            else:
                self._down = error.str()
        if not got and self._down is not None:
            patience.wait(f"Kafka at {self.config.brokers}: {self._down}")
        return found

    def close(self) -> None:
        if self._consumer is not None:
            self._consumer.close()
            self._consumer = None
