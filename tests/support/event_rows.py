"""Rows with histories and several labels: how to draw them, write them in every format, and what they must be read as."""

import io
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import strategies as st

from clickfleet import _core
from clickfleet.data.batch import Batch
from clickfleet.data.schema import Dense, History, KeyRule, Label, Schema, Slot, Transform

Row = dict[str, Any]

LABELS = (Label("click"), Label("buy", given="click"), Label("dwell", loss="mse"), Label("visits", loss="poisson"))
HISTORIES = (
    History("clicked", ("item", "category"), ("past_items", "past_categories"), max=3),
    History("seen", ("item",), max=2, keep="first"),
    History("latest", ("item",), ("past_items",), max=1),  # the same column of the files
)
LISTS = ("past_items", "past_categories", "seen_item", "tags")


def schema(rule: str = "hash64", labels: Sequence[Label] = LABELS) -> Schema:
    return Schema(
        (Dense("x", Transform("log1p"), missing=-1.0),),
        (Slot("item", prefix="7"), Slot("category"), Slot("tags", multi=True), Slot("twin", rows_of="item")),
        keys=KeyRule.parse(rule),
        histories=HISTORIES,
        labels=tuple(labels),
    )


word = st.text("abcXYZ019_é", min_size=1, max_size=12)
whole = st.integers(0, 2**64 - 1).map(str)


@st.composite
def rows(draw: Any, values: Any = word, blanks: bool = True) -> list[Row]:
    """Rows of the schema. With `blanks`, events may lack a value, but not the only event of a history: csv cannot say that."""
    value = st.none() | values
    event = value if blanks else values
    drawn = []
    for _ in range(draw(st.integers(1, 6))):
        past = draw(st.none() | st.lists(st.tuples(event, event), max_size=6))
        seen = draw(st.none() | st.lists(event, max_size=4))
        if past is not None and len(past) == 1:
            past = [tuple("0" if text is None else text for text in past[0])]
        seen = ["0"] if seen == [None] else seen
        labels = {
            "click": draw(st.none() | st.integers(0, 1)),
            "buy": draw(st.none() | st.integers(0, 1)),
            "dwell": draw(st.none() | st.integers(-50, 50).map(lambda x: x / 4)),
            "visits": draw(st.none() | st.integers(0, 9)),
        }
        if all(label is None for label in labels.values()):
            labels["buy"] = 1
        drawn.append(
            {
                **labels,
                "x": draw(st.none() | st.integers(-5000, 5000)),
                "item": draw(value),
                "category": draw(value),
                "twin": draw(value),
                "tags": draw(st.lists(values, max_size=3)),
                "past_items": None if past is None else [item for item, _ in past],
                "past_categories": None if past is None else [category for _, category in past],
                "seen_item": seen,
            }
        )
    return drawn


def key(plan: Schema, slot: str, value: str | None) -> int:
    text = (value or "").encode()
    if plan.keys.name == "raw":
        return int(text or b"0")
    owner = next(one for one in plan.slots if one.name == slot)
    if plan.keys.name == "py2":
        return int(_core.py2_hash((owner.prefix or owner.name).encode() + text)) % plan.keys.modulus
    return int(_core.hash64(owner.name, text))


def expected(given: list[Row], plan: Schema) -> Batch:
    """What every format must read, computed row by row."""
    keys: list[int] = []
    counts: list[int] = []
    for row in given:
        columns = [
            [key(plan, "item", row["item"])],
            [key(plan, "category", row["category"])],
            [key(plan, "tags", tag) for tag in row["tags"] if tag],
            [key(plan, "item", row["twin"])],
        ]
        for history in plan.histories:
            for slot, name in zip(history.slots, history.columns, strict=True):
                events = row[name] or []
                events = events[: history.max] if history.keep == "first" else events[-history.max :]
                columns.append([key(plan, slot, event) for event in events])
        keys += [one for column in columns for one in column]
        counts += map(len, columns)
    numbers = [-1.0 if row["x"] is None else np.sign(row["x"]) * np.log1p(abs(row["x"])) for row in given]
    labels = [[np.nan if row[task.name] is None else row[task.name] for task in plan.tasks] for row in given]
    return Batch(
        np.array(numbers, np.float32)[:, None],
        np.array(keys, np.uint64),
        len(plan.key_columns),
        np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        np.array(labels, np.float32) if len(plan.tasks) > 1 else np.array(labels, np.float32)[:, 0],
    )


def check_equal(read: Batch, wanted: Batch) -> None:
    for name in ("labels", "dense", "keys", "offsets"):
        np.testing.assert_array_equal(getattr(read, name), getattr(wanted, name), name)


def text(value: Any) -> str:
    return "" if value is None else str(value)


def listed(value: Any) -> list[str]:
    return [text(item) for item in value] if isinstance(value, list) else [] if value is None else [text(value)]


def as_csv(given: list[Row], separator: str = ",", list_separator: str = "|", quote: bool = False) -> str:
    def field(value: Any) -> str:
        joined = list_separator.join(listed(value)) if isinstance(value, list) else text(value)
        return '"' + joined.replace('"', '""') + '"' if quote or separator in joined or '"' in joined else joined

    return "".join(separator.join(map(field, line)) + "\n" for line in ([*given[0]], *(row.values() for row in given)))


def as_slots(given: list[Row]) -> str:
    return "".join(
        " ".join(f"{name}:{value}" for name, column in row.items() for value in listed(column)) + "\n" for row in given
    )


def as_feasign(given: list[Row]) -> str:
    return "".join(
        "id\t" + " ".join(f"{value}:{name}" for name, column in row.items() for value in listed(column)) + "\n"
        for row in given
    )


def as_multislot(given: list[Row], plan: Schema) -> str:
    """Blocks in the default order. A missing dense value or a single-valued slot has no block of its own to be absent in."""
    names = ["x", *dict.fromkeys(slot.source_name for slot in plan.read_columns), *plan.label_columns]
    return "".join(
        " ".join(f"{len(listed(row[name]))} {' '.join(listed(row[name]))}".strip() for name in names) + "\n"
        for row in given
    )


def as_jsonl(given: list[Row]) -> str:
    return "".join(
        json.dumps({name: value for name, value in row.items() if value is not None}) + "\n" for row in given
    )


def table(given: list[Row], *, large: bool = False, packed: bool = False) -> pa.Table:
    """The rows as an Arrow table, with one of several types for the same values."""
    string: Any = pa.large_string() if large else pa.string()
    string = pa.dictionary(pa.int32(), string) if packed else string
    lists = pa.large_list(string) if large else pa.list_(string)
    numbers = ("click", "buy", "dwell", "visits", "x")
    kinds = {name: pa.float64() if name in numbers else lists if name in LISTS else string for name in given[0]}
    return pa.table({name: pa.array([row[name] for row in given], kind) for name, kind in kinds.items()})


def arrow_stream(content: pa.Table) -> bytes:
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, content.schema) as writer:
        writer.write_table(content)
    return sink.getvalue()
