"""Sync: all workers wait for each other after every batch, and the shards learn a round as one batch.

Gradients, counts and weights are added up over the workers and learned once, so N workers with a slice of a batch each do what one
machine does with the whole batch.
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
    _rounds.train(job, waits=True, mean=config.reduce == "mean")
