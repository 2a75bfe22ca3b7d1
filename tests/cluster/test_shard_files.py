"""A cut is written slowly while nobody waits for it, at once when somebody does, and not for ever."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from clickfleet.cluster import shard_files
from clickfleet.cluster.shard import Rules, Shard, ShardCheckpoint
from clickfleet.cluster.shard_files import ShardFiles
from clickfleet.config.sections import DenseSettings
from clickfleet.errors import ClusterError
from clickfleet.store import atomic, checkpoint
from clickfleet.store.table import Table
from clickfleet.training.sharding import Kind, Piece, Request
from reference import rows_of


@pytest.fixture
def table() -> Table:
    table = Table(factors=2)
    keys = np.arange(1, 30_001, dtype=np.uint64)
    table.push(keys, np.ones((len(keys), 3), np.float32))
    return table


def taken(table: Table, number: int = 1) -> ShardCheckpoint:
    return ShardCheckpoint(number, table.snapshot(8), {}, {"batches": 5})


class Saving(threading.Thread):
    """Save checkpoint 1 in another thread, so slowly that it would never end."""

    def __init__(self, files: ShardFiles, folder: Path, table: Table) -> None:
        super().__init__(daemon=True)
        self.files, self.folder, self.table = files, folder, table
        self.found: dict[str, Any] = {}
        self.start()

    def run(self) -> None:
        self.found = self.files.save(1, str(self.folder), 30.0, 1e-9, self.table)


@pytest.fixture
def slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_files, "AT_ONCE_S", 0.0)
    monkeypatch.setattr(shard_files, "AT_MOST_S", 1e9)


@pytest.mark.usefixtures("slowly")
def test_a_cut_is_written_slowly_until_somebody_waits_for_it(table: Table, tmp_path: Path) -> None:
    files = ShardFiles(0, 1, 8)
    files.put(taken(table))
    saving = Saving(files, tmp_path, table)
    saving.join(timeout=0.3)
    assert saving.is_alive()
    table.push(np.array([7], np.uint64), np.ones((1, 3), np.float32))  # training goes on meanwhile
    files.hurry(1)
    saving.join(timeout=60)
    assert sum(saving.found["counts"]) == 30_000
    assert saving.found["batches"] == 5
    assert len(list(tmp_path.glob("rows-*"))) == 8


def test_it_ends_by_itself_after_a_while(table: Table, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_files, "AT_ONCE_S", 0.0)
    monkeypatch.setattr(shard_files, "AT_MOST_S", 0.2)
    files = ShardFiles(0, 1, 8)
    files.put(taken(table))
    saving = Saving(files, tmp_path, table)
    saving.join(timeout=60)
    assert sum(saving.found["counts"]) == 30_000


@pytest.mark.usefixtures("slowly")
def test_it_is_written_at_once_where_pushes_wait_for_room(tmp_path: Path) -> None:
    table = Table(factors=2, memory_limit=64 << 20, snapshot_reserve=5 << 20)
    keys = np.arange(1, 100_001, dtype=np.uint64)
    table.push(keys, np.ones((len(keys), 3), np.float32))
    files = ShardFiles(0, 1, 8)
    files.put(taken(table))
    saving = Saving(files, tmp_path, table)
    table.push(keys, np.ones((len(keys), 3), np.float32))  # old images of all rows are more than the reserve holds
    assert table.stats()["undo_waits"]
    saving.join(timeout=60)
    assert sum(saving.found["counts"]) == 100_000


def test_a_dropped_cut_is_not_saved(table: Table, tmp_path: Path) -> None:
    files = ShardFiles(0, 1, 8)
    files.drop(1)
    files.put(taken(table))
    with pytest.raises(ClusterError, match="checkpoint 1 was dropped"):
        files.save(1, str(tmp_path), 30.0, 1.0, table)
    table.snapshot().close()  # the dropped one is no longer open


def test_more_shards_than_a_table_has_files_write_one_each(table: Table, tmp_path: Path) -> None:
    """A checkpoint of 48 shards holds every row once, and loads on any number of shards; so does a key of it."""
    shards = 48
    whole = checkpoint.save(table, tmp_path / "whole")
    writer = atomic.write_folder(tmp_path / "step", "checkpoint")
    with writer:
        counts = [0, 0]
        for number in range(shards):
            part = checkpoint.load(whole, shard=number, shards=shards)
            shard = Shard(part, torch.zeros(4), DenseSettings(), Rules(row_files=checkpoint.row_files(shards)))
            files = ShardFiles(number, shards, checkpoint.row_files(shards))
            shard.on_checkpoint = files.put
            shard.begin([0])
            shard.handle(0, Piece(Request(Kind.MARK, checkpoint=1)))
            written = files.save(1, str(writer.hidden), 30.0, 1.0, part)
            assert list(written["files"]) == [f"rows-{number:05d}-of-00048.arrow"]
            for name, facts in written["files"].items():
                writer.adopt(name, facts)
            counts = [a + b for a, b in zip(counts, written["counts"], strict=True)]
        checkpoint.write_changed(writer, np.empty(0, np.uint64), np.empty(0, np.uint64))
        facts = {"table": table.describe(), "row_files": shards, "tracking": False}
        writer.facts = {**facts, "short_rows": counts[0], "full_rows": counts[1]}
    assert sum(counts) == 30_000
    expected = rows_of(table.snapshot())
    for others in (1, 5, 64):
        parts = [rows_of(checkpoint.load(tmp_path / "step", shard=i, shards=others).snapshot()) for i in range(others)]
        assert sum(map(len, parts)) == 30_000
        assert {key: row for part in parts for key, row in part.items()} == expected
    for key in (1, 77, 30_000):
        batches = list(checkpoint.batches_of(tmp_path / "step", key, shards))
        assert sum(key in batch["key"].to_pylist() for batch in batches) == 1
