"""The keys and the data of PaddleRec's networks with several labels: share_bottom, mmoe, ple, esmm and aitm."""

from __future__ import annotations

from typing import Any

from clickfleet.data.schema import Dense, KeyRule, Label, Schema, Slot
from clickfleet.paddlerec.keys import Keys

H, R = "hyper_parameters.", "runner."
MOST_COLUMNS = 65_536
CENSUS = ("income", "marital")
ALI_CCP = (
    *("101", "109_14", "110_14", "127_14", "150_14", "121", "122", "124", "125", "126", "127", "128", "129"),
    *("205", "206", "207", "210", "216", "508", "509", "702", "853", "301"),
)
"""The fields that PaddleRec's reader of Ali-CCP yields, in its order."""


def _two(keys: Keys, key: str) -> None:
    if keys.integer(H + key, 2) != 2:
        raise keys.wrong(H + key, "must be 2: its reader yields two labels")
    keys.used(H + key, "schema: 2 labels")


def take_share_bottom(keys: Keys, dim: int) -> None:
    _two(keys, "task_num")
    keys.map(H + "bottom_size", "model.bottom", [keys.integer(H + "bottom_size", 117)])
    keys.map(H + "tower_size", "model.hidden", [keys.integer(H + "tower_size", 8)])


def take_mmoe(keys: Keys, dim: int) -> None:
    _two(keys, "gate_num")
    keys.map(H + "expert_num", "model.experts", keys.integer(H + "expert_num", 8))
    keys.map(H + "expert_size", "model.expert", [keys.integer(H + "expert_size", 16)])
    keys.map(H + "tower_size", "model.hidden", [keys.integer(H + "tower_size", 8)])


def take_ple(keys: Keys, dim: int) -> None:
    _two(keys, "task_num")
    keys.map(H + "level_number", "model.levels", keys.integer(H + "level_number", 1))
    keys.map(H + "shared_num", "model.shared", keys.integer(H + "shared_num", 2))
    keys.map(H + "exp_per_task", "model.own", keys.integer(H + "exp_per_task", 3))
    keys.map(H + "expert_size", "model.expert", [keys.integer(H + "expert_size", 16)])
    keys.map(H + "tower_size", "model.hidden", [keys.integer(H + "tower_size", 8)])


def census_schema(keys: Keys) -> Schema:
    """Return the schema of numbers alone, and whether the income is high and whether the person never married."""
    count = keys.integer(H + "feature_size", 499, most=MOST_COLUMNS)
    keys.used(H + "feature_size", f"schema: {count} dense columns")
    columns = tuple(Dense(f"I{i}") for i in range(1, count + 1))
    return Schema(columns, labels=tuple(Label(name) for name in CENSUS), keys=KeyRule("raw"))


def census_arrays(schema: Schema) -> list[Any]:
    return ["dense", *CENSUS]


def census_form(keys: Keys, schema: Schema) -> dict[str, object]:
    columns = [*reversed(CENSUS), *(column.name for column in schema.dense)]
    return {"name": "csv", "columns": columns}


def take_esmm(keys: Keys, dim: int) -> None:
    widths = keys.widths(H + "ctr_fc_sizes", [256, 64])
    if keys.widths(H + "cvr_fc_sizes", widths) != widths:
        raise keys.wrong(
            H + "cvr_fc_sizes", "must equal ctr_fc_sizes: the MLPs of all labels have the same widths here"
        )
    keys.map(H + "ctr_fc_sizes", "model.hidden", widths)
    keys.used(H + "cvr_fc_sizes", "model.hidden")
    keys.used(H + "sparse_feature_number", "table", "the table grows with the keys")
    keys.used(H + "max_len", "your reader", "the values of a field that it keeps")
    keys.set("model.conditional", 0.0)  # its loss is that of the paper


def esmm_schema(keys: Keys) -> Schema:
    if keys.integer(H + "num_field", len(ALI_CCP)) != len(ALI_CCP):
        raise keys.wrong(H + "num_field", f"must be {len(ALI_CCP)}, the fields that its reader yields")
    keys.used(H + "num_field", f"schema: {len(ALI_CCP)} slots")
    slots = tuple(Slot(name, multi=True) for name in ALI_CCP)
    return Schema((), slots, labels=(Label("click"), Label("buy", given="click")), keys=KeyRule("raw"))


def esmm_arrays(schema: Schema) -> list[Any]:
    return [*ALI_CCP, "click", "buy"]


def take_aitm(keys: Keys, dim: int) -> None:
    keys.map(H + "dims", "model.hidden", keys.widths(H + "dims", [128, 64, 32]))
    rates = keys.values.get(H + "drop_prob") or [0.0]
    if not isinstance(rates, list) or not all(isinstance(rate, int | float) and 0 <= rate < 1 for rate in rates):
        raise keys.wrong(H + "drop_prob", "must be a list of numbers from 0 to below 1, one for each layer")
    mean = round(sum(rates) / len(rates), 4)
    keys.map(H + "drop_prob", "model.dropout", mean, "the mean: one rate holds for all layers")


def aitm_schema(keys: Keys) -> Schema:
    known = keys.values.get(H + "feature_vocabulary")
    if not isinstance(known, list) or not all(isinstance(item, list) and len(item) == 2 for item in known):
        raise keys.wrong(
            H + "feature_vocabulary", "must be a list of fields and their numbers of values: [['101', 238635], …]"
        )
    keys.used(H + "feature_vocabulary", f"schema: {len(known)} slots", "the table grows with the keys")
    slots = tuple(Slot(str(name)) for name, _ in known)
    # Each field has an embedding of its own, so equal ids in two fields must have different keys.
    labels = (Label("click"), Label("conversion"))
    return Schema((), slots, labels=labels, keys=KeyRule("hash64"))


def aitm_arrays(schema: Schema) -> list[Any]:
    return ["click", "conversion", [slot.name for slot in schema.slots]]
