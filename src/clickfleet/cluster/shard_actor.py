"""A process with a shard, as Ray starts it. Thin: what a shard does is in shard.py."""

from __future__ import annotations

import shutil
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from clickfleet import checkpoint, mirror, saving
from clickfleet.cluster import sockets
from clickfleet.cluster.cut_files import CutFiles
from clickfleet.cluster.process import Stopwatch, describe_process, keep_memory, log, log_to, own_address, said
from clickfleet.cluster.shard import Rules, Shard
from clickfleet.cluster.wire import Identity, Server
from clickfleet.config import Config
from clickfleet.errors import ClusterError
from clickfleet.table import Changes, Columns, Table


@dataclass(frozen=True)
class Origin:
    """What a shard starts from: a checkpoint, or an empty table; and its part of the dense values with their optimizer's state."""

    path: str | None
    table: dict[str, Any]
    dense: dict[str, Any]
    batches: int = 0


class ShardActor:
    """One shard and its end of the wire."""

    def __init__(self, number: int, config: Config, rules: Rules, who: tuple[int, bytes, int], logs: str) -> None:
        log_to(logs, f"shard-{number}")
        keep_memory()
        torch.set_num_threads(1)
        sys.setswitchinterval(0.001)  # who writes a cut shares the interpreter with who answers
        self.number, self.config, self.rules = number, config, rules
        self.who = Identity(*who)
        self.shard: Shard | None = None
        self.server: Server | None = None
        self.cuts = CutFiles(number, config.cluster.shards, rules.row_files)
        self._changes: Changes | None = None
        self._socket_file = ""
        self._cpu, self._trained = 0.0, Stopwatch()

    def load(self, origin: Origin, who: tuple[int, bytes, int], peers: list[int]) -> dict[str, Any]:
        """Starts, or starts anew, from an origin in that epoch of the run; its addresses."""
        shards = self.config.cluster.shards
        self.cuts.forget()
        if origin.path is None:
            table = Table.like(origin.table)
        else:
            path = saving.resolve(origin.path) if mirror.url_of(origin.path) else Path(origin.path)
            table = checkpoint.load(path, shard=self.number, shards=shards, **origin.table)
            if mirror.origin(path):
                shutil.rmtree(path, ignore_errors=True)
        dense = dict(origin.dense)
        values: torch.Tensor = dense.pop("values").clone()
        shard = Shard(table, values, self.config.dense, self.rules)
        if dense:
            shard.optimizer.restore(dense)
        shard.batches = origin.batches
        shard.begin(peers)
        if self.config.mode.name == "geo":
            shard.replicate(peers)
        shard.on_cut = self.cuts.put
        self.cuts.clear()
        self._changes = None
        if self.server is None:
            self.shard, self.who = shard, Identity(*who)
            self._listen(1 + table.factors)
        else:
            with self.server.lock:
                self.shard, self.who = shard, Identity(*who)
        log(
            f"shard {self.number} of {shards}: {len(table):,} rows from {origin.path or 'nothing'}, epoch {self.who.epoch}"
        )
        assert self.server is not None
        self._cpu, self._trained = time.process_time(), Stopwatch()
        return {**describe_process(), "endpoints": self.server.endpoints}

    def _listen(self, width: int) -> None:
        def handle(peer: int, piece: Any) -> Any:
            assert self.shard is not None
            return self.shard.handle(peer, piece)

        assert self.shard is not None
        self._socket_file = sockets.new()
        binds, floats = [self._address(), f"ipc://{self._socket_file}"], len(self.shard.optimizer.values)
        self.server = Server(handle, lambda: self.who, width, binds, floats=floats, log=log)
        self.server.start()

    def _address(self) -> str:
        """Where other hosts reach this shard: the place it was given, or any free port."""
        given = self.config.cluster.endpoints
        if not given:
            return f"tcp://{own_address()}:*"
        host, _, port = given[self.number].rpartition(":")
        try:
            return f"tcp://{socket.gethostbyname(host)}:{port}"
        except OSError as error:
            raise ClusterError(f"shard {self.number} is to listen on {given[self.number]}: {error}") from None

    def drop_cut(self, number: int) -> None:
        self.cuts.drop(number)

    def hurry(self, number: int) -> None:
        self.cuts.hurry(number)

    def next_epoch(self) -> None:
        assert self.server is not None
        with self.server.lock:
            assert self.shard is not None
            self.shard.resume_rounds()
        self._trained.start()

    def end_epoch(self) -> None:
        self._trained.stop()

    def save(self, number: int, folder: str, timeout_s: float, share: float) -> dict[str, Any]:
        assert self.shard is not None
        return self.cuts.save(number, folder, timeout_s, share, self.shard.table)

    def deliver(self, number: int, url: str) -> None:
        self.cuts.deliver(number, url)

    def said(self) -> str:
        return said()

    def learned(self) -> dict[int, int]:
        """Batches learned of each peer."""
        assert self.server is not None
        with self.server.lock:
            assert self.shard is not None
            return dict(self.shard.learned)

    def shrink(self) -> int:
        with self._still() as table:
            return table.shrink()

    def end_day(self) -> None:
        with self._still() as table:
            table.end_day()

    def restore_readers(self, keys: Any) -> None:
        with self._still() as table:
            table.restore_readers(keys)

    def cut_changes(self, base: bool) -> bool:
        """Takes what is to be published, for `next_changes` to fetch; whether it is everything."""
        with self._still() as table:
            self._changes = table.cut_changes(base=base)
            return self._changes.base

    def next_changes(self) -> Columns | None:
        assert self._changes is not None
        return next(iter(self._changes), None)

    def deleted(self) -> Any:
        """After the last rows: keys that readers must forget."""
        assert self._changes is not None
        return self._changes.deleted

    def end_changes(self, published: bool) -> None:
        with self._still():
            if self._changes is not None:
                (self._changes.commit if published else self._changes.abort)()
                self._changes = None

    @contextmanager
    def _still(self) -> Iterator[Table]:
        """The table, while nothing is learned."""
        assert self.server is not None
        with self.server.lock:
            assert self.shard is not None
            yield self.shard.table

    def dense(self) -> dict[str, Any]:
        assert self.server is not None
        with self.server.lock:
            assert self.shard is not None
            return self.shard.dense_state()

    def look(self) -> dict[str, Any]:
        assert self.server is not None
        if self.server.failure is not None:
            raise ClusterError(f"shard {self.number} failed: {self.server.failure!r}") from self.server.failure
        with self.server.lock:
            assert self.shard is not None
            found = self.shard.stats()
        found |= {
            "dropped": sum(self.server.dropped.counts.values()),
            "received": self.server.bytes_in,
            "sent": self.server.bytes_out,
            "cpu_s": time.process_time() - self._cpu,
            "trained_cpu_s": self._trained.seconds,
        }
        return found

    def process(self) -> dict[str, Any]:
        return describe_process()

    def close(self) -> None:
        if self.server is not None:
            self.server.close()
        if self._socket_file:
            sockets.remove(self._socket_file)
