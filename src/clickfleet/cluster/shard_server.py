"""The process of a shard, as a Ray actor: it serves a `Shard` over the wire."""

from __future__ import annotations

import os
import re
import shutil
import socket
import stat
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch

from clickfleet.cluster.authentication import ProcessKey, new_key
from clickfleet.cluster.process import (
    ProcessFacts,
    Stopwatch,
    describe_process,
    keep_memory,
    log,
    log_to,
    own_address,
    read_log,
)
from clickfleet.cluster.shard import Answers, Rules, Shard
from clickfleet.cluster.shard_files import ShardFiles, WrittenCheckpoint
from clickfleet.cluster.status import ShardStatus
from clickfleet.cluster.wire import PeerIdentity, Server
from clickfleet.config.load import Config
from clickfleet.errors import ClusterError
from clickfleet.store import checkpoint, mirror, run_folder
from clickfleet.store.table import Changes, Columns, Table, TakenChanges
from clickfleet.training import modes
from clickfleet.training.sharding import Piece


@dataclass(frozen=True)
class CheckpointOrigin:
    """What a shard starts from: a checkpoint or an empty table, and its part of the dense weights and optimizer state."""

    path: str | None
    table: Mapping[str, object]
    dense: dict[str, torch.Tensor]
    batches: int = 0
    shards: int | None = None
    """The number of shards. None: as the configuration of the shard says."""


class ShardActor:
    """One shard and its server."""

    def __init__(self, number: int, config: Config, rules: Rules, who: tuple[int, bytes, int], logs: str) -> None:
        log_to(logs, f"shard {number}")
        keep_memory()
        torch.set_num_threads(1)
        sys.setswitchinterval(0.001)  # the thread that writes checkpoints shares the interpreter with the server
        self.number, self.config, self.rules = number, config, rules
        self.who = PeerIdentity(*who)
        self.shard: Shard | None = None
        self.server: Server | None = None
        self._shards = config.cluster.shards
        self.files = ShardFiles(number, self._shards, rules.row_files)
        self._key: ProcessKey | None = None
        self._accepted: list[bytes] = []
        self._changes: Changes | None = None
        self._socket_file = ""
        self._cpu, self._trained = 0.0, Stopwatch()

    def key(self) -> bytes:
        """Return the public key of this process."""
        self._key = self._key or new_key(self.config.cluster.encrypt)
        return self._key.shared

    def accept(self, keys: list[bytes]) -> None:
        """Accept the workers with these keys, and no others. Possible at any time."""
        self._accepted = keys
        if self.server is not None:
            self.server.accept(keys)

    def load(self, origin: CheckpointOrigin, who: tuple[int, bytes, int], peers: list[int]) -> ProcessFacts:
        """Start, or restart, from an origin in a generation of the run. Return the addresses of the server."""
        shards = origin.shards or self.config.cluster.shards
        row_files = checkpoint.row_files(shards)
        self.files.forget()
        if origin.path is None:
            table = Table.like(origin.table)
        else:
            path = run_folder.resolve(origin.path) if mirror.url_of(origin.path) else Path(origin.path)
            table = checkpoint.load(path, shard=self.number, shards=shards, **origin.table)
            if mirror.origin(path):
                shutil.rmtree(path, ignore_errors=True)
        dense = dict(origin.dense)
        values = dense.pop("values").clone()
        shard = Shard(table, values, self.config.dense, replace(self.rules, row_files=row_files))
        if dense:
            shard.optimizer.restore(dense)
        shard.batches = origin.batches
        shard.begin(peers)
        if modes.needs(self.config).replicates_rows:
            shard.replicate(peers)
        self.files.clear()
        if shards != self._shards:
            self._shards, self.files = shards, ShardFiles(self.number, shards, row_files)
        shard.on_checkpoint = self.files.put
        self._changes = None
        if self.server is None:
            self.shard, self.who = shard, PeerIdentity(*who)
            self._listen()
        else:
            with self.server.lock:
                self.shard, self.who = shard, PeerIdentity(*who)
                self.server.floats = len(values)
        log(
            f"shard {self.number} of {shards}: {len(table):,} rows from {origin.path or 'nothing'}, generation {self.who.generation}"
        )
        assert self.server is not None
        self._cpu, self._trained = time.process_time(), Stopwatch()
        return {**describe_process(), "endpoints": self.server.endpoints}

    def begin(self, who: tuple[int, bytes, int], peers: list[int]) -> None:
        """Continue with the same rows and weights in a new generation, with other workers."""
        with self._locked() as shard:
            self.who = PeerIdentity(*who)
            shard.begin(peers)
            if modes.needs(self.config).replicates_rows:
                shard.replicate(peers)
        log(f"shard {self.number}: generation {self.who.generation} with {len(peers)} peers")

    def _listen(self) -> None:
        def handle(peer: int, piece: Piece) -> Answers:
            assert self.shard is not None
            return self.shard.handle(peer, piece)

        self.key()
        assert self.shard is not None
        assert self._key is not None
        self._socket_file = new()
        width, floats = 1 + self.shard.table.factors, len(self.shard.optimizer.values)
        binds = [self._address(), f"ipc://{self._socket_file}"]
        self.server = Server(handle, lambda: self.who, width, binds, self._key, floats=floats, log=log)
        self.server.accept(self._accepted)
        self.server.start()

    def _address(self) -> str:
        """Return the address to listen on: the configured endpoint, or any free port."""
        endpoints = self.config.cluster.endpoints
        if not endpoints:
            return f"tcp://{own_address()}:*"
        host, _, port = endpoints[self.number].rpartition(":")
        try:
            return f"tcp://{socket.gethostbyname(host)}:{port}"
        except OSError as error:
            raise ClusterError(f"shard {self.number} cannot listen on {endpoints[self.number]}: {error}") from None

    def drop_checkpoint(self, number: int) -> None:
        self.files.drop(number)

    def hurry(self, number: int) -> None:
        self.files.hurry(number)

    def next_epoch(self) -> None:
        with self._locked() as shard:
            shard.resume_rounds()
        self._trained.start()

    def end_epoch(self) -> None:
        self._trained.stop()

    def save(self, number: int, folder: str, timeout_s: float, share: float) -> WrittenCheckpoint:
        assert self.shard is not None
        return self.files.save(number, folder, timeout_s, share, self.shard.table)

    def deliver(self, number: int, url: str) -> None:
        self.files.deliver(number, url)

    def read_log(self) -> str:
        return read_log()

    def learned(self) -> dict[int, tuple[int, int]]:
        """Return the last message applied of each peer, and how many batches were applied."""
        with self._locked() as shard:
            return {peer: (shard.learned[peer], shard.batches_of[peer]) for peer in shard.peers}

    def shrink(self) -> int:
        with self._locked() as shard:
            return shard.table.shrink()

    def end_day(self) -> None:
        with self._locked() as shard:
            shard.table.end_day()

    def restore_readers(self, keys: Any) -> None:
        with self._locked() as shard:
            shard.table.restore_readers(keys)

    def tracking(self) -> bool:
        """Return whether changes are recorded, because something was published."""
        with self._locked() as shard:
            return shard.table.tracking

    def take_changes(self) -> TakenChanges:
        """Return what changed, and count it as published."""
        with self._locked() as shard:
            return shard.table.take_changes()

    def cut_changes(self, base: bool) -> bool:
        """Prepare the rows to publish, for `next_changes`. Return whether these are all rows."""
        with self._locked() as shard:
            self._changes = shard.table.cut_changes(base=base)
            return self._changes.base

    def next_changes(self) -> Columns | None:
        assert self._changes is not None
        return next(iter(self._changes), None)

    def deleted(self) -> Any:
        """Return the keys that consumers must delete. Call it after the last `next_changes`."""
        assert self._changes is not None
        return self._changes.deleted

    def end_changes(self, published: bool) -> None:
        with self._locked():
            if self._changes is not None:
                (self._changes.commit if published else self._changes.abort)()
                self._changes = None

    @contextmanager
    def _locked(self) -> Iterator[Shard]:
        """Hold the lock of the server and yield the shard."""
        assert self.server is not None
        with self.server.lock:
            assert self.shard is not None
            yield self.shard

    def dense(self) -> dict[str, torch.Tensor]:
        with self._locked() as shard:
            return shard.dense_state()

    def status(self) -> ShardStatus:
        assert self.server is not None
        if self.server.failure is not None:
            raise ClusterError(f"shard {self.number} failed: {self.server.failure!r}") from self.server.failure
        with self._locked() as shard:
            counts = shard.stats()
        counts |= {
            "dropped": self.server.dropped.total,
            "refused": self.server.refused.total,
            "received": self.server.bytes_in,
            "sent": self.server.bytes_out,
            "cpu_s": time.process_time() - self._cpu,
            "trained_cpu_s": self._trained.seconds,
        }
        return cast(ShardStatus, counts)

    def process(self) -> ProcessFacts:
        return describe_process()

    def close(self) -> None:
        if self.server is not None:
            self.server.close()
        if self._socket_file:
            remove(self._socket_file)


