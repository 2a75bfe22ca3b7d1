"""Hot updates: every reply is of exactly one published sequence; what does not fit is refused and the last good one stays."""

import json
import os
import shutil
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from clickfleet.cli import build
from clickfleet.cli.frame import run as command
from clickfleet.errors import ConfigError
from clickfleet.serve import overlays, predictor, supervisor
from clickfleet.serve.overlays import MAX_OVERLAYS
from clickfleet.serve.server import VersionLoader
from clickfleet.serve.state_folder import Status
from clickfleet.serve.supervisor import Settings
from clickfleet.serve.updater import Updater
from clickfleet.store.onnx import Engine
from clickfleet.store.published import LOG, Entry, prune
from clickfleet.training.export import Publisher
from served import PROBE, WAIT_S, Model, Publication, Served, ask, features, running, until


def right(log: Publication, reply: dict[str, Any]) -> bool:
    return np.allclose(reply["scores"], log.scores[reply["sequence"]], rtol=0, atol=1e-6)


def test_every_reply_is_of_one_sequence_while_the_model_changes(log: Publication, tmp_path: Path) -> None:
    with running(log.folder, tmp_path / "state", workers=2) as served:
        replies: list[dict[str, Any]] = []
        stop = threading.Event()

        def hammer() -> None:
            with httpx.Client(base_url=served.url, timeout=WAIT_S) as client:
                while not stop.is_set():
                    reply = client.post("/v1/predict", json={"rows": PROBE})
                    replies.append(reply.json() if reply.status_code == 200 else {"failed": reply.text})

        threads = [threading.Thread(target=hammer) for _ in range(2)]
        for thread in threads:
            thread.start()
        for turn in range(9):  # more than there may be layers, and a base in between
            last = log.publish("base" if turn == 6 else "delta")
            until(lambda last=last: any(reply.get("sequence") == last for reply in replies[-50:]))
        stop.set()
        for thread in threads:
            thread.join()
        assert not [reply for reply in replies if "failed" in reply]
        assert all(right(log, reply) for reply in replies)
        assert len({reply["sequence"] for reply in replies}) >= 9
        assert ask(served)["layers"] <= MAX_OVERLAYS + 1
        until(lambda: ask(served)["lag"] == 0)  # of whichever worker answers
        assert ask(served)["problem"] is None
        assert not served.said


def test_roll_back_and_on(log: Publication, tmp_path: Path) -> None:
    admin = tmp_path / "admin"
    admin.write_text("boss\n")
    boss = {"authorization": "Bearer boss"}
    for _ in range(3):
        log.publish()
    with running(log.folder, tmp_path / "state", admin_token_file=str(admin)) as served:
        back = served.http.post("/admin/rollback", json={"sequence": 2}, headers=boss)
        assert back.status_code == 200, back.text
        assert (back.json()["sequence"], back.json()["pinned"]) == (2, True)
        reply = served.http.post("/v1/predict", json={"rows": PROBE}).json()
        assert reply["sequence"] == 2
        assert right(log, reply)
        log.publish()
        until(lambda: ask(served)["lag"] == 3)  # seen, not applied
        assert ask(served)["sequence"] == 2
        wrong = served.http.post("/admin/rollback", json={"sequence": 77}, headers=boss)
        assert wrong.status_code == 409
        assert "no entry 77" in wrong.json()["problem"]
        on = served.http.post("/admin/follow", headers=boss).json()
        assert (on["sequence"], on["pinned"]) == (5, False)
        assert right(log, served.http.post("/v1/predict", json={"rows": PROBE}).json())


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


@pytest.fixture
def updater(log: Publication, tmp_path: Path) -> Updater:
    (tmp_path / "state").mkdir()
    made = Updater(Settings(str(log.folder), str(tmp_path / "state")))
    made.start()
    return made


def served_sequence(updater: Updater) -> int:
    assert updater.status is not None
    return int(Path(updater.status.entry).name[:6])


def problem(updater: Updater) -> str:
    assert updater.status is not None
    return updater.status.problem or ""


