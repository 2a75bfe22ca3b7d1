"""What a second label costs, and what learning purchases beside clicks gains.

python benchmarks/tasks.py [--rows 1000000] [--seeds 3] [--rounds 3] [--only cost gain] [--settings "model.hidden=[400, 400, 400]"]

The rows are those of `clickfleet synth --labels click,buy`; docs/logs.md describes their world. Cost: dnn with both labels and with
the click alone, in alternation. Gain: the AUC of buying over all shows, P(click)·P(buy | click), beside that of the true probabilities.

    naive   BASE of the paper of esmm (arXiv:1804.07931): P(buy | click) of a dnn with rows of its own, learned from clicked rows
            alone, times P(click) of another dnn. It makes few steps, so it may choose: batches of 1000 or 100, one, two or four
            epochs, whatever is best on the test rows.
    shared  the network of esmm, whose labels share their rows; the purchase is learned from clicked rows alone
    paper   esmm with `conditional: 0`: the purchase is learned from all rows, by the product alone
    esmm    esmm with its defaults: by the product, and from clicked rows
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow.compute as pc
import yaml
from pyarrow import csv

import clickfleet
from clickfleet.data.logs.synth import SynthOptions, auc, synth

SHARED = """from clickfleet.models.esmm import ESMM


class Shared(ESMM):
    entire_space = False
"""


def train(log: Path, part: str, schema: str, settings: list[str], test: bool = True) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        done = clickfleet.train(
            None,
            f"data.train={log}/{part}",
            *([f"data.test={log}/test"] if test else []),
            f"data.schema={log}/{schema}",
            f"run.dir={folder}/run",
            "run.report=false",
            *settings,
            quiet=True,
        )
        return done if test else done.predict(str(log / "test"))


def cost(log: Path, rounds: int, settings: list[str]) -> None:
    schema = yaml.safe_load((log / "schema.yaml").read_text())
    schema["label"] = schema.pop("labels")[0]["name"]
    (log / "one.yaml").write_text(yaml.safe_dump(schema))
    speeds: dict[str, list[float]] = {"one.yaml": [], "schema.yaml": []}
    for _ in range(rounds):
        for name, found in speeds.items():
            found.append(train(log, "train", name, ["model.name=dnn", *settings]).rows_per_s)
    one, two = (statistics.median(found) for found in speeds.values())
    print(
        f"dnn: one label {one:,.0f} rows/s, two {two:,.0f} rows/s; two cost {one / two:.2f}x (aim <= 1.15x)", flush=True
    )


class Gain(NamedTuple):
    click: float
    buy: float
    """The AUC over all shows."""
    given: float


def of_network(log: Path, model: str, settings: list[str]) -> Gain:
    named = {
        "shared": [f"model.name={log}/shared.py"],
        "paper": ["model.name=esmm", "model.conditional=0"],
    }
    test = train(log, "train", "schema.yaml", [*named.get(model, [f"model.name={model}"]), *settings]).test
    found = test["tasks"]["buy"]
    return Gain(test["auc"], found["auc"], found["auc_given"])


def naive(log: Path, settings: list[str]) -> Gain:
    """Return the AUC of two models: dnn of clicks, and dnn of purchases in clicked rows, with the best of some settings."""
    schema = yaml.safe_load((log / "schema.yaml").read_text())
    del schema["labels"]
    for name in ("click", "buy"):
        (log / f"{name}.yaml").write_text(yaml.safe_dump(schema | {"label": name}))
    table = csv.read_csv(log / "train" / "part-0.csv")
    (log / "clicked").mkdir()
    csv.write_csv(table.filter(pc.equal(table["click"], 1)), log / "clicked" / "part-0.csv")
    test = csv.read_csv(
        log / "test" / "part-0.csv", convert_options=csv.ConvertOptions(include_columns=["click", "buy"])
    )
    clicks, buys = (test[name].fill_null(0).to_numpy().astype(np.int8) for name in ("click", "buy"))
    clicked = clicks == 1
    both = ["model.name=dnn", *settings]
    click = train(log, "train", "click.yaml", both, test=False)
    found = []
    for size in (1000, 100):
        for epochs in (1, 2, 4):
            own = [*both, f"train.epochs={epochs}", f"data.batch_size={size}"]
            buy = train(log, "clicked", "buy.yaml", own, test=False)
            found.append(Gain(auc(click, clicks), auc(click * buy, buys), auc(buy[clicked], buys[clicked])))
    return max(found, key=lambda one: one.buy)


def gain(log: Path, best: dict[str, Any], models: list[str], settings: list[str]) -> dict[str, Gain]:
    """Return the AUCs of each model on one log."""
    found = {"best": Gain(best["click"]["best_auc"], best["buy"]["best_auc"], best["buy"]["best_auc_given"])}
    (log / "shared.py").write_text(SHARED)
    for model in models:
        found[model] = naive(log, settings) if model == "naive" else of_network(log, model, settings)
        print(f"  {model:12} {'  '.join(f'{value:.4f}' for value in found[model])}", flush=True)
    return found


def show(runs: list[dict[str, Gain]]) -> None:
    """Print means over the seeds and, of the difference from the best possible and from naive, the range."""
    for model in runs[0]:
        means = Gain(*(statistics.mean(values) for values in zip(*(run[model] for run in runs), strict=True)))
        line = (
            f"{model:12}  click {means.click:.4f}  buy over all shows {means.buy:.4f}  after a click {means.given:.4f}"
        )
        for other in ("best", "naive"):
            if other in runs[0] and model not in ("best", other):
                apart = [run[model].buy - run[other].buy for run in runs]
                line += f"  to {other} {statistics.mean(apart):+.4f} ({min(apart):+.4f} to {max(apart):+.4f})"
        print(line, flush=True)
    print("aims of esmm: at least -0.01 to best, at least +0.01 to naive", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--test-rows", type=int, default=500_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=7)
    parser.add_argument("--histories", action="store_true", help="rows with histories")
    parser.add_argument("--only", nargs="*", default=["cost", "gain"])
    parser.add_argument("--settings", nargs="*", default=["model.hidden=[64, 32]"], help="settings of all networks")
    parser.add_argument("--models", nargs="*", default=["naive", "shared", "paper", "esmm"])
    args = parser.parse_args()
    runs = []
    for seed in range(args.first_seed, args.first_seed + args.seeds):
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder) / "log"
            options = SynthOptions(
                rows=args.rows,
                test_rows=args.test_rows,
                labels=("click", "buy"),
                histories=args.histories,
                seed=seed,
            )
            report: Any = synth(log, options)
            if "cost" in args.only and seed == args.first_seed:
                cost(log, args.rounds, args.settings)
            if "gain" in args.only:
                print(f"seed {seed}: {report['tasks']}", flush=True)
                runs.append(gain(log, report["tasks"], args.models, args.settings))
    if runs:
        show(runs)


if __name__ == "__main__":
    main()
