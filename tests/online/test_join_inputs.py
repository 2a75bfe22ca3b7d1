"""What the join reads: in the order of time, from where it stopped, with a clock for every stream, from folders and topics."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from clickfleet.data.events import FEEDBACK, SHOWS, Feedback, Show, feedback_columns, show_columns
from clickfleet.errors import ConfigError, DataError
from clickfleet.online import join_inputs
from clickfleet.online.join_inputs import JoinInputs
from clickfleet.online.joiner import EventRound
from clickfleet.online.passes import Patience
from clickfleet.store.event_log import LogWriter, as_message
from joined import SECOND, START, feedback, show
from mock_cluster import Cluster
from served import until


class Clock:
    """Time that only tests move."""

    def __init__(self) -> None:
        self.now = START / SECOND

    def __call__(self) -> float:
        return self.now


class Logs:
    """Two folders, their writers, and inputs that read them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.clock = folder, Clock()
        self.writers: dict[Any, LogWriter] = {}
        self.warnings: list[str] = []
        self.opened: list[JoinInputs] = []

    def write(self, *events: Show | Feedback, writer: int = 0) -> None:
        for kind, schema, columns in (("shows", SHOWS, show_columns), ("feedback", FEEDBACK, feedback_columns)):
            some: Any = [event for event in events if isinstance(event, Show) == (kind == "shows")]
            if some:
                log = self.writers.setdefault((kind, writer), LogWriter(self.folder / kind, schema))
                log.write(columns(some))

    def open(self, saved: dict[str, Any] | None = None, **more: Any) -> JoinInputs:
        inputs = JoinInputs(
            str(self.folder / "shows"),
            str(self.folder / "feedback"),
            saved or {},
            warn=self.warnings.append,
            patience=lambda: Patience(self.warnings.append, 0.01),
            clock=self.clock,
            elapsed=self.clock,
            **more,
        )
        self.opened.append(inputs)
        return inputs

    def close(self) -> None:
        for one in (*self.opened, *self.writers.values()):
            one.close()


@pytest.fixture
def logs(tmp_path: Path) -> Iterator[Logs]:
    made = Logs(tmp_path)
    yield made
    made.close()


def ids(found: EventRound) -> tuple[list[str], list[str]]:
    """The requests of shows and of feedback."""
    of_shows = [name for _, batch in found.shows for name in batch.column("request").to_pylist()]
    return of_shows, [name for batch in found.feedback for name in batch.column("request").to_pylist()]


def clocks(found: EventRound) -> list[float]:
    return sorted((clock - START) / SECOND for clock in found.clocks.values())


def test_everything_is_read_once(logs: Logs) -> None:
    inputs = logs.open()
    assert ids(inputs.take()) == ([], [])
    logs.write(show("a", 1), show("b", 2), feedback("a", 3))
    assert ids(inputs.take()) == (["a", "b"], ["a"])
    assert inputs.caught_up
    assert ids(inputs.take()) == ([], [])
    logs.write(show("c", 4), writer=1)
    assert ids(inputs.take()) == (["c"], [])


