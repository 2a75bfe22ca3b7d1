"""However a run is stopped, and at whatever moment, no process of it stays; where it listens, and who may read its token."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from clickfleet.cluster import process_tree, ray_runtime
from clickfleet.cluster.nodes import LEAVE, MEMBER, SPARE, Watcher
from clickfleet.errors import ClusterError, ConfigError
from clickfleet.store import checkpoint, run_folder
from clickfleet.training.signals import interruptible, leave
from fleet import SLOTS, kill, shows
from marked import Marked
from soak import in_soak

pytestmark = pytest.mark.xdist_group("own clusters")
SOAK = bool(os.environ.get("CLICKFLEET_SOAK"))
LOOPBACK = {"127.0.0.1", "::ffff:127.0.0.1", "::1"}
TERM, INT, HUP, KILL = signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGKILL

PROGRAM = """
import sys, clickfleet
from clickfleet.data.files import expand

with clickfleet.join(sys.argv[1], quiet=True) as job:
    while True:
        job.train(job.split_files(expand(sys.argv[2]) * 25))  # not ending soon: the signal comes in the middle
"""


@pytest.fixture
def endless(config: dict[str, Any]) -> tuple[Path, Path]:
    """A configuration that trains for a long time, and its run folder."""
    run = Path(config["run"]["dir"])
    config |= {"mode": {"name": "async"}, "train": {"epochs": 10_000}}
    config["data"]["test"], config["run"]["checkpoint_every_steps"] = [], 200
    config["cluster"]["stop_timeout"] = "25s"  # a busy machine may need long for a checkpoint
    path = run.parent / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path, run


@pytest.mark.parametrize("moment", ["first process of Ray", "run takes Ray"])
@pytest.mark.parametrize("number", [TERM, INT, HUP, KILL] if SOAK else [TERM])
def test_a_signal_while_ray_starts_ends_everything(
    endless: tuple[Path, Path], number: signal.Signals, moment: str
) -> None:
    command = Marked("train", str(endless[0]), folder=endless[0].parent)
    try:
        if moment == "run takes Ray":
            command.wait_until(lambda: "starting Ray" in command.said())
        else:
            command.wait_until(lambda: len(command.alive()) > 1)
        command.send(number)
        assert command.gone() in (-number, 128 + number)  # the former before its handlers are set
        assert "Traceback" not in command.said()
    finally:
        command.kill()


@in_soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("moment", ["start", "training"])
@pytest.mark.parametrize("numbers", [(TERM,), (INT,), (HUP,), (KILL,), (INT, INT), (TERM, TERM)])
def test_a_stopped_launch_leaves_no_process(
    endless: tuple[Path, Path], config: dict[str, Any], moment: str, numbers: tuple[signal.Signals, ...]
) -> None:
    """23 processes were left to train."""
    path, run = endless
    (path.parent / "program.py").write_text(PROGRAM)
    words = ["launch", "--server_num", "2", "--worker_num", "2", "program.py", str(path), config["data"]["train"][0]]
    command = Marked(*words, folder=path.parent)
    try:
        if moment == "start":
            command.wait_until(lambda: len(command.alive()) > 8)
        else:
            command.wait_until(lambda: bool(checkpoint.steps(run / "checkpoints")))
            assert command.listening() <= LOOPBACK
        before = checkpoint.steps(run / "checkpoints")
        command.send(*numbers)
        code = command.gone()
        assert code == (-numbers[-1] if numbers[-1] == KILL or numbers == (TERM, TERM) else 128 + numbers[0])
        if moment == "training" and numbers == (TERM,):
            said = (run / "log.txt").read_text()
            assert "stopped by SIGTERM; the newest checkpoint is of step" in said, said
            assert "no last checkpoint" not in said
            assert checkpoint.steps(run / "checkpoints") != before
            assert shows(run) == run_folder.read_state(checkpoint.latest(run / "checkpoints"))["rows"] * SLOTS
    finally:
        command.kill()


@pytest.mark.skipif(not SOAK, reason="half a minute each: CLICKFLEET_SOAK=1")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("numbers", [(TERM,), (INT,), (HUP,), (KILL,), (INT, INT), (TERM, TERM)])
def test_a_stopped_run_leaves_no_process(endless: tuple[Path, Path], numbers: tuple[signal.Signals, ...]) -> None:
    path, run = endless
    command = Marked("train", str(path), folder=path.parent)
    try:
        command.wait_until(lambda: (run / "processes.json").exists())
        command.send(*numbers)
        code = command.gone()
        if len(numbers) == 1 and numbers != (KILL,):
            assert code == 128 + numbers[0]
            assert "stopped by a signal after" in command.said()
            assert shows(run) == run_folder.read_state(checkpoint.latest(run / "checkpoints"))["rows"] * SLOTS
        assert "Traceback" not in command.said()
    finally:
        command.kill()


@pytest.mark.skipif(not SOAK, reason="half a minute: CLICKFLEET_SOAK=1")
@pytest.mark.timeout(600)
def test_a_run_that_cannot_save_ends_all_the_same(endless: tuple[Path, Path], config: dict[str, Any]) -> None:
    """A shard hangs when the signal comes."""
    path, run = endless
    config["cluster"]["stop_timeout"] = "3s"
    path.write_text(yaml.safe_dump(config))
    command = Marked("train", str(path), folder=path.parent)
    try:
        command.wait_until(lambda: (run / "processes.json").exists())
        kill(run, "shard 1", signal.SIGSTOP)
        command.send(TERM)
        assert command.gone() == 128 + TERM
        log = (run / "log.txt").read_text()
        assert "no last checkpoint: the checkpoint failed: not written within 3 s of the signal" in log
    finally:
        command.kill()


@contextmanager
def listening(reply: bytes | None) -> Iterator[str]:
    """A server that says something to everybody, or nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with server.accept()[0] as client, suppress(ConnectionError):
                if reply is not None:
                    client.sendall(reply)
                while client.recv(1024):
                    pass

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield "{}:{}".format(*server.getsockname())
        thread.join(60)


