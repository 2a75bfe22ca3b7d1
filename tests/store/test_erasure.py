"""Rows are removed from checkpoints without loading them; everything else keeps its bits."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import csv, parquet

from clickfleet.data import arrow_ipc, files
from clickfleet.data.schema import Dense, KeyRule, Schema, Slot
from clickfleet.errors import CheckpointError, ConfigError, DataError
from clickfleet.store import atomic, checkpoint, erasure
from clickfleet.store.erasure import ForgottenKeys, WantedKeys, read_keys, rewrite, value_keys
from clickfleet.store.rules import rule
from clickfleet.store.table import Table, sort_by_hash

U, F = np.uint64, np.float32
SCHEMA = Schema(dense=(Dense("age"),), slots=(Slot("user"), Slot("tags", multi=True)))
keys_of = st.lists(st.integers(0, 2**64 - 1), max_size=40).map(lambda keys: np.array(keys, U))


@given(wanted=keys_of, asked=keys_of, both=keys_of, ordered=st.booleans())
def test_keys_are_found_among_others(wanted: Any, asked: Any, both: Any, ordered: bool) -> None:
    among = np.concatenate([asked, both])
    among = sort_by_hash(np.unique(among)) if ordered else among
    some = np.concatenate([wanted, both])
    assert WantedKeys(some).mask(among).tolist() == np.isin(among, some).tolist()
    assert len(WantedKeys(some)) == len(set(some.tolist()))


def filled(keys: Any, factors: int = 3, publish: Any = None, **more: Any) -> Table:
    """Rows of the keys, every other one with factors; consumers have those that were there at `publish`."""
    table = Table(factors=factors, rule=rule("adagrad"), admission="count(2)", seed=3, **more)
    if publish is not None:
        table.push(publish, np.ones((len(publish), 1 + factors), F), distinct=True)
        changes = table.cut_changes(base=True)
        list(changes)
        changes.commit()
    table.push(keys, np.arange(len(keys) * (1 + factors), dtype=F).reshape(len(keys), -1) / 100, distinct=True)
    table.push(keys[::2], np.ones((len(keys[::2]), 1 + factors), F), show=np.full(len(keys[::2]), 3, F), distinct=True)
    return table


def rows_in(path: Path) -> dict[int, tuple[object, ...]]:
    out = {}
    for file in sorted(path.glob("rows-*")):
        for batch in arrow_ipc.batches(file, checkpoint.ROWS):
            for row in batch.to_pylist():
                out[row["key"]] = tuple(map(str, row.values()))
    return out


@given(
    keys=st.sets(st.integers(0, 2**64 - 1), min_size=1, max_size=60),
    gone=st.sets(st.integers(0, 59)),
    listed=st.sets(st.integers(0, 59)),
    unknown=keys_of,
    files_=st.sampled_from([1, 8, 32]),
    factors=st.sampled_from([0, 3]),
)
def test_what_is_left_has_the_same_bits(
    tmp_path_factory: pytest.TempPathFactory,
    keys: set[int],
    gone: set[int],
    listed: set[int],
    unknown: Any,
    files_: int,
    factors: int,
) -> None:
    every = np.array(sorted(keys), U)
    out = every[[i for i in sorted(gone) if i < len(every)]]
    consumers = every[[i for i in sorted(listed) if i < len(every)]]
    table = filled(every, factors, consumers)
    folder = tmp_path_factory.mktemp("erasure")
    path = checkpoint.save(table, checkpoint.step_folder(folder, 5), files=files_, step=5)
    before = rows_in(path)
    wanted = WantedKeys(np.concatenate([out, np.setdiff1d(unknown, every)]))
    done = rewrite(path, wanted, step=6)
    assert rows_in(path) == before, "the old one stays as it is"
    assert done.path == checkpoint.step_folder(folder, 6)
    assert (done.removed, done.rows) == (len(out), len(every) - len(out))
    checkpoint.verify(done.path)
    assert rows_in(done.path) == {key: row for key, row in before.items() if key not in set(out.tolist())}
    loaded = checkpoint.load(done.path)
    assert not loaded.known(out).any()
    assert len(loaded) == done.rows
    stay = np.setdiff1d(every, out)
    assert loaded.pull(stay).tobytes() == table.pull(stay).tobytes()
    changes = loaded.cut_changes()
    published = {int(key) for part in changes for key in part["key"]}
    assert published == {int(key) for key in stay}
    assert sorted(changes.deleted.tolist()) == sorted(np.intersect1d(out, consumers).tolist())
    assert done.deletions == len(np.intersect1d(out, consumers))
    changes.abort()
    shutil.rmtree(folder)


def test_files_without_the_keys_are_linked(tmp_path: Path) -> None:
    keys = np.arange(1, 4000, dtype=U)
    path = checkpoint.save(filled(keys), checkpoint.step_folder(tmp_path, 1), step=1)
    done = rewrite(path, WantedKeys(keys[:1]), step=2)
    linked = [file.name for file in sorted(done.path.glob("rows-*")) if file.stat().st_nlink == 2]
    assert len(linked) == 7
    shutil.rmtree(path)
    checkpoint.verify(done.path)


def test_rows_of_shards_and_replicas_go_too(tmp_path: Path) -> None:
    """A cluster's checkpoint: as many files as its shards need, and the replicas of workers beside them."""
    keys = np.arange(1, 500, dtype=U)
    table = filled(keys)
    replica = filled(keys[:50])
    attached = {f"worker-0000{i}-{name}.arrow": checkpoint.pack(replica) for i in (0, 1) for name in ("rows", "old")}
    path = checkpoint.save(table, checkpoint.step_folder(tmp_path, 7), files=32, attached=attached, step=7)
    found = erasure.KeySearch(str(tmp_path), WantedKeys(keys[:10]), SCHEMA).checkpoint(path.name)
    assert found["rows"] == 10 + 4 * 10
    done = rewrite(path, WantedKeys(keys[:10]), step=8)
    assert erasure.KeySearch(str(tmp_path), WantedKeys(keys[:10]), SCHEMA).checkpoint(done.path.name)["rows"] == 0
    parts = [checkpoint.load(done.path, shard=shard, shards=3) for shard in range(3)]
    assert sum(map(len, parts)) == len(keys) - 10
    assert not any(part.known(keys[:10]).any() for part in parts)
    rest = Table.like(replica.describe())
    checkpoint.unpack(rest, (done.path / "worker-00001-old.arrow").read_bytes())
    assert len(rest) == 40
    assert rest.pull(keys[10:50]).tobytes() == replica.pull(keys[10:50]).tobytes()


