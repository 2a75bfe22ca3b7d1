"""Faults beside a worker: what it cannot know it does not claim, revoked tokens do not work, and it recovers by itself."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from clickfleet.errors import ConfigError
from clickfleet.serve import auth as tokens_module
from clickfleet.serve import state_folder
from clickfleet.serve import updater as follow
from clickfleet.serve.auth import Tokens
from clickfleet.serve.predictor import Version
from clickfleet.serve.server import VersionLoader
from clickfleet.serve.state_folder import Coming, Command, Status
from clickfleet.serve.supervisor import Settings
from clickfleet.serve.updater import Updater
from clickfleet.store import atomic
from clickfleet.store.onnx import Engine
from clickfleet.store.published import LOG, Entry
from served import PROBE, WAIT_S, Publication, Served, ask, running, until

BOSS = {"authorization": "Bearer boss"}


def gauge(served: Served, name: str) -> str:
    lines = served.http.get("/metrics").text.splitlines()
    return next(line.split()[1] for line in lines if line.startswith(f"clickfleet_{name} "))


def followed(served: Served) -> bool:
    """Whether a worker has all there is and knows of no problem."""
    found = ask(served)
    return (found["following"]["ok"], found["lag"], found["problem"]) == (True, 0, None)


def test_a_watch_survives_every_fault_and_says_so(log: Publication, tmp_path: Path) -> None:
    """What the updater tells is garbage, then a folder: the worker shows it, serves on, and recovers."""
    state = tmp_path / "state"
    with running(log.folder, state, stale_s=1.0) as served:
        told = state / state_folder.VERSION
        for break_it in (lambda: told.write_text("{garbage"), lambda: (told.unlink(), told.mkdir())):
            break_it()
            until(lambda: ask(served)["following"]["ok"] is False)
            found = ask(served)
            assert "the watch of worker" in found["problem"]
            assert found["lag"] is None
            assert (gauge(served, "following_broken"), gauge(served, "model_lag")) == ("1.0", "NaN")
            assert float(gauge(served, "watch_failures_total")) > 0
            assert served.http.get("/ready").json() == {"ready": True, "following": False, "tokens": True}
            assert served.http.get("/v1/stats").json()["lag"] is None
            assert served.http.post("/v1/predict", json={"rows": [{}]}).status_code == 200
        told.rmdir()
        log.publish()
        until(lambda: ask(served)["sequence"] == 2)
        until(lambda: followed(served))
        assert not served.said


@pytest.mark.parametrize("garbled", [False, True], ids=["no log", "a log of garbage"])
def test_a_log_that_cannot_be_read_is_reported_until_it_can(log: Publication, tmp_path: Path, garbled: bool) -> None:
    with running(log.folder, tmp_path / "state", stale_s=1.0) as served:
        path = log.folder / LOG
        whole = path.read_bytes()
        path.write_bytes(b"garbage\n") if garbled else path.unlink()
        until(lambda: LOG in (ask(served)["problem"] or ""))
        assert ask(served)["lag"] is None
        path.write_bytes(whole)
        until(lambda: followed(served))


@pytest.mark.parametrize("file", ["info.json", "manifest.json", "golden.arrow", "dense.xor", "rows.arrow"])
def test_an_entry_that_is_garbage_is_tried_again(
    log: Publication, tmp_path: Path, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follow, "RETRY_S", 0.01)
    (tmp_path / "state").mkdir()
    updater = Updater(Settings(str(log.folder), str(tmp_path / "state")))
    updater.start()
    log.publish()
    path = log.folder / "000002-delta" / file
    whole = path.read_bytes()
    for content in (b'{"time": [}', b"[]", b"", None):
        path.unlink() if content is None else path.write_bytes(content)
        updater.poll()
        status = state_folder.read_status(tmp_path / "state")
        assert status is not None
        assert "entry 2 was refused" in (status.problem or "")
        assert Path(status.entry).name == "000001-base"
    path.write_bytes(whole)
    until(lambda: updater.poll() and updater.status.problem is None)  # type: ignore[union-attr]
    status = state_folder.read_status(tmp_path / "state")
    assert status is not None
    assert (Path(status.entry).name, status.problem) == ("000002-delta", None)


def test_a_worker_refuses_a_network_that_nobody_has_checked_yet(log: Publication) -> None:
    """The updater announces an entry before it has read its network: whoever opens it finds a single wrong bit."""
    from clickfleet.errors import CheckpointError
    from clickfleet.serve.predictor import open_version
    from clickfleet.store.published import Entry

    path = log.folder / "000001-base" / "dense.onnx"
    whole = bytearray(path.read_bytes())
    whole[len(whole) // 2] ^= 1
    path.write_bytes(whole)
    with pytest.raises(CheckpointError, match="checksum"):
        open_version(Entry(path.parent))


@pytest.mark.parametrize("damage", [None, "manifest.json", "rows.arrow"])
def test_an_entry_is_prepared_before_its_line_and_served_after_it(
    log: Publication, tmp_path: Path, damage: str | None
) -> None:
    """A folder without a line is not published: workers only open it. One that cannot be opened stops nobody."""
    copy, name, state = tmp_path / "copy", "000002-delta", tmp_path / "state"
    shutil.copytree(log.folder, copy)
    log.publish()
    with running(copy, state) as served:
        hidden, path = atomic.hidden(copy / name), copy / name
        shutil.copytree(log.folder / name, hidden)
        until(lambda: state_folder.read_next(state) == Coming(str(hidden)))
        if damage is not None:
            content = bytearray((hidden / damage).read_bytes())
            content[len(content) // 2] ^= 1
            (hidden / damage).write_bytes(content)
        hidden.rename(path)
        coming = Coming(str(path), [str(path), str(copy / "000001-base")])
        if damage is None:
            until(lambda: state_folder.read_next(state) == coming)
        reply = served.http.post("/v1/predict", json={"rows": PROBE}).json()
        assert reply["sequence"] == 1
        assert ask(served)["problem"] is None
        if damage is not None:
            (path / damage).write_bytes((log.folder / name / damage).read_bytes())
            assert state_folder.read_next(state) == Coming(str(hidden))  # workers open no rows that were not verified
        (copy / LOG).write_bytes((log.folder / LOG).read_bytes())
        until(lambda: ask(served)["sequence"] == 2)
        reply = served.http.post("/v1/predict", json={"rows": PROBE}).json()
        assert np.allclose(reply["scores"], log.scores[2], rtol=0, atol=1e-6)
        assert "clickfleet_watch_failures" not in served.http.get("/metrics").text


def test_rows_are_verified_once_and_again_if_another_entry_gets_the_name(
    log: Publication, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy, name = tmp_path / "copy", "000002-delta"
    shutil.copytree(log.folder, copy)
    log.publish()
    (tmp_path / "state").mkdir()
    updater = Updater(Settings(str(copy), str(tmp_path / "state")))
    updater.start()
    verified: list[bool] = []
    real = Entry.verify

    def verify(entry: Entry, rows_only: bool = False) -> Any:
        verified.append(rows_only)
        return real(entry, rows_only)

    monkeypatch.setattr(Entry, "verify", verify)
    shutil.copytree(log.folder / name, copy / name)
    updater.poll()
    assert verified == [True]
    whole = (copy / LOG).read_bytes()
    (copy / LOG).write_bytes((log.folder / LOG).read_bytes())
    updater.poll()
    assert updater.status is not None
    assert (Path(updater.status.entry).name, updater.status.hash) == (name, Entry(copy / name).hash)
    assert verified == [True, False]  # the rows before the line, all of it after it was announced
    updater.close()

    (copy / LOG).write_bytes(whole)
    again = Updater(Settings(str(copy), str(tmp_path / "state")))
    again.start()
    other = copy / name / "rows.arrow"
    content = other.read_bytes()
    monkeypatch.setattr(Entry, "hash", "of another entry", raising=False)
    again.poll()  # it prepares an entry that is not the one which gets the line
    monkeypatch.undo()
    other.write_bytes(content[:-1])
    (copy / LOG).write_bytes((log.folder / LOG).read_bytes())
    again.poll()
    assert again.status is not None
    assert "entry 2 was refused" in (again.status.problem or "")
    again.close()


def opened(loader: VersionLoader, monkeypatch: pytest.MonkeyPatch, status: Status) -> tuple[Version, int]:
    """Open a version. Return it, and how many sessions that took."""
    sessions: list[bytes] = []
    real = Engine.session

    def count(engine: Engine, graph: bytes) -> Any:
        sessions.append(graph)
        return real(engine, graph)

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "session", count)
        version = loader.open(status)
    return version, len(sessions)


def test_a_prepared_version_is_the_one_that_is_served(
    log: Publication, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = VersionLoader(Settings(str(log.folder), str(tmp_path)))
    first = str(log.folder / "000001-base")
    loader.open(Status(first, [first], 1))
    for _ in range(3):
        log.publish()
    second, third, fourth = (str(log.folder / f"{number:06d}-delta") for number in (2, 3, 4))

    def status(path: str, layers: list[str]) -> Status:
        return Status(path, layers, None, hash=Entry(path).hash)

    def right(version: Version, sequence: int) -> bool:
        return np.allclose(version.run(version.fields.rows(PROBE))["score"], log.scores[sequence], rtol=0, atol=1e-6)

    loader.prepare(Coming(second))  # while it is being written: its network
    loader.prepare(Coming(second, [second, first]))
    version, sessions = opened(loader, monkeypatch, status(second, [second, first]))
    assert (right(version, 2), sessions) == (True, 0)
    loader.prepare(Coming(second, [second, first]))  # another entry is served than the one that was expected
    version, sessions = opened(loader, monkeypatch, status(third, [third, second, first]))
    assert (right(version, 3), sessions) == (True, 1)
    loader.prepare(Coming(fourth, [fourth, third, second, first]))
    stranger = replace(status(fourth, [fourth, third, second, first]), hash="of an entry that was removed")
    version, sessions = opened(loader, monkeypatch, stranger)
    assert (right(version, 4), sessions) == (True, 1)


def test_a_network_that_was_prepared_is_used_for_its_entry_only(
    log: Publication, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An entry that is being written may be removed, and another one get its name."""
    loader = VersionLoader(Settings(str(log.folder), str(tmp_path)))
    first = str(log.folder / "000001-base")
    loader.open(Status(first, [first], 1))
    log.publish()
    second = log.folder / "000002-delta"
    unfinished = tmp_path / "unfinished"
    unfinished.mkdir()
    for name, sessions in (("000001-base", 1), ("000002-delta", 0)):
        graph = Entry(log.folder / name).graph()
        (unfinished / "dense.onnx").write_bytes(graph)
        loader.prepare(Coming(str(unfinished)))
        version, found = opened(loader, monkeypatch, Status(str(second), [str(second), first], 2))
        assert np.allclose(version.run(version.fields.rows(PROBE))["score"], log.scores[2], rtol=0, atol=1e-6)
        assert found == sessions
        loader.open(Status(first, [first], 1))


