"""Convert PaddleRec's parameters to the tensors of our models.

A network is described by its layers, in the order of their creation. Dygraph files name parameters by position
(`dnn.linear_0.weight`), static files by kind and number (`linear_0.w_0`). Dense tables have no names.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from clickfleet.errors import CheckpointError
from clickfleet.paddlerec.pickles import Arrays
from clickfleet.training.network import Shape

PARTS = {
    "embedding": ("weight",),
    "linear": ("weight", "bias"),
    "parameter": ("",),
    "conv": ("weight",),
    "norm": ("weight", "bias", "_mean", "_variance"),
}
STATIC = {
    "embedding": r"embedding_(\d+)\.w_0",
    "linear": r"(?:linear|fc)_(\d+)\.([wb])_0",
    "parameter": r"create_parameter_(\d+)\.w_0",
    "conv": r"conv2d_(\d+)\.w_0",
    "norm": r"batch_norm(?:1d)?_(\d+)\.([wb]_\d)",
}
STATIC_PARTS = {"w": "weight", "b": "bias", "w_0": "weight", "b_0": "bias", "w_1": "_mean", "w_2": "_variance"}


@dataclass(frozen=True)
class Layer:
    kind: str
    name: str
    size: tuple[int, ...] = ()
    """The shape of its weight."""
    named: str = ""
    """The name in static files, if it does not follow from kind and number."""
    optional: bool = False

    @property
    def parts(self) -> list[str]:
        return [f"{self.name}.{part}" if part else self.name for part in PARTS[self.kind]]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each part; none for embeddings, which have any length."""
        sizes = (self.size, *((self.size[-1:],) * (len(self.parts) - 1)))
        return {} if self.kind == "embedding" else dict(zip(self.parts, sizes, strict=True))


def _linears(prefix: str, *widths: int) -> list[Layer]:
    return [Layer("linear", f"{prefix}linear_{i}", pair) for i, pair in enumerate(pairwise(widths))]


def layers(network: str, settings: Mapping[str, Any], shape: Shape) -> list[Layer]:
    """Return the layers of one of PaddleRec's networks, in the order of their creation."""
    hidden, d = tuple(settings.get("hidden", ())), shape.factors
    table = Layer("embedding", "embedding", named="SparseFeatFactors")
    n, every = shape.width, (shape.slots + shape.dense) * d
    match network:
        case "dnn":
            return [table, *_linears("", n, *hidden, 2)]
        case "slot_dnn":
            return [
                Layer("embedding", "embedding", named="embedding"),
                *_linears("", shape.slots * (d + 1), *hidden, 1),
            ]
        case "fm" | "ffm":
            return [*_factors(network, shape), Layer("parameter", "bias", (1,))]
        case "deepfm":
            bias = Layer("parameter", "bias", (1,), optional=True)
            return [*_factors("fm", shape), *_linears("dnn.", every, *hidden, 1), bias]
        case "wide_deep":
            return [Layer("linear", "wide_part", (shape.dense, 1)), table, *_linears("", n, *hidden, 1)]
        case "gatenet":
            return list(_gatenet(settings, shape, table, hidden))
        case "dcn":
            cross = [Layer("parameter", "layer_w", (n,)), Layer("parameter", "layer_b", (n,))]
            return [table, *cross, *_linears("", n, *hidden), Layer("linear", "fc", (hidden[-1] + n, 1))]
        case "dcn_v2":
            last = hidden[-1] + (0 if settings.get("structure") == "stacked" else every)
            start = [table, Layer("linear", "dense_emb", (shape.dense, shape.dense * d)), *_crosses(settings, every)]
            return [*start, *_linears("DNN_.", every, *hidden), Layer("linear", "fc", (last, 1))]
        case "deepfefm":
            return _deepfefm(shape, hidden)
        case "dlrm":
            return [*_dlrm(settings, shape), table]
        case "difm":
            return list(_difm(settings, shape, hidden))
        case "flen":
            return list(_flen(settings, shape, hidden))
        case "fat_deepffm":
            return list(_fat_deepffm(shape, hidden))
        case "autofis":
            return list(_autofis(shape, hidden))
        case "fgcnn" | "sign":
            why = {
                "fgcnn": "each of its fields has two tables of its own",
                "sign": "it was trained by squared error, and its scores are clipped, not probabilities",
            }
            raise CheckpointError(
                f"saved models of {network} cannot be imported: {why[network]}", "train the model here"
            )
        case _:
            return _xdeepfm(settings, shape, hidden)


