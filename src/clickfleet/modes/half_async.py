"""Half-async: the trainers of one worker wait for each other after every batch, workers do not.

After each round of batches a worker sends the sum of its trainers' gradients; the shards learn it at once and answer with the dense
values and the rows of the next round.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge

from clickfleet.modes import _rounds
from clickfleet.share import Share

DISTRIBUTED = True


@dataclass(frozen=True)
class Config:
    reduce: Literal["sum", "mean"] = "sum"
    """Row gradients of a round are added up, or also divided by the number of batches in it."""
    queue_size: Annotated[int, Ge(1)] | None = None
    """Always the worker's threads in this mode."""
    merge: Annotated[int, Ge(1)] | None = None
    """Always the worker's threads in this mode."""


def train(job: Share, config: Config) -> None:
    _rounds.train(job, waits=False, mean=config.reduce == "mean")
