"""An example row for people: values that the model knows, and what each input may hold."""

from typing import Any, cast

from clickfleet.data.batch import Batch
from clickfleet.data.histories import history_columns
from clickfleet.data.names import MISSING, Names, keys_of, undo
from clickfleet.data.schema import Schema
from clickfleet.errors import ClickfleetError
from clickfleet.serve.features import InputSpec, inputs_of
from clickfleet.serve.predictor import Version

FREQUENT = 50
"""Frequent values shown per input."""
MOST_FREQUENT = 3000
"""Frequent values shown of all inputs together."""
EVENTS = 3
"""Events of a history in the example."""


class InputHint(InputSpec, total=False):
    """An input, with the range or the frequent values of the training data where they are known."""

    low: float
    high: float
    whole: bool
    frequent: list[str]


def example_row(version: Version) -> dict[str, Any]:
    """Return a row that can be sent: the first golden request, in the terms of the data.

    A key is replaced by the value behind it or, if that is unknown, by the most frequent value of its slot. A dense value is the
    median of the training data, if it is known. A history has a few events. Inputs without a known value are left out, which means
    missing.
    """
    try:
        golden = version.golden(version.entry)
    except ClickfleetError:
        golden = None
    schema, names = version.schema, version.names
    row: dict[str, Any] = {}
    for name, places in version.fields.dense.items():
        numbers = []
        for place in places:
            column = schema.dense[place]
            known = None if names is None else names.ranges.get(column.name)
            given = 0.0 if golden is None else undo(column, float(golden[0].dense[0, place]))
            numbers.append(float(f"{given:.4g}") if known is None else known.median)
        row[name] = numbers[0] if len(numbers) == 1 else numbers
    for place, slot in enumerate(schema.slots):
        if slot.bucket is not None or slot.source_name in row:
            continue
        keys = [] if golden is None else keys_of(golden[0][:1], place).tolist()
        known_values = [] if names is None else [names.name(slot.name, key) for key in keys]
        values = [value for value in known_values if value is not None and value != MISSING]
        if not values and names is not None:
            values = list(names.values.get(slot.name, {}))[:1]
        if not values and schema.keys.name == "raw":
            values = [str(key) for key in keys[:1]]
        if values:
            row[slot.source_name] = values if slot.multi else values[0]
    row |= _events(schema, names, None if golden is None else golden[0])
    return row if _is_accepted(version, row) else {}


def _events(schema: Schema, names: Names | None, golden: Batch | None) -> dict[str, list[str]]:
    """Return a few events of each history, by input. A history with an unknown value is left out: it has no events."""
    row: dict[str, list[str]] = {}
    for history, first in history_columns(schema):
        keys: list[list[int]] = []
        if golden is not None:
            counts = golden.offsets[first + 1 :: golden.slots] - golden.offsets[first : -1 : golden.slots]
            chosen = int(abs(counts - EVENTS).argmin())
            keys = [keys_of(golden[chosen : chosen + 1], first + i).tolist() for i in range(len(history.slots))]
        columns = []
        for i, slot in enumerate(history.slots):
            known = [] if names is None else list(names.values.get(slot, {}))
            values = [None if names is None else names.name(slot, key) for key in (keys[i] if keys else ())]
            if not keys or any(value is None or value == MISSING for value in values):
                values = [known[event % len(known)] for event in range(len(values) or EVENTS)] if known else []
            if not values and keys and schema.keys.name == "raw":
                values = [str(key) for key in keys[i]]
            columns.append([value for value in values if value is not None])
        if columns[0] and all(len(column) == len(columns[0]) for column in columns):
            row |= dict(zip(history.columns, columns, strict=True))
    return row


def _is_accepted(version: Version, row: dict[str, Any]) -> bool:
    """Return whether the server scores the row."""
    try:
        version.fields.rows([row])
    except ClickfleetError:
        return False
    return True


def input_hints(version: Version) -> list[InputHint]:
    """Return the inputs of the model, with ranges and frequent values where they are known."""
    schema, names = version.schema, version.names
    inputs = inputs_of(schema)
    most = max(5, min(FREQUENT, MOST_FREQUENT // max(1, len(inputs))))
    hints: list[InputHint] = []
    for one in inputs:
        hint = cast(InputHint, dict(one))
        places = version.fields.dense.get(one["name"], [])
        known = None if names is None or len(places) != 1 else names.ranges.get(schema.dense[places[0]].name)
        if known is not None:
            hint |= {"low": known.low, "high": known.high, "whole": known.whole}
        for slot in schema.read_columns:
            values = None
            if names is not None and slot.source_name == one["name"]:
                values = names.values.get(slot.name) or names.values.get(slot.rows_of)
            if values:
                hint["frequent"] = list(values)[:most]
        hints.append(hint)
    return hints
