"""How fast a model scores: engines × threads × batch sizes × graph optimisation × memory arena, measured in turns.

from clickfleet.workbench.infer import measure

found = measure("run", ["test/*"], batch_sizes=[1, 100])
found.rows[0]["p50_ms"], found.accuracy["int8"]["auc"]

A batch passes three stages: preparing (its keys once each, rows pulled and pooled), running (the network), collecting (scores as an
array beside the others'). Rows are read and parsed before the clock starts. Cells take turns, so that a busy moment of the machine
falls on all of them. Memory is weighed in processes of its own (scales.py).
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from clickfleet import scoring, trained
from clickfleet.batch import Batch, Floats, concatenate
from clickfleet.embedding import Embedding
from clickfleet.engine import LEVELS, Engine, providers
from clickfleet.errors import ConfigError, DataError
from clickfleet.learner import Learner
from clickfleet.metrics import Metrics
from clickfleet.models import Inputs
from clickfleet.workbench.machine import Environment, environment
from clickfleet.workbench.scales import Way, weigh

Row = dict[str, Any]
WARM_UP = 3
ROUNDS = 5


@dataclass
class Inference:
    """The matrix, cell by cell, and how far engines' scores lie from torch's."""

    rows: list[Row]
    accuracy: dict[str, Row]
    environment: Environment
    skipped: dict[str, str] = field(default_factory=dict)
    """Providers of ONNX Runtime that were not measured, and why."""

    def ratios(self) -> dict[str, float]:
        """How many times as fast as torch an engine is, each at its best setting, by engine and batch size."""
        best: dict[tuple[str, int], float] = {}
        for row in self.rows:
            cell = row["engine"], row["batch_size"]
            best[cell] = min(best.get(cell, float("inf")), row["p50_ms"])
        return {
            f"{engine} / torch, batch {size}": best["torch", size] / took
            for (engine, size), took in best.items()
            if engine != "torch" and ("torch", size) in best
        }

    def to_dict(self) -> dict[str, Any]:
        return {
            "rows": self.rows,
            "ratios": self.ratios(),
            "accuracy": self.accuracy,
            "environment": self.environment.facts,
            "skipped": self.skipped,
        }


def measure(
    model: str | Path,
    data: Any,
    *,
    engines: Sequence[str] = (),
    threads: Sequence[int] = (1, 2),
    batch_sizes: Sequence[int] = (1, 5, 100, 1000),
    graph: Sequence[str] = ("all", "off"),
    arena: Sequence[bool] = (True, False),
    batches: int = 100,
    rows: int = 10_000,
    form: str | None = None,
    say: Callable[[str], None] = print,
    trust: bool = False,
) -> Inference:
    """Scores `batches` batches per cell of the matrix; engines are torch, onnx, int8 and every provider there is."""
    for level in graph:
        if level not in LEVELS:
            raise ConfigError(f"graph optimisation {level!r} is not known", f"choose among {', '.join(LEVELS)}")
    loaded = trained.load(model, trust).reading(form, 1)
    learner = loaded.learner
    sample = _read(loaded, data, rows)
    skipped: dict[str, str] = {}
    names = list(engines) or ["torch", "onnx", "int8", *_present(learner, skipped)]
    keep = torch.get_num_threads()
    learner.model.eval()
    try:
        cells = _cells(learner, names, threads, batch_sizes, graph, arena, sample)
        say(f"{len(cells)} cells, {batches} batches each; {len(sample):,} rows")
        for cell, _ in itertools.product(cells, range(WARM_UP)):
            cell.score(0)
        for turn in range(ROUNDS):
            share = range(turn * batches // ROUNDS, (turn + 1) * batches // ROUNDS)
            for cell in cells:
                for number in share:
                    cell.score(number, keep=True)
        say("memory: each cell in a process of its own")
        network = scoring.exported(learner) if set(names) - {"torch"} else b""
        weighed = weigh(learner, network, [Way(cell.engine, cell.threads, cell.size) for cell in cells], say)
        found = [{**cell.facts(), "memory_bytes": memory} for cell, memory in zip(cells, weighed, strict=True)]
    finally:
        torch.set_num_threads(keep)
    accuracy = _accuracy(learner, [name for name in names if name != "torch"], sample)
    stats = learner.table.stats()
    about = environment(
        model=f"{learner.config.model.name}, {sum(p.numel() for p in learner.model.parameters()):,} dense parameters",
        table=f"{stats['rows']:,} rows, {stats['bytes']:,} bytes, {learner.table.factors} factors",
        rows=f"{len(sample):,}",
    )
    return Inference(found, accuracy, about, skipped)


def _read(loaded: trained.Trained, data: Any, rows: int) -> Batch:
    parts, left = [], rows
    for batch in loaded.source(data, min(rows, 1000)):
        parts.append(batch[: min(left, len(batch))])
        left -= len(parts[-1])
        if left <= 0:
            break
    if not parts:
        raise DataError("there are no rows to score")
    return concatenate(parts)


def _present(learner: Learner, skipped: dict[str, str]) -> list[str]:
    """Further providers that compute at least a part of this network here; the others with the reason."""
    present, absent = providers()
    skipped |= dict.fromkeys(absent, "not part of the installed onnxruntime")
    graph = scoring.exported(learner)
    found = []
    for name in present:
        try:
            nodes = _nodes(Engine(name), graph, learner)
        except Exception as error:  # a provider whose libraries or device are missing raises whatever it likes
            skipped[name] = f"does not start: {error}".splitlines()[0]
            continue
        if nodes:
            found.append(name)
        else:
            skipped[name] = "installed, but takes no node of this network"
    return found


def _nodes(engine: Engine, graph: bytes, learner: Learner) -> int:
    """How many nodes of a graph a provider computes, by a profile of one run."""
    import tempfile

    import onnxruntime

    with tempfile.TemporaryDirectory(prefix="clickfleet-profile-") as folder:
        options = engine.options()
        options.enable_profiling, options.profile_file_prefix = True, f"{folder}/run"
        session = onnxruntime.InferenceSession(graph, options, providers=[engine.provider, "CPUExecutionProvider"])
        shape = learner.shape
        sizes = {"dense": (1, shape.dense), "first": (1, shape.slots), "factors": (1, shape.slots, shape.factors)}
        session.run(None, {item.name: np.zeros(sizes[item.name], np.float32) for item in session.get_inputs()})
        events = json.loads(Path(session.end_profiling()).read_text())
    return sum(event.get("args", {}).get("provider") == engine.provider for event in events)


class _Cell:
    """One way to score at one batch size, and the times it took."""

    def __init__(self, learner: Learner, engine: Engine | None, threads: int, size: int, sample: Batch) -> None:
        self.learner, self.engine, self.threads, self.size = learner, engine, threads, size
        self.embedding = Embedding(learner.schema, learner.table.factors)
        self.batches = [sample[at : at + size] for at in range(0, len(sample), size)]
        self.batches = [batch for batch in self.batches if len(batch) == size] or [_repeated(sample, size)]
        self.scores = np.empty(size, np.float32)
        self.times: list[tuple[float, float, float]] = []
        self.session: Any = None

    def open(self, session: Any) -> None:
        self.session = session
        self.inputs = [item.name for item in session.get_inputs()]

    @torch.inference_mode()
    def score(self, number: int, keep: bool = False) -> None:
        batch = self.batches[number % len(self.batches)]
        if self.engine is None:
            torch.set_num_threads(self.threads)
        begin = time.perf_counter()
        keys = self.embedding.unique(batch)
        pulled = self.learner.table.pull(keys, training=False, out=self.embedding.room())
        x = self.embedding.inputs(batch, pulled, training=False)
        ready = time.perf_counter()
        found: Any = self._run(x)
        ran = time.perf_counter()
        self.scores[:] = found if self.engine is not None else torch.sigmoid(found).numpy()
        if keep:
            self.times.append((ready - begin, ran - ready, time.perf_counter() - ran))

    def _run(self, x: Inputs) -> Any:
        if self.session is None:
            return self.learner.model(x)
        return self.session.run(None, {name: getattr(x, name).numpy() for name in self.inputs})[0]

    def facts(self) -> Row:
        times = np.array(self.times) * 1e3
        totals = times.sum(1)
        engine = self.engine
        return {
            "engine": "torch" if engine is None else engine.name,
            "threads": self.threads,
            "batch_size": self.size,
            "graph": None if engine is None else engine.graph,
            "arena": None if engine is None else "on" if engine.arena else "off",
            "p50_ms": float(np.percentile(totals, 50)),
            "p99_ms": float(np.percentile(totals, 99)),
            "preparing_ms": float(np.median(times[:, 0])),
            "running_ms": float(np.median(times[:, 1])),
            "collecting_ms": float(np.median(times[:, 2])),
            "total_s": float(totals.sum() / 1e3),
            "rows_per_s": self.size / (float(np.median(totals)) / 1e3),
            "batches": len(times),
        }


def _repeated(sample: Batch, size: int) -> Batch:
    """A batch larger than the sample: its rows over and over."""
    return sample.take(np.arange(size) % len(sample))


def _cells(
    learner: Learner,
    names: Sequence[str],
    threads: Sequence[int],
    sizes: Sequence[int],
    graph: Sequence[str],
    arena: Sequence[bool],
    sample: Batch,
) -> list[_Cell]:
    """Every cell, opened."""
    cells = []
    network = scoring.exported(learner) if set(names) - {"torch"} else b""
    for name, count in itertools.product(names, threads):
        ways: list[Engine | None] = [None]
        if name != "torch":
            ways = [Engine(name, count, level, kept) for level, kept in itertools.product(graph, arena)]
        for way in ways:
            mine = [_Cell(learner, way, count, size, sample) for size in sizes]
            if way is not None:
                session = way.session(network)
                for cell in mine:
                    cell.open(session)
            cells += mine
    return cells


def _accuracy(learner: Learner, names: Sequence[str], sample: Batch) -> dict[str, Row]:
    """AUC of every engine, and how far its scores are from torch's."""
    parts = [sample[at : at + 1000] for at in range(0, len(sample), 1000)]

    def scores(engine: Engine | None) -> Floats:
        return np.concatenate([found.copy() for _, found in scoring.Scorer(learner, 1, engine)(parts)])

    def auc(found: Floats) -> float | None:
        if sample.labels is None:
            return None
        metrics = Metrics(learner.config.train.metrics.thresholds)
        metrics.update(found, sample.labels, sample.weights)
        return float(metrics.buckets.auc)

    exact = scores(None)
    rows: dict[str, Row] = {"torch": {"max_drift": 0.0, "mean_drift": 0.0, "auc": auc(exact)}}
    for name in names:
        found = scores(Engine(name))
        off = np.abs(found - exact)
        rows[name] = {"max_drift": float(off.max()), "mean_drift": float(off.mean()), "auc": auc(found)}
    return rows
