"""Rows set aside: a partition of all rows that depends on nothing but their place or time."""

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clickfleet.data.batch import Batch
from clickfleet.data.memory import Feed
from clickfleet.data.parsing import lines
from clickfleet.data.reader import Reader
from clickfleet.data.schema import Dense, Schema, Slot
from clickfleet.data.split import RowSplit, TimeSample, count
from clickfleet.errors import ConfigError, DataError

SCHEMA = Schema(dense=(Dense("n"),), slots=(Slot("city"),), time="t")


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(lines, "BLOCK_BYTES", 1 << 10)  # many blocks
    monkeypatch.setattr(lines, "SPACE", (1 << 10) + 1)
    monkeypatch.setattr(lines, "spare", [])
    number, paths = 0, []
    for name, rows in (("a.csv", 900), ("b.csv.gz", 700), ("empty.csv", 0), ("c.csv", 400)):
        text = "label,n,city,t\n"
        for _ in range(rows):
            text += f"{number % 2},{number},c{number % 9},{1000 + number // 10}\n"
            number += 1
        path = tmp_path / name
        path.write_bytes(gzip.compress(text.encode()) if name.endswith("gz") else text.encode())
        paths.append(str(path))
    return paths


def numbers(batches: Any) -> list[int]:
    return [int(number) for batch in batches for number in batch.dense[:, 0]]


def reader(files: Any, split: RowSplit | None, validation: bool = False, **more: Any) -> Reader:
    made = Reader(files, SCHEMA, "csv", 64, **more)
    made.split, made.validation = split, validation
    return made


@pytest.mark.parametrize("split", [RowSplit(0.1, 7), RowSplit(0.5, 8), RowSplit(0.1, 7, since=1180)])
def test_both_parts_together_are_all_rows(files: list[str], split: RowSplit) -> None:
    aside = numbers(reader(files, split, True))
    for options in ({}, {"threads": 0}, {"threads": 3}, {"shuffle": 200, "seed": 5}, {"shuffle": "global"}):
        rest = numbers(reader(files, split, **options))
        assert len(aside) + len(rest) == 2000
        assert set(aside) | set(rest) == set(range(2000))
        assert set(numbers(reader(files, split, True, **options))) == set(aside)
    if split.since is None:
        assert abs(len(aside) - 2000 * split.share) < 4 * (2000 * split.share * (1 - split.share)) ** 0.5
    else:
        assert aside == list(range(1800, 2000))


def test_every_process_and_every_epoch_chooses_alike(files: list[str], tmp_path: Path) -> None:
    split = RowSplit(0.2, 7)
    aside = set(numbers(reader(files, split, True)))
    by_worker = [set(numbers(reader(files, split, True, worker=(worker, 3)))) for worker in range(3)]
    assert set.union(*by_worker) == aside
    assert sum(map(len, by_worker)) == len(aside)
    again = reader(files, split, shuffle=100)
    assert set(numbers(again)) == set(numbers(again)) == set(range(2000)) - aside
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    for path in files:
        (moved / Path(path).name).write_bytes(Path(path).read_bytes())
    assert (
        set(numbers(reader(str(moved), split, True))) == aside
    )  # it depends on the name of the file, not on its folder
    assert set(numbers(reader(files, RowSplit(0.2, 8), True))) != aside


@pytest.mark.parametrize("options", [{}, {"shuffle": 200}, {"shuffle": "global"}, {"interleave": 2}])
def test_a_reader_resumes_at_every_batch(files: list[str], options: dict[str, Any]) -> None:
    split = RowSplit(0.3, 7)
    whole = [numbers([batch]) for batch in reader(files, split, **options)]
    for stop in range(1, len(whole), 5):
        first = reader(files, split, **options)
        batches = iter(first)
        before = [numbers([next(batches)]) for _ in range(stop)]
        state = json.loads(json.dumps(first.state()))
        batches.close()  # type: ignore[attr-defined]
        second = reader(files, split, threads=2, **options)
        second.restore(state)
        assert before + [numbers([batch]) for batch in second] == whole
    with pytest.raises(DataError, match=r"data\.valid_share"):
        reader(files, None, **options).restore(state)
    with pytest.raises(DataError, match=r"data\.valid_share"):
        reader(files, RowSplit(0.2, 7), **options).restore(state)


