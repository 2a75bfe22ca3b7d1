"""One batch: rows in, loss and row gradients out. What all training modes share."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from clickfleet import devices
from clickfleet.batch import Batch, Floats
from clickfleet.embedding import Embedding, Push
from clickfleet.losses import Loss
from clickfleet.models import Inputs, Model
from clickfleet.optimizers import Flat
from clickfleet.schema import Schema


class Result(NamedTuple):
    """What came of a batch; the gradients of the dense weights are in the step's `flat.grads`."""

    loss: float
    """The sum over the rows, weights and regularisers included."""
    scores: Floats  # [B], as the training data has them: with down-sampled negatives, higher than those of all traffic
    push: Push
    dense_scale: float
    """What the dense gradients are to be multiplied by."""
    labels: Floats | None = None
    """What the scores are of, where those are not the rows of the batch."""


class NotFiniteError(Exception):
    """The loss of a batch is no number; nothing of that batch was learned."""

    def __init__(self, batch: Batch, loss: float) -> None:
        super().__init__(f"the loss is {loss}")
        self.batch, self.loss = batch, loss


class RowDecay(NamedTuple):
    """L2 on rows: strength·w is added to the gradient that a rule sees, after it was divided by shows or the batch's weight."""

    strength: float
    embed_scale: str
    embedx_scale: str

    def add(self, push: Push, rows: Floats) -> None:
        for part, scale in ((slice(0, 1), self.embed_scale), (slice(1, None), self.embedx_scale)):
            divisor = push.show[:, None] if scale == "show" else np.float32(push.n if scale == "batch" else 1.0)
            push.grads[:, part] += self.strength * np.where(divisor > 0, divisor, np.float32(1.0)) * rows[:, part]


class Step:
    """The forward and backward pass of one trainer thread, over its own replica of the dense weights' gradients."""

    def __init__(
        self,
        flat: Flat,
        loss: Loss,
        schema: Schema,
        factors: int,
        device: torch.device = devices.CPU,
        decay: RowDecay | None = None,
    ) -> None:
        assert isinstance(flat.model, Model)
        self.flat, self.model, self.loss, self.schema = flat, flat.model, loss, schema
        self.decay = decay
        self.device, self.factors = device, factors
        self.embedding = self.spare()
        self.score_first = False
        """Scores are of a forward pass in evaluation mode before the one that trains, where the latter adds noise."""
        self.matrices = [p for p in self.model.parameters() if p.requires_grad and p.ndim > 1] if loss.config.l2 else []

    def __call__(self, batch: Batch, rows: Floats) -> Result:
        """`rows` are those of `embedding.unique(batch)`; refuses a loss that is no number before anything is learned."""
        assert batch.labels is not None
        x = self.embedding.inputs(batch, rows)
        labels, weights = self._tensor(batch.labels), None if batch.weights is None else self._tensor(batch.weights)
        self.flat.zero_grads()
        clean = self._evaluate(x) if self.score_first else None
        logits = self.model(x)
        loss = self.loss.total(logits, labels, weights, self.model.extra_loss(), self.matrices)
        value = loss.item()
        if not math.isfinite(value):
            raise NotFiniteError(batch, value)
        loss.backward()  # type: ignore[no-untyped-call]
        scores = torch.sigmoid(self.loss.sampled(logits.detach() if clean is None else clean)).cpu().numpy()
        scale = self.loss.dense_scale(labels, weights)
        push = self.embedding.push(batch, x)
        if self.decay is not None:
            self.decay.add(push, rows)
        return Result(value, scores, push, scale)

    def spare(self) -> Embedding:
        """Another `embedding`, for who gets the next batch ready meanwhile."""
        return Embedding(self.schema, self.factors, self.device)

    def train_in_place(self, batch: Batch) -> Result | None:
        """A whole step on rows where they stand in a table of this process; None where the step cannot do that."""
        return None

    def settle(self) -> None:
        """Before others look at the table: puts in what training in place has kept back."""

    def is_noisy(self) -> bool:
        """Whether training scores a batch otherwise than evaluation would: by dropout or batch norm."""
        kinds = (nn.modules.dropout._DropoutNd, nn.modules.batchnorm._BatchNorm)
        return any(isinstance(part, kinds) or getattr(part, "dropout", 0.0) for part in self.model.modules())

    @torch.no_grad()
    def _evaluate(self, x: Inputs) -> Tensor:
        self.model.eval()
        try:
            return self.model(x)
        finally:
            self.model.train()

    def _tensor(self, column: Floats) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(column)).to(self.device)
