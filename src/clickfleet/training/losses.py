"""Losses of a batch, as sums over its rows. The table needs the gradient of the sum; `Loss.dense_scale` turns it into a mean."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.nn import functional as F

from clickfleet.config import sections
from clickfleet.config.plugins import find_function
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


def damp_shared_error(logits: Tensor, weights: Tensor | None, share: float) -> None:
    """Let the gradient of the logits keep only `share` of the error that all rows share.

    With errors r = p − y and h = p·(1 − p), a Newton step of the bias alone would add −Σr/Σh to every logit, and so change the errors
    by −h·Σr/Σh. Of that part, the gradient keeps `share`: r' = r − c·h·Σr/Σh with c = (1 − share)·(1 − 1/rows). As r' is linear in y,
    the optimum stays where it was. One row shares nothing, so c is 0 for it.

    >>> logits = torch.zeros(4, requires_grad=True)
    >>> damp_shared_error(scaled := logits * 1, None, 0.5)
    >>> log_loss(scaled, torch.tensor([1.0, 0.0, 0.0, 0.0])).backward()
    >>> logits.grad  # without it: -0.5, 0.5, 0.5, 0.5
    tensor([-0.5938,  0.4062,  0.4062,  0.4062])
    """
    p = torch.sigmoid(logits.detach())
    curvature = p * (1 - p) if weights is None else p * (1 - p) * weights
    part = curvature * ((1 - share) * (1 - 1 / len(logits)) / curvature.sum().clamp_min(1e-30))
    logits.register_hook(lambda errors: errors - part * errors.sum())  # type: ignore[no-untyped-call]


def l2(tensors: Iterable[Tensor], strength: float) -> Tensor:
    """strength/2 · Σ‖w‖², whose gradient is strength·w."""
    return torch.stack([tensor.square().sum() for tensor in tensors]).sum() * (strength / 2)


Config = sections.LossSettings
LossFunction = Callable[[Tensor, Tensor, Tensor], Tensor]
"""A user's loss: `function(logits, labels, weights)`, all of shape [B].

It returns the loss of each row, which is then multiplied by its weight, or one number: the sum over all rows, weights included.
"""


class Loss:
    """The objective of a step.

    If only a fraction r of the negatives was kept, the odds in the data are 1/r times too high. The loss is therefore
    computed at logit − ln r. The model learns the logits of the full traffic; evaluation and serving need no correction.
    """

    def __init__(self, config: Config, model_epsilon: float = 0.0) -> None:
        if not 0.0 < config.negatives_kept <= 1.0:
            raise ConfigError(
                f"train.loss.negatives_kept must be in (0, 1], not {config.negatives_kept:g}",
                "set it to the fraction of negatives that the training data still contains, such as 0.1",
            )
        if config.function is not None and config.shared_error not in (None, 1.0):
            raise ConfigError(
                f"train.loss.shared_error is {config.shared_error:g}, which is defined for the log loss only",
                "remove it or train.loss.function",
            )
        self.config = config
        self.shared_error = 1.0 if config.shared_error is None else config.shared_error
        self.epsilon = model_epsilon if config.epsilon is None else config.epsilon
        self.shift = -math.log(config.negatives_kept)
        self._function: LossFunction | None = None

    def total(
        self,
        logits: Tensor,
        labels: Tensor,
        weights: Tensor | None = None,
        extra: Tensor | None = None,
        matrices: Iterable[Tensor] = (),
    ) -> Tensor:
        """Return the sum over the rows. Regularisers have the scale of the mean loss of a row, so they are multiplied by Σ weights.

        `extra` is the model's `extra_loss()`; `matrices` are the weights to which `l2` applies.
        """
        logits = self.sampled(logits)
        if self.shared_error < 1.0 and logits.requires_grad:
            damp_shared_error(logits, weights, self.shared_error)
        if self.config.function is None:
            loss = log_loss(logits, labels, weights, self.epsilon)
        else:
            loss = self._own(logits, labels, weights)
        penalty = extra
        if self.config.l2:
            decay = l2(matrices, self.config.l2)
            penalty = decay if penalty is None else penalty + decay
        return loss if penalty is None else loss + penalty * self.rows(labels, weights)

    def load(self) -> None:
        """Find the user's function, if there is one. A model that only scores needs none."""
        if self.config.function is not None:
            self._function = find_function("loss function", self.config.function)

    def _own(self, logits: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
        if self._function is None:
            self.load()
        assert self._function is not None
        each = torch.ones_like(labels) if weights is None else weights
        loss = self._function(logits, labels, each)
        if not isinstance(loss, Tensor) or loss.shape not in ((), labels.shape):
            found = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise ConfigError(
                f"the loss function returned {found} for {len(labels)} rows",
                "return a tensor with one loss per row, or their sum",
            )
        return (loss * each).sum() if loss.ndim else loss

    def sampled(self, logits: Tensor) -> Tensor:
        """Return the logits on the scale of the down-sampled data, for metrics on training data."""
        return logits + self.shift if self.shift else logits

    def dense_scale(self, labels: Tensor, weights: Tensor | None = None) -> float:
        """Return the factor for the dense gradients of `total` before the optimizer sees them. Σ weights = 0 counts as 1."""
        return 1.0 if self.config.reduction == "sum" else 1.0 / (float(self.rows(labels, weights)) or 1.0)

    @staticmethod
    def rows(labels: Tensor, weights: Tensor | None) -> float | Tensor:
        return len(labels) if weights is None else weights.sum()
