"""The keys and the data of PaddleRec's networks over fields alone: difm, flen, fgcnn, fat_deepffm, autofis and sign."""

from __future__ import annotations

import math
import os
from typing import Any

from clickfleet.data.files import Unpacked, expand
from clickfleet.data.schema import KeyRule, Schema, Slot
from clickfleet.paddlerec.keys import Keys

H, R = "hyper_parameters.", "runner."
MOST_FIELDS = 65_536
FLEN_GROUPS = (13, 3)
"""FLEN's slots of user and item; the others are of the context."""


def _glorot(keys: Keys, key: str, dim: int, default: int) -> None:
    """Set the initial values of an embedding of `key` rows: uniform, by Glorot's rule."""
    rows = keys.integer(H + key, default)
    keys.used(H + key, "table.init", "only for initial values: the table grows with the keys")
    limit = math.sqrt(6 / (rows + dim))
    keys.set("table.init.embedx", f"uniform({-limit:.6g},{limit:.6g})")


def take_difm(keys: Keys, dim: int) -> None:
    slots = keys.integer(H + "sparse_inputs_slots", 27, least=2) - 1
    for key, count in (("sparse_field_num", slots), ("dense_feature_dim", keys.integer(H + "dense_input_dim", 13))):
        if keys.integer(H + key, count) != count:
            raise keys.wrong(H + key, f"sparse_inputs_slots and dense_input_dim give {count}")
        keys.used(H + key, "schema", "follows from the slots and dense columns")
    factors, dense = keys.widths(H + "fen_layers_size"), keys.widths(H + "dense_layers_size")
    if factors[-1] != slots + 1:
        raise keys.wrong(
            H + "fen_layers_size", f"must end with {slots + 1}, one factor per slot and one for all dense values"
        )
    if dense[-1] != dim:
        raise keys.wrong(H + "dense_layers_size", f"must end with sparse_feature_dim, {dim}")
    keys.map(
        H + "fen_layers_size", "model.hidden", factors[:-1], "the last layer, with one factor per field, is implied"
    )
    keys.map(
        H + "dense_layers_size",
        "model.dense_hidden",
        dense[:-1],
        "the last layer, with the width of a field, is implied",
    )
    heads, width = keys.integer(H + "att_head_num"), keys.integer(H + "att_factor_dim")
    keys.map(H + "att_head_num", "model.heads", heads)
    keys.map(H + "att_factor_dim", "model.width", heads * width, "over all heads")


def take_flen(keys: Keys, dim: int) -> None:
    hidden = keys.widths(H + "layer_sizes_dnn", [64, 32])
    if hidden[-1] != dim:
        raise keys.wrong(H + "layer_sizes_dnn", f"must end with sparse_feature_dim, {dim}")
    keys.map(H + "layer_sizes_dnn", "model.hidden", hidden)
    if keys.integer(H + "sparse_num_field", 3) != 3:
        raise keys.wrong(H + "sparse_num_field", "PaddleRec's network has 3 groups: user, item and context")
    names = [slot.name for slot in flen_schema(keys).slots]
    user, item = FLEN_GROUPS
    groups = [names[:user], names[user : user + item], names[user + item :]]
    keys.map(
        H + "sparse_num_field",
        "model.groups",
        [group for group in groups if group],
        "slots 1–13, 14–16, and the others",
    )
    _glorot(keys, "sparse_feature_number", dim, 1_544_488)
    if keys.text(H + "optimizer.class", "Adagrad").lower() == "adagrad":
        keys.set("dense.initial_sum", 0.001)


def flen_schema(keys: Keys) -> Schema:
    count = keys.integer(H + "sparse_inputs_slots", 22, most=MOST_FIELDS)
    keys.used(H + "sparse_inputs_slots", f"schema: {count} slots", "the label is not among them")
    return _of_slots([str(i) for i in range(1, count + 1)], "click")


def flen_arrays(schema: Schema) -> list[Any]:
    """Column 0 of its reader is an id that the network does not see; the label is the last."""
    return [None, *(slot.name for slot in schema.slots), schema.label]


def flen_form(keys: Keys, schema: Schema) -> dict[str, object]:
    return {"name": "csv", "columns": ["id", *(slot.name for slot in schema.slots), schema.label]}


def take_fgcnn(keys: Keys, dim: int) -> None:
    kernels = keys.widths(H + "conv_kernel_width", [7, 7, 7, 7])
    if any(kernel % 2 == 0 for kernel in kernels):
        raise keys.wrong(
            H + "conv_kernel_width", "must be odd numbers: with others PaddleRec's layers do not fit each other"
        )
    keys.map(H + "conv_kernel_width", "model.kernels", kernels)
    for key, ours, default in (
        ("conv_filters", "filters", [14, 16, 18, 20]),
        ("new_maps", "maps", [3, 3, 3, 3]),
        ("pooling_width", "pooling", [2, 2, 2, 2]),
        ("dnn_hidden_units", "hidden", [128]),
    ):
        keys.map(H + key, f"model.{ours}", keys.widths(H + key, default))
    keys.map(H + "dnn_dropout", "model.dropout", keys.number(H + "dnn_dropout", 0.0))
    if keys.widths(H + "stride", [1, 1]) != [1, 1]:
        raise keys.wrong(H + "stride", "must be [1, 1]")
    keys.used(H + "stride", "model", "convolutions visit every field")
    _glorot(keys, "sparse_feature_size", dim, 1_000_000)


