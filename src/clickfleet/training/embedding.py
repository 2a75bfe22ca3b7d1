"""Pool rows into the inputs of a model, slot by slot, and turn gradients of the inputs into gradients of the rows.

>>> from clickfleet.data.schema import Schema, Slot
>>> from clickfleet.store.table import Table
>>> table, embedding = Table(factors=2, init="uniform(1, 1)"), Embedding(Schema(slots=(Slot("a"), Slot("b"))), factors=2)
>>> batch = Batch(np.zeros((1, 0), np.float32), np.array([5, 5], np.uint64), 2, labels=np.ones(1, np.float32))
>>> x = embedding.inputs(batch, table.pull(embedding.unique(batch)))
>>> (x.factors * 3).sum().backward()
>>> embedding.push(batch, x).grads.tolist()  # the key occurs in both slots
[[0.0, 6.0, 6.0]]
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from clickfleet import _core
from clickfleet.data.batch import Batch, Floats, Keys
from clickfleet.data.corrections import Corrections
from clickfleet.data.histories import history_columns
from clickfleet.data.schema import History, Schema
from clickfleet.training import devices
from clickfleet.training.network import Events, Inputs


class Push(NamedTuple):
    """The arguments of `Table.push`. The arrays are valid until the next batch."""

    keys: Keys  # [U]
    grads: Floats  # [U, 1 + D], of the sum of losses
    show: Floats  # [U]
    click: Floats
    slots: NDArray[np.uint16]
    n: float
    distinct: bool = True


class ScratchArrays:
    """Arrays that batches reuse. An array is allocated again only when a batch needs a larger one."""

    def __init__(self) -> None:
        self._flat: dict[str, NDArray[Any]] = {}

    def take(self, name: str, kind: type[np.generic], *shape: int) -> NDArray[Any]:
        """Return an uninitialised array."""
        size = int(np.prod(shape))
        flat = self._flat.get(name)
        if flat is None or len(flat) < size:
            flat = self._flat[name] = np.empty(size + size // 8, kind)
        return flat[:size].reshape(shape)


class Embedding:
    """Convert rows to inputs and back in one thread. Call `unique`, `inputs` and `push`, in this order, for each batch.

    `histories`: the model reads them. Otherwise their columns are pooled like slots.
    """

    def __init__(
        self, schema: Schema, factors: int, device: torch.device = devices.CPU, histories: bool = False
    ) -> None:
        self.columns, self.factors, self.device = len(schema.key_columns), factors, device
        self.slots = len(schema.slots) if histories else self.columns
        self._histories = list(history_columns(schema)) if histories else []
        self._origins: list[NDArray[np.int64]] = []  # of each history: a row of the batch that has it
        pooled = schema.key_columns[: self.slots]
        mean = np.array([slot.pooling == "mean" for slot in pooled], np.uint8)
        self._mean = mean if mean.any() else None
        own = list(schema.slot_numbers) == list(range(self.columns))
        self._numbers = None if own else np.array(schema.slot_numbers, np.uint16)
        self._take = ScratchArrays().take
        self._keys: Keys = np.empty(0, np.uint64)
        self._where: NDArray[np.uint32] = np.empty(0, np.uint32)

    def unique(self, batch: Batch) -> Keys:
        """Return each key of the batch once."""
        n = len(batch.keys)
        distinct, self._where = self._take("keys", np.uint64, n), self._take("where", np.uint32, n)
        self._keys = distinct[: _core.unique_into(batch.keys, distinct, self._where)]
        return self._keys

    def slots_of(self, batch: Batch) -> NDArray[np.uint16]:
        """Return the slot of each key that `unique` returned, as in the push of this batch."""
        columns = np.repeat(np.arange(len(batch.offsets) - 1) % self.columns, np.diff(batch.offsets)).astype(np.uint16)
        slots = np.empty(len(self._keys), np.uint16)
        slots[self._where] = columns if self._numbers is None else self._numbers[columns]
        return slots

    def room(self) -> Floats:
        """Return an array to pull the rows of these keys into."""
        return self._take("rows", np.float32, len(self._keys), 1 + self.factors)

    def inputs(self, batch: Batch, rows: Floats, training: bool = True) -> Inputs:
        """Return the inputs of the model. `rows` are those of the keys that `unique` returned."""
        first = self._take("first", np.float32, len(batch), self.slots)
        factors = self._take("factors", np.float32, len(batch), self.slots, self.factors)
        _core.pool(batch.offsets, self._where, batch.values, self._mean, self.columns, rows, first, factors)
        dense = np.ascontiguousarray(batch.dense)
        histories = {}
        self._origins.clear()
        for history, start in self._histories:
            histories[history.name] = self._events(batch, rows, history, start, training)
        return Inputs(
            torch.from_numpy(dense).to(self.device),
            torch.from_numpy(first).to(self.device).requires_grad_(training),
            torch.from_numpy(factors).to(self.device).requires_grad_(training),
            histories,
        )

    def _events(self, batch: Batch, rows: Floats, history: History, start: int, training: bool) -> Events:
        """Return the events of a history, whose columns begin at `start`."""
        name, size, columns = history.name, len(batch), len(history.slots)
        row, origin, length = (self._take(f"{name}.{part}", np.int64, size) for part in ("row", "origin", "length"))
        distinct, longest = _core.find_events(
            batch.offsets, self._where, batch.values, self.columns, start, columns, row, origin, length
        )
        # No axis may be empty: some operators are not defined there.
        out = self._take(f"{name}.factors", np.float32, distinct, max(longest, 1), columns, self.factors)
        self._origins.append(origin[:distinct])
        _core.gather(batch.offsets, self._where, batch.values, self.columns, start, origin[:distinct], rows, out)
        return Events(
            torch.from_numpy(out).to(self.device).requires_grad_(training),
            torch.from_numpy(length[:distinct]).to(self.device),
            None if distinct == size else torch.from_numpy(row).to(self.device),
        )

    def push(
        self, batch: Batch, x: Inputs, n: float | None = None, by_show: tuple[bool, bool] = (False, False)
    ) -> Push:
        """Return the gradients and statistics of each key. Call it after the backward pass reached `x`.

        `by_show`: whether the rules divide the gradients of first-order weights, and of factors, by shows.
        """
        size = len(self._keys)
        grads = self._zeros("grads", size, 1 + self.factors)
        d_first, d_factors = self._gradient("d_first", x.first), self._gradient("d_factors", x.factors)
        _core.unpool(batch.offsets, self._where, batch.values, self._mean, self.columns, d_first, d_factors, grads)
        for (history, start), origin in zip(self._histories, self._origins, strict=True):
            if (d_events := x.histories[history.name].factors.grad) is not None:
                d_events_ = d_events.contiguous().cpu().numpy()
                _core.scatter(batch.offsets, self._where, batch.values, self.columns, start, origin, d_events_, grads)
        show, click = self._zeros("show", size), self._zeros("click", size)
        slots = self._take("slots", np.uint16, size)
        shows, clicks = batch.statistics()
        _core.count(batch.offsets, self._where, self.columns, shows, clicks, self._numbers, show, click, slots)
        if (late := batch.corrections) is not None:
            self._spread(batch, late, show, grads, by_show)
        weight = (float(len(batch)) if batch.weights is None else float(batch.weights.sum())) if n is None else n
        return Push(self._keys, grads, show, click, slots, weight)

    def _spread(self, batch: Batch, late: Corrections, show: Floats, grads: Floats, by_show: tuple[bool, bool]) -> None:
        """Let a rule that divides by shows divide by corrections too, although they are not shows."""
        size = len(self._keys)
        count, unused = self._zeros("corrections", size), self._zeros("unused", size)
        slots = self._take("unused slots", np.uint16, size)
        rows = late.rows.astype(np.float32)
        _core.count(batch.offsets, self._where, self.columns, rows, None, self._numbers, count, unused, slots)
        factor = np.where(count > 0, np.where(show > 0, show, 1) / np.maximum(show + count, 1e-30), 1).astype(
            np.float32
        )
        for part, divided in zip((slice(0, 1), slice(1, None)), by_show, strict=True):
            if divided:
                grads[:, part] *= factor[:, None]

    def _gradient(self, name: str, of: Tensor) -> Floats:
        if of.grad is None:  # the model does not use this input
            return self._zeros(name, *of.shape)
        return of.grad.contiguous().cpu().numpy()

    def _zeros(self, name: str, *shape: int) -> Floats:
        zeros: Floats = self._take(name, np.float32, *shape)
        zeros.fill(0)
        return zeros
