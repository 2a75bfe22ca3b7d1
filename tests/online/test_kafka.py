"""A topic as passes, on librdkafka's mock cluster: offsets, days, restarts, faults."""

import base64
import io
import json
import shutil
import time
from pathlib import Path
from zoneinfo import ZoneInfo

import pyarrow as pa
import pytest

from clickfleet.config.check import configure
from clickfleet.errors import ConfigError, DataError
from clickfleet.online import rewind
from clickfleet.online.passes import Patience, StopWaitingError
from clickfleet.serve import verification
from clickfleet.store.published import Log
from online.test_publisher import base_of
from streams import HEADER, SCHEMA, START, lines

kafka = pytest.importorskip("confluent_kafka")
PARTITIONS = 4  # what the mock cluster gives a topic
DAY = 86400


class Broker:
    """A mock cluster of one broker, alive as long as its client."""

    def __init__(self) -> None:
        self._owner = kafka.Producer({"test.mock.num.brokers": 1, "bootstrap.servers": "", "log_level": 0})
        found = self._owner.list_topics(timeout=60).brokers.values()
        self.address = ",".join(f"{one.host}:{one.port}" for one in found)

    def send(self, values, topic="clicks", start_s=START, step_s=1, partition=None) -> None:
        producer = kafka.Producer({"bootstrap.servers": self.address, "log_level": 0})
        for i, value in enumerate(values):
            where = i % PARTITIONS if partition is None else partition
            stamp = int((start_s + i * step_s) * 1000)
            producer.produce(
                topic, value.encode() if isinstance(value, str) else value, partition=where, timestamp=stamp
            )
        assert producer.flush(60) == 0


@pytest.fixture(scope="module")
def broker():
    return Broker()


@pytest.fixture
def topic(broker, request):
    return f"clicks-{abs(hash(request.node.name)) % 10**9}-{time.monotonic_ns()}"


@pytest.fixture
def config(stream, broker, topic):
    def make(**kafka_settings):
        section = {"brokers": broker.address, "topic": topic, "idle": "1s", "max_rows_per_pass": None, **kafka_settings}
        made = stream(days=1, rows=1, online={"dir": None, "kafka": section})
        made["data"]["format"] = {"name": "csv", "columns": HEADER.split(",")}
        return made

    return make


def source(settings, tmp_path, said, clock=time.time):
    from clickfleet.online.sources.kafka import Topic

    return Topic(configure(settings), ZoneInfo("UTC"), tmp_path / "spool", said.append, clock)


def passes(topic_source, position=None):
    patience = Patience(lambda text: None, 0.02)
    out = []
    while (found := topic_source.after(position, patience)) is not None:
        out.append(found)
        position = found.position
    topic_source.close()
    return out


def rows_of(found):
    return sorted(line for path in found.data for line in Path(path).read_text().splitlines())


def test_days_of_a_topic_are_trained_on_once(config, broker, topic, online, tmp_path):
    broker.send(lines(60, 1), topic, START)
    broker.send(lines(50, 2), topic, START + DAY)
    broker.send(lines(1, 3), topic, START + 2 * DAY)
    settings = config(rows_per_pass=25)
    done = online(settings)
    assert (done.rows, done.day) == (110, 20260102)
    assert done.passes == 6  # 25 25 10, 25 25 and the day's end, which has no rows
    assert [line.kind for line in Log(tmp_path / "run/published").lines()].count("base") == 3
    plan = [json.loads(line) for line in (tmp_path / "run/passes.jsonl").read_text().splitlines()]
    assert all(set(one["position"]["offsets"]) == {"0", "1", "2", "3"} for one in plan)
    assert online(settings).rows == 0


def test_a_rewind_reads_the_same_offsets_again_or_leaves_them_out(config, broker, topic, online, tmp_path):
    broker.send(lines(60, 1), topic, START)
    broker.send(lines(50, 2), topic, START + DAY)
    broker.send(lines(1, 3), topic, START + 2 * DAY)
    settings = config(rows_per_pass=25)
    settings["run"]["keep"] = 20
    first = base_of(online(settings).learner.table)
    plan = (tmp_path / "run/passes.jsonl").read_bytes()
    done = rewind.rewind(configure(settings), (20260102, 1), 0, print)
    assert done["learned_until"] == "20260101/3"
    again = online(settings)
    assert (again.passes, again.rows, base_of(again.learner.table)) == (6, 50, first)
    assert (tmp_path / "run/passes.jsonl").read_bytes() == plan
    rewind.rewind(configure(settings), (20260102, 1), 1, print)
    assert online(settings).rows == 25
    rewind.rewind(configure(settings), (20260102, 1), 0, print)
    again = online(settings)  # with the pass that was left out
    assert (again.rows, base_of(again.learner.table)) == (50, first)
    assert (tmp_path / "run/passes.jsonl").read_bytes() == plan
    verification.verify(tmp_path / "run")


