"""Compare the cluster modes on this machine with local training: rows per second, test AUC, and where the remaining CPU time goes.

    python benchmarks/cluster.py --rounds 3
    python benchmarks/cluster.py --rounds 3 --checkpoint-rows 0 --no-start --paste    # the table of modes in README and docs

2 shards and 2 single-threaded workers against 2 trainer threads, all at their default settings. Models with dim 10, batches of 1000 rows
of raw text. Figures are medians over rounds that alternate between the modes. The speed of the machine varies, so compare the ratios.
Then, once each: the training speed while a large checkpoint is written (--checkpoint-rows), the time to the first step, and the time
from the last checkpoint to the end of the run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import yaml

import clickfleet
from clickfleet.cluster.ray_runtime import ray_module
from clickfleet.config.load import Config, checked
from clickfleet.data.logs.synth import SynthOptions, synth
from clickfleet.data.reader import Reader
from clickfleet.training import saving
from clickfleet.training.learner import Learner
from clickfleet.training.loop import RunProgress
from clickfleet.training.predict import metrics_of

MODES: dict[str, dict[str, Any]] = {
    "local": {},
    "async": {},
    "geo": {},
    "half_async": {},
    "sync": {},
    "async-gradient": {"dense": "gradient"},
}
TARGETS = {"async": 0.85, "geo": 0.85, "half_async": 0.8, "sync": 0.8}
BASE = Path(__file__).parent.parent
PAGES = [
    "README.md",
    "README.zh.md",
    *(f"docs/{folder}{name}.md" for folder in ("", "zh/") for name in ("modes", "performance")),
]
MODE_TABLE, COST_TABLE = "mode table", "cost table"
Found = dict[str, Any]


def settings(data: Path, run: Path, mode: str, arguments: argparse.Namespace, model: str = "dnn") -> Found:
    return {
        "data": {"train": [str(data / "train" / "*")], "test": [str(data / "test" / "*")], "batch_size": 1000},
        "model": {"name": model},
        "table": {"dim": 10},
        "train": {"threads": 2, "epochs": 1},
        "mode": {"name": mode.partition("-")[0], **MODES[mode]},
        "cluster": {"shards": arguments.shards, "workers": arguments.workers},
        "run": {"dir": str(run), "checkpoint_every": None, "keep_epochs": False, "report": False},
    }


def lines(run: Path, kind: str) -> list[Found]:
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in found if line["kind"] == kind]


def daemons() -> float:
    """Return the CPU seconds used so far by Ray's own processes."""
    total = 0.0
    for process in psutil.Process().children(recursive=True):
        try:
            if not process.name().startswith("ray::") or "Agent" in process.name():
                times = process.cpu_times()
                total += times.user + times.system
        except psutil.NoSuchProcess:
            pass
    return total


def measure(data: Path, mode: str, arguments: argparse.Namespace, model: str = "dnn") -> Found:
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        noted: list[tuple[float, float]] = []

        def note() -> None:
            """Record the CPU time of Ray and the driver at the first and at the last step, when their log lines appear."""
            for kind in (b'"kind": "train"', b'"kind": "epoch"'):
                while not (run / "metrics.jsonl").exists() or kind not in (run / "metrics.jsonl").read_bytes():
                    time.sleep(0.05)
                noted.append((daemons(), time.process_time()))

        noting = threading.Thread(target=note, daemon=True)
        noting.start()
        done = clickfleet.train(settings(data, run, mode, arguments, model), quiet=True)
        noting.join(timeout=10)
        result: Found = {"rows_per_s": done.rows_per_s, "auc": done.test["auc"] if done.test else None}
        if mode != "local":
            result |= lines(run, "cluster")[0]
            first, last = lines(run, "train")[0], lines(run, "epoch")[0]
            result["steady_rows_per_s"] = (last["rows"] - first["rows"]) / (last["time"] - first["time"])
            spent = [1e6 * (end - begin) / done.rows for begin, end in zip(*noted, strict=True)]
            result |= {"ray_cpu_ms_per_step": spent[0], "driver_cpu_ms_per_step": spent[1]}
    return result


def parsing(data: Path) -> float:
    """Return the CPU milliseconds to parse 1000 rows of text into a batch."""
    begin, rows = time.process_time(), 0
    for batch in Reader(str(data / "train" / "*"), batch_size=1000):
        rows += len(batch)
    return 1e6 * (time.process_time() - begin) / rows


