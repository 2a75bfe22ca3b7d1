"""A node of a Ray cluster that lives as long as this process: how a role becomes part of its job."""

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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from clickfleet import paths
from clickfleet.cluster.fleet import Log, place, ray_module
from clickfleet.cluster.roles import Role
from clickfleet.errors import ClusterError

SPACE = "clickfleet"
POLL_S = 0.5
STARTS = 3
"""Times that a node is started before its process gives up: a busy machine is too slow for Ray's own patience."""


@contextmanager
def node(role: Role, timeout_s: float, log: Log) -> Iterator[Any]:
    """Ray, joined, while this process's node is part of it."""
    ray = ray_module()
    for attempt in range(1, STARTS + 1):
        # A folder of its own keeps the nodes of one host apart, while they start and when a driver looks for its own.
        with tempfile.TemporaryDirectory(None, "r", paths.temporary(short=True), ignore_cleanup_errors=True) as folder:
            child = _start(role, folder, timeout_s, log)
            try:
                problem = _join(ray, role, folder, child, timeout_s)
                if not problem:
                    log(
                        f"{role.name} of {len(role.servers)} servers and {role.workers} workers has joined Ray at {role.ray}"
                    )
                    yield ray
                    return
            finally:
                ray.shutdown()
                _end(child)
        if attempt == STARTS:
            raise ClusterError(
                f"{role.name} cannot join Ray at {role.ray}: {problem}",
                "what its node said stands above; give all processes the same RAY_AUTH_TOKEN",
            )
        log(f"{role.name}: {problem}; once more")


def _end(child: subprocess.Popen[bytes]) -> None:
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
    command += [f"--object-store-memory={1 << 27}", f"--temp-dir={folder}", "--include-log-monitor=false"]
    if role.starts_head:
        command += ["--head", f"--port={role.ray.rpartition(':')[2]}", "--include-dashboard=false", "--no-monitor"]
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


def _join(ray: Any, role: Role, folder: str, child: subprocess.Popen[bytes], timeout_s: float) -> str:
    """Connects to the node once it is there; why it cannot be, else."""
    begin = time.monotonic()
    while child.poll() is None:
        try:
            ray.init(address=role.ray, namespace=SPACE, log_to_driver=False, logging_level="ERROR", _temp_dir=folder)
            return ""
        except Exception as error:
            ray.shutdown()
            if time.monotonic() - begin > timeout_s:
                return str(error)
            time.sleep(POLL_S)
    return f"its node ended with exit code {child.returncode}"
