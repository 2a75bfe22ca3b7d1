"""The training loop, and the job that a mode trains.

`Loop.run` is the loop of every kind of training: on one machine, over a stream, and on a cluster. It trains one stretch after
another. A stretch ends where an evaluation, a checkpoint or the end of an epoch is due, or after a signal.

A `Job` hands out batches, holds the table and the trainer threads, and counts what was trained.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from typing import Any, Generic, Literal, Protocol, TypedDict, TypeVar

import torch

from clickfleet.config.load import Config
from clickfleet.data.batch import Batch, Floats, SourceState
from clickfleet.data.dataset import Source
from clickfleet.errors import CheckpointError, DataError, TrainingError
from clickfleet.store.run_folder import State
from clickfleet.training.learner import Learner
from clickfleet.training.metrics import Metrics, distance, metric_name, of_other_labels, value_of
from clickfleet.training.monitor import PHASES, Monitor, Progress
from clickfleet.training.optimizer import clip
from clickfleet.training.predict import ANNOUNCED_BATCHES, Results
from clickfleet.training.saving import Saver
from clickfleet.training.sharding import Gradient, Link
from clickfleet.training.signals import interruptible
from clickfleet.training.step import Result, Step
from clickfleet.training.validation import keeps_best

S = TypeVar("S")
FEW_STEPS = 100
"""A run of fewer steps is warned about."""
SMALL_BATCH = 256
"""Up to this many rows, one thread computes a step. More would wait for each other longer than they compute."""


class Loop(ABC, Generic[S]):
    """The loop that all training shares."""

    def run(self) -> None:
        """Train all epochs that are left."""
        for epoch in self.epochs():  # after a resume: the rest of one, then the others; online: passes
            self.train_epoch(epoch)
        self.finish()

    def train_epoch(self, epoch: int) -> None:
        """Train what is left of an epoch."""
        for stretch in self.stretches(epoch):  # each until an evaluation, a checkpoint or the end is due
            self.train(stretch)
            self.evaluate_if_due()
            self.save_if_due()

    @abstractmethod
    def epochs(self) -> Iterator[int]:
        """Yield the number of each epoch, or pass, that is to be trained."""

    @abstractmethod
    def stretches(self, epoch: int) -> Iterator[S]:
        """Yield what to train next until the epoch ends or the run stops."""

    @abstractmethod
    def train(self, stretch: S) -> None:
        """Train one stretch."""

    @abstractmethod
    def evaluate_if_due(self) -> None:
        """Evaluate between two stretches, and conclude an epoch that has ended."""

    @abstractmethod
    def save_if_due(self) -> None:
        """Write a checkpoint between two stretches."""

    @abstractmethod
    def finish(self) -> None:
        """Write the last checkpoint."""


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
        """Count the time since the last lap as spent on `phase`."""
        now, cpu = time.perf_counter(), time.thread_time()
        self.seconds[phase] += now - self.last
        self.cpu_seconds[phase] += cpu - self._cpu
        self.last, self._cpu = now, cpu


class Trainer:
    """What one trainer thread has for itself."""

    def __init__(self, step: Step) -> None:
        self.step, self.clock = step, Clock()


class Job:
    """One run of training, from its first step to its last. Its trainer threads may use it concurrently."""

    def __init__(
        self,
        learner: Learner,
        source: Source,
        metrics: Metrics,
        report: Callable[[Job], None] = lambda job: None,
        *,
        trainers: int = 1,
        threads: int = 1,
    ) -> None:
        self.learner, self.source, self.metrics = learner, source, metrics
        self.table, self.optimizer = learner.table, learner.optimizer
        self.trainers = [Trainer(step) for step in learner.steps(trainers)]
        small = learner.config.data.batch_rows <= SMALL_BATCH
        self.threads_inside = 1 if small else max(1, threads // trainers)
        self.steps = 0
        """Batches handed out since the run began."""
        self.rows = 0
        self.loss = self.weight = 0.0
        """Sums since this job began."""
        self.stop_at: int | None = None
        """The step before which the stretch ends."""
        self.stop_when: Callable[[], bool] = lambda: False
        """Whether the stretch ends at once."""
        self.epoch_ended = False
        self._report = report
        self._stream: Iterator[Batch] | None = None
        self._ahead: deque[tuple[Batch, SourceState]] = deque()
        """Batches that were read but not handed out, each with the position before it."""
        self._exhausted = False
        """The source has no more batches in this epoch."""
        self._reading, self._reporting = threading.Lock(), threading.Lock()
        self._failure: BaseException | None = None

    @property
    def due(self) -> bool:
        """Whether the stretch ends, apart from `stop_at`."""
        return self.epoch_ended or self._interrupted

    @property
    def _interrupted(self) -> bool:
        """Whether the stretch ends before the next batch."""
        return self.stop_when()

    @property
    def epoch(self) -> int:
        return self.source.epoch - (self._exhausted and len(self._ahead) > 0)

    @property
    def bytes_read(self) -> int:
        return int(self.source.counters.bytes)

    @property
    def bad_lines(self) -> int:
        return int(self.source.counters.bad_lines)

    @property
    def auc(self) -> float:
        return self.metrics.buckets.auc

    @property
    def sliding_auc(self) -> float | None:
        """The AUC of the last batches, if it is measured."""
        return None if self.metrics.sliding is None else self.metrics.sliding.auc

    def table_stats(self) -> dict[str, int]:
        return self.table.stats()

    def together(self, work: Callable[[Trainer], None]) -> None:
        """Run `work` in all trainer threads. The first error ends them all."""

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
        """Yield the next batches for this thread until the stretch ends."""
        while True:
            with self._reading:
                clock.lap("wait")
                if self._failure is not None or self.steps == self.stop_at or self._interrupted:
                    return
                batch = self._next()
                if batch is None:
                    return
                self.steps += 1
            clock.lap("read")
            yield batch

    def _next(self) -> Batch | None:
        announced = 0 if self.table.disk is None else ANNOUNCED_BATCHES
        while len(self._ahead) < announced and not self.stop_when() and self._read_ahead():
            self.table.announce(self._ahead[-1][0].keys)
        if self._ahead:
            return self._ahead.popleft()[0]
        following = self._read()
        self.epoch_ended = following is None
        return following

    def _read(self) -> Batch | None:
        if self._exhausted:
            return None
        if self._stream is None:
            self._stream = iter(self.source)
        following = next(self._stream, None)
        self._exhausted = following is None
        return following

    def _read_ahead(self) -> bool:
        """Read a batch to be handed out later. Return whether there is one."""
        position = self.source.state()
        batch = self._read()
        if batch is not None:
            self._ahead.append((batch, position))
        return batch is not None

    def look_ahead(self) -> None:
        """Find out whether the epoch has ended. Call it while no trainer works."""
        if not self._ahead and not self.epoch_ended:
            self.epoch_ended = not self._read_ahead()

    def position(self) -> SourceState:
        """Return the state of the source after the last batch trained."""
        return self._ahead[0][1] if self._ahead else self.source.state()

    def begin_epoch(self) -> None:
        """Start over: the next batch is the first of the next epoch."""
        self._stream, self.epoch_ended, self._exhausted = None, False, False

    def report(self, batch: Batch, result: Result) -> None:
        """Count a batch that was trained."""
        with self._reporting:
            if result.labels is not None:
                self.metrics.update(result.scores, result.labels)
            else:
                assert batch.labels is not None
                self.metrics.update(result.scores, batch.labels, batch.weights, batch.groups, previous=batch.previous)
            self.rows += len(batch)
            self.loss += result.loss
            self.weight += result.push.n
            self._report(self)

    def shares(self) -> dict[str, float]:
        """Return the share of the trainers' time in each phase."""
        sums = {phase: sum(trainer.clock.seconds[phase] for trainer in self.trainers) for phase in PHASES}
        total = sum(sums.values()) or 1.0
        return {phase: seconds / total for phase, seconds in sums.items()}

    def close(self) -> None:
        """Stop reading. The position stays where the last batch was handed out."""
        if self._stream is not None and hasattr(self._stream, "close"):
            self._stream.close()
        self._stream, self._exhausted = None, False


