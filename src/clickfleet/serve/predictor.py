"""Score batches by one version of a model: the core pools the rows, ONNX Runtime runs the network."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from clickfleet import _core
from clickfleet.data.batch import Batch, Floats, Keys
from clickfleet.data.names import Names
from clickfleet.data.schema import Schema
from clickfleet.errors import CheckpointError
from clickfleet.serve import overlays
from clickfleet.serve.aliases import Aliases
from clickfleet.serve.features import Fields
from clickfleet.store import run_folder
from clickfleet.store.onnx import CPU, Engine, fill_with_nan
from clickfleet.store.published import Entry

GOLDEN_TOLERANCE = 1e-6
DEVICE_TOLERANCE = 1e-3
"""Golden tolerance on an accelerator, which may round products."""
INT8_TOLERANCE = 0.05
"""Largest accepted difference of a quantized golden score."""

Outputs = dict[str, Floats]


class RowSource(Protocol):
    """A source of rows: layers in memory or mapped, or Redis."""

    def inputs(self, keys: Any, offsets: Any, values: Any, mean: Any, first: Any, factors: Any) -> None: ...
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
        self.aliases = Aliases(self.fields, self.outputs)
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
        mean = np.array([slot.pooling == "mean" for slot in self.schema.slots], np.uint8)
        self._mean = mean if mean.any() else None
        self.session = self._load(entry)
        self._inputs = [item.name for item in self.session.get_inputs()]
        self._check_graph(entry)
        self._check_golden(entry)

    def run(self, batch: Batch) -> Outputs:
        """Return all outputs of a batch."""
        return self.run_inputs(*self.inputs(batch))

    def inputs(self, batch: Batch) -> tuple[Floats, Floats, Floats]:
        """Return the inputs of the network: dense, first and factors."""
        n, slots = len(batch), batch.slots
        first = np.empty((n, slots), np.float32)
        factors = np.empty((n, slots, self.factors), np.float32)
        self.rows.inputs(batch.keys, batch.offsets, batch.values, self._mean, first, factors)
        return batch.dense, first, factors

    def run_inputs(self, dense: Floats, first: Floats, factors: Floats) -> Outputs:
        outputs = self.session.run(None, self._feed(dense, first, factors))
        return dict(zip(self.outputs, outputs, strict=True))

    def _feed(self, dense: Floats, first: Floats, factors: Floats) -> dict[str, Floats]:
        arrays = {"dense": dense, "first": first, "factors": factors}
        return {name: arrays[name] for name in self._inputs}

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
        slots = len(self.schema.slots)
        widths = {"dense": [len(self.schema.dense)], "first": [slots], "factors": [slots, self.factors]}
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
        try:
            counts = np.array(golden["counts"].to_pylist(), np.int64).reshape(golden.num_rows * len(self.schema.slots))
            keys = np.concatenate(
                [np.empty(0, np.uint64), *(np.array(row, np.uint64) for row in golden["keys"].to_pylist())]
            )
            dense = np.array(golden["dense"].to_pylist(), np.float32).reshape(golden.num_rows, len(self.schema.dense))
            answers = {name: np.array(golden[name].to_pylist(), np.float32) for name in self.outputs}
            if counts.sum() != len(keys):
                raise ValueError(f"it counts {counts.sum()} keys but holds {len(keys)}")
        except (ValueError, TypeError, KeyError) as error:
            raise CheckpointError(f"{entry.path / 'golden.arrow'} does not fit the schema: {error}") from error
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
        return Batch(dense, keys, len(self.schema.slots), offsets), answers

    def _check_golden(self, entry: Entry) -> None:
        """Check that the golden requests of the entry give the same outputs as at publication."""
        golden = self.golden(entry)
        if golden is None:
            return
        batch, expected = golden
        try:
            if not self.engine.int8:  # int8 cannot represent the NaN
                fill_with_nan(self.session, self._feed(*self.inputs(batch)), rows=4 * len(batch))
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
            scale = 1.0 if name == "score" else max(1.0, float(np.abs(expected).max(initial=0.0)))
            worst = float(np.abs(values.reshape(expected.shape) - expected).max(initial=0.0)) / scale
            if name == "score":
                self.drift = worst if self.engine.int8 else None
            limit = INT8_TOLERANCE if self.engine.int8 else tolerance * (1 if name == "score" else 10)
            if (name == "score" or not self.engine.int8) and not worst <= limit:
                raise CheckpointError(
                    f"{entry.path}: its golden requests give a different {name} than at publication (by {worst:.2g})",
                    "the rows or the network are damaged, or this machine computes differently; publish a base again",
                )


def open_version(
    entry: Entry,
    folders: Sequence[Path | str] | None = None,
    rows: overlays.Rows = "mapped",
    name: str | None = None,
    *,
    opened: dict[str, overlays.Layer] | None = None,
    engine: Engine = Engine(),  # noqa: B008  (frozen)
    like: Version | None = None,
) -> Version:
    """Open a version whose rows are the layers in `folders`, newest first (default: only the entry's own).

    Layers in `opened` are reused, and new ones are added to it. Unchanged parts are shared with `like`.
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
    return Version(entry, table, name, row_count=count, engine=engine, like=like)
