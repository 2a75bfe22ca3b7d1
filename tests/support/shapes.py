"""Data of many shapes, each in files of another format, and what a model must score on them, computed the long way."""

from __future__ import annotations

import copy
import csv
import io
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from pyarrow import parquet

from clickfleet.config.plugins import find, names
from clickfleet.data.schema import Bucket, Dense, History, KeyRule, Label, Schema, Slot, Transform, preset
from clickfleet.training.learner import Learner
from clickfleet.training.losses import predictions
from clickfleet.training.network import Events, Inputs, Model
from data.test_hash import THIRD
from data.test_hash import reference as hashed

MODELS = [name for name in names("models") if find("models", name, Model).scores_rows]
SMALL = {
    "hidden": [4, 4],
    "hidden1": [4, 4],
    "hidden2": [4, 4],
    "bottom": [4],
    "top": [4],
    "cin": [3, 2],
    "width": 4,
    "gate_hidden": 4,
    "layers": 1,
}
Row = dict[str, Any]
"""A row by the names of the files: features, label and the columns beside them; None is missing."""


@dataclass(frozen=True)
class Shape:
    """One kind of data."""

    name: str
    schema: Schema
    form: dict[str, Any]
    draw: Callable[[np.random.Generator], Row]
    write: Callable[[Path, list[Row]], Any]
    ending: str = "txt"
    table: dict[str, Any] = field(default_factory=dict)

    def rows(self, seed: int, count: int) -> list[Row]:
        rng = np.random.default_rng(seed)
        labels = rng.permutation(np.arange(count) % 2)
        rows = [{**self.draw(rng), self.schema.label: int(label)} for label in labels]
        for row in rows[:: 2 if len(self.schema.tasks) > 1 else count]:  # other labels are known of some rows only
            row |= {task.source_name: None for task in self.schema.tasks[1:]}
        return rows

    def features(self, row: Row) -> Row:
        """What a request gives of a row."""
        beside = {*self.schema.label_columns, *self.schema.sides.values()}
        uses = {c.source or c.name for c in (*self.schema.dense, *self.schema.read_columns)}
        return {name: value for name, value in row.items() if name in uses or name not in beside}


def settings(name: str) -> dict[str, Any]:
    """A model of that name, as small as it gets."""
    known = find("models", name, Model).Config.__dataclass_fields__
    return {"name": name, **{k: v for k, v in SMALL.items() if k in known}}


# The long way to a score


def scores(learner: Learner, rows: list[Row]) -> np.ndarray:
    """Rows of the table found by key, pooled in NumPy, through the network in float64."""
    table = contents(learner)
    schema, factors = learner.schema, learner.table.factors
    dense = np.array([_dense(schema, row) for row in rows]).reshape(len(rows), len(schema.dense))
    columns = schema.key_columns[: learner.shape.slots]
    pooled = np.zeros((len(rows), len(columns), 1 + factors))
    for r, row in enumerate(rows):
        for s, slot in enumerate(columns):
            found = _keys(schema, slot, row, dense[r])
            for key, value in found:
                share = value / (len(found) if slot.pooling == "mean" else 1)
                pooled[r, s] += share * table.get(key, 0.0)
    network = copy.deepcopy(learner.model).double().eval()
    parts = [torch.from_numpy(part) for part in (dense, pooled[:, :, 0], pooled[:, :, 1:])]
    histories = {one.name: _events(schema, one, rows, table, factors) for one in schema.histories}
    x = Inputs(*parts, histories if learner.shape.histories else {})
    found: np.ndarray = predictions(network(x), schema.tasks).detach().numpy()
    return found


def _events(schema: Schema, history: History, rows: list[Row], table: dict[int, np.ndarray], factors: int) -> Events:
    """Every history as long as the longest that is allowed."""
    out = np.zeros((len(rows), history.max, len(history.slots), factors))
    lengths = [len(kept(history, row.get(history.columns[0]))) for row in rows]
    slots = {slot.name: slot for slot in schema.slots}
    for r, row in enumerate(rows):
        for k, (slot, column) in enumerate(zip(history.slots, history.columns, strict=True)):
            for e, value in enumerate(kept(history, row.get(column))):
                key = _key(schema, slots[slot], "" if value is None else value)
                out[r, e, k] = table.get(key, np.zeros(1 + factors))[1:]
    return Events(torch.from_numpy(out), torch.tensor(lengths))


def kept(history: History, events: list[Any] | None) -> list[Any]:
    """The events of a row that count."""
    events = events or []
    return events[-history.max :] if history.keep == "last" else events[: history.max]


