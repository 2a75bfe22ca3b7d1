"""Every entry point of the core refuses arrays that do not fit each other, instead of reading past their ends."""

from collections.abc import Callable
from enum import Enum

import numpy as np
import pytest

from clickfleet import _core
from clickfleet.errors import TableError
from clickfleet.store.table import Table

INT, U, U4, F, D, B = np.int64, np.uint64, np.uint32, np.float32, np.float64, np.uint8
WILD = np.array([0, 2**63 - 1, -(2**63), -1, 1, 2, 2], INT)
"""Offsets whose differences overflow to values that look harmless."""


def keys(n: int) -> np.ndarray:
    return np.arange(n, dtype=U)


def floats(*shape: int) -> np.ndarray:
    return np.zeros(shape, F)


def layout(*, label: bool = True) -> "_core.Layout":
    made = _core.Layout(_core.KeyRule.hash64, 1)
    made.label = label
    made.add_dense("x", _core.Scale.none, 0.0, 1.0, 0.0)
    made.add_slot("s", False, "s")
    return made


def keys_only(slots: int = 1) -> "_core.Layout":
    made = _core.Layout(_core.KeyRule.hash64, 1)
    for slot in range(slots):
        made.add_slot(str(slot), False, str(slot))
    return made


def bucketed() -> "_core.Layout":
    made = layout()
    made.add_bucket(0, 0, 0.0, 1.0, 4, [], 0)
    return made


def four_of_each(*, named: bool = True) -> "_core.Fields":
    """Inputs whose number times 2^62 rows wraps to 0. Without names, a request has no columns."""
    made = _core.Layout(_core.KeyRule.hash64, 1)
    for i in range(4):
        made.add_dense(f"x{i}", _core.Scale.none, 0.0, 1.0, 0.0)
        made.add_slot(f"s{i}", True, f"s{i}")
        made.add_bucket(i, i, 0.0, 1.0, 4, [], 0)
    dense = [(f"x{i}", [i]) for i in range(4)] if named else []
    return _core.Fields(made, dense, [(f"s{i}", -1 if named else i) for i in range(4)])


two = np.array([0, 1, 2], INT)
"""The offsets of one row with a key in each of two columns."""


def find_events(offsets=two, first=0, count=2, rows=1, keys_given=2) -> object:
    numbers = [np.zeros(rows, INT) for _ in range(3)]
    return _core.find_events(offsets, np.zeros(keys_given, U4), None, 2, first, count, *numbers)


NOWHERE = np.zeros(2, U4)


def gather(offsets=two, where=NOWHERE, columns=2, first=0, origin=None, out=None) -> None:
    origin = np.zeros(1, INT) if origin is None else origin
    _core.gather(offsets, where, None, columns, first, origin, floats(1, 3), floats(1, 1, 2, 2) if out is None else out)


def passes(start: int = 0, length: int = 2) -> list[np.ndarray]:
    """One pass over packed events: its first event, its first place, and its length."""
    return [np.array([number], INT) for number in (start, start, length)]


def gru_backward(length=2, d_last=None, d_gates=None, d_recurrent=None, d_factors=None) -> None:
    _core.gru_backward(
        floats(2, 6), floats(6, 2), None, *passes(0, length), floats(2, 2), floats(2, _core.gru_kept(2)), None, d_last,
        floats(2, 6) if d_gates is None else d_gates, floats(6, 2) if d_recurrent is None else d_recurrent, d_factors, False,
    )  # fmt: skip


def cells(*offsets: int) -> tuple[np.ndarray, np.ndarray]:
    """Where the keys of each cell start and end."""
    return np.array(offsets[:-1], INT), np.array(offsets[1:], INT)


def of_list(n: int, width: int = 1) -> "_core.RequestColumn":
    return _core.RequestColumn.of_list(["a"] * n, width)


def jagged() -> "_core.RequestColumn":
    """A column of two rows."""
    column = of_list(3)
    column.split(np.array([1, 2], INT), False)
    return column


def core_table(**changes: object) -> "_core.Table":
    """A table with changed settings of its rows."""
    config = Table(factors=2).core_config("")
    (rows,) = config["classes"]
    return _core.Table({**config, "classes": [{**rows, **changes}]})


def layer(factors: int = 2) -> "_core.FrozenLayer":
    full = [(keys(1), floats(1), floats(1, factors))]
    return _core.FrozenLayer(full, [], keys(0), full)


def bytes_(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.uint8)


def small_layer(form: str = "int8", factors: int = 2, records: np.ndarray | None = None) -> "_core.FrozenLayer":
    full = [(keys(1), bytes_(1, 5) if records is None else records)]
    return _core.FrozenLayer.small(form, factors, full, [], keys(0), full)


