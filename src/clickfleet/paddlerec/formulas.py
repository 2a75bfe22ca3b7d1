"""The formulas of PaddleRec's networks in NumPy, over PaddleRec's parameters, to verify an imported model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from clickfleet.paddlerec.pickles import Arrays
from clickfleet.training.network import Shape

Array = Any


def sigmoid(z: Array) -> Array:
    return 1 / (1 + np.exp(-z))


def score(network: str, p: Arrays, settings: Mapping[str, Any], shape: Shape, w: Array, e: Array, x: Array) -> Array:
    """Return the click probabilities. `w` [B, S] and `e` [B, S, d] are the embeddings, `x` [B, F] the dense values."""
    p = {name: array.astype(np.float64) for name, array in p.items() if array.dtype.kind == "f"}
    w, e, x = (part.astype(np.float64) for part in (w, e, x))
    hidden, flat = len(settings.get("hidden", ())), e.reshape(len(e), -1)
    match network:
        case "dnn":
            z = mlp(p, "", hidden + 1, np.concatenate([flat, x], 1))
            return sigmoid(z[:, 1] - z[:, 0])
        case "slot_dnn":
            rows = np.concatenate([w[:, :, None], e], 2).reshape(len(e), -1)
            return sigmoid(np.clip(mlp(p, "", hidden + 1, rows)[:, 0], -15, 15))
        case "fm":
            return sigmoid(first(p, "fm", w, x) + pairs(fields(p, "fm", e, x)) + p["bias"])
        case "ffm":
            f = fields(p, "ffm", e, x)
            n = f.shape[1]
            v = f.reshape(len(f), n, n, -1)
            second = sum((v[:, i, j] * v[:, j, i]).sum(1) for i in range(n) for j in range(i + 1, n))
            return sigmoid(first(p, "ffm", w, x) + second + p["bias"])
        case "deepfm":
            f = fields(p, "fm", e, x)
            deep = mlp(p, "dnn.", hidden + 1, f.reshape(len(f), -1))[:, 0]
            return sigmoid(first(p, "fm", w, x) + pairs(f) + deep)
        case "wide_deep":
            wide = linear(p, "wide_part", x)[:, 0]
            return sigmoid(wide + mlp(p, "", hidden + 1, np.concatenate([flat, x], 1))[:, 0])
        case "gatenet":
            return sigmoid(gatenet(p, settings, hidden, e, x))
        case "dcn":
            return sigmoid(dcn(p, settings, hidden, np.concatenate([flat, x], 1)))
        case "dcn_v2":
            return sigmoid(dcn_v2(p, settings, hidden, np.concatenate([flat, linear(p, "dense_emb", x)], 1)))
        case "deepfefm":
            return sigmoid(deepfefm(p, hidden, shape, w, e, x))
        case "dlrm":
            u = normed(p, "bot_mlp", len(settings["bottom"]) + 1, x)
            t = np.concatenate([e, u[:, None]], 1)
            upper = np.triu_indices(t.shape[1], 1)
            products = (t @ t.transpose(0, 2, 1))[:, upper[0], upper[1]]
            z = normed(p, "top_mlp", len(settings["top"]) + 1, np.concatenate([u, products], 1))
            return sigmoid(z[:, 1] - z[:, 0])
        case "difm":
            return sigmoid(difm(p, settings, hidden, w, e, x))
        case "flen":
            return sigmoid(flen(p, settings, hidden, shape, e))
        case "fat_deepffm":
            return sigmoid(fat_deepffm(p, hidden, shape, e, x))
        case "autofis":
            return sigmoid(autofis(p, hidden, w, e))
        case _:
            return sigmoid(xdeepfm(p, settings, hidden, w, e, x))


def linear(p: Arrays, name: str, h: Array) -> Array:
    return h @ p[f"{name}.weight"] + p[f"{name}.bias"]


def mlp(p: Arrays, prefix: str, count: int, h: Array, relu_last: bool = False) -> Array:
    for i in range(count):
        h = linear(p, f"{prefix}linear_{i}", h)
        h = np.maximum(h, 0) if relu_last or i < count - 1 else h
    return h


def norm(p: Arrays, name: str, h: Array) -> Array:
    return (h - p[f"{name}._mean"]) / np.sqrt(p[f"{name}._variance"] + 1e-5) * p[f"{name}.weight"] + p[f"{name}.bias"]


def normed(p: Arrays, prefix: str, count: int, h: Array) -> Array:
    for i in range(count):
        h = norm(p, f"{prefix}.norm_{i}", np.maximum(linear(p, f"{prefix}.dense_{i}", h), 0))
    return h


def softmax(z: Array) -> Array:
    share = np.exp(z - z.max(-1, keepdims=True))
    return share / share.sum(-1, keepdims=True)


def first(p: Arrays, prefix: str, w: Array, x: Array) -> Array:
    return w.sum(1) + x @ p[f"{prefix}.dense_w_one"]


def fields(p: Arrays, prefix: str, e: Array, x: Array) -> Array:
    return np.concatenate([e, x[:, :, None] * p[f"{prefix}.dense_w"]], 1)


def pairs(f: Array) -> Array:
    return (f.sum(1) ** 2 - (f**2).sum(1)).sum(1) / 2


def gatenet(p: Arrays, settings: Mapping[str, Any], hidden: int, e: Array, x: Array) -> Array:
    if settings.get("embedding_gate", True):
        gates = np.concatenate([p[f"embedding_gate_weight_{i}"] for i in range(e.shape[1])])
        e = e * sigmoid(gates * e.sum(2))[:, :, None]
    h = np.concatenate([e.reshape(len(e), -1), x], 1)
    for i in range(hidden):
        h = np.maximum(linear(p, f"linear_{i}", h), 0)
        if settings.get("hidden_gate", True):
            h = h * np.tanh(h @ p[f"hidden_gate_weight_{i}"])
    return linear(p, "last_layer", h)[:, 0]


def dcn(p: Arrays, settings: Mapping[str, Any], hidden: int, x0: Array) -> Array:
    crossed = x0
    for _ in range(settings.get("layers", 2)):
        crossed = x0 * (crossed @ p["layer_w"])[:, None] + p["layer_b"] + crossed
    return linear(p, "fc", np.concatenate([mlp(p, "", hidden, x0, relu_last=True), crossed], 1))[:, 0]


def dcn_v2(p: Arrays, settings: Mapping[str, Any], hidden: int, x0: Array) -> Array:
    net, crossed = "DeepCrossLayer_.crossNet", x0
    for i in range(settings.get("layers", 3)):
        if settings.get("rank") is None:
            crossed = crossed + x0 * linear(p, f"{net}.cross_layers.{i}", crossed)
            continue
        experts, u, v, c = range(settings.get("experts") or 4), *(p[f"{net}.{part}_list.{i}"] for part in "UVC")
        gates = np.concatenate([linear(p, f"{net}.gating.{k}", crossed) for k in experts], 1)
        share = np.exp(gates - gates.max(1, keepdims=True))
        share /= share.sum(1, keepdims=True)
        bias = p[f"{net}.bias.{i}"].ravel()
        each = [x0 * (np.tanh(np.tanh(crossed @ v[k]) @ c[k].T) @ u[k].T + bias) for k in experts]
        crossed = sum(share[:, k : k + 1] * each[k] for k in experts) + crossed
    if settings.get("structure") == "stacked":
        return linear(p, "fc", mlp(p, "DNN_.", hidden, crossed, relu_last=True))[:, 0]
    return linear(p, "fc", np.concatenate([mlp(p, "DNN_.", hidden, x0, relu_last=True), crossed], 1))[:, 0]


def deepfefm(p: Arrays, hidden: int, shape: Shape, w: Array, e: Array, x: Array) -> Array:
    sparse = shape.slots - len(shape.bucketed)
    z = []
    for i in range(shape.slots):
        for j in range(i + 1, shape.slots):
            m = p[f"fefm.field_embeddings.{i}-{j}"]
            z.append(((e[:, i] @ (m + m.T)) * e[:, j]).sum(1))
    products, ax = np.stack(z, 1), x * p["fefm.dense_w_one"]
    deep = mlp(p, "dnn.", hidden + 1, np.concatenate([e[:, :sparse].reshape(len(e), -1), ax, products], 1))[:, 0]
    return w[:, :sparse].sum(1) + ax.sum(1) + products.sum(1) + deep


def xdeepfm(p: Arrays, settings: Mapping[str, Any], hidden: int, w: Array, e: Array, x: Array) -> Array:
    x0 = fields(p, "linear", e, x)
    maps, sums = x0, []
    for i in range(len(settings["cin"])):
        outer = x0[:, :, None] * maps[:, None]
        maps = np.einsum("hc,bcd->bhd", p[f"cin.cnn_{i}.weight"][:, :, 0, 0], outer.reshape(len(x0), -1, x0.shape[2]))
        sums.append(maps.sum(2))
    cin = linear(p, "cin.cin_linear", np.concatenate(sums, 1))[:, 0]
    deep = mlp(p, "dnn.", hidden + 1, x0.reshape(len(x0), -1))[:, 0]
    return first(p, "linear", w, x) + p["bias"] + cin + deep


def difm(p: Arrays, settings: Mapping[str, Any], hidden: int, w: Array, e: Array, x: Array) -> Array:
    dense = normed(p, "fen_layer.dense_mlp", len(settings["dense_hidden"]) + 1, x)
    own = normed(p, "fen_layer.dnn_mlp", 1, dense)[:, 0]
    f = np.concatenate([dense[:, None], e], 1)
    w = np.concatenate([linear(p, "fen_layer.dense_linear", x), w], 1)
    q, k, v, residual = (f @ p[f"mha_layer.W_{name}"] for name in ("Query", "Key", "Value", "Res"))
    heads = settings["heads"]
    parts = []
    for qh, kh, vh in zip(*(np.split(part, heads, 2) for part in (q, k, v)), strict=True):
        parts.append(softmax(qh @ kh.transpose(0, 2, 1) / np.sqrt(qh.shape[2])) @ vh)
    attended = np.concatenate(parts, 2) + residual
    m = normed(p, "mha_layer.dnn_layer", 1, attended.reshape(len(f), -1))
    m = softmax(m + normed(p, "fen_layer.fen_mlp", hidden + 1, f.reshape(len(f), -1)))
    return (m * w).sum(1) + pairs(m[:, :, None] * f) + p["fm_layer.bias"] + own


def flen(p: Arrays, settings: Mapping[str, Any], hidden: int, shape: Shape, e: Array) -> Array:
    groups = [[shape.slot_names.index(name) for name in group] for group in settings["groups"]]
    sums = [e[:, group].sum(1) for group in groups]
    left, right = np.triu_indices(len(sums), 1)
    kernel = p["_FieldWiseBiInteraction.kernel_mf"].ravel()
    h = sum(r * sums[i] * sums[j] for r, i, j in zip(kernel, left, right, strict=True))
    h = norm(p, "fwbi_bn", np.maximum(linear(p, "fwbi_fc_32", h), 0))
    deep = e.reshape(len(e), -1)
    for i in range(hidden):
        deep = norm(p, f"_DNNLayer.norm_{i}", np.maximum(linear(p, f"_DNNLayer.linear_{i}", deep), 0))
    return linear(p, "linear", np.concatenate([h, deep], 1))[:, 0]


def fat_deepffm(p: Arrays, hidden: int, shape: Shape, e: Array, x: Array) -> Array:
    n = shape.slots + shape.dense
    f = fields(p, "cen", e, x).reshape(len(e), n * n, -1)
    attention = np.maximum(linear(p, "cen.fc.ReductionLinear", f.max(2)), 0)
    attention = np.maximum(linear(p, "cen.fc.AdditionLinear", attention), 0)
    f = (f * attention[:, :, None]).reshape(len(e), n, n, -1)
    products = [f[:, i, j] * f[:, j, i] for i in range(n) for j in range(i + 1, n)]
    return f.sum((1, 2, 3)) + mlp(p, "dnn.", hidden + 1, np.concatenate(products, 1))[:, 0] + p["bias"]


def autofis(p: Arrays, hidden: int, w: Array, e: Array) -> Array:
    h = e.reshape(len(e), -1)
    for i in range(hidden):
        h = np.maximum(norm(p, f"bn.{i}", linear(p, f"linear.{i}", h)), 0)
    left, right = np.triu_indices(e.shape[1], 1)
    products = norm(p, "bn2", (e[:, left] * e[:, right]).sum(2)) * p["mask"]
    return w.sum(1) + products.sum(1) + linear(p, f"linear.{hidden}", h)[:, 0]
