"""Entries of a cluster: the changes of several shards are merged into what one table would have published."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clickfleet import Table
from clickfleet.errors import CheckpointError
from clickfleet.online.on_cluster import merged
from clickfleet.serve import overlays
from clickfleet.store import checkpoint, published
from clickfleet.store.table import mix64, sort_by_hash
from online.test_publisher import content

F = np.float32


class Shards:
    """Tables that hold the keys of one, as shards do."""

    def __init__(self, n: int, **table: Any) -> None:
        self.tables = [Table(factors=2, **table) for _ in range(n)]
        self.n = n

    def split(self, keys: Any) -> list[Any]:
        place = mix64(keys) % np.uint64(1024)
        spans = [checkpoint.span(shard, self.n) for shard in range(self.n)]
        return [(place >= low) & (place < high) for low, high in spans]

    def push(self, keys: Any, rows: Any, **more: Any) -> None:
        for table, own in zip(self.tables, self.split(keys), strict=True):
            table.push(keys[own], rows[own], **{name: values[own] for name, values in more.items()})


class Changed:
    def __init__(self, shards: Shards, base: bool) -> None:
        self.base = base
        self._changes = [table.cut_changes(base=base) for table in shards.tables]

    def __iter__(self) -> Any:
        return merged([iter(changes) for changes in self._changes])

    @property
    def deleted(self) -> Any:
        return sort_by_hash(np.concatenate([changes.deleted for changes in self._changes]))

    def commit(self) -> None:
        for changes in self._changes:
            changes.commit()


@pytest.mark.parametrize("shards", [2, 3, 5])
@pytest.mark.parametrize("admission", ["birth", "count(3)"])
def test_shards_publish_what_one_table_would(tmp_path: Path, shards: int, admission: str) -> None:
    policy = {"admission": admission, "delete_threshold": 0.08, "decay_rate": 0.5}
    one, several = Table(factors=2, **policy), Shards(shards, **policy)
    rng = np.random.default_rng(shards)
    logs = published.Log(tmp_path / "one"), published.Log(tmp_path / "several")
    again = np.empty(0, np.uint64)
    for turn in range(3):
        keys = np.unique(rng.integers(0, 2**63, 90_000 if turn == 0 else 700).astype(np.uint64))
        again = keys[:300] if turn < 2 else again  # seen twice: they stay, and are still short
        keys = np.unique(np.concatenate([keys, again, np.arange(40, dtype=np.uint64)]))
        rows = rng.normal(0, 1, (len(keys), 3)).astype(F)
        one.push(keys, rows)
        several.push(keys, rows)
        if turn == 2:
            removed = one.shrink()
            assert removed == sum(table.shrink() for table in several.tables) > 0
        made = []
        for log, changes in zip(logs, (one.cut_changes(base=turn == 0), Changed(several, turn == 0)), strict=True):
            made.append(log.append(changes, content(turn)))
            changes.commit()
        assert made[0].hash == made[1].hash
        layer = overlays.open_layer(made[1].path, 2)  # what a server does
        assert overlays.size(layer) == made[1].manifest["rows"] + made[1].manifest["deleted"]
    assert made[1].manifest["deleted"] > 0
    assert layer.full_rows > 0
    assert (layer.short_rows > 0) == (admission != "birth")


def test_few_rows_are_held_at_a_time() -> None:
    """A shard without short rows, or with nothing at all, does not make the others wait in memory."""
    tables = [Table(factors=2) for _ in range(3)]
    keys = np.arange(400_000, dtype=np.uint64)
    tables[0].push(keys[:300_000], np.ones((300_000, 3), F))
    tables[1].push(keys[300_000:], np.ones((100_000, 3), F))
    pulled, given = [0], 0

    def counted(table: Table) -> Any:
        for part in table.cut_changes(base=True):
            pulled[0] += len(part["key"])
            yield part

    for part in merged([counted(table) for table in tables]):
        given += len(part["key"])
        assert pulled[0] - given < 3 * 2 * 32768
    assert given == 400_000


def test_rows_out_of_order_are_refused_by_the_writer(tmp_path: Path) -> None:
    shards = Shards(2)
    keys = np.arange(50, dtype=np.uint64)
    shards.push(keys, np.ones((50, 3), F))

    class Wrong(Changed):
        def __iter__(self) -> Any:
            for changes in self._changes:
                yield from changes

    log = published.Log(tmp_path)
    with pytest.raises(CheckpointError, match="not ordered by their hashes"):
        log.append(Wrong(shards, True), content(1))
    assert not log.lines()
    assert not list(tmp_path.glob("0*"))
