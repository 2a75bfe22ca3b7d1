"""Async: a trainer sends its gradients and continues. The shards apply each push on arrival, so no trainer waits for another.

The request for the rows of a batch travels with the gradients of the batch before the previous one. The rows arrive while the batch
between is computed. Dense weights are pulled again after every few sends. Pushes of others that a trainer misses are its staleness.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge

from clickfleet.data.batch import Batch
from clickfleet.training.embedding import Embedding, Push
from clickfleet.training.loop import Trainer, WorkerJob
from clickfleet.training.modes import Needs
from clickfleet.training.sharding import Gradient, Link, Request, Ticket, copied, merged, summed

Count = Annotated[int, Ge(1)]
Coming = tuple[Batch, Embedding, Ticket]
"""A batch whose rows are requested."""
TICK_S = 0.01
NEEDS = Needs(distributed=True, link_per_trainer=True)


@dataclass(frozen=True)
class Config:
    queue_size: Count = 4
    """Unanswered sends before a trainer waits."""
    merge: Count = 1
    """Batches whose gradients are added into one send."""
    wait: Annotated[int, Ge(0)] = 5
    """How long gradients wait to be merged, in units of 10 ms, checked after each batch."""
    pull_every: Count = 2
    """Sends between two pulls of the dense weights."""
    independent_recv: bool = False
    """Request dense weights with the next rows, one step earlier. Otherwise the trainer waits for them after the send."""
    reduce: Literal["sum", "mean"] = "sum"
    """Add merged row gradients, or also divide them by the number of batches (`mean`)."""


class Queue:
    """Merge gradients and send them, with at most `queue_size` sends unanswered."""

    def __init__(self, link: Link, config: Config, clips: bool, loss_mean: bool) -> None:
        self.link, self.config, self._clips, self._loss_mean = link, config, clips, loss_mean
        self.sends = 0
        self.pulled_at: int | None = None
        """Sends before the last pull of the dense weights."""
        self._pushes: list[Push] = []
        self._gradients: list[Gradient] = []
        self._seen: list[int] = []
        self._since = 0.0
        self._out: deque[Ticket] = deque()

    def __len__(self) -> int:
        return len(self._out) + len(self._gradients)

    def add(self, push: Push, gradient: Gradient, seen: list[int], asking: Request | None) -> Ticket | None:
        """Add the gradients of a batch. If a send is due, request the next rows in the same message."""
        if not self._gradients:
            self._since, self._seen = time.monotonic(), seen
        alone = self.config.merge == 1  # sent before the next batch overwrites the arrays
        self._pushes.append(push if alone else copied(push))
        self._gradients.append(gradient if alone else gradient._replace(vector=gradient.vector.copy()))
        if self.due():
            return self.flush(asking)
        return None if asking is None else self.link.ask(asking)

    def stale(self) -> bool:
        """Return whether the dense weights are to be pulled with the next rows, before anything is sent."""
        return self.pulled_at is None or self.sends - self.pulled_at >= self.config.pull_every

    def due(self, more: int = 0) -> bool:
        """Return whether a send is due, counting `more` batches to come."""
        count = len(self._gradients) + more
        waited = bool(self._gradients) and time.monotonic() - self._since >= self.config.wait * TICK_S
        return count >= self.config.merge or waited

    def flush(self, asking: Request | None = None) -> Ticket | None:
        """Send the merged gradients together with the request `asking`."""
        if not self._gradients:
            return None if asking is None else self.link.ask(asking)
        request = asking or Request()
        request.push = merged(self._pushes, self.config.reduce == "mean")
        request.dense = summed(self._gradients, self._clips, self._loss_mean)
        request.seen = self._seen
        ticket = self.link.ask(request)
        self._out.append(ticket)
        while len(self._out) > self.config.queue_size:
            self._out.popleft().wait()
        self.sends += 1
        self._pushes, self._gradients = [], []
        return ticket

    def drain(self) -> None:
        """Send what is left and wait for every answer. The dense weights are pulled anew afterwards."""
        self.flush()
        while self._out:
            self._out.popleft().wait()
        self.pulled_at = None


def train(job: WorkerJob, config: Config) -> None:
    loss_mean = job.learner.loss.config.reduction == "mean"
    queues: list[Queue] = job.carried.setdefault("queues", [])
    if not queues:
        queues += [Queue(link, config, job.optimizer.clips, loss_mean) for link in job.links]
    job.queued = lambda: sum(map(len, queues))

    def drain() -> None:
        for queue in queues:
            queue.drain()

    job.before_checkpoint = drain
    free = [[trainer.step.spare(), trainer.step.spare()] for trainer in job.trainers]

    def work(trainer: Trainer) -> None:
        index = job.trainers.index(trainer)
        step, clock, link, queue = trainer.step, trainer.clock, job.links[index], queues[index]
        stream, coming = job.batches(clock), deque[Coming]()

        def prepare(values: bool = False) -> tuple[Batch, Embedding, Request] | None:
            """Return the next batch and the request for its rows."""
            batch = next(stream, None)
            if batch is None:
                return None
            embedding = free[index].pop()
            return batch, embedding, Request(pull=embedding.unique(batch), values=values)

        for first in (True, False):  # two batches in flight: one is computed while the rows of the other travel
            if following := prepare(stale := first and queue.stale()):
                queue.pulled_at = queue.sends if stale else queue.pulled_at
                coming.append((*following[:2], link.ask(following[2])))
        clock.lap("pull")
        while coming:
            batch, embedding, ticket = coming.popleft()
            reply = ticket.wait()
            clock.lap("pull")
            job.adopt(reply.values)
            free[index].append(step.embedding)
            step.embedding = embedding
            assert reply.rows is not None
            result = step(batch, reply.rows)
            gradient = job.gradient(trainer, result)
            clock.lap("compute")
            due = queue.due(1) and queue.sends + 1 - (queue.pulled_at or 0) >= config.pull_every
            following = prepare(due)
            due = due and following is not None
            asked = queue.add(result.push, gradient, reply.seen, following and following[2])
            if following and asked:
                coming.append((*following[:2], asked))
                if due and not config.independent_recv:
                    job.adopt(asked.wait().values)
            queue.pulled_at = queue.sends if due else queue.pulled_at
            clock.lap("push")
            job.report(batch, result)
        if job.epoch_ended:
            queue.drain()

    job.together(work)
