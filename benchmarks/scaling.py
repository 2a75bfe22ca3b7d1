"""Predict the speed of larger clusters: measure what a step costs each part, derive a model of S shards and N workers, and check it.

    python benchmarks/scaling.py --rows 160000 --rounds 2

async, `dnn` 400×3, dim 10, batches of 1000. Measured during training, per step: the CPU time of a worker's trainer thread, of its other
threads (text, sockets) and of the shards (one part divided among them, one part per shard), and the bytes on the wire; also the cores
that Ray and the driver use constantly. The model, in steps per second of the whole cluster:

    workers   N / t_trainer                                   one core per trainer
    shards    1 / (t_spread / S + t_each)                     one core per shard
    wire      min(N, S) · B / bytes                           B bytes per second per host
    cores     (C − ray) / (t_trainer + t_beside + t_spread + S · t_each)    everything on one machine with C cores

The cores of one chip slow each other down, so costs are measured with as many busy workers as the arrangement has. Speeds are those
between the first and the last step. Prints the model beside the measured speeds of 1×1, 1×2, 2×1 and 2×2 (shards × workers), then its
predictions for larger clusters.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from clickfleet.cluster.ray_runtime import ray_module
from clickfleet.data.logs.synth import SynthOptions, synth
from clickfleet.training.monitor import PHASES
from cluster import measure

ARRANGEMENTS = [(1, 1), (1, 2), (2, 1), (2, 2)]
HOST_BYTES_PER_S = 1.25e9
"""10 Gbit/s."""
Runs = dict[tuple[int, int], list[dict[str, Any]]]


class Costs(NamedTuple):
    """CPU seconds and bytes per step of one worker."""

    trainer: float
    beside: float
    """The worker's other threads."""
    spread: float
    """All shards together, independent of their number."""
    each: float
    """Additional cost per shard."""
    ray: float
    """Cores that Ray and the driver use constantly."""
    wire: float

    def limits(self, shards: int, workers: int, cores: int | None = None) -> dict[str, float]:
        """Return the rows per second at which each part is saturated."""
        found = {
            "workers": workers / self.trainer,
            "shards": 1 / (self.spread / shards + self.each),
            "wire": min(workers, shards) * HOST_BYTES_PER_S / self.wire,
        }
        if cores is not None:
            found["cores"] = (cores - self.ray) / (self.trainer + self.beside + self.spread + shards * self.each)
        return {name: 1000 * steps for name, steps in found.items()}


def fit(found: Runs, workers: int) -> Costs:
    """Return the costs while this many workers are busy."""

    def median(key: str, shards: int | None = None) -> float:
        runs = [run for (s, n), all_ in found.items() if n == workers and shards in (None, s) for run in all_]
        return statistics.median(run[key] for run in runs) / 1e3

    def trainer(run: dict[str, Any]) -> float:
        return float(sum(run[f"{phase}_cpu_ms_per_step"] for phase in PHASES))

    mine = [run for (_, n), all_ in found.items() if n == workers for run in all_]
    busy = statistics.median(map(trainer, mine)) / 1e3
    one, two = (median("shard_cpu_ms_per_step", shards) for shards in (1, 2))
    each = max(0.0, two - one)
    behind = [run["ray_cpu_ms_per_step"] + run["driver_cpu_ms_per_step"] for run in mine]
    ray = statistics.median(ms * run["steady_rows_per_s"] / 1e6 for ms, run in zip(behind, mine, strict=True))
    wire = 1e6 * median("wire_bytes_per_row")
    return Costs(busy, max(0.0, median("worker_cpu_ms_per_step") - busy), one - each, each, ray, wire)


def show(found: Runs, costs: dict[int, Costs], cores: int) -> dict[str, float]:
    """Print predicted and measured speeds. Return their ratios."""
    ratios = {}
    for (shards, workers), runs in found.items():
        limits = costs[workers].limits(shards, workers, cores)
        name = min(limits, key=lambda key: limits[key])
        real = statistics.median(run["steady_rows_per_s"] for run in runs)
        ratios[f"{shards}x{workers}"] = limits[name] / real
        error = f"{limits[name] / real - 1:+.0%}"
        print(f"{shards}×{workers}: model {limits[name]:>8,.0f} rows/s ({name})  measured {real:>8,.0f}  error {error}")
    return ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=160_000)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--data", type=Path, help="a folder made by `clickfleet synth`")
    arguments = parser.parse_args()
    ray = ray_module()
    ray.init(address="local", num_cpus=16, include_dashboard=False, log_to_driver=False, object_store_memory=1 << 28)
    found: Runs = {each: [] for each in ARRANGEMENTS}
    with tempfile.TemporaryDirectory() as folder:
        data = arguments.data or Path(folder) / "data"
        if not data.exists():
            synth(data, SynthOptions(rows=arguments.rows, test_rows=2_000, parts=4))
        for _ in range(arguments.rounds):
            for shards, workers in ARRANGEMENTS:
                run = measure(data, "async", argparse.Namespace(shards=shards, workers=workers))
                found[shards, workers].append(run)
                print(f"{shards}×{workers} {run['steady_rows_per_s']:,.0f} rows/s", flush=True)
    ray.shutdown()
    costs, cores = {workers: fit(found, workers) for workers in (1, 2)}, os.cpu_count() or 1
    for workers, mine in costs.items():
        print(
            f"a step with {workers} busy workers: trainer {1e3 * mine.trainer:.1f} ms, other threads {1e3 * mine.beside:.1f} ms, "
            f"shards {1e3 * mine.spread:.1f} ms in total plus {1e3 * mine.each:.1f} ms each, {mine.wire / 1e6:.2f} MB; "
            f"Ray and the driver {mine.ray:.2f} cores"
        )
    ratios = show(found, costs, cores)
    for shards, workers in ((1, 4), (2, 8), (4, 16), (8, 32), (16, 64), (32, 128)):
        limits = costs[2].limits(shards, workers)
        name = min(limits, key=lambda key: limits[key])
        each = "  ".join(f"{key} {value:,.0f}" for key, value in limits.items())
        print(f"{shards}×{workers} on separate hosts: {limits[name]:,.0f} rows/s, limited by {name} ({each})")
    print(json.dumps({"benchmark": "scaling", **costs[2]._asdict(), **ratios}))


if __name__ == "__main__":
    main()
