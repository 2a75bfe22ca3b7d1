"""Read rows from Redis: one MGET for the distinct keys, and a cache of the rows of this version."""

import threading
from typing import Any

import numpy as np

from clickfleet import _core
from clickfleet.errors import CheckpointError
from clickfleet.serve.batching import BusyError
from clickfleet.store import redis_rows
from clickfleet.store.published import Entry

CACHED_ROWS = 1 << 20


class RedisRows:
    """The rows of an entry in Redis, which must hold exactly that entry."""

    blocking = True

    def __init__(self, url: str, entry: Entry) -> None:
        self._client = redis_rows.connect(url)
        self.factors = int(entry.manifest["factors"])
        head = redis_rows.head(self._client)
        if head is None or head["hash"] != entry.hash:
            held = "nothing" if head is None else f"entry {head['sequence']}"
            raise CheckpointError(
                f"Redis holds {held}, not entry {entry.sequence}", f"fill it with clickfleet publish … --to {url}"
            )
        self._prefix = head["prefix"]
        self.row_formats = redis_rows.row_formats(head)
        self._lock = threading.Lock()
        self._cache: dict[int, Any] = {}

    def read(self, keys: Any, out: Any) -> None:
        distinct, where = np.unique(keys, return_inverse=True)
        out[:] = self._rows(distinct)[where]

    def known(self, keys: Any, out: Any) -> None:
        out[:] = redis_rows.read(self._client, self._prefix, keys, self.factors)[1]

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
    ) -> Any:
        distinct, where = np.empty(len(keys), np.uint64), np.empty(len(keys), np.uint32)
        rows = self._rows(distinct[: _core.unique_into(np.ascontiguousarray(keys), distinct, where)])
        return _core.assemble(where, rows, starts, ends, values, mean, histories, limit, first, factors)

    def _rows(self, keys: Any) -> Any:
        import redis

        out = np.empty((len(keys), 1 + self.factors), np.float32)
        missing = []
        with self._lock:
            for place, key in enumerate(keys.tolist()):
                row = self._cache.get(key)
                if row is None:
                    missing.append(place)
                else:
                    out[place] = row
        if missing:
            try:
                rows, _ = redis_rows.read(self._client, self._prefix, keys[missing], self.factors)
            except redis.RedisError:
                raise BusyError(1.0) from None
            out[missing] = rows
            with self._lock:
                if len(self._cache) + len(missing) > CACHED_ROWS:
                    self._cache.clear()
                self._cache.update(zip(keys[missing].tolist(), rows, strict=True))
        return out
