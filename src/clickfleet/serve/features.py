"""Convert the features of a request into a Batch, by the same layout that reads files.

>>> from clickfleet.data.schema import Dense, Schema, Slot
>>> fields = Fields(Schema(dense=(Dense("age"),), slots=(Slot("city"),)))
>>> fields.rows([{"age": 30, "city": "Bern"}, {"city": "Oslo"}]).dense.tolist()
[[30.0], [0.0]]
>>> fields.rows([{"town": "Bern"}])
Traceback (most recent call last):
    ...
clickfleet.errors.ServeError: row 0: the model has no input 'town'
  inputs: age, city
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NotRequired, TypedDict

import numpy as np

from clickfleet import _core
from clickfleet.data.batch import Batch, concatenate
from clickfleet.data.parsing.layout import dense_groups, layout
from clickfleet.data.schema import Schema
from clickfleet.errors import DataError, ServeError

MAX_EXTRA_KEYS = 1 << 22
"""Keys that a request may produce beyond one per slot and row."""

Column = Any
"""`_core.RequestColumn`: a list, numbers or packed texts."""


class Fields:
    """The inputs of a model by name, in the forms that requests may use."""

    def __init__(self, schema: Schema) -> None:
        self.schema = schema
        self.dense = dense_groups(schema)
        """Dense columns behind each name."""
        self.names = list(dict.fromkeys([*self.dense, *(slot.source or slot.name for slot in schema.read_slots)]))
        """Every input of a request, dense ones first. A column with several uses appears once."""
        buckets = {slot.name: i for i, slot in enumerate(slot for slot in schema.slots if slot.bucket)}
        self._native = _core.Fields(
            layout(schema, label=False),
            list(self.dense.items()),
            [(slot.source or slot.name, buckets.get(slot.name, -1)) for slot in schema.slots],
        )

    def rows(self, rows: list[Any]) -> Batch:
        """Convert one mapping per row. Absent features count as missing; unknown names are refused."""
        try:
            return self._batch(len(rows), *self._native.rows(rows))
        except IndexError as error:
            where, _, name = str(error).partition("\n")
            raise self.unknown(name, f"{where}: ") from None
        except ValueError as error:
            raise ServeError(str(error)) from None

    def columns(self, columns: Mapping[str, Column], rows: int) -> Batch:
        """Convert columns: exactly one per input."""
        for name in columns:
            if name not in self.names:
                raise self.unknown(name)
        for name in self.names:
            if name not in columns:
                raise ServeError(f"input {name!r} is missing", f"inputs: {', '.join(self.names)}")
        try:
            return self._batch(rows, *self._native.columns([columns[name] for name in self.names], rows))
        except ValueError as error:
            raise ServeError(str(error)) from None

    def encoded(self, dense: Any, keys: Any, offsets: Any = None, values: Any = None) -> Batch:
        """Convert keys and dense values that need no transform: dense[B, F], keys[B, S], or keys[N] with offsets[B·S + 1]."""
        schema, slots = self.schema, len(self.schema.slots)
        if dense.ndim != 2 or dense.shape[1] != len(schema.dense):
            raise ServeError(f"dense must have the shape [rows, {len(schema.dense)}], not {list(dense.shape)}")
        if not np.isfinite(dense).all():
            raise ServeError("dense contains a value that is not finite")
        if offsets is None:
            if keys.shape != (len(dense), slots):
                raise ServeError(
                    f"keys must have the shape [{len(dense)}, {slots}], not {list(keys.shape)}",
                    "give offsets if a slot has several keys or none",
                )
        elif not _is_ascending(offsets, len(dense) * slots + 1, keys.size):
            raise ServeError(f"offsets must be {len(dense) * slots + 1} ascending numbers from 0 to {keys.size}")
        if values is not None and values.size != keys.size:
            raise ServeError(f"values has {values.size} numbers for {keys.size} keys")
        if values is not None and not np.isfinite(values).all():
            raise ServeError("values contains a number that is not finite")
        try:
            return Batch(dense, keys.reshape(-1), slots, offsets, values=values)
        except DataError as error:
            raise ServeError(str(error)) from None

    def unknown(self, name: str, where: str = "") -> ServeError:
        return ServeError(f"{where}the model has no input {name!r}", f"inputs: {', '.join(self.names)}")

    def _batch(self, rows: int, dense: Any, keys: Any, offsets: Any, values: Any) -> Batch:
        # The core's 64-bit integers are C's long long, which NumPy reads as the same bytes.
        shaped = dense.reshape(rows, len(self.schema.dense))
        return Batch(shaped, keys, len(self.schema.slots), offsets, values=values)


def _is_ascending(offsets: Any, count: int, last: int) -> bool:
    """Return whether there are `count` ascending offsets from 0 to `last`. Differences could overflow, so compare neighbours."""
    if len(offsets) != count or offsets[0] != 0 or offsets[-1] != last:
        return False
    return bool((offsets[:-1] <= offsets[1:]).all())


class InputSpec(TypedDict):
    """An input of a model, as `/v1/model` shows it."""

    name: str
    kind: Literal["number", "key", "number and key"]
    values: int | Literal["any"]
    missing: NotRequired[float]


def inputs_of(schema: Schema) -> list[InputSpec]:
    """Return the inputs that a request may name, with the kind and number of their values."""
    inputs: dict[str, InputSpec] = {
        name: {"name": name, "kind": "number", "values": len(places), "missing": schema.dense[places[0]].missing}
        for name, places in dense_groups(schema).items()
    }
    for slot in schema.read_slots:
        name = slot.source or slot.name
        item = inputs.setdefault(name, {"name": name, "kind": "key", "values": "any"})
        if item["kind"] == "number":
            item["kind"] = "number and key"
        elif item["kind"] == "key" and not slot.multi:
            item["values"] = 1
    return list(inputs.values())


def check_keys(keys: int, cells: int) -> None:
    """Raise `ServeError` if a request multiplies its keys, such as a user's long list by many candidates."""
    if keys > cells + MAX_EXTRA_KEYS:
        raise ServeError(f"the request expands to {keys:,} keys, which is too many", "send several smaller requests")


