"""A worker process: HTTP and gRPC on one event loop. It switches versions as the updater directs.

python -m clickfleet.serve.server STATE NUMBER DESCRIPTOR
"""

import asyncio
import contextlib
import gc
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import uvicorn

from clickfleet.errors import CheckpointError, ClickfleetError
from clickfleet.serve import admin, parent, state_folder
from clickfleet.serve.auth import Tokens
from clickfleet.serve.batching import AdmissionControl, Batcher
from clickfleet.serve.connection import Limits, limited, sweep
from clickfleet.serve.context import Context
from clickfleet.serve.counters import Meter
from clickfleet.serve.feedback import FeedbackLog
from clickfleet.serve.http import App
from clickfleet.serve.overlays import Layer
from clickfleet.serve.predictor import Version, open_version
from clickfleet.serve.priority import WORKER_SLICE_S, shorten_slices
from clickfleet.serve.show_log import ShowLog
from clickfleet.serve.state_folder import Coming, Status, UpdaterHealth, VersionWatch
from clickfleet.serve.supervisor import Settings
from clickfleet.store.atomic import checksum
from clickfleet.store.published import Entry, unfinished_network

TOKEN, ADMIN_TOKEN = "CLICKFLEET_TOKEN", "CLICKFLEET_ADMIN_TOKEN"
STOP_NOTICE_S = 0.3
"""How long a stopping worker still accepts connections, while `/ready` reports that it stops."""
DRAIN_S = 10
GC_THRESHOLD = 50_000
"""Garbage collection threshold. A request with many candidates allocates thousands of objects, none of them in cycles."""
SWITCH_S = 0.0005
"""Thread switch interval: how long a thread that opens a new version may block the event loop."""


