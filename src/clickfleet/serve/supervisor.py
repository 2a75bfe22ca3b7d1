"""Start the updater and the workers on one listening socket, restart processes that die, and stop without losing a request."""

import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from clickfleet.config.machine import WINDOWS
from clickfleet.config.sections import Serve
from clickfleet.data import files
from clickfleet.data.events import topic_of
from clickfleet.errors import ConfigError, MissingError, ServeError
from clickfleet.serve import parent, state_folder
from clickfleet.serve.event_queue import LogTarget
from clickfleet.serve.priority import renice_session
from clickfleet.store.onnx import Engine

KIB, MIB = 1 << 10, 1 << 20
START_S = 120.0
STOP_S = 15.0
QUICK_S = 5.0
"""A process that dies within this time is restarted after increasing pauses."""
QUICK_DEATHS = 5
"""Consecutive quick deaths after which a process is considered unable to run."""
MIN_PAUSE_S, MAX_PAUSE_S = 0.1, 10.0
LOG_EVERY_S, JOINED_LOG_EVERY_S = 5.0, 0.1
"""Time between two writes of the show log. A request after a write finds cold caches, so few and long ones cost the least."""


@dataclass(frozen=True)
class Settings:
    model: str
    """A published entry, or a folder with a published log."""
    state: str
    """The server's state folder: served version, merged layers, counters."""
    host: str = "127.0.0.1"
    port: int = 8080
    grpc_port: int | None = 8081
    workers: int = 1
    rows: str = "mapped"
    """mapped, memory, or a Redis URL."""
    name: str | None = None
    engine: Engine = Engine()  # noqa: RUF009  (frozen)
    batching: bool = True
    max_queue_ms: float = 50.0
    max_time_ms: float = 5000.0
    max_body: int = 16 * MIB
    max_rows: int = 10000
    max_candidates: int = 10000
    max_header_bytes: int = 32 * KIB
    """Maximum size of request line and headers, and of the metadata of a gRPC call."""
    max_connections: int = 2048
    """Maximum open connections of one worker, for HTTP and gRPC each."""
    header_timeout_s: float = 10.0
    """Time limit of request line and headers, of a TLS handshake, and of the first gRPC frames."""
    body_timeout_s: float = 30.0
    """Time limit of a body, or of the message of a gRPC call."""
    send_timeout_s: float = 30.0
    """Time in which a client must read its reply."""
    idle_timeout_s: float = 75.0
    """Time after which a connection without a request is closed."""
    poll_ms: float = 100.0
    stale_s: float = 10.0
    """Time without a successful poll of the log after which its state counts as unknown."""
    token_file: str | None = None
    admin_token_file: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    upload_dir: str | None = None
    results_redis: str | None = None
    """Redis URL for the results of /upload?re_model=redis."""
    log: str | None = None
    """Folder or kafka://BROKERS/TOPIC for every scored row."""
    log_sample: float = 1.0
    """Fraction of the requests that are logged."""
    log_every_s: float | None = None
    """Time between two writes of the show log; None: see `write_every_s`."""
    feedback: str | None = None
    """Folder or kafka://BROKERS/TOPIC for the events of /v1/feedback."""
    log_rotate_bytes: int = 64 * MIB
    log_rotate_s: float = 300.0
    """Size and age at which a file of a log is completed."""
    kafka_options: dict[str, str | int | float | bool] = field(default_factory=dict)
    run: str | None = None
    """Run folder of the trainer that runs beside this server, in a loop."""

    @classmethod
    def of_section(cls, section: Serve, model: Path, state: Path) -> "Settings":
        """Return the settings that a configuration names."""
        return cls(
            str(model),
            str(state),
            host=section.host,
            port=section.port,
            grpc_port=section.grpc_port,
            workers=section.workers,
            engine=Engine(section.engine, section.threads, section.graph_optimization, section.arena),
            max_queue_ms=section.max_queue_ms,
            token_file=section.token_file,
            log=section.log,
            log_sample=section.log_sample,
            log_every_s=section.log_every,
            feedback=section.feedback,
            log_rotate_bytes=section.log_rotate_size,
            log_rotate_s=section.log_rotate_every,
            kafka_options=section.kafka_options,
        )

    @property
    def write_every_s(self) -> float:
        """Time between two writes of the show log. The feedback that this server takes waits for the shows in it."""
        return self.log_every_s or (LOG_EVERY_S if self.feedback is None else JOINED_LOG_EVERY_S)

    @property
    def log_folder(self) -> str | None:
        """The folder of the show log; None if it is a topic, or there is none."""
        return None if self.log is None or topic_of(self.log) else self.log

    @property
    def frames(self) -> list[Path]:
        """The folders through which workers hand what they scored to the recorder: in memory, or else in the log or the state.

        The next server that writes the log takes over what a killed one left behind.
        """
        beside = Path(self.log_folder or self.state).resolve() / ".frames"
        name = hashlib.blake2b(str(beside).encode(), digest_size=8).hexdigest()
        memory = files.in_memory(f"frames-{name}")
        return [*([] if memory is None else [memory]), beside]

    def target(self, where: str) -> LogTarget:
        """Return how to write the log at a place."""
        return LogTarget(where, self.log_rotate_bytes, self.log_rotate_s, self.kafka_options)

    def write(self) -> None:
        """Write settings.json, readable by the owner only: a Redis URL may contain a password."""
        path = Path(self.state) / "settings.json"
        path.unlink(missing_ok=True)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
            out.write(json.dumps(asdict(self)))

    @classmethod
    def read(cls, state: Path | str) -> "Settings":
        facts = json.loads((Path(state) / "settings.json").read_text())
        return cls(**{**facts, "engine": Engine(**facts["engine"])})


