"""Measure `/v1/rank` with the history of a user, as ratios within one run: models that read the events against the same network over
their mean.

    python benchmarks/rank.py              din with 100 events and sdim with 1,000, 200 candidates each: a minute
    --requests 300 --json

Both servers run at the same time, and one connection sends to each in turn. The scores of every reply are compared with those of the
exported network.
"""

import argparse
import http.client
import json
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from _servers import ours
from clickfleet.config.load import Config, checked
from clickfleet.data.schema import Dense, History, Schema, Slot
from clickfleet.serve.features import Fields
from clickfleet.serve.predictor import open_version
from clickfleet.store.published import Entry
from clickfleet.training import export
from clickfleet.training.learner import Learner

ITEMS, CATEGORIES, USERS = 20_000, 500, 1000
CANDIDATES = 200
POOLED = "dnn"


def schema(events: int) -> Schema:
    return Schema(
        dense=(Dense("price"),),
        slots=(Slot("user"), Slot("city"), Slot("hour"), Slot("item"), Slot("category")),
        histories=(History("clicked", ("item", "category"), ("items", "categories"), max=events),),
    )


def artifact(name: str, events: int, folder: Path) -> Path:
    """Return an export of a 400×3 network with random weights over the rows of all items."""
    raw = {"model": {"name": name, "hidden": [400, 400, 400]}, "table": {"dim": 10}}
    made = Learner(checked(Config, raw, source="benchmark"), schema(events))
    fields, rng = Fields(made.schema), np.random.default_rng(3)
    rows = [{"item": f"i{i}", "category": f"c{i % CATEGORIES}", "user": f"u{i % USERS}"} for i in range(ITEMS)]
    batch = fields.rows(rows)
    slots = np.repeat(np.tile(np.arange(batch.slots), len(batch)), np.diff(batch.offsets)).astype(np.uint16)
    keys, first = np.unique(batch.keys, return_index=True)
    weights = rng.normal(0, 1, (len(keys), made.table.factors + 1)).astype(np.float32)
    made.table.push(keys, weights, slots=slots[first])
    export.export(made, folder / f"{name}-{events}", 1)
    return folder / f"{name}-{events}"


def request(events: int) -> dict[str, Any]:
    rng = np.random.default_rng(events)
    clicked = rng.integers(0, ITEMS, events).tolist()
    user = {
        "user": "u7",
        "city": "Bern",
        "hour": "12",
        "items": [f"i{i}" for i in clicked],
        "categories": [f"c{i % CATEGORIES}" for i in clicked],
    }
    chosen = rng.integers(0, ITEMS, CANDIDATES).tolist()
    items = [
        {"id": n, "item": f"i{i}", "category": f"c{i % CATEGORIES}", "price": i / 1e4} for n, i in enumerate(chosen)
    ]
    return {"user": user, "candidates": items}


class Side:
    """A server and one connection to it."""

    def __init__(self, path: Path, url: str, asked: dict[str, Any]) -> None:
        version = open_version(Entry(path))
        rows = [{**asked["user"], **{k: v for k, v in c.items() if k != "id"}} for c in asked["candidates"]]
        self.expected = version.run(version.fields.rows(rows))["score"]
        self.body = json.dumps(asked).encode()
        parts = urlsplit(url)
        self.connection = http.client.HTTPConnection(str(parts.hostname), parts.port)
        self.times: list[float] = []

    def send(self) -> None:
        begin = time.perf_counter()
        self.connection.request("POST", "/v1/rank", self.body, {"Content-Type": "application/json"})
        reply = self.connection.getresponse().read()
        self.times.append(1e3 * (time.perf_counter() - begin))
        ranked = json.loads(reply)["ranked"]
        found = np.array([item["score"] for item in sorted(ranked, key=lambda item: int(item["id"]))])
        np.testing.assert_allclose(found, self.expected, rtol=0, atol=1e-5)

    def p50(self) -> float:
        return statistics.median(self.times)


def measure(name: str, events: int, requests: int, folder: Path) -> dict[str, float]:
    """Return the median times of a model and of the pooled one."""
    asked = request(events)
    with ExitStack() as stack:
        sides = {}
        for model in (name, POOLED):
            path = artifact(model, events, folder)
            sides[model] = Side(path, stack.enter_context(ours(path)).url, asked)
        for _ in range(20):  # until both are warm
            for side in sides.values():
                side.send()
        for side in sides.values():
            side.times.clear()
        for _ in range(requests):
            for side in sides.values():
                side.send()
        ours_ms, pooled_ms = sides[name].p50(), sides[POOLED].p50()
        return {
            "p50_ms": round(ours_ms, 3),
            "pooled_p50_ms": round(pooled_ms, 3),
            "ratio": round(ours_ms / pooled_ms, 3),
            "p99_ms": round(float(np.percentile(sides[name].times, 99)), 3),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, events, target in (("din", 100, "p50 ≤ 5 ms, ≤ 1.5×"), ("sdim", 1000, "≤ 2×")):
            found = results[f"{name}, {events} events"] = measure(name, events, options.requests, Path(folder))
            if not options.json:
                print(
                    f"{name}, {CANDIDATES} candidates, {events:,} events: p50 {found['p50_ms']:.2f} ms, "
                    f"p99 {found['p99_ms']:.2f} ms; pooled {found['pooled_p50_ms']:.2f} ms; {found['ratio']:.2f}×   ({target})",
                    flush=True,
                )
    if options.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
