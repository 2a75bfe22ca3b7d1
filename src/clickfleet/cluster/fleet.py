"""The processes of a run: started together by Ray, looked after, replaced when they are lost."""

from __future__ import annotations

import math
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from clickfleet import paths
from clickfleet.cluster import process_tree
from clickfleet.cluster.ray_runtime import LOOPBACK, check_there, keep_token, on_loopback, our_signals, ray_module
from clickfleet.config import Config
from clickfleet.errors import ClusterError

Call = Any
Log = Callable[[str], None]
SAY_EVERY_S = 5.0
"""Between two lines about who is still missing."""


def place(name: str) -> str:
    """The resource that a Ray node offers on which this shard or worker is to run.

    >>> place("server 2"), place("worker 0")
    ('clickfleet shard 2', 'clickfleet worker 0')
    """
    return f"clickfleet {name.replace('server', 'shard')}"


class Fleet:
    """Shards and workers as Ray actors, by name: `shard 0`, `worker 1`."""

    def __init__(self, config: Config, log: Log) -> None:
        self.config, self.log = config, log
        self.ray = ray_module()
        self._own = False
        self._roots: set[int] = set()
        """Children of this process that are Ray's, where it was started for this run."""
        self._others: set[int] | None = None
        """While it is being started: the other children."""
        self.deadline = math.inf
        """When everything must have started."""
        self.check: Callable[[], None] = lambda: None
        """Called while waiting; an exception ends it."""
        self.actors: dict[str, Any] = {}
        self.facts: dict[str, dict[str, Any]] = {}

    def start(self) -> None:
        """Joins the cluster that the configuration names, or starts one on this machine."""
        ray, address = self.ray, self.config.cluster.address
        timeout_s = self.config.cluster.start_timeout
        self.deadline = time.monotonic() + timeout_s
        if ray.is_initialized():
            return
        if address is not None:
            self.log(f"joining Ray at {address} …")
            check_there(address, timeout_s)
        else:
            self.log("starting Ray on this machine …")
        self.check()
        for attempt in (1, 2):  # a machine that stands still for some seconds is too slow for Ray's own patience
            try:
                self._init()
                break
            except ClusterError:
                raise
            except Exception as error:
                self._end_ray()
                self.check()
                if attempt == 2 or address is not None or time.monotonic() > self.deadline:
                    what = f"Ray at {address}" if address else "Ray does not start on this machine"
                    raise ClusterError(
                        f"{what}: {error}", "is it running? see `ray status`" if address else ""
                    ) from error
                self.log(f"Ray did not start ({error}); once more")
        self._own = True
        self.check()

    def _init(self) -> None:
        cluster = self.config.cluster
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
        if cluster.address is not None:
            self._join(cluster.address, options)
            return
        cpus = max(os.cpu_count() or 1, cluster.shards + cluster.workers * cluster.threads)
        options |= {"num_cpus": cpus, "include_dashboard": False, "object_store_memory": 1 << 28}
        if "RAY_TMPDIR" not in os.environ:  # Ray opens its folders to everybody: let nobody come that far
            options["_temp_dir"] = str(paths.temporary(short=True) / "ray")
        keep_token(make=True)
        self._others = process_tree.own_children()
        try:
            with on_loopback(self.ray), our_signals(self.ray):
                self.ray.init(address="local", _node_ip_address=LOOPBACK, **options)
        finally:
            self._roots, self._others = self.roots(), None

    def _join(self, address: str, options: dict[str, Any]) -> None:
        """In a thread, as Ray may wait longer than we do, where something answers that is no Ray."""
        ray, problems = self.ray, list[Exception]()

        def join() -> None:
            try:
                with our_signals(ray):
                    ray.init(address=address, **options)
            except Exception as error:
                problems.append(error)

        thread = threading.Thread(target=join, daemon=True, name="clickfleet-join")
        thread.start()
        while thread.is_alive():
            thread.join(timeout=0.1)
            self.check()
            if time.monotonic() > self.deadline:
                raise ClusterError(
                    f"Ray at {address} has not let this run join within {self.config.cluster.start_timeout:.0f} s",
                    "is it healthy (`ray status`)? raise cluster.start_timeout if it is only slow",
                )
        if problems:
            raise problems[0]

    def roots(self) -> set[int]:
        """Children of this process that belong to the run."""
        return self._roots if self._others is None else process_tree.own_children() - self._others

    def _end_ray(self) -> None:
        """Ray, and whatever it leaves behind of what it has started for this run."""
        started = process_tree.tree(self._roots)
        try:
            self.ray.shutdown()
        finally:
            process_tree.kill(started)
            self._roots = set()

    def create(self, name: str, kind: type[Any], *arguments: Any, cpus: float) -> None:
        """Starts one process, where the configuration wants it; it may take a while until it answers."""
        actor = self.ray.remote(kind)
        options: dict[str, Any] = {"max_restarts": 0, "max_task_retries": 0, "max_concurrency": 8}
        if self.config.cluster.endpoints:  # where its role was started, now or again
            options |= {"num_cpus": 0, "resources": {place(name): 1}}
        else:
            spread = "DEFAULT" if self.config.cluster.address is None else "SPREAD"
            options |= {"num_cpus": cpus, "scheduling_strategy": spread}
        self.actors[name] = actor.options(**options).remote(*arguments)

    def wait_for(
        self, calls: dict[str, Call], what: str, timeout_s: float, watch: Callable[[], None] = lambda: None
    ) -> dict[str, Any]:
        """The results of calls by name; says now and then who is missing, and who was when time is up."""
        done: dict[str, Any] = {}
        begin = said = time.monotonic()
        waiting = {call: name for name, call in calls.items()}
        while waiting:
            ready, _ = self.ray.wait(list(waiting), timeout=0.5)
            for call in ready:
                name = waiting.pop(call)
                done[name] = self.result(name, call)
            watch()
            self.check()
            now = time.monotonic()
            names = ", ".join(sorted(waiting.values()))
            if waiting and now - begin > timeout_s:
                raise ClusterError(
                    f"{what}: after {timeout_s:.0f} s still missing: {names}",
                    "has the cluster enough free CPUs (`ray status`)? raise cluster.start_timeout if it is only slow",
                )
            if waiting and now - said > SAY_EVERY_S:
                said = now
                left = "" if math.isinf(timeout_s) else f" ({begin + timeout_s - now:.0f} s left)"
                self.log(f"{what}: waiting for {more(waiting.values(), calls)}: {names}{left}")
        return done

    def result(self, name: str, call: Call) -> Any:
        """The result of a call that has ended; the loss of its process is a LostError."""
        from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

        try:
            return self.ray.get(call, timeout=60)
        except RayActorError as error:
            raise LostError(name, "its process ended") from error
        except GetTimeoutError as error:
            raise LostError(name, "its result cannot be fetched") from error
        except RayTaskError as error:
            cause = error.cause
            raise (cause if isinstance(cause, Exception) else error) from None

    def end(self, name: str) -> None:
        """Ends what is left of a process."""
        actor = self.actors.pop(name, None)
        if actor is not None:
            self.ray.kill(actor, no_restart=True)

    def named(self, kind: str) -> dict[str, Any]:
        """The actors whose name starts so, in the order of their numbers."""
        found = [name for name in self.actors if name.startswith(kind)]
        return {name: self.actors[name] for name in sorted(found, key=lambda name: int(name.split()[1]))}

    def stop(self, close: Iterable[str] = ()) -> None:
        """Ends all processes, and Ray if it was started for this run."""
        try:
            calls = [self.actors[name].close.remote() for name in close if name in self.actors]
            if calls:
                self.ray.wait(calls, num_returns=len(calls), timeout=2)
            for actor in self.actors.values():
                self.ray.kill(actor, no_restart=True)
        finally:
            self.actors = {}
            if self._own:
                self._own = False
                self._end_ray()


def more(missing: Iterable[str], names: Iterable[str]) -> str:
    """How many are missing of how many, by kind.

    >>> more(["server 1", "worker 3"], [f"server {i}" for i in range(2)] + [f"worker {i}" for i in range(4)])
    '1 more server of 2, 1 more worker of 4'
    """
    kinds = Counter(name.split()[0] for name in missing)
    of = Counter(name.split()[0] for name in names)
    return ", ".join(f"{n} more {kind}{'s' if n > 1 else ''} of {of[kind]}" for kind, n in kinds.items())


def counted(names: Iterable[str]) -> str:
    """How many of each kind.

    >>> counted(["shard 0", "worker 0", "worker 1"])
    '1 shard and 2 workers'
    """
    kinds = Counter(name.split()[0] for name in names)
    return " and ".join(f"{count} {kind}{'s' if count > 1 else ''}" for kind, count in kinds.items())


class StoppedError(ClusterError):
    """A signal ended what was waited for."""


class LostError(Exception):
    """A process of the run is no more."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name}: {reason}")
        self.name, self.reason = name, reason
