from __future__ import annotations

import copy
import threading
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from clickfleet.training.layers import FieldVectors, Tower, Wide, constant, fm_pairs, tower, truncated
from clickfleet.training.network import Shape
from clickfleet.training.optimizer import Config, Flat, Optimizer


def plain(t: Tower, *parts: Tensor) -> Tensor:
    """What the fused node must equal."""
    h = torch.cat([part.flatten(1) for part in parts], 1)
    for i, layer in enumerate(t.layers):
        h = layer(h)
        if i < len(t.layers) - 1 or t.relu_last:
            h = F.relu(h)
    return h


def gradients(out: Tensor, *tensors: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad((out * torch.arange(1.0, out.numel() + 1).view_as(out)).sum(), tensors))


@settings(deadline=None, max_examples=40)
@given(
    st.integers(1, 9),
    st.lists(st.integers(1, 17), min_size=1, max_size=4),
    st.booleans(),
    st.lists(st.booleans(), min_size=3, max_size=3),
    st.integers(0, 1000),
)
def test_the_fused_tower_has_autograds_values_and_gradients(
    rows: int, widths: list[int], relu_last: bool, wanted: list[bool], seed: int
) -> None:
    torch.manual_seed(seed)
    t = tower(3 * 2 + 4 + 1, *widths, relu_last=relu_last)
    parts = [torch.randn(rows, 3, 2), torch.randn(rows, 4), torch.randn(rows, 1)]
    for part, want in zip(parts, wanted, strict=True):
        part.requires_grad_(want)
    tensors = [*(part for part in parts if part.requires_grad), *t.parameters()]
    ours, theirs = t(*parts), plain(t, *parts)
    torch.testing.assert_close(ours, theirs)
    for a, b in zip(gradients(ours, *tensors), gradients(theirs, *tensors), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-4)


def test_it_really_is_one_node_in_training_and_plain_layers_in_evaluation() -> None:
    t, x = tower(3, 4, 1), torch.randn(2, 3)
    assert "FusedTower" in type(t(x).grad_fn).__name__
    assert "FusedTower" not in type(t.eval()(x).grad_fn).__name__
    assert "FusedTower" not in type(tower(3, 4, 1, dropout=0.1)(x).grad_fn).__name__
    assert "FusedTower" not in type(tower(3, 4, 1, batch_norm=True)(x).grad_fn).__name__


def test_two_forwards_before_their_backwards_do_not_disturb_each_other() -> None:
    t = tower(3, 8, 8, 1)
    x, y = torch.randn(5, 3), torch.randn(4, 3)
    a, b = t(x), t(y)
    params = list(t.parameters())
    for out, inputs in ((a, x), (b, y)):
        for ours, theirs in zip(gradients(out, *params), gradients(plain(t, inputs), *params), strict=True):
            torch.testing.assert_close(ours, theirs)


def test_buffers_are_reused_and_grow_and_shrink_with_the_batch() -> None:
    t = tower(3, 8, 8, 1)
    for rows in (4, 9, 2, 9):
        x = torch.randn(rows, 3)
        for ours, theirs in zip(gradients(t(x), *t.parameters()), gradients(plain(t, x), *t.parameters()), strict=True):
            torch.testing.assert_close(ours, theirs)
        assert len(t.buffers_.free) == 1


def test_a_second_backward_is_exact_or_refused() -> None:
    t, x = tower(3, 8, 8, 1), torch.randn(4, 3)
    loss = t(x).sum()
    params = list(t.parameters())
    once = torch.autograd.grad(loss, params, retain_graph=True)
    assert all(
        torch.equal(a, b) for a, b in zip(once, torch.autograd.grad(loss, params, retain_graph=True), strict=True)
    )
    t(x)  # borrows the buffers that the first backward gave back
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(loss, params)


def test_a_copy_and_a_state_dict_carry_no_buffers() -> None:
    t = tower(3, 8, 1)
    t(torch.randn(4, 3)).sum().backward()
    assert t.buffers_.free
    assert not copy.deepcopy(t).buffers_.free
    assert set(t.state_dict()) == {"layers.0.weight", "layers.0.bias", "layers.1.weight", "layers.1.bias"}


def test_hogwild_threads_on_one_set_of_weights_learn() -> None:
    torch.manual_seed(5)
    flat = Flat(tower(6, 16, 16, 1))
    optimizer = Optimizer(Config("adam", lr=0.01), flat.values)
    x = torch.randn(512, 6)
    y = (x[:, 0] * x[:, 1] > 0).float()
    losses: dict[int, list[float]] = {0: [], 1: []}
    failures: list[Exception] = []

    def train(thread: int, mine: Flat) -> None:
        try:
            for step in range(300):
                rows = slice((step * 2 + thread) % 8 * 64, (step * 2 + thread) % 8 * 64 + 64)
                loss = F.binary_cross_entropy_with_logits(mine.model(x[rows]).squeeze(1), y[rows])
                mine.zero_grads()
                loss.backward()
                optimizer.step(mine.grads)
                losses[thread].append(loss.item())
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=train, args=(i, flat.replica())) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert optimizer.steps == 600
    assert all(np.mean(losses[i][-20:]) < 0.35 for i in losses)


