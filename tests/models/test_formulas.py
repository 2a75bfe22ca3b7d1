"""The formulas of single models against NumPy written straight from the paper, and the originals' peculiarities."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from clickfleet.errors import ConfigError
from clickfleet.models.autofis import AutoFIS
from clickfleet.models.autoint import AutoInt
from clickfleet.models.dcn import DCN
from clickfleet.models.dcn_v2 import DCNv2
from clickfleet.models.deepfefm import DeepFEFM
from clickfleet.models.deepfm import DeepFM
from clickfleet.models.difm import DIFM
from clickfleet.models.dlrm import DLRM
from clickfleet.models.dnn import DNN
from clickfleet.models.fat_deepffm import FATDeepFFM
from clickfleet.models.ffm import FFM
from clickfleet.models.fgcnn import FGCNN
from clickfleet.models.final_mlp import FinalMLP
from clickfleet.models.flen import FLEN
from clickfleet.models.fm import FM
from clickfleet.models.gate_dnn import GateDNN
from clickfleet.models.sign import SIGN
from clickfleet.models.slot_dnn import SlotDNN
from clickfleet.models.wide_deep import WideDeep
from clickfleet.models.xdeepfm import XDeepFM
from clickfleet.training.network import Inputs, Shape, TableInit

S, F, D = 3, 2, 4
SHAPE = Shape(F, S, D, D, ("a", "b", "c"), ("x", "y"))


def inputs(factors: int = D, rows: int = 2) -> Inputs:
    torch.manual_seed(9)
    return Inputs(torch.rand(rows, F), torch.randn(rows, S), torch.randn(rows, S, factors))


def arrays(x: Inputs) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return x.dense.numpy(), x.first.numpy(), x.factors.numpy()


def test_fm() -> None:
    x, model = inputs(), FM(FM.Config(), SHAPE)
    with torch.no_grad():
        model.wide.weight.copy_(torch.tensor([2.0, -1.0]))
        model.wide.bias.fill_(0.5)
    dense, first, factors = arrays(x)
    vectors = model.fields.vectors.detach().numpy()
    for b in range(2):
        fields = [*factors[b], *(dense[b, i] * vectors[i] for i in range(F))]
        pairs = sum(fields[f] @ fields[g] for f in range(5) for g in range(f + 1, 5))
        expected = first[b].sum() + 2 * dense[b, 0] - dense[b, 1] + 0.5 + pairs
        assert model(x)[b].item() == pytest.approx(expected, rel=1e-5)


def test_ffm_pairs_meet_in_each_others_vectors() -> None:
    config = FFM.Config()
    width = FFM.row_factors(config, D, S, F)
    assert width == (S + F) * D
    x, model = inputs(width), FFM(config, Shape(F, S, D, width))
    dense, first, factors = arrays(x)
    own = model.fields.vectors.detach().numpy()
    for b in range(2):
        e = np.concatenate([factors[b], dense[b][:, None] * own]).reshape(S + F, S + F, D)
        pairs = sum(e[f, g] @ e[g, f] for f in range(S + F) for g in range(f + 1, S + F))
        assert model(x)[b].item() == pytest.approx(first[b].sum() + pairs, rel=1e-4)


@pytest.mark.parametrize("paddlerec", [False, True])
def test_dcn_cross_layers(paddlerec: bool) -> None:
    x, model = inputs(), DCN(DCN.Config(layers=2, hidden=(4,), paddlerec=paddlerec), SHAPE)
    with torch.no_grad():
        model.biases.normal_()
    assert len(model.weights) == (1 if paddlerec else 2)
    dense, _, factors = arrays(x)
    w, c = (p.detach().numpy() for p in (model.weights, model.biases))
    weight, bias = model.out.weight.detach().numpy()[0], model.out.bias.item()
    penalty = 0.0
    for b in range(2):
        x0 = np.concatenate([factors[b].ravel(), dense[b]])
        crossed = x0
        for layer in range(2):
            own = 0 if paddlerec else layer
            penalty += float(np.sum((crossed * w[own]) ** 2))
            crossed = x0 * (crossed @ w[own]) + c[own] + crossed
        deep = model.deep(torch.from_numpy(x0)[None]).detach().numpy()[0]
        assert model(x)[b].item() == pytest.approx(np.concatenate([deep, crossed]) @ weight + bias, rel=1e-4, abs=1e-5)
    if paddlerec:
        extra = model.extra_loss()
        assert extra is not None
        assert extra.item() == pytest.approx(penalty, rel=1e-5)  # unscaled, summed over the batch
        model.eval()(x)
        assert model.extra_loss() is None


def test_dcn_l2_is_on_the_cross_weights() -> None:
    model = DCN(DCN.Config(hidden=(4,), l2=0.5), SHAPE)
    extra = model.extra_loss()
    assert extra is not None
    assert extra.item() == pytest.approx(0.25 * model.weights.square().sum().item())


@pytest.mark.parametrize("rank", [None, 2])
def test_dcn_v2_stacked(rank: int | None) -> None:
    x, model = inputs(), DCNv2(DCNv2.Config(layers=2, rank=rank, structure="stacked", hidden=(4,)), SHAPE)
    x0 = torch.cat([x.factors.flatten(1), x.dense], 1).numpy()
    crossed = x0
    for layer in range(2):
        w = model.ups[layer].detach().numpy()
        if rank:
            w = w @ model.downs[layer].detach().numpy()
        crossed = x0 * (crossed @ w.T + model.biases[layer].detach().numpy()) + crossed
    np.testing.assert_allclose(model(x).detach(), model.deep(torch.from_numpy(crossed))[:, 0].detach(), rtol=1e-4)


def test_dlrm_products_stand_above_the_diagonal_row_by_row() -> None:
    x, model = inputs(), DLRM(DLRM.Config(bottom=(5,), top=(6,)), SHAPE)
    u = model.bottom(x.dense).detach().numpy()
    for b in range(2):
        t = [*x.factors[b].numpy(), u[b]]  # the slots, then the bottom's output
        products = [t[i] @ t[j] for i in range(4) for j in range(i + 1, 4)]
        top = torch.tensor(np.concatenate([u[b], products])[None])
        assert model(x)[b].item() == pytest.approx(model.top(top).item(), rel=1e-5)


def test_deepfefm_pairs() -> None:
    x, model = inputs(), DeepFEFM(DeepFEFM.Config(hidden=(4,)), SHAPE)
    dense, first, factors = arrays(x)
    m = model.matrices.detach().numpy()
    for b in range(2):
        pairs = [(0, 1), (0, 2), (1, 2)]
        z = [factors[b, i] @ (m[p] + m[p].T) @ factors[b, j] for p, (i, j) in enumerate(pairs)]
        deep = torch.tensor(np.concatenate([factors[b].ravel(), dense[b], z]).astype(np.float32)[None])
        expected = first[b].sum() + sum(z) + model.deep(deep).item()
        assert model(x)[b].item() == pytest.approx(expected, rel=1e-4)


def test_deepfefm_original_sees_no_bucketed_slots_in_its_mlp() -> None:
    shape = Shape(F, S, D, D, bucketed=(2,))
    model = DeepFEFM(DeepFEFM.Config(hidden=(4,), paddlerec=True), shape)
    assert model.deep.layers[0].weight.shape == (4, 2 * D + F + 3)
    assert model.matrices.requires_grad
    assert model.extra_loss() is not None
    x = inputs()
    other = x._replace(first=x.first.clone())
    other.first[:, 2] += 1
    assert torch.equal(model.eval()(x), model(other))


def test_xdeepfm_cin() -> None:
    x, model = inputs(), XDeepFM(XDeepFM.Config(cin=(3, 2), hidden=(4,)), SHAPE)
    _, first, _ = arrays(x)
    x0 = model.fields(x.factors, x.dense).detach().numpy()
    n = S + F
    for b in range(2):
        below, sums = x0[b], []
        for weight in model.cin:
            w = weight.detach().numpy().reshape(len(weight), n, len(below))
            below = np.array(
                [
                    sum(w[h, i, j] * x0[b, i] * below[j] for i in range(n) for j in range(len(below)))
                    for h in range(len(w))
                ]
            )
            sums.extend(below.sum(1))
        cin = model.out.weight.detach().numpy()[0] @ np.array(sums)
        deep = model.deep(torch.from_numpy(x0[b : b + 1])).item()
        assert model(x)[b].item() == pytest.approx(first[b].sum() + cin + deep, rel=1e-4, abs=1e-5)


def test_gate_dnn() -> None:
    x, model = inputs(), GateDNN(GateDNN.Config(hidden=(4,)), SHAPE)
    dense, _, factors = arrays(x)
    linear, gate = model.layers[0], model.hidden_gates[0].detach().numpy()
    for b in range(2):
        gated = [e / (1 + np.exp(-1.0 * e.sum())) for e in factors[b]]
        h = torch.tensor(np.concatenate([*gated, dense[b]])[None])
        h = np.maximum(linear(h).detach().numpy()[0], 0)
        h = h * np.tanh(h @ gate + 1.0)  # open at the start
        assert model(x)[b].item() == pytest.approx(
            h @ model.out.weight.detach().numpy()[0] + model.out.bias.item(), abs=1e-5
        )


def test_autoint_attention() -> None:
    x, model = inputs(), AutoInt(AutoInt.Config(layers=1, heads=2, width=4, hidden=()), SHAPE)
    fields = model.fields(x.factors, x.dense).detach().numpy()
    q, k, v, r = np.split(model.maps[0].detach().numpy(), 4)
    for b in range(2):
        h = fields[b]
        heads = []
        for part in (slice(0, 2), slice(2, 4)):
            scores = (h @ q[part].T) @ (h @ k[part].T).T
            attention = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
            heads.append(attention @ (h @ v[part].T))
        out = np.maximum(np.concatenate(heads, 1) + h @ r.T, 0)
        expected = out.ravel() @ model.out.weight.detach().numpy()[0] + model.out.bias.item()
        assert model(x)[b].item() == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_final_mlp_joins_its_streams_by_heads_and_gates_by_named_slots() -> None:
    config = FinalMLP.Config(hidden1=(6,), hidden2=(4,), heads=2, gate_hidden=3, gate1_slots=("b",))
    x, model = inputs(), FinalMLP(config, SHAPE)
    x0 = torch.cat([x.factors.flatten(1), x.dense], 1)
    gate1 = model.gate1
    named = 2 * torch.sigmoid(gate1.outer(torch.relu(gate1.inner(x.factors[:, 1]))))
    o1 = model.deep1(x0 * named).detach().numpy()
    o2 = model.deep2(x0 * model.gate2(x.factors)).detach().numpy()
    w = model.bilinear.detach().numpy()
    for b in range(2):
        both = sum(o1[b, 3 * h : 3 * h + 3] @ w[h] @ o2[b, 2 * h : 2 * h + 2] for h in range(2))
        linear = np.concatenate([o1[b], o2[b]]) @ model.out.weight.detach().numpy()[0] + model.out.bias.item()
        assert model(x)[b].item() == pytest.approx(linear + both, rel=1e-4, abs=1e-5)


def softmax(scores: np.ndarray) -> np.ndarray:
    share = np.exp(scores - scores.max(-1, keepdims=True))
    return share / share.sum(-1, keepdims=True)


@pytest.mark.parametrize("paddlerec", [False, True])
def test_difm_scales_weights_and_vectors_by_what_the_row_holds(paddlerec: bool) -> None:
    config = DIFM.Config(hidden=(6,), heads=2, width=4, paddlerec=paddlerec, dense_hidden=(5,) if paddlerec else None)
    x, model = inputs(), DIFM(config, SHAPE).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=0.1)
    dense, first, factors = arrays(x)
    q, k, v, r = np.split(model.maps.detach().numpy(), 4)
    a = model.weight.detach().numpy()
    for b in range(2):
        logit = model.bias.item()
        if paddlerec:  # all dense columns are the first field
            field = model.dense_field(x.dense)[b : b + 1].detach()
            e = np.concatenate([field.numpy(), factors[b]])
            w = np.concatenate([[dense[b] @ a + model.dense_bias.item()], first[b]])
            logit += model.dense_logit(field).item()
        else:
            e = np.concatenate([factors[b], dense[b][:, None] * model.fields.vectors.detach().numpy()])
            w = np.concatenate([first[b], a * dense[b]])
        heads = []
        for part in (slice(0, 2), slice(2, 4)):
            attention = softmax((e @ q[part].T) @ (e @ k[part].T).T / np.sqrt(2))
            heads.append(attention @ (e @ v[part].T))
        h = torch.tensor((np.concatenate(heads, 1) + e @ r.T).ravel()[None], dtype=torch.float32)
        m = (model.vectors(h) + model.bits(torch.tensor(e.ravel()[None], dtype=torch.float32))).detach().numpy()[0]
        m = softmax(m) if paddlerec else m
        n = len(e)
        pairs = sum(m[i] * m[j] * (e[i] @ e[j]) for i in range(n) for j in range(i + 1, n))
        assert model(x)[b].item() == pytest.approx(logit + m @ w + pairs, rel=1e-4, abs=1e-5)


def test_difm_starts_as_a_factorization_machine() -> None:
    x, model = inputs(), DIFM(DIFM.Config(), SHAPE)
    with torch.no_grad():
        for part in (model.bits, model.vectors):
            part.layers[-1].weight.zero_()
        vectors = model.fields(x.factors, x.dense)
        pairs = (vectors.sum(1).square() - vectors.square().sum(1)).sum(1) / 2
        torch.testing.assert_close(model(x), x.first.sum(1) + pairs)


def test_flen_has_one_weight_for_each_pair_of_groups() -> None:
    x, model = inputs(), FLEN(FLEN.Config(groups=(("c", "a"),), hidden=(4,)), SHAPE)
    with torch.no_grad():
        model.between.normal_()
        model.inside.normal_()
    dense, first, factors = arrays(x)
    between, inside = model.between.detach().numpy(), model.inside.detach().numpy()
    deep = model.deep(x.factors, x.dense).detach().numpy()
    for b in range(2):
        e = np.concatenate([factors[b], dense[b][:, None] * model.fields.vectors.detach().numpy()])
        groups = [[2, 0], [1], [3, 4]]  # c and a, the slot b alone, the dense columns
        sums = [e[group].sum(0) for group in groups]
        h = sum(between[p] * sums[f] * sums[g] for p, (f, g) in enumerate([(0, 1), (0, 2), (1, 2)]))
        h = h + sum(inside[g] * (sums[g] ** 2 - (e[group] ** 2).sum(0)) for g, group in enumerate(groups))
        expected = first[b].sum() + np.concatenate([h, deep[b]]) @ model.out.weight.detach().numpy()[0]
        assert model(x)[b].item() == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_flen_original_has_no_pairs_inside_a_group_and_no_first_order_part() -> None:
    config = FLEN.Config(groups=(("a", "b"), ("c",)), hidden=(4,), paddlerec=True)
    shape = Shape(0, S, D, D, ("a", "b", "c"))
    x, model = inputs()._replace(dense=torch.empty(2, 0)), FLEN(config, shape).eval()
    assert torch.equal(model(x), model(x._replace(first=x.first + 1)))
    r = model.between.item()
    h = model.layer(r * (x.factors[:, 0] + x.factors[:, 1]) * x.factors[:, 2])
    torch.testing.assert_close(model(x), model.out(torch.cat([h, model.deep(x.factors)], 1))[:, 0])


@pytest.mark.parametrize("paddlerec", [False, True])
def test_fgcnn_makes_new_fields_of_neighbours(paddlerec: bool) -> None:
    config = FGCNN.Config(kernels=(3, 3), filters=(2, 3), maps=(2, 1), pooling=(2, 2), hidden=(4,), paddlerec=paddlerec)
    width = FGCNN.row_factors(config, D, S, F)
    x, model = inputs(width), FGCNN(config, Shape(F, S, D, width)).eval()
    rows = np.concatenate([x.factors, x.dense[:, :, None] * model.fields.vectors.detach()], 1)
    for b in range(2):
        e, maps, fields = rows[b, :, :D], rows[b, None, :, D:], []
        for block, combination in zip(model.convolutions, model.combinations, strict=True):
            weight, bias = block[0].weight.detach().numpy()[..., 0], block[0].bias.detach().numpy()
            high = np.pad(maps, ((0, 0), (1, 1), (0, 0)))
            n = maps.shape[1]
            out = np.stack(
                [
                    sum(np.einsum("c,cnd->nd", weight[o, :, i], high[:, i : i + n]) for i in range(3))
                    for o in range(len(bias))
                ]
            )
            out = out + bias[:, None, None]
            if paddlerec:
                out = out / np.sqrt(1 + 1e-5)  # batch norm that has seen nothing
            maps = np.tanh(out)[:, : n // 2 * 2].reshape(len(bias), n // 2, 2, D).max(2)
            new = np.tanh(combination.weight.detach().numpy() @ maps.ravel() + combination.bias.detach().numpy())
            fields.append(new.reshape(-1, D))
        assert [len(part) for part in fields] == [4, 1]  # five fields, then two, then one
        f = np.concatenate([e, *fields])
        products = [f[i] @ f[j] for i in range(10) for j in range(i + 1, 10)]
        deep = model.deep(torch.tensor(np.concatenate([f.ravel(), products])[None], dtype=torch.float32))
        assert model(x)[b].item() == pytest.approx(deep.item(), rel=1e-4, abs=1e-5)


@pytest.mark.parametrize(("paddlerec", "product"), [(False, "hadamard"), (False, "inner"), (True, "hadamard")])
def test_fat_deepffm_weighs_the_vectors_of_pairs(paddlerec: bool, product: Any) -> None:
    config = FATDeepFFM.Config(hidden=(4,), product=product, paddlerec=paddlerec)
    width, n = FATDeepFFM.row_factors(config, D, S, F), S + F
    x, model = inputs(width), FATDeepFFM(config, Shape(F, S, D, width)).eval()
    dense, first, factors = arrays(x)
    assert model.inner.weight.shape == (n * n // (1 if paddlerec else 8), n * n)
    w1, b1, w2, b2 = (p.detach().numpy() for layer in (model.inner, model.outer) for p in (layer.weight, layer.bias))
    for b in range(2):
        e = np.concatenate([factors[b], dense[b][:, None] * model.fields.vectors.detach().numpy()]).reshape(n * n, D)
        d = e.max(1) if paddlerec else (e * model.compose.detach().numpy()).sum(1)
        a = np.maximum(w2 @ np.maximum(w1 @ d + b1, 0) + b2, 0)
        h = (a[:, None] * e).reshape(n, n, D)
        products = np.stack([h[f, g] * h[g, f] for f in range(n) for g in range(f + 1, n)])
        seen = products.sum(1) if product == "inner" else products.ravel()
        logit = h.sum() if paddlerec else first[b].sum()
        logit += model.deep(torch.tensor(seen[None], dtype=torch.float32)).item()
        assert model(x)[b].item() == pytest.approx(logit, rel=1e-4, abs=1e-5)
    assert (model.extra_loss() is not None) == paddlerec


def test_autofis_normalizes_pairs_and_closes_small_gates() -> None:
    x, model = inputs(rows=6), AutoFIS(AutoFIS.Config(hidden=(4,)), SHAPE).train()
    with torch.no_grad():
        model.gates.copy_(torch.linspace(-0.025, 0.065, 10))
    vectors = model.fields(x.factors, x.dense).detach().numpy()
    z = np.stack([(vectors[:, i] * vectors[:, j]).sum(1) for i in range(5) for j in range(i + 1, 5)], 1)
    z = (z - z.mean(0)) / np.sqrt(z.var(0) + 1e-5)
    gates = np.linspace(-0.025, 0.065, 10)
    alpha = np.sign(gates) * np.maximum(np.abs(gates) - 0.01, 0)
    expected = x.first.sum(1).numpy() + z @ alpha / np.sqrt(10) + model.deep(x.factors, x.dense)[:, 0].detach().numpy()
    np.testing.assert_allclose(model(x).detach(), expected, rtol=1e-4, atol=1e-5)
    extra = model.extra_loss()
    assert extra is not None
    assert extra.item() == pytest.approx(2e-4 * np.abs(gates).sum(), rel=1e-5)
    found = model.findings()
    assert list(found)[:2] == ["x*y", "c*y"]
    assert len(found) == 8
    assert not {"a*x", "a*y"} & found.keys()  # |γ| ≤ 0.01


def test_autofis_trains_the_pairs_that_a_search_has_found() -> None:
    x = inputs(rows=6)
    model = AutoFIS(AutoFIS.Config(hidden=(4,), pairs=("c*a", "b*x")), SHAPE)
    assert sorted(model.findings()) == ["a*c", "b*x"]
    assert model.extra_loss() is None
    assert model(x).shape == (6,)
    original = AutoFIS(AutoFIS.Config(hidden=(4,), paddlerec=True), SHAPE)
    assert original.norm.weight.requires_grad
    assert not original.wide.bias.requires_grad


def test_sign_sums_the_messages_of_its_edges() -> None:
    config = SIGN.Config(pair_hidden=5)
    width, n = SIGN.row_factors(config, D, S, F), S + F
    x, model = inputs(width), SIGN(config, Shape(F, S, D, width)).eval()
    dense, _, factors = arrays(x)
    for b in range(2):
        rows = np.concatenate([factors[b], dense[b][:, None] * model.fields.vectors.detach().numpy()])
        rows = torch.tensor(rows, dtype=torch.float32)
        total = torch.zeros(D)
        for i in range(n):
            for j in range(n):
                loc = model.edge_out(torch.relu(model.edge_in(rows[i, D:] * rows[j, D:])))
                s = (1.2 * torch.sigmoid(loc) - 0.1).clamp(0, 1)
                total = total + s * model.node_out(torch.relu(model.node_in(rows[i, :D] * rows[j, :D]))) / n
        assert model(x)[b].item() == pytest.approx(model.out(total).item(), rel=1e-4, abs=1e-5)
    assert model.extra_loss() is None
    model.train()(x)
    assert model.extra_loss() is not None  # the expected fraction of edges


def test_sign_original_sends_messages_one_way() -> None:
    config = SIGN.Config(pair_hidden=5, paddlerec=True)
    width = SIGN.row_factors(config, D, S, 0)
    shape = Shape(0, S, D, width)
    x, model = inputs(width)._replace(dense=torch.empty(2, 0)), SIGN(config, shape).eval()
    with torch.no_grad():
        model.edge_out.bias.fill_(-4.0)  # so that some edges are missing
    missing = 0
    for b in range(2):
        nodes = []
        for j in range(S):
            messages = []
            for i in range(j + 1):
                v, u = x.factors[b, :, :D], x.factors[b, :, D:] + 0.2
                loc = model.edge_out(torch.relu(model.edge_in(u[i] * u[j])))
                s = (1.2 * torch.sigmoid(loc) - 0.1).clamp(0, 1)
                if s > 0:
                    messages.append(s * model.node_out(torch.relu(model.node_in(v[i] * v[j]))))
                else:
                    missing += 1
            nodes.append(torch.stack(messages).mean(0) if messages else torch.zeros(D))
        both = model.out(torch.stack(nodes).mean(0))
        assert model(x)[b].item() == pytest.approx((both[1] - both[0]).item(), rel=1e-4, abs=1e-5)
    assert 0 < missing < 12


def test_two_outputs_become_their_difference() -> None:
    model = DNN(DNN.Config(hidden=(4,), paddlerec=True), SHAPE)
    x = inputs()
    two = model.deep(x.factors, x.dense)
    torch.testing.assert_close(torch.sigmoid(model(x)), torch.softmax(two, 1)[:, 1])


def test_the_originals_start_as_they_did() -> None:
    fm = FM(FM.Config(paddlerec=True), SHAPE)
    assert (fm.wide.weight == 1).all()
    assert (fm.fields.vectors == 1).all()
    small = "truncated(0.033333333)"
    assert FM.table_init(FM.Config(paddlerec=True), 9) == TableInit(small, small)
    assert DNN.table_init(DNN.Config(paddlerec=True), 9) == TableInit("zero", "uniform(-1,1)")
    assert DLRM.table_init(DLRM.Config(paddlerec=True), 16).embedx == "truncated(1)"
    assert FM.table_init(FM.Config(), 9) == FM.rows
    assert (FM.loss_epsilon(FM.Config(paddlerec=True)), FM.loss_epsilon(FM.Config())) == (1e-4, 0.0)
    assert DNN.loss_epsilon(DNN.Config(paddlerec=True)) == 0.0  # softmax had none
    torch.manual_seed(0)
    dnn = DNN(DNN.Config(hidden=(500, 400), paddlerec=True), SHAPE)
    assert dnn.deep.layers[1].weight.std().item() == pytest.approx(500**-0.5, rel=0.02)


def test_the_originals_peculiarities() -> None:
    dlrm = DLRM(DLRM.Config(bottom=(5,), top=(6,), paddlerec=True), SHAPE)
    assert len(dlrm.top.norms or ()) == len(dlrm.top.layers) == 2  # the output layer too
    assert len(dlrm.bottom.norms or ()) == 2
    x = inputs()
    wide = WideDeep(WideDeep.Config(hidden=(4,), paddlerec=True), SHAPE).eval()
    assert torch.equal(wide(x), wide(x._replace(first=x.first + 1)))  # slots are not in its wide part
    slot = SlotDNN(SlotDNN.Config(hidden=(4,), paddlerec=True), SHAPE).eval()
    assert slot(x._replace(factors=x.factors * 1e6)).abs().max() == 15
    deep = DeepFM(DeepFM.Config(hidden=(4,), paddlerec=True), SHAPE)
    assert deep.deep.layers[0].weight.shape[1] == (S + F) * D
    assert not deep.wide.bias.requires_grad
    xdeep = XDeepFM(XDeepFM.Config(hidden=(4,), paddlerec=True), SHAPE)
    assert xdeep.l2 == 1e-4


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: DLRM(DLRM.Config(), Shape(0, S, D, D)), "dlrm needs dense columns"),
        (lambda: AutoInt(AutoInt.Config(width=5), SHAPE), "must be a multiple of model.heads"),
        (lambda: FinalMLP(FinalMLP.Config(hidden1=(5,)), SHAPE), "must be multiples of model.heads"),
        (lambda: FinalMLP(FinalMLP.Config(gate2_slots=("q",)), SHAPE), "unknown slot 'q'"),
        (lambda: DIFM(DIFM.Config(width=5), SHAPE), "must be a multiple of model.heads"),
        (lambda: FLEN(FLEN.Config(groups=(("q",),)), SHAPE), "unknown slot 'q' in model.groups"),
        (lambda: FLEN(FLEN.Config(groups=(("a",), ("b", "a"))), SHAPE), "'a' is in model.groups twice"),
        (lambda: FGCNN(FGCNN.Config(kernels=(3,)), SHAPE), "must have the same length"),
        (lambda: FGCNN(FGCNN.Config(kernels=(3, 3, 3, 4)), SHAPE), "must be odd"),
        (lambda: SIGN(SIGN.Config(stretch=(0.0, 1.0)), Shape(F, S, D, 2 * D)), "a range around"),
        (lambda: AutoFIS(AutoFIS.Config(pairs=("a*q",)), SHAPE), "unknown pair 'a.q'"),
    ],
)
def test_impossible_settings_are_refused(build: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build()  # type: ignore[operator]


def test_the_model_in_the_guide_works() -> None:
    guide = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    scope: dict[str, Any] = {"__name__": "guide"}
    code = guide.split("```python\n")[1].split("```")[0]
    exec(compile(code, "guide", "exec", dont_inherit=True), scope)
    model = scope["TwoTowers"](scope["TwoTowers"].Config(), SHAPE)
    assert model(inputs()).shape == (2,)
