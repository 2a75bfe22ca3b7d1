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
        self.losses: list[str] = []

    def _count(self, loss: ProcessFailedError) -> None:
        checkpoints = self.run.checkpoints
        checkpoints.losses += 1
        self.run.overview.losses += 1
        self.losses.append(str(loss))
        self.run.monitor.log(f"lost {loss}")
        checkpoints.drop()
        if checkpoints.losses > self.run.config.cluster.max_failures:
            raise ClusterError(
                f"{checkpoints.losses} failures without a new checkpoint; the last one: {loss}",
                f"see {self.run.logs}; fix the cause and resume the run",
            )

    def roll_back(self, loss: ProcessFailedError) -> None:
        """Replace the failed process and put all processes back to the last checkpoint."""
        run = self.run
        while True:
            if run.signal is not None:
                raise StoppedError(f"lost {loss}")
            self._count(loss)
            run.processes.generation += 1
            run.progress = RunProgress(**run.base.progress)
            begin, before = time.monotonic(), run.overview.rows
            run.checkpoints.forget()
            try:
                run.waits = True
                for actor in run.processes.trainers.values():
                    actor.abandon.remote(run.processes.generation - 1)
                run.processes.replace(loss.name)
                run.begin()
            except ProcessFailedError as another:
                loss = another
                continue
            finally:
                run.waits = False
            again = before - run.base.rows
            run.monitor.log(
                f"back to step {run.base.steps:,} after {time.monotonic() - begin:.1f} s; "
                f"about {max(0, again):,} rows are trained on again"
            )
            return

    def go_on_without(self, loss: ProcessFailedError, calls: dict[str, Call], tasks: dict[str, Assignment]) -> None:
        """Replace the failed process at the last checkpoint while the others continue (`on_failure: continue`).

        What the failed process had learned since then is lost. A log line records how much.
        """
        self._count(loss)
        known = self.run.overview.shards.get(loss.name)
        self.run.processes.replace(loss.name)
        if loss.name.startswith("shard"):
            self._return_shard(loss.name, 0 if known is None else known["pushes"])
        elif loss.name in self.run.processes.trainers:
            calls[loss.name] = self._return_worker(loss.name, tasks[loss.name])
        else:
            raise loss  # other workers take its files, from the last checkpoint on

    def _return_shard(self, name: str, pushes: int) -> None:
        run, processes = self.run, self.run.processes
        processes.call(
            {name: processes.actor_group.actors[name]}, "drop_checkpoint", run.checkpoints.number
        )  # late marks of it may still arrive
        processes.load([name], run.base)
        processes.call(processes.trainers, "move", int(name.split()[1]), processes.actor_group.facts[name]["endpoints"])
        run.monitor.log(
            f"{name} is back with the rows of step {run.base.steps:,}; it had applied {pushes:,} pushes since its start"
        )

    def _return_worker(self, name: str, task: Assignment) -> Call:
        run, processes = self.run, self.run.processes
        seen = processes.call(processes.shards, "learned").values()
        links, index = links_of(run.config), int(name.split()[1])
        mine = range(index * links, (index + 1) * links)
        learned = [max(found.get(peer, 0) for found in seen) for peer in mine]
        processes.connect([name], run.base, learned)
        skip = max(0, sum(learned) - run.base.worker_steps.get(name, 0))
        run.monitor.log(
            f"{name} continues after {skip:,} batches since the last checkpoint; what it had not sent is lost"
        )
        return processes.actor_group.actors[name].train.remote(replace(self._share(task), skip=skip))

    def _share(self, task: Assignment) -> Assignment:
        """Return the assignment of a worker as of the last checkpoint."""
        base = self.run.base
        states = base.reader["streams"] if base.reader["epoch"] == task.epoch else {}
        streams = [replace(s, state=states.get(str(s.number), s.state)) for s in task.streams]
        left = [s for s in streams if str(s.number) not in states or s.state is not None]
        return replace(task, streams=tuple(left), saved={})
