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
from dataclasses import dataclass
from typing import Any, Literal, NotRequired, TypedDict

import numpy as np

from clickfleet.data.batch import Batch, Floats, Integers, Keys, concatenate
from clickfleet.data.histories import keep_events
from clickfleet.data.parsing.layout import dense_groups, request_fields
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
        self.names = list(dict.fromkeys([*self.dense, *(slot.source or slot.name for slot in schema.read_columns)]))
        """Every input of a request, dense ones first. A column with several uses appears once."""
        self.jagged = frozenset(item["name"] for item in inputs_of(schema) if item["values"] == "any")
        """Inputs that may have any number of values in a row."""
        self._native = request_fields(schema)

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
        schema, slots = self.schema, len(self.schema.key_columns)
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
            return keep_events(Batch(dense, keys.reshape(-1), slots, offsets, values=values), schema)
        except DataError as error:
            raise ServeError(str(error)) from None

    def unknown(self, name: str, where: str = "") -> ServeError:
        return ServeError(f"{where}the model has no input {name!r}", f"inputs: {', '.join(self.names)}")

    def _batch(self, rows: int, dense: Any, keys: Any, offsets: Any, values: Any) -> Batch:
        # The core's 64-bit integers are C's long long, which NumPy reads as the same bytes.
        shaped = dense.reshape(rows, len(self.schema.dense))
        return Batch(shaped, keys, len(self.schema.key_columns), offsets, values=values)


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
    history: NotRequired[str]
    """The history it belongs to. All inputs of a history have the same number of values in a row."""
    slot: NotRequired[str]
    """The slot whose rows the values of a history use."""


def inputs_of(schema: Schema) -> list[InputSpec]:
    """Return the inputs that a request may name, with the kind and number of their values."""
    inputs: dict[str, InputSpec] = {
        name: {"name": name, "kind": "number", "values": len(places), "missing": schema.dense[places[0]].missing}
        for name, places in dense_groups(schema).items()
    }
    for slot in schema.read_columns:
        name = slot.source or slot.name
        item = inputs.setdefault(name, {"name": name, "kind": "key", "values": "any"})
        if item["kind"] == "number":
            item["kind"] = "number and key"
        elif item["kind"] == "key" and not slot.multi:
            item["values"] = 1
    for history in schema.histories:
        for slot_name, name in zip(history.slots, history.columns, strict=True):
            inputs[name] |= {"history": history.name, "slot": slot_name}
    return list(inputs.values())


def check_keys(keys: int, cells: int) -> None:
    """Raise `ServeError` if a request multiplies its keys, such as a user's long list by many candidates."""
    if keys > cells + MAX_EXTRA_KEYS:
        raise ServeError(f"the request expands to {keys:,} keys, which is too many", "send several smaller requests")


def features_of(fields: Fields) -> dict[str, tuple[str, ...]]:
    """Return what a row can be explained by, with its inputs: every input, and every history with all its inputs together.

    Histories that read the same input are one feature: without the input, neither has events.
    """
    groups: list[tuple[list[str], set[str]]] = []  # names of histories, and their inputs
    for history in fields.schema.histories:
        names, inputs = [history.name], set(history.columns)
        for group in [one for one in groups if one[1] & inputs]:
            groups.remove(group)
            names, inputs = group[0] + names, group[1] | inputs
        groups.append((names, inputs))
    others = [name for name in fields.names if not any(name in inputs for _, inputs in groups)]
    features: dict[str, tuple[str, ...]] = {name: (name,) for name in others}
    for names, inputs in groups:  # an input of the same name is a feature of its own
        name = " and ".join(names)
        features[f"{name} (history)" if name in features else name] = tuple(n for n in fields.names if n in inputs)
    return features


def pick(names: Sequence[str], known: Sequence[str], what: str) -> list[str]:
    """Return the names, all of which must be known."""
    for name in names:
        if name not in known:
            raise ServeError(f"the model has no {what} {name!r}", f"{what}s: {', '.join(known)}")
    return list(names)


