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
        case _:
            return sigmoid(xdeepfm(p, settings, hidden, w, e, x))


def linear(p: Arrays, name: str, h: Array) -> Array:
    return h @ p[f"{name}.weight"] + p[f"{name}.bias"]


def mlp(p: Arrays, prefix: str, count: int, h: Array, relu_last: bool = False) -> Array:
    for i in range(count):
        h = linear(p, f"{prefix}linear_{i}", h)
        h = np.maximum(h, 0) if relu_last or i < count - 1 else h
    return h


def normed(p: Arrays, prefix: str, count: int, h: Array) -> Array:
    for i in range(count):
        h = np.maximum(linear(p, f"{prefix}.dense_{i}", h), 0)
        norm = f"{prefix}.norm_{i}"
        h = (h - p[f"{norm}._mean"]) / np.sqrt(p[f"{norm}._variance"] + 1e-5) * p[f"{norm}.weight"] + p[f"{norm}.bias"]
    return h


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
