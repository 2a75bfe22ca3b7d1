"""Async: a trainer sends its gradients and continues. The shards apply each push on arrival, so no trainer waits for another.

The request for the rows of a batch travels with the gradients of the batch before the previous one. The rows arrive while the batch
between is computed. Pushes of others that a trainer misses are its staleness.

Dense weights travel in one of two ways. By default each worker trains its own copy and now and then averages it with those of the
others. With `dense: gradient` the shards run one optimizer on the gradients of all workers.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge

from clickfleet.data.batch import Batch
from clickfleet.errors import ConfigError
from clickfleet.training.embedding import Embedding, Push
from clickfleet.training.loop import Trainer, WorkerJob, ramped
from clickfleet.training.modes import Needs
from clickfleet.training.modes._own_weights import WARM_UP, OwnWeights
from clickfleet.training.sharding import Gradient, Link, Reply, Request, Ticket, copied, merged, summed
from clickfleet.training.step import Result

Count = Annotated[int, Ge(1)]
Coming = tuple[Batch, Embedding, Ticket]
"""A batch whose rows are requested."""
TICK_S = 0.01
DENSE_EVERY, PULL_EVERY = 8, 2
OF_GRADIENT = ("pull_every", "independent_recv")
"""Settings of `dense: gradient`."""
OF_AVERAGE = ("dense_every", "warm_up")
NEEDS = Needs(distributed=True, stale=True, link_per_trainer=True)


@dataclass(frozen=True)
class Config:
    dense: Literal["average", "gradient"] | None = None
    """Dense weights. average: each worker trains its own copy and averages it with the others. gradient: the shards run one optimizer
    on the gradients of all workers, with eight times the messages. Default: average, unless pull_every or independent_recv is set."""
    dense_every: Count | None = None
    """Batches of a worker between two averages of the dense weights; fewer at the beginning of a run. Default: 8. Only for average."""
    warm_up: Annotated[int, Ge(0)] | None = None
    """Batches of each worker, from the beginning of a run, that are trained in parts: one for each worker, of at least 100 rows. So a
    worker makes as many steps as one machine while the weights change most. Default: 25. Only for average."""
    queue_size: Count = 4
    """Unanswered sends before a trainer waits."""
    merge: Count = 1
    """Batches whose gradients are added into one send."""
    wait: Annotated[int, Ge(0)] = 5
    """How long gradients wait to be merged, in units of 10 ms, checked after each batch."""
    pull_every: Count | None = None
    """Sends between two pulls of the dense weights. Default: 2. Only for gradient."""
    independent_recv: bool | None = None
    """Request dense weights with the next rows, one step earlier. Otherwise the trainer waits for them after the send. Only for
    gradient."""
    reduce: Literal["sum", "mean"] = "sum"
    """Add merged row gradients, or also divide them by the number of batches (`mean`)."""

    def __post_init__(self) -> None:
        given = [name for name in (*OF_GRADIENT, *OF_AVERAGE) if getattr(self, name) is not None]
        unused = [name for name in given if (name in OF_GRADIENT) == self.averages]
        if unused:
            why = f"mode.dense is {self.dense}" if self.dense else f"mode.{given[0]} makes mode.dense gradient"
            raise ConfigError(
                f"mode.{unused[0]} has no effect: {why}", f"remove mode.{unused[0]}, or change mode.dense"
            )

    @property
    def averages(self) -> bool:
        """Whether each worker trains its own dense weights."""
        return self.dense == "average" or (
            self.dense is None and all(getattr(self, name) is None for name in OF_GRADIENT)
        )


class Queue:
    """Merge gradients and send them, with at most `queue_size` sends unanswered."""

    def __init__(self, link: Link, config: Config, clips: bool, loss_mean: bool) -> None:
        self.link, self.config, self._clips, self._loss_mean = link, config, clips, loss_mean
        self.sends = 0
        self.pulled_at: int | None = None
        """Sends before the last pull of the dense weights, with `dense: gradient`."""
        self._pushes: list[Push] = []
        self._gradients: list[Gradient] = []
        self._batches = 0
        self._seen: list[int] = []
        self._since = 0.0
        self._out: deque[Ticket] = deque()

    def __len__(self) -> int:
        return len(self._out) + len(self._pushes)

    def add(
        self, push: Push, gradient: Gradient | None, seen: list[int], counted: bool, asking: Request | None
    ) -> Ticket | None:
        """Add the gradients of a batch or a part. If a send is due, request the next rows in the same message."""
        if not self._pushes:
            self._since, self._seen = time.monotonic(), seen
        alone = self.config.merge == 1  # sent before the next batch overwrites the arrays
        self._pushes.append(push if alone else copied(push))
        self._batches += counted
        if gradient is not None:
            self._gradients.append(gradient if alone else gradient._replace(vector=gradient.vector.copy()))
        if self.due():
            return self.flush(asking)
        return None if asking is None else self.link.ask(asking)

    def due(self, more: int = 0) -> bool:
        """Return whether a send is due, counting `more` batches to come."""
        count = len(self._pushes) + more
        waited = bool(self._pushes) and time.monotonic() - self._since >= self.config.wait * TICK_S
        return count >= self.config.merge or waited

    def flush(self, asking: Request | None = None) -> Ticket | None:
        """Send the merged gradients together with the request `asking`."""
        if not self._pushes:
            return None if asking is None else self.link.ask(asking)
        request = asking or Request()
        request.push, request.batches = merged(self._pushes, self.config.reduce == "mean"), self._batches
        if self._gradients:
            request.dense = summed(self._gradients, self._clips, self._loss_mean)
        request.seen = self._seen
        ticket = self.link.ask(request)
        self._out.append(ticket)
        while len(self._out) > self.config.queue_size:
            self._out.popleft().wait()
        self.sends += 1
        self._pushes, self._gradients, self._batches = [], [], 0
        return ticket

    def drain(self) -> None:
        """Send what is left and wait for every answer. The dense weights are pulled again afterwards."""
        self.flush()
        while self._out:
            self._out.popleft().wait()
        self.pulled_at = None


class PulledWeights:
    """Dense weights that the shards train (`dense: gradient`). A trainer pulls them again after every few sends."""

    def __init__(self, job: WorkerJob, config: Config) -> None:
        self.job, self.every, self.waits = job, config.pull_every or PULL_EVERY, not config.independent_recv

    def begin(self, job: WorkerJob) -> None:
        self.job = job

    def first(self, queue: Queue, request: Request) -> None:
        """Complete the first request of a stretch."""
        request.values = queue.pulled_at is None or queue.sends - queue.pulled_at >= self.every
        if request.values:
            queue.pulled_at = queue.sends

    def learn(self, trainer: Trainer, batch: Batch, result: Result) -> Gradient | None:
        """Learn from a batch; return the gradient to send."""
        return self.job.gradient(trainer, result)

    def ask(self, queue: Queue, request: Request) -> None:
        """Complete a request for rows that travels with gradients."""
        request.values = queue.sends + 1 - (queue.pulled_at or 0) >= self.every

    def sent(self, queue: Queue, request: Request, ticket: Ticket) -> None:
        """Take note of a request that was sent."""
        if request.values:
            queue.pulled_at = queue.sends
            if self.waits:
                self.take(ticket.wait())

    def take(self, reply: Reply) -> None:
        """Take the weights of the shards, if the reply has them."""
        self.job.adopt(reply.values)

    def pause(self) -> None:
        """Exchange what is due between two stretches, while no trainer works."""

    def end(self) -> None:
        """Exchange what is left, while no trainer works."""


class AveragedWeights:
    """Dense weights that the worker trains itself and averages with those of the others (`dense: average`)."""

    def __init__(self, job: WorkerJob, config: Config) -> None:
        self.weights, self.every = OwnWeights(job), config.dense_every or DENSE_EVERY

    def begin(self, job: WorkerJob) -> None:
        self.weights.begin(job)

    def first(self, queue: Queue, request: Request) -> None: ...

    def learn(self, trainer: Trainer, batch: Batch, result: Result) -> None:
        self.weights.step(trainer, batch, result)

    def ask(self, queue: Queue, request: Request) -> None:
        if self._due:
            self.weights.put(request)

    def sent(self, queue: Queue, request: Request, ticket: Ticket) -> None: ...

    def take(self, reply: Reply) -> None:
        self.weights.take(reply)

    def pause(self) -> None:
        if self._due:
            self.weights.exchange()

    @property
    def _due(self) -> bool:
        return self.weights.batches >= ramped(self.every, self.weights.job.age)

    def end(self) -> None:
        self.weights.exchange()


def train(job: WorkerJob, config: Config) -> None:
    loss_mean = job.learner.loss.config.reduction == "mean"
    queues: list[Queue] = job.carried.setdefault("queues", [])
    if not queues:
        queues += [Queue(link, config, job.optimizer.clips, loss_mean) for link in job.links]
        job.carried["dense"] = (AveragedWeights if config.averages else PulledWeights)(job, config)
    dense: AveragedWeights | PulledWeights = job.carried["dense"]
    dense.begin(job)
    if config.averages:
        job.warm_up = WARM_UP if config.warm_up is None else config.warm_up
    job.queued = lambda: sum(map(len, queues))

    def drain() -> None:
        for queue in queues:
            queue.drain()
        dense.end()

    job.before_checkpoint = drain
    free = [[trainer.step.spare(), trainer.step.spare()] for trainer in job.trainers]

    def work(trainer: Trainer) -> None:
        index = job.trainers.index(trainer)
        step, clock, link, queue = trainer.step, trainer.clock, job.links[index], queues[index]
        stream, coming = job.batches(clock), deque[Coming]()

        def prepare() -> tuple[Batch, Embedding, Request] | None:
            """Return the next batch and the request for its rows."""
            batch = next(stream, None)
            if batch is None:
                return None
            embedding = free[index].pop()
            return batch, embedding, Request(pull=embedding.unique(batch))

        for first in (True, False):  # two batches in flight: one is computed while the rows of the other travel
            if following := prepare():
                batch, embedding, request = following
                if first:
                    dense.first(queue, request)
                coming.append((batch, embedding, link.ask(request)))
        clock.lap("pull")
        while coming:
            batch, embedding, ticket = coming.popleft()
            reply = ticket.wait()
            clock.lap("pull")
            dense.take(reply)
            free[index].append(step.embedding)
            step.embedding = embedding
            assert reply.rows is not None
            result = step(batch, reply.rows)
            gradient = dense.learn(trainer, batch, result)
            clock.lap("compute")
            following = prepare()
            asking = None if following is None else following[2]
            if asking is not None and queue.due(1):
                dense.ask(queue, asking)
            asked = queue.add(result.push, gradient, reply.seen, batch.counted, asking)
            if following and asking and asked:
                coming.append((following[0], following[1], asked))
                dense.sent(queue, asking, asked)
            clock.lap("push")
            job.report(batch, result)
        if job.epoch_ended:
            queue.drain()

    job.together(work)
    if job.epoch_ended:
        dense.end()
    else:
        dense.pause()
