"""joined: rows that `clickfleet join` and `online.join` make of shows and their feedback. The schema selects features by name.

A row has the features that were scored, as JSON, and its labels by name. They become numbers and keys by the functions that a server
uses for requests, so a trained row is the scored one bit for bit. Features that the schema does not have are left out; those that a row
lacks are missing values. Rows without a value of any of the schema's labels are left out too: their show only got others so far.

A correction also has the labels of the earlier row that it replaces. They are `previous` in a batch; a batch without corrections has
none. A file names the share of each label that comes on time, for labels with `late: weight`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from clickfleet.data.arrow_ipc import numbers
from clickfleet.data.batch import Batch, Floats, concatenate
from clickfleet.data.events import JOINED, read_columns
from clickfleet.data.files import open_bytes, reading
from clickfleet.data.formats import Bad, Block, Format, OnBad, Parsed
from clickfleet.data.formats.jsonl import table_of
from clickfleet.data.parsing.columns import BLOCK_ROWS, TableBlock, text_buffers
from clickfleet.data.parsing.layout import layout, not_a_label, nothing, request_fields
from clickfleet.data.schema import Schema
from clickfleet.errors import DataError

ON_TIME = b"on_time"
"""Key of the shares in the metadata of a file."""
_ROW = re.compile(r"^row \d+:\s*")


@dataclass(frozen=True)
class Joined(Format):
    """Reads record batches. A position is a row number."""

    named_columns = True
    corrects = True

    def blocks(self, path: str, schema: Schema, at: int) -> Iterator[Block]:
        from clickfleet.data.arrow_ipc import open_ipc

        with open_bytes(path) as raw, reading(path):
            opened = open_ipc(raw)
            reader = JoinedReader(schema, on_time_of(opened.schema))
            first = 0
            for batch in opened:
                try:
                    rows = read_columns(batch, JOINED).batch
                except ValueError as error:
                    raise DataError(f"{path} has no joined rows: {error}", "check data.format") from None
                if len(rows) < len(batch):
                    raise DataError(f"{path}: a joined row lacks a value", "join again")
                for start in range(0, len(rows), BLOCK_ROWS):
                    piece, row = rows.slice(start, BLOCK_ROWS), first + start
                    if row >= at:
                        yield JoinedBlock(row, row + len(piece), piece.nbytes, piece, reader)
                first += len(rows)


@dataclass(slots=True)
class JoinedBlock(Block):
    rows: Any
    reader: JoinedReader

    def parse(self, on_bad: OnBad) -> Parsed:
        return self.reader.parse(self.rows, on_bad)

    def columns(self) -> TableBlock:
        """Return the features of the rows as columns, to show their values."""
        features = [row if isinstance(row, dict) else {} for row in features_of(self.rows)]
        schema = replace(self.reader.schema.inputs(), label="label")
        names = list(dict.fromkeys(slot.source_name for slot in schema.read_columns))
        return TableBlock(self.at, self.end, self.size, table_of(features, names, schema)[0], None)  # type: ignore[arg-type]


def features_of(rows: pa.RecordBatch) -> list[Any]:
    """Return the features of joined rows: a mapping, a list if they were encoded, or the reason why there are none."""
    users: dict[str | None, Any] = {None: {}}
    found: list[Any] = []
    columns = (rows.column(name).to_pylist() for name in ("features", "user", "route"))
    for text, user, route in zip(*columns, strict=True):
        try:
            if user not in users:
                users = {None: {}, user: _parse(user)}
            features = _parse(text)
            if not isinstance(users[user], dict) or not isinstance(features, dict | list):
                raise ValueError("expected an object")
            if isinstance(features, dict):
                if route == "rank":
                    features = {name: value for name, value in features.items() if name not in ("id", "value")}
                features = {**users[user], **features} if users[user] else features
            found.append(features)
        except (ValueError, RecursionError) as error:
            found.append(f"the features are not JSON: {error}")
    return found


def _parse(text: str | None) -> Any:
    return json.loads(text or "null", parse_constant=_no_number)


def _no_number(text: str) -> Any:
    raise ValueError(f"{text} is not a number")


class JoinedReader:
    """Converts joined rows to batches of a schema."""

    def __init__(self, schema: Schema, on_time: Mapping[str, float] | None = None) -> None:
        self.schema = schema
        self._on_time: Floats | None = None
        """Of every label with `late: weight`, the share that comes on time; else 1."""
        if any(task.late == "weight" for task in schema.tasks):
            shares = [
                (on_time or {}).get(task.source_name, 1.0) if task.late == "weight" else 1.0 for task in schema.tasks
            ]
            self._on_time = np.array(shares, np.float32)
        self._plan, self._fields = layout(schema, label=True), request_fields(schema)
        self._names = {
            *(column.source_name for column in schema.dense),
            *(slot.source_name for slot in schema.read_columns),
        }

    def parse(self, rows: pa.RecordBatch, on_bad: OnBad) -> Parsed:
        """Convert rows. `line` of a bad row is its index."""
        labels, bad = self._labels(rows.column("labels"))
        features = features_of(rows)
        known = np.flatnonzero(~np.isnan(labels).all(1)).tolist()
        batch, places = self._convert(features, known, bad)
        for i in bad:
            labels[i] = np.nan
        shown = sorted(bad.items())
        if shown and on_bad == "stop":
            end = shown[0][0]
            kept = np.flatnonzero(places < end)
            places, batch, shown = places[kept], batch.take(kept), shown[:1]
        good = self._with_sides(batch, places, labels, rows, features)
        lines = shown[0][0] + 1 if shown and on_bad == "stop" else len(rows)
        texts = rows.column("features")
        found = [Bad(i, (texts[i].as_py() or "").encode(), *why) for i, why in shown]
        return Parsed(good, lines, len(shown), found)

    def _labels(self, column: Any) -> tuple[Any, dict[int, tuple[str, str]]]:
        """Return the labels of each row, [rows, labels], NaN where it has none; and rows with a value that is no label."""
        counts = np.diff(numbers(column.offsets, np.int32))
        row = np.repeat(np.arange(len(column)), counts)
        first, last = column.offsets[0].as_py(), column.offsets[len(column)].as_py()
        keys, items = column.keys.slice(first, last - first), column.items.slice(first, last - first)
        labels = np.full((len(column), len(self.schema.tasks)), np.nan)
        bad: dict[int, tuple[str, str]] = {}
        for i, task in enumerate(self.schema.tasks):
            ours = pc.equal(keys, task.source_name).to_numpy(zero_copy_only=False)
            values = labels[:, i]
            values[row[ours]] = items.filter(pa.array(ours)).fill_null(np.nan).to_numpy(zero_copy_only=False)
            if task.loss == "log":
                values[(values == 0) | (values == self.schema.negative)] = 0
                wrong, reason = (values != 0) & (values != 1), not_a_label(self.schema)
            else:
                wrong, reason = np.isinf(values) | ((values < 0) & (task.loss == "poisson")), "is out of range"
            bad |= {
                int(at): (task.source_name, f"{values[at]:g} {reason}")
                for at in np.flatnonzero(wrong & ~np.isnan(values))
            }
        return labels, bad

    def _convert(self, features: list[Any], rows: list[int], bad: dict[int, tuple[str, str]]) -> tuple[Batch, Any]:
        """Return the batch of those rows that are good, and their indices. Add the others to `bad`."""
        named = [i for i in rows if i not in bad and isinstance(features[i], dict)]
        encoded = [i for i in rows if i not in bad and isinstance(features[i], list)]
        bad.update({i: ("", features[i]) for i in rows if isinstance(features[i], str)})
        parts: list[Batch] = []
        places: list[int] = []
        if named:
            plain = [self._known(features[i]) for i in named]
            try:
                parts.append(self._batch(plain))
                places += named
            except ValueError:
                for i, row in zip(named, plain, strict=True):
                    try:
                        parts.append(self._batch([row]))
                        places.append(i)
                    except ValueError as error:
                        name, _, reason = _ROW.sub("", str(error)).partition(": ")
                        bad[i] = (name, reason) if reason else ("", name)
        for i in encoded:
            try:
                parts.append(self._encoded(features[i]))
                places.append(i)
            except (ValueError, TypeError, OverflowError, DataError) as error:
                bad[i] = ("", str(error).partition("\n")[0])
        if not parts:
            return nothing(self.schema), np.empty(0, np.int64)
        order = np.argsort(np.array(places))
        batch = concatenate(parts)
        return (
            (batch, np.array(places))
            if (order[1:] > order[:-1]).all()
            else (batch.take(order), np.array(places)[order])
        )

    def _known(self, row: dict[str, Any]) -> dict[str, Any]:
        return row if row.keys() <= self._names else {name: row[name] for name in row if name in self._names}

    def _batch(self, rows: list[dict[str, Any]]) -> Batch:
        dense, keys, offsets, values = self._fields.rows(rows)
        if offsets is not None:
            offsets = offsets.view(np.int64)  # else C's long long, which torch cannot convert
        shaped = dense.reshape(len(rows), len(self.schema.dense))
        return Batch(shaped, keys.view(np.uint64), len(self.schema.key_columns), offsets, values=values)

    def _encoded(self, row: list[Any]) -> Batch:
        """Return a row that its client had encoded: it must have been by this schema."""
        if len(row) != 4 or row[0] != self.schema.inputs().hash:
            raise ValueError("the features were encoded by another schema")
        keys, weights = row[2], row[3]
        flat = np.array([key for slot in keys for key in slot], np.uint64)
        ends = np.cumsum([0, *map(len, keys)])
        values: Floats | None = None
        if self.schema.values:
            values = np.array([one for slot in weights for one in slot], np.float32)
        dense = np.array([row[1]], np.float32).reshape(1, -1)
        if dense.shape[1] != len(self.schema.dense) or not np.isfinite(dense).all():
            raise ValueError("the dense values do not fit the schema")
        return Batch(dense, flat, len(self.schema.key_columns), ends, values=values)

    def _with_sides(self, batch: Batch, places: Any, labels: Any, rows: pa.RecordBatch, features: list[Any]) -> Batch:
        """Add labels, times and the side columns of the schema."""
        schema, count = self.schema, len(batch)
        chosen: Floats = labels[places].astype(np.float32)
        shape = chosen.shape if len(schema.tasks) > 1 else (count,)
        batch = replace_columns(batch, labels=chosen.reshape(shape))
        if (previous := self._previous(rows, places)) is not None:
            batch.previous = previous.reshape(shape)
        if self._on_time is not None:
            batch.on_time = np.repeat(self._on_time[None], count, 0).reshape(shape)
        batch.times = numbers(rows.column("known"), np.int64)[places] // 1_000_000
        if schema.show:
            batch.shows = np.ones(count, np.float32)
        if schema.click:
            batch.clicks = np.nan_to_num(chosen[:, 0])
        if schema.weight:
            batch.weights = np.ones(count, np.float32)
        if schema.group:
            requests = rows.column("request").to_pylist()
            texts = [_group(features[i], schema.group, requests[i]) for i in places.tolist()]
            out = np.empty((count, 1), np.uint64)
            self._plan.group_keys(*text_buffers(pa.array(texts, pa.string())), out)
            batch.groups = out[:, 0]
        return batch

    def _previous(self, rows: pa.RecordBatch, places: Any) -> Floats | None:
        """Return the labels that the chosen rows replace, NaN where there are none; None if no row replaces any.

        An earlier row with a bad label was not learned, so there is nothing to replace.
        """
        column = rows.column("previous")
        if column.null_count == len(column):
            return None
        labels, bad = self._labels(column)
        labels[list(bad)] = np.nan
        previous: Floats = labels[places].astype(np.float32)
        return None if np.isnan(previous).all() else previous


def on_time_of(schema: pa.Schema) -> dict[str, float]:
    """Return the share of each label that comes on time, as a file of joined rows names it.

    >>> on_time_of(with_on_time({"buy": 0.25}))
    {'buy': 0.25}
    """
    try:
        found = json.loads((schema.metadata or {}).get(ON_TIME, b"{}"))
        shares = {str(name): float(share) for name, share in found.items()}
        return {name: share for name, share in shares.items() if 0 <= share <= 1}
    except (ValueError, TypeError, AttributeError, RecursionError):
        return {}


def with_on_time(shares: Mapping[str, float]) -> pa.Schema:
    """Return the columns of joined rows for a file that names the share of each label that comes on time."""
    return JOINED.with_metadata({**(JOINED.metadata or {}), ON_TIME: json.dumps(dict(shares)).encode()})


def replace_columns(batch: Batch, **columns: Any) -> Batch:
    """Return a batch with other columns."""
    offsets = None if batch.one_each else batch.offsets
    return Batch(batch.dense, batch.keys, batch.slots, offsets, values=batch.values, **columns)  # type: ignore[arg-type]


def _group(features: Any, name: str, request: str) -> str:
    """Return the group of a row: the feature of that name, or its request."""
    value = features.get(name) if isinstance(features, dict) else None
    return request if value is None or isinstance(value, list | dict) else str(value)
