"""Write a learner as published entries: `Publisher` appends to a log, `export` writes a single artifact."""

from __future__ import annotations

import hashlib
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

import clickfleet
from clickfleet.data.arrow_ipc import FLOATS
from clickfleet.data.batch import Batch
from clickfleet.data.histories import history_columns
from clickfleet.data.names import Names
from clickfleet.data.schema import Dense, Schema, Slot
from clickfleet.errors import ConfigError
from clickfleet.store import published
from clickfleet.store.calibration import Calibration
from clickfleet.store.published import Content, Entry, Log, PublishedRows, Sample
from clickfleet.store.row_format import RowFormat
from clickfleet.store.table import Changes, Columns, Floats, Keys, PublishableTable
from clickfleet.training.embedding import Embedding
from clickfleet.training.learner import Learner
from clickfleet.training.onnx_graph import OUTPUTS, Graph, Kept

GOLDEN_ROWS = 16
PUBLISHED_VALUES, PUBLISHED_BYTES = 10_000, 1 << 18
"""Most values, and bytes of them, that a base holds as names."""


class Publisher:
    """Appends the state of a learner to a published log. Call it between two steps.

    `table` holds the rows; by default, it is the table of the learner.
    """

    def __init__(
        self,
        learner: Learner,
        folder: Path | str,
        outputs: Sequence[str] = OUTPUTS,
        cache: Path | None = None,
        table: PublishableTable | None = None,
        rows: RowFormat = "float32",
    ) -> None:
        self.rows: RowFormat = rows
        """The format of published rows."""
        self.learner, self.log, self._cache = learner, Log(folder), cache
        self.table: PublishableTable = learner.table if table is None else table
        self._outputs = tuple(outputs)
        self._graph: Graph | None = None
        self.names: Callable[[], Names | None] = lambda: None
        """Returns the names that a base holds."""

    def publish(self, kind: Literal["base", "delta"], step: int, **info: Any) -> Entry:
        """Publish the changes since the last entry, or everything if there is none. If it fails, the next entry holds them."""
        self.log.refresh()
        known, head = self.log.head, self.log.recover()
        everything = head is None or known != head  # no entry yet, or one recovered from a killed writer
        changes = self.table.cut_changes(base=kind == "base" or everything)
        try:
            entry = self.log.append(changes, self.content(step, **info))
        except BaseException:
            changes.abort()
            raise
        changes.commit()
        return entry

    def content(
        self,
        step: int,
        weights: Mapping[str, Tensor] | None = None,
        calibration: Calibration | None = None,
        **info: Any,
    ) -> Content:
        """Return the content of an entry besides its rows: of these dense weights and this calibration, or as of now."""
        if self._graph is None:
            self._graph = Graph(self.learner.model, self.learner.shape, self._outputs, cache=self._cache)
        facts = content(self.learner, self._graph, step, None, self.names(), weights, calibration, **info)
        return replace(facts, row_format=self.rows)


def content(
    learner: Learner,
    graph: Graph,
    step: int,
    kept: Kept | None = None,
    names: Names | None = None,
    weights: Mapping[str, Tensor] | None = None,
    calibration: Calibration | None = None,
    **info: Any,
) -> Content:
    weights = learner.dense() if weights is None else weights
    calibration = learner.calibration if calibration is None else calibration
    schema, more = learner.schema, {}
    if kept is not None:
        more["pruned_from"] = schema.to_dict()
        schema = pruned(schema, kept)
    form = learner.config.data.format
    return Content(
        schema=schema.to_dict(),
        model=learner.facts["model"],
        factors=learner.table.factors,
        step=step,
        graph=graph.bytes(weights),
        golden=lambda sample: golden(graph, weights, schema, learner.table.factors, sample, calibration),
        outputs=graph.outputs,
        calibration=calibration,
        info={
            "time": time.time(),
            "host": platform.node(),
            "versions": {"clickfleet": clickfleet.__version__, "torch": torch.__version__},
            "format": {"name": form.name, **form.settings},
            **info,
        },
        more=more,
        names=None if names is None else names.only(schema).limited(PUBLISHED_VALUES, PUBLISHED_BYTES).to_dict(),
    )


def export(
    learner: Learner,
    out: Path | str,
    step: int,
    inputs: Sequence[str] | None = None,
    outputs: Sequence[str] = OUTPUTS,
    names: Names | None = None,
    overwrite: bool = False,
    rows: RowFormat = "float32",
) -> Entry:
    """Write the model as an artifact for serving: a single base entry, optionally with only some `inputs`.

    With `overwrite`, it replaces an artifact of that name once it is complete. `rows` is the format of the rows.
    """
    kept = None if inputs is None else kept_inputs(learner.schema, inputs)
    graph = Graph(learner.model, learner.shape, outputs, kept)
    changes = learner.table.cut_changes(base=True)
    try:
        kept_rows: PublishedRows = changes if kept is None else _KeptRows(changes, kept, learner.schema)
        facts = replace(content(learner, graph, step, kept, names), row_format=rows)
        chain = published.chain(facts, 1)
        return published.write(Path(out), kept_rows, facts, replaces=overwrite, sequence=1, parent=None, chain=chain)
    finally:
        changes.abort()