@dataclass(slots=True, eq=False)
class SharedBatch:
    """Rows that share keys: row b has the keys [starts[b * slots + s], ends[b * slots + s]) in slot s.

    The keys of a user are there once, whatever the number of candidates.
    """

    dense: Floats  # [B, F]
    keys: Keys  # [N]
    slots: int
    starts: Integers  # [B * slots]
    ends: Integers  # [B * slots]
    values: Floats | None = None  # [N]

    def __len__(self) -> int:
        return len(self.dense)

    def __getitem__(self, rows: slice) -> "SharedBatch":
        start, stop, _ = rows.indices(len(self))
        cells = slice(start * self.slots, stop * self.slots)
        return SharedBatch(
            self.dense[start:stop], self.keys, self.slots, self.starts[cells], self.ends[cells], self.values
        )

    def apart(self) -> Batch:
        """Return the same rows, each with keys of its own."""
        lengths = self.ends - self.starts
        check_keys(int(lengths.sum()), len(lengths))
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
        where = np.repeat(self.starts - offsets[:-1], lengths) + np.arange(offsets[-1])
        values = None if self.values is None else self.values[where]
        return Batch(self.dense, self.keys[where], self.slots, offsets, values=values)


Rows = Batch | SharedBatch
"""The rows of a request."""


def cells(rows: Rows) -> tuple[Integers, Integers]:
    """Return where the keys of every slot of every row start and end."""
    return (rows.offsets[:-1], rows.offsets[1:]) if isinstance(rows, Batch) else (rows.starts, rows.ends)


def join(requests: Sequence[Rows]) -> Rows:
    """Return the rows of several requests, in order."""
    if len(requests) == 1:
        return requests[0]
    batches = [rows for rows in requests if isinstance(rows, Batch)]
    if len(batches) == len(requests):
        return concatenate(batches)
    firsts = np.cumsum([0] + [len(rows.keys) for rows in requests])
    starts, ends = (
        np.concatenate([part + first for part, first in zip(parts, firsts[:-1], strict=True)])
        for parts in zip(*map(cells, requests), strict=True)
    )
    values = None
    if any(rows.values is not None for rows in requests):
        values = np.concatenate(
            [np.ones(len(rows.keys), np.float32) if rows.values is None else rows.values for rows in requests]
        )
    dense, keys = (np.concatenate([getattr(rows, name) for rows in requests]) for name in ("dense", "keys"))
    return SharedBatch(dense, keys, requests[0].slots, starts, ends, values)


def most_keys(rows: Rows, slot: int) -> int:
    """Return the largest number of keys that a row has in a slot."""
    starts, ends = cells(rows)
    return int((ends[slot :: rows.slots] - starts[slot :: rows.slots]).max(initial=0))


def share(fields: Fields, user: Batch, candidates: Batch, names: set[str]) -> Rows:
    """Return the candidates' rows, with the user's dense values and keys in the columns named for the user."""
    schema = fields.schema
    n, slots = len(candidates), len(schema.key_columns)
    dense = candidates.dense.copy()
    columns = [place for name, places in fields.dense.items() if name in names for place in places]
    dense[:, columns] = user.dense[0, columns]
    derived = {schema.dense[place].name for place in columns}
    from_user = np.array(
        [
            slot.bucket.column in derived if slot.bucket else (slot.source or slot.name) in names
            for slot in schema.key_columns
        ],
        bool,
    )
    if user.one_each and candidates.one_each:
        keys = np.where(from_user, user.keys.reshape(1, slots), candidates.keys.reshape(n, slots))
        return Batch(dense, keys.reshape(-1), slots)
    starts, ends = (
        np.where(from_user, of_user, of_candidates.reshape(n, slots) + len(user.keys)).reshape(-1)
        for of_user, of_candidates in zip(cells(user), cells(candidates), strict=True)
    )
    values = None
    if user.values is not None and candidates.values is not None:
        values = np.concatenate([user.values, candidates.values])
    return SharedBatch(dense, np.concatenate([user.keys, candidates.keys]), slots, starts, ends, values)


def overlay(fields: Fields, user: Batch, candidates: Batch, names: set[str]) -> Batch:
    """As `share`, but every row has keys of its own."""
    rows = share(fields, user, candidates, names)
    return rows if isinstance(rows, Batch) else rows.apart()
