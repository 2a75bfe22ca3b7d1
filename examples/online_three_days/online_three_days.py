# %% [markdown]
# # Three days of online learning
#
# A log in timed folders that drifts: ids disappear, and effects change. Each pass is scored before it is trained on,
# then a delta is published. At the end of a day old rows are deleted and a base is published. Run the program again to
# continue where it stopped.

# %%
import json
from pathlib import Path

from clickfleet.data.logs.synth import SynthOptions, synth
from clickfleet.online.learn import learn
from clickfleet.online.manual import publish
from clickfleet.store.published import Log

synth("log", SynthOptions(rows=18_000, test_rows=0, days=3, split_interval_min=480, drift=0.2, seed=2))

# %% Three passes of eight hours a day
CONFIG = {
    "model": "lr",
    "table": {"dim": 4, "preset": "online", "memory_limit": "64MiB"},
    "data": {"batch_size": 250},
    "online": {"dir": "log", "start_day": 20260101, "end_day": 20260102, "split_interval": "8h"},
    "publish": {"guard": {"copc": None, "auc_drop": None}},
    "run": {"dir": "live"},
}
two_days = learn(CONFIG, quiet=True)
print(f"{two_days.passes} passes, {two_days.rows:,} rows, last entry {two_days.last_sequence}")

# %% The third day arrives: continue the same run
three_days = learn(CONFIG, "online.end_day=20260103", quiet=True)
print(f"{three_days.passes} passes, {three_days.rows:,} new rows, last entry {three_days.last_sequence}")

# %% How well each pass was predicted before training on it
for line in map(json.loads, Path("live/metrics.jsonl").read_text().splitlines()):
    if line["kind"] == "pass":
        print(f"{line['day']} pass {line['pass']}: AUC {line['auc']:.4f}, COPC {line['calibration']:.3f}")

# %% The published log, as servers see it
for entry in Log("live/published").lines():
    print(f"{entry.sequence:3} {entry.kind:5} {entry.name}")

# %% Something went wrong downstream: roll consumers back to an earlier entry
back = publish(Path("live"), None, rollback=three_days.last_sequence - 1)
print(f"entry {back['entry']}: {back['rows']:,} rows, {back['deleted']:,} deleted")
assert three_days.passes == 9
