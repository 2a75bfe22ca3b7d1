"""Read data with a user's `RecDataset(file_list, config)`, which yields arrays per sample in the order of the network's inputs.

Its samples are `label, slot, slot …, dense`. The label is absent if `runner.inference` is set. `show` precedes the label
if the schema has that column. `arrays` describes samples in another order: for each array the name of its column, the names
of the columns of its elements, or null for one that is not used. A name that comes several times collects the elements. Zeros
are padding in histories and multi-valued slots, and are left out.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import numpy as np

from clickfleet.data.batch import NOT_A_LABEL, Batch
from clickfleet.data.formats import Block, Format, OnBad, Parsed
from clickfleet.data.formats.slots import Slots
from clickfleet.data.schema import Schema
from clickfleet.errors import ClickfleetError, DataError
from clickfleet.paddlerec.original import Values

BLOCK_ROWS = 500


@dataclass(slots=True)
class Samples(Block):
    """Samples of a file, starting at number `at`."""

    at: int
    end: int
    size: int
    path: str
    rows: list[Any]
    schema: Schema
    names: tuple[str, ...] = ()
    """The name of each array of a sample. Empty: the usual order, in which the number of arrays decides."""

    def parse(self, on_bad: OnBad) -> Parsed:
        if self.schema.values:
            return Parsed(self._valued_batch(), len(self.rows))
        if self.names:
            names, labelled = list(self.names), self.schema.label in self.names
        else:
            names, labelled = self._names(len(self.rows[0]))
        batch = self._batch(names, labelled)
        if batch is not None:
            return Parsed(batch, len(self.rows))
        lines = "".join(self._line(i, names, sample) for i, sample in enumerate(self.rows)).encode()
        first = f"{self.schema.label}:".encode() if labelled else b":"
        return Slots().parser(self.schema, first, self.path)(lines, on_bad)

    def _batch(self, names: Sequence[str], labelled: bool) -> Batch | None:
        """Return the samples as a batch if each slot has one id and no number needs a conversion; None otherwise."""
        schema, count = self.schema, len(self.rows)
        plain = all(column.transform.name == "none" for column in schema.dense) and schema.show is None
        if not plain or schema.keys.name != "raw" or len(schema.read_columns) < len(schema.slots):
            return None
        if schema.histories or schema.labels or any(slot.multi for slot in schema.slots):
            return None
        if any(len(sample) != len(names) for sample in self.rows):
            return None
        columns = [np.concatenate([np.ravel(sample[i]) for sample in self.rows]) for i in range(len(names))]
        label = columns.pop(0) if labelled else None
        dense = columns.pop() if schema.dense else np.empty(0, np.float32)
        if any(len(column) != count or column.dtype.kind not in "iu" for column in columns):
            return None
        if len(dense) != count * len(schema.dense) or dense.dtype.kind not in "fiu" or not np.isfinite(dense).all():
            return None
        if label is not None and (
            len(label) != count or label.dtype.kind not in "fiu" or not np.isin(label, (0, 1)).all()
        ):
            return None
        keys = np.stack([column.astype(np.int64).view(np.uint64) for column in columns], 1)
        return Batch(
            np.ascontiguousarray(dense, np.float32).reshape(count, len(schema.dense)),
            keys.reshape(-1),
            len(schema.slots),
            labels=None if label is None else label.astype(np.float32),
        )

    def _valued_batch(self) -> Batch:
        """Return samples of a label, the ids of all fields and their values as a batch."""
        schema, count, fields = self.schema, len(self.rows), len(self.schema.slots)
        for number, sample in enumerate(self.rows):
            sizes = [np.size(part) for part in sample]
            if sizes[-2:] != [fields, fields] or sizes[:-2] not in ([1], []) or len(sample) != len(self.rows[0]):
                raise DataError(
                    f"{self.path}: sample {self.at + number + 1} has arrays of {', '.join(map(str, sizes))} numbers, but the "
                    f"network has {fields} fields: expected a label, {fields} ids and {fields} values",
                    "check num_field in hyper_parameters",
                )
        ids = np.stack([np.ravel(sample[-2]) for sample in self.rows]).astype(np.int64).view(np.uint64)
        values = np.stack([np.ravel(sample[-1]) for sample in self.rows]).astype(np.float32)
        labels = None
        if len(self.rows[0]) > 2:
            labels = np.concatenate([np.ravel(sample[0]) for sample in self.rows]).astype(np.float32)
            if not np.isin(labels, (0, 1)).all():
                raise DataError(f"{self.path}: a label {NOT_A_LABEL}")
        if not np.isfinite(values).all():
            raise DataError(f"{self.path}: a value of a field is not finite")
        dense = np.empty((count, 0), np.float32)
        return Batch(dense, ids.reshape(-1), len(schema.slots), labels=labels, values=values.reshape(-1))

    def _names(self, found: int) -> tuple[list[str], bool]:
        """Return the name of each array of a sample, and whether there is a label; the number of arrays decides."""
        schema = self.schema
        names = [slot.source or slot.name for slot in schema.read_columns] + (["dense"] if schema.dense else [])
        before = [*([schema.show] if schema.show else []), schema.label]
        if found == len(names):
            return names, False
        if found == len(names) + len(before):
            return [*before, *names], True
        if found == len(names) + 1:
            return [schema.label, *names], True
        wanted = f"{len(schema.read_columns)} slots{' and dense values' if schema.dense else ''}"
        raise DataError(
            f"{self.path}: the reader yields {found} arrays per sample, but the network has {wanted}: "
            f"expected {len(names)}, or {len(names) + 1} with a label",
            "check sparse_inputs_slots and dense_input_dim in hyper_parameters",
        )

    def _line(self, number: int, names: Sequence[str], sample: Any) -> str:
        if len(sample) != len(names):
            raise DataError(
                f"{self.path}: sample {self.at + number + 1} has {len(sample)} arrays, but the first one had {len(names)}"
            )
        tokens: list[str] = []
        for name, values in zip(names, sample, strict=True):
            flat = np.asarray(values).reshape(-1)
            if name == "dense":
                columns = self.schema.dense
                if len(flat) != len(columns):
                    raise DataError(
                        f"{self.path}: sample {self.at + number + 1} has {len(flat)} dense values, but the network has {len(columns)}",
                        "check dense_input_dim in hyper_parameters",
                    )
                tokens += [f"{c.source or c.name}:{v!r}" for c, v in zip(columns, flat.tolist(), strict=True)]
            else:  # int64 carries the bits of uint64 ids
                tokens += [f"{name}:{v & 0xFFFF_FFFF_FFFF_FFFF if isinstance(v, int) else v}" for v in flat.tolist()]
        return " ".join(tokens) + "\n"


class RecDatasetRows(Format):
    """Reads each file with a separate dataset, so that any part of it can be read again."""

    def __init__(self, kind: Any, config: Values | None, arrays: Sequence[Any] | None = None) -> None:
        self.kind, self.config, self.arrays = kind, config, arrays

    def blocks(self, path: str, schema: Schema, at: int) -> Iterator[Block]:
        samples = self.samples(path, at)
        first: Any = next(samples, None)
        names: tuple[str, ...] = ()
        if first is None:
            return
        samples = chain([first], samples)
        if self.arrays is not None:
            order = SampleOrder(self.arrays, schema, path, len(first))
            samples, names = map(order.of, samples), order.names
        rows, size = list(islice(samples, BLOCK_ROWS)), os.path.getsize(path)
        while rows:
            following = list(islice(samples, BLOCK_ROWS))
            yield Samples(at, at + len(rows), 0 if following else size, path, rows, schema, names)
            at, rows = at + len(rows), following

    def samples(self, path: str, at: int = 0) -> Iterator[Any]:
        """Yield the samples of a file from number `at` on."""
        number, config = 0, None if self.config is None else dict(self.config)
        try:
            for number, sample in enumerate(self.kind([path], config)):
                if number >= at:
                    yield sample
        except ClickfleetError:
            raise
        except Exception as error:
            where = error.__traceback__
            while where is not None and where.tb_next is not None:
                where = where.tb_next
            line = f" ({where.tb_frame.f_code.co_filename}:{where.tb_lineno})" if where is not None else ""
            raise DataError(
                f"{path}: the reader failed after {number} samples: {type(error).__name__}: {error}{line}",
                "correct the data or the reader",
            ) from error


class SampleOrder:
    """Brings the arrays of a sample into the usual order: the labels, if it has them, each column of keys, dense values."""

    def __init__(self, arrays: Sequence[Any], schema: Schema, path: str, found: int) -> None:
        labels = schema.label_columns
        if found == len(arrays) - len(labels):
            arrays = [names for names in arrays if names not in labels]
        self.arrays, self.path = arrays, path
        given = {name for names in arrays for name in ([names] if isinstance(names, str) else names or [])}
        keys = [slot.source or slot.name for slot in schema.read_columns]
        dense = ["dense"] if "dense" in given else [column.source or column.name for column in schema.dense]
        self.names = tuple(name for name in (*labels, *keys, *dense) if name in given)
        self.keys = frozenset(keys)
        self.histories = [history.columns for history in schema.histories]
        self.padded = {slot.source or slot.name for slot in schema.slots if slot.multi}

    def of(self, sample: Any) -> list[Any]:
        """Return the arrays of a sample in the order of `names`."""
        sizes = [np.size(part) for part in sample]
        wanted = [None if isinstance(names, str) else len(names or []) for names in self.arrays]
        if len(sizes) != len(wanted) or any(n and n != size for n, size in zip(wanted, sizes, strict=True)):
            raise DataError(
                f"{self.path}: the reader yields {len(sizes)} arrays of {sizes} elements, "
                f"expected {len(wanted)} of {[1 if n is None else n for n in wanted]}",
                "check the numbers of slots in hyper_parameters",
            )
        values: dict[str, list[Any]] = {}
        for names, array in zip(self.arrays, sample, strict=True):
            flat = np.ravel(array)
            if isinstance(names, str):
                values.setdefault(names, []).append(flat)
            else:
                for name, value in zip(names or (), flat, strict=False):
                    values.setdefault(name, []).append(value)
        columns = {
            name: _whole(np.hstack(parts)) if name in self.keys else np.hstack(parts) for name, parts in values.items()
        }
        for history in self.histories:
            if not columns.keys() >= set(history):
                continue
            events = np.any([columns[name] != 0 for name in history], 0)
            columns |= {name: columns[name][events] for name in history}
        columns |= {name: columns[name][columns[name] != 0] for name in self.padded & columns.keys()}
        return [columns[name] for name in self.names]


def _whole(ids: Any) -> Any:
    """Return ids as integers, if a reader gives them as floats."""
    return ids.astype(np.int64) if ids.dtype.kind == "f" and np.all(ids == np.floor(ids)) else ids
