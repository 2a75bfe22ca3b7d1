"""Train din and dien beside FuxiCTR's on the same rows: GAUC and rows per second from files. Then din beside the pooled model.

python benchmarks/histories.py [--rows 200000] [--only din] [--ratings FOLDER] [--zoo FOLDER] [--seeds 1 2 3]

The rows are those of `clickfleet synth --histories`, and with --ratings those of ml-100k, in the folder with ml-100k.inter.gz
and ml-100k.item: a rating of 4 or 5 is the label, the films a user liked before are the history, the last fifth of each user's
ratings is the test, and the tenth before it is the validation. FuxiCTR takes part if it is installed and --zoo is the folder
`model_zoo` of its repository, as its wheel lacks the models. All train with Adam 1e-3, batches of 1000 and factors of width 10;
FuxiCTR has an MLP of 400×3, and its other settings are those of its templates. On synth, all make one epoch. On ml-100k, all
stop early by the AUC of the validation, with a patience of 2, and keep the best epoch; our other settings are the defaults.
FuxiCTR's seconds cover reading and encoding the training rows, and the epochs. Evaluations are not timed.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import importlib
import importlib.util
import io
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import yaml

import clickfleet
from clickfleet.data.logs.synth import SynthOptions, synth
from clickfleet.training.metrics import Buckets, Groups

BATCH, DIM, HIDDEN = 1000, 10, (400, 400, 400)


class Outcome(NamedTuple):
    rows_per_s: float
    auc: float
    gauc: float


class Log(NamedTuple):
    """Files csv with a header, and their schema."""

    folder: Path
    rows: int
    epochs: int | None
    """None: training stops by the validation rows."""
    best: float | None = None

    @property
    def schema(self) -> dict[str, Any]:
        found: dict[str, Any] = yaml.safe_load((self.folder / "schema.yaml").read_text())
        return found


def planted(folder: Path, rows: int, test_rows: int) -> Log:
    report = synth(folder, SynthOptions(rows=rows, test_rows=test_rows, histories=True))
    return Log(folder, rows, 1, report["best_auc"])


def ratings(folder: Path, source: Path, epochs: int | None, most: int = 50) -> Log:
    """Write the rows of ml-100k, in the order of time."""
    with (source / "ml-100k.item").open() as file:
        films = [line.rstrip("\n").split("\t") for line in file][1:]
    genre = {film[0]: film[3].split(" ")[0] if len(film) > 3 and film[3] else "none" for film in films}
    with gzip.open(source / "ml-100k.inter.gz", "rt") as file:
        events = [line.rstrip("\n").split("\t") for line in file][1:]
    events.sort(key=lambda event: float(event[3]))
    total: dict[str, int] = defaultdict(int)
    for event in events:
        total[event[0]] += 1
    done: dict[str, int] = defaultdict(int)
    liked: dict[str, list[str]] = defaultdict(list)
    header = "liked,user,item,genre,liked_items,liked_genres\n"
    parts = {name: [header] for name in ("train", "valid", "test")}
    for user, item, rating, _ in events:
        past = liked[user][-most:]
        row = [str(int(float(rating) >= 4)), user, item, genre[item]]
        row += ["|".join(past), "|".join(genre[film] for film in past)]
        done[user] += 1
        share = done[user] / total[user]
        part = "train" if share <= 0.7 else "valid" if share <= 0.8 else "test"
        parts[part].append(",".join(row) + "\n")
        if float(rating) >= 4:
            liked[user].append(item)
    for name, lines in parts.items():
        (folder / name).mkdir(parents=True)
        (folder / name / "part-0.csv").write_text("".join(lines))
    history = {"name": "liked", "slots": ["item", "genre"], "columns": ["liked_items", "liked_genres"], "max": most}
    schema = {"label": "liked", "group": "user", "slots": ["user", "item", "genre"], "histories": [history]}
    (folder / "schema.yaml").write_text(yaml.safe_dump(schema))
    return Log(folder, len(parts["train"]) - 1, epochs)


def ours(log: Log, model: str, seed: int, *settings: str) -> Outcome:
    length = [f"data.valid={log.folder}/valid/part-0.csv"] if log.epochs is None else [f"train.epochs={log.epochs}"]
    with tempfile.TemporaryDirectory() as folder:
        done = clickfleet.train(
            None,
            f"data.train={log.folder}/train/part-0.csv",
            f"data.test={log.folder}/test/part-0.csv",
            f"data.schema={log.folder}/schema.yaml",
            f"model.name={model}",
            f"table.dim={DIM}",
            f"data.batch_size={BATCH}",
            f"train.seed={seed}",
            f"run.dir={folder}/run",
            "run.report=false",
            *length,
            *settings,
            quiet=True,
        )
    assert done.test is not None
    return Outcome(done.rows_per_s, done.test["auc"], done.test["gauc"])


def fuxictr(log: Log, model: str, seed: int, zoo: Path) -> Outcome:
    """Train FuxiCTR's model of the same name."""
    from fuxictr.preprocess import FeatureProcessor, build_dataset
    from fuxictr.pytorch.dataloaders import RankDataLoader
    from fuxictr.pytorch.torch_utils import seed_everything

    from peers import one_epoch, start_ray

    name = model.upper()
    place = importlib.util.spec_from_file_location(f"zoo_{name}", zoo / name / "src" / f"{name}.py")
    assert place is not None
    assert place.loader is not None
    module = importlib.util.module_from_spec(place)
    place.loader.exec_module(module)
    schema = log.schema
    label = schema["label"] if "label" in schema else schema["labels"][0]["name"]
    history = schema["histories"][0]
    features: list[dict[str, Any]] = [
        {"name": part["name"], "active": True, "dtype": "float", "type": "numeric", "fill_na": 0,
         "normalizer": "StandardScaler"}
        for part in schema.get("dense", [])
    ]  # fmt: skip
    slots = [slot if isinstance(slot, str) else slot["name"] for slot in schema["slots"]]
    features += [{"name": slot, "active": True, "dtype": "str", "type": "categorical", "fill_na": ""} for slot in slots]
    features += [
        {"name": column, "active": True, "dtype": "str", "type": "sequence", "splitter": "|", "fill_na": "",
         "max_len": history["max"], "padding": "post", "share_embedding": slot, "feature_encoder": None}
        for column, slot in zip(history["columns"], history["slots"], strict=True)
    ]  # fmt: skip
    kind = "din" if model == "din" else "dien"
    fields = {f"{kind}_target_field": [tuple(history["slots"])], f"{kind}_sequence_field": [tuple(history["columns"])]}
    if model == "dien":
        fields |= {"dien_neg_seq_field": [], "dnn_activations": "Dice", "attention_activation": "ReLU"}
    start_ray()
    seed_everything(seed)
    with tempfile.TemporaryDirectory() as folder:
        others = time_of_other_parts()
        begin = time.monotonic()
        processor = FeatureProcessor(features, {"name": label, "dtype": "float"}, dataset_id="log", data_root=folder)
        files = {part: str(log.folder / part / "part-0.csv") for part in ("train", "valid", "test")}
        paths = build_dataset(processor, files["train"], None if log.epochs else files["valid"], files["test"])
        prepare_s = time.monotonic() - begin - sum(others)
        processor.feature_map.default_emb_dim = DIM
        network = getattr(module, name)(
            processor.feature_map, verbose=0, metrics=["AUC", "logloss"], model_root=folder, optimizer="adam",
            monitor={"AUC": 1, "logloss": -1}, loss="binary_crossentropy", task="binary_classification",
            learning_rate=1e-3, embedding_dim=DIM, dnn_hidden_units=list(HIDDEN), batch_norm=model == "dien", **fields,
        )  # fmt: skip
        loaders = RankDataLoader(
            processor.feature_map, train_data=paths[0], valid_data=None if log.epochs else paths[1],
            test_data=paths[2], batch_size=BATCH, data_format="parquet", shuffle=True,
        )  # fmt: skip
        reader, validation, tester = loaders.make_iterator() if hasattr(loaders, "make_iterator") else loaders
        begin = time.monotonic()
        if log.epochs:
            epochs, evaluation_s = log.epochs, 0.0
            for _ in range(epochs):
                one_epoch(network, reader)
        else:
            epochs, evaluation_s = fit(network, reader, validation)
        train_s = time.monotonic() - begin - evaluation_s
        network.eval()
        with torch.no_grad():
            scores = [network(batch)["y_pred"].reshape(-1).numpy() for batch in tester]
    outcome = judged(log, label, np.concatenate(scores).astype(np.float32))
    return Outcome(log.rows * epochs / (prepare_s + train_s), *outcome)


