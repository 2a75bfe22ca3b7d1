"""Sync: all workers wait for each other after every batch, and the shards apply a round as one batch.

The shards add gradients, counts and weights over all workers and apply the sum once. N workers with a slice of a batch each learn
what one machine learns from the whole batch.
"""

from __future__ import annotations

from clickfleet.training.loop import WorkerJob
from clickfleet.training.modes import Needs, _rounds

NEEDS = Needs(distributed=True, deterministic=True, shards_wait=True, marks_checkpoints=True)
Config = _rounds.Config


def train(job: WorkerJob, config: Config) -> None:
    _rounds.train(job, waits=True, mean=config.reduce == "mean")
