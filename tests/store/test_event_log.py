"""Logs of events: written by several, read while they grow, whole after kills, and read again from any place."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clickfleet.data.events import (
    FEEDBACK,
    REQUESTS,
    SHOWS,
    Show,
    feedback_columns,
    feedback_of,
    feedback_rows,
    read_columns,
    read_lines,
    read_message,
    show_columns,
    shows_of,
    topic_of,
)
from clickfleet.errors import ConfigError
from clickfleet.store import event_log
from clickfleet.store.event_log import (
    EventFolder,
    LogPlace,
    LogWriter,
    StreamReader,
    as_message,
    complete_leftovers,
    seal,
    stream_bytes,
    stream_head,
)
from small_disk import small_disk


def shows(first: int, count: int) -> pa.RecordBatch:
    return show_columns([Show(f"r{i}", "0", 1_000_000 * (i + 1), "{}") for i in range(first, first + count)])


class Reading:
    """All streams of a folder, read on and on."""

    def __init__(self, folder: Path, places: dict[str, LogPlace] | None = None, schema: pa.Schema = SHOWS) -> None:
        self.folder, self.schema, self.places = EventFolder(folder), schema, dict(places or {})
        self.readers: dict[str, StreamReader] = {}
        self.warnings: list[str] = []
        self.bad = 0

    def new(self) -> list[str]:
        """The requests that were not read before."""
        listed, found = self.folder.streams(), []
        for name in sorted(listed):
            if name not in self.readers:
                place = self.places.get(name, LogPlace())
                self.readers[name] = StreamReader(self.folder, name, self.schema, place, self.warnings.append)
            while (read := self.readers[name].read(listed)) is not None:
                found += read.batch.column("request").to_pylist()
                self.bad += read.bad
        self.places = {name: reader.place for name, reader in self.readers.items()}
        return found

    def close(self) -> None:
        for reader in self.readers.values():
            reader.close()


@pytest.fixture
def reading() -> Any:
    made: list[Reading] = []

    def open_(*args: Any, **more: Any) -> Reading:
        made.append(Reading(*args, **more))
        return made[-1]

    yield open_
    for one in made:
        one.close()


def names(first: int, end: int) -> list[str]:
    return [f"r{i}" for i in range(first, end)]


def test_a_log_is_read_while_it_grows(tmp_path: Path, reading: Callable[..., Reading]) -> None:
    log, writer = reading(tmp_path), LogWriter(tmp_path, SHOWS)
    assert log.new() == []
    for first in range(0, 30, 3):
        writer.write(shows(first, 3))
        assert log.new() == names(first, first + 3)
    assert log.new() == []
    writer.close()
    assert log.new() == []
    (file,) = tmp_path.glob("*/*")
    assert pa.ipc.open_file(str(file)).read_all().column("request").to_pylist() == names(0, 30)


def test_a_reader_goes_on_in_a_file_that_became_complete(tmp_path: Path, reading: Callable[..., Reading]) -> None:
    writer = LogWriter(tmp_path, SHOWS)
    places: dict[str, LogPlace] = {}
    seen: list[str] = []
    for step in range(12):
        writer.rotate_bytes = 1 if step % 3 == 2 else 1 << 30
        writer.write(shows(5 * step, 5))
        if step % 4 == 3:
            for thread in event_log.threading.enumerate():
                if thread.name == "clickfleet-seal":
                    thread.join()
        if step % 2:
            log = reading(tmp_path, places)
            seen += log.new()
            places = log.places
    writer.close()
    log = reading(tmp_path, places)
    assert seen + log.new() == names(0, 60)
    assert not log.warnings


def test_several_writers_do_not_step_on_each_other(tmp_path: Path, reading: Callable[..., Reading]) -> None:
    code = (
        "import sys; from clickfleet.data.events import *; from clickfleet.store.event_log import LogWriter\n"
        "log = LogWriter(sys.argv[1], SHOWS, rotate_bytes=3000)\n"
        "for i in range(200): log.write(show_columns([Show(f'{sys.argv[2]}-{i}', '0', 1, '{}')]))\n"
        "log.close()"
    )
    writers = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path), str(n)]) for n in range(3)]
    assert [writer.wait() for writer in writers] == [0, 0, 0]
    log = reading(tmp_path)
    found = log.new()
    assert sorted(found) == sorted(f"{n}-{i}" for n in range(3) for i in range(200))
    assert [name for name in found if name.startswith("1-")] == [f"1-{i}" for i in range(200)]


KILLED = """
import sys
from clickfleet.data.events import *
from clickfleet.store.event_log import LogWriter
log = LogWriter(sys.argv[1], SHOWS, rotate_bytes=20000)
for i in range(1_000_000):
    log.write(show_columns([Show(f"{i}-{j}", "0", 1, "x" * 300) for j in range(10)]))
    print(i, flush=True)
