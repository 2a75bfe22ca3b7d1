"""Files are replaced as a whole: through errors, kills and a full disk; the lock is free as soon as its holder is gone."""

import errno
import os
import random
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from clickfleet.data.files import replacing, writing
from clickfleet.errors import CheckpointError, DataError
from clickfleet.store import atomic
from clickfleet.store.lock import Lock

WRITER = """
import sys
from pathlib import Path
from clickfleet.data.files import replacing
print("begin", flush=True)
for n in range(1_000_000):
    with replacing(Path(sys.argv[1])) as temporary, temporary.open("wb", buffering=0) as out:
        for _ in range(50):
            out.write(b"%08d\\n" % n * 200)
"""


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("durable", [False, True])
def test_a_file_is_replaced_when_the_block_ends(tmp_path: Path, durable: bool) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")
    with replacing(path, durable=durable) as temporary:
        temporary.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert names(tmp_path) == ["a.txt"]
    before = os.umask(0)
    os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~before


def test_only_a_durable_write_waits_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[int] = []
    monkeypatch.setattr(os, "fsync", flushed.append)
    with replacing(tmp_path / "a") as temporary:
        temporary.write_text("")
    assert not flushed
    with replacing(tmp_path / "a", durable=True) as temporary:
        temporary.write_text("")
    assert len(flushed) == 2  # the file, then its name
    atomic.write_file(tmp_path / "a", b"")
    assert len(flushed) == 4


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_leaves_the_old_file_and_nothing_else(tmp_path: Path, error: type[BaseException]) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")

    def fail() -> None:
        with replacing(path) as temporary:
            temporary.write_text("half")
            raise error

    with pytest.raises(error):
        fail()
    assert path.read_text() == "old"
    assert names(tmp_path) == ["a.txt"]


def test_a_killed_writer_leaves_the_old_content_or_the_new(tmp_path: Path) -> None:
    path, dice = tmp_path / "a.txt", random.Random(7)
    for _ in range(5):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE)
        assert writer.stdout is not None
        writer.stdout.readline()
        time.sleep(0.02 + dice.random() * 0.1)
        writer.send_signal(signal.SIGKILL)
        writer.communicate()
        lines = path.read_bytes().splitlines()
        assert len(lines) == 10_000
        assert len(set(lines)) == 1
    assert set(names(tmp_path)) <= {"a.txt", ".a.txt.writing"}
    atomic.write_file(path, b"next")
    assert names(tmp_path) == ["a.txt"]


@pytest.mark.parametrize(("durable", "error"), [(True, CheckpointError), (False, DataError)])
def test_a_full_disk_changes_nothing(tmp_path: Path, durable: bool, error: type[Exception]) -> None:
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(small)], capture_output=True).returncode:
        pytest.skip("mounting a small file system needs root")
    try:
        path = small / "a.txt"
        path.write_text("old")

        def fill() -> None:
            if durable:
                atomic.write_file(path, bytes(1 << 20))
            with writing(path) as temporary:
                temporary.write_bytes(bytes(1 << 20))

        with pytest.raises(error, match=f"cannot write {path}") as told:
            fill()
        assert isinstance(told.value.__cause__, OSError)
        assert told.value.__cause__.errno == errno.ENOSPC
        assert path.read_text() == "old"
        assert names(small) == ["a.txt"]
    finally:
        subprocess.run(["umount", "-l", str(small)], check=True)


def test_a_lock_names_its_holder_and_waits_for_it(tmp_path: Path) -> None:
    program = (
        "import sys; from clickfleet.store.lock import Lock; from pathlib import Path\n"
        "with Lock(Path(sys.argv[1]), 'trains'): print('held', flush=True); sys.stdin.read()"
    )
    path = tmp_path / "run" / ".lock"
    other = subprocess.Popen(
        [sys.executable, "-c", program, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdout is not None
    assert other.stdout.readline() == "held\n"
    holder = rf"run is in use: process {other.pid} on \S+ \(since \d{{4}}-\d\d-\d\d [\d:]{{8}} \S+\) trains there"
    for _ in range(2):  # an attempt that failed leaves the name
        with pytest.raises(CheckpointError, match=holder), Lock(path, "trains"):
            pass
    began = time.monotonic()
    with pytest.raises(CheckpointError, match=holder), Lock(path, "trains", patience_s=0.3):
        pass
    assert time.monotonic() - began >= 0.3
    other.kill()
    other.communicate()
    with Lock(path, "trains"):  # the system released it
        assert str(os.getpid()) in path.read_text()
        with pytest.raises(CheckpointError, match=f"process {os.getpid()} .* trains there"), Lock(path, "trains"):
            pass
    with Lock(path, "trains", patience_s=1):
        pass


def test_a_lock_that_cannot_be_taken_is_explained(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"cannot lock .*file/\.lock"), Lock(tmp_path / "file/.lock", "trains"):
        pass