def words() -> "_core.Words":
    return _core.Words(keys(2), keys(2) + np.uint64(2), np.ones(2), np.ones(2))


def pairs() -> "_core.Pairs":
    drawn = _core.Pairs(words(), 1, 1)
    drawn.draw(np.array([0, 1], U), np.array([0, 2, 2], INT), 2, 7)
    return drawn


def moved() -> None:
    drawn = pairs()
    n = drawn.gather()
    drawn.draw(np.array([0, 1], U), np.array([0, 2, 2], INT), 2, 8)  # other pairs than were gathered
    drawn.gradient(floats(n, 3), False, floats(n, 3))


def core(**settings: object) -> "_core.Table":
    return Table(factors=2, **settings).core


def rows_of(core: "_core.Table", **other: np.ndarray) -> None:
    n = 2
    made = {
        "key": keys(n), "slot": np.zeros(n, np.uint16), "show": np.zeros(n), "click": np.zeros(n), "days": np.zeros(n, np.uint16),
        "score": floats(n), "published": np.zeros(n, B), "w": floats(n), "state": floats(n * core.kinds[1][1]),
        "x": floats(n * 2), "x_state": floats(n * core.kinds[1][2]),
    }  # fmt: skip
    core.restore(1, *{**made, **other}.values(), 0, 1024)


def split(owner: int, starts: int) -> None:
    owners = np.full(_core.VIRTUAL_SHARDS, owner, np.uint16)
    _core.split(keys(2), owners, keys(2), np.zeros(2, U4), np.zeros(starts, INT))


def memory(size: int = 0) -> list[int]:
    return [size] * (6 * 32) + [0]


SLOT = np.zeros(1, np.uint16)

