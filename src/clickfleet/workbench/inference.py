"""Measure how fast a model scores: engines × threads × batch sizes × graph optimisation.


result = measure("run", ["test/*"], batch_sizes=[1, 100])
result.rows[0].p50_ms, result.accuracy["int8"].auc

A batch passes three stages: preparing (unique keys, rows pulled and pooled), running (the network) and collecting (scores as an array).
Rows are read and parsed before the clock starts. Cells of the matrix take turns, so that a busy moment of the machine affects all of them.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import torch

from clickfleet.data.batch import Batch, Floats, concatenate
from clickfleet.errors import ConfigError, DataError
from clickfleet.store.onnx import LEVELS, Engine, providers
from clickfleet.training import predict
from clickfleet.training.learner import Learner
from clickfleet.training.metrics import Metrics
from clickfleet.training.model import SavedModel, load
from clickfleet.training.network import Inputs
from clickfleet.training.report import charts, page
from clickfleet.training.report.charts import KINDS, Series
from clickfleet.workbench.runner import Facts, count
from clickfleet.workbench.tables import Column, Environment, TextTable, environment

COLUMNS = (
    Column("engine"),
    Column("threads"),
    Column("batch_size", "batch"),
    Column("graph"),
    Column("p50_ms", "p50 ms", "{:.3f}"),
    Column("p99_ms", "p99 ms", "{:.3f}"),
    Column("preparing_ms", "preparing", "{:.3f}"),
    Column("running_ms", "running", "{:.3f}"),
    Column("collecting_ms", "collecting", "{:.3f}"),
    Column("total_s", "total s", "{:.2f}"),
    Column("rows_per_s", "rows/s", "{:,.0f}"),
)
ACCURACY = (
    Column("engine"),
    Column("max_drift", "largest drift", "{:.2e}"),
    Column("mean_drift", "mean drift", "{:.2e}"),
    Column("auc", "AUC", "{:.5f}"),
    Column("auc_change", "change of AUC", "{:+.5f}"),
)


def matrix(result: Inference) -> TextTable:
    return TextTable(COLUMNS, [asdict(row) for row in result.rows])


def accuracy(result: Inference) -> TextTable:
    exact = result.accuracy["torch"].auc
    rows = []
    for name, one in result.accuracy.items():
        change = None if exact is None or one.auc is None else one.auc - exact
        rows.append({"engine": name, **asdict(one), "auc_change": change})
    return TextTable(ACCURACY, rows)


def reasons(result: Inference) -> dict[str, list[str]]:
    """Return the skipped providers, grouped by reason."""
    by_reason: dict[str, list[str]] = {}
    for name, why in result.skipped.items():
        by_reason.setdefault(why, []).append(name.removesuffix("ExecutionProvider"))
    return by_reason


def text(result: Inference) -> str:
    ratios = "\n".join(f"{ratio:>6.2f} ×  {name}" for name, ratio in result.ratios().items())
    parts = [matrix(result).text(), ratios, accuracy(result).text(), result.environment.text()]
    parts += ["\n".join(f"not measured, {why}: {', '.join(names)}" for why, names in reasons(result).items())]
    return "\n\n".join(part for part in parts if part)


def write_all(result: Inference, out: Path) -> Path:
    """Write infer.csv, infer.md and infer.html. Return the path of the page."""
    page.write(out / "infer.csv", TextTable([], [asdict(row) for row in result.rows]).csv())
    skipped = "".join(f"* {why}: {', '.join(names)}\n" for why, names in reasons(result).items())
    lines = ["## Inference", "", matrix(result).markdown(), "", "## Scores", "", accuracy(result).markdown(), ""]
    lines += ["## Environment", "", "```text", result.environment.text(), "```", ""]
    lines += ["## Not measured", "", skipped] if skipped else []
    page.write(out / "infer.md", "\n".join(lines))
    missing = "".join(f"<p><b>{escape(why)}</b>: {', '.join(names)}</p>" for why, names in reasons(result).items())
    parts = [
        "<h1>Inference</h1>",
        page.section("Speed", page.charts(*plots(result))),
        page.section("Scores", accuracy(result).html()),
        page.section("Matrix", matrix(result).html()),
        page.section("Environment", page.details("this machine", result.environment.text())),
        page.section("Not measured", missing),
    ]
    return page.write(out / "infer.html", page.page("Inference", parts))


def plots(result: Inference) -> list[str]:
    """Plot rows per second and latency by batch size: one curve per engine and number of threads, each at its best setting."""
    best: dict[tuple[str, int], dict[int, Measurement]] = {}
    for row in result.rows:
        cells = best.setdefault((row.engine, row.threads), {})
        size = row.batch_size
        if size not in cells or row.p50_ms < cells[size].p50_ms:
            cells[size] = row
    figures = []
    for title, key, unit in (("Rows per second", "rows_per_s", "rows/s"), ("p99 of a batch", "p99_ms", "ms")):
        series = [
            Series(
                f"{name}, {count(threads, 'thread')}",
                [(float(size), float(getattr(cells[size], key))) for size in sorted(cells)],
                KINDS[i % len(KINDS)],
                dots=True,
            )
            for i, ((name, threads), cells) in enumerate(best.items())
        ]
        sizes = {size for cells in best.values() for size in cells}
        figures.append(charts.lines(title, series, "batch size", unit, log=len(sizes) > 1))
    return figures


WARM_UP = 3
ROUNDS = 5


@dataclass(frozen=True)
class Measurement:
    """One cell of the matrix. Stage times are medians; the percentiles are of whole batches."""

    engine: str
    threads: int
    batch_size: int
    graph: str | None
    """Level of graph optimisation; None for torch."""
    p50_ms: float
    p99_ms: float
    preparing_ms: float
    running_ms: float
    collecting_ms: float
    total_s: float
    rows_per_s: float
    batches: int


@dataclass(frozen=True)
class Accuracy:
    """How far the scores of an engine are from torch's."""

    max_drift: float
    mean_drift: float
    auc: float | None


