"""Roll the published log back to an earlier entry."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from clickfleet.errors import CheckpointError
from clickfleet.store.erasure import ForgottenKeys, without_names, without_requests
from clickfleet.store.published import Content, Entry, Log, since_base
from clickfleet.store.row_format import RowFormat
from clickfleet.store.table import Columns, Keys, mix64, sort_by_hash


def changed_keys(entry: Entry) -> Iterator[Keys]:
    """Yield every key that an entry sets or deletes."""
    for batch in entry.batches():
        yield np.ascontiguousarray(batch.column("key").to_numpy())
    yield np.ascontiguousarray(entry.deleted())


def rollback(log: Log, sequence: int) -> Entry:
    """Append an entry that gives consumers the model of an earlier entry again.

    If no base was published since, it is a delta of the keys that changed since; otherwise it is a base.
    """
    log.recover()
    lines = log.lines()
    numbers = [line.sequence for line in lines]
    if sequence not in numbers:
        known = f"entries {numbers[0]} to {numbers[-1]}" if numbers else "nothing"
        raise CheckpointError(f"{log.folder} has no entry {sequence}", f"it holds {known}")
    at = numbers.index(sequence)
    past, newer = since_base(lines[: at + 1]), lines[at + 1 :]
    try:
        chain = [log.entry(line) for line in past]
        if not chain:
            raise CheckpointError(f"its base is not in {log.path} any more")
    except CheckpointError as error:
        raise CheckpointError(f"cannot roll back to entry {sequence}: {error}", "its chain was removed") from error
    target, keys = chain[-1], None
    if not newer:
        return target
    if all(line.kind == "delta" for line in newer):
        keys = np.unique(np.concatenate([keys for line in newer for keys in changed_keys(log.entry(line))]))
    facts = target.manifest
    forgotten = ForgottenKeys(log.folder.parent)
    gone = forgotten.since(facts["step"])
    calibration = target.calibration()
    content = Content(
        schema=facts["schema"],
        model=facts["model"],
        factors=facts["factors"],
        step=facts["step"],
        graph=target.graph(),
        golden=lambda sample: without_requests(target.golden(), gone),  # its other requests are valid again
        outputs=tuple(facts["outputs"]),
        calibration=None if calibration is None else calibration.without(gone.mask),
        row_format=_common_format(chain),
        info={**without_names(target.info, facts["schema"], gone), "time": time.time(), "rollback_to": sequence},
    )
    return log.append(_RestoredRows(chain, keys, facts["factors"], forgotten), content)


def _common_format(chain: list[Entry]) -> RowFormat:
    """Return the format in which the rows of a chain can be written again exactly."""
    formats = {entry.row_format for entry in chain}
    return formats.pop() if len(formats) == 1 else "float32"


class _RestoredRows:
    """The rows of a base and its deltas: all of them, or those of the given keys. Given keys without a row are deleted.

    Keys that were forgotten since have no row.
    """

    def __init__(self, chain: list[Entry], keys: Keys | None, factors: int, forgotten: ForgottenKeys) -> None:
        self.base = keys is None
        self._forgotten = forgotten
        self._factors = factors
        self._rows: dict[int, list[Columns]] = {}
        """Width -> parts."""
        self._left = keys
        """Keys not found yet. None: all keys are wanted, and `_seen` holds those of later entries."""
        self._seen: Keys = np.empty(0, np.uint64)
        for entry in reversed(chain):
            self._read(entry)
        self.deleted: Keys = np.empty(0, np.uint64)
        if keys is not None:
            restored = [part["key"] for parts in self._rows.values() for part in parts]
            self.deleted = sort_by_hash(np.setdiff1d(keys, np.concatenate([self.deleted, *restored])))

    def _read(self, entry: Entry) -> None:
        """Add the rows that no later entry sets or deletes."""
        parts: list[Keys] = [entry.deleted()]
        gone = self._forgotten.since(entry.manifest["step"])
        for batch in entry.batches():
            keys = batch.column("key").to_numpy()
            if self._left is None:
                places = np.flatnonzero(~np.isin(keys, self._seen))
            else:
                places = _search(keys, self._left)
            parts.append(keys if self._left is None else keys[places])
            places = places[~gone.mask(keys[places])]
            if len(places):
                self._keep(batch.take(pa.array(places)))
        known = np.concatenate(parts)
        if self._left is None:
            self._seen = np.union1d(self._seen, known)
        else:
            self._left = np.setdiff1d(self._left, known)

    def _keep(self, batch: pa.RecordBatch) -> None:
        embedx = batch.column("embedx").flatten().to_numpy()
        columns = {name: batch.column(name).to_numpy() for name in ("key", "slot", "embed_w")}
        width = len(embedx) // batch.num_rows
        self._rows.setdefault(width, []).append({**columns, "embedx": embedx.reshape(batch.num_rows, width)})

    def __iter__(self) -> Iterator[Columns]:
        for width, parts in sorted(self._rows.items()):
            joined = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
            order = np.argsort(mix64(joined["key"]), kind="stable")
            columns = {name: np.ascontiguousarray(values[order]) for name, values in joined.items()}
            yield {**columns, "embedx": columns["embedx"].reshape(-1), "full": width > 0 or self._factors == 0}


def _search(rows: Keys, wanted: Keys) -> Any:
    """Return the positions of the wanted keys in rows that ascend by mix64, by binary search."""
    hashes = mix64(wanted)
    low, high = np.zeros(len(wanted), np.int64), np.full(len(wanted), len(rows), np.int64)
    while (open_ := low < high).any():
        middle = (low + high) // 2
        below = np.zeros(len(wanted), bool)
        below[open_] = mix64(rows[middle[open_]]) < hashes[open_]
        low, high = np.where(open_ & below, middle + 1, low), np.where(open_ & ~below, middle, high)
    inside = low < len(rows)
    found = np.zeros(len(wanted), bool)
    found[inside] = rows[low[inside]] == wanted[inside]
    return np.sort(low[found])
