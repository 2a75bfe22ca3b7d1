"""A worker's share in a job: what a cluster mode works with besides batches and trainers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from clickfleet.batch import Batch, Floats
from clickfleet.exchange import Gradient, Link
from clickfleet.job import Job, Source, Trainer
from clickfleet.learner import Learner
from clickfleet.metrics import Metrics
from clickfleet.optimizers import clip
from clickfleet.step import Result

Position = dict[str, Any]


class Share(Job):
    """The part of a run that one worker trains: some streams of batches, and links to the shards, one per trainer."""

    def __init__(
        self,
        learner: Learner,
        source: Source,
        metrics: Metrics,
        attend: Callable[[Job], bool],
        report: Callable[[Job], None],
        *,
        links: list[Link],
        worker: int = 0,
        workers: int = 1,
        trainers: int = 1,
        wanted: Callable[[], int] = lambda: 0,
        took: Callable[[int, Position], None] = lambda cut, position: None,
    ) -> None:
        super().__init__(learner, source, metrics, attend, report, trainers=trainers, threads=trainers)
        self.links, self.worker, self.workers = links, worker, workers
        self.trained = 0
        """Batches learned; `steps` counts those handed out, some of which may be ahead."""
        self.wanted = wanted
        """The cut that is asked for, or 0."""
        self.took = took
        """Tells that a cut contains all batches up to a position and none after it."""
        self.saved: dict[str, bytes] = {}
        """What the mode kept for itself in the cut that training goes on from."""
        self.carried: dict[str, Any] = {}
        """What the mode carries from one epoch to the next."""
        self.keep: Callable[[], dict[str, bytes]] = dict
        """What the mode wants to keep for itself in a cut, as files."""
        self.queued: Callable[[], int] = lambda: 0
        """Gradients of this worker that are not answered yet."""
        self.before_cut: Callable[[], None] = lambda: None
        """What the mode must send before a mark."""

    def report(self, batch: Batch, result: Result) -> None:
        super().report(batch, result)
        self.trained += 1

    def adopt(self, values: Floats | None) -> None:
        """Takes over dense values."""
        if values is not None:
            with torch.no_grad():
                self.learner.flat.values.copy_(torch.from_numpy(values))

    def gradient(self, trainer: Trainer, result: Result) -> Gradient:
        """The dense gradient of the trainer's last step, clipped; it is good until the next one."""
        grads, scale = trainer.step.flat.grads, result.dense_scale
        config = self.optimizer.config
        if config.clip_norm is not None or config.clip_value is not None:
            clip(config, grads.mul_(scale))
            scale = 1.0
        return Gradient(grads.numpy(), result.push.n, scale)
