"""The features of a request -> Batch, by the layout that also reads files.

>>> from clickfleet.schema import Dense, Schema, Slot
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
from typing import Any

import numpy as np

from clickfleet import _core
from clickfleet.batch import Batch, concatenate
from clickfleet.errors import DataError, ServeError
from clickfleet.formats._native import dense_groups, layout
from clickfleet.schema import Schema

MANY_KEYS = 1 << 22
"""Keys that a request may make beyond one per slot and row."""

Column = Any
"""`_core.RequestColumn`: a list, numbers or packed texts."""


class Fields:
    """The inputs of a model by name, as requests may give them."""

    def __init__(self, schema: Schema) -> None:
        self.schema = schema
        self.dense = dense_groups(schema)
        """Dense columns behind each name."""
        self.names = list(dict.fromkeys([*self.dense, *(slot.source or slot.name for slot in schema.read_slots)]))
        """Everything a request gives, dense names first; a column with several uses once."""
        buckets = {slot.name: i for i, slot in enumerate(slot for slot in schema.slots if slot.bucket)}
        self._native = _core.Fields(
            layout(schema, label=False),
            list(self.dense.items()),
            [(slot.source or slot.name, buckets.get(slot.name, -1)) for slot in schema.slots],
        )

    def rows(self, rows: list[Any]) -> Batch:
        """Mappings, one per row; what a row does not name is missing, what the model does not know is refused."""
        try:
            return self._batch(len(rows), *self._native.rows(rows))
        except IndexError as error:
            where, _, name = str(error).partition("\n")
            raise self.unknown(name, f"{where}: ") from None
        except ValueError as error:
            raise ServeError(str(error)) from None

    def columns(self, columns: Mapping[str, Column], rows: int) -> Batch:
        """One column per input, all of them and no other."""
        for name in columns:
            if name not in self.names:
                raise self.unknown(name)
        for name in self.names:
            if name not in columns:
                raise ServeError(f"the input {name!r} is missing", f"inputs: {', '.join(self.names)}")
        try:
            return self._batch(rows, *self._native.columns([columns[name] for name in self.names], rows))
        except ValueError as error:
            raise ServeError(str(error)) from None

    def ready(self, dense: Any, keys: Any, offsets: Any = None, values: Any = None) -> Batch:
        """Keys and dense values that need no transform: dense[B, F], keys[B, S], or keys[N] with offsets[B·S + 1]."""
        schema, slots = self.schema, len(self.schema.slots)
        if dense.ndim != 2 or dense.shape[1] != len(schema.dense):
            raise ServeError(f"dense must have the shape [rows, {len(schema.dense)}], not {list(dense.shape)}")
        if not np.isfinite(dense).all():
            raise ServeError("dense holds a value that is not a finite number")
        if offsets is None:
            if keys.shape != (len(dense), slots):
                raise ServeError(
                    f"keys must have the shape [{len(dense)}, {slots}], not {list(keys.shape)}",
                    "give offsets where a slot has several keys or none",
                )
        elif not _rises(offsets, len(dense) * slots + 1, keys.size):
            raise ServeError(f"offsets must rise from 0 to {keys.size}, {len(dense) * slots + 1} numbers")
        if values is not None and values.size != keys.size:
            raise ServeError(f"there are {values.size} values for {keys.size} keys")
        if values is not None and not np.isfinite(values).all():
            raise ServeError("values holds one that is not a finite number")
        try:
            return Batch(dense, keys.reshape(-1), slots, offsets, values=values)
        except DataError as error:
            raise ServeError(str(error)) from None

    def unknown(self, name: str, where: str = "") -> ServeError:
        return ServeError(f"{where}the model has no input {name!r}", f"inputs: {', '.join(self.names)}")

    def _batch(self, rows: int, dense: Any, keys: Any, offsets: Any, values: Any) -> Batch:
        # The core's 64-bit integers are C's long long; NumPy sees the same bytes.
        shaped = dense.reshape(rows, len(self.schema.dense))
        return Batch(shaped, keys, len(self.schema.slots), offsets, values=values)


def _rises(offsets: Any, count: int, last: int) -> bool:
    """Whether there are `count` offsets that rise from 0 to `last`; neighbours are compared, as a difference may overflow."""
    if len(offsets) != count or offsets[0] != 0 or offsets[-1] != last:
        return False
    return bool((offsets[:-1] <= offsets[1:]).all())


def inputs_of(schema: Schema) -> list[dict[str, Any]]:
    """What a request may name, with the kind and number of its values, for people and for protocol metadata."""
    found: dict[str, dict[str, Any]] = {
        name: {"name": name, "kind": "number", "values": len(places), "missing": schema.dense[places[0]].missing}
        for name, places in dense_groups(schema).items()
    }
    for slot in schema.read_slots:
        name = slot.source or slot.name
        item = found.setdefault(name, {"name": name, "kind": "key", "values": "any"})
        if item["kind"] == "number":
            item["kind"] = "number and key"
        elif item["kind"] == "key" and not slot.multi:
            item["values"] = 1
    return list(found.values())


def check_keys(keys: int, cells: int) -> None:
    """Refuses a request that would multiply its keys, such as a long list of a user's for many candidates."""
    if keys > cells + MANY_KEYS:
        raise ServeError(
            f"the request makes {keys:,} keys, more than this server takes at once", "send several requests"
        )


def pick(names: Sequence[str], known: Sequence[str], what: str) -> list[str]:
    """The names asked for, each of which must be known."""
    for name in names:
        if name not in known:
            raise ServeError(f"the model has no {what} {name!r}", f"{what}s: {', '.join(known)}")
    return list(names)


def overlay(fields: Fields, user: Batch, candidates: Batch, names: set[str]) -> Batch:
    """The candidates' rows with the user's dense values and keys in the columns that the user gave."""
    schema = fields.schema
    n, slots = len(candidates), len(schema.slots)
    dense = candidates.dense.copy()
    columns = [place for name, places in fields.dense.items() if name in names for place in places]
    dense[:, columns] = user.dense[0, columns]
    derived = {schema.dense[place].name for place in columns}
    mine = np.array(
        [
            slot.bucket.column in derived if slot.bucket else (slot.source or slot.name) in names
            for slot in schema.slots
        ],
        bool,
    )
    if user.one_each and candidates.one_each:
        keys = np.where(mine, user.keys.reshape(1, slots), candidates.keys.reshape(n, slots))
        return Batch(dense, keys.reshape(-1), slots)
    both = concatenate([user, candidates])
    counts = np.diff(both.offsets).reshape(n + 1, slots)
    source = np.where(mine, 0, np.arange(1, n + 1)[:, None])  # row of `both` that each cell comes from
    cells = (source * slots + np.arange(slots)).reshape(-1)
    lengths = counts.reshape(-1)[cells]
    check_keys(int(lengths.sum()), n * slots)
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    where = np.repeat(both.offsets[cells] - offsets[:-1], lengths) + np.arange(offsets[-1])
    values = None if both.values is None else both.values[where]
    return Batch(dense, both.keys[where], slots, offsets, values=values)