def pick(names: Sequence[str], known: Sequence[str], what: str) -> list[str]:
    """Return the names, all of which must be known."""
    for name in names:
        if name not in known:
            raise ServeError(f"the model has no {what} {name!r}", f"{what}s: {', '.join(known)}")
    return list(names)


def overlay(fields: Fields, user: Batch, candidates: Batch, names: set[str]) -> Batch:
    """Return the candidates' rows, with the user's dense values and keys in the columns named for the user."""
    schema = fields.schema
    n, slots = len(candidates), len(schema.slots)
    dense = candidates.dense.copy()
    columns = [place for name, places in fields.dense.items() if name in names for place in places]
    dense[:, columns] = user.dense[0, columns]
    derived = {schema.dense[place].name for place in columns}
    from_user = np.array(
        [
            slot.bucket.column in derived if slot.bucket else (slot.source or slot.name) in names
            for slot in schema.slots
        ],
        bool,
    )
    if user.one_each and candidates.one_each:
        keys = np.where(from_user, user.keys.reshape(1, slots), candidates.keys.reshape(n, slots))
        return Batch(dense, keys.reshape(-1), slots)
    both = concatenate([user, candidates])
    counts = np.diff(both.offsets).reshape(n + 1, slots)
    source = np.where(from_user, 0, np.arange(1, n + 1)[:, None])  # row of `both` that each cell comes from
    cells = (source * slots + np.arange(slots)).reshape(-1)
    lengths = counts.reshape(-1)[cells]
    check_keys(int(lengths.sum()), n * slots)
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    where = np.repeat(both.offsets[cells] - offsets[:-1], lengths) + np.arange(offsets[-1])
    values = None if both.values is None else both.values[where]
    return Batch(dense, both.keys[where], slots, offsets, values=values)
