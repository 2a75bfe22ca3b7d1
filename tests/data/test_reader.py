"""The reader: every row exactly once, in an order that only the seed decides, from anywhere it stopped."""

import gzip
import json
import threading
from itertools import chain
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clickfleet.data.block_queue import Blocks, Place
from clickfleet.data.files import split_files
from clickfleet.data.formats import load
from clickfleet.data.parsing import columns
from clickfleet.data.reader import Reader
from clickfleet.data.schema import Dense, Schema, Slot, preset
from clickfleet.errors import ConfigError, DataError
from lines import GOLDEN_LINE, criteo_text

PLAIN = Schema(
    (Dense("I2"), *(Dense(f"I{i}") for i in range(3, 14))), tuple(Slot(f"C{i}") for i in range(1, 27)), label="click"
)  # the first dense value is the number of the row


def numbers(batches) -> list[int]:
    return [int(x) for batch in batches for x in batch.dense[:, 0]]


@pytest.fixture
def three_files(write, small_blocks):
    return [
        str(write(f"part-{i}", criteo_text(rows, first)))
        for i, (rows, first) in enumerate([(37, 0), (1, 37), (60, 38)])
    ]


def test_in_order_with_a_partial_last_batch(three_files):
    batches = list(Reader(three_files, PLAIN, batch_size=30))
    assert [len(batch) for batch in batches] == [30, 30, 30, 8]
    assert numbers(batches) == list(range(98))


@pytest.mark.parametrize("shuffle", [0, 25, 1000, "global"])
@pytest.mark.parametrize("interleave", [None, 1, 2, 7])
def test_threads_change_nothing(three_files, shuffle, interleave):
    def read(threads):
        reader = Reader(
            three_files, PLAIN, batch_size=10, shuffle=shuffle, seed=3, interleave=interleave, threads=threads
        )
        return [numbers(reader), numbers(reader)], reader.counters

    expected, counters = read(0)
    assert sorted(expected[0]) == sorted(expected[1]) == list(range(98))
    assert (expected[0] == expected[1]) == (shuffle == 0)  # every pass is shuffled anew
    assert (counters.rows, counters.lines) == (196, 196)
    for threads in (1, 2, 5):
        assert read(threads)[0] == expected


def test_the_seed_decides_the_order(three_files):
    orders = [numbers(Reader(three_files, PLAIN, shuffle="global", seed=seed, batch_size=7)) for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]


def test_the_order_is_frozen(three_files):
    first = numbers(Reader(three_files, PLAIN, shuffle="global", seed=7))[:10]
    assert first[:7] == [17, 14, 91, 44, 37, 75, 11]


