"""Published entries -> a learner again, to score with: rows without statistics, the network from its ONNX file."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
from torch import Tensor

from clickfleet import sections
from clickfleet.config import Config
from clickfleet.errors import CheckpointError
from clickfleet.graph import read_weights
from clickfleet.learner import Learner
from clickfleet.published import Entry
from clickfleet.rules import rule
from clickfleet.schema import Schema
from clickfleet.table import Table


def load(entries: Sequence[Entry], trust: bool = False) -> Learner:
    """A base and the deltas after it, every byte checked; unless trusted, no code that they name is run."""
    last = entries[-1]
    if "pruned_from" in last.manifest:
        raise CheckpointError(
            f"{last.path} has only some of the model's inputs, and its network is a graph", "score it with serve"
        )
    for entry in entries:
        entry.verify()
    settings = dict(last.manifest["model"])
    name, dim = settings.pop("name"), settings.pop("dim")
    origin = "" if trust else str(last.path)
    config = Config(
        data=sections.Data(format=sections.Plugin.parse(last.info["format"], origin)),
        model=sections.Plugin(name, settings, origin),
        table=sections.Table(dim=dim, rule=sections.Plugin("sgd", {})),
    )
    learner = Learner(config, Schema.from_dict(last.manifest["schema"], str(last.path)), rows(entries))
    learner.restore_dense(_dense(learner, read_weights(last.graph())))
    return learner


def _dense(learner: Learner, saved: dict[str, Tensor]) -> dict[str, Tensor]:
    """What the graph has of the network; counters that only training needs and empty tensors are not in it."""
    state = learner.model.state_dict()
    absent = {name for name, mine in state.items() if name.endswith("num_batches_tracked") or not mine.numel()}
    return {name: mine if name in absent else saved[name] for name, mine in state.items() if name in {*saved, *absent}}


def rows(entries: Sequence[Entry]) -> Table:
    """The rows of a base after its deltas; what training kept beside the weights is not in them."""
    factors = int(entries[-1].manifest["factors"])
    table = Table(factors, rule=rule("sgd"))
    newer = np.empty(0, np.uint64)  # keys that a later entry sets or deletes
    for entry in reversed(entries):
        batches = list(entry.batches())
        for batch in batches:
            _restore(table, batch, newer)
        keys = [batch.column("key").to_numpy() for batch in batches]
        newer = np.unique(np.concatenate([newer, entry.deleted(), *keys])) if entry is not entries[0] else newer
    return table


def _restore(table: Table, batch: pa.RecordBatch, newer: np.ndarray[tuple[int], np.dtype[np.uint64]]) -> None:
    key = batch.column("key").to_numpy()
    batch = batch.filter(pa.array(~np.isin(key, newer))) if len(newer) else batch
    size = batch.num_rows
    factors = batch.column("embedx").flatten().to_numpy()
    full = len(factors) > 0 or table.factors == 0
    if len(factors) != size * table.factors * full:
        raise CheckpointError(f"the rows do not fit the model: {table.factors} factors per row were expected")
    plain = {name: batch.column(name).to_numpy() for name in ("key", "slot", "embed_w")}
    zeros, none = np.zeros(size), np.empty(0, np.float32)
    days, scores, flags = zeros.astype(np.uint16), zeros.astype(np.float32), zeros.astype(np.uint8)
    table.core.restore(
        full,
        plain["key"],
        plain["slot"],
        zeros,
        zeros,
        days,
        scores,
        flags,
        plain["embed_w"],
        none,
        factors,
        none,
        0,
        1024,
    )
