"""Average the weights of several epochs. On small logs, the average generalises better than the weights of any one epoch.

The ends of epochs are checkpoints. After the last epoch, `average_epochs` tries averages over some of them on validation data. If
one is as good as the best epoch, it becomes the BEST checkpoint, under the number of the step after the last. LATEST still names
the last epoch: a resumed run continues from there and forgets the average.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import torch as torch_tensors
from torch import Tensor

from clickfleet.config.load import Config
from clickfleet.data.batch import Floats, Keys
from clickfleet.errors import ConfigError
from clickfleet.store import checkpoint
from clickfleet.store.run_folder import State
from clickfleet.training import saving
from clickfleet.training.learner import Learner
from clickfleet.training.metrics import Metrics, distance, value_of
from clickfleet.training.predict import Results
from clickfleet.training.validation import keeps_best


def check_average(config: Config) -> None:
    """Refuse train.average in a run that lacks what it needs."""
    if config.train.average and not (keeps_best(config) and config.run.keep_epochs):
        raise ConfigError(
            "train.average needs the checkpoints of all epochs and of the best",
            "set train.patience (or run.keep_best=true), and run.keep_epochs=true",
        )
    if config.train.average and not admits_all(config):
        raise ConfigError(
            "train.average needs factors in every row, but table.admission leaves rows without",
            "set table.admission=birth, or train.average=false",
        )


def admits_all(config: Config) -> bool:
    """Return whether every row has factors from its start."""
    table = config.table
    usual = table.admission or ("birth" if table.preset == "plain" else "score")
    return all((own or usual).strip() == "birth" for own in (usual, *(slot.admission for slot in table.slots.values())))


@dataclass(frozen=True)
class Average:
    """The best average of consecutive epochs on validation data."""

    first: int
    last: int
    valid: Results
    path: Path


@dataclass(frozen=True)
class Weights:
    """All weights of a model: rows by key, and dense tensors by name."""

    rows: Floats
    dense: Mapping[str, Tensor]

    def plus(self, other: Weights) -> Weights:
        dense = {name: tensor + other.dense[name] for name, tensor in self.dense.items()}
        return Weights(self.rows + other.rows, dense)

    def minus(self, other: Weights) -> Weights:
        dense = {name: tensor - other.dense[name] for name, tensor in self.dense.items()}
        return Weights(self.rows - other.rows, dense)


def average_epochs(
    folder: Path,
    metrics: Metrics,
    state: State,
    config: Config,
    best: float | None,
    evaluate: Callable[[Learner], Results],
) -> Average | None:
    """Try averages of the epochs whose checkpoints are in `folder`, and write the best as BEST unless `best` is clearly better.

    `state` is that of the last checkpoint. `evaluate` returns the metrics of a model on validation data; train.monitor compares them.
    """
    monitor = config.train.monitor
    paths = checkpoint.epochs(folder)
    last = checkpoint.latest(folder)
    epochs = sorted(paths)
    if len(epochs) < 2:
        return None
    learner = saving.load(last, trust=True, run=config)
    keys = _keys(learner)
    sums: list[Weights] = []
    for epoch in epochs:
        weights = _weights(paths[epoch], keys)
        sums.append(sums[-1].plus(weights) if sums else weights)
    found: tuple[float, int, int, Results] | None = None
    for first, end in windows(len(epochs)):
        _put(learner, keys, _mean(sums, first, end))
        results = evaluate(learner)
        now = distance(monitor, value_of(results, monitor))
        if now < distance(monitor, best) + margin(monitor, results) and (found is None or now < found[0]):
            found = now, first, end, results
    if found is None:
        return None
    _, first, end, results = found
    _put(learner, keys, _mean(sums, first, end))
    step = int(state["step"]) + 1
    path = checkpoint.save(
        learner.table,
        checkpoint.step_folder(folder, step),
        files=saving.ROW_FILES,
        attached=saving.capture(learner, metrics, {**state, "step": step}),
        step=step,
        **learner.facts,
    )
    checkpoint.label_best(path)
    return Average(epochs[first], epochs[end], results, path)


def margin(monitor: str, results: Results) -> float:
    """Return how much worse than one epoch an average may seem. The best epoch owes a part of its AUC to chance.

    >>> round(margin("auc", {"rows": 1000, "actual_ctr": 0.1}), 4), margin("logloss", {"rows": 1000, "actual_ctr": 0.1})
    (0.005, 0.0)
    """
    rarer = results["rows"] * min(results["actual_ctr"], 1 - results["actual_ctr"])
    return float(0.05 / max(rarer, 1.0) ** 0.5) if monitor == "auc" else 0.0


def windows(epochs: int) -> Iterator[tuple[int, int]]:
    """Yield the first and last epoch of each average to try: from the beginning, and of the later half, up to each of the last epochs.

    >>> list(windows(4))
    [(0, 1), (0, 2), (1, 2), (0, 3), (1, 3), (2, 3)]
    """
    for end in range(max(1, epochs - 6), epochs):
        yield from ((first, end) for first in sorted({0, end // 2, end - 1}))


def _keys(learner: Learner) -> Keys:
    with learner.table.snapshot() as rows:
        parts = [columns["key"] for columns in rows]
    return np.concatenate(parts) if parts else np.empty(0, np.uint64)


def _weights(path: Path, keys: Keys) -> Weights:
    table = checkpoint.load(path)
    dense = checkpoint.parsed(path, "dense.safetensors", torch_tensors.load)
    return Weights(
        table.pull(keys, training=False).astype(np.float64), {name: one.double() for name, one in dense.items()}
    )


def _mean(sums: list[Weights], first: int, last: int) -> Weights:
    whole = sums[last] if first == 0 else sums[last].minus(sums[first - 1])
    count = last - first + 1
    return Weights(
        (whole.rows / count).astype(np.float32), {name: tensor / count for name, tensor in whole.dense.items()}
    )


def _put(learner: Learner, keys: Keys, weights: Weights) -> None:
    """Set the weights of a model."""
    types = {name: tensor.dtype for name, tensor in learner.model.state_dict().items()}
    with torch.no_grad():
        learner.restore_dense({name: tensor.to(types[name]) for name, tensor in weights.dense.items()})
    if len(keys):
        learner.table.move(keys, weights.rows, add=False)


def forget_average(folder: Path, best_step: int | None) -> None:
    """Let BEST name the best epoch again, after the checkpoint of an average was removed by a resume."""
    label = folder / checkpoint.BEST
    if not label.is_file():
        return
    name = label.read_text().partition(" ")[0]
    if (folder / name).is_dir():
        return
    label.unlink()
    if best_step is not None and (path := checkpoint.step_folder(folder, best_step)).is_dir():
        checkpoint.label_best(path)