def contents(learner: Learner) -> dict[int, np.ndarray]:
    """Every row of the table by its key: the first-order weight, then the factors."""
    found = {}
    with learner.table.snapshot() as parts:
        for part in parts:
            width = len(part["embedx"]) // max(len(part["key"]), 1)
            wide = np.asarray(part["embedx"]).reshape(len(part["key"]), width) if width else None
            for i, key in enumerate(part["key"].tolist()):
                row = np.zeros(1 + learner.table.factors)
                row[0] = part["embed_w"][i]
                if wide is not None:
                    row[1 : 1 + width] = wide[i]
                found[key] = row
    return found


def _dense(schema: Schema, row: Row) -> list[float]:
    found, seen = [], dict[str, int]()
    for column in schema.dense:
        name = column.source or column.name
        value = row.get(name)
        if isinstance(value, list):
            value = value[seen.setdefault(name, 0)]
            seen[name] += 1
        if value is None or value == "":
            found.append(float(np.float32(column.missing)))
            continue
        x, t = float(value), column.transform
        if t.name == "log1p":
            x = math.copysign(math.log1p(abs(x)), x)
        elif t.name != "none":
            x = (x - t.a) / t.scale
        found.append(float(np.float32(x)))
    return found


def _keys(schema: Schema, slot: Slot, row: Row, dense: np.ndarray) -> list[tuple[int, float]]:
    """The keys of a slot, each with its value."""
    if slot.bucket is not None:
        x = dense[[column.name for column in schema.dense].index(slot.bucket.column)]
        place = sum(x >= edge for edge in slot.bucket.boundaries)
        return [(_key(schema, slot, place), 1.0)]
    value = row.get(slot.source or slot.name)
    history = next((one for one in schema.histories if slot.name.startswith(f"{one.name}.")), None)
    if history is not None:
        owner = next(one for one in schema.slots if one.name == slot.rows_of)
        return [(_key(schema, owner, "" if event is None else event), 1.0) for event in kept(history, value)]
    if isinstance(value, dict):
        return [(_key(schema, slot, key), float(np.float32(weight))) for key, weight in value.items()]
    several = value if isinstance(value, list) else [value]
    given = [item for item in several if item is not None and (item != "" or not slot.multi)]
    if not given and not slot.multi:
        given = [""]
    return [(_key(schema, slot, item), 1.0) for item in given]


def _key(schema: Schema, slot: Slot, value: Any) -> int:
    if schema.keys.name == "raw":
        return int(value or 0)
    return hashed(hashed(THIRD, slot.name.encode()), str(value).encode())


# Files


def _delimited(order: list[str], separator: str, header: bool) -> Callable[[Path, list[Row]], Any]:
    def write(path: Path, rows: list[Row]) -> None:
        out = io.StringIO()
        writer = csv.writer(out, delimiter=separator, lineterminator="\n")
        if header:
            writer.writerow(order)
        for row in rows:
            cells = (row.get(name) for name in order)
            writer.writerow(
                "|".join("" if e is None else str(e) for e in c) if isinstance(c, list) else c for c in cells
            )
        path.write_text(out.getvalue())

    return write


