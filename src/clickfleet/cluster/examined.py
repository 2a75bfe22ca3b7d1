"""The shards' model where a worker evaluates and scores: its own learner, with their rows and dense values behind it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch

from clickfleet.cluster.base import adopt_buffers
from clickfleet.cluster.remote import Remote, RemoteTable
from clickfleet.config import Config
from clickfleet.exchange import Request
from clickfleet.learner import Learner
from clickfleet.opening import for_scoring, open_source
from clickfleet.schema import Schema
from clickfleet.table import Table


class Examined:
    """A learner that is the shards' model while this is open, and then itself again."""

    def __init__(self, learner: Learner, link: Remote, buffers: bytes) -> None:
        self._learner, self._link, self._buffers = learner, link, buffers

    def __enter__(self) -> Learner:
        learner = self._learner
        self._table, self._values = learner.table, learner.flat.values.clone()
        values = self._link.ask(Request(values=True)).wait().values
        assert values is not None
        learner.flat.values.copy_(torch.from_numpy(values))
        adopt_buffers(learner, self._buffers)
        learner.table = cast(Table, RemoteTable(self._link, learner.table.factors))
        return learner

    def __exit__(self, *_: object) -> None:
        self._learner.table = self._table
        self._learner.flat.values.copy_(self._values)
        self._link.close()


def files_to_score(config: Config, schema: Schema, files: Sequence[str], labels: bool = True) -> Any:
    """Files to evaluate or score, in their order."""
    return open_source(for_scoring(config), list(files), schema, labels=labels)