PREFIX, NAME = "clickfleet-wire-", "shard"
_FOLDER = re.compile(PREFIX + r"\w+")
_YOUNG_S = 60.0
"""A younger socket may refuse connections only because its server does not listen yet."""


def new() -> str:
    """Return a path for the socket of a shard. Delete sockets without a listener that earlier processes left behind."""
    for folder in Path(tempfile.gettempdir()).glob(PREFIX + "*"):
        if _FOLDER.fullmatch(folder.name) and is_ours(str(folder / NAME)) and _is_abandoned(folder / NAME):
            shutil.rmtree(folder, ignore_errors=True)
    return str(Path(tempfile.mkdtemp(prefix=PREFIX)) / NAME)


def remove(path: str) -> None:
    """Delete a socket and its folder."""
    with suppress(OSError):
        os.unlink(path)
    with suppress(OSError):
        os.rmdir(os.path.dirname(path))


def is_ours(path: str) -> bool:
    """Return whether the socket exists in a folder that belongs to this user and is closed to others."""
    try:
        folder, socket_file = os.lstat(os.path.dirname(path)), os.lstat(path)
    except OSError:
        return False
    private = stat.S_ISDIR(folder.st_mode) and not folder.st_mode & 0o077
    return private and stat.S_ISSOCK(socket_file.st_mode) and folder.st_uid == socket_file.st_uid == os.getuid()


def _is_abandoned(path: Path) -> bool:
    if not hasattr(socket, "AF_UNIX"):
        return False
    try:
        if time.time() - path.lstat().st_mtime < _YOUNG_S:
            return False
        with socket.socket(socket.AF_UNIX) as probe:
            probe.connect(str(path))
    except ConnectionRefusedError:
        return True
    except OSError:  # gone meanwhile
        return False
    return False
