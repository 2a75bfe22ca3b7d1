"""The session of online learning: begin and end passes and days, publish entries, write checkpoints."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Iterator
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
from clickfleet.online.calibrator import Calibrator
from clickfleet.online.freshness import Freshness, seconds
from clickfleet.online.pass_queue import PassQueue, PassReader, Supplied
from clickfleet.online.passes import GatheredItems, Pass, Place, Position
from clickfleet.online.publisher import PassPublisher, PassResults, pack, unpack
from clickfleet.online.reports import PassReport, StreamReports, describe
from clickfleet.store import checkpoint, run_folder
from clickfleet.store.run_folder import State
from clickfleet.store.table import PublishableTable, size_facts
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
        self.calibrator: Calibrator | None = None
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
        if self.calibrator is not None and batch.labels is not None and result.labels is None:
            now_s = self._stream_time(batch)
            scores = self.calibrator.learn(batch, result.scores, batch.labels, batch.weights, now_s)
            result = result._replace(scores=scores)
        super().report(batch, result)
        with self._reporting:
            told = batch.times is not None and self.fresh.trained(batch.times)
            if not told and self.span_s is not None:
                self.fresh.trained_between(self.span_s, len(batch))

    def _stream_time(self, batch: Batch) -> float:
        """Return the time of a batch: the median of its events, the end of its pass, or the clock's."""
        times = np.empty(0) if batch.times is None else seconds(batch.times)
        if len(times):
            return float(np.median(times))
        return time.time() if self.span_s is None else self.span_s[1]


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
        publisher.before_cut = self._wait
        self.reports: StreamReports = publisher.reports
        self._overdue = False
        """Whether a pass was not published yet because the writer was busy with an earlier one."""
        self._slice_names: Names | None = None
        """The values behind frequent keys, to name slices by."""
        self.course = OnlinePosition()
        self.now: Supplied | None = None
        """The pass being trained."""
        self.last: Results = {}
        """Metrics of the last pass."""
        self._start_s = self._begin_s = self._waited_s = 0.0
        self._begun_rows = 0
        """Rows of the run before the pass."""
        self._reader: SourceState | None = None
        self.validated = Metrics(config.train.metrics.thresholds)
        """Metrics of all passes scored as a whole, except those of the first day."""
        self._first_day: int | None = None
        self._named_at: float | None = None
        self._kept: dict[int, Place] = {}
        """Step -> the last pass in the checkpoint of that step."""

    def _start(self) -> None:
        super()._start()
        if self.online.pass_ is not None:  # a checkpoint can wait for the end of a micro-pass
            self.job.stop_when = lambda: self.signal is not None

    def epochs(self) -> Iterator[int]:
        """Begin each pass and yield its number."""
        self._start()
        self.monitor.start(self.watched)
        self.reports.watched = self.watched
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
        self.publisher.settle()
        self.reports.flush()

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
        self._begin_s, self._begun_rows = time.monotonic(), self.job.rows
        if fresh:
            self._collect_names(begun)
            self.course.validation = self.course.validation_buckets = None
            if not self.reports.together:
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
            data = begun.data.items[0] if isinstance(begun.data, GatheredItems) else begun.data
            found = from_memory(Feed(data, schema))
        try:
            known = None
            with suppress(CheckpointError):  # damaged: replaced
                known = run_folder.read_names(folder, schema)
            both = found if known is None or found is None else known.merge(found)
            if both is not None:
                self._slice_names = both
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
        """Return whether to wait no longer for the next pass. Called several times a second.

        What ended meanwhile is taken over, so that a quiet stream leaves nothing unpublished, unrecorded or unsaved.
        """
        self.publisher.settle(wait=False)
        if self._overdue and not self.publisher.busy:
            self._publish()
        if self.reports.together and not self.publisher.busy:
            self.reports.flush_if_due()
            if self._checkpoint_due():
                self._checkpoint()
        return self.signal is not None

    def _interrupted(self) -> bool:
        return self.signal is not None or self.queue.patience.cancelled

    def _validate(self) -> None:
        assert self.now is not None
        begun, source = self.now
        metrics = self._measure(source)
        self.course.validation = metrics.results()
        self.course.validation_buckets = pack(metrics.buckets_of(self.config.publish.guard.monitor))
        self._first_day = self._first_day or begun.day
        if begun.day > self._first_day:
            self.validated.merge(metrics)
        if not self.reports.together:
            self.monitor.log(f"{begun.name} before training: {describe(self.course.validation)}")

    def _measure(self, source: PassReader) -> Metrics:
        return predict.measure(self.job.learner, source.all(), self.arrangement["threads"])

    def _end(self) -> None:
        assert self.now is not None
        job, course = self.job, self.course
        (ended, source), self.now = self.now, None
        source.close()
        self.publisher.settle(wait=self._waits_for_entries)  # an entry is recorded before the pass after it
        seen = job.seen()
        trained = seen.results()
        trained.pop("sliding_auc", None)
        scored = {"progressive": trained, "none": None, "pass": course.validation}
        judged: MetricResults | None = scored[self.online.validate]
        learned = bool(trained["rows"]) or job.rows > self._begun_rows  # corrections are rows without metrics
        if not learned:
            self.monitor.log(f"warning: {ended.name} has no rows")
            job.steps += 1  # so that the next checkpoint gets a new name
        facts: dict[str, object] = {"table_rows": len(job.table), "run_rows": job.rows}
        bad_lines = job.bad_lines + ended.bad_records
        self._judge_lines(trained["rows"], bad_lines)
        if judged is not None and trained["rows"]:
            window = self.publisher.guard.add(self._scored_first(seen))
            course.undelivered.append({**judged, "window": window})
            facts |= {"guard_rows": window["rows"], "guard_auc": window["auc"]}
            facts |= {"guard_calibration": window["calibration"], "guard_warmup_rows": window["warmup_rows"]}
        if self.publisher.calibrator is not None:
            facts["slices"] = self.publisher.calibrator.results(self._slice_names)
        if (backlog := self.queue.backlog) is not None:
            facts["backlog"] = backlog
        apart = self._scored_first(seen) if self.online.validate == "pass" and judged is not None else None
        took_s, status = time.monotonic() - self._begin_s, self.queue.source.status
        self.reports.passed(PassReport(ended, job.steps, seen, apart, judged, took_s, bad_lines, facts, status))
        self.last = dict(trained)
        self.trained_s = self._elapsed()
        job.forget_seen()
        course.position, course.begun = ended.position, None
        course.validation = course.validation_buckets = None
        course.passes += 1
        self.publisher.due |= learned
        if self.publisher.due and (self._overdue or ended.number % self.online.delta_every_passes == 0):
            self._publish()
        if ended.last:
            self._end_day()
        elif self._saves_after(ended):
            self._checkpoint()

    @property
    def _waits_for_entries(self) -> bool:
        """Whether every pass has its own entry. Otherwise a pass that ends while one is being written is part of the next."""
        return self.config.train.deterministic or self.online.pass_ is None

    def _publish(self) -> None:
        """Begin to publish what was trained. Training continues meanwhile."""
        if self.publisher.busy and not self._waits_for_entries:
            self._overdue = True
            return
        self._overdue = False
        self.publisher.begin(self.publisher.next_kind, self.job.steps, self.course)

    def _saves_after(self, ended: Pass) -> bool:
        """Return whether a checkpoint is due after a pass."""
        every = self.online.checkpoint_every_passes
        if every is None and self.online.pass_ is not None:
            return self._checkpoint_due()
        return ended.number % (every or 1) == 0

    def _scored_first(self, trained: Metrics) -> Buckets:
        """Return the scores that the guard judges of the pass that ends, made before it was trained."""
        if self.online.validate == "progressive":
            return trained.buckets_of(self.config.publish.guard.monitor)
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
        self.publisher.settle()
        self.reports.flush()
        if self.publisher.due:
            self.publisher.release("delta", job.steps, self.course, day_over=True)
        self._wait()  # a table has one snapshot at a time
        begin = time.monotonic()
        removed = job.table.shrink()
        self.monitor.log(f"{day} ends: shrink removed {removed:,} rows, {len(job.table):,} stay")
        self.publisher.release("base", job.steps, self.course, day_over=True)
        job.table.end_day()
        job.steps += 1
        self.course.open_day, self._overdue = None, False
        stats = job.table.stats()
        facts: dict[str, object] = {"day": day, "step": job.steps, "removed": removed, **size_facts(stats)}
        facts |= {"evicted": stats["evicted"], "seconds": time.monotonic() - begin}
        self.monitor.record("day", facts)
        self._checkpoint()

    def _checkpoint(self) -> None:
        """Write a checkpoint at the end of a pass or day."""
        self._save()
        folder = Path(self.config.run.dir) / "checkpoints"
        self.publisher.checkpointed(self.course, checkpoint.step_folder(folder, self.job.steps))
        self._forget_passes(folder)

    def _forget_passes(self, folder: Path) -> None:
        """Forget the plan of passes before the oldest checkpoint that is kept."""
        known, self._kept = self._kept, {}
        try:
            for step in checkpoint.steps(folder):
                place = known.get(step)
                if place is None:
                    position = run_folder.read_state(checkpoint.step_folder(folder, step))["online"]["position"]
                    place = (0, 0) if position is None else (position["day"], position["pass"])
                self._kept[step] = place
        except CheckpointError:  # only its manifest is here, the rest at the URL of the run
            return
        if self._kept:
            self.queue.forget_before(min(self._kept.values()))

    def _finish(self) -> None:
        if self._overdue:
            self._overdue = False
            self.publisher.release(self.publisher.next_kind, self.job.steps, self.course)
        begin = time.monotonic()
        if self._saved_step != self.job.steps:
            self._save(last=True)
        self._wait(last=True)
        self.publisher.tell_consumers(lambda done: done.flush())
        self.trained_s, self.last_save_s = self._elapsed() - (time.monotonic() - begin), time.monotonic() - begin

    def _save(self, epoch: int | None = None, last: bool = False) -> None:
        self.publisher.settle()  # a checkpoint knows the entries before it
        super()._save(epoch, last)

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


def _amount(begun: Pass) -> str:
    return f": {len(begun.data)} files, {sum(begun.sizes):,} bytes" if begun.in_files else ""
