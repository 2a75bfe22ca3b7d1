"""Starts the workers on one listening socket and the updater, restarts what dies, stops all without losing a request."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from clickfleet import paths
from clickfleet.errors import ConfigError, MissingError, ServeError
from clickfleet.machine import WINDOWS
from clickfleet.serve import versions
from clickfleet.serve.settings import Settings

START_S = 120.0
STOP_S = 15.0
QUICK_S = 5.0
"""A process that dies sooner than this after its start is restarted more and more slowly."""
QUICK_DEATHS = 5
"""After so many quick deaths a process is taken for one that cannot run."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 10.0


@dataclass
class _Child:
    command: list[str]
    descriptors: tuple[int, ...] = ()
    process: "subprocess.Popen[bytes] | None" = None
    started: float = 0.0
    deaths: int = 0
    quick_deaths: int = 0
    restart_at: float | None = None

    def start(self) -> None:
        self.started, self.restart_at = time.monotonic(), None
        self.process = subprocess.Popen(self.command, pass_fds=self.descriptors, start_new_session=True)

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def hopeless(self) -> bool:
        """Whether it died again and again, right after its start."""
        return self.quick_deaths >= QUICK_DEATHS

    def bury(self) -> float:
        """Counts a death; the seconds until it is started again."""
        now = time.monotonic()
        self.deaths += 1
        self.quick_deaths = self.quick_deaths + 1 if now - self.started < QUICK_S else 0
        pause = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2**self.quick_deaths) if self.quick_deaths > 1 else 0.0
        self.restart_at = now + pause
        return pause


@dataclass
class Fleet:
    """The processes of one server."""

    settings: Settings
    listener: socket.socket
    reserved: socket.socket | None
    children: dict[str, _Child] = field(default_factory=dict)
    stopping: bool = False

    @property
    def address(self) -> str:
        scheme = "https" if self.settings.tls_cert else "http"
        host = f"[{self.settings.host}]" if ":" in self.settings.host else self.settings.host
        return f"{scheme}://{host}:{self.settings.port}"

    def start(self) -> None:
        state = Path(self.settings.state)
        self.settings.write()
        for old in [*state.glob("ready-*"), state / versions.CHILDREN, state / versions.PULSE]:
            old.unlink(missing_ok=True)  # of a server that had the same folder
        run = [sys.executable, "-m"]
        self.children["updater"] = _Child([*run, "clickfleet.serve.updater", str(state)])
        for number in range(self.settings.workers):
            command = [*run, "clickfleet.serve.worker", str(state), str(number), str(self.listener.fileno())]
            self.children[f"worker {number}"] = _Child(command, (self.listener.fileno(),))
        for child in self.children.values():
            child.start()
        until = time.monotonic() + START_S
        while not self.ready():
            for name, child in self.children.items():
                if not child.alive:
                    self.stop()
                    raise ServeError(f"the {name} did not start (its reason stands above)")
            if time.monotonic() > until or self.stopping:
                self.stop()
                raise ServeError(f"the server was not ready within {START_S:.0f} s")
            time.sleep(0.01)

    def ready(self) -> bool:
        state = Path(self.settings.state)
        return all((state / f"ready-{number}").exists() for number in range(self.settings.workers))

    def watch(self, say: Callable[[str], None]) -> None:
        """Until it is told to stop: whoever dies is started again; without an updater the workers go on as they are."""
        workers = [child for name, child in self.children.items() if name != "updater"]
        while not self.stopping:
            for name, child in self.children.items():
                if child.alive or self.stopping:
                    continue
                if child.restart_at is None:
                    self._bury(name, child, say)
                if all(worker.hopeless and not worker.alive for worker in workers):
                    self.stop()
                    raise ServeError(f"no worker runs: each died {QUICK_DEATHS} times in a row", "its log says why")
                if child.restart_at is not None and time.monotonic() >= child.restart_at:
                    child.start()
            time.sleep(0.05)

    def _bury(self, name: str, child: _Child, say: Callable[[str], None]) -> None:
        assert child.process is not None
        pause = child.bury()
        when = f"starting it again in {pause:.1f} s" if pause else "starting it again"
        say(f"the {name} died (status {child.process.returncode}); {when}")
        deaths = {one: other.deaths for one, other in self.children.items() if other.deaths}
        versions.put(Path(self.settings.state) / versions.CHILDREN, deaths)

    def stop(self) -> None:
        """Lets the workers finish what they have begun."""
        self.stopping = True
        for child in self.children.values():
            if child.alive:
                assert child.process is not None
                child.process.terminate()
        until = time.monotonic() + STOP_S
        for child in self.children.values():
            if child.process is None:
                continue
            try:
                child.process.wait(max(0.1, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.process.kill()
                child.process.wait()
        self.listener.close()
        if self.reserved is not None:
            self.reserved.close()


def fleet(settings: Settings) -> Fleet:
    """A server that listens already, though nobody answers yet."""
    if WINDOWS:
        raise ServeError(
            "a server hands its socket to its workers, which Windows cannot do", "serve from WSL or a container"
        )
    for module, extra in (("uvicorn", "serve"), ("msgspec", "serve"), ("onnxruntime", "serve"), ("starlette", "serve")):
        _need(module, extra)
    if settings.grpc_port is not None:
        _need("grpc", "serve")
    _ = settings.engine.provider  # one that is not here is refused now, not by every worker
    if (settings.tls_cert is None) != (settings.tls_key is None):
        raise ConfigError("TLS needs both a certificate and a key", "give --tls-cert and --tls-key")
    for file in (settings.tls_cert, settings.tls_key, settings.token_file, settings.admin_token_file):
        if file is not None and not os.access(file, os.R_OK):
            raise ConfigError(f"cannot read {file}")
    if settings.rows not in ("mapped", "memory"):
        _need("redis", "redis")
    listener = _listen(settings.host, settings.port)
    settings = replace(settings, port=listener.getsockname()[1])
    reserved = None
    if settings.grpc_port == 0:  # keep the port that was found for the workers, who share it
        reserved = _bind(settings.host, 0, reuse_port=True)
        settings = replace(settings, grpc_port=reserved.getsockname()[1])
    return Fleet(settings, listener, reserved)


def _need(module: str, extra: str) -> None:
    from importlib.util import find_spec

    if find_spec(module) is None:
        raise MissingError(module, extra)


def _bind(host: str, port: int, reuse_port: bool = False) -> socket.socket:
    made = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if reuse_port:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        made.bind((host, port))
    except OSError as error:
        made.close()
        raise ServeError(
            f"cannot listen on {host}:{port}: {error.strerror or error}", "choose another --port"
        ) from None
    return made


def _listen(host: str, port: int) -> socket.socket:
    made = _bind(host, port)
    made.listen(2048)
    return made


def run(settings: Settings, say: Callable[[str], None], ready: Callable[[Fleet], None]) -> None:
    """Serves until SIGTERM or SIGINT."""
    own = not settings.state
    folder = tempfile.mkdtemp(prefix="clickfleet-serve-") if own else settings.state
    Path(folder).mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        server = fleet(replace(settings, state=folder))
        for file in filter(None, (settings.tls_key, settings.token_file, settings.admin_token_file)):
            if problem := paths.exposed(file):
                say(f"warning: {problem}")

        def stop(*_: object) -> None:
            server.stopping = True

        signal.signal(signal.SIGTERM, stop)
        signal.signal(signal.SIGINT, stop)
        try:
            server.start()
            ready(server)
            server.watch(say)
        finally:
            server.stop()
    finally:
        if own:
            shutil.rmtree(folder, ignore_errors=True)
