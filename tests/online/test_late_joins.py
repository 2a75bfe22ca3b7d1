"""Late labels from events to the table: counts are those of a run that knew every label at once, whatever came when."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as tried
from hypothesis import strategies as st

from clickfleet.cluster.simulate import SimulatedCluster, with_mode
from clickfleet.config.load import load
from clickfleet.config.sections import Calibrate
from clickfleet.data.batch import Batch
from clickfleet.data.events import FEEDBACK, SHOWS, feedback_columns, show_columns
from clickfleet.data.formats.joined import JoinedReader
from clickfleet.data.memory import Feed
from clickfleet.data.parsing.layout import request_fields
from clickfleet.data.schema import Label, Schema, Slot, write_schema
from clickfleet.online.calibrator import Calibrator
from clickfleet.online.joiner import Joiner, JoinRules
from clickfleet.online.label_delays import LabelDelays
from clickfleet.online.learn import OnlineResult
from clickfleet.online.row_join import JoinSettings, RowJoin
from clickfleet.store.event_log import LogWriter
from clickfleet.store.table import Table
from clickfleet.training import modes
from clickfleet.training.learner import Learner
from clickfleet.training.loop import Job
from clickfleet.training.metrics import Metrics
from joined import arrived, feedback, show, write_logs
from soak import SOAK
from streams import SCHEMA as STREAM
from streams import settings

NAMES = ("click", "buy")
SHOP = Schema(slots=(Slot("user"), Slot("ad")), labels=(Label("click"), Label("buy", given="click")))
RULES = JoinRules(wait_s=30, window_s=3600, labels=NAMES)


def counted(table: Table) -> dict[int, tuple[float, float]]:
    """Shows and clicks of every key."""
    with table.snapshot() as rows:
        return {
            key: (show, click)
            for part in rows
            for key, show, click in zip(*(part[name].tolist() for name in ("key", "show", "click")), strict=True)
        }


def joined(folder: Path, rounds: Any, kill: bool = False, schema: Schema = SHOP) -> list[Batch]:
    """The batches of a join of some rounds of events."""
    join, batches = Joiner(folder, RULES), []
    for shows, events, clock in rounds:
        rows = join.apply(arrived(shows, events, clock))
        join.commit({})
        if kill:
            join.close()
            join = Joiner(folder, RULES)
        batches += [JoinedReader(schema).parse(part, "stop").batch for part in rows]
    batches += [JoinedReader(schema).parse(part, "stop").batch for part in join.finish()]
    join.close()
    return [batch for batch in batches if len(batch)]


@st.composite
def histories(draw: st.DrawFn) -> tuple[Any, dict[str, tuple[str, dict[str, float]]]]:
    """Rounds of events, and the last labels of every show with its user."""
    count = draw(st.integers(1, 12))
    users = draw(st.lists(st.sampled_from(["u", "v", "w"]), min_size=count, max_size=count))
    shows = {i: show(f"r{i}", i, "0", json.dumps({"user": users[i], "ad": str(i % 3)})) for i in range(count)}
    known: dict[str, tuple[str, dict[str, float]]] = {f"r{i}": (users[i], {}) for i in range(count)}
    events: list[Any] = []
    for n in range(draw(st.integers(0, 25))):
        i, name = draw(st.integers(0, count - 1)), draw(st.sampled_from(NAMES))
        at = i + round(draw(st.floats(0.1, 90)), 3) + n * 1e-5  # no two events at the same time
        value = draw(st.sampled_from([1.0, 1.0, 0.0]))
        events.append((at, feedback(f"r{i}", at, event=f"e{n}", **{name: value})))
    events.sort(key=lambda one: one[0])
    for _, event in events:
        known[event.request][1].update(event.labels)
    rounds = []
    ends = [*range(0, 110, draw(st.sampled_from([1, 7, 40]))), 200]
    for begin, end in zip([-1, *ends], ends, strict=False):
        new = [one for i, one in shows.items() if begin < i <= end]
        rounds.append((new, [event for at, event in events if begin < at <= end], float(end)))
    return rounds, known


@given(history=histories(), kill=st.booleans())
@tried(max_examples=200 if SOAK else 15, deadline=None)
def test_counts_are_those_of_labels_known_at_once(
    tmp_path_factory: pytest.TempPathFactory, history: Any, kill: bool
) -> None:
    rounds, known = history
    batches = joined(tmp_path_factory.mktemp("join"), rounds, kill)
    config = load(None, ["model.name=lr", "table.rule={name: adagrad, lr: 0.1}"])
    learner, metrics = Learner(config, SHOP), Metrics(tasks=SHOP.tasks)
    modes.load(config)(Job(learner, Feed(batches, SHOP, 5), metrics))
    shows, clicks = {"u": 0, "v": 0, "w": 0}, {"u": 0.0, "v": 0.0, "w": 0.0}
    for user, labels in known.values():
        shows[user] += 1
        clicks[user] += labels.get("click", 0.0)
    found = counted(learner.table)
    fields = request_fields(SHOP)
    for user, count in shows.items():
        key = int(fields.rows([{"user": user, "ad": "0"}])[1][0])
        assert found.get(key, (0, 0)) == (count, clicks[user])
    results = metrics.results()
    assert results["rows"] == len(known)
    assert 0 <= results["tasks"]["buy"]["rows"] - len(known) <= withdrawn_refusals(rounds)


def withdrawn_refusals(rounds: Any) -> int:
    """How often feedback says first that there was no click, then that there was. Until then it is known that nothing was bought;
    afterwards it is unknown again, so a purchase may be judged twice."""
    last: dict[str, float] = {}
    found = 0
    for _, events, _ in rounds:
        for event in sorted(events, key=lambda one: one.time_us):
            if "click" in event.labels:
                found += (last.get(event.request), event.labels["click"]) == (0.0, 1.0)
                last[event.request] = event.labels["click"]
    return found


@pytest.mark.parametrize("mode", ["sync", "half_async", "async", "geo"])
def test_counts_are_the_same_on_a_cluster(tmp_path: Path, mode: str) -> None:
    rng = np.random.default_rng(3)
    shows = [show(f"r{i}", i / 10, "0", json.dumps({"user": f"u{i % 7}", "ad": str(i % 3)})) for i in range(200)]
    events = sorted(
        ((i / 10 + d, feedback(f"r{i}", i / 10 + d)) for i in range(0, 200, 3) if (d := rng.exponential(40.0))),
        key=lambda one: one[0],
    )
    rounds = [
        (
            [one for i, one in enumerate(shows) if end - 5 < i / 10 <= end],
            [event for at, event in events if end - 5 < at <= end],
            float(end),
        )
        for end in range(0, 400, 5)
    ]
    batches = joined(tmp_path, rounds)
    assert any(batch.corrections is not None for batch in batches)
    config = load(None, ["model.name=dnn", "model.hidden=[4]", "table.dim=2", "data.batch_size=16"])
    alone = Learner(config, SHOP)
    modes.load(config)(Job(alone, Feed(batches, SHOP, 16), Metrics(tasks=SHOP.tasks)))
    fleet = SimulatedCluster(with_mode(config, mode), SHOP, 2, shards=2)
    metrics = Metrics(tasks=SHOP.tasks)
    found = fleet.train([Feed(batches[i::2], SHOP, 16) for i in range(2)], metrics)
    assert counted(found.table) == counted(alone.table)
    assert sum(show for show, _ in counted(found.table).values()) == 2 * len(shows)
    assert metrics.results()["rows"] == len(shows)


def test_calibration_counts_a_show_once_and_its_late_click() -> None:
    schema = Schema(slots=(Slot("site"),), label="click")
    calibrator = Calibrator(Calibrate(by=("site",)), schema)
    scores = np.full(4, 0.5, np.float32)

    def batch(labels: list[float], previous: list[float] | None = None) -> Batch:
        late = None if previous is None else np.array(previous, np.float32)
        keys = np.full(len(labels), 7, np.uint64)
        return Batch(
            np.zeros((len(labels), 0), np.float32), keys, 1, labels=np.array(labels, np.float32), previous=late
        )

    for labels, previous in (([0, 0, 1, 0], None), ([1, 0], [0, np.nan])):
        rows = batch(labels, previous)
        assert rows.labels is not None
        calibrator.learn(rows, scores[: len(labels)], rows.labels, None, 1000.0)
    for one in calibrator.results():
        assert (one["shows"], one["copc"]) == (5, pytest.approx(2 / 2.5))


def test_the_share_of_open_labels_falls_as_windows_end() -> None:
    delays = LabelDelays(NAMES, window_us=6400)
    shown = np.array([0, 1000, 2000])
    delays.learned(shown, np.array([[1, np.nan], [0, 0], [0, 0]]), None)
    delays.learned(shown[:1], np.array([[1.0, 0.0]]), np.array([[1.0, np.nan]]))
    assert delays.open == {"click": 2 / 3, "buy": 1.0}
    delays.learned(shown[1:2], np.array([[1.0, 0.0]]), np.array([[0.0, 0.0]]))
    again = LabelDelays(NAMES, 6400, json.loads(json.dumps(delays.state())))
    assert again.open == delays.open == {"click": 1 / 3, "buy": 1.0}
    assert again.on_time["click"] == 2 / 3
    again.forget(1100)
    assert again.open == {"click": 1 / 3, "buy": 1 / 3}
    again.forget(10_000)
    assert again.open == {"click": 0.0, "buy": 0.0}


# Whole runs


@pytest.fixture
def run(tmp_path: Path, graph: Path) -> Callable[..., dict[str, Any]]:
    """A run over logs with late clicks, whose table never forgets."""

    def make(schema: Schema = STREAM) -> dict[str, Any]:
        (tmp_path / "run").mkdir()
        shutil.copy(graph, tmp_path / "run" / "graph.onnx")
        section = {"shows": str(tmp_path / "shows"), "feedback": str(tmp_path / "feedback"), "wait": "30s"}
        section |= {"rows_per_pass": 70, "interval": "1h"}
        config = settings(tmp_path, online={"dir": None, "join": section, "start_day": None, "end_day": 20260101})
        config["table"] |= {"decay_rate": 1.0, "delete_threshold": 0.0}
        del config["data"]["format"]
        write_schema(schema, tmp_path / "schema.yaml")
        return config

    return make


@pytest.mark.parametrize("late", ["correct", "weight", "none"])
def test_a_run_counts_every_show_and_click_once(
    tmp_path: Path, run: Callable[..., dict[str, Any]], online: Callable[..., OnlineResult], late: Any
) -> None:
    labels = write_logs(tmp_path, 400)
    schema = Schema(STREAM.dense, STREAM.slots, labels=(Label("click", late=late),), time="time")
    config = run(schema)
    done = online(config, "run.keep=99", "publish.calibrate={by: [ad]}")
    found = counted(done.learner.table)
    shows, clicks = (sum(one[i] for one in found.values()) for i in (0, 1))
    slots = 3
    assert (shows, clicks) == (slots * len(labels), slots * sum(labels.values()))
    records = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert sum(record["rows"] for record in records if record["kind"] == "pass") == len(labels), "in the metrics, too"
    last = [record for record in records if record["kind"] == "join"][-1]
    assert 0 < last["open"]["click"] < 1
    assert 0 < last["on_time"]["click"] < 1
    text = (tmp_path / "run/metrics.prom").read_text()
    for name in ("open", "on_time"):
        assert f'clickfleet_online_labels_{name}{{label="click"}} {last[name]["click"]}' in text


def test_a_run_joins_all_labels_of_its_schema(
    tmp_path: Path, run: Callable[..., dict[str, Any]], online: Callable[..., OnlineResult]
) -> None:
    write_logs(tmp_path, 200)
    schema = Schema(STREAM.dense, STREAM.slots, labels=(Label("click"), Label("buy", given="click")), time="time")
    done = online(run(schema), "run.keep=99")
    assert done.last["tasks"]["buy"]["rows"] > 0
    assert done.total_rows > 200


def test_without_corrections_labels_are_still_completed(tmp_path: Path) -> None:
    """A click makes a row at once. That nothing was bought is known after the wait, and it is no correction of the click."""
    for name, schema, rows in (
        ("shows", SHOWS, show_columns([show("r", 0), show("s", 0), show("clock", 100)])),
        ("feedback", FEEDBACK, feedback_columns([feedback("r", 1), feedback("s", 200)])),
    ):
        writer = LogWriter(tmp_path / name, schema)
        writer.write(rows)
        writer.close()
    logs = JoinSettings(str(tmp_path / "shows"), str(tmp_path / "feedback"), RULES, corrections=False)
    join = RowJoin(logs, tmp_path / "join", tmp_path / "out", lambda text: None)
    part = join.gather(100, 3600.0, once=True)
    rows = [(row["request"], row["kind"], dict(row["labels"])) for batch in part.batches for row in batch.to_pylist()]
    status = join.status()
    join.close()
    assert sorted(rows, key=str) == [
        ("r", "correction", {"click": 1.0, "buy": 0.0}),
        ("r", "label", {"click": 1.0}),
        ("s", "negative", {"click": 0.0, "buy": 0.0}),
    ]
    assert status["open"] == {"click": 0.0, "buy": 0.0}, "nothing that was learned changes"
