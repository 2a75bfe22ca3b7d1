"""The processes of a run: start shards and workers, load a state into them, connect, call, poll and end them."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, cast

import torch

from clickfleet.cluster import ray_start
from clickfleet.cluster.assignments import links_of
from clickfleet.cluster.authentication import ShardAddress
from clickfleet.cluster.process import ProcessFacts, log_name
from clickfleet.cluster.ray_runtime import check_there, ray_module, renew_handlers
from clickfleet.cluster.ray_start import RayStart
from clickfleet.cluster.shard import rules_of
from clickfleet.cluster.shard_client import AbandonedError
from clickfleet.cluster.shard_server import CheckpointOrigin, ShardActor
from clickfleet.cluster.start_state import StartState, split_dense
from clickfleet.cluster.status import ClusterProgress, ShardStatus, WorkerStatus
from clickfleet.cluster.wire import new_run
from clickfleet.cluster.worker import WorkerActor
from clickfleet.config.load import Config
from clickfleet.config.sections import WorkerRange
from clickfleet.data.schema import Schema
from clickfleet.errors import ClusterError
from clickfleet.store import checkpoint
from clickfleet.training.sharding import Spread

POLL_S = 0.5
FIRST_POLL_S = 0.1
"""Time between two polls until the first step."""
RAY_POLL_S = 0.1
ROOM_S = 3.0
"""How long to wait for CPUs that a failed process has used."""
PING_S = 3.0
"""Time limit for the answers of processes that are asked whether they are alive."""
Call = Hashable
"""The handle of a remote call. `ActorGroup.result` returns its result."""


class RemoteMethod(Protocol):
    """A method of an actor."""

    def remote(self, *arguments: object) -> Call: ...


class Actor(Protocol):
    """The handle of a Ray actor."""

    def __getattr__(self, method: str) -> RemoteMethod: ...


class ProcessGroup:
    """The shards and workers of a run, and its current generation."""

    def __init__(self, config: Config, schema: Schema, spread: Spread, logs: str, log: Log) -> None:
        metrics = replace(config.train.metrics, functions={})  # the driver calls them
        config = replace(config, train=replace(config.train, metrics=metrics))
        self.config, self.schema, self.spread = config, schema, spread
        self.log, self._logs = log, logs
        self.actor_group = ActorGroup(config, log)
        self.overview = ClusterProgress(config.train.metrics.thresholds)
        self.workers = list(range(config.cluster.workers))
        self.limits = config.cluster.workers if isinstance(config.cluster.workers, WorkerRange) else None
        """The smallest and largest number of workers, if the room in the Ray cluster decides between them."""
        self.generation = 0
        self._run = new_run()
        self._keys: dict[str, bytes] = {}
        """The public key of each process."""
        self._polls: dict[str, tuple[Call, float]] = {}
        self._polled = 0.0

    @property
    def row_files(self) -> int:
        """The number of row files of a checkpoint."""
        return checkpoint.row_files(self.spread.shards)

    def resize(self, workers: Sequence[int], shards: int) -> None:
        """Change which workers there are, and the number of shards, from the next generation on."""
        self.workers = list(workers)
        self.spread = Spread(shards, self.spread.width, self.spread.floats)
        cluster = replace(self.config.cluster, workers=len(self.workers), shards=shards)
        self.config = self.actor_group.config = replace(self.config, cluster=cluster)

    @property
    def who(self) -> tuple[int, bytes, int]:
        return int(self.schema.hash[:15], 16), self._run, self.generation

    @property
    def peers(self) -> list[int]:
        links = links_of(self.config)
        return [worker * links + i for worker in self.workers for i in range(links)]

    @property
    def shards(self) -> dict[str, Actor]:
        return self.actor_group.named("shard")

    @property
    def trainers(self) -> dict[str, Actor]:
        """The workers' actors."""
        return self.actor_group.named("worker")

    def start(self) -> None:
        """Start all processes together and wait for them."""
        self.actor_group.start()
        if self.limits is not None:
            room = int(self.actor_group.free_cpus() - self.spread.shards) // self.config.cluster.threads
            count = min(max(room, int(self.limits)), self.limits.most)
            self.log(f"room for {max(room, 0)} workers: {count} of {self.limits} start")
            self.resize(range(count), self.spread.shards)
        names = self.names
        left = max(0.0, self.actor_group.deadline - time.monotonic())
        self.log(f"waiting for {counted(names)} to start, for {left:.0f} s at most …")
        self.create(names, left)

    @property
    def names(self) -> list[str]:
        """The processes that the run is to have."""
        return [f"shard {i}" for i in range(self.spread.shards)] + [f"worker {i}" for i in self.workers]

    def create(self, names: Iterable[str], timeout_s: float | None = None, extra: bool = False) -> None:
        calls, keys = {}, {}
        for name in names:
            self.actor_group.actors[name] = actor = self.spawn(name, extra)
            calls[name], keys[name] = actor.process.remote(), actor.key.remote()
        limit = self.config.cluster.start_timeout if timeout_s is None else timeout_s
        self.actor_group.facts |= self.actor_group.wait_for(calls, "start", limit)
        self._keys |= self.actor_group.wait_for(keys, "making keys", limit)
        self.admit()

    def admit(self) -> None:
        """Let the shards accept the workers of now, and no others."""
        self.call(self.shards, "accept", [self._keys[name] for name in self.trainers])

    def spawn(self, name: str, extra: bool = False) -> Actor:
        """Start a process and do not wait for it. `extra`: not one of those that the run begins with.

        A private Ray counts CPUs only for the latter. It is for any number of processes, as the user wants.
        """
        kind, number = name.split()
        group, free = self.actor_group, extra and self.actor_group.private and self.limits is None
        if kind == "shard":
            rules = rules_of(self.config, self.row_files)
            arguments = (int(number), self.config, rules, self.who, self._logs)
            return group.spawn(name, ShardActor, *arguments, cpus=0 if free else 1)
        threads = 0 if free else self.config.cluster.threads
        return group.spawn(name, WorkerActor, int(number), self.config, self.schema.to_dict(), self._logs, cpus=threads)

    def rearrange(self, optimizer: dict[str, torch.Tensor], buffers: bytes, trained: int) -> None:
        """Begin a new generation with the current workers, after so many batches. The shards keep their rows."""
        self.generation += 1
        self.call(self.shards, "begin", self.who, self.peers)
        self._connect(self.trainers, optimizer, buffers, trained, lasts=True)
        self._polls = {}

    def adopt(self, actors: Mapping[str, Actor], facts: Mapping[str, ProcessFacts]) -> None:
        """Add processes that have started, and end those that the run no longer has."""
        self.actor_group.actors |= actors
        self.actor_group.facts |= facts
        for name in [name for name in self.actor_group.actors if name not in self.names]:
            self.actor_group.end(name)
            self.forget(name)
            self.actor_group.facts.pop(name, None)
            self._keys.pop(name, None)
        self._keys |= self.call(actors, "key")
        self.admit()

    def forget(self, name: str) -> None:
        """Expect no more answers of a process that has ended."""
        self._polls.pop(name, None)
        self.overview.workers.pop(name, None)
        self.overview.shards.pop(name, None)

    def begin(self, start: StartState, lasts: bool = False) -> None:
        """Put all processes into the start state, in the current generation. `lasts`: the workers are in it already."""
        self.load(self.shards, start)
        self._connect(self.trainers, self.optimizer_of(start), start.buffers, start.batches, lasts=lasts)
        self._polls = {}

    def load(self, shards: Iterable[str], start: StartState) -> None:
        parts = split_dense(self.spread, start.dense)
        calls = {}
        for name in shards:
            dense = parts[int(name.split()[1])]
            origin = CheckpointOrigin(start.path, start.table, dense, start.batches, self.spread.shards)
            calls[name] = self.actor_group.actors[name].load.remote(origin, self.who, self.peers)
        self.actor_group.facts |= self.actor_group.wait_for(
            calls, "loading", max(self.config.cluster.start_timeout, 600.0)
        )

    def connect(self, workers: Iterable[str], start: StartState, learned: Sequence[tuple[int, int]] = ()) -> None:
        """Connect workers to the shards. `learned`: messages and batches that they have applied of each link of a failed worker."""
        self._connect(workers, self.optimizer_of(start), start.buffers, start.batches, learned)

    @staticmethod
    def optimizer_of(start: StartState) -> dict[str, torch.Tensor]:
        """Return the state of the dense optimizer, for modes whose workers run it; empty at the start of a run."""
        return {key: tensor for key, tensor in start.dense.items() if key != "values"} if start.batches else {}

    def _connect(
        self,
        workers: Iterable[str],
        optimizer: dict[str, torch.Tensor],
        buffers: bytes,
        trained: int,
        learned: Sequence[tuple[int, int]] = (),
        lasts: bool = False,
    ) -> None:
        shards = [self.address(name) for name in self.shards]
        arguments = (shards, self.who, optimizer, buffers, learned, self.workers, trained, lasts)
        calls = {name: self.actor_group.actors[name].connect.remote(*arguments) for name in workers}
        self.actor_group.wait_for(calls, "connecting", self.config.cluster.start_timeout)

    def address(self, shard: str) -> ShardAddress:
        """Return where a shard listens, and its key."""
        return ShardAddress(self.actor_group.facts[shard]["endpoints"], self._keys[shard])

    def replace(self, name: str) -> None:
        """Start a new process for a failed one. If there is no room for a worker, the others take its files."""
        self.actor_group.end(name)
        self._polls.pop(name, None)
        index = int(name.split()[1])
        if name not in self.names:
            return
        if self.limits is not None and not self._make_room(name):
            return
        try:
            self.create([name], extra=True)
        except StoppedError:
            raise
        except ClusterError:
            if name.startswith("shard") or len(self.workers) <= (self.limits or 1):
                raise
            self.actor_group.end(name)
            self.workers.remove(index)
            self.admit()
            self.log(f"no free CPUs for {name}: the other {len(self.workers)} workers take its files")

    def _make_room(self, name: str) -> bool:
        """Wait a moment for free CPUs for a process. Without them, continue with fewer workers, but not below the minimum.

        Return whether the process is still needed.
        """
        assert self.limits is not None
        index, deadline = int(name.split()[1]), time.monotonic() + ROOM_S
        shard = name.startswith("shard")
        while self.actor_group.free_cpus() < (1 if shard else self.config.cluster.threads):
            self.actor_group.check()
            if time.monotonic() < deadline:  # Ray has not noticed yet that the failed process left its CPUs
                time.sleep(POLL_S / 2)
                continue
            if len(self.workers) <= self.limits:
                self.log(f"no free CPUs for {name}, and {len(self.workers)} workers are the fewest: waiting for room")
                return True
            left = max(self.workers) if shard else index
            self.log(f"no free CPUs for {name}: the run continues with {len(self.workers) - 1} workers")
            self.resize([worker for worker in self.workers if worker != left], self.spread.shards)
            self.adopt({}, {})
            if not shard:
                return False
            deadline = time.monotonic() + ROOM_S
        return True

    def failed(self) -> list[str]:
        """Return the processes that have ended: with a node, all those on it fail at once."""
        calls = {name: actor.process.remote() for name, actor in self.actor_group.actors.items()}
        ready, _ = self.actor_group.ray.wait(list(calls.values()), num_returns=len(calls), timeout=PING_S)
        ended = []
        for name, call in calls.items():
            try:
                if call in ready:
                    self.actor_group.result(name, call)
            except ProcessFailedError:
                ended.append(name)
        return ended

    def call(self, actors: Mapping[str, Actor], verb: str, *arguments: Any, timeout_s: float = 60.0) -> dict[str, Any]:
        """Call a method of all actors at once. Return their results by name."""
        calls = {name: getattr(actor, verb).remote(*arguments) for name, actor in actors.items()}
        return self.actor_group.wait_for(calls, verb, timeout_s)

    def result(self, name: str, call: Call) -> Any:
        """Return the result of a finished call. Raise ProcessFailedError for a worker that cannot continue."""
        try:
            return self.actor_group.result(name, call)
        except AbandonedError:
            raise ProcessFailedError(name, "a shard rejected it") from None
        except ClusterError as error:
            if "has not answered" in str(error):
                raise ProcessFailedError(name, str(error).splitlines()[0]) from None
            raise

    def poll(self) -> None:
        """Poll the status of every process. Raise ProcessFailedError for one that does not answer or does not progress."""
        now, limit = time.monotonic(), self.config.cluster.heartbeat_timeout
        for name, (call, since) in list(self._polls.items()):
            if self.actor_group.ray.wait([call], timeout=0)[0]:
                del self._polls[name]
                idle_s = self._note(name, self.result(name, call))
                if idle_s > limit:
                    raise ProcessFailedError(name, f"hung: no progress for {idle_s:.0f} s")
            elif now - since > limit:
                raise ProcessFailedError(name, f"hung: no answer for {now - since:.0f} s")
        if now - self._polled >= (POLL_S if self.overview.steps else FIRST_POLL_S):
            self._polled = now
            for name, actor in self.actor_group.actors.items():
                if name not in self._polls:
                    self._polls[name] = (actor.status.remote(), now)

    def count(self) -> int:
        """Return the exact number of batches trained."""
        for name, status in self.call(self.actor_group.actors, "status").items():
            self._note(name, status)
        return self.overview.steps

    def _note(self, name: str, status: WorkerStatus | ShardStatus) -> float:
        """Record the status of a process. Return for how many seconds it has made no progress; 0 for a shard."""
        if not name.startswith("worker"):
            self.overview.shards[name] = cast(ShardStatus, status)
            return 0.0
        self.overview.reported_at = time.monotonic()
        worker = self.overview.workers[name] = cast(WorkerStatus, status)
        return worker["idle_s"]

    def gather_logs(self, folder: Path) -> None:
        """Copy the logs of all processes, also from other hosts, to `folder`."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in self.call(self.actor_group.actors, "read_log").items():
            (folder / log_name(name)).write_text(text)

    def stop(self) -> None:
        self._polls = {}  # Ray would try to recover their results when a node leaves
        self.actor_group.stop(self.shards)


Log = Callable[[str], None]
LOG_EVERY_S = 5.0
"""Time between two log lines about missing processes."""


def place(name: str) -> str:
    """Return the resource that the Ray node of this shard or worker offers.

    >>> place("server 2"), place("worker 0")
    ('clickfleet shard 2', 'clickfleet worker 0')
    """
    return f"clickfleet {name.replace('server', 'shard')}"


def call_result(ray: Any, name: str, call: Call) -> Any:
    """Return the result of a finished call of a process. Raise ProcessFailedError if the process failed."""
    from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

    try:
        return ray.get(call, timeout=60)
    except RayActorError as error:
        raise ProcessFailedError(name, "its process ended") from error
    except GetTimeoutError as error:
        raise ProcessFailedError(name, "its result cannot be fetched") from error
    except RayTaskError as error:
        cause = error.cause
        raise (cause if isinstance(cause, Exception) else error) from None


class ActorGroup:
    """Shards and workers as Ray actors, by name: `shard 0`, `worker 1`."""

    def __init__(self, config: Config, log: Log) -> None:
        self.config, self.log = config, log
        self.ray = ray_module()
        self._ray_start: RayStart | None = None
        """How this run has started or joined Ray. None if it uses a Ray that it does not shut down."""
        self.deadline = math.inf
        """When all processes must have started."""
        self.check: Callable[[], None] = lambda: None
        """Called while waiting. An exception ends the wait."""
        self.actors: dict[str, Actor] = {}
        self._classes: dict[type[Any], Any] = {}
        """The kinds of actors as Ray knows them. Ray exports each of these objects once, which takes a tenth of a second."""
        self.facts: dict[str, ProcessFacts] = {}

    def start(self) -> None:
        """Join the configured Ray cluster, or start one on this machine."""
        ray, address = self.ray, self.config.cluster.address
        timeout_s = self.config.cluster.start_timeout
        self.deadline = time.monotonic() + timeout_s
        if ray.is_initialized() and not ray_start.begun():
            return
        if address is not None:
            self.log(f"joining Ray at {address} …")
            check_there(address, timeout_s)
        else:
            self.log("starting Ray on this machine …")
        self.check()
        for attempt in (1, 2):  # on a busy machine Ray may miss its own time limits
            try:
                self._ray_start = ray_start.take(self.config.cluster, plain=attempt == 2)
                self._wait_for_ray(self._ray_start)
                break
            except ClusterError:
                raise
            except Exception as error:
                self._end_ray()
                self.check()
                if attempt == 2 or address is not None or time.monotonic() > self.deadline:
                    what = f"cannot join Ray at {address}" if address else "Ray does not start on this machine"
                    remedy = "check with `ray status` that it is running" if address else ""
                    raise ClusterError(f"{what}: {error}", remedy) from error
                self.log(f"Ray did not start ({error}); retrying")
        self.check()

    def _wait_for_ray(self, start: RayStart) -> None:
        """Wait for Ray in short turns, so that signals and our time limit end the wait."""
        address = self.config.cluster.address
        while not start.done.wait(RAY_POLL_S):
            self.check()
            if address is not None and time.monotonic() > self.deadline:
                raise ClusterError(
                    f"cannot join Ray at {address} within {self.config.cluster.start_timeout:.0f} s",
                    "check it with `ray status`; raise cluster.start_timeout if it is only slow",
                )
        renew_handlers()
        if start.problem is not None:
            raise start.problem

    def roots(self) -> set[int]:
        """Return the children of this process that belong to the run."""
        return set() if self._ray_start is None else self._ray_start.roots()

    def _end_ray(self) -> None:
        """Shut down Ray and kill what it leaves behind of this run."""
        if self._ray_start is not None:
            self._ray_start.end()
            self._ray_start = None

    @property
    def private(self) -> bool:
        """Whether Ray is a private one of this run, on this machine."""
        return self._ray_start is not None and self.config.cluster.address is None

    def free_cpus(self) -> float:
        """Return how many CPUs of the Ray cluster are free."""
        return float(self.ray.available_resources().get("CPU", 0.0))

    def spawn(self, name: str, kind: type[Any], *arguments: Any, cpus: float) -> Actor:
        """Start one process at its configured place. Do not wait for it."""
        actor = self._classes.get(kind) or self._classes.setdefault(kind, self.ray.remote(kind))
        options: dict[str, object] = {"max_restarts": 0, "max_task_retries": 0, "max_concurrency": 8}
        if self.config.cluster.endpoints:  # on the node of its role
            options |= {"num_cpus": 0, "resources": {place(name): 1}}
        else:
            if self.private and not isinstance(self.config.cluster.workers, WorkerRange):
                cpus = min(cpus, 1)  # it has one CPU for each process, whatever its threads
            spread = "DEFAULT" if self.config.cluster.address is None else "SPREAD"
            options |= {"num_cpus": cpus, "scheduling_strategy": spread}
        return cast(Actor, actor.options(**options).remote(*arguments))

    def wait_for(
        self, calls: dict[str, Call], what: str, timeout_s: float, monitor: Callable[[], None] = lambda: None
    ) -> dict[str, Any]:
        """Wait for calls and return their results by name. Log which are missing, and fail after `timeout_s`."""
        done: dict[str, Any] = {}
        begin = logged_at = time.monotonic()
        waiting = {call: name for name, call in calls.items()}
        while waiting:
            ready, _ = self.ray.wait(list(waiting), timeout=0.5)
            for call in ready:
                name = waiting.pop(call)
                done[name] = self.result(name, call)
            monitor()
            self.check()
            now = time.monotonic()
            names = ", ".join(sorted(waiting.values()))
            if waiting and now - begin > timeout_s:
                raise ClusterError(
                    f"{what}: after {timeout_s:.0f} s still missing: {names}",
                    "check that the cluster has enough free CPUs (`ray status`); raise cluster.start_timeout if it is only slow",
                )
            if waiting and now - logged_at > LOG_EVERY_S:
                logged_at = now
                left = "" if math.isinf(timeout_s) else f" ({begin + timeout_s - now:.0f} s left)"
                self.log(f"{what}: waiting for {more(waiting.values(), calls)}: {names}{left}")
        return done

    def result(self, name: str, call: Call) -> Any:
        """Return the result of a finished call. Raise ProcessFailedError if its process failed."""
        return call_result(self.ray, name, call)

    def end(self, name: str) -> None:
        """Kill a process and forget it."""
        actor = self.actors.pop(name, None)
        if actor is not None:
            self.ray.kill(actor, no_restart=True)

    def named(self, kind: str) -> dict[str, Actor]:
        """Return the actors of a kind, in the order of their numbers."""
        names = [name for name in self.actors if name.startswith(kind)]
        return {name: self.actors[name] for name in sorted(names, key=lambda name: int(name.split()[1]))}

    def stop(self, close: Iterable[str] = ()) -> None:
        """End all processes, and Ray if this run started it."""
        try:
            calls = [self.actors[name].close.remote() for name in close if name in self.actors]
            if calls:
                self.ray.wait(calls, num_returns=len(calls), timeout=2)
            for actor in self.actors.values():
                self.ray.kill(actor, no_restart=True)
        finally:
            self.actors = {}
            self._end_ray()


def more(missing: Iterable[str], names: Iterable[str]) -> str:
    """Describe how many are missing of how many, by kind.

    >>> more(["server 1", "worker 3"], [f"server {i}" for i in range(2)] + [f"worker {i}" for i in range(4)])
    '1 more server of 2, 1 more worker of 4'
    """
    kinds = Counter(name.split()[0] for name in missing)
    of = Counter(name.split()[0] for name in names)
    return ", ".join(f"{n} more {kind}{'s' if n > 1 else ''} of {of[kind]}" for kind, n in kinds.items())


def counted(names: Iterable[str]) -> str:
    """Describe how many there are of each kind.

    >>> counted(["shard 0", "worker 0", "worker 1"])
    '1 shard and 2 workers'
    """
    kinds = Counter(name.split()[0] for name in names)
    return " and ".join(f"{count} {kind}{'s' if count > 1 else ''}" for kind, count in kinds.items())


class StoppedError(ClusterError):
    """A signal ended the wait."""


class ProcessFailedError(Exception):
    """A process of the run has ended or hangs."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name} failed: {reason}")
        self.name = name
