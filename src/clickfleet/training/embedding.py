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
from clickfleet.data.schema import Schema
from clickfleet.training import devices
from clickfleet.training.network import Inputs


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
    """Convert rows to inputs and back in one thread. Call `unique`, `inputs` and `push`, in this order, for each batch."""

    def __init__(self, schema: Schema, factors: int, device: torch.device = devices.CPU) -> None:
        self.slots, self.factors, self.device = len(schema.slots), factors, device
        mean = np.array([slot.pooling == "mean" for slot in schema.slots], np.uint8)
        self._mean = mean if mean.any() else None
        self._take = ScratchArrays().take
        self._keys: Keys = np.empty(0, np.uint64)
        self._where: NDArray[np.uint32] = np.empty(0, np.uint32)

    def unique(self, batch: Batch) -> Keys:
        """Return each key of the batch once."""
        n = len(batch.keys)
        distinct, self._where = self._take("keys", np.uint64, n), self._take("where", np.uint32, n)
        self._keys = distinct[: _core.unique_into(batch.keys, distinct, self._where)]
        return self._keys

    def room(self) -> Floats:
        """Return an array to pull the rows of these keys into."""
        return self._take("rows", np.float32, len(self._keys), 1 + self.factors)

    def inputs(self, batch: Batch, rows: Floats, training: bool = True) -> Inputs:
        """Return the inputs of the model. `rows` are those of the keys that `unique` returned."""
        first = self._take("first", np.float32, len(batch), self.slots)
        factors = self._take("factors", np.float32, len(batch), self.slots, self.factors)
        _core.pool(batch.offsets, self._where, batch.values, self._mean, rows, first, factors)
        dense = np.ascontiguousarray(batch.dense)
        return Inputs(
            torch.from_numpy(dense).to(self.device),
            torch.from_numpy(first).to(self.device).requires_grad_(training),
            torch.from_numpy(factors).to(self.device).requires_grad_(training),
        )

    def push(self, batch: Batch, x: Inputs, n: float | None = None) -> Push:
        """Return the gradients and statistics of each key. Call it after the backward pass reached `x`."""
        size = len(self._keys)
        grads = self._zeros("grads", size, 1 + self.factors)
        d_first, d_factors = self._gradient("d_first", x.first), self._gradient("d_factors", x.factors)
        _core.unpool(batch.offsets, self._where, batch.values, self._mean, d_first, d_factors, grads)
        show, click = self._zeros("show", size), self._zeros("click", size)
        slots = self._take("slots", np.uint16, size)
        clicks = batch.labels if batch.clicks is None else batch.clicks
        _core.count(batch.offsets, self._where, self.slots, batch.shows, clicks, show, click, slots)
        weight = (float(len(batch)) if batch.weights is None else float(batch.weights.sum())) if n is None else n
        return Push(self._keys, grads, show, click, slots, weight)

    def _gradient(self, name: str, of: Tensor) -> Floats:
        if of.grad is None:  # the model does not use this input
            return self._zeros(name, *of.shape)
        return of.grad.contiguous().cpu().numpy()

    def _zeros(self, name: str, *shape: int) -> Floats:
        zeros: Floats = self._take(name, np.float32, *shape)
        zeros.fill(0)
        return zeros
