"""Dense weights that each worker trains itself and now and then averages with those of the others.

With x the worker's weights, o those it received last, s those of the shards and N workers:

    send      δ = (x − o)/N                                   s ← s + δ
    receive   x ← s' + what the worker has learned meanwhile  o ← s'

The mean of N workers moves one step while they make N. So each makes steps N times as long, and a batch moves s as far as on one
machine. No worker waits for another, and nothing but these differences travels.
"""

from __future__ import annotations

import threading

import torch

from clickfleet.training.loop import Trainer, WorkerJob
from clickfleet.training.optimizer import factor
from clickfleet.training.sharding import Reply, Request
from clickfleet.training.step import Result


class OwnWeights:
    """The dense weights of one worker. Its trainers share them and one optimizer."""

    def __init__(self, job: WorkerJob) -> None:
        self.job, self.values, self.optimizer = job, job.learner.flat.values, job.optimizer
        self._received, self._sent = self.values.clone(), self.values.clone()
        self._begun = self._asked = False
        self.steps = 0
        """Steps since the last exchange."""
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

    def step(self, trainer: Trainer, result: Result) -> None:
        """Learn from the gradients of a batch."""
        config, workers = self.optimizer.config, self.job.workers
        rate = config.lr * factor(config.schedule, self._batches + self.steps * workers)
        self.optimizer.step(trainer.step.flat.grads, result.dense_scale, workers * rate)
        self.steps += 1

    def put(self, request: Request) -> None:
        """Let a request exchange what was learned, unless that is nothing or another exchange is under way."""
        with self._lock:
            if self._asked or not self.steps:
                return
            self._batches += self.steps * self.job.workers
            self._asked, self.steps = True, 0
            with self.optimizer.lock:
                self._sent.copy_(self.values)
            request.difference = ((self._sent - self._received) / self.job.workers).numpy()
            request.values = True

    def take(self, reply: Reply) -> None:
        """Take the weights of the shards, if the reply has them."""
        if reply.values is None:
            return
        with self._lock, self.optimizer.lock, torch.no_grad():
            self._received.copy_(torch.from_numpy(reply.values))
            learned = self.values - self._sent  # since it was sent
            torch.add(self._received, learned, out=self.values)
            self._batches, self._asked = reply.batches, False

    def exchange(self) -> None:
        """Exchange what was learned and wait for the answer. Call it while no trainer works."""
        self.put(request := Request(batches=0))
        if request.values:
            self.take(self.job.links[0].ask(request).wait())
