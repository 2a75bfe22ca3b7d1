"""Feedback over HTTP: validated, authorised like the rest, and in the log before it is acknowledged."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from clickfleet.data.events import FEEDBACK
from clickfleet.errors import ServeError
from clickfleet.serve.client import Client
from clickfleet.store.event_log import EventFolder, LogPlace, StreamReader
from served import Served, running, until
from small_disk import small_disk

EVENT: dict[str, Any] = {"request": "r", "item": "a", "label": {"click": 1}}


def events_in(folder: Path) -> list[dict[str, Any]]:
    log, rows = EventFolder(folder), []
    listed = log.streams()
    for name in listed:
        reader = StreamReader(log, name, FEEDBACK, LogPlace(), lambda text: None)
        while (read := reader.read(listed)) is not None:
            rows += read.batch.to_pylist()
        reader.close()
    return sorted(rows, key=lambda row: row["received"])


@pytest.fixture(scope="module")
def told(artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, Path]]:
    folder = tmp_path_factory.mktemp("told")
    with running(artifact, folder / "state", workers=2, max_body=1 << 20, feedback=str(folder / "feedback")) as found:
        yield found, folder / "feedback"


def test_events_are_in_the_log_when_they_are_acknowledged(told: tuple[Served, Path]) -> None:
    served, folder = told
    single = {**EVENT, "event": "e1", "time": 1700000000.25, "label": {"click": True, "dwell": 2.5}}
    assert served.http.post("/v1/feedback", json=single).json() == {"accepted": 1}
    several = [{"request": 17, "label": {"buy": 0}}, {**EVENT, "item": None}]
    assert served.http.post("/v1/feedback", json={"events": several}).json() == {"accepted": 2}
    found = {row["event"]: row for row in events_in(folder)}
    assert len(found) >= 3
    one = found["e1"]
    assert (one["request"], one["item"], one["labels"]) == ("r", "a", [("click", 1.0), ("dwell", 2.5)])
    assert one["time"].timestamp() == 1700000000.25
    assert one["received"].timestamp() > 1.7e9
    others = [row for row in found.values() if row["request"] == "17" or row["item"] == "0"]
    assert all(row["item"] == "0" and row["time"] == row["received"] for row in others)
    assert len({row["event"] for row in others}) == 2, "an event without an id gets one"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "cannot parse"),
        (b"[]", "must be an object, not list"),
        (b"{}", "the request must be a text"),
        (b'{"events": []}', "from 1 to 10,000 events"),
        (b'{"events": [{}], "more": 1}', "the only member"),
        (b'{"events": 1}', "events must be a list"),
        (b'{"request": "r"}', "the label must be an object"),
        (b'{"request": "r", "label": {}}', "the label must be an object"),
        (b'{"request": "r", "label": {"click": "1"}}', "the label 'click' must be a number"),
        (b'{"request": "r", "label": {"click": 1e300}}', "the label 'click' must be a number"),
        (b'{"request": "r", "label": {"": 1}}', "the name of a label"),
        (b'{"request": "", "label": {"click": 1}}', "the request must be a text of 1 to 1024"),
        (b'{"request": 1.5, "label": {"click": 1}}', "the request must be a text"),
        (b'{"request": true, "label": {"click": 1}}', "the request must be a text"),
        (b'{"request": "\\ud800", "label": {"click": 1}}', "cannot parse"),
        (b'{"request": "r", "item": [], "label": {"click": 1}}', "the item must be a text"),
        (b'{"request": "r", "lable": {"click": 1}}', "unknown member 'lable'"),
        (b'{"request": "r", "label": {"click": 1}, "time": 1700000000000}', "seconds since 1970"),
        (b'{"request": "r", "label": {"click": 1}, "time": "now"}', "seconds since 1970"),
        (b'{"request": "r", "label": {"click": 1}, "event": ""}', "the event must be a text"),
        (b'{"events": [{"request": "r", "label": {"click": 1}}, {"request": "r"}]}', "event 1: the label"),
        (b'{"request": "r", "label": ' + b'{"a":' * 5000 + b"1" + b"}" * 5001, "cannot parse"),
    ],
)
def test_events_that_are_none_are_refused_by_name(told: tuple[Served, Path], body: bytes, message: str) -> None:
    before = len(events_in(told[1]))
    reply = told[0].http.post("/v1/feedback", content=body)
    assert (reply.status_code, message in reply.json()["error"]) == (400, True), reply.text
    assert len(events_in(told[1])) == before, "a request is stored as a whole or not at all"


def test_a_request_is_bounded(told: tuple[Served, Path]) -> None:
    http = told[0].http
    names = {f"l{i}": 1 for i in range(33)}
    assert http.post("/v1/feedback", json={"request": "r", "label": names}).status_code == 400
    assert http.post("/v1/feedback", json={"events": [EVENT] * 10_001}).status_code == 400
    assert http.post("/v1/feedback", content=b" " * (2 << 20)).status_code == 413
    assert http.get("/v1/feedback").status_code == 405


def test_the_client(told: tuple[Served, Path]) -> None:
    with Client(told[0].url) as client:
        assert client.feedback({"request": "by-client", "label": {"click": 1}}) == 1
        assert client.feedback([{**EVENT, "request": "by-client", "event": f"c{i}"} for i in range(5)]) == 5
        with pytest.raises(ServeError, match="the label 'click' must be a number"):
            client.feedback({**EVENT, "label": {"click": None}})
    found = [row for row in events_in(told[1]) if row["request"] == "by-client"]
    assert {row["event"] for row in found} >= {f"c{i}" for i in range(5)}
    assert len(found) == 6


def test_feedback_needs_a_token_like_the_rest(artifact: Path, tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text("secret\n")
    settings = {"token_file": str(tmp_path / "tokens"), "feedback": str(tmp_path / "feedback")}
    with running(artifact, tmp_path / "state", **settings) as served:
        assert served.http.post("/v1/feedback", json=EVENT).status_code == 401
        with Client(served.url, token="secret") as client:
            assert client.feedback(EVENT) == 1
    assert len(events_in(tmp_path / "feedback")) == 1


def test_what_was_acknowledged_survives_a_kill(artifact: Path, tmp_path: Path) -> None:
    acknowledged = []
    with running(artifact, tmp_path / "state", feedback=str(tmp_path / "feedback")) as served:
        for round_ in range(3):
            for i in range(10):
                event = f"{round_}-{i}"
                with httpx.Client(base_url=served.url, timeout=60) as http:
                    assert http.post("/v1/feedback", json={**EVENT, "event": event}).status_code == 200
                acknowledged.append(event)
            process = served.fleet.children["worker 0"].process
            assert process is not None
            os.kill(process.pid, signal.SIGKILL)
            until(lambda process=process: served.fleet.children["worker 0"].process is not process)
            until(lambda: served.fleet.ready())
    assert [row["event"] for row in events_in(tmp_path / "feedback")] == acknowledged


def test_a_full_disk_refuses_feedback_and_loses_none(artifact: Path, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 2 << 20) as disk:
        folder = disk.folder / "feedback"
        with running(artifact, tmp_path / "state", feedback=str(folder)) as served:
            assert served.http.post("/v1/feedback", json={**EVENT, "event": "first"}).status_code == 200
            disk.leave(0)
            replies = [
                served.http.post("/v1/feedback", json={"events": [{**EVENT, "event": f"{i}-{j}"} for j in range(200)]})
                for i in range(20)
            ]
            assert {reply.status_code for reply in replies} == {200, 503} or {r.status_code for r in replies} == {503}
            assert served.http.post("/v1/predict", json={"rows": [{}]}).status_code == 200
            disk.free()
            assert served.http.post("/v1/feedback", json={**EVENT, "event": "last"}).status_code == 200
            counts = served.http.get("/v1/stats").json()["counts"]
        wanted = {"first", "last"} | {
            f"{i}-{j}" for i, reply in enumerate(replies) if reply.status_code == 200 for j in range(200)
        }
        found = [row["event"] for row in events_in(folder)]
        assert set(found) == wanted
        assert len(found) == len(wanted)
        assert counts["feedback_refused"] == 200 * sum(reply.status_code == 503 for reply in replies)
