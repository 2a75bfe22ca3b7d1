from __future__ import annotations

import itertools
import math

import pytest
import torch

from clickfleet.config.plugins import Plugin
from clickfleet.errors import ConfigError
from clickfleet.training.losses import Config, Loss, l2, log_loss

LOGITS = torch.tensor([-2.0, 0.5, 3.0], dtype=torch.float64)
LABELS = torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64)
WEIGHTS = torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64)


def by_hand(logits: torch.Tensor, epsilon: float = 0.0) -> list[float]:
    chances = [1 / (1 + math.exp(-x)) for x in logits.tolist()]
    return [-math.log((p if y else 1 - p) + epsilon) for p, y in zip(chances, LABELS.tolist(), strict=True)]


@pytest.mark.parametrize("epsilon", [0.0, 1e-4])
def test_log_loss_is_the_weighted_sum(epsilon: float) -> None:
    losses = by_hand(LOGITS, epsilon)
    assert log_loss(LOGITS, LABELS, epsilon=epsilon).item() == pytest.approx(sum(losses))
    weighted = losses[0] + 2 * losses[1] + 0.5 * losses[2]
    assert log_loss(LOGITS, LABELS, WEIGHTS, epsilon).item() == pytest.approx(weighted)


def test_l2_has_the_gradient_strength_times_weight() -> None:
    w = torch.tensor([1.0, -2.0], requires_grad=True)
    l2([w, w], 0.1).backward()
    assert w.grad is not None
    assert w.grad.tolist() == pytest.approx([0.2, -0.4])


def test_regularisers_enter_once_per_row_so_that_the_mean_has_them_once() -> None:
    loss = Loss(Config(l2=0.1))
    total = loss.total(LOGITS, LABELS, WEIGHTS, torch.tensor(7.0), [torch.tensor([2.0])])
    mean = total.item() * loss.dense_scale(LABELS, WEIGHTS)
    assert mean == pytest.approx(log_loss(LOGITS, LABELS, WEIGHTS).item() / 3.5 + 7.0 + 0.1 / 2 * 4)


def test_the_scale_of_dense_gradients() -> None:
    assert Loss(Config()).dense_scale(LABELS) == pytest.approx(1 / 3)
    assert Loss(Config()).dense_scale(LABELS, WEIGHTS) == pytest.approx(1 / 3.5)
    assert Loss(Config()).dense_scale(LABELS, torch.zeros(3)) == 1.0
    assert Loss(Config(reduction="sum")).dense_scale(LABELS, WEIGHTS) == 1.0


def test_the_models_epsilon_is_used_unless_the_configuration_says_otherwise() -> None:
    assert Loss(Config(), 1e-4).epsilon == 1e-4
    assert Loss(Config(epsilon=0.0), 1e-4).epsilon == 0.0


def test_down_sampled_negatives_are_corrected_in_the_log_odds() -> None:
    """100 clicks in 1000 rows; one negative in ten was kept. The logit that fits must give 100/1000 again."""
    labels = torch.cat([torch.ones(100), torch.zeros(90)])
    bias = torch.zeros((), requires_grad=True)
    loss = Loss(Config(negatives_kept=0.1))
    for _ in range(200):
        (grad,) = torch.autograd.grad(loss.total(bias.expand(190), labels), bias)
        bias.data -= 4.0 / 190 * grad
    assert torch.sigmoid(bias).item() == pytest.approx(0.1, abs=1e-4)
    assert torch.sigmoid(loss.sampled(bias)).item() == pytest.approx(100 / 190, abs=1e-4)


@pytest.mark.parametrize("share", [0.0, -0.5, 1.5])
def test_an_impossible_share_is_refused(share: float) -> None:
    with pytest.raises(ConfigError, match=r"must be in \(0, 1\]"):
        Loss(Config(negatives_kept=share))


def errors(
    logits: torch.Tensor, labels: torch.Tensor, share: float, weights: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the gradient of the logits with a shared error of `share`."""
    leaf = logits.clone().requires_grad_()
    Loss(Config(shared_error=share)).total(leaf * 1, labels, weights).backward()  # type: ignore[no-untyped-call]
    assert leaf.grad is not None
    return leaf.grad


def test_a_step_corrects_a_share_of_the_shared_error() -> None:
    draw = torch.Generator().manual_seed(3)
    logits, labels = torch.randn(50, generator=draw) - 2, (torch.rand(50, generator=draw) < 0.3).float()
    weights = torch.rand(50, generator=draw)
    for weighed in (None, weights):
        plain, damped = errors(logits, labels, 1.0, weighed), errors(logits, labels, 0.25, weighed)
        kept = 1 - 0.75 * (1 - 1 / 50)
        assert torch.allclose(damped.sum(), kept * plain.sum(), rtol=1e-4)
        p = torch.sigmoid(logits)
        curvature = p * (1 - p) * (1 if weighed is None else weighed)
        assert torch.allclose(damped - plain, curvature * ((damped - plain).sum() / curvature.sum()), atol=1e-6)


def test_the_shared_error_does_not_move_the_optimum() -> None:
    """If the scores are the true probabilities, the expected gradient of every row is zero, in small batches too."""
    logits = torch.tensor([-3.0, -1.0, 0.5])
    p = torch.sigmoid(logits)
    expected = torch.zeros(3)
    for labels in itertools.product((0.0, 1.0), repeat=3):
        y = torch.tensor(labels)
        chance = torch.prod(torch.where(y > 0, p, 1 - p))
        expected += chance * errors(logits, y, 0.2)
    assert torch.allclose(expected, torch.zeros(3), atol=1e-6)


def test_a_single_row_and_rows_without_weight_keep_their_errors() -> None:
    one = torch.tensor([0.3]), torch.tensor([1.0])
    assert torch.equal(errors(*one, 0.2), errors(*one, 1.0))
    logits, labels = torch.tensor([40.0, 200.0]), torch.tensor([0.0, 1.0])
    assert torch.isfinite(errors(logits, labels, 0.2)).all()  # p·(1 − p) is zero
    assert torch.equal(errors(logits, labels, 0.2, torch.zeros(2)), torch.zeros(2))


def test_the_shared_error_is_for_the_log_loss() -> None:
    with pytest.raises(ConfigError, match="shared_error"):
        Loss(Config(shared_error=0.5, function=Plugin("./mine.py")))
