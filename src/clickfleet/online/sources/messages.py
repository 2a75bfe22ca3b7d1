"""Write the records of a pass to files: text unchanged, JSON and Arrow as an Arrow stream with the schema's columns.

Every record becomes rows or counts as bad. `data.bad_lines` sets what happens to bad records: an error that names the record; counted
and dropped; or kept with topic, partition, offset, reason and bytes in `<run>/quarantine/<day>-<pass>.records.txt`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from clickfleet.config.load import Config
from clickfleet.data.arrow_ipc import check
from clickfleet.data.bad_lines import places_of, quarantined, write_origins
from clickfleet.data.dataset import schema_of
from clickfleet.data.files import replacing
from clickfleet.data.schema import Schema
from clickfleet.errors import DataError
from clickfleet.online.sources.broker import Record
from clickfleet.store import atomic

Records = dict[int, list[Record]]
"""Partition -> records in the order of their offsets."""
Lines = tuple[int, int, int]
"""Partition and offset of a record, and its number of lines or rows in the file."""

PARTS_PER_WORKER = 4
"""Files of a pass per worker of a cluster, so that the files of a failed worker can be distributed."""
Fits = dict[str, Callable[[Any], Any]]

CHUNK = 4096
"""Records per table."""
ROWS_PER_BYTE = 8
"""Limit on the rows that an Arrow record may claim: one per bit. Beyond it, the record is bad and nothing is allocated."""
UNREADABLE = (pa.ArrowException, OSError, ValueError, TypeError, KeyError, OverflowError, MemoryError)
"""What pyarrow raises for bytes that are not an Arrow stream."""
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_WHOLE = re.compile(r"[+-]?\d{1,30}", re.ASCII)


class BadRecord(NamedTuple):
    """A bad record, or a bad line of a record."""

    record: Record
    reason: str
    text: bytes

    @property
    def words(self) -> str:
        return f"{self.record.place}: {self.reason}: {self.text[:100]!r}"

    @property
    def facts(self) -> dict[str, object]:
        return {**self.record.origin._asdict(), "time_s": self.record.time_s, "reason": self.reason}


class PassFiles(NamedTuple):
    """The files and bad records of a pass."""

    files: tuple[str, ...]
    sizes: tuple[int, ...]
    bad: list[BadRecord]
    quarantine: str | None


class Spool:
    """A folder with the records of recent passes. They are also in the topic, so lost files can be written again.

    A pass is one file for one worker. For several workers, it is several files per worker with equal numbers of rows.
    """

    def __init__(self, folder: Path, config: Config, workers: int = 1) -> None:
        self.folder, self.config, self.workers = folder, config, workers
        assert config.online.kafka is not None
        self.kind = config.online.kafka.format
        self.columns, self._fits = None, Fits()
        if self.kind != "text":
            schema = schema_of(config)
            self.columns = columns_of(schema)
            self._fits = fits_of(self.columns, [name for history in schema.histories for name in history.columns])

    def rows_of(self, record: Record) -> int:
        """Return the number of rows in a record. A bad record, or a bad line, counts as one."""
        if self.kind != "arrow":
            return count_lines(record.value)
        try:
            with pa.ipc.open_stream(record.value) as stream:
                rows = sum(batch.num_rows for batch in stream)
        except UNREADABLE:
            return 1
        return rows if 1 <= rows <= ROWS_PER_BYTE * len(record.value) else 1

    def write(self, name: str, records: Records, wrong: Sequence[BadRecord] = ()) -> PassFiles:
        """Write the files of a pass; none if there are no records. `wrong` holds records already known to be bad."""
        for record in wrong:
            self.refuse(record)
        ordered = [record for p in sorted(records) for record in records[p]]
        bad, paths = list(wrong), list[Path]()
        with atomic.write_errors(self.folder / name):
            self.folder.mkdir(parents=True, exist_ok=True)
            if ordered and self.columns is None:
                paths = self._write_text(name, ordered)
            elif ordered:
                paths = self._write_rows(name, ordered[0].topic, *self._tables(ordered, bad))
            aside = self._quarantine(name, bad)
        return PassFiles(tuple(map(str, paths)), tuple(path.stat().st_size for path in paths), bad, aside)

    def _write_text(self, name: str, ordered: list[Record]) -> list[Path]:
        counts = [count_lines(record.value) for record in ordered]
        shares = self._shares(sum(counts))
        paths = self._paths(name, "txt", len(shares))
        pieces = iter(_pieces(ordered, counts, shares) if len(shares) > 1 else [zip(ordered, counts, strict=True)])
        for path in paths:
            origins: list[Lines] = []
            with replacing(path) as temporary, temporary.open("wb") as out:
                for record, lines in next(pieces):
                    out.write(record.value.rstrip(b"\n") + b"\n")
                    origins.append((record.partition, record.offset, lines))
                write_origins(path, ordered[0].topic, origins)
        return paths

    def _write_rows(self, name: str, topic: str, rows: pa.Table, origins: list[Lines]) -> list[Path]:
        shares = self._shares(len(rows))
        paths = self._paths(name, "arrow", len(shares))
        first = 0
        for path, count in zip(paths, shares, strict=True):
            with replacing(path) as temporary, temporary.open("wb") as sink:
                with pa.ipc.new_stream(sink, rows.schema) as writer:
                    writer.write_table(rows.slice(first, count))
                write_origins(path, topic, _between(origins, first, first + count))
            first += count
        return paths

    def _tables(self, ordered: list[Record], bad: list[BadRecord]) -> tuple[pa.Table, list[Lines]]:
        """Return the rows of records and their origins. Add unreadable records to `bad`."""
        assert self.columns is not None
        origins: list[Lines] = []
        tables = [self.columns.empty_table()]
        read = self._arrow if self.kind == "arrow" else self._json
        for start in range(0, len(ordered), CHUNK):
            tables += read(ordered[start : start + CHUNK], origins, bad)
        return pa.concat_tables(tables), origins

    def _arrow(self, records: list[Record], origins: list[Lines], bad: list[BadRecord]) -> list[pa.Table]:
        assert self.columns is not None
        tables = []
        for record in records:
            try:
                table = read_arrow(record.value, self.columns)
            except ValueError as error:
                self._add(bad, BadRecord(record, str(error), record.value))
                continue
            tables.append(table)
            origins.append((record.partition, record.offset, len(table)))
        return tables

    def _json(self, records: list[Record], origins: list[Lines], bad: list[BadRecord]) -> list[pa.Table]:
        assert self.columns is not None
        rows: list[dict[str, object]] = []
        for record in records:
            before = len(rows)
            for line in record.value.rstrip(b"\n").split(b"\n"):
                try:
                    rows.append(read_json(line, self._fits))
                except ValueError as error:
                    self._add(bad, BadRecord(record, str(error), line))
            if len(rows) > before:
                origins.append((record.partition, record.offset, len(rows) - before))
        return [pa.Table.from_pylist(rows, self.columns)]

    def _add(self, bad: list[BadRecord], record: BadRecord) -> None:
        self.refuse(record)
        bad.append(record)

    def refuse(self, record: BadRecord) -> None:
        """Raise DataError for a bad record if data.bad_lines is "error"."""
        if self.config.data.bad_lines == "error":
            raise DataError(
                record.words,
                "to continue past bad records, set data.bad_lines=quarantine (keeps them in a file) or skip (drops them)",
            )

    def _quarantine(self, name: str, bad: list[BadRecord]) -> str | None:
        """Write the bad records of a pass to the quarantine if it is enabled. Return the file's name."""
        data = self.config.data
        if not bad or data.bad_lines != "quarantine":
            return None
        path = self.folder.parent / "quarantine" / f"{name}.records.txt"
        if data.quarantine is not None:
            path = Path(f"{data.quarantine}.{name}")
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            temporary.write_bytes(b"".join(quarantined(record.facts, record.text) for record in bad))
        return str(path)

    def _shares(self, rows: int) -> list[int]:
        """Return the number of rows for each file of a pass: even, and at least a batch each if every worker still gets a file."""
        if self.workers == 1:
            return [rows]
        each = min(PARTS_PER_WORKER, rows // self.config.data.batch_rows // self.workers)
        return split_evenly(rows, max(1, min(rows, self.workers * max(each, 1))))

    def _paths(self, name: str, ending: str, count: int) -> list[Path]:
        if count == 1:
            return [self.folder / f"{name}.{ending}"]
        return [self.folder / f"{name}.{number:03d}.{ending}" for number in range(count)]

    def prune(self, keep: int) -> None:
        """Remove the files of all but the newest `keep` passes."""
        passes: dict[tuple[int, ...], list[Path]] = {}
        for path in self.folder.glob("[!.]*"):
            passes.setdefault(_pass_of(path), []).append(path)
        for name in sorted(passes)[:-keep]:
            for path in passes[name]:
                path.unlink(missing_ok=True)
                places_of(path).unlink(missing_ok=True)


def _pass_of(path: Path) -> tuple[int, ...]:
    """Return the day and number of a file's pass; numbers may have more than four digits."""
    words = path.name.split(".")[0].split("-")
    return tuple(int(word) if word.isdigit() else -1 for word in words)


def split_evenly(rows: int, parts: int) -> list[int]:
    """Split rows into parts that differ by at most one.

    >>> split_evenly(10, 3)
    [4, 3, 3]
    """
    share, extra = divmod(rows, parts)
    return [share + (part < extra) for part in range(parts)]


def _pieces(ordered: list[Record], counts: list[int], shares: list[int]) -> Iterator[list[tuple[Record, int]]]:
    """Yield the records and their numbers of lines for each of several files. A record may be split between files."""
    at = inside = 0
    for left in shares:
        piece = []
        while left:
            take = min(left, counts[at] - inside)
            record = ordered[at]
            if take < counts[at]:
                value = b"\n".join(record.value.rstrip(b"\n").split(b"\n")[inside : inside + take])
                record = record._replace(value=value)
            piece.append((record, take))
            left, inside = left - take, inside + take
            if inside == counts[at]:
                at, inside = at + 1, 0
        yield piece


def _between(origins: list[Lines], first: int, last: int) -> list[Lines]:
    """Return the origins of rows `first` to `last`."""
    out, at = [], 0
    for partition, offset, rows in origins:
        if (inside := min(at + rows, last) - max(at, first)) > 0:
            out.append((partition, offset, inside))
        at += rows
    return out


def count_lines(value: bytes) -> int:
    """Count the lines of a record; an empty record has one.

    >>> count_lines(b"a\\nb\\n"), count_lines(b"")
    (2, 1)
    """
    return value.rstrip(b"\n").count(b"\n") + 1


def columns_of(schema: Schema) -> pa.Schema:
    """Return Arrow columns for the rows of a schema. Missing values are null."""
    whole = pa.uint64() if schema.keys.name == "raw" else pa.string()
    kinds: dict[str, pa.DataType] = dict.fromkeys(schema.label_columns, pa.float64())
    for kind, name in schema.sides.items():
        kinds[name] = {"time": pa.int64(), "group": pa.string()}.get(kind, pa.float64())
    for column in schema.dense:
        kinds[column.source or column.name] = pa.float64()
    for slot in schema.read_columns:
        kinds[slot.source or slot.name] = pa.list_(whole) if slot.multi else whole
    return pa.schema(list(kinds.items()))


def read_arrow(value: bytes, columns: pa.Schema) -> pa.Table:
    """Return the rows of an Arrow IPC stream with these columns. Raise ValueError with the reason if the bytes are invalid.

    Every buffer is checked before use, because casting damaged offsets would read past the record.
    """
    if not value:
        raise ValueError("the record is empty")
    try:
        source = pa.BufferReader(value)
        batches, rows = [], 0
        with pa.ipc.open_stream(source) as stream:
            names = stream.schema.names
            for name in columns.names:
                if names.count(name) != 1:
                    raise ValueError(f"it has {'no' if name not in names else 'more than one'} column {name!r}")
            for batch in stream:
                rows += batch.num_rows
                if not 0 <= rows <= ROWS_PER_BYTE * len(value):
                    raise ValueError(f"it claims {rows:,} rows in {len(value):,} bytes")
                check(batch)
                batches.append(batch.select(columns.names))
            rest = len(value) - source.tell()
            if rest > 0:
                raise ValueError(f"{rest:,} bytes follow the end of its Arrow stream")
            kinds = pa.schema([stream.schema.field(name) for name in columns.names])
        return pa.Table.from_batches(batches, kinds).cast(columns)
    except UNREADABLE as error:
        if type(error) is ValueError:
            raise
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise ValueError(f"it is not an Arrow stream of the schema: {reason}") from None


def fits_of(columns: pa.Schema, histories: Collection[str] = ()) -> Fits:
    """Return, for each column, the function that converts a JSON value. `histories` are columns of histories."""
    return {field.name: _fit_of(field.type, field.name in histories) for field in columns}


def read_json(line: bytes, fits: Fits) -> dict[str, object]:
    """Return the row of a line with a JSON object. Raise ValueError with the reason if the bytes are invalid."""
    if not line.strip():
        raise ValueError("the line is empty")
    try:
        row = _DECODER.decode(line.decode())
        if not isinstance(row, dict):
            raise ValueError("it is not an object")
        return {name: None if (value := row.get(name)) is None else fit(value) for name, fit in fits.items()}
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start} is not UTF-8") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except (TypeError, OverflowError) as error:
        raise ValueError(str(error)) from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, object]:
    row = dict(pairs)
    if len(row) < len(pairs):
        twice = next(name for i, (name, _) in enumerate(pairs) if name in dict(pairs[:i]))
        raise ValueError(f"the key {twice!r:.60} occurs twice")
    return row


