"""Who a process is, by its environment: one of the servers (shards) or one of the workers of a job, started by somebody else.

>>> role = read({"TRAINING_ROLE": "TRAINER", "PADDLE_PSERVERS_IP_PORT_LIST": "10.0.0.1:6170,10.0.0.2:6170",
...              "PADDLE_TRAINERS_NUM": "4", "PADDLE_TRAINER_ID": "1", "POD_IP": "10.0.0.7"})
>>> role.name, role.drives, role.ray, role.servers[1]
('worker 1', False, '10.0.0.1:6379', Endpoint(host='10.0.0.2', port=6170))
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from clickfleet.errors import ConfigError

ROLE, SERVERS, WORKERS, INDEX = (
    "TRAINING_ROLE",
    "PADDLE_PSERVERS_IP_PORT_LIST",
    "PADDLE_TRAINERS_NUM",
    "PADDLE_TRAINER_ID",
)
HOST, PORT, WORKER_LIST, THREADS = "POD_IP", "PADDLE_PORT", "PADDLE_TRAINER_ENDPOINTS", "CPU_NUM"
RAY, RAY_PORT = "RAY_ADDRESS", "CLICKFLEET_RAY_PORT"
DEFAULT_RAY_PORT = 6379
Environment = Mapping[str, str]


class Endpoint(NamedTuple):
    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


@dataclass(frozen=True)
class Role:
    """One process of a job, and what it knows of the others."""

    kind: str
    """server or worker."""
    index: int
    servers: tuple[Endpoint, ...]
    """Server i holds shard i, which listens there."""
    workers: int
    threads: int | None
    """Trainer threads of a worker, where the environment says so."""
    host: str
    """By which other hosts reach this process."""
    ray: str
    """The head of the Ray cluster that all join."""
    starts_head: bool
    """The first server starts it, unless the environment names one that is there."""

    @property
    def name(self) -> str:
        return f"{self.kind} {self.index}"

    @property
    def drives(self) -> bool:
        """Worker 0 leads the job."""
        return self.kind == "worker" and self.index == 0


def read(environ: Environment | None = None) -> Role | None:
    """The role that the environment gives this process; None where it names no servers, and the process is alone."""
    environ = os.environ if environ is None else environ
    given = environ.get(ROLE, "").strip()
    if given and given not in ("TRAINER", "PSERVER"):
        raise ConfigError(f"{ROLE} is {given!r}, and must be TRAINER or PSERVER")
    if not environ.get(SERVERS, "").strip():
        if given == "PSERVER":
            raise ConfigError(f"{ROLE} is PSERVER, and {SERVERS} is missing", "set it to ip:port of every server")
        if given and environ.get(WORKERS, "").strip() and _number(environ, WORKERS, least=1) > 1:
            raise ConfigError(f"{WORKERS} is {environ[WORKERS]}, and {SERVERS} is missing", "several workers need it")
        return None
    if not given:
        raise ConfigError(f"{SERVERS} is set, and {ROLE} is missing", "set it to TRAINER or PSERVER, or unset both")
    servers = _endpoints(environ, SERVERS)
    workers = _number(environ, WORKERS, least=1)
    listed = _endpoints(environ, WORKER_LIST) if environ.get(WORKER_LIST, "").strip() else ()
    if listed and len(listed) != workers:
        raise ConfigError(f"{WORKERS} is {workers}, and {WORKER_LIST} names {len(listed)}")
    kind, index, host = _server(environ, servers) if given == "PSERVER" else _worker(environ, servers, workers, listed)
    head, starts = _head(environ, servers)
    threads = _number(environ, THREADS, least=1) if environ.get(THREADS, "").strip() else None
    return Role(kind, index, servers, workers, threads, host, head, starts and kind == "server" and index == 0)


def _server(environ: Environment, servers: tuple[Endpoint, ...]) -> tuple[str, int, str]:
    own = Endpoint(_text(environ, HOST), _number(environ, PORT, least=1))
    if own not in servers:
        raise ConfigError(
            f"{HOST}:{PORT} is {own}, which is not in {SERVERS} ({', '.join(map(str, servers))})",
            "a server is known by its place in the list",
        )
    return "server", servers.index(own), own.host


def _worker(
    environ: Environment, servers: tuple[Endpoint, ...], workers: int, listed: tuple[Endpoint, ...]
) -> tuple[str, int, str]:
    index = _number(environ, INDEX, least=0)
    if index >= workers:
        raise ConfigError(f"{INDEX} is {index}, and {WORKERS} is {workers}", f"numbers go from 0 to {workers - 1}")
    host = environ.get(HOST, "").strip()
    if host and listed and listed[index].host != host:
        raise ConfigError(f"{HOST} is {host}, and entry {index} of {WORKER_LIST} is {listed[index]}")
    return "worker", index, host or (listed[index].host if listed else _address_towards(servers[0]))


def _head(environ: Environment, servers: tuple[Endpoint, ...]) -> tuple[str, bool]:
    there = environ.get(RAY, "").strip()
    if there:
        if "://" in there or ":" not in there:
            raise ConfigError(f"{RAY} is {there}, and must be host:port here", "each process becomes a node of it")
        return there, False
    port = _number(environ, RAY_PORT, least=1) if environ.get(RAY_PORT, "").strip() else DEFAULT_RAY_PORT
    if any(server == (servers[0].host, port) for server in servers):
        raise ConfigError(f"port {port} of {servers[0].host} is in {SERVERS}, and Ray's", f"set {RAY_PORT} to another")
    return f"{servers[0].host}:{port}", True


def _text(environ: Environment, name: str) -> str:
    found = environ.get(name, "").strip()
    if not found:
        raise ConfigError(f"{ROLE} is {environ[ROLE]}, and {name} is missing")
    return found


def _number(environ: Environment, name: str, least: int) -> int:
    text = _text(environ, name)
    if not text.isdecimal() or int(text) < least:
        raise ConfigError(f"{name} is {text!r}, and must be a whole number from {least} on")
    return int(text)


def _endpoints(environ: Environment, name: str) -> tuple[Endpoint, ...]:
    found = []
    for item in environ[name].split(","):
        host, _, port = item.strip().rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ConfigError(f"{name} has {item.strip()!r}, and every entry must be ip:port")
        found.append(Endpoint(host, int(port)))
    twice = sorted({str(each) for each in found if found.count(each) > 1})
    if twice:
        raise ConfigError(f"{name} has {', '.join(twice)} twice")
    return tuple(found)


def _address_towards(server: Endpoint) -> str:
    """The address of this host on the way to a server; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((server.host, server.port))
        except OSError as error:
            raise ConfigError(f"{server}, the first of {SERVERS}, cannot be reached: {error}") from None
        return str(probe.getsockname()[0])
