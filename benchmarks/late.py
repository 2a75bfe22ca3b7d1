"""How much of the harm of late labels each method repairs.

python benchmarks/late.py [--rows 300000] [--days 3] [--seeds 3] [--labels click,buy] [--delays click=20s,buy=2h] [--wait 15min]

The stream is that of `clickfleet synth --delays`: the last label comes hours after its show, later for some values than for others.
`clickfleet join` makes rows of it, as they come to be known. One model for each method learns the same shows, in the order of time:

    oracle    every label is known with its show
    ignore    labels count as known after the wait; corrections are dropped
    none, weight, correct    corrections are learned, by `late` of the label

All are judged on rows of the last day that none has seen, with their true labels. `closed` is the share of the gap between ignore
and oracle that a method closes, of AUC and of log loss. Quality does not depend on the speed or load of the machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import clickfleet
from clickfleet.config.sections import SECONDS
from clickfleet.data.logs.delayed_log import parse_delays
from clickfleet.data.logs.synth import SynthOptions, synth
from clickfleet.data.schema import read_schema, write_schema
from clickfleet.online.join_folder import join
from clickfleet.online.joiner import JoinRules
from clickfleet.online.row_join import JoinSettings

METHODS = ("none", "weight", "correct")


def train(log: Path, files: Path, schema: Path, form: str, settings: list[str]) -> Any:
    """Return the metrics on the test rows of a model that learned some files once, in their order."""
    with tempfile.TemporaryDirectory() as folder:
        done = clickfleet.train(
            None,
            f"data.train={files}/2*/*/part-*",
            f"data.schema={schema}",
            f"data.format={form}",
            "data.shuffle=0",
            "data.valid_share=0",
            f"run.dir={folder}/run",
            "run.report=false",
            "train.threads=1",
            *settings,
            quiet=True,
        )
        return done.reading("csv").evaluate(f"{log}/test")


def compare(args: argparse.Namespace, seed: int, folder: Path) -> dict[str, dict[str, float]]:
    log = folder / f"log-{seed}"
    labels = tuple(args.labels.split(","))
    options = SynthOptions(
        rows=args.rows,
        test_rows=args.test_rows,
        days=args.days,
        drift=args.drift,
        seed=seed,
        labels=labels,
        delays=parse_delays(args.delays, labels),
        format="csv",
    )
    synth(log, options)
    rules = JoinRules(float(SECONDS.parse(args.wait)), float(SECONDS.parse(args.window)), labels)
    for name, corrections in (("rows", True), ("ignore", False)):
        logs = JoinSettings(str(log / "shows"), str(log / "feedback"), rules, corrections)
        done, _ = join(logs, log / name, once=True)
        if corrections:
            print(f"seed {seed}: {json.dumps(done.to_dict())}", flush=True)
    schema = read_schema(log / "schema.yaml")
    for late in METHODS:
        tasks: Any = tuple(replace(task, late=late) for task in schema.tasks)
        write_schema(replace(schema, labels=tasks), log / f"{late}.yaml")
    runs = {"oracle": (log, "schema", "csv"), "ignore": (log / "ignore", "schema", "joined")}
    runs |= {late: (log / "rows", late, "joined") for late in METHODS}
    found = {}
    for name, (files, kind, form) in runs.items():
        results = train(log, files, log / f"{kind}.yaml", form, args.settings)
        part = results["tasks"][labels[-1]] if len(labels) > 1 else results
        found[name] = {metric: part[metric] for metric in ("auc", "logloss", "calibration")}
        if "auc_given" in part:
            found[name] |= {"auc_given": part["auc_given"], "logloss_given": part["logloss_given"]}
        print(f"seed {seed} {name:8} {json.dumps(found[name])}", flush=True)
    return found


def closed(found: dict[str, dict[str, float]], method: str, metric: str) -> float:
    ignored, best = found["ignore"][metric], found["oracle"][metric]
    return (found[method][metric] - ignored) / (best - ignored)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=300_000)
    parser.add_argument("--test-rows", type=int, default=100_000)
    parser.add_argument("--days", type=int, default=3)
    parser.add_argument("--drift", type=float, default=None)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=7)
    parser.add_argument("--labels", default="click,buy")
    parser.add_argument("--delays", default="click=20s,buy=2h")
    parser.add_argument("--wait", default="15min")
    parser.add_argument("--window", default="1d")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("settings", nargs="*", help="settings of training, such as model.name=esmm")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        runs = [compare(args, args.first_seed + i, Path(folder)) for i in range(args.seeds)]
    metrics = [name for name in runs[0]["oracle"] if name != "calibration"]
    table = {
        method: {
            **{metric: statistics.mean(run[method][metric] for run in runs) for metric in runs[0][method]},
            **{f"closed_{metric}": [closed(run, method, metric) for run in runs] for metric in metrics},
        }
        for method in runs[0]
    }
    if args.json:
        print(json.dumps(table))
        return
    for method, row in table.items():
        means = "  ".join(f"{name} {row[name]:.4f}" for name in runs[0][method])
        parts = "  ".join(
            f"{name} {statistics.mean(row[f'closed_{name}']):.2f} ({', '.join(f'{one:.2f}' for one in row[f'closed_{name}'])})"
            for name in metrics
        )
        print(f"{method:8} {means}   closed: {parts}")


if __name__ == "__main__":
    main()