WRONG: dict[str, Callable[[], object]] = {
    # offsets and indices
    "pool: wild offsets": lambda: _core.pool(WILD, np.zeros(2, U4), None, None, 2, floats(1, 3), floats(3, 2), floats(3, 2, 2)),
    "pool: key outside rows": lambda: _core.pool(two, np.array([0, 1], U4), None, None, 2, floats(1, 3), floats(1, 2), floats(1, 2, 2)),
    "pool: past the keys": lambda: _core.pool(two * 9, np.zeros(2, U4), None, None, 2, floats(1, 3), floats(1, 2), floats(1, 2, 2)),
    "pool: no offsets": lambda: _core.pool(two[:0], np.zeros(2, U4), None, None, 2, floats(1, 3), floats(1, 2), floats(1, 2, 2)),
    "pool: narrow rows": lambda: _core.pool(two, np.zeros(2, U4), None, None, 2, floats(1, 2), floats(1, 2), floats(1, 2, 2)),
    "pool: few values": lambda: _core.pool(two, np.zeros(2, U4), floats(1), None, 2, floats(1, 3), floats(1, 2), floats(1, 2, 2)),
    "pool: few means": lambda: _core.pool(two, np.zeros(2, U4), None, np.zeros(1, B), 2, floats(1, 3), floats(1, 2), floats(1, 2, 2)),
    "pool: small output": lambda: _core.pool(two, np.zeros(2, U4), None, None, 2, floats(1, 3), floats(1, 2), floats(1, 1, 2)),
    "unpool: wild offsets": lambda: _core.unpool(WILD, np.zeros(2, U4), None, None, 2, floats(3, 2), floats(3, 2, 2), floats(1, 3)),
    "unpool: key outside": lambda: _core.unpool(two, np.array([0, 9], U4), None, None, 2, floats(1, 2), floats(1, 2, 2), floats(1, 3)),
    "count: wild offsets": lambda: _core.count(WILD, np.zeros(2, U4), 2, None, None, None, floats(1), floats(1), np.zeros(1, np.uint16)),
    "count: few shows": lambda: _core.count(two, np.zeros(2, U4), 1, floats(1), None, None, floats(1), floats(1), np.zeros(1, np.uint16)),
    "count: few clicks out": lambda: _core.count(two, np.zeros(2, U4), 1, None, None, None, floats(1), floats(0), np.zeros(1, np.uint16)),
    "count: few numbers": lambda: _core.count(two, NOWHERE, 1, None, None, np.zeros(2, np.uint16), floats(1), floats(1), SLOT),
    "find_events: wild offsets": lambda: find_events(offsets=WILD, rows=3),
    "find_events: columns": lambda: find_events(first=2),
    "find_events: no column": lambda: find_events(count=0),
    "find_events: rows": lambda: find_events(rows=2),
    "find_events: unequal": lambda: find_events(offsets=np.array([0, 2, 2], INT), keys_given=2),
    "gather: key outside": lambda: gather(where=np.array([0, 9], U4)),
    "gather: row outside": lambda: gather(origin=np.array([1], INT)),
    "gather: negative row": lambda: gather(origin=np.array([-1], INT)),
    "gather: long history": lambda: gather(offsets=np.array([0, 2], INT), columns=1, out=floats(1, 1, 1, 2)),
    "gather: width": lambda: gather(out=floats(1, 1, 2, 1)),
    "gather: columns": lambda: gather(first=1),
    "gather: histories": lambda: gather(out=floats(2, 1, 2, 2)),
    "scatter: row outside": lambda: _core.scatter(two, np.zeros(2, U4), None, 2, 0, np.array([7], INT), floats(1, 1, 2, 2), floats(1, 3)),
    "scatter: width": lambda: _core.scatter(two, np.zeros(2, U4), None, 2, 0, np.zeros(1, INT), floats(1, 1, 2, 2), floats(1, 2)),
    "Layout.add_history: columns": lambda: keys_only().add_history(2, 3, True),
    "Layout.add_history: single": lambda: keys_only().add_history(1, 3, True),
    "take_rows": lambda: _core.take_rows(np.array([3], U4), floats(3, 2), floats(1, 2)),
    "take_rows: width": lambda: _core.take_rows(np.array([0], U4), floats(3, 2), floats(1, 1)),
    "take_rows: room": lambda: _core.take_rows(np.zeros(3, U4), floats(3, 2), floats(1, 2)),
    "put_rows": lambda: _core.put_rows(np.array([3], U4), floats(1, 2), floats(3, 2)),
    "add_rows": lambda: _core.add_rows(np.array([0, 0], U4), floats(1, 2), floats(3, 2)),
    "split: owner": lambda: split(2, 3),
    "split: no starts": lambda: split(0, 0),
    "pack_rows": lambda: _core.pack_rows(np.array([7], U4), keys(1), floats(1, 1), floats(1), floats(1), SLOT, np.zeros(22, B)),
    "unique_into": lambda: _core.unique_into(keys(2), keys(1), np.zeros(2, U4)),
    "mix64": lambda: _core.mix64(keys(4), keys(3)),
    # the table
    "Table.pull: rows": lambda: core().pull(keys(4), True, floats(3, 3)),
    "Table.pull: width": lambda: core().pull(keys(4), True, floats(4, 2)),
    "Table.push: grads": lambda: core().push(keys(4), floats(3, 3), None, None, None, 1.0, False),
    "Table.push: show": lambda: core().push(keys(4), floats(4, 3), floats(3), None, None, 1.0, False),
    "Table.push: slots": lambda: core().push(keys(4), floats(4, 3), None, None, np.zeros(3, np.uint16), 1.0, False),
    "Table.push: move": lambda: core().push(keys(4), floats(4, 3), None, None, None, 1.0, False, 3),
    "Table.known": lambda: core().known(keys(4), np.zeros(3, B)),
    "Table.restore: factors": lambda: rows_of(core(), x=floats(3)),
    "Table.restore: state": lambda: rows_of(core(), state=floats(0)),
    "Table.restore: slots": lambda: rows_of(core(), slot=np.zeros(1, np.uint16)),
    "Table.reserve": lambda: core().reserve([2**64 - 1, 2**63]),
    "Table.reserve: kinds": lambda: core().reserve([1, 2, 3]),
    "Table.prepare: numbers": lambda: core(memory_limit=1 << 26).prepare([0] * 5),
    "Table.prepare: too much": lambda: core(memory_limit=1 << 26).prepare(memory(1 << 40)),
    "Table.prepare: no limit": lambda: core().prepare(memory(1)),
    "Table.settle: numbers": lambda: core(memory_limit=1 << 26).settle([]),
    "Table.settle: too much": lambda: core(memory_limit=1 << 26).settle(memory(1 << 20)),
    "Table: factors": lambda: core_table(factors=-5),
    "Table: admission": lambda: core_table(admission="no such way"),
    "Table: no class": lambda: _core.Table({**Table(factors=2).core_config(""), "classes": []}),
    "Table: slot of no class": lambda: _core.Table({**Table(factors=2).core_config(""), "slot_class": [1]}),
    "Cut: kind": lambda: _core.Cut(core(), "all", 1),
    "Cut: no files": lambda: _core.Cut(core(), "snapshot", 0),
    "Cut: files": lambda: _core.Cut(core(), "snapshot", 3),
    "rule_state: name": lambda: _core.rule_state("none such", {}, floats(1)),
    "apply_rule: level": lambda: _core.apply_rule("sgd", {"lr": 1.0}, floats(1), floats(0), floats(1), 1.0, -1.0, 1.0, "avx1024"),
    "apply_rule: gradient": lambda: _core.apply_rule("sgd", {"lr": 1.0}, floats(9), floats(0), floats(1), 1.0, -1.0, 1.0, "base"),
    # published rows
    "FrozenRows.inputs: wild cells": lambda: _core.FrozenRows((layer(),), 2).inputs(
        keys(2), *cells(0, 2**63 - 1, -(2**63), -1, 1, 2, 2), None, None, [], 9, floats(3, 2), floats(3, 2, 2)
    ),
    "FrozenRows.inputs: falling": lambda: _core.FrozenRows((layer(),), 2).inputs(
        keys(2), *cells(0, 2, 1), None, None, [], 9, floats(1, 2), floats(1, 2, 2)
    ),
    "FrozenRows.inputs: rows": lambda: _core.FrozenRows((layer(),), 2).inputs(
        keys(2), *cells(0, 1, 2), None, None, [], 9, floats(2, 2), floats(2, 2, 2)
    ),
    "FrozenRows.inputs: histories": lambda: _core.FrozenRows((layer(),), 2).inputs(
        keys(2), *cells(0, 1, 2), None, None, [(0, 1)], 9, floats(1, 1), floats(1, 1, 2)
    ),
    "FrozenRows.inputs: unequal": lambda: _core.FrozenRows((layer(),), 2).inputs(
        keys(3), *cells(0, 1, 3), None, None, [(0, 2)], 9, floats(1, 0), floats(1, 0, 2)
    ),
    "FrozenRows.inputs: too long": lambda: _core.FrozenRows((layer(),), 2).inputs(
        keys(2), *cells(0, 2), None, None, [(0, 1)], 1, floats(1, 0), floats(1, 0, 2)
    ),
    "assemble: where": lambda: _core.assemble(
        np.array([0, 2], np.uint32), floats(2, 3), *cells(0, 1, 2), None, None, [], 9, floats(1, 2), floats(1, 2, 2)
    ),
    "assemble: width": lambda: _core.assemble(
        np.array([0, 1], np.uint32), floats(2, 4), *cells(0, 1, 2), None, None, [], 9, floats(1, 2), floats(1, 2, 2)
    ),
    "FrozenRows.read: width": lambda: _core.FrozenRows((layer(),), 2).read(keys(2), floats(2, 2)),
    "FrozenRows.known": lambda: _core.FrozenRows((layer(),), 2).known(keys(2), np.zeros(1, B)),
    "FrozenRows: width": lambda: _core.FrozenRows((layer(3),), 2),
    "FrozenRows: none": lambda: _core.FrozenRows((None,), 2),
    "FrozenLayer: lengths": lambda: _core.FrozenLayer([(keys(2), floats(1), floats(2, 2))], [], keys(0), None),
    "FrozenLayer: one key, two widths": lambda: _core.FrozenLayer([(keys(1), floats(1), floats(1, n)) for n in (1, 2)], [], keys(0), None),
    "FrozenLayer: no width": lambda: _core.FrozenLayer([(keys(1), floats(1), floats(1, 0))], [], keys(0), None),
    "FrozenLayer.small: unknown": lambda: small_layer(form="int4"),
    "FrozenLayer.small: float32": lambda: small_layer(form="float32"),
    "FrozenLayer.small: lengths": lambda: small_layer(records=bytes_(2, 5)),
    "FrozenLayer.small: size": lambda: small_layer(records=bytes_(1, 6)),
    "FrozenLayer.small: no factors": lambda: small_layer(factors=0, records=bytes_(1, 2)),
    "merge_records: none": lambda: _core.merge_records([None], 2, 0, 2**64 - 1, True),
    "merge_records: floats": lambda: _core.merge_records([layer()], 2, 0, 2**64 - 1, True),
    "merge_records: mixed": lambda: _core.merge_records([layer(), small_layer()], 2, 0, 2**64 - 1, True),
    "merge_records: width": lambda: _core.merge_records([small_layer()], 1, 0, 2**64 - 1, True),
    "pack_rows: unknown": lambda: _core.pack_rows("int4", floats(1), floats(2), 2),
    "pack_rows: width": lambda: _core.pack_rows("int8", floats(2), floats(2), 2),
    "pack_rows: wide": lambda: _core.pack_rows("int8", floats(0), floats(0), 1 << 62),
    "unpack_rows: unknown": lambda: _core.unpack_rows("int4", bytes_(1, 5), floats(1, 3)),
    "unpack_rows: rows": lambda: _core.unpack_rows("int8", bytes_(1, 5), floats(2, 3)),
    "unpack_rows: size": lambda: _core.unpack_rows("int8", bytes_(1, 4), floats(1, 3)),
    "unpack_rows: nothing": lambda: _core.unpack_rows("int8", bytes_(1, 4), floats(1, 0)),
    "round_rows: unknown": lambda: _core.round_rows("int4", floats(1, 3)),
    "round_rows: nothing": lambda: _core.round_rows("int8", floats(1, 0)),
    "merge_frozen: none": lambda: _core.merge_frozen([None], 2, 0, 2**64 - 1, True),
    "merge_frozen: width": lambda: _core.merge_frozen([layer(3)], 2, 0, 2**64 - 1, True),
    # columns and plans
    "Layout.text_keys: falling": lambda: layout().text_keys(0, np.array([0, 5, 2], np.int32), np.zeros(8, B), np.zeros((2, 1), U)),
    "Layout.text_keys: negative": lambda: layout().text_keys(0, np.array([-9, 1, 2], np.int32), np.zeros(8, B), np.zeros((2, 1), U)),
    "Layout.group_keys: outside": lambda: layout().group_keys(np.array([0, 99], np.int32), np.zeros(8, B), np.zeros((1, 1), U)),
    "Layout.integer_keys: slot": lambda: layout().integer_keys(1, np.zeros(2, INT), np.zeros((2, 1), U)),
    "Layout.integer_keys: room": lambda: layout().integer_keys(0, np.zeros(2, INT), np.zeros((1, 1), U)),
    "Layout.dense_values: column": lambda: layout().dense_values(1, np.zeros(2), floats(2, 1)),
    "Layout.dense_values: room": lambda: layout().dense_values(0, np.zeros(2), floats(1, 1)),
    "Layout.bucket_keys: bucket": lambda: layout().bucket_keys(floats(2, 1), np.zeros((2, 1), U), 0),
    "Layout.bucket_keys: width": lambda: bucketed().bucket_keys(floats(2, 0), np.zeros((2, 1), U), 0),
    "Layout.missing_key": lambda: layout().missing_key(1),
    "weave: index": lambda: _core.weave([(keys(2), np.array([0, -1], np.int32))], np.zeros((2, 1), U)),
    "weave: rows": lambda: _core.weave([(keys(2), None)], np.zeros((3, 1), U)),
    "weave: columns": lambda: _core.weave([(keys(2), None)], np.zeros((2, 2), U)),
    "PrintColumn: ends": lambda: _core.PrintColumn(np.zeros(2, B), ends=np.array([0, 3], np.int32)),
    "PrintColumn: starts": lambda: _core.PrintColumn(np.zeros(2), starts=np.array([0, 2**63 - 1, -(2**63)], INT)),
    "PrintColumn: weights": lambda: _core.PrintColumn(np.zeros(2), weights=floats(1)),
    "PrintColumn: present": lambda: _core.PrintColumn(np.zeros(2), present=np.zeros(1, B)),
    "PrintColumn: digits": lambda: _core.PrintColumn(np.zeros(2), digits=400),
    "print_rows": lambda: _core.print_rows([_core.PrintColumn(np.zeros(n)) for n in (1, 2)], "\t"),
    "Layout.add_bucket: no column": lambda: layout().add_bucket(0, 7, 0.0, 1.0, 4, [], 0),
    "Layout.add_bucket: no slot": lambda: layout().add_bucket(7, 0, 0.0, 1.0, 4, [], 0),
    "Layout.add_bucket: limits": lambda: layout().add_bucket(0, 0, 1.0, 1.0, 4, [], 0),
    "Delimited: slot": lambda: _core.Delimited(layout(), [[(_core.Role.slot, 5)]], "\t", "\0", False),
    "Delimited: dense": lambda: _core.Delimited(layout(), [[(_core.Role.dense, -1)]], "\t", "\0", False),
    "Delimited: no label": lambda: _core.Delimited(
        layout(label=False), [[(_core.Role.label, 0)], [(_core.Role.dense, 0)], [(_core.Role.slot, 0)]], "\t", "\0", False
    ),
    "Delimited: nothing fills it": lambda: _core.Delimited(layout(), [[(_core.Role.label, 0)]], "\t", "\0", False),
    "Slotted: group": lambda: _core.Slotted(layout(), _core.Token.name_value, [[0]], [("x", _core.Role.dense, 1)]),
    "Slotted: column": lambda: _core.Slotted(layout(), _core.Token.name_value, [[4]], []),
    "Slotted: time": lambda: _core.Slotted(layout(), _core.Token.name_value, [[0]], [("t", _core.Role.time, 0)]),
    "Weighted: dense": lambda: _core.Weighted(layout(), _core.Grammar.positions, []),
    "Weighted: slot": lambda: _core.Weighted(keys_only(), _core.Grammar.spaces, [("a", _core.Role.slot, 1)]),
    "Weighted: time": lambda: _core.Weighted(keys_only(), _core.Grammar.bag, [("qid", _core.Role.time, 0)]),
    "Weighted: slots": lambda: _core.Weighted(keys_only(2), _core.Grammar.bag, []),
    "text_times: room": lambda: _core.text_times(np.array([0, 1, 2], np.int32), np.zeros(2, B), np.zeros(1, INT)),
    "text_times: outside": lambda: _core.text_times(np.array([0, 99], np.int32), np.zeros(2, B), np.zeros(1, INT)),
    "text_times: falling": lambda: _core.text_times(np.array([0, 2, 1], np.int64), np.zeros(2, B), np.zeros(2, INT)),
    "MultiSlot: width": lambda: _core.MultiSlot(layout(), [[0]], [([(_core.Role.dense, 0)], 2)]),
    "Fields: place": lambda: _core.Fields(layout(), [("x", [1])], [("s", -1)]),
    "Fields: bucket": lambda: _core.Fields(layout(), [("x", [0])], [("s", 0)]),
    "Fields: slots": lambda: _core.Fields(layout(), [("x", [0])], [("s", -1), ("t", -1)]),
    "Fields.columns: none": lambda: _core.Fields(layout(), [("x", [0])], [("s", -1)]).columns([None, None], 1),
    "Fields.columns: product": lambda: _core.Fields(layout(), [("x", [0])], [("s", -1)]).columns(
        [_core.RequestColumn.of_list([], 4)] * 2, 2**62
    ),
    "Fields.columns: product without values": lambda: four_of_each().columns([_core.RequestColumn.of_list([], 0)] * 8, 2**62),
    "Fields.columns: product without columns": lambda: four_of_each(named=False).columns([], 2**62),
    "RequestColumn.split: negative": lambda: of_list(3).split(np.array([-1, 4], INT), False),
    "RequestColumn.split: sum": lambda: of_list(3).split(np.array([1, 1], INT), False),
    "RequestColumn.split: wraps": lambda: of_list(3).split(np.array([2**63 - 1, 2**63 - 1, 5], INT), False),
    "RequestColumn.split: padded": lambda: of_list(4, 2).split(np.array([1, 3], INT), True),
    "RequestColumn.split: rows": lambda: of_list(4, 2).split(np.array([1, 1, 0], INT), True),
    "Fields.columns: split": lambda: _core.Fields(layout(), [("x", [0])], [("s", -1)]).columns([jagged()] * 2, 3),
    "RequestColumn.of_texts": lambda: _core.RequestColumn.of_texts(b"\xff\xff\xff\xffab", 1),
    "weave_lists: lengths": lambda: _core.weave_lists([(keys(2), None, np.zeros(1, INT), np.zeros(1, INT), None)], 2),
    "weave_lists: rows": lambda: _core.weave_lists([(keys(2), None, np.array([1], INT), np.array([2], INT), None)], 1),
    # metrics
    "Buckets: thresholds": lambda: _core.Buckets(-7),
    "Buckets.merge": lambda: _core.Buckets(1 << 20).merge(_core.Buckets(1)),
    "Slices.merge": lambda: _core.Slices(1 << 20, 4).merge(_core.Slices(1, 4)),
    "Buckets.update": lambda: _core.Buckets(8).update(floats(2), floats(1)),
    "Buckets.update: weights": lambda: _core.Buckets(8).update(floats(2), floats(2), floats(1)),
    "Buckets.write": lambda: _core.Buckets(8).write(np.zeros(1)),
    "Buckets.read": lambda: _core.Buckets(8).read(np.zeros(1)),
    "Slices: thresholds": lambda: _core.Slices(0, 4),
    "Slices.update": lambda: _core.Slices(8, 4).update(keys(1), floats(2), floats(2)),
    "Slices.write": lambda: _core.Slices(8, 4).write(0, False, np.zeros(1)),
    "Slices.read": lambda: _core.Slices(8, 4).read(0, False, np.zeros(1)),
    "Window.update": lambda: _core.Window(8, 2).update(floats(2), floats(1)),
    "Window.write": lambda: _core.Window(8, 2).write(np.zeros(1)),
    "Window.read": lambda: _core.Window(8, 2).read(np.zeros(1), 0),
    "Window: size": lambda: _core.Window(8, 0),
    "Groups.update": lambda: _core.Groups(8).update(keys(1), floats(2), floats(2)),
    "Groups.write": lambda: _core.Groups(8).write(keys(2), floats(1), floats(2)),
    "Groups.append: not a number": lambda: _core.Groups(8).append(keys(2), np.array([0.5, np.nan], F), floats(2), 0),
    # sets of keys and words
    "KeySet.has": lambda: _core.KeySet().has(keys(2), np.zeros(1, B)),
    "KeySet.copy": lambda: _core.KeySet().copy(keys(1)),
    "KeySet.insert": lambda: _core.KeySet().insert(keys(2), np.zeros(1, B)),
    "ShowColumns.read": lambda: _core.ShowColumns().read(0, 8, 0),
    "FrameAppender.append_show": lambda: _core.FrameAppender(-1, 9).append_show("predict", "r", 0, "m", 0, b"abc", b"{}"),
    "Touched.add": lambda: _core.Touched(3).add(keys(2), floats(2, 2), floats(2), floats(2), np.zeros(2, np.uint16)),
    "Touched.rebase": lambda: _core.Touched(3).rebase(keys(2), floats(2, 3), np.zeros(1, B)),
    "Touched.copy_keys": lambda: _core.Touched(3).copy_keys(keys(1)),
    "Touched.take": lambda: _core.Touched(3).take(floats(1, 3), floats(0), floats(0), np.zeros(0, np.uint16)),
    "Words: chances": lambda: _core.Words(keys(2), keys(2), np.array([1, np.nan]), np.ones(2)),
    "Words: no noise": lambda: _core.Words(keys(2), keys(2), np.ones(2), np.zeros(2)),
    "Pairs.draw: offsets": lambda: pairs().draw(keys(2), np.array([0, 9, 9], INT), 2, 7),
    "Pairs.draw: no slots": lambda: pairs().draw(keys(2), np.array([0, 2], INT), 0, 7),
    "Pairs: window": lambda: _core.Pairs(words(), 0, 2**32 - 1),
    "Pairs.gradient: not gathered": moved,
    "Pairs.move": lambda: pairs().move(floats(9, 3), 0.1, 0.1, False, (-1, 1), (-1, 1), floats(9, 3)),
    "Pairs.rows": lambda: (drawn := pairs()).gather() and drawn.rows(keys(0), floats(0), np.zeros(0, np.uint16)),
    "Pairs.take_counts": lambda: pairs().take_counts(floats(1), floats(2)),
    "Pairs.train: held": lambda: pairs().train(_core.InPlace(core(), keys(1)), 0.1, False, False),
    "add_bias_relu: bias": lambda: _core.add_bias_relu(floats(2, 9), floats(1)),
    "relu_backward: bias": lambda: _core.relu_backward(floats(2, 9), floats(2, 9), floats(1)),
    "relu_backward_of_product": lambda: _core.relu_backward_of_product(floats(1, 1), floats(1, 9), floats(2, 9), floats(2, 9), floats(9)),
    # recurrences
    "gru_forward: width": lambda: _core.gru_forward(floats(2, 5), floats(6, 2), None, *passes(), floats(2, 2), None),
    "gru_forward: no width": lambda: _core.gru_forward(floats(2, 0), floats(0, 0), None, *passes(), floats(2, 0), None),
    "gru_forward: states": lambda: _core.gru_forward(floats(2, 6), floats(6, 2), None, *passes(), floats(1, 2), None),
    "gru_forward: kept": lambda: _core.gru_forward(floats(2, 6), floats(6, 2), None, *passes(), floats(2, 2), floats(2, 1)),
    "gru_forward: factors": lambda: _core.gru_forward(floats(2, 6), floats(6, 2), floats(1), *passes(), floats(2, 2), None),
    "gru_forward: events": lambda: _core.gru_forward(floats(1, 6), floats(6, 2), None, *passes(), floats(2, 2), None),
    "gru_forward: wild": lambda: _core.gru_forward(floats(2, 6), floats(6, 2), None, *passes(2**63 - 1), floats(2, 2), None),
    "gru_forward: negative": lambda: _core.gru_forward(floats(2, 6), floats(6, 2), None, *passes(0, -1), floats(2, 2), None),
    "gru_backward: events": lambda: gru_backward(length=3),
    "gru_backward: last": lambda: gru_backward(d_last=floats(2, 2)),
    "gru_backward: gates": lambda: gru_backward(d_gates=floats(1, 6)),
    "gru_backward: recurrent": lambda: gru_backward(d_recurrent=floats(2, 2)),
    "gru_backward: factors": lambda: gru_backward(d_factors=floats(1)),
    "attend: queries": lambda: _core.attend(floats(2, 2), floats(2, 2), *passes(), floats(2)),
    "attend: places": lambda: _core.attend(floats(2, 2), floats(1, 2), *passes(), floats(1)),
    "attend_backward: weights": lambda: _core.attend_backward(
        floats(2, 2), floats(1, 2), *passes(), floats(2), floats(1), floats(2, 2), floats(1, 2)
    ),
    "attend_backward: states": lambda: _core.attend_backward(
        floats(2, 2), floats(1, 2), *passes(), floats(2), floats(2), floats(1, 2), floats(1, 2)
    ),
    "next_events: shape": lambda: _core.next_events(floats(2, 2), floats(1, 2), *passes()[1:], floats(2, 2), floats(2, 2)),
    "next_events: length": lambda: _core.next_events(floats(2, 2), floats(2, 2), *passes(0, 3)[1:], floats(2, 2), floats(2, 2)),
}  # fmt: skip