def test_a_dead_updater_stops_nobody(log: Publication, tmp_path: Path) -> None:
    """It is killed again and again: the workers serve on, say that they follow nobody, and go on when it is back."""
    state = tmp_path / "state"
    with running(log.folder, state, stale_s=0.5) as served:
        updater = served.fleet.children["updater"]
        good = updater.command
        updater.command = ["/bin/false"]
        assert updater.process is not None
        os.kill(updater.process.pid, signal.SIGKILL)
        until(lambda: updater.crash_looping)
        assert served.http.post("/v1/predict", json={"rows": [{}]}).status_code == 200
        until(lambda: ask(served)["lag"] is None)
        assert "no heartbeat of the updater" in ask(served)["problem"]
        assert "restarting it in" in served.said[-1]
        until(lambda: ask(served)["following"]["deaths"].get("updater", 0) >= 5)
        assert float(gauge(served, "updater_deaths")) >= 5
        updater.command = good
        log.publish()
        until(lambda: ask(served)["sequence"] == 2)
        until(lambda: ask(served)["lag"] == 0)


def test_a_server_without_workers_ends(log: Publication, tmp_path: Path) -> None:
    from clickfleet.errors import ServeError

    with running(log.folder, tmp_path / "state", workers=2) as served:
        ended: list[Exception] = []
        served.fleet.stopping = True
        served.watcher.join(WAIT_S)
        assert not served.watcher.is_alive()

        def watch() -> None:
            try:
                served.fleet.supervise(served.said.append)
            except ServeError as error:
                ended.append(error)

        served.fleet.stopping = False
        for name, child in served.fleet.children.items():
            if name != "updater":
                child.command = ["/bin/false"]
                assert child.process is not None
                os.kill(child.process.pid, signal.SIGKILL)
        watcher = threading.Thread(target=watch)
        watcher.start()
        watcher.join(WAIT_S)
        assert "every worker died" in str(ended[0])


