"""What a model loses when the values of a field are shuffled between rows: slots and dense columns by importance.

Rows are pulled and pooled once; a field is then shuffled where the model sees it, so that one costs one forward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from clickfleet.batch import Batch, concatenate
from clickfleet.embedding import Embedding
from clickfleet.errors import ConfigError, DataError
from clickfleet.learner import Learner
from clickfleet.metrics import Buckets
from clickfleet.models import Inputs

ROWS_AT_ONCE = 500
SCORED_ROWS = 200_000
"""All fields together, by default: a second or two."""
SAMPLE_BYTES = 1 << 26


class Importance(NamedTuple):
    """The loss by one field, or several shuffled together."""

    name: str
    auc_drop: float
    logloss_rise: float


class Sample:
    """Rows taken evenly from a stream of unknown length: at most twice `limit`, always every n-th one.

    >>> sample = Sample(limit=2)
    >>> for i in range(5):
    ...     sample.add(Batch(np.full((2, 1), i, np.float32), np.zeros(2, np.uint64), 1))
    >>> sample.rows.dense.tolist()
    [[0.0], [2.0], [4.0]]
    """

    def __init__(self, limit: int) -> None:
        self.limit, self._every, self._seen, self._size = limit, 1, 0, 0
        self._parts: list[Batch] = []

    @classmethod
    def for_importance(cls, learner: Learner) -> Sample:
        """Of a size that shuffling every field of a model takes a bounded time and memory."""
        slots, fields = len(learner.schema.slots), len(learner.schema.slots) + len(learner.schema.dense)
        wide = 4 * (slots * (1 + learner.table.factors) + len(learner.schema.dense))
        return cls(max(min(5000, SCORED_ROWS // (2 * fields or 1), SAMPLE_BYTES // (2 * wide or 1)), 200))

    def add(self, batch: Batch) -> None:
        """The next rows of the stream."""
        first = -self._seen % self._every
        self._seen += len(batch)
        if first < len(batch):
            self._parts.append(batch.take(np.arange(first, len(batch), self._every)))
            self._size += len(self._parts[-1])
        while self._size > 2 * self.limit:
            self._every *= 2
            kept = self.rows.take(np.arange(0, self._size, 2))
            self._parts, self._size = [kept], len(kept)

    @property
    def rows(self) -> Batch:
        return concatenate(self._parts)

    def __len__(self) -> int:
        return self._size


def importance(
    learner: Learner,
    rows: Batch,
    groups: Sequence[Sequence[str]] | None = None,
    *,
    threads: int = 1,
    seed: int = 0,
) -> list[Importance]:
    """The loss by each field, or by each of `groups` of fields that are shuffled together; the largest first."""
    if rows.labels is None or not len(rows):
        raise DataError("importance needs rows with labels")
    names = [slot.name for slot in learner.schema.slots]
    dense = [column.name for column in learner.schema.dense]
    wanted = [[name] for name in (*names, *dense)] if groups is None else [list(group) for group in groups]
    unknown = [name for group in wanted for name in group if name not in names and name not in dense]
    if unknown:
        raise ConfigError(f"the model has no field {unknown[0]}", f"fields: {', '.join((*names, *dense))}")
    order = torch.from_numpy(np.random.default_rng(seed).permutation(len(rows))).to(learner.device)
    x = _inputs(learner, rows)
    starts = range(0, len(rows), ROWS_AT_ONCE)

    @torch.inference_mode()
    def score(group: Sequence[str], start: int) -> NDArray[np.float32]:
        part = slice(start, start + ROWS_AT_ONCE)
        dense_, first, factors = (each[part].clone() for each in x)
        for name in group:
            if name in names:
                field = names.index(name)
                first[:, field], factors[:, field] = x.first[order[part], field], x.factors[order[part], field]
            else:
                dense_[:, dense.index(name)] = x.dense[order[part], dense.index(name)]
        return torch.sigmoid(learner.model(Inputs(dense_, first, factors))).cpu().numpy()

    was_training = learner.model.training
    learner.model.eval()
    try:
        with ThreadPoolExecutor(threads, "clickfleet-importance", torch.set_num_threads, (1,)) as pool:
            tasks = [[pool.submit(score, group, start) for start in starts] for group in ([], *wanted)]
            base, *found = (_metrics(np.concatenate([task.result() for task in parts]), rows) for parts in tasks)
    finally:
        learner.model.train(was_training)
    losses = [
        Importance("+".join(group), base[0] - auc, loss - base[1])
        for group, (auc, loss) in zip(wanted, found, strict=True)
    ]
    return sorted(losses, key=lambda one: -one.auc_drop)


def _inputs(learner: Learner, rows: Batch) -> Inputs:
    embedding = Embedding(learner.schema, learner.table.factors, learner.device)
    pulled = learner.table.pull(embedding.unique(rows), training=False, out=embedding.room())
    return embedding.inputs(rows, pulled, training=False)


def _metrics(scores: NDArray[np.float32], rows: Batch) -> tuple[float, float]:
    buckets = Buckets()
    assert rows.labels is not None
    buckets.update(scores, rows.labels, rows.weights)
    return buckets.auc, float(buckets.results()["logloss"] or 0.0)
