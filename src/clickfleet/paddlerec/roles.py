"""Read the role of a process from its environment: one of the servers (shards) or workers of a job that another tool started.

>>> role = read({"TRAINING_ROLE": "TRAINER", "PADDLE_PSERVERS_IP_PORT_LIST": "10.0.0.1:6170,10.0.0.2:6170",
...              "PADDLE_TRAINERS_NUM": "4", "PADDLE_TRAINER_ID": "1", "POD_IP": "10.0.0.7"})
>>> role.name, role.drives, role.ray, role.servers[1]
('worker 1', False, '10.0.0.1:6379', Endpoint(host='10.0.0.2', port=6170))
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from contextlib import ExitStack

from clickfleet.cluster import Endpoint, Role
from clickfleet.cluster.ray_runtime import LOOPBACK
from clickfleet.errors import ConfigError

FLAG = "FLAGS_communicator_"
FLAGS: dict[str, str | None] = {
    "send_queue_size": "queue_size",
    "max_merge_var_num": "merge",
    "send_wait_times": "wait",
    "thread_pool_size": None,
    "independent_recv_thread": "independent_recv",
    "min_send_grad_num_before_recv": "pull_every",
    "is_sgd_optimizer": "reduce",
    "merge_sparse_grad": None,
    "fake_rpc": None,
    "k_steps": "k_steps",
}
"""The setting behind each flag. None: the flag has no effect here, in any mode."""
_TRUTH = {"1": True, "true": True, "0": False, "false": False}


def from_environment(known: set[str], environ: Mapping[str, str] | None = None) -> dict[str, int | str]:
    """Return the settings in `known` that `FLAGS_communicator_*` give. Raise ConfigError for an unknown flag.

    >>> from_environment({"merge", "reduce"}, {"FLAGS_communicator_max_merge_var_num": "4", "FLAGS_communicator_is_sgd_optimizer": "0"})
    {'merge': 4, 'reduce': 'mean'}
    """
    environ = os.environ if environ is None else environ
    flags = _flags(environ)
    return dict(sorted((key, _value(name, key, environ[name])) for name, key in flags.items() if key in known))


def without_effect(known: set[str], environ: Mapping[str, str] | None = None) -> list[str]:
    """Return the flags of the environment that have no effect in a mode with the settings `known`.

    >>> without_effect({"reduce"}, {"FLAGS_communicator_is_sgd_optimizer": "0", "FLAGS_communicator_fake_rpc": "1"})
    ['FLAGS_communicator_fake_rpc']
    """
    return [name for name, key in _flags(os.environ if environ is None else environ).items() if key not in known]


def _flags(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the setting behind each flag of the environment; an empty name if there is none."""
    names = sorted(name for name in environ if name.startswith(FLAG))
    for name in names:
        if name.removeprefix(FLAG) not in FLAGS:
            raise ConfigError(f"unknown {name} in the environment", f"known: {', '.join(FLAGS)}")
    return {name: FLAGS[name.removeprefix(FLAG)] or "" for name in names}


def _value(name: str, key: str, text: str) -> int | str:
    if key in ("independent_recv", "reduce"):
        if text.lower() not in _TRUTH:
            raise ConfigError(f"{name} must be 0 or 1, not {text!r}")
        truth = _TRUTH[text.lower()]
        return truth if key != "reduce" else "sum" if truth else "mean"
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{name} must be an integer, not {text!r}") from None


ROLE, SERVERS = "TRAINING_ROLE", "PADDLE_PSERVERS_IP_PORT_LIST"
WORKERS, INDEX = "PADDLE_TRAINERS_NUM", "PADDLE_TRAINER_ID"
HOST, PORT, WORKER_LIST, THREADS = "POD_IP", "PADDLE_PORT", "PADDLE_TRAINER_ENDPOINTS", "CPU_NUM"
RAY, RAY_PORT = "RAY_ADDRESS", "CLICKFLEET_RAY_PORT"
DEFAULT_RAY_PORT = 6379
Environment = Mapping[str, str]


def read(environ: Environment | None = None) -> Role | None:
    """Return the role that the environment gives this process. None: it names no servers, and the process is alone."""
    environ = os.environ if environ is None else environ
    given = environ.get(ROLE, "").strip()
    if given and given not in ("TRAINER", "PSERVER"):
        raise ConfigError(f"{ROLE} must be TRAINER or PSERVER, not {given!r}")
    if not environ.get(SERVERS, "").strip():
        if given == "PSERVER":
            raise ConfigError(f"{ROLE} is PSERVER, but {SERVERS} is missing", "set it to ip:port of every server")
        for name, alone in ((WORKERS, 1), (INDEX, 0)):
            if given and environ.get(name, "").strip() and _number(environ, name, least=alone) > alone:
                raise ConfigError(
                    f"{name} is {environ[name]}, but {SERVERS} is missing", "set it to ip:port of every server"
                )
        return None
    if not given:
        raise ConfigError(f"{SERVERS} is set, but {ROLE} is missing", "set it to TRAINER or PSERVER, or unset both")
    servers = _endpoints(environ, SERVERS)
    workers = _number(environ, WORKERS, least=1)
    listed = _endpoints(environ, WORKER_LIST) if environ.get(WORKER_LIST, "").strip() else ()
    if listed and len(listed) != workers:
        raise ConfigError(f"{WORKERS} is {workers}, but {WORKER_LIST} has {len(listed)} entries")
    kind, index, host = _server(environ, servers) if given == "PSERVER" else _worker(environ, servers, workers, listed)
    head, starts = _head(environ, servers)
    threads = _number(environ, THREADS, least=1) if environ.get(THREADS, "").strip() else None
    return Role(kind, index, servers, workers, threads, host, head, starts and kind == "server" and index == 0)


