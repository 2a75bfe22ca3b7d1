"""Local: the trainer threads of one process share the table and the dense weights without locks.

With one trainer, steps follow each other strictly. With several (hogwild), a step may start from weights that miss
unfinished steps of other threads.
"""

from __future__ import annotations

from dataclasses import dataclass

from clickfleet.training.loop import Job, Trainer
from clickfleet.training.modes import Needs

NEEDS = Needs(distributed=False, deterministic=True)


@dataclass(frozen=True)
class Config: ...


def train(job: Job, config: Config) -> None:
    def work(trainer: Trainer) -> None:
        step, clock = trainer.step, trainer.clock
        for batch in job.batches(clock):
            job.report(batch, step.train(batch, job.table, job.optimizer, clock.lap))
        step.flush()

    job.together(work)
