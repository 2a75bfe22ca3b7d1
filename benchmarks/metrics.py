"""Measure streaming metrics: CPU nanoseconds per row of each update, and scikit-learn's AUC of the same rows for comparison.

python benchmarks/metrics.py [--rows 1000000] [--batch 1000]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
from sklearn.metrics import roc_auc_score

from clickfleet.training.metrics import Buckets, Groups, Slices, Sliding


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--batch", type=int, default=1000)
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    scores = rng.beta(1, 3, args.rows).astype(np.float32)
    labels = (rng.random(args.rows) < scores).astype(np.float32)
    ones, weights = np.ones_like(scores), rng.integers(1, 4, args.rows).astype(np.float32)
    users, slots = (rng.integers(0, n, args.rows).astype(np.uint64) for n in (50_000, 30))
    parts = [slice(i, i + args.batch) for i in range(0, args.rows, args.batch)]
    buckets, sliding, groups, slices = Buckets(), Sliding(), Groups(), Slices()
    cases: dict[str, Callable[[slice], object]] = {
        "buckets": lambda p: buckets.update(scores[p], labels[p]),
        "buckets, weights of 1": lambda p: buckets.update(scores[p], labels[p], ones[p]),
        "buckets, weights": lambda p: buckets.update(scores[p], labels[p], weights[p]),
        "sliding": lambda p: sliding.update(scores[p], labels[p]),
        "groups": lambda p: groups.update(users[p], scores[p], labels[p]),
        "slices": lambda p: slices.update(slots[p], scores[p], labels[p]),
    }
    times: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(5):
        groups.reset()
        for name, update in cases.items():
            start = time.process_time()
            for part in parts:
                update(part)
            times[name].append((time.process_time() - start) / args.rows * 1e9)
    for name, values in times.items():
        print(f"{name:22} {statistics.median(values):6.1f} ns of CPU per row in batches of {args.batch}")
    start = time.process_time()
    roc_auc_score(labels, scores)
    print(f"{'scikit-learn, AUC only':22} {(time.process_time() - start) / args.rows * 1e9:6.1f} ns per row at once")


if __name__ == "__main__":
    main()
