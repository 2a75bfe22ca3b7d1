"""The role of a process in a job, and its node of the Ray cluster, which lives as long as the process."""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import Any

from clickfleet.cluster import Role, process_tree
from clickfleet.cluster.processes import LOG_EVERY_S, Log, more, place
from clickfleet.cluster.ray_runtime import LOOPBACK, LOOPBACK_ONLY, on_loopback, our_signals, ray_module
from clickfleet.config.load import Config
from clickfleet.data import files
from clickfleet.errors import ClusterError
from clickfleet.training.signals import interruptible, leave

SPACE = "clickfleet"
POLL_S = 0.5
STARTS = 3
"""Attempts to start a node: on a busy machine Ray may miss its own time limits."""
STOP_LIMIT_S = 8.0
"""Time limit to stop after a signal while joining or leaving. Then the process and its node are killed."""
ON_LOOPBACK = """
from ray._private import services
services.resolve_ip_for_localhost = lambda host: host
services.get_node_ip_address = lambda address=None: "127.0.0.1"
"""
"""Lets the command `ray` keep the loopback address. Otherwise it replaces it by an address that others can reach."""
RAY = """
import sys
from ray.scripts import scripts
scripts.get_ray_client_dependency_error = lambda: "not used"
sys.argv[0] = "ray"
scripts.main()
"""
"""The command `ray`, without the server for clients that are not nodes (port 10001). No option turns it off."""
LAUNCHER = "CLICKFLEET_LAUNCHER"
"""Environment variable with the process id of the launcher. A role ends with its launcher."""


@contextmanager
def node(role: Role, timeout_s: float, stop_s: float, log: Log) -> Iterator[Any]:
    """Start the node of this process, join Ray and yield it. A signal ends the process, unless the caller handles it."""
    ray, deadline = ray_module(), time.monotonic() + timeout_s
    roots: set[int] = set()
    _watch_launcher(roots, stop_s + STOP_LIMIT_S)

    def force(number: int) -> None:
        process_tree.force(number, roots)

    limits = [STOP_LIMIT_S]
    with interruptible(leave, lambda: limits[-1], force), ExitStack() as started:
        if is_local(role):
            started.enter_context(on_loopback(ray))
        for attempt in range(1, STARTS + 1):
            # Each node needs its own folder, because several may run on one host.
            with tempfile.TemporaryDirectory(
                None, "r", files.temporary(short=True), ignore_cleanup_errors=True
            ) as folder:
                child = _start(role, folder, deadline, log)
                roots.add(child.pid)
                try:
                    problem = _join(ray, role, folder, child, deadline)
                    if not problem:
                        servers, workers = len(role.servers), role.workers
                        log(f"{role.name} of {servers} servers and {workers} workers has joined Ray at {role.ray}")
                        limits.append(stop_s + STOP_LIMIT_S / 2)  # worker 0 may need it for a last checkpoint
                        yield ray
                        return
                finally:
                    ray.shutdown()
                    _end(child)
                    roots.discard(child.pid)
            if attempt == STARTS or time.monotonic() > deadline:
                raise ClusterError(
                    f"{role.name} cannot join Ray at {role.ray}: {problem}",
                    "see the output of its node above; give all processes the same RAY_AUTH_TOKEN",
                )
            log(f"{role.name}: {problem}; retrying")


def is_local(role: Role) -> bool:
    """Return whether the whole job runs on the loopback of this machine."""
    return {role.host, role.ray.rpartition(":")[0], *(server.host for server in role.servers)} == {LOOPBACK}


def _watch_launcher(roots: set[int], limit_s: float) -> None:
    """End this process when its launcher ends: by a signal, and by force after `limit_s`."""
    launcher = os.environ.get(LAUNCHER, "")
    if launcher != str(os.getppid()):
        return

    def act() -> None:
        if not sys.platform.startswith("linux"):
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(limit_s)
        process_tree.force(signal.SIGTERM, roots)

    process_tree.watch_parent(int(launcher), act)


def _end(child: subprocess.Popen[bytes]) -> None:
    started = process_tree.tree([child.pid])
    child.terminate()
    try:
        child.wait(timeout=STOP_LIMIT_S / 2)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
    finally:
        process_tree.kill(started)


