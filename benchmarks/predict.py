"""Compare batch scoring from raw text with a forward-only limit, in alternation in one run.

python benchmarks/predict.py [--batch 1000 4096] [--rounds 5] [--rows 200000] [--json]

The limit is the same MLP (273 → 400 → 400 → 400 → 1) with a sigmoid on random tensors under inference_mode, without
data and rows, in the better of two arrangements: two threads within each operator, or two single-threaded workers.
Ours is everything `clickfleet predict` does: read and parse Criteo text, pull and pool rows, write scores in order.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import threading
import time
from itertools import pairwise
from pathlib import Path

import torch
from torch import nn

from clickfleet.data.logs.synth import SynthOptions, synth
from clickfleet.training import run
from clickfleet.training.model import SavedModel, load
from clickfleet.training.score_files import write_scores

WIDTHS = (273, 400, 400, 400)


Speed = tuple[float, float]
"""Rows per second of wall-clock time, and of CPU time."""


def limit(rows: int, threads: int, count: int) -> Speed:
    """Measure the bare network in this many threads, which share two cores."""
    layers = [layer for a, b in pairwise(WIDTHS) for layer in (nn.Linear(a, b), nn.ReLU())]
    net = nn.Sequential(*layers, nn.Linear(WIDTHS[-1], 1), nn.Sigmoid()).eval()
    begin = threading.Barrier(threads + 1)

    def work() -> None:
        torch.set_num_threads(2 // threads)
        x = torch.randn(rows, WIDTHS[0])
        with torch.inference_mode():
            net(x)
            begin.wait()
            for _ in range(count):
                net(x)

    workers = [threading.Thread(target=work) for _ in range(threads)]
    for worker in workers:
        worker.start()
    begin.wait()
    start, cpu = time.perf_counter(), time.process_time()
    for worker in workers:
        worker.join()
    done = threads * count * rows
    return done / (time.perf_counter() - start), done / (time.process_time() - cpu)


def ours(model: SavedModel, data: str, batch: int, out: str) -> Speed:
    cpu = time.process_time()
    done = write_scores(model, data, out, batch)
    return done["rows_per_s"], done["rows"] / (time.process_time() - cpu)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--batch", type=int, nargs="+", default=[1000, 4096])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        synth(Path(folder) / "log", SynthOptions(rows=args.rows, test_rows=0))
        data = f"{folder}/log/train"
        config = {
            "data": {"train": data},
            "model": {"name": "dnn", "hidden": [400, 400, 400]},
            "table": {"dim": 10},
            "train": {"threads": 2},
            "run": {"dir": f"{folder}/run"},
        }
        run.train(config, quiet=True)
        model = load(f"{folder}/run").reading(threads=2)
        for batch in args.batch:
            count = max(
                args.rows // (2 * batch), 1
            )  # about as long as ours, so that both see the same load on the machine
            cases = {
                "limit, 2 threads": lambda b=batch, n=count: limit(b, 1, n),
                "limit, 2×1": lambda b=batch, n=count: limit(b, 2, n),
                "from raw text to .npy": lambda b=batch: ours(model, data, b, f"{folder}/scores.npy"),
                "from raw text to text": lambda b=batch: ours(model, data, b, f"{folder}/scores.txt"),
            }
            speeds: dict[str, list[Speed]] = {name: [] for name in cases}
            for _ in range(args.rounds):
                for name, case in cases.items():
                    speeds[name].append(case())
            medians = {name: [statistics.median(x) for x in zip(*found, strict=True)] for name, found in speeds.items()}
            best = [max(medians[name][i] for name in cases if name.startswith("limit")) for i in (0, 1)]
            print(f"batch {batch}: rows/s (ratio to the limit), rows per second of CPU (ratio)")
            for name, (wall, cpu) in medians.items():
                results[f"{batch} {name}"] = {
                    "rows_per_s": round(wall),
                    "ratio": wall / best[0],
                    "cpu_ratio": cpu / best[1],
                }
                ratios = f"({wall / best[0]:.2f})", f"({cpu / best[1]:.2f})"
                print(f"  {name:24} {wall:9,.0f} {ratios[0]}  {cpu:9,.0f} {ratios[1]}", flush=True)
    if args.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
