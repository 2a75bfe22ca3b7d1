"""The rest of an interrupted pass, divided: every row is read once, whatever the shuffle, the lanes and the moment."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clickfleet.data import memory, reader
from clickfleet.data.batch import Batch
from clickfleet.data.memory import Feed
from clickfleet.data.reader import Reader
from clickfleet.data.schema import Dense, Schema, Slot

SCHEMA = Schema(dense=(Dense("age"),), slots=(Slot("city"),))
ROWS = (40, 1, 0, 25, 7, 60, 13, 31)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Files of different sizes. Every row has its own number as its age."""
    folder, number, paths = tmp_path_factory.mktemp("files"), 0, []
    for i, rows in enumerate(ROWS):
        lines = [f"{i % 2},{number + row},c{row}" for row in range(rows)]
        number += rows
        paths.append(str(folder / f"part-{i}.csv"))
        Path(paths[-1]).write_text("\n".join(["label,age,city", *lines]) + "\n")
    return paths


def numbers(batches: Any) -> list[int]:
    return [int(age) for batch in batches for age in batch.dense[:, 0]]


@given(
    shuffle=st.sampled_from([0, 8, 30, 500, "global"]),
    lanes=st.sampled_from([None, 1, 3]),
    batch=st.integers(1, 50),
    moments=st.lists(st.integers(0, 12), min_size=1, max_size=3),
)
def test_files_begun_and_files_unread_are_all_rows_once(
    files: list[str], shuffle: Any, lanes: int | None, batch: int, moments: list[int]
) -> None:
    def opened(paths: list[str], state: Any = None) -> Reader:
        made = Reader(paths, SCHEMA, "csv", batch, shuffle=shuffle, seed=5, interleave=lanes)
        if state is not None:
            made.restore(state)
        return made

    seen: list[int] = []
    streams: list[tuple[list[str], Any]] = [(files, None)]
    for moment in moments:
        rest = []
        for paths, state in streams:
            source = opened(paths, state)
            iterator = iter(source)
            batches = list(islice(iterator, moment))
            seen += numbers(batches)
            iterator.close()  # type: ignore[attr-defined]
            if len(batches) < moment:  # it has ended
                continue
            begun, unread = reader.split_off(paths, source.state())
            assert begun is not None or len(unread) == len(paths)
            rest += [(paths, begun)] if begun is not None else []
            rest += [(unread[i::2], None) for i in range(2) if unread[i::2]]
        streams = rest
    for paths, state in streams:
        seen += numbers(opened(paths, state))
    assert sorted(seen) == list(range(sum(ROWS)))


@given(
    shuffle=st.booleans(),
    batch=st.integers(1, 20),
    moment=st.integers(0, 5),
    sizes=st.lists(st.integers(1, 40), max_size=4),
)
def test_rows_in_memory_are_divided_exactly(shuffle: bool, batch: int, moment: int, sizes: list[int]) -> None:
    rows = Batch(np.arange(90, dtype=np.float32)[:, None], np.ones(90, np.uint64), 1, labels=np.zeros(90, np.float32))

    def opened(state: Any = None) -> Feed:
        feed = Feed([rows[:50], rows[50:]], SCHEMA, batch, shuffle=shuffle, seed=3)
        if state is not None:
            feed.restore(state)
        return feed

    whole = numbers(opened())
    feed = opened()
    seen = numbers(islice(iter(feed), moment))
    rest: Any = feed.state()
    if len(seen) == len(rows):
        return
    for size in sizes:
        if rest is not None:
            state, rest = memory.split_off(len(rows), rest, size)
            seen += numbers(opened(state))
    seen += numbers(opened(rest)) if rest is not None else []
    assert seen == whole
