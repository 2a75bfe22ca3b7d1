# %% [markdown]
# # DeepFM from raw logs to an artifact
#
# Make a log, split it and fit its transforms, train until the test AUC no longer rises, look at the report, export,
# and prove that the artifact is the model that was trained.

# %%
from pathlib import Path

import clickfleet
from clickfleet import exporting, parity
from clickfleet.logs.prepare import prepare
from clickfleet.logs.stats import stats
from clickfleet.logs.synth import Options, synth

synth("raw", Options(rows=15_000, test_rows=0, seed=5))

# %% Describe it: what is missing, how many different values
summary = stats("raw/train")
print(f"{summary.rows:,} rows, click rate {summary.to_dict()['ctr']:.3f}")

# %% Nine tenths to train on, the rest to test on; min-max transforms fitted to the former, written to schema.yaml
split = prepare("raw/train", "ready")
print(f"{split['train_rows']:,} rows to train on, {split['test_rows']:,} to test on: {split['schema']}")

# %% Train; the best checkpoint is kept
trained = clickfleet.train(
    {
        "data": {"train": "ready/train", "test": "ready/test", "schema": "ready/schema.yaml", "batch_size": 250},
        "model": {"name": "deepfm", "hidden": [64, 32]},
        "train": {"epochs": 3, "patience": 1},
        "run": {"dir": "run"},
    },
    quiet=True,
)
print(f"best test AUC {trained.best_auc:.4f} in {trained.best}")
print(f"curves, calibration, importance of fields: {Path('run/report.html').resolve()}")

# %% Score rows as they come, without labels
lines = Path("ready/test").glob("part-*")
rows = [line.split("\t", 1)[1] for line in next(iter(sorted(lines))).read_text().splitlines()[:100]]
Path("rows.tsv").write_text("\n".join(rows) + "\n")
best = clickfleet.load("run/BEST")
print("five scores:", best.predict("rows.tsv")[:5])

# %% The artifact: rows, the network as ONNX, the schema, requests with known answers
exporting.export(best.learner, "artifact", step=1)
report = parity.compare("run/BEST", None, ["rows.tsv"], artifact=Path("artifact"))
for check in report.checks:
    print("ok  " if check.ok else "DIFF", check.name, "-", check.detail)
assert report.ok