def _several(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _named(pattern: str, label: str) -> Callable[[Path, list[Row]], Any]:
    """Tokens that name their slot."""

    def write(path: Path, rows: list[Row]) -> None:
        lines = []
        for row in rows:
            others = [(name, item) for name, value in row.items() if name != label for item in _several(value)]
            lines.append(" ".join(pattern.format(name=n, value=v) for n, v in [(label, row[label]), *others]))
        path.write_text("\n".join(lines) + "\n")

    return write


def _libffm(path: Path, rows: list[Row]) -> None:
    def tokens(row: Row) -> Iterable[str]:
        for name, value in row.items():
            if name != "label":
                yield from (f"{name}:{key}:{weight}" for key, weight in (value or {}).items())

    path.write_text("".join(" ".join([str(row["label"]), *tokens(row)]) + "\n" for row in rows))


def _blocks(order: list[str]) -> Callable[[Path, list[Row]], Any]:
    def write(path: Path, rows: list[Row]) -> None:
        lines = []
        for row in rows:
            blocks = [_several(row[name]) or [0] for name in order]
            lines.append(" ".join(f"{len(block)} {' '.join(map(str, block))}" for block in blocks))
        path.write_text("\n".join(lines) + "\n")

    return write


def _table(kinds: dict[str, pa.DataType], put: Callable[[pa.Table, Path], Any]) -> Callable[[Path, list[Row]], Any]:
    def write(path: Path, rows: list[Row]) -> None:
        columns = {name: pa.array([row.get(name) for row in rows], kind) for name, kind in kinds.items()}
        put(pa.table(columns), path)

    return write


def _ipc(table: pa.Table, path: Path) -> None:
    with pa.ipc.new_file(path, table.schema) as out:
        out.write_table(table, 7)


# Shapes


def _maybe(rng: np.random.Generator, value: Any, chance: float = 0.8) -> Any:
    return value if rng.random() < chance else None


def _criteo(rng: np.random.Generator) -> Row:
    counts = {f"I{i}": _maybe(rng, int(rng.integers(-2, 2000))) for i in range(1, 14)}
    return counts | {f"C{i}": _maybe(rng, f"{rng.integers(6):08x}") for i in range(1, 27)}


def _no_dense(rng: np.random.Generator) -> Row:
    city = ["Zürich; Altstadt", 'the "old" town', "Bern", ""][rng.integers(4)]
    return {"city": city, "ad": int(rng.integers(5)), "tags": [f"t{i}" for i in rng.choice(6, rng.integers(0, 4))]}


def _no_slots(rng: np.random.Generator) -> Row:
    return {name: _maybe(rng, round(float(rng.normal(scale=3)), 3)) for name in "abc"}


def _multi(rng: np.random.Generator) -> Row:
    lists = {name: rng.integers(1, 9, rng.integers(0, 4)).tolist() for name in ("7", "8")}
    return {"vector": [round(float(x), 3) for x in rng.random(2)], **lists}


def _twice(rng: np.random.Generator) -> Row:
    return {
        "age": _maybe(rng, int(rng.integers(15, 70))),
        "city": _maybe(rng, f"c{rng.integers(5)}"),
        "n": rng.random(),
    }


def _ids(rng: np.random.Generator) -> Row:
    return {
        "x": _maybe(rng, rng.normal()),
        "text": _maybe(rng, ["ä", "", "日本", "x" * 40][rng.integers(4)]),
        "whole": _maybe(rng, int(rng.integers(-3, 3))),
        "large": _maybe(rng, 2**64 - 1 - int(rng.integers(4))),
        "several": _maybe(rng, [f"s{i}" for i in rng.integers(0, 4, rng.integers(0, 4))]),
    }


def _one(rng: np.random.Generator) -> Row:
    return {"0": {str(key): round(float(rng.normal()), 3) for key in rng.choice(9, rng.integers(0, 4), replace=False)}}


def _many(rng: np.random.Generator) -> Row:
    used = rng.choice(np.arange(2, 302), 30, replace=False)
    return {str(slot): rng.integers(1, 2**62, rng.integers(1, 3)).tolist() for slot in sorted(used.tolist())}


def _sides(rng: np.random.Generator) -> Row:
    return {
        "price": round(float(rng.random()), 3),
        "user": int(rng.integers(1, 5)),
        "ad": int(rng.integers(1, 9)),
        "w": round(float(rng.uniform(0.5, 2)), 2),
        "at": 1_700_000_000 + int(rng.integers(1000)),
    }


_CRITEO = preset("criteo")
_LETTERS = tuple(
    Dense(name, Transform(*transform), missing=-1.0)
    for name, transform in {"a": ("log1p",), "b": ("standard", 0.5, 2.0), "c": ("minmax", -3.0, 3.0)}.items()
)
_SIDES_ORDER = ["user", "price", "label", "ad", "w", "at"]
SHAPES = {
    shape.name: shape
    for shape in [
        Shape(
            "criteo",
            _CRITEO,
            {"name": "criteo"},
            _criteo,
            _delimited([_CRITEO.label, *(c.name for c in _CRITEO.columns)], "\t", False),
        ),
        Shape(
            "no_dense",
            Schema(slots=(Slot("city"), Slot("ad"), Slot("tags", multi=True, pooling="mean"))),
            {"name": "csv", "separator": ";"},
            _no_dense,
            _delimited(["tags", "label", "city", "ad"], ";", True),
            "csv",
        ),
        Shape(
            "no_slots",
            Schema(dense=_LETTERS),
            {"name": "csv", "separator": "\t", "columns": ["label", "c", "a", "b"]},
            _no_slots,
            _delimited(["label", "c", "a", "b"], "\t", False),
            "tsv",
        ),
        Shape(
            "only_multi",
            Schema(
                dense=(Dense("v1", source="vector"), Dense("v2", Transform("log1p"), source="vector")),
                slots=(Slot("7", multi=True), Slot("8", multi=True, pooling="mean")),
                keys=KeyRule("raw"),
                label="click",
            ),
            {"name": "slots"},
            _multi,
            _named("{name}:{value}", "click"),
        ),
        Shape(
            "twice",
            Schema(
                dense=(Dense("age", Transform("log1p"), missing=0.5), Dense("n")),
                slots=(
                    Slot("years", source="age"),
                    Slot("age group", bucket=Bucket("age", boundaries=(3.0, 3.5, 4.0))),
                    Slot("city"),
                    Slot("town", source="city", multi=True),
                ),
            ),
            {"name": "parquet"},
            _twice,
            _table(
                {"label": pa.int8(), "age": pa.int32(), "city": pa.string(), "n": pa.float32()},
                lambda table, path: parquet.write_table(table, path, row_group_size=11),
            ),
            "parquet",
        ),
        Shape(
            "ids",
            Schema(
                dense=(Dense("x", missing=2.0),),
                slots=(Slot("text"), Slot("whole"), Slot("large"), Slot("several", multi=True)),
            ),
            {"name": "arrow"},
            _ids,
            _table(
                {
                    "several": pa.list_(pa.large_string()),
                    "text": pa.dictionary(pa.int8(), pa.string()),
                    "whole": pa.int16(),
                    "large": pa.uint64(),
                    "x": pa.float64(),
                    "label": pa.int64(),
                },
                _ipc,
            ),
            "arrow",
        ),
        Shape(
            "one_slot",
            Schema(slots=(Slot("0", multi=True),), keys=KeyRule("raw"), values=True),
            {"name": "libffm"},
            _one,
            _libffm,
        ),
        Shape("300_slots", preset("feasign"), {"name": "feasign"}, _many, _named("{value}:{name}", "1")),
        Shape(
            "sides",
            Schema(
                dense=(Dense("price"),),
                slots=(Slot("user"), Slot("ad")),
                weight="w",
                group="user",
                time="at",
            ),
            {"name": "multislot", "order": _SIDES_ORDER},
            _sides,
            _blocks(_SIDES_ORDER),
        ),
    ]
}


def _history(rng: np.random.Generator) -> Row:
    events = int(rng.integers(0, 6))
    return {
        "price": _maybe(rng, round(float(rng.random()), 3)),
        "item": f"i{rng.integers(6)}",
        "shop": _maybe(rng, f"s{rng.integers(3)}"),
        "items": [f"i{i}" for i in rng.integers(0, 6, events)],
        "shops": [_maybe(rng, f"s{i}") if events > 1 else f"s{i}" for i in rng.integers(0, 3, events)],
    }


def _labels(rng: np.random.Generator) -> Row:
    seen, other = rng.integers(0, 5, rng.integers(0, 4)).tolist(), rng.integers(0, 5, rng.integers(0, 3)).tolist()
    return {
        "user": int(rng.integers(1, 5)),
        "item": int(rng.integers(5)),
        "seen": _maybe(rng, seen),
        "disliked": other,
        "bought": int(rng.integers(2)),
        "seconds": round(float(rng.gamma(2.0)), 2),
    }


HISTORIES = {
    shape.name: shape
    for shape in [
        Shape(
            "history",
            Schema(
                dense=(Dense("price"),),
                slots=(Slot("item"), Slot("shop")),
                histories=(History("past", ("item", "shop"), ("items", "shops"), max=3),),
            ),
            {"name": "csv"},
            _history,
            _delimited(["label", "item", "shop", "items", "shops", "price"], ",", True),
            "csv",
        ),
        Shape(
            "labels",
            Schema(
                slots=(Slot("user"), Slot("item")),
                histories=(
                    History("seen", ("item",), ("seen",), max=2, keep="first"),
                    History("disliked", ("item",), ("disliked",)),
                ),
                labels=(
                    Label("click"),
                    Label("buy", given="click", weight=0.5, source="bought"),
                    Label("seconds", loss="poisson", given="click", weight=0.1),
                ),
                group="user",
            ),
            {"name": "parquet"},
            _labels,
            _table(
                {
                    "click": pa.int8(),
                    "bought": pa.int8(),
                    "seconds": pa.float32(),
                    "user": pa.int32(),
                    "item": pa.int64(),
                    "seen": pa.list_(pa.int32()),
                    "disliked": pa.large_list(pa.int64()),
                },
                lambda table, path: parquet.write_table(table, path, row_group_size=11),
            ),
            "parquet",
        ),
    ]
}
"""Data with histories, and with several labels."""
