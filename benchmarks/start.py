"""Measure how long a run on a cluster takes to its first step, and from its last step to its end.

    python benchmarks/start.py --rounds 5
    python benchmarks/start.py --rounds 5 --other OLD/.venv/bin/clickfleet

`clickfleet train` in mode async with 2 shards and 2 workers, on a small log. The first step is that of the first progress line in
metrics.jsonl; time runs from the start of the process. With --other, two versions start in alternation: this one and another.
Figures are medians. The load average before each start is printed, because other programs on the machine slow a start down.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml

from clickfleet.data.logs.synth import SynthOptions, synth

OURS = Path(sys.executable).with_name("clickfleet")


def start(command: Path, config: Path, run: Path) -> dict[str, float]:
    """Run a command to its end; return the seconds of each part."""
    begin = time.time()
    subprocess.run(
        [str(command), "train", str(config), "mode.name=async", f"run.dir={run}"], check=True, capture_output=True
    )
    end = time.time()
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    first, last = (next(line for line in lines if line["kind"] == kind)["time"] for kind in ("train", "cluster"))
    return {"first_step_s": first - begin, "end_s": end - last, "whole_s": end - begin}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--other", type=Path, help="the command of another version, to compare with")
    arguments = parser.parse_args()
    commands = {"this": OURS} | ({"other": arguments.other} if arguments.other else {})
    found: dict[str, list[dict[str, float]]] = {name: [] for name in commands}
    with tempfile.TemporaryDirectory() as folder:
        data, config = Path(folder) / "data", Path(folder) / "config.yaml"
        synth(data, SynthOptions(rows=arguments.rows, test_rows=10_000, parts=4))
        settings = {
            "data": {"train": [str(data / "train" / "*")], "test": [str(data / "test" / "*")], "batch_size": 1000},
            "model": {"name": "dnn", "hidden": [400, 400, 400]},
            "table": {"dim": 10},
            "train": {"epochs": 1},
            "cluster": {"shards": 2, "workers": 2},
            "run": {"checkpoint_every": None, "keep_epochs": False, "report": False},
        }
        config.write_text(yaml.safe_dump(settings))
        for turn in range(arguments.rounds):
            for name, command in commands.items():
                load = os.getloadavg()[0]
                one = start(command, config, Path(folder) / f"{name}-{turn}")
                found[name].append(one)
                print(f"{name:>5}  load {load:.1f}  " + "  ".join(f"{k} {v:.2f}" for k, v in one.items()), flush=True)
    medians = {
        name: {key: statistics.median(each[key] for each in runs) for key in runs[0]} for name, runs in found.items()
    }
    for name, figures in medians.items():
        print(f"{name:>5}  median  " + "  ".join(f"{key} {value:.2f}" for key, value in figures.items()))
    print(json.dumps({"benchmark": "start", **medians}))


if __name__ == "__main__":
    main()