def time_of_other_parts() -> list[float]:
    """Return a list that gets the seconds FuxiCTR spends on encoding validation and test rows, which are not counted."""
    module: Any = importlib.import_module("fuxictr.preprocess.build_dataset")
    encode, seconds = getattr(module.transform, "untimed", module.transform), []

    def timed(*args: Any, split: str = "train", **settings: Any) -> None:
        begin = time.monotonic()
        encode(*args, split=split, **settings)
        if split != "train":
            seconds.append(time.monotonic() - begin)

    timed.untimed = encode  # type: ignore[attr-defined]
    module.transform = timed
    return seconds


def fit(network: Any, reader: Any, validation: Any, most: int = 20) -> tuple[int, float]:
    """Train until FuxiCTR stops, and load its best weights. Return the epochs, and the seconds of evaluations."""
    spent, evaluate = 0.0, network.eval_step

    def timed() -> None:
        nonlocal spent
        begin = time.monotonic()
        evaluate()
        spent += time.monotonic() - begin

    network.eval_step = timed
    network.fit(reader, epochs=most, validation_data=validation)
    return network._epoch_index + 1, spent


def judged(log: Log, label: str, scores: Any) -> tuple[float, float]:
    """Return AUC and GAUC of scores, in the order of the test rows."""
    import pandas as pd

    frame = pd.read_csv(log.folder / "test" / "part-0.csv", usecols=[label, "user"])
    labels = frame[label].to_numpy(np.float32)
    groups = Groups()
    groups.update(frame["user"].to_numpy(np.uint64), scores, labels)
    buckets = Buckets()
    buckets.update(scores, labels)
    return buckets.auc, groups.gauc


