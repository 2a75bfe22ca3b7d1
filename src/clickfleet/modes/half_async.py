"""Half-async: the trainers of one worker wait for each other after every batch, workers do not.

After each round of batches a worker sends the sum of its trainers' gradients; the shards learn it at once and answer with the dense
values and the rows of the next round.
"""

from __future__ import annotations

from clickfleet.modes import _rounds
from clickfleet.share import Share

DISTRIBUTED = True
Config = _rounds.Config


def train(job: Share, config: Config) -> None:
    _rounds.train(job, waits=False, mean=config.reduce == "mean")