@pytest.mark.parametrize(
    "file", ["rows.arrow", "deleted.arrow", "dense.xor", "golden.arrow", "manifest.json", "info.json"]
)
def test_a_broken_entry_is_refused_and_the_next_base_is_taken(log: Publication, updater: Updater, file: str) -> None:
    log.publish()
    path = log.folder / "000002-delta" / file
    flip(path, path.stat().st_size // 2)
    updater.poll()
    assert served_sequence(updater) == 1
    assert "entry 2 was refused" in problem(updater)
    assert updater.status is not None
    assert updater.status.lag(served_sequence(updater)) == 1
    if file == "manifest.json":  # the writer reads the newest one
        flip(path, path.stat().st_size // 2)
    log.publish("base")
    updater.poll()
    assert (served_sequence(updater), problem(updater)) == (3, "")


def test_scores_that_are_not_golden_are_refused(
    log: Publication, updater: Updater, monkeypatch: pytest.MonkeyPatch
) -> None:
    log.publish()
    monkeypatch.setattr(predictor, "GOLDEN_TOLERANCE", -1.0)
    updater.poll()
    assert served_sequence(updater) == 1
    assert "golden requests give a different score" in problem(updater)


def test_gaps_and_forks_are_refused(log: Publication, updater: Updater, tmp_path: Path) -> None:
    log.publish()
    whole = (log.folder / LOG).read_bytes()
    log.publish()
    lines = (log.folder / LOG).read_bytes().splitlines(keepends=True)
    (log.folder / LOG).write_bytes(lines[0] + lines[1] + lines[3])  # entry 2 is missing
    updater.poll()
    assert served_sequence(updater) == 1
    assert "entry 3 does not follow entry 1" in problem(updater)
    assert updater.status is not None
    assert updater.status.lag(1) is None  # nobody knows
    (log.folder / LOG).write_bytes(b"".join(lines))
    updater.poll()
    assert (served_sequence(updater), problem(updater)) == (3, "")

    other = tmp_path / "other"  # the same beginning, then another history
    shutil.copytree(log.folder, other)
    (other / LOG).write_bytes(whole)
    shutil.rmtree(other / "000003-delta")
    fork = Publication(other)
    fork.model = log.model
    fork.publisher = Publisher(log.model.learner, other)
    fork.seed = 40
    fork.publish("base")
    shutil.rmtree(log.folder)
    shutil.copytree(other, log.folder)
    updater.poll()
    assert served_sequence(updater) == 3
    assert "(a fork)" in problem(updater)


def test_a_log_that_retention_rewrote_is_followed_on(log: Publication, updater: Updater) -> None:
    log.publish()
    updater.poll()
    assert served_sequence(updater) == 2
    for _ in range(2):
        log.publish("base")
        log.publish()
        prune(log.publisher.log, 1)
    assert len(log.publisher.log.lines()) == 6
    updater.poll()
    assert (served_sequence(updater), problem(updater)) == (6, "")
    for _ in range(4):
        log.publish("base")
        prune(log.publisher.log, 1)
    assert log.publisher.log.lines()[0].sequence > 6  # the line of what is served is gone
    updater.poll()
    assert (served_sequence(updater), problem(updater)) == (10, "")
    (log.folder / LOG).unlink()
    updater.poll()
    assert served_sequence(updater) == 10
    assert "is missing or has no entries" in problem(updater)
    assert updater.status is not None
    assert updater.status.lag(10) is None


def test_merged_layers_score_like_the_log(log: Publication, updater: Updater) -> None:
    for turn in range(12):
        log.publish()
        updater.poll()
        assert updater.status is not None
        assert len(updater.status.layers) <= MAX_OVERLAYS + 1
        version = predictor.open_version(Entry(updater.status.entry), updater.status.layers)
        found = version.run(version.fields.rows(PROBE))["score"]
        np.testing.assert_allclose(found, log.scores[turn + 2], rtol=0, atol=1e-6)


def test_rows_in_memory_are_those_in_files(log: Publication) -> None:
    entry = Entry(log.folder / "000001-base")
    mapped, memory = (predictor.open_version(entry, rows=rows) for rows in ("mapped", "memory"))
    batch = mapped.fields.rows(PROBE)
    np.testing.assert_array_equal(mapped.run(batch)["logit"], memory.run(batch)["logit"])
    assert overlays.size(overlays.open_layer(entry.path, 3)) == entry.manifest["rows"]


def test_int8_shows_its_drift(log: Publication) -> None:
    version = predictor.open_version(Entry(log.folder / "000001-base"), engine=Engine("int8"))
    assert version.drift is not None
    assert 0 < version.drift < predictor.INT8_TOLERANCE


def test_a_server_obeys_the_choice_of_an_engine(
    log: Publication, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Settings] = []
    monkeypatch.setattr("clickfleet.serve.supervisor.run", lambda settings, say, ready: asked.append(settings))
    argv = ["serve", str(log.folder), "--int8", "--threads", "2", "--graph-optimization", "basic", "--no-arena"]
    assert command(build(), argv) == 0
    assert asked[0].engine == Engine("int8", 2, "basic", arena=False)
    settings = replace(asked[0], state=str(tmp_path))
    settings.write()
    assert Settings.read(tmp_path) == settings  # as the workers get it
    version = VersionLoader(settings).open(
        Status(str(log.folder / "000001-base"), [str(log.folder / "000001-base")], 1)
    )
    options = version.session.get_session_options()
    assert (options.intra_op_num_threads, options.enable_cpu_mem_arena) == (2, False)
    assert version.drift is not None
    assert command(build(), ["serve", str(log.folder), "--engine", "torch"]) == 1
    assert "a server uses exactly one engine of ONNX Runtime" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="engine 'OpenVINO' is not available"):
        supervisor.create(replace(settings, engine=Engine("OpenVINO"), port=0))


@contextmanager
def half_sent(served: Served, rows: list[dict[str, Any]]) -> Iterator[Callable[[], Any]]:
    """A request that the server has begun to read; what is given sends the rest of it and reads the reply."""
    body = json.dumps({"rows": rows}).encode()
    head = b"POST /v1/predict HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: %d\r\n\r\n" % len(body)
    with socket.create_connection(("127.0.0.1", served.fleet.settings.port), timeout=WAIT_S) as sock:
        sock.sendall(head + body[:10])
        assert b" 100 " in sock.recv(1000)

        def finish() -> Any:
            sock.sendall(body[10:])
            reply = HTTPResponse(sock)
            reply.begin()
            assert reply.status == 200
            return json.loads(reply.read())

        yield finish


def test_a_killed_worker_comes_back_and_a_stop_loses_nothing(artifact: Path, model: Model, tmp_path: Path) -> None:
    rows = features(7, 3)
    expected = model.scores(rows)
    replies: list[Any] = []
    stop = threading.Event()
    with running(artifact, tmp_path / "state", workers=2) as served:

        def hammer() -> None:
            with httpx.Client(
                base_url=served.url, timeout=WAIT_S, limits=httpx.Limits(max_keepalive_connections=0)
            ) as client:
                while not stop.is_set():
                    try:
                        replies.append(client.post("/v1/predict", json={"rows": rows}).json()["scores"])
                    except httpx.TransportError as error:
                        replies.append(error)

        first = int((tmp_path / "state" / "ready-0").read_text())
        thread = threading.Thread(target=hammer)
        thread.start()
        (tmp_path / "state" / "ready-0").unlink()
        os.kill(first, signal.SIGKILL)
        until((tmp_path / "state" / "ready-0").exists)
        lost = [reply for reply in replies if isinstance(reply, Exception)]
        assert len(lost) <= 1  # the one in flight
        assert served.said
        del replies[:]
        until(lambda: len(replies) > 20)
        with half_sent(served, rows) as finish:
            stop.set()  # one request more at most, which has begun by now
            served.fleet.stopping = True
            for child in served.fleet.children.values():
                assert child.process is not None
                child.process.terminate()
            replies.append(finish()["scores"])
        thread.join()
        assert not [reply for reply in replies if isinstance(reply, Exception)]
        assert all(np.allclose(reply, expected, rtol=0, atol=1e-6) for reply in replies)
