"""Geo: each worker trains its own copy of the model and ships the difference every k steps.

With x the worker's value, o its old copy, s the shards' value and N workers:

    ship      δ = (x − o)/N      o ← o + δ      s ← s + δ
    receive   x ← x + (s' − o)   o ← s'

so after a round x = s' + (1 − 1/N)·(own progress): what was not shipped stays and enters the next difference. What
is left at the end of training is not shipped: the whole sum of the workers' progress would overshoot (it cost 0.007 AUC in a trial).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge

from clickfleet.batch import Batch, Keys
from clickfleet.embedding import Embedding
from clickfleet.errors import ConfigError
from clickfleet.job import Trainer
from clickfleet.modes._replica import Fetch, Replica
from clickfleet.sections import Bytes
from clickfleet.share import Share

DISTRIBUTED = True
TOGETHER = 8
"""Batches of a worker with one trainer whose rows are asked for in one message."""


@dataclass(frozen=True)
class Config:
    k_steps: Annotated[int, Ge(1)] = 5
    """Batches of a worker between two shipments."""
    replica_limit: Bytes | None = None
    """Memory of a worker's rows; beyond it those longest unused are shipped whole and dropped."""


def train(job: Share, config: Config) -> None:
    for part in (job.table.rule, job.table.embed_rule):
        if part.name == "ftrl":
            raise ConfigError(
                "mode geo cannot ship rows of the rule ftrl: their weights follow from sums that do not add up",
                "choose another table.rule, or mode async",
            )
    replica: Replica = job.carried.setdefault("replica", None) or Replica(job, config.replica_limit)
    job.carried["replica"], replica.job = replica, job
    job.keep, job.before_cut, job.queued = replica.save, replica.exchange, replica.waiting

    together = TOGETHER if len(job.trainers) == 1 else 1  # several trainers share a round evenly, batch by batch
    spare = {trainer: [[trainer.step.spare() for _ in range(together)] for _ in range(2)] for trainer in job.trainers}

    def work(trainer: Trainer) -> None:
        step, clock = trainer.step, trainer.clock
        stream, sides = job.batches(clock), itertools.cycle(spare[trainer])

        def ask() -> tuple[list[tuple[Batch, Embedding, Keys]], Fetch] | None:
            """Some batches, and their rows on the way."""
            some = []
            for own, batch in zip(next(sides), stream, strict=False):
                some.append((batch, own, own.unique(batch)))
                clock.lap("pull")
            fetch = replica.ask([keys for _, _, keys in some])
            clock.lap("pull")
            return (some, fetch) if some else None

        coming = ask()
        while coming:
            some, fetch = coming
            replica.put(fetch)
            coming = ask()  # travels while these are computed
            for batch, step.embedding, keys in some:
                rows = replica.pull(keys, step.embedding.room())
                clock.lap("pull")
                result = step(batch, rows)
                job.optimizer.step(step.flat.grads, result.dense_scale)
                clock.lap("compute")
                replica.push(result.push)
                replica.receive(wait=False)
                clock.lap("push")
                job.report(batch, result)

    while job.goes_on():
        replica.begin()
        job.stop_at = job.steps + config.k_steps
        job.together(work)
        clock = job.trainers[0].clock
        clock.start()
        replica.ship()
        if job.epoch_ended:
            replica.exchange()
        clock.lap("push")
