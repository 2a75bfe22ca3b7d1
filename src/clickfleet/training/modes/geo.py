"""Geo: each worker trains its own copy of the model and ships the difference every k steps.

For rows, with x the worker's value, o its old copy, s the shards' value and N workers:

    ship      δ = (x − o)/N      o ← o + δ      s ← s + δ
    receive   x ← x + (s' − o)   o ← s'

After a round x = s' + (1 − 1/N)·(own progress): the rest stays and enters the next difference. The rest at the end of
training is never shipped: the full sum of the workers' progress overshoots (it cost 0.007 AUC in a trial). Dense weights are
averaged instead (`_own_weights.py`).

When N workers become M < N, one that stays takes over the rest of one that leaves, and all rests are multiplied by M/N. So the
mean of the workers' copies stays the same. A worker that joins starts from the shards' values, without a rest, and with the
states of the rules of another worker.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge

from clickfleet.config.sections import Bytes
from clickfleet.data.batch import Batch, Keys
from clickfleet.errors import ConfigError
from clickfleet.training.embedding import Embedding
from clickfleet.training.loop import Trainer, WorkerJob
from clickfleet.training.modes import Needs
from clickfleet.training.modes._replica import Fetch, Replica

NEEDS = Needs(distributed=True, stale=True, replicates_rows=True)
TOGETHER = 8
"""Batches whose rows a worker with one trainer requests in one message."""


@dataclass(frozen=True)
class Config:
    k_steps: Annotated[int, Ge(1)] = 10
    """Batches of a worker between two shipments."""
    replica_limit: Bytes | None = None
    """Memory of a worker's replica. Beyond it, the least recently used rows are shipped completely and dropped."""


def train(job: WorkerJob, config: Config) -> None:
    for rule in (job.table.rule, job.table.embed_rule):
        if rule.name == "ftrl":
            raise ConfigError(
                "mode geo cannot ship rows of the rule ftrl: differences of their weights do not add up",
                "choose another table.rule, or mode async",
            )
    replica: Replica = job.carried.setdefault("replica", None) or Replica(job, config.replica_limit)
    job.carried["replica"], replica.job = replica, job
    replica.weights.begin(job)
    job.keep, job.before_checkpoint, job.queued = replica.save, replica.exchange, replica.waiting

    together = TOGETHER if len(job.trainers) == 1 else 1  # several trainers divide a round batch by batch
    spare = {trainer: [[trainer.step.spare() for _ in range(together)] for _ in range(2)] for trainer in job.trainers}

    def work(trainer: Trainer) -> None:
        step, clock = trainer.step, trainer.clock
        stream, sides = job.batches(clock), itertools.cycle(spare[trainer])

        def ask() -> tuple[list[tuple[Batch, Embedding, Keys]], Fetch] | None:
            """Return the next batches and the request for their rows."""
            batches = []
            for embedding, batch in zip(next(sides), stream, strict=False):
                batches.append((batch, embedding, embedding.unique(batch)))
                clock.lap("pull")
            fetch = replica.ask([keys for _, _, keys in batches])
            clock.lap("pull")
            return (batches, fetch) if batches else None

        coming = ask()
        while coming:
            batches, fetch = coming
            replica.put(fetch)
            coming = ask()  # its rows travel while these batches are computed
            for batch, step.embedding, keys in batches:
                rows = replica.pull(keys, step.embedding.room())
                clock.lap("pull")
                result = step(batch, rows)
                replica.weights.step(trainer, result)
                clock.lap("compute")
                replica.push(result.push)
                replica.receive(wait=False)
                clock.lap("push")
                job.report(batch, result)

    while not job.due:
        replica.begin()
        job.stop_at = replica.shipped_at + config.k_steps
        job.together(work)
        clock = job.trainers[0].clock
        clock.start()
        if job.steps >= job.stop_at or job.epoch_ended:
            replica.ship()
        if job.epoch_ended:
            replica.exchange()
        clock.lap("push")
