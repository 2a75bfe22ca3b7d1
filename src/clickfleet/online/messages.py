"""The records of a pass in a file: text as it came, JSON and Arrow as an Arrow stream with the schema's columns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa

from clickfleet import storage
from clickfleet.config import Config
from clickfleet.errors import DataError
from clickfleet.online.broker import Record
from clickfleet.opening import schema_of
from clickfleet.schema import Schema

Records = dict[int, list[Record]]
"""By partition, in the order of their offsets."""


class Spool:
    """A folder with the records of the last passes; they are in the topic too, so a file that is lost is written again."""

    def __init__(self, folder: Path, config: Config) -> None:
        self.folder, self.config = folder, config
        assert config.online.kafka is not None
        self.kind = config.online.kafka.format
        self.columns = None if self.kind == "text" else columns_of(schema_of(config))

    def rows_of(self, record: Record) -> int:
        """How many rows a record holds, about: blank lines count too."""
        value = record.value
        if self.kind == "arrow":
            with _naming(record), pa.ipc.open_stream(value) as stream:
                return sum(batch.num_rows for batch in stream)
        return len(value.rstrip(b"\n").splitlines()) if value else 0

    def write(self, name: str, records: Records) -> tuple[tuple[str, ...], tuple[int, ...]]:
        """The file of a pass and its size; no file where there are no rows."""
        ordered = [record for p in sorted(records) for record in records[p] if record.value]
        if not ordered:
            return (), ()
        path = self.folder / (f"{name}.txt" if self.columns is None else f"{name}.arrow")
        hidden = path.with_name(f".{path.name}.writing")
        with storage.plainly(path):
            self.folder.mkdir(parents=True, exist_ok=True)
            try:
                self._fill(hidden, ordered)
                hidden.replace(path)
            finally:
                hidden.unlink(missing_ok=True)
        return (str(path),), (path.stat().st_size,)

    def _fill(self, path: Path, ordered: list[Record]) -> None:
        if self.columns is None:
            with path.open("wb") as out:
                for record in ordered:
                    out.write(record.value.rstrip(b"\n") + b"\n")
            return
        with path.open("wb") as sink, pa.ipc.new_stream(sink, self.columns) as writer:
            for start in range(0, len(ordered), 4096):
                writer.write_table(self._table(ordered[start : start + 4096]))

    def _table(self, records: list[Record]) -> pa.Table:
        assert self.columns is not None
        if self.kind == "arrow":
            return pa.concat_tables([self._arrow(record) for record in records])
        rows: list[dict[str, Any]] = []
        skip = self.config.data.bad_lines != "error"
        for record in records:
            for line in record.value.splitlines():
                try:
                    row = json.loads(line)
                    if not isinstance(row, dict):
                        raise ValueError("not an object")
                    rows.append({field.name: _fit(row.get(field.name), field.type) for field in self.columns})
                except (ValueError, TypeError) as error:
                    if not skip:
                        raise DataError(
                            f"{record.place}: {error}: {line[:100]!r}",
                            "set data.bad_lines=skip to drop such records",
                        ) from None
        return pa.Table.from_pylist(rows, self.columns)

    def _arrow(self, record: Record) -> pa.Table:
        assert self.columns is not None
        with _naming(record), pa.ipc.open_stream(record.value) as stream:
            return stream.read_all().select(self.columns.names).cast(self.columns)

    def prune(self, keep: int) -> None:
        """Removes all but the newest files."""
        files = sorted(path for path in self.folder.glob("*") if not path.name.startswith("."))
        for path in files[:-keep]:
            path.unlink(missing_ok=True)


class _naming:  # noqa: N801  (used like a function)
    """Errors of a record name it."""

    def __init__(self, record: Record) -> None:
        self.record = record

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, pa.ArrowException | KeyError):
            raise DataError(
                f"{self.record.place}: {error}", "messages must be Arrow IPC streams of the schema"
            ) from error


def columns_of(schema: Schema) -> pa.Schema:
    """Arrow columns for the rows of a schema; a missing value is null."""
    whole = pa.uint64() if schema.keys.name == "raw" else pa.string()
    kinds: dict[str, pa.DataType] = {schema.label: pa.float64()}
    for kind, name in schema.sides.items():
        kinds[name] = {"time": pa.int64(), "group": pa.string()}.get(kind, pa.float64())
    for column in schema.dense:
        kinds[column.source or column.name] = pa.float64()
    for slot in schema.read_slots:
        kinds[slot.source or slot.name] = pa.list_(whole) if slot.multi else whole
    return pa.schema(list(kinds.items()))


def _fit(value: Any, kind: pa.DataType) -> Any:
    """A JSON value for a column; text columns take integers in decimal, but no other numbers."""
    if value is None:
        return None
    if pa.types.is_list(kind):
        return [_fit(item, kind.value_type) for item in (value if isinstance(value, list) else [value])]
    if isinstance(value, bool) and not pa.types.is_floating(kind):
        raise ValueError(f"true or false where {kind} is expected")
    if pa.types.is_string(kind):
        if isinstance(value, float) or not isinstance(value, str | int):
            raise ValueError(f"{value!r:.40} is no text and no whole number")
        return str(value)
    if pa.types.is_integer(kind):
        return int(value)
    return float(value)
