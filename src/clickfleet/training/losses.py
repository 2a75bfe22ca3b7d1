"""Losses of a batch, as sums over its rows. The table needs the gradient of the sum; `Loss.dense_scale` turns it into a mean."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from clickfleet.config import sections
from clickfleet.config.plugins import find_function
from clickfleet.data.schema import Label
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
    part = curvature * ((1 - share) * (1 - 1 / len(logits)) / curvature.sum(0).clamp_min(1e-30))
    logits.register_hook(lambda errors: errors - part * errors.sum(0))  # type: ignore[no-untyped-call]


def log_loss_of_product(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """The log loss of p = Π_k σ(logit_k) of logits [B, K], by ln p = Σ_k ln σ(logit_k).

    >>> log_loss_of_product(torch.zeros(2, 2), torch.tensor([1.0, 0.0]), torch.ones(2))  # ln 4 + ln 4/3
    tensor(1.6740)
    """
    log_p = F.logsigmoid(logits).sum(1)
    log_rest = torch.log(-torch.expm1(log_p.clamp_max(-1e-7)))
    return -(weights * (labels * log_p + (1 - labels) * log_rest)).sum()


class LateLabels(NamedTuple):
    """What a batch knows about labels that come late; both have the shape of the labels."""

    previous: Tensor | None
    """Labels that corrections replace, else NaN."""
    on_time: Tensor | None
    """The share of positives that come before a row counts as negative."""


class TaskRows(NamedTuple):
    """What one label adds to the loss: Σ weight·loss(label) − Σ withdrawn·loss(before)."""

    labels: Tensor
    weights: Tensor
    before: Tensor | None = None
    withdrawn: Tensor | None = None
    """What the earlier rows of corrections added, and is taken back."""


def real_negatives(p: Tensor, on_time: Tensor) -> Tensor:
    """Return the probability that a row without a label will never get it, if it gets one with probability p.

    Of the positives, the share `on_time` is known by now: (1 − p) / (1 − p·on_time). With it as the weight of negatives, late
    positives that are learned as one more row leave the expected gradient of a show as it is when its label is known at once. This is
    fake-negative weighting (arXiv:1907.06558) after a wait.

    >>> real_negatives(torch.tensor(0.5), torch.tensor([0.0, 1.0]))
    tensor([0.5000, 1.0000])
    """
    return (1 - p) / (1 - p * on_time).clamp_min(1e-6)


def own_space(labels: Tensor, tasks: Sequence[Label], task: int) -> tuple[Tensor, Tensor]:
    """Return the labels of a task, 0 where they are unknown, and where they count: known, and after the label in `given`."""
    column = labels[:, task]
    counts = ~torch.isnan(column)
    if (parent := given(tasks, task)) is not None:
        counts = counts & (labels[:, parent] == 1)
    return torch.where(counts, column, 0.0), counts


def entire_space(labels: Tensor, tasks: Sequence[Label], task: int) -> tuple[Tensor, Tensor]:
    """Return the labels of a task over all rows, and where they are known: without the label in `given`, it is 0."""
    column = labels[:, task]
    if (parent := given(tasks, task)) is not None:
        before, known = entire_space(labels, tasks, parent)
        column = torch.where(before == 1, column, torch.where(known, 0.0, torch.nan))
    return column.nan_to_num(), ~torch.isnan(column)


def given(tasks: Sequence[Label], task: int) -> int | None:
    """Return the number of the label that must be 1 for this one to have a meaning."""
    name = tasks[task].given
    return [other.name for other in tasks].index(name) if name else None


def chain(tasks: Sequence[Label], task: int) -> list[int]:
    """Return a task and those it depends on, the last first.

    >>> chain((Label("click"), Label("buy", given="click"), Label("return", given="buy")), 2)
    [2, 1, 0]
    """
    parent = given(tasks, task)
    return [task] if parent is None else [task, *chain(tasks, parent)]


def l2(tensors: Iterable[Tensor], strength: float) -> Tensor:
    """strength/2 · Σ‖w‖², whose gradient is strength·w."""
    return torch.stack([tensor.square().sum() for tensor in tensors]).sum() * (strength / 2)


Config = sections.LossSettings
LossFunction = Callable[[Tensor, Tensor, Tensor], Tensor]
"""A user's loss: `function(logits, labels, weights)`, all of shape [B].