def fgcnn_schema(keys: Keys) -> Schema:
    sparse = keys.integer(H + "sparse_inputs_slots", 26, least=0, most=MOST_FIELDS)
    dense = keys.integer(H + "dense_inputs_slots", 13, least=0, most=MOST_FIELDS)
    names = keys.values.get(H + "feature_name") or [str(i) for i in range(1, sparse + dense + 1)]
    if not isinstance(names, list) or len(set(map(str, names))) != sparse + dense:
        raise keys.wrong(H + "feature_name", f"must be {sparse + dense} different names, one for each slot")
    keys.used(H + "sparse_inputs_slots", f"schema: {sparse} slots", "the label is not among them")
    keys.used(H + "dense_inputs_slots", f"schema: {dense} slots", "numbers in buckets are slots too")
    keys.used(H + "feature_name", "schema", "names of the slots")
    # Each field has an embedding of its own, so equal ids in two fields must have different keys.
    return _of_slots([str(name) for name in names], "label", KeyRule("hash64"))


def fields_and_label(schema: Schema) -> list[Any]:
    """One array with the ids of all slots, and one with the label."""
    return [[slot.name for slot in schema.slots], schema.label]


def take_fat_deepffm(keys: Keys, dim: int) -> None:
    keys.map(H + "layer_sizes_dnn", "model.hidden", keys.widths(H + "layer_sizes_dnn", [1600, 1600]))


def take_autofis(keys: Keys, dim: int) -> None:
    fields = keys.integer(H + "num_inputs", 39, least=2, most=MOST_FIELDS)
    count = fields * (fields - 1) // 2
    for key in ("pairs", "n_col"):
        if keys.integer(H + key, count) != count:
            raise keys.wrong(H + key, f"{fields} fields have {count} pairs")
        keys.used(H + key, "schema", "follows from num_inputs")
    width, depth = keys.integer(H + "width", 700), keys.integer(H + "depth", 5)
    keys.map(H + "width", "model.hidden", [width] * depth, "depth times width")
    keys.used(H + "depth", "model.hidden")
    _glorot(keys, "input_size", dim, 1_178_909)
    keys.set(
        "table.init.embed",
        f"uniform({-(limit := math.sqrt(6 / keys.integer(H + 'input_size', 1_178_909))):.6g},{limit:.6g})",
    )
    for key in ("grad_c", "grad_mu"):
        keys.skip(
            H + key, "there is no GRDA; model.paddlerec=false model.l1=… searches pairs with an L1 penalty on the gates"
        )
    keys.skip(
        H + "optimizer.gamma",
        "PaddleRec multiplied the rate by it after each fifth of an epoch; dense.schedule={name: step, every: …, decay: …} does so",
    )


def autofis_schema(keys: Keys) -> Schema:
    count = keys.integer(H + "num_inputs", 39, least=2, most=MOST_FIELDS)
    keys.used(H + "num_inputs", f"schema: {count} slots")
    return _of_slots([str(i) for i in range(1, count + 1)], "label")


def autofis_form(keys: Keys, schema: Schema) -> dict[str, object]:
    columns = [schema.label, *(slot.name for slot in schema.slots)]
    return {"name": "paired", "columns": columns}


def take_sign(keys: Keys, dim: int) -> None:
    if keys.integer(H + "pred_edges", 1, least=0) == 0:
        raise keys.wrong(H + "pred_edges", "must be 1: PaddleRec's reader has no file of edges either")
    keys.used(H + "pred_edges", "model", "edges are always predicted")
    keys.map(H + "hidden_layer", "model.pair_hidden", keys.integer(H + "hidden_layer", 64))
    shape = keys.values.get(H + "l0_para") or [0.66, -0.1, 1.1]
    if not isinstance(shape, list) or len(shape) != 3 or not all(isinstance(v, int | float) for v in shape):
        raise keys.wrong(H + "l0_para", "must be three numbers: temperature, low and high")
    keys.set("model.temperature", float(shape[0]))
    keys.set("model.stretch", [float(shape[1]), float(shape[2])])
    keys.used(H + "l0_para", "model.temperature and model.stretch")
    weight = keys.number(H + "l0_weight", 0.001)
    keys.map(H + "l0_weight", "model.l0", weight, "and model.l2, which PaddleRec reads from this key too")
    keys.set("model.l2", weight)
    keys.skip(H + "l2_weight", "PaddleRec never reads it; set model.l2")
    keys.skip(R + "is_train", "PaddleRec never reads it")


def sign_schema(keys: Keys) -> Schema:
    """Return the schema of lines `label node node …`; the first line of the data tells the number of nodes."""
    return _of_slots([str(i) for i in range(1, _nodes(keys) + 1)], "label")


def sign_form(keys: Keys, schema: Schema) -> dict[str, object]:
    columns = [schema.label, *(slot.name for slot in schema.slots)]
    return {"name": "csv", "separator": " ", "columns": columns}


def _nodes(keys: Keys) -> int:
    path = keys.text(R + "train_data_dir")
    for file in expand([path if "://" in path else os.path.normpath(keys.original.folder / path)]):
        stream, space = Unpacked(file), bytearray(1 << 16)
        try:
            got = stream.readinto(memoryview(space))
        finally:
            stream.close()
        if count := len(bytes(space[:got]).partition(b"\n")[0].split()):
            return max(count - 1, 1)
    raise keys.wrong(
        R + "train_data_dir", "its files hold no line `label node node …`, which tells the number of nodes"
    )


def _of_slots(names: list[str], label: str, keys: KeyRule | None = None) -> Schema:
    return Schema((), tuple(Slot(name) for name in names), label=label, keys=keys or KeyRule("raw"))