def kept_inputs(schema: Schema, names: Sequence[str]) -> Kept:
    """Return which inputs to keep: every use of each named column. The others count as missing numbers and unknown keys.

    A name is that of the files, which requests use too, or that of the schema. A bucketed slot stays with its dense column. A
    history stays as a whole.
    """
    columns: list[Dense | Slot] = [*schema.dense, *schema.read_columns]
    known = dict.fromkeys(name for column in columns for name in (column.source or column.name, column.name))
    known |= dict.fromkeys(history.name for history in schema.histories)
    for name in names:
        if name not in known:
            raise ConfigError(f"the model has no input {name}", f"inputs: {', '.join(known)}")
    dense = [i for i, column in enumerate(schema.dense) if {column.name, column.source} & set(names)]
    derived = {schema.dense[i].name for i in dense}
    slots = [
        i
        for i, slot in enumerate(schema.slots)
        if (slot.bucket.column in derived if slot.bucket else {slot.name, slot.source} & set(names))
    ]
    kept = {schema.slots[i].name for i in slots}
    histories = []
    for history, first in history_columns(schema):
        columns_of_history = range(first, first + len(history.slots))
        own = {history.name, *history.columns, *(schema.key_columns[i].name for i in columns_of_history)}
        if own & set(names):
            if missing := [slot for slot in history.slots if slot not in kept]:
                raise ConfigError(
                    f"the history {history.name} uses the rows of the slot {missing[0]}, which is not among the inputs",
                    f"add {missing[0]} to the inputs",
                )
            histories.append(history.name)
            slots += columns_of_history
    return Kept(dense, slots, [column.missing for column in schema.dense], histories)


def pruned(schema: Schema, kept: Kept) -> Schema:
    return replace(
        schema,
        dense=tuple(schema.dense[i] for i in kept.dense),
        slots=tuple(schema.slots[i] for i in kept.slots if i < len(schema.slots)),
        histories=tuple(history for history in schema.histories if history.name in kept.histories),
    )


class _KeptRows:
    """The rows of the kept slots, with new slot numbers; all rows if slots may share a row."""

    base = True

    def __init__(self, changes: Changes, kept: Kept, schema: Schema) -> None:
        self._changes, self._by_slot = changes, schema.keys.by_slot
        self._slots = [i for i in kept.slots if i < len(schema.slots)]
        self._slots += {schema.slot_numbers[i] for i in self._slots} - set(self._slots)  # whose rows the kept ones use

    def __iter__(self) -> Iterator[Columns]:
        numbers = np.full(1 << 16, -1 if self._by_slot or not self._slots else 0, np.int32)
        numbers[self._slots] = np.arange(len(self._slots))
        for columns in self._changes:
            slots = numbers[columns["slot"]]
            kept = slots >= 0
            width = len(columns["embedx"]) // len(kept)
            yield {
                "full": columns["full"],
                "key": columns["key"][kept],
                "slot": slots[kept].astype(np.uint16),
                "embed_w": columns["embed_w"][kept],
                "embedx": np.asarray(columns["embedx"]).reshape(len(kept), width)[kept].reshape(-1),
            }

    @property
    def deleted(self) -> Keys:
        return np.empty(0, np.uint64)


def golden(
    graph: Graph,
    weights: Mapping[str, Tensor],
    schema: Schema,
    factors: int,
    sample: Sample,
    calibration: Calibration | None = None,
) -> pa.Table:
    """Return requests with published, deleted and unknown keys, and the outputs of the network for them, the score calibrated."""
    table = {key: row for rows in sample.rows.values() for key, row in rows}
    columns = len(schema.key_columns)
    counts, keys = np.zeros((GOLDEN_ROWS, columns), np.uint32), []
    events = {first + i: history for history, first in history_columns(schema) for i in range(len(history.slots))}
    for row, column in np.ndindex(counts.shape):
        slot = schema.slot_numbers[column]
        known = [key for key, _ in sample.rows.get(slot, ())] + sample.deleted[column::columns][:1].tolist()
        several = (row + column) % 3 if schema.key_columns[column].multi else 1
        if column in events:  # of the same length in all columns of a history; two rows have the same
            several = min(row // 2, events[column].max)
        for turn in range(several):
            choice = ((row // 2 if column in events else row) + turn) % (len(known) + 1)
            keys.append(known[choice] if choice < len(known) else _unknown(row, column))
            counts[row, column] += 1
    dense = np.random.default_rng(GOLDEN_ROWS).uniform(0, 2, (GOLDEN_ROWS, len(schema.dense))).astype(np.float32)
    offsets = np.concatenate([[0], counts.reshape(-1).cumsum()]).astype(np.int64)
    batch = Batch(dense, np.array(keys, np.uint64), columns, offsets)
    embedding = Embedding(schema, factors, histories=graph.reads_histories)
    distinct = embedding.unique(batch)
    rows = np.zeros((len(distinct), 1 + factors), np.float32)
    for place, key in enumerate(distinct.tolist()):
        weights_of_key: Floats = table.get(key, rows[place])
        rows[place, : len(weights_of_key)] = weights_of_key
    expected = graph.run(weights, embedding.inputs(batch, rows, training=False))
    if calibration is not None and "score" in graph.outputs:
        place = graph.outputs.index("score")
        expected[place] = calibration.of(schema)(expected[place], batch)
    per_row = [batch.keys[a:b] for a, b in zip(*_bounds(offsets, columns), strict=True)]
    return pa.table(
        {
            "dense": pa.array(list(dense), FLOATS),
            "keys": pa.array(per_row, pa.list_(pa.uint64())),
            "counts": pa.array(list(counts), pa.list_(pa.uint32())),
            **{
                name: pa.array(list(values.reshape(GOLDEN_ROWS, -1)), FLOATS)
                for name, values in zip(graph.outputs, expected, strict=True)
            },
        }
    )


def _bounds(offsets: Any, slots: int) -> tuple[list[int], list[int]]:
    ends = offsets[::slots] if slots else np.zeros(GOLDEN_ROWS + 1, np.int64)
    return ends[:-1].tolist(), ends[1:].tolist()


def _unknown(row: int, slot: int) -> int:
    """Return a key that no row has."""
    return int.from_bytes(hashlib.blake2b(f"golden {row} {slot}".encode(), digest_size=8).digest())