def test_a_memory_limit_is_kept(tmp_path: Path) -> None:
    keys = np.arange(1, 500, dtype=U)
    table = filled(keys, memory_limit=4_000_000)
    path = checkpoint.save(table, checkpoint.step_folder(tmp_path, 1), step=1)
    assert "memory" in atomic.read_manifest(path, "checkpoint")
    done = rewrite(path, WantedKeys(keys[:100]), step=2)
    loaded = checkpoint.load(done.path)
    assert (len(loaded), loaded.memory_limit) == (399, 4_000_000)
    loaded.push(keys, np.ones((len(keys), 4), F))


@pytest.mark.parametrize("exchanges", [True, False])
def test_a_label_names_its_checkpoint_at_any_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchanges: bool
) -> None:
    """The place of a labelled checkpoint is taken while others read it; a system without exchange has a short gap."""
    keys = np.arange(1, 50, dtype=U)
    path = checkpoint.write(filled(keys), tmp_path, 3, epoch=0, best=True)
    seen: list[int] = []

    def look() -> None:
        labels = ("LATEST", "BEST", "EPOCH-0000")
        seen.extend(len(checkpoint.load(checkpoint.labelled(tmp_path, label))) for label in labels)

    if not exchanges:
        monkeypatch.setattr(atomic, "exchange", lambda one, other: False)
    for name in ("flush", "move"):
        original = getattr(files, name)

        def told(*paths: Path, call: Any = original) -> None:
            if exchanges or path.exists():
                look()
            call(*paths)

        monkeypatch.setattr(atomic, name, told)
    monkeypatch.setattr(files, "move", atomic.move)  # labels are files that are replaced
    done = rewrite(path, WantedKeys(keys[:9]))
    look()
    assert done.path == path
    assert set(seen) == {49, 40}
    assert (tmp_path / "LATEST").read_text().count(" ") == 1