@dataclass
class Inference:
    """The measured cells, and the accuracy of each engine."""

    rows: list[Measurement]
    accuracy: dict[str, Accuracy]
    environment: Environment
    skipped: dict[str, str] = field(default_factory=dict)
    """Providers of ONNX Runtime that were not measured, each with the reason."""

    def ratios(self) -> dict[str, float]:
        """Return the speed-up over torch by engine and batch size, each engine at its best setting."""
        best: dict[tuple[str, int], float] = {}
        for row in self.rows:
            cell = row.engine, row.batch_size
            best[cell] = min(best.get(cell, float("inf")), row.p50_ms)
        return {
            f"{engine} / torch, batch {size}": best["torch", size] / p50_ms
            for (engine, size), p50_ms in best.items()
            if engine != "torch" and ("torch", size) in best
        }

    def to_dict(self) -> Facts:
        return {
            "rows": [asdict(row) for row in self.rows],
            "ratios": self.ratios(),
            "accuracy": {name: asdict(one) for name, one in self.accuracy.items()},
            "environment": self.environment.facts,
            "skipped": self.skipped,
        }


def measure(
    model: str | Path | SavedModel,
    data: Any,
    *,
    engines: Sequence[str] = (),
    threads: Sequence[int] = (1, 2),
    batch_sizes: Sequence[int] = (1, 5, 100, 1000),
    graph: Sequence[str] = ("all", "off"),
    batches: int = 100,
    rows: int = 10_000,
    form: str | None = None,
    say: Callable[[str], None] = print,
    trust: bool = False,
) -> Inference:
    """Score `batches` batches per cell. Without `engines`, measure torch, onnx, int8 and all usable providers."""
    for level in graph:
        if level not in LEVELS:
            raise ConfigError(f"unknown graph optimisation {level!r}", f"choose among {', '.join(LEVELS)}")
    saved = model if isinstance(model, SavedModel) else load(model, trust)
    loaded = saved.reading(form, 1)
    learner = loaded.learner
    sample = _read(loaded, data, rows)
    skipped: dict[str, str] = {}
    names = list(engines) or ["torch", "onnx", "int8", *_usable_providers(learner, skipped)]
    keep = torch.get_num_threads()
    learner.model.eval()
    try:
        cells = _open_cells(learner, names, threads, batch_sizes, graph, sample)
        say(f"{len(cells)} cells, {batches} batches each; {len(sample):,} rows")
        for cell, _ in itertools.product(cells, range(WARM_UP)):
            cell.score(0)
        for turn in range(ROUNDS):
            share = range(turn * batches // ROUNDS, (turn + 1) * batches // ROUNDS)
            for cell in cells:
                for number in share:
                    cell.score(number, keep=True)
        measured = [cell.result() for cell in cells]
    finally:
        torch.set_num_threads(keep)
    accuracy = _accuracy(learner, [name for name in names if name != "torch"], sample)
    stats = learner.table.stats()
    about = environment(
        model=f"{learner.config.model.name}, {sum(p.numel() for p in learner.model.parameters()):,} dense parameters",
        table=f"{stats['rows']:,} rows, {stats['bytes']:,} bytes, {learner.table.factors} factors",
        rows=f"{len(sample):,}",
    )
    return Inference(measured, accuracy, about, skipped)


def _read(loaded: SavedModel, data: Any, rows: int) -> Batch:
    parts, left = [], rows
    for batch in loaded.source(data, min(rows, 1000)):
        parts.append(batch[: min(left, len(batch))])
        left -= len(parts[-1])
        if left <= 0:
            break
    if not parts:
        raise DataError("the data holds no rows")
    return concatenate(parts)


def _usable_providers(learner: Learner, skipped: dict[str, str]) -> list[str]:
    """Return the providers that compute a part of this network on this machine. Add the others to `skipped` with the reason."""
    present, absent = providers()
    skipped |= dict.fromkeys(absent, "not part of the installed onnxruntime")
    graph = predict.exported(learner)
    usable = []
    for name in present:
        try:
            nodes = _count_nodes(Engine(name), graph, learner)
        except Exception as error:  # a provider with missing libraries or devices may raise anything
            skipped[name] = f"does not start: {error}".splitlines()[0]
            continue
        if nodes:
            usable.append(name)
        else:
            skipped[name] = "installed, but computes no node of this network"
    return usable


def _count_nodes(engine: Engine, graph: bytes, learner: Learner) -> int:
    """Count the nodes of a graph that a provider computes, from a profile of one run."""
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
    """An engine with its threads at one batch size, and the times of its batches."""

    def __init__(self, learner: Learner, engine: Engine | None, threads: int, size: int, sample: Batch) -> None:
        self.learner, self.engine, self.threads, self.size = learner, engine, threads, size
        self.embedding = learner.embedding()
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
        output: Any = self._run(x)
        ran = time.perf_counter()
        self.scores[:] = output if self.engine is not None else torch.sigmoid(output).numpy()
        if keep:
            self.times.append((ready - begin, ran - ready, time.perf_counter() - ran))

    def _run(self, x: Inputs) -> Any:
        if self.session is None:
            return self.learner.model(x)
        return self.session.run(None, {name: getattr(x, name).numpy() for name in self.inputs})[0]

    def result(self) -> Measurement:
        times = np.array(self.times) * 1e3
        totals = times.sum(1)
        return Measurement(
            engine="torch" if self.engine is None else self.engine.name,
            threads=self.threads,
            batch_size=self.size,
            graph=None if self.engine is None else self.engine.graph,
            p50_ms=float(np.percentile(totals, 50)),
            p99_ms=float(np.percentile(totals, 99)),
            preparing_ms=float(np.median(times[:, 0])),
            running_ms=float(np.median(times[:, 1])),
            collecting_ms=float(np.median(times[:, 2])),
            total_s=float(totals.sum() / 1e3),
            rows_per_s=self.size / (float(np.median(totals)) / 1e3),
            batches=len(times),
        )


def _repeated(sample: Batch, size: int) -> Batch:
    """Return a batch larger than the sample by repeating its rows."""
    return sample.take(np.arange(size) % len(sample))


def _open_cells(
    learner: Learner,
    names: Sequence[str],
    threads: Sequence[int],
    sizes: Sequence[int],
    graph: Sequence[str],
    sample: Batch,
) -> list[_Cell]:
    """Return all cells of the matrix. Cells that differ only in the batch size share one session."""
    cells = []
    network = predict.exported(learner) if set(names) - {"torch"} else b""
    for name, number in itertools.product(names, threads):
        engines: list[Engine | None] = [None]
        if name != "torch":
            engines = [Engine(name, number, level) for level in graph]
        for engine in engines:
            group = [_Cell(learner, engine, number, size, sample) for size in sizes]
            if engine is not None:
                session = engine.session(network)
                for cell in group:
                    cell.open(session)
            cells += group
    return cells


def _accuracy(learner: Learner, names: Sequence[str], sample: Batch) -> dict[str, Accuracy]:
    """Return the AUC of every engine, and how far its scores are from torch's."""
    parts = [sample[at : at + 1000] for at in range(0, len(sample), 1000)]

    def score(engine: Engine | None) -> Floats:
        return np.concatenate([scores.copy() for _, scores in predict.Scorer(learner, 1, engine)(parts)])

    def auc(scores: Floats) -> float | None:
        if sample.labels is None:
            return None
        metrics = Metrics(learner.config.train.metrics.thresholds)
        metrics.update(scores, sample.labels, sample.weights, previous=sample.previous)
        return float(metrics.buckets.auc)

    exact = score(None)
    rows = {"torch": Accuracy(0.0, 0.0, auc(exact))}
    for name in names:
        scores = score(Engine(name))
        drift = np.abs(scores - exact)
        rows[name] = Accuracy(float(drift.max()), float(drift.mean()), auc(scores))
    return rows
