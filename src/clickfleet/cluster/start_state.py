"""The state that shards and workers start from: initial values, an old model, or a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import torch as torch_tensors

from clickfleet.cluster.assignments import NEXT_EPOCH, EpochPosition
from clickfleet.config.load import Config
from clickfleet.data.schema import Schema
from clickfleet.store import checkpoint
from clickfleet.training import saving
from clickfleet.training.learner import Learner, table_spec
from clickfleet.training.loop import RunProgress
from clickfleet.training.metrics import TOTALS, Metrics, make_metrics
from clickfleet.training.sharding import Spread


@dataclass
class StartState:
    """Everything a run needs to start or to resume."""

    path: str | None
    """A checkpoint with the rows, or None for an empty table."""
    table: Mapping[str, object]
    """Changes to the table of the checkpoint, or the description of the empty table."""
    dense: dict[str, torch.Tensor]
    metrics: Metrics
    steps: int = 0
    rows: int = 0
    batches: int = 0
    """The position in the learning-rate schedule."""
    reader: EpochPosition = field(default_factory=lambda: NEXT_EPOCH)
    saved: dict[int, dict[str, bytes]] = field(default_factory=dict)
    """State of the mode, by worker."""
    buffers: bytes = b""
    progress: dict[str, Any] = field(default_factory=lambda: vars(RunProgress()).copy())
    worker_steps: dict[str, int] = field(default_factory=dict)
    """Batches of each worker since it was connected to the shards."""
    more: dict[str, Any] = field(default_factory=dict)
    """Additional state, such as the position in a stream."""


def last_batches(metrics: Metrics) -> NDArray[np.float64] | None:
    """Return the batches of the sliding window as one set of buckets; None if there are none."""
    if metrics.sliding is None:
        return None
    whole: NDArray[np.float64] = metrics.sliding.state()["window"].reshape(metrics.sliding.size, -1).sum(axis=0)
    return whole if whole[TOTALS.index("rows")] else None


def set_last_batches(metrics: Metrics, whole: NDArray[np.float64]) -> None:
    """Replace the sliding window by these buckets: the last batches of several workers."""
    assert metrics.sliding is not None
    window = np.zeros(metrics.sliding.numbers)
    window[: len(whole)] = whole
    metrics.sliding.restore({"window": window, "next": np.ones(1, np.int64)})


def dense_of(learner: Learner) -> dict[str, torch.Tensor]:
    return {"values": learner.flat.values.clone(), **learner.optimizer.state()}


def mean_state(states: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return the mean of the optimizer states of several workers. Any number of workers can resume from it.

    >>> mean_state([{"steps": torch.tensor(4), "mean": torch.ones(1)}, {"steps": torch.tensor(7), "mean": torch.zeros(1)}])
    {'steps': tensor(6), 'mean': tensor([0.5000])}
    """
    means = {key: torch.stack([state[key] for state in states]).double().mean(dim=0) for key in states[0]}
    return {
        key: (mean if states[0][key].is_floating_point() else mean.round()).to(states[0][key].dtype)
        for key, mean in means.items()
    }


def pack_buffers(learner: Learner) -> bytes:
    buffers = {name: buffer.clone() for name, buffer in learner.model.named_buffers()}
    return torch_tensors.save(buffers) if buffers else b""


def adopt_buffers(learner: Learner, packed: bytes) -> None:
    if packed:
        buffers = dict(learner.model.named_buffers())
        for name, tensor in torch_tensors.load(packed).items():
            buffers[name].copy_(tensor)


def fresh(config: Config, schema: Schema, learner: Learner) -> StartState:
    """Return the start state of a new run."""
    table = table_spec(config, schema)
    return StartState(None, table, dense_of(learner), make_metrics(config, schema), buffers=pack_buffers(learner))


def start_from(path: Path, config: Config, schema: Schema, learner: Learner) -> tuple[StartState, list[str]]:
    """Return the start state of a new run with what fits of an old model, and the names of what does not."""
    changes, misfits = saving.fitting(path, config, schema)
    misfits += learner.adopt_dense(checkpoint.parsed(path, "dense.safetensors", torch_tensors.load))
    start = fresh(config, schema, learner)
    if changes is not None:
        start.path, start.table = str(path), changes
    return start, misfits


def resume(
    path: Path, config: Config, schema: Schema, learner: Learner, log: Callable[[str], None]
) -> tuple[StartState, dict[str, Any]]:
    """Return the start state to resume a checkpoint of a cluster or of one machine, and the state in that checkpoint."""
    metrics = make_metrics(config, schema)
    changes = saving.free(path, config, schema)
    state = saving.resume_dense(path, learner, metrics)
    reader = state["reader"]
    if "streams" not in reader:  # of one machine: one stream of all files
        reader = {"epoch": reader["epoch"], "of": 1, "streams": {"0": reader}}
    start = StartState(
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
    return start, state


def more_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the additional state of a checkpoint."""
    return {name: state[name] for name in ("online", "published") if name in state}


def _replicas(
    path: Path, state: Mapping[str, Any], config: Config, log: Callable[[str], None]
) -> dict[int, dict[str, bytes]]:
    kept: dict[str, list[str]] = state.get("keep", {})
    if not kept:
        return {}
    if config.mode.name != state["arrangement"].get("mode"):
        log(
            f"warning: the checkpoint holds replicas of {len(kept)} workers in mode {state['arrangement'].get('mode')}, which do not "
            "fit this run; they are dropped, with their optimizer state and with changes that were not shipped"
        )
        return {}
    if not all((path / kept_name(int(worker), name)).exists() for worker, names in kept.items() for name in names):
        log(
            "warning: the checkpoint was changed by hand after a cluster wrote it: the replicas of its workers are dropped"
        )
        return {}
    return {
        int(worker): {name: checkpoint.read(path, kept_name(int(worker), name)) for name in names}
        for worker, names in kept.items()
    }


def kept_name(worker: int, name: str) -> str:
    return f"worker-{worker:05d}-{name}"


def split_dense(spread: Spread, dense: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """Split the dense state among the shards. Numbers that are not per value go to all."""
    return [
        {key: tensor[first:last].clone() if tensor.ndim else tensor for key, tensor in dense.items()}
        for first, last in spread.spans
    ]


def join_dense(parts: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {key: torch.cat([p[key] for p in parts]) if parts[0][key].ndim else parts[0][key] for key in parts[0]}
