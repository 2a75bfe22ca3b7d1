"""Where a cluster's speed ends: what a step costs each part, a model of S shards and N workers made of it, and the model against reality.

    python benchmarks/scaling.py --rows 60000 --rounds 2

async, `dnn` 400×3, dim 10, batches of 1000. Measured per step: CPU of a worker, CPU of the shards (a part that is spread over them, and
one per message), CPU of Ray and the driver, bytes on the wire. The model, in steps per second of the whole cluster:

    workers   N / t_worker                 each has a core
    shards    1 / (t_spread / S + t_message)    each has a core
    wire      min(N, S) · B / bytes        of B bytes per second for every host
    cores     C / (t_worker + S · t_message + t_spread + t_ray)   all on one machine with C cores

Prints it beside what 1×1, 1×2, 2×1 and 2×2 (shards × workers) reach on this machine, then what it says of larger clusters.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from clickfleet.cluster.fleet import ray_module
from clickfleet.logs.synth import Options, synth
from cluster import measure

ARRANGEMENTS = [(1, 1), (1, 2), (2, 1), (2, 2)]
HOST_BYTES_PER_S = 1.25e9
"""10 Gbit/s."""


class Costs(NamedTuple):
    """Seconds of CPU, and bytes, of one step of one worker."""

    worker: float
    spread: float
    """Of all shards together, however many they are."""
    message: float
    """Of each shard besides."""
    ray: float
    wire: float

    def limits(self, shards: int, workers: int, cores: int | None = None) -> dict[str, float]:
        """Rows per second at which each part is busy all the time."""
        found = {
            "workers": workers / self.worker,
            "shards": 1 / (self.spread / shards + self.message),
            "wire": min(workers, shards) * HOST_BYTES_PER_S / self.wire,
        }
        if cores is not None:
            found["cores"] = cores / (self.worker + self.spread + shards * self.message + self.ray)
        return {name: 1000 * steps for name, steps in found.items()}


def fit(found: dict[tuple[int, int], list[dict[str, Any]]]) -> Costs:
    def median(key: str, shards: int | None = None) -> float:
        runs = [run for (s, _), all_ in found.items() if shards in (None, s) for run in all_]
        return statistics.median(run[key] for run in runs)

    one, two = (median("shard_cpu_ms_per_step", shards) for shards in (1, 2))
    message = max(0.0, two - one)
    return Costs(
        median("worker_cpu_ms_per_step") / 1e3,
        (one - message) / 1e3,
        message / 1e3,
        (median("ray_cpu_ms_per_step") + median("driver_cpu_ms_per_step")) / 1e3,
        1000 * median("wire_bytes_per_row"),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=60_000)
    parser.add_argument("--rounds", type=int, default=2)
    arguments = parser.parse_args()
    ray = ray_module()
    ray.init(address="local", num_cpus=16, include_dashboard=False, log_to_driver=False, object_store_memory=1 << 28)
    found: dict[tuple[int, int], list[dict[str, Any]]] = {each: [] for each in ARRANGEMENTS}
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        synth(data, Options(rows=arguments.rows, test_rows=2_000, parts=4))
        for _ in range(arguments.rounds):
            for shards, workers in ARRANGEMENTS:
                run = measure(data, "async", argparse.Namespace(shards=shards, workers=workers))
                found[shards, workers].append(run)
                print(f"{shards}×{workers} {run['rows_per_s']:,.0f} rows/s", flush=True)
    ray.shutdown()
    costs, cores = fit(found), os.cpu_count() or 1
    print(
        f"a step: worker {1e3 * costs.worker:.2f} ms  shards {1e3 * costs.spread:.2f} ms spread + {1e3 * costs.message:.2f} ms each  "
        f"Ray and driver {1e3 * costs.ray:.2f} ms  wire {costs.wire / 1e6:.2f} MB"
    )
    errors = {}
    for (shards, workers), runs in found.items():
        limits = costs.limits(shards, workers, cores)
        name = min(limits, key=lambda key: limits[key])
        real = statistics.median(run["rows_per_s"] for run in runs)
        errors[f"{shards}x{workers}"] = limits[name] / real
        print(
            f"{shards}×{workers}: model {limits[name]:>9,.0f} rows/s ({name})  measured {real:>9,.0f}  {limits[name] / real:.2f}"
        )
    for shards, workers in ((1, 4), (2, 8), (4, 16), (8, 32), (16, 64), (32, 128)):
        limits = costs.limits(shards, workers)
        name = min(limits, key=lambda key: limits[key])
        each = "  ".join(f"{key} {value:,.0f}" for key, value in limits.items())
        print(
            f"{shards}×{workers} on hosts of their own: {limits[name]:,.0f} rows/s, the {name} are the limit ({each})"
        )
    print(json.dumps({"benchmark": "scaling", **costs._asdict(), **errors}))


if __name__ == "__main__":
    main()