def _no_number(token: str) -> Any:
    raise ValueError(f"{token} is not a JSON number")


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_no_number)


def _fit_of(kind: pa.DataType, history: bool = False) -> Callable[[Any], Any]:
    """Return the conversion for a column. Text columns accept integers, but no other numbers. A history is always a list."""
    if pa.types.is_list(kind):
        return partial(_list, _fit_of(kind.value_type), history)
    if pa.types.is_string(kind):
        return _text
    if pa.types.is_integer(kind):
        return partial(_whole_number, *((0, 2**64) if pa.types.is_unsigned_integer(kind) else (-(2**63), 2**63)))
    return _number


def _list(fit: Callable[[Any], Any], history: bool, value: Any) -> list[Any]:
    if history and not isinstance(value, list):
        raise ValueError(f"{value!r:.40} is not a list, as a history needs")
    return [None if item is None else fit(item) for item in (value if isinstance(value, list) else [value])]


def _text(value: Any) -> str:
    if isinstance(value, bool | float) or not isinstance(value, str | int):
        raise ValueError(f"{value!r:.40} is neither text nor an integer")
    text = str(value)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{text!a:.40} holds half a surrogate pair, which is not valid text") from None
    return text


def _number(value: Any) -> float:
    if isinstance(value, str) and not _NUMBER.fullmatch(value.strip()):
        raise ValueError(f"{value!a:.40} is not a number")
    if not isinstance(value, str | int | float):
        raise ValueError(f"{value!r:.40} is not a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{value!s:.40} is out of range")
    return number


def _whole_number(low: int, high: int, value: Any) -> int:
    if isinstance(value, str) and _WHOLE.fullmatch(value.strip()):
        value = int(value)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{value!a:.40} is not an integer")
    if not low <= value < high:
        raise ValueError(f"{value!s:.40} is out of range")
    return value
