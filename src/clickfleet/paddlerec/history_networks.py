"""The keys and the data of PaddleRec's networks over the events of the past: din, dien, bst, dmr and dsin."""

from __future__ import annotations

from typing import Any

from clickfleet.data.schema import Dense, History, KeyRule, Schema, Slot
from clickfleet.paddlerec.keys import Keys

H, R = "hyper_parameters.", "runner."
GROWS = "the table grows with the keys"
SESSIONS, SESSION_EVENTS = 5, 10
"""DSIN's sessions of a row, and the events of a session."""
DMR_EVENTS = 50


def _own_width(keys: Keys, key: str, dim: int, *slots: str) -> None:
    """Give slots the width of their own embeddings."""
    width = keys.integer(H + key, dim)
    for slot in slots if width != dim else ():
        keys.set(f"table.dims.{slot}", width)
    keys.used(H + key, f"table.dim={dim}" if width == dim else f"table.dims: {width} for {', '.join(slots)}")


def _sizes(keys: Keys, *names: str) -> None:
    """Report the sizes of embeddings, which a table does not need."""
    for name in names:
        keys.used(H + name, "table", GROWS)


def _of_events(slots: list[str], history: tuple[str, ...], columns: tuple[str, ...], **others: Any) -> Schema:
    """Return a schema with one history. Each slot has an embedding of its own, so equal ids in two slots get different keys."""
    label = others.pop("label", "label")
    return Schema(
        others.pop("dense", ()),
        tuple(Slot(name) for name in slots),
        label=label,
        keys=KeyRule("hash64"),
        histories=(History("history", history, columns, **others),),
    )


def take_din(keys: Keys, dim: int) -> None:
    _own_width(keys, "cat_emb_size", dim, "cat")
    _sizes(keys, "item_count", "cat_count")
    keys.skip(H + "act", "the attention has PReLU, as in the paper")
    keys.set("model.hidden", [80, 40])
    keys.set("model.weights", "softmax")


def take_dien(keys: Keys, dim: int) -> None:
    _own_width(keys, "cat_emb_size", dim, "cat")
    _sizes(keys, "item_count", "cat_count")
    keys.skip(H + "act", "the gates have sigmoid, as in the paper")
    keys.set("model.hidden", [80, 40])


def din_schema(keys: Keys) -> Schema:
    """Return the schema of lines `items;categories;item;category;label`, with blanks between the events."""
    return _of_events(["item", "cat"], ("item", "cat"), ("history_item", "history_cat"))


def din_form(keys: Keys, schema: Schema) -> dict[str, object]:
    columns = [*schema.histories[0].columns, "item", "cat", schema.label]
    return {"name": "csv", "separator": ";", "list_separator": " ", "columns": columns}


def take_bst(keys: Keys, dim: int) -> None:
    _own_width(keys, "cat_emb_size", dim, "target_cate")
    _own_width(keys, "position_emb_size", dim, "target_position")
    _sizes(keys, "item_count", "user_count", "cat_count", "position_count")
    keys.map(H + "n_encoder_layers", "model.blocks", keys.integer(H + "n_encoder_layers", 1))
    keys.map(H + "n_head", "model.heads", keys.integer(H + "n_head", 1))
    keys.map(H + "d_inner_hid", "model.inner", keys.integer(H + "d_inner_hid", 512))
    keys.map(H + "fc_sizes", "model.hidden", keys.widths(H + "fc_sizes", [1024, 512, 256]))
    keys.map(H + "dropout_rate", "model.dropout", keys.number(H + "dropout_rate", 0.0))
    for key in ("prepostprocess_dropout", "relu_dropout"):
        keys.skip(H + key, "one rate holds for all layers: dropout_rate")
    width = keys.integer(H + "d_key", 16)
    keys.map(H + "d_key", "model.width", width, "the width of a head")
    if keys.integer(H + "d_value", width) != width:
        raise keys.wrong(H + "d_value", f"must equal d_key, {width}")
    keys.used(H + "d_value", "model.width")
    keys.used(H + "d_model", "model", "follows from the width of an event")
    for key in ("postprocess_cmd", "preprocess_cmd"):
        keys.skip(H + key, "each layer has a residual and normalizes after it, as in the paper")
    keys.skip(H + "act", "layers have ReLU")


def bst_schema(keys: Keys) -> Schema:
    """Return the schema of slot text. An event has an item, its category, and how long ago it was."""
    target = ("target", "target_cate", "target_position")
    return _of_events(["userid", *target], target, ("history", "cate", "position"))


def bst_form(keys: Keys, schema: Schema) -> dict[str, object]:
    return {"name": "slots"}


USER = ["cms_segid", "cms_group_id", "final_gender_code", "age_level", "pvalue_level", "shopping_level", "occupation"]
USER.append("new_user_class_level")


def take_dmr(keys: Keys, dim: int) -> None:
    keys.used(H + "main_embedding_size", f"table.dim={dim}")
    _own_width(keys, "other_embedding_size", dim, *USER, "pid")
    _sizes(
        keys, *(f"{name}_size" for name in ("user", *USER, "adgroup_id", "cate", "campaign_id", "customer", "brand"))
    )
    _sizes(keys, "pid_size")
    keys.skip(
        H + "btag_size", "what the user did in an event is left out: the candidate has nothing that belongs to it"
    )


def dmr_schema(keys: Keys) -> Schema:
    slots = ["user", *USER, "adgroup_id", "cate", "campaign_id", "customer", "brand", "pid"]
    columns = ("history_cate", "history_brand")
    return _of_events(slots, ("cate", "brand"), columns, dense=(Dense("price"),), max=DMR_EVENTS, label="click")


def dmr_arrays(schema: Schema) -> list[Any]:
    """One array of everything: events of the past in columns of their own, two masks, user, advertisement, context, label."""
    cate, brand = schema.histories[0].columns
    past = [None] * DMR_EVENTS + [cate] * DMR_EVENTS + [brand] * DMR_EVENTS + [None] * (2 * DMR_EVENTS)
    row = ["user", *USER, "adgroup_id", "cate", "campaign_id", "customer", "brand", "price", "pid", schema.label]
    return [[*past, *row]]


def take_dsin(keys: Keys, dim: int) -> None:
    names = (
        "user",
        "cms_segid",
        "cms_group",
        "final_gender",
        "age_level",
        "pvalue_level",
        "shopping_level",
        "occupation",
    )
    _sizes(keys, *(f"{name}_size" for name in names), "new_user_class_level_size", "adgroup_size", "cate_size")
    _sizes(keys, "campaign_size", "customer_size", "brand_size", "pid_size")
    keys.report.notes.append(
        "bst reads the events of all sessions as one history; DSIN's network over whole sessions does not exist here"
    )


def dsin_schema(keys: Keys) -> Schema:
    slots = ["userid", "adgroup_id", "pid", *USER, "campaign_id", "customer", "cate_id", "brand"]
    columns = ("history_cate", "history_brand")
    most = SESSIONS * SESSION_EVENTS
    return _of_events(slots, ("cate_id", "brand"), columns, dense=(Dense("price"),), max=most, label="click")


def dsin_arrays(schema: Schema) -> list[Any]:
    """Slots, the price, sessions with the categories and then the brands of their events, the number of sessions, the label."""
    cate, brand = schema.histories[0].columns
    sessions = ([cate] * SESSION_EVENTS + [brand] * SESSION_EVENTS) * SESSIONS
    return [[slot.name for slot in schema.slots], "price", sessions, None, schema.label]