def show_cost(found: Found, parse_ms: float) -> dict[str, float]:
    """Print the CPU milliseconds per step of each part, and the fraction outside the model and text parsing."""
    client = found["pull_cpu_ms_per_step"] + found["push_cpu_ms_per_step"] + found["wait_cpu_ms_per_step"]
    trainer = found["compute_cpu_ms_per_step"] + client + found["read_cpu_ms_per_step"]
    behind = max(0.0, found["worker_cpu_ms_per_step"] - trainer - parse_ms)
    parts = {
        "model": found["compute_cpu_ms_per_step"],
        "text": parse_ms + found["read_cpu_ms_per_step"],
        "client": client,
        "sockets": behind,
        "shards": found["shard_cpu_ms_per_step"],
        "ray": found["ray_cpu_ms_per_step"],
        "driver": found["driver_cpu_ms_per_step"],
    }
    outside = sum(parts.values()) - parts["model"] - parts["text"]
    print("    CPU ms per step: " + "  ".join(f"{name} {ms:.2f}" for name, ms in parts.items()), end="")
    print(f"  outside model and text {outside / sum(parts.values()):.0%}")
    print(
        f"    wire {found['wire_bytes_per_row']:,.0f} bytes per row  pull p50 {found['pull_p50_ms']:.1f} p99 {found['pull_p99_ms']:.1f} ms"
        f"  push p50 {found['push_p50_ms']:.1f} p99 {found['push_p99_ms']:.1f} ms  staleness {found['staleness']:.1f}"
    )
    return {**parts, "outside": outside / sum(parts.values())}


def paste(table: str, rows: list[str]) -> None:
    """Put these rows into every table between the marks. Its heading stays, in the language of the page."""
    begin, end = f"<!-- {table} -->\n", f"<!-- end of the {table} -->"
    for name in PAGES:
        before, mark, rest = (BASE / name).read_text().partition(begin)
        old, _, after = rest.partition(end)
        if mark:
            heading = old.strip().splitlines()[:2]
            (BASE / name).write_text(f"{before}{begin}\n" + "\n".join([*heading, *rows]) + f"\n\n{end}{after}")