@dataclass
class ChildProcess:
    """A process that is restarted when it dies."""

    command: list[str]
    descriptors: tuple[int, ...] = ()
    process: "subprocess.Popen[bytes] | None" = None
    started: float = 0.0
    deaths: int = 0
    quick_deaths: int = 0
    restart_at: float | None = None
    stop_s: float = STOP_S
    """How long it may take to stop."""
    session: int = 0
    """Niceness of its session."""

    def start(self) -> None:
        self.started, self.restart_at = time.monotonic(), None
        self.process = subprocess.Popen(
            self.command, pass_fds=self.descriptors, start_new_session=True, env=parent.child_environment()
        )
        if self.session:
            renice_session(self.session, self.process.pid)

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def crash_looping(self) -> bool:
        """Return whether it keeps dying right after its start."""
        return self.quick_deaths >= QUICK_DEATHS

    def record_death(self) -> float:
        """Count a death and schedule the restart. Return the seconds until then."""
        now = time.monotonic()
        self.deaths += 1
        self.quick_deaths = self.quick_deaths + 1 if now - self.started < QUICK_S else 0
        pause = min(MAX_PAUSE_S, MIN_PAUSE_S * 2**self.quick_deaths) if self.quick_deaths > 1 else 0.0
        self.restart_at = now + pause
        return pause


@dataclass
class Supervisor:
    """The processes of one server."""

    settings: Settings
    listener: socket.socket
    reserved: socket.socket | None
    children: dict[str, ChildProcess] = field(default_factory=dict)
    stopping: bool = False

    @property
    def address(self) -> str:
        scheme = "https" if self.settings.tls_cert else "http"
        host = f"[{self.settings.host}]" if ":" in self.settings.host else self.settings.host
        return f"{scheme}://{host}:{self.settings.port}"

    def start(self) -> None:
        state = Path(self.settings.state)
        self.settings.write()
        for old in [*state.glob("ready-*"), state / state_folder.CHILDREN, state / state_folder.HEARTBEAT]:
            old.unlink(missing_ok=True)  # left by an earlier server
        run = [sys.executable, "-m"]
        self.children["updater"] = ChildProcess([*run, "clickfleet.serve.updater", str(state)])
        for number in range(self.settings.workers):
            command = [*run, "clickfleet.serve.server", str(state), str(number), str(self.listener.fileno())]
            self.children[f"worker {number}"] = ChildProcess(command, (self.listener.fileno(),))
        if self.settings.log is not None:
            self.children["recorder"] = ChildProcess([*run, "clickfleet.serve.recorder", str(state)])
        for child in self.children.values():
            child.start()
        deadline = time.monotonic() + START_S
        while not self.ready():
            for name, child in self.children.items():
                if not child.alive:
                    self.stop()
                    raise ServeError(f"the {name} did not start; see its message above")
            if time.monotonic() > deadline or self.stopping:
                self.stop()
                raise ServeError(f"the server was not ready within {START_S:.0f} s")
            time.sleep(0.01)

    def ready(self) -> bool:
        state = Path(self.settings.state)
        return all((state / f"ready-{number}").exists() for number in range(self.settings.workers))

    def supervise(self, log: Callable[[str], None]) -> None:
        """Restart processes that die, until `stopping` is set. Without an updater, workers keep serving their version."""
        workers = [child for name, child in self.children.items() if name.startswith("worker")]
        while not self.stopping:
            for name, child in self.children.items():
                if child.alive or self.stopping:
                    continue
                if child.restart_at is None:
                    self._handle_death(name, child, log)
                if all(worker.crash_looping and not worker.alive for worker in workers):
                    self.stop()
                    raise ServeError(
                        f"every worker died {QUICK_DEATHS} times right after its start", "see the log above"
                    )
                if child.restart_at is not None and time.monotonic() >= child.restart_at:
                    child.start()
            time.sleep(0.05)

    def _handle_death(self, name: str, child: ChildProcess, log: Callable[[str], None]) -> None:
        assert child.process is not None
        pause = child.record_death()
        when = f"restarting it in {pause:.1f} s" if pause else "restarting it"
        log(f"the {name} died (status {child.process.returncode}); {when}")
        deaths = {name: child.deaths for name, child in self.children.items() if child.deaths}
        with suppress(OSError):  # a full disk must not end the supervision; the next death is written again
            state_folder.write_json(Path(self.settings.state) / state_folder.CHILDREN, deaths)

    def stop(self) -> None:
        """Stop all processes. Workers finish the requests they have begun, and then the recorder writes what they scored."""
        self.stopping = True
        recorder = [child for name, child in self.children.items() if name == "recorder"]
        stop([child for child in self.children.values() if child not in recorder])
        stop(recorder)
        self.listener.close()
        if self.reserved is not None:
            self.reserved.close()


