"""Translate a schema to the native layout, and the results of the native parsers to Parsed, with a reason per bad line."""

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import numpy as np

from clickfleet import _core
from clickfleet.data.batch import NOT_A_LABEL, Batch
from clickfleet.data.formats import Bad, OnBad, Parsed
from clickfleet.data.histories import history_columns
from clickfleet.data.parsing.lines import Text
from clickfleet.data.schema import Schema
from clickfleet.errors import ConfigError

_ON_BAD = {"stop": _core.OnBad.stop, "some": _core.OnBad.some, "all": _core.OnBad.all}

# The core's 64-bit integers are C's long long, which torch cannot convert.
_WIDE = {"keys": np.uint64, "groups": np.uint64, "offsets": np.int64, "times": np.int64}

# In the order of `Why` in layout.h. {detail} is a number from the parser.
_REASONS = (
    "",
    "expected {expected}, found {detail}",
    "is not a number",
    "is not an unsigned 64-bit integer, as the key rule raw requires",
    "is not an integer",
    "is out of range",
    "is a second value, but the slot is single-valued (multi: true allows more)",
    "{detail} values do not match the number of columns in the schema",
    "the label is missing",
    "is a label, but the first line of the file has none",
    "the time is missing",
    "is not {expected}",
    "the line is empty",
    "is not a number of values (1 or more), which must start a block",
    "the line ends too early",
    "comes after the last field",
    "the line contains a NUL byte; this is not a text file",
    "has a quotation mark that is not closed on the line or not followed by a separator",
    "{not_a_label}",
    "is not a time: an integer, or a date such as 2026-01-31 or 2026-01-31T10:20:30",
    "has a value other than 1, but the schema has no values (values: true allows them)",
    "{unequal}",
)
_LABEL_KINDS = {"log": _core.LabelKind.click, "mse": _core.LabelKind.number, "poisson": _core.LabelKind.count}


def not_a_label(schema: Schema) -> str:
    """Return the reason why a label is bad."""
    if not schema.negative:
        return NOT_A_LABEL
    return f"is not a label; labels must be 1 (click) or {schema.negative} (no click), as the schema says (negative)"


def unequal_history(schema: Schema, column: int, expected: int, found: int) -> str:
    """Return the reason why a key column has another length than the first column of its history."""
    history, first = next(pair for pair in reversed(list(history_columns(schema))) if pair[1] <= column)
    return (
        f"the history {history.name} has {expected} values in {history.columns[0]}, "
        f"but {found} in {history.columns[column - first]}"
    )


def check_holds(form: str, schema: Schema, *, histories: bool = False, labels: bool = False) -> None:
    """Refuse histories, and several labels, in a format that does not hold them."""
    others = "use csv, jsonl, parquet, arrow, slots, feasign or multislot"
    if schema.histories and not histories:
        raise ConfigError(f"{form} has no lists, as the history {schema.histories[0].name} needs", others)
    if len(schema.tasks) > 1 and not labels:
        names = ", ".join(task.name for task in schema.tasks)
        raise ConfigError(f"{form} has one label per line, but the schema has {len(schema.tasks)}: {names}", others)


def without_absent_sides(schema: Schema, present: Collection[str]) -> Schema:
    """Return the schema to read rows without labels with. They are only scored, which needs no side columns."""
    absent: dict[str, Any] = {kind: None for kind, name in schema.sides.items() if name not in present}
    return replace(schema, **absent)


