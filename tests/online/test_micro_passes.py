"""Micro-passes: a pass ends after a time or a number of rows, from every source. Nothing waits for more data than that."""

import shutil
import threading
import time
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest

from clickfleet.config import sections
from clickfleet.config.check import configure
from clickfleet.errors import ConfigError, DataError
from clickfleet.online.learn import learn
from clickfleet.online.passes import Patience, StopWaitingError
from clickfleet.online.sources.directories import ArrivingFiles
from clickfleet.online.sources.iterable import IterableSource
from clickfleet.serve import verification
from clickfleet.store.published import Log
from online.test_publisher import state_of
from served import WAIT_S, until
from streams import HEADER, lines

ZONE = ZoneInfo("UTC")
FOREVER = 1000.0
"""Seconds that no test waits: what ends such a pass is something else."""


def patience() -> Patience:
    return Patience(lambda text: None, 0.02)


def arriving(folder: Path, limits: sections.PassLimits, **more: object) -> ArrivingFiles:
    config = sections.Online(
        **{"dir": str(folder), "start_day": 20260101, "split_interval": 10.0, "pass_": limits, **more}  # type: ignore[arg-type]
    )
    return ArrivingFiles(config, ZONE, lambda text: None, lambda path: len(Path(path).read_text()))


def put(folder: Path, name: str, content: str = "x") -> None:
    """Write a file under another name and rename it, as a writer should."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f".{name}").write_text(content)
    (folder / f".{name}").rename(folder / name)


def names(found: object) -> list[str]:
    return ["/".join(path.rsplit("/", 2)[1:]) for path in found.data]  # type: ignore[attr-defined]


def test_folders_of_ten_seconds_are_read_by_rows(tmp_path: Path) -> None:
    """Whole files until a pass has its rows, across folders; a restart continues between two files of one."""
    for split, files in {"000000": "abcd", "000010": "ef"}.items():
        for name in files:
            put(tmp_path / "20260101" / split, name, "xx" if name == "a" else "x")
        (tmp_path / "20260101" / split / "_DONE").touch()
    put(tmp_path / "20260101" / "000020", "g")
    limits = sections.PassLimits(rows=2)
    source, found, position = arriving(tmp_path, limits), [], None
    for _ in range(2):
        found.append(source.after(position, patience()))
        position = found[-1].position
    source.close()
    again = arriving(tmp_path, limits)
    again.recall(found)
    for _ in range(2):
        found.append(again.after(position, patience()))
        position = found[-1].position
    again.close()
    assert [names(one) for one in found] == [
        ["000000/a"],
        ["000000/b", "000000/c"],
        ["000000/d", "000010/e"],
        ["000010/f", "000020/g"],
    ]
    assert [one.place for one in found] == [(20260101, number) for number in (1, 2, 3, 4)]


def test_a_file_that_arrives_ends_its_pass_by_time(tmp_path: Path) -> None:
    """The folders do not exist yet, and no other file follows."""
    source = arriving(tmp_path, sections.PassLimits(seconds=0.05))
    found = []
    finder = threading.Thread(target=lambda: found.append(source.after(None, patience())))
    finder.start()
    put(tmp_path / "20260101" / "000000", "a")
    finder.join(WAIT_S)
    source.close()
    assert names(found[0]) == ["000000/a"]


def test_a_folder_without_a_done_file_ends_when_it_is_quiet_and_the_next_has_files(tmp_path: Path) -> None:
    day = tmp_path / "20260101"
    put(day / "000000", "a")
    put(day / "000010", "b")
    source = arriving(tmp_path, sections.PassLimits(rows=2), done_file=None, quiet=0.01)
    first = source.after(None, patience())
    put(day / "000020", "c")
    put(day / "000020", "d")
    second = source.after(first.position, patience())
    source.close()
    assert (names(first), names(second)) == (["000000/a", "000010/b"], ["000020/c", "000020/d"])


def test_files_of_an_ended_folder_and_changed_files_are_reported(tmp_path: Path) -> None:
    day = tmp_path / "20260101"
    put(day / "000000", "a")
    (day / "000000" / "_DONE").touch()
    put(day / "000010", "b")
    source = arriving(tmp_path, sections.PassLimits(rows=2), poll=0.0)
    read = [source.after(None, patience())]
    put(day / "000010", "c")  # in time
    (day / "000010" / "b").write_text("changed")
    put(day / "000000", "late")
    put(day / "000010", "d")
    read.append(source.after(read[-1].position, patience()))
    assert names(read[-1]) == ["000010/c", "000010/d"]
    reports = source.late_files(read)
    source.close()
    assert {(report.folder[-6:], report.files) for report in reports} == {("000000", 1), ("000010", 1)}


def test_a_wait_for_files_ends_with_the_run(tmp_path: Path) -> None:
    source, waiting = arriving(tmp_path, sections.PassLimits(seconds=0.05)), patience()
    stopped = []

    def find() -> None:
        try:
            source.after(None, waiting)
        except StopWaitingError:
            stopped.append(True)

    finder = threading.Thread(target=find)
    finder.start()
    waiting.cancel()
    finder.join(WAIT_S)
    source.close()
    assert stopped == [True]


def test_items_of_a_stream_are_gathered_by_rows_and_by_day() -> None:
    items = [
        ({"x": [0] * rows}, day, number)
        for rows, day, number in [
            (3, 20260101, 1),
            (1, 20260101, 2),
            (9, 20260101, 5),
            (1, 20260102, 1),
            (1, 20260102, 2),
        ]
    ]
    source, found, position = IterableSource(items, limits=sections.PassLimits(rows=4)), [], None
    while (one := source.after(position, patience())) is not None:
        found.append((one.place, len(one.data.items)))
        position = one.position
    source.close()
    assert found == [((20260101, 2), 2), ((20260101, 5), 1), ((20260102, 2), 2)]


def test_rows_that_cannot_be_counted_are_refused() -> None:
    source = IterableSource([(iter([]), 20260101, 1)], limits=sections.PassLimits(rows=4))
    with pytest.raises(DataError, match="cannot count the rows"):
        source.after(None, patience())
    source.close()


def test_a_failing_stream_fails_the_run() -> None:
    def stream():  # type: ignore[no-untyped-def]
        yield {"x": [1]}, 20260101, 1
        raise OSError("the socket is closed")

    source = IterableSource(stream(), limits=sections.PassLimits(seconds=FOREVER))
    with pytest.raises(OSError, match="socket"):
        source.after(None, patience())
    source.close()


@pytest.mark.parametrize(
    ("limits", "word"),
    [({}, "neither seconds nor rows"), ({"seconds": 0}, "online.pass.seconds"), ({"rows": 0}, "online.pass.rows")],
)
def test_limits_that_end_no_pass_are_refused(stream, online, limits, word) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError, match=word):
        online(stream(online={"pass": limits}))


def test_seconds_may_have_a_unit() -> None:
    for text, seconds in {"1s": 1.0, "250ms": 0.25}.items():
        assert configure({"online": {"pass": text}}).online.pass_ == sections.PassLimits(seconds)
    assert configure({"online": {"pass": {"seconds": "2s", "rows": 5}}}).online.pass_ == sections.PassLimits(2.0, 5)


def table(rows: int, seed: int) -> dict[str, list[object]]:
    columns = dict(
        zip(HEADER.split(","), zip(*(line.split(",") for line in lines(rows, seed)), strict=True), strict=True)
    )
    numbers = {name: [float(x) for x in columns[name]] for name in ("click", "price")}
    return {
        **{name: list(values) for name, values in columns.items()},
        **numbers,
        "time": [int(x) for x in columns["time"]],
        "site": [x.split("|") for x in columns["site"]],
    }


def test_a_quiet_stream_is_published_at_once(stream, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """The stream yields nothing more until what it yielded was published: neither the pass nor its entry waits for more."""
    config = stream(days=1, online={"dir": None, "pass": "50ms", "start_day": None, "end_day": None})
    config["train"]["deterministic"] = False
    log = Log(tmp_path / "run/published")
    learned = []

    def source():  # type: ignore[no-untyped-def]
        for number in range(1, 5):
            before = len(log.lines())
            yield table(40, number), 20260101, number
            until(lambda before=before: len(log.lines()) > before)
            learned.append(number)

    done = learn(config, source=source(), quiet=True)
    assert (learned, done.rows) == ([1, 2, 3, 4], 160)
    verification.verify(tmp_path / "run")


def test_deltas_written_during_later_passes_give_the_base(stream, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """Entries are written while training goes on. Put together, they are the base at the end of the day, which removes nothing."""
    config = stream(
        days=1,
        online={"dir": None, "pass": {"rows": 50}, "start_day": None, "end_day": None},
        table={"delete_threshold": 0.0, "base_threshold": 0.0},
    )
    config["train"]["deterministic"] = False
    done = learn(config, source=[(table(50, number), 20260101, number) for number in range(1, 41)], quiet=True)
    assert (done.rows, done.passes) == (2000, 40)
    log = Log(tmp_path / "run/published")
    kinds = [line.kind for line in log.lines()]
    assert (kinds[0], kinds[-1], set(kinds[1:-1])) == ("base", "base", {"delta"})
    assert state_of(log, upto=len(kinds) - 1) == state_of(log)
    verification.verify(tmp_path / "run")


def test_one_log_however_often_it_is_run(stream, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """A deterministic run with micro-passes publishes the same bytes again."""
    config = stream(days=1, online={"dir": None, "pass": {"rows": 50}, "start_day": None, "end_day": None})
    items = [(table(25, number), 20260101, number) for number in range(1, 13)]
    logs = []
    for _ in range(2):
        learn(config, source=items, quiet=True)
        logs.append((tmp_path / "run/published/LOG.jsonl").read_bytes())
        for name in ("published", "checkpoints", "passes.jsonl", "metrics.jsonl"):
            path = tmp_path / "run" / name
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert logs[0] == logs[1]
    assert logs[0].count(b"\n") > 6


def test_a_topic_ends_its_passes_by_rows_or_time(stream, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """Whichever comes first: four rows, or a moment after the first record; no pass waits for records that do not come."""
    pytest.importorskip("confluent_kafka")
    from clickfleet.online.sources.kafka import Topic
    from online.test_kafka import Broker, rows_of

    broker, topic = Broker(), f"micro-{time.monotonic_ns()}"
    section = {"brokers": broker.address, "topic": topic, "max_rows_per_pass": None}
    config = stream(days=1, rows=1, online={"dir": None, "kafka": section, "pass": {"seconds": 0.5, "rows": 4}})
    config["online"]["start_day"] = config["online"]["end_day"] = None
    config["data"]["format"] = {"name": "csv", "columns": HEADER.split(",")}
    source = Topic(configure(config), ZONE, tmp_path / "spool", lambda text: None)
    broker.send([f"r{i}" for i in range(9)], topic, time.time() - 1, step_s=0.01, partition=0)
    found, position = [], None
    for _ in range(3):
        found.append(source.after(position, patience()))
        position = found[-1].position
    broker.send(["later"], topic, time.time(), partition=1)
    found.append(source.after(position, patience()))
    source.close()
    assert [len(rows_of(one)) for one in found] == [4, 4, 1, 1]
    assert sorted(row for one in found for row in rows_of(one)) == sorted([f"r{i}" for i in range(9)] + ["later"])
