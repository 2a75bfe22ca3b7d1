"""Dense weights that each worker trains itself and now and then averages with those of the others.

With x the worker's weights, o those it received last, s those of the shards and N workers:

    send      δ = (x − o)/N                                   s ← s + δ
    receive   x ← s' + what the worker has learned meanwhile  o ← s'

The mean of N workers moves one step while they make N. So each makes steps N times as long, and a batch moves s as far as on one
machine. No worker waits for another, and nothing but these differences travels. While a run warms up, batches are cut into parts; the
steps of all parts of a batch are together as long as that of the batch.
"""

from __future__ import annotations

import threading

import torch

from clickfleet.data.batch import Batch
from clickfleet.training.loop import Trainer, WorkerJob
from clickfleet.training.optimizer import factor
from clickfleet.training.sharding import Reply, Request
from clickfleet.training.step import Result

WARM_UP = 25
"""Batches of each worker that are trained in parts."""


class OwnWeights:
    """The dense weights of one worker. Its trainers share them and one optimizer."""

    def __init__(self, job: WorkerJob) -> None:
        self.job, self.values, self.optimizer = job, job.learner.flat.values, job.optimizer
        self._received, self._sent = self.values.clone(), self.values.clone()
        self._begun = self._asked = False
        self.steps = self.batches = 0
        """Steps and batches since the last exchange."""
        self._batches = 0
        """Batches of all workers at the last exchange, for the learning-rate schedule. Those since then are estimated."""
        self._lock = threading.Lock()

    def begin(self, job: WorkerJob) -> None:
        """Take part in a job. At first, take the weights of the shards. Call it before the trainers work."""
        self.job, job.runs_optimizer = job, True
        if not self._begun:
            self._sent.copy_(self.values)
            self.take(job.links[0].ask(Request(values=True)).wait())
            self._begun = True

    def step(self, trainer: Trainer, batch: Batch, result: Result) -> None:
        """Learn from the gradients of a batch or a part of one."""
        config, workers = self.optimizer.config, self.job.workers
        rate = config.lr * factor(config.schedule, self._batches + self.batches * workers)
        self.optimizer.step(trainer.step.flat.grads, result.dense_scale, workers * rate / batch.parts)
        self.steps += 1
        self.batches += batch.counted

    def put(self, request: Request) -> None:
        """Let a request exchange what was learned, unless that is nothing or another exchange is under way."""
        with self._lock:
            if self._asked or not self.steps:
                return
            self._batches += self.batches * self.job.workers
            self._asked, self.steps, self.batches = True, 0, 0
            with self.optimizer.lock:
                self._sent.copy_(self.values)
            request.difference = (self._sent - self._received).div_(self.job.workers).numpy()
            request.values = True

    def take(self, reply: Reply) -> None:
        """Take the weights of the shards, if the reply has them."""
        if reply.values is None:
            return
        with self._lock, self.optimizer.lock, torch.no_grad():
            self._received = torch.from_numpy(reply.values)
            self.values.sub_(self._sent).add_(self._received)  # keeps what was learned since it was sent
            self._batches, self._asked = reply.batches, False

    def exchange(self) -> None:
        """Exchange what was learned and wait for the answer. Call it while no trainer works."""
        self.put(request := Request(batches=0))
        if request.values:
            self.take(self.job.links[0].ask(request).wait())
