"""Measure what each mode costs in AUC: the same training job in all modes, with simulated workers.

    python benchmarks/modes.py --rows 300000

Two logical workers of equal speed take turns in one process (clickfleet.cluster.simulate). Raw text, `dnn` 400×3, dim 10, batches of
1000, one epoch. In sync and geo, where N workers take one step together, each worker has batches of 1000 / N, as docs/cluster.md
recommends. Prints the test AUC of each mode at its defaults and the difference from local, which should be at most 0.005.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from clickfleet.cluster.simulate import SimulatedCluster, with_mode
from clickfleet.config.load import load
from clickfleet.data.batch import Batch
from clickfleet.data.logs.synth import SynthOptions, synth
from clickfleet.data.memory import Feed
from clickfleet.data.reader import Reader
from clickfleet.training import predict

TRIALS: dict[str, tuple[str, dict[str, Any]]] = {
    "local": ("sync", {}),
    "sync": ("sync", {}),
    "half_async": ("half_async", {}),
    "async": ("async", {}),
    "geo": ("geo", {}),
}
LIMIT = 0.005


def shares(batches: list[Batch], mode: str, workers: int) -> list[list[Batch]]:
    """Return the batches of each worker. In sync and geo, which combine the steps of all workers, each gets a part of every batch."""
    if workers == 1:
        return [batches]
    if mode not in ("sync", "geo"):
        return [batches[i::workers] for i in range(workers)]
    size = 1000 // workers
    return [[batch[i * size : (i + 1) * size] for batch in batches] for i in range(workers)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=300_000)
    parser.add_argument("--test-rows", type=int, default=40_000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0, help="seed for the order of turns")
    parser.add_argument("--hidden", default="400,400,400")
    parser.add_argument("--try", dest="tries", action="append", default=[], metavar="MODE:KEY=VALUE,…")
    parser.add_argument("--only", action="store_true", help="run only local and the --try settings")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    trials = {"local": TRIALS["local"]} if arguments.only else dict(TRIALS)
    for text in arguments.tries:
        mode, _, settings = text.partition(":")
        pairs = (pair.split("=") for pair in settings.split(",") if pair)
        trials[text] = (mode, {key: json.loads(value) for key, value in pairs})
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder)
        synth(data, SynthOptions(rows=arguments.rows, test_rows=arguments.test_rows, parts=2))
        batches = list(Reader(str(data / "train" / "*"), batch_size=1000))
        reader = Reader(str(data / "test" / "*"), batch_size=1000)
        test, schema = list(islice(reader, 1000)), reader.schema
    config = load(None, ["model.name=dnn", f"model.hidden=[{arguments.hidden}]", "table.dim=10"])
    found: dict[str, float] = {}
    for name, (mode, settings) in trials.items():
        count = 1 if name == "local" else arguments.workers
        begin = time.monotonic()
        fleet = SimulatedCluster(with_mode(config, mode, **settings), schema, count, seed=arguments.seed)
        model = fleet.train([Feed(share, schema, len(share[0])) for share in shares(batches, mode, count)])
        found[name] = predict.evaluate(model, test)["auc"]
        difference = found[name] - found["local"]
        print(
            f"{name:>24}  AUC {found[name]:.4f}  {difference:+.4f}  {'' if difference >= -LIMIT else 'MISSES'}  "
            f"staleness {fleet.staleness:.1f}  {time.monotonic() - begin:.0f} s",
            flush=True,
        )
    print(json.dumps({"benchmark": "modes", **found}))


if __name__ == "__main__":
    main()