def show(name: str, outcome: Outcome, beside: Outcome | None = None) -> None:
    ratio = (
        f", {outcome.rows_per_s / beside.rows_per_s:5.2f}x the speed, GAUC {outcome.gauc - beside.gauc:+.4f}"
        if beside
        else ""
    )
    print(
        f"  {name:16} {outcome.rows_per_s:9,.0f} rows/s  AUC {outcome.auc:.4f}  GAUC {outcome.gauc:.4f}{ratio}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--test-rows", type=int, default=50_000)
    parser.add_argument("--only", nargs="*", default=["din", "dien"], help="models to compare")
    parser.add_argument("--ratings", type=Path, help="folder of ml-100k")
    parser.add_argument("--zoo", type=Path, help="folder model_zoo of FuxiCTR's repository")
    parser.add_argument("--no-synth", action="store_true")
    parser.add_argument("--epochs", type=int, help="of ml-100k, instead of early stopping")
    parser.add_argument("--seeds", type=int, nargs="*", default=[7])
    args = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parent))
    peer = args.zoo is not None and importlib.util.find_spec("fuxictr") is not None
    with tempfile.TemporaryDirectory() as folder:
        logs = {}
        if not args.no_synth:
            logs["synth"] = planted(Path(folder) / "synth", args.rows, args.test_rows)
        if args.ratings:
            logs["ml-100k"] = ratings(Path(folder) / "ratings", args.ratings, args.epochs)
        for name, log in logs.items():
            best = f", best possible AUC {log.best:.4f}" if log.best else ""
            epochs = f"epochs: {log.epochs}" if log.epochs else "early stopping"
            print(f"{name}: {log.rows:,} rows, {epochs}{best}", flush=True)
            for seed in args.seeds:
                compare(log, args.only, seed, args.zoo if peer else None)


def compare(log: Log, models: list[str], seed: int, zoo: Path | None) -> None:
    """Print the outcomes of the pooled model, and of each model beside its peer."""
    pooled = ours(log, "dnn", seed)
    show("dnn, pooled", pooled)
    for model in models:
        theirs = None
        if zoo is not None and model in ("din", "dien"):
            with contextlib.redirect_stdout(io.StringIO()):
                theirs = fuxictr(log, model, seed, zoo)
            show(f"FuxiCTR's {model}", theirs)
        done = ours(log, model, seed)
        show(model, done, theirs)
        if log.best:
            closed = (done.auc - pooled.auc) / (log.best - pooled.auc)
            print(f"  {model} closes {closed:.0%} of the gap between the pooled model and the teacher", flush=True)


if __name__ == "__main__":
    main()
