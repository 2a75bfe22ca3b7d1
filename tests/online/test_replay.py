"""Backtests and pictures."""

import json
from xml.etree import ElementTree

import pytest

from clickfleet.cli import build, frame
from clickfleet.config.check import configure
from clickfleet.errors import ConfigError, DataError
from clickfleet.online.replay import draw_days, replay


def test_settings_are_compared_on_the_same_events(stream, tmp_path, graph):
    config = configure(stream(days=2, splits=4, rows=80))
    said = []
    rows = replay(config, tmp_path / "replay", ["1d", "6h"], [0, 3], said.append)
    assert [(row["sync"], row["admit"], row["rows_scored"]) for row in rows] == [
        ("1d", 0, 320), ("1d", 3, 320), ("6h", 0, 320), ("6h", 3, 320),
    ]  # fmt: skip
    assert all(0.4 < row["auc"] < 1 for row in rows)
    assert rows[1]["full_rows"] < rows[0]["full_rows"]
    assert rows[2]["deltas"] > rows[0]["deltas"]
    assert len(said) == 4
    assert json.loads((tmp_path / "replay/replay.json").read_text()) == rows


def test_from_the_command_line(stream, tmp_path, capsys):
    import yaml

    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(stream(days=2, rows=40)))
    assert frame.run(build(), ["replay", str(path), "--sync", "12h", "--out", str(tmp_path / "out"), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert printed["rows"][0]["sync"] == "12h"
    picture = ElementTree.parse(tmp_path / "out/replay.svg").getroot()
    texts = [one.text for one in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert {"AUC", "Million rows", "Deltas, MB", "admit 0", "12h", "published every"} <= set(texts)

    assert frame.run(build(), ["online", str(path), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (printed["passes"], printed["last_sequence"]) == (4, 6)
    run = str(tmp_path / "run")
    assert frame.run(build(), ["shrink", run, "--json"]) == 0
    assert frame.run(build(), ["publish", run, "base", "--to", str(tmp_path / "copy"), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (printed["sequence"], printed["kind"]) == (7, "base")
    assert frame.run(build(), ["publish", run, "--rollback", "6"]) == 0
    assert frame.run(build(), ["publish", run]) == 2
    capsys.readouterr()
    days = ElementTree.parse(draw_days(run, tmp_path / "days.svg")).getroot()
    assert len(days.findall(".//{http://www.w3.org/2000/svg}polyline")) == 3  # rows, bytes, AUC


def test_what_cannot_be_replayed(stream, tmp_path):
    config = stream()
    for sync, message in (("10min", "must be a multiple"), ("2d", "at most a day"), ("soon", "is not an interval")):
        with pytest.raises(ConfigError, match=message):
            replay(configure(config), tmp_path / "out", [sync], [0])
    with pytest.raises(ConfigError, match="needs past logs"):
        replay(configure(config, ["online.end_day=null"]), tmp_path / "out", ["1d"], [0])
    with pytest.raises(DataError, match="cannot read"):
        draw_days(tmp_path, tmp_path / "x.svg")
