"""One version of a model -> scores: rows, pooled by the core, through ONNX Runtime. No protocol and no torch here."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from clickfleet import _core
from clickfleet.batch import Batch, Floats, Keys
from clickfleet.engine import CPU, Engine, soil
from clickfleet.errors import CheckpointError
from clickfleet.published import Entry
from clickfleet.schema import Schema
from clickfleet.serve import layers
from clickfleet.serve.fields import Fields

GOLDEN_TOLERANCE = 1e-6
DEVICE_TOLERANCE = 1e-3
"""The same where an accelerator computes, which may round its products."""
INT8_TOLERANCE = 0.05
"""By how much quantised golden scores may differ before a version is refused."""

Outputs = dict[str, Floats]


class RowSource(Protocol):
    """Where rows come from: layers in memory or mapped, or Redis."""

    def inputs(self, keys: Any, offsets: Any, values: Any, mean: Any, first: Any, factors: Any) -> None: ...
    def read(self, keys: Any, out: Any) -> None: ...
    def known(self, keys: Any, out: Any) -> None: ...


@dataclass(frozen=True)
class Identity:
    """What a version is, for people and for replies."""

    name: str
    sequence: int
    hash: str
    chain: str
    published: float
    """When it was published (seconds since 1970)."""
    step: int
    rows: int
    model: dict[str, Any] = field(default_factory=dict)


class Version:
    """A model at one sequence; immutable, so that one reference to it is one consistent model."""

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
        same = like is not None and like.entry.manifest["schema"] == manifest["schema"]
        self.fields: Fields = like.fields if like is not None and same else Fields(Schema.from_dict(manifest["schema"]))
        self.schema = self.fields.schema
        self.factors = int(manifest["factors"])
        self.rows = rows
        self.blocking = bool(getattr(rows, "blocking", False))
        """Whether reading rows may wait for somebody else: then it must not happen on the event loop."""
        self.outputs: tuple[str, ...] = tuple(manifest["outputs"])
        self.identity = Identity(
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
        """The format of the data it was trained on."""
        self.drift: float | None = None
        """Largest difference of a quantised golden score."""
        self.engine = engine
        mean = np.array([slot.pooling == "mean" for slot in self.schema.slots], np.uint8)
        self._mean = mean if mean.any() else None
        self._session = self._load(entry)
        self._inputs = [item.name for item in self._session.get_inputs()]
        self._check_graph(entry)
        self._check(entry)

    def run(self, batch: Batch) -> Outputs:
        """All outputs of some rows."""
        return self.run_inputs(*self.inputs(batch))

    def inputs(self, batch: Batch) -> tuple[Floats, Floats, Floats]:
        """What the network sees: dense, first and factors."""
        n, slots = len(batch), batch.slots
        first = np.empty((n, slots), np.float32)
        factors = np.empty((n, slots, self.factors), np.float32)
        self.rows.inputs(batch.keys, batch.offsets, batch.values, self._mean, first, factors)
        return batch.dense, first, factors

    def run_inputs(self, dense: Floats, first: Floats, factors: Floats) -> Outputs:
        found = self._session.run(None, self._given(dense, first, factors))
        return dict(zip(self.outputs, found, strict=True))

    def _given(self, dense: Floats, first: Floats, factors: Floats) -> dict[str, Floats]:
        given = {"dense": dense, "first": first, "factors": factors}
        return {name: given[name] for name in self._inputs}

    def read(self, keys: Keys) -> Floats:
        """The rows of keys; zeros where they are unknown."""
        out = np.empty((len(keys), 1 + self.factors), np.float32)
        self.rows.read(keys, out)
        return out

    def known(self, keys: Keys) -> NDArray[np.bool_]:
        """Which keys have a row."""
        out = np.empty(len(keys), np.uint8)
        self.rows.known(keys, out)
        return out.astype(bool)

    def _load(self, entry: Entry) -> Any:
        try:
            return self.engine.session(entry.graph())
        except CheckpointError as error:
            raise CheckpointError(f"{entry.path}: {error}") from error

    def _check_graph(self, entry: Entry) -> None:
        """The network must take what rows give, and give what the manifest names."""
        slots = len(self.schema.slots)
        widths = {"dense": [len(self.schema.dense)], "first": [slots], "factors": [slots, self.factors]}
        for item in self._session.get_inputs():
            shape = list(item.shape[1:])
            wanted = widths.get(item.name)
            if (
                wanted is None
                or len(shape) != len(wanted)
                or any(isinstance(a, int) and a != b for a, b in zip(shape, wanted, strict=True))
            ):
                raise CheckpointError(
                    f"{entry.path}: its network takes {item.name}{shape} for each row, which is not known"
                )
        names = [item.name for item in self._session.get_outputs()]
        if names != list(self.outputs):
            raise CheckpointError(
                f"{entry.path}: its network gives {', '.join(names)}, and the manifest says {', '.join(self.outputs)}"
            )

    def _golden(self, entry: Entry) -> tuple[Batch, dict[str, Floats]] | None:
        """The golden requests of an entry and their answers; None where it has none."""
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
                raise ValueError(f"{counts.sum()} keys are counted and {len(keys)} are there")
        except (ValueError, TypeError, KeyError) as error:
            raise CheckpointError(f"{entry.path / 'golden.arrow'} does not fit the schema: {error}") from error
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
        return Batch(dense, keys, len(self.schema.slots), offsets), answers

    def _check(self, entry: Entry) -> None:
        """The golden requests of the entry must give what they gave when it was published."""
        golden = self._golden(entry)
        if golden is None:
            return
        batch, wanted = golden
        try:
            if not self.engine.int8:  # NaN is no integer
                soil(self._session, self._given(*self.inputs(batch)), rows=4 * len(batch))
            found = self.run(batch)
            first = {} if self.engine.int8 else self.run(batch[:1])  # with int8 a single row has another scale
        except Exception as error:  # whatever ONNX Runtime finds wrong with it
            raise CheckpointError(f"{entry.path}: its network cannot answer its golden requests: {error}") from error
        self._compare(entry, found, wanted)
        self._compare(entry, first, {name: values[:1] for name, values in wanted.items()})

    def _compare(self, entry: Entry, found: Outputs, golden: Outputs) -> None:
        tolerance = GOLDEN_TOLERANCE if self.engine.provider == CPU else DEVICE_TOLERANCE
        for name, values in found.items():
            wanted = golden[name]
            if values.size != wanted.size:
                raise CheckpointError(f"{entry.path}: its golden requests give another number of {name}s")
            scale = 1.0 if name == "score" else max(1.0, float(np.abs(wanted).max(initial=0.0)))
            worst = float(np.abs(values.reshape(wanted.shape) - wanted).max(initial=0.0)) / scale
            if name == "score":
                self.drift = worst if self.engine.int8 else None
            limit = INT8_TOLERANCE if self.engine.int8 else tolerance * (1 if name == "score" else 10)
            if (name == "score" or not self.engine.int8) and not worst <= limit:
                raise CheckpointError(
                    f"{entry.path}: its golden requests give another {name} than when it was published (by {worst:.2g})",
                    "the rows or the network were damaged, or this machine computes differently; publish a base again",
                )


def open_version(
    entry: Entry,
    folders: Sequence[Path | str] | None = None,
    rows: layers.Rows = "mapped",
    name: str | None = None,
    *,
    opened: dict[str, Any] | None = None,
    engine: Engine = Engine(),  # noqa: B008  (frozen)
    like: Version | None = None,
) -> Version:
    """A version whose rows are the layers in `folders`, newest first (default: those of the entry alone).

    Layers in `opened` are used again, new ones are added there; what does not change is taken from `like`.
    """
    factors = int(entry.manifest["factors"])
    known = {} if opened is None else opened
    stack = []
    for folder in map(str, folders or [entry.path]):
        if folder not in known:
            known[folder] = layers.open_layer(folder, factors, rows)
        stack.append(known[folder])
    table = _core.FrozenRows(tuple(stack), factors)
    count = sum(layers.size(layer) for layer in stack)
    return Version(entry, table, name, row_count=count, engine=engine, like=like)


def age(identity: Identity) -> float:
    """Seconds since it was published."""
    return max(0.0, time.time() - identity.published)