def big_model(config: Config, schema: Any, rows: int, folder: Path) -> None:
    """Write a checkpoint with this many rows that training never touches."""
    learner = Learner(config, schema)
    chance = np.random.default_rng(1)
    for _ in range(rows // 100_000):
        keys = chance.integers(1, 1 << 63, 100_000, dtype=np.uint64)
        learner.table.move(keys, np.full((len(keys), 1 + learner.table.factors), 0.01, np.float32), add=False)
    saver = saving.Saver(folder, 1, False, print)
    state = {
        "version": 1,
        "step": 0,
        "rows": 0,
        "reader": {},
        "progress": vars(RunProgress()),
        "arrangement": {},
        "metrics_bytes": 0,
    }
    saver.save(learner, metrics_of(learner), state)
    saver.wait(last=True)


def measure_checkpoint(data: Path, arguments: argparse.Namespace) -> Found:
    """Measure rows per second while a checkpoint is written, and before it in the same run. The files are read repeatedly."""
    with tempfile.TemporaryDirectory() as folder:
        run, old, again = Path(folder) / "run", Path(folder) / "old", Path(folder) / "again"
        raw = settings(data, run, "async", arguments)
        config = checked(Config, raw, source="benchmark")
        big_model(config, Reader(str(data / "train" / "*")).schema, arguments.checkpoint_rows, old)
        again.mkdir()
        for i in range(-(-arguments.checkpoint_run // arguments.rows)):
            for file in sorted((data / "train").iterdir()):
                (again / f"{i:03d}-{file.name}").symlink_to(file)
        raw["data"] = {"train": [str(again / "*")], "batch_size": 1000}
        raw["train"] = {"threads": 2, "epochs": 1, "init_from": str(old)}
        raw["run"]["checkpoint_every"] = "15s"
        clickfleet.train(raw, quiet=True)
        first, *others = lines(run, "cut")
        if not others:
            raise SystemExit("training ended before the checkpoint was written; increase --checkpoint-run")
        return {
            "cut_rows": first["table_rows"],
            "cut_s": first["seconds"],
            "cut_of_rest": first["rows_per_s"] / first["rows_per_s_before"],
        }


def measure_start(data: Path, arguments: argparse.Namespace) -> Found:
    """Measure a separate run: seconds to its first step, and from its last checkpoint to its end."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.yaml"
        path.write_text(yaml.safe_dump(settings(data, Path(folder) / "run", "async", arguments)))
        begin = time.time()
        subprocess.run(
            [str(Path(sys.executable).with_name("clickfleet")), "train", str(path)], check=True, capture_output=True
        )
        end = time.time()
        first, last = lines(Path(folder) / "run", "train")[0], lines(Path(folder) / "run", "cluster")[0]
        return {"start_s": first["time"] - begin, "shutdown_s": end - last["time"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=600_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--shards", type=int, default=2)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--models", default="dnn,deepfm")
    parser.add_argument("--paste", action="store_true", help="put the table of modes into README and docs")
    parser.add_argument(
        "--checkpoint-rows", type=int, default=5_000_000, help="rows of the checkpoint to measure; 0: none"
    )
    parser.add_argument("--checkpoint-run", type=int, default=2_500_000, help="training rows of that run")
    parser.add_argument("--no-start", action="store_true", help="do not measure start-up and shutdown")
    parser.add_argument("--data", type=Path, help="a folder made by `clickfleet synth`")
    arguments = parser.parse_args()
    ray = ray_module()
    ray.init(address="local", num_cpus=16, include_dashboard=False, log_to_driver=False, object_store_memory=1 << 28)
    models, names = arguments.models.split(","), arguments.modes.split(",") if arguments.modes else []
    with tempfile.TemporaryDirectory() as folder:
        data = arguments.data or Path(folder) / "data"
        if not data.exists():
            synth(data, SynthOptions(rows=arguments.rows, test_rows=100_000, parts=2 * arguments.workers))
        parse_ms = parsing(data)
        found: dict[tuple[str, str], list[Found]] = {(model, name): [] for model in models for name in names}
        for _ in range(arguments.rounds):
            for (model, name), runs in found.items():
                runs.append(measure(data, name, arguments, model))
                print(model, name, f"{runs[-1]['rows_per_s']:,.0f} rows/s  AUC {runs[-1]['auc']:.4f}", flush=True)
        more = measure_checkpoint(data, arguments) if arguments.checkpoint_rows else {}
        ray.shutdown()
        if not arguments.no_start:
            more |= measure_start(data, arguments)
    ratios: dict[str, float] = {}
    rows: list[str] = []
    costs: list[str] = []
    for (model, name), runs in found.items():
        # Ratios within a round: both runs are close in time and saw the same load on the machine.
        local = found.get((model, "local"), runs)
        ratio = statistics.median(a["rows_per_s"] / b["rows_per_s"] for a, b in zip(runs, local, strict=True))
        speed, auc = (statistics.median(each[key] for each in runs) for key in ("rows_per_s", "auc"))
        ratios[f"{model}_{name}"] = ratio
        aim = f"  (target {TARGETS[name]})" if name in TARGETS else ""
        print(f"{model} {name:>14}  {speed:>9,.0f} rows/s  {ratio:.2f} of local{aim}  AUC {auc:.4f}")
        wire, stale = (
            f"{runs[-1][key]:,.0f}" if name != "local" else "" for key in ("wire_bytes_per_row", "staleness")
        )
        shown = name.replace("-gradient", "`, `dense: gradient")
        rows.append(
            f"| `{model}` | `{shown}` | {'1' if name == 'local' else f'{ratio:.2f}×'} | {auc:.4f} | {wire} | {stale} |"
        )
        if name != "local":
            cost = show_cost(runs[-1], parse_ms)
            if name == "async":
                more[f"{model}_async_outside"] = cost["outside"]
            parts = " | ".join(f"{ms:.1f}" for part, ms in cost.items() if part != "outside")
            costs.append(f"| `{model}` | `{shown}` | {parts} | {cost['outside']:.0%} |")
    if arguments.paste:
        paste(MODE_TABLE, rows)
        paste(COST_TABLE, costs)
    if "cut_of_rest" in more:
        print(
            f"a checkpoint of {more['cut_rows']:,} rows takes {more['cut_s']:.1f} s;"
            f" training runs at {more['cut_of_rest']:.2f} of its speed (target 0.9)"
        )
    if "start_s" in more:
        print(
            f"first step after {more['start_s']:.1f} s (target 25); exit {more['shutdown_s']:.1f} s after the last checkpoint (target 5)"
        )
    print(json.dumps({"benchmark": "cluster", **{f"{name}_of_local": ratio for name, ratio in ratios.items()}, **more}))


if __name__ == "__main__":
    main()
