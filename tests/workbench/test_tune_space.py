"""A search without a space starts from the automatic settings, tries values around them and says what mattered."""

import json
from pathlib import Path
from typing import Any

import pytest

from clickfleet.cli import build
from clickfleet.cli.frame import run as command
from clickfleet.config.check import configure
from clickfleet.config.load import load
from clickfleet.workbench.tune import check_space, start_values, tune, with_settings, with_space


@pytest.mark.parametrize("model", ["deepfm", "lr", "dcn_v2", "ffm"])
def test_the_space_surrounds_the_automatic_settings(config: dict[str, Any], model: str) -> None:
    said: list[str] = []
    base = configure({"data": {**config["data"], "batch_size": None}, "model": model})
    chosen = with_space(base, said.append)
    check_space(chosen)
    space = chosen.tune.space
    assert {"data.batch_size", "dense.lr", "table.rule.lr", "table.embed_rule.lr"} <= space.keys()
    assert ("model.hidden" in space) == (model in ("deepfm", "dcn_v2"))
    start = start_values(chosen)
    for key, one in space.items():
        if one.choices is None:
            assert one.low < start[key] < one.high, key
        else:
            assert json.loads(start[key]) in list(one.choices), key
    again = with_settings(
        chosen, {key: json.loads(start[key]) if one.choices is not None else start[key] for key, one in space.items()}
    )
    assert (again.data.batch_size, again.table.rule, again.dense) == (
        chosen.data.batch_size,
        chosen.table.rule,
        chosen.dense,
    )
    assert "1,200 rows" in said[0]
    assert said[-1].startswith("no search space given: trying data.batch_size, dense.lr")


def test_it_ends_by_the_clock_and_the_first_trial_has_the_automatic_settings(
    config: dict[str, Any], tmp_path: Path
) -> None:
    said: list[str] = []
    base = {**config, "train": {"epochs": 1}}
    search = tune(base, minutes=0.01, jobs=1, out=tmp_path / "tune", say=said.append)
    assert [row["state"] for row in search.rows][:1] == ["done"]
    assert search.rows[0]["data.batch_size"] == 100
    assert search.best is not None
    best = load(search.config)
    assert best.tune.space == {}
    assert best.data.batch_size == search.best["data.batch_size"]
    assert "0.01 minutes of trials; 1 at a time" in "\n".join(said)


def test_it_says_which_settings_mattered(
    config: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = config["data"]
    arguments = [f"data.train={data['train'][0]}", f"data.valid={data['valid'][0]}", "model=lr", "train.epochs=1"]
    status = command(build(), ["tune", *arguments, "--trials", "5", "--out", str(tmp_path / "tune"), "--json"])
    out, err = capsys.readouterr()
    assert status == 0, err
    shares = json.loads(out.splitlines()[-1])["importances"]
    assert sum(shares.values()) == pytest.approx(1)
    assert "what mattered: " in err
