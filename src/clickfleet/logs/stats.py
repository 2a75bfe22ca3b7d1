"""What is in a log: rows, click rate, and per column what is missing, how many values it has, the frequent ones."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clickfleet import _core
from clickfleet.bad_lines import Policy
from clickfleet.batch import concatenate
from clickfleet.files import expand
from clickfleet.logs.encode import slot_keys
from clickfleet.logs.sketch import Distinct, Frequent, Spread
from clickfleet.logs.source import COLUMNAR, Piece, Source, schema_for, watched
from clickfleet.schema import Schema, Slot

_GATHER = 16384  # rows per update of the sketches: blocks may be much smaller


@dataclass
class DenseColumn:
    name: str
    missing: int | None = 0
    """None where the format does not tell a missing value from its substitute."""
    spread: Spread = field(default_factory=Spread)

    def to_dict(self) -> dict[str, Any]:
        edges, counts = self.spread.histogram()
        quantiles = {
            f"p{round(100 * share)}": self.spread.quantile(share) for share in (0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
        }
        return {
            "name": self.name,
            "kind": "dense",
            "missing": self.missing,
            "min": self.spread.low if self.spread.count else None,
            "max": self.spread.high if self.spread.count else None,
            "mean": self.spread.mean if self.spread.count else None,
            "deviation": self.spread.deviation,
            **quantiles,
            "edges": edges.tolist(),
            "counts": counts.tolist(),
        }


@dataclass
class SlotColumn:
    name: str
    missing: int = 0
    values: int = 0
    distinct: Distinct = field(default_factory=Distinct)
    frequent: Frequent = field(default_factory=Frequent)

    def to_dict(self, top: int = 10) -> dict[str, Any]:
        return {
            "name": self.name,
            "kind": "slot",
            "missing": self.missing,
            "values": self.values,
            "distinct": self.distinct.estimate(),
            "top": [[value.decode("utf-8", "backslashreplace"), count] for value, count in self.frequent.top(top)],
            "slack": self.frequent.slack,
        }


@dataclass
class Summary:
    """Grows with every piece of a log."""

    schema: Schema
    rows: int = 0
    labelled: int = 0
    clicks: float = 0.0

    def __post_init__(self) -> None:
        self.dense = [DenseColumn(column.name) for column in self.schema.dense]
        self.slots = [SlotColumn(slot.name) for slot in self.schema.slots if slot.bucket is None]

    def add(self, piece: Piece) -> None:
        self.rows += len(piece)
        if piece.columns is not None:
            self._add_columns(piece.columns)
        else:
            self._add_batch(piece)

    def _add_columns(self, columns: Any) -> None:
        import pyarrow as pa

        names = set(columns.column_names)
        if self.schema.label in names:
            labels = columns.column(self.schema.label).cast(pa.float64()).drop_null().to_numpy()
            self._add_labels(labels)
        for dense, column in zip(self.dense, self.schema.dense, strict=True):
            values = _pick(columns, column.source or column.name, names)
            dense.missing = (dense.missing or 0) + values.null_count
            dense.spread.add(values.cast(pa.float64()).drop_null().to_numpy())
        for slot, described in zip(self.slots, self.schema.read_slots, strict=True):
            values, missing = _texts(_pick(columns, described.source or described.name, names))
            slot.missing += missing
            counted = values.value_counts()
            texts = counted.field("values").to_pylist()
            counts = counted.field("counts").to_numpy()
            slot.values += int(counts.sum())
            slot.distinct.add(np.fromiter((_core.hash64("", text) for text in texts), np.uint64, len(texts)))
            slot.frequent.add(texts, counts)

    def _add_batch(self, piece: Piece) -> None:
        batch = piece.batch
        assert batch is not None
        if batch.labels is not None:
            self._add_labels(batch.labels)
        for i, dense in enumerate(self.dense):
            dense.missing = None
            dense.spread.add(batch.dense[:, i])
        places = [i for i, slot in enumerate(self.schema.slots) if slot.bucket is None]
        for place, slot, described in zip(places, self.slots, self.schema.read_slots, strict=True):
            keys, starts, _ = slot_keys(batch, place)
            absent = missing_key(self.schema, described)
            if described.multi:
                slot.missing += int((np.diff(starts) == 0).sum())
            else:
                slot.missing += int((keys == absent).sum())
                keys = keys[keys != absent]
            slot.values += len(keys)
            values, counts = np.unique(keys, return_counts=True)
            slot.distinct.add(values)
            slot.frequent.add([b"%d" % key for key in values.tolist()], counts)

    def _add_labels(self, labels: NDArray[Any]) -> None:
        self.labelled += len(labels)
        self.clicks += float((labels > 0).sum())

    @property
    def ctr(self) -> float | None:
        return self.clicks / self.labelled if self.labelled else None

    def to_dict(self) -> dict[str, Any]:
        columns = [column.to_dict() for column in self.dense] + [slot.to_dict() for slot in self.slots]
        return {"rows": self.rows, "ctr": self.ctr, "columns": columns}


def stats(
    inputs: str | Path | Iterable[str | Path],
    format: str = "criteo",  # noqa: A002
    schema: Schema | None = None,
    bad_lines: Policy = "error",
) -> Summary:
    """A summary of all rows of `inputs`, in memory that does not grow with them."""
    files = expand(inputs)
    log = Source(files, format, schema_for(format, schema), bad_lines)
    summary = Summary(log.schema)
    with watched(files, "reading") as bar:
        for path in files:
            for piece in _gathered(log.pieces(path, columns=format in COLUMNAR, bar=bar)):
                summary.add(piece)
    return summary


def missing_key(schema: Schema, slot: Slot) -> int:
    """The key of a missing value in a single-valued slot."""
    if schema.keys.name == "hash64":
        return int(_core.hash64(slot.name, b""))
    if schema.keys.name == "py2":
        return int(_core.py2_hash((slot.prefix or slot.name).encode())) % schema.keys.modulus
    return 0


def _gathered(pieces: Iterator[Piece]) -> Iterator[Piece]:
    waiting: list[Piece] = []
    for piece in pieces:
        waiting.append(piece)
        if sum(map(len, waiting)) >= _GATHER:
            yield _joined(waiting)
            waiting = []
    if waiting:
        yield _joined(waiting)


def _joined(pieces: list[Piece]) -> Piece:
    import pyarrow as pa

    if pieces[0].columns is not None:
        return Piece(None, pa.Table.from_batches([piece.columns for piece in pieces]).combine_chunks().to_batches()[0])
    return Piece(concatenate([piece.batch for piece in pieces if piece.batch is not None]))


def _pick(columns: Any, name: str, names: set[str]) -> Any:
    from clickfleet.errors import DataError
    from clickfleet.find import closest

    if name not in names:
        raise DataError(f"the data has no column {name!r}{closest(name, names)}", "describe its columns with --schema")
    return columns.column(name)


def _texts(column: Any) -> tuple[Any, int]:
    """A slot's values as bytes, one by one, and in how many rows there is none."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
        lengths = pc.fill_null(pc.list_value_length(column), 0)
        return _texts(pc.list_flatten(column))[0], int(pc.sum(pc.equal(lengths, 0)).as_py() or 0)
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if not pa.types.is_binary(column.type):
        column = column.cast(pa.string()).cast(pa.binary())
    present = column.drop_null()
    present = present.filter(pc.not_equal(pc.binary_length(present), 0))
    return present, len(column) - len(present)
