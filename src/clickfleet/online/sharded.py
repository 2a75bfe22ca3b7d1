"""The table of a cluster, for who ends days and publishes: every verb is asked of all shards, which do not train meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from clickfleet.cluster.crew import Crew
from clickfleet.table import Columns, Keys, Table

LONG_S = 3600.0
"""A shrink of a large table takes its time."""


class ShardedTable(Table):
    """Of a Table, what the days of a stream need."""

    def __init__(self, crew: Crew, factors: int) -> None:
        self._crew, self.factors = crew, factors

    def __len__(self) -> int:
        return self.stats()["rows"]

    def stats(self) -> dict[str, int]:
        total: dict[str, int] = {}
        for found in self._ask("look").values():
            for name, value in found.items():
                total[name] = total.get(name, 0) + value
        return total

    def shrink(self) -> int:
        return sum(self._ask("shrink").values())

    def end_day(self) -> None:
        self._ask("end_day")

    def restore_readers(self, keys: Keys) -> None:
        split = self._crew.spread.split(keys)
        for (name, actor), own in zip(self._crew.shards.items(), split.spans, strict=True):
            self._crew.tell({name: actor}, "restore_readers", split.keys[own], timeout_s=LONG_S)

    def cut_changes(self, *, base: bool = False) -> ShardChanges:  # type: ignore[override]
        found = self._ask("cut_changes", base)
        if len(set(found.values())) > 1:  # some have never been published: all begin anew
            self._ask("end_changes", False)
            found = self._ask("cut_changes", True)
        return ShardChanges(self._crew, all(found.values()))

    def _ask(self, verb: str, *arguments: Any) -> dict[str, Any]:
        return self._crew.tell(self._crew.shards, verb, *arguments, timeout_s=LONG_S)


class ShardChanges:
    """What to publish, shard after shard: each holds a span of mix64, so keys ascend as in one table."""

    def __init__(self, crew: Crew, base: bool) -> None:
        self._crew, self.base = crew, base

    def __iter__(self) -> Iterator[Columns]:
        for name, actor in self._crew.shards.items():
            while (part := self._crew.tell({name: actor}, "next_changes", timeout_s=LONG_S)[name]) is not None:
                yield part

    @property
    def deleted(self) -> Keys:
        found = self._crew.tell(self._crew.shards, "deleted")
        return np.concatenate([found[name] for name in self._crew.shards])

    def commit(self) -> None:
        self._crew.tell(self._crew.shards, "end_changes", True)

    def abort(self) -> None:
        self._crew.tell(self._crew.shards, "end_changes", False)
