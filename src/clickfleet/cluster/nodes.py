"""A node of a Ray cluster that lives as long as this process: how a role becomes part of its job."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from clickfleet import paths
from clickfleet.cluster import process_tree
from clickfleet.cluster.fleet import SAY_EVERY_S, Log, place
from clickfleet.cluster.ray_runtime import LOOPBACK, LOOPBACK_ONLY, on_loopback, our_signals, ray_module
from clickfleet.cluster.roles import Role
from clickfleet.errors import ClusterError
from clickfleet.interrupts import interruptible, leave

SPACE = "clickfleet"
POLL_S = 0.5
STARTS = 3
"""Times that a node is started before its process gives up: a busy machine is too slow for Ray's own patience."""
STOP_LIMIT_S = 8.0
"""A role that a signal stops while it joins or leaves ends within so long, or is killed with its node."""
LOCAL_RAY = """
import sys
from ray._private import services
services.resolve_ip_for_localhost = lambda host: host
services.get_node_ip_address = lambda address=None: "127.0.0.1"
from ray.scripts.scripts import main
sys.argv[0] = "ray"
main()
"""
"""The command `ray` that takes the loopback for what it is: by itself it turns it into an address that others can reach."""
LAUNCHER = "CLICKFLEET_LAUNCHER"
"""In the environment of a role: the process id of its launcher, without which it does not go on."""


@contextmanager
def node(role: Role, timeout_s: float, stop_s: float, log: Log) -> Iterator[Any]:
    """Ray, joined, while this process's node is part of it; a signal ends it, unless who uses it sees to that."""
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
            # A folder of its own keeps the nodes of one host apart, while they start and when a driver looks for its own.
            with tempfile.TemporaryDirectory(
                None, "r", paths.temporary(short=True), ignore_cleanup_errors=True
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
                    "what its node said stands above; give all processes the same RAY_AUTH_TOKEN",
                )
            log(f"{role.name}: {problem}; once more")


def is_local(role: Role) -> bool:
    """Whether all of the job is on this machine, where nobody else is to reach it."""
    return {role.host, role.ray.rpartition(":")[0], *(server.host for server in role.servers)} == {LOOPBACK}


def _watch_launcher(roots: set[int], limit_s: float) -> None:
    """Ends this process when its launcher does: asked by the kernel where it can, and in any case after a while."""
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
    ray = ["-c", LOCAL_RAY] if is_local(role) else ["-m", "ray.scripts.scripts"]
    command = [sys.executable, *ray, "start", "--block", "--disable-usage-stats"]
    command += [f"--node-ip-address={role.host}", "--num-cpus=0", f"--resources={json.dumps(offers)}"]
    # Several nodes may be on one host: no port of theirs is fixed.
    command += ["--min-worker-port=0", "--max-worker-port=0", "--dashboard-agent-listen-port=0"]
    command += [f"--object-store-memory={1 << 27}", f"--temp-dir={folder}", "--include-log-monitor=false"]
    if role.starts_head:
        command += ["--head", f"--port={role.ray.rpartition(':')[2]}", "--include-dashboard=false", "--no-monitor"]
        log(f"{role.name} starts Ray at {role.ray} …")
    else:
        _wait_for_head(role, deadline, log)
        command += [f"--address={role.ray}"]
    environ = {name: value for name, value in os.environ.items() if name not in LOOPBACK_ONLY}  # which forbids nodes
    environ["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"] = "0"  # nothing is left to drain when a role ends
    # In a session of its own no signal of a terminal reaches it: its role ends it.
    return subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        preexec_fn=process_tree.end_with_parent,
        env=environ,
        start_new_session=True,
    )


def _wait_for_head(role: Role, deadline: float, log: Log) -> None:
    host, _, port = role.ray.rpartition(":")
    said = 0.0
    while True:
        try:
            socket.create_connection((host, int(port)), timeout=2).close()
            return
        except OSError as error:
            now = time.monotonic()
            if now > deadline:
                raise ClusterError(
                    f"{role.name}: no Ray at {role.ray} in time ({error})",
                    "server 0 starts it, unless RAY_ADDRESS is set: is it there, and the port open? or raise cluster.start_timeout",
                ) from None
            if now - said > SAY_EVERY_S:
                said = now
                log(f"{role.name} waits for Ray at {role.ray} ({deadline - now:.0f} s left)")
            time.sleep(POLL_S)


def _join(ray: Any, role: Role, folder: str, child: subprocess.Popen[bytes], deadline: float) -> str:
    """Connects to the node once it is there; why it cannot be, else."""
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
