"""Ray: import it with our settings, keep it on the loopback, protect its token and check its address."""

from __future__ import annotations

import logging
import os
import secrets
import shlex
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from clickfleet.cluster.fork_server import CLIENT, ForkServer
from clickfleet.errors import ClusterError, ConfigError, MissingError
from clickfleet.training.signals import SIGNALS

LOOPBACK = "127.0.0.1"
LOOPBACK_ONLY = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""Environment that keeps Ray on the loopback, as on systems where Ray supports no clusters."""
EARLY_WORKERS = {
    "RAY_enable_worker_prestart": "1",
    "RAY_prestart_worker_first_driver": "1",
    "RAY_preload_python_modules": "clickfleet.cluster.worker",
}
"""Environment of a private Ray without a fork server: it starts a process for each of its CPUs at once, which imports what shards and
workers need."""
AGENT_PORTS = ("METRICS_AGENT", "METRICS_EXPORT", "DASHBOARD_AGENT_LISTEN", "RUNTIME_ENV_AGENT")
_NO_PORT = -1
"""What an agent of Ray reports if it does not serve."""
_DUMPS = "RAY_DISABLE_FAILURE_SIGNAL_HANDLER"
PROBE_S = 5.0
_HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""The preface of HTTP/2 and empty settings. Every gRPC server answers them with its settings."""


def ray_module() -> Any:
    """Return the module `ray`. Raise MissingError if it is not installed."""
    keep_token()
    _authenticate()  # before the import, which reads the setting
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")  # otherwise Ray lowers the priority of its processes
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")  # of abandoned calls, after a failure
    try:
        import ray
        import zmq  # noqa: F401
    except ImportError as error:
        raise MissingError(f"{error.name}, which cluster modes need,", "cluster") from None
    return ray


def _token_path() -> Path:
    return Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")


def keep_token(make: bool = False) -> None:
    """Make the token of Ray readable for this user only. With `make`, create it if there is none."""
    path = _token_path()
    make = make and not os.environ.get("RAY_AUTH_TOKEN") and os.environ.get("RAY_AUTH_MODE") in (None, "token")
    with suppress(OSError):
        if make and not path.exists():
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            _make_private(path.parent)
            handle, name = tempfile.mkstemp(dir=path.parent)  # mode 0600
            with os.fdopen(handle, "w") as file:
                file.write(secrets.token_hex(32))
            with suppress(FileExistsError):  # another process was faster
                os.link(name, path)
            os.unlink(name)
    _make_private(path)
    if not os.environ.get("RAY_AUTH_TOKEN_PATH"):
        _make_private(path.parent)


def _make_private(path: Path) -> None:
    with suppress(OSError):
        status = path.stat()
        if status.st_uid == os.getuid() and status.st_mode & 0o077:
            path.chmod(stat.S_IMODE(status.st_mode) & 0o700)


def _authenticate() -> None:
    """Present the token of this user to every Ray. By default Ray presents it only to one that it starts."""
    if os.environ.get("RAY_AUTH_TOKEN") or _token_path().exists():
        os.environ.setdefault("RAY_AUTH_MODE", "token")


@contextmanager
def on_loopback(ray: Any) -> Iterator[None]:
    """Let Ray processes that start meanwhile listen on the loopback only."""
    constants = ray._private.ray_constants
    before = {name: os.environ.get(name) for name in LOOPBACK_ONLY}, constants.ENABLE_RAY_CLUSTER
    os.environ.update(LOOPBACK_ONLY)
    constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        constants.ENABLE_RAY_CLUSTER = before[1]
        for name, value in before[0].items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


@contextmanager
def our_signals(ray: Any) -> Iterator[None]:
    """Keep Ray from setting signal handlers, and block SIGHUP for the processes it starts. The run ends them."""
    utils, constants = ray._private.utils, ray._private.ray_constants
    before = utils.set_sigterm_handler, getattr(constants, _DUMPS, False)
    utils.set_sigterm_handler = lambda handler: None
    setattr(constants, _DUMPS, True)
    in_main = threading.current_thread() is threading.main_thread()
    logger = logging.getLogger("ray._private.worker")
    level = logger.level
    if not in_main:
        logger.setLevel(logging.ERROR)  # suppress its warning that it sets no handlers
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP}) if hasattr(signal, "SIGHUP") else None
    try:
        yield
    finally:
        utils.set_sigterm_handler = before[0]
        setattr(constants, _DUMPS, before[1])
        logger.setLevel(level)
        if mask is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        renew_handlers()