def test_bad_lines_do_not_change_the_parts(files: list[str], tmp_path: Path) -> None:
    path = Path(files[0])
    rows = path.read_text().splitlines()
    for line in (5, 6, 100, 899):
        rows[line] = "3,what,is this"
    path.write_text("\n".join(rows) + "\n")
    split = RowSplit(0.3, 7)
    aside = set(numbers(reader(files, split, True, bad_lines="skip")))
    rest = set(numbers(reader(files, split, bad_lines="quarantine", quarantine=str(tmp_path / "bad"))))
    assert not aside & rest
    assert len(aside | rest) == 1996


def test_data_in_memory_is_split_and_shuffled_anew_in_every_epoch() -> None:
    data = {
        "label": np.arange(500) % 2,
        "n": np.arange(500),
        "city": np.arange(500) % 9,
        "t": np.arange(500)[::-1].copy(),
    }
    for split in (RowSplit(0.2, 7), RowSplit(0.2, 7, since=400)):
        feed, aside = Feed(data, SCHEMA, 64, shuffle=True, seed=3), Feed(data, SCHEMA, 64)
        feed.split, aside.split, aside.validation = split, split, True
        first, second, held_out = numbers(feed), numbers(feed), numbers(aside)
        assert first != second
        assert sorted(first) == sorted(second)
        assert sorted(first + held_out) == list(range(500))
        assert (held_out == list(range(100))) == (split.since is not None)
    feed = Feed(data, SCHEMA, 64, shuffle=True, seed=3)
    feed.split = split
    passes = [numbers([batch]) for _ in range(2) for batch in feed]
    for stop in (1, 5, 8, 12):
        before = Feed(data, SCHEMA, 64, shuffle=True, seed=3)
        before.split = split
        seen: list[list[int]] = []
        while len(seen) < stop:
            for batch in before:
                seen.append(numbers([batch]))
                state = before.state()
                if len(seen) == stop:
                    break
        after = Feed(data, SCHEMA, 64, shuffle=True, seed=3)
        after.split = split
        after.restore(json.loads(json.dumps(state)))
        rest = [numbers([batch]) for batch in after]
        if after.epoch == 1:
            rest += [numbers([batch]) for batch in after]
        assert seen + rest == passes, stop
    with pytest.raises(DataError, match=r"train\.seed"):
        Feed(data, SCHEMA, 64, shuffle=True, seed=4).restore(state)


def test_what_is_read_once_is_not_shuffled() -> None:
    with pytest.raises(ConfigError, match=r"data.shuffle cannot shuffle a generator"):
        Feed((row for row in [{}]), SCHEMA, shuffle=True)
    assert Feed([{"n": 1}], SCHEMA).rereadable
    assert not Feed(iter([]), SCHEMA).rereadable


def test_the_time_from_which_rows_are_set_aside() -> None:
    def since(times: Any, share: float = 0.1, limit: int = 1 << 20) -> int | None:
        sample = TimeSample(limit)
        for part in np.array_split(np.asarray(times, np.int64), 7):
            sample.add(part)
        return sample.since(share)

    assert since(np.arange(1000)) == 900
    assert since(np.arange(1000)[::-1], 0.25) == 750
    assert since(np.zeros(1000)) is None  # all equal
    assert since([]) is None
    assert since(np.repeat([1, 2, 3, 4, 5, 6, 7], 100)) == 7  # a seventh is near enough
    assert since(np.repeat([1, 2], 100)) is None  # half of the rows is too much
    assert since(np.repeat([1, 2], 100), 0.5) == 2
    big = since(np.arange(100_000), limit=500)
    assert big is not None
    assert abs(big - 90_000) < 300


def test_count_keeps_few_rows_only() -> None:
    batch = Batch(np.zeros((4, 0), np.float32), np.zeros(4, np.uint64), 1, labels=np.array([0, 1, 0, 0], np.float32))
    few, many = count([batch] * 10), count([batch] * 10, limit=39)
    assert (few.rows, few.clicks, few.enough) == (many.rows, many.clicks, many.enough) == (40, 10, False)
    assert few.kept is not None
    assert len(few.kept) == 40
    assert many.kept is None
    assert count([batch] * 20).enough
    assert count([]).kept is None
    with pytest.raises(DataError, match="rows without a time"):
        RowSplit(0.1, 7, since=3).aside("a.csv", 0, batch)
