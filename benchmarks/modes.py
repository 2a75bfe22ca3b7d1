"""Measure what each mode costs in AUC: the same training job in all modes, with simulated workers.

    python benchmarks/modes.py                                            # dnn and deepfm, 100 and 500 steps, 2 workers
    python benchmarks/modes.py --models dnn,deepfm,dcn_v2 --workers 2,4 --seeds 7,11
    python benchmarks/modes.py --batch 250 --steps 600
    python benchmarks/modes.py --try async:dense=gradient --try geo:k_steps=100 --only

Logical workers of equal speed take turns in one process (clickfleet.cluster.simulate). Every worker trains on whole batches of its share
of synthetic Criteo rows, at the default settings of the models and modes. Prints the test AUC of each mode and its difference from one
machine, with the limit of that case: 0.002 for two workers after 500 steps or more, else 0.005. --processes runs cases side by side.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from concurrent.futures import ProcessPoolExecutor
from itertools import islice, product
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch

from clickfleet.cluster.simulate import SimulatedCluster, with_mode
from clickfleet.config.load import load
from clickfleet.data.logs.synth import SynthOptions, synth
from clickfleet.data.memory import Feed
from clickfleet.data.reader import Reader
from clickfleet.training import predict

DEFAULTS: dict[str, tuple[str, dict[str, Any]]] = {
    "half_async": ("half_async", {}),
    "async": ("async", {}),
    "geo": ("geo", {}),
}
ONE = "one machine"
MANY_STEPS = 500
Trials = dict[str, tuple[str, dict[str, Any]]]


class Case(NamedTuple):
    """One training job."""

    data: str
    model: str
    seed: int
    steps: int
    batch: int
    workers: int

    @property
    def limit(self) -> float:
        return 0.002 if self.steps >= MANY_STEPS and self.workers == 2 else 0.005


def aucs(case: Case, trials: Trials) -> dict[str, tuple[float, float]]:
    """Return the test AUC and the staleness of each trial."""
    torch.set_num_threads(1)
    reader = Reader(f"{case.data}/train/*", batch_size=case.batch)
    batches, schema = list(islice(reader, case.steps)), reader.schema
    test = list(Reader(f"{case.data}/test/*", batch_size=5000))
    config = load(None, [f"model.name={case.model}", f"data.batch_size={case.batch}"])
    found = {}
    for name, (mode, settings) in {ONE: ("sync", {}), **trials}.items():
        count = 1 if name == ONE else case.workers
        cluster = SimulatedCluster(with_mode(config, mode, **settings), schema, count, seed=case.seed)
        model = cluster.train([Feed(batches[i::count], schema, case.batch) for i in range(count)])
        found[name] = predict.evaluate(model, test)["auc"], cluster.staleness
    return found


def parsed(text: str) -> tuple[str, dict[str, Any]]:
    """Return the mode and the settings of MODE:KEY=VALUE,…"""
    mode, _, settings = text.partition(":")
    pairs = (pair.split("=") for pair in settings.split(",") if pair)
    return mode, {key: json.loads(value) if value[0] in "0123456789tf" else value for key, value in pairs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="dnn,deepfm")
    parser.add_argument("--steps", default="100,500")
    parser.add_argument("--batch", default="1000")
    parser.add_argument("--workers", default="2")
    parser.add_argument("--seeds", default="7", help="seeds of the logs")
    parser.add_argument("--test-rows", type=int, default=40_000)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--try", dest="tries", action="append", default=[], metavar="MODE:KEY=VALUE,…")
    parser.add_argument("--only", action="store_true", help="run only the --try settings")
    arguments = parser.parse_args()
    trials: Trials = ({} if arguments.only else dict(DEFAULTS)) | {text: parsed(text) for text in arguments.tries}

    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    seeds, sizes, counts = numbers(arguments.seeds), numbers(arguments.batch), numbers(arguments.steps)
    with tempfile.TemporaryDirectory() as folder:
        for seed in seeds:
            rows = max(sizes) * max(counts)
            synth(Path(folder) / str(seed), SynthOptions(rows=rows, test_rows=arguments.test_rows, parts=4, seed=seed))
        cases = [
            Case(f"{folder}/{seed}", model, seed, steps, batch, workers)
            for model, seed, steps, batch, workers in product(
                arguments.models.split(","), seeds, counts, sizes, numbers(arguments.workers)
            )
        ]
        missed = 0
        print(f"| model | seed of the log | steps × rows | workers | {ONE} | " + " | ".join(trials) + " | limit |")
        print("|---" * (len(trials) + 6) + "|", flush=True)
        with ProcessPoolExecutor(arguments.processes, mp_context=get_context("spawn")) as pool:
            for case, found in zip(cases, pool.map(aucs, cases, [trials] * len(cases)), strict=True):
                base = found[ONE][0]
                cells = [f"{found[name][0] - base:+.4f}" for name in trials]
                missed += sum(found[name][0] < base - case.limit for name in trials)
                print(
                    f"| `{case.model}` | {case.seed} | {case.steps} × {case.batch} | {case.workers} | {base:.4f} | "
                    + " | ".join(cells)
                    + f" | {case.limit} |",
                    flush=True,
                )
    print(json.dumps({"benchmark": "modes", "cases": len(cases) * len(trials), "missed": missed}))


if __name__ == "__main__":
    main()