@dataclass
class RunProgress:
    """How far a run has come, besides its steps. Part of every checkpoint."""

    epoch: int = 0
    best_value: float | None = None
    """The best train.monitor on validation data."""
    best_step: int | None = None
    waited: int = 0
    """Evaluations since the best."""
    evaluated_at: int = -1
    stopped_early: bool = False
    train: Results | None = None
    """Metrics of the last whole epoch."""
    valid: Results | None = None
    best_valid: Results | None = None
    """The validation metrics behind best_value."""
    test: Results | None = None

    @classmethod
    def resumed(cls, saved: Mapping[str, Any], config: Config) -> RunProgress:
        """Return the progress of a checkpoint. The patience may have changed since it was written."""
        known = {field.name for field in fields(cls)}  # older versions also kept the best test AUC
        progress, patience = cls(**{key: value for key, value in saved.items() if key in known}), config.train.patience
        progress.stopped_early = patience is not None and progress.waited >= patience
        return progress

    def end_epoch(self, run: Progress, metrics: Metrics, monitor: Monitor, trained_s: float) -> None:
        """Count an epoch that has ended, and record its metrics."""
        if run.rows == 0:
            raise DataError("there are no rows to train on", "check data.train: the files are empty")
        self.train = dict(metrics.results())
        monitor.end_epoch(run, {"epoch": self.epoch, "step": run.steps, **self.train}, trained_s)
        monitor.log(f"epoch {self.epoch} done: step {run.steps:,}, {run.rows:,} rows, {summary(self.train)}")
        self.epoch += 1

    def take_validation(self, results: Results, epoch: int, step: int, config: Config, monitor: Monitor) -> None:
        """Record the results of an evaluation on validation data. Stop the run early if the best one is too long ago."""
        self.valid, self.evaluated_at = results, step
        name, patience = config.train.monitor, config.train.patience
        value = value_of(results, name)
        if distance(name, value) < distance(name, self.best_value):
            self.best_value, self.best_step, self.waited, self.best_valid = value, step, 0, results
        else:
            self.waited += 1
        record(monitor, "valid", results, epoch, step, name)
        if patience is not None and self.waited >= patience:
            self.stopped_early = True
            best = "" if self.best_value is None else f" than {self.best_value:.4f} of step {self.best_step:,}"
            monitor.log(f"stopped: no better validation {metric_name(name)}{best} in {self.waited} evaluations")

    def warn_of_few_steps(self, steps: int, monitor: Monitor) -> None:
        """Warn of a run that has ended after too few steps to learn much."""
        if 0 < steps < FEW_STEPS:
            monitor.log(
                f"warning: only {steps} step{'s' * (steps > 1)}, too few to learn much; lower data.batch_size or raise "
                "train.epochs (`auto` chooses both by the rows)"
            )

    def take_test(self, results: Results, epoch: int, step: int, monitor: Monitor) -> None:
        """Record the results of an evaluation on test data. They influence nothing."""
        self.test, self.evaluated_at = results, step
        record(monitor, "test", results, epoch, step)


