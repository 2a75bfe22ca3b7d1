"""A process that somebody else started with a role: it becomes a node of one Ray cluster, and stays until worker 0 has ended the job.

Each role is a Ray node of its own that offers one resource, `clickfleet shard 0` or `clickfleet worker 1`, so a shard or a worker runs
where its role was started. The end is told by a named actor of worker 0: while it lives the job goes on, and it ends with its maker.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from clickfleet.cluster.fleet import place, ray_module
from clickfleet.cluster.roles import Role
from clickfleet.config import Config
from clickfleet.errors import ClusterError
from clickfleet.interrupts import interruptible

Log = Callable[[str], None]
SPACE, WATCH = "clickfleet", "the end"
POLL_S = 0.5
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
    """Lives as long as the job, and knows whether it ended well and who has heard of it."""

    def __init__(self) -> None:
        self._ended = False
        self._left: set[str] = set()

    def end(self) -> None:
        self._ended = True

    def ended(self, name: str) -> bool:
        if self._ended:
            self._left.add(name)
        return self._ended

    def left(self) -> int:
        return len(self._left)


@contextmanager
def node(role: Role, timeout_s: float, log: Log) -> Iterator[Any]:
    """Ray, joined, while this process's node is part of it."""
    ray = ray_module()
    # A folder of its own keeps the nodes of one host apart, while they start and when a driver looks for its own.
    with tempfile.TemporaryDirectory(prefix="clickfleet-", ignore_cleanup_errors=True) as folder:
        child = _start(role, folder, timeout_s, log)
        try:
            _join(ray, role, folder, child, timeout_s, log)
            yield ray
        finally:
            ray.shutdown()
            child.terminate()
            try:
                child.wait(timeout=10)
            except subprocess.TimeoutExpired:
                child.kill()


def _start(role: Role, folder: str, timeout_s: float, log: Log) -> subprocess.Popen[bytes]:
    offers = {place(role.name): 1}
    command = [str(Path(sys.executable).with_name("ray")), "start", "--block", "--disable-usage-stats"]
    command += [f"--node-ip-address={role.host}", "--num-cpus=0", f"--resources={json.dumps(offers)}"]
    # Several nodes may be on one host: no port of theirs is fixed.
    command += ["--min-worker-port=0", "--max-worker-port=0", "--dashboard-agent-listen-port=0"]
    command += [f"--object-store-memory={1 << 27}", f"--temp-dir={folder}"]
    if role.starts_head:
        command += ["--head", f"--port={role.ray.rpartition(':')[2]}", "--include-dashboard=false"]
        log(f"{role.name} starts Ray at {role.ray}")
    else:
        _wait_for_head(role, timeout_s, log)
        command += [f"--address={role.ray}"]
    quickly = {**os.environ, "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0"}  # nothing is left to drain when a role ends
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, preexec_fn=_end_with_parent, env=quickly)


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: no node outlives its role


def _wait_for_head(role: Role, timeout_s: float, log: Log) -> None:
    host, _, port = role.ray.rpartition(":")
    begin = said = time.monotonic()
    while True:
        try:
            socket.create_connection((host, int(port)), timeout=2).close()
            return
        except OSError as error:
            now = time.monotonic()
            if now - begin > timeout_s:
                raise ClusterError(
                    f"{role.name}: no Ray at {role.ray} after {timeout_s:.0f} s ({error})",
                    "server 0 starts it, unless RAY_ADDRESS is set: is it there, and the port open?",
                ) from None
            if now - said > 5:
                said = now
                log(f"{role.name} waits for Ray at {role.ray}")
            time.sleep(POLL_S)


def _join(ray: Any, role: Role, folder: str, child: subprocess.Popen[bytes], timeout_s: float, log: Log) -> None:
    begin = time.monotonic()
    while True:
        if child.poll() is not None:
            raise ClusterError(
                f"{role.name}: its Ray node ended with exit code {child.returncode}",
                "what it said stands above; give all processes the same RAY_AUTH_TOKEN",
            )
        try:
            ray.init(
                address=role.ray,
                namespace=SPACE,
                log_to_driver=False,
                logging_level="ERROR",
                _temp_dir=folder,
            )
            log(f"{role.name} of {len(role.servers)} servers and {role.workers} workers has joined Ray at {role.ray}")
            return
        except Exception as error:
            ray.shutdown()
            if time.monotonic() - begin > timeout_s:
                raise ClusterError(f"{role.name} cannot join Ray at {role.ray}: {error}") from error
            time.sleep(POLL_S)


@contextmanager
def driving(role: Role, config: Config, log: Log) -> Iterator[None]:
    """Worker 0 while it leads the job; the others end with it."""
    with node(role, config.cluster.start_timeout, log) as ray:
        watcher = ray.remote(Watcher).options(name=WATCH, num_cpus=0).remote()
        names = [f"server {i}" for i in range(len(role.servers))] + [f"worker {i}" for i in range(role.workers)]
        _wait_for_all(ray, names, config.cluster.start_timeout, log)
        yield
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
                    f"{role.name}: worker 0, which drives, is gone ({type(error).__name__})",
                    "start all processes again; with --resume they go on from the last checkpoint",
                ) from None
            time.sleep(POLL_S)
        if role.starts_head:
            _let_others_leave(ray)
    log(f"{role.name}: {'stopped by a signal' if stopped else 'the job has ended'}")


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
