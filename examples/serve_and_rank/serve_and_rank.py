# %% [markdown]
# # Serve and rank
#
# Train a model of users and items on rows in memory, start a real server, and send it the requests of a
# recommender.

# %%
import subprocess
import sys

import numpy as np

import clickfleet
from clickfleet.data.schema import Dense, Schema, Slot, Transform
from clickfleet.serve.client import Client
from clickfleet.training import export

# %% The clicks: users prefer items of their own colour, and cheap ones
rng = np.random.default_rng(0)
COLOURS = np.array(["red", "green", "blue"])
user, item, price = rng.integers(0, 200, 12_000), rng.integers(0, 60, 12_000), rng.uniform(1, 100, 12_000)
logit = 3 * (user % 3 == item % 3) - 0.02 * price - 1
frame = {
    "label": (rng.random(12_000) < 1 / (1 + np.exp(-logit))).astype(np.float32),
    "price": price,
    "user": np.char.add("u", user.astype(str)),
    "taste": COLOURS[user % 3],
    "item": np.char.add("i", item.astype(str)),
    "colour": COLOURS[item % 3],
}
scaled = Dense("price", Transform("minmax", 0, 100))
schema = Schema(dense=(scaled,), slots=(Slot("user"), Slot("taste"), Slot("item"), Slot("colour")))

# %% Train, and export an artifact
settings = {
    "model": {"name": "deepfm", "hidden": [32]},
    "table": {"dim": 4},
    "train": {"epochs": 3},
    "data": {"batch_size": 100},
}
trained = clickfleet.train(settings, data=frame, schema=schema, quiet=True)
print(f"training AUC {trained.train['auc']:.4f}")
export.export(trained.learner, "artifact", step=1)

# %% Start a server in its own process; port 0 takes a free port
command = [
    sys.executable,
    "-c",
    "from clickfleet.cli import main; main()",
    "serve",
    "artifact",
    "--port",
    "0",
    "--grpc-port",
    "-1",
]
server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
try:
    url = next(line for line in server.stdout if line.startswith("ready:")).split()[1]
    with Client(url) as client:
        # %% One row
        print("score:", client.predict([{"user": "u3", "taste": "red", "item": "i9", "colour": "red", "price": 20}]))

        # %% One user, sixty candidates: the user's features are sent once; i9 was shown already
        candidates = [
            {"id": f"i{n}", "item": f"i{n}", "colour": COLOURS[n % 3].item(), "price": 10 + n} for n in range(60)
        ]
        ranked = client.rank(candidates, user={"user": "u3", "taste": "red"}, top_k=5, exclude=["i9"])
        for place in ranked["ranked"]:
            print(place)

        # %% The best items have the user's colour
        best = [int(place["id"][1:]) for place in ranked["ranked"]]
        assert sum(n % 3 == 0 for n in best) >= 4
finally:
    server.terminate()
    server.communicate()
