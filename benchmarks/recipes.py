"""Train every recipe for one epoch on synthetic click logs. Print its test AUC, the one in its header, and its speed.

python benchmarks/recipes.py [--rows 100000] [--only fm dcn] [--write]

With --write, the measured AUC replaces the one in the headers.
"""

from __future__ import annotations

import argparse
import re
import tempfile
from pathlib import Path

import clickfleet
from clickfleet.config import recipes
from clickfleet.data.logs.synth import SynthOptions, synth

PROMISE = re.compile(r"(?<=Expect a test AUC of )\d\.\d+(?= after one epoch)")


def log_of(recipe: str, rows: int, test_rows: int) -> SynthOptions:
    """Return the rows on which the header of a recipe promises its AUC, in other numbers."""
    words = (recipes.find(recipe).expected or "").rstrip("`.").split()
    labels = words[words.index("--labels") + 1].split(",") if "--labels" in words else ["click"]
    return SynthOptions(rows=rows, test_rows=test_rows, histories="--histories" in words, labels=tuple(labels))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--test-rows", type=int, default=20_000)
    parser.add_argument("--only", nargs="*", help="names of recipes")
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        logs: dict[SynthOptions, Path] = {}
        for path in sorted(recipes.FOLDER.glob("*.yaml")):
            if recipes.find(path.stem).model == "word2vec" or (
                args.only and path.stem not in args.only
            ):  # that reads plain text
                continue
            options = log_of(path.stem, args.rows, args.test_rows)
            if options not in logs:
                logs[options] = Path(folder) / f"log-{len(logs)}"
                synth(logs[options], options)
            log = logs[options]
            data = [f"data.train={log}/train", f"data.test={log}/test", f"run.dir={folder}/{path.stem}"]
            if options.described:
                data.append(f"data.schema={log}/schema.yaml")
            done = clickfleet.train(None, *data, "train.epochs=1", "run.report=false", recipe=path.stem, quiet=True)
            assert done.test is not None
            text = path.read_text()
            promised = PROMISE.search(text)
            said = promised[0] if promised else "nothing"
            print(
                f"{path.stem:14} test AUC {done.test['auc']:.4f} (header: {said}), {done.rows_per_s:8,.0f} rows/s",
                flush=True,
            )
            if args.write:
                path.write_text(PROMISE.sub(f"{done.test['auc']:.3f}", text))


if __name__ == "__main__":
    main()
