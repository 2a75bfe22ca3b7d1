"""Training from raw text against the dense limit, in one run, in alternation.

python benchmarks/train.py [--batch 1000 4096] [--rounds 5] [--rows 200000] [--data FILE] [--json]

The dense limit is the same MLP (273 → 400 → 400 → 400 → 1) trained by eager PyTorch with fused Adam on random tensors,
no data and no rows, in the better of two arrangements: two threads inside each operator, or two hogwild threads of one.
Ours is everything: Criteo text is read and parsed, rows pulled, pooled, trained and pushed, Adam steps, metrics count.
`rows_per_s` is what `clickfleet train` reports: from the first line read to the last push applied.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path

import torch

from clickfleet import run
from clickfleet.logs.synth import Options, synth
from tower import eager, seconds_per_step


def ours(data: str, batch: int, trainers: int) -> float:
    """Rows per second of a whole training run; it writes no checkpoint until after the last push."""
    with tempfile.TemporaryDirectory() as folder:
        config = {
            "data": {"train": data, "batch_size": batch},
            "model": {"name": "dnn", "hidden": [400, 400, 400]},
            "table": {"dim": 10},
            "train": {"threads": 2, "hogwild": trainers},
            "run": {"dir": folder},
        }
        return run.train(config, quiet=True).rows_per_s


def limit(rows: int, trainers: int, count: int) -> float:
    wall, _ = seconds_per_step(eager(rows, trainers), count)
    return rows / wall


def measure(data: str, batch: int, rounds: int) -> dict[str, float]:
    """The median speed of every arrangement."""
    count = 40 if batch <= 1000 else 12
    cases = {
        "dense limit, 2 threads": lambda: limit(batch, 1, count),
        "dense limit, hogwild 2×1": lambda: limit(batch, 2, count),
        "from raw text, hogwild 2×1": lambda: ours(data, batch, 2),
        "from raw text, 2 threads": lambda: ours(data, batch, 1),
    }
    speeds: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(rounds):
        for name, case in cases.items():
            speeds[name].append(case())
    return {name: statistics.median(found) for name, found in speeds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--batch", type=int, nargs="+", default=[1000, 4096])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--data", help="raw Criteo text (default: made)")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(0)
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        data = args.data
        if data is None:
            synth(Path(folder) / "log", Options(rows=args.rows, test_rows=0))
            data = str(Path(folder) / "log/train")
        for batch in args.batch:
            speeds = measure(data, batch, args.rounds)
            best = max(speed for name, speed in speeds.items() if name.startswith("dense"))
            results[batch] = {name: {"rows_per_s": round(x), "ratio": x / best} for name, x in speeds.items()}
            print(f"batch {batch}: rows/s (ratio to the dense limit)")
            for name, x in speeds.items():
                print(f"  {name:28} {x:9,.0f} ({x / best:.2f})", flush=True)
    if args.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