def _factors(prefix: str, shape: Shape) -> list[Layer]:
    tables = [Layer("embedding", f"{prefix}.embedding_one"), Layer("embedding", f"{prefix}.embedding")]
    one = Layer("parameter", f"{prefix}.dense_w_one", (shape.dense,))
    return [*tables, one, Layer("parameter", f"{prefix}.dense_w", (1, shape.dense, shape.factors))]


def _gatenet(settings: Mapping[str, Any], shape: Shape, table: Layer, hidden: tuple[int, ...]) -> Iterator[Layer]:
    if settings.get("embedding_gate", True):
        for i in range(shape.slots):
            yield Layer("parameter", f"embedding_gate_weight_{i}", (1,), f"embedding_gate_weight_{i}")
    yield table
    yield Layer("linear", "last_layer", (hidden[-1], 1))
    for i, linear in enumerate(_linears("", shape.width, *hidden)):
        yield linear
        if settings.get("hidden_gate", True):
            yield Layer("parameter", f"hidden_gate_weight_{i}", (hidden[i], hidden[i]), f"hidden_gate_weight_{i}")


def _crosses(settings: Mapping[str, Any], n: int) -> Iterator[Layer]:
    net, count, rank = "DeepCrossLayer_.crossNet", settings.get("layers", 3), settings.get("rank")
    if rank is None:
        yield from (Layer("linear", f"{net}.cross_layers.{i}", (n, n)) for i in range(count))
        return
    experts = settings.get("experts") or 4
    for part, size in (("U_list", (n, rank)), ("V_list", (n, rank)), ("C_list", (rank, rank))):
        yield from (Layer("parameter", f"{net}.{part}.{i}", (experts, *size)) for i in range(count))
    yield from (Layer("linear", f"{net}.gating.{k}", (n, 1)) for k in range(experts))
    yield from (Layer("parameter", f"{net}.bias.{i}", (n, 1)) for i in range(count))


def _deepfefm(shape: Shape, hidden: tuple[int, ...]) -> list[Layer]:
    d, sparse = shape.factors, shape.slots - len(shape.bucketed)
    pairs = [f"{i}-{j}" for i in range(shape.slots) for j in range(i + 1, shape.slots)]
    matrices = [Layer("parameter", f"fefm.field_embeddings.{pair}", (d, d), optional=True) for pair in pairs]
    start = [layer for layer in _factors("fefm", shape) if layer.name != "fefm.dense_w"]
    width = sparse * d + shape.dense + len(pairs)
    return [*start, *matrices, *_linears("dnn.", width, *hidden, 1), Layer("parameter", "bias", (1,), optional=True)]


def _normed(prefix: str, *widths: int) -> Iterator[Layer]:
    for i, pair in enumerate(pairwise(widths)):
        yield Layer("linear", f"{prefix}.dense_{i}", pair)
        yield Layer("norm", f"{prefix}.norm_{i}", pair[1:])


