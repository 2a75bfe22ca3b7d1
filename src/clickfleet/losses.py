"""Losses of a batch, as sums over rows: the table wants the gradient of the sum, and a mean is one division away."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import functional as F

from clickfleet import sections
from clickfleet.errors import ConfigError


def log_loss(logits: Tensor, labels: Tensor, weights: Tensor | None = None, epsilon: float = 0.0) -> Tensor:
    """Σ weight·(−y ln p − (1−y) ln(1−p)), p = σ(logit); with `epsilon`, ln(p+ε) and ln(1−p+ε) as in PaddleRec.

    >>> log_loss(torch.zeros(4), torch.tensor([0.0, 0.0, 1.0, 1.0])) / 4  # ln 2
    tensor(0.6931)
    """
    if not epsilon:
        return F.binary_cross_entropy_with_logits(logits, labels, weights, reduction="sum")
    p = torch.sigmoid(logits)
    losses = -labels * torch.log(p + epsilon) - (1 - labels) * torch.log(1 - p + epsilon)
    return (losses if weights is None else losses * weights).sum()


def softmax2(logits: Tensor, labels: Tensor, weights: Tensor | None = None) -> Tensor:
    """Σ weight·cross-entropy over two logits [B, 2]: the log loss of their difference, and computed as that."""
    return log_loss(logits[:, 1] - logits[:, 0], labels, weights)


def l2(tensors: Iterable[Tensor], strength: float) -> Tensor:
    """strength/2 · Σ‖w‖², whose gradient is strength·w."""
    return torch.stack([tensor.square().sum() for tensor in tensors]).sum() * (strength / 2)


Config = sections.Loss


class Loss:
    """The objective of a step under a `Config`.

    Training on down-sampled negatives sees odds 1/r times too high, so the loss is taken at logit − ln r. The model
    then learns logits of the full traffic, and evaluation and serving need no correction.
    """

    def __init__(self, config: Config, model_epsilon: float = 0.0) -> None:
        if not 0.0 < config.negatives_kept <= 1.0:
            raise ConfigError(
                f"negatives_kept is {config.negatives_kept:g}, and a share lies in (0, 1]",
                "give the fraction of negatives that the training data still has, e.g. 0.1",
            )
        self.config = config
        self.epsilon = model_epsilon if config.epsilon is None else config.epsilon
        self.shift = -math.log(config.negatives_kept)

    def total(
        self,
        logits: Tensor,
        labels: Tensor,
        weights: Tensor | None = None,
        extra: Tensor | None = None,
        matrices: Iterable[Tensor] = (),
    ) -> Tensor:
        """The sum over the rows; regularisers are on the scale of a row's mean loss and enter Σ weights times.

        `extra` is the model's `extra_loss()`, `matrices` its weights, for `l2`.
        """
        loss = log_loss(self.sampled(logits), labels, weights, self.epsilon)
        penalty = extra
        if self.config.l2:
            decay = l2(matrices, self.config.l2)
            penalty = decay if penalty is None else penalty + decay
        return loss if penalty is None else loss + penalty * self.rows(labels, weights)

    def sampled(self, logits: Tensor) -> Tensor:
        """The logits as the down-sampled data has them: what metrics on training data compare with labels."""
        return logits + self.shift if self.shift else logits

    def dense_scale(self, labels: Tensor, weights: Tensor | None = None) -> float:
        """What the dense gradients of `total` are multiplied by before the optimizer; a Σ weights of 0 counts as 1."""
        return 1.0 if self.config.reduction == "sum" else 1.0 / (float(self.rows(labels, weights)) or 1.0)

    @staticmethod
    def rows(labels: Tensor, weights: Tensor | None) -> float | Tensor:
        return len(labels) if weights is None else weights.sum()
