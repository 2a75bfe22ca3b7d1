"""The processes of a run: started together by Ray, looked after, replaced when they are lost."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from typing import Any

from clickfleet import paths
from clickfleet.config import Config
from clickfleet.errors import ClusterError, MissingError

Call = Any
Log = Callable[[str], None]


def ray_module() -> Any:
    """Ray, or how to get it."""
    _authenticate()  # before the import, which reads it
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")  # Ray lowers the priority of its processes otherwise
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")  # of calls that nobody waits for any more: after a loss
    try:
        import ray
        import zmq  # noqa: F401
    except ImportError as error:
        raise MissingError(f"{error.name}, which cluster modes need,", "cluster") from None
    return ray


def _authenticate() -> None:
    """Shows the token of this user, if there is one, to any Ray: by itself Ray does so only to one that it starts."""
    kept = [os.environ.get("RAY_AUTH_TOKEN_PATH", ""), os.path.expanduser("~/.ray/auth_token")]
    if os.environ.get("RAY_AUTH_TOKEN") or any(path and os.path.exists(path) for path in kept):
        os.environ.setdefault("RAY_AUTH_MODE", "token")


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
        self.actors: dict[str, Any] = {}
        self.facts: dict[str, dict[str, Any]] = {}

    def start(self) -> None:
        """Joins the cluster that the configuration names, or starts one on this machine."""
        ray, address = self.ray, self.config.cluster.address
        if ray.is_initialized():
            return
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
        if address is None:
            cluster = self.config.cluster
            cpus = max(os.cpu_count() or 1, cluster.shards + cluster.workers * cluster.threads)
            options |= {"num_cpus": cpus, "include_dashboard": False, "object_store_memory": 1 << 28}
            if "RAY_TMPDIR" not in os.environ:  # Ray opens its folders to everybody: let nobody come that far
                options["_temp_dir"] = str(paths.temporary(short=True) / "ray")
        for attempt in (1, 2):  # a machine that stands still for some seconds is too slow for Ray's own patience
            try:
                ray.init(address=address or "local", **options)
                break
            except Exception as error:
                ray.shutdown()
                if attempt == 2 or address is not None:
                    what = f"Ray at {address}" if address else "Ray does not start on this machine"
                    raise ClusterError(
                        f"{what}: {error}", "is it running? see `ray status`" if address else ""
                    ) from error
                self.log(f"Ray did not start ({error}); once more")
        self._own = True

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
            ready, _ = self.ray.wait(list(waiting), timeout=1.0)
            for call in ready:
                name = waiting.pop(call)
                done[name] = self.result(name, call)
            watch()
            now = time.monotonic()
            names = ", ".join(sorted(waiting.values()))
            if waiting and now - begin > timeout_s:
                raise ClusterError(
                    f"{what}: after {timeout_s:.0f} s still missing: {names}",
                    "has the cluster enough free CPUs (`ray status`)? raise cluster.start_timeout if it is only slow",
                )
            if waiting and now - said > 5:
                said = now
                self.log(f"{what}: {len(done)} of {len(calls)} ready, waiting for {names}")
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
        calls = [self.actors[name].close.remote() for name in close if name in self.actors]
        if calls:
            self.ray.wait(calls, num_returns=len(calls), timeout=2)
        for actor in self.actors.values():
            self.ray.kill(actor, no_restart=True)
        self.actors = {}
        if self._own:
            self.ray.shutdown()


class LostError(Exception):
    """A process of the run is no more."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name}: {reason}")
        self.name, self.reason = name, reason