def layout(schema: Schema, *, label: bool) -> Any:
    """Return the native layout of a schema's rows, with or without a label."""
    plan = _core.Layout(getattr(_core.KeyRule, schema.keys.name), max(schema.keys.modulus, 1))
    plan.label = label
    plan.labels = [_LABEL_KINDS[task.loss] for task in schema.tasks]
    for kind in schema.sides:
        setattr(plan, kind, True)
    if schema.group is not None:
        plan.group_by(schema.group)
    plan.values = schema.values
    plan.negative = schema.negative
    columns = [column.name for column in schema.dense]
    for column in schema.dense:
        scale = getattr(_core.Scale, column.transform.name)
        plan.add_dense(column.name, scale, column.transform.a, column.transform.scale, column.missing)
    for slot, number in zip(schema.slots, schema.slot_numbers, strict=False):
        owner = schema.slots[number]
        plan.add_slot(owner.name, slot.multi, owner.prefix or owner.name)
    for history in schema.histories:
        for name in history.slots:
            owner = next(slot for slot in schema.slots if slot.name == name)
            plan.add_slot(owner.name, True, owner.prefix or owner.name)
        plan.add_history(len(history.slots), history.max, history.keep == "last")
    for i, slot in enumerate(schema.slots):
        if (bucket := slot.bucket) is not None:
            plan.add_bucket(
                slot=i,
                column=columns.index(bucket.column),
                low=bucket.low,
                high=bucket.high,
                buckets=bucket.buckets,
                boundaries=list(bucket.boundaries),
                offset=bucket.offset,
            )
    return plan


def dense_groups(schema: Schema) -> dict[str, list[int]]:
    """Return the indices of the dense columns for each name in the files, in order."""
    groups: dict[str, list[int]] = {}
    for i, column in enumerate(schema.dense):
        groups.setdefault(column.source_name, []).append(i)
    return groups


def request_fields(schema: Schema) -> Any:
    """Return the native converter of named features, as requests have them: `_core.Fields`."""
    buckets = {slot.name: i for i, slot in enumerate(slot for slot in schema.key_columns if slot.bucket)}
    slots = [(slot.source_name, buckets.get(slot.name, -1)) for slot in schema.key_columns]
    return _core.Fields(layout(schema, label=False), list(dense_groups(schema).items()), slots)


class NativeParser:
    """Wraps a native parser. `names` maps field numbers to names; `expected` describes a valid line or token."""

    def __init__(self, plan: Any, schema: Schema, names: Callable[[int], str], expected: str = "") -> None:
        self._plan, self._schema = plan, schema
        self._dense, self._slots, self._labels = len(schema.dense), len(schema.key_columns), len(schema.tasks)
        self._names = names
        self._expected = expected
        self._not_a_label = not_a_label(schema)

    def __call__(self, lines: Text, on_bad: OnBad) -> Parsed:
        columns, rows, seen, bad_lines, bad = self._plan.parse(lines, _ON_BAD[on_bad])
        columns["dense"] = columns["dense"].reshape(rows, self._dense)
        if self._labels > 1 and columns["labels"] is not None:
            columns["labels"] = columns["labels"].reshape(rows, self._labels)
        for name, kind in _WIDE.items():
            if columns[name] is not None:
                columns[name] = columns[name].view(kind)
        return Parsed(Batch(slots=self._slots, **columns), seen, bad_lines, [self._bad(lines, *item) for item in bad])

    def _bad(
        self,
        lines: Text,
        line: int,
        at: int,
        length: int,
        value: int,
        value_length: int,
        field: int,
        why: int,
        detail: int,
    ) -> Bad:
        reason = _REASONS[why]
        if reason == "{unequal}":
            reason = unequal_history(self._schema, detail >> 42, detail >> 21 & 0x1FFFFF, detail & 0x1FFFFF)
        reason = reason.format(detail=detail, expected=self._expected, not_a_label=self._not_a_label)
        if reason.startswith(("is ", "has ", "comes ")):
            reason = f"{shorten(bytes(lines[value : value + value_length]))} {reason}"
        return Bad(line, bytes(lines[at : at + length]), "" if field == -1 else self._names(field), reason)


def shorten(text: bytes, limit: int = 40) -> str:
    """Return bytes for a message: quoted, shortened, with unprintable ones escaped.

    >>> shorten(b"caf\\xc3\\xa9\\t\\xff")
    "'caf\u00e9\\\\t\\\\xff'"
    """
    shown = repr(text[:limit].decode("utf-8", "backslashreplace")).replace("\\\\", "\\")
    return f"{shown[:-1]}…{shown[-1]}" if len(text) > limit else shown


def nothing(schema: Schema) -> Batch:
    """Return a batch without rows."""
    return Batch(np.empty((0, len(schema.dense)), np.float32), np.empty(0, np.uint64), len(schema.key_columns))
