"""A model with a million rows, and a published log that keeps changing it."""

import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from _loads import VALUES
from clickfleet import _core
from clickfleet.config.load import Config, checked
from clickfleet.data.schema import preset
from clickfleet.serve.features import Fields
from clickfleet.serve.predictor import open_version
from clickfleet.store import published
from clickfleet.store.published import Entry
from clickfleet.training import export
from clickfleet.training.learner import Learner
from clickfleet.training.onnx_graph import Graph


def learner(name: str = "deepfm") -> Learner:
    """Return a 400×3 network over a million rows with random weights."""
    config = checked(
        Config, {"model": {"name": name, "hidden": [400, 400, 400]}, "table": {"dim": 10}}, source="benchmark"
    )
    made = Learner(config, preset("criteo"))
    fields = Fields(made.schema)
    rng = np.random.default_rng(3)
    for start in range(0, VALUES, 5000):
        batch = fields.rows([{f"C{s}": f"{v:08x}" for s in range(1, 27)} for v in range(start, start + 5000)])
        slots = np.tile(np.arange(26, dtype=np.uint16), 5000)
        made.table.push(batch.keys, rng.normal(0, 1, (len(batch.keys), 11)).astype(np.float32), slots=slots)
    return made


class Deltas:
    """A published log whose deltas hold random rows. Knows the expected score of a row at every sequence number."""

    def __init__(self, model: Learner, graph: Graph, folder: Path) -> None:
        self.folder = folder
        shutil.rmtree(folder, ignore_errors=True)
        self.log = published.Log(folder)
        self.content = export.content(model, graph, 1)
        changes = model.table.cut_changes(base=True)
        try:
            self.log.append(changes, self.content)
        finally:
            changes.abort()
        everything = Fields(model.schema).rows([{f"C{s}": f"{v:08x}" for s in range(1, 27)} for v in range(VALUES)])
        self.keys, self.slots = everything.keys, np.tile(np.arange(26, dtype=np.uint16), VALUES)
        hashes = np.empty_like(self.keys)
        _core.mix64(self.keys, hashes)
        order = np.argsort(hashes)
        self.keys, self.slots = self.keys[order], self.slots[order]
        self.rng = np.random.default_rng(9)
        self.scores: dict[int, float] = {}

    def publish(self, n: int) -> Entry:
        chosen = np.sort(self.rng.permutation(len(self.keys))[:n])

        class Some:
            base = False
            deleted = np.empty(0, np.uint64)

            def __init__(self, outer: Deltas) -> None:
                self.outer = outer

            def __iter__(self) -> Iterator[dict[str, Any]]:
                weights = self.outer.rng.normal(0, 0.05, (len(chosen), 11)).astype(np.float32)
                yield {
                    "full": True,
                    "key": self.outer.keys[chosen],
                    "slot": self.outer.slots[chosen],
                    "embed_w": np.ascontiguousarray(weights[:, 0]),
                    "embedx": np.ascontiguousarray(weights[:, 1:]).reshape(-1),
                }

        return self.log.append(Some(self), self.content)

    def publish_every(self, period: float, n: int, stop: threading.Event) -> None:
        while not stop.is_set():
            begin = time.monotonic()
            self.publish(n)
            stop.wait(max(0.0, period - (time.monotonic() - begin)))

    def score(self, sequence: int, row: list[dict[str, Any]]) -> float:
        """Score rows offline from the base and the deltas up to a sequence number."""
        if sequence not in self.scores:
            lines = [line for line in self.log.lines() if line.sequence <= sequence]
            entries = [self.log.entry(line) for line in lines]
            stack = [str(entry.path) for entry in reversed(entries)]
            version = open_version(entries[-1], stack)
            self.scores[sequence] = float(version.run(version.fields.rows(row))["score"][0])
        return self.scores[sequence]