def test_batch_norm_and_dropout_stand_after_each_relu() -> None:
    torch.manual_seed(0)
    t = tower(3, 4, 1, batch_norm=True, dropout=0.5)
    t.eval()
    x = torch.randn(5, 3)
    first, last = (layer for layer in t.layers if isinstance(layer, nn.Linear))
    torch.testing.assert_close(t(x), last(F.relu(first(x)) / (1 + 1e-5) ** 0.5))
    t.train()
    assert not torch.equal(t(x), t(x))


def test_fm_pairs_is_the_sum_over_pairs() -> None:
    e = np.random.default_rng(0).normal(size=(4, 6, 3))
    pairs = [sum(e[b, f] @ e[b, g] for f in range(6) for g in range(f + 1, 6)) for b in range(4)]
    np.testing.assert_allclose(fm_pairs(torch.from_numpy(e)), pairs)


def test_wide_and_field_vectors() -> None:
    wide = Wide(Shape(2, 2, 1, 1), constant(1.0))
    assert wide(torch.tensor([[1.0, 2.0]]), torch.tensor([[10.0, 20.0]])).item() == 33
    fields = FieldVectors(2, 3, constant(0.5))(torch.ones(1, 1, 3), torch.tensor([[2.0, 4.0]]))
    assert fields.tolist() == [[[1, 1, 1], [1, 1, 1], [2, 2, 2]]]


def test_truncated_is_cut_off_at_two_deviations() -> None:
    t = torch.empty(100_000)
    truncated(0.1)(t)
    assert t.abs().max() <= 0.2
    assert t.std().item() == pytest.approx(0.088, abs=0.001)  # the cut takes 12% of the deviation


def test_tower_names_its_widths_in_order() -> None:
    assert [tuple(layer.weight.shape) for layer in tower(5, 4, 3, 2).layers] == [
        (b, a) for a, b in pairwise((5, 4, 3, 2))
    ]


@pytest.mark.parametrize("plain", [False, True])
def test_gradients_written_where_the_trainer_wants_them_are_the_same(plain: bool) -> None:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(3, 4), tower(4, 8, 8, 2), nn.Linear(2, 1)).train(not plain)
    reference = copy.deepcopy(model).eval()  # plain layers
    flat, x = Flat(model), torch.randn(6, 3)
    assert len(flat.sinks) == 1
    for times in (1, 2, 0, 1):  # once, added up over two, and zeros where nothing ran
        flat.zero_grads()
        reference.zero_grad()
        for _ in range(times):
            model(x).square().sum().backward()
            reference(x).square().sum().backward()
        ours = flat.views(flat.grads)
        for name, p in reference.named_parameters():
            torch.testing.assert_close(ours[name], torch.zeros_like(p) if p.grad is None else p.grad)


def test_towers_with_dropout_train_under_a_flat_vector_too() -> None:
    torch.manual_seed(2)
    flat = Flat(tower(3, 8, 1, dropout=0.2))
    flat.zero_grads()
    flat.model(torch.randn(6, 3)).sum().backward()
    assert all(grad.any() for grad in flat.views(flat.grads).values())


def test_a_models_own_zero_grad_is_understood() -> None:
    flat, x = Flat(nn.Sequential(nn.Linear(3, 4), tower(4, 8, 1))), torch.randn(6, 3)
    flat.zero_grads()
    flat.model(x).sum().backward()
    once = flat.grads.clone()
    flat.model.zero_grad()
    flat.zero_grads()
    flat.model(x).sum().backward()
    assert torch.equal(flat.grads, once)


def test_a_tower_used_twice_in_one_model_adds_both_gradients() -> None:
    torch.manual_seed(2)
    t = tower(3, 8, 1)
    reference = copy.deepcopy(t).eval()
    flat, x = Flat(t), torch.randn(6, 3)
    flat.zero_grads()
    (t(x).square() * t(x + 1)).sum().backward()
    (reference(x).square() * reference(x + 1)).sum().backward()
    ours = flat.views(flat.grads)
    for name, p in reference.named_parameters():
        torch.testing.assert_close(ours[name], p.grad)


@pytest.mark.parametrize("relu_last", [False, True])
def test_scoring_borrows_the_memory_of_training(relu_last: bool) -> None:
    torch.manual_seed(0)
    net = tower(7, 5, 3, relu_last=relu_last)
    parts = torch.randn(6, 3, 2), torch.randn(6, 1)
    expected = net.eval()(*parts).detach()  # gradients are on: plain layers
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            for rows in (6, 2, 6):
                torch.testing.assert_close(net(*(part[:rows] for part in parts)), expected[:rows])
        assert len(net.buffers_.free) == 1
        net.train()(*parts).sum().backward()  # memory that scoring made serves a backward pass
        net.eval()
    assert all(p.grad is not None for p in net.parameters())
