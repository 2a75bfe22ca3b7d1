"""What happens between steps: evaluations, checkpoints, ends of epochs, early stopping, signals."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from clickfleet.config import Config
from clickfleet.errors import CheckpointError, DataError, TrainingError
from clickfleet.interrupts import interruptible
from clickfleet.job import Job
from clickfleet.saving import Saver, State
from clickfleet.watch import Watch

Results = dict[str, Any]


@dataclass
class Progress:
    """How far a run has come, besides its steps: part of every checkpoint."""

    epoch: int = 0
    best_auc: float | None = None
    best_step: int | None = None
    waited: int = 0
    """Evaluations since the best."""
    evaluated_at: int = -1
    stopped_early: bool = False
    train: Results | None = None
    """Metrics of the last whole epoch."""
    test: Results | None = None
    best_test: Results | None = None
    """The test metrics behind best_auc."""

    @classmethod
    def resumed(cls, saved: Results, config: Config) -> Progress:
        """That of a checkpoint, under a patience that may be another one now."""
        found, patience = cls(**saved), config.train.patience
        found.stopped_early = patience is not None and found.waited >= patience
        return found

    def tested(self, results: Results, step: int) -> None:
        """Takes the results of an evaluation over."""
        self.test, self.evaluated_at = results, step
        if self.best_auc is None or results["auc"] > self.best_auc:
            self.best_auc, self.best_step, self.waited, self.best_test = results["auc"], step, 0, results
        else:
            self.waited += 1


def keeps_best(config: Config) -> bool:
    """Whether a run keeps the checkpoint with the best test AUC, for which its folder then stands."""
    return config.train.patience is not None if config.run.keep_best is None else config.run.keep_best


class Session:
    """Attends to a job between its steps; `evaluate` gives the test metrics, or is None where there is no test data."""

    def __init__(
        self,
        config: Config,
        watch: Watch,
        saver: Saver | None,
        evaluate: Callable[[], Results] | None,
        arrangement: dict[str, Any],
    ) -> None:
        self.config, self.watch, self.saver, self.evaluate = config, watch, saver, evaluate
        self.arrangement = arrangement
        self.progress = Progress()
        self.signal: int | None = None
        """What interrupted the run."""
        self.trained_s = self.last_save_s = 0.0
        """From the first line read to the last push applied, without evaluations; the last checkpoint after it."""
        self._mark: float | None = None
        self._saved_at = self._saved_step = 0.0
        self._keeps_best = keeps_best(config)

    def attend(self, job: Job) -> bool:
        """Does what is due; False when training is over."""
        now = time.monotonic()
        if self._mark is None:  # the beginning
            self._saved_at, self._saved_step = now, job.steps
            job.stop_when = self._wants_to_stop
            self.watch.start(job)
            if self._over():
                return False
        else:
            self.trained_s += now - self._mark
            job.look_ahead()
            if job.epoch_ended:
                self._end_epoch(job)
            elif self._due(self.config.train.eval_every, job.steps) and self.progress.evaluated_at != job.steps:
                self._test(job)
            if self.signal is not None or self._over():
                self._save(job, last=True)
                return False
            if self._checkpoint_due(job) or (self._is_best(job) and self._saved_step != job.steps):
                self._save(job)
        periods = [self.config.train.eval_every if self.evaluate else None]
        periods.append(self.config.run.checkpoint_every_steps if self.saver else None)
        job.stop_at = min(((job.steps // every + 1) * every for every in periods if every), default=None)
        self._mark = time.monotonic()
        return True

    def _due(self, every: int | None, steps: int) -> bool:
        return every is not None and steps > 0 and steps % every == 0

    def _wants_to_stop(self) -> bool:
        return self.signal is not None or self._time_is_due()

    def _time_is_due(self) -> bool:
        every = self.config.run.checkpoint_every
        return self.saver is not None and every is not None and time.monotonic() - self._saved_at >= every

    def _checkpoint_due(self, job: Job) -> bool:
        if self.saver is None or self._saved_step == job.steps:
            return False
        return self._time_is_due() or self._due(self.config.run.checkpoint_every_steps, job.steps)

    def _over(self) -> bool:
        return self.progress.epoch >= self.config.train.epochs or self.progress.stopped_early

    def _end_epoch(self, job: Job) -> None:
        if job.rows == 0:
            raise DataError("there are no rows to train on", "check data.train: the files are empty")
        epoch = self.progress.epoch
        self.progress.train = dict(job.metrics.results())
        facts = {"epoch": epoch, "step": job.steps, "rows": job.rows, **self.progress.train}
        self.watch.end_epoch(job, facts, self.trained_s)
        self.watch.log(f"epoch {epoch} done: step {job.steps:,}, {words(self.progress.train)}")
        self.progress.epoch += 1
        if self.progress.evaluated_at != job.steps:
            self._test(job, epoch)
        if not self.config.train.metrics.continuous:
            job.metrics.reset()
        job.begin_epoch()
        if not self._over() and self.saver is not None and self.config.run.keep_epochs:
            self._save(job, epoch=epoch)

    def _test(self, job: Job, epoch: int | None = None) -> None:
        if self.evaluate is None:
            return
        now = self.progress
        results = self.evaluate()
        now.tested(results, job.steps)
        slices = {key: value for key, value in results.items() if key != "slices"}
        self.watch.record("test", {"epoch": now.epoch if epoch is None else epoch, "step": job.steps, **slices})
        self.watch.log(f"test after step {job.steps:,}: {words(results)}")
        patience = self.config.train.patience
        if patience is not None and now.waited >= patience:
            now.stopped_early = True
            self.watch.log(
                f"stopped: no better test AUC than {now.best_auc:.4f} of step {now.best_step:,} in {now.waited} evaluations"
            )

    def _is_best(self, job: Job) -> bool:
        return self._keeps_best and self.progress.best_step == job.steps

    def _save(self, job: Job, epoch: int | None = None, last: bool = False) -> None:
        if self.saver is None:
            return
        begin = time.monotonic()
        if not torch.isfinite(job.learner.flat.values).all():
            raise TrainingError(
                f"step {job.steps}: a dense weight is no longer a number; no checkpoint of it was written",
                "lower dense.lr or set dense.clip_norm, and go on from the last checkpoint with --resume",
            )
        if last and self.progress.epoch and self.signal is None:
            epoch = self.progress.epoch - 1
        try:
            state = self.state(job)
        except CheckpointError as error:  # the disk is full: what is not written down yet cannot be saved as done
            if last:
                raise
            self.watch.log(f"no checkpoint: {error}")
            self._saved_at = time.monotonic()
            return
        self.saver.save(job.learner, job.metrics, state, epoch, best=self._is_best(job))
        if last:
            self.saver.wait(last=True)
        took = time.monotonic() - begin
        self._saved_at, self._saved_step = time.monotonic(), job.steps
        if last:
            self.last_save_s = took
        else:
            self.trained_s += took

    def state(self, job: Job) -> State:
        self.watch.mark(job.steps)
        return {
            "version": 1,
            "step": job.steps,
            "rows": job.rows,
            "reader": job.position(),
            "progress": vars(self.progress),
            "arrangement": self.arrangement,
        }

    def restore(self, job: Job, state: State) -> None:
        """Goes on from a checkpoint's state."""
        job.steps, job.rows = state["step"], state["rows"]
        job.source.restore(state["reader"])
        self.progress = Progress.resumed(state["progress"], self.config)
        if self.saver is not None and self._is_best(job):  # the kill may have come before it was labelled
            self.saver.label_best()
        self.watch.forget_after(state["step"], state.get("metrics_bytes"))

    def interruptible(self) -> AbstractContextManager[None]:
        """The first SIGTERM or SIGINT lets the step end, saves and stops; the second one does what it always does."""

        def stop(number: int) -> None:
            self.signal = number

        return interruptible(stop)


def words(results: Results) -> str:
    loss = "" if results["logloss"] is None else f", log loss {results['logloss']:.4f}"
    sliding = f", last batches {results['sliding_auc']:.4f}" if "sliding_auc" in results else ""
    return f"{results['rows']:,} rows, AUC {results['auc']:.4f}{loss}{sliding}"
