"""The state that shards and workers start from: the beginning, an old model, or a cut."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import torch as torch_tensors

from clickfleet import checkpoint, saving
from clickfleet.config import Config
from clickfleet.exchange import Spread
from clickfleet.learner import Learner
from clickfleet.metrics import TOTALS, Metrics
from clickfleet.schema import Schema
from clickfleet.session import Progress

NEXT_EPOCH = {"epoch": -1, "of": 0, "streams": {}}
"""The position after the end of an epoch."""


@dataclass
class Base:
    """Everything a run needs to go on from some instant."""

    path: str | None
    """A checkpoint with the rows, or None for an empty table."""
    table: dict[str, Any]
    """What the checkpoint's table is to be changed in, or the description of the empty one."""
    dense: dict[str, torch.Tensor]
    metrics: Metrics
    steps: int = 0
    rows: int = 0
    batches: int = 0
    """Where the learning-rate schedule stands."""
    reader: dict[str, Any] = field(default_factory=lambda: NEXT_EPOCH)
    """The position of each stream of the epoch (None at its end), and the number of streams that the files were split into."""
    saved: dict[int, dict[str, bytes]] = field(default_factory=dict)
    """What the mode keeps per worker."""
    buffers: bytes = b""
    progress: dict[str, Any] = field(default_factory=lambda: vars(Progress()).copy())
    worker_steps: dict[str, int] = field(default_factory=dict)
    """Batches of each worker up to here since it was connected to the shards."""
    more: dict[str, Any] = field(default_factory=dict)
    """What the run keeps besides, such as how far a stream has been learned from."""


def metrics_of(config: Config, schema: Schema) -> Metrics:
    settings = config.train.metrics
    return Metrics(settings.thresholds, settings.sliding or None, groups=schema.group is not None)


def last_batches(metrics: Metrics) -> NDArray[np.float64] | None:
    """The batches of the sliding window as one set of buckets; None where there are none."""
    if metrics.sliding is None:
        return None
    whole: NDArray[np.float64] = metrics.sliding.state()["window"].reshape(metrics.sliding.size, -1).sum(axis=0)
    return whole if whole[TOTALS.index("rows")] else None


def set_last_batches(metrics: Metrics, whole: NDArray[np.float64]) -> None:
    """The sliding window holds nothing but these buckets from now on: the last batches of several workers."""
    assert metrics.sliding is not None
    window = np.zeros(metrics.sliding.numbers)
    window[: len(whole)] = whole
    metrics.sliding.restore({"window": window, "next": np.ones(1, np.int64)})


def dense_of(learner: Learner) -> dict[str, torch.Tensor]:
    return {"values": learner.flat.values.clone(), **learner.optimizer.state()}


def pack_buffers(learner: Learner) -> bytes:
    found = {name: buffer.clone() for name, buffer in learner.model.named_buffers()}
    return torch_tensors.save(found) if found else b""


def adopt_buffers(learner: Learner, packed: bytes) -> None:
    if packed:
        mine = dict(learner.model.named_buffers())
        for name, tensor in torch_tensors.load(packed).items():
            mine[name].copy_(tensor)


def fresh(config: Config, schema: Schema, learner: Learner) -> Base:
    """The beginning of a run."""
    table = Learner(config, schema).table.describe()
    return Base(None, table, dense_of(learner), metrics_of(config, schema), buffers=pack_buffers(learner))


def start_from(path: Path, config: Config, schema: Schema, learner: Learner) -> tuple[Base, list[str]]:
    """The beginning of a run with what fits of an old model; what does not, in words."""
    changes, anew = saving.fitting(path, config, schema)
    anew += learner.adopt_dense(checkpoint.parsed(path, "dense.safetensors", torch_tensors.load))
    base = fresh(config, schema, learner)
    if changes is not None:
        base.path, base.table = str(path), changes
    return base, anew


def resume(
    path: Path, config: Config, schema: Schema, learner: Learner, log: Callable[[str], None]
) -> tuple[Base, dict[str, Any]]:
    """A checkpoint, of a cluster or of one machine, to go on from; and its state."""
    metrics = metrics_of(config, schema)
    changes = saving.free(path, config, schema)
    state = saving.resume_dense(path, learner, metrics)
    reader = state["reader"]
    if "streams" not in reader:  # of one machine: one stream of all files
        reader = {"epoch": reader["epoch"], "of": 1, "streams": {"0": reader}}
    base = Base(
        str(path),
        changes,
        dense_of(learner),
        metrics,
        state["step"],
        state["rows"],
        int(state.get("batches") or state["step"]),
        reader,
        _replicas(path, state, config, log),
        pack_buffers(learner),
        state["progress"],
        more=more_of(state),
    )
    return base, state


def more_of(state: dict[str, Any]) -> dict[str, Any]:
    """The parts of a checkpoint's state that are not every run's."""
    return {name: state[name] for name in ("online", "published") if name in state}


def _replicas(
    path: Path, state: dict[str, Any], config: Config, log: Callable[[str], None]
) -> dict[int, dict[str, bytes]]:
    kept: dict[str, list[str]] = state.get("keep", {})
    if not kept:
        return {}
    if config.mode.name != state["arrangement"].get("mode") or len(kept) != config.cluster.workers:
        log(
            f"warning: the checkpoint has the copies of {len(kept)} workers of mode {state['arrangement'].get('mode')}, which do not "
            "fit here: what their rules remembered, and what they had not shipped, is dropped"
        )
        return {}
    if not all((path / kept_name(int(worker), name)).exists() for worker, names in kept.items() for name in names):
        log(
            "warning: the checkpoint was made by hand from one of a cluster: what its workers kept for themselves is dropped"
        )
        return {}
    return {
        int(worker): {name: checkpoint.read(path, kept_name(int(worker), name)) for name in names}
        for worker, names in kept.items()
    }


def kept_name(worker: int, name: str) -> str:
    return f"worker-{worker:05d}-{name}"


def split_dense(spread: Spread, dense: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """The parts of the dense state that each shard keeps; numbers that are not per value go to all."""
    return [
        {key: tensor[first:last].clone() if tensor.ndim else tensor for key, tensor in dense.items()}
        for first, last in spread.spans
    ]


def join_dense(parts: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {key: torch.cat([p[key] for p in parts]) if parts[0][key].ndim else parts[0][key] for key in parts[0]}
