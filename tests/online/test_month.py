"""Weeks of drifting ids: the memory limit holds and the model stays good. CLICKFLEET_PLOT=FILE also draws it."""

import json
import os

import pytest

from clickfleet.data.logs.synth import SynthOptions, synth
from clickfleet.online.learn import learn
from clickfleet.online.replay import draw_days
from soak import SOAK

DAYS, ROWS_A_DAY, LIMIT = 30, 20_000, 24_000_000


@pytest.mark.skipif(not SOAK, reason="a minute long: runs in make soak")
def test_memory_and_auc_over_the_days(tmp_path):
    synth(
        tmp_path / "log",
        SynthOptions(rows=DAYS * ROWS_A_DAY, test_rows=0, days=DAYS, split_interval_min=720),
        threads=1,
    )
    config = {
        "model": {"name": "fm"},
        "table": {
            "dim": 8,
            "admission": "score(1)",
            "decay_rate": 0.9,
            "delete_threshold": 0.1,
            "memory_limit": f"{LIMIT}B",
        },
        "train": {"threads": 1},
        "run": {"dir": str(tmp_path / "run"), "checkpoint_every": None, "keep": 1},
        "online": {
            "dir": str(tmp_path / "log"),
            "start_day": 20260101,
            "end_day": 20260100 + DAYS,
            "split_interval": "12h",
            "checkpoint_every_passes": 100,
        },
        "publish": {"guard": {"auc_drop": None, "copc": None}, "keep_chains": 1, "done_files": False},
    }
    done = learn(config, quiet=True)
    stats = done.learner.table.stats()
    assert stats["peak_bytes"] <= LIMIT
    assert stats["evicted"] + stats["shrunk"] > 0
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    days = [line for line in lines if line["kind"] == "day"]
    assert len(days) == DAYS
    assert all(line["table_bytes"] <= LIMIT for line in days)
    aucs = [line["auc"] for line in lines if line["kind"] == "pass"]
    assert min(aucs[len(aucs) // 2 :]) > max(aucs[:1]) - 0.01  # what was learned is not lost again
    if out := os.environ.get("CLICKFLEET_PLOT"):
        draw_days(tmp_path / "run", out)
        print(
            json.dumps(
                {"days": [(d["day"], d["table_rows"], d["table_bytes"], d["evicted"]) for d in days], "aucs": aucs}
            )
        )