def as_parquet(path, out):
    names = ["click", *(f"I{i}" for i in range(1, 14)), *(f"C{i}" for i in range(1, 27))]
    types = {name: pa.string() for name in names if name[0] == "C"}
    table = pa.csv.read_csv(
        path,
        pa.csv.ReadOptions(column_names=names),
        pa.csv.ParseOptions(delimiter="\t"),
        pa.csv.ConvertOptions(column_types=types),
    )
    pq.write_table(table, out, row_group_size=13)
    with pa.OSFile(str(out) + ".arrow", "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=17)
    pa.csv.write_csv(table, str(out) + ".csv")


@pytest.fixture
def stored(three_files, tmp_path, monkeypatch):
    """The same rows in every kind of file."""
    monkeypatch.setattr(columns, "BLOCK_ROWS", 5)
    for module in ("parquet", "arrow"):
        monkeypatch.setattr(f"clickfleet.data.formats.{module}.BLOCK_ROWS", 5)
    kinds = {kind: [] for kind in ("criteo", "gz", "zst", "parquet", "arrow", "csv", "pipe", "own")}
    for i, path in enumerate(three_files):
        content = Path(path).read_bytes()
        kinds["criteo"].append(path)
        kinds["gz"].append(str(tmp_path / f"{i}.gz"))
        with open(kinds["gz"][-1], "wb") as file:  # several members, as parallel compressors write them
            file.write(gzip.compress(content[:700]) + gzip.compress(content[700:]))
        kinds["zst"].append(str(tmp_path / f"{i}.zst"))
        with pa.CompressedOutputStream(kinds["zst"][-1], "zstd") as file:
            file.write(content)
        as_parquet(path, tmp_path / f"{i}.parquet")
        kinds["parquet"].append(str(tmp_path / f"{i}.parquet"))
        kinds["arrow"].append(str(tmp_path / f"{i}.parquet.arrow"))
        kinds["csv"].append(str(tmp_path / f"{i}.parquet.csv"))
    kinds["own"] = kinds["pipe"] = kinds["criteo"]
    own = tmp_path / "own.py"
    own.write_text(OWN_FORMAT)
    awk = "awk -F'\\t' '{printf \"1 %s 1 %s 1 %s\\n\", $3, NR, $1}'"
    forms = {"gz": "criteo", "zst": "criteo", "pipe": {"name": "pipe", "command": awk}, "own": str(own)}
    two = Schema((Dense("row"),), (Slot("s"),))
    return {
        kind: (files, forms.get(kind, kind), two if kind in ("pipe", "own") else PLAIN) for kind, files in kinds.items()
    }


OWN_FORMAT = """
import numpy as np
from clickfleet.data.batch import Batch
from clickfleet.data.schema import Dense, Schema, Slot

class Mine:
    schema = Schema((Dense("row"),), (Slot("s"),))

    def parse(self, block):
        rows = [line.split(b"\\t") for line in block.splitlines()]
        return Batch(
            dense=np.array([[int(row[2])] for row in rows], np.float32),
            keys=np.array([len(row[20]) for row in rows], np.uint64),
            slots=1,
            labels=np.array([float(row[0]) for row in rows], np.float32),
        )
"""

KINDS = ["criteo", "gz", "zst", "parquet", "arrow", "csv", "pipe", "own"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shuffle", [0, 24, "global"])
def test_restores_at_every_batch(stored, kind, shuffle):
    files, form, schema = stored[kind]

    def reader(threads):
        return Reader(files, schema, form, batch_size=8, shuffle=shuffle, seed=5, threads=threads)

    original, seen, states = reader(2), [], []
    for batch in original:
        seen.append(numbers([batch]))
        states.append(json.dumps(original.state()))
    assert sorted(chain(*seen)) == list(range(98))
    step = 3 if kind == "pipe" else 1  # each restart starts a process per file
    for i in range(0, len(states), step):
        again = reader(i % 3)
        again.restore(json.loads(states[i]))
        assert [numbers([batch]) for batch in again] == seen[i + 1 :]
        assert again.counters == original.counters
        assert again.epoch == 1


def test_restores_between_passes_and_in_a_later_one(three_files):
    def reader():
        return Reader(three_files, PLAIN, batch_size=40, shuffle=50, seed=1)

    original = reader()
    passes = [numbers(original) for _ in range(3)]
    again = reader()
    list(again)
    middle = reader()
    middle.restore(again.state())
    first = next(iter(middle))
    state = middle.state()
    assert numbers([first]) == passes[1][:40]
    last = reader()
    last.restore(state)
    assert numbers(last) == passes[1][40:]
    assert numbers(last) == passes[2]


def test_goes_on_where_a_loop_was_left(three_files):
    reader = Reader(three_files, PLAIN, batch_size=10)
    first = next(iter(reader))
    assert numbers([first]) + numbers(reader) == list(range(98))


def test_states_of_other_readers_are_refused(three_files):
    state = Reader(three_files, PLAIN, shuffle=10).state()
    with pytest.raises(DataError, match="the saved reader state has files"):
        Reader(three_files[:2], PLAIN, shuffle=10).restore(state)
    with pytest.raises(DataError, match="the saved reader state has shuffle"):
        Reader(three_files, PLAIN, shuffle=2000).restore(state)
    with pytest.raises(DataError, match="the saved reader state has schema"):
        Reader(three_files, preset("criteo"), shuffle=10).restore(state)


def test_a_file_that_shrank_is_noticed(three_files, write):
    reader = Reader(three_files, PLAIN, batch_size=30)
    next(iter(reader))
    state = reader.state()
    write("part-0", criteo_text(3))
    again = Reader(three_files, PLAIN, batch_size=30)
    again.restore(state)
    with pytest.raises(DataError, match="has changed since the state was saved"):
        list(again)


@given(st.integers(0, 40), st.integers(1, 12))
def test_any_split_over_workers_covers_every_file_once(files, workers):
    names = [str(i) for i in range(files)]
    shares = [split_files(names, worker, workers) for worker in range(workers)]
    assert list(chain(*shares)) == names
    sizes = [len(share) for share in shares]
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1


def test_split_as_specified():
    assert [split_files(["a", "b"], worker, 3) for worker in range(3)] == [["a"], ["b"], []]
    with pytest.raises(TypeError, match="list of paths"):
        split_files("abc", 0, 2)
    with pytest.raises(ConfigError, match="worker 2 of 2"):
        split_files(["a"], 2, 2)


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
@pytest.mark.parametrize("shuffle", [0, 20])
def test_any_split_over_workers_covers_every_row_once(three_files, workers, shuffle):
    shares = [numbers(Reader(three_files, PLAIN, worker=(i, workers), shuffle=shuffle)) for i in range(workers)]
    assert sorted(chain(*shares)) == list(range(98))


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_do_not_run_far_ahead(write, small_blocks, threads, monkeypatch):
    """A slow consumer stops them: what is read but not used stays bounded, whatever the file's size."""
    form, before, read_blocks = load("criteo"), set(threading.enumerate()), threading.Semaphore(0)
    real = type(form).blocks

    def counted(*arguments):
        for block in real(*arguments):
            read_blocks.release()
            yield block

    monkeypatch.setattr(type(form), "blocks", counted)
    blocks = Blocks(
        [[str(write("a", criteo_text(400)))]], form, PLAIN, [Place()], turn=0, threads=threads, on_bad="stop"
    )
    taken = iter(blocks)
    next(taken)
    for _ in range(1 + threads + 2):  # the one that was taken, and those that may be ready before they are wanted
        assert read_blocks.acquire(timeout=60)
    assert not read_blocks.acquire(timeout=0.2)
    taken.close()
    assert not set(threading.enumerate()) - before


def test_a_reader_of_one_line(write):
    (batch,) = Reader(write("a", GOLDEN_LINE), preset("criteo"))
    assert len(batch) == 1
    assert not batch.keys.flags.writeable or batch.keys.dtype == np.uint64


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size"),
        ({"shuffle": -1}, "data.shuffle"),
        ({"bad_lines": "ignore"}, "unknown policy 'ignore' in data.bad_lines"),
        ({"bad_lines": "quarantine"}, "require each other"),
        ({"max_bad_fraction": 2}, "between 0 and 1"),
        ({"format": "criteoo"}, "unknown format 'criteoo'; did you mean criteo?"),
        ({"format": {"name": "csv", "seperator": ";"}}, "unknown key data.format.seperator; did you mean separator?"),
        ({"format": {"separator": ";"}}, "the format has no name"),
        ({"format": "csv"}, "has no default schema"),
        ({"worker": (3, 2)}, "worker 3 of 2"),
    ],
)
def test_refuses_wrong_settings(write, options, message):
    with pytest.raises(ConfigError) as refusal:
        Reader(write("a", GOLDEN_LINE), **options)
    assert message in str(refusal.value)
