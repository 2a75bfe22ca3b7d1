"""Convert Arrow columns (also from NumPy, pandas and Polars) to batches, with the same native functions as for text."""

import json
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from clickfleet import _core
from clickfleet.config.plugins import closest
from clickfleet.data.batch import Batch, Floats, Keys
from clickfleet.data.formats import Bad, Block, OnBad, Parsed
from clickfleet.data.histories import history_columns
from clickfleet.data.parsing.layout import dense_groups, layout, not_a_label, unequal_history, without_absent_sides
from clickfleet.data.schema import History, Label, Schema, Slot
from clickfleet.errors import DataError

_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_NUMBERS = (pa.types.is_integer, pa.types.is_floating, pa.types.is_decimal, pa.types.is_null)


class Columns:
    """Converts record batches to rows of a schema. Columns that the schema does not need are ignored."""

    def __init__(self, schema: Schema, present: Collection[str], where: str) -> None:
        self.labelled = all(name in present for name in schema.label_columns)
        self.schema = schema = schema if self.labelled else without_absent_sides(schema, present)
        self._where = where
        self._layout = layout(schema, label=self.labelled)
        needed = [*self.names(schema), *(schema.label_columns if self.labelled else ())]
        for name in needed:
            if name not in present:
                raise DataError(
                    f"{where}: there is no column {name!r}{closest(name, present)}",
                    "set the column's name in the data in the schema (source: …)",
                )
        labels = schema.label_columns if self.labelled else ()
        self.needed = [*labels, *dict.fromkeys(name for name in needed if name not in labels)]
        """Names of the columns to read."""

    @staticmethod
    def names(schema: Schema) -> list[str]:
        """Return the names of the columns that rows without a label have."""
        return [*schema.sides.values(), *dense_groups(schema), *(slot.source_name for slot in schema.read_columns)]

    def parse(self, table: pa.RecordBatch, on_bad: OnBad = "all") -> Parsed:
        """Convert a record batch. `line` of a bad row is its index in the record batch."""
        conversion = _Conversion(self.schema, self._layout, table, self._where)
        try:
            batch = conversion.batch(self.labelled)
        except (pa.ArrowException, KeyError, UnicodeError, MemoryError) as error:  # such as a type unknown to pyarrow
            reason = f"{type(error).__name__}: {error}"
            raise DataError(f"{self._where}: cannot read the columns ({reason})", "write the file again") from error
        if not conversion.bad:
            return Parsed(batch, len(table))
        bad = sorted(conversion.bad.items())[: 1 if on_bad == "stop" else None]
        good = np.ones(len(table), bool)
        good[list(conversion.bad)] = False
        lines = bad[0][0] + 1 if on_bad == "stop" else len(table)
        good[lines:] = False
        shown = [
            Bad(row, json.dumps(table.slice(row, 1).to_pylist()[0], default=str).encode(), *why) for row, why in bad
        ]
        return Parsed(batch.take(np.flatnonzero(good)), lines, len(bad), shown)


