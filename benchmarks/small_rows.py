"""Compare the formats of published rows: bytes, drift and AUC, and the speed of the server's reading and pooling.

python benchmarks/small_rows.py [--rows 6000000] [--dim 10] [--train-rows 300000] [--json]

Three entries hold the same random rows in float32, float16 and int8. `file_bytes` is the size of their row files per row,
`memory_bytes` what a server reads of them per row: keys, numbers and index. `rows_per_s` is how many rows of 26 keys are looked up
and pooled per second of CPU time, for requests of 1, 100 and 2000 rows with uniformly random keys, so that most rows come from
memory and not from the cache. The formats take turns; `speed` is the median of the ratios to float32 within one turn. A model
trained on synthetic rows is then scored on 50,000 others in each format, as `clickfleet publish --what-if` does.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

import clickfleet
from clickfleet import _core
from clickfleet.config.check import configure
from clickfleet.data.logs.synth import SynthOptions, synth
from clickfleet.serve import overlays
from clickfleet.store import published, row_format
from clickfleet.store.published import Content, Entry
from clickfleet.store.row_format import FORMATS, RowFormat
from clickfleet.store.table import Columns, sort_by_hash
from clickfleet.workbench.what_if import what_if

SLOTS = 26
ROUNDS, SECONDS = 9, 0.3
PART = 1 << 20


class RandomRows:
    """Full rows with random numbers, ordered as an entry needs them."""

    base = True
    deleted = np.empty(0, np.uint64)

    def __init__(self, rows: int, dim: int) -> None:
        self.keys = sort_by_hash(np.unique(np.random.default_rng(1).integers(0, 1 << 63, rows).astype(np.uint64)))
        self.dim = dim

    def __iter__(self) -> Iterator[Columns]:
        rng = np.random.default_rng(2)
        for at in range(0, len(self.keys), PART):
            keys = self.keys[at : at + PART]
            slots = rng.integers(0, SLOTS, len(keys)).astype(np.uint16)
            weights, factors = (rng.normal(0, 0.05, len(keys) * n).astype(np.float32) for n in (1, self.dim))
            yield {"full": True, "key": keys, "slot": slots, "embed_w": weights, "embedx": factors}


def publish(rows: RandomRows, folder: Path, form: RowFormat) -> Entry:
    content = Content(
        {"slots": [f"C{i}" for i in range(SLOTS)]},
        {},
        rows.dim,
        1,
        b"",
        lambda sample: pa.table({"score": pa.array([], pa.float32())}),
        ("score",),
        row_format=form,
    )
    return published.write(folder / form, rows, content, sequence=1, parent=None, chain="")


class Requests:
    """Requests to one format."""

    def __init__(self, layer: Any, keys: Any, size: int, dim: int) -> None:
        self.rows, self.size = _core.FrozenRows((layer,), dim), size
        rng = np.random.default_rng(size)
        self.asked = [rng.choice(keys, size * SLOTS) for _ in range(max(4, 20_000 // size))]
        ends = np.arange(size * SLOTS + 1, dtype=np.int64)
        self.cells = ends[:-1].copy(), ends[1:].copy()
        self.out = np.empty((size, SLOTS), np.float32), np.empty((size, SLOTS, dim), np.float32)

    def rows_per_s(self) -> float:
        done, begin = 0, time.thread_time()
        while (passed := time.thread_time() - begin) < SECONDS:
            for keys in self.asked:
                self.rows.inputs(keys, *self.cells, None, None, [], 1 << 20, *self.out)
            done += len(self.asked) * self.size
        return done / passed


def compare_speed(rows: int, dim: int, folder: Path) -> list[dict[str, Any]]:
    """Write the rows in each format, and read them in turns."""
    given = RandomRows(rows, dim)
    entries = {form: publish(given, folder, form) for form in FORMATS}
    layers = {form: overlays.open_layer(entry.path, dim, "memory") for form, entry in entries.items()}
    out: list[dict[str, Any]] = []
    for form, entry in entries.items():
        memory = row_format.memory_bytes(form, dim) + layers[form].index_bytes / len(given.keys)
        out.append(
            {
                "format": form,
                "rows": len(given.keys),
                "file_bytes": round(entry.row_bytes / len(given.keys), 2),
                "memory_bytes": round(memory, 2),
            }
        )
    for one in out:
        one |= {f"{name}_ratio": round(one[name] / out[0][name], 3) for name in ("file_bytes", "memory_bytes")}
    for size in (1, 100, 2000):
        asked = {form: Requests(layer, given.keys, size, dim) for form, layer in layers.items()}
        turns = [{form: requests.rows_per_s() for form, requests in asked.items()} for _ in range(ROUNDS)]
        for one in out:
            form = one["format"]
            one[f"rows_per_s_{size}"] = round(statistics.median(turn[form] for turn in turns))
            one[f"speed_{size}"] = round(statistics.median(turn[form] / turn["float32"] for turn in turns), 3)
    return out


def compare_scores(model: str, rows: int, dim: int, folder: Path) -> list[dict[str, Any]]:
    """Train a model, and score 50,000 rows with its rows in each format."""
    if not (folder / "log").exists():
        synth(folder / "log", SynthOptions(rows=rows, test_rows=50_000))
    config = configure(
        {
            "data": {"train": [str(folder / "log" / "train")], "format": "criteo"},
            "model": {"name": model},
            "table": {"dim": dim},
            "train": {"epochs": 1},
            "run": {"dir": str(folder / model)},
        }
    )
    done = clickfleet.train(config)
    found = what_if(clickfleet.load(done.path), [str(folder / "log" / "test")])
    return [{"model": model, "rows": found.rows, "scored": found.scored, **vars(one)} for one in found.formats]


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    arguments.add_argument("--rows", type=int, default=6_000_000)
    arguments.add_argument("--dim", type=int, default=10)
    arguments.add_argument("--train-rows", type=int, default=300_000)
    arguments.add_argument("--models", default="dnn,deepfm")
    arguments.add_argument("--json", action="store_true")
    given = arguments.parse_args()

    def show(lines: list[dict[str, Any]]) -> None:
        for one in lines:
            text = "  ".join(f"{key} {value}" for key, value in one.items() if value is not None)
            print(json.dumps(one) if given.json else text, flush=True)

    with tempfile.TemporaryDirectory() as folder:
        show(compare_speed(given.rows, given.dim, Path(folder)))
    with tempfile.TemporaryDirectory() as folder:
        for model in given.models.split(","):
            show(compare_scores(model, given.train_rows, given.dim, Path(folder)))


if __name__ == "__main__":
    main()
