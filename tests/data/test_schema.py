from dataclasses import replace
from pathlib import Path

import pytest

from clickfleet.data.schema import (
    PRESETS,
    Bucket,
    Dense,
    KeyRule,
    Schema,
    Slot,
    Transform,
    preset,
    read_schema,
    write_schema,
)
from clickfleet.errors import ConfigError, DataError

EVERYTHING = Schema(
    dense=(
        Dense("age", Transform("minmax", 0.0, 99.0), missing=-1.0),
        Dense("d1", source="vector"),
        Dense("d2", source="vector"),
    ),
    slots=(
        Slot("city", source="town"),
        Slot("tags", multi=True, pooling="mean"),
        Slot("age group", bucket=Bucket("age", boundaries=(0.2, 0.4))),
        Slot("fine age", bucket=Bucket("age", buckets=7, offset=100)),
    ),
    label="clicked",
    keys=KeyRule("py2", 1000001),
    show="shown",
    click="clicks",
    weight="w",
    time="at",
    group="user",
    values=True,
)


@pytest.mark.parametrize("schema", [EVERYTHING, *(preset(name) for name in PRESETS)])
def test_survives_yaml(schema: Schema, tmp_path: Path) -> None:
    write_schema(schema, tmp_path / "schema.yaml")
    again = read_schema(tmp_path / "schema.yaml")
    assert again == schema
    assert again.hash == schema.hash
    assert schema.diff(again) == []


def test_hashes_are_frozen() -> None:
    assert preset("criteo").hash == "0165d9675c47350048c0836ec3974384"
    assert preset("criteo-paddle").hash == "cc3aaa747f20498b5d7b68651b58f7cd"


def test_a_name_is_enough_for_a_column() -> None:
    schema = Schema.from_dict({"dense": ["a"], "slots": ["b", {"name": "c", "multi": True}]})
    assert schema == Schema((Dense("a"),), (Slot("b"), Slot("c", multi=True)))


def test_where_a_column_is_found_is_not_what_it_means() -> None:
    moved = replace(EVERYTHING, slots=(Slot("city"), *EVERYTHING.slots[1:]))
    assert moved != EVERYTHING
    assert moved.hash == EVERYTHING.hash
    assert moved.diff(EVERYTHING) == []


def test_diff_names_each_difference() -> None:
    ours = Schema((Dense("a"),), (Slot("b"), Slot("c")))
    theirs = Schema((Dense("a", Transform("log1p")),), (Slot("c", multi=True), Slot("d")), keys=KeyRule("raw"))
    assert ours.diff(theirs) == [
        "keys: hash64 here, raw there",
        "dense column a: transform none here, log1p there",
        "slot b: only here",
        "slot d: only there",
        "slot c: multi False here, True there",
    ]
    with pytest.raises(
        DataError, match=r"train\.tsv and the model have different schemas \(5 differences\)"
    ) as refusal:
        ours.check_same(theirs, "train.tsv", "the model")
    assert "slot d: only there" in str(refusal.value)


def test_diff_notices_another_order() -> None:
    lines = Schema(slots=(Slot("a"), Slot("b"))).diff(Schema(slots=(Slot("b"), Slot("a"))))
    assert lines == ["slots in different order: a, b here, b, a there"]


def test_applied_reads_what_was_written() -> None:
    applied = preset("criteo-paddle").applied()
    assert str(applied.keys) == "raw"
    assert {str(column.transform) for column in applied.dense} == {"none"}


@pytest.mark.parametrize(
    ("plain", "message"),
    [
        ({"slots": ["a"], "labl": "x"}, "unknown key labl; did you mean label?"),
        ({"slots": [{"name": "a", "mutli": True}]}, "unknown key mutli; did you mean multi?"),
        ({"slots": [3]}, "expected a name or a mapping, found int"),
        ({"slots": ["a", "a"]}, "two columns named 'a'"),
        ({"slots": [{"name": "a", "pooling": "max"}]}, "unknown pooling 'max'"),
        ({"slots": ["a"], "keys": "py2"}, "cannot read the key rule 'py2'"),
        ({"slots": ["a"], "keys": "md5"}, "unknown key rule 'md5'"),
        ({"dense": [{"name": "a", "transform": "minmax"}]}, "cannot read the transform 'minmax'"),
        ({"dense": [{"name": "a", "transform": "minmax(1, 1)"}]}, "finite range greater than zero"),
        ({"dense": [{"name": "a", "transform": "minmax(x, 1)"}]}, "not numbers"),
        ({"slots": [{"name": "a", "bucket": {"column": "b"}}]}, "unknown dense column 'b'"),
        ({"dense": ["b"], "slots": [{"name": "a", "bucket": {"column": "b", "buckets": 0}}]}, "at least one bucket"),
        ({"dense": ["b"], "slots": [{"name": "a", "bucket": {"column": "b", "boundaries": [2, 1]}}]}, "must increase"),
        ({}, "at least one slot or dense column"),
        ({"slots": [{"multi": True}]}, "missing 1 required positional argument: 'name'"),
    ],
)
def test_refuses_nonsense(plain: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        Schema.from_dict(plain)
    assert message in str(refusal.value)


def test_refuses_a_preset_there_is_not() -> None:
    with pytest.raises(ConfigError, match="did you mean criteo"):
        preset("criteoo")