def _start(role: Role, folder: str, deadline: float, log: Log) -> subprocess.Popen[bytes]:
    offers = {place(role.name): 1}
    program = ON_LOOPBACK + RAY if is_local(role) else RAY
    command = [sys.executable, "-c", program, "start", "--block", "--disable-usage-stats"]
    command += [f"--node-ip-address={role.host}", "--num-cpus=0", f"--resources={json.dumps(offers)}"]
    # Several nodes may run on one host, so no port is fixed.
    command += ["--min-worker-port=0", "--max-worker-port=0", "--dashboard-agent-listen-port=0"]
    command += [f"--object-store-memory={1 << 27}", f"--temp-dir={folder}", "--include-log-monitor=false"]
    if role.starts_head:
        command += ["--head", f"--port={role.ray.rpartition(':')[2]}", "--include-dashboard=false", "--no-monitor"]
        log(f"{role.name} starts Ray at {role.ray} …")
    else:
        _wait_for_head(role, deadline, log)
        command += [f"--address={role.ray}"]
    # LOOPBACK_ONLY forbids several nodes.
    environ = {name: value for name, value in os.environ.items() if name not in LOOPBACK_ONLY}
    environ["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"] = "0"  # a role that ends has nothing to drain
    # In its own session it gets no signals of the terminal. Its role ends it.
    return subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        preexec_fn=process_tree.end_with_parent,
        env=environ,
        start_new_session=True,
    )


def _wait_for_head(role: Role, deadline: float, log: Log) -> None:
    host, _, port = role.ray.rpartition(":")
    logged_at = 0.0
    while True:
        try:
            socket.create_connection((host, int(port)), timeout=2).close()
            return
        except OSError as error:
            now = time.monotonic()
            if now > deadline:
                raise ClusterError(
                    f"{role.name}: no Ray at {role.ray} within cluster.start_timeout ({error})",
                    "unless RAY_ADDRESS is set, server 0 starts it: check server 0 and its port, or raise the timeout",
                ) from None
            if now - logged_at > LOG_EVERY_S:
                logged_at = now
                log(f"{role.name} waits for Ray at {role.ray} ({deadline - now:.0f} s left)")
            time.sleep(POLL_S)


def _join(ray: Any, role: Role, folder: str, child: subprocess.Popen[bytes], deadline: float) -> str:
    """Wait for the node and connect to it. Return the problem, or an empty text."""
    while child.poll() is None:
        try:
            with our_signals(ray):
                ray.init(
                    address=role.ray, namespace=SPACE, log_to_driver=False, logging_level="ERROR", _temp_dir=folder
                )
            return ""
        except Exception as error:
            ray.shutdown()
            if time.monotonic() > deadline:
                return str(error)
            time.sleep(POLL_S)
    return f"its node ended with exit code {child.returncode}"


WATCH = "the end"
MEMBER, SPARE, LEAVE = "member", "spare", "leave"
NOTES_S = 2.0
"""How often worker 0 polls for notes about arriving processes."""
LEAVE_S = 15.0
"""How long the last process waits for the others to leave."""


def settled(config: Config, role: Role) -> Config:
    """Return the configuration with the cluster settings of the role."""
    places = tuple(map(str, role.servers))
    threads = role.threads or config.cluster.threads
    cluster = replace(config.cluster, shards=len(places), workers=role.workers, threads=threads)
    return replace(config, cluster=replace(cluster, address=role.ray, endpoints=places))


class Watcher:
    """The actor that coordinates a job: it knows its members and its end, and collects values for collective calls."""

    def __init__(self, servers: int = 0, workers: int = 1) -> None:
        self._ended = False
        self._left: set[str] = set()
        self._servers, self._workers = servers, workers
        self._meetings: dict[int, dict[int, Any]] = {}
        self._nodes: dict[str, list[str]] = {}
        self._notes: list[str] = []
        self._status = ""

    def arrive(self, name: str, node: str, alive: list[str]) -> str:
        """Return what a process that has joined must do: take part, wait as a spare, or leave."""
        kind, index = name.split()
        count = self._servers if kind == "server" else self._workers
        if int(index) >= count:
            self._notes.append(f"rejected {name}: this run has {count} {kind}s, {kind} 0 to {count - 1}")
            return LEAVE
        others = [each for each in self._nodes.get(name, []) if each in alive and each != node]
        self._nodes[name] = [*others, node]
        if others:
            self._notes.append(f"{name} was started more than once: one of them waits as a spare")
            return SPARE
        return MEMBER

    def report(self, status: str) -> list[str]:
        """Store what the job waits for. Return and clear the notes about arriving processes."""
        self._status = status
        notes, self._notes = self._notes, []
        return notes

    def end(self) -> None:
        self._ended = True

    def ended(self, name: str) -> tuple[bool, str]:
        """Return whether the job has ended, and what it waits for."""
        if self._ended:
            self._left.add(name)
        return self._ended, self._status

    def left(self) -> int:
        return len(self._left)

    def bring(self, meeting: int, worker: int, value: Any) -> None:
        """Store what a worker contributes to a collective call."""
        self._meetings.setdefault(meeting, {})[worker] = value
        self._meetings.pop(meeting - 2, None)  # all workers have finished that one

    def brought(self, meeting: int) -> tuple[list[Any], list[int]]:
        """Return the values of all workers in order, empty while some are missing, and the missing workers."""
        values = self._meetings.get(meeting, {})
        missing = [worker for worker in range(self._workers) if worker not in values]
        return ([] if missing else [values[worker] for worker in range(self._workers)]), missing


