"""What a second label costs, and what learning purchases from all shows gains.

python benchmarks/tasks.py [--rows 500000] [--rounds 3] [--only cost gain]

The rows are those of `clickfleet synth --labels click,buy`: a purchase is known only after a click, and what is clicked much sells
little. Cost: dnn with both labels and with the click alone, in alternation. Gain: the AUC of buying over all shows, beside the
best possible. naive is what the paper of esmm compares with: P(click) of one model times P(buy | click) of another, which learns
from clicked rows alone and has its own rows in a table of its own. shared is the network of esmm, whose labels share their rows,
with the purchase learned from clicked rows alone.
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


def train(log: Path, model: str, *settings: str, schema: str = "schema.yaml") -> Any:
    with tempfile.TemporaryDirectory() as folder:
        return clickfleet.train(
            None,
            f"data.train={log}/train",
            f"data.test={log}/test",
            f"data.schema={log}/{schema}",
            f"model.name={model}",
            f"run.dir={folder}/run",
            "run.report=false",
            *settings,
            quiet=True,
        )


def cost(log: Path, rounds: int) -> None:
    schema = yaml.safe_load((log / "schema.yaml").read_text())
    schema["label"] = schema.pop("labels")[0]["name"]
    (log / "one.yaml").write_text(yaml.safe_dump(schema))
    speeds: dict[str, list[float]] = {"one.yaml": [], "schema.yaml": []}
    for _ in range(rounds):
        for name, found in speeds.items():
            found.append(train(log, "dnn", schema=name).rows_per_s)
    one, two = (statistics.median(found) for found in speeds.values())
    print(
        f"dnn: one label {one:,.0f} rows/s, two {two:,.0f} rows/s; two cost {one / two:.2f}x (aim <= 1.15x)", flush=True
    )


class Gain(NamedTuple):
    click: float
    buy: float
    """The AUC over all shows."""
    given: float


def of_network(log: Path, model: str, epochs: int) -> Gain:
    test = train(log, model, f"train.epochs={epochs}").test
    found = test["tasks"]["buy"]
    return Gain(test["auc"], found["auc"], found["auc_given"])


def naive(log: Path, epochs: int) -> tuple[Gain, float]:
    """Return the AUC of two models, dnn of clicks and dnn of purchases in clicked rows, and that of the second one alone over all shows."""
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
    click = scores(log, "train", "click.yaml", f"train.epochs={epochs}")
    buy = scores(log, "clicked", "buy.yaml")
    clicked = clicks == 1
    both = Gain(auc(click, clicks), auc(click * buy, buys), auc(buy[clicked], buys[clicked]))
    return both, auc(buy, buys)


def scores(log: Path, part: str, schema: str, *settings: str) -> Any:
    """Train dnn and return its scores of the test rows."""
    with tempfile.TemporaryDirectory() as folder:
        done = clickfleet.train(
            None,
            f"data.train={log}/{part}",
            f"data.schema={log}/{schema}",
            "model.name=dnn",
            f"run.dir={folder}/run",
            "run.report=false",
            *settings,
            quiet=True,
        )
        return done.predict(str(log / "test"))


def gain(log: Path, best: dict[str, Any], epochs: int, models: list[str]) -> None:
    limit = best["buy"]["best_auc"]
    found = {"best possible": Gain(best["click"]["best_auc"], limit, best["buy"]["best_auc_given"])}
    show("best possible", found["best possible"], limit)
    (log / "shared.py").write_text(SHARED)
    for model in models:
        if model == "naive":
            found[model], alone = naive(log, epochs)
            show("naive", found[model], limit)
            print(f"  its P(buy | click) alone over all shows: {alone:.4f}", flush=True)
        else:
            found[model] = of_network(log, f"{log}/shared.py" if model == "shared" else model, epochs)
            show(model, found[model], limit)
    if "naive" in found and "esmm" in found:
        lead, gap = found["esmm"].buy - found["naive"].buy, found["esmm"].buy - limit
        print(f"esmm against naive {lead:+.4f} (aim >= +0.01), against the best {gap:+.4f} (aim >= -0.01)", flush=True)


def show(name: str, found: Gain, limit: float) -> None:
    print(
        f"{name:16}  click {found.click:.4f}  buy over all shows {found.buy:.4f} ({found.buy - limit:+.4f})"
        f"  after a click {found.given:.4f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=500_000)
    parser.add_argument("--test-rows", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--histories", action="store_true", help="rows with histories")
    parser.add_argument("--only", nargs="*", default=["cost", "gain"])
    parser.add_argument(
        "--models", nargs="*", default=["naive", "shared", "dnn", "share_bottom", "mmoe", "ple", "esmm", "aitm"]
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        options = SynthOptions(
            rows=args.rows, test_rows=args.test_rows, labels=("click", "buy"), histories=args.histories
        )
        report: Any = synth(log, options)
        if "cost" in args.only:
            cost(log, args.rounds)
        if "gain" in args.only:
            gain(log, report["tasks"], args.epochs, args.models)


if __name__ == "__main__":
    main()
