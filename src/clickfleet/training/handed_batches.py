"""Batches that a program hands to a job, one at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

from clickfleet.data.bad_lines import Counters
from clickfleet.data.batch import Batch, SourceState
from clickfleet.data.schema import Schema
from clickfleet.data.split import RowSplit
from clickfleet.errors import ClusterError

POLL_S = 0.2


class HandedBatches:
    """The source of a job: it has at most one batch, and ends when the program closes it.

    The job trains in stretches of one batch: `idle` ends a stretch. The program may be another thread than the trainer.
    """

    def __init__(self, schema: Schema, epoch: int) -> None:
        self.schema, self.epoch = schema, epoch
        self.counters = Counters()
        self.split: RowSplit | None = None
        self.validation = False
        self._change = threading.Condition()
        self._batch: Batch | None = None
        self._closed = False
        self._trained = 0
        """Batches trained."""
        self._problem: str | None = None
        """Why no more batches are trained."""

    @property
    def idle(self) -> bool:
        """Whether the next batch has not come yet."""
        return self._batch is None and not self._closed

    def put(self, batch: Batch) -> None:
        """Hand over the next batch."""
        with self._change:
            batch.epoch, batch.row = self.epoch, self.counters.rows
            self._batch = batch
            self._change.notify_all()

    def close(self) -> None:
        """End the epoch: no batch follows."""
        with self._change:
            self._closed = True
            self._change.notify_all()

    def __iter__(self) -> Iterator[Batch]:
        while self._batch is not None:
            batch, self._batch = self._batch, None
            self.counters.rows += len(batch)
            self.counters.lines += len(batch)
            yield batch
        self.epoch += 1

    def wait(self, over: Callable[[], bool]) -> None:
        """Wait for a batch or the end, or until `over`."""
        with self._change:
            while self.idle and not over():
                self._change.wait(POLL_S)

    def finish(self, problem: str | None = None) -> None:
        """Report that the batch was trained, or why no more batches are."""
        with self._change:
            self._trained += 1
            self._problem = problem
            self._change.notify_all()

    def put_and_wait(self, batch: Batch, over: Callable[[], bool]) -> None:
        """Hand over a batch and wait until another thread has trained it."""
        with self._change:
            number = self._trained + 1
            self.put(batch)
            while self._trained < number and self._problem is None and not over():
                self._change.wait(POLL_S)
            if self._problem is not None or self._trained < number:
                raise ClusterError(self._problem or "the batch was not trained: the run was abandoned")

    def state(self) -> SourceState:
        """Return a position. A program cannot hand over its batches again, so no run resumes from it."""
        return {"epoch": self.epoch, "skip": self.counters.rows}

    def restore(self, state: SourceState) -> None:
        raise ClusterError(
            "an epoch that a program fed batch by batch cannot be resumed in its middle",
            "resume from the checkpoint before it",
        )