def test_an_address_without_ray_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_runtime, "PROBE_S", 60.0)
    with listening(b"HTTP/1.1 400 Bad Request\r\n\r\n") as place, pytest.raises(ClusterError, match="is not Ray"):
        ray_runtime.check_there(place, 60)
    with listening(None) as place, pytest.raises(ClusterError, match=f"no Ray answers at {place}: timed out"):
        ray_runtime.check_there(place, 0.3)
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))  # without listening: who connects is refused, and nobody else gets the port
        place = "{}:{}".format(*deaf.getsockname())
        for address in (place, f"ray://{place}"):
            with pytest.raises(ClusterError, match=r"no Ray answers at .*refused\n.*ray start --head"):
                ray_runtime.check_there(address, 60)
        monkeypatch.setenv("RAY_ADDRESS", place)
        with pytest.raises(ClusterError, match=rf"{place} \(auto\)"):
            ray_runtime.check_there("auto", 60)
    with pytest.raises(ConfigError, match="host:port"):
        ray_runtime.check_there("somewhere", 60)
    with listening(bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))) as place:
        ray_runtime.check_there(place, 60)


def test_the_token_of_ray_is_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE"):
        monkeypatch.delenv(name, raising=False)
    token, folder = tmp_path / ".ray" / "auth_token", tmp_path / ".ray"
    ray_runtime.keep_token()
    assert not folder.exists()
    ray_runtime.keep_token(make=True)
    first = token.read_text()
    assert len(first) == 64
    token.chmod(0o644)
    folder.chmod(0o755)
    ray_runtime.keep_token(make=True)
    assert (token.read_text(), [path.name for path in folder.iterdir()]) == (first, ["auth_token"])
    assert (token.stat().st_mode & 0o777, folder.stat().st_mode & 0o777) == (0o600, 0o700)


def test_the_first_signal_asks_and_the_second_does_not() -> None:
    heard: list[int] = []
    ignored = signal.signal(HUP, signal.SIG_IGN)
    before = signal.signal(INT, signal.default_int_handler)  # a shell starts background jobs with INT ignored
    try:
        with interruptible(heard.append):
            signal.raise_signal(HUP)  # as under nohup
            assert heard == []
            signal.raise_signal(INT)
            assert heard == [INT]
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(INT)
    finally:
        signal.signal(HUP, ignored)
        signal.signal(INT, before)
    with pytest.raises(SystemExit) as ended, interruptible(leave):
        signal.raise_signal(TERM)
    assert ended.value.code == 128 + TERM


def test_a_block_that_does_not_end_after_a_signal_is_forced() -> None:
    forced = threading.Event()
    with interruptible(lambda number: None, lambda: 0.0, lambda number: forced.set()):
        assert not forced.wait(0.05)
        signal.raise_signal(TERM)
        assert forced.wait(60)


def test_a_process_tree_is_found_and_killed() -> None:
    code = "import subprocess, sys; p = subprocess.Popen(['sleep', '100']); print(p.pid, flush=True); p.wait()"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        found = process_tree.tree([parent.pid])
        assert {entry.pid for entry in found} == {parent.pid, child}
        assert parent.pid in process_tree.own_children()
        process_tree.kill([found[0]._replace(began="another")])  # of an earlier process with that number
        assert parent.poll() is None
        process_tree.kill(found)
    deadline = time.monotonic() + 60
    while any(entry.pid == child for entry in process_tree.tree([child])) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert process_tree.tree([child]) == []


def test_a_process_too_many_is_rejected_or_waits() -> None:
    watcher = Watcher(servers=1, workers=2)
    assert watcher.arrive("worker 1", "a", ["a"]) == MEMBER
    assert watcher.arrive("worker 1", "b", ["a", "b"]) == SPARE
    assert watcher.arrive("worker 1", "b", ["b"]) == MEMBER  # the first has gone meanwhile
    assert watcher.arrive("worker 2", "c", ["a", "b", "c"]) == LEAVE
    assert watcher.arrive("server 1", "d", ["d"]) == LEAVE
    assert watcher.arrive("server 0", "e", ["e"]) == MEMBER
    notes = watcher.report("waiting")
    assert [note.partition(" ")[0] for note in notes] == ["worker", "rejected", "rejected"]
    assert "this run has 2 workers" in notes[1]
    assert watcher.report("") == []
    assert watcher.ended("worker 1") == (False, "")
