"""The table of a cluster, for who ends days and publishes: every verb is asked of all shards, which do not train meanwhile."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from clickfleet.cluster.crew import Crew
from clickfleet.online.repair import in_order, mixed
from clickfleet.table import Columns, Keys, Table

LONG_S = 3600.0
"""A shrink of a large table takes its time."""
LAST_HASH = 2**64 - 1


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
        return ShardChanges(self._crew, all(found.values()), self.factors)

    def _ask(self, verb: str, *arguments: Any) -> dict[str, Any]:
        return self._crew.tell(self._crew.shards, verb, *arguments, timeout_s=LONG_S)


class ShardChanges:
    """What to publish. Shards split keys by the low bits of mix64 and an entry ascends by all of them, so shards are merged."""

    def __init__(self, crew: Crew, base: bool, factors: int) -> None:
        self._crew, self.base, self._factors = crew, base, factors

    def __iter__(self) -> Iterator[Columns]:
        return merged([self._parts(name) for name in self._crew.shards], self._factors)

    def _parts(self, name: str) -> Iterator[Columns]:
        actor = {name: self._crew.shards[name]}
        while (part := self._crew.tell(actor, "next_changes", timeout_s=LONG_S)[name]) is not None:
            yield part

    @property
    def deleted(self) -> Keys:
        found = self._crew.tell(self._crew.shards, "deleted")
        return in_order(np.concatenate([found[name] for name in self._crew.shards]))

    def commit(self) -> None:
        self._crew.tell(self._crew.shards, "end_changes", True)

    def abort(self) -> None:
        self._crew.tell(self._crew.shards, "end_changes", False)


def merged(shards: Sequence[Iterator[Columns]], factors: int) -> Iterator[Columns]:
    """The changes of several tables with different keys as those of one; few parts of each are in memory at a time."""
    feeds = [_Feed(parts, factors) for parts in shards]
    while True:
        done = min(feed.done for feed in feeds)
        for full in (False, True):
            parts = [part for feed in feeds for part in feed.take(full, done)]
            if parts:
                yield _joined(parts, full)
        if done > LAST_HASH:
            return
        for feed in feeds:
            if feed.done == done:
                feed.pull()


class _Feed:
    """The parts of one table: ranges of hashes that ascend, of each range first the short rows, then the full ones."""

    def __init__(self, parts: Iterator[Columns], factors: int) -> None:
        self._parts, self._factors = parts, factors
        self._held: dict[bool, list[tuple[Keys, Columns]]] = {False: [], True: []}
        self._seen = -1
        """The largest hash of all rows so far."""
        self.done = -1
        """All rows up to this hash are here."""

    def pull(self) -> None:
        part = next(self._parts, None)
        if part is None:
            self.done = LAST_HASH + 1
            return
        hashes = mixed(part["key"])
        if not part["full"]:
            self.done = self._seen  # a range begins: those before it are complete
        self._seen = max(self._seen, int(hashes[-1]))
        if part["full"]:
            self.done = self._seen
        self._held[bool(part["full"]) or self._factors == 0].append((hashes, part))

    def take(self, full: bool, upto: int) -> list[tuple[Keys, Columns]]:
        """Rows of a kind with hashes up to some value, which are held no longer."""
        width = self._factors if full else 0
        out, rest = [], []
        for hashes, part in self._held[full]:
            n = int(np.searchsorted(hashes, np.uint64(min(upto, LAST_HASH)), "right")) if upto >= 0 else 0
            if n:
                out.append((hashes[:n], _cut(part, slice(None, n), slice(None, n * width))))
            if n < len(hashes):
                rest.append((hashes[n:], _cut(part, slice(n, None), slice(n * width, None))))
        self._held[full] = rest
        return out


def _cut(part: Columns, rows: slice, values: slice) -> Columns:
    return {**{name: part[name][rows] for name in ("key", "slot", "embed_w")}, "embedx": part["embedx"][values]}


def _joined(parts: list[tuple[Keys, Columns]], full: bool) -> Columns:
    """Rows of several tables in the order of their hashes."""
    order = np.argsort(np.concatenate([hashes for hashes, _ in parts]), kind="stable")
    columns = {name: np.concatenate([part[name] for _, part in parts])[order] for name in ("key", "slot", "embed_w")}
    embedx = np.concatenate([part["embedx"] for _, part in parts])
    width = len(embedx) // len(order)
    return {**columns, "embedx": embedx.reshape(len(order), width)[order].reshape(-1), "full": full}
