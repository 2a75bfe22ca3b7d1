"""The cuts of one shard on their way to its row files: written aside, and slowly while training goes on.

Who writes shares cores with who trains, so a cut that nobody waits for takes a small share of one: it lasts longer and costs little.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from clickfleet import checkpoint, mirror, paths, storage
from clickfleet.cluster.process import log
from clickfleet.cluster.shard import Cut
from clickfleet.errors import ClusterError
from clickfleet.table import Columns, Table

NICENESS = 10
"""Of the thread that writes: training comes first."""
AT_ONCE_S = 0.05
"""CPU that a cut may use before it slows down: a small one is over by then."""
AT_MOST_S = 300.0
"""A cut takes no longer, if it could be written in that time at all."""
LOOK_S = 0.1
"""How often a pause looks whether pushes wait for it."""


class CutFiles:
    """Cuts that were taken and are to be written, one at a time."""

    def __init__(self, shard: int, shards: int, row_files: int) -> None:
        self._name, self._row_files = f"shard {shard}", row_files
        first, last = checkpoint.span(shard, shards)
        self._files = range(first * row_files // 1024, last * row_files // 1024)
        self._cuts: dict[int, Cut] = {}
        self._dropped = self._hurried = 0
        self._change = threading.Condition()
        self.written: list[Path] = []

    def put(self, cut: Cut) -> None:
        """A cut was taken."""
        with self._change:
            if cut.number <= self._dropped:
                cut.rows.close()
            else:
                self._cuts[cut.number] = cut
            self._change.notify_all()

    def drop(self, number: int) -> None:
        """Nobody will save that cut any more, taken or not."""
        with self._change:
            self._dropped = number
            if number in self._cuts:
                self._cuts.pop(number).rows.close()
            self._change.notify_all()

    def clear(self) -> None:
        """None of the cuts taken so far is wanted."""
        with self._change:
            for cut in self._cuts.values():
                cut.rows.close()
            self._cuts = {}

    def hurry(self, number: int) -> None:
        """Somebody waits for that cut: it is written as fast as can be."""
        with self._change:
            self._hurried = max(self._hurried, number)
            self._change.notify_all()

    def save(self, number: int, folder: str, timeout_s: float, share: float, table: Table) -> dict[str, Any]:
        """Writes the rows of a cut into a directory in the making, once the cut is taken; facts of the files, and the dense part."""
        with self._change:
            there = self._change.wait_for(lambda: number in self._cuts or number <= self._dropped, timeout_s)
            if number not in self._cuts:
                problem = "was dropped" if there else f"was not complete within {timeout_s:.0f} s"
                raise ClusterError(f"{self._name}: cut {number} {problem}")
            cut = self._cuts.pop(number)
        found: list[Any] = []

        def write() -> None:
            if sys.platform == "linux":  # elsewhere threads have no niceness of their own
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
            try:
                found.append(self._write(cut, folder, share, table))
            except Exception as error:
                found.append(error)

        writer = threading.Thread(target=write, name="clickfleet-cut")  # of its own, as it stays behind everyone else
        writer.start()
        writer.join()
        if not found:
            raise ClusterError(f"{self._name}: cut {number} could not be written", "see the shard's log")
        if isinstance(found[0], Exception):
            raise found[0]
        return dict(found[0])

    def _write(self, cut: Cut, folder: str, share: float, table: Table) -> dict[str, Any]:
        begin = time.monotonic()
        written: dict[str, storage.HashedFile] = {}
        paths.make(Path(folder))  # on another host than the driver's

        def file(name: str) -> storage.HashedFile:
            written[name] = storage.HashedFile(Path(folder) / name)
            return written[name]

        try:
            with cut.rows:
                counts = checkpoint.write_rows(file, self._paced(cut, share, table), self._row_files, self._files)
                changed, deleted, tracking = cut.rows.changed, cut.rows.deleted, cut.rows.tracking
                memory = cut.rows.memory
        finally:
            for each in written.values():
                each.abandon()
        self.forget()
        self.written = [Path(folder) / name for name in written]
        used = f"{time.thread_time():.2f} s of CPU"
        log(f"cut {cut.number}: {sum(counts):,} rows written in {time.monotonic() - begin:.2f} s, {used}")
        return {
            "files": {name: each.facts() for name, each in written.items()},
            "counts": counts,
            "changed": changed,
            "deleted": deleted,
            "tracking": tracking,
            "memory": memory,
            "dense": cut.dense,
            "batches": cut.facts["batches"],
        }

    def _paced(self, cut: Cut, share: float, table: Table) -> Iterator[Columns]:
        """Its rows, with pauses, so that this thread uses that share of a core; none once somebody waits."""
        begin, rows, total = time.monotonic(), 0, max(1, len(table))
        waits = table.stats()["undo_waits"]

        def pressing() -> bool:
            wanted = cut.number <= max(self._hurried, self._dropped)
            return wanted or table.stats()["undo_waits"] != waits  # pushes wait for this thread

        for part in cut.rows:
            yield part
            rows += len(part["key"])
            used = time.thread_time()
            until = begin + min(used / share, AT_MOST_S * rows / total)
            while used > AT_ONCE_S and not pressing() and (left := until - time.monotonic()) > 0:
                with self._change:
                    self._change.wait(min(left, LOOK_S))

    def deliver(self, number: int, url: str) -> None:
        """Puts the row files of the last cut to a URL."""
        mirror.put(self.written, url)
        log(f"cut {number}: put to {url}")
        self.forget()

    def forget(self) -> None:
        """Row files that were put elsewhere, or whose cut came to nothing; in a folder that all see they have moved."""
        for file in self.written:
            file.unlink(missing_ok=True)
        self.written = []