def ask(ray: Any, call: Any, name: str, timeout_s: float = 60.0) -> Any:
    """Return the answer of the watcher. Raise ClusterError if there is none: then the job is over."""
    try:
        return ray.get(call, timeout=timeout_s)
    except Exception as error:
        raise ClusterError(
            f"{name}: lost the connection to worker 0 or to Ray on server 0 ({type(error).__name__})",
            "start all processes again: `online`, and `train --resume`, continue from the last checkpoint",
        ) from None


@contextmanager
def driving(role: Role, config: Config, log: Log) -> Iterator[Any]:
    """Run worker 0, which drives the job, and yield the watcher. When the block ends, the other processes end too."""
    cluster = config.cluster
    deadline = time.monotonic() + cluster.start_timeout
    with node(role, cluster.start_timeout, cluster.stop_timeout, log) as ray:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy  # only after Ray has read its token

        node_id = ray.get_runtime_context().get_node_id()
        here = NodeAffinitySchedulingStrategy(node_id, soft=False)
        watcher = (
            ray.remote(Watcher)
            .options(name=WATCH, num_cpus=0, scheduling_strategy=here)
            .remote(len(role.servers), role.workers)
        )
        ask(ray, watcher.arrive.remote(role.name, node_id, [node_id]), role.name)
        names = [f"server {i}" for i in range(len(role.servers))] + [f"worker {i}" for i in range(role.workers)]
        _wait_for_all(ray, watcher, names, deadline, log)
        try:
            with _notes(ray, watcher, log):
                yield watcher
        except (KeyboardInterrupt, SystemExit):
            with suppress(ClusterError):
                _end_job(ray, watcher, role, len(names) - 1, LEAVE_S / 5)
            raise
        _end_job(ray, watcher, role, len(names) - 1, LEAVE_S)


def _end_job(ray: Any, watcher: Any, role: Role, others: int, limit_s: float) -> None:
    """Announce the end of the job and wait until all other processes have seen it."""
    deadline = time.monotonic() + limit_s
    ask(ray, watcher.end.remote(), role.name, limit_s)
    while ask(ray, watcher.left.remote(), role.name, limit_s) < others and time.monotonic() < deadline:
        time.sleep(POLL_S / 2)


@contextmanager
def _notes(ray: Any, watcher: Any, log: Log) -> Iterator[None]:
    """Log the notes about arriving processes until the block ends."""
    over = threading.Event()

    def listen() -> None:
        with suppress(Exception):  # Ray raises when the job ends
            while not over.wait(NOTES_S):
                for note in ray.get(watcher.report.remote("")):
                    log(note)

    thread = threading.Thread(target=listen, daemon=True, name="clickfleet-notes")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(timeout=2)


def _wait_for_all(ray: Any, watcher: Any, names: list[str], deadline: float, log: Log) -> None:
    logged_at = 0.0
    while True:
        offered = ray.cluster_resources()
        missing = [name for name in names if place(name) not in offered]
        now = time.monotonic()
        if not missing:
            ask(ray, watcher.report.remote(""), "worker 0")
            return
        if now > deadline:
            raise ClusterError(
                f"still missing after cluster.start_timeout: {', '.join(missing)}",
                "start them, or raise cluster.start_timeout if they are only slow",
            )
        status = f"waiting for {more(missing, names)}: {', '.join(missing)} ({deadline - now:.0f} s left)"
        for note in ask(ray, watcher.report.remote(status), "worker 0"):
            log(note)
        if now - logged_at > LOG_EVERY_S:
            logged_at = now
            log(status)
        time.sleep(POLL_S)


