"""The recurrences of the core against plain torch, history by history."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from clickfleet import _core
from clickfleet.training.network import Events
from clickfleet.training.recurrence import PackedEvents, attention_gru, gru, next_event_loss

LENGTHS = st.lists(st.integers(0, 9), min_size=1, max_size=11)


def cell(h: Tensor, x: Tensor, recurrent: Tensor, a: Tensor | float) -> Tensor:
    update, reset, proposal = (recurrent @ h).chunk(3)
    update_in, reset_in, proposal_in = x.chunk(3)
    u, r = torch.sigmoid(update_in + update), torch.sigmoid(reset_in + reset)
    return h + a * u * (torch.tanh(proposal_in + r * proposal) - h)


def packed(lengths: list[int], row: list[int] | None = None, width: int = 1) -> PackedEvents:
    flat = torch.randn(len(lengths), max(*lengths, 1, 1), width)
    return PackedEvents.of(Events(flat.unsqueeze(2), torch.tensor(lengths), None if row is None else torch.tensor(row)))


def random(*shapes: tuple[int, int]) -> list[Tensor]:
    """Return tensors whose products with one another are of the order of 1."""
    return [(torch.randn(shape) / shape[1] ** 0.5).requires_grad_() for shape in shapes]


def agree(own: Tensor, reference: Tensor, leaves: list[Tensor]) -> None:
    """Compare values, and the gradients of a random sum of them."""
    torch.testing.assert_close(own, reference, rtol=1e-5, atol=5e-6)
    by = torch.randn_like(own)
    for a, b in zip(
        torch.autograd.grad((own * by).sum(), leaves),
        torch.autograd.grad((reference * by).sum(), leaves, allow_unused=True, materialize_grads=True),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-5)


@settings(max_examples=25, deadline=None)
@given(LENGTHS, st.sampled_from([1, 3, 8, 20, 33]), st.integers(0, 2**31))
def test_states_and_gradients_are_those_of_plain_torch(lengths: list[int], width: int, seed: int) -> None:
    torch.manual_seed(seed)
    histories, (gates, recurrent) = packed(lengths).histories, random((sum(lengths), 3 * width), (3 * width, width))
    reference = []
    for part in gates.split(lengths):
        h = torch.zeros(width)
        for x in part:
            h = cell(h, x, recurrent, 1.0)
            reference.append(h)
    own = gru(gates, recurrent, histories)
    agree(own, torch.stack(reference) if reference else gates[:, :width] + 0 * recurrent[:0], [gates, recurrent])


@settings(max_examples=25, deadline=None)
@given(LENGTHS, st.sampled_from([1, 4, 20]), st.booleans(), st.integers(0, 2**31))
def test_rows_attend_to_the_events_of_their_histories(lengths: list[int], width: int, shared: bool, seed: int) -> None:
    torch.manual_seed(seed)
    row = sorted(np.random.default_rng(seed).integers(0, len(lengths), 7).tolist()) if shared else None
    rows = list(range(len(lengths))) if row is None else row
    events, size = packed(lengths, row), sum(lengths)
    leaves = random((size, 3 * width), (3 * width, width), (size, width), (len(rows), width))
    gates, recurrent, states, queries = leaves
    reference = []
    for b, u in enumerate(rows):
        g = torch.zeros(width)
        own_states = states.split(lengths)[u]
        a = torch.softmax(own_states @ queries[b], 0)
        for x, weight in zip(gates.split(lengths)[u], a, strict=True):
            g = cell(g, x, recurrent, weight)
        reference.append(g + 0 * queries[b])
    agree(attention_gru(gates, recurrent, states, queries, events.rows), torch.stack(reference), leaves)


@settings(max_examples=25, deadline=None)
@given(LENGTHS, st.sampled_from([1, 20]), st.integers(0, 2**31))
def test_the_next_event_is_told_from_that_of_another_history(lengths: list[int], width: int, seed: int) -> None:
    torch.manual_seed(seed)
    histories, (states, events) = packed(lengths).histories, random((sum(lengths), width), (sum(lengths), width))
    h, e = states.split(lengths), events.split(lengths)
    positive, negative = [], []
    for u, length in enumerate(lengths):
        positive += [F.softplus(-(h[u][i] @ e[u][i + 1])) for i in range(length - 1)]
        shared = min(length, lengths[u - 1]) - 1 if len(lengths) > 1 else 0
        negative += [F.softplus(h[u][i] @ e[u - 1][i + 1]) for i in range(shared)]
    means = [torch.stack(part).mean() for part in (positive, negative) if part]
    reference = torch.stack([*means, 0 * states.sum() + 0 * events.sum()]).sum()
    agree(next_event_loss(states, events, histories), reference, [states, events])


def test_packing_leaves_out_the_padding() -> None:
    padded = torch.arange(24.0).view(3, 2, 2, 2).requires_grad_()
    events = PackedEvents.of(Events(padded, torch.tensor([1, 0, 2]), torch.tensor([0, 0, 2])))
    assert events.flat.tolist() == [[0, 1, 2, 3], [16, 17, 18, 19], [20, 21, 22, 23]]
    assert [part.tolist() for part in events.rows.arrays] == [[0, 0, 1], [0, 1, 2], [1, 1, 2]]
    events.flat.sum().backward()
    assert padded.grad is not None
    assert padded.grad.flatten(2).sum(2).tolist() == [[4, 0], [0, 0], [4, 4]]


def test_large_and_undefined_values_pass_the_gates() -> None:
    gates = torch.tensor([[1e30, 0.0, -1e30], [-1e30, 0.0, 1e30], [float("nan"), 0.0, 0.0]])
    states = gru(gates, torch.zeros(3, 1), packed([2, 1]).histories)
    assert states[:2].flatten().tolist() == pytest.approx([-1, -1], abs=1e-6)
    assert states[2].isnan()


@pytest.mark.parametrize(("start", "length"), [(0, 4), (3, 1), (-1, 1), (0, -1)])
def test_a_sequence_outside_of_the_events_is_refused(start: int, length: int) -> None:
    gates, states, kept = (np.zeros((3, n), np.float32) for n in (3, 1, _core.gru_kept(1)))
    place, lengths = np.array([start]), np.array([length])
    with pytest.raises(ValueError, match="behind the last event"):
        _core.gru_forward(gates, np.zeros((3, 1), np.float32), None, place, place, lengths, states, kept)