"""


def test_a_kill_leaves_whole_batches_which_the_next_writer_completes(
    tmp_path: Path, reading: Callable[..., Reading]
) -> None:
    for round_ in range(3):
        folder = tmp_path / str(round_)
        process = subprocess.Popen([sys.executable, "-c", KILLED, str(folder)], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        for line in process.stdout:
            if int(line) >= 20 + 7 * round_:
                break
        os.kill(process.pid, signal.SIGKILL)
        written = [int(line), *map(int, process.stdout.read().split())][-1]
        process.stdout.close()
        process.wait()
        found = reading(folder).new()
        assert len(found) % 10 == 0
        assert found[: 10 * (written + 1)] == [f"{i}-{j}" for i in range(written + 1) for j in range(10)]
        complete_leftovers(folder)
        assert not list(folder.glob("*/*.open"))
        log = reading(folder)
        assert log.new() == found
        assert not log.warnings


def test_a_growing_file_of_a_living_writer_is_left_alone(tmp_path: Path) -> None:
    writer = LogWriter(tmp_path, SHOWS)
    writer.write(shows(0, 1))
    assert complete_leftovers(tmp_path) == []
    writer.close()


def test_a_torn_end_is_left_out(tmp_path: Path, reading: Callable[..., Reading]) -> None:
    day = tmp_path / "20260101"
    day.mkdir()
    whole = stream_head(SHOWS) + stream_bytes(shows(0, 2))
    torn = stream_bytes(shows(2, 2))
    for cut in (1, 7, 9, 100, len(torn) - 1):
        path = day / f"20260101T000000-{cut:08x}-000001.arrow.open"
        path.write_bytes(whole + torn[:cut])
        assert reading(tmp_path).new() == names(0, 2)
        assert seal(path).name.endswith(".arrow")
        assert reading(tmp_path).new() == names(0, 2)
        for old in day.iterdir():
            old.unlink()


def test_a_full_disk_leaves_the_log_as_it_was(tmp_path: Path, reading: Callable[..., Reading]) -> None:
    with small_disk(tmp_path / "disk", 2 << 20) as disk:
        log, writer = reading(disk.folder / "log"), LogWriter(disk.folder / "log", SHOWS)
        big = show_columns([Show(f"b{i}", "0", 1, os.urandom(400).hex()) for i in range(500)])
        writer.write(shows(0, 3))
        disk.leave(8192)
        with pytest.raises(OSError, match="No space left"):
            writer.write(big)
        assert log.new() == names(0, 3)
        writer.rotate_bytes = 1
        writer.write(shows(3, 1))  # completing it takes more space than there is: it only gets its final name
        writer.close()
        disk.free()
        writer = LogWriter(disk.folder / "log", SHOWS)
        writer.write(big)
        writer.close()
        found = log.new()
        assert "r3" in found  # in which order, depends on the names of the two writers
        assert len(found) == 501
        assert not log.warnings
        log.close()


def test_files_of_other_programs_are_read_too(tmp_path: Path, reading: Callable[..., Reading]) -> None:
    table = pa.table(
        {"features": ['{"a":1}'], "request": ["arrow"], "item": ["x"], "time": pa.array([5], SHOWS.field("time").type)}
    )
    with pa.OSFile(str(tmp_path / "theirs.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as out:
        out.write_table(table)
    lines = tmp_path / "more.jsonl"
    lines.write_text('{"request": "one", "features": {"a": 1}, "time": 3}\n{"no": 1}\n{"request": "half')
    (tmp_path / "notes.txt").write_text("not an event")
    (tmp_path / "_hidden.jsonl").write_text('{"request": "hidden", "features": {}}\n')
    log = reading(tmp_path)
    assert sorted(log.new()) == ["arrow", "one"]
    assert log.bad == 1
    with lines.open("a") as out:
        out.write('", "features": {}}\n')
    assert log.new() == ["half"]
    again = reading(tmp_path, log.places)
    assert again.new() == []


def test_a_damaged_file_is_named_and_left_out(tmp_path: Path, reading: Callable[..., Reading]) -> None:
    writer = LogWriter(tmp_path, SHOWS, rotate_bytes=1)
    for i in range(3):
        writer.write(shows(i, 1))
    writer.close()
    second = sorted(tmp_path.glob("*/*"))[1]
    second.write_bytes(second.read_bytes()[:-40] + b"x" * 40)
    log = reading(tmp_path)
    assert log.new() == ["r0", "r2"]
    (warning,) = log.warnings
    assert second.name in warning
    assert log.bad == 1


def test_a_file_that_was_removed_too_early_is_reported(tmp_path: Path, reading: Callable[..., Reading]) -> None:
    writer = LogWriter(tmp_path, SHOWS, rotate_bytes=1)
    for i in range(4):
        writer.write(shows(i, 1))
    writer.close()
    files = sorted(tmp_path.glob("*/*"))
    files[1].unlink()
    files[2].unlink()
    log = reading(tmp_path)
    assert log.new() == ["r0", "r3"]
    assert "000002 to 3 was removed before it was read" in log.warnings[0]


def test_a_file_that_is_being_copied_is_read_when_it_is_whole(
    tmp_path: Path, reading: Callable[..., Reading], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = stream_head(SHOWS) + stream_bytes(shows(0, 2))
    with pa.BufferOutputStream() as sink:
        with pa.ipc.new_file(sink, SHOWS) as out:
            out.write_batch(shows(0, 2))
        content = sink.getvalue().to_pybytes()
    path = tmp_path / "copy.arrow"
    path.write_bytes(content[: len(content) // 2])
    log = reading(tmp_path)
    assert log.new() == []
    path.write_bytes(content)
    assert log.new() == names(0, 2)
    (tmp_path / "never.arrow").write_bytes(whole[:100])
    os.utime(tmp_path / "never.arrow", (time.time() - 60,) * 2)
    assert log.new() == []
    assert "never.arrow is damaged" in log.warnings[0]
    assert log.new() == []
    assert len(log.warnings) == 1


# Shows with a row per request, as a server writes them


def requests(first: int, *counts: int, user: str | None = '{"u": 1}') -> pa.RecordBatch:
    """Requests with so many rows each."""
    columns = {
        "request": [f"r{first + i}" for i in range(len(counts))],
        "time": [first + i for i in range(len(counts))],
        "rows": [
            [
                {"item": str(row), "features": f'{{"a": {row}}}', "position": row or None, "score": 0.5}
                for row in range(count)
            ]
            for count in counts
        ],
        "model": ["m"] * len(counts),
        "sequence": [7] * len(counts),
        "route": [None] * len(counts),
        "user": [user] * len(counts),
    }
    return pa.record_batch([pa.array(columns[field.name], field.type) for field in REQUESTS], schema=REQUESTS)


@given(
    st.lists(
        st.tuples(st.text(max_size=3), st.integers(0, 4), st.none() | st.text(max_size=3), st.integers(-5, 5)),
        max_size=5,
    ),
    st.integers(0, 2),
)
def test_every_row_has_what_its_request_has(some: list[tuple[str, int, str | None, int]], skipped: int) -> None:
    rows = [
        [{"item": f"{i}", "features": name * i, "position": i or None, "score": None} for i in range(count)]
        for name, count, _, _ in some
    ]
    columns = {"request": [name for name, *_ in some], "rows": rows, "user": [user for _, _, user, _ in some]}
    columns |= {"time": [when for *_, when in some], "sequence": [when for *_, when in some]}
    nothing = [None] * len(some)
    batch = pa.record_batch(
        [pa.array(columns.get(field.name, nothing), field.type) for field in REQUESTS], schema=REQUESTS
    )
    found = shows_of(batch.slice(skipped))
    found.validate(full=True)
    assert found.schema.equals(SHOWS, check_metadata=True)
    expected = [
        (name, f"{i}", when, name * i, i or None, None, when, None, None, user)
        for name, count, user, when in some[skipped:]
        for i in range(count)
    ]
    assert found.equals(show_columns([Show(*row) for row in expected]))
    assert shows_of(found) is found


def test_a_log_of_requests_is_read_row_by_row(tmp_path: Path, reading: Callable[..., Reading]) -> None:
    """While it grows, from the middle of a request on, and when it is complete."""
    writer = LogWriter(tmp_path, REQUESTS)
    writer.write(requests(0, 2, 3))
    log = reading(tmp_path)
    assert log.new() == ["r0"] * 2 + ["r1"] * 3
    writer.write(requests(2, 1, 0, 2))
    middle = {name: LogPlace(number, 4) for name, (number, _) in log.places.items()}
    rest = ["r1", "r2", "r4", "r4"]
    assert log.new() == rest[1:]
    assert reading(tmp_path, middle).new() == rest
    writer.close()
    (whole,) = tmp_path.glob("*/*.arrow")
    table = pa.ipc.open_file(str(whole)).read_all()
    assert table.schema.equals(SHOWS, check_metadata=True)
    assert table["position"].to_pylist() == [None, 1, None, 1, 2, None, None, 1]
    assert reading(tmp_path, middle).new() == rest
    assert reading(tmp_path, log.places).new() == []


def test_a_log_of_requests_that_died_before_its_first_one_is_an_empty_log_of_shows(tmp_path: Path) -> None:
    path = tmp_path / "20260101" / "20260101T000000-00000000-000001.arrow.open"
    path.parent.mkdir()
    path.write_bytes(stream_head(REQUESTS))
    (whole,) = complete_leftovers(tmp_path)
    table = pa.ipc.open_file(str(whole)).read_all()
    assert (table.schema, len(table)) == (SHOWS, 0)


def test_rows_that_would_fill_the_memory_are_refused(tmp_path: Path, reading: Callable[..., Reading]) -> None:
    """A file of a megabyte whose user would be there 3,000 times."""
    huge = requests(0, 3000, user="u" * 1_000_000)
    with pytest.raises(ValueError, match="'user' of all rows has more than 1024 MiB"):
        shows_of(huge)
    (tmp_path / "theirs.arrows").write_bytes(as_message(huge))
    log = reading(tmp_path)
    assert log.new() == []
    os.utime(tmp_path / "theirs.arrows", (time.time() - 60,) * 2)
    assert log.new() == []
    assert "1024 MiB" in log.warnings[0]


@pytest.mark.parametrize("schema", [SHOWS, REQUESTS])
def test_an_event_that_lacks_a_value_is_left_out_and_counted(
    tmp_path: Path, schema: pa.Schema, reading: Callable[..., Reading]
) -> None:
    """Arrow does not check what a schema says about missing values."""
    good = shows(0, 1) if schema is SHOWS else requests(0, 1)
    bad = [pa.nulls(1, field.type) if field.name == "request" else good.column(field.name) for field in schema]
    both = pa.Table.from_batches([pa.record_batch(bad, schema=schema), good]).combine_chunks().to_batches()[0]
    (tmp_path / "theirs.arrows").write_bytes(as_message(both))
    log = reading(tmp_path)
    assert log.new() == ["r0"]
    assert log.bad == 1


# Events


def test_topics() -> None:
    for wrong in ("kafka://", "kafka://host", "kafka://host/", "kafka://host/a/b", "kafka:///t", "kafka://h/a b"):
        with pytest.raises(ConfigError, match="names no Kafka topic"):
            topic_of(wrong)
    assert topic_of("/shows") is None


@given(
    st.lists(
        st.fixed_dictionaries(
            {
                "request": st.text(st.characters(codec="utf-8"), min_size=1, max_size=9),
                "label": st.dictionaries(
                    st.text(st.characters(codec="utf-8"), min_size=1), st.integers(-9, 9), min_size=1
                ),
            },
            optional={"item": st.integers(0, 99), "time": st.floats(0, 1e10), "event": st.text("ab", min_size=1)},
        )
    )
)
def test_feedback_is_the_same_as_columns_lines_and_messages(events: list[dict[str, Any]]) -> None:
    wanted = [feedback_of(event, 7, f"made-{i}") for i, event in enumerate(events)]
    columns = feedback_columns(wanted)
    assert feedback_rows(columns) == wanted
    assert feedback_rows(read_message(as_message(columns), FEEDBACK, 0).batch) == wanted
    lines = "\n".join(json.dumps(event) for event in events).encode()
    read = feedback_rows(read_message(lines, FEEDBACK, 7).batch)
    assert [one._replace(event="") for one in read] == [one._replace(event="") for one in wanted]


def test_lines_that_are_no_events_are_counted_with_a_reason() -> None:
    read = read_lines(b'{"request": "r", "label": {"click": 1}, "extra": 1}\n\nx\n[1]\n{"request": NaN}\n', FEEDBACK, 5)
    assert (len(read.batch), read.bad) == (1, 3)
    assert "Expecting value" in read.reason
    for line, reason in (
        (b'{"request": "r"}', "features must be an object"),
        (b'{"request": "r", "features": {}, "position": 0}', "position must be a number"),
        (b'{"request": "r", "features": {}, "score": "x"}', "score must be a number"),
        (b'{"request": "r", "features": {}, "sequence": -1}', "sequence must be a number"),
        (b'{"features": {}}', "the request must be a text"),
    ):
        assert reason in read_lines(line, SHOWS, 5).reason


def test_columns_of_another_kind_are_refused() -> None:
    with pytest.raises(ValueError, match="no column 'features'"):
        read_columns(feedback_columns([]), SHOWS)
    table = pa.record_batch(
        {**{name: shows(0, 2).column(name) for name in ("request", "item", "features")}, "time": ["x", "y"]}
    )
    with pytest.raises(ValueError, match="column 'time'"):
        read_columns(table, SHOWS)
    nulls = pa.record_batch(
        {**{name: shows(0, 2).column(name) for name in ("item", "features", "time")}, "request": ["a", None]}
    )
    read = read_columns(nulls, SHOWS)
    assert (len(read.batch), read.bad, read.reason) == (1, 1, "a value is missing")
    assert read_message(b"\xff\xff\xff\xff\x00\x01", SHOWS, 0).bad == 1
