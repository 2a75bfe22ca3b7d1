"""Local: the trainer threads of one process share the table and the dense weights, and none waits for another.

With one trainer, steps follow each other strictly; with several (hogwild), a step may start from weights that miss the
steps still under way in other threads.
"""

from __future__ import annotations

from dataclasses import dataclass

from clickfleet.job import Job, Trainer


@dataclass(frozen=True)
class Config: ...


def train(job: Job, config: Config) -> None:
    def work(trainer: Trainer) -> None:
        step, clock = trainer.step, trainer.clock
        for batch in job.batches(clock):
            if (done := step.train_in_place(batch)) is not None:
                clock.lap("compute")
                job.report(batch, done)
                continue
            keys = step.embedding.unique(batch)
            rows = job.table.pull(keys, out=step.embedding.room())
            clock.lap("pull")
            result = step(batch, rows)
            job.optimizer.step(step.flat.grads, result.dense_scale)
            clock.lap("compute")
            job.table.push(**result.push._asdict())
            clock.lap("push")
            job.report(batch, result)
        step.settle()

    while job.goes_on():
        job.together(work)