def record(
    monitor: Monitor, kind: Literal["valid", "test"], results: Results, epoch: int, step: int, metric: str = "auc"
) -> None:
    """Record and log the results of an evaluation. The log shows `metric` too."""
    shown = {key: value for key, value in results.items() if key != "slices"}
    monitor.record(kind, {"epoch": epoch, "step": step, "trained_rows": monitor.trained_rows, **shown})
    value = value_of(results, metric)
    more = f", {metric_name(metric)} {value:.4f}" if metric not in ("auc", "logloss") and value is not None else ""
    data = "validation" if kind == "valid" else kind
    monitor.log(f"{data} after step {step:,}: {results['rows']:,} rows, {summary(results)}{more}")


class Arrangement(TypedDict, total=False):
    """What decides the last bits of a result: threads, kind of CPU and version of torch; on a cluster, the mode."""

    deterministic: bool
    threads: int
    hogwild: int
    cpu: str
    mode: str


class SessionJob(Protocol):
    """What a session needs of the job it trains: a `Job` of this process, or the workers of a cluster."""

    learner: Learner
    steps: int
    stop_at: int | None
    stop_when: Callable[[], bool]

    @property
    def rows(self) -> int: ...
    @property
    def epoch_ended(self) -> bool: ...
    def look_ahead(self) -> None: ...
    def position(self) -> SourceState: ...


J = TypeVar("J", bound=SessionJob)


