"""A process that somebody else started with a role: it becomes a node of one Ray cluster, and stays until worker 0 has ended the job.

Each role is a Ray node of its own that offers one resource, `clickfleet shard 0` or `clickfleet worker 1`, so a shard or a worker runs
where its role was started. The end is told by a named actor of worker 0: while it lives the job goes on, and it ends with its maker.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from clickfleet.cluster.fleet import Log, place
from clickfleet.cluster.nodes import POLL_S, SPACE, node
from clickfleet.cluster.roles import Role
from clickfleet.config import Config
from clickfleet.errors import ClusterError
from clickfleet.interrupts import interruptible

WATCH = "the end"
LEAVE_S = 15.0
"""How long who leaves last waits for the others."""


def settled(config: Config, role: Role) -> Config:
    """The configuration with what the environment says of the cluster."""
    places = tuple(map(str, role.servers))
    threads = role.threads or config.cluster.threads
    placed = replace(
        config.cluster,
        shards=len(places),
        workers=role.workers,
        threads=threads,
        address=role.ray,
        endpoints=places,
    )
    return replace(config, cluster=placed)


class Watcher:
    """Lives as long as the job; knows whether it ended well and who has heard of it, and lets its processes meet."""

    def __init__(self, workers: int = 1) -> None:
        self._ended = False
        self._left: set[str] = set()
        self._workers = workers
        self._meetings: dict[int, dict[int, Any]] = {}

    def end(self) -> None:
        self._ended = True

    def ended(self, name: str) -> bool:
        if self._ended:
            self._left.add(name)
        return self._ended

    def left(self) -> int:
        return len(self._left)

    def bring(self, meeting: int, worker: int, value: Any) -> None:
        """What a worker contributes to a meeting of all workers."""
        self._meetings.setdefault(meeting, {})[worker] = value
        self._meetings.pop(meeting - 2, None)  # whoever is here has left that one

    def brought(self, meeting: int) -> tuple[list[Any], list[int]]:
        """What all have contributed, in their order; empty while some are missing, and who is."""
        there = self._meetings.get(meeting, {})
        missing = [worker for worker in range(self._workers) if worker not in there]
        return ([] if missing else [there[worker] for worker in range(self._workers)]), missing


@contextmanager
def driving(role: Role, config: Config, log: Log) -> Iterator[Any]:
    """Worker 0 while it leads the job, with its watcher; the others end with it."""
    with node(role, config.cluster.start_timeout, log) as ray:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy  # not before Ray knows its token

        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        watcher = ray.remote(Watcher).options(name=WATCH, num_cpus=0, scheduling_strategy=here).remote(role.workers)
        names = [f"server {i}" for i in range(len(role.servers))] + [f"worker {i}" for i in range(role.workers)]
        _wait_for_all(ray, names, config.cluster.start_timeout, log)
        yield watcher
        ray.get(watcher.end.remote(), timeout=60)
        deadline = time.monotonic() + LEAVE_S
        while ray.get(watcher.left.remote(), timeout=60) < len(names) - 1 and time.monotonic() < deadline:
            time.sleep(POLL_S / 2)


def _wait_for_all(ray: Any, names: list[str], timeout_s: float, log: Log) -> None:
    begin = said = time.monotonic()
    while True:
        offered = ray.cluster_resources()
        missing = ", ".join(name for name in names if place(name) not in offered)
        now = time.monotonic()
        if not missing:
            return
        if now - begin > timeout_s:
            raise ClusterError(
                f"after {timeout_s:.0f} s still missing: {missing}",
                "were they started? raise cluster.start_timeout if they are only slow",
            )
        if now - said > 5:
            said = now
            log(f"waiting for {missing}")
        time.sleep(POLL_S)


def serve(role: Role, config: Config, log: Log) -> None:
    """Any other process: its node is there for the job until worker 0 has ended it."""
    stopped: list[int] = []
    with node(role, config.cluster.start_timeout, log) as ray, interruptible(stopped.append):
        watcher = _find(ray, role, config.cluster.start_timeout, stopped, log)
        while not stopped:
            try:
                if ray.get(watcher.ended.remote(role.name), timeout=config.cluster.heartbeat_timeout):
                    break
            except Exception as error:
                raise ClusterError(
                    f"{role.name}: worker 0, which drives, or server 0 with Ray is gone ({type(error).__name__})",
                    "start all processes again; with --resume they go on from the last checkpoint",
                ) from None
            time.sleep(POLL_S)
        if role.starts_head:
            _let_others_leave(ray)
    log(f"{role.name}: {'stopped by a signal' if stopped else 'the job has ended'}")


@contextmanager
def following(role: Role, config: Config, log: Log) -> Iterator[Any]:
    """A worker that takes part in what worker 0 leads, with the watcher of the job."""
    with node(role, config.cluster.start_timeout, log) as ray:
        watcher = _find(ray, role, config.cluster.start_timeout, [], log)
        yield watcher
        deadline = time.monotonic() + config.cluster.timeout
        while not ray.get(watcher.ended.remote(role.name), timeout=60) and time.monotonic() < deadline:
            time.sleep(POLL_S / 2)


def gone(ray: Any, workers: int) -> list[int]:
    """Workers whose node has left the cluster."""
    offered = ray.cluster_resources()
    return [worker for worker in range(workers) if place(f"worker {worker}") not in offered]


def _find(ray: Any, role: Role, timeout_s: float, stopped: list[int], log: Log) -> Any:
    begin = said = time.monotonic()
    while not stopped:
        try:
            return ray.get_actor(WATCH, namespace=SPACE)
        except ValueError:
            now = time.monotonic()
            if now - begin > timeout_s:
                raise ClusterError(f"{role.name}: worker 0 is not there after {timeout_s:.0f} s") from None
            if now - said > 5:
                said = now
                log(f"{role.name} waits for worker 0")
            time.sleep(POLL_S)
    return None


def _let_others_leave(ray: Any) -> None:
    """The head goes last, so that nobody's end looks like a failure."""
    deadline = time.monotonic() + LEAVE_S
    while sum(1 for each in ray.nodes() if each["Alive"]) > 1 and time.monotonic() < deadline:
        time.sleep(POLL_S)
