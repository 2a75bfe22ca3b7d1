"""Rows of several widths in one table: each slot's rows are those of a table of its own, bit for bit."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clickfleet import Table, _core
from clickfleet.errors import CheckpointError, ConfigError, TableError
from clickfleet.store import checkpoint
from clickfleet.store.rules import rule
from clickfleet.store.table import NO_SLOT, SlotRows, size_facts, width_facts
from reference import ModelTable, rows_of

F = np.float32
WIDTHS = {0: 3, 1: 9, 2: 1, 3: 3}
COMMON: dict[str, Any] = {
    "init": "uniform(-0.5, 0.5)",
    "embed_init": "normal(0.1)",
    "seed": 11,
    "decay_rate": 0.75,
    "delete_threshold": 0.1,
}
MIXED = {
    1: SlotRows(factors=9, rule=rule("adam", lr=0.01)),
    2: SlotRows(factors=1, admission="count(3)"),
    3: SlotRows(embed_rule=rule("sgd", lr=0.02), admission="score(0.6)"),
}
WIDE = {1: SlotRows(factors=9), 2: SlotRows(factors=1)}


def mixed(slots: Any = MIXED, **settings: Any) -> Table:
    return Table(factors=3, rule=rule("adagrad", lr=0.05), slots=slots, **{**COMMON, **settings})


def alone(slot: int, slots: Any = MIXED, **settings: Any) -> Table:
    """A table for the rows of one slot only."""
    own = slots.get(slot, SlotRows())
    return Table(
        factors=3 if own.factors is None else own.factors,
        rule=own.rule or rule("adagrad", lr=0.05),
        embed_rule=own.embed_rule,
        admission=own.admission,
        **{**COMMON, **settings},
    )


def some(rng: np.random.Generator, width: int, most: int = 400) -> dict[str, Any]:
    """A push. The slot of a key is its remainder by 4."""
    keys = rng.integers(0, 300, rng.integers(1, most)).astype(np.uint64)
    return {
        "keys": keys,
        "grads": rng.normal(size=(len(keys), width)).astype(F),
        "show": rng.integers(0, 3, len(keys)).astype(F),
        "click": rng.integers(0, 2, len(keys)).astype(F),
        "slots": (keys % 4).astype(np.uint16),
        "n": float(len(keys)),
    }


def part(push: dict[str, Any], slot: int, width: int) -> dict[str, Any]:
    own = push["slots"] == slot
    columns = {name: value[own] if isinstance(value, np.ndarray) else value for name, value in push.items()}
    return {**columns, "grads": np.ascontiguousarray(columns["grads"][:, : 1 + width])}


@pytest.mark.parametrize("slots", [MIXED, WIDE], ids=["rules", "widths"])
@pytest.mark.parametrize("seed", range(2))
def test_every_slot_has_the_rows_of_its_own_table(slots: Any, seed: int, tmp_path: Path) -> None:
    """A random history of all operations, compared with one table per slot and with NumPy."""
    rng = np.random.default_rng(seed)
    table, apart = mixed(slots), [alone(slot, slots) for slot in WIDTHS]
    models = [ModelTable(one) for one in apart]
    everything, births = np.arange(330, dtype=np.uint64), slots is WIDE
    for turn in range(25):
        push = some(rng, 1 + table.factors)
        table.push(**push)
        for slot, one in enumerate(apart):
            own = part(push, slot, one.factors)
            if len(own["keys"]):
                one.push(**own)
                models[slot].push(own["keys"].tolist(), own["grads"], own["show"], own["click"], own["n"])
        match rng.integers(7):
            case 0:
                assert table.shrink() == sum(one.shrink() for one in apart)
                [model.shrink() for model in models]
            case 1:
                table.end_day()
                [one.end_day() for one in apart]
                [model.end_day() for model in models]
            case 2:
                path = checkpoint.save(table, tmp_path / f"save-{turn}", files=4)
                again = checkpoint.save(checkpoint.load(path), tmp_path / f"again-{turn}", files=4)
                same_files(path, again)
                table = checkpoint.load(path)
            case 3:
                path = checkpoint.save(table, tmp_path / f"parts-{turn}", files=4)
                parts = [rows_of(checkpoint.load(path, shard=i, shards=3).snapshot()) for i in range(3)]
                assert parts[0] | parts[1] | parts[2] == rows_of(table.snapshot())
        for training in (False, True) if turn % 5 == 4 else ():
            found = table.pull(everything, training=training)
            for slot, one in enumerate(apart):
                keys, width = everything[everything % 4 == slot], one.factors
                rows, known = found[everything % 4 == slot], one.known(keys)
                expected = one.pull(keys, training=training)
                if not births:  # unknown keys have zero factors: not all slots admit at birth
                    expected[~known, 1:] = 0
                np.testing.assert_array_equal(rows[:, : 1 + width], expected)
                assert not rows[known, 1 + width :].any()
                reference = np.array([models[slot].pull(int(key), training) for key in keys[known]])
                np.testing.assert_allclose(
                    rows[known, : 1 + width], reference.reshape(-1, 1 + width), rtol=1e-3, atol=1e-4
                )
    rows = rows_of(table.snapshot())
    expected_rows: dict[Any, Any] = {}
    for one in apart:
        expected_rows |= rows_of(one.snapshot())
    assert rows == expected_rows


def same_files(a: Path, b: Path) -> None:
    for file in sorted(a.iterdir()):
        assert file.read_bytes() == (b / file.name).read_bytes(), file.name


def test_rows_on_disk_are_those_in_memory(tmp_path: Path) -> None:
    where: dict[str, Any] = {"memory_limit": 8 << 20, "snapshot_reserve": 1 << 20, "disk": tmp_path / "rows"}
    limited, unlimited = mixed(**where), mixed()
    rng = np.random.default_rng(5)
    for turn in range(12):
        keys = rng.integers(0, 150_000, 20_000).astype(np.uint64)
        grads = rng.normal(size=(len(keys), 10)).astype(F)
        for table in (limited, unlimited):
            table.push(keys, grads, slots=(keys % 4).astype(np.uint16))
        np.testing.assert_array_equal(limited.pull(keys), unlimited.pull(keys))
        if turn == 6:
            assert limited.shrink() == unlimited.shrink()
            limited = checkpoint.load(checkpoint.save(limited, tmp_path / "saved"), **where)
    stats, facts = limited.stats(), width_facts(limited.stats())
    assert stats["disk_rows"] > 20_000
    assert sum(one["disk_rows"] for one in facts.values()) == stats["disk_rows"]
    assert sum(one["rows"] + one["disk_rows"] for one in facts.values()) == stats["rows"] == len(unlimited)
    assert facts[9]["disk_bytes_per_row"] > facts[3]["disk_bytes_per_row"] > facts[0]["disk_bytes_per_row"]
    assert rows_of(limited.snapshot()) == rows_of(unlimited.snapshot())


def test_rows_take_the_memory_of_their_own_width() -> None:
    table = mixed(WIDE, snapshot_reserve=0)
    keys = np.arange(200_000, dtype=np.uint64)
    slots = np.where(keys % 10 == 0, 1, 2).astype(np.uint16)
    table.push(keys, np.zeros((len(keys), 10), F), slots=slots)
    facts, stats = width_facts(table.stats()), table.stats()
    assert {width: one["rows"] for width, one in facts.items()} == {1: 180_000, 9: 20_000}
    assert sum(one["bytes"] for one in facts.values()) <= stats["bytes"]
    kinds = {factors: size for factors, _, _, size, _ in table.core.kinds if factors}
    for width, one in facts.items():
        assert kinds[width] <= one["bytes_per_row"] <= 2.2 * kinds[width]
    whole = Table(factors=9, rule=rule("adagrad"), **COMMON)
    whole.push(keys, np.zeros((len(keys), 10), F))
    assert stats["bytes"] < 0.8 * whole.stats()["bytes"]
    assert size_facts(stats)["table_width_9_rows"] == 20_000
    assert "table_width_9_rows" not in size_facts(whole.stats())


def test_a_row_keeps_its_width() -> None:
    """A key that two slots share has the width of the slot in which it was first learned."""
    table = mixed(WIDE)
    key = np.array([77], np.uint64)
    grads = np.ones((1, 10), F)
    table.push(key, grads, slots=np.array([2], np.uint16))
    table.push(key, grads, slots=np.array([1], np.uint16))
    assert not table.pull(key)[0, 2:].any()
    (row,) = rows_of(table.snapshot()).values()
    assert row["slot"] == (2,)
    table.push(np.array([78], np.uint64), grads)
    assert np.flatnonzero(table.pull(np.array([78], np.uint64))[0]).max() == 3  # no slot: the usual width


@pytest.mark.parametrize("on_disk", [False, True])
def test_slots_are_only_a_hint_to_a_pull(on_disk: bool, tmp_path: Path) -> None:
    where: dict[str, Any] = {"memory_limit": 8 << 20, "snapshot_reserve": 1 << 20, "disk": tmp_path / "rows"}
    table = mixed(**where) if on_disk else mixed()
    keys = np.random.default_rng(3).permutation(100_000).astype(np.uint64)
    right = (keys % 4).astype(np.uint16)
    table.push(keys, np.ones((len(keys), 10), F), slots=right)
    assert not on_disk or table.stats()["disk_rows"] > 10_000
    for asked in (keys[:20_000], keys[:5], keys[:3000] + np.uint64(99_000)):  # the last ones are partly new
        expected = table.pull(asked)
        for slots in (asked % 4, (asked + 1) % 4, asked % 7 + 3, np.full(len(asked), NO_SLOT)):
            np.testing.assert_array_equal(table.pull(asked, slots=slots.astype(np.uint16)), expected)
    with pytest.raises(TableError, match="slots"):
        table.pull(keys, slots=right[1:])
    # A push that names another slot than before finds the row too.
    rows = len(table)
    table.push(keys, np.ones((len(keys), 10), F), slots=(right + 1) % 4)
    assert len(table) == rows


def test_eviction_and_changes_cover_all_widths(tmp_path: Path) -> None:
    table = mixed(WIDE, memory_limit=6 << 20, delete_threshold=0.0)
    rng = np.random.default_rng(3)
    published: dict[int, np.ndarray] = {}
    for turn in range(30):
        keys = rng.integers(0, 90_000, 6_000).astype(np.uint64)
        table.push(keys, rng.normal(size=(len(keys), 10)).astype(F), slots=(keys % 4).astype(np.uint16))
        assert table.stats()["bytes"] <= 6 << 20
        changes = table.cut_changes(base=turn == 0)
        for columns in changes:
            width = len(columns["embedx"]) // len(columns["key"])
            assert {WIDTHS[slot] for slot in columns["slot"].tolist()} == {width}
            hashes = np.empty(len(columns["key"]), np.uint64)
            _core.mix64(columns["key"], hashes)
            assert (hashes[1:] > hashes[:-1]).all()
            for i, key in enumerate(columns["key"].tolist()):
                published[key] = np.append(columns["embed_w"][i], columns["embedx"][i * width : (i + 1) * width])
        for key in changes.deleted.tolist():
            published.pop(key, None)
        changes.commit()
    assert table.stats()["evicted"] > 0
    keys = np.array(sorted(published), np.uint64)
    assert table.known(keys).all()
    assert len(keys) == len(table)
    padded = np.array([np.pad(published[int(key)], (0, 10 - len(published[int(key)]))) for key in keys])
    np.testing.assert_array_equal(table.pull(keys), padded)
    # With the same limit, a loaded table evicts the same rows.
    path = checkpoint.save(table, tmp_path / "saved")
    loaded = checkpoint.load(path)
    for one in (table, loaded):
        for turn in range(5):
            keys = np.random.default_rng(turn).integers(0, 90_000, 6_000).astype(np.uint64)
            one.push(keys, np.ones((len(keys), 10), F), slots=(keys % 4).astype(np.uint16))
    assert rows_of(table.snapshot()) == rows_of(loaded.snapshot())


def test_a_description_gives_the_same_table() -> None:
    table = mixed()
    again = Table.like(table.describe())
    assert again.describe() == table.describe()
    assert again.classes == table.classes
    assert table.describe()["factors"] == 3
    assert table.factors == 9
    assert not table.at_birth
    assert "slots" not in mixed({1: SlotRows(factors=3)}).describe()
    assert table.class_of(np.array([0, 1, 2, 3, 4, NO_SLOT], np.uint16)).tolist() == [0, 1, 2, 3, 0, 0]


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match="between 0 and 65536"):
        mixed({1: SlotRows(factors=-1)})
    with pytest.raises(ConfigError, match="more than 16 different widths"):
        mixed({slot: SlotRows(factors=slot) for slot in range(20)})
    with pytest.raises(ConfigError, match="not a number from 0"):
        mixed({NO_SLOT: SlotRows(factors=1)})
    with pytest.raises(TableError, match="memory_limit is too small"):
        mixed(WIDE, memory_limit=1 << 19)
    with pytest.raises(TableError, match="several widths in place"):
        _core.InPlace(mixed(WIDE).core, np.empty(0, np.uint64))


def test_rows_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    table = mixed(WIDE)
    push = some(np.random.default_rng(0), 10)
    table.push(**push)
    path = checkpoint.save(table, tmp_path / "saved")
    with pytest.raises(CheckpointError, match="embedx does not fit the table"):
        checkpoint.load(path, slots={"1": {**table.describe()["slots"]["1"], "factors": 8}})
    moved = checkpoint.load(path, slots=mixed({1: SlotRows(factors=9), 2: SlotRows(factors=1)}).describe()["slots"])
    assert rows_of(moved.snapshot()) == rows_of(table.snapshot())
    columns = next(part for part in table.snapshot() if part["kind"] == 3)
    narrow = {**columns, "embedx": columns["embedx"][: 3 * len(columns["key"])]}
    with pytest.raises(ValueError, match="another width than its slot"):
        table.core.restore(1, *(narrow[name] for name in checkpoint.ROWS.names), 0, 1024)
