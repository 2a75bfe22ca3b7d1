"""The join: each rule by itself, and random histories with kills beside a join by dictionaries."""

import copy
import os
import shutil
import tempfile
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clickfleet.data.events import Feedback, Show
from clickfleet.errors import CheckpointError, ConfigError
from clickfleet.online import joiner
from clickfleet.online.joiner import Joiner, JoinRules
from clickfleet.store import show_store, sorted_runs
from joined import SECOND, START, Reference, Row, arrived, feedback, rows_of, show
from soak import SOAK

RULES = JoinRules(wait_s=30, window_s=3600)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that are full after a few records, so that every kind of them is written. Nothing waits for the disk."""
    monkeypatch.setattr(os, "fsync", lambda file: None)
    monkeypatch.setattr(show_store, "SEGMENT_ROWS", 8)
    monkeypatch.setattr(show_store, "BATCH_ROWS", 2)
    monkeypatch.setattr(show_store, "CACHE_BYTES", 1000)
    monkeypatch.setattr(sorted_runs, "MERGED_RUNS", 2)
    monkeypatch.setattr(sorted_runs, "CHUNK", 4)


_joiners: list[Joiner] = []


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    while _joiners:
        _joiners.pop().close()


def opened(folder: Path, rules: JoinRules = RULES) -> Joiner:
    _joiners.append(Joiner(folder, rules, memory_records=4))
    return _joiners[-1]


def kinds(batches: list[pa.RecordBatch]) -> Counter[str]:
    return Counter(row.kind for row in rows_of(batches))


def test_a_click_is_a_row_at_once_and_silence_is_a_negative_after_the_wait(tmp_path: Path) -> None:
    join = opened(tmp_path)
    assert join.apply(arrived([show("r1", 0), show("r2", 1)], clocks=1)) == []
    (row,) = rows_of(join.apply(arrived(events=[feedback("r2", 5)], clocks=6)))
    assert row[:4] == ("label", "r2", "0", (("click", 1.0),))
    assert (row.previous, row.known, row.labelled) == (None, START + 5 * SECOND, START + 5 * SECOND)
    assert join.apply(arrived(clocks=29.999)) == []
    (row,) = rows_of(join.apply(arrived(clocks=30)))
    assert row[:4] == ("negative", "r1", "0", (("click", 0.0),))
    assert (row.previous, row.known, row.labelled, row.event) == (None, START + 30 * SECOND, None, None)
    assert join.apply(arrived(clocks=5000)) == []
    assert join.pending == 0


def test_a_label_after_the_wait_is_a_correction_that_names_what_it_replaces(tmp_path: Path) -> None:
    join = opened(tmp_path)
    join.apply(arrived([show("r", 0)], clocks=40))
    (row,) = rows_of(join.apply(arrived(events=[feedback("r", 100, event="e")], clocks=100)))
    assert row[:5] == ("correction", "r", "0", (("click", 1.0),), (("click", 0.0),))
    assert row.event == "e"
    back = feedback("r", 200, event="undo", click=0.0)
    (row,) = rows_of(join.apply(arrived(events=[back], clocks=200)))
    assert row[3:5] == ((("click", 0.0),), (("click", 1.0),))


def test_nothing_is_taken_after_the_window(tmp_path: Path) -> None:
    join = opened(tmp_path)
    join.apply(arrived([show("r", 0)], clocks=40))
    assert join.apply(arrived(events=[feedback("r", 3600.001)], clocks=4000)) == []
    assert join.counts["late"] == 1
    assert kinds(join.apply(arrived(events=[feedback("r", 3600)], clocks=4000))) == {"correction": 1}


def test_the_same_event_counts_once_however_often_it_comes(tmp_path: Path) -> None:
    join = opened(tmp_path)
    click = feedback("r", 5, event="e")
    join.apply(arrived([show("r", 0)], [click, click], clocks=5))
    again = click._replace(received_us=click.received_us + 60 * SECOND)
    undone = feedback("r", 50, event="f", click=0.0)
    assert kinds(join.apply(arrived(events=[again, again], clocks=70))) == {}
    assert kinds(join.apply(arrived(events=[undone], clocks=71))) == {"correction": 1}
    assert kinds(join.apply(arrived(events=[again], clocks=72))) == {}
    assert join.counts["repeated_feedback"] == 4


def test_the_later_of_two_values_holds_in_whatever_order_they_come(tmp_path: Path) -> None:
    first, second = feedback("r", 5, event="a", click=1.0), feedback("r", 6, event="b", click=0.0)
    finals = []
    for number, order in enumerate([[first, second], [second, first]]):
        join = opened(tmp_path / str(number))
        join.apply(arrived([show("r", 0)], clocks=0))
        rows = [row for event in order for row in rows_of(join.apply(arrived(events=[event], clocks=10)))]
        finals.append(rows[-1].labels)
        assert join.apply(arrived(clocks=100)) == []
    assert finals == [(("click", 0.0),)] * 2


def test_of_two_values_of_the_same_microsecond_the_larger_one_holds(tmp_path: Path) -> None:
    """Whatever their ids and the order in which they come, together or apart."""
    finals = []
    for click, none in [("a", "b"), ("b", "a"), ("x1", "x2"), ("x2", "x1")]:
        first, second = feedback("r", 5, event=click, click=1.0), feedback("r", 5, event=none, click=0.0)
        for number, parts in enumerate(
            [[[first], [second]], [[second], [first]], [[first, second]], [[second, first]]]
        ):
            join = opened(tmp_path / f"{click}-{number}")
            join.apply(arrived([show("r", 0)], clocks=0))
            rows = [row for part in parts for row in rows_of(join.apply(arrived(events=part, clocks=10)))]
            finals.append(rows[-1].labels)
    assert finals == [(("click", 1.0),)] * 16


def test_feedback_may_come_before_its_show(tmp_path: Path) -> None:
    join = opened(tmp_path)
    assert join.apply(arrived(events=[feedback("r", 5), feedback("r", 6, event="buy")], clocks=5)) == []
    assert join.parked == 2
    join.commit({})
    join.close()
    join = opened(tmp_path)
    assert join.parked == 2
    (row,) = rows_of(join.apply(arrived([show("r", 4)], clocks=6)))
    assert row[:4] == ("label", "r", "0", (("click", 1.0),))
    assert join.parked == 0
    join.commit({})
    assert opened(tmp_path).parked == 0


def test_feedback_without_a_show_is_dropped_after_the_window(tmp_path: Path) -> None:
    join = opened(tmp_path)
    join.apply(arrived([show("other", 0)], [feedback("r", 5)], clocks=5))
    assert join.apply(arrived(clocks=3604)) != []
    assert (join.parked, join.counts["lost_feedback"]) == (1, 0)
    join.apply(arrived(clocks=3606))
    assert (join.parked, join.counts["lost_feedback"]) == (0, 1)


def test_feedback_that_waits_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joiner, "MAX_PARKED", 10)
    join = opened(tmp_path)
    for i in range(50):
        join.apply(arrived(events=[feedback(f"r{i}", i)], clocks=i))
        join.commit({})
    assert (join.parked, join.counts["lost_feedback"]) == (10, 40)
    rows = rows_of(join.apply(arrived([show(f"r{i}", 60) for i in range(50)], clocks=60)))
    assert {row.request for row in rows} == {f"r{i}" for i in range(40, 50)}, "the oldest were dropped"


def test_each_stream_has_its_own_clock(tmp_path: Path) -> None:
    """A server whose clock is an hour ahead neither hurries nor holds up the shows of others."""
    join = opened(tmp_path, JoinRules(30, 86400))
    join.apply(arrived({1: [show("a", 0)], 2: [show("b", 3600)]}, clocks={1: 0, 2: 3600}))
    assert join.apply(arrived(clocks={1: 29, 2: 3629})) == []
    assert [row.request for row in rows_of(join.apply(arrived(clocks={1: 29, 2: 3630})))] == ["b"]
    click = feedback("a", 3630, received=3630)  # by the clock that is ahead
    assert kinds(join.apply(arrived(events=[click], clocks={1: 29.5, 2: 3630}))) == {"label": 1}
    assert join.apply(arrived(clocks={1: 50, 2: 3650})) == []


def test_a_candidate_that_was_not_returned_was_not_shown(tmp_path: Path) -> None:
    join = opened(tmp_path)
    join.apply(arrived([show("r", 0, "a"), show("r", 0, "b", position=None)], clocks=0))
    assert [row.item for row in rows_of(join.apply(arrived(clocks=30)))] == ["a"]
    assert join.counts["unshown"] == 1


def test_the_same_item_twice_in_a_request_is_one_show(tmp_path: Path) -> None:
    join = opened(tmp_path)
    join.apply(arrived([show("r", 0, "a", '{"n":1}'), show("r", 0, "a", '{"n":2}')], clocks=0))
    join.apply(arrived([show("r", 5, "a", '{"n":3}')], clocks=5))
    join.commit({})
    join.close()
    join = opened(tmp_path)
    join.apply(arrived([show("r", 6, "a", '{"n":4}')], clocks=6))
    (row,) = rows_of(join.apply(arrived(clocks=60)))
    assert row.features == '{"n":1}', "the first one counts"
    assert join.counts["repeated_shows"] == 3


def test_several_labels(tmp_path: Path) -> None:
    """A row has the labels that are known; those that are not at the end of the wait are 0; each change is a row."""
    join = opened(tmp_path, JoinRules(30, 3600, ("click", "buy")))
    join.apply(arrived([show("r", 0), show("s", 0)], [feedback("r", 5, click=1.0)], clocks=5))
    (row, negative) = rows_of(join.apply(arrived(clocks=30)))
    assert row[0] == "correction"
    assert row[3:5] == ((("buy", 0.0), ("click", 1.0)), (("click", 1.0),))
    assert (negative.kind, negative.labels) == ("negative", (("buy", 0.0), ("click", 0.0)))
    (row,) = rows_of(join.apply(arrived(events=[feedback("r", 60, buy=1.0)], clocks=60)))
    assert row[3:5] == ((("buy", 1.0), ("click", 1.0)), (("buy", 0.0), ("click", 1.0)))


def test_labels_that_nobody_asked_for_make_no_rows(tmp_path: Path) -> None:
    join = opened(tmp_path)
    assert join.apply(arrived([show("r", 0)], [feedback("r", 5, share=1.0)], clocks=5)) == []
    assert kinds(join.apply(arrived(events=[feedback("r", 6, click=1.0)], clocks=6))) == {"label": 1}
    assert join.counts["other_labels"] == 1


def test_an_explicit_zero_is_a_row_at_once(tmp_path: Path) -> None:
    join = opened(tmp_path)
    (row,) = rows_of(join.apply(arrived([show("r", 0)], [feedback("r", 5, click=0.0)], clocks=5)))
    assert (row.kind, row.labels) == ("label", (("click", 0.0),))
    assert join.apply(arrived(clocks=100)) == []


def test_many_negatives_at_once_come_in_portions_and_each_once(tmp_path: Path) -> None:
    join = opened(tmp_path)
    join.apply(arrived([show(f"r{i}", i / 10) for i in range(100)], clocks=10))
    seen: list[str] = []
    for _ in range(20):
        rows = rows_of(join.apply(arrived(clocks=1000), most=10))
        assert len(rows) <= 10
        seen += [row.request for row in rows]
        join.commit({})
        join.close()
        join = opened(tmp_path)
    assert sorted(seen) == sorted(f"r{i}" for i in range(100))
    assert seen[:10] == sorted(f"r{i}" for i in range(10)), "those that waited longest first"


def test_a_click_among_late_negatives_is_still_a_label(tmp_path: Path) -> None:
    """A show that is overdue, but whose turn has not come, has no row yet."""
    join = opened(tmp_path)
    join.apply(arrived([show(f"r{i}", i) for i in range(10)], clocks=10))
    assert len(rows_of(join.apply(arrived(clocks=1000), most=4))) == 4
    assert kinds(join.apply(arrived(events=[feedback("r9", 900)]))) == {"label": 1}
    assert kinds(join.apply(arrived(events=[feedback("r0", 901)]))) == {"correction": 1}


def test_the_end_decides_everything(tmp_path: Path) -> None:
    join = opened(tmp_path)
    join.apply(arrived({1: [show("a", 0)], 2: [show("b", 99)]}, [feedback("a", 5)], {1: 0, 2: 99}))
    assert [(row.kind, row.request) for row in rows_of(join.finish())] == [("negative", "b")]
    assert kinds(join.apply(arrived(events=[feedback("b", 120)]))) == {"correction": 1}


@pytest.mark.usefixtures("small")
def test_shows_beyond_the_window_are_forgotten(tmp_path: Path) -> None:
    join = opened(tmp_path, JoinRules(30, 100))
    for i in range(2000):
        rows = join.apply(arrived([show(f"r{i}", i)], clocks=i))
        assert len(rows_of(rows)) == (i >= 30)
        if i % 7 == 0:
            join.commit({})
        if i % 400 == 399:
            join.commit({})
            join.close()
            join = opened(tmp_path, JoinRules(30, 100))
    join.commit({})
    assert len(join.shows) <= 130
    assert len(join.index) <= 300
    join.close()
    assert len(list(tmp_path.glob("shows-*"))) <= 20
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 150_000


@pytest.mark.usefixtures("small")
def test_a_full_store_decides_the_oldest_shows_early_and_loses_none(tmp_path: Path) -> None:
    join = opened(tmp_path, JoinRules(10_000, 20_000, limit_bytes=60_000))
    seen: list[str] = []
    for i in range(500):
        seen += [row.request for row in rows_of(join.apply(arrived([show(f"r{i}", i, features="x" * 500)], clocks=i)))]
        join.commit({})
        assert join.bytes < 80_000
    assert join.counts["cut_short"] == len(seen) > 300
    assert sorted(seen + [row.request for row in rows_of(join.finish())]) == sorted(f"r{i}" for i in range(500))


def test_what_was_not_committed_never_happened(tmp_path: Path) -> None:
    join = opened(tmp_path)
    join.apply(arrived([show("a", 0)], clocks=0))
    join.commit({"place": 1})
    join.apply(arrived([show("b", 1)], [feedback("a", 2)], clocks=40))
    join.close()
    join = opened(tmp_path)
    assert (join.facts, join.pending, join.counts["shows"]) == ({"place": 1}, 1, 1)
    assert [row.request for row in rows_of(join.apply(arrived(clocks=40)))] == ["a"]


def test_a_damaged_store_and_other_labels_are_refused(tmp_path: Path) -> None:
    join = opened(tmp_path)
    join.apply(arrived([show("a", 0)], clocks=0))
    join.commit({})
    join.close()
    with pytest.raises(ConfigError, match="joins the labels click, not buy"):
        opened(tmp_path, JoinRules(labels=("buy",)))
    (log,) = tmp_path.glob("keys-*.log")
    whole = log.read_bytes()
    log.write_bytes(whole[:-1])
    with pytest.raises(CheckpointError, match="missing or damaged"):
        opened(tmp_path)
    log.write_bytes(whole)
    (tmp_path / "join.json").write_bytes((tmp_path / "join.json").read_bytes().replace(b"click", b"clock"))
    with pytest.raises(CheckpointError, match=r"join\.json is damaged"):
        opened(tmp_path)
    for rules in ((40, 30), (-1, 30)):
        with pytest.raises(ConfigError, match="at least as long"):
            JoinRules(*rules)
    with pytest.raises(ConfigError, match="each only once"):
        JoinRules(labels=("a", "a"))


@pytest.mark.parametrize("per_day", [10_000 if SOAK else 1000])
def test_memory_is_flat_over_a_simulated_week(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, per_day: int) -> None:
    """Nine days in virtual time with a window of two: what is in memory on the last days is what was on the third."""
    monkeypatch.setattr(os, "fsync", lambda file: None)
    monkeypatch.setattr(show_store, "SEGMENT_ROWS", 256)
    monkeypatch.setattr(show_store, "BATCH_ROWS", 32)
    join = Joiner(tmp_path, JoinRules(30, 2 * 86400), memory_records=300)
    _joiners.append(join)
    used, rows, step = [], 0, 86400 / per_day
    tracemalloc.start()
    try:
        for day in range(9):
            for start in range(0, per_day, 50):
                numbers = range(day * per_day + start, day * per_day + start + 50)
                shows = [show(f"r{i}", i * step, features='{"a": "b"}') for i in numbers]
                clicks = [feedback(f"r{i}", (i + 3) * step) for i in numbers if i % 10 == 0]
                late = [feedback(f"r{i - per_day}", i * step) for i in numbers if i % 25 == 0]
                rows += sum(map(len, join.apply(arrived(shows, clicks + late, clocks=numbers[-1] * step))))
                join.commit({})
            used.append(tracemalloc.get_traced_memory()[0] + pa.total_allocated_bytes())
    finally:
        tracemalloc.stop()
    rows += sum(map(len, join.finish()))
    assert join.counts["shows"] == 9 * per_day
    assert rows == join.counts["negatives"] + join.counts["labels"] + join.counts["corrections"]
    assert join.counts["negatives"] + join.counts["labels"] == 9 * per_day
    assert join.counts["corrections"] > 100
    assert len(join.shows) < 2.5 * per_day
    assert max(used[6:]) < 1.25 * max(used[2:4]) + 500_000, used


# Random histories

KEYS = st.tuples(st.sampled_from(["r1", "r2", "r3", "r4", "r5", "r6"]), st.sampled_from(["a", "b"]))
TIMES = st.integers(0, 120)


@st.composite
def some_shows(draw: Any) -> Show:
    request, item = draw(KEYS)
    return show(
        request, draw(TIMES), item, f'{{"n":{draw(st.integers(0, 9))}}}', draw(st.sampled_from([1, 1, 1, None]))
    )


@st.composite
def some_feedback(draw: Any) -> Feedback:
    request, item = draw(KEYS)
    labels = draw(st.dictionaries(st.sampled_from(["click", "buy", "other"]), st.sampled_from([0.0, 1.0]), min_size=1))
    event = f"e{draw(st.integers(0, 15))}"
    return feedback(request, draw(TIMES), item, event, draw(TIMES), **labels)


ROUNDS = st.tuples(
    st.just("round"),
    st.dictionaries(st.sampled_from([1, 2]), st.lists(some_shows(), max_size=4), max_size=2),
    st.lists(some_feedback(), max_size=5),
    st.fixed_dictionaries({1: st.integers(0, 15), 2: st.integers(0, 15)}),
)
HISTORIES = st.lists(
    st.one_of(ROUNDS, ROUNDS, st.just(("commit",)), st.just(("commit",)), st.just(("kill",))), max_size=24
)


@settings(max_examples=600 if SOAK else 60, deadline=None)
@given(HISTORIES, st.sampled_from([("click",), ("click", "buy")]))
def test_random_histories_with_kills_equal_those_of_dictionaries(history: list[Any], labels: tuple[str, ...]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(show_store, "SEGMENT_ROWS", 4)
        patch.setattr(show_store, "BATCH_ROWS", 2)
        patch.setattr(sorted_runs, "MERGED_RUNS", 2)
        patch.setattr(sorted_runs, "CHUNK", 2)
        patch.setattr(os, "fsync", lambda file: None)
        folder = Path(tempfile.mkdtemp(prefix="clickfleet-join-"))
        try:
            _follow(folder, history, JoinRules(30, 100_000, labels))
        finally:
            shutil.rmtree(folder)


def _follow(folder: Path, history: list[Any], rules: JoinRules) -> None:
    join, wanted = Joiner(folder, rules, memory_records=3), Reference(rules)
    clocks, saved = {1: 0, 2: 0}, (copy.deepcopy(wanted), {1: 0, 2: 0})
    rows: list[Row] = []
    first: dict[tuple[str, str], int] = {}
    for kind, *facts in history:
        if kind == "commit":
            join.commit({"clocks": [clocks[1], clocks[2]]})
            saved = copy.deepcopy(wanted), dict(clocks)
            for row in rows:
                first[row.request, row.item] = first.get((row.request, row.item), 0) + (row.kind != "correction")
            rows = []
        elif kind == "kill":
            join.close()
            join, wanted, clocks = Joiner(folder, rules, memory_records=3), copy.deepcopy(saved[0]), dict(saved[1])
            rows = []
        else:
            shows, events, steps = facts
            clocks = {stream: clocks[stream] + steps[stream] for stream in clocks}
            times = {stream: START + clock * SECOND for stream, clock in clocks.items()}
            found = rows_of(join.apply(arrived(shows, events, {s: float(c) for s, c in clocks.items()})))
            assert found == wanted.apply(shows, events, times)
            rows += found
    join.close()
    assert set(first.values()) <= {0, 1}, "a show is learned once; only corrections come again"


@settings(max_examples=100 if SOAK else 25, deadline=None)
@given(st.lists(some_feedback(), max_size=8), st.randoms(use_true_random=False))
def test_the_last_row_of_a_show_does_not_depend_on_the_order_of_its_events(events: list[Feedback], rng: Any) -> None:
    distinct = {(event.request, event.item, event.event): event for event in events}
    finals = []
    for _ in range(2):
        folder = Path(tempfile.mkdtemp(prefix="clickfleet-join-"))
        try:
            join = Joiner(folder, JoinRules(30, 100_000))
            steps: list[Any] = [*distinct.values(), *(show(f"r{i}", 0, item) for i in range(1, 7) for item in "ab")]
            rng.shuffle(steps)
            rows: list[Row] = []
            for number, step in enumerate(steps):
                shows, some = ([step], []) if isinstance(step, Show) else ([], [step])
                rows += rows_of(join.apply(arrived(shows, some, float(number * 10))))
            rows += rows_of(join.finish())
            finals.append({(row.request, row.item): row.labels for row in rows})
            assert len(finals[-1]) == 12
            join.close()
        finally:
            shutil.rmtree(folder)
    assert finals[0] == finals[1]
