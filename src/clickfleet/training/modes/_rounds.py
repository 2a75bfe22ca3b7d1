"""Rounds: each trainer of a worker computes one batch, and the worker sends the merged gradients as one push.

The push also carries the keys of the next batches, so a round is one message to each shard and one answer.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from clickfleet import _core
from clickfleet.data.batch import Batch, Floats, Keys, SourceState
from clickfleet.training.loop import Trainer, WorkerJob
from clickfleet.training.sharding import Gradient, Kind, Request, merged, summed, unique
from clickfleet.training.step import Result


@dataclass(frozen=True)
class Config:
    reduce: Literal["sum", "mean"] = "sum"
    """Add the row gradients of a round, or also divide them by its number of batches (`mean`)."""


class Prefetch(NamedTuple):
    """The batches of the next round, one per trainer, and the position of the source before them."""

    position: SourceState
    batches: list[Batch]
    keys: Keys
    where: list[NDArray[np.uint32] | None]

    def rows(self, trainer: int, rows: Floats) -> Floats:
        """Return the rows of one trainer's batch, from those of `keys`."""
        where = self.where[trainer]
        if where is None:
            return rows
        taken = np.empty((len(where), rows.shape[1]), np.float32)
        _core.take_rows(where, rows, taken)
        return taken


def train(job: WorkerJob, *, waits: bool, mean: bool) -> None:
    """Train rounds until the streams end. `waits`: the shards wait for all workers before they apply a round."""
    with ThreadPoolExecutor(len(job.trainers), "clickfleet-trainer", torch.set_num_threads, (1,)) as pool:
        _epoch(job, pool, waits, mean)


def _epoch(job: WorkerJob, pool: ThreadPoolExecutor, waits: bool, mean: bool) -> None:
    link, trainers, clock = job.links[0], job.trainers, job.trainers[0].clock
    torch.set_num_threads(1)
    spare = [trainer.step.spare() for trainer in trainers]
    stream = job.batches(clock)
    loss_mean = job.learner.loss.config.reduction == "mean"

    def draw() -> Prefetch:
        position = job.position()
        batches = list(islice(stream, len(trainers)))
        keys = [embedding.unique(batch) for embedding, batch in zip(spare, batches, strict=False)]
        if len(keys) == 1:
            return Prefetch(position, batches, keys[0], [None])
        distinct, where = unique(np.concatenate([np.empty(0, np.uint64), *keys]))
        edges = np.cumsum([0, *map(len, keys)])
        parts = [where[first:last] for first, last in pairwise(edges)]
        return Prefetch(position, batches, distinct, parts)  # type: ignore[arg-type]

    def compute(trainer: Trainer, batch: Batch, rows: Floats) -> tuple[Result, Gradient]:
        result = trainer.step(batch, rows)
        return result, job.gradient(trainer, result)

    clock.start()
    ahead = draw()
    reply = link.ask(Request(pull=ahead.keys, values=True)).wait()
    while ahead.batches:
        clock.lap("pull")
        job.adopt(reply.values)
        assert reply.rows is not None
        batches, rows = ahead.batches, [ahead.rows(i, reply.rows) for i in range(len(ahead.batches))]
        for i, trainer in enumerate(trainers):
            trainer.step.embedding, spare[i] = spare[i], trainer.step.embedding
        if len(batches) == 1:
            results = [compute(trainers[0], batches[0], rows[0])]
        else:
            results = list(pool.map(compute, trainers, batches, rows))
        clock.lap("compute")
        ahead = draw()
        request = Request(
            push=merged([result.push for result, _ in results], mean),
            batches=len(results),
            dense=summed([gradient for _, gradient in results], job.optimizer.clips, loss_mean),
            pull=ahead.keys,
            values=True,
            checkpoint=job.wanted() if waits else 0,
            seen=reply.seen,
        )
        reply = link.ask(request).wait()
        clock.lap("push")
        for batch, (result, _) in zip(batches, results, strict=True):
            job.report(batch, result)
        if reply.checkpoint:
            job.took(reply.checkpoint, ahead.position)
        elif not waits and (number := job.wanted()):
            link.ask(Request(Kind.MARK, checkpoint=number)).wait()
            job.took(number, ahead.position)
    if job.epoch_ended:
        link.ask(Request(Kind.DONE)).wait()
    job.adopt(reply.values)
