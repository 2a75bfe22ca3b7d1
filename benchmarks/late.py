"""How much of the harm of late labels each method repairs.

python benchmarks/late.py [--rows 300000] [--days 3] [--drift 0.1] [--seeds 3] [--delays click=20s,buy=2h] [--wait 15min]

The stream is that of `clickfleet synth --delays`: the last label comes hours after its show, later for some values than for others.
`clickfleet join` makes rows of it, as they come to be known: a row when the wait ends, and one more, a correction, when a label
comes later. One model for each method learns this stream once:

    oracle    every show has its true labels, and is learned at the time of the show
    ignore    a label that has not come by the end of the wait is 0 for ever
    none      a late label is learned as one more row; the negative before it stays
    weight    as none, but negatives count less from the start
    correct   what the negative taught is taken back
    patient   every show is learned with its true labels when the window is over, so nothing of the last day is known

The first five read the same rows in the same batches, so they make equally many steps: where a method has nothing to learn from a
correction, the row is there and its labels are what they were. All are judged on rows of the last day that none has seen, with their
true labels. `closed` is the share of the gap between ignore and oracle that a method closes, of AUC and of log loss. `calibration` is
COPC: labels over the sum of their predictions. Quality does not depend on the speed or load of the machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv

import clickfleet
from clickfleet.config.sections import SECONDS
from clickfleet.data.events import LABELS
from clickfleet.data.logs.delayed_log import parse_delays
from clickfleet.data.logs.synth import SynthOptions, synth
from clickfleet.data.schema import read_schema, write_schema
from clickfleet.online.join_folder import join
from clickfleet.online.joiner import JoinRules
from clickfleet.online.row_join import JoinSettings

METHODS = ("none", "weight", "correct")
METRICS = ("auc", "logloss", "auc_given", "logloss_given")
COPC = ("calibration", "calibration_given")
Values = dict[str, float]


def train(log: Path, files: Path, schema: Path, settings: list[str]) -> Any:
    """Return the metrics on the test rows of a model that learned some files once, in their order."""
    with tempfile.TemporaryDirectory() as folder:
        done = clickfleet.train(
            None,
            f"data.train={files}/2*/*/part-*",
            f"data.schema={schema}",
            "data.format=joined",
            "data.shuffle=0",
            "data.valid_share=0",
            f"run.dir={folder}/run",
            "run.report=false",
            "train.threads=1",
            *settings,
            quiet=True,
        )
        return done.reading("csv").evaluate(f"{log}/test")


class Stream:
    """The rows of a join in the order in which they came to be known, and the files that hold them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.paths = sorted(folder.glob("2*/*/part-*"))
        parts = [pa.ipc.open_file(str(path)).read_all() for path in self.paths]
        self.counts = [len(part) for part in parts]
        self.rows = pa.concat_tables([part.replace_schema_metadata(None) for part in parts])
        self.requests = self.rows["request"].to_pylist()
        self.shown = self.rows["shown"].cast(pa.int64()).to_numpy()
        seen: set[str] = set()
        self.first = np.array([not (one in seen or seen.add(one)) for one in self.requests])  # type: ignore[func-returns-value]

    def write(self, out: Path, rows: pa.Table) -> None:
        """Write as many rows to each file as in the stream, so that batches are the same."""
        start = 0
        for path, count in zip(self.paths, self.counts, strict=True):
            target = out / path.relative_to(self.folder)
            target.parent.mkdir(parents=True, exist_ok=True)
            with pa.ipc.new_file(str(target), rows.schema) as sink:
                sink.write_table(rows.slice(start, count))
            start += count

    def labelled(self, labels: Iterable[Values], previous: Iterable[Values]) -> pa.Table:
        """Return the rows with other labels. A row without previous labels is no correction."""
        columns = {
            "labels": [list(one.items()) for one in labels],
            "previous": [list(one.items()) or None for one in previous],
        }
        rows = self.rows
        for name, values in columns.items():
            rows = rows.set_column(rows.schema.get_field_index(name), name, pa.array(values, LABELS))
        return rows

    def oracle(self, truth: dict[str, Values]) -> pa.Table:
        """Return the rows with their true labels, shows in the order of time. Corrections are there, but change nothing."""
        labels = [truth[one] for one in self.requests]
        previous = [{} if first else one for one, first in zip(labels, self.first, strict=True)]
        places = np.flatnonzero(self.first)
        order = np.arange(len(self.rows))
        order[places] = places[np.argsort(self.shown[places], kind="stable")]
        return self.labelled(labels, previous).take(order)

    def ignore(self) -> pa.Table:
        """Return the rows with the first value of every label. Corrections of it are there, but change nothing."""
        known: dict[str, Values] = {}
        labels, previous = [], []
        for request, values in zip(self.requests, self.rows["labels"].to_pylist(), strict=True):
            before = known.get(request, {})
            known[request] = {**dict(values), **before}
            labels.append(known[request])
            previous.append(before)
        return self.labelled(labels, previous)


