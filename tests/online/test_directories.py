"""Folders without a done file: read once they are quiet; what comes later is reported, not lost in silence."""

import json
import shutil
import threading
import time
from zoneinfo import ZoneInfo

import fsspec
import pytest

from clickfleet.config import sections
from clickfleet.errors import ConfigError
from clickfleet.online.learn import learn
from clickfleet.online.passes import Patience, StopWaitingError
from clickfleet.online.sources.directories import Directories
from streams import HEADER, lines


class Clock:
    """Time that passes only when told."""

    def __init__(self, now_s: float) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


class Waiting(Patience):
    """Does something each time that it is waited, and then lets time pass."""

    def __init__(self, clock: Clock, *acts, step_s: float = 20.0) -> None:
        super().__init__(lambda text: None, 0.0)
        self.clock, self.acts, self.step_s = clock, list(acts), step_s
        self.waited: list[str] = []

    def wait(self, what: str) -> None:
        self.waited.append(what)
        if len(self.waited) > 50:
            raise StopWaitingError
        if self.acts:
            self.acts.pop(0)()
        self.clock.now_s += self.step_s


def source(folder, clock, wall=None):
    """Folders by a clock of ours; `wall`, where it is another, is compared with the times of files."""
    config = sections.Online(dir=str(folder), start_day=20260101, split_interval=43200.0, done_file=None)
    return Directories(config, ZoneInfo("UTC"), lambda text: None, clock=wall or clock, elapsed=clock)


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "logs/20260101/0000"
    made.mkdir(parents=True)
    return made


def test_a_folder_is_read_once_it_is_quiet(folder):
    clock = Clock(0.0)
    (folder / "part-0").write_text("a")
    grow = [lambda n=n: (folder / f"part-{n}").write_text("b" * n) for n in (1, 2, 3)]
    waiting = Waiting(clock, *grow)
    found = source(folder.parents[1], clock, wall=time.time).after(None, waiting)
    assert [path.rsplit("/", 1)[1] for path in found.data] == ["part-0", "part-1", "part-2", "part-3"]
    assert found.sizes == (1, 1, 2, 3)
    assert set(waiting.waited) == {f"30 s without changes in {folder} (online.quiet)"}
    assert len(waiting.waited) >= 4


def test_a_file_that_grows_is_not_quiet(folder):
    clock, part = Clock(0.0), folder / "part-0"
    part.write_text("a")
    grow = [lambda: part.write_text(part.read_text() + "more")] * 4
    found = source(folder.parents[1], clock, wall=time.time).after(None, Waiting(clock, *grow))
    assert found.sizes == (17,)


def test_an_old_folder_is_read_at_once(folder):
    (folder / "part-0").write_text("a")
    clock = Clock((folder / "part-0").stat().st_ctime + 31)
    waiting = Waiting(clock)
    assert len(source(folder.parents[1], clock).after(None, waiting).data) == 1
    assert not waiting.waited


def test_an_empty_folder_waits_for_files_or_for_the_next_folder(folder):
    clock = Clock(folder.stat().st_mtime + 1000)
    following = folder.parent / "1200"

    def begin_next():
        following.mkdir()
        (following / "part-0").write_text("a")

    waiting = Waiting(clock, lambda: None, begin_next)
    found = source(folder.parents[1], clock).after(None, waiting)
    assert found.data == ()
    assert waiting.waited[0] == f"files in {folder}, or in {following}"


@pytest.mark.parametrize("name", ["x.tmp", "x.csv._COPYING_", ".x", "_x", "x.inprogress", "x~", ".x.csv.Ab12"])
def test_temporary_names_are_never_read(folder, name):
    (folder / "part-0").write_text("a")
    (folder / name).write_text("half")
    clock = Clock(folder.stat().st_mtime + 1000)
    found = source(folder.parents[1], clock).after(None, Waiting(clock))
    assert [path.rsplit("/", 1)[1] for path in found.data] == ["part-0"]


