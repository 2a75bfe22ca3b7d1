"""A process that somebody else started with a role: it becomes a node of one Ray cluster, and stays until worker 0 has ended the job.

Each role is a Ray node of its own that offers one resource, `clickfleet shard 0` or `clickfleet worker 1`, so a shard or a worker runs
where its role was started. The end is told by a named actor of worker 0: while it lives the job goes on, and it ends with its maker.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

from clickfleet.cluster.fleet import SAY_EVERY_S, Log, more, place
from clickfleet.cluster.nodes import POLL_S, SPACE, node
from clickfleet.cluster.roles import Role
from clickfleet.config import Config
from clickfleet.errors import ClusterError
from clickfleet.interrupts import interruptible, leave

WATCH = "the end"
MEMBER, SPARE, LEAVE = "member", "spare", "leave"
NOTES_S = 2.0
"""How often worker 0 looks who else came."""
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
    """Lives as long as the job; knows who takes part and whether it ended well, and lets its processes meet."""

    def __init__(self, servers: int = 0, workers: int = 1) -> None:
        self._ended = False
        self._left: set[str] = set()
        self._servers, self._workers = servers, workers
        self._meetings: dict[int, dict[int, Any]] = {}
        self._nodes: dict[str, list[str]] = {}
        self._notes: list[str] = []
        self._status = ""

    def arrive(self, name: str, node: str, alive: list[str]) -> str:
        """What a process that has joined is to do: take part, wait as a spare for one of the same name, or leave."""
        kind, index = name.split()
        count = self._servers if kind == "server" else self._workers
        if int(index) >= count:
            self._notes.append(f"{name} came, and was sent away: this run has {count} {kind}s, {kind} 0 to {count - 1}")
            return LEAVE
        there = [each for each in self._nodes.get(name, []) if each in alive and each != node]
        self._nodes[name] = [*there, node]
        if there:
            self._notes.append(f"{name} is there more than once: one of them waits as a spare")
            return SPARE
        return MEMBER

    def tell(self, status: str) -> list[str]:
        """Takes what the job waits for, and gives what is to be said about who came."""
        self._status = status
        notes, self._notes = self._notes, []
        return notes

    def end(self) -> None:
        self._ended = True

    def ended(self, name: str) -> tuple[bool, str]:
        """Whether the job has ended, and what it waits for."""
        if self._ended:
            self._left.add(name)
        return self._ended, self._status

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


def ask(ray: Any, call: Any, name: str, timeout_s: float = 60.0) -> Any:
    """What the watcher answers a process; without an answer the job is over."""
    try:
        return ray.get(call, timeout=timeout_s)
    except Exception as error:
        raise ClusterError(
            f"{name}: worker 0, which drives, or server 0 with Ray is gone ({type(error).__name__})",
            "start all processes again; with --resume they go on from the last checkpoint",
        ) from None


@contextmanager
def driving(role: Role, config: Config, log: Log) -> Iterator[Any]:
    """Worker 0 while it leads the job, with its watcher; the others end with it."""
    cluster = config.cluster
    deadline = time.monotonic() + cluster.start_timeout
    with node(role, cluster.start_timeout, cluster.stop_timeout, log) as ray:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy  # not before Ray knows its token

        own_node = ray.get_runtime_context().get_node_id()
        here = NodeAffinitySchedulingStrategy(own_node, soft=False)
        watcher = (
            ray.remote(Watcher)
            .options(name=WATCH, num_cpus=0, scheduling_strategy=here)
            .remote(len(role.servers), role.workers)
        )
        ask(ray, watcher.arrive.remote(role.name, own_node, [own_node]), role.name)
        names = [f"server {i}" for i in range(len(role.servers))] + [f"worker {i}" for i in range(role.workers)]
        _wait_for_all(ray, watcher, names, deadline, log)
        try:
            with _notes(ray, watcher, log):
                yield watcher
        except (KeyboardInterrupt, SystemExit):
            with suppress(ClusterError):
                _end(ray, watcher, role, len(names) - 1, LEAVE_S / 5)
            raise
        _end(ray, watcher, role, len(names) - 1, LEAVE_S)


def _end(ray: Any, watcher: Any, role: Role, others: int, limit_s: float) -> None:
    """Tells the others that the job has ended, and waits until they have heard it."""
    deadline = time.monotonic() + limit_s
    ask(ray, watcher.end.remote(), role.name, limit_s)
    while ask(ray, watcher.left.remote(), role.name, limit_s) < others and time.monotonic() < deadline:
        time.sleep(POLL_S / 2)


@contextmanager
def _notes(ray: Any, watcher: Any, log: Log) -> Iterator[None]:
    """Says meanwhile who came that is not needed."""
    over = threading.Event()

    def listen() -> None:
        with suppress(Exception):  # of Ray, when the job ends
            while not over.wait(NOTES_S):
                for note in ray.get(watcher.tell.remote("")):
                    log(note)

    thread = threading.Thread(target=listen, daemon=True, name="clickfleet-notes")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(timeout=2)


def _wait_for_all(ray: Any, watcher: Any, names: list[str], deadline: float, log: Log) -> None:
    said = 0.0
    while True:
        offered = ray.cluster_resources()
        missing = [name for name in names if place(name) not in offered]
        now = time.monotonic()
        if not missing:
            ask(ray, watcher.tell.remote(""), "worker 0")
            return
        if now > deadline:
            raise ClusterError(
                f"still missing after cluster.start_timeout: {', '.join(missing)}",
                "were they started? raise cluster.start_timeout if they are only slow",
            )
        status = f"waiting for {more(missing, names)}: {', '.join(missing)} ({deadline - now:.0f} s left)"
        for note in ask(ray, watcher.tell.remote(status), "worker 0"):
            log(note)
        if now - said > SAY_EVERY_S:
            said = now
            log(status)
        time.sleep(POLL_S)


def serve(role: Role, config: Config, log: Log) -> None:
    """Any other process: its node is there for the job until worker 0 has ended it.

    After a signal it stays until worker 0, which may have got one too, has saved, for cluster.stop_timeout at most.
    """
    cluster = config.cluster
    deadline = time.monotonic() + cluster.start_timeout
    stopped: list[int] = []
    said = ""
    with node(role, cluster.start_timeout, cluster.stop_timeout, log) as ray:
        watcher = _find(ray, role, deadline, log)
        _arrive(ray, watcher, role, log)
        with interruptible(stopped.append):
            stop_by = math.inf
            while time.monotonic() < stop_by:
                ended, status = ask(ray, watcher.ended.remote(role.name), role.name, cluster.heartbeat_timeout)
                if ended:
                    break
                if stopped and stop_by == math.inf:
                    stop_by = time.monotonic() + cluster.stop_timeout
                    log(f"{role.name}: {signal.Signals(stopped[0]).name}; stays until worker 0 has ended the job, "
                        f"for {cluster.stop_timeout:.0f} s at most")  # fmt: skip
                if _kind(status) != _kind(said):
                    log(f"{role.name}: {status or 'all processes are there'}")
                said = status
                time.sleep(POLL_S)
        if role.starts_head:
            _let_others_leave(ray)
    log(f"{role.name}: {'stopped by a signal' if stopped else 'the job has ended'}")
    if stopped:
        leave(stopped[0])


def _kind(status: str) -> str:
    """Without the seconds, which change all the time."""
    return status.partition("(")[0]


def _arrive(ray: Any, watcher: Any, role: Role, log: Log, spare: bool = True) -> None:
    """Tells worker 0 that this process is there, and says what it is to do; not all can be a spare."""
    alive = [each["NodeID"] for each in ray.nodes() if each["Alive"]]
    node_id = ray.get_runtime_context().get_node_id()
    told = ask(ray, watcher.arrive.remote(role.name, node_id, alive), role.name)
    if told == LEAVE:
        raise ClusterError(
            f"{role.name} leaves: this run has all its {role.kind}s, and was started with fewer of them",
            "start all processes with the same numbers of servers and workers; they change at a checkpoint, with --resume",
        )
    if told == SPARE and not spare:
        raise ClusterError(f"{role.name} leaves: this run has its {role.name} already", "start each process once")
    if told == SPARE:
        log(
            f"{role.name}: this run has its {role.name} already; waiting as a spare, which takes its place if it is lost"
        )


@contextmanager
def following(role: Role, config: Config, log: Log) -> Iterator[Any]:
    """A worker that takes part in what worker 0 leads, with the watcher of the job."""
    cluster = config.cluster
    deadline = time.monotonic() + cluster.start_timeout
    with node(role, cluster.start_timeout, cluster.stop_timeout, log) as ray:
        watcher = _find(ray, role, deadline, log)
        _arrive(ray, watcher, role, log, spare=False)
        try:
            yield watcher
        except (KeyboardInterrupt, SystemExit):  # worker 0 may have got a signal too, and save
            stop_by = time.monotonic() + cluster.stop_timeout
            with suppress(ClusterError):
                while not ask(ray, watcher.ended.remote(role.name), role.name)[0] and time.monotonic() < stop_by:
                    time.sleep(POLL_S / 2)
            raise
        leave_by = time.monotonic() + cluster.timeout
        while not ask(ray, watcher.ended.remote(role.name), role.name)[0] and time.monotonic() < leave_by:
            time.sleep(POLL_S / 2)


def gone(ray: Any, workers: int) -> list[int]:
    """Workers whose node has left the cluster."""
    offered = ray.cluster_resources()
    return [worker for worker in range(workers) if place(f"worker {worker}") not in offered]


def _find(ray: Any, role: Role, deadline: float, log: Log) -> Any:
    said = 0.0
    while True:
        try:
            return ray.get_actor(WATCH, namespace=SPACE)
        except ValueError:
            now = time.monotonic()
            if now > deadline:
                raise ClusterError(
                    f"{role.name}: worker 0 is not there after cluster.start_timeout", "was it started?"
                ) from None
            if now - said > SAY_EVERY_S:
                said = now
                log(f"{role.name} waits for worker 0 ({deadline - now:.0f} s left)")
            time.sleep(POLL_S)


def _let_others_leave(ray: Any) -> None:
    """The head goes last, so that nobody's end looks like a failure."""
    deadline = time.monotonic() + LEAVE_S
    while sum(1 for each in ray.nodes() if each["Alive"]) > 1 and time.monotonic() < deadline:
        time.sleep(POLL_S)
