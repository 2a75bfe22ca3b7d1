"""When a run cuts: checkpoints of all shards and workers at instants that lie between the same batches."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clickfleet import checkpoint
from clickfleet.cluster import base as bases
from clickfleet.cluster import cutting

if TYPE_CHECKING:
    from clickfleet.cluster.driver import Driver

TICK_S = 0.25


class Cuts:
    """The cuts of a run, one at a time."""

    def __init__(self, run: Driver) -> None:
        self.run = run
        self.work: cutting.Cutting | None = None
        """The one under way."""
        self.number = 0
        self.saved_at = time.monotonic()
        self.losses = 0
        """Since the last one."""
        self._unwanted: list[Any] = []
        self._since = run.overview.moment

    def due(self) -> bool:
        if self._unwanted:  # of a cut that was dropped: a shard writes one at a time
            ray = self.run.crew.fleet.ray
            done = ray.wait(self._unwanted, num_returns=len(self._unwanted), timeout=0)[0]
            self._unwanted = [call for call in self._unwanted if call not in done]
            if self._unwanted:
                return False
        run, steps = self.run.config.run, self.run.overview.steps - self.run.base.steps
        by_time = run.checkpoint_every is not None and time.monotonic() - self.saved_at >= run.checkpoint_every
        by_steps = run.checkpoint_every_steps is not None and steps >= run.checkpoint_every_steps
        return steps > 0 and (by_time or by_steps or self._exam_due())

    def _exam_due(self) -> bool:
        return self.run.exams.due(self.run.overview.steps, self.run.progress)

    def note(self) -> None:
        """From here on it counts how fast training is without a cut."""
        self._since = self.run.overview.moment

    def begin(self, epoch: int | None, share: float | None = None) -> None:
        """Asks all for their parts; where an evaluation is due, the workers stand still after theirs until it is over.

        After a signal they stand still too: what they learn from then on would be lost.
        """
        self.number += 1
        exam = epoch is None and self._exam_due()
        work = self.work = cutting.begin(self.number, self.run.folder, epoch, exam)
        work.speed, self._since = self._since.speed_until(self.run.overview.moment), self.run.overview.moment
        share = share or self.run.config.cluster.cut_share
        hidden, limit = str(work.writer.hidden), self.run.config.cluster.timeout
        for name, actor in self.run.crew.trainers.items():
            work.calls[name] = actor.cut.remote(work.number, exam or self.run.signal is not None)
        for name, actor in self.run.crew.shards.items():
            work.calls[name] = actor.save.remote(work.number, hidden, limit, share)

    def collect(self) -> None:
        """Takes what is there of a cut, and completes it when all is there."""
        work, crew = self.work, self.run.crew
        assert work is not None
        left = {call: name for name, call in work.calls.items() if name not in work.done}
        for call in crew.fleet.ray.wait(list(left), num_returns=len(left), timeout=0)[0] if left else ():
            work.done[left[call]] = crew.result(left[call], call)
        if work.exam and len(work.reports) == len(crew.trainers):
            work.exam = False
            try:
                if self.run.signal is None:
                    self.run.exams.take(self.run.progress, self.run.overview.epoch, self._steps(work))
            finally:
                crew.tell(crew.trainers, "release")
        if len(work.done) == len(work.calls):
            self._complete(work)
            self.work = None

    def _steps(self, work: cutting.Cutting) -> int:
        return int(self.run.overview.base["steps"] + sum(report["steps"] for report in work.reports.values()))

    def _complete(self, work: cutting.Cutting) -> None:
        run, counted = self.run, self.run.overview.base
        streams: dict[str, Any] = dict.fromkeys(run.finished)
        for report in work.reports.values():
            streams |= report["position"]
        reader = {"epoch": run.overview.epoch, "of": run.streams_of, "streams": streams}
        state = {
            **run.carried,
            "version": 1,
            "step": self._steps(work),
            "rows": counted["rows"] + sum(report["rows"] for report in work.reports.values()),
            "reader": bases.NEXT_EPOCH if run.progress.epoch > run.overview.epoch else reader,
            "progress": vars(run.progress).copy(),
            "metrics_bytes": run.watch.size(),
            **run.more(),
        }
        metrics = run.merged(report["metrics"] for report in work.reports.values())
        shards = list(run.crew.shards)
        run.base = cutting.finish(
            work, shards, run.config, run.learner, metrics, run.base, state, run.crew.row_files, run.table
        )
        run.path, self.saved_at, self.losses = Path(str(run.base.path)), time.monotonic(), 0
        run.base.path = run.deliver(work.number, run.path)
        took = time.monotonic() - work.begin
        speed = self._since.speed_until(run.overview.moment)
        facts = {"epoch": run.overview.epoch, "step": state["step"], "rows": state["rows"], "seconds": took}
        facts |= {"rows_per_s": speed, "rows_per_s_before": work.speed}
        run.watch.record("cut", {**facts, "table_rows": run.overview.table.stats()["rows"]})
        self.note()
        run.watch.log(f"cut {work.number}: step {state['step']:,}, {state['rows']:,} rows, {took:.1f} s", show=False)

    def now(self, epoch: int | None) -> None:
        """A checkpoint of this moment, written when this returns."""
        self.wait()
        self.begin(epoch, share=1.0)
        self.wait()

    def wait(self) -> None:
        """Until none is under way; what is, is written as fast as can be."""
        if self.work is not None:
            for actor in self.run.crew.shards.values():
                actor.hurry.remote(self.work.number)
        while (work := self.work) is not None:
            left = [call for name, call in work.calls.items() if name not in work.done]
            if left:
                self.run.crew.fleet.ray.wait(left, timeout=TICK_S)
            self.run.crew.feel()
            self.run.crew.fleet.check()
            self.collect()

    def last(self) -> None:
        """A checkpoint of the end, unless there is one."""
        run = self.run
        epoch = run.progress.epoch - 1 if run.progress.epoch and run.signal is None else None
        saved = run.path is not None and run.base.progress == vars(run.progress)
        if run.crew.count() != run.base.steps or not saved:
            self.now(epoch)
        elif epoch is not None and run.config.run.keep_epochs and run.path is not None:
            checkpoint.label_epoch(run.folder, epoch, run.path)

    def drop(self) -> None:
        """Gives up the one under way."""
        if self.work is not None:
            self.work.drop()
            self._unwanted = list(self.work.calls.values())
            for actor in self.run.crew.shards.values():
                actor.drop_cut.remote(self.work.number)
            for actor in self.run.crew.trainers.values():
                actor.release.remote()
            self.work = None

    def forget(self) -> None:
        """Nobody works on an old one any more."""
        self._unwanted = []
