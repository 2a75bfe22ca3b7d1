"""Translate a schema to the native layout, and the results of the native parsers to Parsed, with a reason per bad line."""

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import numpy as np

from clickfleet import _core
from clickfleet.data.batch import NOT_A_LABEL, Batch
from clickfleet.data.formats import Bad, OnBad, Parsed
from clickfleet.data.parsing.lines import Text
from clickfleet.data.schema import Schema

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
)


def not_a_label(schema: Schema) -> str:
    """Return the reason why a label is bad."""
    if not schema.negative:
        return NOT_A_LABEL
    return f"is not a label; labels must be 1 (click) or {schema.negative} (no click), as the schema says (negative)"


def without_absent_sides(schema: Schema, present: Collection[str]) -> Schema:
    """Return the schema to read rows without labels with. They are only scored, which needs no side columns."""
    absent: dict[str, Any] = {kind: None for kind, name in schema.sides.items() if name not in present}
    return replace(schema, **absent)


def layout(schema: Schema, *, label: bool) -> Any:
    """Return the native layout of a schema's rows, with or without a label."""
    plan = _core.Layout(getattr(_core.KeyRule, schema.keys.name), max(schema.keys.modulus, 1))
    plan.label = label
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
    for slot in schema.slots:
        plan.add_slot(slot.name, slot.multi, slot.prefix or slot.name)
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


class NativeParser:
    """Wraps a native parser. `names` maps field numbers to names; `expected` describes a valid line or token."""

    def __init__(self, plan: Any, schema: Schema, names: Callable[[int], str], expected: str = "") -> None:
        self._plan = plan
        self._dense, self._slots = len(schema.dense), len(schema.slots)
        self._names = names
        self._expected = expected
        self._not_a_label = not_a_label(schema)

    def __call__(self, lines: Text, on_bad: OnBad) -> Parsed:
        columns, rows, seen, bad_lines, bad = self._plan.parse(lines, _ON_BAD[on_bad])
        columns["dense"] = columns["dense"].reshape(rows, self._dense)
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
        reason = _REASONS[why].format(detail=detail, expected=self._expected, not_a_label=self._not_a_label)
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
    return Batch(np.empty((0, len(schema.dense)), np.float32), np.empty(0, np.uint64), len(schema.slots))
