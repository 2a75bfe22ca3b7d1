"""Modes on a cluster of this machine against local training, in one run: rows per second, and where the rest goes.

    python benchmarks/cluster.py --rows 200000 --rounds 3

2 shards and 2 single-threaded workers against 2 trainer threads; the CTR-DNN 400×3 with dim 10, batches of 1000 rows of raw text. Figures
are medians over rounds that alternate between the modes; the machine's speed wanders, so read the ratios.
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

import clickfleet
from clickfleet.cluster.fleet import ray_module
from clickfleet.logs.synth import Options, synth

MODES: dict[str, dict[str, Any]] = {
    "local": {},
    "async": {"pull_every": 8, "independent_recv": True},
    "geo": {"k_steps": 100},
    "half_async": {},
    "sync": {},
}
TARGETS = {"async": 0.7, "geo": 0.85, "half_async": 0.5, "sync": 0.5}


def settings(data: Path, run: Path, mode: str, arguments: argparse.Namespace) -> dict[str, Any]:
    return {
        "data": {"train": [str(data / "train" / "*")], "test": [str(data / "test" / "*")], "batch_size": 1000},
        "model": {"name": "dnn", "hidden": [400, 400, 400]},
        "table": {"dim": 10},
        "train": {"threads": 2},
        "mode": {"name": mode, **MODES[mode]},
        "cluster": {"shards": arguments.shards, "workers": arguments.workers},
        "run": {"dir": str(run), "checkpoint_every": None, "keep_epochs": False},
    }


def measure(data: Path, mode: str, arguments: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        begin = time.monotonic()
        done = clickfleet.train(settings(data, run, mode, arguments), quiet=True)
        result = {"rows_per_s": done.rows_per_s, "auc": done.test["auc"] if done.test else None}
        if mode != "local":
            lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
            result |= next((line for line in lines if line["kind"] == "cluster"), {})
        result["whole_s"] = time.monotonic() - begin
        shutil.rmtree(run, ignore_errors=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--shards", type=int, default=2)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--data", type=Path, help="a folder made by `clickfleet synth` before")
    arguments = parser.parse_args()
    ray = ray_module()
    ray.init(address="local", num_cpus=16, include_dashboard=False, log_to_driver=False, object_store_memory=1 << 28)
    names = arguments.modes.split(",")
    with tempfile.TemporaryDirectory() as folder:
        data = arguments.data or Path(folder) / "data"
        if not data.exists():
            synth(data, Options(rows=arguments.rows, test_rows=20_000, parts=2 * arguments.workers))
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
        for _ in range(arguments.rounds):
            for name in names:
                found[name].append(measure(data, name, arguments))
                print(name, f"{found[name][-1]['rows_per_s']:,.0f} rows/s", flush=True)
    ray.shutdown()
    speed = {name: statistics.median(each["rows_per_s"] for each in runs) for name, runs in found.items()}
    for name, runs in found.items():
        last, ratio = runs[-1], speed[name] / speed.get("local", speed[name])
        print(f"{name:>10}  {speed[name]:>9,.0f} rows/s  {ratio:.2f} of local  AUC {last['auc']:.4f}", end="")
        if name != "local":
            print(
                f"  (target {TARGETS[name]})  ",
                {k: v for k, v in last.items() if k not in ("rows_per_s", "auc")},
                end="",
            )
        print()
    print(
        json.dumps(
            {"benchmark": "cluster", **{f"{n}_of_local": speed[n] / speed["local"] for n in names if "local" in speed}}
        )
    )


if __name__ == "__main__":
    main()
