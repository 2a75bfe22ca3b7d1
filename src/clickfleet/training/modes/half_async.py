"""Half-async: the trainers of one worker wait for each other after every batch. Workers do not.

After each round of batches a worker sends the sum of its trainers' gradients. The shards apply it at once and answer with the dense
weights and the rows of the next round.
"""

from __future__ import annotations

from clickfleet.training.loop import WorkerJob
from clickfleet.training.modes import Needs, _rounds

NEEDS = Needs(distributed=True, stale=True, marks_checkpoints=True)
Config = _rounds.Config


def train(job: WorkerJob, config: Config) -> None:
    _rounds.train(job, waits=False, mean=config.reduce == "mean")
