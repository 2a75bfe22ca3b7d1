"""Sync: all workers wait for each other after every batch, and the shards learn a round as one batch.

Gradients, counts and weights are added up over the workers and learned once, so N workers with a slice of a batch each do what one
machine does with the whole batch.
"""

from __future__ import annotations

from clickfleet.modes import _rounds
from clickfleet.share import Share

DISTRIBUTED = True
Config = _rounds.Config


def train(job: Share, config: Config) -> None:
    _rounds.train(job, waits=True, mean=config.reduce == "mean")
