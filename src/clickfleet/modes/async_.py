"""Async: a trainer sends its gradients and goes on; the shards learn whatever comes, and nobody waits for anybody.

The rows of a batch are asked for along with the gradients of the last but one, so that they travel while the one between is computed;
dense values come anew after every few sends. What a trainer misses meanwhile is its staleness.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge

from clickfleet.batch import Batch
from clickfleet.embedding import Embedding, Push
from clickfleet.exchange import Gradient, Link, Request, Ticket, copied, merged, summed
from clickfleet.job import Trainer
from clickfleet.share import Share

Count = Annotated[int, Ge(1)]
Coming = tuple[Batch, Embedding, Ticket]
"""A batch whose rows are under way."""
TICK_S = 0.01


DISTRIBUTED = True


@dataclass(frozen=True)
class Config:
    queue_size: Count = 4
    """Sends that may be unanswered before a trainer waits."""
    merge: Count = 1
    """Batches whose gradients are added up to one send."""
    wait: Annotated[int, Ge(0)] = 5
    """How long gradients wait to be merged with others, in units of 10 ms, looked at after each batch."""
    pull_every: Count = 2
    """Sends between two readings of the dense values."""
    independent_recv: bool = False
    """Dense values come along with the rows of the next batch; else a trainer waits for them after the send."""
    reduce: Literal["sum", "mean"] = "sum"
    """Merged row gradients are added up, or also divided by the number of batches."""
    merge_sparse: bool = True
    """Off: row gradients are sent after every batch, only dense ones are merged."""
    io_threads: Count = 1
    """Threads of a worker that send and receive."""
    fake_send: bool = False
    """Nothing is sent: shows what sending costs. Such a run learns nothing."""


class Queue:
    """Gradients on their way: merged, sent, and at most `queue_size` of them unanswered."""

    def __init__(self, link: Link, config: Config, clips: bool, loss_mean: bool) -> None:
        self.link, self.config, self._clips, self._loss_mean = link, config, clips, loss_mean
        self.sends = 0
        self._pushes: list[Push] = []
        self._gradients: list[Gradient] = []
        self._seen: list[int] = []
        self._since = 0.0
        self._out: deque[Ticket] = deque()

    def __len__(self) -> int:
        return len(self._out) + len(self._gradients)

    def add(self, push: Push, gradient: Gradient, seen: list[int], asking: Request | None) -> Ticket | None:
        """Takes the gradients of a batch, and asks for the rows of another in the same message where one is due."""
        if not self._gradients:
            self._since, self._seen = time.monotonic(), seen
        alone = self.config.merge == 1  # sent before the next batch overwrites it
        if self.config.merge_sparse:
            self._pushes.append(push if alone else copied(push))
        else:
            self._send(Request(push=push, seen=seen))
        self._gradients.append(gradient if alone else gradient._replace(vector=gradient.vector.copy()))
        if self.due():
            return self.flush(asking)
        return None if asking is None else self.link.ask(asking)

    def due(self, more: int = 0) -> bool:
        """Whether what is merged is to be sent, with so many batches more."""
        count = len(self._gradients) + more
        waited = bool(self._gradients) and time.monotonic() - self._since >= self.config.wait * TICK_S
        return count >= self.config.merge or waited

    def flush(self, asking: Request | None = None) -> Ticket | None:
        """Sends what is merged so far, and asks what is to be asked."""
        request = asking or Request()
        if self._gradients and not self.config.fake_send:
            request.push = merged(self._pushes, self.config.reduce == "mean") if self._pushes else None
            request.dense = summed(self._gradients, self._clips, self._loss_mean)
            request.seen = self._seen
            ticket = self._send(request)
        else:
            ticket = None if asking is None else self.link.ask(asking)
        self.sends += bool(self._gradients)
        self._pushes, self._gradients = [], []
        return ticket

    def _send(self, request: Request) -> Ticket | None:
        if self.config.fake_send:
            return None
        self._out.append(self.link.ask(request))
        ticket = self._out[-1]
        while len(self._out) > self.config.queue_size:
            self._out.popleft().wait()
        return ticket

    def drain(self) -> None:
        """Until everything was answered."""
        self.flush()
        while self._out:
            self._out.popleft().wait()


def train(job: Share, config: Config) -> None:
    dense, loss = job.optimizer.config, job.learner.loss.config
    clips = dense.clip_norm is not None or dense.clip_value is not None
    queues = [Queue(link, config, clips, loss.reduction == "mean") for link in job.links]
    job.queued = lambda: sum(map(len, queues))
    free = [[trainer.step.spare(), trainer.step.spare()] for trainer in job.trainers]

    def work(trainer: Trainer) -> None:
        index = job.trainers.index(trainer)
        step, clock, link, queue = trainer.step, trainer.clock, job.links[index], queues[index]
        stream, coming = job.batches(clock), deque[Coming]()
        fresh = queue.sends

        def prepare(values: bool = False) -> tuple[Batch, Embedding, Request] | None:
            """The next batch, and what to ask for it."""
            batch = next(stream, None)
            if batch is None:
                return None
            embedding = free[index].pop()
            return batch, embedding, Request(pull=embedding.unique(batch), values=values)

        for first in (True, False):  # rows of two batches are under way: one is computed while the other travels
            if following := prepare(first):
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
            due = queue.due(1) and queue.sends + 1 - fresh >= config.pull_every
            following = prepare(due)
            asked = queue.add(result.push, gradient, reply.seen, following and following[2])
            if following and asked:
                coming.append((*following[:2], asked))
                if due and not config.independent_recv:
                    job.adopt(asked.wait().values)
            fresh = queue.sends if due else fresh
            clock.lap("push")
            job.report(batch, result)
        queue.drain()

    while job.goes_on():
        job.together(work)
