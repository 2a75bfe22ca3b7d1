"""Measure what online learning costs beyond plain training, and what a delta costs beyond its rows.

python benchmarks/online.py [--rows 500000] [--rounds 3] [--table-rows 10000000] [--only pass|delta|records] [--json]

pass: `clickfleet online` over two passes (progressive validation, shuffling, a delta after each pass, background
checkpoints) against `clickfleet train` on the same rows, in alternation. Online time runs from the start of the first
pass to the end of the last delta. Both times exclude imports and the ONNX export, which happen once per run.

delta: a table of 10 million rows of which 10,000 changed, written as a delta and as a base; also shrink and end of day
on the same table.

records: Kafka records of one row each, as text and as JSON, written to the file of a pass, against reading that file.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from clickfleet import Table
from clickfleet.config.check import configure
from clickfleet.data.logs.synth import SynthOptions, synth
from clickfleet.data.reader import Reader
from clickfleet.data.schema import preset
from clickfleet.online.learn import learn
from clickfleet.online.sources.broker import Record
from clickfleet.online.sources.messages import Spool
from clickfleet.store.published import Content, Log
from clickfleet.training import run
from clickfleet.training.learner import Learner
from clickfleet.training.onnx_graph import Graph


def settings(folder: Path) -> dict[str, Any]:
    return {
        "model": {"name": "dnn", "hidden": [400, 400, 400]},
        "table": {"dim": 10},
        "train": {"threads": 2},
        "run": {"dir": str(folder / "run"), "checkpoint_every": None, "report": False},
    }


def plain(folder: Path) -> float:
    """Return the seconds to train on the files in order."""
    shutil.rmtree(folder / "run", ignore_errors=True)
    config = settings(folder)
    config["data"] = {"train": [str(path) for path in sorted(folder.glob("log/2026*/*/part-*"))]}
    done = run.train(config, quiet=True)
    return done.rows / done.rows_per_s


def online(folder: Path) -> tuple[float, float]:
    """Return the seconds from the start of the first pass to the last delta, and the seconds of that delta."""
    shutil.rmtree(folder / "run", ignore_errors=True)
    (folder / "run").mkdir()
    shutil.copy(folder / "graph.onnx", folder / "run")
    config = settings(folder)
    config["online"] = {
        "dir": str(folder / "log"),
        "start_day": 20260101,
        "end_day": 20260101,
        "split_interval": "720min",
    }
    config["publish"] = {"guard": {"auc_drop": None, "copc": None}}
    learn(config, quiet=True)
    lines = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    passes = [line for line in lines if line["kind"] == "pass"]
    deltas = [line for line in lines if line["kind"] == "published"][: len(passes)]
    return deltas[-1]["time"] - (passes[0]["time"] - passes[0]["seconds"]), deltas[-1]["seconds"]


def compare_passes(folder: Path, rows: int, rounds: int) -> dict[str, float]:
    synth(folder / "log", SynthOptions(rows=2 * rows, test_rows=0, days=1, split_interval_min=720), threads=2)
    learner = Learner(configure(settings(folder)), preset("criteo"))
    Graph(learner.model, learner.shape, cache=folder / "graph.onnx")  # a run exports it once
    trained, learned, deltas = [], [], []
    for _ in range(rounds):
        trained.append(plain(folder))
        seconds, delta = online(folder)
        learned.append(seconds)
        deltas.append(delta)
    ratios = [b / a for a, b in zip(trained, learned, strict=True)]
    found = {
        "rows_per_pass": rows,
        "plain_rows_per_s": 2 * rows / statistics.median(trained),
        "online_rows_per_s": 2 * rows / statistics.median(learned),
        "delta_seconds": statistics.median(deltas),
        "online_over_plain": statistics.median(ratios),
        "smallest_ratio": min(ratios),
        "largest_ratio": max(ratios),
    }
    print(
        f"two passes of {rows:,} rows: plain {found['plain_rows_per_s']:,.0f} rows/s, online {found['online_rows_per_s']:,.0f} rows/s"
    )
    print(
        f"  online / plain = {found['online_over_plain']:.3f} ({min(ratios):.3f} to {max(ratios):.3f}), target ≤ 1.25"
    )
    return found


def content(step: int) -> Content:
    return Content({}, {}, 10, step, b"", lambda sample: pa.table({"score": pa.array([], pa.float32())}), ("score",))


def compare_entries(folder: Path, rows: int, changed: int, rounds: int) -> dict[str, float]:
    table, log = Table(10, decay_rate=0.99, base_threshold=0.0), Log(folder / "published")
    keys = np.random.default_rng(7).integers(0, 2**63, rows, dtype=np.uint64)
    for start in range(0, rows, 1 << 20):
        part = keys[start : start + (1 << 20)]
        table.push(part, np.ones((len(part), 11), np.float32))

    def publish(base: bool) -> float:
        begin = time.perf_counter()
        changes = table.cut_changes(base=base)
        log.append(changes, content(0))
        changes.commit()
        return time.perf_counter() - begin

    publish(True)
    bases, deltas, shrinks, days = [], [], [], []
    for n in range(rounds):
        table.push(keys[n * changed : (n + 1) * changed], np.ones((changed, 11), np.float32))
        deltas.append(publish(False))
        bases.append(publish(True))
        for times, act in ((shrinks, table.shrink), (days, table.end_day)):
            begin = time.perf_counter()
            act()
            times.append(time.perf_counter() - begin)
    delta, base = statistics.median(deltas), statistics.median(bases)
    found = {
        "table_rows": rows,
        "changed_rows": changed,
        "base_seconds": base,
        "delta_seconds": delta,
        "base_over_delta": base / delta,
        "shrink_rows_per_s": len(table) / statistics.median(shrinks),
        "end_day_rows_per_s": len(table) / statistics.median(days),
    }
    print(
        f"{changed:,} of {rows:,} rows changed: delta {delta * 1000:,.1f} ms, base {base:.2f} s, {base / delta:,.0f}× (target ≥ 20×)"
    )
    print(f"  shrink {found['shrink_rows_per_s'] / 1e6:.1f} million rows/s (target ≥ 10 per core)")
    return found


def compare_records(folder: Path, rows: int, rounds: int) -> dict[str, float]:
    synth(folder / "log", SynthOptions(rows=rows, test_rows=0, parts=1))
    lines = (folder / "log/train/part-0").read_bytes().splitlines()
    names = [column.name for column in preset("criteo").dense] + [slot.name for slot in preset("criteo").slots]
    fields = [line.decode().split("\t") for line in lines]
    objects = [json.dumps({"click": row[0], **dict(zip(names, row[1:], strict=True))}) for row in fields]
    found: dict[str, float] = {}
    for kind, values in (("text", lines), ("json", [text.replace('""', "null").encode() for text in objects])):
        kafka = {"brokers": "-", "topic": "-", "rows_per_pass": 1, "format": kind}
        config = configure({"data": {"preset": "criteo"}, "online": {"kafka": kafka}})
        spool = Spool(folder / kind, config)
        records = {0: [Record("-", 0, offset, 0.0, value) for offset, value in enumerate(values)]}
        ratios = []
        for _ in range(rounds):
            begin = time.perf_counter()
            (path,) = spool.write("20260101-0001", records).files
            written = time.perf_counter()
            read = sum(map(len, Reader(path, preset("criteo"), "criteo" if kind == "text" else "arrow")))
            ratios.append((written - begin) / (time.perf_counter() - written))
            assert read == rows
        found[f"{kind}_write_over_read"] = statistics.median(ratios)
        print(f"{rows:,} {kind} records: writing their file / reading it = {found[f'{kind}_write_over_read']:.2f}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=500_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--table-rows", type=int, default=10_000_000)
    parser.add_argument("--changed", type=int, default=10_000)
    parser.add_argument("--only", choices=["pass", "delta", "records"])
    parser.add_argument("--json", action="store_true", help="also print the figures as a JSON line")
    options = parser.parse_args()
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        if options.only in (None, "records"):
            figures["records"] = compare_records(Path(folder) / "records", min(options.rows, 100_000), options.rounds)
        if options.only in (None, "delta"):
            figures["entries"] = compare_entries(Path(folder), options.table_rows, options.changed, options.rounds)
        if options.only in (None, "pass"):
            figures["passes"] = compare_passes(Path(folder), options.rows, options.rounds)
    if options.json:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