def _difm(settings: Mapping[str, Any], shape: Shape, hidden: tuple[int, ...]) -> Iterator[Layer]:
    n, d, width = shape.slots + 1, shape.factors, settings["width"]
    yield from _normed("fen_layer.fen_mlp", n * d, *hidden, n)
    yield Layer("embedding", "fen_layer.sparse_weight", named="SparseFeatFactors2")
    yield Layer("embedding", "fen_layer.sparse_embedding", named="SparseFeatFactors")
    yield Layer("linear", "fen_layer.dense_linear", (shape.dense, 1))
    yield from _normed("fen_layer.dense_mlp", shape.dense, *settings["dense_hidden"], d)
    yield from _normed("fen_layer.dnn_mlp", d, 1)
    yield Layer("parameter", "fm_layer.bias", (1,))
    for name in ("Query", "Key", "Value", "Res"):
        yield Layer("parameter", f"mha_layer.W_{name}", (d, width))
    yield from _normed("mha_layer.dnn_layer", n * width, n)


def _flen(settings: Mapping[str, Any], shape: Shape, hidden: tuple[int, ...]) -> Iterator[Layer]:
    d, groups = shape.factors, len(settings["groups"])
    yield Layer("embedding", "_EmbeddingLayer.embedding")
    for i, pair in enumerate(pairwise((shape.slots * d, *hidden))):
        yield Layer("linear", f"_DNNLayer.linear_{i}", pair)
        yield Layer("norm", f"_DNNLayer.norm_{i}", pair[1:])
    yield Layer("parameter", "_FieldWiseBiInteraction.kernel_mf", (groups * (groups - 1) // 2, 1))
    yield Layer("linear", "fwbi_fc_32", (d, d))
    yield Layer("norm", "fwbi_bn", (d,))
    yield Layer("linear", "linear", (d + hidden[-1], 1))


def _fat_deepffm(shape: Shape, hidden: tuple[int, ...]) -> Iterator[Layer]:
    n, d = shape.slots + shape.dense, shape.dim
    yield Layer("embedding", "cen.embedding")
    yield Layer("parameter", "cen.dense_w", (1, shape.dense, n * d))
    yield Layer("linear", "cen.fc.ReductionLinear", (n * n, n * n))
    yield Layer("linear", "cen.fc.AdditionLinear", (n * n, n * n))
    yield from _linears("dnn.", n * (n - 1) // 2 * d, *hidden, 1)
    yield Layer("parameter", "bias", (1,))


def _autofis(shape: Shape, hidden: tuple[int, ...]) -> Iterator[Layer]:
    pairs = shape.slots * (shape.slots - 1) // 2
    yield Layer("embedding", "w_embeddings")
    yield Layer("embedding", "v_embeddings")
    yield from (Layer("norm", f"bn.{i}", (width,)) for i, width in enumerate(hidden))
    for i, pair in enumerate(pairwise((shape.slots * shape.factors, *hidden, 1))):
        yield Layer("linear", f"linear.{i}", pair)
    yield Layer("parameter", "mask", (1, pairs))
    yield Layer("norm", "bn2", (pairs,))


def _dlrm(settings: Mapping[str, Any], shape: Shape) -> Iterator[Layer]:
    products = (shape.slots + 1) * shape.slots // 2
    bottom, top = (shape.dense, *settings["bottom"], shape.factors), (shape.factors + products, *settings["top"], 2)
    for name, widths in (("bot_mlp", bottom), ("top_mlp", top)):
        yield from _normed(name, *widths)


def _xdeepfm(settings: Mapping[str, Any], shape: Shape, hidden: tuple[int, ...]) -> list[Layer]:
    n, cin = shape.slots + shape.dense, tuple(settings["cin"])
    convs = [Layer("conv", f"cin.cnn_{i}", (h, n * below, 1, 1)) for i, (below, h) in enumerate(pairwise((n, *cin)))]
    last = [*_linears("dnn.", n * shape.factors, *hidden, 1), Layer("parameter", "bias", (1,))]
    return [*_factors("linear", shape), *convs, Layer("linear", "cin.cin_linear", (sum(cin), 1)), *last]


def by_position(arrays: Arrays, wanted: list[Layer]) -> Arrays:
    """Return the arrays of a dygraph or static file, named by position. Omit arrays that the network does not have."""
    places = {part for layer in wanted for part in layer.parts}
    if (places - {layer.named for layer in wanted}) & arrays.keys():
        found = {name: array for name, array in arrays.items() if name in places}
        for part in ("weight", "bias"):  # a layer that was added under two names
            if f"cin.cnn_fc.{part}" in arrays and "cin.cin_linear.weight" in places:
                found.setdefault(f"cin.cin_linear.{part}", arrays[f"cin.cnn_fc.{part}"])
        return found
    found = {
        layer.name + (".weight" if layer.kind == "embedding" else ""): arrays[layer.named]
        for layer in wanted
        if layer.named in arrays
    }
    for kind, pattern in STATIC.items():
        matches = [m for m in (re.fullmatch(pattern, name) for name in arrays) if m]
        numbers = sorted({int(m[1]) for m in matches})
        unnamed = [layer for layer in wanted if layer.kind == kind and layer.named not in arrays]
        for m in matches:
            place = numbers.index(int(m[1]))
            if place < len(unnamed):
                part = STATIC_PARTS[m[2]] if len(m.groups()) > 1 else PARTS[kind][0]
                found[f"{unnamed[place].name}.{part}" if part else unnamed[place].name] = arrays[m[0]]
    return found


def check(found: Arrays, wanted: list[Layer], source: str) -> list[str]:
    """Reject missing arrays and wrong shapes. Return the names of missing arrays that are optional."""
    absent = []
    for layer in wanted:
        for name, shape in layer.shapes.items():
            if name not in found:
                if not layer.optional:
                    raise CheckpointError(
                        f"{source} has no {name}, which the network needs",
                        "check that the file belongs to this network, which the name of the configuration's folder selects",
                    )
                absent.append(name)
            elif found[name].shape != shape:
                raise CheckpointError(
                    f"{source}: {name} has shape {found[name].shape}, but the configuration needs {shape}",
                    "check fc_sizes, sparse_feature_dim and the other widths in hyper_parameters",
                )
    return absent


def split_dense(values: Any, wanted: list[Layer], source: str) -> Arrays:
    """Split the values of a dense table into arrays by name. The table holds parameters in the order of their static names."""
    found: Arrays = {}
    at = 0
    for name, shape in dense_order(wanted):
        size = int(np.prod(shape))
        found[name] = values[at : at + size].reshape(shape) if at + size <= len(values) else values[:0]
        at += size
    if at != len(values):
        raise CheckpointError(
            f"{source} has {len(values)} dense values, but the network needs {at}",
            "check fc_sizes and the other widths in hyper_parameters",
        )
    return found


def dense_order(wanted: list[Layer]) -> list[tuple[str, tuple[int, ...]]]:
    """Return position and shape of every parameter in a dense table. Running statistics are not parameters."""
    names = static_names(wanted)
    shapes = [item for layer in wanted for item in list(layer.shapes.items())[:2]]
    return sorted(shapes, key=lambda item: names[item[0]])


def static_names(wanted: list[Layer], linear: str = "linear") -> dict[str, str]:
    """Return the name in static files of every array, by position. Embeddings without a name of their own are numbered too."""
    kinds = {"linear": linear, "parameter": "create_parameter", "conv": "conv2d", "norm": "batch_norm1d"}
    kinds |= {"embedding": "embedding"}
    counts, names = dict.fromkeys(kinds, 0), {}
    for layer in wanted:
        base = layer.named or f"{kinds[layer.kind]}_{counts[layer.kind]}"
        counts[layer.kind] += not layer.named
        for name, part in zip(layer.parts, ("w_0", "b_0", "w_1", "w_2"), strict=False):
            names[name] = base if layer.named else f"{base}.{part}"
    return names


SUMMED = ("cin.cin_linear.bias",)
"""Biases that ours has in a sum with another. An export writes zeros for them and the sum for the other."""


def their_arrays(
    network: str, ours: Arrays, wanted: list[Layer], shape: Shape, settings: Mapping[str, Any]
) -> Arrays | None:
    """Return PaddleRec's arrays by position, from which `our_tensors` makes ours. None: our network is not PaddleRec's.

    `our_tensors` only moves numbers. Here it moves their places, which tells where each number of ours belongs.
    """
    shapes = {name: size for layer in wanted for name, size in layer.shapes.items()}
    places, end = {}, 0
    for name, size in shapes.items():
        if name not in SUMMED:
            places[name] = np.arange(end, end + int(np.prod(size))).reshape(size)
            end += places[name].size
    try:
        moved = our_tensors(network, places, shape, settings)
    except (IndexError, ValueError):  # the network has other inputs
        return None
    if moved.keys() != ours.keys() or any(moved[name].shape != ours[name].shape for name in moved):
        return None
    values = np.zeros(end, np.float32)
    for name, at in moved.items():
        values[at] = ours[name]
    return {
        name: values[places[name]] if name in places else np.zeros(size, np.float32) for name, size in shapes.items()
    }


def our_tensors(network: str, found: Arrays, shape: Shape, settings: Mapping[str, Any]) -> Arrays:
    """Return our tensors by name. Omit tensors with missing parts."""
    out: Arrays = {}
    hidden = len(settings.get("hidden", ()))

    def put(name: str, theirs: str, how: Any = None) -> None:
        if theirs in found:
            out[name] = found[theirs] if how is None else how(found[theirs])

    def linear(name: str, theirs: str) -> None:
        put(f"{name}.weight", f"{theirs}.weight", np.transpose)
        put(f"{name}.bias", f"{theirs}.bias")

    def stack(name: str, theirs: list[str], how: Any = np.stack) -> None:
        if all(part in found for part in theirs):
            out[name] = how([found[part] for part in theirs])

    def tower(theirs: str, count: int, name: str = "deep.layers.{}", step: int = 1) -> None:
        for i in range(count):
            linear(name.format(step * i), f"{theirs}linear_{i}")

    def norm(name: str, theirs: str) -> None:
        parts = {"weight": "weight", "bias": "bias", "running_mean": "_mean", "running_var": "_variance"}
        for mine, part in parts.items():
            put(f"{name}.{mine}", f"{theirs}.{part}")

    def normed(name: str, theirs: str, count: int) -> None:
        for i in range(count):
            linear(f"{name}.layers.{i}", f"{theirs}.dense_{i}")
            norm(f"{name}.norms.{i}", f"{theirs}.norm_{i}")

    def factors(prefix: str, bias: str | None = None) -> None:
        put("wide.weight", f"{prefix}.dense_w_one")
        put("fields.vectors", f"{prefix}.dense_w", lambda a: a[0])
        if bias is not None:
            put("wide.bias", bias)

    match network:
        case "dnn":
            tower("", hidden + 1)
        case "slot_dnn":
            tower("", hidden + 1)
            if "deep.layers.0.weight" in out:
                out["deep.layers.0.weight"] = out["deep.layers.0.weight"][:, slot_order(shape)]
        case "fm" | "ffm":
            factors(network, "bias")
        case "deepfm":
            factors("fm")
            tower("dnn.", hidden + 1)
        case "wide_deep":
            put("wide.weight", "wide_part.weight", np.ravel)
            put("wide.bias", "wide_part.bias")
            tower("", hidden + 1)
        case "gatenet":
            if settings.get("embedding_gate", True):
                stack("gates", [f"embedding_gate_weight_{i}" for i in range(shape.slots)], np.concatenate)
            tower("", hidden, "layers.{}")
            for i in range(hidden):
                put(f"hidden_gates.{i}", f"hidden_gate_weight_{i}")
            linear("out", "last_layer")
        case "dcn":
            put("weights", "layer_w", lambda a: a[None])
            put("biases", "layer_b", lambda a: a[None])
            tower("", hidden)
            linear("out", "fc")
        case "dcn_v2":
            linear("dense_vectors", "dense_emb")
            net = "DeepCrossLayer_.crossNet"
            for i in range(settings.get("layers", 3)):
                put(f"ups.{i}", f"{net}.cross_layers.{i}.weight", np.transpose)
                put(f"biases.{i}", f"{net}.cross_layers.{i}.bias")
                for mine, theirs in (("ups", "U_list"), ("downs", "V_list"), ("middles", "C_list")):
                    put(f"mixture.{mine}.{i}", f"{net}.{theirs}.{i}")
                put(f"mixture.biases.{i}", f"{net}.bias.{i}", np.ravel)
            if settings.get("rank") is not None:
                experts = range(settings.get("experts") or 4)
                stack(
                    "mixture.gates.weight",
                    [f"{net}.gating.{k}.weight" for k in experts],
                    lambda a: np.concatenate(a, 1).T,
                )
                stack("mixture.gates.bias", [f"{net}.gating.{k}.bias" for k in experts], np.concatenate)
            tower("DNN_.", hidden, "deep.layers.{}", 4)
            linear("out", "fc")
        case "deepfefm":
            put("wide.weight", "fefm.dense_w_one")
            pairs = [f"fefm.field_embeddings.{i}-{j}" for i in range(shape.slots) for j in range(i + 1, shape.slots)]
            stack("matrices", pairs)
            tower("dnn.", hidden + 1, "deep.layers.{}", 4)
        case "dlrm":
            for mine, theirs in (("bottom", "bot_mlp"), ("top", "top_mlp")):
                normed(mine, theirs, len(settings[mine]) + 1)
        case "difm":
            fen, mha = "fen_layer.", "mha_layer."
            normed("bits", fen + "fen_mlp", hidden + 1)
            normed("dense_field", fen + "dense_mlp", len(settings["dense_hidden"]) + 1)
            normed("dense_logit", fen + "dnn_mlp", 1)
            normed("vectors", mha + "dnn_layer", 1)
            put("weight", fen + "dense_linear.weight", np.ravel)
            put("dense_bias", fen + "dense_linear.bias")
            put("bias", "fm_layer.bias")
            parts = [f"{mha}W_{name}" for name in ("Query", "Key", "Value", "Res")]
            stack("maps", parts, lambda a: np.concatenate(a, 1).T)
        case "flen":
            for i in range(hidden):
                linear(f"deep.layers.{6 * i}", f"_DNNLayer.linear_{i}")
                norm(f"deep.layers.{6 * i + 4}", f"_DNNLayer.norm_{i}")
            put("between", "_FieldWiseBiInteraction.kernel_mf", np.ravel)
            linear("layer.0", "fwbi_fc_32")
            norm("layer.2", "fwbi_bn")
            linear("out", "linear")
        case "fat_deepffm":
            put("fields.vectors", "cen.dense_w", lambda a: a[0])
            linear("inner", "cen.fc.ReductionLinear")
            linear("outer", "cen.fc.AdditionLinear")
            tower("dnn.", hidden + 1, "deep.layers.{}", 4)
            put("bias", "bias")
        case "autofis":
            for i in range(hidden + 1):
                linear(f"deep.{3 * i}", f"linear.{i}")
                norm(f"deep.{3 * i + 1}", f"bn.{i}")
            put("gates", "mask", np.ravel)
            norm("norm", "bn2")
        case _:
            factors("linear")
            for i in range(len(settings["cin"])):
                put(f"cin.{i}", f"cin.cnn_{i}.weight", lambda a: a[:, :, 0, 0])
            put("out.weight", "cin.cin_linear.weight", np.transpose)
            stack(
                "wide.bias", [name for name in ("bias", "cin.cin_linear.bias") if name in found], lambda a: np.sum(a, 0)
            )
            tower("dnn.", hidden + 1)
    return out


def slot_order(shape: Shape) -> Any:
    """Return the order of slot_dnn's inputs: ours has all first-order weights, then all factors; PaddleRec's has whole rows."""
    rows = np.arange(shape.slots * (shape.factors + 1)).reshape(shape.slots, -1)
    return np.concatenate([rows[:, 0], rows[:, 1:].ravel()])
