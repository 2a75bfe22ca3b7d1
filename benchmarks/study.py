"""Reproduce the study behind the default recipe: vary one factor at a time, choose on validation rows, report once on test rows.

python benchmarks/study.py FOLDER [--only NAME …] [--models NAME …] [--threads 1]

FOLDER receives the data (per data seed 550,000 synthetic rows, of which the last 50,000 are for validation, and 50,000
test rows) and `results.jsonl`. Completed runs are not repeated, so the study can be stopped and resumed. At the end the
tables of docs/study.md are printed. `screen` compares settings by validation AUC on a narrow DeepFM (128, 64), `full`
the two final settings at full width with several seeds, `zoo` every model on 200,000 rows. Only `full` and `zoo` use
test rows, after everything was chosen.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from clickfleet.data.logs.synth import SynthOptions, synth
from clickfleet.data.schema import Bucket, Schema, Slot, Transform, preset, write_schema
from clickfleet.training import run

ORIGINALS = ("fm", "wide_deep", "deepfm", "dnn", "slot_dnn", "dcn", "gate_dnn", "dlrm", "deepfefm", "ffm", "xdeepfm")
MODELS = ("lr", *ORIGINALS, "dcn_v2", "final_mlp", "autoint")
ZOO_PARTS = 4
OLD = ("table.rule.name=adagrad", "table.rule.lr=0.1", "table.rule.initial_g2sum=0.3")
BEFORE = (*OLD, "table.init.embedx=uniform(-0.05,0.05)", "dense.lr=0.001")
"""The defaults before this study."""


def rule(part: str, name: str, **settings: Any) -> tuple[str, ...]:
    """Return `key=value` items for the rule of the factors (`rule`) or of the first-order weights (`embed_rule`)."""
    return tuple(f"table.{part}.{key}={value}" for key, value in {"name": name, **settings}.items())


EMBED = rule("embed_rule", "adagrad_v2", lr=0.1, initial_g2sum=4, scale="none")
ROWS = rule("rule", "adagrad_v2", lr=0.05, initial_g2sum=1, scale="none")
SHOW = rule("embed_rule", "adagrad", lr=0.1, initial_g2sum=0.3)
CHOSEN = (*EMBED, *ROWS)


class Trial(NamedTuple):
    part: str
    label: str
    sets: tuple[str, ...] = ()
    model: str = "deepfm"
    data: int = 7
    seed: int = 7
    schema: str = "log1p"
    """Changes to the schema, joined by +."""
    parts: int = 10
    """Number of training parts to use, of ten with 50,000 rows each."""


def screen() -> Iterator[Trial]:
    """Vary one factor at a time around the chosen setting; also try the previous defaults."""
    narrow = ("model.hidden=[128,64]",)

    def trial(label: str, *sets: str, schema: str = "log1p") -> Trial:
        return Trial("screen", label, (*narrow, *CHOSEN, *sets), schema=schema)

    yield trial("chosen")
    yield Trial("screen", "before: adagrad 0.1, 0.3 for both, rows ±0.05, Adam 1e-3", (*narrow, *BEFORE))
    for width in (0.005, 0.01, 0.03, 0.05, 0.1):
        yield trial(f"rows start in ±{width}", f"table.init.embedx=uniform(-{width},{width})")
    for lr in (0.02, 0.035, 0.07, 0.1):
        yield trial(f"factors: lr {lr}", f"table.rule.lr={lr}")
    for start in (0, 0.1, 10):
        yield trial(f"factors: initial_g2sum {start}", f"table.rule.initial_g2sum={start}")
    for lr in (0.05, 0.15):
        yield trial(f"first order: lr {lr}", f"table.embed_rule.lr={lr}")
    for start in (1, 16):
        yield trial(f"first order: initial_g2sum {start}", f"table.embed_rule.initial_g2sum={start}")
    others = {
        "factors: adagrad 0.1, 0.3, scaled by show": rule("rule", "adagrad", lr=0.1, initial_g2sum=0.3),
        "factors: adam 0.001": rule("rule", "adam", lr=0.001),
        "factors: adam 0.004": rule("rule", "adam", lr=0.004),
        "factors: shared_adam 0.002": rule("rule", "shared_adam", lr=0.002),
        "factors: std_adagrad 0.1, 0.3, scaled by show": rule("rule", "std_adagrad", lr=0.1, initial_g2sum=0.3),
        "factors: ftrl 0.05, not scaled": rule("rule", "ftrl", lr=0.05, scale="none"),
    }
    for label, sets in others.items():
        yield Trial("screen", label, (*narrow, *EMBED, *sets))
    yield Trial("screen", "first order: adagrad 0.1, 0.3, scaled by show", (*narrow, *SHOW, *ROWS))
    ftrl = rule("embed_rule", "ftrl", lr=0.1, scale="none")
    yield Trial("screen", "first order: ftrl 0.1, not scaled", (*narrow, *ftrl, *ROWS))
    yield trial("first order and factors: the factors' rule for both", *rule("embed_rule", "adagrad_v2", lr=0.05))
    for count in (3, 10):
        yield trial(f"rows get factors after {count} shows", f"table.admission=count({count})")
    for size in (250, 500, 2000, 4096):
        yield trial(f"batch {size}", f"data.batch_size={size}")
    for rate in (0.00025, 0.001, 0.002):
        yield trial(f"dense Adam {rate}", f"dense.lr={rate}")
    yield trial("dense AdaGrad 0.01", "dense.optimizer=adagrad", "dense.lr=0.01")
    yield trial("dropout 0.2", "model.dropout=0.2")
    yield trial("L2 1e-5 on dense matrices", "train.loss.l2=0.00001")
    yield trial("dim 4", "table.dim=4")
    yield trial("dim 16", "table.dim=16")
    yield trial("counts as they are", schema="none")
    yield trial("counts min-max", schema="minmax")
    yield trial("missing counts are -1", schema="missing")
    yield trial("counts also as bucketed slots", schema="missing+buckets")


def full() -> Iterator[Trial]:
    for data in (7, 11):
        for seed in (7, 8):
            yield Trial("full", "before", BEFORE, data=data, seed=seed)
            yield Trial("full", "default", data=data, seed=seed)


def zoo() -> Iterator[Trial]:
    for data in (7, 11):
        for model in MODELS:
            yield Trial("zoo", "default", model=model, data=data, parts=ZOO_PARTS)
    for model in ORIGINALS:
        yield Trial("zoo", "paddlerec", ("model.paddlerec=true",), model, parts=ZOO_PARTS)


PARTS = {"full": full, "zoo": zoo, "screen": screen}


def schema(name: str) -> Schema:
    made = preset("criteo")
    for part in name.split("+"):
        match part:
            case "none":
                made = replace(made, dense=tuple(replace(column, transform=Transform()) for column in made.dense))
            case "minmax":
                made = replace(made, dense=preset("criteo-paddle").dense)
            case "missing":
                made = replace(made, dense=tuple(replace(column, missing=-1.0) for column in made.dense))
            case "buckets":
                slots = (Slot(f"B{i}", bucket=Bucket(c.name, -2.0, 12.0, 56)) for i, c in enumerate(made.dense, 1))
                made = replace(made, slots=(*made.slots, *slots))
    return made


def rows(folder: Path, seed: int) -> Path:
    """The log of a data seed: parts 0 to 9 to train on, part 10 to choose by, and test rows."""
    path = folder / f"data-{seed}"
    if not path.exists():
        synth(path, SynthOptions(rows=550_000, test_rows=50_000, parts=11, seed=seed))
    return path


def train(trial: Trial, log: Path, threads: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as work:
        config = {
            "data": {
                "train": [str(log / f"train/part-{i}") for i in range(trial.parts)],
                "test": str(log / "train/part-10"),
            },
            "model": {"name": trial.model},
            "train": {"threads": threads, "seed": trial.seed},
            "run": {"dir": f"{work}/run"},
        }
        if trial.schema != "log1p":
            write_schema(schema(trial.schema), f"{work}/schema.yaml")
            config["data"]["schema"] = f"{work}/schema.yaml"
        begin = time.monotonic()
        outcome = run.train(config, *trial.sets, quiet=True)
        assert outcome.test is not None
        found = {"auc": outcome.test["auc"], "logloss": outcome.test["logloss"]}
        if trial.part != "screen":
            found["test_auc"] = outcome.evaluate(str(log / "test"))["auc"]
        return found | {"seconds": round(time.monotonic() - begin, 1)}


def tables(results: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the tables of docs/study.md."""
    screened = [one for one in results if one["part"] == "screen"]
    if screened:
        base = next(one["auc"] for one in screened if one["label"] == "chosen")
        yield "| setting | validation AUC | against the chosen |\n|---|---|---|"
        for one in screened:
            yield f"| {one['label']} | {one['auc']:.4f} | {one['auc'] - base:+.4f} |"
    whole = [one for one in results if one["part"] == "full"]
    if whole:
        yield "\n| data seed, training seed | recipe | validation AUC | test AUC |\n|---|---|---|---|"
        for one in whole:
            yield f"| {one['data']}, {one['seed']} | {one['label']} | {one['auc']:.4f} | {one['test_auc']:.4f} |"
    models = [one for one in results if one["part"] == "zoo"]
    if models:
        yield "\n| model | test AUC, data 7 | data 11 | mean lead over lr | `paddlerec`, data 7 |\n|---|---|---|---|---|"
        found = {(one["model"], one["label"], one["data"]): one["test_auc"] for one in models}
        for name in MODELS:
            default = [found.get((name, "default", data)) for data in (7, 11)]
            leads = [
                mine - lr
                for mine, data in zip(default, (7, 11), strict=True)
                if mine is not None and (lr := found.get(("lr", "default", data))) is not None
            ]
            lead = f"{mean(leads):+.4f}" if leads else ""
            cells = [*default, found.get((name, "paddlerec", 7))]
            shown = ["" if cell is None else f"{cell:.4f}" for cell in cells]
            yield f"| `{name}` | {shown[0]} | {shown[1]} | {lead} | {shown[2]} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    record = args.folder / "results.jsonl"
    results = [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []
    done = {json.dumps({key: one[key] for key in Trial._fields}) for one in results}
    for trial in (trial for part in args.only for trial in PARTS[part]() if trial.model in args.models):
        asked = json.loads(json.dumps(trial._asdict()))
        if json.dumps(asked) in done:
            continue
        found = asked | train(trial, rows(args.folder, trial.data), args.threads)
        results.append(found)
        with record.open("a") as file:
            file.write(json.dumps(found) + "\n")
            file.flush()
            os.fsync(file.fileno())
        print(f"{trial.part} {trial.model} {trial.label}: {found['auc']:.4f} in {found['seconds']} s", flush=True)
    print("\n".join(tables(results)))


if __name__ == "__main__":
    main()