def test_a_pass_never_spans_days_and_late_records_count_today(config, broker, topic, tmp_path):
    broker.send([f"r{i}" for i in range(10)], topic, START + DAY - 5)  # five before midnight, five after
    broker.send(["late"], topic, START - 100, partition=0)
    broker.send([f"end{p}" for p in range(PARTITIONS)], topic, START + 3 * DAY)
    said = []
    settings = config(rows_per_pass=100)
    settings["online"]["start_day"] = None
    first, second = passes(source(settings, tmp_path, said))
    assert (first.day, first.number, first.last, rows_of(first)) == (20260101, 1, True, [f"r{i}" for i in range(5)])
    assert (second.day, rows_of(second)) == (20260102, ["late"] + [f"r{i}" for i in range(5, 10)])
    assert said == ["20260102 pass 1 has 1 records of earlier days"]


def test_intervals_of_event_time(config, broker, topic, tmp_path):
    broker.send([f"r{i}" for i in range(8)], topic, START, step_s=900)  # two hours
    broker.send(["evening"], topic, START + 20 * 3600, partition=1)
    broker.send([f"end{p}" for p in range(PARTITIONS)], topic, START + 2 * DAY)
    settings = config(interval="1h")
    found = passes(source(settings, tmp_path, []))
    assert [(p.number, len(rows_of(p))) for p in found] == [(1, 4), (2, 4), (3, 1), (4, 0)]
    assert found[-1].last
    assert found[0].span_s == (START, START + 2700)


def test_idle_partitions_hold_nothing_up_once_the_clock_says_so(config, broker, topic, tmp_path):
    broker.send(["one", "two"], topic, START, partition=2)
    settings = config(rows_per_pass=100)
    settings["online"]["end_day"] = 20260101
    (only,) = passes(source(settings, tmp_path, [], clock=lambda: START + DAY + 2))
    assert rows_of(only) == ["one", "two"]
    assert only.last


def test_a_planned_pass_is_the_same_after_its_file_was_lost(config, broker, topic, tmp_path):
    broker.send([f"r{i}" for i in range(30)], topic, START)
    settings = config(rows_per_pass=20)
    one = source(settings, tmp_path, [])
    planned = one.after(None, Patience(lambda text: None, 0.02))
    before = Path(planned.data[0]).read_text()
    one.close()
    shutil.rmtree(tmp_path / "spool")
    broker.send(["more"] * 40, topic, START + 100)
    two = source(settings, tmp_path, [])
    assert two.again(planned, Patience(lambda text: None, 0.02)) == planned
    two.close()
    assert Path(planned.data[0]).read_text() == before


def test_json_and_arrow_messages(config, broker, topic, online):
    names = HEADER.split(",")
    rows = []
    for line in lines(40, 1):
        row = dict(zip(names, line.split(","), strict=True))
        whole = {**row, "click": int(row["click"]), "time": int(row["time"]), "price": float(row["price"])}
        rows.append({**whole, "site": row["site"].split("|"), "ignored": True})
    broker.send([json.dumps(row) for row in rows], topic, START)
    broker.send(["{}"], topic, START + 5 * DAY)
    settings = config(rows_per_pass=20, format="json")
    done = online(settings)
    assert (done.passes, done.rows) == (3, 40)

    columns = pa.schema([("click", pa.int64()), ("time", pa.int64()), ("price", pa.float32()), ("user", pa.string()),
                         ("ad", pa.string()), ("site", pa.list_(pa.string()))])  # fmt: skip
    messages = []
    for start in range(0, 40, 10):
        sink = io.BytesIO()
        with pa.ipc.new_stream(sink, columns) as writer:
            writer.write_table(pa.Table.from_pylist(rows[start : start + 10], columns))
        messages.append(sink.getvalue())
    other = topic + "-arrow"
    broker.send(messages, other, START)
    broker.send(messages[:1], other, START + 5 * DAY)
    settings["online"]["kafka"] = {**settings["online"]["kafka"], "topic": other, "format": "arrow"}
    shutil.rmtree(settings["run"]["dir"] + "/checkpoints")
    path = Path(settings["run"]["dir"]) / "passes.jsonl"
    path.unlink()
    arrow = online(settings)
    assert (arrow.rows, path.exists()) == (40, True)
    assert arrow.last["auc"] == done.last["auc"]


