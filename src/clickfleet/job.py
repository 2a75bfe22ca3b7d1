"""What a training mode works with: batches, the table, trainer threads, and someone to report to.

A mode trains until something is due (an evaluation, a checkpoint, the end of an epoch), lets the job attend to it and
goes on. The job knows neither files nor progress bars: whoever made it gave it a stream and an `attend`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

from clickfleet.batch import Batch
from clickfleet.learner import Learner
from clickfleet.metrics import Metrics
from clickfleet.schema import Schema
from clickfleet.step import Result, Step

PHASES = ("read", "pull", "compute", "push", "wait")


class Source(Protocol):
    """A Reader or a Feed."""

    schema: Schema
    epoch: int
    counters: Any

    def __iter__(self) -> Iterator[Batch]: ...
    def state(self) -> dict[str, Any]: ...
    def restore(self, state: dict[str, Any], /) -> None: ...


class Clock:
    """Where the time of one trainer thread goes."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.cpu_seconds = dict.fromkeys(PHASES, 0.0)
        """Of this thread alone."""
        self.last = time.perf_counter()
        self._cpu = time.thread_time()

    def start(self) -> None:
        self.last, self._cpu = time.perf_counter(), time.thread_time()

    def lap(self, phase: str) -> None:
        """All since the last lap was spent on `phase`."""
        now, cpu = time.perf_counter(), time.thread_time()
        self.seconds[phase] += now - self.last
        self.cpu_seconds[phase] += cpu - self._cpu
        self.last, self._cpu = now, cpu


class Trainer:
    """One trainer thread's own things."""

    def __init__(self, step: Step) -> None:
        self.step, self.clock = step, Clock()


class Job:
    """One run of training, from its first step to its last; safe to use from its trainer threads."""

    def __init__(
        self,
        learner: Learner,
        source: Source,
        metrics: Metrics,
        attend: Callable[[Job], bool],
        report: Callable[[Job], None],
        *,
        trainers: int = 1,
        threads: int = 1,
    ) -> None:
        self.learner, self.source, self.metrics = learner, source, metrics
        self.table, self.optimizer = learner.table, learner.optimizer
        self.trainers = [Trainer(step) for step in learner.steps(trainers)]
        self.threads_inside = max(1, threads // trainers)
        self.steps = 0
        """Batches handed out since the run began."""
        self.rows = 0
        self.loss = self.weight = 0.0
        """Sums since this job began."""
        self.stop_at: int | None = None
        """The step before which trainers stop, to attend to something."""
        self.stop_when: Callable[[], bool] = lambda: False
        self.epoch_ended = False
        self._attend, self._report = attend, report
        self._stream: Iterator[Batch] | None = None
        self._ahead: tuple[Batch, dict[str, Any]] | None = None  # a batch read to see whether there is one
        self._reading, self._reporting = threading.Lock(), threading.Lock()
        self._failure: BaseException | None = None

    def goes_on(self) -> bool:
        """Attends to what is due while no trainer works; False when training is over."""
        return self._attend(self)

    def together(self, work: Callable[[Trainer], None]) -> None:
        """Runs `work` in every trainer thread at once; the first error ends them all."""

        def run(trainer: Trainer) -> None:
            torch.set_num_threads(self.threads_inside)  # of this thread
            trainer.clock.start()
            try:
                work(trainer)
            except BaseException as error:
                self._failure = self._failure or error

        if len(self.trainers) == 1:
            before = torch.get_num_threads()
            run(self.trainers[0])
            torch.set_num_threads(before)
        else:
            workers = [
                threading.Thread(target=run, args=(trainer,), name=f"clickfleet-trainer-{i}", daemon=True)
                for i, trainer in enumerate(self.trainers)
            ]
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
        if self._failure is not None:
            self.close()
            raise self._failure

    def batches(self, clock: Clock) -> Iterator[Batch]:
        """The next batches for this thread, until something is due."""
        while True:
            with self._reading:
                clock.lap("wait")
                if self._failure is not None or self.steps == self.stop_at or self.stop_when():
                    return
                batch = self._next()
                if batch is None:
                    return
                self.steps += 1
            clock.lap("read")
            yield batch

    def _next(self) -> Batch | None:
        if self._ahead is not None:
            (batch, _), self._ahead = self._ahead, None
            return batch
        if self._stream is None:
            self._stream = iter(self.source)
        following = next(self._stream, None)
        self.epoch_ended = following is None
        return following

    def look_ahead(self) -> None:
        """Finds out whether the epoch has ended, while no trainer works."""
        if self._ahead is None and not self.epoch_ended:
            position = self.source.state()
            batch = self._next()
            self._ahead = None if batch is None else (batch, position)

    def position(self) -> dict[str, Any]:
        """The source's state after the last batch that was trained on."""
        return self.source.state() if self._ahead is None else self._ahead[1]

    def begin_epoch(self) -> None:
        """The next batch is the first of another pass over the data."""
        self._stream, self.epoch_ended = None, False

    def report(self, batch: Batch, result: Result) -> None:
        """Counts a batch that was trained on."""
        with self._reporting:
            if result.labels is not None:
                self.metrics.update(result.scores, result.labels)
            else:
                assert batch.labels is not None
                self.metrics.update(result.scores, batch.labels, batch.weights, batch.groups)
            self.rows += len(batch)
            self.loss += result.loss
            self.weight += result.push.n
            self._report(self)

    def shares(self) -> dict[str, float]:
        """The share of the trainers' time in each phase."""
        sums = {phase: sum(trainer.clock.seconds[phase] for trainer in self.trainers) for phase in PHASES}
        total = sum(sums.values()) or 1.0
        return {phase: seconds / total for phase, seconds in sums.items()}

    def close(self) -> None:
        """Stops reading; the position stays where the last batch was handed out."""
        if self._stream is not None and hasattr(self._stream, "close"):
            self._stream.close()
        self._stream = None
