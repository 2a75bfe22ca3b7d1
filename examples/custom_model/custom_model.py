# %% [markdown]
# # A model of your own
#
# `two_towers.py` beside this file holds one class derived from `Model`: only mathematics, no files, devices or
# optimizers. Its settings are the fields of its `Config`, checked like all others. It trains, resumes, exports and
# serves like the models that come with the package.

# %%
from pathlib import Path

import clickfleet
from clickfleet import exporting
from clickfleet.errors import ConfigError
from clickfleet.logs.synth import Options, synth

synth("log", Options(rows=5_000, test_rows=1_000, seed=4))
MODEL = str(Path(__file__).parent / "two_towers.py")
DATA = {"train": "log/train", "test": "log/test", "batch_size": 100}

# %% Train it with settings of its own
model = {"name": MODEL, "left": ["C1", "C2", "C3"], "hidden": 16}
trained = clickfleet.train({"data": DATA, "model": model, "run": {"dir": "mine"}}, quiet=True)
print(f"two towers: test AUC {trained.test['auc']:.4f}")

# %% Beside a model of the house
house = clickfleet.train({"data": DATA, "model": "lr", "run": {"dir": "house"}}, quiet=True)
print(f"lr:         test AUC {house.test['auc']:.4f}")

# %% A mistyped setting is refused by name
try:
    clickfleet.train({"data": DATA, "model": {"name": MODEL, "hiden": 16}}, quiet=True)
except ConfigError as error:
    print("refused:", error)

# %% It is loaded and exported like any other
again = clickfleet.load("mine", trust=True)  # it names a Python file: ours
print("scores:", again.predict("log/test")[:3])
entry = exporting.export(again.learner, "artifact", step=1)
print(f"artifact with {entry.manifest['rows']:,} rows")
