"""Compare every model with scikit-learn's hashed logistic regression on a small log.

python benchmarks/small.py FILE [--recipe small] [--train-rows 8000] [--models …] [--seeds 7 8]

FILE is raw Criteo text: its first rows are for training, the rest for testing. The regression uses log1p of the counts
and 2^18 hashed categories, once with scikit-learn's default C of 1 and once with 0.03, the best value on rows 6,001 to
8,000 after training on the rows before them.
"""

from __future__ import annotations

import argparse
import gzip
import math
import tempfile
from pathlib import Path
from statistics import mean

from clickfleet.training import run
from study import MODELS

FLAT = ("lr", "fm", "ffm")
"""Models without an MLP. According to the recipe, they need a larger dense learning rate."""


def hashed_regression(train: list[str], test: list[str], strength: float) -> float:
    from sklearn.feature_extraction import FeatureHasher
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import roc_auc_score

    def features(line: str) -> dict[str, float]:
        fields = line.split("\t")
        counts = {f"I{i}": float(value) for i, value in enumerate(fields[1:14]) if value}
        logs = {name: math.copysign(math.log1p(abs(x)), x) for name, x in counts.items()}
        return logs | {f"C{i}={value}": 1.0 for i, value in enumerate(fields[14:])}

    hasher = FeatureHasher(1 << 18)
    x, held = (hasher.transform(map(features, lines)) for lines in (train, test))
    y, truth = ([line[0] == "1" for line in lines] for lines in (train, test))
    model = LogisticRegression(C=strength, solver="liblinear").fit(x, y)
    return float(roc_auc_score(truth, model.decision_function(held)))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file")
    parser.add_argument("--recipe", default="small")
    parser.add_argument("--train-rows", type=int, default=8000)
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[7, 8])
    args = parser.parse_args()
    data = Path(args.file).read_bytes()
    lines = (gzip.decompress(data) if args.file.endswith(".gz") else data).decode().splitlines()
    train, test = lines[: args.train_rows], lines[args.train_rows :]
    print("| model | test AUC |\n|---|---|")
    for strength in (1.0, 0.03):
        auc = hashed_regression(train, test, strength)
        print(f"| scikit-learn, hashed, C = {strength:g} | {auc:.4f} |", flush=True)
    with tempfile.TemporaryDirectory() as work:
        for name, part in (("train", train), ("test", test)):
            (Path(work) / name).write_text("\n".join(part) + "\n")
        for model in args.models:
            found = []
            for seed in args.seeds:
                sets = [f"data.train={work}/train", f"data.test={work}/test", f"model.name={model}"]
                sets += ["dense.lr=0.002"] if model in FLAT else []
                sets += [f"train.seed={seed}", "train.threads=1", f"run.dir={work}/{model}-{seed}"]
                made = run.train(None, *sets, recipe=args.recipe, quiet=True)
                assert made.test is not None
                found.append(made.test["auc"])
            print(f"| `{model}` | {mean(found):.4f} ({', '.join(f'{auc:.4f}' for auc in found)}) |", flush=True)


if __name__ == "__main__":
    main()
