"""Checkpoints of a run: when to take one, and how the parts of shards and workers become one.

All parts belong to the same moment: each contains the same batches and no others.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from clickfleet.cluster.assignments import NEXT_EPOCH
from clickfleet.cluster.processes import Call, ProcessFailedError
from clickfleet.cluster.shard_files import WrittenCheckpoint
from clickfleet.cluster.start_state import (
    StartState,
    adopt_buffers,
    join_dense,
    kept_name,
    mean_state,
    more_of,
)
from clickfleet.cluster.worker import WorkerCheckpoint
from clickfleet.config.load import dump
from clickfleet.store import atomic, checkpoint, run_folder
from clickfleet.training import saving
from clickfleet.training.metrics import Metrics
from clickfleet.training.validation import keeps_best

if TYPE_CHECKING:
    from clickfleet.cluster.driver import Driver

TICK_S = 0.25


class ClusterCheckpoints:
    """The checkpoints of a run, one at a time."""

    def __init__(self, run: Driver) -> None:
        self.run = run
        self.work: CheckpointRound | None = None
        """The checkpoint in progress."""
        self.number = 0
        self.saved_at = time.monotonic()
        self.failures = 0
        """Failures since the last checkpoint."""
        self._dropped_calls: list[Call] = []
        """Calls of a dropped checkpoint that have not ended."""
        self._since = run.overview.moment
        self.wanted = False
        """Whether a checkpoint is to be taken soon, because the processes have changed since the last one."""

    def due(self) -> bool:
        if self._dropped_calls:  # a shard writes one checkpoint at a time
            ray = self.run.processes.actor_group.ray
            _, self._dropped_calls = ray.wait(self._dropped_calls, num_returns=len(self._dropped_calls), timeout=0)
            if self._dropped_calls:
                return False
        run, steps = self.run.config.run, self.run.overview.steps - self.run.start_state.steps
        by_time = run.checkpoint_every is not None and time.monotonic() - self.saved_at >= run.checkpoint_every
        by_steps = run.checkpoint_every_steps is not None and steps >= run.checkpoint_every_steps
        return steps > 0 and (by_time or by_steps or self.wanted or self._evaluation_due())

    def _evaluation_due(self) -> bool:
        return self.run.evaluations.due(self.run.overview.steps, self.run.progress)

    def note(self) -> None:
        """Start to measure the speed of training without a checkpoint."""
        self._since = self.run.overview.moment

    def begin(self, epoch: int | None, share: float | None = None, hold: bool = False, brief: bool = False) -> None:
        """Request the parts of a checkpoint. If an evaluation is due, the workers pause after their part until it is done.

        With `hold` they pause, too, and without an evaluation. After a signal they pause because later batches would be lost. A
        `brief` checkpoint has the files of the mode from one worker only. Who resumes from it gives them to all.
        """
        self.run.before_checkpoint()
        if self.run.untouched:
            self.run.assign_nothing()
        self.number, self.wanted = self.number + 1, False
        evaluate = epoch is None and not hold and self._evaluation_due()
        writer = atomic.write_folder(self.run.folder / f"cut-{self.number}", "checkpoint")
        writer.__enter__()
        now = self.run.overview.moment
        work = self.work = CheckpointRound(self.number, writer, epoch, evaluate, speed=self._since.speed_until(now))
        self._since = now
        share = share or self.run.config.cluster.checkpoint_cpu
        hidden, limit = str(work.writer.hidden), self.run.config.cluster.timeout
        lead = f"worker {min(self.run.processes.workers)}"
        for name, actor in self.run.processes.trainers.items():
            paused = hold or evaluate or self.run.signal is not None
            work.calls[name] = actor.checkpoint.remote(work.number, paused, not brief or name == lead)
        for name, actor in self.run.processes.shards.items():
            work.calls[name] = actor.save.remote(work.number, hidden, limit, share)

    def evaluate_if_due(self) -> None:
        """Take the parts that have arrived. Evaluate the model as soon as all workers have paused for it."""
        work, processes = self.work, self.run.processes
        if work is None:
            return
        pending = work.pending
        ready = processes.actor_group.ray.wait(list(pending), num_returns=len(pending), timeout=0)[0] if pending else ()
        for call in ready:
            work.done[pending[call]] = processes.result(pending[call], call)
        if work.evaluate and len(work.reports) == len(processes.trainers):
            work.evaluate = False
            try:
                if self.run.signal is None:
                    self.run.evaluations.take(self.run.progress, self.run.overview.epoch, self._steps(work))
            finally:
                processes.call(processes.trainers, "release")

    def complete_if_ready(self) -> None:
        """Complete the checkpoint in progress if all its parts have arrived."""
        if self.work is not None and len(self.work.done) == len(self.work.calls):
            self._complete(self.work)
            self.work = None

    def _steps(self, work: CheckpointRound) -> int:
        return int(self.run.overview.start.steps + sum(report["steps"] for report in work.reports.values()))

    def _complete(self, work: CheckpointRound) -> None:
        run = self.run
        reader = run.position(work.reports)
        if run.untouched:
            reader = run.next_position
        elif run.progress.epoch > run.overview.epoch:
            reader = NEXT_EPOCH
        state: dict[str, Any] = {
            **run.start_state.more,
            "version": 1,
            "step": self._steps(work),
            "rows": run.overview.start.rows + sum(report["rows"] for report in work.reports.values()),
            "reader": reader,
            "progress": vars(run.progress).copy(),
            **run.more(),
        }
        run.monitor.mark(int(state["step"]))
        metrics = run.merged(report["metrics"] for report in work.reports.values())
        run.path, run.start_state = self._write(work, metrics, state)
        self.saved_at, self.failures = time.monotonic(), 0
        run.start_state.path = run.deliver(work.number, run.path)
        took = time.monotonic() - work.begin
        speed = self._since.speed_until(run.overview.moment)
        facts = {"epoch": run.overview.epoch, "step": state["step"], "rows": state["rows"], "seconds": took}
        facts |= {"rows_per_s": speed, "rows_per_s_before": work.speed}
        run.monitor.record("cut", {**facts, "table_rows": run.overview.table_stats()["rows"]})
        self.note()
        run.monitor.log(
            f"checkpoint {work.number}: step {state['step']:,}, {state['rows']:,} rows, {took:.1f} s", show=False
        )

    def _write(self, work: CheckpointRound, metrics: Metrics, state: dict[str, Any]) -> tuple[Path, StartState]:
        """Write the remaining files and give the checkpoint its final name. Return its path and its start state."""
        run, config, learner = self.run, self.run.config, self.run.learner
        parts = [cast(WrittenCheckpoint, work.done[name]) for name in run.processes.shards]
        dense = join_dense([part["dense"] for part in parts])
        dense |= optimizer_of(work.reports)
        learner.flat.values.copy_(dense["values"])
        learner.optimizer.restore({key: value for key, value in dense.items() if key != "values"})
        buffers = buffers_of(work.reports) or run.start_state.buffers
        adopt_buffers(learner, buffers)
        kept = kept_of(work.reports)
        state = {
            **state,
            "batches": parts[0]["batches"],
            "arrangement": {"mode": config.mode.name, **vars(run.processes.config.cluster)},
            "keep": {str(worker): sorted(files) for worker, files in kept.items()},
        }
        attached = saving.capture(learner, metrics, state)
        attached["config.yaml"] = dump(run_folder.at_origin(config)).encode()
        for worker, files in kept.items():
            attached |= {kept_name(worker, name): content for name, content in files.items()}
        out = work.writer
        final = checkpoint.step_folder(out.path.parent, state["step"])
        out.path = final
        for name, content in attached.items():
            out.put(name, content)
        for part in parts:
            for name, facts in part["files"].items():
                out.adopt(name, facts)
        changed, deleted = [part["changed"] for part in parts], [part["deleted"] for part in parts]
        checkpoint.write_changed(out, np.concatenate(changed), np.concatenate(deleted))
        out.facts = {
            "table": checkpoint.portable(run.table),
            **checkpoint.count_facts([part["counts"] for part in parts]),
            "row_files": run.processes.row_files,
            "tracking": any(part["tracking"] for part in parts),
            **checkpoint.memory_facts([part["memory"] for part in parts]),
            "step": state["step"],
            **learner.facts,
        }
        if final.exists():  # the same batches, but an epoch has ended since
            atomic.remove(final)
        out.__exit__(None, None, None)
        epoch = work.epoch if config.run.keep_epochs else None
        best = keeps_best(config) and state["progress"]["best_step"] == state["step"]
        checkpoint.register(final, config.run.keep, epoch, best)
        return final, StartState(
            str(final),
            {key: run.table[key] for key in saving.FREE if key in run.table},
            dense,
            metrics,
            state["step"],
            state["rows"],
            state["batches"],
            state["reader"],
            kept,
            buffers,
            state["progress"],
            {name: report["steps"] for name, report in work.reports.items()},
            more_of(state),
        )

    def now(self, epoch: int | None, hold: bool = False, brief: bool = False) -> None:
        """Take a checkpoint now and wait until it is written. With `hold`, the workers pause after it. See `begin`."""
        self.wait()
        self.begin(epoch, share=1.0, hold=hold, brief=brief)
        self.wait()

    def pause(self, files: bool) -> dict[str, WorkerCheckpoint]:
        """Stop all workers between the same batches. Return what they have trained; the shards have applied just that.

        This is a checkpoint that the shards do not write. It needs one in progress to be complete. `files`: with those of the mode.
        """
        assert self.work is None
        processes = self.run.processes
        self.number += 1
        processes.call(processes.shards, "drop_checkpoint", self.number)
        calls = {name: actor.checkpoint.remote(self.number, True, files) for name, actor in processes.trainers.items()}
        limit = self.run.config.cluster.timeout
        reports: dict[str, WorkerCheckpoint] = {}
        waiting, begin = {call: name for name, call in calls.items()}, time.monotonic()
        while waiting:
            for call in processes.actor_group.ray.wait(list(waiting), timeout=TICK_S)[0]:
                name = waiting.pop(call)
                reports[name] = processes.result(name, call)
            processes.poll()
            processes.actor_group.check()
            if waiting and time.monotonic() - begin > limit:
                raise ProcessFailedError(next(iter(waiting.values())), f"it did not pause within {limit:.0f} s")
        return reports

    def hurry(self) -> bool:
        """Write the checkpoint in progress at full speed, without waiting for it. Return whether there is one."""
        if self.work is not None:
            for actor in self.run.processes.shards.values():
                actor.hurry.remote(self.work.number)
        return self.work is not None or bool(self._dropped_calls)

    def wait(self) -> None:
        """Write the checkpoint in progress at full speed and wait for it."""
        self.hurry()
        while (work := self.work) is not None:
            if pending := list(work.pending):
                self.run.processes.actor_group.ray.wait(pending, timeout=TICK_S)
            self.run.processes.poll()
            self.run.processes.actor_group.check()
            self.evaluate_if_due()
            self.complete_if_ready()

    def last(self) -> None:
        """Take the last checkpoint of the run, unless the newest one contains everything."""
        run = self.run
        epoch = run.progress.epoch - 1 if run.progress.epoch and run.signal is None else None
        saved = run.path is not None and run.start_state.progress == vars(run.progress)
        if run.processes.count() != run.start_state.steps or not saved:
            self.now(epoch)
        elif epoch is not None and run.config.run.keep_epochs and run.path is not None:
            checkpoint.label_epoch(run.path, epoch)

    def drop(self) -> None:
        """Discard the checkpoint in progress."""
        if self.work is not None:
            self.work.drop()
            self._dropped_calls = list(self.work.calls.values())
            for actor in self.run.processes.shards.values():
                actor.drop_checkpoint.remote(self.work.number)
            for actor in self.run.processes.trainers.values():
                actor.release.remote()
            self.work = None

    def forget(self) -> None:
        """Forget calls of discarded checkpoints: their processes have started again."""
        self._dropped_calls = []


def buffers_of(reports: Mapping[str, WorkerCheckpoint]) -> bytes:
    """Return the buffers of the network, which the first worker reports."""
    return next((report["buffers"] for report in reports.values() if report["buffers"]), b"")


def optimizer_of(reports: Mapping[str, WorkerCheckpoint]) -> dict[str, torch.Tensor]:
    """Return the mean state of the dense optimizers of the workers; empty if the shards run the optimizer."""
    states = [report["optimizer"] for report in reports.values() if report["optimizer"]]
    return mean_state(states) if states else {}


def kept_of(reports: Mapping[str, WorkerCheckpoint]) -> dict[int, dict[str, bytes]]:
    """Return the files of the mode, by worker."""
    return {int(name.split()[1]): report["keep"] for name, report in reports.items() if report["keep"]}


@dataclass
class CheckpointRound:
    """A checkpoint in progress: the calls for its parts, and the parts that have arrived."""

    number: int
    writer: atomic.FolderWriter
    epoch: int | None
    """The epoch that ends with this checkpoint, if one does."""
    evaluate: bool
    """Whether the model of this moment must still be evaluated."""
    speed: float
    """Rows per second before the checkpoint began."""
    calls: dict[str, Call] = field(default_factory=dict)
    """The requests for the parts, by process."""
    done: dict[str, WorkerCheckpoint | WrittenCheckpoint] = field(default_factory=dict)
    begin: float = field(default_factory=time.monotonic)

    @property
    def pending(self) -> dict[Call, str]:
        """The calls that have not ended, each with its process."""
        return {call: name for name, call in self.calls.items() if name not in self.done}

    @property
    def reports(self) -> dict[str, WorkerCheckpoint]:
        """The parts of the workers."""
        return {name: cast(WorkerCheckpoint, part) for name, part in self.done.items() if name.startswith("worker")}

    def drop(self) -> None:
        """Delete the files written so far."""
        self.writer.__exit__(RuntimeError, RuntimeError("dropped"), None)
