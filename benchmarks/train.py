"""Compare training from raw text with a dense limit, plain PyTorch and other packages, in alternation in one run.

python benchmarks/train.py [--batch 1000 4096] [--rounds 5] [--rows 200000] [--data FILE] [--threads 2] [--json]
python benchmarks/train.py --compare [--peers DeepCTR-Torch …] [--rounds 3] [--rows 500000] [--cpu-time] [--json]

The dense limit is the same MLP (273 → 400 → 400 → 400 → 1) trained by eager PyTorch with fused Adam on random tensors,
without data and rows, in the better of two arrangements: two threads within each operator, or two single-threaded
hogwild trainers. Ours is everything: read and parse Criteo text, pull, pool, train and push rows, Adam steps, metrics.
`rows_per_s` is the speed that `clickfleet train` reports: from the first line read to the last push applied.

`--compare` trains a DeepFM (400×3, dim 10) from the same text with our defaults (batch 1000), in plain PyTorch (batches
of 1000 and 4096) and in the installed packages of peers.py (4096, where they are fastest), and tests each.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

import peers
from clickfleet.data.logs.synth import SynthOptions, synth
from clickfleet.training import run
from tower import eager, seconds_per_step


def ours(data: str, batch: int, trainers: int) -> float:
    """Return the rows per second of a whole training run, which writes no checkpoint before the last push."""
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


def compare(folder: Path, rounds: int, batch: int, chosen: list[str]) -> dict[str, dict[str, float]]:
    """Measure the seconds from text to model and the test AUC of every system; medians over the rounds."""
    train, test = sorted((folder / "train").iterdir()), sorted((folder / "test").iterdir())
    rows = sum(file.read_bytes().count(b"\n") for file in train)

    def default() -> peers.Outcome:
        with tempfile.TemporaryDirectory() as work:
            data = {"train": str(folder / "train")}
            threads = {"threads": torch.get_num_threads()}
            begin = peers.clock()
            made = run.train(
                {"data": data, "model": "deepfm", "train": threads, "run": {"dir": work, "report": False}}, quiet=True
            )
            seconds = peers.clock() - begin  # includes the checkpoint and everything else of a run
            return peers.Outcome(0.0, seconds, made.evaluate(str(folder / "test"))["auc"])

    cases = {
        "clickfleet, default recipe": default,
        "plain PyTorch, batch 1000": lambda: peers.plain(train, test, 1000),
        f"plain PyTorch, batch {batch}": lambda: peers.plain(train, test, batch),
        f"plain PyTorch, batch {batch}, read in Python": lambda: peers.plain(train, test, batch, by_line=True),
        f"plain PyTorch, batch {batch}, counts as they are": lambda: peers.plain(train, test, batch, log1p=False),
    }
    cases |= {name: partial(peers.run, name, train, test, batch) for name in chosen}
    found: dict[str, list[peers.Outcome]] = {name: [] for name in cases}
    for _ in range(rounds):
        for name, case in cases.items():
            threads = torch.get_num_threads()
            found[name].append(case())
            torch.set_num_threads(threads)
    result = {}
    for name, outcomes in found.items():
        prepare_s, train_s, auc = (statistics.median(column) for column in zip(*outcomes, strict=True))
        result[name] = {
            "rows_per_s": rows / (prepare_s + train_s),
            "prepare_s": prepare_s,
            "train_s": train_s,
            "auc": auc,
        }
    mine = result["clickfleet, default recipe"]["rows_per_s"]
    for one in result.values():
        one["ratio"] = mine / one["rows_per_s"]
    return result


def measure(data: str, batch: int, rounds: int) -> dict[str, float]:
    """Return the median speed of every arrangement."""
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
    parser.add_argument(
        "--data", help="raw Criteo text, for --compare a folder with train/ and test/ (default: synthetic)"
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--threads", type=int, default=2, help="cores per system (default 2)")
    parser.add_argument("--compare", action="store_true", help="compare with plain PyTorch and other packages")
    parser.add_argument("--peers", nargs="*", default=list(peers.PEERS), help="packages to compare with, if installed")
    parser.add_argument("--cpu-time", action="store_true", help="compare CPU seconds, for busy machines")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(args.threads)
    results: dict[Any, Any] = {}
    if args.cpu_time:
        peers.clock = time.process_time
    if args.compare:
        there, absent = peers.installed()
        chosen = [name for name in there if name in args.peers]
        with tempfile.TemporaryDirectory() as folder:
            log = Path(args.data or f"{folder}/log")
            if args.data is None:
                synth(log, SynthOptions(rows=args.rows, test_rows=50_000))
            results = compare(log, args.rounds, 4096, chosen)
        for name, one in results.items():
            print(
                f"{name:48} {one['rows_per_s']:9,.0f} rows/s (prepare {one['prepare_s']:.1f} s, train {one['train_s']:.1f} s), "
                f"AUC {one['auc']:.4f}, ours is {one['ratio']:.2f} times as fast"
            )
        print(f"not installed: {', '.join(absent) or 'none'}")
        if args.json:
            print(json.dumps(results))
        return
    with tempfile.TemporaryDirectory() as folder:
        data = args.data
        if data is None:
            synth(Path(folder) / "log", SynthOptions(rows=args.rows, test_rows=0))
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