class Session(Loop[J]):
    """Trains a job by a mode, and saves it: what epochs over files and passes of a stream have in common."""

    def __init__(
        self,
        config: Config,
        job: J,
        mode: Callable[[J], None],
        monitor: Monitor,
        saver: Saver | None,
        arrangement: Arrangement,
    ) -> None:
        self.config, self.job, self.mode, self.monitor, self.saver = config, job, mode, monitor, saver
        self.arrangement = arrangement
        self.progress = RunProgress()
        self.signal: int | None = None
        """The signal that interrupted the run."""
        self.trained_s = self.last_save_s = 0.0
        """Seconds of training, without evaluations and the last checkpoint; seconds of the last checkpoint."""
        self._begun = False
        self._saved_at = self._saved_step = 0.0

    @property
    def saves(self) -> bool:
        """Whether the run writes checkpoints."""
        return self.saver is not None

    def _start(self) -> None:
        self._saved_at, self._saved_step, self._begun = time.monotonic(), self.job.steps, False
        self.job.stop_when = lambda: self.signal is not None or self.progress.stopped_early or self._time_is_due()

    def stop(self) -> None:
        """End the run after this step, as early stopping does."""
        self.progress.stopped_early = True

    def _time_is_due(self) -> bool:
        every = self.config.run.checkpoint_every
        return self.saves and every is not None and time.monotonic() - self._saved_at >= every

    def _checkpoint_due(self) -> bool:
        if not self.saves or self._saved_step == self.job.steps:
            return False
        return self._time_is_due() or is_due(self.config.run.checkpoint_every_steps, self.job.steps)

    def _save(self, epoch: int | None = None, last: bool = False) -> None:
        if not self.saves:
            return
        begin = time.monotonic()
        if not torch.isfinite(self.job.learner.flat.values).all():
            raise TrainingError(
                f"step {self.job.steps}: a dense weight is not finite; no checkpoint of it was written",
                "lower dense.lr or set dense.clip_norm, and resume from the last checkpoint with --resume",
            )
        try:
            state = self.state()
        except CheckpointError as error:
            # The disk is full. Metrics that are not on disk cannot be part of a checkpoint.
            if last:
                raise
            self.monitor.log(f"no checkpoint: {error}")
            self._saved_at = time.monotonic()
            return
        self._write(state, epoch)
        if last:
            self._wait(last=True)
        took = time.monotonic() - begin
        self._saved_at, self._saved_step = time.monotonic(), self.job.steps
        if last:
            self.last_save_s = took
        else:
            self.trained_s += took

    @abstractmethod
    def _write(self, state: State, epoch: int | None) -> None:
        """Start to write a checkpoint; `epoch` is the one that ends with it."""

    def _wait(self, last: bool = False) -> None:
        """Wait until the checkpoint is written. Unless it is the last one, a failure is only logged."""
        if self.saver is not None:
            self.saver.wait(last)

    def state(self) -> State:
        """Return the state of the run for a checkpoint."""
        self.monitor.mark(self.job.steps)
        return {
            "version": 1,
            "step": self.job.steps,
            "rows": self.job.rows,
            "reader": self.job.position(),
            "progress": vars(self.progress),
            "arrangement": self.arrangement,
        }

    def interruptible(self) -> AbstractContextManager[None]:
        """Save and stop after the step at the first SIGTERM, SIGINT or SIGHUP. The second one has its usual effect."""

        def stop(number: int) -> None:
            self.signal = number

        return interruptible(stop)


def is_due(every: int | None, steps: int) -> bool:
    """Return whether something that happens every `every` steps is due after this many steps."""
    return every is not None and steps > 0 and steps % every == 0


