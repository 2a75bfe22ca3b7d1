"""Measure the dense step: an MLP 273 → 400 → 400 → 400 → 1 with Adam, our fused tower against eager autograd.

python benchmarks/tower.py [--batch 1000 4096] [--rounds 15] [--json]

Random inputs, no data, no table: 26 slots of width 10 and 13 dense values. The gradient of the slots is computed, as
training needs it. The arrangements alternate in one process: two threads within an operator, or two single-threaded
hogwild trainers. Prints medians and their ratios to the best eager arrangement.

Tried once each on a shared AVX-512 machine, and rejected. Padding the first layer from 273 to 288, 304 or 320: its
forward product took 3-7% longer at 288 and more beyond, its other products about the same. Transposed weights: forward
products 5-10% faster, but the whole step 17% slower at batch 1000 with two threads, and equal in the other cases. Two
buffers for all activation gradients instead of one each: no difference beyond the noise.
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
from collections.abc import Callable
from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional as F

from clickfleet.training.layers import tower
from clickfleet.training.optimizer import Config, Flat, Optimizer

SLOTS, DIM, DENSE, HIDDEN = 26, 10, 13, (400, 400, 400)
INPUTS = SLOTS * DIM + DENSE
Step = Callable[[], object]


def batch_of(rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        torch.randn(rows, SLOTS, DIM, requires_grad=True),
        torch.randn(rows, DENSE),
        (torch.rand(rows) < 0.25).float(),
    )


def eager(rows: int, threads: int) -> list[Step]:
    """Return one step per thread over shared weights, in plain PyTorch. It needs no concatenation."""
    widths = (INPUTS, *HIDDEN)
    layers = [layer for a, b in pairwise(widths) for layer in (nn.Linear(a, b), nn.ReLU())]
    net = nn.Sequential(*layers, nn.Linear(HIDDEN[-1], 1))

    def one() -> Step:
        mine = nn.Sequential(*(type(m)(m.in_features, m.out_features) if isinstance(m, nn.Linear) else m for m in net))
        for p, q in zip(mine.parameters(), net.parameters(), strict=True):
            p.data = q.data
        optimizer = torch.optim.Adam(mine.parameters(), lr=1e-3, fused=True)
        x, y = torch.randn(rows, INPUTS, requires_grad=True), (torch.rand(rows) < 0.25).float()

        def step() -> None:
            optimizer.zero_grad()
            x.grad = None
            F.binary_cross_entropy_with_logits(mine(x)[:, 0], y).backward()
            optimizer.step()

        return step

    return [one() for _ in range(threads)]


def fused(rows: int, threads: int) -> list[Step]:
    """Return our steps. They include the concatenation of slots and dense values, and share one flat vector and one optimizer."""
    flat = Flat(tower(INPUTS, *HIDDEN, 1))
    optimizer = Optimizer(Config("adam", lr=1e-3), flat.values)

    def one(mine: Flat) -> Step:
        factors, dense, y = batch_of(rows)

        def step() -> None:
            mine.zero_grads()
            factors.grad = None
            logits = mine.model(factors, dense).squeeze(1)
            F.binary_cross_entropy_with_logits(logits, y, reduction="sum").backward()
            optimizer.step(mine.grads, scale=1 / rows)

        return step

    return [one(flat if i == 0 else flat.replica()) for i in range(threads)]


def seconds_per_step(steps: list[Step], count: int) -> tuple[float, float]:
    """Return wall-clock and CPU seconds per step, over `count` steps with one thread per entry of `steps`."""

    def run(step: Step) -> None:
        torch.set_num_threads(2 // len(steps))  # of this thread
        for _ in range(count // len(steps)):
            step()

    workers = [threading.Thread(target=run, args=(step,)) for step in steps]
    wall, cpu = time.perf_counter(), time.process_time()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    done = count // len(steps) * len(steps)
    return (time.perf_counter() - wall) / done, (time.process_time() - cpu) / done


def measure(rows: int, rounds: int) -> dict[str, tuple[float, float]]:
    """Return median rows per second, and per CPU second, which other load on the machine affects less."""
    torch.manual_seed(0)
    cases = {
        "eager, 2 threads": eager(rows, 1),
        "fused, 2 threads": fused(rows, 1),
        "eager, hogwild 2×1": eager(rows, 2),
        "fused, hogwild 2×1": fused(rows, 2),
    }
    count = 24 if rows <= 1000 else 6
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in cases}
    for steps in cases.values():
        seconds_per_step(steps, 4)
    for _ in range(rounds):
        for name, steps in cases.items():
            times[name].append(seconds_per_step(steps, count))
    median = statistics.median
    return {
        name: (rows / median(wall for wall, _ in pairs), rows / median(cpu for _, cpu in pairs))
        for name, pairs in times.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--batch", type=int, nargs="+", default=[1000, 4096])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    results = {}
    for rows in args.batch:
        speeds = measure(rows, args.rounds)
        wall, cpu = (max(pair[i] for name, pair in speeds.items() if name.startswith("eager")) for i in (0, 1))
        results[rows] = {
            name: {"rows_per_s": round(x), "ratio": x / wall, "cpu_ratio": y / cpu} for name, (x, y) in speeds.items()
        }
        print(f"batch {rows}: rows/s, and rows per CPU second (ratios to the best eager arrangement)")
        for name, (x, y) in speeds.items():
            print(f"  {name:20} {x:9,.0f} ({x / wall:.2f}) {y:9,.0f} ({y / cpu:.2f})")
    if args.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