def test_an_object_store_is_listed_by_sizes_and_times():
    fs, clock = fsspec.filesystem("memory"), Clock(0.0)
    root = "/quiet-logs/20260101/0000"
    fs.pipe_file(f"{root}/part-0", b"a")
    clock.now_s = fs.info(f"{root}/part-0")["created"].timestamp()
    waiting = Waiting(clock, lambda: fs.pipe_file(f"{root}/part-1", b"bc"))
    one = source("memory://quiet-logs", clock)
    found = one.after(None, waiting)
    assert found.sizes == (1, 2)
    assert len(waiting.waited) >= 2
    assert one.late_files([found]) == []
    fs.pipe_file(f"{root}/part-2", b"d")
    assert [(late.files, late.bytes) for late in one.late_files([found])] == [(1, 1)]


def test_what_comes_late_is_reported_once(folder):
    (folder / "part-0").write_text("a")
    clock = Clock(folder.stat().st_mtime + 1000)
    one = source(folder.parents[1], clock)
    found = one.after(None, Waiting(clock))
    assert one.late_files([found]) == []
    (folder / "part-1").write_text("bc")
    (folder / "part-0").write_text("aaaa")
    (folder / "part-2.tmp").write_text("no")
    (late,) = one.late_files([found])
    assert (late.day, late.number, late.files, late.bytes) == (20260101, 1, 2, 6)
    assert one.late_files([found]) == []
    restarted = source(folder.parents[1], clock)
    assert restarted.late_files([found]) == [late]


def test_rows_that_come_after_the_done_file_are_an_alarm(stream, online, tmp_path):
    config = stream(days=2)
    stopped = online(config, "online.end_day=20260101")
    assert stopped.rows == 120
    late = tmp_path / "logs/20260101/1200/part-1.csv"
    late.write_text("\n".join([HEADER, *lines(5, 1)]) + "\n")
    assert online(config, "run.report=true").rows == 120
    words = f"1 files ({late.stat().st_size} bytes) of {late.parent} arrived or changed after 20260101 pass 2 was read"
    assert f"ALARM: {words}" in (tmp_path / "run/log.txt").read_text()
    kinds = [json.loads(line)["kind"] for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert kinds.count("late_files") == 1
    assert "clickfleet_online_late_files_total 1.0\n" in (tmp_path / "run/metrics.prom").read_text()
    assert words in (tmp_path / "run/report.html").read_text()


def test_a_done_file_with_any_name_is_no_late_file(stream, online, tmp_path):
    config = stream(days=1, online={"end_day": 20260101, "done_file": "to.hadoop.done"})
    for done in (tmp_path / "logs/20260101").glob("*/_DONE"):
        done.rename(done.with_name("to.hadoop.done"))
    assert online(config).rows == 120
    assert "ALARM" not in (tmp_path / "run/log.txt").read_text()


def test_a_half_made_folder_is_waited_for_by_a_run(stream, tmp_path):
    config = stream(days=1, online={"end_day": 20260101, "done_file": None, "quiet": "1s"})
    half = tmp_path / "logs/20260101/1200"
    for path in half.iterdir():
        path.unlink()
    done = []
    thread = threading.Thread(target=lambda: done.append(learn(config, quiet=True)))
    thread.start()
    log = tmp_path / "run/log.txt"
    while not (log.exists() and f"waiting for files in {half}" in log.read_text()):
        assert thread.is_alive()
        time.sleep(0.01)
    for n in range(4):
        (tmp_path / f"part-{n}.csv").write_text("\n".join([HEADER, *lines(10, n)]) + "\n")
    for n in range(4):  # at once: the folder must not seem quiet in between
        (tmp_path / f"part-{n}.csv").rename(half / f"part-{n}.csv")
    thread.join()
    assert done[0].rows == 60 + 40


def test_a_stream_may_begin_in_the_middle_of_a_day(stream, online, tmp_path):
    """The folders before it need not exist; a restart goes on after the last pass, not at the first."""
    config = stream(days=2, splits=4, online={"end_day": 20260102})
    for folder in ("0000", "0600"):
        shutil.rmtree(tmp_path / "logs/20260101" / folder)
    stopped = online(config, "online.start_pass=3", "online.end_day=20260101")
    assert (stopped.passes, stopped.rows) == (2, 120)
    assert online(config, "online.start_pass=3").rows == 240
    log = (tmp_path / "run/log.txt").read_text()
    assert "20260101 pass 3 begins" in log
    assert "20260102 pass 1 begins" in log
    with pytest.raises(ConfigError, match="a day has only 4 passes"):
        online(config | {"run": {"dir": str(tmp_path / "other")}}, "online.start_pass=5")
