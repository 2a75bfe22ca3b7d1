"""Score batches with several threads, in order, and compute metrics of the scores."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray

from clickfleet.data.batch import Batch, Floats
from clickfleet.data.schema import Schema
from clickfleet.errors import ConfigError
from clickfleet.store.onnx import Engine
from clickfleet.training.embedding import Embedding
from clickfleet.training.learner import Learner
from clickfleet.training.metrics import Metrics
from clickfleet.training.network import Model
from clickfleet.training.onnx_graph import Graph

Results = dict[str, Any]


class Scorer:
    """Computes click probabilities with torch, or with an `engine` of ONNX Runtime.

    The model must not change in the meantime. Unknown keys count as rows of zeros.
    """

    def __init__(self, learner: Learner, threads: int = 1, engine: Engine | None = None) -> None:
        self.learner, self.threads = learner, threads
        self._local = threading.local()
        self._session: Any = None
        if engine is not None:  # instead of torch
            self._session = engine.session(exported(learner))
            self._inputs = [item.name for item in self._session.get_inputs()]

    def __call__(self, batches: Iterable[Batch]) -> Iterator[tuple[Batch, Floats]]:
        """Yield each batch with its scores, in order."""
        training = self.learner.model.training
        self.learner.model.eval()
        try:
            if self.threads == 1:
                yield from ((batch, self.score(batch)) for batch in batches)
            else:
                yield from self._by_threads(batches)
        finally:
            self.learner.model.train(training)

    def _by_threads(self, batches: Iterable[Batch]) -> Iterator[tuple[Batch, Floats]]:
        waiting: deque[tuple[Batch, Future[Floats]]] = deque()
        with ThreadPoolExecutor(self.threads, "clickfleet-scorer", torch.set_num_threads, (1,)) as pool:
            for batch in batches:
                waiting.append((batch, pool.submit(self.score, batch)))
                if len(waiting) > 2 * self.threads:
                    done, scores = waiting.popleft()
                    yield done, scores.result()
            for done, scores in waiting:
                yield done, scores.result()

    @torch.inference_mode()
    def score(self, batch: Batch) -> Floats:
        """Return the scores of one batch. The model must be in evaluation mode."""
        embedding = getattr(self._local, "embedding", None)
        if embedding is None:
            embedding = self._local.embedding = Embedding(
                self.learner.schema, self.learner.table.factors, self.learner.device
            )
        keys = embedding.unique(batch)
        rows = self.learner.table.pull(keys, training=False, out=embedding.room())
        x = embedding.inputs(batch, rows, training=False)
        if self._session is not None:
            scores: Floats = self._session.run(None, {name: getattr(x, name).cpu().numpy() for name in self._inputs})[0]
            return scores
        return torch.sigmoid(self.learner.model(x)).cpu().numpy()


_graphs: WeakKeyDictionary[Model, Graph] = WeakKeyDictionary()
"""An export takes seconds, so it is kept; only the weights are replaced."""


def exported(learner: Learner) -> bytes:
    """Return the network as an ONNX graph whose output is the score."""
    if learner.model not in _graphs:
        _graphs[learner.model] = Graph(learner.model, learner.shape, ("score",))
    return _graphs[learner.model].bytes(learner.dense())


def evaluate(learner: Learner, batches: Iterable[Batch], threads: int = 1) -> Results:
    """Return the metrics of a model on labelled batches. With `train.metrics.slices`, `slices` holds them per key."""
    return results(measure(learner, batches, threads))


def measure(
    learner: Learner,
    batches: Iterable[Batch],
    threads: int = 1,
    on_batch: Callable[[Batch], None] | None = None,
    engine: Engine | None = None,
) -> Metrics:
    """Evaluate and return sums and buckets, which can be merged and drawn. `on_batch` is called with every batch."""
    metrics = metrics_of(learner)
    slot = slice_slot(learner.schema, learner.config.train.metrics.slices)
    for batch, scores in Scorer(learner, threads, engine)(batches):
        assert batch.labels is not None
        slices = None if slot is None else slot_keys(batch, slot)
        metrics.update(scores, batch.labels, batch.weights, batch.groups, slices)
        if on_batch is not None:
            on_batch(batch)
    return metrics


def metrics_of(learner: Learner) -> Metrics:
    """Return empty metrics with the settings of a model."""
    settings = learner.config.train.metrics
    return Metrics(settings.thresholds, groups=learner.schema.group is not None, slices=settings.slices is not None)


def results(metrics: Metrics) -> Results:
    """Return the metrics by name."""
    out: Results = dict(metrics.results())
    if metrics.slices is not None:
        out["slices"] = {"other" if key is None else str(key): part for key, part in metrics.slices.results().items()}
    return out


def slice_slot(schema: Schema, name: str | None) -> int | None:
    """Return the position of the slot whose values get separate metrics."""
    if name is None:
        return None
    names = [slot.name for slot in schema.slots]
    if name not in names:
        raise ConfigError(f"unknown slot {name!r} in train.metrics.slices", f"the schema has {', '.join(names)}")
    if schema.slots[names.index(name)].multi:
        raise ConfigError(
            f"slot {name!r} in train.metrics.slices has several values per row", "choose a single-valued slot"
        )
    return names.index(name)


def slot_keys(batch: Batch, slot: int) -> NDArray[np.uint64]:
    """Return the key of every row in a single-valued slot."""
    return np.ascontiguousarray(batch.keys[batch.offsets[slot : -1 : batch.slots]])