@contextmanager
def deaf_children() -> Iterator[None]:
    """Block the signals of a terminal for processes that start meanwhile. The run ends them."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def renew_handlers() -> None:
    """Set our signal handlers again: Ray may have replaced them below Python. Other threads than the main one cannot."""
    if threading.current_thread() is threading.main_thread():
        for number in SIGNALS:
            signal.signal(number, signal.getsignal(number))


@contextmanager
def lean(ray: Any, processes: int, server: ForkServer | None) -> Iterator[None]:
    """Let a Ray that starts meanwhile leave out its API server, autoscaler, log monitor and agents.

    Its processes are forks of the server. Without one, so many processes start at once.
    """
    node, parameters, services = ray._private.node.Node, ray._private.parameter.RayParams, ray._private.services
    early = {"RAY_worker_maximum_startup_concurrency": str(processes), **(EARLY_WORKERS if server is None else {})}
    before = {name: os.environ.get(name) for name in early}
    start_api_server, set_parameters = node.start_api_server, parameters.__init__
    start_process = services.start_ray_process

    def without_monitors(self: Any, *arguments: Any, **options: Any) -> None:
        set_parameters(self, *arguments, **{**options, "no_monitor": True, "include_log_monitor": False})

    def without_server(self: Any, **_: object) -> None:
        self._webui_url = ""  # as Ray sets it without a dashboard

    def without_agents(command: list[str], kind: str, **options: Any) -> Any:
        if kind == ray._private.ray_constants.PROCESS_TYPE_RAYLET:
            command = _lean_command(ray, command, server)
        return start_process(command, kind, **options)

    os.environ.update({name: early[name] for name, value in before.items() if value is None})
    node.start_api_server, parameters.__init__ = without_server, without_monitors
    services.start_ray_process = without_agents
    try:
        yield
    finally:
        node.start_api_server, parameters.__init__ = start_api_server, set_parameters
        services.start_ray_process = start_process
        for name, value in before.items():
            if value is None:
                os.environ.pop(name)


def _lean_command(ray: Any, command: list[str], server: ForkServer | None) -> list[str]:
    """Return the command of a raylet that needs no agents, and whose processes come from a fork server.

    A raylet waits until its agents have written their ports to files, and ends with them. They serve the dashboard and runtime
    environments, which a private Ray does not have.
    """
    options = dict(option.partition("=")[::2] for option in command)
    for name in AGENT_PORTS:
        port_name = getattr(ray._raylet, f"{name}_PORT_NAME")
        ray._raylet.persist_port(options["--session_dir"], options["--node_id"], port_name, _NO_PORT)
    idle = subprocess.list2cmdline([sys.executable, "-I", "-S", CLIENT, "wait"])
    changed = {"--dashboard_agent_command": idle, "--runtime_env_agent_command": idle}
    if server is not None:
        _, setup, *rest = shlex.split(options["--python_worker_command"])
        changed["--python_worker_command"] = subprocess.list2cmdline([*server.command(setup), *rest])
    return [
        f"{name}={changed[name]}" if (name := option.partition("=")[0]) in changed else option for option in command
    ]


def check_there(address: str, timeout_s: float) -> None:
    """Reject an address without a Ray at once. Ray itself would retry for minutes."""
    place = address
    if address == "auto":
        place = os.environ.get("RAY_ADDRESS", "") or _known_address()
        if not place:
            return  # Ray searches for one, and fails quickly
    host, _, port = place.removeprefix("ray://").rpartition(":")
    if "://" in host:
        return
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"invalid cluster.address {address!r}", "give host:port, ray://host:port or auto")
    shown = place if place == address else f"{place} ({address})"
    remedy = "start it there with `ray start --head`, correct cluster.address, or leave it out for a private Ray"
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=min(PROBE_S, timeout_s)) as probe:
            if os.environ.get("RAY_USE_TLS", "0") == "0":
                probe.sendall(_HTTP2)
                if probe.recv(9)[3:4] != b"\x04":  # no settings of HTTP/2
                    raise ClusterError(f"the server at {shown} is not Ray", remedy)
    except OSError as error:
        raise ClusterError(f"no Ray answers at {shown}: {error}", remedy) from None


def _known_address() -> str:
    """Return the address of the Ray that was started last on this machine."""
    import ray._private.utils

    return str(ray._private.utils.read_ray_address() or "")