class _Conversion:
    """The conversion of one record batch."""

    def __init__(self, schema: Schema, plan: Any, table: pa.RecordBatch, where: str) -> None:
        self.schema, self.plan, self.table, self.where = schema, plan, table, where
        self.rows = len(table)
        self.bad: dict[int, tuple[str, str]] = {}  # row -> field, reason

    def batch(self, labelled: bool) -> Batch:
        schema = self.schema
        labels = self._labels() if labelled else None
        shows, weights = (self._amounts(name, 1.0) if name else None for name in (schema.show, schema.weight))
        clicks = None
        if schema.click:
            clicks = self._amounts(schema.click, np.nan)
            first = np.float32(0) if labels is None else np.nan_to_num(labels if labels.ndim == 1 else labels[:, 0])
            clicks = np.where(np.isnan(clicks), first, clicks).astype(np.float32)
        times = self._times(schema.time) if schema.time else None
        groups = self._groups(schema.group) if schema.group else None
        dense = self._dense()
        keys, offsets, values = self._keys(dense)
        return Batch(
            dense, keys, len(schema.key_columns), offsets, labels, shows, clicks, weights, times, groups, values
        )

    def _column(self, name: str) -> pa.Array:
        return _without_views(self.table.column(name))

    def _floats(self, name: str, column: pa.Array) -> NDArray[np.float64]:
        kind = column.type
        if pa.types.is_dictionary(kind):
            column, kind = column.dictionary_decode(), kind.value_type
        if pa.types.is_boolean(kind):
            column = column.cast(pa.int8())
        elif _is_text(kind) and any(name == slot.source_name for slot in self.schema.read_columns):
            return self._parsed_numbers(name, column)  # the column is also a slot, whose numbers may be text
        elif not any(check(kind) for check in _NUMBERS):
            raise self._wrong(name, kind, "a number")
        # safe=False: an integer beyond 2^53 is rounded, as in a text file
        wide: pa.Array = column.cast(pa.float64(), safe=False)
        return np.ascontiguousarray(wide.to_numpy(zero_copy_only=False), np.float64)

    def _parsed_numbers(self, name: str, column: pa.Array) -> NDArray[np.float64]:
        """Parse numbers stored as text. Empty text is a missing value."""
        numbers = np.full(len(column), np.nan)
        for row, text in enumerate(column.to_pylist()):
            if text:
                text = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
                if _NUMBER.fullmatch(text):
                    numbers[row] = float(text)
                else:
                    self.bad.setdefault(row, (name, f"{text!r:.42} is not a number"))
        return numbers

    def _wrong(self, name: str, kind: Any, wanted: str) -> DataError:
        return DataError(f"{self.where}: column {name!r} has type {kind}; expected {wanted}", "convert it first")

    def _numbers(self, name: str, missing: float | str) -> Floats:
        """Return a column with one number per row. A missing value is replaced by `missing` or, if that is a text, is bad."""
        wide = self._floats(name, self._column(name))
        absent = np.isnan(wide)
        if isinstance(missing, str):
            for row in np.flatnonzero(absent):
                self.bad.setdefault(int(row), (name, missing))
        else:
            wide = np.where(absent, missing, wide)
        with np.errstate(over="ignore"):
            narrow = wide.astype(np.float32)
        for row in np.flatnonzero(np.isinf(narrow)):
            self.bad.setdefault(int(row), (name, f"{wide[row]} is out of range"))
        return narrow

    def _amounts(self, name: str, missing: float) -> Floats:
        """Return a column of numbers that must not be negative: shows, clicks or weights."""
        amounts = self._numbers(name, missing)
        for row in np.flatnonzero(amounts < 0):
            self.bad.setdefault(int(row), (name, f"{amounts[row]:g} is out of range"))
        return amounts

    def _labels(self) -> Floats:
        """Return the labels: [B], or [B, T] if there are several, of which a row must have at least one."""
        tasks = self.schema.tasks
        if len(tasks) == 1:
            return self._label(tasks[0], "the label is missing")
        labels = np.stack([self._label(task, np.nan) for task in tasks], axis=1)
        for row in np.flatnonzero(np.isnan(labels).all(1)):
            self.bad.setdefault(int(row), ("", "the label is missing"))
        return labels

    def _label(self, task: Label, missing: float | str) -> Floats:
        name = task.source_name
        labels = self._numbers(name, missing)
        if task.loss == "log":
            known = (labels == self.schema.negative) | (labels == 1) | np.isnan(labels)
            for row in np.flatnonzero(~known):
                self.bad.setdefault(int(row), (name, f"{labels[row]:g} {not_a_label(self.schema)}"))
            return np.where(np.isnan(labels), labels, labels == 1).astype(np.float32)
        if task.loss == "poisson":
            for row in np.flatnonzero(labels < 0):
                self.bad.setdefault(int(row), (name, f"{labels[row]:g} is out of range"))
        return labels

    def _times(self, name: str) -> NDArray[np.int64]:
        column = self._column(name)
        if pa.types.is_dictionary(column.type):
            column = column.dictionary_decode()
        if pa.types.is_timestamp(column.type) or pa.types.is_date(column.type):
            column = column.cast(pa.timestamp("s"), safe=False)
        elif pa.types.is_floating(column.type):
            column = self._whole_times(name, column)
        elif _is_text(column.type):
            column = self._parsed_times(name, column)
        elif not pa.types.is_integer(column.type) and not pa.types.is_null(column.type):
            raise self._wrong(name, column.type, "an integer, a timestamp or text")
        for row in np.flatnonzero(column.is_null()):
            self.bad.setdefault(int(row), (name, "the time is missing"))
        times: NDArray[np.int64] = column.cast(pa.int64()).fill_null(0).to_numpy(zero_copy_only=False)
        return times

    def _whole_times(self, name: str, column: pa.Array) -> pa.Array:
        """Return times stored as floats as integers, as pandas stores them if some are missing."""
        numbers = np.floor(self._floats(name, column))
        far = np.abs(numbers) >= 2.0**53
        for row in np.flatnonzero(far):
            self.bad.setdefault(int(row), (name, f"{numbers[row]:g} is out of range"))
        missing = np.isnan(numbers) | far
        return pa.array(np.where(missing, 0, numbers).astype(np.int64), mask=missing)

    def _parsed_times(self, name: str, column: pa.Array) -> pa.Array:
        """Return times stored as text as integers. Empty text is a missing value."""
        missing = pc.equal(pc.binary_length(column).fill_null(0), 0).to_numpy(zero_copy_only=False)
        ends, data = text_buffers(column.fill_null(""))
        out = np.zeros(self.rows, np.int64)
        at = 0
        while at < self.rows:
            at += int(_core.text_times(np.ascontiguousarray(ends[at:]), data, out[at:]))
            if at < self.rows:
                if not missing[at]:
                    self.bad.setdefault(at, (name, f"{column[at].as_py()!r:.42} is not a time"))
                out[at] = 0
                at += 1
        return pa.array(out, mask=missing)

    def _groups(self, name: str) -> Keys:
        column = self._column(name)
        if pa.types.is_floating(column.type):
            column = self._whole(name, column, int)
        text = column.cast(pa.string()).fill_null("")
        out = np.empty((self.rows, 1), np.uint64)
        self.plan.group_keys(*text_buffers(text), out)
        return out[:, 0]

    def _dense(self) -> Floats:
        dense = np.empty((self.rows, len(self.schema.dense)), np.float32)
        for name, places in dense_groups(self.schema).items():
            column = self._column(name)
            if _is_list(column.type):
                self._dense_list(name, column, places, dense)
            elif len(places) > 1:
                raise self._wrong(name, column.type, f"a list of {len(places)} numbers")
            else:
                self._dense_column(name, places[0], self._floats(name, column), dense)
        return dense

    def _dense_list(self, name: str, column: pa.Array, places: list[int], dense: Floats) -> None:
        lengths = column.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
        flat = self._floats(name, _flat(column))
        wide = np.full((self.rows, len(places)), np.nan)
        for row in np.flatnonzero((lengths != len(places)) & (lengths > 0)):
            self.bad.setdefault(int(row), (name, f"{lengths[row]} values, not {len(places)} as in the schema"))
        whole = lengths == len(places)
        wide[whole] = flat[np.repeat(whole, lengths)].reshape(-1, len(places))
        for i, place in enumerate(places):
            self._dense_column(name, place, np.ascontiguousarray(wide[:, i]), dense)

    def _dense_column(self, name: str, place: int, wide: NDArray[np.float64], dense: Floats) -> None:
        out = dense[:, place : place + 1]
        self._each(
            name, self.rows, lambda at: self.plan.dense_values(place, wide[at:], out[at:]), out, "is out of range", wide
        )

    def _each(
        self, name: str, n: int, fill: Callable[[int], int], out: Any, reason: str, values: Any, row_of: "RowOf" = int
    ) -> None:
        """Call `fill` until all values are filled. Each value at which it stops is bad; the next call starts after it."""
        at = fill(0) if n else 0
        while at < n:
            out[at] = 0
            self.bad.setdefault(row_of(at), (name, f"{values[at]} {reason}"))
            at += 1 + (fill(at + 1) if at + 1 < n else 0)

    def _keys(self, dense: Floats) -> tuple[Keys, Any, Any]:
        slots = self.schema.key_columns
        columns = [None if slot.bucket else self._column(slot.source_name) for slot in slots]
        ragged = self.schema.values or any(
            slot.multi or (column is not None and _is_list(column.type))
            for slot, column in zip(slots, columns, strict=True)
        )
        if ragged:
            return self._ragged(columns, dense)
        woven: list[tuple[Keys, Any]] = []  # keys, and which of them each row uses
        buckets = self._bucket_keys(dense)
        for i, (slot, column) in enumerate(zip(slots, columns, strict=True)):
            if column is None:
                woven.append((next(buckets), None))
            else:
                woven.append(self._keys_of(i, slot, column, int))
        keys = np.empty((self.rows, len(slots)), np.uint64)
        _core.weave(woven, keys)
        return keys.reshape(-1), None, None

    def _bucket_keys(self, dense: Floats) -> Iterator[Keys]:
        """Yield the keys of each bucketed slot."""
        for number in range(len(self.schema.key_columns) - len(self.schema.read_columns)):
            out = np.empty((self.rows, 1), np.uint64)
            self.plan.bucket_keys(dense, out, number)
            yield out[:, 0]

    def _by_dictionary(self, column: pa.Array) -> bool:
        # With the key rule raw, and among floats, a bad dictionary entry must be traced to its rows.
        kind = column.type
        return bool(
            pa.types.is_dictionary(kind)
            and self.schema.keys.name != "raw"
            and not pa.types.is_floating(kind.value_type)
        )

    def _dictionary(self, i: int, slot: Slot, column: pa.Array) -> tuple[Keys, Any]:
        """Return the keys of a dictionary's entries, the last for a missing value, and the entry of each row."""
        uses = column.indices.cast(pa.int32())
        uses = uses.fill_null(len(column.dictionary)) if uses.null_count else uses
        keys = np.empty((len(column.dictionary) + 1, 1), np.uint64)
        keys[-1] = self.plan.missing_key(i)
        self._slot_keys(i, slot, column.dictionary, keys[:-1], int)
        return keys[:, 0], uses.to_numpy()

    def _ragged(self, columns: list[Any], dense: Floats) -> tuple[Keys, Any, Any]:
        buckets = self._bucket_keys(dense)
        lists = [
            _Lists(next(buckets)) if column is None else self._slot_lists(i, slot, column)
            for i, (slot, column) in enumerate(zip(self.schema.key_columns, columns, strict=True))
        ]
        for history, first in history_columns(self.schema):
            self._keep_events(history, first, lists)
        keys, offsets, values = _core.weave_lists([column.arrays() for column in lists], self.rows)
        if self.schema.values and values is None:
            values = np.ones(len(keys), np.float32)
        return keys.view(np.uint64), offsets.view(np.int64), values if self.schema.values else None

    def _keep_events(self, history: History, first: int, lists: list["_Lists"]) -> None:
        """Check the columns of a history against each other, and drop the events beyond its limit."""
        events = lists[first].counts
        for place in range(first, first + len(history.slots)):
            column = lists[place]
            for row in np.flatnonzero(column.counts != events):
                reason = unequal_history(self.schema, place, int(events[row]), int(column.counts[row]))
                self.bad.setdefault(int(row), ("", reason))
            kept = np.minimum(column.counts, history.max)
            if history.keep == "last":
                column.starts = column.starts + (column.counts - kept)
            lists[place].counts = kept

    def _slot_lists(self, i: int, slot: Slot, column: pa.Array) -> "_Lists":
        """Return the keys of a slot that may have several per row, or of a column of a history."""
        values, is_event = None, i >= len(self.schema.slots)
        if is_event and not _is_list(column.type) and not pa.types.is_null(column.type):
            raise self._wrong(slot.source_name, column.type, "a list, as a history needs")
        if not _is_list(column.type) and not slot.multi:
            return _Lists(*self._keys_of(i, slot, column, int))
        if _is_list(column.type):
            pairs = pa.types.is_map(column.type)
            if pairs:
                kind = column.type
                column = column.cast(pa.list_(pa.struct([("key", kind.key_type), ("value", kind.item_type)])))
            counts = column.value_lengths().fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
            flat = _flat(column)
            if pairs:
                values = self._floats(slot.name, flat.field(1)).astype(np.float32)
                flat = flat.field(0)
        else:
            counts = column.is_valid().to_numpy(zero_copy_only=False).astype(np.int64)
            flat = column.drop_null()
        ends = np.cumsum(counts)
        keys, uses = self._keys_of(i, slot, flat, lambda entry: int(np.searchsorted(ends, entry, "right")))
        if not is_event and (absent := _empty(flat)) is not None:  # an empty value has a key only if it is an event
            present = ~absent
            counts = counts - np.bincount(np.repeat(np.arange(self.rows), counts)[absent], minlength=self.rows)
            ends = np.cumsum(counts)
            keys, uses = (keys[present], None) if uses is None else (keys, uses[present])
            values = None if values is None else values[present]
        starts = ends - counts
        if not slot.multi:
            for row in np.flatnonzero(counts > 1):
                self.bad.setdefault(int(row), (slot.name, "has several values, but the slot is single-valued"))
            keys = np.append(keys, np.uint64(self.plan.missing_key(i)))
            uses = np.arange(len(keys) - 1, dtype=np.int32) if uses is None else uses
            uses = np.append(uses, np.int32(len(keys) - 1))
            values = None if values is None else np.append(values, np.float32(1))
            starts = np.where(counts == 0, len(uses) - 1, starts)
            counts = np.ones(self.rows, np.int64)
        return _Lists(keys, uses, starts, counts, values)

    def _keys_of(self, i: int, slot: Slot, column: pa.Array, row_of: "RowOf") -> tuple[Keys, Any]:
        """Return keys, and which of them each entry of a column uses; None: they are in order."""
        if self._by_dictionary(column):
            return self._dictionary(i, slot, column)
        out = np.empty((len(column), 1), np.uint64)
        self._slot_keys(i, slot, column, out, row_of)
        return out[:, 0], None

    def _whole(self, name: str, column: pa.Array, row_of: "RowOf") -> pa.Array:
        """Return ids stored as floats as integers; NaN is a missing value. pandas stores ids so if some are missing."""
        numbers = self._floats(name, column)
        missing = np.isnan(numbers)
        with np.errstate(invalid="ignore"):
            odd = ~missing & ((numbers != np.floor(numbers)) | (np.abs(numbers) >= 2.0**53))
        for at in np.flatnonzero(odd):
            self.bad.setdefault(row_of(int(at)), (name, f"{numbers[at]:g} is not an id; expected text or integers"))
        absent = missing | odd
        return pa.array(np.where(absent, 0, numbers).astype(np.int64), mask=absent)

    def _slot_keys(self, i: int, slot: Slot, column: pa.Array, out: Keys, row_of: "RowOf") -> None:
        """Write the key of each entry of `column` to `out`."""
        kind, n = column.type, len(column)
        name = slot.source_name
        if pa.types.is_dictionary(kind):
            column, kind = column.dictionary_decode(), kind.value_type
        if pa.types.is_boolean(kind):
            column, kind = column.cast(pa.int8()), pa.int8()
        if pa.types.is_floating(kind):
            column, kind = self._whole(name, column, row_of), pa.int64()
        if pa.types.is_integer(kind):
            wide = column.cast(pa.uint64() if pa.types.is_unsigned_integer(kind) else pa.int64())
            numbers = np.ascontiguousarray(wide.fill_null(0).to_numpy(zero_copy_only=False))
            reason = "is negative; the key rule raw needs unsigned integers"
            self._each(
                name, n, lambda at: self.plan.integer_keys(i, numbers[at:], out[at:]), out, reason, numbers, row_of
            )
        elif _is_text(kind) or pa.types.is_null(kind):
            text = column if _is_text(kind) else column.cast(pa.string())
            text = text.fill_null("") if text.null_count else text
            ends, data = text_buffers(text)
            reason = "is not an unsigned 64-bit integer, as the key rule raw requires"
            self._each(name, n, lambda at: self.plan.text_keys(i, ends[at:], data, out[at:]), out, reason, text, row_of)
        else:
            raise self._wrong(name, kind, "text or integers")
        if column.null_count:
            out[column.is_null().to_numpy(zero_copy_only=False), 0] = self.plan.missing_key(i)


