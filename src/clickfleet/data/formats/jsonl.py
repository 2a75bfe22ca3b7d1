"""jsonl: one JSON object per line: `{"click": 1, "user": "u17", "tags": ["a", "b"]}`. The schema selects its members by name."""

import json
from dataclasses import dataclass
from typing import Any

import numpy as np

from clickfleet.data.formats import Bad, OnBad, Parsed
from clickfleet.data.parsing.lines import Lines, Parser, Text
from clickfleet.data.schema import Schema


@dataclass(frozen=True)
class Jsonl(Lines):
    """A list is the value of a multi-valued slot, of a history or of several dense columns. null and an absent member are missing."""

    named_columns = True

    def parser(self, schema: Schema, first_line: bytes, path: str) -> Parser:
        from clickfleet.data.parsing.columns import Columns

        first = _object(first_line)
        labelled = not isinstance(first, dict) or any(name in first for name in schema.label_columns)
        names = Columns.names(schema)
        columns = Columns(schema, [*names, *schema.label_columns] if labelled else names, path)

        def parse(lines: Text, on_bad: OnBad) -> Parsed:
            texts = bytes(lines).split(b"\n")[:-1]
            rows: list[dict[str, Any]] = []
            places: list[int] = []
            bad: list[Bad] = []
            for place, row in enumerate(_objects(texts)):
                if isinstance(row, str):
                    bad.append(Bad(place, texts[place], "", row))
                elif not labelled and (name := next((name for name in schema.label_columns if name in row), None)):
                    reason = f"{row[name]!r:.42} is a label, but the first line of the file has none"
                    bad.append(Bad(place, texts[place], name, reason))
                else:
                    rows.append(row)
                    places.append(place)
            table, refused = table_of(rows, columns.needed, schema)
            parsed = columns.parse(table, "all")
            reasons = {item.line: (item.field, item.reason) for item in parsed.bad} | refused
            batch = parsed.batch
            if refused:
                kept = np.delete(np.arange(len(rows)), [item.line for item in parsed.bad])
                batch = batch.take(np.flatnonzero(~np.isin(kept, list(refused))))
            bad += [Bad(places[row], texts[places[row]], *why) for row, why in reasons.items()]
            bad.sort(key=lambda item: item.line)
            if bad and on_bad == "stop":
                good = sum(place < bad[0].line for place in places)
                return Parsed(batch[:good], bad[0].line + 1, 1, bad[:1])
            return Parsed(batch, len(texts), len(bad), bad)

        return parse


def _objects(lines: list[bytes]) -> list[Any]:
    """Return the object of each line, or the reason why it has none. One call for all is faster, if all lines are good."""
    if not all(line[:1] == b"{" and line.rstrip()[-1:] == b"}" for line in lines):
        return [_object(line) for line in lines]
    try:
        rows = json.loads(b"[" + b",".join(lines) + b"]", parse_constant=_refuse)
        if len(rows) == len(lines) and all(type(row) is dict for row in rows):
            return list(rows)
    except (ValueError, RecursionError):
        pass
    return [_object(line) for line in lines]


def _object(line: bytes) -> dict[str, Any] | str:
    """Return the object of a line, or the reason why it has none."""
    if not line.strip():
        return "the line is empty"
    try:
        row = json.loads(line, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        return f"the line is not a JSON object: {error}"
    return row if isinstance(row, dict) else f"the line is not a JSON object but {type(row).__name__}"


def _refuse(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")


def table_of(rows: list[dict[str, Any]], names: list[str], schema: Schema) -> tuple[Any, dict[int, tuple[str, str]]]:
    """Return the members `names` as an Arrow record batch, and the rows with a value that is not allowed."""
    import pyarrow as pa

    events = {name for history in schema.histories for name in history.columns}
    slots = {slot.source_name for slot in schema.read_columns} | {schema.group, schema.time}
    lists = {slot.source_name for slot in schema.read_columns} | {column.source_name for column in schema.dense}
    refused: dict[int, tuple[str, str]] = {}
    columns: list[Any] = []
    for name in names:
        values = [row.get(name) for row in rows]
        if name in events:
            values = _lists(values, name, refused)
        try:
            column = pa.array(values)
            if _is_plain(column.type, name in slots, name in lists):
                columns.append(column)
                continue
        except (pa.ArrowException, OverflowError, ValueError, UnicodeError):
            pass
        columns.append(_mixed(values, name, name in slots, name in lists, refused))
    return pa.record_batch(columns, names), refused


def _lists(values: list[Any], name: str, refused: dict[int, tuple[str, str]]) -> list[Any]:
    """Return the values of a column of a history. Refuse what is not a list."""
    for row, value in enumerate(values):
        if value is not None and not isinstance(value, list):
            refused[row] = (name, f"{value!r:.42} is not a list, as a history needs")
    return [value if isinstance(value, list) else None for value in values]


def _is_plain(kind: Any, is_slot: bool, may_be_list: bool) -> bool:
    """Tell whether a column of this type can be read as it is: texts and integers as a slot, numbers otherwise."""
    from pyarrow import types

    inner = kind.value_type if types.is_list(kind) and may_be_list else kind
    if types.is_integer(inner) or types.is_floating(inner) or types.is_null(inner):
        return True
    return bool(types.is_string(inner) if is_slot else types.is_boolean(inner)) or (
        may_be_list and bool(types.is_boolean(inner))
    )


def _mixed(values: list[Any], name: str, is_slot: bool, may_be_list: bool, refused: dict[int, tuple[str, str]]) -> Any:
    """Return a column whose values have several types: texts for a slot, numbers otherwise. Refuse what is neither."""
    import pyarrow as pa

    lists = may_be_list and any(isinstance(value, list) for value in values)
    out: list[Any] = []
    for row, value in enumerate(values):
        items = value if lists and isinstance(value, list) else [] if value is None else [value]
        try:
            plain = [_scalar(item, is_slot) for item in items]
            out.append(plain if lists else plain[0] if plain else None)
        except ValueError as error:
            refused[row] = (name, str(error))
            out.append(None)
    kind = pa.string() if is_slot else pa.float64()
    return pa.array(out, pa.list_(kind) if lists else kind)


def _scalar(value: Any, is_slot: bool) -> Any:
    if value is None:
        return None
    if isinstance(value, dict | list):
        raise ValueError(f"{value!r:.42} is nested; expected text, a number or a list of them")
    if not is_slot:
        if isinstance(value, str):
            raise ValueError(f"{value!r:.42} is not a number")
        return float(value)
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, float) and not value.is_integer():
        raise ValueError(f"{value!r} is not an id; expected text or integers")
    text = value if isinstance(value, str) else str(int(value))
    text.encode()
    return text
