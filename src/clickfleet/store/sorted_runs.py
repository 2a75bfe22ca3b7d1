"""Records of fixed size on disk, found by a 64-bit key. They are added, found and forgotten, and take a bounded amount of memory.

New records are in memory, and in a log that makes them durable. When there are enough, they become a run: a file sorted by key, which is
searched where it is, through the page cache. A thread merges neighbouring runs of similar size, so that there are few. Records have a
place `at` that rises with time; those before a certain place can be forgotten.

`commit` makes everything durable and returns what `SortedRuns` needs to open the same state again. Files written after the last commit are
removed when it is opened.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

import numpy as np
from numpy.typing import NDArray

from clickfleet.data.batch import Keys
from clickfleet.data.files import flush, move
from clickfleet.errors import CheckpointError

MEMORY_RECORDS = 1 << 17
"""Records in memory after which they become a run."""
MERGED_RUNS = 4
"""Number of neighbouring runs of similar size that are merged."""
LARGEST_RUN = 1 << 23
"""Runs of so many records are not merged further."""
CHUNK = 1 << 18
"""Records merged at a time."""
Records = NDArray[Any]
"""Structured: every record has a field `at`."""


class _Piece(NamedTuple):
    """Records sorted by key; equal keys in the order in which they were added."""

    keys: Keys
    records: Records


class RunState(TypedDict):
    number: int
    records: int
    first: int
    last: int
    """The smallest and largest place in the run."""


class RunsState(TypedDict):
    """What a commit must remember."""

    log: int
    log_records: int
    next: int
    runs: list[RunState]


class _Run:
    """A file of keys and a file of records, mapped into memory."""

    def __init__(self, folder: Path, name: str, state: RunState, kind: np.dtype[Any]) -> None:
        self.state = state
        self.paths = _run_paths(folder, name, state["number"])
        for path, size in zip(self.paths, (8, kind.itemsize), strict=True):
            if not path.is_file() or path.stat().st_size != size * state["records"]:
                raise CheckpointError(f"{path} is missing or damaged", "the join starts anew with an empty store")
        keys: Keys = np.memmap(self.paths[0], np.uint64, "r")
        self.piece = _Piece(keys, np.memmap(self.paths[1], kind, "r"))

    def remove(self) -> None:
        for path in self.paths:
            path.unlink(missing_ok=True)


def _run_paths(folder: Path, name: str, number: int) -> tuple[Path, Path]:
    return folder / f"{name}-{number:08d}.keys", folder / f"{name}-{number:08d}.records"


class SortedRuns:
    """See the module. With `newest`, a record replaces earlier ones of the same key and place. Use it from one thread."""

    def __init__(
        self,
        folder: Path,
        name: str,
        kind: np.dtype[Any],
        state: RunsState | None = None,
        *,
        newest: bool = False,
        memory_records: int = MEMORY_RECORDS,
    ) -> None:
        self.folder, self.name, self.kind, self.newest = folder, name, kind, newest
        self.memory_records = memory_records
        self._entry = np.dtype([("key", np.uint64), ("record", kind)])
        self.first = 0
        """Records before this place are forgotten."""
        self._pieces: list[_Piece] = []
        self._unlogged: list[Records] = []
        self._log_records = self._in_memory = 0
        self._log, self._next = 0, 1
        self._runs: list[_Run] = []
        self._dropped: list[_Run] = []
        """Runs that the next commit no longer needs."""
        self._old_logs: list[int] = []
        self._merging: _Merge | None = None
        if state is not None:
            self._log, self._next, self._log_records = state["log"], state["next"], state["log_records"]
            self._runs = [_Run(folder, name, run, kind) for run in state["runs"]]
            self._load_log()
        self._remove_others()

    def __len__(self) -> int:
        return self._in_memory + sum(run.state["records"] for run in self._runs)

    @property
    def bytes(self) -> int:
        """Size of the files."""
        return sum(run.state["records"] for run in self._runs) * (8 + self.kind.itemsize) + (
            self._log_records * self._entry.itemsize
        )

    def add(self, keys: Keys, records: Records) -> None:
        """Add records. They are durable after the next commit."""
        if not len(keys):
            return
        entries = np.empty(len(keys), self._entry)
        entries["key"], entries["record"] = keys, records
        self._unlogged.append(entries)
        self._remember(_sorted(keys, records))

    def _remember(self, piece: _Piece) -> None:
        self._in_memory += len(piece.keys)
        self._pieces.append(piece)
        while len(self._pieces) > 1 and len(self._pieces[-2].keys) <= 2 * len(self._pieces[-1].keys):
            newer = self._pieces.pop()
            self._pieces[-1] = _merged([self._pieces[-1], newer])

    def find(self, keys: Keys, since: int = 0) -> tuple[NDArray[np.int64], Records]:
        """Return the records with these keys, the newest first: the index of the key of each, and the records.

        Runs whose records are all before the place `since` are not searched.
        """
        order = np.argsort(keys)
        wanted = keys[order]
        found: list[NDArray[np.int64]] = []
        records: list[Records] = []
        runs = (run.piece for run in reversed(self._runs) if run.state["last"] >= since)
        for piece in (*reversed(self._pieces), *runs):
            where, some = _search(piece, wanted)
            if len(where):
                found.append(order[where])
                records.append(some)
        if not found:
            return np.empty(0, np.int64), np.empty(0, self.kind)
        which, all_records = np.concatenate(found), np.concatenate(records)
        if self.first:
            kept = all_records["at"] >= self.first
            which, all_records = which[kept], all_records[kept]
        return which, all_records

    def since(self, place: int) -> Iterator[tuple[Keys, Records]]:
        """Yield the keys and records from a place on, the oldest ones first."""
        for piece in (*(run.piece for run in self._runs if run.state["last"] >= place), *self._pieces):
            kept = piece.records["at"] >= place
            if kept.any():
                yield np.asarray(piece.keys)[kept], np.asarray(piece.records)[kept]

    def forget(self, before: int) -> None:
        """Forget the records before a place. Their files go when all records in them are forgotten, or when they are merged."""
        self.first = max(self.first, before)
        gone = [run for run in self._runs if run.state["last"] < self.first]
        busy = set() if self._merging is None else set(map(id, self._merging.runs))
        if gone := [run for run in gone if id(run) not in busy]:
            self._runs = [run for run in self._runs if run not in gone]
            self._dropped += gone

    def commit(self) -> RunsState:
        """Make all records durable. Call `committed` when the returned state is durable too."""
        self._take_merged()
        if self._in_memory >= self.memory_records:
            self._write_run()
        elif self._unlogged:
            self._append_log()
        self._merge()
        return {
            "log": self._log,
            "log_records": self._log_records,
            "next": self._next,
            "runs": [run.state for run in self._runs],
        }

    def committed(self) -> None:
        """Remove the files that only earlier commits needed."""
        for run in self._dropped:
            run.remove()
        self._dropped = []
        for number in self._old_logs:
            self._log_path(number).unlink(missing_ok=True)
        self._old_logs = []

    def close(self) -> None:
        """Wait for the merging thread."""
        if self._merging is not None:
            self._merging.stop = True
            self._merging.thread.join()
            self._merging = None

    def _log_path(self, number: int) -> Path:
        return self.folder / f"{self.name}-{number:08d}.log"

    def _append_log(self) -> None:
        if not self._log:
            self._log, self._next, self._log_records = self._next, self._next + 1, 0
        entries = np.concatenate(self._unlogged)
        with open(self._log_path(self._log), "r+b" if self._log_records else "wb", buffering=0) as out:
            out.seek(self._log_records * self._entry.itemsize)
            _write_all(out, entries)
            out.truncate()
            os.fsync(out.fileno())
        self._log_records += len(entries)
        self._unlogged = []

    def _load_log(self) -> None:
        if not self._log or not self._log_records:
            return
        path, size = self._log_path(self._log), self._log_records * self._entry.itemsize
        content = path.read_bytes()[:size] if path.is_file() else b""
        if len(content) != size:
            raise CheckpointError(f"{path} is missing or damaged", "the join starts anew with an empty store")
        entries = np.frombuffer(content, self._entry)
        self._remember(_sorted(entries["key"].copy(), entries["record"].copy()))

    def _write_run(self) -> None:
        """Write the records in memory as a run, and begin a new log."""
        piece = _merged(self._pieces)
        number, self._next = self._next, self._next + 1
        state = _write_run(self.folder, self.name, number, [self._kept(piece)])
        if state is not None:
            self._runs.append(_Run(self.folder, self.name, state, self.kind))
        self._pieces, self._unlogged = [], []
        self._old_logs += [self._log] if self._log else []
        self._log = self._log_records = self._in_memory = 0

    def _kept(self, piece: _Piece) -> _Piece:
        return _newest(_after(piece, self.first)) if self.newest else _after(piece, self.first)

    def _merge(self) -> None:
        """Begin to merge the oldest neighbouring runs of similar size."""
        if self._merging is not None:
            return
        sizes = [run.state["records"] for run in self._runs]
        for start in range(len(sizes) - MERGED_RUNS + 1):
            some = sizes[start : start + MERGED_RUNS]
            if max(some) <= MERGED_RUNS * min(some) and sum(some) <= LARGEST_RUN:
                number, self._next = self._next, self._next + 1
                self._merging = _Merge(self, self._runs[start : start + MERGED_RUNS], number)
                return

    def _take_merged(self) -> None:
        merge = self._merging
        if merge is None or merge.thread.is_alive():
            return
        self._merging = None
        if merge.failed:  # a full disk: try again later
            return
        at = self._runs.index(merge.runs[0])
        merged = [] if merge.state is None else [_Run(self.folder, self.name, merge.state, self.kind)]
        self._runs[at : at + len(merge.runs)] = merged
        self._dropped += merge.runs

    def _remove_others(self) -> None:
        """Remove files that were written after the last commit."""
        kept = {path for run in self._runs for path in run.paths} | {self._log_path(self._log)}
        for path in self.folder.glob(f"*{self.name}-*"):
            if path not in kept and path.name.lstrip(".").startswith(f"{self.name}-"):
                path.unlink(missing_ok=True)


class _Merge:
    """Runs that are being merged by a thread."""

    def __init__(self, owner: SortedRuns, runs: Sequence[_Run], number: int) -> None:
        self.runs, self.number = list(runs), number
        self.state: RunState | None = None
        self.failed = self.stop = False
        self._owner, self._first = owner, owner.first
        self.thread = threading.Thread(target=self._work, name="clickfleet-merge", daemon=True)
        self.thread.start()

    def _work(self) -> None:
        try:
            self.state = _write_run(self._owner.folder, self._owner.name, self.number, self._chunks())
        except (OSError, InterruptedMergeError):
            self.failed = True

    def _chunks(self) -> Iterator[_Piece]:
        """Yield the records of all runs in the order of their keys, some at a time."""
        pieces = [run.piece for run in self.runs]
        places = [0] * len(pieces)
        while any(place < len(piece.keys) for place, piece in zip(places, pieces, strict=True)):
            if self.stop:
                raise InterruptedMergeError
            step = CHUNK // len(pieces)
            ends = [min(place + step, len(piece.keys)) for place, piece in zip(places, pieces, strict=True)]
            # Up to the smallest of the last keys, every run is complete.
            last = min(
                (piece.keys[end - 1] for piece, end in zip(pieces, ends, strict=True) if end < len(piece.keys)),
                default=None,
            )
            if last is not None:
                ends = [int(np.searchsorted(piece.keys, last, "right")) for piece in pieces]
            parts = [
                _Piece(np.asarray(piece.keys[start:end]), np.asarray(piece.records[start:end]))
                for piece, start, end in zip(pieces, places, ends, strict=True)
            ]
            places = ends
            piece = _after(_merged(parts), self._first)
            yield _newest(piece) if self._owner.newest else piece


class InterruptedMergeError(Exception):
    """The store is closed; the merge starts again another time."""


def _write_run(folder: Path, name: str, number: int, pieces: Iterable[_Piece]) -> RunState | None:
    """Write sorted records as a run. Return None if there are none."""
    paths = _run_paths(folder, name, number)
    hidden = [path.with_name(f".{path.name}") for path in paths]
    records, first, last = 0, 1 << 63, 0
    try:
        with hidden[0].open("wb") as keys_out, hidden[1].open("wb") as records_out:
            for piece in pieces:
                if not len(piece.keys):
                    continue
                _write_all(keys_out, piece.keys)
                _write_all(records_out, piece.records)
                places = piece.records["at"]
                records, first, last = (
                    records + len(places),
                    min(first, int(places.min())),
                    max(last, int(places.max())),
                )
        if not records:
            return None
        for path, final in zip(hidden, paths, strict=True):
            flush(path)
            move(path, final)
        flush(folder)
    finally:
        for path in hidden:
            with suppress(OSError):
                path.unlink(missing_ok=True)
    return {"number": number, "records": records, "first": first, "last": last}


def _write_all(out: Any, values: NDArray[Any]) -> None:
    rest = memoryview(np.ascontiguousarray(values).view(np.uint8).reshape(-1))  # type: ignore[arg-type]
    while rest:
        rest = rest[out.write(rest) :]


def _sorted(keys: Keys, records: Records) -> _Piece:
    order = np.argsort(keys, kind="stable")
    return _Piece(keys[order], records[order])


def _merged(pieces: Sequence[_Piece]) -> _Piece:
    """Return the records of several pieces, the oldest piece first."""
    if len(pieces) == 1:
        return pieces[0]
    return _sorted(np.concatenate([one.keys for one in pieces]), np.concatenate([one.records for one in pieces]))


def _after(piece: _Piece, first: int) -> _Piece:
    """Return the records from a place on."""
    if not first or not len(piece.keys) or (kept := piece.records["at"] >= first).all():
        return piece
    return _Piece(piece.keys[kept], piece.records[kept])


def _newest(piece: _Piece) -> _Piece:
    """Return the last record of every key and place."""
    keys, places = piece.keys, piece.records["at"]
    if len(keys) < 2 or not (keys[1:] == keys[:-1]).any():
        return piece
    order = np.lexsort((np.arange(len(keys)), places, keys))
    same = (keys[order][1:] == keys[order][:-1]) & (places[order][1:] == places[order][:-1])
    kept = np.sort(order[np.append(~same, True)])
    return _Piece(keys[kept], piece.records[kept])


def _search(piece: _Piece, wanted: Keys) -> tuple[NDArray[np.int64], Records]:
    """Return the index in `wanted` of every record whose key is wanted, and the records, the newest first for each key."""
    left = np.searchsorted(piece.keys, wanted, "left")
    hit = np.flatnonzero(left < len(piece.keys))
    hit = hit[piece.keys[left[hit]] == wanted[hit]]
    if not len(hit):
        return hit, piece.records[:0]
    right = np.searchsorted(piece.keys, wanted[hit], "right")
    counts = right - left[hit]
    where = np.repeat(right - 1, counts) - (np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts))
    return np.repeat(hit, counts), np.asarray(piece.records[where])
