"""One training step: rows in, loss and row gradients out. All training modes share it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from clickfleet.data.batch import Batch, Floats, Keys
from clickfleet.data.schema import Schema
from clickfleet.errors import ConfigError
from clickfleet.store.table import Table
from clickfleet.training import devices
from clickfleet.training.embedding import Embedding, Push
from clickfleet.training.losses import LateLabels, Loss
from clickfleet.training.network import Inputs, Model
from clickfleet.training.optimizer import Flat, Optimizer

if TYPE_CHECKING:
    from clickfleet.training.learner import Learner


class Result(NamedTuple):
    """The result of a batch. The gradients of the dense weights are in the step's `flat.grads`."""

    loss: float
    """The sum over the rows, including weights and regularisers."""
    scores: (
        Floats  # [B], or [B, T] of several labels, on the scale of the training data: down-sampled negatives raise them
    )
    push: Push
    dense_scale: float
    """Factor for the dense gradients."""
    labels: Floats | None = None
    """The labels that belong to the scores, if they are not the labels of the batch."""


class NotFiniteError(Exception):
    """The loss of a batch is not finite. Nothing was learned from this batch."""

    def __init__(self, batch: Batch, loss: float) -> None:
        super().__init__(f"the loss is {loss}")
        self.batch, self.loss = batch, loss


class RowDecay(NamedTuple):
    """L2 on rows: add strength·w to the gradient that the rule sees after it divided by shows or by the weight of the batch."""

    strength: float
    embed_scale: str
    embedx_scale: str

    def add(self, push: Push, rows: Floats) -> None:
        for part, scale in ((slice(0, 1), self.embed_scale), (slice(1, None), self.embedx_scale)):
            divisor = push.show[:, None] if scale == "show" else np.float32(push.n if scale == "batch" else 1.0)
            push.grads[:, part] += self.strength * np.where(divisor > 0, divisor, np.float32(1.0)) * rows[:, part]


class TableDecay:
    """L2 on the whole table: the gradient of strength/2·w² per row of data, as if every row of the table took part in every step.

    Only the rows of a batch are at hand. So each takes the share of the steps in which its key did not occur: the gradient is divided
    by the probability that a batch contains the key. Earlier batches tell it; their counts are in a hashed array.
    """

    MOST = 10.0
    """Bound of the coefficient of one step, so that a key that comes back after long does not overshoot."""
    BITS = 20

    def __init__(self, strength: float) -> None:
        self.strength = strength
        self.counts = np.zeros(1 << self.BITS, np.float32)
        self.total = 0.0

    @classmethod
    def of(cls, strength: float, table: Table) -> TableDecay:
        """Return the decay for a table, whose rows tell how often each key occurred so far."""
        decay = cls(strength)
        if len(table):
            with table.snapshot() as rows:
                for columns in rows:
                    decay.count(columns["key"], columns["show"])
        return decay

    def count(self, keys: Keys, shows: Floats) -> NDArray[np.int64]:
        """Count occurrences. Return the places of the keys in `counts`."""
        places = (keys * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(64 - self.BITS)).astype(np.int64)
        np.add.at(self.counts, places, shows)
        self.total += float(shows.sum(dtype=np.float64))
        return places

    def add(self, push: Push, rows: Floats) -> None:
        places = self.count(push.keys, push.show)
        expected = self.counts[places] * np.float32(push.show.sum(dtype=np.float64) / max(self.total, 1.0))
        present = np.maximum(-np.expm1(-expected), np.float32(1e-12))
        push.grads[:] += np.minimum(np.float32(self.strength * push.n) / present, np.float32(self.MOST))[:, None] * rows


