"""Small streams for tests: days of timed folders whose clicks depend on the ad, and configurations over them."""

from pathlib import Path
from typing import Any

import numpy as np

from clickfleet.data.schema import Dense, Schema, Slot, write_schema

SCHEMA = Schema(
    dense=(Dense("price"),), slots=(Slot("user"), Slot("ad"), Slot("site", multi=True)), label="click", time="time"
)
HEADER = "click,time,price,user,ad,site"
RULE = {"name": "adagrad", "lr": 0.1, "initial_g2sum": 0.3}
START = 1767225600  # 2026-01-01 00:00 UTC


def lines(rows: int, seed: int, start_s: int = START, span_s: int = 3600, users: int = 40) -> list[str]:
    """Ads with an even number are clicked on more often."""
    rng = np.random.default_rng(seed)
    out = []
    for i in range(rows):
        ad, user = int(rng.zipf(1.5)) % 50 + seed % 7, int(rng.integers(users))
        click = int(rng.random() < (0.6 if ad % 2 == 0 else 0.1))
        out.append(
            f"{click},{start_s + i * span_s // max(rows, 1)},{rng.random():.3f},u{user},a{ad},s{ad % 5}|s{user % 3}"
        )
    return out


def write_days(
    folder: Path, days: int = 2, splits: int = 2, rows: int = 60, done: str | None = "_DONE", users: int = 40
) -> Path:
    """<folder>/logs with `splits` folders a day, one file each."""
    for day in range(days):
        for split in range(splits):
            hours, minutes = divmod(split * 1440 // splits, 60)
            where = folder / "logs" / str(20260101 + day) / f"{hours:02}{minutes:02}"
            where.mkdir(parents=True)
            seed = day * splits + split
            start = START + day * 86400 + split * 86400 // splits
            (where / "part-0.csv").write_text("\n".join([HEADER, *lines(rows, seed, start, users=users)]) + "\n")
            if done:
                (where / done).touch()
    return folder / "logs"


def settings(folder: Path, splits: int = 2, **more: Any) -> dict[str, Any]:
    """A configuration over these days, deterministic and small."""
    write_schema(SCHEMA, folder / "schema.yaml")
    config: dict[str, Any] = {
        "data": {"format": "csv", "schema": str(folder / "schema.yaml"), "batch_size": 16, "threads": 0},
        "model": {"name": "deepfm", "hidden": [4]},
        "table": {"dim": 2, "rule": RULE, "decay_rate": 0.9, "delete_threshold": 0.15, "base_threshold": 0.15},
        "train": {"deterministic": True, "threads": 1},
        "run": {"dir": str(folder / "run"), "checkpoint_every": None, "report": False},
        "online": {
            "dir": str(folder / "logs"),
            "start_day": 20260101,
            "end_day": 20260102,
            "split_interval": f"{1440 // splits}min",
            "poll": "20ms",
        },
        "publish": {"guard": {"auc_drop": None, "copc": None}},
    }
    for section, keys in more.items():
        config[section] = {**config.get(section, {}), **keys}
    return config
