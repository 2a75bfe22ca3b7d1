# %% [markdown]
# # Histories and several labels from ratings
#
# Ratings with timestamps become a click log with histories: what a user rated before is known when the next film is
# shown. `python movie_histories.py FOLDER` reads MovieLens 100K, as published (`u.data`, `u.item`) or as the files
# `*.inter` and `*.item` of RecBole. Without a folder, it makes a small log of the same shape.

# %%
import random
import sys
from pathlib import Path

import pandas as pd
import pyarrow as pa
from pyarrow import parquet

import clickfleet
from clickfleet.data.schema import History, Label, Schema, Slot, write_schema

GENRES = ["Action", "Comedy", "Drama", "Horror", "Romance", "Thriller"]
EVENTS = 30  # events of a history


# %% A small log: every user likes one genre and the good films, and rates a hundred films in the course of time
def make_ratings(folder: Path, users: int = 120, films: int = 120) -> None:
    random.seed(7)
    genres = {film: random.choice(GENRES) for film in range(1, films + 1)}
    good = {film: random.random() < 0.4 for film in genres}
    ratings = []
    for user in range(1, users + 1):
        liked = random.choice(GENRES)
        for i, film in enumerate(random.sample(sorted(genres), 100)):
            stars = (
                random.choice([4, 5, 5, 4, 2])
                if good[film] or genres[film] == liked
                else random.choice([1, 2, 3, 3, 4])
            )
            ratings.append(f"{user}\t{film}\t{stars}\t{880_000_000 + 3600 * i + random.randint(0, 900)}\n")
    random.shuffle(ratings)
    folder.mkdir(exist_ok=True)
    (folder / "u.data").write_text("".join(ratings))
    flags = {name: [str(int(name == one)) for one in GENRES] for name in GENRES}
    lines = [f"{film}|Film {film}|01-Jan-1995||url|" + "|".join(flags[name]) for film, name in genres.items()]
    (folder / "u.item").write_text("\n".join(lines) + "\n", encoding="latin-1")
    (folder / "u.genre").write_text("".join(f"{name}|{i}\n" for i, name in enumerate(GENRES)))


# %% Read either shape: one row per rating, and the first genre of every film
def read_ratings(folder: Path) -> tuple[pd.DataFrame, dict[int, str]]:
    names = ["user", "item", "rating", "time"]
    if (folder / "u.data").exists():
        ratings = pd.read_csv(folder / "u.data", sep="\t", names=names)
        genres = [line.split("|")[0] for line in (folder / "u.genre").read_text().split("\n") if "|" in line]
        films = [line.split("|") for line in (folder / "u.item").read_text(encoding="latin-1").splitlines()]
        first = {int(film[0]): genres[film[5:].index("1")] for film in films if "1" in film[5:]}
    else:
        (inter,) = folder.glob("*.inter*")
        (items,) = folder.glob("*.item*")
        ratings = pd.read_csv(inter, sep="\t", names=names, header=0)
        table = pd.read_csv(items, sep="\t", quoting=3).rename(columns=lambda name: name.partition(":")[0])
        first = {
            int(item): str(text).partition(" ")[0] for item, text in zip(table["item_id"], table["class"], strict=True)
        }
    return ratings, first


# %% The history of a row is what the user rated before it. Equal timestamps come in the order of the file
def with_histories(ratings: pd.DataFrame, genre: dict[int, str]) -> pa.Table:
    rows = []
    past: dict[int, list[int]] = {}
    for rating in ratings.sort_values("time", kind="stable").itertuples():
        events = past.setdefault(int(rating.user), [])
        like = int(rating.rating >= 4)
        rows.append(
            {
                "like": like,
                "love": int(rating.rating >= 5) if like else None,  # known only of films that are liked
                "rating": float(rating.rating),
                "user": int(rating.user),
                "item": int(rating.item),
                "genre": genre.get(int(rating.item), ""),
                "liked_item": events[-EVENTS:],
                "liked_genre": [genre.get(film, "") for film in events[-EVENTS:]],
                "time": int(rating.time),
            }
        )
        if like:
            events.append(int(rating.item))
    return pa.Table.from_pylist(rows)


# %% The folder that the user names, or the small log
folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path("ratings")
if len(sys.argv) == 1:
    make_ratings(folder)
table = with_histories(*read_ratings(folder))

# %% The newest tenth is the test. The same rows as Parquet and as csv
cut = len(table) * 9 // 10
parquet.write_table(table.slice(0, cut), "train.parquet")
parquet.write_table(table.slice(cut), "test.parquet")
lists = {name: ["|".join(map(str, row)) for row in table[name].to_pylist()] for name in ("liked_item", "liked_genre")}
table.to_pandas().assign(**lists).astype({"love": "Int64"}).to_csv("ratings.csv", index=False)

# %% The schema: an item has one row, whether it is shown or lies in the past
schema = Schema(
    slots=(Slot("user"), Slot("item"), Slot("genre")),
    histories=(History("liked", ("item", "genre"), max=EVENTS),),
    labels=(Label("like"), Label("love", given="like", weight=0.5), Label("rating", loss="mse", weight=0.1)),
    group="user",
    time="time",
)
write_schema(schema, "schema.yaml")

# %% Train a model that reads the history event by event
data = {
    "train": "train.parquet",
    "test": "test.parquet",
    "schema": "schema.yaml",
    "shuffle": "global",
    "batch_size": 100,
}
config = {"data": data, "model": "din", "train": {"epochs": 4}, "run": {"dir": "run"}}
trained = clickfleet.train(config, quiet=True)
for name, task in trained.test["tasks"].items():
    shown = {key: round(task[key], 4) for key in ("auc", "gauc", "auc_given", "rmse") if key in task}
    print(f"{name}: {shown}")
assert trained.test["auc"] > 0.55
