"""Runs keep the values behind frequent keys, and show them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml

import clickfleet
from clickfleet.cli import build
from clickfleet.cli.frame import run as command
from clickfleet.data.schema import Schema, Slot, write_schema
from clickfleet.errors import CheckpointError
from clickfleet.store import run_folder
from clickfleet.training import report
from clickfleet.training.model import load
from clickfleet.training.predict import top_slices
from clickfleet.workbench.explain import explain
from clickfleet.workbench.inspection import describe, look_up

SCHEMA = Schema(slots=(Slot("city"), Slot("user")), label="clicked")
CITIES = ("Zürich", "<b>Bern</b>", "other", "Oslo")


def frame(n: int = 600, cities: tuple[str, ...] = CITIES) -> pd.DataFrame:
    rng = np.random.default_rng(2)
    chosen = [cities[min(int(x), len(cities) - 1)] for x in rng.exponential(1.0, n)]
    return pd.DataFrame(
        {"clicked": rng.integers(0, 2, n), "city": chosen, "user": [f"u{x}" for x in rng.integers(0, 40, n)]}
    )


def settings(folder: Path, **more: Any) -> dict[str, Any]:
    frame().to_csv(folder / "log.csv", index=False)
    write_schema(SCHEMA, folder / "schema.yaml")
    return {
        "model": "lr",
        "data": {
            "train": str(folder / "log.csv"),
            "test": str(folder / "log.csv"),
            "schema": str(folder / "schema.yaml"),
            "format": "csv",
            "batch_size": 100,
        },
        "train": {"metrics": {"slices": "city"}, "threads": 1},
        "run": {"dir": str(folder / "run"), **more},
    }


def test_slices_are_named_and_sorted_by_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = clickfleet.train(settings(tmp_path), quiet=True)
    assert done.test is not None
    counts = frame()["city"].value_counts()
    wanted = {"Zürich": "Zürich", "<b>Bern</b>": "<b>Bern</b>", "Oslo": "Oslo"}
    for found in (done.test["slices"], load(tmp_path / "run").evaluate(str(tmp_path / "log.csv"))["slices"]):
        assert [part["rows"] for part in found.values()] == counts.tolist()
        for name, city in wanted.items():
            assert found[name]["rows"] == counts[city]
            assert run_folder.read_names(done.last, SCHEMA).name("city", found[name]["key"]) == city  # type: ignore[union-attr, arg-type]
        (clash,) = [name for name in found if name.startswith("other (key ")]  # a value that is called like the rest
        assert found[clash]["rows"] == counts["other"]
    assert command(build(), ["evaluate", str(tmp_path / "run"), str(tmp_path / "log.csv"), "--json"]) == 0
    said = capsys.readouterr()
    assert f"slice Zürich: {counts['Zürich']:,} rows, AUC" in said.out + said.err
    assert json.loads(said.out.splitlines()[-1])["slices"]["Oslo"]["key"] == done.test["slices"]["Oslo"]["key"]
    page = report.rebuild(tmp_path / "run").read_text()
    assert "Zürich" in page
    assert "<b>Bern</b>" not in page  # escaped
    assert "&lt;b&gt;Bern" in page


def test_the_data_at_hand_names_what_the_run_has_not_seen(tmp_path: Path) -> None:
    clickfleet.train(settings(tmp_path), quiet=True)
    frame(cities=("Roma", "Zürich")).to_csv(tmp_path / "new.csv", index=False)
    found = load(tmp_path / "run").evaluate(str(tmp_path / "new.csv"))["slices"]
    assert set(found) == {"Roma", "Zürich"}
    facts = explain(tmp_path / "run", str(tmp_path / "new.csv"), line=1)
    assert {part["field"]: part["value"] for part in facts["contributions"]}["city"] in ("Roma", "Zürich")


def test_many_slices_are_summed_up() -> None:
    part = {"rows": 1, "auc": 0.5, "logloss": 0.5, "key": 1}
    slices = {f"v{i}": {**part, "rows": 100 - i, "key": i} for i in range(50)}
    found = top_slices({"slices": slices}, 10)
    assert [name for name, _ in found[:10]] == [f"v{i}" for i in range(10)]
    assert found[10] == ("other (40 values)", {"rows": sum(range(51, 91)), "auc": None, "logloss": 0.5})
    slices["other"] = {**part, "rows": 7, "key": None, "logloss": None}
    assert top_slices({"slices": slices}, 10)[-1][0] == "other (40 values and more)"
    few = dict(list(slices.items())[:3])
    assert [name for name, _ in top_slices({"slices": few}, 10)] == ["v0", "v1", "v2"]
    few["other"] = slices["other"]
    assert top_slices({"slices": few}, 10)[-1][0] == "other (beyond the first 3 values)"
    assert top_slices({}) == []


def test_inspect_shows_the_value_of_a_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    clickfleet.train(settings(tmp_path), quiet=True)
    top = describe(tmp_path / "run")["top_rows"]
    assert top[0]["value"] == "Zürich"
    assert [row["show"] for row in top] == sorted((row["show"] for row in top), reverse=True)
    assert look_up(tmp_path / "run", top[0]["key"])["value"] == "Zürich"
    assert command(build(), ["inspect", str(tmp_path / "run"), "--slot", "city", "--value", "Zürich"]) == 0
    assert "slot city = Zürich" in capsys.readouterr().out
    assert command(build(), ["export", str(tmp_path / "run"), str(tmp_path / "artifact")]) == 0
    capsys.readouterr()
    assert describe(tmp_path / "artifact")["top_rows"][0]["value"] in {*CITIES, *(f"u{i}" for i in range(40))}


def test_names_can_be_turned_off(tmp_path: Path) -> None:
    done = clickfleet.train(settings(tmp_path, names=False), quiet=True)
    assert not (tmp_path / "run/names.json").exists()
    assert done.test is not None
    assert all(name == str(part["key"]) for name, part in done.test["slices"].items())
    assert all(row["value"] is None for row in describe(tmp_path / "run")["top_rows"])
    for file in (tmp_path / "run").rglob("*"):
        assert not file.is_file() or "Zürich".encode() not in file.read_bytes(), file


def test_damage_is_named_and_does_not_stop_a_resume(tmp_path: Path) -> None:
    config = settings(tmp_path)
    clickfleet.train(config, quiet=True)
    file = tmp_path / "run/names.json"
    whole = file.read_bytes()
    for damage in (whole[:-5], whole.replace(b"Oslo", b"Olso"), b"{}", b""):
        file.write_bytes(damage)
        with pytest.raises(CheckpointError, match=r"names\.json is damaged"):
            describe(tmp_path / "run")
    config["train"]["epochs"] = 2
    clickfleet.train(config, resume=True, quiet=True)
    assert json.loads(file.read_bytes())["values"] == json.loads(whole)["values"]


def test_data_in_memory_has_names_without_a_folder(tmp_path: Path) -> None:
    config = {"model": "lr", "train": {"metrics": {"slices": "city"}, "threads": 1}, "data": {"batch_size": 100}}
    done = clickfleet.train(config, data=frame(), test=frame(), schema=SCHEMA, quiet=True)
    assert done.test is not None
    assert "Zürich" in done.test["slices"]
    (tmp_path / "x.yaml").write_text(yaml.safe_dump(config))
    assert not list(tmp_path.rglob("names.json"))


def test_an_old_run_without_names_shows_keys(tmp_path: Path) -> None:
    clickfleet.train(settings(tmp_path), quiet=True)
    (tmp_path / "run/names.json").unlink()
    assert all(row["value"] is None for row in describe(tmp_path / "run")["top_rows"])