def test_a_damaged_checkpoint_is_left_alone(tmp_path: Path) -> None:
    path = checkpoint.save(filled(np.arange(1, 50, dtype=U)), checkpoint.step_folder(tmp_path, 1), step=1)
    file = next(path.glob("rows-00003*"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"rows-00003.*damaged"):
        rewrite(path, WantedKeys(np.arange(1, 5, dtype=U)), step=2)
    assert [one.name for one in tmp_path.iterdir()] == [path.name]


def test_keys_come_from_files_of_every_kind(tmp_path: Path) -> None:
    user, tags = (value_keys(SCHEMA, slot, pa.array(["a", "b\tc", "é"])) for slot in ("user", "tags"))
    text = tmp_path / "keys.txt"
    text.write_text("user\ta\r\n12\n\n0xff\ntags\tb\tc\n 18446744073709551615 \nuser\té")
    expected = {12, 255, 2**64 - 1, int(user[0]), int(user[2]), int(tags[1])}
    assert set(read_keys(SCHEMA, text, None).keys.tolist()) == expected
    columns = pa.table({"user": ["a", None, "é"], "tags": ["b\tc", "a", None], "other": [1, 2, 3]})
    both = {int(user[0]), int(user[2]), int(tags[0]), int(tags[1])}
    csv.write_csv(columns, tmp_path / "keys.csv")
    parquet.write_table(columns, tmp_path / "keys.parquet")
    with pa.ipc.new_file(str(tmp_path / "keys.arrow"), columns.schema) as writer:
        writer.write_table(columns)
    for name in ("keys.csv", "keys.parquet", "keys.arrow"):
        assert set(read_keys(SCHEMA, str(tmp_path / name), None).keys.tolist()) == both
    parquet.write_table(pa.table({"key": pa.array([3, 2**64 - 1], pa.uint64())}), tmp_path / "numbers.parquet")
    assert set(read_keys(SCHEMA, tmp_path / "numbers.parquet", None).keys.tolist()) == {3, 2**64 - 1}
    (tmp_path / "numbers.csv").write_text("key\n3\n0x10\n")
    assert set(read_keys(SCHEMA, tmp_path / "numbers.csv", None).keys.tolist()) == {3, 16}
    assert set(read_keys(SCHEMA, [1, 2], {"user": "a", "tags": ["a", "a"]}).keys.tolist()) == {
        *(1, 2),
        int(user[0]),
        int(tags[0]),
    }


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"keys": []}, "no keys were given"),
        ({"keys": [-1]}, "no keys"),
        ({"keys": [2**64]}, "no keys"),
        ({"keys": np.array([0.5])}, "no keys"),
        ({"values": {"colour": "red"}}, "no slot colour"),
    ],
)
def test_what_is_no_key_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_keys(SCHEMA, given.get("keys"), given.get("values"))


def test_files_that_hold_no_keys_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "keys.txt"
    for content, message in (("12\nuser=3\n", "is no key"), ("99999999999999999999\n", "is no key")):
        path.write_text(content)
        with pytest.raises(DataError, match=message):
            read_keys(SCHEMA, path, None)
    path.write_text("colour\tred\n")
    with pytest.raises(ConfigError, match="no slot colour"):
        read_keys(SCHEMA, path, None)
    parquet.write_table(pa.table({"colour": ["red"]}), tmp_path / "keys.parquet")
    with pytest.raises(DataError, match="neither a column key nor"):
        read_keys(SCHEMA, tmp_path / "keys.parquet", None)
    with pytest.raises(DataError, match="cannot be read"):
        read_keys(SCHEMA, tmp_path / "nothing.txt", None)
    raw = Schema(slots=(Slot("user"),), keys=KeyRule("raw"))
    assert value_keys(raw, "user", pa.array(["12"])).tolist() == [12]
    with pytest.raises(ConfigError, match="whole number"):
        value_keys(raw, "user", pa.array(["anna"]))


def test_the_list_of_a_run_shrinks(tmp_path: Path) -> None:
    known = ForgottenKeys(tmp_path)
    known.add(WantedKeys(np.array([1, 2, 3], U)), 10, 4)
    known.add(WantedKeys(np.array([3, 4], U)), 20, 4)
    known = ForgottenKeys(tmp_path)
    assert sorted(known.since(9).keys.tolist()) == [1, 2, 3, 4]
    assert sorted(known.since(10).keys.tolist()) == [3, 4]
    known.add(WantedKeys(np.array([5], U)), 30, 15)  # nothing older than step 15 is kept
    assert sorted(ForgottenKeys(tmp_path).since(0).keys.tolist()) == [3, 4, 5]
