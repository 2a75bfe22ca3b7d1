"""Rows beyond the memory limit on disk: the same bits as in memory, through kills, a full disk and damaged files."""

import os
import random
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clickfleet import Table
from clickfleet.errors import ConfigError, TableError
from clickfleet.store import checkpoint

F = np.float32
LIMIT = 3_000_000
SMALL = {"memory_limit": LIMIT, "snapshot_reserve": LIMIT // 4}
SOAK = bool(os.environ.get("CLICKFLEET_SOAK"))


def content(table: Table, rows=None) -> tuple:
    """Every column of every row by key, and the keys that are to be published or deleted."""
    found = {}
    with rows or table.snapshot() as cut:
        for part in cut:
            columns = [column for value in part.values() if (column := np.asarray(value)).ndim]
            size = len(part["key"])
            for i, key in enumerate(part["key"].tolist()):
                assert key not in found
                found[key] = b"".join(column[i : i + 1].tobytes() for column in columns if len(column) == size)
        lists = [sorted(set(np.asarray(getattr(cut, name, ())).tolist())) for name in ("changed", "deleted")]
    return found, *lists


class History:
    """The same calls on several tables, drawn from a seed."""

    def __init__(self, seed: int, size: int, tables: list[Table]) -> None:
        self.rng, self.size, self.tables, self.top = np.random.default_rng(seed), size, tables, 0

    def keys(self) -> np.ndarray:
        """Old keys, new keys, and often the same."""
        self.top += self.size // 2
        recent = self.rng.integers(max(0, self.top - 3 * self.size), self.top, self.size // 2, dtype=np.uint64)
        often = (self.top * self.rng.random(self.size // 2) ** 3).astype(np.uint64)
        return np.concatenate([recent, often])

    def batch(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        keys = self.keys()
        return (
            keys,
            self.rng.standard_normal((len(keys), 1 + self.tables[0].factors)).astype(F),
            self.rng.integers(1, 4, len(keys)).astype(F),
        )

    def step(self) -> None:
        keys, grads, show = self.batch()
        if self.rng.random() < 0.7:
            for table in self.tables:
                table.announce(keys)
        first, *others = [table.pull(keys) for table in self.tables]
        assert all(first.tobytes() == other.tobytes() for other in others)
        for table in self.tables:
            table.push(keys, grads, show=show)

    def shrink(self) -> None:
        assert len({table.shrink() for table in self.tables}) == 1

    def end_day(self) -> None:
        for table in self.tables:
            table.end_day()

    def publish(self) -> None:
        base, abort, more = self.rng.random() < 0.3, self.rng.random() < 0.3, self.batch()
        cuts = [table.cut_changes(base=base) for table in self.tables]
        for table in self.tables:
            table.push(more[0], more[1], show=more[2])
        first, *others = [content(table, cut) for table, cut in zip(self.tables, cuts, strict=True)]
        assert all(first == other for other in others)
        for cut in cuts:
            cut.abort() if abort else cut.commit()

    def snapshot(self) -> None:
        """A snapshot is of its moment, whatever is pushed while it is read."""
        more = [self.batch() for _ in range(3)]

        def push(table: Table) -> None:
            for keys, grads, show in more:
                table.push(keys, grads, show=show)

        cuts = [table.snapshot(8) for table in self.tables]
        with ThreadPoolExecutor(2 * len(self.tables)) as pool:
            reads = [pool.submit(content, table, cut) for table, cut in zip(self.tables, cuts, strict=True)]
            list(pool.map(push, self.tables))
            first, *others = [read.result() for read in reads]
        assert all(first == other for other in others)

    def known(self) -> None:
        keys = self.rng.integers(0, 2 * self.top + 1, self.size, dtype=np.uint64)
        first, *others = [table.known(keys) for table in self.tables]
        assert all((first == other).all() for other in others)


@settings(max_examples=settings.default.max_examples // 10, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    size=st.sampled_from([400, 3000, 9000]),
    factors=st.sampled_from([1, 8]),
    admission=st.sampled_from(["birth", "count(2)"]),
    threads=st.booleans(),
    policy=st.sampled_from([{}, {"decay_rate": 0.8, "delete_threshold": 0.1, "delete_after_unseen_days": 3}]),
)
def test_the_same_bits_as_an_unlimited_table(tmp_path_factory, seed, size, factors, admission, threads, policy):
    folder = tmp_path_factory.mktemp("disk")
    shape = {"factors": factors, "admission": admission, "init": "uniform(-0.1, 0.1)", **policy}
    with pytest.MonkeyPatch.context() as patch:
        if threads:  # instead of io_uring
            patch.setenv("CLICKFLEET_DISK_THREADS", "1")
        tables = [Table(**shape), Table(**shape, **SMALL, disk=folder)]
    history = History(seed, size, tables)
    acts = [history.shrink, history.end_day, history.publish, history.snapshot, history.known, "save"]
    for _ in range(2):
        for _ in range(-(-60_000 // size)):
            history.step()
            assert tables[1].stats()["peak_bytes"] <= LIMIT
            if history.rng.random() < 0.3:
                act = acts[history.rng.integers(len(acts))]
                if act == "save":  # a checkpoint of either loads into either
                    saved = [
                        checkpoint.save(table, folder.parent / f"{folder.name}-{i}") for i, table in enumerate(tables)
                    ]
                    flip = bool(history.rng.random() < 0.5)
                    tables[0] = checkpoint.load(saved[flip])
                    tables[1] = checkpoint.load(saved[not flip], **SMALL, disk=str(folder))
                    for path in saved:
                        shutil.rmtree(path)
                else:
                    act()
        assert content(tables[0]) == content(tables[1])
    assert tables[1].stats()["disk_rows"] > 0


def test_rows_are_read_ahead_of_the_pull_that_needs_them(tmp_path):
    table = Table(factors=8, **SMALL, disk=tmp_path)
    keys = np.arange(100_000, dtype=np.uint64)
    table.push(keys, np.ones((len(keys), 9), F))
    table.core.wait_for_disk()
    wanted = keys[::200].copy()
    table.announce(wanted)
    table.core.wait_for_disk()
    announced = table.stats()
    assert announced["disk_reads"] > 100
    table.pull(wanted)
    assert table.stats()["disk_reads"] - announced["disk_reads"] < 10  # their tags belong to several rows
    others = wanted + np.uint64(1)
    table.pull(others)
    assert table.stats()["disk_waits"] - announced["disk_waits"] > 100


def test_memory_is_bounded_by_the_process_too(tmp_path):
    """The limit counts everything: a process with fifty times as many rows as fit grows by less than the limit."""
    program = """
import sys, resource, numpy as np
from clickfleet import Table
def rss(): return int(open('/proc/self/statm').read().split()[1]) * resource.getpagesize()
limit = 40_000_000
table = Table(factors=8, memory_limit=limit, disk=sys.argv[1])
grads = np.ones((20_000, 9), np.float32)
table.push(np.arange(10, dtype=np.uint64), grads[:10])
before = rss()
for start in range(0, 3_000_000, 20_000):
    table.push(np.arange(start, start + 20_000, dtype=np.uint64), grads)
assert len(table) == 3_000_000, len(table)
print(rss() - before, table.stats()["peak_bytes"])
"""
    if not Path("/proc/self/statm").exists():
        pytest.skip("this system does not tell the memory of a process")
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    grown, peak = map(int, done.stdout.split())
    assert peak <= 40_000_000
    assert grown < 40_000_000 + (24 << 20)  # buffers of the push and of its thread


def test_the_disk_limit_evicts_the_lowest_scores(tmp_path):
    limit = 16 << 20
    table = Table(factors=8, memory_limit=8_000_000, disk=tmp_path, disk_limit=limit)
    valuable = np.arange(2000, dtype=np.uint64)
    table.push(valuable, np.ones((2000, 9), F), show=np.full(2000, 50, F))
    for start in range(10_000, 600_000, 5000):
        table.push(np.arange(start, start + 5000, dtype=np.uint64), np.ones((5000, 9), F))
    stats = table.stats()
    assert stats["evicted"] > 200_000
    assert stats["rows"] + stats["evicted"] == 592_000
    assert stats["peak_disk_bytes"] <= limit
    assert stats["peak_bytes"] <= 8_000_000
    assert table.known(valuable).all()


def test_a_table_leaves_no_files(tmp_path):
    tables = [Table(factors=8, **SMALL, disk=tmp_path / "rows") for _ in range(2)]
    for table in tables:
        table.push(np.arange(100_000, dtype=np.uint64), np.ones((100_000, 9), F))
    assert len(list((tmp_path / "rows").glob("table-*/segment-*"))) > 2
    del tables, table
    assert [path.name for path in (tmp_path / "rows").iterdir()] == ["lock"]


CHILD = """
import sys, numpy as np
from pathlib import Path
from clickfleet import Table
from clickfleet.store import checkpoint
disk, saved = sys.argv[1], Path(sys.argv[2])
last = checkpoint.latest(saved) if checkpoint.steps(saved) else None
limits = {"memory_limit": 3_000_000, "snapshot_reserve": 750_000, "disk": disk}
table = checkpoint.load(last, **limits) if last else Table(factors=8, **limits)
begin = int(last.name[5:]) if last else 0
for step in range(begin, 60):
    rng = np.random.default_rng(step)
    keys = rng.integers(0, 200_000, 4000, dtype=np.uint64)
    table.push(keys, rng.standard_normal((4000, 9)).astype(np.float32))
    if step % 10 == 9:
        table.shrink()
        checkpoint.save(table, saved / f"step-{step + 1:012d}")
    print(step, flush=True)
"""


def test_killed_at_any_moment_it_goes_on_from_the_checkpoint(tmp_path):
    """Writes, reads and merges happen all the time; the files of a killed process are neither read nor left behind."""
    chance, disk, saved = random.Random(5), tmp_path / "disk", tmp_path / "saved"
    saved.mkdir()
    for kill in [*[True] * (40 if SOAK else 3), False]:
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(disk), str(saved)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        if kill:
            for _ in range(chance.randint(5, 40)):
                if not child.stdout.readline():
                    break
            child.send_signal(signal.SIGKILL)
        _, problem = child.communicate(timeout=120)
        assert kill or child.returncode == 0, problem
    unlimited = Table(factors=8)
    for step in range(60):
        rng = np.random.default_rng(step)
        keys = rng.integers(0, 200_000, 4000, dtype=np.uint64)
        unlimited.push(keys, rng.standard_normal((4000, 9)).astype(F))
        if step % 10 == 9:
            unlimited.shrink()
    done = checkpoint.load(checkpoint.latest(saved), **SMALL, disk=str(disk))
    assert content(done) == content(unlimited)
    assert done.stats()["disk_rows"] > 0
    assert len(list(disk.glob("table-*"))) == 1


@pytest.fixture
def small_disk(tmp_path):
    folder = tmp_path / "small"
    folder.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)], capture_output=True, text=True
    )
    if made.returncode:
        pytest.skip(f"a small file system cannot be mounted here: {made.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_is_an_error_and_loses_nothing(small_disk, tmp_path):
    table, unlimited = Table(factors=8, **SMALL, disk=small_disk), Table(factors=8)
    balloon = small_disk / "balloon"
    balloon.write_bytes(bytes(2 << 20))
    failed = None
    for step in range(120):
        keys = np.arange(step * 1000, (step + 1) * 1000, dtype=np.uint64)
        grads = np.full((1000, 9), 0.5, F)
        try:
            table.push(keys, grads)
        except TableError as error:
            failed = str(error)
            break
        unlimited.push(keys, grads)
    assert failed is not None
    assert "No space left on device" in failed
    assert str(small_disk) in failed
    assert "check table.disk" in failed
    # The push that failed changed nothing, and everything before it can be read and saved.
    assert content(table) == content(unlimited)
    saved = checkpoint.save(table, tmp_path / "saved")
    assert content(checkpoint.load(saved)) == content(unlimited)
    with pytest.raises(TableError, match="No space left"):
        table.push(keys, grads)
    balloon.unlink()  # with space again, the same table goes on
    for one in (table, unlimited):
        one.push(keys, grads)
    assert content(table) == content(unlimited)


@settings(max_examples=settings.default.max_examples // 10, deadline=None)
@given(seed=st.integers(0, 10**6), how=st.sampled_from(["flip", "cut", "swap", "zero"]))
def test_a_damaged_file_never_gives_a_wrong_row(tmp_path_factory, seed, how):
    chance, folder = random.Random(seed), tmp_path_factory.mktemp("disk")
    table, unlimited = Table(factors=8, **SMALL, disk=folder), Table(factors=8)
    keys = np.arange(60_000, dtype=np.uint64)
    grads = np.random.default_rng(seed).standard_normal((len(keys), 9)).astype(F)
    for one in (table, unlimited):
        one.push(keys, grads)
    table.core.wait_for_disk()
    files = sorted(folder.glob("table-*/segment-*"))
    chosen = chance.sample(files, 3)
    before = [path.read_bytes() for path in chosen]
    for path, data in zip(chosen, before, strict=True):
        with path.open("r+b") as file:
            if how == "flip":
                for _ in range(20):
                    at = chance.randrange(len(data))
                    file.seek(at)
                    file.write(bytes([data[at] ^ 1 << chance.randrange(8)]))
            elif how == "cut":
                file.truncate(chance.randrange(len(data)))
            elif how == "zero":
                file.seek(chance.randrange(len(data) // 2))
                file.write(bytes(len(data) // 2))
            else:
                file.write(before[0] if data is not before[0] else before[1])
    failures = []
    for part in np.array_split(np.random.default_rng(seed).permutation(keys), 300):
        try:
            assert table.pull(part).tobytes() == unlimited.pull(part).tobytes()
        except TableError as error:
            failures.append(str(error))
    assert failures
    assert all("resume from" in text and any(str(path) in text for path in chosen) for text in failures)
    with pytest.raises(TableError, match="segment-"):
        content(table)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"disk": "."}, "table.disk needs table.memory_limit"),
        ({"disk_limit": 1 << 30, "memory_limit": 1 << 24}, "table.disk_limit needs table.disk"),
        ({"disk": ".", "memory_limit": 100_000}, "memory_limit is too small"),
        ({"disk": ".", "memory_limit": 1 << 24, "disk_limit": 1 << 20}, "disk_limit is too small"),
        ({"disk": "a/b/c", "memory_limit": 1 << 24}, "a/b does not exist"),
    ],
)
def test_settings_that_cannot_work_are_refused(tmp_path, monkeypatch, given, problem):
    monkeypatch.chdir(tmp_path)
    with pytest.raises((ConfigError, TableError), match=problem):
        Table(factors=8, **given)
    assert not list(tmp_path.glob("table-*"))