def stop(children: Sequence[ChildProcess]) -> None:
    for child in children:
        if child.alive:
            assert child.process is not None
            renice_session(0, child.process.pid)  # what it still has to do is waited for
            child.process.terminate()
    begin = time.monotonic()
    for child in children:
        if child.process is None:
            continue
        try:
            child.process.wait(max(0.1, begin + child.stop_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.process.kill()
            child.process.wait()


def create(settings: Settings) -> Supervisor:
    """Check the settings and open the sockets. Connections wait until the server is started."""
    if WINDOWS:
        raise ServeError(
            "serving needs to share a socket between processes, which Windows cannot do", "use WSL or a container"
        )
    for module, extra in (("uvicorn", "serve"), ("msgspec", "serve"), ("onnxruntime", "serve"), ("starlette", "serve")):
        _require(module, extra)
    if settings.grpc_port is not None:
        _require("grpc", "serve")
    _ = settings.engine.provider  # refuse a missing provider here, before any worker does
    if (settings.tls_cert is None) != (settings.tls_key is None):
        raise ConfigError("TLS needs both a certificate and a key", "give --tls-cert and --tls-key")
    for file in (settings.tls_cert, settings.tls_key, settings.token_file, settings.admin_token_file):
        if file is not None and not os.access(file, os.R_OK):
            raise ConfigError(f"cannot read {file}")
    if settings.rows not in ("mapped", "memory"):
        _require("redis", "redis")
    if not 0 < settings.log_sample <= 1:
        raise ConfigError(f"log_sample is {settings.log_sample}", "give a fraction above 0, up to 1")
    if settings.log is not None and settings.log == settings.feedback:
        raise ConfigError("the show log and the feedback cannot be in one place", "give each a folder or topic")
    for where in filter(None, (settings.log, settings.feedback)):
        settings.target(where).check()
    if settings.log is not None:
        beside = settings.frames[-1]
        beside.mkdir(mode=0o700, parents=True, exist_ok=True)
        files.check_private(beside)
    listener = _listen(settings.host, settings.port)
    settings = replace(settings, port=listener.getsockname()[1])
    reserved = None
    if settings.grpc_port == 0:  # reserve the chosen port for the workers, which share it
        reserved = _bind(settings.host, 0, reuse_port=True)
        settings = replace(settings, grpc_port=reserved.getsockname()[1])
    return Supervisor(settings, listener, reserved)


def _require(module: str, extra: str) -> None:
    from importlib.util import find_spec

    if find_spec(module) is None:
        raise MissingError(module, extra)


def _bind(host: str, port: int, reuse_port: bool = False) -> socket.socket:
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if reuse_port:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise ServeError(
            f"cannot listen on {host}:{port}: {error.strerror or error}", "choose another --port"
        ) from None
    return sock


def _listen(host: str, port: int) -> socket.socket:
    sock = _bind(host, port)
    sock.listen(2048)
    return sock


def run(settings: Settings, log: Callable[[str], None], ready: Callable[[Supervisor], None]) -> None:
    """Serve until SIGTERM or SIGINT."""
    temporary = not settings.state
    folder = tempfile.mkdtemp(prefix="clickfleet-serve-") if temporary else settings.state
    Path(folder).mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        server = create(replace(settings, state=folder))
        for file in filter(None, (settings.tls_key, settings.token_file, settings.admin_token_file)):
            if problem := files.exposed(file):
                log(f"warning: {problem}")

        def stop(*_: object) -> None:
            server.stopping = True

        signal.signal(signal.SIGTERM, stop)
        signal.signal(signal.SIGINT, stop)
        try:
            server.start()
            ready(server)
            server.supervise(log)
        finally:
            server.stop()
    finally:
        if temporary:
            handed = replace(settings, state=folder).frames if settings.log_folder is None else []
            for path in [Path(folder), *handed]:
                shutil.rmtree(path, ignore_errors=True)
