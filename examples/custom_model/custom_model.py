# %% [markdown]
# # A model of your own
#
# `two_towers.py` beside this file holds one class derived from `Model`: only mathematics, no files, devices or
# optimizers. Its settings are the fields of its `Config`, checked like all others. It trains, resumes, exports and
# serves like the models of the package.

# %%
from pathlib import Path

import clickfleet
from clickfleet.data.logs.synth import SynthOptions, synth
from clickfleet.errors import ConfigError
from clickfleet.training import export

synth("log", SynthOptions(rows=5_000, test_rows=1_000, seed=4))
MODEL = str(Path(__file__).parent / "two_towers.py")
DATA = {"train": "log/train", "test": "log/test", "batch_size": 100}

# %% Train it with its own settings
model = {"name": MODEL, "left": ["C1", "C2", "C3"], "hidden": 16}
trained = clickfleet.train({"data": DATA, "model": model, "run": {"dir": "mine"}}, quiet=True)
print(f"two towers: test AUC {trained.test['auc']:.4f}")

# %% Compare it with a model of the package
house = clickfleet.train({"data": DATA, "model": "lr", "run": {"dir": "house"}}, quiet=True)
print(f"lr:         test AUC {house.test['auc']:.4f}")

# %% A misspelt setting is rejected by name
try:
    clickfleet.train({"data": DATA, "model": {"name": MODEL, "hiden": 16}}, quiet=True)
except ConfigError as error:
    print("refused:", error)

# %% Load and export it like any other model
again = clickfleet.load("mine", trust=True)  # allows the Python file that the run folder names
print("scores:", again.predict("log/test")[:3])
entry = export.export(again.learner, "artifact", step=1)
print(f"artifact with {entry.manifest['rows']:,} rows")
