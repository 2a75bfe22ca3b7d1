"""Measure what a change of a running cluster costs: the time without progress, and the speed before and after it.

    python benchmarks/elastic.py --rows 400000
    python benchmarks/elastic.py --mode geo --rows 4000000 --after 3000000    # when the workers hold many rows

A run of `dnn` 400×3 on raw text, batches of 1000, two workers and two shards. Workers are added and removed, and shards split and merged,
while it trains. Prints for each change the seconds from the request to the first batch after it, the seconds without progress, which
should be at most 15, and the speed after it as a ratio to the speed before.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import yaml

from clickfleet import RunningCluster
from clickfleet.cluster.control import ChangeFacts
from clickfleet.data.logs.synth import SynthOptions, synth
from clickfleet.errors import ClusterError

LIMIT_S = 15.0
CHANGES: dict[str, Callable[[RunningCluster], ChangeFacts]] = {
    "workers 2 → 4": lambda cluster: cluster.add_workers(2),
    "shards 2 → 4": lambda cluster: cluster.set_shards(4),
    "workers 4 → 1": lambda cluster: cluster.remove_workers(3),
    "shards 4 → 1": lambda cluster: cluster.set_shards(1),
    "workers 1 → 2": lambda cluster: cluster.add_workers(1),
    "shards 1 → 2": lambda cluster: cluster.set_shards(2),
}


def speed(cluster: RunningCluster, seconds: float) -> float:
    """Return the rows per second of the run over some time."""
    first = cluster.status()
    time.sleep(seconds)
    last = cluster.status()
    return (last["rows"] - first["rows"]) / max(last["time"] - first["time"], 1e-9)


def wait_for(cluster: RunningCluster, command: subprocess.Popen[bytes], rows: int) -> None:
    """Wait until the run has trained this many rows."""
    while command.poll() is None:
        try:
            if cluster.status()["rows"] >= rows:
                return
        except ClusterError:
            pass
        time.sleep(0.1)
    sys.exit("the run ended before the first change")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=400_000)
    parser.add_argument("--mode", default="async")
    parser.add_argument("--after", type=int, default=1, help="rows to train before the first change")
    parser.add_argument("--seconds", type=float, default=6.0, help="time over which a speed is measured")
    arguments = parser.parse_args()
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        synth(Path(folder) / "log", SynthOptions(rows=arguments.rows, test_rows=1, parts=32))
        config = {
            "data": {"train": [f"{folder}/log/train/*"], "batch_size": 1000, "valid_share": 0},
            "model": {"name": "dnn", "hidden": [400, 400, 400]},
            "train": {"epochs": 100_000},
            "mode": {"name": arguments.mode},
            "cluster": {"shards": 2, "workers": 2, "start_timeout": "4min"},
            "run": {"dir": f"{folder}/run", "checkpoint_every": None, "keep_epochs": False, "report": False},
        }
        (Path(folder) / "config.yaml").write_text(yaml.safe_dump(config))
        program = str(Path(sys.executable).with_name("clickfleet"))
        command = subprocess.Popen([program, "train", f"{folder}/config.yaml"], stdout=subprocess.DEVNULL)
        try:
            cluster = RunningCluster(f"{folder}/run")
            wait_for(cluster, command, arguments.after)
            before = speed(cluster, arguments.seconds)
            for name, change in CHANGES.items():
                done = change(cluster)
                after = speed(cluster, arguments.seconds)
                verdict = "" if done["stopped_s"] <= LIMIT_S else "MISSES"
                print(
                    f"{name:>14}  {done['seconds']:5.1f} s  {done['stopped_s']:5.1f} s without progress  "
                    f"speed × {after / max(before, 1e-9):.2f}  {verdict}",
                    flush=True,
                )
                found |= {f"{name} stopped_s": done["stopped_s"], f"{name} speed": after / max(before, 1e-9)}
                before = after
        finally:
            command.send_signal(signal.SIGTERM)
            command.wait()
    print(json.dumps({"benchmark": "elastic", "mode": arguments.mode, **found}, ensure_ascii=False))


if __name__ == "__main__":
    main()
