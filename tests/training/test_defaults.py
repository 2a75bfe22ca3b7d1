from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml

import clickfleet
from clickfleet.config.load import Config, dump, load
from clickfleet.config.sections import FIRST_ORDER_RULE, ROW_RULE, AutoFloat, AutoInt
from clickfleet.data.facts import LogFacts
from clickfleet.data.schema import Dense, Schema, Slot
from clickfleet.training.defaults import LARGE_ROWS, SMALL_ROWS, AutoSettings, auto_settings, choose, settings_for
from clickfleet.training.modes import with_shared_error
from clickfleet.training.run import settled

pytestmark = pytest.mark.usefixtures("small_logs")
SCHEMA = Schema(dense=(Dense("x"),), slots=(Slot("a"), Slot("b")))


def facts(rows: int, slots: int = 26) -> LogFacts:
    return LogFacts(rows, True, 13, slots, positives=0.25, ids=rows // 2, shows_per_id=2.0 * slots)


def chosen(rows: int, *overrides: str, slots: int = 26, can_stop: bool = True) -> Config:
    return settled(auto_settings(load(None, overrides), facts(rows, slots), can_stop).config)


def usual(*overrides: str) -> Config:
    """The settings before there was a choice."""
    fixed = ["data.batch_size=1000", "data.shuffle=0", "train.epochs=1", "dense.lr=0.001", *overrides]
    return with_shared_error(load(None, fixed))


def test_large_logs_keep_the_usual_settings_exactly() -> None:
    for rows in (LARGE_ROWS or 400_000, 500_000, 50_000_000):
        now = chosen(rows)
        assert now == usual()
        assert yaml.safe_load(dump(now)) == yaml.safe_load(dump(usual()))
        assert (now.table.rule, now.table.embed_rule) == (ROW_RULE, FIRST_ORDER_RULE)


def test_settings_of_a_small_log() -> None:
    log = LogFacts(rows=57_722, exact=True, dense=0, slots=10, positives=0.33, ids=5_400, shows_per_id=110)
    assert settings_for(log) == AutoSettings(256, 20, 2, True, 0.08, 0.1, None, 0.00017, wide=True, small=True)


def test_settings_of_a_tiny_log() -> None:
    log = LogFacts(rows=5_000, exact=True, dense=3, slots=4, positives=0.3, ids=200, shows_per_id=100)
    assert settings_for(log) == AutoSettings(64, 20, 4, True, 0.1, 0.1, 1.0, 0.002, 0.002, wide=True, small=True)


def test_the_network_learns_faster_from_few_rows_with_numbers() -> None:
    few, many = facts(20_000), facts(60_000)
    assert (settings_for(few).dense_rate, settings_for(many).dense_rate) == (0.002, None)
    assert settings_for(replace(few, dense=0)).dense_rate is None
    chosen = auto_settings(load(), few)
    assert chosen.config.dense.lr == 0.002
    assert "13 dense columns: rate of the network 0.002" in chosen.notes
    assert auto_settings(load(None, ["dense.lr=0.003"]), few).config.dense.lr == 0.003
    assert auto_settings(load(), many).config.dense.lr == load().dense.lr


def test_settings_grow_with_the_rows() -> None:
    sizes = (300, 2_000, 8_000, 20_000, 60_000, 150_000, 300_000, 500_000)
    by_size = [chosen(rows) for rows in sizes]
    batches = [one.data.batch_rows for one in by_size]
    assert batches == sorted(batches)
    rates = [settings_for(facts(rows)) for rows in sizes if rows < SMALL_ROWS]
    assert [one.rate for one in rates] == sorted(one.rate or 0 for one in rates)
    for l2 in ([one.l2_rows or 0.0 for one in rates], [one.l2_table or 0.0 for one in rates]):
        assert l2 == sorted(l2, reverse=True)
    assert all(one.l2_table for one in rates)
    epochs = [one.train.epochs for one in by_size]
    assert epochs == sorted(epochs, reverse=True)


def test_every_size_makes_enough_steps() -> None:
    for rows in (500, 2_000, 8_000, 60_000, 150_000, 300_000, 400_000):
        now = chosen(rows)
        assert rows * now.train.epochs / now.data.batch_rows >= 300


def test_many_slots_mean_small_rates() -> None:
    few, many = settings_for(facts(50_000, 3)), settings_for(facts(50_000, 40))
    assert few.rate == 0.1
    assert many.rate is not None
    assert few.rate is not None
    assert many.rate < few.rate
    assert settings_for(facts(50_000, 0)) != AutoSettings()  # dense columns alone


def test_explicit_settings_win() -> None:
    given = {
        "data.batch_size": 300,
        "data.shuffle": 0,
        "train.epochs": 7,
        "train.loss.l2_rows": 0.0,
        "train.loss.l2_table": 0.5,
        "train.hogwild": 2,
        "train.threads": 2,
        "dense.lr": 0.004,
        "model.hidden": "[8]",
        "table.rule.lr": 0.07,
        "table.embed_rule.lr": 0.09,
    }
    now = chosen(5_000, *(f"{key}={value}" for key, value in given.items()))
    assert (now.data.batch_size, now.data.shuffle, now.train.epochs) == (300, 0, 7)
    assert (now.train.patience, now.train.average) == (None, None)  # whoever gives the epochs gets all of them
    assert (now.train.loss.l2_rows, now.train.loss.l2_table) == (0.0, 0.5)
    assert (now.train.hogwild, now.dense.lr) == (2, 0.004)
    assert now.model.settings["hidden"] == [8]
    assert now.table.rule.name == "adagrad_v2"
    assert now.table.rule.settings["lr"] == 0.07
    assert now.table.embed_rule is not None
    assert now.table.embed_rule.settings["lr"] == 0.09


def test_a_named_rule_stays_as_it_is() -> None:
    now = chosen(5_000, "table.rule={name: ftrl, lr: 0.2}")
    assert now.table == load(None, ["table.rule={name: ftrl, lr: 0.2}"]).table


def test_few_steps_keep_the_usual_rates() -> None:
    now = chosen(2_000, "data.batch_size=100", "train.epochs=1")
    assert now.table.rule == ROW_RULE
    assert (now.train.loss.l2_rows, now.train.loss.l2_table) == (None, None)
    assert "hidden" not in now.model.settings


def test_a_cluster_keeps_the_usual_rates() -> None:
    now = chosen(60_000, "mode.name=async")
    assert now.table.rule == ROW_RULE
    assert (now.data.batch_size, now.data.shuffle) == (256, 0)
    assert now.train.patience is not None


def test_a_model_as_in_paddlerec_keeps_every_setting() -> None:
    config = load(None, ["model={name: dnn, paddlerec: true}"])
    log = pd.DataFrame({"label": [0, 1] * 500, "x": 1.0, "a": 1, "b": 2})
    assert choose(config, log, None, SCHEMA).config is config


def test_models_without_a_first_order_part_get_one() -> None:
    assert chosen(60_000, "model.name=dnn").model.settings == {"wide": True, "hidden": [128, 64]}
    assert chosen(60_000, "model.name=dnn", "model.wide=false").model.settings["wide"] is False
    assert "wide" not in chosen(60_000, "model.name=deepfm").model.settings
    assert chosen(500_000, "model.name=dnn").model.settings == {}


def test_without_validation_data_there_is_no_early_stopping() -> None:
    now = chosen(8_000, can_stop=False)
    assert (now.train.patience, now.train.average) == (None, None)
    assert 1 < now.train.epochs <= 3


@pytest.mark.parametrize(
    "key",
    [
        "data.batch_size",
        "data.shuffle",
        "train.epochs",
        "train.patience",
        "dense.lr",
        "train.loss.l2_rows",
        "train.loss.l2_table",
    ],
)
def test_the_word_auto_is_the_default(key: str) -> None:
    assert load(None, [f"{key}=auto"]) == load()
    section, _, name = key.partition(".")
    assert yaml.safe_load(dump(load()))[section][name.partition(".")[0]] in ("auto", None) or "." in name


def test_the_word_auto_works_for_plug_ins() -> None:
    words = load(None, ["table.rule=auto", "model.hidden=auto", "model.wide=auto", "table.embed_rule=auto"])
    assert words == load()
    assert words.table.rule.given == {}


def test_a_configuration_with_auto_survives_a_file(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(dump(load()))
    again = load(tmp_path / "a.yaml")
    assert isinstance(again.train.epochs, AutoInt)
    assert isinstance(again.data.shuffle, AutoInt)
    assert isinstance(again.dense.lr, AutoFloat)
    assert again == replace(load(), run=again.run)


def log(rows: int, seed: int = 0) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    a, b, x = rng.integers(0, 40, rows), rng.integers(0, 6, rows), rng.normal(size=rows)
    logit = np.sin(a) + 0.7 * (b % 2) + 0.5 * x - 0.8
    return pd.DataFrame({"label": (rng.random(rows) < 1 / (1 + np.exp(-logit))).astype(int), "x": x, "a": a, "b": b})


def test_a_run_writes_and_explains_its_numbers(tmp_path: Path) -> None:
    clickfleet.train({"run": {"dir": str(tmp_path / "run")}}, data=log(3_000), schema=SCHEMA, quiet=True)
    saved = yaml.safe_load((tmp_path / "run/config.yaml").read_text())
    assert saved["data"]["batch_size"] == 64
    assert saved["train"]["epochs"] == 20
    assert saved["train"]["patience"] == 4
    assert isinstance(saved["dense"]["lr"], float)
    assert "auto" not in (tmp_path / "run/config.yaml").read_text().replace("name: auto", "")
    text = (tmp_path / "run/log.txt").read_text()
    assert "3,000 rows: batches of 64, up to 20 epochs with early stopping, averaged, shuffled" in text
    assert "2 slots, 46 ids: row rates 0.1 and 0.1 (first order), L2 0.0033 and 1 on the rows of a batch" in text


def test_a_resumed_run_keeps_its_numbers(tmp_path: Path) -> None:
    where = {"run": {"dir": str(tmp_path / "run"), "report": False}}
    clickfleet.train(where, "train.epochs=2", data=log(3_000), schema=SCHEMA, quiet=True)
    before = yaml.safe_load((tmp_path / "run/config.yaml").read_text())
    more = pd.concat([log(3_000), log(30_000, 1)])  # a new guess would differ
    with pytest.raises(clickfleet.errors.ClickfleetError):
        clickfleet.train(where, "data.batch_size=500", "train.epochs=3", data=more, schema=SCHEMA, quiet=True)
    clickfleet.train(where, "train.epochs=3", data=log(3_000), schema=SCHEMA, resume=True, quiet=True)
    after = yaml.safe_load((tmp_path / "run/config.yaml").read_text())
    assert after["train"]["epochs"] == 3
    before["train"]["epochs"] = 3
    assert after == before


def test_a_run_that_chose_its_epochs_goes_on_with_given_ones(tmp_path: Path) -> None:
    where = {"run": {"dir": str(tmp_path / "run"), "report": False}}
    first = clickfleet.train(where, data=log(3_000), schema=SCHEMA, quiet=True)
    done = len(list((tmp_path / "run").glob("checkpoints/*")))
    more = clickfleet.train(where, "train.epochs=25", data=log(3_000), schema=SCHEMA, resume=True, quiet=True)
    assert more.rows > first.rows
    assert len(list((tmp_path / "run").glob("checkpoints/*"))) >= done
    assert more.best is not None
    assert "no longer kept" not in (tmp_path / "run/log.txt").read_text()


def test_init_from_keeps_the_shape_of_the_model(tmp_path: Path) -> None:
    first = {"run": {"dir": str(tmp_path / "a"), "report": False}}
    clickfleet.train(first, "model.hidden=[16]", "train.epochs=1", data=log(3_000), schema=SCHEMA, quiet=True)
    second = {"run": {"dir": str(tmp_path / "b"), "report": False}, "train": {"init_from": str(tmp_path / "a")}}
    clickfleet.train(second, "train.epochs=1", data=log(3_000), schema=SCHEMA, quiet=True)
    assert "initialised anew" not in (tmp_path / "b/log.txt").read_text()


def test_a_run_of_few_steps_is_warned_about(tmp_path: Path) -> None:
    where = {"run": {"dir": str(tmp_path / "run"), "report": False}}
    clickfleet.train(where, "train.epochs=1", "data.batch_size=500", data=log(3_000), schema=SCHEMA, quiet=True)
    text = (tmp_path / "run/log.txt").read_text()
    assert "warning: only 6 steps" in text
    assert "data.batch_size" in text
    where = {"run": {"dir": str(tmp_path / "other"), "report": False}}
    clickfleet.train(where, "train.epochs=1", "data.batch_size=20", data=log(3_000), schema=SCHEMA, quiet=True)
    assert "warning" not in (tmp_path / "other/log.txt").read_text()
