"""A user's program in every role of a job, all of them processes of this machine, each with a log of its own."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from clickfleet.cluster import roles
from clickfleet.errors import ConfigError

HOST = "127.0.0.1"
TICK_S = 0.2
END_S = 20.0
"""How long servers may take to end after the last worker has."""


def launch(
    program: str, arguments: Sequence[str], servers: int, workers: int, folder: str
) -> tuple[str, int, str] | None:
    """Runs it to its end; the first worker that failed, its exit code and the last line it wrote, if one did."""
    if not Path(program).is_file():
        raise ConfigError(f"there is no {program}", "name a Python program, or a YAML file")
    logs = Path(folder)
    logs.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-u", program, *arguments]
    running: dict[str, subprocess.Popen[bytes]] = {}
    with ExitStack() as files:
        try:
            for name, environ in environments(servers, workers).items():
                out = files.enter_context((logs / f"{name}.log").open("wb"))
                running[name] = subprocess.Popen(
                    command, env={**os.environ, **environ}, stdout=out, stderr=subprocess.STDOUT
                )
            failed = _wait(running)
        finally:
            for process in running.values():
                if process.poll() is None:
                    process.send_signal(signal.SIGTERM)
            for process in running.values():
                try:
                    process.wait(timeout=END_S)
                except subprocess.TimeoutExpired:
                    process.kill()
    if failed is None:
        return None
    said = (logs / f"{failed}.log").read_text(errors="replace").strip().splitlines()
    return failed, running[failed].returncode, said[-1] if said else "it said nothing"


def _wait(running: dict[str, subprocess.Popen[bytes]]) -> str | None:
    """Until all workers have ended and the servers after them; the first that failed ends the rest."""
    deadline = float("inf")
    while True:
        codes = {name: process.poll() for name, process in running.items()}
        for name, code in codes.items():
            if code:
                return name
        if None not in codes.values() or time.monotonic() > deadline:
            return None
        if all(code is not None for name, code in codes.items() if name.startswith("worker")):
            deadline = min(deadline, time.monotonic() + END_S)
        time.sleep(TICK_S)


def environments(servers: int, workers: int) -> dict[str, dict[str, str]]:
    """What each process is told of its role, by the name of the process."""
    *ports, head = _free_ports(servers + 1)
    job = {
        roles.SERVERS: ",".join(f"{HOST}:{port}" for port in ports),
        roles.WORKERS: str(workers),
        roles.HOST: HOST,
        roles.RAY_PORT: str(head),
        roles.RAY: "",
    }
    found = {f"server-{i}": {**job, roles.ROLE: "PSERVER", roles.PORT: str(port)} for i, port in enumerate(ports)}
    return found | {f"worker-{i}": {**job, roles.ROLE: "TRAINER", roles.INDEX: str(i)} for i in range(workers)}


def _free_ports(count: int) -> list[int]:
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind((HOST, 0))
        return [int(each.getsockname()[1]) for each in sockets]
