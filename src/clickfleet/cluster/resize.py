"""Change the number of workers and shards of a run while it trains.

New processes start while the others train. When they are there, all workers pause between the same batches. A change of workers
needs no checkpoint: the shards keep their rows, and what is left of the streams is divided among the workers that there are now.
A change of shards goes through a checkpoint, which the new shards load. A failure meanwhile returns the run to its last checkpoint,
with the new processes if the change had begun, else with the old ones.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from clickfleet.cluster.control import (
    ChangeAnswer,
    ChangeFacts,
    ClusterStatus,
    ControlFolder,
    SizeRequest,
    process_status,
)
from clickfleet.cluster.process import ProcessFacts
from clickfleet.cluster.processes import Actor, Call, ProcessFailedError, counted
from clickfleet.errors import ClusterError
from clickfleet.store.checkpoint import MAX_SHARDS

if TYPE_CHECKING:
    from clickfleet.cluster.driver import Driver

TICK_S = 0.2
STATUS_S = 1.0
"""Time between two versions of the status."""
ROOM_S = 5.0
"""Time between two looks for free CPUs, if the run chooses the number of its workers."""
RETRY_S = 60.0
"""Time until the next look, after new workers did not start."""


@dataclass
class Change:
    """A change in progress."""

    text: str
    workers: list[int]
    shards: int
    request: str | None = None
    """The request that it answers; None if the run decided itself."""
    actors: dict[str, Actor] = field(default_factory=dict)
    """Processes that it starts."""
    calls: dict[str, Call] = field(default_factory=dict)
    facts: dict[str, ProcessFacts] = field(default_factory=dict)
    loans: dict[str, Call] | None = None
    """The new workers that wait for the state of another one. None: not asked for yet."""
    begun: float = field(default_factory=time.monotonic)
    paused: float = 0.0
    """When the workers were asked to pause."""
    applied: bool = False
    """Whether the run has its new processes: it does not go back to the old ones."""


class Resizing:
    """The changes of a run, one at a time."""

    def __init__(self, run: Driver) -> None:
        self.run = run
        self.control = ControlFolder(run.folder.parent)
        self.fixed = "the processes of this job are fixed by their roles" if run.config.cluster.endpoints else ""
        """Why this run cannot be resized."""
        self._change: Change | None = None
        self._last: ChangeFacts | None = None
        self._ticked = self._written = self._looked = 0.0

    def tick(self) -> None:
        """Serve requests, and take the change in progress one step further. Call it several times a second."""
        now = time.monotonic()
        if now - self._ticked < TICK_S or self.run.signal is not None:
            return
        self._ticked = now
        if now - self._written >= STATUS_S:
            self._write()
        change = self._change = self._change or self._next() or self._growth()
        if change is None:
            return
        if change.applied:
            self._conclude(change)
        elif self._started(change) and self._lent(change) and not self.run.checkpoints.hurry():
            self._apply(change)

    def _next(self) -> Change | None:
        """Return the next change that is asked for. Answer requests that cannot be met."""
        for name, request in self.control.requests().items():
            try:
                return self._begin(self._planned(request, name))
            except ClusterError as error:
                self.run.monitor.log(f"{request}: {error}")
                self.control.answer(name, refusal(error))
        return None

    def _growth(self) -> Change | None:
        """Return a change to more workers, if the run chooses their number and the Ray cluster has room for more."""
        processes, now = self.run.processes, time.monotonic()
        limits, group, count = processes.limits, processes.actor_group, len(processes.workers)
        if limits is None or count >= limits.most or now - self._looked < ROOM_S:
            return None
        self._looked = now
        more = min(int(group.free_cpus()) // processes.config.cluster.threads, limits.most - count)
        if more < 1:
            return None
        return self._begin(Change(f"grow to {count + more} workers", self._with(more), processes.spread.shards))

    def _with(self, more: int) -> list[int]:
        """Return the workers of the run and `more` others."""
        workers = self.run.processes.workers
        free = [index for index in range(len(workers) + more) if index not in workers]
        return sorted([*workers, *free[:more]])

    def _planned(self, request: SizeRequest, name: str) -> Change:
        processes = self.run.processes
        workers, shards, number = list(processes.workers), processes.spread.shards, request.number
        if self.fixed:
            raise ClusterError(f"cannot {request}: {self.fixed}", "stop the run, and resume it with other numbers")
        if number < 1:
            raise ClusterError(f"cannot {request}", "give a number of at least 1")
        if processes.limits is not None and request.kind != "shards":
            raise ClusterError(
                f"cannot {request}: cluster.workers is {processes.limits}, so the run uses what there is room for",
                "start or stop Ray nodes, or resume the run with one number",
            )
        if request.kind == "add-workers":
            workers = self._with(number)
        elif request.kind == "remove-workers":
            if number >= len(workers):
                raise ClusterError(
                    f"cannot remove {number} of {len(workers)} workers",
                    "one must stay; stop the run with SIGTERM to end it",
                )
            workers = workers[:-number]
        elif request.kind == "shards":
            shards = number
            if shards > MAX_SHARDS:
                raise ClusterError(
                    f"cannot divide the rows among {shards} shards", f"at most {MAX_SHARDS} are supported"
                )
        else:
            raise ClusterError(f"unknown change {request.kind!r}", "use `clickfleet cluster`")
        return Change(str(request), workers, shards, name)

    def _begin(self, change: Change) -> Change:
        """Start the new processes of a change."""
        processes, group = self.run.processes, self.run.processes.actor_group
        here = set(processes.names)
        names = [f"shard {i}" for i in range(change.shards)] + [f"worker {i}" for i in change.workers]
        names = [name for name in names if name not in here]
        if names and (not group.private or processes.limits is not None):
            free, threads = group.free_cpus(), processes.config.cluster.threads
            needed = sum(1 if name.startswith("shard") else threads for name in names)
            if needed > free:
                raise ClusterError(
                    f"no free CPUs for {counted(names)}: they need {needed}, and the Ray cluster has {free:g}",
                    "start more Ray nodes first, or ask for fewer",
                )
        self.run.monitor.log(f"{change.text}: " + (f"starting {counted(names)}" if names else "begins"))
        change.actors = {name: processes.spawn(name, extra=True) for name in names}
        change.calls = {name: actor.process.remote() for name, actor in change.actors.items()}
        return change

    def _started(self, change: Change) -> bool:
        """Return whether the new processes have started. Give the change up if they do not start in time."""
        processes, limit = self.run.processes, self.run.config.cluster.start_timeout
        try:
            for name, call in list(change.calls.items()):
                if processes.actor_group.ray.wait([call], timeout=0)[0]:
                    change.facts[name] = processes.result(name, call)
                    del change.calls[name]
            if change.calls and time.monotonic() - change.begun > limit:
                raise ClusterError(
                    f"{', '.join(change.calls)} did not start within {limit:.0f} s",
                    "see `ray status`; raise cluster.start_timeout if it is only slow",
                )
        except (ProcessFailedError, ClusterError) as error:
            self._give_up(change, error if isinstance(error, ClusterError) else ClusterError(str(error)))
            return False
        return not change.calls

    def _lent(self, change: Change) -> bool:
        """Return whether the new workers have the state of another one, if the mode has any. The others train meanwhile."""
        run, group = self.run, self.run.processes.actor_group
        if change.loans is None:
            joining = {name: actor for name, actor in change.actors.items() if name.startswith("worker")}
            lender = next((actor for name, actor in run.processes.trainers.items() if name not in joining), None)
            change.loans = {}
            if joining and lender is not None and run.lasting and not run.untouched:
                files = lender.lend.remote()  # from worker to worker, not through the driver
                change.loans = {name: actor.borrow.remote(files) for name, actor in joining.items()}
        for name, call in list(change.loans.items()):
            if group.ray.wait([call], timeout=0)[0]:
                del change.loans[name]
                try:
                    run.processes.result(name, call)
                except (ProcessFailedError, ClusterError) as error:  # a worker that has failed is noticed elsewhere
                    run.monitor.log(f"{name} begins without the state of another worker: {error}")
        return not change.loans

    def _give_up(self, change: Change, error: ClusterError) -> None:
        self._end(change)
        self._change, self._looked = None, time.monotonic() + RETRY_S
        self.run.monitor.log(f"{change.text}: given up, {error}")
        if change.request is not None:
            self.control.answer(change.request, refusal(error))

    def _end(self, change: Change) -> None:
        """End the new processes of a change."""
        for actor in change.actors.values():
            self.run.processes.actor_group.ray.kill(actor, no_restart=True)

    def _apply(self, change: Change) -> None:
        """Pause the workers, and continue with the new processes."""
        run, processes = self.run, self.run.processes
        change.paused = change.paused or time.monotonic()
        if change.shards == processes.spread.shards:
            reports = {} if run.untouched else run.checkpoints.pause(files=not run.lasting)
            run.check_positions(reports)
            self._adopt(change)
            run.rearrange(reports)
            run.checkpoints.wanted = True
        else:
            run.checkpoints.now(None, hold=True, brief=run.lasting)
            self._adopt(change)
            run.reload()
            run.checkpoints.wanted = run.lasting

    def _adopt(self, change: Change) -> None:
        processes = self.run.processes
        processes.resize(change.workers, change.shards)
        change.applied = True  # a new process that fails from here on is replaced
        processes.adopt(change.actors, change.facts)

    def _conclude(self, change: Change, ended: bool = False) -> None:
        """Answer the request once the new workers have trained something, or the run has ended."""
        run = self.run
        if run.trains and run.overview.rows <= run.overview.start.rows and not ended:
            return
        self._change = None
        now = time.monotonic()
        facts: ChangeFacts = {
            "change": change.text,
            "workers": len(run.processes.workers),
            "shards": run.processes.spread.shards,
            "seconds": now - change.begun,
            "stopped_s": now - change.paused,
            "time": time.time(),
        }
        self._last = facts
        run.monitor.log(
            f"{change.text}: done after {facts['seconds']:.1f} s; {facts['workers']} workers and {facts['shards']} shards; "
            f"{facts['stopped_s']:.1f} s without progress"
        )
        run.monitor.record("resize", {"step": run.overview.steps, "epoch": run.overview.epoch, **facts})
        if change.request is not None:
            self.control.answer(change.request, {"done": facts})
        self._write()

    def _write(self) -> None:
        self._written = time.monotonic()
        run, processes = self.run, self.run.processes
        facts, overview = processes.actor_group.facts, processes.overview
        counts: dict[str, Any] = {**overview.shards, **overview.workers}
        waiting = [str(request) for name, request in self.control.requests().items() if name != self._request]
        status: ClusterStatus = {
            "time": time.time(),
            "mode": run.config.mode.name,
            "epoch": overview.epoch,
            "step": overview.steps,
            "rows": overview.rows,
            "generation": processes.generation,
            "failures": overview.failures,
            "workers": len(processes.workers),
            "shards": processes.spread.shards,
            "range": None if processes.limits is None else [int(processes.limits), processes.limits.most],
            "processes": [process_status(name, facts.get(name), counts.get(name, {})) for name in processes.names],
            "change": None if self._change is None else self._change.text,
            "waiting": waiting,
            "last_change": self._last,
        }
        self.control.write(status)

    @property
    def _request(self) -> str | None:
        return None if self._change is None else self._change.request

    def open(self) -> None:
        """Begin to accept requests."""
        self.control.open()
        self._write()

    def close(self) -> None:
        """Answer all waiting requests: the run ends."""
        if self._change is not None and self._change.applied:
            self._conclude(self._change, ended=True)
        elif self._change is not None:
            self._end(self._change)
        self.control.close("the run has ended")


def refusal(error: ClusterError) -> ChangeAnswer:
    message, _, remedy = str(error).partition("\n")
    return {"error": message, "remedy": remedy.strip()}
