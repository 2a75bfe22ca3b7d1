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

from clickfleet.config.load import Config
from clickfleet.config.plugins import PASSED, find_function
from clickfleet.data.batch import Batch, Floats
from clickfleet.data.names import Names
from clickfleet.data.schema import Schema
from clickfleet.errors import ConfigError
from clickfleet.store.onnx import Engine
from clickfleet.store.row_format import RowFormat, round_rows
from clickfleet.store.table import Table
from clickfleet.training.learner import Learner
from clickfleet.training.metrics import MetricResults, Metrics
from clickfleet.training.network import Model
from clickfleet.training.onnx_graph import Graph

Results = dict[str, Any]
ANNOUNCED_BATCHES = 3
"""Batches whose keys are announced to a table with rows on disk, so that it reads them ahead."""


class Scorer:
    """Computes click probabilities with torch, or with an `engine` of ONNX Runtime.

    The model must not change in the meantime. Unknown keys count as rows of zeros. `rows` rounds rows as consumers of that format get
    them.
    """

    def __init__(
        self, learner: Learner, threads: int = 1, engine: Engine | None = None, rows: RowFormat = "float32"
    ) -> None:
        self.learner, self.threads, self._row_format = learner, threads, rows
        self._local = threading.local()
        self._session: Any = None
        if engine is not None:  # instead of torch
            self._session = engine.session(exported(learner))
            self._inputs = [item.name for item in self._session.get_inputs()]

    def __call__(self, batches: Iterable[Batch]) -> Iterator[tuple[Batch, Floats]]:
        """Yield each batch with its scores, in order."""
        training = self.learner.model.training
        self.learner.model.eval()
        batches = batches if self.learner.table.disk is None else announced(self.learner.table, batches)
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
            embedding = self._local.embedding = self.learner.embedding()
        keys = embedding.unique(batch)
        table = self.learner.table
        slots = embedding.slots_of(batch) if len(table.classes) > 1 else None
        rows = round_rows(self._row_format, table.pull(keys, training=False, out=embedding.room(), slots=slots))
        x = embedding.inputs(batch, rows, training=False)
        scores: Floats
        if self._session is not None:
            tensors = x.tensors()
            scores = self._session.run(None, {name: tensors[name].cpu().numpy() for name in self._inputs})[0]
        else:
            scores = self.learner.loss.scores(self.learner.model(x)).cpu().numpy()
        calibration = self.learner.calibration
        return scores if calibration is None else calibration.of(self.learner.schema)(scores, batch)


def announced(table: Table, batches: Iterable[Batch]) -> Iterator[Batch]:
    """Yield batches, and announce the keys of the next ones to a table that reads rows from disk."""
    waiting: deque[Batch] = deque()
    for batch in batches:
        table.announce(batch.keys)
        waiting.append(batch)
        if len(waiting) > ANNOUNCED_BATCHES:
            yield waiting.popleft()
    yield from waiting


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
    collected: ScoredRows | None = None,
) -> Metrics:
    """Evaluate and return sums and buckets, which can be merged and drawn. `on_batch` is called with every batch.

    `collected` receives the labels and scores of all rows.
    """
    metrics, own = metrics_of(learner), MetricFunctions(learner.config)
    slot = slice_slot(learner.schema, learner.config.train.metrics.slices)
    for batch, scores in Scorer(learner, threads, engine)(batches):
        assert batch.labels is not None
        slices = None if slot is None else slot_keys(batch, slot)
        metrics.update(scores, batch.labels, batch.weights, batch.groups, slices, batch.previous)
        for rows in (own.rows if own.functions else None, collected):
            if rows is not None:
                rows.add(batch, scores)
        if on_batch is not None:
            on_batch(batch)
    metrics.own = own.results()
    return metrics


MetricFunction = Callable[[Floats, Floats, Floats], float]
"""A user's metric: `function(labels, scores, weights)`, arrays with one number per row of the evaluation data.

With several labels, `labels` and `scores` have a column for each; NaN is an unknown label.
"""


