"""Start Ray, or join a running one, in a thread, so that the command can import torch and read the data meanwhile."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from clickfleet.cluster import process_tree
from clickfleet.cluster.fork_server import SUPPORTED, ForkServer
from clickfleet.cluster.ray_runtime import (
    LOOPBACK,
    deaf_children,
    keep_token,
    lean,
    on_loopback,
    our_signals,
    ray_module,
)
from clickfleet.config.sections import Cluster, WorkerRange
from clickfleet.data import files
from clickfleet.training.signals import interruptible, leave

ABANDON_S = 4.0
"""Time limit for a start that is no longer wanted. Then its processes are killed."""
QUIET: dict[str, object] = {"log_to_driver": False, "logging_level": "ERROR"}


class RayStart:
    """One attempt to start a private Ray, or to join the one at an address."""

    def __init__(self, settings: Cluster, plain: bool = False) -> None:
        self.settings, self.cpus, self.plain = settings, cpus_of(settings), plain
        self.ray: Any = None
        self.problem: Exception | None = None
        self.done = threading.Event()
        self._unwanted = threading.Event()
        self._others: set[int] | None = process_tree.own_children()
        """Children of this process that do not belong to Ray, while it starts."""
        self._roots: set[int] = set()
        self._server: ForkServer | None = None
        if settings.address is None and not plain and SUPPORTED:
            with deaf_children():
                self._server = ForkServer(files.temporary(short=True))
        threading.Thread(target=self._run, daemon=True, name="clickfleet-ray").start()

    def _run(self) -> None:
        try:
            self.ray = ray_module()  # in this thread: a signal must not end an import of Ray half-way
            with our_signals(self.ray):
                if self.settings.address is None:
                    self._start()
                else:
                    self.ray.init(address=self.settings.address, **QUIET)
        except Exception as error:
            self.problem = error
        finally:
            if self.settings.address is None:
                self._roots = self.roots()
            self._others = None
            self.done.set()
        self._unwanted.wait()  # Linux ends the processes of Ray together with the thread that started them

    def _start(self) -> None:
        options: dict[str, Any] = {**QUIET, "include_dashboard": False, "object_store_memory": 1 << 28}
        if "RAY_TMPDIR" not in os.environ:  # Ray makes its folders readable for everyone: put them into a private one
            options["_temp_dir"] = str(files.temporary(short=True) / "ray")
        keep_token(make=True)
        started = nullcontext() if self.plain else lean(self.ray, self.cpus, self._server)
        with on_loopback(self.ray), started:
            self.ray.init(address="local", _node_ip_address=LOOPBACK, num_cpus=self.cpus, **options)

    def roots(self) -> set[int]:
        """Return the children of this process that belong to Ray."""
        return self._roots if self._others is None else process_tree.own_children() - self._others

    def end(self) -> None:
        """Shut down Ray, and kill what is left of it."""
        self.done.wait(ABANDON_S if self.settings.address is None else 0.0)
        started = process_tree.tree(self.roots())
        try:
            if self.done.is_set() and self.ray is not None:
                self.ray.shutdown()
        finally:
            process_tree.kill(started)
            if self._server is not None:
                self._server.end()
            self._roots = set()
            self._unwanted.set()


def cpus_of(settings: Cluster) -> int:
    """Return the CPUs that a private Ray offers: one for every process of the run, or those of the machine if the run chooses the number
    of its workers. Ray starts as many processes ahead."""
    needed = settings.shards + settings.workers
    return max(needed, os.cpu_count() or 1) if isinstance(settings.workers, WorkerRange) else needed


_ahead: list[RayStart] = []
"""The start that no run has taken yet."""


@contextmanager
def ahead(settings: Cluster) -> Iterator[None]:
    """Start a private Ray in the background for the first run in this block. End it if no run takes it."""
    ray = sys.modules.get("ray")
    if settings.address is not None or settings.endpoints or _ahead or (ray is not None and ray.is_initialized()):
        yield
        return

    def stop(number: int) -> None:
        if _ahead:
            leave(number)
        signal.raise_signal(number)  # the run has handlers of its own: this one is not ours

    with interruptible(stop):
        _ahead.append(RayStart(settings))
        try:
            yield
        finally:
            if _ahead:
                _ahead.pop().end()


def begun() -> bool:
    """Return whether a Ray was started ahead that no run has taken yet."""
    return bool(_ahead)


def take(settings: Cluster, plain: bool = False) -> RayStart:
    """Return the start that has begun ahead, or a new one if there is none or it has too few CPUs. `plain`: leave nothing out."""
    if _ahead:
        begun = _ahead.pop()
        if settings.address is None and begun.cpus >= cpus_of(settings):
            return begun
        begun.end()
    return RayStart(settings, plain)
