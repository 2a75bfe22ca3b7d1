"""Check that online equals offline: score the same rows with a model's files and a server, and find the first difference."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

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
from clickfleet.serve.predictor import Version, open_version
from clickfleet.serve.uploads import TEXT_FORMATS
from clickfleet.store import redis_rows, run_folder
from clickfleet.store.published import Entry
from clickfleet.training.embedding import Embedding
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
            _compare_settings(report, learner, client.model())
            if data:
                _compare_scores(report, learner, client, data, limit)
    if artifact is not None:
        version = open_version(Entry(artifact))
        _compare_rows(
            report,
            "rows of the artifact",
            learner,
            lambda keys: (version.read(keys), version.known(keys)),
            version.identity.rows,
            sample,
            version.schema,
        )
        _compare_weights(report, learner, version)
        if data:
            _compare_graph(report, learner, version, data, limit)
    if redis is not None:
        read_rows, count = _redis_reader(redis)
        rows_held = count if not sample else None
        _compare_rows(report, "rows in Redis", learner, read_rows, rows_held, sample, learner.schema)
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
    return _first_rows(SavedModel(learner, threads=1).source(list(data), CHUNK_ROWS), limit)


def _first_rows(source: Source, limit: int) -> Iterator[Batch]:
    left = limit
    for batch in source:
        yield batch[: min(left, len(batch))]
        left -= len(batch)
        if left <= 0:
            return


def _compare_scores(report: ParityReport, learner: Learner, client: Client, data: Sequence[str], limit: int) -> None:
    source = SavedModel(learner, threads=1).source(list(data), CHUNK_ROWS)
    batches = _first_rows(source, limit)
    offline = np.concatenate([np.empty(0, np.float32), *(scores.copy() for _, scores in Scorer(learner)(batches))])
    form = learner.config.data.format.name
    # The server parses uploaded lines itself, which also tests its transforms and key hash. Groups of lines repeat no header,
    # and the server skips no bad lines.
    texts = form in TEXT_FORMATS and not load_format(learner.config.data.format).header_lines
    texts = texts and not source.counters.bad_lines
    if texts:
        online = [client.upload(lines, form).scores for lines in groups_of_lines(data, CHUNK_ROWS, limit)]
    else:
        online = [client.score(batch).scores for batch in read_batches(learner, data, limit)]
    served = np.concatenate([np.empty(0, np.float32), *online])
    if len(served) != len(offline):
        report.add("scores", False, f"{len(offline)} rows offline, {len(served)} online")
        return
    gaps = np.abs(served - offline)
    rows, worst = len(gaps), float(gaps.max(initial=0.0))
    report.rows, report.max_abs_diff = rows, worst
    ok = worst <= TOLERANCE
    report.add("scores", ok, f"{rows:,} rows, largest difference {worst:.2g}")
    if not ok and texts:
        first_bad = int(np.flatnonzero(gaps > TOLERANCE)[0])
        report.add("first step that differs", False, _find_difference(learner, client, data, form, first_bad))


def _find_difference(learner: Learner, client: Client, data: Sequence[str], form: str, row: int) -> str:
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
    pulled = learner.table.pull(batch.keys, training=False)
    gaps = np.abs(np.array(seen["rows"], np.float32).reshape(pulled.shape) - pulled).max(axis=1)
    if gaps.max(initial=0.0) > TOLERANCE:
        place = int(np.flatnonzero(gaps > TOLERANCE)[0])
        return f"{where}row of key {int(batch.keys[place])} in slot {_slot_name(learner, batch, place)}"
    embedding = Embedding(learner.schema, learner.table.factors)
    x = embedding.inputs(batch, learner.table.pull(embedding.unique(batch), training=False), training=False)
    for what, pooled in (("first", x.first), ("factors", x.factors)):
        if not np.allclose(np.array(seen[what], np.float32), pooled.numpy(), rtol=0, atol=TOLERANCE):
            return f"{where}pooled input {what}"
    for layer, value in learner.dense().items():
        theirs = seen["weights"].get(layer)
        if theirs is not None and theirs != checksum(value.detach().numpy()):
            return f"{where}layer {layer}: its weights differ"
    return f"{where}output of the network, though its inputs and weights agree"


def _slot_name(learner: Learner, batch: Batch, place: int) -> str:
    cell = int(np.searchsorted(batch.offsets, place, side="right")) - 1
    return learner.schema.slots[cell % batch.slots].name


RowReader = Callable[[NDArray[np.uint64]], tuple[Floats, Any]]
"""keys -> (rows, which of them exist)"""


def _redis_reader(url: str) -> tuple[RowReader, int]:
    client = redis_rows.connect(url)
    head = redis_rows.head(client)
    if head is None:
        raise ConfigError(f"{url} holds no rows", f"fill it: clickfleet publish … --to {url}")
    prefix, factors = head["prefix"], head["factors"]
    return lambda keys: redis_rows.read(client, prefix, keys, factors), redis_rows.count(client, prefix)


def _compare_rows(
    report: ParityReport,
    name: str,
    learner: Learner,
    read: RowReader,
    count: int | None,
    sample: int,
    schema: Schema,
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
            width = learner.table.factors if columns["full"] else 0
            expected = np.zeros((len(keys), 1 + learner.table.factors), np.float32)
            expected[:, 0] = columns["embed_w"][wanted]
            if width:
                expected[:, 1:] = np.asarray(columns["embedx"]).reshape(-1, width)[wanted]
            if sample and ours + len(keys) > sample:
                keys, expected = keys[: sample - ours], expected[: sample - ours]
            theirs, known = read(keys)
            ours += len(keys)
            missing += int((~known).sum())
            different += int(((theirs != expected).any(axis=1) & known).sum())
            if sample and ours >= sample:
                break
    finally:
        changes.abort()
    extra = 0 if count is None or sample else max(0, count - (ours - missing))
    detail = f"{ours:,} compared: {missing:,} missing, {extra:,} extra, {different:,} different"
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
    slots = [i for i, slot in enumerate(learner.schema.slots) if slot.name in {s.name for s in version.schema.slots}]
    dense = [
        i for i, column in enumerate(learner.schema.dense) if column.name in {c.name for c in version.schema.dense}
    ]
    worst, rows = 0.0, 0
    output = "score" if "score" in version.outputs else "logit"
    if output not in version.outputs:
        report.add("graph", True, "not compared: the artifact has neither score nor logit")
        return
    for batch in read_batches(learner, data, limit):
        whole, part = prune(batch, learner.schema, dense, slots)
        ((_, scores),) = list(Scorer(learner)([whole]))
        expected = scores if output == "score" else np.log(scores / (1 - scores))
        worst = max(worst, float(np.abs(version.run(part)[output] - expected).max(initial=0.0)))
        rows += len(batch)
    pruned = len(learner.schema.columns) - len(dense) - len(slots)
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