def true_labels(log: Path, labels: tuple[str, ...]) -> dict[str, Values]:
    """Return the labels of all shows, by request."""
    tables = [
        csv.read_csv(path, convert_options=csv.ConvertOptions(include_columns=list(labels)))
        for path in sorted(log.glob("2*/*/part-*.csv"))
    ]
    columns = pa.concat_tables(tables)
    values = [columns[name].fill_null(0).to_pylist() for name in labels]
    return {f"r{i}": dict(zip(labels, map(float, row), strict=True)) for i, row in enumerate(zip(*values, strict=True))}


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
    done, _ = join(JoinSettings(str(log / "shows"), str(log / "feedback"), rules), log / "rows", once=True)
    print(f"seed {seed}: {json.dumps(done.to_dict())}", flush=True)
    stream = Stream(log / "rows")
    oracle = stream.oracle(true_labels(log, labels))
    stream.write(log / "oracle", oracle)
    stream.write(log / "ignore", stream.ignore())
    shown = oracle["shown"].cast(pa.int64())
    over = pc.less_equal(shown, pc.max(shown).as_py() - round(rules.window_s * 1e6))
    stream.write(log / "patient", oracle.filter(over))
    schema = read_schema(log / "schema.yaml")
    for late in METHODS:
        tasks: Any = tuple(replace(task, late=late) for task in schema.tasks)
        write_schema(replace(schema, labels=tasks), log / f"{late}.yaml")
    runs = {name: (log / name, "correct") for name in ("oracle", "ignore", "patient")}
    runs |= {late: (log / "rows", late) for late in METHODS}
    found = {}
    for name in args.methods:
        files, kind = runs[name]
        results = train(log, files, log / f"{kind}.yaml", args.settings)
        part = results["tasks"][labels[-1]] if len(labels) > 1 else results
        found[name] = {metric: part[metric] for metric in (*METRICS, *COPC) if metric in part}
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
    parser.add_argument("--methods", nargs="+", default=["oracle", "ignore", *METHODS, "patient"])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--settings", nargs="*", default=[], help="settings of training, such as model.name=esmm")
    args = parser.parse_args()
    if not {"oracle", "ignore"} <= set(args.methods):
        parser.error("--methods must have oracle and ignore, the ends of the gap")
    runs = []
    for seed in range(args.first_seed, args.first_seed + args.seeds):
        with tempfile.TemporaryDirectory() as folder:
            runs.append(compare(args, seed, Path(folder)))
    names = list(runs[0]["oracle"])
    table = {
        method: {
            **{name: [run[method][name] for run in runs] for name in names},
            **{f"closed_{name}": [closed(run, method, name) for run in runs] for name in names if name not in COPC},
        }
        for method in runs[0]
    }
    if args.json:
        print(json.dumps(table))
        return
    for method, row in table.items():
        print(method)
        for name, values in row.items():
            each = ", ".join(f"{value:.4f}" for value in values)
            print(f"  {name:22} {statistics.mean(values):.4f} ({each})")


if __name__ == "__main__":
    main()