ANY = {
    *(
        "gru_kept",
        "Buckets.auc",
        "Buckets.calibration_groups",
        "Buckets.reset",
        "Window.auc",
        "Groups",
        "Groups.gauc",
        "Groups.merge",
    ),
    *(
        "Groups.reset",
        "Slices.ids",
        "Cut.abort",
        "Cut.changed_keys",
        "Cut.close",
        "Cut.commit",
        "Cut.deleted_keys",
        "Cut.memory",
    ),
    *(
        "Table.announce",
        "Table.wait_for_disk",
        "Cut.next",
        "Table.end_day",
        "Table.restore_changes",
        "Table.restore_readers",
        "Table.set_rules",
        "Table.shrink",
        "Table.stats",
    ),
    *(
        "KeySet",
        "KeySet.add",
        "ShowColumns",
        "ShowColumns.add",
        "ShowColumns.take",
        "ShowColumns.take_others",
        "Touched",
        "InPlace",
        "Pairs.drawn",
        "Pairs.gather",
        "Pairs.scores",
        "Layout",
        "Layout.add_dense",
    ),
    *(
        "Layout.add_slot",
        "Layout.group_by",
        "RequestColumn",
        "RequestColumn.of_list",
        "RequestColumn.of_numbers",
        "Fields.rows",
    ),
    *(
        "Delimited.parse",
        "Slotted.parse",
        "Weighted.parse",
        "MultiSlot.parse",
        "parse_sentences",
        "unique",
        "FrameAppender",
        "FrameAppender.append",
        "FrameAppender.make_room",
        "frame_hash",
        "frames_end",
        "hash64",
        "py2_hash",
        "rules",
        "cpu_level",
    ),
}
"""Entry points whose arguments cannot contradict each other: any bytes, keys or rows are valid, or there are none."""


