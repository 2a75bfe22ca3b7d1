"""`table.dims` and `table.slots`: the rows of single slots."""

from typing import Any

import pytest

from clickfleet.config.load import Config, checked, dump, load, read
from clickfleet.config.plugins import find, names
from clickfleet.data.schema import History, Schema, Slot
from clickfleet.errors import CheckpointError, ConfigError
from clickfleet.store.policy import Admission
from clickfleet.store.rules import rule
from clickfleet.training.learner import Learner, new_table, slot_widths, table_spec
from clickfleet.training.network import Model

SCHEMA = Schema(
    slots=(Slot("user_id"), Slot("item"), Slot("class"), Slot("other_item", rows_of="item")),
    histories=(History("seen", ("item",), ("items",)),),
)


def configured(*settings: str) -> Config:
    return load(None, ["model.name=dnn", "model.hidden=[4]", *settings])


def test_dims_by_slot() -> None:
    config = configured("table.dims={user_id: 32, default: 10}")
    assert config.table.dim == 10
    assert slot_widths(config, SCHEMA) == [32, 10, 10, 10]
    assert slot_widths(configured("table.dims.item=4", "table.dim=6"), SCHEMA) == [6, 4, 6, 4]
    assert slot_widths(configured("table.slots={class: {dim: 3}}"), SCHEMA) == [10, 10, 3, 10]
    assert slot_widths(configured("table.dims={default: 8}"), SCHEMA) == [8] * 4
    assert slot_widths(configured("table.dims={user_id: 7}"), Schema(slots=(Slot("user_id"),))) == [7]
    assert new_table(configured("table.dims={user_id: 7}"), Schema(slots=(Slot("user_id"),))).factors == 7


def test_a_configuration_with_slots_is_saved_and_loaded() -> None:
    config = configured(
        "table.dims={user_id: 32}", "table.slots={class: {rule: {lr: 0.2}, admission: count(3)}, item: {rule: adam}}"
    )
    again = checked(Config, read(dump(config), "saved"))
    assert again.table.slots == config.table.slots or dump(again) == dump(config)
    assert table_spec(again, SCHEMA) == table_spec(config, SCHEMA)


def test_rule_and_admission_by_slot() -> None:
    settings = [
        "table.rule={name: adagrad, lr: 0.05, initial_g2sum: 2}",
        "table.admission=score(2)",
        "table.slots={user_id: {dim: 3, rule: adam}, item: {rule: {lr: 0.2}, admission: count(3)}, class: {embed_rule: sgd}}",
    ]
    table = new_table(configured(*settings), SCHEMA)
    usual, user, item, third = table.classes
    assert (usual.factors, user.factors, item.factors) == (10, 3, 10)
    assert usual.rule == usual.embed_rule == rule("adagrad", lr=0.05, initial_g2sum=2)
    assert user.rule == user.embed_rule == rule("adam")
    assert item.rule == rule("adagrad", lr=0.2, initial_g2sum=2)
    assert (usual.admission, item.admission) == (Admission("score", 2.0), Admission("count", 3.0))
    assert (third.rule, third.embed_rule) == (usual.rule, rule("sgd"))
    assert set(table.describe()["slots"]) == {"0", "1", "2"}
    # A rule for the first-order weights of the whole table holds for slots with a rule of their own too.
    both = new_table(
        configured("table.embed_rule=sgd", "table.rule=adagrad", "table.slots={item: {rule: adam}}"), SCHEMA
    )
    assert both.classes[1].embed_rule == rule("sgd")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["table.dims={usr_id: 3}"], "unknown slot usr_id in table.dims; did you mean user_id"),
        (["table.slots={itme: {dim: 3}}"], "unknown slot itme in table.slots; did you mean item"),
        (["table.dims={seen.item: 3}"], "has the rows of slot item"),
        (["table.dims={other_item: 3}"], "this slot has the rows of slot item"),
        (["table.dim=8", "table.dims={default: 4}"], "table.dim is 8, but table.dims.default is 4"),
        (
            ["table.dims={item: 3}", "table.slots={item: {dim: 4}}"],
            "table.dims.item is 3, but table.slots.item.dim is 4",
        ),
        (["table.dims={item: 0}"], "the width of slot item is 0"),
        (["table.dims={item: -1}"], "table.dims.item: "),
        (["table.slots={item: {dmi: 4}}"], "unknown key table.slots.item.dmi; did you mean dim"),
        (["table.slots={item: {dim: many}}"], "table.slots.item.dim: "),
        (["table.slots={item: {rule: adom}}"], "unknown rule 'adom'; did you mean adam"),
        (["table.slots={item: {admission: sometimes}}"], "unknown admission 'sometimes'"),
        (["model.name=deepfm", "table.dims={user_id: 32}"], "the model deepfm needs rows of equal width.*user_id 32"),
        (["model={name: dcn_v2, paddlerec: true}", "table.dims={user_id: 32}"], "dcn_v2 needs rows of equal width"),
        (["table.dims={a: 1}"], "slots: user_id, item, class, other_item"),
    ],
)
def test_wrong_settings_are_refused(settings: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        new_table(configured(*settings), SCHEMA)


def test_a_refusal_says_which_models_take_unequal_widths() -> None:
    with pytest.raises(ConfigError) as refused:
        Learner(load(None, ["model.name=fm", "table.dims={user_id: 2}"]), SCHEMA)
    for name in names("models"):
        assert (f" {name}," in str(refused.value) + ",") == (find("models", name, Model).unequal_widths), name


def test_equal_widths_are_one_table_of_one_width() -> None:
    equal: Any = configured("table.dims={user_id: 6, item: 6, default: 6}")
    table = new_table(equal, SCHEMA)
    assert len(table.classes) == 1
    assert table.describe() == new_table(configured("table.dim=6"), SCHEMA).describe()
    assert Learner(equal, SCHEMA).shape.widths is None
    assert len(new_table(load(None, ["model.name=lr", "table.dims={user_id: 3}"]), SCHEMA).classes) == 1


def test_saved_rows_must_have_the_widths_of_the_slots() -> None:
    table = new_table(configured("table.dims={user_id: 3}"), SCHEMA)
    with pytest.raises(CheckpointError, match="the saved rows have 3/10/10/10 factors"):
        Learner(configured("table.dims={user_id: 4}"), SCHEMA, table)
