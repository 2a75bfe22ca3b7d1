"""Encode rows in a target format, write output files, and derive the schema that reads them.

The formats criteo, csv, parquet and arrow can store raw columns unchanged. The others store keys and transformed dense values,
so the schema of the result has no transforms and the key rule raw.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clickfleet._core import PrintColumn, print_rows
from clickfleet.data.batch import Batch
from clickfleet.data.files import packing, replacing
from clickfleet.data.formats import load
from clickfleet.data.logs.source import COLUMNAR, LogPiece, exact_dense
from clickfleet.data.schema import KeyRule, Label, Schema, Slot
from clickfleet.errors import ConfigError, DataError

Floats = NDArray[np.float32] | NDArray[np.float64]

_LIST_SEPARATOR = "|"


def raw_lines(columns: Any, separator: str, quote: bool) -> bytes:
    """Return an Arrow record batch as delimited lines. A missing value is an empty field."""
    printed = [_raw(columns.column(i), separator, quote, columns.schema.names[i]) for i in range(columns.num_columns)]
    return bytes(print_rows(printed, separator))


def _raw(column: Any, separator: str, quote: bool, name: str) -> PrintColumn:
    import pyarrow as pa

    around: Mapping[str, Any] = {}
    present = None if column.null_count == 0 else column.is_valid().to_numpy(zero_copy_only=False).astype(np.uint8)
    if pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
        if not quote:
            raise DataError(
                f"column {name} contains lists, which this format cannot store", "write csv, parquet or arrow instead"
            )
        column = column.cast(pa.large_list(column.type.value_type))
        starts = column.offsets.to_numpy()
        around = {"starts": starts - starts[0], "between": _LIST_SEPARATOR}
        column = column.flatten()  # an absent list is an empty one
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if around and column.null_count:  # an event without a value
        column = column.cast(pa.string()).fill_null("")
    return _printed(column, present, separator, quote, name, around)


def _printed(
    column: Any, present: NDArray[np.uint8] | None, separator: str, quote: bool, name: str, around: Mapping[str, Any]
) -> PrintColumn:
    import pyarrow as pa
    import pyarrow.compute as pc

    if pa.types.is_boolean(column.type):
        column = column.cast(pa.int8())
    kind = column.type
    if pa.types.is_integer(kind):
        whole = np.uint64 if kind == pa.uint64() else np.int64
        return PrintColumn(column.fill_null(0).to_numpy(zero_copy_only=False).astype(whole), present=present, **around)
    if pa.types.is_floating(kind):
        real = np.float32 if kind == pa.float32() else np.float64
        values = column.fill_null(0).to_numpy(zero_copy_only=False).astype(real)
        return PrintColumn(values, present=present, bare=True, **around)
    if pa.types.is_nested(kind):
        raise DataError(
            f"column {name} has type {kind}, which delimited text cannot store", "write parquet or arrow instead"
        )
    column = (column if pa.types.is_binary(kind) else column.cast(pa.string())).cast(pa.binary())
    if _holds(column, separator + "\n\r" + ('"' if quote else "") + around.get("between", "")):
        if not quote or _holds(column, "\n\r") or around:
            raise DataError(
                f"column {name} contains a value with a separator or line ending", "write parquet or arrow instead"
            )
        column = pc.replace_substring(column, b'"', b'""')
        around = {"prefix": '"', "suffix": '"'}
    _, ends, data = column.buffers()
    ends = np.frombuffer(ends, np.int32)[column.offset : column.offset + len(column) + 1]
    values = np.frombuffer(data, np.uint8) if data is not None and data.size else np.empty(0, np.uint8)
    return PrintColumn(values, ends=ends, present=present, **around)


def _holds(column: Any, characters: str) -> bool:
    """Tell whether a value contains one of `characters`. Search all bytes first, then the single values."""
    import pyarrow.compute as pc

    data = column.buffers()[2]
    content = b"" if data is None else data.to_pybytes()
    candidates = [character.encode() for character in characters if character.encode() in content]
    return any(pc.any(pc.match_substring(column, character)).as_py() for character in candidates)


def slots_lines(batch: Batch, dense: Floats, schema: Schema) -> bytes:
    """Return lines of `name:value` tokens, with the label first."""
    columns = [
        _number(values, prefix=f"{name}:", skip_absent=True) for name, values in row_columns(batch, schema).items()
    ]
    columns += [_dense(dense, i, prefix=f"{column.source_name}:") for i, column in enumerate(schema.dense)]
    columns += [
        _keys(batch, i, prefix=f"{slot.source_name}:", skip_absent=True) for i, slot in enumerate(schema.key_columns)
    ]
    return bytes(print_rows(columns, " "))


def feasign_lines(batch: Batch, dense: Floats, schema: Schema) -> bytes:
    """Return lines of `value:slot` tokens, with the label first and without dense values."""
    assert not dense.shape[1]
    columns = [
        _number(values, suffix=f":{name}", skip_absent=True) for name, values in row_columns(batch, schema).items()
    ]
    columns += [
        _keys(batch, i, suffix=f":{slot.source_name}", skip_absent=True) for i, slot in enumerate(schema.key_columns)
    ]
    return bytes(print_rows(columns, " "))


def multislot_lines(batch: Batch, dense: Floats, schema: Schema) -> bytes:
    """Return lines of counted blocks: dense values, slots (an empty one becomes a 0), histories, other columns, labels."""
    width = dense.shape[1]
    columns = [_dense(dense, i, before=f"{width} " if i == 0 else "") for i in range(width)]
    columns += [
        _keys(batch, i, counted=True, absent="1 0" if i < len(schema.slots) else "0")
        for i in range(len(schema.key_columns))
    ]
    numbers = row_columns(batch, schema)
    for name in schema.label_columns:
        if name in numbers:
            numbers[name] = numbers.pop(name)  # last
    columns += [_block(values) for values in numbers.values()]
    return bytes(print_rows(columns, " "))


def libffm_lines(batch: Batch, dense: Floats, schema: Schema) -> bytes:
    """Return lines of a label and `field:key:value` tokens. The single key of a dense column is its own number."""
    columns = [] if batch.labels is None else [_number(batch.labels)]
    for i in range(dense.shape[1]):
        present = (dense[:, i] != 0).astype(np.uint8)
        columns.append(_dense(dense, i, prefix=f"{i}:{i}:", present=present, skip_absent=True))
    values = np.ones(len(batch.keys), np.float32) if batch.values is None else batch.values
    columns += [
        _keys(batch, i, prefix=f"{dense.shape[1] + i}:", skip_absent=True, values=values) for i in range(batch.slots)
    ]
    return bytes(print_rows(columns, " "))


def row_columns(batch: Batch, schema: Schema) -> dict[str, NDArray[Any]]:
    """Return the labels and the other columns with one value per row, by their names in the files. NaN is a missing label."""
    named: dict[str, Any] = {}
    if batch.labels is not None:
        labels = batch.labels.reshape(len(batch), -1)
        named = {name: np.ascontiguousarray(labels[:, i]) for i, name in enumerate(schema.label_columns)}
    named |= {name: getattr(batch, f"{kind}s") for kind, name in schema.sides.items()}
    return {name: values for name, values in named.items() if values is not None}


def _number(values: NDArray[Any], **around: Any) -> PrintColumn:
    real = values.dtype.kind == "f"
    present = ~np.isnan(values) if real else None
    flags = None if present is None or present.all() else present.astype(np.uint8)
    return PrintColumn(values, bare=real, present=flags, **around)


def _block(values: NDArray[Any]) -> PrintColumn:
    """Print a counted block of one value, or of none if it is missing."""
    real = values.dtype.kind == "f"
    present = ~np.isnan(values) if real else np.ones(len(values), bool)
    starts = np.concatenate([[0], np.cumsum(present)]).astype(np.int64)
    return PrintColumn(values[present], starts=starts, counted=True, absent="0", bare=real)


def _dense(dense: Floats, i: int, **around: Any) -> PrintColumn:
    """Print a double with 12 significant digits, as the published files do, and a float with as few as it needs."""
    return PrintColumn(np.ascontiguousarray(dense[:, i]), digits=12 if dense.dtype == np.float64 else 0, **around)


def _keys(batch: Batch, slot: int, *, values: NDArray[np.float32] | None = None, **around: Any) -> PrintColumn:
    keys, starts, picked = slot_keys(batch, slot, values)
    return PrintColumn(keys, starts=starts, weights=picked, **around)


def slot_keys(
    batch: Batch, slot: int, values: NDArray[np.float32] | None = None
) -> tuple[NDArray[np.uint64], NDArray[np.int64], NDArray[np.float32] | None]:
    """Return the keys of one slot, the index of the first key of each row, and the values of the keys."""
    if batch.one_each:
        pick: Any = slice(slot, None, batch.slots)
        starts = np.arange(len(batch) + 1, dtype=np.int64)
    else:
        begin = batch.offsets[slot :: batch.slots][: len(batch)]
        length = batch.offsets[slot + 1 :: batch.slots][: len(batch)] - begin
        starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(length)])
        pick = np.repeat(begin - starts[:-1], length) + np.arange(starts[-1])
    return (
        np.ascontiguousarray(batch.keys[pick]),
        starts,
        None if values is None else np.ascontiguousarray(values[pick]),
    )


def key_columns(batch: Batch, dense: Floats, schema: Schema) -> Any:
    """Return rows as an Arrow record batch: the label, dense columns as floats, keys as uint64 or lists of them."""
    import pyarrow as pa

    if batch.values is not None and not (batch.values == 1).all():
        raise DataError("the keys have values other than 1, which only libffm can store")
    columns = {name: pa.array(values, from_pandas=True) for name, values in row_columns(batch, schema).items()}
    for i, column in enumerate(schema.dense):
        columns[column.source_name] = pa.array(np.ascontiguousarray(dense[:, i]))
    for i, slot in enumerate(schema.key_columns):
        keys, starts, _ = slot_keys(batch, i)
        one = pa.array(keys)
        columns[slot.source_name] = pa.LargeListArray.from_arrays(starts, one) if slot.multi else one
    return pa.RecordBatch.from_pydict(columns)


LINES: dict[str, Callable[[Batch, Floats, Schema], bytes]] = {
    "slots": slots_lines,
    "feasign": feasign_lines,
    "multislot": multislot_lines,
    "libffm": libffm_lines,
}
"""Text formats that store keys."""
ENDINGS = {"csv": ".csv", "parquet": ".parquet", "arrow": ".arrow"}
"""File extensions of the formats that have one."""


class OutputFile:
    """Writes bytes (text formats) or Arrow record batches (parquet, arrow). `-` means stdout."""

    def __init__(self, path: str | Path, kind: str) -> None:
        self.path, self.kind, self.rows = str(path), kind, 0
        self._writer: Any = None
        if self.path == "-":
            if kind in ("parquet", "arrow"):
                raise DataError(f"cannot write {kind} to stdout", "name a file with --out")
            self._file: Any = sys.stdout.buffer if hasattr(sys.stdout, "buffer") else _Text()
            return
        where = Path(path)
        where.parent.mkdir(parents=True, exist_ok=True)
        self._replacing = replacing(where, durable=True)
        try:
            self._raw: Any = self._replacing.__enter__().open("wb")
        except OSError as error:
            raise DataError(f"cannot write {where}: {error.strerror}") from None
        self._file = self._raw
        if kind not in ("parquet", "arrow") and (packed := packing(self.path)):
            import pyarrow as pa

            self._file = pa.CompressedOutputStream(pa.PythonFile(self._raw, mode="w"), packed)

    def write(self, content: Any, rows: int, header: bytes = b"") -> None:
        """Write `rows` rows, and before the first of a file its `header`."""
        try:
            if header and not self.rows:
                self._file.write(header)
            if self.kind in ("parquet", "arrow"):
                self._open(content.schema).write_batch(content)
            else:
                self._file.write(content)
        except OSError as error:
            raise DataError(f"cannot write {self.path}: {error.strerror or error}", "is the disk full?") from None
        self.rows += rows

    def _open(self, schema: Any) -> Any:
        if self._writer is None:
            import pyarrow as pa
            from pyarrow import parquet

            if self.kind == "parquet":
                self._writer = parquet.ParquetWriter(self._file, schema, compression="zstd")
            else:
                self._writer = pa.ipc.new_file(self._file, schema)
        return self._writer

    def __enter__(self) -> OutputFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.path == "-":
            self._file.flush()
            return
        try:
            if self._writer is not None:
                self._writer.close()
            if self._file is not self._raw:
                self._file.close()
            self._raw.close()
        except BaseException as failure:
            self._replacing.__exit__(type(failure), failure, failure.__traceback__)
            raise
        self._replacing.__exit__(kind, error, trace)


class _Text:
    """A stdout that accepts text only, as in notebooks and tests."""

    def write(self, content: bytes) -> None:
        sys.stdout.write(content.decode("utf-8", "surrogateescape"))

    def flush(self) -> None:
        sys.stdout.flush()


FORMATS = (*COLUMNAR, *LINES)
"""Formats that can be written to files."""


@dataclass(frozen=True)
class Target:
    """The format to write. `schema` describes the input rows; `raw` keeps their columns unchanged."""

    format: str
    schema: Schema
    raw: bool
    drop_dense: bool = False

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise ConfigError(f"cannot write the format {self.format!r}", f"choose one of {', '.join(FORMATS)}")
        if self.raw and self.format not in COLUMNAR:
            raise ConfigError(f"{self.format} stores keys and cannot keep raw values", "choose --keys py2 or hash64")
        if self.format in ("criteo", "libffm") and (self.schema.histories or len(self.schema.tasks) > 1):
            what = "histories" if self.schema.histories else "several labels"
            raise ConfigError(f"{self.format} cannot store {what}", "choose csv, parquet, arrow, slots or multislot")
        if self.format == "criteo":
            if not self.raw:
                raise ConfigError("criteo stores raw values, which cannot be recovered from keys")
            if (len(self.schema.dense), len(self.schema.read_columns)) != (13, 26):
                raise ConfigError(
                    f"a criteo line has 13 dense columns and 26 slots, this schema has {len(self.schema.dense)} "
                    f"and {len(self.schema.read_columns)}"
                )
        if self.format == "libffm" and self.schema.sides:
            raise ConfigError("libffm cannot store the columns show, click, weight, time or group")
        if self.format == "feasign" and self.schema.dense and not self.drop_dense and not self._all_bucketed:
            raise ConfigError(
                "feasign cannot store dense columns",
                "add a bucketed slot to the schema for each, or drop them with --drop-dense",
            )

    @property
    def _all_bucketed(self) -> bool:
        used = {slot.bucket.column for slot in self.schema.slots if slot.bucket}
        return used == {dense.name for dense in self.schema.dense}

    def header(self, piece: LogPiece) -> bytes:
        """Return the header line of a file that starts with these rows."""
        if self.format != "csv":
            return b""
        if self.raw:
            names = [name for name in self._columns if name in piece.columns.schema.names]  # type: ignore[union-attr]
        else:
            assert piece.batch is not None
            names = [*row_columns(piece.batch, self.result)]
            names += [column.source_name for column in self.result.dense]
            names += [slot.source_name for slot in self.result.key_columns]
        quoted = ['"' + name.replace('"', '""') + '"' if any(c in name for c in ',"') else name for name in names]
        return (",".join(quoted) + "\n").encode()

    @property
    def _columns(self) -> list[str]:
        """The raw columns, in the order of the output."""
        schema = self.schema
        names = [dense.source_name for dense in schema.dense]
        names += [slot.source_name for slot in schema.read_columns]
        return list(dict.fromkeys([*schema.label_columns, *names, *schema.sides.values()]))

    @cached_property
    def result(self) -> Schema:
        """The schema of the output."""
        if self.raw:
            return self.schema
        if self.format == "libffm":
            fields = tuple(Slot(str(i), multi=True) for i in range(len(self.schema.dense) + len(self.schema.slots)))
            return Schema((), fields, label="label", keys=KeyRule("raw"), values=True)
        schema = replace(self.schema.applied(), values=False)
        dense = () if self.format == "feasign" else schema.dense
        slots = tuple(
            Slot(slot.name, slot.multi, slot.pooling, slot.source, rows_of=slot.rows_of) for slot in schema.slots
        )
        labels = schema.tasks
        plain = not schema.histories and len(labels) == 1
        known = load(self.format).schema if self.format in LINES and plain else None
        if known is not None and (len(known.dense), len(known.slots)) == (len(dense), len(slots)):
            dense, labels = known.dense, known.tasks
            names = [(given.name, given.source) for given in known.slots]
        elif self.format == "feasign" and not all(slot.name.isdigit() and slot.name != "1" for slot in slots):
            labels = (replace(labels[0], source="1"), *labels[1:])
            names = [(str(i), "") for i, _ in enumerate(slots, 2)]
        else:
            labels = (replace(labels[0], source="1"), *labels[1:]) if self.format == "feasign" else labels
            names = [(slot.name, slot.source) for slot in slots]
        return _renamed(replace(schema, dense=dense, slots=slots), names, labels)

    def encode(self, piece: LogPiece) -> Any:
        """Return rows as bytes or as an Arrow record batch."""
        if self.raw:
            return self._raw(piece.columns)
        assert piece.batch is not None
        dense: Floats = piece.batch.dense
        if piece.columns is not None:
            dense = exact_dense(self.schema, piece.columns)
        if self.format == "feasign":
            dense = np.empty((len(piece.batch), 0), np.float32)
        if self.format in LINES:
            return self._lines(piece.batch, dense)
        columns = key_columns(piece.batch, dense, self.result)
        return raw_lines(columns, ",", True) if self.format == "csv" else columns

    def _lines(self, batch: Batch, dense: Floats) -> bytes:
        if self.format != "libffm" and batch.values is not None and not (batch.values == 1).all():
            raise DataError(f"the keys have values other than 1, which {self.format} cannot store")
        return LINES[self.format](batch, dense, self.result)

    def _raw(self, columns: Any) -> Any:
        import pyarrow as pa

        present = [name for name in self._columns if name in columns.schema.names]
        missing = [name for name in self._columns if name not in present and name not in self.schema.label_columns]
        if missing:
            raise DataError(f"the data has no column {missing[0]!r}", "name its columns in a schema (--schema)")
        picked = columns.select(present)
        if self.format in ("criteo", "csv"):
            for slot in self.schema.key_columns[len(self.schema.slots) :]:
                _check_events(columns.column(slot.source_name), slot.source_name)
            return raw_lines(picked, "\t" if self.format == "criteo" else ",", self.format == "csv")
        text = pa.schema([pa.field(f.name, pa.string()) if pa.types.is_binary(f.type) else f for f in picked.schema])
        try:
            return picked.cast(text)
        except pa.ArrowInvalid as error:
            raise DataError(f"{self.format} cannot store a column that is not UTF-8 text: {error}") from None


def _renamed(schema: Schema, names: list[tuple[str, str]], labels: tuple[Label, ...]) -> Schema:
    """Return the schema with new names of its slots. Every column of keys gets a name of its own in the files."""
    new = {slot.name: name for slot, (name, _) in zip(schema.slots, names, strict=True)}
    taken = {label.source_name for label in labels} | {column.source_name for column in schema.dense}

    def free(wanted: str) -> str:
        name, n = wanted, 1
        while name in taken:
            name, n = f"{wanted}_{n}", n + 1
        taken.add(name)
        return name

    slots = []
    for slot, (name, source) in zip(schema.slots, names, strict=True):
        where = free(source or name)
        slots.append(replace(slot, name=name, source="" if where == name else where, rows_of=new.get(slot.rows_of, "")))
    histories = tuple(
        replace(
            history,
            slots=tuple(new[slot] for slot in history.slots),
            columns=tuple(free(column) for column in history.columns),
        )
        for history in schema.histories
    )
    sides: dict[str, Any] = {kind: free(name) for kind, name in schema.sides.items()}
    one: dict[str, Any] = {"labels": labels}
    if len(labels) == 1 and labels[0] == Label(labels[0].name, source=labels[0].source):
        one = {"labels": (), "label": labels[0].source_name}
    return replace(schema, slots=tuple(slots), histories=histories, **one, **sides)


def _check_events(column: Any, name: str) -> None:
    """Raise DataError if a history has a single event without a value: its field would be empty, as without events."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if not (pa.types.is_list(column.type) or pa.types.is_large_list(column.type)):
        return
    single = column.filter(pc.equal(pc.fill_null(pc.list_value_length(column), 0), 1))
    values = single.flatten()
    if pa.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    text = pa.types.is_string(values.type) or pa.types.is_large_string(values.type) or pa.types.is_binary(values.type)
    if values.null_count or (text and pc.any(pc.equal(pc.binary_length(values), 0)).as_py()):
        raise DataError(
            f"column {name} has a history of one event without a value, which csv cannot store",
            "write parquet or arrow instead",
        )
