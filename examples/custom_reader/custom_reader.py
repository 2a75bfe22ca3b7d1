# %% [markdown]
# # A reader of your own
#
# A custom log format, read by a generator class as in PaddleRec (`pairs_reader.py` beside this file). The class runs
# inside clickfleet, or as a command in a pipe. A line that it cannot read is a bad line like any other: it stops the
# run, is counted, or is quarantined.

# %%
import random
import sys
from pathlib import Path

import clickfleet
from clickfleet import Reader
from clickfleet.data.schema import Dense, Schema, Slot, write_schema

# %% The log: ann clicks items with tag a, eve clicks cheap items
random.seed(1)
lines = []
for _ in range(6000):
    user, price = random.choice(["ann", "bob", "eve"]), round(random.uniform(1, 9), 1)
    tags = random.sample("abcd", random.randint(1, 3))
    likes = {"ann": 0.8 * ("a" in tags), "bob": 0.1, "eve": 0.9 * (price < 4)}[user]
    clicked = int(random.random() < likes)
    lines.append(f"2026-01-01 clicked={clicked} user={user} tags={','.join(tags)} price={price}")
Path("log.txt").write_text("\n".join(lines) + "\n")

# %% The schema: what the columns mean
schema = Schema(dense=(Dense("price"),), slots=(Slot("user"), Slot("tags", multi=True))).with_keys("raw")
write_schema(schema, "schema.yaml")
READER = str(Path(__file__).parent / "pairs_reader.py")

# %% The same batches inside clickfleet and through a pipe
inside = next(iter(Reader("log.txt", schema, format=READER, batch_size=1000)))
pipe = {"name": "pipe", "command": f"{sys.executable} {READER}"}
piped = next(iter(Reader("log.txt", schema, format=pipe, batch_size=1000)))
assert (inside.keys == piped.keys).all()
assert (inside.labels == piped.labels).all()

# %% Train on it
data = {"train": "log.txt", "test": "log.txt", "format": READER, "schema": "schema.yaml", "batch_size": 100}
config = {"data": data, "model": "fm", "table": {"dim": 4}, "train": {"epochs": 3}, "run": {"dir": "run"}}
trained = clickfleet.train(config, quiet=True)
print(f"AUC {trained.test['auc']:.4f}")
assert trained.test["auc"] > 0.75

# %% A line that cannot be read
Path("bad.txt").write_text(lines[0] + "\n2026-01-01 oh\n" + "\n".join(lines[:50]) + "\n")
reader = Reader("bad.txt", schema, format=READER, bad_lines="skip")
print(sum(len(batch) for batch in reader), "rows;", reader.counters.examples)
