"""Geo: each worker trains its own copy of the model and ships the difference every k steps.

For rows, with x the worker's value, o its value before the first step after a shipment and s the shards' value:

    ship      δ = x − o                                              s ← s + δ
    receive   x ← x + (s' − o)   o ← s'   or just x ← s' without a step since the shipment

To s' the worker adds the shipments that are still on their way. So the shards add up the progress of all workers. AdaGrad's steps
shrink with the squares of all gradients, but a replica sees only its own; it counts each of them N times (`part_of_all`). Dense
weights are averaged instead (`_own_weights.py`).

After an exchange the worker has the shards' values. So a worker that joins or leaves changes nothing but N. Those that stay keep the
states of their rules and fetch the values again on first use. One that joins starts with the states of another worker.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from annotated_types import Ge

from clickfleet.config.sections import Bytes
from clickfleet.data.batch import Batch, Keys
from clickfleet.errors import ConfigError
from clickfleet.store.table import Table
from clickfleet.training.embedding import Embedding
from clickfleet.training.loop import Trainer, WorkerJob, ramped
from clickfleet.training.modes import Needs
from clickfleet.training.modes._own_weights import WARM_UP
from clickfleet.training.modes._replica import ROWS, Fetch, Replica, replica_spec, saved_rows

NEEDS = Needs(distributed=True, stale=True, replicates_rows=True, lasting=True)
TOGETHER = 8
"""Batches whose rows a worker with one trainer requests in one message."""
AHEAD = 2
"""Such requests that travel while a worker computes."""
UNANSWERED = 3
"""Shipments that may be under way when a worker with one trainer sends the next one."""
OF_ALL, MOST, LEAST = 50, 25, 5
"""Batches of all workers between two shipments of one, and the most and the least of one worker. The more workers there are, the further
apart are their replicas."""


@dataclass(frozen=True)
class Config:
    k_steps: Annotated[int, Ge(1)] | None = None
    """Batches of a worker between two shipments. At the beginning of a run it ships more often. Default: 25; with more than two workers 50
    divided by their number, but at least 5."""
    warm_up: Annotated[int, Ge(0)] = WARM_UP
    """Batches of each worker, from the beginning of a run, that are trained in parts: one for each worker, of at least 100 rows. So a
    worker makes as many steps as one machine while the weights change most."""
    replica_limit: Bytes | None = None
    """Memory of a worker's replica. Beyond it, the least recently used rows are dropped after a shipment."""


def interval(config: Config, workers: int) -> int:
    """Return the batches of a worker between two shipments.

    >>> [interval(Config(), workers) for workers in (1, 2, 4, 100)], interval(Config(k_steps=7), 4)
    ([25, 25, 12, 5], 7)
    """
    return config.k_steps or max(LEAST, min(MOST, OF_ALL // workers))


def unpack(table: Table, files: Mapping[str, bytes]) -> dict[str, Any]:
    """Return the rows of another worker's replica, for one that joins."""
    return {ROWS: saved_rows(replica_spec(table, workers=1), files)}


def train(job: WorkerJob, config: Config) -> None:
    for rule in (rule for own in job.table.classes for rule in (own.rule, own.embed_rule)):
        if rule.name == "ftrl":
            raise ConfigError(
                "mode geo cannot ship rows of the rule ftrl: differences of their weights do not add up",
                "choose another table.rule, or mode async",
            )
    replica: Replica = job.carried.setdefault("replica", None) or Replica(job, config.replica_limit)
    job.carried["replica"], replica.job = replica, job
    replica.weights.begin(job)
    job.warm_up = config.warm_up
    job.keep = job.lend = replica.save
    job.before_checkpoint, job.queued = replica.exchange, replica.waiting

    by_slot = len(job.table.classes) > 1
    alone = len(job.trainers) == 1
    runs_on = alone and config.replica_limit is None  # else a shipment may drop rows of the batches to come
    k_steps = interval(config, job.workers)
    together = TOGETHER if alone else 1  # several trainers divide a round batch by batch
    sides = AHEAD + 1
    spare = {
        trainer: [[trainer.step.spare() for _ in range(together)] for _ in range(sides)] for trainer in job.trainers
    }

    def work(trainer: Trainer) -> None:
        step, clock = trainer.step, trainer.clock
        stream, free = job.batches(clock), itertools.cycle(spare[trainer])
        coming: deque[tuple[list[tuple[Batch, Embedding, Keys]], Fetch]] = deque()

        def ask() -> None:
            """Request the rows of the next batches."""
            batches, slots = [], []
            for embedding, batch in zip(next(free), stream, strict=False):
                batches.append((batch, embedding, embedding.unique(batch)))
                slots += [embedding.slots_of(batch)] if by_slot else []
                clock.lap("pull")
            if batches:
                coming.append((batches, replica.ask([keys for _, _, keys in batches], slots)))
                clock.lap("pull")

        for _ in range(AHEAD):
            ask()
        while coming:
            batches, fetch = coming.popleft()
            replica.put(fetch)
            ask()  # its rows travel while these batches are computed
            for batch, step.embedding, keys in batches:
                rows = replica.pull(keys, step.embedding.room())
                clock.lap("pull")
                result = step(batch, rows)
                replica.weights.step(trainer, batch, result)
                clock.lap("compute")
                replica.push(result.push, rows if alone else None)
                job.report(batch, result)
                replica.receive(wait=False)
                if runs_on and replica.steps >= ramped(k_steps, job.age):
                    replica.ship(UNANSWERED)
                clock.lap("push")

    while not job.due:
        every = ramped(k_steps, job.age)
        job.stop_at = None if runs_on else job.steps + max(every - replica.steps, 0)
        job.together(work)
        clock = job.trainers[0].clock
        clock.start()
        if job.epoch_ended:
            replica.exchange()
        elif not runs_on and replica.steps >= every:
            replica.ship()
        clock.lap("push")
