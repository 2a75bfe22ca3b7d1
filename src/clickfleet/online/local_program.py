"""A program whose job runs in its own process, in mode local."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from clickfleet.config.load import Config
from clickfleet.data.batch import Batch, SourceState
from clickfleet.data.dataset import Data, Source
from clickfleet.data.memory import Feed
from clickfleet.data.schema import Schema
from clickfleet.errors import CheckpointError
from clickfleet.online import manual
from clickfleet.online.program import Kind, ProgramEpoch, ProgramJob, check_kind
from clickfleet.store import checkpoint, mirror
from clickfleet.store.run_folder import State
from clickfleet.training import modes
from clickfleet.training.handed_batches import HandedBatches
from clickfleet.training.loop import Job, RunProgress, TrainingSession
from clickfleet.training.model import SavedModel
from clickfleet.training.monitor import Monitor
from clickfleet.training.predict import Results
from clickfleet.training.run import LocalStart, OpenRun, open_run, settled
from clickfleet.training.signals import leave


@contextmanager
def run_here(config: Config, schema: Schema, role: Any, resume: bool, quiet: bool) -> Iterator[ProgramJob]:
    """Yield a job of this process alone."""
    with open_run(settled(config), config.run.dir, resume, Monitor, quiet) as run:
        start = LocalStart(run.settings, schema)
        run.begin(start)
        yield LocalJob(run, start)


class ProgramSession(TrainingSession):
    """One epoch of a program. It ends with a checkpoint."""

    published: Mapping[str, Any]
    """What was published before, as checkpoints hold it."""

    def state(self) -> State:
        return {**self.published, **super().state()}

    def finish(self) -> None:
        self._save(epoch=self._ended if self.signal is None else None, last=True)


class LocalJob(ProgramJob):
    """A job of one process."""

    def __init__(self, run: OpenRun[Monitor], start: LocalStart) -> None:
        super().__init__(0, 1, run.settings, start.schema)
        self._run, self._start, self._saver = run, start, run.saver()
        self._mode = modes.load(run.settings)
        self._steps = self._rows = 0
        self._progress = RunProgress()
        self._rest: SourceState | None = None
        """The position in an epoch that the run was stopped in."""
        self._changed = False
        """Whether the table has changed since the last step."""
        self._resume()

    def _resume(self) -> None:
        """Continue from the state of the checkpoint, if there is one."""
        state = self._start.state
        if state is None:
            return
        self._steps, self._rows = state["step"], state["rows"]
        self._progress = RunProgress.resumed(state["progress"], self.config)
        self._rest = _middle(state["reader"], self._progress.epoch)
        self._run.monitor.forget_after(self._steps, state.get("metrics_bytes"))

    def session(self, source: Source, trainers: int | None = None) -> ProgramSession:
        """Return a session that trains one epoch."""
        start, settings = self._start, self.config
        threads = start.arrangement["threads"]
        job = Job(
            start.learner,
            source,
            start.metrics,
            self._run.monitor.tick,
            trainers=trainers or start.arrangement["hogwild"],
            threads=threads,
        )
        job.steps, job.rows = self._steps, self._rows
        source.epoch = self._progress.epoch
        model, data = SavedModel(start.learner, threads=threads), settings.data
        one = replace(settings, train=replace(settings.train, epochs=self._progress.epoch + 1, patience=None))
        session = ProgramSession(
            one,
            job,
            self._mode,
            self._run.monitor,
            self._saver,
            start.arrangement,
            (lambda: model.evaluate(data.valid)) if data.valid else None,
            (lambda: model.evaluate(data.test)) if data.test else None,
        )
        session.progress = self._progress
        session.published = {key: value for key, value in (start.state or {}).items() if key in ("online", "published")}
        return session

    def end(self, session: ProgramSession) -> Results:
        """Take over what a session has trained; return its metrics."""
        self._steps, self._rows, self._progress = session.job.steps, session.job.rows, session.progress
        if session.signal is not None:
            self._run.monitor.log(f"stopped at step {self._steps:,}; resume with resume=True")
            leave(session.signal)
        return {**(self._progress.train or {}), "step": self._steps, "test": self._progress.test}

    def train(self, data: Data) -> Results:
        session = self.session(self.source(data))
        if self._rest is not None:
            session.job.source.restore(self._rest)
            self._rest = None
        try:
            with session.interruptible():
                session.run()
        finally:
            session.job.close()
        return self.end(session)

    @contextmanager
    def epoch(self) -> Iterator[ProgramEpoch]:
        if self._rest is not None:
            raise CheckpointError(
                "the checkpoint lies in the middle of an epoch", "end that epoch first, with `train` and the same data"
            )
        epoch = LocalEpoch(self)
        try:
            yield epoch
        finally:
            epoch.close()
        epoch.end()

    def evaluate(self, data: Data) -> Results:
        threads = self._start.arrangement["threads"]
        return SavedModel(self._start.learner, threads=threads).evaluate(data)

    def save(self, kind: Kind = "checkpoint") -> str:
        check_kind(kind)
        checkpoints = self._run.checkpoints
        self._steps += self._changed  # each checkpoint has a step of its own
        self._changed = False
        if self._saver is None or self._saver.last is None or self._saver.last[0] != self._steps:
            session = self.session(Feed([], self.schema))
            session.finish()
        path = checkpoint.latest(checkpoints)
        if kind == "checkpoint":
            return mirror.origin(path) or str(path)
        done = manual.publish(checkpoints.parent, kind, locked=True, trust=True)
        newest = checkpoint.latest(checkpoints)
        self._start.resume(newest)  # rows that were published no longer count as changed
        self._resume()
        if self._saver is not None:
            self._saver.last = self._steps, newest
        if self._run.mirror is not None:
            self._run.mirror.push()
        return str(done["entry"])

    def shrink(self) -> int:
        self._changed = True
        return int(self._start.learner.table.shrink())

    def _meet(self, value: Any) -> list[Any]:
        return [value]


class LocalEpoch(ProgramEpoch):
    """An epoch of a job of one process."""

    def __init__(self, job: LocalJob) -> None:
        self._source = HandedBatches(job.schema, 0)
        self._session = job.session(self._source, trainers=1)
        super().__init__(job, self._source.epoch)
        self._local = job
        self._session.job.stop_when = lambda: self._source.idle
        self._session.monitor.start(self._session.job)

    def _train(self, batch: Batch) -> tuple[float, float]:
        self._source.put(batch)
        return self._stretch()

    def _stretch(self) -> tuple[float, float]:
        session, job, begin = self._session, self._session.job, time.monotonic()
        loss, weight = job.loss, job.weight
        session.mode(job)
        session.trained_s += time.monotonic() - begin
        return job.loss - loss, job.weight - weight

    def metrics(self) -> Results:
        return dict(self._session.job.metrics.results())

    def end(self) -> None:
        """Conclude the epoch."""
        self._source.close()
        self._stretch()
        self._session.evaluate_if_due()
        self._session.finish()
        self.results = self._local.end(self._session)


def _middle(reader: SourceState, epoch: int) -> SourceState | None:
    """Return the position in an epoch that a run was stopped in; None if it is at the beginning of one."""
    if "streams" in reader:
        if reader["epoch"] == epoch:
            raise CheckpointError(
                "the checkpoint lies in the middle of an epoch of a cluster", "resume it in the mode of the cluster"
            )
        return None
    return reader if reader.get("passed") or reader.get("skip") else None
