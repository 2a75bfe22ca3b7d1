"""Check that online equals offline: score the same rows with a model's files and a server, and find the first difference."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from clickfleet.data.batch import Batch, Floats
from clickfleet.data.dataset import Source, with_format
from clickfleet.data.formats import load as load_format
from clickfleet.data.schema import Schema
from clickfleet.errors import ConfigError
from clickfleet.serve.admin import checksum
from clickfleet.serve.client import Client, groups_of_lines
from clickfleet.serve.json_api import logits_of
from clickfleet.serve.predictor import Version, open_version
from clickfleet.serve.uploads import TEXT_FORMATS
from clickfleet.store import redis_rows, run_folder
from clickfleet.store.published import Entry
from clickfleet.store.row_format import RowFormat, round_rows
from clickfleet.training.learner import Learner
from clickfleet.training.model import SavedModel
from clickfleet.training.model import load as load_model
from clickfleet.training.onnx_graph import read_weights
from clickfleet.training.predict import Scorer
from clickfleet.workbench.runner import Facts

TOLERANCE = 1e-6
CHUNK_ROWS = 500


@dataclass
class Check:
    """One comparison and its result."""

    name: str
    ok: bool
    detail: str


@dataclass
class ParityReport:
    model: str = ""
    """The compared checkpoint or entry."""
    rows: int = 0
    max_abs_diff: float | None = None
    checks: list[Check] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return all(check.ok for check in self.checks)

    def add(self, name: str, ok: bool, detail: str) -> None:
        self.checks.append(Check(name, bool(ok), detail))

    def to_dict(self) -> Facts:
        return {"ok": self.ok, **asdict(self)}


def check_parity(
    model: str | Path | SavedModel,
    server: str | None,
    data: Sequence[str],
    *,
    form: str | None = None,
    artifact: str | Path | None = None,
    redis: str | None = None,
    limit: int = 10000,
    sample: int = 0,
    token: str | None = None,
    certificate: str | None = None,
    trust: bool = False,
) -> ParityReport:
    """Compare a model with a server, an artifact and Redis, whichever are given.

    `data` is read as `evaluate` and `predict` read it. `sample` limits the table rows compared (0: all). `trust` allows code
    named by the model to run.
    """
    if server is None and artifact is None and redis is None:
        raise ConfigError("nothing to compare with", "give --server, --artifact or --redis")
    saved = model if isinstance(model, SavedModel) else load_model(model, trust)
    learner = saved.learner
    learner.config = with_format(learner.config, form)
    report = ParityReport("" if saved.path is None else run_folder.describe(saved.path))
    if server is not None:
        with Client(server, token, certificate=certificate) as client:
            served = client.model()
            _compare_settings(report, learner, served)
            if data:
                _compare_scores(report, learner, client, data, limit, served.get("row_formats", ["float32"]))
    if artifact is not None:
        version = open_version(Entry(artifact))
        read = HeldRows(
            lambda keys: (version.read(keys), version.known(keys)), version.identity.rows, (version.entry.row_format,)
        )
        _compare_rows(report, "rows of the artifact", learner, read, sample, version.schema)
        _compare_weights(report, learner, version)
        if data:
            _compare_graph(report, learner, version, data, limit)
    if redis is not None:
        held = _redis_reader(redis, count=not sample)
        _compare_rows(report, "rows in Redis", learner, held, sample, learner.schema)
    return report


def _compare_settings(report: ParityReport, learner: Learner, served: Facts) -> None:
    schema = Schema.from_dict(served["schema"])
    lines = learner.schema.diff(schema)
    report.add("schema", not lines, "; ".join(lines[:3]) or f"the same ({schema.hash[:12]})")
    offline, online = str(learner.schema.keys), served["keys"]
    same = offline == online
    report.add("key rule", same, offline if same else f"{offline} offline, {online} online")
    drift = f", drift {served['int8_drift']:.2g}" if served.get("int8_drift") is not None else ""
    report.add("precision", served["precision"] == "fp32", f"fp32 offline, {served['precision']} online{drift}")
    level = served["graph_optimisation"]
    report.add(
        "graph optimisation", level == "all", f"{level} online" if level == "all" else f"all expected, {level} online"
    )


def read_batches(learner: Learner, data: Sequence[str], limit: int) -> Iterator[Batch]:
    """Yield the first `limit` rows of the data, in their order."""
    return first_rows(SavedModel(learner, threads=1).source(list(data), CHUNK_ROWS), limit)


def first_rows(source: Source, limit: int) -> Iterator[Batch]:
    """Yield the first `limit` rows of a source."""
    left = limit
    for batch in source:
        yield batch[: min(left, len(batch))]
        left -= len(batch)
        if left <= 0:
            return


def _compare_scores(
    report: ParityReport,
    learner: Learner,
    client: Client,
    data: Sequence[str],
    limit: int,
    row_formats: Sequence[RowFormat],
) -> None:
    """Compare scores. If all rows of the server have one small format, offline rows are rounded to it, which changes no published row."""
    row_format: RowFormat = row_formats[0] if len(row_formats) == 1 else "float32"
    source = SavedModel(learner, threads=1).source(list(data), CHUNK_ROWS)
    offline = _stacked(scores.copy() for _, scores in Scorer(learner, rows=row_format)(first_rows(source, limit)))
    if row_formats != ["float32"]:
        exact = read_batches(learner, data, limit)
        report.add("format of rows", True, _describe_rounding(learner, exact, offline, row_formats))
    form = learner.config.data.format.name
    # The server parses uploaded lines itself, which also tests its transforms and key hash. Groups of lines repeat no header,
    # and the server skips no bad lines.
    texts = form in TEXT_FORMATS and not load_format(learner.config.data.format).header_lines
    texts = texts and not source.counters.bad_lines
    if texts:
        online = [client.upload(lines, form).scores for lines in groups_of_lines(data, CHUNK_ROWS, limit)]
    else:
        online = [client.score(batch).scores for batch in read_batches(learner, data, limit)]
    served = _stacked(online)
    if served.shape != offline.shape:
        report.add("scores", False, f"scores {list(offline.shape)} offline, {list(served.shape)} online")
        return
    gaps = _gaps(served, offline, learner.schema)
    rows, worst = len(gaps), float(gaps.max(initial=0.0))
    report.rows, report.max_abs_diff = rows, worst
    ok = worst <= TOLERANCE
    report.add("scores", ok, f"{rows:,} rows, largest difference {worst:.2g}")
    if not ok and texts:
        first_bad = int(np.flatnonzero(gaps > TOLERANCE)[0])
        found = _find_difference(learner, client, data, form, first_bad, row_format)
        report.add("first step that differs", False, found)


def _describe_rounding(
    learner: Learner, batches: Iterable[Batch], rounded: Floats, row_formats: Sequence[RowFormat]
) -> str:
    """Tell how rows are stored online, and how far that moves the scores of this model."""
    what = f"{', '.join(row_formats) or 'no rows'} online"
    if len(row_formats) != 1:
        return f"{what}; offline rows are not rounded: compare the published log instead of a checkpoint"
    exact = _stacked(scores.copy() for _, scores in Scorer(learner)(batches))
    drift = float(_gaps(rounded, exact, learner.schema).max(initial=0.0))
    return f"{what}, so offline rows are rounded too; this moves a score by at most {drift:.2g}"


def _stacked(parts: Iterable[Floats]) -> Floats:
    """Return the scores of all rows, [rows] or [rows, labels]."""
    scores = list(parts)
    return np.concatenate(scores) if scores else np.empty(0, np.float32)


def _gaps(found: Floats, expected: Floats, schema: Schema) -> Floats:
    """Return the largest difference of each row. Scores that are no probabilities are compared by their size."""
    expected = expected.reshape(-1, len(schema.tasks))
    scale = np.where([task.loss == "log" for task in schema.tasks], 1.0, np.maximum(1.0, np.abs(expected)))
    gaps: Floats = (np.abs(found.reshape(expected.shape) - expected) / scale).max(axis=1)
    return gaps


def _find_difference(
    learner: Learner, client: Client, data: Sequence[str], form: str, row: int, row_format: RowFormat
) -> str:
    """Find where the computation of a row first differs: key, dense value, table row, pooled input or layer."""
    line = next(islice(groups_of_lines(data, 1), row, None))
    seen = client.inspect(line, form)
    (batch,) = [
        part[row % CHUNK_ROWS :][:1] for part in islice(read_batches(learner, data, row + 1), row // CHUNK_ROWS, None)
    ]
    where = f"row {row}: "
    if not np.array_equal(np.array(seen["keys"], np.uint64), batch.keys):
        slot = next((s for s, (a, b) in enumerate(zip(seen["keys"], batch.keys.tolist(), strict=False)) if a != b), 0)
        return f"{where}key of slot {_slot_name(learner, batch, slot)}"
    if not np.allclose(np.array(seen["dense"], np.float32), batch.dense, rtol=0, atol=TOLERANCE):
        column = int(np.flatnonzero(np.abs(np.array(seen["dense"]) - batch.dense)[0] > TOLERANCE)[0])
        return f"{where}dense value of {learner.schema.dense[column].name}"
    pulled = round_rows(row_format, learner.table.pull(batch.keys, training=False))
    gaps = np.abs(np.array(seen["rows"], np.float32).reshape(pulled.shape) - pulled).max(axis=1)
    if gaps.max(initial=0.0) > TOLERANCE:
        place = int(np.flatnonzero(gaps > TOLERANCE)[0])
        return f"{where}row of key {int(batch.keys[place])} in slot {_slot_name(learner, batch, place)}"
    embedding = learner.embedding()
    rows = round_rows(row_format, learner.table.pull(embedding.unique(batch), training=False))
    x = embedding.inputs(batch, rows, training=False)
    events = {f"{name}.factors": events.factors for name, events in x.histories.items()}
    for what, pooled in {"first": x.first, "factors": x.factors, **events}.items():
        if not np.allclose(np.array(seen[what], np.float32), pooled.numpy(), rtol=0, atol=TOLERANCE):
            return f"{where}{'events of the history' if what in events else 'pooled input'} {what}"
    for layer, value in learner.dense().items():
        theirs = seen["weights"].get(layer)
        if theirs is not None and theirs != checksum(value.detach().numpy()):
            return f"{where}layer {layer}: its weights differ"
    return f"{where}output of the network, though its inputs and weights agree"


def _slot_name(learner: Learner, batch: Batch, place: int) -> str:
    cell = int(np.searchsorted(batch.offsets, place, side="right")) - 1
    return learner.schema.key_columns[cell % batch.slots].name


class HeldRows(NamedTuple):
    """The rows held elsewhere."""

    read: Callable[[NDArray[np.uint64]], tuple[Floats, Any]]
    """keys -> (rows, which of them exist)"""
    total: int | None
    """How many there are; None if unknown."""
    formats: tuple[RowFormat, ...]
    """How they are stored."""


def _redis_reader(url: str, count: bool) -> HeldRows:
    client = redis_rows.connect(url)
    head = redis_rows.head(client)
    if head is None:
        raise ConfigError(f"{url} holds no rows", f"fill it: clickfleet publish … --to {url}")
    prefix, factors = head["prefix"], head["factors"]
    return HeldRows(
        lambda keys: redis_rows.read(client, prefix, keys, factors),
        redis_rows.count(client, prefix) if count else None,
        redis_rows.row_formats(head),
    )


def _compare_rows(
    report: ParityReport, name: str, learner: Learner, held: HeldRows, sample: int, schema: Schema
) -> None:
    """Compare every row that the model would publish with the rows held elsewhere; count missing, extra and different ones."""
    changes = learner.table.cut_changes(base=True)
    ours = missing = different = 0
    kept = {i for i, slot in enumerate(learner.schema.slots) if slot.name in {s.name for s in schema.slots}}
    if kept and not learner.schema.keys.by_slot:  # slots may share a row, so all were published
        kept = set(range(len(learner.schema.slots)))
    try:
        for columns in changes:
            wanted = np.isin(columns["slot"], list(kept)) if len(kept) < len(learner.schema.slots) else slice(None)
            keys = np.ascontiguousarray(columns["key"][wanted])
            width = len(columns["embedx"]) // max(len(columns["key"]), 1)
            expected = np.zeros((len(keys), 1 + learner.table.factors), np.float32)
            expected[:, 0] = columns["embed_w"][wanted]
            if width:
                expected[:, 1 : 1 + width] = np.asarray(columns["embedx"]).reshape(-1, width)[wanted]
            if sample and ours + len(keys) > sample:
                keys, expected = keys[: sample - ours], expected[: sample - ours]
            theirs, known = held.read(keys)
            ours += len(keys)
            missing += int((~known).sum())
            wrong = [(theirs != round_rows(form, expected.copy())).any(axis=1) for form in held.formats]
            different += int((np.logical_and.reduce(wrong) & known).sum())
            if sample and ours >= sample:
                break
    finally:
        changes.abort()
    extra = 0 if held.total is None or sample else max(0, held.total - (ours - missing))
    detail = f"{ours:,} compared: {missing:,} missing, {extra:,} extra, {different:,} different"
    if held.formats != ("float32",):
        detail += f"; stored as {', '.join(held.formats)}"
    report.add(name, not (missing or extra or different), detail)


def _compare_weights(report: ParityReport, learner: Learner, version: Version) -> None:
    theirs = read_weights(version.entry.graph())
    wrong = [
        name
        for name, value in learner.dense().items()
        if name in theirs and not torch.equal(value, theirs[name].reshape(value.shape))
    ]
    report.add(
        "weights of the artifact",
        not wrong,
        f"{len(theirs)} tensors" if not wrong else f"{', '.join(wrong[:3])} differ",
    )


def _compare_graph(report: ParityReport, learner: Learner, version: Version, data: Sequence[str], limit: int) -> None:
    """Compare the artifact's graph with the training graph; pruned inputs are missing for both."""
    kept = {slot.name for slot in version.schema.key_columns}
    slots = [i for i, slot in enumerate(learner.schema.key_columns) if slot.name in kept]
    dense = [
        i for i, column in enumerate(learner.schema.dense) if column.name in {c.name for c in version.schema.dense}
    ]
    worst, rows = 0.0, 0
    output = "score" if "score" in version.outputs else "logit"
    if output not in version.outputs:
        report.add("graph", True, "not compared: the artifact has neither score nor logit")
        return
    scorer = Scorer(learner, rows=version.entry.row_format)
    for batch in read_batches(learner, data, limit):
        whole, part = prune(batch, learner.schema, dense, slots)
        ((_, scores),) = list(scorer([whole]))
        found = version.run(part)[output]
        expected = scores.reshape(len(batch), -1)
        if output == "logit":
            expected = logits_of(expected.astype(np.float64), learner.schema.tasks)
        worst = max(worst, float(_gaps(found, expected, learner.schema).max(initial=0.0)))
        rows += len(batch)
    pruned = len(learner.schema.dense) + len(learner.schema.key_columns) - len(dense) - len(slots)
    what = f"{rows:,} rows, {pruned} inputs pruned, largest difference {worst:.2g}"
    report.add("graph", worst <= TOLERANCE * (1 if output == "score" else 10), what)


def prune(batch: Batch, schema: Schema, dense: list[int], slots: list[int]) -> tuple[Batch, Batch]:
    """Return the batch with only some inputs filled, and a batch that consists of only these inputs."""
    counts = np.diff(batch.offsets).reshape(len(batch), batch.slots)
    kept = np.isin(np.arange(batch.slots), slots)
    which = np.repeat(np.tile(kept, len(batch)), counts.reshape(-1))
    filled = np.tile(np.array([column.missing for column in schema.dense], np.float32), (len(batch), 1))
    filled[:, dense] = batch.dense[:, dense]
    keys, values = batch.keys[which], None if batch.values is None else batch.values[which]

    def offsets(counts: Any) -> Any:
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts.reshape(-1))])

    whole = Batch(filled, keys, batch.slots, offsets(np.where(kept, counts, 0)), values=values)
    part = Batch(
        np.ascontiguousarray(batch.dense[:, dense]), keys, len(slots), offsets(counts[:, slots]), values=values
    )
    return whole, part
