"""A small model that is trained and published step by step, and real servers for it."""

import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from clickfleet.config.load import Config, checked
from clickfleet.data.batch import Batch
from clickfleet.data.memory import Feed
from clickfleet.data.schema import Dense, History, Label, Schema, Slot, Transform
from clickfleet.serve import supervisor
from clickfleet.serve.supervisor import Settings
from clickfleet.training.export import Publisher
from clickfleet.training.learner import Learner
from clickfleet.training.predict import Scorer

SCHEMA = Schema(
    dense=(Dense("age", Transform("log1p"), missing=0.5), Dense("n")),
    slots=(Slot("user"), Slot("tags", multi=True, pooling="mean"), Slot("ad")),
)
FLAT = Schema(
    dense=tuple(Dense(f"I{i}", Transform("log1p")) for i in range(3)), slots=tuple(Slot(f"C{i}") for i in range(4))
)

EVENTS = replace(
    SCHEMA,
    histories=(History("past", ("ad", "user"), ("ads", "users"), max=5),),
    labels=(Label("click"), Label("buy", given="click")),
)
"""The same with a history, and a second label."""


WAIT_S = 60.0
"""Far longer than anything takes, even on a busy machine: only a test that fails waits so long."""


def features(seed: int, rows: int = 30, schema: Schema = SCHEMA) -> list[dict[str, Any]]:
    """Rows of raw features, some of them missing."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(rows):
        row: dict[str, Any] = {}
        for column in schema.dense:
            if rng.random() < 0.9:
                row[column.name] = float(np.round(rng.uniform(-3, 50), 2))
        for slot in schema.slots:
            values = [f"v{value}" for value in rng.integers(0, 40, rng.integers(0, 4) if slot.multi else 1)]
            if slot.multi:
                row[slot.name] = values
            elif rng.random() < 0.9:
                row[slot.name] = values[0]
        for history in schema.histories:
            events = rng.integers(0, 9)
            row |= {name: [f"v{value}" for value in rng.integers(0, 40, events)] for name in history.columns}
        found.append(row)
    return found


class Model:
    """A learner with what tests do to it."""

    def __init__(self, schema: Schema = SCHEMA, name: str = "deepfm", **table: Any) -> None:
        raw = {"model": {"name": name}, "table": {"dim": 3, **table}}
        self.schema = schema
        self.learner = Learner(checked(Config, raw, source="test"), schema)

    def batch(self, rows: list[dict[str, Any]]) -> Batch:
        """Through the code that reads people's data frames, not the server's."""
        names = [column.source_name for column in (*self.schema.dense, *self.schema.read_columns)]
        labels = dict.fromkeys(self.schema.label_columns, 0.0)
        whole = [{**labels, **{name: row.get(name) for name in names}} for row in rows]
        (found,) = list(Feed(whole, self.schema, len(rows)))
        return found

    def train(self, seed: int, rows: int = 60) -> None:
        data = self.batch(features(seed, rows, self.schema))
        size = rows if len(self.schema.tasks) == 1 else (rows, len(self.schema.tasks))
        data.labels = np.random.default_rng(seed).integers(0, 2, size).astype(np.float32)
        step = self.learner.steps(1)[0]
        result = step(data, self.learner.table.pull(step.embedding.unique(data)))
        self.learner.optimizer.step(step.flat.grads, result.dense_scale)
        self.learner.table.push(**result.push._asdict())

    def scores(self, rows: list[dict[str, Any]]) -> Any:
        ((_, found),) = list(Scorer(self.learner)([self.batch(rows)]))
        return np.array(found)


@dataclass
class Served:
    """A running server."""

    fleet: supervisor.Supervisor
    http: httpx.Client
    said: list[str]
    watcher: threading.Thread
    """Restarts what dies, until `fleet.stopping`."""

    @property
    def url(self) -> str:
        return self.fleet.address

    @property
    def grpc(self) -> str:
        return f"127.0.0.1:{self.fleet.settings.grpc_port}"


def trust(certificate: str | None) -> ssl.SSLContext | bool:
    return ssl.create_default_context(cafile=certificate) if certificate else True


@contextmanager
def running(model: Path | str, state: Path, **settings: Any) -> Iterator[Served]:
    state.mkdir(parents=True, exist_ok=True)
    chosen = {"port": 0, "grpc_port": None, "poll_ms": 20.0, **settings}
    fleet = supervisor.create(Settings(str(model), str(state), **chosen))
    said: list[str] = []
    try:
        fleet.start()
        watcher = threading.Thread(target=fleet.supervise, args=(said.append,))
        watcher.start()
        with httpx.Client(base_url=fleet.address, timeout=WAIT_S, verify=trust(settings.get("tls_cert"))) as client:
            yield Served(fleet, client, said, watcher)
    finally:
        fleet.stopping = True
        fleet.stop()
    watcher.join()


PROBE = features(900, 12)


class Publication:
    """A model that is trained and published on and on; `scores` holds what it gave at every sequence."""

    def __init__(self, folder: Path) -> None:
        self.model = Model()
        self.folder = folder
        self.publisher = Publisher(self.model.learner, folder)
        self.scores: dict[int, Any] = {}
        self.seed = 0

    def publish(self, kind: Any = "delta") -> int:
        self.seed += 1
        self.model.train(self.seed)
        entry = self.publisher.publish(kind, self.seed)
        self.scores[entry.sequence] = self.model.scores(PROBE)
        return entry.sequence


def until(check: Callable[[], bool], seconds: float = WAIT_S) -> None:
    """Wait for something that a working server does within moments."""
    end = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)


def ask(served: Served) -> dict[str, Any]:
    """What a server says of its model."""
    found: dict[str, Any] = served.http.get("/v1/model").json()
    return found
