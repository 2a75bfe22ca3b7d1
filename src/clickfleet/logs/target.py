"""What a log becomes in another format: which schema reads it, and how its rows are written.

Raw columns stay as they are between the formats that have them (criteo, csv, parquet, arrow). Everything else holds
keys and transformed dense values, so the schema of the result has no transform and takes its keys as they stand.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from clickfleet.batch import Batch
from clickfleet.errors import ConfigError, DataError
from clickfleet.formats import load
from clickfleet.logs.encode import LINES, Floats, key_columns, raw_lines, row_columns
from clickfleet.logs.source import COLUMNAR, Piece, exact_dense
from clickfleet.schema import KeyRule, Schema, Slot

FORMATS = (*COLUMNAR, *LINES)
"""Formats that can be written."""


@dataclass(frozen=True)
class Target:
    """`schema` is that of the rows that come in; `raw` keeps their columns as they are."""

    format: str
    schema: Schema
    raw: bool
    drop_dense: bool = False

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise ConfigError(f"cannot write {self.format!r}", f"choose one of {', '.join(FORMATS)}")
        if self.raw and self.format not in COLUMNAR:
            raise ConfigError(
                f"{self.format} holds keys, so raw values cannot be kept in it", "choose --keys py2 or hash64"
            )
        if self.format == "criteo":
            if not self.raw:
                raise ConfigError("criteo holds raw values, and keys cannot be turned back into them")
            if (len(self.schema.dense), len(self.schema.read_slots)) != (13, 26):
                raise ConfigError(
                    f"a criteo line has 13 counts and 26 categories, this schema has {len(self.schema.dense)} "
                    f"and {len(self.schema.read_slots)}"
                )
        if self.format == "libffm" and any(
            (self.schema.show, self.schema.click, self.schema.weight, self.schema.time, self.schema.group)
        ):
            raise ConfigError("libffm has a label and keys only: no place for show, click, weight, time or group")
        if self.format == "feasign" and self.schema.dense and not self.drop_dense and not self._all_bucketed:
            raise ConfigError(
                "feasign has no place for dense columns",
                "put each into a bucketed slot of the schema, or leave them out with --drop-dense",
            )

    @property
    def _all_bucketed(self) -> bool:
        used = {slot.bucket.column for slot in self.schema.slots if slot.bucket}
        return used == {dense.name for dense in self.schema.dense}

    def header(self, piece: Piece) -> bytes:
        """The first line of a file that starts with these rows."""
        if self.format != "csv":
            return b""
        if self.raw:
            names = [name for name in self._columns if name in piece.columns.schema.names]  # type: ignore[union-attr]
        else:
            assert piece.batch is not None
            names = [*row_columns(piece.batch, self.result)]
            names += [column.source or column.name for column in self.result.dense]
            names += [slot.source or slot.name for slot in self.result.slots]
        quoted = ['"' + name.replace('"', '""') + '"' if any(c in name for c in ',"') else name for name in names]
        return (",".join(quoted) + "\n").encode()

    @property
    def _columns(self) -> list[str]:
        """The raw columns, in the order in which they are written."""
        schema = self.schema
        names = [dense.source or dense.name for dense in schema.dense]
        names += [slot.source or slot.name for slot in schema.read_slots]
        extras = [schema.show, schema.click, schema.weight, schema.time, schema.group]
        names += [name for name in extras if name is not None]
        return list(dict.fromkeys([schema.label, *names]))

    @cached_property
    def result(self) -> Schema:
        """The schema that reads what is written."""
        if self.raw:
            return self.schema
        if self.format == "libffm":
            fields = tuple(Slot(str(i), multi=True) for i in range(len(self.schema.dense) + len(self.schema.slots)))
            return Schema((), fields, label="label", keys=KeyRule("raw"), values=True)
        schema = replace(self.schema.applied(), values=False)
        dense = () if self.format == "feasign" else schema.dense
        slots = tuple(Slot(slot.name, slot.multi, slot.pooling, slot.source) for slot in schema.slots)
        known = load(self.format).schema if self.format in LINES else None
        if known is not None and (len(known.dense), len(known.slots)) == (len(dense), len(slots)):
            dense, label = known.dense, known.label
            slots = tuple(
                replace(slot, name=given.name, source=given.source)
                for slot, given in zip(slots, known.slots, strict=True)
            )
        elif self.format == "feasign":
            label = "1"
            if not all(slot.name.isdigit() and slot.name != "1" for slot in slots):
                slots = tuple(replace(slot, name=str(i), source="") for i, slot in enumerate(slots, 2))
        else:
            label = schema.label
        return replace(schema, dense=dense, slots=slots, label=label)

    def encode(self, piece: Piece) -> Any:
        """The bytes or the Arrow record batch of some rows."""
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
            raise DataError(f"the keys carry values other than 1, and {self.format} has no place for them")
        write: Callable[[Batch, Floats, Schema], bytes] = LINES[self.format]
        return write(batch, dense, self.result)

    def _raw(self, columns: Any) -> Any:
        import pyarrow as pa

        there = set(columns.schema.names)
        missing = [name for name in self._columns if name not in there and name != self.schema.label]
        if missing:
            raise DataError(f"the data has no column {missing[0]!r}", "name its columns in a schema (--schema)")
        picked = columns.select([name for name in self._columns if name in there])
        if self.format in ("criteo", "csv"):
            return raw_lines(picked, "\t" if self.format == "criteo" else ",", self.format == "csv")
        text = pa.schema([pa.field(f.name, pa.string()) if pa.types.is_binary(f.type) else f for f in picked.schema])
        try:
            return picked.cast(text)
        except pa.ArrowInvalid as error:
            raise DataError(f"a column is not UTF-8 text, so {self.format} cannot hold it: {error}") from None
