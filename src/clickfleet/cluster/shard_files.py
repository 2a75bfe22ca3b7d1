"""Write the checkpoints of one shard to row files, in the background.

The writer thread shares cores with training. Unless a caller waits, it limits itself to a small fraction of one core.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TypedDict

from torch import Tensor

from clickfleet.cluster.process import log
from clickfleet.cluster.shard import ShardCheckpoint
from clickfleet.data import files
from clickfleet.errors import ClusterError
from clickfleet.store import atomic, checkpoint, mirror
from clickfleet.store.table import Columns, Keys, Table

NICENESS = 10
"""Niceness of the writer thread: training comes first."""
AT_ONCE_S = 0.05
"""CPU seconds before the writer slows down. A small checkpoint is written by then."""
AT_MOST_S = 300.0
"""The writer paces itself to finish within this time."""
POLL_S = 0.1
"""How often a paused writer checks whether pushes wait for it."""


class WrittenCheckpoint(TypedDict):
    """The part of a shard in a checkpoint: the row files it wrote, and what the driver writes for it."""

    files: dict[str, atomic.FileFacts]
    counts: list[int]
    """The number of rows of each kind."""
    changed: Keys
    deleted: Keys
    tracking: bool
    memory: list[int] | None
    dense: dict[str, Tensor]
    batches: int


class ShardFiles:
    """Checkpoints that were taken and are not written yet. They are written one at a time."""

    def __init__(self, shard: int, shards: int, row_files: int) -> None:
        self._name, self._row_files = f"shard {shard}", row_files
        self._files = checkpoint.files_within(*checkpoint.span(shard, shards), row_files)
        self._taken: dict[int, ShardCheckpoint] = {}
        self._dropped = self._hurried = 0
        self._change = threading.Condition()
        self.written: list[Path] = []

    def put(self, taken: ShardCheckpoint) -> None:
        """Add a checkpoint that the shard has taken."""
        with self._change:
            if taken.number <= self._dropped:
                taken.rows.close()
            else:
                self._taken[taken.number] = taken
            self._change.notify_all()

    def drop(self, number: int) -> None:
        """Discard a checkpoint, whether it is taken already or not."""
        with self._change:
            self._dropped = number
            if number in self._taken:
                self._taken.pop(number).rows.close()
            self._change.notify_all()

    def clear(self) -> None:
        """Discard all checkpoints taken so far."""
        with self._change:
            for taken in self._taken.values():
                taken.rows.close()
            self._taken = {}

    def hurry(self, number: int) -> None:
        """Write a checkpoint at full speed, because a caller waits for it."""
        with self._change:
            self._hurried = max(self._hurried, number)
            self._change.notify_all()

    def save(self, number: int, folder: str, timeout_s: float, share: float, table: Table) -> WrittenCheckpoint:
        """Wait until the checkpoint is taken and write its rows into `folder`. Return facts of the files, and the dense part."""
        with self._change:
            notified = self._change.wait_for(lambda: number in self._taken or number <= self._dropped, timeout_s)
            if number not in self._taken:
                problem = "was dropped" if notified else f"was not complete within {timeout_s:.0f} s"
                raise ClusterError(f"{self._name}: checkpoint {number} {problem}")
            taken = self._taken.pop(number)
        results: list[WrittenCheckpoint | Exception] = []

        def write() -> None:
            if sys.platform == "linux":  # other systems have no niceness per thread
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
            try:
                results.append(self._write(taken, folder, share, table))
            except Exception as error:
                results.append(error)

        writer = threading.Thread(target=write, name="clickfleet-checkpoint")  # its niceness cannot be lowered again
        writer.start()
        writer.join()
        if not results:
            raise ClusterError(f"{self._name}: cannot write checkpoint {number}", "see the shard's log")
        if isinstance(results[0], Exception):
            raise results[0]
        return results[0]

    def _write(self, taken: ShardCheckpoint, folder: str, share: float, table: Table) -> WrittenCheckpoint:
        begin = time.monotonic()
        written: dict[str, atomic.HashedFile] = {}
        files.make(Path(folder))  # this host may not be the driver's

        def file(name: str) -> atomic.HashedFile:
            written[name] = atomic.HashedFile(Path(folder) / name)
            return written[name]

        try:
            with taken.rows:
                counts = checkpoint.write_rows(file, self._paced(taken, share, table), self._row_files, self._files)
                changed, deleted, tracking = taken.rows.changed, taken.rows.deleted, taken.rows.tracking
                memory = taken.rows.memory
        finally:
            for each in written.values():
                each.abandon()
        self.forget()
        self.written = [Path(folder) / name for name in written]
        used = f"{time.thread_time():.2f} s of CPU"
        log(f"checkpoint {taken.number}: {sum(counts):,} rows written in {time.monotonic() - begin:.2f} s, {used}")
        return {
            "files": {name: each.facts() for name, each in written.items()},
            "counts": counts,
            "changed": changed,
            "deleted": deleted,
            "tracking": tracking,
            "memory": memory,
            "dense": taken.dense,
            "batches": taken.facts["batches"],
        }

    def _paced(self, taken: ShardCheckpoint, share: float, table: Table) -> Iterator[Columns]:
        """Yield the rows with pauses, so that this thread uses `share` of a core. Stop pausing when a caller waits."""
        begin, rows, total = time.monotonic(), 0, max(1, len(table))
        waits = table.stats()["undo_waits"]

        def pressing() -> bool:
            wanted = taken.number <= max(self._hurried, self._dropped)
            return wanted or table.stats()["undo_waits"] != waits  # pushes wait for this thread

        for part in taken.rows:
            yield part if self._row_files <= checkpoint.SPLIT_FILES else {**part, "file": self._files[0]}
            rows += len(part["key"])
            used = time.thread_time()
            until = begin + min(used / share, AT_MOST_S * rows / total)
            while used > AT_ONCE_S and not pressing() and (left := until - time.monotonic()) > 0:
                with self._change:
                    self._change.wait(min(left, POLL_S))

    def deliver(self, number: int, url: str) -> None:
        """Upload the row files of the last checkpoint to a URL."""
        mirror.put(self.written, url)
        log(f"checkpoint {number}: uploaded to {url}")
        self.forget()

    def forget(self) -> None:
        """Delete row files that were uploaded, or whose checkpoint failed. In a shared folder they have moved already."""
        for file in self.written:
            file.unlink(missing_ok=True)
        self.written = []
