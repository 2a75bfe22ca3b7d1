"""Rows of data in memory survive the way through files unchanged."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clickfleet.data import feed_files
from clickfleet.data.batch import ROW_COLUMNS, Batch, concatenate
from clickfleet.data.feed_files import write_rows
from clickfleet.data.memory import Feed
from clickfleet.data.schema import Dense, Schema, Slot
from clickfleet.errors import DataError


def batch(rows: int, dense: int = 2, ragged: bool = True, sides: bool = True, seed: int = 0) -> Batch:
    draw = np.random.default_rng(seed)
    counts = draw.integers(0, 3, rows * 2) if ragged else np.ones(rows * 2, np.int64)
    keys = draw.integers(0, 2**63, counts.sum(), np.uint64)
    offsets: Any = np.concatenate(([0], np.cumsum(counts))) if ragged else None
    more: dict[str, Any] = {name: draw.random(rows, np.float32) for name in ("shows", "clicks", "weights")}
    more |= {"times": draw.integers(0, 99, rows), "groups": draw.integers(0, 9, rows, np.uint64)}
    more["values"] = draw.random(len(keys), np.float32)
    labels = draw.integers(0, 2, rows).astype(np.float32)
    return Batch(draw.random((rows, dense), np.float32), keys, 2, offsets, labels, **(more if sides else {}))


def same(a: Batch, b: Batch) -> bool:
    columns = ("dense", "keys", "offsets", "values", *ROW_COLUMNS)
    pairs = [(getattr(a, name), getattr(b, name)) for name in columns]
    return a.one_each == b.one_each and all(
        x is y or (x is not None and y is not None and x.dtype == y.dtype and np.array_equal(x, y)) for x, y in pairs
    )


@pytest.mark.parametrize(("dense", "ragged", "sides"), [(2, True, True), (0, False, False), (1, True, False)])
def test_rows_come_back_as_they_were(tmp_path: Path, dense: int, ragged: bool, sides: bool) -> None:
    given = [batch(rows, dense, ragged, sides, rows) for rows in (1, 9000, 0, 13)]
    fed = write_rows(given, tmp_path)
    assert len(fed) == 9014
    assert same(concatenate(list(fed)), concatenate([one for one in given if len(one)]))
    shares = [rows for i in range(4) for rows in fed.share(i, 4)]
    assert same(concatenate(shares), concatenate(list(fed)))
    assert max(len(fed.share(i, 4)) for i in range(4)) - min(len(fed.share(i, 4)) for i in range(4)) <= 1
    assert list(write_rows([], tmp_path / "none")) == []


def test_a_share_reads_only_files_with_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_files, "CHUNK_ROWS", 10)
    monkeypatch.setattr(feed_files, "FILE_ROWS", 20)
    rows = batch(90)
    fed = write_rows([rows], tmp_path)
    assert [count for _, count in fed.files] == [20, 20, 20, 20, 10]
    (tmp_path / "rows-00000.arrow").unlink()
    second = concatenate(list(fed.share(1, 2)))
    assert same(second, rows[45:])
    with pytest.raises(DataError, match=r"rows-00000.arrow: cannot be read"):
        list(fed.share(0, 2))


def test_a_feed_resumes_only_with_the_same_rows(tmp_path: Path) -> None:
    schema = Schema(dense=(Dense("a"), Dense("b")), slots=(Slot("x", multi=True), Slot("y", multi=True)))
    feed = Feed(write_rows([batch(100)], tmp_path / "a"), schema, 30, shuffle=True, seed=5)
    batches = list(feed)
    again = Feed(write_rows([batch(100)], tmp_path / "b"), schema, 30, shuffle=True, seed=5)
    first = next(iter(again))
    rest = Feed(write_rows([batch(100)], tmp_path / "c"), schema, 30, shuffle=True, seed=5)
    rest.restore(again.state())
    assert same(concatenate([first, *rest]), concatenate(batches))
    other = Feed(write_rows([batch(100, seed=1)], tmp_path / "d"), schema, 30, shuffle=True, seed=5)
    with pytest.raises(DataError, match="other data in memory"):
        other.restore(again.state())