class TrainingSession(Session[Job]):
    """Epochs over the training data.

    `validate` and `test` return the metrics on validation and test data; they are None without such data. With validation data,
    the test data is evaluated once, at the end. Otherwise it is evaluated after each epoch.
    """

    def __init__(
        self,
        config: Config,
        job: Job,
        mode: Callable[[Job], None],
        monitor: Monitor,
        saver: Saver | None,
        arrangement: Arrangement,
        validate: Callable[[], Results] | None,
        test: Callable[[], Results] | None,
    ) -> None:
        super().__init__(config, job, mode, monitor, saver, arrangement)
        self.validate, self.test = validate, test
        self._keeps_best = keeps_best(config)
        self._ended: int | None = None
        """The epoch that has just ended."""

    def epochs(self) -> Iterator[int]:
        self._start()
        self.monitor.start(self.job)
        while not self._over():
            yield self.progress.epoch
            if self.signal is not None:
                return

    def stretches(self, epoch: int) -> Iterator[Job]:
        job, config = self.job, self.config
        self._begun = True
        while True:
            periods = [config.train.eval_every if self.validate else None]
            periods.append(config.run.checkpoint_every_steps if self.saves else None)
            job.stop_at = min(((job.steps // every + 1) * every for every in periods if every), default=None)
            yield job
            if self.progress.epoch > epoch or self.stops:
                return

    @property
    def stops(self) -> bool:
        """Whether no more is to be trained."""
        return self.signal is not None or self._over()

    def _over(self) -> bool:
        return self.progress.epoch >= self.config.train.epochs or self.progress.stopped_early

    def train(self, stretch: Job) -> None:
        begin = time.monotonic()
        self.mode(stretch)
        self.trained_s += time.monotonic() - begin
        stretch.look_ahead()
        if self.signal is not None and not stretch.epoch_ended:
            self.monitor.point(stretch)

    def evaluate_if_due(self) -> None:
        steps = self.job.steps
        self._ended = None
        if self.job.epoch_ended:
            self._end_epoch()
        elif self.progress.evaluated_at == steps:
            return
        elif is_due(self.config.train.eval_every, steps) or self.progress.stopped_early:
            self._evaluate(self.progress.epoch)

    def _end_epoch(self) -> None:
        job = self.job
        self._ended = epoch = self.progress.epoch
        self.progress.end_epoch(job, job.metrics, self.monitor, self.trained_s)
        if self.progress.evaluated_at != job.steps:
            self._evaluate(epoch)
        if not self.config.train.metrics.continuous:
            job.metrics.reset()
        job.begin_epoch()

    def _evaluate(self, epoch: int) -> None:
        if self.validate is not None:
            self.progress.take_validation(self.validate(), epoch, self.job.steps, self.config, self.monitor)
        elif self.test is not None:
            self.progress.take_test(self.test(), epoch, self.job.steps, self.monitor)

    def save_if_due(self) -> None:
        if self._ended is not None and self.config.run.keep_epochs and not self._over():
            self._save(epoch=self._ended)
        is_new_best = self._is_best() and self._saved_step != self.job.steps
        if not self.stops and (self._checkpoint_due() or is_new_best):
            self._save()

    def finish(self) -> None:
        if self._begun:
            if self.signal is None:
                self.progress.warn_of_few_steps(self.job.steps, self.monitor)
            if self.validate is not None and self.test is not None and self.signal is None and self.is_chosen:
                self.progress.take_test(self.test(), self.progress.epoch - 1, self.job.steps, self.monitor)
            self._save(epoch=self._ended if self.signal is None else None, last=True)

    @property
    def is_chosen(self) -> bool:
        """Whether the model of this moment is the one that the run folder names at the end of the run."""
        return self.saver is None or not self._keeps_best or self.progress.best_step in (None, self.job.steps)

    def state(self) -> State:
        split = self.job.source.split
        return {**super().state(), **({} if split is None else {"split": split.to_dict()})}

    def _is_best(self) -> bool:
        return self._keeps_best and self.progress.best_step == self.job.steps

    def _write(self, state: State, epoch: int | None) -> None:
        assert self.saver is not None
        self.saver.save(self.job.learner, self.job.metrics, state, epoch, best=self._is_best())

    def restore(self, state: State) -> None:
        """Resume from the state of a checkpoint."""
        job = self.job
        job.steps, job.rows = state["step"], state["rows"]
        job.source.restore(state["reader"])
        self.progress = RunProgress.resumed(state["progress"], self.config)
        if self.saver is not None and self._is_best():  # a kill may have come before it was labelled
            self.saver.label_best()
        self.monitor.forget_after(state["step"], state.get("metrics_bytes"))


def summary(results: Results) -> str:
    """Return the most important metrics in a few words, for a log line."""
    loss = "" if results["logloss"] is None else f", log loss {results['logloss']:.4f}"
    sliding = f", last batches {results['sliding_auc']:.4f}" if "sliding_auc" in results else ""
    others = (
        f", {metric_name(name)} {value:.4f}" for name, value in of_other_labels(results).items() if value is not None
    )
    return f"AUC {results['auc']:.4f}{loss}{''.join(others)}{sliding}"


SMALLEST_PART = 100
"""Rows. Smaller parts of a batch cost time and teach little."""


def cut(batch: Batch, parts: int) -> list[Batch]:
    """Cut a batch into about equal parts, none much smaller than SMALLEST_PART. Only the first counts as a batch."""
    parts = min(parts, len(batch) // SMALLEST_PART)
    if parts < 2:
        return [batch]
    size = -(-len(batch) // parts)
    cuts = [batch[first : first + size] for first in range(0, len(batch), size)]
    for i, part in enumerate(cuts):
        part.epoch, part.row = batch.epoch, batch.row + i * size
        part.parts, part.counted = len(cuts), i == 0
    return cuts


RAMP = 8
"""Batches of a worker after which the interval between two exchanges grows by a step."""


def ramped(every: int, age: int) -> int:
    """Return after how many steps a worker exchanges weights. `age` is how many batches it has taken: at first after each step.

    >>> [ramped(8, age) for age in (0, 7, 8, 40, 1000)]
    [1, 1, 2, 6, 8]
    """
    return min(every, 1 + age // RAMP)


class WorkerJob(Job):
    """The part of a run that one worker trains: streams of batches, and links to the shards, one per trainer."""

    def __init__(
        self,
        learner: Learner,
        source: Source,
        metrics: Metrics,
        report: Callable[[Job], None] = lambda job: None,
        *,
        links: list[Link],
        worker: int = 0,
        workers: int = 1,
        trainers: int = 1,
        wanted: Callable[[], int] = lambda: 0,
        took: Callable[[int, SourceState], None] = lambda checkpoint, position: None,
    ) -> None:
        super().__init__(learner, source, metrics, report, trainers=trainers, threads=trainers)
        self.links, self.worker, self.workers = links, worker, workers
        self.trained = 0
        """Batches trained. `steps` counts those handed out, and counts parts of batches as such."""
        self.trained_before = 0
        """Batches that all workers had trained when this worker began."""
        self.warm_up = 0
        """Batches of each worker that are cut into one part for each worker, from the beginning of the run."""
        self.cuts = True
        """Whether batches may be cut. A program that hands them over decides their size itself."""
        self._parts: deque[Batch] = deque()
        """Parts of the last batch that are not handed out yet."""
        self.taken = 0
        """Batches taken from the source. `trained` follows."""
        self.wanted = wanted
        """Returns the number of the checkpoint that is asked for, or 0."""
        self.took = took
        """Called when a checkpoint contains all batches up to a position and none after it."""
        self.saved: dict[str, bytes] = {}
        """Files of the mode in the checkpoint that training resumes from."""
        self.carried: dict[str, Any] = {}
        """State that the mode keeps from one epoch to the next."""
        self.keep: Callable[[], dict[str, bytes]] = dict
        """Returns the files of the mode for a checkpoint."""
        self.lasting: dict[str, Any] = {}
        """State of the mode that outlives a change of the workers or shards. It must not depend on links or dense weights."""
        self.lend: Callable[[], dict[str, bytes]] = dict
        """Returns files from which a worker that joins makes its own lasting state. Called from another thread."""
        self.queued: Callable[[], int] = lambda: 0
        """Returns how many gradients are not acknowledged yet."""
        self.before_checkpoint: Callable[[], None] = lambda: None
        """Sends what the mode must send before a checkpoint."""
        self.runs_optimizer = False
        """Whether the mode runs the dense optimizer in the worker. Its state then belongs to a checkpoint."""

    @property
    def age(self) -> int:
        """Batches that one worker has taken since the run began, if all are equally fast."""
        return self.trained_before // self.workers + self.taken

    @property
    def _interrupted(self) -> bool:
        return not self._parts and self.stop_when()  # a position lies between two batches

    def _next(self) -> Batch | None:
        if self._parts:
            return self._parts.popleft()
        warms_up, batch = self.cuts and self.age < self.warm_up, super()._next()
        if batch is None:
            return None
        self.taken += 1
        first, *rest = cut(batch, self.workers) if warms_up else [batch]
        self._parts.extend(rest)
        return first

    def report(self, batch: Batch, result: Result) -> None:
        super().report(batch, result)
        self.trained += batch.counted

    def adopt(self, values: Floats | None) -> None:
        """Adopt dense values of the shards."""
        if values is not None:
            with torch.no_grad():
                self.learner.flat.values.copy_(torch.from_numpy(values))

    def gradient(self, trainer: Trainer, result: Result) -> Gradient:
        """Return the dense gradient of the trainer's last step, clipped. It is valid until the next step."""
        grads, scale = trainer.step.flat.grads, result.dense_scale
        if self.optimizer.clips:
            clip(self.optimizer.config, grads.mul_(scale))
            scale = 1.0
        return Gradient(grads.numpy(), result.push.n, scale)
