"""What happens between the steps of online learning: passes begin and end, days end, entries and checkpoints are written."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from clickfleet import scoring
from clickfleet.bad_lines import ENOUGH_LINES, too_many
from clickfleet.batch import Batch
from clickfleet.config import Config
from clickfleet.job import Job
from clickfleet.metrics import Buckets, Metrics
from clickfleet.online.ahead import Ahead
from clickfleet.online.done_files import DoneFiles
from clickfleet.online.freshness import Freshness
from clickfleet.online.guard import pack, unpack
from clickfleet.online.passes import Pass, Position
from clickfleet.online.release import Release
from clickfleet.online.supply import Supplied, Supply
from clickfleet.saving import Saver, State
from clickfleet.scoring import Results
from clickfleet.session import Session
from clickfleet.step import Result
from clickfleet.watch import Watch


@dataclass
class Course:
    """How far a stream has been learned from: part of every checkpoint."""

    position: Position | None = None
    """After the last pass that was finished."""
    open_day: int | None = None
    """The day whose passes are being trained on; None once it has ended."""
    begun: dict[str, Any] | None = None
    """The pass that is partly trained on."""
    validation: Results | None = None
    """Of that pass, scored before it was trained on."""
    validation_buckets: str | None = None
    """The same, for the guard."""
    passes: int = 0
    lines: int = 0
    """Lines read since the share of bad ones was last judged."""
    bad_lines: int = 0
    """Bad ones among them, and bad records."""
    undelivered: list[Results] = field(default_factory=list)
    """Results of the passes since the last publication, which the guard looks at."""


class PassJob(Job):
    """A job that also follows the times of events."""

    fresh: Freshness
    span_s: tuple[float, float] | None = None

    @property
    def bad_lines(self) -> int:
        """Of this pass."""
        return int(self.source.counters.bad_lines)

    def report(self, batch: Batch, result: Result) -> None:
        super().report(batch, result)
        with self._reporting:
            if batch.times is not None:
                self.fresh.trained(batch.times)
            elif self.span_s is not None:
                self.fresh.trained(np.linspace(*self.span_s, 16).astype(np.int64), len(batch))


class PassSession(Session):
    """Attends to a job over the passes of a stream."""

    def __init__(
        self, config: Config, watch: Watch, saver: Saver, supply: Supply, release: Release, arrangement: dict[str, Any]
    ) -> None:
        super().__init__(config, watch, saver, None, arrangement)
        self.online, self.supply, self.release = config.online, supply, release
        self.course = Course()
        self.now: Supplied | None = None
        """The pass being trained on."""
        self.last: Results = {}
        """What the last pass showed."""
        self._begin_s = self._waited_s = 0.0
        self._reader: dict[str, Any] | None = None
        self.validated = Metrics(config.train.metrics.thresholds)
        """All passes that were scored as a whole, but those of the first day."""
        self._first_day: int | None = None

    def attend(self, job: Job) -> bool:
        """Does what is due; False when there are no more passes."""
        assert isinstance(job, PassJob)
        if self._mark is None:
            self._saved_at, self._saved_step = time.monotonic(), job.steps
            job.stop_when = self._wants_to_stop
            self._show(job)
            self.release.prepare()
            if self.online.first_base and self.course.position is None and self.course.begun is None:
                self.release.release("base", job, self.course, judged=False)
            self._mark = time.monotonic()
            if not self._begin(job):
                return False
        else:
            job.look_ahead()
            if job.epoch_ended:
                self._end(job)
                if self.signal is not None or not self._begin(job):
                    self._finish(job)
                    return False
            if self.signal is not None:
                self._save(job, last=True)
                return False
            if self._checkpoint_due(job):
                self._save(job)
        every = self.config.run.checkpoint_every_steps
        job.stop_at = (job.steps // every + 1) * every if every else None
        return True

    def _show(self, job: PassJob) -> None:
        self.watch.start(job)

    def _begin(self, job: PassJob) -> bool:
        """Takes the next pass up, ending the day where it belongs to another; False when there is none."""
        if self.course.begun is not None:
            assert self._reader is not None
            self.now = self.supply.resume(Pass.from_dict(self.course.begun), self.course.position, self._reader)
        else:
            begin = time.monotonic()
            self.now = self.supply.after(self.course.position, lambda: self.signal is not None)
            self._waited_s += time.monotonic() - begin
            self._report_late(job)
            if self.course.open_day is not None and (self.now is None or self.now[0].day != self.course.open_day):
                if self.now is None and self._interrupted():
                    return False  # the day may still go on
                self._end_day(job)
        if self.now is None:
            return False
        begun, source = self.now
        fresh = self.course.begun is None
        self.course.begun, self.course.open_day = begun.to_dict(), begun.day
        self.supply.prefetch(begun.position)
        job.source, job.span_s = source, begun.span_s
        job.begin_epoch()
        self._begin_s = time.monotonic()
        if fresh:
            self.course.validation = self.course.validation_buckets = None
            self.watch.log(f"{begun.name} begins{_amount(begun)}")
            if self.online.validate == "pass":
                self._validate(job)
        return True

    def _report_late(self, job: PassJob) -> None:
        for late in self.supply.take_late():
            self.watch.record("late_files", {"step": job.steps, **asdict(late), "words": late.words})
            self.watch.log(f"ALARM: {late.words}")

    def _elapsed(self) -> float:
        """Time since the first pass, without that spent waiting for data."""
        assert self._mark is not None
        return time.monotonic() - self._mark - self._waited_s

    def _interrupted(self) -> bool:
        return self.signal is not None or self.supply.patience.called_off

    def _validate(self, job: PassJob) -> None:
        assert self.now is not None
        begun, source = self.now
        metrics = self._measure(job, source)
        self.course.validation = dict(metrics.results())
        self.course.validation_buckets = pack(metrics.buckets)
        self._first_day = self._first_day or begun.day
        if begun.day > self._first_day:
            self.validated.merge(metrics)
        self.watch.log(f"{begun.name} before training: {describe(self.course.validation)}")

    def _measure(self, job: PassJob, source: Ahead) -> Metrics:
        return scoring.measure(job.learner, source.all(), self.arrangement["threads"])

    def _end(self, job: PassJob) -> None:
        assert self.now is not None
        (ended, source), self.now = self.now, None
        source.close()
        trained = dict(job.metrics.results())
        trained.pop("sliding_auc", None)
        judged = {"progressive": trained, "none": None, "pass": self.course.validation}[self.online.validate]
        if not trained["rows"]:
            self.watch.log(f"warning: {ended.name} has no rows")
            job.steps += 1  # so that the checkpoint after it is another one
        self.watch.log(f"{ended.name} trained: {describe(trained)}")
        facts = {"day": ended.day, "pass": ended.number, "step": job.steps, **trained, "table_rows": len(job.table)}
        facts |= {f"validation_{key}": value for key, value in (judged or {}).items()}
        bad_lines = job.bad_lines + ended.bad_records
        facts |= {"seconds": time.monotonic() - self._begin_s, "bad_lines": bad_lines}
        self._judge_lines(int(trained["rows"] or 0), bad_lines)
        if judged is not None and trained["rows"]:
            window = self.release.judge.add(self._scored_first(job))
            self.course.undelivered.append({**judged, "window": window})
            facts |= {f"guard_{key}": window[key] for key in ("rows", "auc", "calibration", "warmup_rows")}
        if (backlog := self.supply.backlog) is not None:
            facts["backlog"] = backlog
        self.watch.record("pass", facts)
        self.last = trained
        self.trained_s = self._elapsed()
        job.metrics.reset()
        course = self.course
        course.position, course.begun = ended.position, None
        course.validation = course.validation_buckets = None
        course.passes += 1
        self.release.due |= bool(trained["rows"])
        if self.release.due and ended.number % self.online.delta_every_passes == 0:
            self._settle()
            self.release.release("delta", job, course)
        if ended.last:
            self._end_day(job)
        elif ended.number % self.online.checkpoint_every_passes == 0:
            self._checkpoint(job)

    def _scored_first(self, job: PassJob) -> Buckets:
        """The scores of the pass that ends, made before it was trained on."""
        if self.online.validate == "progressive":
            return job.metrics.buckets
        assert self.course.validation_buckets is not None
        return unpack(self.course.validation_buckets, self.config.train.metrics.thresholds)

    def _judge_lines(self, rows: int, bad_lines: int) -> None:
        """Stops a run that reads garbage; passes may be small, so their lines are counted together until they say something."""
        course, limit = self.course, self.config.data.max_bad_fraction
        course.lines += rows + bad_lines
        course.bad_lines += bad_lines
        if course.lines >= ENOUGH_LINES:
            if course.bad_lines > limit * course.lines:
                raise too_many(course.bad_lines, course.lines, limit)
            course.lines = course.bad_lines = 0

    def _end_day(self, job: PassJob) -> None:
        """delta, shrink, base, a day older, checkpoint: a row seen today is 0 days unseen at shrink and base."""
        day = self.course.open_day
        assert day is not None
        self._settle()
        if self.release.due:
            self.release.release("delta", job, self.course)
        begin = time.monotonic()
        removed = job.table.shrink()
        self.watch.log(f"{day} ends: shrink removed {removed:,} rows, {len(job.table):,} stay")
        self.release.release("base", job, self.course)
        job.table.end_day()
        job.steps += 1
        self.course.open_day = None
        stats = job.table.stats()
        facts: dict[str, Any] = {"day": day, "step": job.steps, "removed": removed, "table_rows": stats["rows"]}
        facts |= {"table_bytes": stats["bytes"], "evicted": stats["evicted"], "seconds": time.monotonic() - begin}
        self.watch.record("day", facts)
        self._checkpoint(job)

    def _settle(self) -> None:
        """Lets the checkpoint under way be written: a table can be cut once at a time."""
        assert self.saver is not None
        self.saver.wait()

    def _checkpoint(self, job: PassJob) -> None:
        """One at the end of a pass or day."""
        assert self.saver is not None
        self._save(job)
        self.release.checkpointed(self.course, self.saver.folder / f"step-{job.steps:012d}")

    def _finish(self, job: PassJob) -> None:
        begin = time.monotonic()
        if self._saved_step != job.steps:
            self._save(job, last=True)
        assert self.saver is not None
        self.saver.wait(last=True)
        self.release.tell_consumers(DoneFiles.flush)
        self.trained_s, self.last_save_s = self._elapsed() - (time.monotonic() - begin), time.monotonic() - begin

    def state(self, job: Job) -> State:
        state = {**super().state(job), "online": asdict(self.course), "published": self.release.state()}
        if self.course.begun is None:  # the reader of the pass that has ended says nothing any more
            state["reader"] = {"epoch": -1}
        return state

    def restore(self, job: Job, state: State) -> None:
        """Goes on from a checkpoint's state."""
        job.steps, job.rows = state["step"], state["rows"]
        self.course = Course(**state["online"])
        self._reader = state["reader"]
        self.release.restore(state["published"])
        self.watch.forget_after(state["metrics_bytes"])


def describe(results: Results) -> str:
    """The numbers of a pass, named as the original named them, with its spelling put right."""
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
