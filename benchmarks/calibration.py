"""Measure how soon calibrated scores are right again after the world has changed, and what calibration costs.

python benchmarks/calibration.py [--hours 3] [--rate 1000] [--slices 12] [--seeds 3] [--json]

A network that does not learn scores a stream of shows. Their click probabilities are known. After some hours the world changes at
once: the slope and the level of all log-odds, and those of each slice (standard deviation 0.4). The calibration (by slice, default
settings) learns from every show. Printed for 10, 30 and 60 minutes after the change: the COPC of every slice over the next 10
minutes, of which only slices with at least 10,000 shows count. `true` compares with the known probabilities, `seen` with the
clicks, whose error by chance is printed beside it. `within` is the largest change of AUC within a slice.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import numpy as np

from clickfleet.config.sections import Calibrate
from clickfleet.data.batch import Batch
from clickfleet.data.schema import Schema, Slot
from clickfleet.online.calibrator import Calibrator
from clickfleet.store.calibration import probability
from clickfleet.training.metrics import Buckets

SCHEMA = Schema(slots=(Slot("site"),))
STEP_S = 10.0
LEAST_SHOWS = 10_000


class World:
    def __init__(self, seed: int, slices: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.slices, self.base = slices, self.rng.normal(-1.0, 0.3, slices)
        shares = np.linspace(0.5, 1.5, slices)
        self.shares = shares / shares.sum()
        self.slope, self.moves = 1.0, np.zeros(slices)

    def change(self) -> None:
        self.slope, self.moves = 0.8, self.rng.normal(-0.2, 0.4, self.slices)

    def shows(self, count: int) -> tuple[Batch, Any, Any, Any, Any]:
        where = self.rng.choice(self.slices, count, p=self.shares)
        logits = self.base[where] + self.rng.normal(0, 1, count)
        true = probability(self.slope * logits + self.moves[where])
        batch = Batch(np.zeros((count, 0), np.float32), (where + 1).astype(np.uint64), 1)
        return (
            batch,
            probability(logits).astype(np.float32),
            (self.rng.random(count) < true).astype(np.float32),
            true,
            where,
        )


def auc(scores: Any, clicks: Any) -> float:
    buckets = Buckets(1 << 18)
    buckets.update(np.ascontiguousarray(scores), np.ascontiguousarray(clicks))
    return buckets.auc


def judge(world: World, calibrator: Calibrator, rate: float) -> dict[str, float]:
    """Score the shows of ten minutes with the calibration of this moment."""
    batch, raw, clicks, true, where = world.shows(int(600 * rate))
    served = calibrator.calibration.apply(raw, batch, (0,))
    shows, predicted = np.bincount(where), np.bincount(where, served)
    large = shows >= LEAST_SHOWS
    right, seen = np.bincount(where, true) / predicted, np.bincount(where, clicks) / predicted
    error = np.sqrt(np.bincount(where, true * (1 - true))) / predicted
    before = np.bincount(where, true) / np.bincount(where, raw)
    within = max(
        abs(auc(raw[where == one], clicks[where == one]) - auc(served[where == one], clicks[where == one]))
        for one in range(world.slices)
    )
    return {
        "slices": int(large.sum()),
        "smallest": int(shows[large].min()),
        "raw_low": before[large].min(), "raw_high": before[large].max(),
        "true_low": right[large].min(), "true_high": right[large].max(),
        "seen_low": seen[large].min(), "seen_high": seen[large].max(),
        "chance": error[large].max(),
        "within": within,
        "auc_raw": auc(raw, clicks), "auc": auc(served, clicks),
    }  # fmt: skip


def measure(seed: int, hours: float, rate: float, slices: int) -> list[dict[str, float]]:
    world, calibrator = World(seed, slices), Calibrator(Calibrate(by=("site",)), SCHEMA)
    now, found, learn_s, fit_s, rows, fits = 1e9, [], 0.0, 0.0, 0, 0
    steps = int((hours * 3600 + 3600) / STEP_S)
    changed = int(hours * 3600 / STEP_S)
    for step in range(steps + 1):
        if step == changed:
            world.change()
        minutes = (step - changed) * STEP_S / 60
        if minutes in (10.0, 30.0, 60.0):
            found.append({"seed": seed, "minutes": minutes, **judge(world, calibrator, rate)})
        batch, raw, clicks, *_ = world.shows(int(rate * STEP_S))
        begin = time.perf_counter()
        calibrator.learn(batch, raw, clicks, None, now)
        middle = time.perf_counter()
        calibrator.fit_if_due()
        learn_s, fit_s = learn_s + middle - begin, fit_s + time.perf_counter() - middle
        rows, fits, now = rows + len(batch), fits + 1, now + STEP_S
    for line in found:
        line |= {"learn_us_per_1000_rows": 1e9 * learn_s / rows, "fit_ms": 1e3 * fit_s / fits}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--hours", type=float, default=3.0)
    parser.add_argument("--rate", type=float, default=1000.0)
    parser.add_argument("--slices", type=int, default=12)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    for seed in range(given.seeds):
        for line in measure(seed, given.hours, given.rate, given.slices):
            if given.json:
                print(json.dumps({key: round(float(value), 6) for key, value in line.items()}), flush=True)
                continue
            print(
                f"{line['minutes']:3.0f} min after the change: COPC raw {line['raw_low']:.3f} to {line['raw_high']:.3f}, "
                f"calibrated (true) {line['true_low']:.4f} to {line['true_high']:.4f}, "
                f"(seen) {line['seen_low']:.3f} to {line['seen_high']:.3f} ± {line['chance']:.3f} "
                f"on {line['slices']} slices of {line['smallest']:,} shows or more; AUC {line['auc_raw']:.4f} -> {line['auc']:.4f}, "
                f"within slices ± {line['within']:.1e}; "
                f"{line['learn_us_per_1000_rows']:.0f} us per 1,000 rows, a fit {line['fit_ms']:.1f} ms",
                flush=True,
            )


if __name__ == "__main__":
    main()
