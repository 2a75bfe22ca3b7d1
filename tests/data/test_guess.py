"""The role of every column, by name, type and values; and what only the user can decide."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

from clickfleet import _core
from clickfleet.config.plugins import Plugin
from clickfleet.data.guess import ColumnGuess, guess
from clickfleet.data.memory import Feed
from clickfleet.data.reader import Reader
from clickfleet.data.schema import Schema, Slot, read_schema
from clickfleet.errors import ConfigError

N = 2000
RNG = np.random.default_rng(3)
CLICKS = RNG.integers(0, 2, N)


def role_of(values: Any, name: str = "x", **options: Any) -> ColumnGuess:
    frame = {"clicked": CLICKS[: len(values)], "other": np.arange(len(values)) % 7, name: values}
    return next(column for column in guess(frame, **options).columns if column.name == name)


IDS = RNG.permutation(np.repeat(RNG.choice(5000, 400, replace=False), 5))

ROLES: dict[str, tuple[str, Any, str]] = {
    "text": ("x", [f"v{i % 50}" for i in range(N)], "slot"),
    "few integers": ("x", np.arange(N) % 30, "slot"),
    "ids by name": ("item_id", IDS, "slot"),
    "ids by camel case": ("adId", IDS, "slot"),
    "ids by their shape": ("x", IDS, "slot"),
    "hashes": ("x", RNG.choice(RNG.integers(2**40, 2**62, 300), N), "slot"),
    "leading zeros": ("x", [f"{i % 99:05d}" for i in range(N)], "slot"),
    "counts": ("x", RNG.geometric(0.02, N), "dense"),
    "ages": ("x", np.clip(RNG.normal(40, 12, N), 18, 90).astype(int), "dense"),
    "amounts by name": ("item_count", IDS, "dense"),
    "fractions": ("x", RNG.normal(size=N), "dense"),
    "booleans": ("x", np.arange(N) % 3 == 0, "slot"),
    "numbers as text": ("x", [f"{value:.3f}" for value in RNG.normal(size=N)], "dense"),
    "lists": ("x", [["a", "b"], ["c"]] * (N // 2), "list"),
    "users": ("user_id", np.arange(N) % 300, "user"),
    "times": ("event_time", 1_700_000_000 + np.arange(N), "time"),
    "milliseconds": ("ts", 1_700_000_000_000 + np.arange(N), "time"),
    "hours as YYMMDDHH": ("hour", np.repeat([14102100, 14102101, 14102223, 14103000], N // 4), "time"),
    "days as YYYYMMDD": ("date", np.repeat([20260131, 20260201], N // 2), "time"),
    "hours of a day": ("hour", np.arange(N) % 24, "slot"),
    "a duration": ("time", RNG.geometric(0.01, N), "dense"),
    "ISO": ("when", [f"2026-01-{1 + i % 28:02d} 10:00:00" for i in range(N)], "time"),
    "timestamps": ("x", np.datetime64("2026-01-01T00:00:00") + np.arange(N), "time"),
    "unique": ("x", [f"row{i}" for i in range(N)], "ignored"),
    "unique numbers": ("id", np.arange(N), "ignored"),
    "constant": ("x", ["same"] * N, "ignored"),
    "missing": ("x", [None] * N, "ignored"),
    "the label again": ("x", np.where(CLICKS == 1, "yes", "no"), "ignored"),
    "prose": ("x", [f"a long text about {i} and {i * 7} of them" for i in range(N - 9)] + ["the same words again"] * 9, "ignored"),
    "nested": ("x", [{"a": 1}] * N, "ignored"),
}  # fmt: skip


@pytest.mark.parametrize("name", ROLES)
def test_roles(name: str) -> None:
    column, values, role = ROLES[name]
    data = pa.table({"clicked": CLICKS, "other": np.arange(N) % 7, column: pa.array(values)})
    found = next(one for one in guess(data).columns if one.name == column)
    assert found.role == role, found.why
    assert found.why


def test_every_kind_of_frame_gives_the_same() -> None:
    columns = {
        "clicked": CLICKS,
        "user": [f"u{i % 40}" for i in range(N)],
        "price": np.where(np.arange(N) % 9 == 0, np.nan, RNG.lognormal(2, 1, N)),
        "tags": [["a"], ["b", "c"]] * (N // 2),
        "thing": np.arange(N) % 60,
    }
    frames = [pd.DataFrame(columns), pl.DataFrame(columns), pa.table(pd.DataFrame(columns))]
    schemas = [guess(frame).schema for frame in frames]
    assert schemas[0] == schemas[1] == schemas[2]
    plain = {name: columns[name] for name in ("clicked", "user", "price", "thing")}
    assert guess(plain).schema.dense == schemas[0].dense
    assert schemas[0].group == "user"
    assert [slot.name for slot in schemas[0].slots] == ["user", "tags", "thing", "price_bucket"]


def test_a_number_is_scaled_and_bucketed() -> None:
    counts = RNG.geometric(0.01, N).astype(float)
    counts[:100] = np.nan
    prices = RNG.normal(50, 10, N)
    schema = guess({"clicked": CLICKS, "visits": counts, "price": prices}).schema
    visits, price = schema.dense
    assert (str(visits.transform), visits.missing) == ("log1p", -1.0)
    assert price.transform.name == "standard"
    assert (price.transform.a, price.transform.b) == pytest.approx((prices.mean(), prices.std()), rel=1e-5)
    batch = next(iter(Feed({"clicked": CLICKS, "visits": counts, "price": prices}, schema, N)))
    buckets = batch.keys.reshape(N, 2)
    sizes = np.unique(buckets[:, 1], return_counts=True)[1]
    assert len(sizes) == min(CLICKS.sum(), N - CLICKS.sum()) // 100  # one for every 100 rows of the rarer label
    assert sizes.min() > 150
    assert len(set(buckets[:100, 0].tolist())) == 1  # a missing value has its own bucket
    assert not set(buckets[:100, 0].tolist()) & set(buckets[100:, 0].tolist())


@pytest.mark.parametrize(
    ("columns", "label"),
    [
        (["clicked", "x"], "clicked"),
        (["x", "Label"], "Label"),
        (["x", "isClick"], "isClick"),
        (["x", "conversion"], "conversion"),
        (["click", "conversion"], "click"),
        (["x", "z", "label:float"], "label:float"),
    ],
)
def test_the_label_by_name(columns: list[str], label: str) -> None:
    data = {name: CLICKS if i % 2 else 1 - CLICKS for i, name in enumerate(columns)}
    data["feature"] = np.arange(N) % 9
    data["flag"] = (np.arange(N) % 5 == 0).astype(int)
    assert guess(data).schema.label == label


def test_the_only_binary_column_is_the_label() -> None:
    data = {"feature": np.arange(N) % 9, "z": CLICKS}
    assert guess(data).schema.label == "z"


def test_what_cannot_be_decided_is_asked(tmp_path: Path) -> None:
    data = {"feature": np.arange(N) % 9, "z": CLICKS, "w": np.arange(N) % 2}
    with pytest.raises(ConfigError, match=r"which column is the label\? candidates: z, w"):
        guess(data)
    assert guess(data, label="w").schema.label == "w"
    with pytest.raises(ConfigError, match=r"candidates: click, label"):
        guess({"feature": np.arange(N) % 9, "click": CLICKS, "label": np.arange(N) % 2})
    with pytest.raises(ConfigError, match=r"No column has the values 0 and 1.*the columns are a, b"):
        guess({"a": np.arange(N) % 9, "b": np.arange(N) % 5})
    with pytest.raises(ConfigError, match=r"there is no column 'clik' for the label; did you mean click"):
        guess({"click": CLICKS, "a": np.arange(N) % 3}, label="clik")
    (tmp_path / "a.txt").write_text("".join(f"{i % 2} x{i % 3} {i % 2}\n" for i in range(50)))
    assert guess(tmp_path / "a.txt").schema.label == "c1"  # without a header, the first column


LABELS: dict[str, tuple[Any, int | str]] = {
    "0 and 1": ([0, 1], 0),
    "fractions": ([0.0, 1.0], 0),
    "booleans": ([False, True], 0),
    "-1 and 1": ([-1, 1], -1),
    "all negative": ([-1, -1], -1),
    "all 0": ([0, 0], 0),
    "both": ([-1, 0, 1], "-1, 0, 1"),
    "1 and 2": ([1, 2], "1, 2"),
    "ratings": ([1, 2, 3, 4, 5], "1, 2, 3, 4, 5"),
    "words": (["no", "yes"], "no, yes"),
    "true": (["true", "false"], "true, false"),
}


@pytest.mark.parametrize("name", LABELS)
def test_labels(name: str) -> None:
    values, meaning = LABELS[name]
    data = pd.DataFrame({"label": (values * N)[:N], "a": np.arange(N) % 9})
    if isinstance(meaning, str):
        with pytest.raises(
            ConfigError, match=f"the label 'label' has the values {meaning}; expected 0 and 1, or -1 and 1"
        ):
            guess(data)
        return
    found = guess(data)
    assert found.schema.negative == meaning
    assert ("labels -1 and 1 are read as 0 and 1" in found.text()) == bool(meaning)


def test_a_schema_file_to_edit(tmp_path: Path) -> None:
    data = {"clicked": CLICKS, "id": np.arange(N), "x": RNG.normal(size=N), "größe": [f"{i % 3}é" for i in range(N)]}
    found = guess(data)
    found.write(tmp_path / "sub" / "schema.yaml")
    assert read_schema(tmp_path / "sub" / "schema.yaml") == found.schema
    assert "# ignored: id (every row has its own value)" in (tmp_path / "sub" / "schema.yaml").read_text()
    assert found.to_dict()["columns"][1]["role"] == "ignored"


def test_ids_with_gaps_are_ids() -> None:
    """pandas stores integers with missing values as floats; they have the keys of the integers in a file."""
    schema = Schema(slots=(Slot("a"), Slot("m", multi=True)), group="a")
    frame = pd.DataFrame({"label": [0, 1, 1], "a": [123.0, np.nan, 7.0], "m": [[1.0, 2.0], [np.nan], None]})
    (batch,) = list(Feed(frame, schema, 10))
    assert batch.keys[[0, 3, 4]].tolist() == [
        _core.hash64("a", b"123"),
        _core.hash64("a", b""),
        _core.hash64("a", b"7"),
    ]
    assert batch.groups.tolist() == batch.keys[[0, 3, 4]].tolist()
    (mixed,) = list(Feed({"label": [0, 1], "a": np.array(["x", np.nan], object)}, Schema(slots=(Slot("a"),)), 10))
    assert mixed.keys.tolist() == [_core.hash64("a", b"x"), _core.hash64("a", b"")]
    assert guess(pd.DataFrame({"label": [0, 1] * 30, "item_id": [5.0, np.nan, 6.0] * 20})).schema.slots == (
        Slot("item_id"),
    )


def test_typed_headers_of_recbole(tmp_path: Path) -> None:
    lines = [f"{i % 2}\t{i % 50}\t{i % 40}\tComedy Drama{i % 3}\t{881250949 + i}\n" for i in range(300)]
    header = "label:float\tuser_id:token\tage:token\tgenre:token_seq\ttimestamp:float\n"
    (tmp_path / "x.inter").write_text(header + "".join(lines))
    found = guess(tmp_path / "x.inter")
    assert {column.name: column.role for column in found.columns} == {
        "label:float": "label", "user_id:token": "user", "age:token": "slot", "genre:token_seq": "list", "timestamp:float": "time",
    }  # fmt: skip
    assert found.format == Plugin("csv", {"separator": "tab", "list_separator": "space"})
    batch = next(iter(Reader(tmp_path / "x.inter", found.schema, found.format, 400)))
    assert len(batch) == 300


def test_words_for_missing_numbers(tmp_path: Path) -> None:
    words = ["NA", "null", "None", "\\N", "?", "nan", "", "N/A"]
    lines = [f"{i % 2},{words[i // 2 % 8] if i % 3 == 0 else i + 0.5},x{i % 4}\n" for i in range(200)]
    (tmp_path / "a.csv").write_text("clicked,price,site\n" + "".join(lines))
    found = guess(tmp_path / "a.csv")
    assert [(column.name, column.role) for column in found.columns][1] == ("price", "dense")
    batch = next(iter(Reader(tmp_path / "a.csv", found.schema, found.format, 400)))
    assert (batch.dense[::3, 0] == found.schema.dense[0].missing).all()


def test_times_are_seconds_of_utc_in_text_and_tables(tmp_path: Path) -> None:
    texts = [
        "2026-01-31",
        "2026-01-31 10:20",
        "2026-01-31T10:20:30Z",
        "2026-01-31T10:20:30.75+02:00",
        "1700000000",
        "1700000000.9",
    ]
    seconds = [1769817600, 1769854800, 1769854830, 1769847630, 1700000000, 1700000000]
    schema = Schema(slots=(Slot("a"),), time="t")
    (tmp_path / "a.csv").write_text("label,a,t\n" + "".join(f"1,x,{text}\n" for text in texts))
    (batch,) = list(Reader(tmp_path / "a.csv", schema, "csv", 10))
    assert batch.times.tolist() == seconds
    (batch,) = list(Feed({"label": [1] * 6, "a": ["x"] * 6, "t": texts}, schema, 10))
    assert batch.times.tolist() == seconds
    for text in ("2026-13-01", "2026-01-31x", "01/02/2026", "2026-01-31T25:00", "soon"):
        (tmp_path / "a.csv").write_text(f"label,a,t\n1,x,{text}\n")
        with pytest.raises(Exception, match="is not a time"):
            list(Reader(tmp_path / "a.csv", schema, "csv", 10))


def past_frame(n: int = 400) -> dict[str, Any]:
    rng = np.random.default_rng(5)
    click = rng.integers(0, 2, n)
    lengths = rng.integers(0, 5, n)
    return {
        "click": click,
        "buy": click * rng.integers(0, 2, n),
        "item_id": rng.integers(0, 90, n),
        "category": rng.integers(0, 9, n),
        "hist_item_ids": [rng.integers(0, 90, k).tolist() for k in lengths],
        "hist_categories": [rng.integers(0, 9, k).tolist() for k in lengths],
        "recent_item_id": [rng.integers(0, 90, 3).tolist() for _ in range(n)],
        "tags": [rng.integers(0, 9, 2).tolist() for _ in range(n)],
    }


def test_lists_of_past_values_are_histories(tmp_path: Path) -> None:
    frame = past_frame()
    texts = {name: ["|".join(map(str, v)) if isinstance(v, list) else v for v in frame[name]] for name in frame}
    pd.DataFrame(texts).to_csv(tmp_path / "a.csv", index=False)
    for data in (frame, [tmp_path / "a.csv"]):
        found = guess(data)
        assert [slot.name for slot in found.schema.slots] == ["item_id", "category", "tags"]
        assert [(one.name, one.slots, one.columns) for one in found.schema.histories] == [
            ("hist", ("item_id", "category"), ("hist_item_ids", "hist_categories")),
            ("recent", ("item_id",), ("recent_item_id",)),
        ]
        roles = {column.name: column.role for column in found.columns}
        assert (roles["hist_item_ids"], roles["tags"]) == ("history", "list")
    unequal = guess({**frame, "hist_categories": [[1, 2]] * len(frame["click"])})
    assert [one.slots for one in unequal.schema.histories] == [("item_id",), ("category",), ("item_id",)]


def test_what_follows_a_click_is_a_label() -> None:
    found = guess(past_frame())
    assert [(task.name, task.given) for task in found.schema.tasks] == [("click", ""), ("buy", "click")]
    assert any("buy is 1 only where click is 1" in note for note in found.notes)
    frame = past_frame()
    other = guess({**frame, "buy": np.roll(frame["click"], 1)})  # not only after a click: a feature
    assert len(other.schema.tasks) == 1
    assert "buy" in [slot.name for slot in other.schema.slots]