def serve(role: Role, config: Config, log: Log) -> None:
    """Keep the node of any other process running until worker 0 ends the job.

    After a signal, wait at most cluster.stop_timeout for worker 0: it may have received the signal too, and saves.
    """
    cluster = config.cluster
    deadline = time.monotonic() + cluster.start_timeout
    stopped: list[int] = []
    logged = ""
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
                    log(f"{role.name}: {signal.Signals(stopped[0]).name}; waiting until worker 0 has ended the job, "
                        f"for {cluster.stop_timeout:.0f} s at most")  # fmt: skip
                if _without_time(status) != _without_time(logged):
                    log(f"{role.name}: {status or 'all processes have joined'}")
                logged = status
                time.sleep(POLL_S)
        if role.starts_head:
            _let_others_leave(ray)
    log(f"{role.name}: {'stopped by a signal' if stopped else 'the job has ended'}")
    if stopped:
        leave(stopped[0])


def _without_time(status: str) -> str:
    """Return the status without the seconds that are left."""
    return status.partition("(")[0]


def _arrive(ray: Any, watcher: Any, role: Role, log: Log, spare: bool = True) -> None:
    """Report this process to the watcher. Raise ClusterError if it must leave, or must be a spare and cannot."""
    alive = [each["NodeID"] for each in ray.nodes() if each["Alive"]]
    node_id = ray.get_runtime_context().get_node_id()
    duty = ask(ray, watcher.arrive.remote(role.name, node_id, alive), role.name)
    if duty == LEAVE:
        raise ClusterError(
            f"{role.name} leaves: this run was started with fewer {role.kind}s",
            "start all processes with the same numbers of servers and workers; to change them, stop the job and resume it",
        )
    if duty == SPARE and not spare:
        raise ClusterError(f"{role.name} leaves: this run has its {role.name} already", "start each process once")
    if duty == SPARE:
        log(f"{role.name}: this run has its {role.name} already; waiting as a spare to replace it if it fails")


@contextmanager
def following(role: Role, config: Config, log: Log) -> Iterator[Any]:
    """Run a worker other than worker 0 and yield the watcher of the job."""
    cluster = config.cluster
    deadline = time.monotonic() + cluster.start_timeout
    with node(role, cluster.start_timeout, cluster.stop_timeout, log) as ray:
        watcher = _find(ray, role, deadline, log)
        _arrive(ray, watcher, role, log, spare=False)
        try:
            yield watcher
        except (KeyboardInterrupt, SystemExit):  # worker 0 may have received the signal too, and saves
            with suppress(ClusterError):
                _wait_for_end(ray, watcher, role, cluster.stop_timeout)
            raise
        _wait_for_end(ray, watcher, role, cluster.timeout)


def _wait_for_end(ray: Any, watcher: Any, role: Role, limit_s: float) -> None:
    """Wait until worker 0 has ended the job."""
    deadline = time.monotonic() + limit_s
    while not ask(ray, watcher.ended.remote(role.name), role.name)[0] and time.monotonic() < deadline:
        time.sleep(POLL_S / 2)


def bring(watcher: Any, meeting: int, worker: int, value: Any) -> None:
    """Store what a worker contributes to a collective call of all workers."""
    ask(ray_module(), watcher.bring.remote(meeting, worker, value), f"worker {worker}")


def brought(watcher: Any, meeting: int, name: str) -> tuple[list[Any], list[int]]:
    """Return the values of a collective call, empty while some are missing, and the missing workers."""
    values, missing = ask(ray_module(), watcher.brought.remote(meeting), name)
    return values, missing


def gone(workers: int) -> list[int]:
    """Return the workers whose node has left the cluster."""
    offered = ray_module().cluster_resources()
    return [worker for worker in range(workers) if place(f"worker {worker}") not in offered]


def _find(ray: Any, role: Role, deadline: float, log: Log) -> Any:
    logged_at = 0.0
    while True:
        try:
            return ray.get_actor(WATCH, namespace=SPACE)
        except ValueError:
            now = time.monotonic()
            if now > deadline:
                raise ClusterError(
                    f"{role.name}: worker 0 has not joined within cluster.start_timeout", "start worker 0"
                ) from None
            if now - logged_at > LOG_EVERY_S:
                logged_at = now
                log(f"{role.name} waits for worker 0 ({deadline - now:.0f} s left)")
            time.sleep(POLL_S)


def _let_others_leave(ray: Any) -> None:
    """Wait for the other nodes. The head leaves last, so that no end looks like a failure."""
    deadline = time.monotonic() + LEAVE_S
    while sum(1 for each in ray.nodes() if each["Alive"]) > 1 and time.monotonic() < deadline:
        time.sleep(POLL_S)
