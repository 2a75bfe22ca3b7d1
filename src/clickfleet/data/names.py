"""The values behind keys: a bounded dictionary of frequent values per slot, and the range of every dense column.

A key is a hash, from which nothing can be read. `collect` reads a sample of the data a second time, as text, and keeps the most
frequent values. Only values that hash to a key of the parsed rows are kept, so a name is never wrong, whatever the format.

>>> from clickfleet.data.schema import Schema, Slot
>>> schema = Schema(slots=(Slot("city"),))
>>> names = Names(schema, {"city": {"Bern": 2, "Oslo": 1}})
>>> names.name("city", names.keys("city", ["Oslo"])[0])
'Oslo'
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from clickfleet.data.batch import Batch, Keys
from clickfleet.data.formats import Format
from clickfleet.data.logs.source import LineRows, TableRows, column_names, stored, text_columns
from clickfleet.data.memory import Feed
from clickfleet.data.parsing.columns import text_buffers
from clickfleet.data.parsing.delimited import Delimited
from clickfleet.data.parsing.layout import layout
from clickfleet.data.parsing.lines import LineBlock
from clickfleet.data.reader import Reader
from clickfleet.data.schema import Bucket, Dense, Schema
from clickfleet.errors import ClickfleetError

MOST_VALUES = 100_000
"""Values kept in all slots together."""
MOST_BYTES = 4 << 20
"""Bytes of UTF-8 kept in all slots together."""
LONGEST = 200
"""Bytes of the longest value kept."""
MISSING = "(missing)"
"""The name of the key that stands for a missing value."""
SAMPLE_ROWS, SAMPLE_CELLS, SAMPLE_FILES, SAMPLE_S = 10_000, 1_000_000, 16, 5.0
"""Where a sample ends: about so many rows, values and files. The seconds only stop a slow source: equal runs have equal names."""
MOST_CANDIDATES = 2_000_000
"""Tokens × slots tried for one block of a text format without columns."""
MOST_BUCKETS = 10_000
_TOKEN = re.compile(rb"[^\s:|,;=]+|[^\s|,;=]+|[^\s]+")


@dataclass(frozen=True)
class DenseRange:
    """The range of a dense column in the sample, as in the data: from the 1st to the 99th percentile."""

    low: float
    high: float
    median: float
    whole: bool
    """Whether all values are whole numbers."""


@dataclass
class Names:
    """Frequent values by slot, with the number of times each was seen, and ranges of dense columns."""

    schema: Schema
    values: dict[str, dict[str, int]] = field(default_factory=dict)
    """Slot -> value -> count, the most frequent first."""
    ranges: dict[str, DenseRange] = field(default_factory=dict)
    """Dense column -> its range."""

    def __post_init__(self) -> None:
        self._layout = layout(self.schema, label=False)
        self._places = {slot.name: i for i, slot in enumerate(self.schema.slots)}
        self._owners = {slot.name: slot.rows_of for slot in self.schema.key_columns[len(self.schema.slots) :]}
        self._by_key: dict[str, dict[int, str]] = {}

    def __len__(self) -> int:
        return sum(map(len, self.values.values()))

    def keys(self, slot: str, texts: Sequence[str]) -> Keys:
        """Return the key of each value of a slot."""
        return text_keys(self._layout, self._places[slot], pa.array(texts, pa.string()))

    def name(self, slot: str, key: int) -> str | None:
        """Return the value behind a key of a slot or of a column of a history; None if it is not known."""
        slot = self._owners.get(slot, slot)
        place = self._places.get(slot)
        if place is None:
            return None
        if slot not in self._by_key:
            self._by_key[slot] = self._dictionary(slot, place)
        known = self._by_key[slot].get(key)
        if known is None and self.schema.keys.name == "raw" and self.schema.slots[place].bucket is None:
            return str(key)
        return known

    def _dictionary(self, slot: str, place: int) -> dict[int, str]:
        bucket = self.schema.slots[place].bucket
        if bucket is not None:
            return self._buckets(place, bucket)
        if self.schema.keys.name == "raw":
            return {}
        texts = list(self.values.get(slot, {}))
        names = dict(zip(self.keys(slot, texts).tolist(), texts, strict=True)) if texts else {}
        return {int(self._layout.missing_key(place)): MISSING, **names}

    def _buckets(self, place: int, bucket: Bucket) -> dict[int, str]:
        """Return the interval of every bucket, in the units of the data, by its key."""
        columns = [column.name for column in self.schema.dense]
        column = columns.index(bucket.column)
        edges = list(bucket.boundaries) or np.linspace(bucket.low, bucket.high, bucket.buckets + 1).tolist()
        if len(edges) > MOST_BUCKETS:
            return {}
        inside = [(low + high) / 2 for low, high in pairwise(edges)]
        dense = np.zeros((len(inside) + 2, len(columns)), np.float32)
        dense[:, column] = [edges[0] - 1, *inside, edges[-1] + 1]
        out = np.empty((len(dense), 1), np.uint64)
        number = sum(1 for slot in self.schema.slots[:place] if slot.bucket is not None)
        self._layout.bucket_keys(dense, out, number)
        shown = [f"{undo(self.schema.dense[column], edge):.4g}" for edge in edges]
        texts = [f"below {shown[0]}", *(f"{a} to {b}" for a, b in pairwise(shown))]
        texts.append(f"{shown[-1]} and more")
        names = dict(zip(out[:, 0].tolist(), texts, strict=True))
        # With equal buckets, values beyond the limits are in the first and the last bucket.
        names.update(zip(out[1:-1, 0].tolist(), texts[1:-1], strict=True))
        return names

    def merge(self, other: Names) -> Names:
        """Return the values of both. Ranges cover both."""
        values = {slot: dict(counts) for slot, counts in self.values.items()}
        for slot, counts in other.values.items():
            mine = values.setdefault(slot, {})
            for text, count in counts.items():
                mine[text] = mine.get(text, 0) + count
        ranges = dict(self.ranges)
        for name, one in other.ranges.items():
            known = ranges.get(name, one)
            ranges[name] = DenseRange(
                min(known.low, one.low), max(known.high, one.high), known.median, known.whole and one.whole
            )
        return Names(self.schema, values, ranges).limited()

    def limited(self, values: int = MOST_VALUES, size: int = MOST_BYTES) -> Names:
        """Return the most frequent values of each slot, at most so many values and bytes in all."""
        slots = max(1, len(self.values))
        kept = {}
        for slot, counts in self.values.items():
            room, chosen = size // slots, {}
            for text, count in Counter(counts).most_common(max(1, values // slots)):
                room -= len(text.encode())
                if room < 0:
                    break
                chosen[text] = count
            kept[slot] = chosen
        return Names(self.schema, kept, self.ranges)

    def only(self, schema: Schema) -> Names:
        """Return the names of the slots and columns that a smaller schema has."""
        slots, columns = {slot.name for slot in schema.slots}, {column.name for column in schema.dense}
        values = {slot: counts for slot, counts in self.values.items() if slot in slots}
        return Names(schema, values, {name: one for name, one in self.ranges.items() if name in columns})

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        # Lists, because canonical JSON sorts the keys of a mapping, and the order tells the frequency.
        return {
            "version": 1,
            "schema": self.schema.hash,
            "values": {slot: [list(counts), list(counts.values())] for slot, counts in self.values.items()},
            "ranges": {name: asdict(one) for name, one in self.ranges.items()},
        }

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any], schema: Schema) -> Names:
        """Return the names of a model with this schema. Slots and columns that it does not have are left out.

        Raise ValueError if the content is malformed.
        """
        try:
            if plain["version"] != 1:
                raise ValueError(f"its version is {plain['version']}, not 1")
            values = {
                slot: {str(text): int(count) for text, count in zip(*pair, strict=True)}
                for slot, pair in plain["values"].items()
            }
            ranges = {name: DenseRange(**one) for name, one in plain["ranges"].items()}
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"it does not hold names: {error}") from None
        return cls(schema, values, ranges).only(schema)


def text_keys(plan: Any, place: int, texts: pa.Array) -> Keys:
    """Return the key of each text of a slot."""
    out = np.empty((len(texts), 1), np.uint64)
    if len(texts):
        done = plan.text_keys(place, *text_buffers(texts), out)
        if done < len(texts):  # with the key rule raw, a text may be no number
            raise ValueError(f"{texts[int(done)]} has no key")
    return out[:, 0]


def undo(column: Dense, value: float) -> float:
    """Return the value in the data of a transformed dense value."""
    kind = column.transform
    if kind.name == "log1p":
        return float(np.sign(value) * np.expm1(min(abs(value), 700.0)))
    return float(value) if kind.name == "none" else float(value * kind.scale + kind.a)


class _Collector:
    """Counts the values of samples."""

    def __init__(self, schema: Schema) -> None:
        self.schema = schema
        self.plan = layout(schema, label=False)
        self.counts: dict[str, Counter[str]] = {slot.name: Counter() for slot in schema.slots if slot.bucket is None}
        self.dense: list[Any] = []
        self.rows = 0
        self.limit = min(SAMPLE_ROWS, max(200, SAMPLE_CELLS // max(1, len(schema.key_columns))))
        self.deadline = time.monotonic() + SAMPLE_S

    @property
    def full(self) -> bool:
        return self.rows >= self.limit or time.monotonic() > self.deadline

    def add(self, batch: Batch, texts: Callable[[int], pa.Array | None]) -> None:
        """Count the values of a batch. `texts` returns the possible values of a slot, by its position."""
        self.rows += len(batch)
        if self.schema.dense:
            self.dense.append(batch.dense[:: max(1, len(batch) // 2000)])
        if self.schema.keys.name == "raw":  # a key is its own name
            return
        for place, slot in enumerate(self.schema.key_columns):
            if slot.bucket is not None:
                continue
            found = texts(place)
            if found is None or not len(found):
                continue
            keys = text_keys(self.plan, place, found)
            present, times = np.unique(keys_of(batch, place), return_counts=True)
            where = np.searchsorted(present, keys)
            where[where == len(present)] = 0
            if not len(present):
                continue
            known = np.flatnonzero(present[where] == keys)
            counter = self.counts[slot.name if place < len(self.schema.slots) else slot.rows_of]
            for text, count in zip(found.take(known).to_pylist(), times[where[known]].tolist(), strict=True):
                if text and len(text.encode()) <= LONGEST:
                    counter[text] += count

    def names(self) -> Names:
        ranges = {}
        if self.dense:
            every = np.concatenate(self.dense)
            for i, column in enumerate(self.schema.dense):
                present = every[:, i]
                present = present[np.isfinite(present)]
                if len(present):
                    ranges[column.name] = _range(column, present)
        return Names(self.schema, {slot: dict(counts) for slot, counts in self.counts.items()}, ranges).limited()


def _range(column: Dense, values: Any) -> DenseRange:
    low, median, high = (undo(column, float(x)) for x in np.percentile(values, (1, 50, 99), method="nearest"))
    some = np.array([undo(column, float(x)) for x in values[:1000]])
    whole = bool((np.abs(some - np.rint(some)) < 1e-3 * np.maximum(1, np.abs(some) * 1e-2)).all())

    def shown(x: float) -> float:
        return float(round(x)) if whole else float(f"{x:.6g}")

    return DenseRange(shown(low), shown(high), shown(median), whole)


def keys_of(batch: Batch, slot: int) -> Keys:
    """Return all keys of a slot in a batch."""
    if batch.one_each:
        return batch.keys.reshape(len(batch), batch.slots)[:, slot]
    starts, ends = batch.offsets[:-1][slot :: batch.slots], batch.offsets[1:][slot :: batch.slots]
    lengths = ends - starts
    where = np.repeat(starts - np.cumsum(lengths) + lengths, lengths) + np.arange(lengths.sum())
    keys: Keys = batch.keys[where]
    return keys


def collect(*sources: object) -> Names | None:
    """Return the names in a bounded sample of each source, a Reader or a Feed of one schema; None if none can be sampled.

    Data that can be read only once is left alone. A problem with the data is not reported: whoever trains on it finds it too.
    """
    names = None
    for source in sources:
        found = None
        if isinstance(source, Reader):
            found = from_files(source.files, source.format, source.schema)
        elif isinstance(source, Feed):
            found = from_memory(source)
        if found is not None:
            names = found if names is None else names.merge(found)
    return names


def from_files(files: Sequence[str], form: Format, schema: Schema) -> Names:
    """Return the names in a sample of some files: the first rows of several of them."""
    collector = _Collector(schema)
    chosen = [path for path in files if "://" in path or Path(path).is_file()]  # a pipe can be read only once
    chosen = (
        [chosen[int(i)] for i in np.unique(np.linspace(0, len(chosen) - 1, SAMPLE_FILES).astype(int))] if chosen else []
    )
    for number, path in enumerate(chosen, 1):
        share = collector.limit * number // len(chosen)
        try:
            for batch, texts in _file_rows(path, form, schema):
                collector.add(batch, texts)
                if collector.rows >= share or collector.full:
                    break
        except (ClickfleetError, OSError, ValueError, pa.ArrowException):
            continue
        if collector.full:
            break
    return collector.names()


def _file_rows(path: str, form: Format, schema: Schema) -> Iterator[tuple[Batch, Callable[[int], pa.Array | None]]]:
    """Yield the rows of each block, with the possible values of its slots."""
    names = column_names(form, path, schema) if isinstance(form, Delimited) else ()
    needed = [slot.source_name for slot in schema.read_columns]
    blocks = form.blocks(path, schema, 0)
    try:
        for block in blocks:
            rows = stored(block)
            parsed = block.parse("all")
            if not len(parsed.batch):
                continue
            if isinstance(rows, TableRows):
                yield parsed.batch, _columns(rows.content, schema)
            elif isinstance(form, Delimited) and isinstance(rows, LineRows):
                good = rows.without([bad.line for bad in parsed.bad])
                table = text_columns(good.content, names, form, schema, path, list(dict.fromkeys(needed)))
                yield parsed.batch, _columns(table, schema, form.list_separator)
            elif isinstance(block, LineBlock):
                yield parsed.batch, _tokens(rows.content, parsed.batch, schema)
    finally:
        close = getattr(blocks, "close", None)
        if close is not None:
            close()


def _columns(table: pa.RecordBatch, schema: Schema, separator: str = "") -> Callable[[int], pa.Array | None]:
    """Return the distinct values of a slot from the columns of a table."""

    def texts(place: int) -> pa.Array | None:
        slot = schema.key_columns[place]
        if slot.source_name not in table.schema.names:
            return None
        return distinct(table.column(slot.source_name), separator if slot.multi else "")

    return texts


def distinct(column: Any, separator: str = "") -> pa.Array | None:
    """Return the distinct values of a column as text; of its lists, the distinct entries. None if it holds neither text nor integers."""
    import pyarrow.compute as pc

    kinds = pa.types
    if kinds.is_dictionary(column.type):
        column = column.dictionary_decode()
    if kinds.is_map(column.type):
        column = column.keys
    while kinds.is_list(column.type) or kinds.is_large_list(column.type) or kinds.is_fixed_size_list(column.type):
        column = pc.list_flatten(column)
    if kinds.is_dictionary(column.type):
        column = column.dictionary_decode()
    if kinds.is_boolean(column.type):
        column = column.cast(pa.int8())
    if kinds.is_floating(column.type):  # whole numbers with gaps, as pandas stores them
        column = column.cast(pa.int64(), safe=False)
    column = pc.unique(column).drop_null()
    if kinds.is_binary(column.type) or kinds.is_large_binary(column.type) or kinds.is_binary_view(column.type):
        try:
            column = column.cast(pa.string())
        except pa.ArrowInvalid:  # not all of it is text
            column = pa.array([text for raw in column.to_pylist() if (text := _decoded(raw)) is not None], pa.string())
    elif kinds.is_integer(column.type) or kinds.is_string(column.type) or kinds.is_large_string(column.type):
        column = column.cast(pa.string())
    elif kinds.is_string_view(column.type):
        column = column.cast(pa.large_string()).cast(pa.string())
    else:
        return None
    if separator:
        parts = dict.fromkeys(part for text in column.to_pylist() for part in text.split(separator))
        column = pa.array(list(parts), pa.string())
    return column


def _decoded(raw: bytes) -> str | None:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return None


def _tokens(content: bytes, batch: Batch, schema: Schema) -> Callable[[int], pa.Array | None]:
    """Return the tokens of lines, whatever their format. The keys of the rows tell which of them are values of a slot."""
    if schema.keys.name != "hash64":  # keys of the other rules are small numbers, which many tokens would match
        return lambda place: None
    most = max(1000, MOST_CANDIDATES // max(1, len(schema.read_columns)))
    found: dict[bytes, None] = {}
    for line in content.splitlines():
        for piece in line.split():
            found.update(dict.fromkeys(_TOKEN.findall(piece)))
            head, colon, tail = piece.partition(b":")
            if colon:
                found.update(dict.fromkeys((head, tail, tail.rpartition(b":")[0], piece.rpartition(b":")[0])))
        if len(found) > most:
            break
    texts = pa.array([text for raw in found if raw and (text := _decoded(raw)) is not None], pa.string())
    return lambda place: texts


def from_memory(feed: Feed) -> Names | None:
    """Return the names in the first rows of data in memory; None if it can be read only once, or has no columns."""
    collector = _Collector(feed.schema)
    try:
        for table in feed.head(collector.limit):
            for batch in Feed(table, feed.schema, max(1, len(table))):
                collector.add(batch, _columns(table, feed.schema))
            if collector.full:
                break
    except (ClickfleetError, ValueError, TypeError, pa.ArrowException):
        return None
    return collector.names() if collector.rows else None
