"""A user's program in every role of a job, all of them processes of this machine, each with a log of its own."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from clickfleet.cluster import process_tree, roles
from clickfleet.cluster.fleet import Log
from clickfleet.cluster.nodes import LAUNCHER
from clickfleet.cluster.ray_runtime import LOOPBACK, keep_token
from clickfleet.errors import ConfigError
from clickfleet.interrupts import interruptible, leave

TICK_S = 0.1
END_S = 20.0
"""How long servers may take to end after the last worker has."""
SAVE_S = 600.0
"""The same of worker 0 after a signal; its own limit, cluster.stop_timeout, is shorter."""
LEAVE_S, STOP_S = 3.0, 5.0
"""How long the others may take to end after it, and after they are told to; then they are killed."""
DRIVER = "worker-0"

Running = dict[str, "subprocess.Popen[bytes]"]


def launch(
    program: str, arguments: Sequence[str], servers: int, workers: int, folder: str, log: Log
) -> tuple[str, int, str] | None:
    """Runs it to its end; the first worker that failed, its exit code and the last line it wrote, if one did.

    A signal is passed on to worker 0, which saves and ends the job; the next one ends all processes at once. No process outlives this one.
    """
    if not Path(program).is_file():
        raise ConfigError(f"there is no {program}", "name a Python program, or a YAML file")
    logs = Path(folder)
    logs.mkdir(parents=True, exist_ok=True)
    keep_token(make=True)
    command = [sys.executable, "-u", program, *arguments]
    running: Running = {}
    stopped: list[int] = []
    others = process_tree.own_children()
    with interruptible(stopped.append), process_tree.adopting_orphans(), ExitStack() as files:
        try:
            for name, environ in environments(servers, workers).items():
                out = files.enter_context((logs / f"{name}.log").open("wb"))
                # In sessions of their own: a signal of the terminal reaches this process, which passes it on once.
                running[name] = subprocess.Popen(
                    command,
                    env={**os.environ, **environ, LAUNCHER: str(os.getpid())},
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    preexec_fn=process_tree.end_with_parent,
                    start_new_session=True,
                )
            failed = _wait(running, stopped, log)
        finally:
            _end(running, others)
    if stopped:
        log(f"stopped by {signal.Signals(stopped[0]).name}: all processes have ended")
        leave(stopped[0])
    if failed is None:
        return None
    said = (logs / f"{failed}.log").read_text(errors="replace").strip().splitlines()
    return failed, running[failed].returncode, said[-1] if said else "it said nothing"


def _wait(running: Running, stopped: list[int], log: Log) -> str | None:
    """Until all workers have ended and the servers after them; the first that failed ends the rest."""
    deadline = float("inf")
    told = False
    while True:
        codes = {name: process.poll() for name, process in running.items()}
        if stopped and not told:
            told, deadline = True, time.monotonic() + SAVE_S
            log(f"{signal.Signals(stopped[0]).name}: {DRIVER} saves and ends the job; another signal ends it at once")
            if codes[DRIVER] is None:
                running[DRIVER].send_signal(signal.SIGTERM)
        for name, code in codes.items():
            if code and not stopped:
                return name
        if None not in codes.values() or time.monotonic() > deadline:
            return None
        ended = [code is not None for name, code in codes.items() if name.startswith("worker")]
        if all(ended) or (stopped and codes[DRIVER] is not None):
            deadline = min(deadline, time.monotonic() + (LEAVE_S if stopped else END_S))
        time.sleep(TICK_S)


def _end(running: Running, others: set[int]) -> None:
    """Ends what has not ended by itself, and all that it started."""
    for process in running.values():
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + STOP_S
    for process in running.values():
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=max(0.0, deadline - time.monotonic()))
    while roots := process_tree.own_children() - others:
        process_tree.kill(process_tree.tree(roots))
        for process in running.values():
            process.wait()
        for pid in roots - {process.pid for process in running.values()}:  # whose parent has ended before them
            with suppress(OSError):
                os.waitpid(pid, 0)


def environments(servers: int, workers: int) -> dict[str, dict[str, str]]:
    """What each process is told of its role, by the name of the process."""
    *ports, head = _free_ports(servers + 1)
    job = {
        roles.SERVERS: ",".join(f"{LOOPBACK}:{port}" for port in ports),
        roles.WORKERS: str(workers),
        roles.HOST: LOOPBACK,
        roles.RAY_PORT: str(head),
        roles.RAY: "",
    }
    found = {f"server-{i}": {**job, roles.ROLE: "PSERVER", roles.PORT: str(port)} for i, port in enumerate(ports)}
    return found | {f"worker-{i}": {**job, roles.ROLE: "TRAINER", roles.INDEX: str(i)} for i in range(workers)}


def _free_ports(count: int) -> list[int]:
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind((LOOPBACK, 0))
        return [int(each.getsockname()[1]) for each in sockets]
