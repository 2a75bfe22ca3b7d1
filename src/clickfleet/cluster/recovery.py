"""Recover from the failure of a process: roll all processes back to the last checkpoint, or only the failed one."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from clickfleet.cluster.assignments import Assignment, links_of
from clickfleet.cluster.processes import Call, ProcessFailedError, StoppedError
from clickfleet.errors import ClusterError
from clickfleet.training.loop import RunProgress

if TYPE_CHECKING:
    from clickfleet.cluster.driver import Driver


class Recovery:
    """Count the failures of a run and recover from them."""

    def __init__(self, run: Driver) -> None:
        self.run = run

    def _count(self, failure: ProcessFailedError) -> None:
        checkpoints = self.run.checkpoints
        checkpoints.failures += 1
        self.run.overview.failures += 1
        self.run.monitor.log(str(failure))
        checkpoints.drop()
        if checkpoints.failures > self.run.config.cluster.max_failures:
            raise ClusterError(
                f"{checkpoints.failures} failures without a new checkpoint; the last one: {failure}",
                f"see {self.run.logs}; fix the cause and resume the run",
            )

    def roll_back(self, failure: ProcessFailedError) -> None:
        """Replace the failed process and put all processes back to the last checkpoint."""
        run = self.run
        while True:
            if run.signal is not None:
                raise StoppedError(str(failure))
            self._count(failure)
            run.processes.generation += 1
            run.progress = RunProgress(**run.start_state.progress)
            begin, before = time.monotonic(), run.overview.rows
            run.checkpoints.forget()
            try:
                run.waits = True
                for actor in run.processes.trainers.values():
                    actor.abandon.remote(run.processes.generation - 1)
                for name in dict.fromkeys([failure.name, *run.processes.failed()]):
                    run.processes.replace(name)
                run.begin()
            except ProcessFailedError as another:
                failure = another
                continue
            finally:
                run.waits = False
            run.monitor.forget_after(run.start_state.steps)
            run.monitor.log(
                f"rolled back to step {run.start_state.steps:,} in {time.monotonic() - begin:.1f} s; "
                f"about {max(0, before - run.start_state.rows):,} rows are trained on again"
            )
            return

    def continue_without(
        self, failure: ProcessFailedError, calls: dict[str, Call], tasks: dict[str, Assignment]
    ) -> None:
        """Replace the failed process at the last checkpoint while the others continue (`on_failure: continue`).

        What the failed process had learned since then is lost. A log line records how much.
        """
        name = failure.name
        self._count(failure)
        status = self.run.overview.shards.get(name)
        self.run.processes.replace(name)
        if name.startswith("shard"):
            self._restart_shard(name, 0 if status is None else status["pushes"])
        elif name in self.run.processes.trainers:
            calls[name] = self._restart_worker(name, tasks[name])
        else:
            raise failure  # other workers take its files, from the last checkpoint on

    def _restart_shard(self, name: str, pushes: int) -> None:
        run, processes = self.run, self.run.processes
        actor = {name: processes.actor_group.actors[name]}
        processes.call(actor, "drop_checkpoint", run.checkpoints.number)  # its marks may still arrive
        processes.load([name], run.start_state)
        processes.call(processes.trainers, "move", int(name.split()[1]), processes.address(name))
        run.monitor.log(
            f"{name} restarted with the rows of step {run.start_state.steps:,}; it had applied {pushes:,} pushes since its start"
        )

    def _restart_worker(self, name: str, task: Assignment) -> Call:
        run, processes = self.run, self.run.processes
        by_shard = processes.call(processes.shards, "learned").values()
        links, index = links_of(run.config), int(name.split()[1])
        peers = range(index * links, (index + 1) * links)
        learned = [max(of_shard.get(peer, (0, 0)) for of_shard in by_shard) for peer in peers]
        processes.connect([name], run.start_state, learned)
        skip = max(0, sum(batches for _, batches in learned) - run.start_state.worker_steps.get(name, 0))
        run.monitor.log(
            f"{name} continues after {skip:,} batches since the last checkpoint; what it had not sent is lost"
        )
        return processes.actor_group.actors[name].train.remote(replace(self._rest(task), skip=skip))

    def _rest(self, task: Assignment) -> Assignment:
        """Return what was left of an assignment at the last checkpoint."""
        reader = self.run.start_state.reader
        states = reader["streams"] if reader["epoch"] == task.epoch else {}
        streams = [replace(s, state=states.get(str(s.number), s.state)) for s in task.streams]
        left = [s for s in streams if str(s.number) not in states or s.state is not None]
        return replace(task, streams=tuple(left), saved={})