RowOf = Callable[[int], int]
"""Returns the row of an entry."""


class _Lists:
    """The keys of a column. Row r uses `counts[r]` entries from `starts[r]` on; without them, entry r."""

    def __init__(
        self, keys: Keys, uses: Any = None, starts: Any = None, counts: Any = None, values: Any = None
    ) -> None:
        self.keys, self.uses, self.starts, self.counts, self.values = keys, uses, starts, counts, values

    def arrays(self) -> tuple[Any, ...]:
        return np.ascontiguousarray(self.keys), self.uses, self.starts, self.counts, self.values


def _empty(column: pa.Array) -> NDArray[np.bool_] | None:
    """Return which entries are null or an empty text; None if no entry is."""
    if pa.types.is_dictionary(column.type):
        inside = _empty(column.dictionary)
        if inside is None and not column.null_count:
            return None
        inside = np.append(np.zeros(len(column.dictionary), bool) if inside is None else inside, True)
        return np.asarray(inside[column.indices.cast(pa.int64()).fill_null(len(inside) - 1).to_numpy()])
    absent = np.zeros(len(column), bool)
    if pa.types.is_floating(column.type):
        absent = np.isnan(column.fill_null(np.nan).to_numpy(zero_copy_only=False))
    elif column.null_count:
        absent = column.is_null().to_numpy(zero_copy_only=False)
    if _is_text(column.type):
        ends, _ = text_buffers(column)
        absent = absent | (np.diff(ends) == 0)
    return absent if absent.any() else None


