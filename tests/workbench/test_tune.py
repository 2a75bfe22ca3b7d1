"""A search: what it tries, gives up, keeps and writes; real Optuna, real processes."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from clickfleet.cli import build
from clickfleet.cli.frame import run as command
from clickfleet.config.check import configure
from clickfleet.config.load import load
from clickfleet.config.sections import Dimension
from clickfleet.data.dataset import settle_in
from clickfleet.errors import ConfigError, MissingError
from clickfleet.workbench.runner import RunEnd, RunResult
from clickfleet.workbench.tune import StudyRunner, check_space, distribution, open_study, tune, values, with_settings

SPACE = {
    "dense.lr": {"low": 1e-4, "high": 0.1, "log": True},
    "table.dim": {"low": 2, "high": 6, "step": 2},
    "model.hidden": {"choices": [[8], [4, 4]]},
}


def said(text: str) -> None:
    """Nothing is said."""


@pytest.mark.parametrize(
    ("space", "what"),
    [
        ({"dense.lr": {}}, r"tune.space.dense.lr needs either choices, or low and high"),
        ({"dense.lr": {"low": 0.1, "high": 0.01}}, "low below high"),
        ({"dense.lr": {"low": 0.0, "high": 1.0, "log": True}}, "log needs low above 0"),
        ({"dense.lr": {"low": 0.1, "high": 0.2, "step": 3.0}}, "step must be above 0"),
        ({"dense.optimizer": {"choices": ["adam", "adma"]}}, r"tune.space.dense.optimizer: .*'adam'"),
        ({"dense.rate": {"low": 0.1, "high": 0.2}}, "unknown key dense.rate"),
    ],
)
def test_a_space_that_makes_no_sense_is_refused(config: dict[str, Any], space: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        check_space(configure({**config, "tune": {"space": space}}))


def test_keys_of_the_section_are_strict(config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"unknown key tune.space.dense.lr.lo; did you mean low\?"):
        configure({**config, "tune": {"space": {"dense.lr": {"lo": 1.0}}}})
    with pytest.raises(ConfigError, match=r"unknown key tune.trails; did you mean trials\?"):
        configure({**config, "tune": {"trails": 3}})


def test_what_is_tried_becomes_settings(config: dict[str, Any]) -> None:
    space = configure({**config, "tune": {"space": SPACE}}).tune.space
    assert [type(distribution(one)).__name__ for one in space.values()] == [
        "FloatDistribution",
        "IntDistribution",
        "CategoricalDistribution",
    ]
    assert type(distribution(Dimension(1.0, 2.0))).__name__ == "FloatDistribution"
    found = values(space, {"dense.lr": 0.01, "table.dim": 4, "model.hidden": "[4, 4]"})
    made = with_settings(configure(config), found)
    assert (made.dense.lr, made.table.dim, made.model.settings["hidden"]) == (0.01, 4, [4, 4])


@pytest.mark.parametrize("share", [None, 0.05])
def test_too_few_rows_to_validate_are_refused_before_the_first_trial(
    tmp_path: Path, share: float | None, write: Callable[..., Path]
) -> None:
    rows = "".join(f"{i % 2},u{i % 9},i{i % 7}\n" for i in range(200))
    data: dict[str, Any] = {name: str(write(f"{name}.csv", "click,user,item\n" + rows)) for name in ("train", "test")}
    with pytest.raises(ConfigError, match=r"a search needs validation data; no validation: \d+% of the rows") as caught:
        tune({"data": {**data, "valid_share": share}}, out=tmp_path / "out", say=said)
    assert "set data.valid, or a larger data.valid_share" in str(caught.value)
    assert not (tmp_path / "out/trials").exists()
    with pytest.raises(ConfigError, match="a search needs validation data"):
        tune({"data": {**data, "valid_share": 0}}, out=tmp_path / "out", say=said)


def test_without_optuna_the_message_says_how_to_get_it(
    config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(MissingError, match=r'pip install "clickfleet\[tune\]"'):
        open_study(configure({**config, "tune": {"space": SPACE}}), tmp_path)


def test_a_search_goes_on_and_its_best_can_be_trained(
    config: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], browser: Any
) -> None:
    out = tmp_path / "out"
    tune = {"space": SPACE, "warmup_trials": 2, "trials": 5}
    train = {**config["train"], "eval_every": 3, "epochs": 2}
    (tmp_path / "t.yaml").write_text(yaml.safe_dump({**config, "train": train, "tune": tune}))
    argv = ["tune", str(tmp_path / "t.yaml"), "--out", str(out), "--json"]
    assert command(build(), [*argv, "--trials", "3", "--jobs", "1"]) == 0
    first = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [row["trial"] for row in first["rows"]] == [0, 1, 2]

    # A search that was killed left a trial running: it is taken up, in its own folder, with its own values.
    settings = settle_in(load(tmp_path / "t.yaml"), out, said)
    search = StudyRunner(open_study(settings, out), settings, out, 1, said)
    left = search.ask()
    asked = left.config.dense.lr
    assert command(build(), [*argv, "--jobs", "2"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert len(found["rows"]) == 5
    again = next(row for row in found["rows"] if row["folder"] == left.name)
    assert again["trial"] != int(left.name.removeprefix("trial-"))
    assert again["dense.lr"] == asked
    done = [row for row in found["rows"] if row["state"] == "done"]
    assert found["best"]["value"] == max(row["value"] for row in done)

    best = load(found["config"])
    assert best.dense.lr == found["best"]["dense.lr"]
    assert not best.tune.space
    kept = [path.parent.name for path in out.glob("trials/*/checkpoints")]
    assert kept == [found["best"]["folder"]]  # only the best keeps its checkpoints
    page = browser.new_page()
    page.goto((out / "tune.html").as_uri())
    heads = [one.inner_text() for one in page.query_selector_all("h2")]
    assert [head for head in heads if head != "Importance"] == [
        "History",
        "Settings",
        "Trials",
        "Environment",
        "Best configuration",
    ]
    assert len(page.query_selector_all("svg")) == 4  # the history, and a slice per setting
    page.close()
    with pytest.raises(ConfigError, match="holds a search with other settings"):
        open_study(configure({**config, "table": {"dim": 3}, "tune": tune}), out)


def test_bad_trials_are_given_up_early(config: dict[str, Any], tmp_path: Path) -> None:
    """The pruner decides by what runs write down as they go."""
    how = {"space": {"dense.lr": {"choices": [0.01, 0.02]}}, "warmup_trials": 0, "pruner": "median"}
    settings = configure({**config, "tune": how})
    search = StudyRunner(open_study(settings, tmp_path), settings, tmp_path, 1, said)
    for aucs in ((0.7, 0.71), (0.72, 0.73), (0.5, 0.5)):
        order = search.ask()
        order.folder.mkdir(parents=True)
        (order.folder / "metrics.jsonl").write_text(
            "".join(json.dumps({"kind": "valid", "step": i, "auc": auc}) + "\n" for i, auc in enumerate(aucs))
        )
        stopped: list[Any] = []
        search.report(order.name, stopped.append)
        assert bool(stopped) == (aucs[0] == 0.5)
        result = RunResult(0.5, 0.7, aucs[1], aucs[1], 0.5, None, None, 1e3, 10, 5, 5, 1.0, 100, False, None)
        search.record(order, RunEnd(stopped=15) if stopped else RunEnd(result))
    assert [row["state"] for row in search.rows()] == ["done", "done", "given up"]
