"""librdkafka's mock cluster by its C interface, which can also fail: brokers go down, topics and records are deleted."""

import ctypes
from pathlib import Path

import pytest


class Cluster:
    """Brokers on this machine that speak Kafka's protocol, until `close`."""

    def __init__(self, brokers: int = 1) -> None:
        kafka = pytest.importorskip("confluent_kafka")
        found = sorted(Path(kafka.__file__).parents[1].glob("confluent_kafka.libs/librdkafka*"))
        self._lib = ctypes.CDLL(str(found[0])) if found else None
        if self._lib is None or not hasattr(self._lib, "rd_kafka_mock_topic_delete"):
            pytest.skip("this confluent-kafka has no librdkafka 2.15 beside it, whose mock cluster can delete topics")
        self._lib.rd_kafka_conf_new.restype = ctypes.c_void_p
        self._lib.rd_kafka_new.restype = ctypes.c_void_p
        self._lib.rd_kafka_mock_cluster_new.restype = ctypes.c_void_p
        self._lib.rd_kafka_mock_cluster_bootstraps.restype = ctypes.c_char_p
        conf, text = ctypes.c_void_p(self._lib.rd_kafka_conf_new()), ctypes.create_string_buffer(512)
        self._lib.rd_kafka_conf_set(conf, b"log_level", b"0", text, ctypes.c_size_t(512))
        self._owner = ctypes.c_void_p(self._lib.rd_kafka_new(0, conf, text, ctypes.c_size_t(512)))
        self._cluster = ctypes.c_void_p(self._lib.rd_kafka_mock_cluster_new(self._owner, brokers))
        self.address = self._lib.rd_kafka_mock_cluster_bootstraps(self._cluster).decode()

    def create(self, topic: str, partitions: int) -> None:
        assert self._lib.rd_kafka_mock_topic_create(self._cluster, topic.encode(), partitions, 1) == 0

    def delete(self, topic: str) -> None:
        assert self._lib.rd_kafka_mock_topic_delete(self._cluster, topic.encode()) == 0

    def forget_records(self, topic: str, partition: int, before: int) -> None:
        """What retention does: offsets below `before` are gone."""
        done = self._lib.rd_kafka_mock_partition_delete_records(
            self._cluster, topic.encode(), ctypes.c_int32(partition), ctypes.c_int64(before)
        )
        assert done == 0

    def set_down(self, down: bool, broker: int = 1) -> None:
        change = self._lib.rd_kafka_mock_broker_set_down if down else self._lib.rd_kafka_mock_broker_set_up
        assert change(self._cluster, ctypes.c_int32(broker)) == 0

    def close(self) -> None:
        self._lib.rd_kafka_mock_cluster_destroy(self._cluster)
        self._lib.rd_kafka_destroy(self._owner)
