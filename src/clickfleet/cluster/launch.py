"""Run a user's program in every role of a job, as processes of this machine, each with its own log."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from clickfleet.cluster import process_tree
from clickfleet.cluster.nodes import LAUNCHER
from clickfleet.cluster.process import log_name
from clickfleet.cluster.processes import Log
from clickfleet.cluster.ray_runtime import keep_token
from clickfleet.errors import ConfigError
from clickfleet.training.signals import interruptible, leave

TICK_S = 0.1
END_S = 20.0
"""Time limit for servers to end after the last worker."""
SAVE_S = 600.0
"""Time limit for worker 0 after a signal. Its own limit, cluster.stop_timeout, is shorter."""
LEAVE_S, STOP_S = 3.0, 5.0
"""Time limits for the others to end after worker 0, and after SIGTERM. Then they are killed."""
DRIVER = "worker-0"

Running = dict[str, "subprocess.Popen[bytes]"]


def launch(
    program: str, arguments: Sequence[str], environments: Mapping[str, Mapping[str, str]], folder: str, log: Log
) -> tuple[str, int, str] | None:
    """Run the program in one process per environment, to its end.

    Return the first worker that failed, its exit code and the last line it wrote; None if all succeeded.

    A signal is passed on to worker 0, which saves and ends the job. A second one ends all processes at once. No process outlives
    this one.
    """
    if not Path(program).is_file():
        raise ConfigError(f"{program} does not exist", "give a Python program or a YAML file")
    logs = Path(folder)
    logs.mkdir(parents=True, exist_ok=True)
    keep_token(make=True)
    command = [sys.executable, "-u", program, *arguments]
    running: Running = {}
    stopped: list[int] = []
    others = process_tree.own_children()
    with interruptible(stopped.append), process_tree.adopting_orphans(), ExitStack() as files:
        try:
            for name, environ in environments.items():
                out = files.enter_context((logs / log_name(name)).open("wb"))
                # Each has its own session: a signal of the terminal reaches only this process, which passes it on once.
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
    lines = (logs / log_name(failed)).read_text(errors="replace").strip().splitlines()
    return failed, running[failed].returncode, lines[-1] if lines else "its log is empty"


def _wait(running: Running, stopped: list[int], log: Log) -> str | None:
    """Wait until all workers and then all servers have ended. Return at once if one fails, with its name."""
    deadline = float("inf")
    forwarded = False
    while True:
        codes = {name: process.poll() for name, process in running.items()}
        if stopped and not forwarded:
            forwarded, deadline = True, time.monotonic() + SAVE_S
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
    """End the remaining processes and all their descendants."""
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
        for pid in roots - {process.pid for process in running.values()}:  # orphans
            with suppress(OSError):
                os.waitpid(pid, 0)