def test_two_rollbacks_at_once_are_both_obeyed(log: Publication, tmp_path: Path) -> None:
    admin = tmp_path / "admin"
    admin.write_text("boss\n")
    for _ in range(3):
        log.publish()
    with running(log.folder, tmp_path / "state", workers=2, admin_token_file=str(admin)) as served:
        replies: list[tuple[int, Any]] = []

        def back(sequence: int) -> None:
            reply = served.http.post("/admin/rollback", json={"sequence": sequence}, headers=BOSS)
            replies.append((sequence, reply.json()))
            assert reply.status_code == 200

        for _ in range(3):
            threads = [threading.Thread(target=back, args=(sequence,)) for sequence in (1, 2, 3)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert len(replies) == 9
        assert all(reply["sequence"] == sequence and reply["pinned"] for sequence, reply in replies)
        assert ask(served)["sequence"] in (1, 2, 3)
        back(2)
        updater = served.fleet.children["updater"].process
        assert updater is not None
        os.kill(updater.pid, signal.SIGKILL)  # the next one stays where this one was
        until(lambda: ask(served)["following"]["deaths"] == {"updater": 1})
        log.publish()
        until(lambda: [ask(served)[name] for name in ("head", "sequence", "pinned")] == [5, 2, True])
        on = served.http.post("/admin/follow", headers=BOSS).json()
        assert (on["sequence"], on["pinned"]) == (5, False)


def test_a_command_that_nobody_takes_is_withdrawn(tmp_path: Path) -> None:
    name = state_folder.send_command(tmp_path, Command(3))
    assert state_folder.withdraw_command(tmp_path, name)
    assert state_folder.take_commands(tmp_path) == []
    first, second = state_folder.send_command(tmp_path, Command(3)), state_folder.send_command(tmp_path, Command())
    assert state_folder.take_commands(tmp_path) == [(first, Command(3)), (second, Command())]
    assert not state_folder.withdraw_command(tmp_path, first)


def test_a_status_is_read_from_the_file_of_an_earlier_server(tmp_path: Path) -> None:
    facts = {"entry": "a", "layers": ["a"], "head": 3, "problem": None, "pinned": True, "told": 7, "following": True}
    (tmp_path / "version.json").write_text(json.dumps(facts))
    status = state_folder.read_status(tmp_path)
    assert status == Status("a", ["a"], 3, pinned=True, revision=7, following=True)
    state_folder.write_status(status, tmp_path)
    assert json.loads((tmp_path / "version.json").read_text()) == {**facts, "events": {}, "hash": ""}


def garbage(path: Path) -> None:
    path.write_bytes(b"\xff\xfe\x00")


@pytest.mark.parametrize(
    "break_it",
    [Path.unlink, garbage, lambda path: path.write_text(""), lambda path: (path.unlink(), path.mkdir())],
    ids=["deleted", "garbage", "empty", "a folder"],
)
def test_tokens_that_cannot_be_read_let_nobody_in(tmp_path: Path, break_it: Callable[[Path], Any]) -> None:
    path, clock = tmp_path / "tokens", [0.0]
    path.write_text("one\n")
    found = Tokens(str(path), "NONE", lambda: clock[0])
    assert found.allow(b"Bearer one")
    break_it(path)
    clock[0] += tokens_module.REFRESH_S
    assert found.allow(b"Bearer one")  # it may be being replaced
    assert found.problem is not None
    clock[0] += tokens_module.GRACE_S
    assert not found.allow(b"Bearer one")
    assert found.closed
    if path.is_dir():
        path.rmdir()
    path.write_text("two\n")
    clock[0] += tokens_module.REFRESH_S
    assert not found.allow(b"Bearer one")
    assert found.allow(b"Bearer two")
    assert found.problem is None


def test_tokens_replaced_within_one_tick_of_the_clock_count(tmp_path: Path) -> None:
    path, clock = tmp_path / "tokens", [0.0]
    path.write_text("one\n")
    before = path.stat()
    found = Tokens(str(path), "NONE", lambda: clock[0])
    path.write_text("two\n")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))  # the same inode, length and time
    clock[0] += tokens_module.REFRESH_S
    assert not found.allow(b"Bearer one")
    garbage(path)
    with pytest.raises(ConfigError, match="it is not text"):
        Tokens(str(path), "NONE")