def entry_points() -> set[str]:
    found = set()
    for name, value in vars(_core).items():
        if isinstance(value, type) and not issubclass(value, Enum):
            found |= {
                name,
                *(f"{name}.{part}" for part, call in vars(value).items() if callable(call) and part[0] != "_"),
            }
        elif callable(value) and not isinstance(value, type):
            found.add(name)
    return found


def test_every_entry_point_is_here() -> None:
    assert entry_points() == {call.partition(":")[0] for call in WRONG} | ANY


@pytest.mark.parametrize("call", WRONG)
def test_a_call_that_does_not_fit_is_refused(call: str) -> None:
    with pytest.raises((ValueError, IndexError, TableError)):
        WRONG[call]()


def test_a_list_that_shrank_after_it_was_taken_is_refused() -> None:
    fields = _core.Fields(layout(label=False), [("x", [0])], [("s", -1)])
    given = [1.0] * 1000
    column, texts = _core.RequestColumn.of_list(given, 1), _core.RequestColumn.of_list(["a"] * 1000, 1)
    given.clear()
    with pytest.raises(ValueError, match="different lengths"):
        fields.columns([column, texts], 1000)


def test_a_weight_that_is_not_finite_is_refused() -> None:
    made = layout(label=False)
    made.add_slot("m", True, "m")
    made.values = True
    fields = _core.Fields(made, [("x", [0])], [("s", -1), ("m", -1)])
    assert len(fields.rows([{"m": {"a": 2.0}}])[1]) == 2
    with pytest.raises(ValueError, match="finite"):
        fields.rows([{"m": {"a": float("inf")}}])


def test_an_output_of_another_type_is_refused_not_copied() -> None:
    with pytest.raises(TypeError):
        _core.mix64(keys(2), np.zeros(2, D))
    with pytest.raises(TypeError):
        _core.FrozenLayer([(keys(1), np.zeros(1, D), floats(1, 2))], [], keys(0), None)
