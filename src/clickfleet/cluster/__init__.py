"""Training on many processes. Shards hold the table and the dense weights, workers train, and Ray places both.

    driver.py          one run: epochs over the data
    run_on_cluster.py  `train` and `scorers` on a cluster
    processes.py       start the shards and workers, call them, poll them
    checkpoints.py     when to take a checkpoint, and how its parts become one
    evaluate.py        evaluation and scores by all workers
    recovery.py        what follows a failure
    resize.py          workers and shards that come and go while a run trains
    control.py         requests for that from other processes, by files in the run folder
    start_state.py     the state that a run starts or resumes from
    status.py          progress of all processes, and the monitor that shows it
    worker.py          a mode over a worker's share of the files; assignments.py describes that share
    shard.py           one part of the table and of the dense weights
    shard_server.py    the process of a shard; shard_files.py writes its checkpoints
    shard_client.py    the shards as a worker sees them
    wire.py            messages between workers and shards over ZeroMQ
    authentication.py  keys of the processes, and what is rejected without one
    process.py         what the processes of workers and shards have in common
    nodes.py           the role of a process in a job, and its node of the Ray cluster
    launch.py          a user's program in every role, on this machine
    ray_start.py       start Ray in the background, or join a running one
    process_tree.py    processes of this machine and their descendants
    ray_runtime.py     Ray: its settings, its token, its address
    simulate.py        modes, shards and messages in one process, in an order that a seed decides

Only this package imports Ray and ZeroMQ, and only when a cluster starts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from clickfleet.config.load import Config
from clickfleet.errors import ConfigError


def check(config: Config) -> None:
    """Reject settings that a cluster does not support, before any process starts."""
    from clickfleet.store.checkpoint import MAX_SHARDS
    from clickfleet.training import modes  # imports torch, which `ray_start` does not wait for

    mode = config.mode.name
    if config.cluster.shards > MAX_SHARDS:
        raise ConfigError(
            f"cluster.shards is {config.cluster.shards}; at most {MAX_SHARDS} are supported",
            "rows are divided into that many virtual shards, and each lies on one shard",
        )
    endpoints = config.cluster.endpoints
    if endpoints and len(endpoints) != config.cluster.shards:
        raise ConfigError(
            f"cluster.endpoints has {len(endpoints)} entries for {config.cluster.shards} shards", "give one per shard"
        )
    for endpoint in endpoints:
        host = endpoint.rpartition(":")[0]
        if host in ("", "*", "0.0.0.0", "::", "[::]"):
            raise ConfigError(
                f"cluster.endpoints: {endpoint} names no host; a shard listens on one address",
                "give the address at which the workers reach it",
            )
    modes.check_deterministic(config)
    if config.train.device != "cpu" or config.train.profile:
        key = "train.profile" if config.train.profile else "train.device"
        raise ConfigError(f"{key} is not supported in mode {mode}", "workers compute on CPUs; profile in mode local")
    if config.train.hogwild is not None:
        raise ConfigError(f"train.hogwild is not supported in mode {mode}", "set cluster.threads")


class Endpoint(NamedTuple):
    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


@dataclass(frozen=True)
class Role:
    """One process of a job, and where to find the others."""

    kind: str
    """server or worker."""
    index: int
    servers: tuple[Endpoint, ...]
    """Where the servers listen; server i holds shard i."""
    workers: int
    threads: int | None
    """Trainer threads of a worker, if the environment sets them."""
    host: str
    """The address at which other hosts reach this process."""
    ray: str
    """The head of the Ray cluster that all join."""
    starts_head: bool
    """Whether this process starts the head: server 0 does, unless the environment names a running one."""

    @property
    def name(self) -> str:
        return f"{self.kind} {self.index}"

    @property
    def drives(self) -> bool:
        """Whether this process drives the job: worker 0 does."""
        return self.kind == "worker" and self.index == 0
