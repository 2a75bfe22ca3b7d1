"""Write a learner as published entries: `Publisher` appends to a log, `export` writes a single artifact."""

from __future__ import annotations

import hashlib
import platform
import time
from collections.abc import Callable, Iterator, Sequence
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
from clickfleet.data.names import Names
from clickfleet.data.schema import Dense, Schema, Slot
from clickfleet.errors import ConfigError
from clickfleet.store import published
from clickfleet.store.published import Content, Entry, Log, PublishedRows, Sample
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
    ) -> None:
        self.learner, self.log, self._cache = learner, Log(folder), cache
        self.table: PublishableTable = learner.table if table is None else table
        self._outputs = tuple(outputs)
        self._graph: Graph | None = None
        self.names: Callable[[], Names | None] = lambda: None
        """Returns the names that a base holds."""

    def publish(self, kind: Literal["base", "delta"], step: int, **info: Any) -> Entry:
        """Publish the changes since the last entry, or everything if there is none. If it fails, the next entry holds them."""
        known, head = self.log.lines()[-1:], self.log.recover()
        everything = head is None or known != [head]  # no entry yet, or one recovered from a killed writer
        changes = self.table.cut_changes(base=kind == "base" or everything)
        try:
            entry = self.log.append(changes, self.content(step, **info))
        except BaseException:
            changes.abort()
            raise
        changes.commit()
        return entry

    def content(self, step: int, **info: Any) -> Content:
        """Return the content of an entry besides its rows, as of now."""
        if self._graph is None:
            self._graph = Graph(self.learner.model, self.learner.shape, self._outputs, cache=self._cache)
        return content(self.learner, self._graph, step, names=self.names(), **info)


def content(
    learner: Learner, graph: Graph, step: int, kept: Kept | None = None, names: Names | None = None, **info: Any
) -> Content:
    weights = learner.dense()
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
        golden=lambda sample: golden(graph, weights, schema, learner.table.factors, sample),
        outputs=graph.outputs,
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
) -> Entry:
    """Write the model as an artifact for serving: a single base entry, optionally with only some `inputs`.

    With `overwrite`, it replaces an artifact of that name once it is complete.
    """
    kept = None if inputs is None else kept_inputs(learner.schema, inputs)
    graph = Graph(learner.model, learner.shape, outputs, kept)
    changes = learner.table.cut_changes(base=True)
    try:
        rows: PublishedRows = changes if kept is None else _KeptRows(changes, kept, learner.schema.keys.by_slot)
        facts = content(learner, graph, step, kept, names)
        chain = published.chain(facts, 1)
        return published.write(Path(out), rows, facts, replaces=overwrite, sequence=1, parent=None, chain=chain)
    finally:
        changes.abort()


def kept_inputs(schema: Schema, names: Sequence[str]) -> Kept:
    """Return which inputs to keep: every use of each named column. The others count as missing numbers and unknown keys.

    A name is that of the files, which requests use too, or that of the schema. A bucketed slot stays with its dense column.
    """
    columns: list[Dense | Slot] = [*schema.dense, *schema.read_slots]
    known = dict.fromkeys(name for column in columns for name in (column.source or column.name, column.name))
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
    return Kept(dense, slots, [column.missing for column in schema.dense])


def pruned(schema: Schema, kept: Kept) -> Schema:
    return replace(
        schema,
        dense=tuple(schema.dense[i] for i in kept.dense),
        slots=tuple(schema.slots[i] for i in kept.slots),
    )


class _KeptRows:
    """The rows of the kept slots, with new slot numbers; all rows if slots may share a row."""

    base = True

    def __init__(self, changes: Changes, kept: Kept, by_slot: bool) -> None:
        self._changes, self._kept, self._by_slot = changes, kept, by_slot

    def __iter__(self) -> Iterator[Columns]:
        numbers = np.full(1 << 16, -1 if self._by_slot or not self._kept.slots else 0, np.int32)
        numbers[list(self._kept.slots)] = np.arange(len(self._kept.slots))
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


def golden(graph: Graph, weights: dict[str, Tensor], schema: Schema, factors: int, sample: Sample) -> pa.Table:
    """Return requests with published, deleted and unknown keys, and the outputs of the network for them."""
    table = {key: row for rows in sample.rows.values() for key, row in rows}
    counts, keys = np.zeros((GOLDEN_ROWS, len(schema.slots)), np.uint32), []
    for row, slot in np.ndindex(counts.shape):
        known = [key for key, _ in sample.rows.get(slot, ())] + sample.deleted[slot :: len(schema.slots)][:1].tolist()
        several = schema.slots[slot].multi
        for turn in range((row + slot) % 3 if several else 1):
            choice = (row + turn) % (len(known) + 1)
            keys.append(known[choice] if choice < len(known) else _unknown(row, slot))
            counts[row, slot] += 1
    dense = np.random.default_rng(GOLDEN_ROWS).uniform(0, 2, (GOLDEN_ROWS, len(schema.dense))).astype(np.float32)
    offsets = np.concatenate([[0], counts.reshape(-1).cumsum()]).astype(np.int64)
    batch = Batch(dense, np.array(keys, np.uint64), len(schema.slots), offsets)
    embedding = Embedding(schema, factors)
    distinct = embedding.unique(batch)
    rows = np.zeros((len(distinct), 1 + factors), np.float32)
    for place, key in enumerate(distinct.tolist()):
        weights_of_key: Floats = table.get(key, rows[place])
        rows[place, : len(weights_of_key)] = weights_of_key
    expected = graph.run(weights, embedding.inputs(batch, rows, training=False))
    per_row = [batch.keys[a:b] for a, b in zip(*_bounds(offsets, len(schema.slots)), strict=True)]
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