def test_a_server_whose_tokens_are_lost_answers_503(artifact: Path, tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text("one\n")
    mine = {"authorization": "Bearer one"}
    with running(artifact, tmp_path / "state", token_file=str(path)) as served:
        assert served.http.get("/v1/model", headers=mine).status_code == 200
        path.unlink()
        until(lambda: served.http.get("/v1/model", headers=mine).status_code == 503)
        assert served.http.get("/ready").status_code == 503
        assert served.http.get("/health").status_code == 200
        path.write_text("two\n")
        until(lambda: served.http.get("/v1/model", headers={"authorization": "Bearer two"}).status_code == 200)
        assert served.http.get("/v1/model", headers=mine).status_code == 401


def test_a_server_may_wait_for_its_first_base(tmp_path: Path) -> None:
    run = tmp_path / "run"
    command = [
        sys.executable,
        "-c",
        "from clickfleet.cli import main; main()",
        "serve",
        str(run),
        "--port",
        "0",
        "--grpc-port",
        "-1",
    ]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S)
    assert refused.returncode == 1
    server = subprocess.Popen([*command, "--wait"], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        assert server.stdout.readline() == f"waiting for the first base in {run} …\n"
        Publication(run / "published").publish("base")
        ready = server.stdout.readline()
        assert ready.startswith("ready: http://127.0.0.1:")
        assert httpx.get(f"{ready.split()[1].rstrip(',')}/v1/model").json()["sequence"] == 1
    finally:
        server.terminate()
        server.communicate(timeout=WAIT_S)