def _server(environ: Environment, servers: tuple[Endpoint, ...]) -> tuple[str, int, str]:
    endpoint = Endpoint(_text(environ, HOST), _number(environ, PORT, least=1))
    if endpoint not in servers:
        raise ConfigError(
            f"{HOST}:{PORT} is {endpoint}, but {SERVERS} does not contain it ({', '.join(map(str, servers))})",
            "the position in this list is the number of the server",
        )
    return "server", servers.index(endpoint), endpoint.host


def _worker(
    environ: Environment, servers: tuple[Endpoint, ...], workers: int, listed: tuple[Endpoint, ...]
) -> tuple[str, int, str]:
    index = _number(environ, INDEX, least=0)
    if index >= workers:
        raise ConfigError(f"{INDEX} is {index}, but {WORKERS} is {workers}", f"use a number from 0 to {workers - 1}")
    host = environ.get(HOST, "").strip()
    if host and listed and listed[index].host != host:
        raise ConfigError(f"{HOST} is {host}, but entry {index} of {WORKER_LIST} is {listed[index]}")
    return "worker", index, host or (listed[index].host if listed else _address_towards(servers[0]))


def _head(environ: Environment, servers: tuple[Endpoint, ...]) -> tuple[str, bool]:
    address = environ.get(RAY, "").strip()
    if address:
        if "://" in address or ":" not in address:
            raise ConfigError(
                f"{RAY} must be host:port, not {address}", "each process joins the Ray cluster at this address"
            )
        return address, False
    port = _number(environ, RAY_PORT, least=1) if environ.get(RAY_PORT, "").strip() else DEFAULT_RAY_PORT
    if any(server == (servers[0].host, port) for server in servers):
        raise ConfigError(
            f"{servers[0].host}:{port} is in {SERVERS} and is also the address of Ray",
            f"set {RAY_PORT} to another port",
        )
    return f"{servers[0].host}:{port}", True


def _text(environ: Environment, name: str) -> str:
    text = environ.get(name, "").strip()
    if not text:
        raise ConfigError(f"{ROLE} is {environ[ROLE]}, but {name} is missing")
    return text


def _number(environ: Environment, name: str, least: int) -> int:
    text = _text(environ, name)
    if not text.isdecimal() or int(text) < least:
        raise ConfigError(f"{name} must be an integer of at least {least}, not {text!r}")
    return int(text)


def _endpoints(environ: Environment, name: str) -> tuple[Endpoint, ...]:
    endpoints = []
    for item in environ[name].split(","):
        host, _, port = item.strip().rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ConfigError(f"{name} has the entry {item.strip()!r}, but every entry must be ip:port")
        endpoints.append(Endpoint(host, int(port)))
    twice = sorted({str(each) for each in endpoints if endpoints.count(each) > 1})
    if twice:
        raise ConfigError(f"{name} has duplicate entries: {', '.join(twice)}")
    return tuple(endpoints)


def _address_towards(server: Endpoint) -> str:
    """Return the address of this host on the route to a server. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((server.host, server.port))
        except OSError as error:
            raise ConfigError(f"cannot reach {server}, the first entry of {SERVERS}: {error}") from None
        return str(probe.getsockname()[0])


def environments(servers: int, workers: int) -> dict[str, dict[str, str]]:
    """Return the environment variables of each process of a local job, by the name of the process."""
    *ports, head = _free_ports(servers + 1)
    job = {
        SERVERS: ",".join(f"{LOOPBACK}:{port}" for port in ports),
        WORKERS: str(workers),
        HOST: LOOPBACK,
        RAY_PORT: str(head),
        RAY: "",
    }
    processes = {f"server-{i}": {**job, ROLE: "PSERVER", PORT: str(port)} for i, port in enumerate(ports)}
    return processes | {f"worker-{i}": {**job, ROLE: "TRAINER", INDEX: str(i)} for i in range(workers)}


def _free_ports(count: int) -> list[int]:
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind((LOOPBACK, 0))
        return [int(each.getsockname()[1]) for each in sockets]