def test_reading_goes_on_where_a_commit_stopped(logs: Logs, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of what was read ahead, also after files became complete."""
    monkeypatch.setattr(join_inputs, "SPANS", 15)
    logs.write(*(show(f"r{i}", i + 1) for i in range(10)))
    logs.write(*(feedback(f"r{i}", i + 1) for i in range(10)))
    seen: tuple[list[str], list[str]] = ([], [])
    saved: dict[str, Any] = {}
    for step in range(8):
        inputs = logs.open(saved)
        for both, new in zip(seen, ids(inputs.take()), strict=True):
            both += new
        ids(inputs.take())  # not committed
        saved = saved if step < 0 else _state_after_first(logs, saved)
        if step == 3:
            for writer in logs.writers.values():
                writer.rotate_bytes = 1
            logs.write(show("last", 20), feedback("last", 20))
    names = [f"r{i}" for i in range(10)] + ["last"]
    assert seen == (names, names)


def _state_after_first(logs: Logs, saved: dict[str, Any]) -> dict[str, Any]:
    """What a commit after one round saves."""
    inputs = logs.open(saved)
    inputs.take()
    return inputs.state()


def test_a_backlog_is_read_in_the_order_of_time(logs: Logs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Feedback is never read long after shows that are younger than it."""
    monkeypatch.setattr(join_inputs, "READ_ROWS", 10)
    for minute in range(30):
        logs.write(*(show(f"s{minute}-{i}", 60 * minute + i) for i in range(1, 20)))
        if minute % 3 == 0:
            logs.write(feedback(f"s{minute}-1", 60 * minute + 30))
    inputs = logs.open()
    newest_show = newest_feedback = 0.0
    while not inputs.caught_up:
        found = inputs.take()
        for _, batch in found.shows:
            newest_show = max(newest_show, batch.column("time")[-1].value / SECOND)
        for batch in found.feedback:
            newest_feedback = max(newest_feedback, batch.column("received")[-1].value / SECOND)
        if newest_feedback and not inputs.caught_up:
            assert newest_show < newest_feedback + 3 * 60 + 30


def test_a_stream_without_events_goes_on_by_this_machines_clock(logs: Logs) -> None:
    inputs = logs.open()
    logs.write(show("a", 100))
    assert clocks(inputs.take()) == [100]
    logs.clock.now += 7
    assert clocks(inputs.take()) == [107]
    logs.write(show("b", 103))  # a little behind
    assert clocks(inputs.take()) == [107]
    logs.write(show("c", 250))
    assert clocks(inputs.take()) == [250]
    logs.clock.now += 5
    assert clocks(inputs.take()) == [255]


def test_a_stream_that_ended_is_not_left_behind_for_ever(logs: Logs) -> None:
    """Clocks may differ by an hour, not by more."""
    logs.write(show("old", 1))
    logs.write(show("new", 9000), writer=1)
    inputs = logs.open()
    while not inputs.caught_up:
        found = inputs.take()
    assert clocks(found) == [5400, 9000]


def test_time_to_catch_up_does_not_count(logs: Logs, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream that ended long ago must not be decided while feedback of its time is unread."""
    monkeypatch.setattr(join_inputs, "READ_ROWS", 2)
    monkeypatch.setattr(join_inputs, "SKEW_S", 1e9)
    logs.write(show("old", 1))
    logs.write(*(show(f"r{i}", 10 + i) for i in range(20)), writer=1)
    logs.write(*(feedback(f"r{i}", 10 + i) for i in range(20)))
    inputs = logs.open()
    rounds = 0
    while not inputs.caught_up:
        logs.clock.now += 3600
        assert min(clocks(inputs.take()), default=1) == 1
        rounds += 1
    assert rounds > 5
    logs.clock.now += 2
    assert clocks(inputs.take())[0] == pytest.approx(3, abs=0.1)
    # Nor does the time between two processes.
    inputs = logs.open(inputs.state())
    logs.clock.now += 3600
    assert clocks(inputs.take())[0] == pytest.approx(3, abs=0.1)


def test_servers_whose_clocks_differ_keep_their_own(logs: Logs) -> None:
    inputs = logs.open()
    logs.write(show("a", 0.5))
    logs.write(show("b", 3600.5), writer=1)
    logs.write(feedback("a", 3601), writer=1)
    assert ids(inputs.take()) == (["a"], [])
    assert ids(inputs.take()) == (["b"], ["a"])
    logs.clock.now += 10
    assert clocks(inputs.take()) == [pytest.approx(10.5, abs=0.6), 3610.5]
    for step in range(1, 6):  # events all the time do not hold up the clock of a quiet stream
        logs.write(show(f"a{step}", 10.5 + step))
        logs.write(show(f"b{step}", 3610.5 + step), writer=1)
        logs.clock.now += 1
        logs.write(show("quiet", 1), writer=2) if step == 1 else None
        while not ids(inputs.take())[0] or not inputs.caught_up:
            pass
    assert clocks(inputs.take())[0] > 4


def test_events_of_the_far_future_move_no_clock(logs: Logs) -> None:
    inputs = logs.open()
    wrong = show("wrong", 10 * 86400)
    logs.write(show("a", 1), wrong, show("b", 2), show("c", 0)._replace(time_us=-5))
    found = inputs.take()
    assert ids(found) == (["a", "b"], [])
    assert clocks(found) == [2]
    assert "2 events cannot be used" in logs.warnings[0]
    saved = inputs.state()
    logs.clock.now += 30 * 86400  # the same rows are left out when they are read again
    logs.write(show("d", 3))
    assert ids(logs.open(saved).take()) == (["d"], [])


def test_shows_before_the_start_are_left_out(logs: Logs) -> None:
    inputs = logs.open(start_us=START + 5 * SECOND)
    logs.write(show("a", 4), show("b", 5), show("c", 6))
    assert ids(inputs.take()) == (["b", "c"], [])
    assert inputs.skipped == 1


def test_one_log_cannot_be_both(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be the same log"):
        JoinInputs("x", "x", {}, warn=print, patience=lambda: Patience(print, 1.0))


# Kafka


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    made = Cluster()
    for topic in ("shows", "feedback"):
        made.create(topic, 2)
    yield made
    made.close()


class Topics:
    """Topics of a cluster, and inputs that read them."""

    def __init__(self, cluster: Cluster) -> None:
        kafka = pytest.importorskip("confluent_kafka")
        self.cluster = cluster
        self.producer = kafka.Producer({"bootstrap.servers": cluster.address, "log_level": 0})
        self.opened: list[JoinInputs] = []
        self.clock = Clock()

    def send(self, topic: str, value: bytes, partition: int = 0) -> None:
        self.producer.produce(topic, value, partition=partition)
        assert self.producer.flush(60) == 0

    def open(self, saved: dict[str, Any] | None = None) -> JoinInputs:
        where = f"kafka://{self.cluster.address}"
        inputs = JoinInputs(
            f"{where}/shows",
            f"{where}/feedback",
            saved or {},
            warn=lambda text: None,
            patience=lambda: Patience(lambda text: None, 0.05),
            options={"reconnect.backoff.max.ms": 100},
            clock=lambda: START / SECOND + 1e9,
            elapsed=self.clock,
        )
        self.opened.append(inputs)
        return inputs


@pytest.fixture
def topics(cluster: Cluster) -> Iterator[Topics]:
    made = Topics(cluster)
    yield made
    for one in made.opened:
        one.close()


def all_of(inputs: JoinInputs, done: Callable[[tuple[list[str], list[str]]], bool]) -> tuple[list[str], list[str]]:
    """Take until enough was found."""
    seen: tuple[list[str], list[str]] = ([], [])

    def enough() -> bool:
        for both, new in zip(seen, ids(inputs.take()), strict=True):
            both += new
        return done(seen)

    until(enough)
    return seen


def test_topics_are_read_once_as_arrow_and_as_json(topics: Topics) -> None:
    topics.send("shows", as_message(show_columns([show("a", 1), show("b", 2)])))
    topics.send("shows", b'{"request": "c", "features": {"x": 1}, "time": 1767225603}\n{"bad": 1}', 1)
    topics.send("feedback", b'{"request": "a", "label": {"click": 1}}')
    topics.send("feedback", b"garbage")
    inputs = topics.open()
    seen = all_of(inputs, lambda seen: len(seen[0]) == 3 and len(seen[1]) == 1)
    assert sorted(seen[0]) == ["a", "b", "c"]
    until(lambda: bool(inputs.take()) and inputs.caught_up)
    assert (inputs.shows.bad, inputs.feedback.bad) == (1, 1)
    saved = inputs.state()
    topics.send("shows", as_message(show_columns([show("d", 4)])))
    again = topics.open(saved)
    assert all_of(again, lambda seen: bool(seen[0])) == (["d"], [])


def test_nothing_is_decided_while_feedback_cannot_be_read(topics: Topics) -> None:
    """Otherwise every show of the outage would become a negative."""
    topics.send("shows", as_message(show_columns([show("a", 1)])))
    topics.send("feedback", b'{"request": "z", "label": {"click": 1}}')
    inputs = topics.open()
    all_of(inputs, lambda seen: len(seen[0]) == 1 and len(seen[1]) == 1)
    until(lambda: bool(inputs.take().clocks))
    topics.cluster.set_down(True)
    until(lambda: not inputs.take().clocks)
    topics.cluster.set_down(False)
    topics.send("feedback", b'{"request": "a", "label": {"click": 1}}')
    assert all_of(inputs, lambda seen: bool(seen[1]))[1] == ["a"]
    until(lambda: bool(inputs.take().clocks))


def test_records_that_retention_removed_are_named(topics: Topics) -> None:
    for i in range(4):
        topics.send("shows", as_message(show_columns([show(f"r{i}", 1 + i)])))
    topics.send("feedback", b'{"request": "z", "label": {"click": 1}}')
    inputs = topics.open()
    all_of(inputs, lambda seen: len(seen[0]) == 4)
    saved = inputs.state()
    for i in range(4, 8):
        topics.send("shows", as_message(show_columns([show(f"r{i}", 1 + i)])))
    topics.cluster.forget_records("shows", 0, 7)
    with pytest.raises(DataError, match="retention removed the records"):
        all_of(topics.open(saved), lambda seen: bool(seen[0]))
