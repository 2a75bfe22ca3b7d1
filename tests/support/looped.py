"""A small loop, traffic for it that counts what it sent, and the proof that every show was learned once."""

import os
import random
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa

from clickfleet.data.schema import Schema, Slot, write_schema
from served import WAIT_S, until

SCHEMA = Schema(slots=(Slot("user"), Slot("ad")), label="click")


def loop_settings(folder: Path, **online: Any) -> dict[str, Any]:
    """A loop that learns fast: one slot decides, and a show waits half a second."""
    write_schema(SCHEMA, folder / "schema.yaml")
    return {
        "data": {"schema": str(folder / "schema.yaml"), "batch_size": 32},
        "model": {"name": "lr"},
        "table": {"rule": {"name": "adagrad", "lr": 0.5}},
        "train": {"threads": 1},
        "run": {"dir": str(folder / "run"), "report": False, "checkpoint_every": "1s", "keep": 20},
        "publish": {"guard": {"auc_drop": None, "copc": None}},
        "online": {
            "join": {"shows": str(folder / "shows"), "feedback": str(folder / "feedback"), "wait": "500ms"},
            "pass": "100ms",
            **online,
        },
        "serve": {"port": 0, "grpc_port": None},
    }


@dataclass
class Sent:
    """A show that was answered."""

    at: float
    clicked: bool


@dataclass
class LoopTraffic:
    """Ranks two ads per request and clicks on the good one. Every request must be answered, after retries at most."""

    url: str
    seed: int = 1
    shows: dict[tuple[str, str], Sent] = field(default_factory=dict)
    sequences: set[int] = field(default_factory=set)
    """Entries that gave the replies."""
    refused: set[int] = field(default_factory=set)
    """Entries that must not give any."""
    slowest_s: float = 0.0
    scores: dict[str, float] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)
    skew_s: float = 0.0
    """Added to the time that feedback names."""
    failure: BaseException | None = None
    stopping: bool = False

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)
        self._http = httpx.Client(base_url=self.url, timeout=WAIT_S)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._number = 0

    def __enter__(self) -> "LoopTraffic":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def stop(self) -> None:
        self.stopping = True
        self._thread.join()
        self._http.close()
        if self.failure is not None:
            raise self.failure

    def _run(self) -> None:
        try:
            while not self.stopping:
                self._request()
                time.sleep(0.02)
        except BaseException as error:
            self.failure = error

    def _request(self) -> None:
        self._number += 1
        request = f"{self.seed}-{self._number}"
        body = {"user": {"user": f"u{self._number % 7}"}, "request": request}
        reply = self.post("/v1/rank", {**body, "candidates": [{"id": ad, "ad": ad} for ad in ("good", "bad")]})
        self.sequences.add(reply["sequence"])
        at = time.time()
        clicked = self._rng.random() < 0.8
        for ranked in reply["ranked"]:
            self.scores[ranked["id"]] = ranked["score"]
            self.shows[request, ranked["id"]] = Sent(at, clicked and ranked["id"] == "good")
        if clicked:
            event = {"request": request, "item": "good", "label": {"click": 1}, "event": f"e{request}"}
            self.events.append(event | ({"time": at + self.skew_s} if self.skew_s else {}))
            self.post("/v1/feedback", self.events[-1])

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Post until it is answered. Requests and events have ids, so repeating one is harmless."""
        begin = time.monotonic()
        while True:
            try:
                reply = self._http.post(path, json=body)
                if reply.status_code == 200:
                    break
                assert reply.status_code in (500, 503), reply.text
            except httpx.TransportError:
                pass
            assert time.monotonic() < begin + WAIT_S, "the server does not answer"
            time.sleep(0.01)
        self.slowest_s = max(self.slowest_s, time.monotonic() - begin)
        found: dict[str, Any] = reply.json()
        return found

    def status(self) -> dict[str, Any]:
        """What /v1/loop says."""
        while True:
            try:
                found: dict[str, Any] = httpx.get(f"{self.url}/v1/loop", timeout=WAIT_S).json()
                return found
            except httpx.TransportError:
                time.sleep(0.01)


class KeptRows:
    """Links the rows of every pass into a folder of the test, because the run removes those that it no longer needs."""

    def __init__(self, run: Path) -> None:
        self.spool, self.folder = run / "spool", run.parent / "kept"
        self.folder.mkdir(exist_ok=True)
        self._known: dict[str, list[dict[str, Any]]] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "KeptRows":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(0.05):
            self._link()

    def _link(self) -> None:
        for path in self.spool.glob("[!.]*.arrow"):
            with suppress(FileExistsError, FileNotFoundError):
                os.link(path, self.folder / path.name)

    def rows(self) -> list[dict[str, Any]]:
        """Every row that the join has made, in order."""
        for path in sorted(self.folder.glob("*.arrow")):
            if path.name not in self._known:
                self._known[path.name] = pa.ipc.open_file(str(path)).read_all().to_pylist()
        return [row for name in sorted(self._known) for row in self._known[name]]


def learned_once(kept: KeptRows, traffic: LoopTraffic) -> None:
    """Wait until everything that was shown is learned; then nothing was lost, doubled or mislabelled."""

    def missing() -> set[tuple[str, str]]:
        return set(traffic.shows) - {(row["request"], row["item"]) for row in kept.rows()}

    until(lambda: not missing(), 2 * WAIT_S)
    rows = kept.rows()
    first = Counter((row["request"], row["item"]) for row in rows if row["kind"] != "correction")
    assert set(first.values()) <= {1}, "a show was learned twice"

    def labelled() -> bool:
        last = {(row["request"], row["item"]): row["labels"][0][1] for row in kept.rows()}
        return all(last[show] == float(sent.clicked) for show, sent in traffic.shows.items())

    until(labelled, 2 * WAIT_S)
    # What was joined is also trained on, each row once, although the trainer may have been killed in between.
    until(lambda: traffic.status()["rows_learned"] == len(kept.rows()), 2 * WAIT_S)