def _is_list(kind: Any) -> bool:
    return bool(
        pa.types.is_list(kind)
        or pa.types.is_large_list(kind)
        or pa.types.is_fixed_size_list(kind)
        or pa.types.is_map(kind)
    )


def _flat(column: pa.Array) -> pa.Array:
    """Return the values of all lists."""
    return _without_views(pc.list_flatten(column))


def _is_text(kind: Any) -> bool:
    types = pa.types
    return bool(
        types.is_string(kind) or types.is_large_string(kind) or types.is_binary(kind) or types.is_large_binary(kind)
    )


def _without_views(column: pa.Array) -> pa.Array:
    """Convert views, which Polars uses for text, to offsets and bytes."""
    if pa.types.is_string_view(column.type):
        return column.cast(pa.large_string())
    return column.cast(pa.large_binary()) if pa.types.is_binary_view(column.type) else column


def text_buffers(column: pa.Array) -> tuple[Any, NDArray[np.uint8]]:
    """Return the offsets and bytes of a text column."""
    large = pa.types.is_large_string(column.type) or pa.types.is_large_binary(column.type)
    _, ends, data = column.buffers()
    kind: Any = np.int64 if large else np.int32
    if ends is None or not len(column):
        return np.zeros(len(column) + 1, kind), np.empty(0, np.uint8)
    offsets = np.frombuffer(ends, kind)[column.offset : column.offset + len(column) + 1]
    return offsets, np.empty(0, np.uint8) if data is None else np.frombuffer(data, np.uint8)


BLOCK_ROWS = 16384


@dataclass(slots=True)
class TableBlock(Block):
    table: Any
    columns: Columns

    def parse(self, on_bad: OnBad) -> Parsed:
        return self.columns.parse(self.table, on_bad)
