# %% [markdown]
# # The classic CTR-DNN
#
# Criteo's log as the PaddleRec tutorials read it (ids by hash modulo 1000001, min-max counts), and an MLP over rows of
# width ten. It trains first in one process, then on two workers and two shards. To use the real log, run
# `clickfleet fetch criteo` and replace `log/train` by `criteo/train_data`.

# %%
import clickfleet
from clickfleet.data.logs.synth import SynthOptions, synth

made = synth("log", SynthOptions(rows=20_000, test_rows=4_000, parts=4, seed=1))
print(f"{made['rows']:,} rows, click rate {made['ctr']:.3f}, best possible AUC {made['best_auc']:.3f}")

# %% [markdown]
# The recipe. `clickfleet recipes ctr_dnn` shows the exact settings of the original, which take several epochs to learn. These
# settings learn faster.

# %%
CONFIG = {
    "data": {"train": "log/train", "test": "log/test", "preset": "criteo-paddle", "batch_size": 250},
    "model": {"name": "dnn", "hidden": [64, 64, 64]},
    "table": {"dim": 10},
    "run": {"checkpoint_every": None},
}

# %% In one process
local = clickfleet.train(CONFIG, "run.dir=local", quiet=True)
print(f"local    {local.rows_per_s:9,.0f} rows/s   test AUC {local.test['auc']:.4f}")

# %% Two workers train, two shards hold the rows; the run starts Ray and stops it at the end
settings = [
    "mode.name=half_async",
    "cluster.workers=2",
    "cluster.shards=2",
    "cluster.start_timeout=4min",
    "run.dir=two-by-two",
]
cluster = clickfleet.train(CONFIG, *settings, quiet=True)
print(f"cluster  {cluster.rows_per_s:9,.0f} rows/s   test AUC {cluster.test['auc']:.4f}")

# %% The result is an ordinary model: one process loads it
model = clickfleet.load("two-by-two")
scores = model.predict("log/test")
print(f"{len(scores):,} scores, mean {scores.mean():.4f}")
assert abs(local.test["auc"] - cluster.test["auc"]) < 0.05