It returns the loss of each row, which is then multiplied by its weight, or one number: the sum over all rows, weights included.
"""


def predictions(logits: Tensor, tasks: Sequence[Label]) -> Tensor:
    """Return the prediction behind each logit: σ(logit) for log, the logit for mse, exp(logit) for poisson."""
    if all(task.loss == "log" for task in tasks):
        return torch.sigmoid(logits)
    functions = {"log": torch.sigmoid, "mse": lambda x: x, "poisson": torch.exp}
    return torch.stack([functions[task.loss](logits[:, i]) for i, task in enumerate(tasks)], 1)


class Loss:
    """The objective of a step: the sum over all labels of weight·loss.

    A label with `given` counts in rows where that label is 1. With `entire_space`, it counts in all rows: the product of the
    probabilities predicts both labels. `conditional` then adds the loss in rows where the other label is 1, with this weight.

    If only a fraction r of the negatives was kept, the odds in the data are 1/r times too high. The loss is therefore
    computed at logit − ln r, for the first label. The model learns the logits of the full traffic; evaluation and serving
    need no correction.
    """

    def __init__(
        self,
        config: Config,
        model_epsilon: float = 0.0,
        tasks: tuple[Label, ...] = (Label("label"),),
        entire_space: bool = False,
        conditional: float = 0.0,
    ) -> None:
        if len(tasks) > 1 and config.function is not None:
            raise ConfigError(
                f"train.loss.function is defined for one label, but the schema has {len(tasks)}", "remove it"
            )
        if not 0.0 < config.negatives_kept <= 1.0:
            raise ConfigError(
                f"train.loss.negatives_kept must be in (0, 1], not {config.negatives_kept:g}",
                "set it to the fraction of negatives that the training data still contains, such as 0.1",
            )
        if config.function is not None and any(task.late == "weight" for task in tasks):
            raise ConfigError(
                f"the label {tasks[0].name} has late: weight, which is defined for the log loss only",
                "remove train.loss.function, or set late to correct or none",
            )
        if config.function is not None and config.shared_error not in (None, 1.0):
            raise ConfigError(
                f"train.loss.shared_error is {config.shared_error:g}, which is defined for the log loss only",
                "remove it or train.loss.function",
            )
        self.config, self.tasks = config, tasks
        self._terms: list[tuple[int, Label, bool]] = []
        """The terms of the loss of several labels: the number of a label, the label, and whether it is learned from all rows."""
        for i, task in enumerate(tasks):
            entire = entire_space and bool(task.given) and task.loss == "log"
            self._terms.append((i, task, entire))
            if entire and conditional:
                self._terms.append((i, replace(task, weight=task.weight * conditional), False))
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
        late: LateLabels | None = None,
    ) -> Tensor:
        """Return the sum over the rows. Regularisers have the scale of the mean loss of a row, so they are multiplied by Σ weights.

        `extra` is the model's `extra_loss()`; `matrices` are the weights to which `l2` applies.
        """
        logits = self.sampled(logits)
        if len(self.tasks) > 1:
            loss = self._all_tasks(logits, labels, weights, late)
        elif late is not None:
            loss = self._one_late(logits, labels, weights, late)
        else:
            loss = self._one(logits, labels, weights)
        penalty = extra
        if self.config.l2:
            decay = l2(matrices, self.config.l2)
            penalty = decay if penalty is None else penalty + decay
        return loss if penalty is None else loss + penalty * self.rows(labels, weights)

    def _one(self, logits: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
        if self.shared_error < 1.0 and logits.requires_grad:
            damp_shared_error(logits, weights, self.shared_error)
        return self._of_one(logits, labels, weights)

    def _of_one(self, logits: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
        if self.config.function is not None:
            return self._own(logits, labels, weights)
        return log_loss(logits, labels, weights, self.epsilon)

    def _one_late(self, logits: Tensor, labels: Tensor, weights: Tensor | None, late: LateLabels) -> Tensor:
        """Return the loss of one label, some of whose values come late."""
        counts = torch.ones_like(labels, dtype=torch.bool)
        earlier = None if late.previous is None else (late.previous.nan_to_num(), ~torch.isnan(late.previous))
        p = torch.sigmoid(logits.detach() - self.shift)
        rows = _learned(self.tasks[0], (labels, counts), earlier, weights, p, late.on_time)
        if self.shared_error < 1.0 and logits.requires_grad:
            damp_shared_error(logits, _curvature(rows), self.shared_error)
        loss = self._of_one(logits, rows.labels, rows.weights)
        return loss if rows.before is None else loss - self._of_one(logits, rows.before, rows.withdrawn)

    def _all_tasks(self, logits: Tensor, labels: Tensor, weights: Tensor | None, late: LateLabels | None) -> Tensor:
        """Return the loss of all labels. `logits` and `labels` are [B, T]; NaN is an unknown label."""
        parts = []
        for i, task, entire in self._terms:
            space = entire_space if entire else own_space
            column, counts = space(labels, self.tasks, i)
            if late is None:
                each = counts.float() * task.weight
                parts.append(TaskRows(column, each if weights is None else each * weights))
                continue
            earlier = None if late.previous is None else space(late.previous, self.tasks, i)
            on_time = None if late.on_time is None else late.on_time[:, i]
            p = self._probability(logits.detach(), i, entire) if task.late == "weight" else column
            parts.append(_learned(task, (column, counts), earlier, weights, p, on_time))
        if self.shared_error < 1.0 and logits.requires_grad:
            curvature = torch.zeros_like(logits)
            for (i, task, _), rows in zip(self._terms, parts, strict=True):
                if task.loss == "log":
                    curvature[:, i] += _curvature(rows)
            damp_shared_error(logits, curvature, self.shared_error)
        losses = []
        for (i, _, entire), rows in zip(self._terms, parts, strict=True):
            losses.append(self._task(logits, i, entire, rows.labels, rows.weights))
            if rows.before is not None and rows.withdrawn is not None:
                losses.append(-self._task(logits, i, entire, rows.before, rows.withdrawn))
        return torch.stack(losses).sum()

    def _task(self, logits: Tensor, task: int, entire: bool, labels: Tensor, weights: Tensor) -> Tensor:
        """Return the loss of one of several labels, in all rows or in those where it counts."""
        kind, logit = self.tasks[task].loss, logits[:, task]
        if entire:
            return log_loss_of_product(logits[:, chain(self.tasks, task)], labels, weights)
        if kind == "log":
            return log_loss(logit, labels, weights, self.epsilon)
        if kind == "mse":
            return (weights * (logit - labels).square()).sum()
        return (weights * (logit.exp() - labels * logit)).sum()

    def _probability(self, logits: Tensor, task: int, entire: bool) -> Tensor:
        """Return the predicted probability of a label in the space that it is learned in, on the scale of the full traffic."""
        behind = chain(self.tasks, task) if entire else [task]
        shifts = torch.tensor([self.shift if i == 0 else 0.0 for i in behind], device=logits.device)
        return torch.sigmoid(logits[:, behind] - shifts).prod(1)

    def scores(self, logits: Tensor) -> Tensor:
        """Return the predictions of all labels: a probability, a number, or the mean of a count."""
        return predictions(logits, self.tasks)

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
        if not self.shift or logits.ndim == 1:
            return logits + self.shift if self.shift else logits
        return logits + torch.tensor([self.shift] + [0.0] * (len(self.tasks) - 1), device=logits.device)

    def dense_scale(self, labels: Tensor, weights: Tensor | None = None) -> float:
        """Return the factor for the dense gradients of `total` before the optimizer sees them. Σ weights = 0 counts as 1."""
        return 1.0 if self.config.reduction == "sum" else 1.0 / (float(self.rows(labels, weights)) or 1.0)

    @staticmethod
    def rows(labels: Tensor, weights: Tensor | None) -> float | Tensor:
        return len(labels) if weights is None else weights.sum()


def _learned(
    task: Label,
    now: tuple[Tensor, Tensor],
    earlier: tuple[Tensor, Tensor] | None,
    weights: Tensor | None,
    p: Tensor,
    on_time: Tensor | None,
) -> TaskRows:
    """Return what a label adds to the loss: `now` and `earlier` are its values and where they count, of the rows and of those before.

    A correction whose value did not change adds nothing.
    """
    labels, counts = now
    each = torch.full_like(labels, task.weight) if weights is None else weights * task.weight
    first = counts
    before = withdrawn = None
    if earlier is not None:
        before, counted = earlier
        changed = (counts != counted) | (labels != before)
        first, counts = counts & ~counted, counts & changed
        withdrawn = each * (counted & changed)
    each = each * counts
    if task.late == "weight" and on_time is not None:
        each = torch.where(first & (labels == 0), each * real_negatives(p, on_time), each)
    return TaskRows(labels, each, before, withdrawn) if task.late == "correct" else TaskRows(labels, each)


def _curvature(rows: TaskRows) -> Tensor:
    """Return the weight of the second derivatives by the logits: a value that replaces another adds none."""
    return rows.weights if rows.withdrawn is None else (rows.weights - rows.withdrawn).clamp_min(0)
