"""Score batches by one version of a model: the core pools the rows, ONNX Runtime runs the network."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from clickfleet import _core
from clickfleet.data.batch import Batch, Floats, Keys
from clickfleet.data.histories import history_columns
from clickfleet.data.names import Names
from clickfleet.data.schema import Schema
from clickfleet.errors import CheckpointError
from clickfleet.serve import overlays
from clickfleet.serve.aliases import Aliases
from clickfleet.serve.features import Fields, Rows, cells, most_keys
from clickfleet.store import run_folder
from clickfleet.store.onnx import CPU, Engine, fill_with_nan
from clickfleet.store.published import Entry

GOLDEN_TOLERANCE = 1e-6
DEVICE_TOLERANCE = 1e-3
"""Golden tolerance on an accelerator, which may round products."""
INT8_TOLERANCE = 0.05
"""Largest accepted difference of a quantized golden score."""

Outputs = dict[str, Floats]
NetworkInputs = dict[str, NDArray[Any]]
MAX_HISTORY_KEYS = 1 << 23
"""Keys that the histories of a request may have after padding: its rows, times the keys of the longest history."""
RUN_HISTORY_KEYS = 1 << 18
"""The same for one run of the network. More rows run in pieces, which bounds the memory."""


class RowSource(Protocol):
    """A source of rows: layers in memory or mapped, or Redis."""

    @property
    def row_formats(self) -> Sequence[str]:
        """The formats of its rows."""
        ...

    def inputs(
        self,
        keys: Any,
        starts: Any,
        ends: Any,
        values: Any,
        mean: Any,
        histories: Any,
        limit: int,
        first: Any,
        factors: Any,
    ) -> Any: ...
    def read(self, keys: Any, out: Any) -> None: ...
    def known(self, keys: Any, out: Any) -> None: ...


@dataclass(frozen=True)
class ModelIdentity:
    """The identity of a version, as shown in replies."""

    name: str
    sequence: int
    hash: str
    chain: str
    published: float
    """Unix time of publication."""
    step: int
    rows: int
    model: dict[str, Any] = field(default_factory=dict)

    @property
    def age_s(self) -> float:
        """Seconds since publication."""
        return max(0.0, time.time() - self.published)


class Version:
    """A model at one sequence. It is immutable, so holding a reference gives one consistent model."""

    def __init__(
        self,
        entry: Entry,
        rows: RowSource,
        name: str | None = None,
        *,
        row_count: int = 0,
        engine: Engine = Engine(),  # noqa: B008  (frozen)
        like: "Version | None" = None,
        session: Any = None,
    ) -> None:
        manifest = entry.manifest
        self.entry = entry
        if like is None or like.entry.manifest["schema"] != manifest["schema"]:
            self.fields: Fields = Fields(Schema.from_dict(manifest["schema"]))
        else:
            self.fields = like.fields
        self.schema = self.fields.schema
        self.factors = int(manifest["factors"])
        self.rows = rows
        self.blocking = bool(getattr(rows, "blocking", False))
        """Whether reading rows may block on I/O, so that it must not run on the event loop."""
        self.outputs: tuple[str, ...] = tuple(manifest["outputs"])
        """Outputs of the network. With several labels, `score` and `logit` have a column for each."""
        self.tasks: tuple[str, ...] = tuple(label.name for label in self.schema.tasks)
        """Names of the labels."""
        several = len(self.tasks) > 1 and "score" in self.outputs
        self._columns = {name: i for i, name in enumerate(self.tasks) if several and name not in self.outputs}
        self.output_names: tuple[str, ...] = (*self._columns, *self.outputs)
        """What a request may ask for: the score of each of several labels, and the outputs of the network."""
        self.aliases = Aliases(self.fields, self.outputs, self.tasks)
        self.identity = ModelIdentity(
            name or str(manifest["model"].get("name", "clickfleet")),
            entry.sequence,
            entry.hash,
            manifest["chain"],
            float(entry.info.get("time", 0.0)),
            int(manifest["step"]),
            row_count,
            manifest["model"],
        )
        self.version = str(entry.sequence)
        self.format: dict[str, Any] = dict(entry.info.get("format") or {"name": "slots"})
        """Format of the training data."""
        self.drift: float | None = None
        """Largest difference of a quantized golden score."""
        self.engine = engine
        same = like is not None and like.entry.hash == entry.hash and like.engine == engine
        if session is None:
            session = like.session if like is not None and same else self._load(entry)
        self.session: Any = session
        self._inputs = [item.name for item in self.session.get_inputs()]
        self.histories = self._read_histories()
        """Histories that the network reads: name, first key column, number of columns. Others are pooled."""
        pooled = self.schema.key_columns[: len(self.schema.slots) if self.histories else None]
        mean = np.array([slot.pooling == "mean" for slot in pooled], np.uint8)
        self._slots, self._mean = len(pooled), mean if mean.any() else None
        calibration = entry.calibration()
        self.calibration = calibration
        """What maps the scores of the network to those that are served; None if they are the same."""
        self._calibrate = None if calibration is None or "score" not in self.outputs else calibration.of(self.schema)
        self._check_graph(entry)
        self._check_golden(entry)

    def run(self, rows: Rows) -> Outputs:
        """Return all outputs for some rows. The score is calibrated."""
        size = len(rows)
        if self.histories:
            size = max(1, RUN_HISTORY_KEYS // max(1, self.history_keys(rows)))
        if size >= len(rows):
            outputs = self.run_inputs(self.inputs(rows))
        else:
            parts = [self.run_inputs(self.inputs(rows[at : at + size])) for at in range(0, len(rows), size)]
            outputs = {name: np.concatenate([part[name] for part in parts]) for name in self.outputs}
        if self._calibrate is not None:
            outputs["score"] = self._calibrate(outputs["score"], rows)
        return outputs

    def history_keys(self, rows: Rows) -> int:
        """Return the keys that each row has in the histories that the network reads, all as long as the longest."""
        return sum(most_keys(rows, first) * columns for _, first, columns in self.histories)

    def output(self, name: str, outputs: Outputs) -> Floats:
        """Return an output by its name: one of the network, or the score of one of several labels."""
        column = self._columns.get(name)
        return outputs[name] if column is None else np.ascontiguousarray(outputs["score"][:, column])

    def by_task(self, values: Floats) -> Floats | dict[str, Floats]:
        """Return scores or logits of several labels by their names; of one label, as they are."""
        if len(self.tasks) == 1:
            return values
        return dict(zip(self.tasks, np.ascontiguousarray(values.T), strict=True))

    def inputs(self, rows: Rows) -> NetworkInputs:
        """Return the inputs of the network by name: dense, first and factors, and three arrays for each history it reads."""
        n = len(rows)
        first = np.empty((n, self._slots), np.float32)
        factors = np.empty((n, self._slots, self.factors), np.float32)
        places = [(start, columns) for _, start, columns in self.histories]
        starts, ends = cells(rows)
        events = self.rows.inputs(
            rows.keys, starts, ends, rows.values, self._mean, places, MAX_HISTORY_KEYS, first, factors
        )
        arrays: NetworkInputs = {"dense": rows.dense, "first": first, "factors": factors}
        for (name, _, _), (event_factors, length, row) in zip(self.histories, events, strict=True):
            arrays |= {f"{name}.factors": event_factors, f"{name}.length": length, f"{name}.row": row}
        return arrays

    def run_inputs(self, arrays: NetworkInputs) -> Outputs:
        """Return the outputs of the network."""
        outputs = self.session.run(None, {name: arrays[name] for name in self._inputs})
        return dict(zip(self.outputs, outputs, strict=True))

    def _read_histories(self) -> list[tuple[str, int, int]]:
        """Return the histories of a network that reads them."""
        every = [(history.name, first, len(history.slots)) for history, first in history_columns(self.schema)]
        parts = ("factors", "length", "row")
        return every if any(f"{name}.{part}" in self._inputs for name, _, _ in every for part in parts) else []

    def read(self, keys: Keys) -> Floats:
        """Return the rows of keys; zeros for unknown ones."""
        out = np.empty((len(keys), 1 + self.factors), np.float32)
        self.rows.read(keys, out)
        return out

    def known(self, keys: Keys) -> NDArray[np.bool_]:
        """Return which keys have a row."""
        out = np.empty(len(keys), np.uint8)
        self.rows.known(keys, out)
        return out.astype(bool)

    def _load(self, entry: Entry) -> Any:
        try:
            return self.engine.session(entry.graph())
        except CheckpointError as error:
            raise CheckpointError(f"{entry.path}: {error}") from error

    def _check_graph(self, entry: Entry) -> None:
        """Check that the network takes the inputs of the schema and returns the outputs in the manifest."""
        slots = self._slots
        widths: dict[str, list[Any]] = {
            "dense": [len(self.schema.dense)],
            "first": [slots],
            "factors": [slots, self.factors],
        }
        for name, _, columns in self.histories:
            widths |= {f"{name}.factors": ["", columns, self.factors], f"{name}.length": [], f"{name}.row": []}
        for item in self.session.get_inputs():
            shape = list(item.shape[1:])
            expected = widths.get(item.name)
            if (
                expected is None
                or len(shape) != len(expected)
                or any(isinstance(a, int) and a != b for a, b in zip(shape, expected, strict=True))
            ):
                raise CheckpointError(f"{entry.path}: its network takes an unknown input {item.name}{shape} per row")
        names = [item.name for item in self.session.get_outputs()]
        if names != list(self.outputs):
            raise CheckpointError(
                f"{entry.path}: its network returns {', '.join(names)}, but its manifest names {', '.join(self.outputs)}"
            )

    @cached_property
    def names(self) -> Names | None:
        """The values behind frequent keys, for people; None if they were not published."""
        return run_folder.published_names(self.entry, self.schema)

    def golden(self, entry: Entry) -> tuple[Batch, dict[str, Floats]] | None:
        """Return the golden requests of an entry and their expected outputs, or None if it has none."""
        golden = entry.golden()
        if not golden.num_rows:
            return None
        columns = len(self.schema.key_columns)
        try:
            rows = golden.num_rows
            counts = _values(golden, "counts", np.int64).reshape(rows * columns)
            keys = _values(golden, "keys", np.uint64)
            dense = _values(golden, "dense", np.float32).reshape(rows, len(self.schema.dense))
            answers = {name: _values(golden, name, np.float32).reshape(rows, -1) for name in self.outputs}
            if counts.sum() != len(keys):
                raise ValueError(f"it counts {counts.sum()} keys but holds {len(keys)}")
        except (ValueError, TypeError, KeyError, pa.ArrowException) as error:
            raise CheckpointError(f"{entry.path / 'golden.arrow'} does not fit the schema: {error}") from error
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
        return Batch(dense, keys, columns, offsets), answers

    def _check_golden(self, entry: Entry) -> None:
        """Check that the golden requests of the entry give the same outputs as at publication."""
        golden = self.golden(entry)
        if golden is None:
            return
        batch, expected = golden
        try:
            if not self.engine.int8:  # int8 cannot represent the NaN
                arrays = self.inputs(batch)
                fill_with_nan(self.session, {name: arrays[name] for name in self._inputs}, rows=4 * len(batch))
            outputs = self.run(batch)
            first = {} if self.engine.int8 else self.run(batch[:1])  # with int8, a single row has another scale
        except Exception as error:  # ONNX Runtime raises many kinds
            raise CheckpointError(f"{entry.path}: its network fails on its golden requests: {error}") from error
        self._compare(entry, outputs, expected)
        self._compare(entry, first, {name: values[:1] for name, values in expected.items()})

    def _compare(self, entry: Entry, outputs: Outputs, golden: Outputs) -> None:
        tolerance = GOLDEN_TOLERANCE if self.engine.provider == CPU else DEVICE_TOLERANCE
        for name, values in outputs.items():
            expected = golden[name]
            if values.size != expected.size:
                raise CheckpointError(
                    f"{entry.path}: its golden requests give {values.size} values of {name}, not {expected.size}"
                )
            scale = np.maximum(1.0, np.abs(expected).max(axis=0, initial=0.0))
            if name == "score":  # probabilities are compared as they are, numbers and counts by their size
                scale = np.where([label.loss == "log" for label in self.schema.tasks], 1.0, scale)
            worst = float((np.abs(values.reshape(expected.shape) - expected) / scale).max(initial=0.0))
            if name == "score":
                self.drift = worst if self.engine.int8 else None
            limit = INT8_TOLERANCE if self.engine.int8 else tolerance * (1 if name == "score" else 10)
            if (name == "score" or not self.engine.int8) and not worst <= limit:
                raise CheckpointError(
                    f"{entry.path}: its golden requests give a different {name} than at publication (by {worst:.2g})",
                    "the rows or the network are damaged, or this machine computes differently; publish a base again",
                )


def _values(table: pa.Table, name: str, kind: type[np.generic]) -> Any:
    """Return all values of a list column, or of a plain one, one after another."""
    column = table.column(name).combine_chunks()
    values = column.flatten() if pa.types.is_list(column.type) else column
    if column.null_count or values.null_count:
        raise ValueError(f"{name} has missing values")
    return values.to_numpy(zero_copy_only=False).astype(kind)


def open_version(
    entry: Entry,
    folders: Sequence[Path | str] | None = None,
    rows: overlays.Rows = "mapped",
    name: str | None = None,
    *,
    opened: dict[str, overlays.Layer] | None = None,
    engine: Engine = Engine(),  # noqa: B008  (frozen)
    like: Version | None = None,
    session: Any = None,
) -> Version:
    """Open a version whose rows are the layers in `folders`, newest first (default: only the entry's own).

    Layers in `opened` are reused, and new ones are added to it. Unchanged parts are shared with `like`. `session` is the open network
    of the entry, if there is one already.
    """
    factors = int(entry.manifest["factors"])
    known = {} if opened is None else opened
    stack = []
    for folder in map(str, folders or [entry.path]):
        if folder not in known:
            known[folder] = overlays.open_layer(folder, factors, rows)
        stack.append(known[folder])
    table = _core.FrozenRows(tuple(stack), factors)
    count = sum(overlays.size(layer) for layer in stack)
    return Version(entry, table, name, row_count=count, engine=engine, like=like, session=session)
