"""Async: a trainer sends its gradients and goes on; the shards learn whatever comes, and nobody waits for anybody.

Rows are read just before a batch is computed, while the batch before is; dense values come anew after every few sends. What a trainer
misses meanwhile is its staleness.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge

from clickfleet.embedding import Push
from clickfleet.exchange import Gradient, Link, Request, Ticket, copied, merged, summed
from clickfleet.job import Trainer
from clickfleet.share import Share

Count = Annotated[int, Ge(1)]
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

    def add(self, push: Push, gradient: Gradient, seen: list[int]) -> bool:
        """Takes the gradients of a batch; whether something was sent."""
        if not self._gradients:
            self._since, self._seen = time.monotonic(), seen
        alone = self.config.merge == 1  # sent before the next batch overwrites it
        if self.config.merge_sparse:
            self._pushes.append(push if alone else copied(push))
        else:
            self._send(Request(push=push, seen=seen))
        self._gradients.append(gradient if alone else gradient._replace(vector=gradient.vector.copy()))
        due = len(self._gradients) >= self.config.merge
        if due or time.monotonic() - self._since >= self.config.wait * TICK_S:
            self.flush()
            return True
        return False

    def flush(self) -> None:
        """Sends what is merged so far."""
        if self._gradients:
            push = merged(self._pushes, self.config.reduce == "mean") if self._pushes else None
            dense = summed(self._gradients, self._clips, self._loss_mean)
            self._pushes, self._gradients = [], []
            self._send(Request(push=push, dense=dense, seen=self._seen))
            self.sends += 1

    def _send(self, request: Request) -> None:
        if not self.config.fake_send:
            self._out.append(self.link.ask(request))
            while len(self._out) > self.config.queue_size:
                self._out.popleft().wait()

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
    spare = [trainer.step.spare() for trainer in job.trainers]

    def work(trainer: Trainer) -> None:
        index = job.trainers.index(trainer)
        step, clock, link, queue = trainer.step, trainer.clock, job.links[index], queues[index]
        stream = job.batches(clock)
        batch = next(stream, None)
        if batch is None:
            return
        ticket = link.ask(Request(pull=spare[index].unique(batch), values=True))
        fresh = queue.sends
        while batch is not None:
            reply = ticket.wait()
            clock.lap("pull")
            job.adopt(reply.values)
            step.embedding, spare[index] = spare[index], step.embedding
            following = next(stream, None)
            if following is not None:
                due = config.independent_recv and queue.sends - fresh >= config.pull_every
                ticket = link.ask(Request(pull=spare[index].unique(following), values=due))
                fresh = queue.sends if due else fresh
                clock.lap("pull")
            assert reply.rows is not None
            result = step(batch, reply.rows)
            gradient = job.gradient(trainer, result)
            clock.lap("compute")
            queue.add(result.push, gradient, reply.seen)
            if not config.independent_recv and queue.sends - fresh >= config.pull_every:
                job.adopt(link.ask(Request(values=True)).wait().values)
                fresh = queue.sends
            clock.lap("push")
            job.report(batch, result)
            batch = following
        queue.drain()

    while job.goes_on():
        job.together(work)
