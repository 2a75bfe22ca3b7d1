"""Kafka goes down, topics and records vanish: the run waits or ends as documented, says why, and loses nothing."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from clickfleet.config.check import configure
from clickfleet.errors import DataError
from clickfleet.online.learn import learn
from clickfleet.online.passes import Patience
from clickfleet.online.sources import broker
from clickfleet.store import checkpoint
from clickfleet.store.published import Log
from mock_cluster import Cluster
from streams import HEADER, lines

kafka = pytest.importorskip("confluent_kafka")
PARTITIONS, DAY = 2, 86400
START = (int(time.time()) // DAY + 1) * DAY + DAY // 2  # tomorrow at noon: no day of theirs ends by the clock
TOMORROW = int(time.strftime("%Y%m%d", time.gmtime(START)))


@pytest.fixture
def cluster():
    made = Cluster()
    made.create("clicks", PARTITIONS)
    yield made
    made.close()


@pytest.fixture
def config(stream, cluster, monkeypatch):
    monkeypatch.setattr(broker, "CHECK_S", 0.1)
    section = {"brokers": cluster.address, "topic": "clicks", "idle": "1s", "rows_per_pass": 20, "max_clock_skew": "3d"}
    section["options"] = {"reconnect.backoff.max.ms": 200}
    made = stream(days=1, rows=1, online={"dir": None, "kafka": section, "start_day": None, "end_day": TOMORROW})
    made["data"]["format"] = {"name": "csv", "columns": HEADER.split(",")}
    return made


def send(cluster: Cluster, rows: list[str], start_s: int = START) -> None:
    producer = kafka.Producer({"bootstrap.servers": cluster.address, "log_level": 0})
    for i, row in enumerate(rows):
        stamp = (start_s + i) * 1000
        producer.produce("clicks", row.encode(), partition=i % PARTITIONS, timestamp=stamp)
    assert producer.flush(60) == 0


def in_background(config) -> tuple[threading.Thread, list]:
    found: list = []

    def work() -> None:
        try:
            found.append(learn(config, quiet=True))
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    return thread, found


def until(thread: threading.Thread, said: Callable[[], bool]) -> None:
    end = time.monotonic() + 120
    while not said():
        assert thread.is_alive()
        assert time.monotonic() < end
        time.sleep(0.02)


def read_on(one: broker.Broker, patience: Patience) -> None:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        one.records(patience)


def log_of(tmp_path: Path) -> str:
    file = tmp_path / "run/log.txt"
    return file.read_text() if file.exists() else ""


def test_a_broker_that_goes_down_is_waited_for(config, cluster, tmp_path):
    send(cluster, lines(30, 1))
    thread, found = in_background(config)
    until(thread, lambda: "pass 1 trained" in log_of(tmp_path))
    cluster.set_down(True)
    until(thread, lambda: f"waiting for Kafka at {cluster.address}" in log_of(tmp_path))
    assert "Connection refused" in log_of(tmp_path) or "transport failure" in log_of(tmp_path)
    cluster.set_down(False)
    send(cluster, lines(10, 2), START + 100)
    send(cluster, lines(PARTITIONS, 3), START + DAY)
    thread.join()
    assert (found[0].rows, found[0].held) == (40, 0)


def test_a_topic_that_is_deleted_ends_the_run_by_name(config, cluster, tmp_path):
    send(cluster, lines(30, 1))
    thread, found = in_background(config)
    until(thread, lambda: "pass 1 trained" in log_of(tmp_path))
    cluster.delete("clicks")
    thread.join()
    assert isinstance(found[0], DataError)
    assert f"the topic clicks no longer exists in Kafka at {cluster.address}\n" in str(found[0])
    last = checkpoint.latest(tmp_path / "run/checkpoints")
    assert checkpoint.verify(last)["step"] > 0  # what was trained on is there, and published
    assert [line.kind for line in Log(tmp_path / "run/published").lines()] == ["base"]
    with pytest.raises(DataError, match="the topic clicks no longer exists"):  # not waited for: it was there
        learn(config, quiet=True)
    cluster.create("clicks", PARTITIONS)
    with pytest.raises(
        DataError, match=r"holds offsets 0 to 0, but the run continues at \d+: .* the topic was created again"
    ):
        learn(config, quiet=True)
    send(cluster, lines(30, 1))  # as they were
    send(cluster, lines(PARTITIONS, 3), START + DAY)
    assert learn(config, quiet=True).passes == 2


def test_a_topic_that_is_not_there_yet_is_waited_for(config, cluster, tmp_path):
    cluster.delete("clicks")
    thread, found = in_background(config)
    until(
        thread,
        lambda: (
            f"waiting for Kafka at {cluster.address}: topic clicks: Broker: Unknown topic or partition"
            in log_of(tmp_path)
        ),
    )
    cluster.create("clicks", PARTITIONS)
    send(cluster, lines(10, 1))
    send(cluster, lines(PARTITIONS, 3), START + DAY)
    thread.join()
    assert found[0].rows == 10


def test_records_that_retention_took_are_named(config, cluster, tmp_path):
    send(cluster, lines(30, 1))
    thread, found = in_background(config)
    until(thread, lambda: "pass 1 trained" in log_of(tmp_path))
    cluster.delete("clicks")
    thread.join()
    assert isinstance(found[0], DataError)
    cluster.create("clicks", PARTITIONS)
    send(cluster, lines(60, 1))
    cluster.forget_records("clicks", 0, 25)
    with pytest.raises(DataError, match=r"partition 0 of clicks holds offsets 25 to 30, but the run continues at \d+"):
        learn(config, quiet=True)


def test_records_that_vanish_before_they_are_read(config, cluster):
    send(cluster, lines(30, 1))
    section = configure(config).online.kafka
    assert section is not None
    one, patience = broker.Broker(section), Patience(lambda text: None, 0.02)
    assert one.held(0, patience) == (0, 15)
    cluster.forget_records("clicks", 0, 5)
    one.assign({0: 0, 1: 0})
    with pytest.raises(
        DataError, match=r"partition 0 of clicks no longer has the next offset .* retention removed the records"
    ):
        read_on(one, patience)
    one.close()
