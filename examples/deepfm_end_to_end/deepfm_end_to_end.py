# %% [markdown]
# # DeepFM from raw logs to an artifact
#
# Make a log, split it, and fit its transforms. Train until the test AUC no longer rises. Read the report, export the
# model, and verify that the artifact equals the trained model.

# %%
from pathlib import Path

import clickfleet
from clickfleet.data.logs.prepare import prepare
from clickfleet.data.logs.stats import stats
from clickfleet.data.logs.synth import SynthOptions, synth
from clickfleet.training import export
from clickfleet.workbench import parity

synth("raw", SynthOptions(rows=15_000, test_rows=0, seed=5))

# %% Describe it: missing and distinct values
summary = stats("raw/train")
print(f"{summary.rows:,} rows, click rate {summary.to_dict()['ctr']:.3f}")

# %% Nine tenths train, the rest tests; schema.yaml has min-max transforms fitted to the training rows
split = prepare("raw/train", "ready")
print(f"{split['train_rows']:,} rows to train on, {split['test_rows']:,} to test on: {split['schema']}")

# %% Train, and keep the checkpoint that is best on the tenth of the training rows that is set aside
trained = clickfleet.train(
    {
        "data": {"train": "ready/train", "test": "ready/test", "schema": "ready/schema.yaml", "batch_size": 250},
        "model": {"name": "deepfm", "hidden": [64, 32]},
        "train": {"epochs": 3, "patience": 1},
        "run": {"dir": "run"},
    },
    quiet=True,
)
print(f"validation AUC {trained.valid['auc']:.4f}, test AUC {trained.test['auc']:.4f}: {trained.best}")
print(f"curves, calibration, importance of fields: {Path('run/report.html').resolve()}")

# %% Score rows without labels
lines = Path("ready/test").glob("part-*")
rows = [line.split("\t", 1)[1] for line in next(iter(sorted(lines))).read_text().splitlines()[:100]]
Path("rows.tsv").write_text("\n".join(rows) + "\n")
best = clickfleet.load("run/BEST")
print("five scores:", best.predict("rows.tsv")[:5])

# %% The artifact: rows, the network as ONNX, the schema, golden requests
export.export(best.learner, "artifact", step=1)
report = parity.check_parity("run/BEST", None, ["rows.tsv"], artifact=Path("artifact"))
for check in report.checks:
    print("ok  " if check.ok else "DIFF", check.name, "-", check.detail)
assert report.ok
