"""What follows the loss of a process: everyone goes back to the last cut, or only the lost one does and the rest goes on."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from clickfleet.cluster.fleet import LostError, StoppedError
from clickfleet.cluster.streams import Assignment, links_of
from clickfleet.errors import ClusterError
from clickfleet.session import Progress

if TYPE_CHECKING:
    from clickfleet.cluster.driver import Driver


class Recovery:
    """Counts the losses of a run and mends them."""

    def __init__(self, run: Driver) -> None:
        self.run = run
        self.losses: list[str] = []

    def _count(self, loss: LostError) -> None:
        cuts = self.run.cuts
        cuts.losses += 1
        self.run.overview.losses += 1
        self.losses.append(str(loss))
        self.run.watch.log(f"lost {loss}")
        cuts.drop()
        if cuts.losses > self.run.config.cluster.max_losses:
            raise ClusterError(
                f"{cuts.losses} losses without a new checkpoint; the last one: {loss}",
                f"see {self.run.logs}; go on with --resume once the cause is found",
            )

    def roll_back(self, loss: LostError) -> None:
        """Puts everything back to the last cut, with a new process for the lost one."""
        run = self.run
        while True:
            if run.signal is not None:
                raise StoppedError(f"lost {loss}", "go on from the last checkpoint with --resume")
            self._count(loss)
            run.crew.run_epoch += 1
            run.progress = Progress(**run.base.progress)
            begin, before = time.monotonic(), run.overview.rows
            run.cuts.forget()
            try:
                run.waits = True
                for actor in run.crew.trainers.values():
                    actor.abandon.remote(run.crew.run_epoch - 1)
                run.crew.replace(loss.name)
                run.begin()
            except LostError as another:
                loss = another
                continue
            finally:
                run.waits = False
            again = before - run.base.rows
            run.watch.log(
                f"back to step {run.base.steps:,} after {time.monotonic() - begin:.1f} s; "
                f"about {max(0, again):,} rows are trained on again"
            )
            return

    def go_on_without(self, loss: LostError, calls: dict[str, Any], tasks: dict[str, Assignment]) -> None:
        """on_loss continue: only the lost process goes back to the last cut; what it had learned since is lost, and shown."""
        self._count(loss)
        known = self.run.overview.shards.get(loss.name, {})
        self.run.crew.replace(loss.name)
        if loss.name.startswith("shard"):
            self._return_shard(loss.name, known.get("pushes", 0))
        elif loss.name in self.run.crew.trainers:
            calls[loss.name] = self._return_worker(loss.name, tasks[loss.name])
        else:
            raise loss  # its files go to others: from the last cut

    def _return_shard(self, name: str, pushes: int) -> None:
        run, crew = self.run, self.run.crew
        crew.tell({name: crew.fleet.actors[name]}, "drop_cut", run.cuts.number)  # marks of it may still come
        crew.load([name], run.base)
        crew.tell(crew.trainers, "move", int(name.split()[1]), crew.fleet.facts[name]["endpoints"])
        run.watch.log(
            f"{name} is back with the rows of step {run.base.steps:,}; it had learned {pushes:,} pushes since it was started"
        )

    def _return_worker(self, name: str, task: Assignment) -> Any:
        run, crew = self.run, self.run.crew
        seen = crew.tell(crew.shards, "learned").values()
        links, index = links_of(run.config), int(name.split()[1])
        mine = range(index * links, (index + 1) * links)
        learned = [max(found.get(peer, 0) for found in seen) for peer in mine]
        crew.connect([name], run.base, learned)
        skip = max(0, sum(learned) - run.base.worker_steps.get(name, 0))
        run.watch.log(f"{name} goes on after {skip:,} batches since the last cut; what it had not sent is lost")
        return crew.fleet.actors[name].train.remote(replace(self._share(task), skip=skip))

    def _share(self, task: Assignment) -> Assignment:
        """The streams of a worker as the last cut has them."""
        base = self.run.base
        states = base.reader["streams"] if base.reader["epoch"] == task.epoch else {}
        streams = [replace(s, state=states.get(str(s.number), s.state)) for s in task.streams]
        left = [s for s in streams if str(s.number) not in states or s.state is not None]
        return replace(task, streams=tuple(left), saved={})