class VersionLoader:
    """Open the versions that the updater names. Reuse layers that are already open, and what was prepared."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._opened: dict[str, Layer] = {}
        self._previous: Version | None = None
        self._network: tuple[object, Any] | None = None
        """The network of the entry that is being written: its checksum, and its session."""
        self._next: tuple[Coming, Version, dict[str, Layer]] | None = None
        """The version that is about to be published, and its layers by folder."""

    def prepare(self, coming: Coming) -> None:
        """Open the network of an entry while the rest is being written, or a version whose entry has no line yet."""
        if self.settings.rows not in ("mapped", "memory"):
            return
        if coming.layers:
            self._next = None
            opened = dict(self._opened)  # without the new layers: another entry may still get their names
            self._next = coming, self._open(Entry(coming.entry), coming.layers, opened), opened
        elif self._previous is not None:
            network = unfinished_network(Path(coming.entry), self._previous.entry)
            if network is not None:
                self._network = dict(checksum(network)), self.settings.engine.session(network)

    def open(self, status: Status) -> Version:
        settings = self.settings
        if self._next is not None:
            coming, version, opened = self._next
            same = (coming.entry, coming.layers) == (status.entry, status.layers)
            if same and version.entry.hash == status.hash:  # another entry may have had its name
                self._previous, self._network, self._next = version, None, None
                self._opened = {folder: opened[folder] for folder in status.layers}
                return version
        entry = Entry(status.entry)
        if settings.rows not in ("mapped", "memory"):
            from clickfleet.serve.redis_cache import RedisRows

            rows = RedisRows(settings.rows, entry)
            count = int(entry.manifest["rows"])
            return Version(entry, rows, settings.name, row_count=count, engine=settings.engine, like=self._previous)
        version = self._previous = self._open(entry, status.layers, self._opened)
        self._network = self._next = None
        self._opened = {folder: layer for folder, layer in self._opened.items() if folder in status.layers}
        return version

    def _open(self, entry: Entry, layers: list[str], opened: dict[str, Layer]) -> Version:
        settings, network = self.settings, self._network
        return open_version(
            entry,
            layers,
            "memory" if settings.rows == "memory" else "mapped",
            settings.name,
            opened=opened,
            engine=settings.engine,
            like=self._previous,
            session=network[1] if network is not None and network[0] == entry.network else None,
        )


class _Server(uvicorn.Server):
    handshake_s: float
    """Time limit of a TLS handshake."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # the worker handles signals itself

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Do what the parent does for listening sockets, with a time limit for handshakes."""
        config, loop = self.config, asyncio.get_running_loop()
        await self.lifespan.startup()
        limit = self.handshake_s if config.ssl else None
        kind: Any = config.http_protocol_class

        def connection() -> Any:
            return kind(config=config, server_state=self.server_state, app_state=self.lifespan.state)

        self.servers = [
            await loop.create_server(
                connection, sock=listener, ssl=config.ssl, backlog=config.backlog, ssl_handshake_timeout=limit
            )
            for listener in sockets or []
        ]
        self.started = True


async def serve(settings: Settings, number: int, listener: socket.socket) -> None:
    state = Path(settings.state)
    loader = VersionLoader(settings)
    stamp, status = await _first_status(state)
    version = await asyncio.to_thread(loader.open, status)
    batcher = Batcher(version, max_queue_s=settings.max_queue_ms / 1e3, merge=settings.batching)
    context = Context(
        settings,
        batcher,
        Meter(state / f"worker-{number}.json"),
        Tokens(settings.token_file, TOKEN),
        Tokens(settings.admin_token_file, ADMIN_TOKEN),
        status,
        AdmissionControl(settings.max_queue_ms / 1e3, batcher.counts),
        UpdaterHealth(settings.stale_s),
    )
    if settings.log is not None:
        context.shows = ShowLog(settings.frames, context.meter, settings.log_sample)
    if settings.feedback is not None:
        context.feedback = FeedbackLog(settings.target(settings.feedback), context.meter)
    limits = Limits(
        settings.max_header_bytes,
        settings.header_timeout_s,
        settings.body_timeout_s,
        settings.send_timeout_s,
        settings.idle_timeout_s,
        settings.max_connections,
    )
    config = uvicorn.Config(
        App(context, admin.admin_app(context)),
        http=limited(limits, context.meter),
        ws="none",
        log_level="error",
        access_log=False,
        server_header=False,
        date_header=False,
        timeout_graceful_shutdown=DRAIN_S,
        backlog=2048,
        ssl_certfile=settings.tls_cert,
        ssl_keyfile=settings.tls_key,
    )
    server = _Server(config)
    server.handshake_s = settings.header_timeout_s
    context.connections = lambda: len(server.server_state.connections)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signal_number, stop.set)
    grpc_server = None
    if settings.grpc_port is not None:
        from clickfleet.serve import grpc

        grpc_server = await grpc.start(context)
    tasks = [
        asyncio.create_task(VersionWatch(context, loader.open, loader.prepare, state, stamp).run()),
        asyncio.create_task(sweep(server.server_state.connections, limits)),
        asyncio.create_task(_ready_when_started(server, state / f"ready-{number}")),
        asyncio.create_task(_stop(context, server, grpc_server, stop)),
    ]
    try:
        await server.serve(sockets=[listener])
    finally:
        for task in tasks:
            task.cancel()
        if grpc_server is not None:
            await grpc_server.stop(DRAIN_S)
        logs = [log for log in (context.shows, context.feedback) if log is not None]
        await asyncio.to_thread(lambda: [log.close() for log in logs])
        context.save_counts()
        batcher.close()
        gc.unfreeze()  # otherwise the core would report every object as leaked


async def _first_status(state: Path) -> tuple[Any, Status]:
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline:
        stamp, status = state_folder.stamp(state), state_folder.read_status(state)
        if status is not None:
            return stamp, status
        await asyncio.sleep(0.01)
    raise CheckpointError("the updater provided no version within 10 minutes")


async def _ready_when_started(server: uvicorn.Server, mark: Path) -> None:
    while not server.started:
        await asyncio.sleep(0.005)
    gc.collect()
    gc.freeze()  # exclude the long-lived objects from every later collection
    gc.set_threshold(GC_THRESHOLD)
    state_folder.write_json(mark, os.getpid())


async def _stop(context: Context, server: uvicorn.Server, grpc_server: Any, stop: asyncio.Event) -> None:
    """Wait for a signal or the death of the parent, then stop without losing a request."""
    while not stop.is_set():
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), 1.0)
        if parent.is_gone():
            stop.set()
    context.draining = True
    await asyncio.sleep(STOP_NOTICE_S)
    if grpc_server is not None:
        await grpc_server.stop(DRAIN_S)
    server.should_exit = True


def main() -> None:
    state, number, descriptor = sys.argv[1:]
    listener = socket.socket(fileno=int(descriptor))
    listener.setblocking(False)
    sys.setswitchinterval(SWITCH_S)
    shorten_slices(WORKER_SLICE_S)
    _raise_file_limit()
    try:
        _run(serve(Settings.read(state), int(number), listener))
    except ClickfleetError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(1)


def _raise_file_limit() -> None:
    """Raise the limit of open files to the maximum: every connection needs one."""
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _run(work: Any) -> None:
    try:
        import uvloop
    except ModuleNotFoundError:  # not on Windows
        asyncio.run(work)
    else:
        uvloop.run(work)


if __name__ == "__main__":
    main()
