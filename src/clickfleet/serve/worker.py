"""One worker process: HTTP and gRPC on one event loop, following what the updater says.

python -m clickfleet.serve.worker STATE NUMBER DESCRIPTOR
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
from clickfleet.published import Entry
from clickfleet.serve import slow, versions
from clickfleet.serve.admission import Admission
from clickfleet.serve.batching import Batcher
from clickfleet.serve.connection import Limits, limited, sweep
from clickfleet.serve.context import Context
from clickfleet.serve.http import App
from clickfleet.serve.meter import Meter
from clickfleet.serve.predictor import Version, open_version
from clickfleet.serve.settings import Settings
from clickfleet.serve.tokens import Tokens
from clickfleet.serve.versions import Status
from clickfleet.serve.watch import Following, Watch

TOKEN, ADMIN_TOKEN = "CLICKFLEET_TOKEN", "CLICKFLEET_ADMIN_TOKEN"
LAME_S = 0.3
"""How long a worker still accepts connections once it was told to stop, saying that it will."""
DRAIN_S = 10
GARBAGE = 50_000
"""Objects more than were freed before a collection: a request of many candidates makes thousands, none of them in cycles."""
SWITCH_S = 0.0005
"""How long a thread that opens a new version may keep the interpreter from the event loop."""


class Loader:
    """Opens the versions that the updater names; layers already open are used again."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._opened: dict[str, Any] = {}
        self._before: Version | None = None

    def open(self, status: Status) -> Version:
        settings = self.settings
        entry = Entry(status.entry)
        if settings.rows not in ("mapped", "memory"):
            from clickfleet.serve.remote_rows import RedisRows

            rows = RedisRows(settings.rows, entry)
            count = int(entry.manifest["rows"])
            return Version(entry, rows, settings.name, row_count=count, engine=settings.engine, like=self._before)
        version = open_version(
            entry,
            status.layers,
            "memory" if settings.rows == "memory" else "mapped",
            settings.name,
            opened=self._opened,
            engine=settings.engine,
            like=self._before,
        )
        self._before = version
        self._opened = {folder: layer for folder, layer in self._opened.items() if folder in status.layers}
        return version


class _Server(uvicorn.Server):
    handshake_s: float
    """Time for a TLS handshake."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # the worker has its own way to stop

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As its parent does for sockets that listen already, but with a limit for handshakes."""
        config, loop = self.config, asyncio.get_running_loop()
        await self.lifespan.startup()
        limit = self.handshake_s if config.ssl else None
        kind: Any = config.http_protocol_class

        def connection() -> Any:
            return kind(config=config, server_state=self.server_state, app_state=self.lifespan.state)

        self.servers = [
            await loop.create_server(
                connection, sock=one, ssl=config.ssl, backlog=config.backlog, ssl_handshake_timeout=limit
            )
            for one in sockets or []
        ]
        self.started = True


async def serve(settings: Settings, number: int, listener: socket.socket) -> None:
    state = Path(settings.state)
    loader = Loader(settings)
    stamp, status = await _first(state)
    version = await asyncio.to_thread(loader.open, status)
    batcher = Batcher(version, max_queue_s=settings.max_queue_ms / 1e3, merge=settings.batching)
    context = Context(
        settings,
        batcher,
        Meter(state / f"worker-{number}.json"),
        Tokens(settings.token_file, TOKEN),
        Tokens(settings.admin_token_file, ADMIN_TOKEN),
        status,
        Admission(settings.max_queue_ms / 1e3, batcher.counts),
        Following(settings.stale_s),
    )
    limits = Limits(
        settings.max_header_bytes,
        settings.header_timeout_s,
        settings.body_timeout_s,
        settings.send_timeout_s,
        settings.idle_timeout_s,
        settings.max_connections,
    )
    config = uvicorn.Config(
        App(context, slow.make(context)),
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
    for number_of_signal in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number_of_signal, stop.set)
    calls = None
    if settings.grpc_port is not None:
        from clickfleet.serve import grpc

        calls = await grpc.start(context)
    tasks = [
        asyncio.create_task(Watch(context, loader.open, state, stamp).run()),
        asyncio.create_task(sweep(server.server_state.connections, limits)),
        asyncio.create_task(_ready_when_started(server, state / f"ready-{number}")),
        asyncio.create_task(_stop(context, server, calls, stop, os.getppid())),
    ]
    try:
        await server.serve(sockets=[listener])
    finally:
        for task in tasks:
            task.cancel()
        if calls is not None:
            await calls.stop(DRAIN_S)
        context.save_counts()
        batcher.close()
        gc.unfreeze()  # or the core would report everything as leaked


async def _first(state: Path) -> tuple[Any, Status]:
    until = time.monotonic() + 600
    while time.monotonic() < until:
        stamp, status = versions.stamp(state), versions.read(state)
        if status is not None:
            return stamp, status
        await asyncio.sleep(0.01)
    raise CheckpointError("the updater named no version in ten minutes")


async def _ready_when_started(server: uvicorn.Server, mark: Path) -> None:
    while not server.started:
        await asyncio.sleep(0.005)
    gc.collect()
    gc.freeze()  # what is there now stays: collections need not look at it while requests wait
    gc.set_threshold(GARBAGE)
    versions.put(mark, os.getpid())


async def _stop(context: Context, server: uvicorn.Server, calls: Any, stop: asyncio.Event, parent: int) -> None:
    """Waits for the signal (or the death of the parent), then stops without losing a request."""
    while not stop.is_set():
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), 1.0)
        if os.getppid() != parent:
            stop.set()
    context.draining = True
    await asyncio.sleep(LAME_S)
    if calls is not None:
        await calls.stop(DRAIN_S)
    server.should_exit = True


def main() -> None:
    state, number, descriptor = sys.argv[1:]
    listener = socket.socket(fileno=int(descriptor))
    listener.setblocking(False)
    sys.setswitchinterval(SWITCH_S)
    _allow_files()
    try:
        _run(serve(Settings.read(state), int(number), listener))
    except ClickfleetError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(1)


def _allow_files() -> None:
    """As many open files as the system lets this user have: a connection is one."""
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