def test_a_bad_message_is_named_by_its_offset(config, broker, topic, online):
    broker.send(["not json"], topic, START, partition=3)
    broker.send(["{}"], topic, START + 5 * DAY)
    settings = config(rows_per_pass=20, format="json")
    with pytest.raises(DataError, match=f"{topic} partition 3 offset 0: Expecting value"):
        online(settings)
    assert online(settings, "data.bad_lines=skip").rows == 0


def test_bad_records_of_every_kind_are_kept_and_the_rest_is_learned(config, broker, topic, online, tmp_path):
    good = lines(30, 1)
    bad = [b"not a row", b"\xff\xfe", b"", b"1,x,y,u,a,s", b"x" * 900_000]
    broker.send([*good[:10], *bad, *good[10:]], topic, START)
    broker.send([lines(1, 1)[0]] * PARTITIONS, topic, START + 5 * DAY)
    settings = config(rows_per_pass=1000)
    settings["online"]["end_day"] = 20260101
    with pytest.raises(DataError, match=rf"{topic} partition \d offset \d: "):
        online(settings)
    done = online(settings, "data.bad_lines=quarantine", "data.max_bad_fraction=0.5")
    assert done.rows == 30
    kept = [json.loads(line) for line in (tmp_path / "run/quarantine/20260101-1.txt").read_text().splitlines()]
    expected = {(i % PARTITIONS, i // PARTITIONS): value for i, value in enumerate([b"g"] * 10 + bad)}
    assert {(one["partition"], one["offset"]) for one in kept} == {
        place for place, value in expected.items() if value != b"g"
    }
    for one in kept:
        text = base64.b64decode(one["base64"]) if "base64" in one else one["text"].encode()
        assert (one["topic"], text) == (topic, expected[one["partition"], one["offset"]])


def test_one_bad_record_in_a_small_pass_does_not_end_the_run(config, broker, topic, online):
    broker.send([*lines(3, 1), "bad", *lines(4, 2)], topic, START)
    broker.send([lines(1, 1)[0]] * PARTITIONS, topic, START + 5 * DAY)
    settings = config(rows_per_pass=4)
    settings["online"]["end_day"] = 20260101
    assert online(settings, "data.bad_lines=skip").rows == 7


def test_a_stream_of_garbage_ends_the_run_however_small_its_passes(config, broker, topic, online):
    broker.send([row if i % 5 else "{" for i, row in enumerate(lines(1600, 1))], topic, START, step_s=0.01)
    settings = config(rows_per_pass=300)
    with pytest.raises(DataError, match=r"\d\d\d of 1\d\d\d lines are bad, more than data.max_bad_fraction"):
        online(settings, "data.bad_lines=skip", "online.delta_every_passes=99", "online.checkpoint_every_passes=99")


def test_wrong_times_move_no_day(config, broker, topic, online, tmp_path):
    """Stamped 2099, before 1970, and months ahead of the stream's own clock while it replays an old day."""
    broker.send(lines(20, 1), topic, START)
    for stamp in (4070908800, START + 200 * DAY):
        broker.send(lines(2, 2), topic, stamp, partition=1)
    broker.send(lines(20, 3), topic, START + 60)
    broker.send(lines(20, 4), topic, START + DAY)
    broker.send([lines(1, 5)[0]] * PARTITIONS, topic, START + 2 * DAY)
    settings = config(rows_per_pass=1000)
    with pytest.raises(DataError, match="its timestamp 2099-01-01T00:00:00Z is ahead of the clock") as raised:
        online(settings)
    assert "set data.bad_lines=quarantine" in str(raised.value)
    done = online(settings, "data.bad_lines=quarantine", "data.max_bad_fraction=0.5")
    assert (done.rows, done.day) == (60, 20260102)
    (aside,) = (tmp_path / "run/quarantine").iterdir()
    kept = [json.loads(line) for line in aside.read_text().splitlines()]
    assert [one["reason"].split("Z is ")[1].split(" by ")[0] for one in kept] == [
        *["ahead of the clock"] * 2,
        *["later than the open day"] * 2,
    ]
    assert [one["text"] for one in kept] == lines(2, 2) * 2
    assert "clickfleet_online_bad_lines_total 4.0" in (tmp_path / "run/metrics.prom").read_text()


def test_a_gap_in_the_traffic_is_believed(config, broker, topic, tmp_path):
    broker.send([f"r{i}" for i in range(8)], topic, START)
    broker.send([f"s{i}" for i in range(8)], topic, START + 30 * DAY)
    settings = config(rows_per_pass=100)
    settings["online"]["end_day"] = 20260131
    found = passes(source(settings, tmp_path, [], clock=lambda: START + 31 * DAY + 60))
    assert [(one.day, len(rows_of(one)), one.bad_records) for one in found] == [(20260101, 8, 0), (20260131, 8, 0)]


def test_a_planned_pass_puts_the_same_records_aside_when_the_clock_has_gone_on(config, broker, topic, tmp_path):
    broker.send([f"r{i}" for i in range(8)], topic, START)
    broker.send(["early"], topic, START + 7200, partition=2)
    broker.send([f"s{i}" for i in range(8)], topic, START + 60)
    settings = config(rows_per_pass=17)
    settings["data"]["bad_lines"] = "skip"
    one = source(settings, tmp_path, [], clock=lambda: START + 100)
    planned = one.after(None, Patience(lambda text: None, 0.02))
    one.close()
    assert (planned.bad_records, "early" in rows_of(planned)) == (1, False)
    assert planned.position["aside"] == [[2, 2, 1, "clock"]]
    shutil.rmtree(tmp_path / "spool")
    later = source(settings, tmp_path, [], clock=lambda: START + 9000)
    assert later.again(planned, Patience(lambda text: None, 0.02)) == planned
    later.close()


def test_records_before_the_first_day_are_passed_over_and_counted(config, broker, topic, tmp_path):
    broker.send([f"old{i}" for i in range(8)], topic, START - 5 * DAY)
    broker.send([f"r{i}" for i in range(8)], topic, START)
    settings, said = config(rows_per_pass=8), []
    one = source(settings, tmp_path, said)
    assert rows_of(one.after(None, Patience(lambda text: None, 0.02))) == [f"r{i}" for i in range(8)]
    one.close()
    assert said == ["8 records from before online.start_day are skipped"]


def test_a_day_that_has_ended_does_not_come_again(config, broker, topic, tmp_path):
    broker.send([f"r{i}" for i in range(8)], topic, START)
    broker.send(["next"], topic, START + DAY, partition=0)
    one, patience = source(config(rows_per_pass=100), tmp_path, []), Patience(lambda text: None, 0.02)
    first = one.after(None, patience)
    assert (first.day, first.last) == (20260101, True)
    broker.send(["late"], topic, START + 5, partition=1)  # a partition that had nothing of the new day yet
    broker.send([f"end{p}" for p in range(PARTITIONS)], topic, START + 2 * DAY)
    second = one.after(first.position, patience)
    one.close()
    assert (second.day, second.number, rows_of(second)) == (20260102, 1, ["late", "next"])


def test_what_was_taken_when_waiting_was_called_off_is_read_again(config, broker, topic, tmp_path, monkeypatch):
    broker.send([f"r{i}" for i in range(8)], topic, START)
    one = source(config(rows_per_pass=8), tmp_path, [], clock=lambda: START + 100)  # the day goes on
    patience = Patience(lambda text: None, 0.02)
    first = one.after(None, patience)
    broker.send([f"s{i}" for i in range(4)], topic, START + 60)
    real, taken = one.broker.records, []

    def records(patience, within_s=None):
        """As when a worker is lost while the next pass is collected."""
        if taken:
            raise StopWaitingError
        taken.extend(real(patience))
        return taken

    with monkeypatch.context() as patch:
        patch.setattr(one.broker, "records", records)
        with pytest.raises(StopWaitingError):
            one.after(first.position, patience)
    broker.send([f"t{i}" for i in range(4)], topic, START + 70)
    second = one.after(first.position, patience)
    one.close()
    assert rows_of(second) == [f"{name}{i}" for name in "st" for i in range(4)]


def test_a_pass_ends_at_its_rows_or_its_interval_whichever_comes_first(config, broker, topic, tmp_path):
    broker.send([f"r{i}" for i in range(20)], topic, START, step_s=60)  # 20 minutes
    broker.send([f"s{i}" for i in range(4)], topic, START + 3600)
    broker.send([f"end{p}" for p in range(PARTITIONS)], topic, START + 2 * DAY)
    found = passes(source(config(interval="15min", rows_per_pass=8), tmp_path, []))
    assert sum(len(rows_of(one)) for one in found) == 24
    assert all(len(rows_of(one)) <= 8 for one in found)
    first = [sorted(int(row[1:]) for row in rows_of(one)) for one in found[:4]]
    assert sorted(row for one in first[:2] for row in one) == list(range(15))  # 8 and 7: to the end of the interval
    assert first[2] == list(range(15, 20))
    assert (found[-1].last, len(found)) == (True, 5)


def test_a_backlog_becomes_larger_passes(config, broker, topic, tmp_path):
    broker.send([f"r{i}" for i in range(100)], topic, START)
    one = source(config(rows_per_pass=10, max_rows_per_pass=60), tmp_path, [])
    patience = Patience(lambda text: None, 0.02)
    first = one.after(None, patience)
    assert (len(rows_of(first)), one.backlog) == (60, 40)
    second = one.after(first.position, patience)
    assert (len(rows_of(second)), one.backlog) == (40, 0)
    broker.send([f"s{i}" for i in range(12)], topic, START + 200)  # no longer behind
    assert len(rows_of(one.after(second.position, patience))) == 10
    shutil.rmtree(tmp_path / "spool")
    assert one.again(first, patience) == first  # a restart repeats what was written down
    one.close()


def test_a_backlog_of_intervals_is_merged_up_to_the_limit(config, broker, topic, tmp_path):
    broker.send([f"r{i}" for i in range(96)], topic, START, step_s=300)  # eight hours
    broker.send([f"end{p}" for p in range(PARTITIONS)], topic, START + 2 * DAY)
    settings = config(interval="1h")
    apart = passes(source(settings, tmp_path / "a", []))
    settings["online"]["kafka"]["max_rows_per_pass"] = 36
    merged = passes(source(settings, tmp_path / "b", []))
    assert [len(rows_of(one)) for one in apart] == [12] * 8 + [0]
    assert sum(len(rows_of(one)) for one in merged) == 96
    assert max(len(rows_of(one)) for one in merged) <= 36
    assert len(merged) <= 5


def test_a_pass_for_a_cluster_is_several_files(config, broker, topic, tmp_path):
    broker.send([f"r{i}" for i in range(90)], topic, START)
    settings = config(rows_per_pass=90)
    settings["mode"], settings["cluster"] = {"name": "async"}, {"workers": 2, "shards": 1}
    settings["data"]["batch_size"] = 10
    one = source(settings, tmp_path, [])
    found = one.after(None, Patience(lambda text: None, 0.02))
    one.close()
    assert [len(Path(path).read_text().splitlines()) for path in found.data] == [12, 12, 11, 11, 11, 11, 11, 11]
    assert rows_of(found) == sorted(f"r{i}" for i in range(90))


def test_kafka_that_is_down_is_awaited_by_name(config, tmp_path):
    settings = config(rows_per_pass=20)
    settings["online"]["kafka"]["brokers"] = "127.0.0.1:9"
    said = []

    class ToldError(Exception): ...

    def say(text):
        said.append(text)
        raise ToldError

    one = source(settings, tmp_path, said)
    with pytest.raises(ToldError):
        one.after(None, Patience(say, 0.02))
    assert said[0].startswith("waiting for Kafka at 127.0.0.1:9")
    one.close()


def test_waiting_for_records_can_be_called_off(config, broker, topic, tmp_path):
    broker.send(["one"], topic, START)
    patience = Patience(lambda text: None, 0.02)
    patience.cancel()
    one = source(config(rows_per_pass=20), tmp_path, [])
    with pytest.raises(StopWaitingError):
        one.after(None, patience)
    one.close()


def test_a_topic_made_anew_is_refused(config, broker, topic, tmp_path):
    broker.send(["one"], topic, START)
    one = source(config(rows_per_pass=20), tmp_path, [])
    position = {
        "day": 20260101,
        "pass": 1,
        "day_over": False,
        "end_s": START,
        "offsets": {str(p): 50 for p in range(4)},
    }
    with pytest.raises(DataError, match="retention removed the records, or the topic was created again"):
        one.after(position, Patience(lambda text: None, 0.02))
    one.close()


def test_rows_or_interval(config, online):
    with pytest.raises(ConfigError, match="needs rows_per_pass or interval"):
        online(config())


def test_records_have_no_header(config, online):
    settings = config(rows_per_pass=5)
    settings["data"]["format"] = "csv"
    with pytest.raises(ConfigError, match="the records of a topic have no header line"):
        online(settings)


def test_schema_is_what_the_tests_say():
    assert SCHEMA.time == "time"
