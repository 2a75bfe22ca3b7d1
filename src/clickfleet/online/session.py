"""The session of online learning: begin and end passes and days, publish entries, write checkpoints."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np

from clickfleet.config.load import Config
from clickfleet.data.bad_lines import ENOUGH_LINES, too_many
from clickfleet.data.batch import Batch, SourceState
from clickfleet.data.formats import load as load_format
from clickfleet.data.memory import Feed
from clickfleet.data.names import Names, from_files, from_memory
from clickfleet.errors import CheckpointError
from clickfleet.online.freshness import Freshness
from clickfleet.online.pass_queue import PassQueue, PassReader, Supplied
from clickfleet.online.passes import Pass, Position
from clickfleet.online.publisher import PassPublisher, PassResults, pack, unpack
from clickfleet.store import checkpoint, run_folder
from clickfleet.store.run_folder import State
from clickfleet.store.table import PublishableTable
from clickfleet.training import predict
from clickfleet.training.learner import Learner
from clickfleet.training.loop import Arrangement, Job, Session, SessionJob
from clickfleet.training.metrics import Buckets, MetricResults, Metrics
from clickfleet.training.monitor import Monitor, Progress
from clickfleet.training.predict import Results
from clickfleet.training.saving import Saver
from clickfleet.training.step import Result

NAMES_EVERY_S = 600.0
"""Seconds between two updates of names.json."""


@dataclass
class OnlinePosition:
    """How far a stream has been trained. Part of every checkpoint."""

    position: Position | None = None
    """The position after the last finished pass."""
    open_day: int | None = None
    """The day whose passes are being trained; None once it has ended."""
    begun: dict[str, object] | None = None
    """The pass that is partly trained."""
    validation: MetricResults | None = None
    """Metrics of that pass, scored before it was trained."""
    validation_buckets: str | None = None
    """Its buckets, for the guard."""
    passes: int = 0
    lines: int = 0
    """Lines read since the fraction of bad lines was last checked."""
    bad_lines: int = 0
    """Bad lines among them, and bad records."""
    undelivered: list[PassResults] = field(default_factory=list)
    """Results of the passes since the last publication. The guard judges by them."""


class PassTraining(SessionJob, Protocol):
    """What a session needs to train passes: a job of this process, or the workers of a cluster."""

    table: PublishableTable

    @property
    def bad_lines(self) -> int: ...
    def begin_pass(self, source: PassReader, span_s: tuple[float, float] | None) -> None: ...
    def seen(self) -> Metrics: ...
    def forget_seen(self) -> None: ...


class PassJob(Job):
    """A job that also records the times of events."""

    def __init__(
        self, learner: Learner, metrics: Metrics, report: Callable[[Job], None], fresh: Freshness, **threads: int
    ) -> None:
        super().__init__(learner, Feed([], learner.schema), metrics, report, **threads)
        self.fresh = fresh
        self.span_s: tuple[float, float] | None = None
        """The first and last time of a pass whose rows have none."""

    def begin_pass(self, source: PassReader, span_s: tuple[float, float] | None) -> None:
        """Train on this source from now on."""
        self.source, self.span_s = source, span_s
        self.begin_epoch()

    def seen(self) -> Metrics:
        """Return the metrics of this pass."""
        return self.metrics

    def forget_seen(self) -> None:
        """Start the metrics of the next pass."""
        self.metrics.reset()

    def report(self, batch: Batch, result: Result) -> None:
        super().report(batch, result)
        with self._reporting:
            if batch.times is not None:
                self.fresh.trained(batch.times)
            elif self.span_s is not None:
                self.fresh.trained(np.linspace(*self.span_s, 16).astype(np.int64), len(batch))


P = TypeVar("P", bound=PassTraining)


class PassSession(Session[P]):
    """Trains the passes of a stream, publishes them, and ends days."""

    def __init__(
        self,
        config: Config,
        job: P,
        mode: Callable[[P], None],
        monitor: Monitor,
        saver: Saver | None,
        queue: PassQueue,
        publisher: PassPublisher,
        arrangement: Arrangement,
    ) -> None:
        super().__init__(config, job, mode, monitor, saver, arrangement)
        self.online, self.queue, self.publisher = config.online, queue, publisher
        self.course = OnlinePosition()
        self.now: Supplied | None = None
        """The pass being trained."""
        self.last: Results = {}
        """Metrics of the last pass."""
        self._start_s = self._begin_s = self._waited_s = 0.0
        self._reader: SourceState | None = None
        self.validated = Metrics(config.train.metrics.thresholds)
        """Metrics of all passes scored as a whole, except those of the first day."""
        self._first_day: int | None = None
        self._named_at: float | None = None

    def epochs(self) -> Iterator[int]:
        """Begin each pass and yield its number."""
        self._start()
        self.monitor.start(self.watched)
        self.publisher.prepare()
        if self.online.first_base and self.course.position is None and self.course.begun is None:
            self.publisher.release("base", self.job.steps, self.course, judged=False)
        self._start_s = time.monotonic()
        while self._begin():
            yield self.course.passes
            if self.signal is not None:
                return

    def stretches(self, epoch: int) -> Iterator[P]:
        job, every = self.job, self.config.run.checkpoint_every_steps
        if self._begun and self.signal is not None:
            return
        self._begun = True
        self.save_if_due()  # a checkpoint that became due while the last pass ended is of the beginning of this one
        while True:
            job.stop_at = (job.steps // every + 1) * every if every else None
            yield job
            if self.course.passes > epoch or self.signal is not None:
                return

    def train(self, stretch: P) -> None:
        self.mode(stretch)
        stretch.look_ahead()

    def evaluate_if_due(self) -> None:
        if self.job.epoch_ended:
            self._end()

    def save_if_due(self) -> None:
        if self.now is not None and self.signal is None and self._checkpoint_due():
            self._save()

    def finish(self) -> None:
        if self.now is not None:  # a signal came within a pass
            self._save(last=True)
        elif self._begun:
            self._finish()

    @property
    @abstractmethod
    def watched(self) -> Progress:
        """What the monitor shows."""

    def _begin(self) -> bool:
        """Begin the next pass; first end the day if the pass belongs to another one. Return False if there is none."""
        if self.course.begun is not None:
            assert self._reader is not None
            self.now = self.queue.resume(Pass.from_dict(self.course.begun), self.course.position, self._reader)
        else:
            begin = time.monotonic()
            self.now = self.queue.after(self.course.position, self._stops_waiting)
            self._waited_s += time.monotonic() - begin
            self._report_late()
            if self.course.open_day is not None and (self.now is None or self.now[0].day != self.course.open_day):
                if self.now is None and self._interrupted():
                    return False  # the day may continue after a restart
                self._end_day()
        if self.now is None:
            return False
        begun, source = self.now
        fresh = self.course.begun is None
        self.course.begun, self.course.open_day = begun.to_dict(), begun.day
        self.queue.prefetch(begun.position)
        self.job.begin_pass(source, begun.span_s)
        self._begin_s = time.monotonic()
        if fresh:
            self._collect_names(begun)
            self.course.validation = self.course.validation_buckets = None
            self.monitor.log(f"{begun.name} begins{_amount(begun)}")
            if self.online.validate == "pass":
                self._validate()
        return True

    def _collect_names(self, begun: Pass) -> None:
        """Add the frequent values of a pass to names.json, at most every few minutes."""
        now = time.monotonic()
        if not self.config.run.names or (self._named_at is not None and now - self._named_at < NAMES_EVERY_S):
            return
        self._named_at = now
        schema, folder = self.job.learner.schema, Path(self.config.run.dir)
        if begun.in_files:
            found: Names | None = from_files(begun.data, load_format(self.queue.reading(begun).data.format), schema)
        else:
            found = from_memory(Feed(begun.data, schema))
        try:
            known = None
            with suppress(CheckpointError):  # damaged: replaced
                known = run_folder.read_names(folder, schema)
            both = found if known is None or found is None else known.merge(found)
            if both is not None:
                run_folder.write_names(folder, both)
        except CheckpointError as error:  # a full disk: the run goes on without names
            self.monitor.log(f"warning: {error}")

    def _report_late(self) -> None:
        for late in self.queue.take_late():
            self.monitor.record("late_files", {"step": self.job.steps, **asdict(late), "words": late.words})
            self.monitor.log(f"ALARM: {late.words}")

    def _elapsed(self) -> float:
        """Return the seconds since the start, without those spent waiting for data."""
        return time.monotonic() - self._start_s - self._waited_s

    def _stops_waiting(self) -> bool:
        """Return whether to wait no longer for the next pass. Called several times a second."""
        return self.signal is not None

    def _interrupted(self) -> bool:
        return self.signal is not None or self.queue.patience.cancelled

    def _validate(self) -> None:
        assert self.now is not None
        begun, source = self.now
        metrics = self._measure(source)
        self.course.validation = metrics.results()
        self.course.validation_buckets = pack(metrics.buckets)
        self._first_day = self._first_day or begun.day
        if begun.day > self._first_day:
            self.validated.merge(metrics)
        self.monitor.log(f"{begun.name} before training: {describe(self.course.validation)}")

    def _measure(self, source: PassReader) -> Metrics:
        return predict.measure(self.job.learner, source.all(), self.arrangement["threads"])

    def _end(self) -> None:
        assert self.now is not None
        job = self.job
        (ended, source), self.now = self.now, None
        source.close()
        seen = job.seen()
        trained = seen.results()
        trained.pop("sliding_auc", None)
        scored = {"progressive": trained, "none": None, "pass": self.course.validation}
        judged: MetricResults | None = scored[self.online.validate]
        if not trained["rows"]:
            self.monitor.log(f"warning: {ended.name} has no rows")
            job.steps += 1  # so that the next checkpoint gets a new name
        self.monitor.log(f"{ended.name} trained: {describe(trained)}")
        facts: dict[str, object] = {"day": ended.day, "pass": ended.number, "step": job.steps, **trained}
        facts["table_rows"] = len(job.table)
        if judged is not None:
            facts |= {f"validation_{key}": value for key, value in judged.items()}
        bad_lines = job.bad_lines + ended.bad_records
        facts |= {"seconds": time.monotonic() - self._begin_s, "bad_lines": bad_lines}
        self._judge_lines(trained["rows"], bad_lines)
        if judged is not None and trained["rows"]:
            window = self.publisher.guard.add(self._scored_first(seen))
            self.course.undelivered.append({**judged, "window": window})
            facts |= {"guard_rows": window["rows"], "guard_auc": window["auc"]}
            facts |= {"guard_calibration": window["calibration"], "guard_warmup_rows": window["warmup_rows"]}
        if (backlog := self.queue.backlog) is not None:
            facts["backlog"] = backlog
        self.monitor.point(self.watched)  # so that the curves end where the pass does
        self.monitor.record("pass", facts)
        self.last = dict(trained)
        self.trained_s = self._elapsed()
        job.forget_seen()
        course = self.course
        course.position, course.begun = ended.position, None
        course.validation = course.validation_buckets = None
        course.passes += 1
        self.publisher.due |= bool(trained["rows"])
        if self.publisher.due and ended.number % self.online.delta_every_passes == 0:
            self._wait()  # a table has one snapshot at a time
            self.publisher.release("delta", job.steps, course)
        if ended.last:
            self._end_day()
        elif ended.number % self.online.checkpoint_every_passes == 0:
            self._checkpoint()

    def _scored_first(self, trained: Metrics) -> Buckets:
        """Return the scores of the pass that ends, made before it was trained."""
        if self.online.validate == "progressive":
            return trained.buckets
        assert self.course.validation_buckets is not None
        return unpack(self.course.validation_buckets, self.config.train.metrics.thresholds)

    def _judge_lines(self, rows: int, bad_lines: int) -> None:
        """Stop a run that reads too many bad lines. Count small passes together until there are enough lines to judge."""
        course, limit = self.course, self.config.data.max_bad_fraction
        course.lines += rows + bad_lines
        course.bad_lines += bad_lines
        if course.lines >= ENOUGH_LINES:
            if course.bad_lines > limit * course.lines:
                raise too_many(course.bad_lines, course.lines, limit)
            course.lines = course.bad_lines = 0

    def _end_day(self) -> None:
        """Publish a delta, shrink, publish a base, age the rows by a day, and save.

        Rows of today are 0 days unseen when the table shrinks and when the base is published.
        """
        job, day = self.job, self.course.open_day
        assert day is not None
        self._wait()  # a table has one snapshot at a time
        if self.publisher.due:
            self.publisher.release("delta", job.steps, self.course, day_over=True)  # a base follows anyway
        begin = time.monotonic()
        removed = job.table.shrink()
        self.monitor.log(f"{day} ends: shrink removed {removed:,} rows, {len(job.table):,} stay")
        self.publisher.release("base", job.steps, self.course, day_over=True)
        job.table.end_day()
        job.steps += 1
        self.course.open_day = None
        stats = job.table.stats()
        facts: dict[str, object] = {"day": day, "step": job.steps, "removed": removed, "table_rows": stats["rows"]}
        facts |= {"table_bytes": stats["bytes"], "evicted": stats["evicted"], "seconds": time.monotonic() - begin}
        self.monitor.record("day", facts)
        self._checkpoint()

    def _checkpoint(self) -> None:
        """Write a checkpoint at the end of a pass or day."""
        self._save()
        folder = Path(self.config.run.dir) / "checkpoints"
        self.publisher.checkpointed(self.course, checkpoint.step_folder(folder, self.job.steps))

    def _finish(self) -> None:
        begin = time.monotonic()
        if self._saved_step != self.job.steps:
            self._save(last=True)
        self._wait(last=True)
        self.publisher.tell_consumers(lambda done: done.flush())
        self.trained_s, self.last_save_s = self._elapsed() - (time.monotonic() - begin), time.monotonic() - begin

    def state(self) -> State:
        state = {**super().state(), "online": asdict(self.course), "published": self.publisher.state()}
        if self.course.begun is None:  # the pass has ended: its reader has no position
            state["reader"] = {"epoch": -1}
        return state

    def restore(self, state: State) -> None:
        """Resume from the state of a checkpoint."""
        self.course = OnlinePosition(**state["online"])
        self._reader = state["reader"]
        self.publisher.restore(state["published"])
        self.monitor.forget_after(state["step"], state.get("metrics_bytes"))


class LocalPassSession(PassSession[PassJob]):
    """A session whose job runs in this process."""

    @property
    def watched(self) -> Progress:
        return self.job

    def _write(self, state: State, epoch: int | None) -> None:
        assert self.saver is not None
        self.saver.save(self.job.learner, self.job.metrics, state, epoch)

    def restore(self, state: State) -> None:
        self.job.steps, self.job.rows = state["step"], state["rows"]
        super().restore(state)


def describe(results: Mapping[str, object]) -> str:
    """Return the metrics of a pass as a line of log, under PaddleRec's names with the spelling corrected."""
    names = {
        "auc": "AUC",
        "bucket_error": "BUCKET_ERROR",
        "mae": "MAE",
        "rmse": "RMSE",
        "actual_ctr": "Actual_CTR",
        "predicted_ctr": "Predicted_CTR",
        "calibration": "COPC",
    }
    words = [f"{text}={'-' if results[key] is None else format(results[key], '.6f')}" for key, text in names.items()]
    return f"global {' '.join(words)} rows={results['rows']}"


def _amount(begun: Pass) -> str:
    return f": {len(begun.data)} files, {sum(begun.sizes):,} bytes" if begun.in_files else ""