class Step:
    """The forward and backward pass of one trainer thread. Each thread has its own gradients of the dense weights."""

    def __init__(
        self,
        flat: Flat,
        loss: Loss,
        schema: Schema,
        factors: int,
        device: torch.device = devices.CPU,
        row_decays: Sequence[RowDecay | TableDecay] = (),
        by_show: tuple[bool, bool] = (False, False),
    ) -> None:
        assert isinstance(flat.model, Model)
        self.flat, self.model, self.loss, self.schema = flat, flat.model, loss, schema
        self.row_decays, self.by_show = row_decays, by_show
        self.device, self.factors = device, factors
        self.embedding = self.spare()
        self.score_first = False
        """Take the scores from a separate forward pass in evaluation mode, before training on the batch."""
        self.matrices = [p for p in self.model.parameters() if p.requires_grad and p.ndim > 1] if loss.config.l2 else []

    @classmethod
    def of(cls, learner: Learner, flat: Flat) -> Step:
        """Return the step of a learner for one thread."""
        table, l2 = learner.table, learner.l2_rows
        decays: list[RowDecay | TableDecay] = []
        if l2:
            decays.append(RowDecay(l2, table.embed_rule.scale, table.rule.scale))
        if strength := learner.config.train.loss.l2_table:
            decays.append(TableDecay.of(strength, table))
        by_show = (table.embed_rule.scale == "show", table.rule.scale == "show")
        return cls(flat, learner.loss, learner.schema, table.factors, learner.device, decays, by_show)

    def train(self, batch: Batch, table: Table, optimizer: Optimizer, lap: Callable[[str], None]) -> Result:
        """Train on a batch with a table of this process: pull, compute, push. `lap` is called with the name of each phase at its end."""
        keys = self.embedding.unique(batch)
        slots = self.embedding.slots_of(batch) if len(table.classes) > 1 else None
        rows = table.pull(keys, out=self.embedding.room(), slots=slots)
        lap("pull")
        result = self(batch, rows)
        optimizer.step(self.flat.grads, result.dense_scale)
        lap("compute")
        table.push(**result.push._asdict())
        lap("push")
        return result

    def __call__(self, batch: Batch, rows: Floats) -> Result:
        """Compute loss and gradients. `rows` are those of `embedding.unique(batch)`. Raise `NotFiniteError` if the loss is not finite."""
        assert batch.labels is not None
        x = self.embedding.inputs(batch, rows)
        labels, weights = self._tensor(batch.labels), None if batch.weights is None else self._tensor(batch.weights)
        self.flat.zero_grads()
        before = self._evaluate(x) if self.score_first else None
        logits = self.logits(self.model(x), len(batch))
        loss = self.loss.total(
            logits, labels, weights, self.model.extra_loss(), self.matrices, self._late_labels(batch)
        )
        value = loss.item()
        if not math.isfinite(value):
            raise NotFiniteError(batch, value)
        loss.backward()  # type: ignore[no-untyped-call]
        scores = self.loss.scores(self.loss.sampled(logits.detach() if before is None else before)).cpu().numpy()
        scale = self.loss.dense_scale(labels, weights)
        push = self.embedding.push(batch, x, by_show=self.by_show)
        for decay in self.row_decays:
            decay.add(push, rows)
        return Result(value, scores, push, scale)

    def spare(self) -> Embedding:
        """Return another `embedding`, to prepare the next batch during this one."""
        return Embedding(self.schema, self.factors, self.device, self.model.reads_histories)

    def logits(self, out: Tensor, rows: int) -> Tensor:
        """Return what a model has returned. Refuse it unless it has one logit per row and label."""
        tasks = len(self.schema.tasks)
        if out.shape != ((rows, tasks) if tasks > 1 else (rows,)):
            expected = f"[rows, {tasks}], one logit per label" if tasks > 1 else "[rows]"
            raise ConfigError(
                f"the model returned logits of the shape {list(out.shape)} for {rows} rows; expected {expected}",
                "a model for several labels has `shape.outputs` outputs" if tasks > 1 else "return one logit per row",
            )
        return out

    def flush(self) -> None:
        """Write to the table what `train` has kept back. Call it before anyone else reads the table."""

    def is_noisy(self) -> bool:
        """Return whether scores differ between training and evaluation mode: dropout, batch norm, or a model that draws samples."""
        kinds = (nn.modules.dropout._DropoutNd, nn.modules.batchnorm._BatchNorm)
        return any(
            isinstance(part, kinds) or getattr(part, "dropout", 0.0) or getattr(part, "samples", False)
            for part in self.model.modules()
        )

    @torch.no_grad()
    def _evaluate(self, x: Inputs) -> Tensor:
        self.model.eval()
        try:
            return self.model(x)
        finally:
            self.model.train()

    def _late_labels(self, batch: Batch) -> LateLabels | None:
        if batch.previous is None and batch.on_time is None:
            return None
        return LateLabels(*(None if one is None else self._tensor(one) for one in (batch.previous, batch.on_time)))

    def _tensor(self, column: Floats) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(column)).to(self.device)