class ScoredRows:
    """The labels, scores and weights of the rows of an evaluation."""

    def __init__(self) -> None:
        self._parts: list[tuple[Floats, Floats, Floats]] = []

    def add(self, batch: Batch, scores: Floats) -> None:
        assert batch.labels is not None
        weights = np.ones(len(batch), np.float32) if batch.weights is None else batch.weights
        labels = batch.labels
        if (late := batch.corrections) is not None:  # an earlier row of the show was collected
            labels = late.judged()
            first = ~np.isnan(labels.reshape(len(labels), -1)).all(1)
            labels, scores, weights = labels[first], scores[first], weights[first]
        self._parts.append((labels, scores, weights))

    def extend(self, columns: tuple[Floats, Floats, Floats]) -> None:
        """Add the rows that another process has collected."""
        self._parts.append(columns)

    def columns(self) -> tuple[Floats, Floats, Floats]:
        """Return labels, scores and weights, one number (or one per label) per row."""
        if not self._parts:
            return (np.empty(0, np.float32),) * 3
        labels, scores, weights = (np.concatenate(part) for part in zip(*self._parts, strict=True))
        return labels, scores, weights


class MetricFunctions:
    """The user's metric functions, and the rows of an evaluation for them."""

    def __init__(self, config: Config, missing_ok: bool = True) -> None:
        """`missing_ok` leaves out functions that were passed in Python when the model was trained and are not saved with it."""
        given = config.train.metrics.functions
        if missing_ok:
            given = {
                name: plugin for name, plugin in given.items() if plugin.passed or not plugin.name.startswith(PASSED)
            }
        taken = [name for name in given if name in MetricResults.__annotations__ or name in RESERVED]
        if taken:
            raise ConfigError(f"{taken[0]} is a built-in name", "give your metric another name")
        self.functions = {name: find_function("metric function", plugin) for name, plugin in given.items()}
        self.rows = ScoredRows()

    def results(self) -> dict[str, float]:
        """Return the result of each function on all rows."""
        if not self.functions:
            return {}
        labels, scores, weights = self.rows.columns()
        results = {}
        for name, function in self.functions.items():
            value = function(labels, scores, weights)
            if not np.isscalar(value) and np.ndim(value):
                raise ConfigError(f"the metric {name} returned an array", "return one number")
            results[name] = float(value)
        return results


RESERVED = ("epoch", "step", "slices", "kind", "time")
"""Names that records of metrics use besides those of metrics."""


def metrics_of(learner: Learner) -> Metrics:
    """Return empty metrics with the settings of a model."""
    settings = learner.config.train.metrics
    schema = learner.schema
    return Metrics(
        settings.thresholds, groups=schema.group is not None, slices=settings.slices is not None, tasks=schema.tasks
    )


def results(metrics: Metrics) -> Results:
    """Return the metrics by name."""
    out: Results = {**metrics.results(), **metrics.own}
    if metrics.slices is not None:
        parts = sorted(metrics.slices.results().items(), key=lambda item: (item[0] is None, -item[1]["rows"]))
        out["slices"] = {OTHER if key is None else str(key): {"key": key, **part} for key, part in parts}
    return out


OTHER = "other"
"""The slice of all values beyond the limit."""


def name_slices(results: Results, names: Names | None, slot: str | None) -> Results:
    """Return the results with the value of each slice in place of its key, where it is known."""
    if names is None or slot is None or "slices" not in results:
        return results
    named: Results = {}
    for text, part in results["slices"].items():
        name = None if part["key"] is None else names.name(slot, part["key"])
        name = text if name is None else name
        if part["key"] is not None and (name == OTHER or name in named):  # a value that looks like another slice
            name = f"{name} (key {part['key']})"
        named[name] = part
    return {**results, "slices": named}


def top_slices(results: Results, top: int = 20) -> list[tuple[str, Results]]:
    """Return the slices with the most rows, and all others summed up. The sum has no AUC, which cannot be added."""
    slices: list[tuple[str, Results]] = [(name, part) for name, part in results.get("slices", {}).items()]
    slices.sort(key=lambda item: (item[1]["key"] is None, -item[1]["rows"]))
    beyond = any(part["key"] is None for _, part in slices)
    if len(slices) <= top + 1 and not beyond:
        return slices
    named = [item for item in slices if item[1]["key"] is not None]
    shown, rest = named[:top], named[top:]
    parts = [part for _, part in slices[len(shown) :]]
    rows = sum(part["rows"] for part in parts)
    loss = sum(part["logloss"] * part["rows"] for part in parts if part["logloss"] is not None)
    many = (
        f"{len(rest):,} values" + (" and more" if beyond else "") if rest else f"beyond the first {len(shown):,} values"
    )
    return [*shown, (f"{OTHER} ({many})", {"rows": rows, "auc": None, "logloss": loss / rows if rows else None})]


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
