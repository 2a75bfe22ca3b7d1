"""What Ray starts: a process with a shard, a process with a worker. Thin: what they do is in shard.py and worker.py."""

from __future__ import annotations

import os
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from clickfleet import checkpoint, mirror, saving, storage
from clickfleet.cluster.base import adopt_buffers, pack_buffers
from clickfleet.cluster.process import Stopwatch, describe_process, keep_memory, log, log_to, own_address, said
from clickfleet.cluster.shard import Cut, Rules, Shard
from clickfleet.cluster.wire import Identity, Server
from clickfleet.cluster.worker import Assignment, Worker
from clickfleet.config import Config
from clickfleet.errors import ClusterError
from clickfleet.exchange import Spread
from clickfleet.table import Changes, Columns, Table

CUT_NICENESS = 10
"""Of the thread that writes a cut: training comes first."""


@dataclass(frozen=True)
class Origin:
    """What a shard starts from: a checkpoint, or an empty table; and its part of the dense values with their optimizer's state."""

    path: str | None
    table: dict[str, Any]
    dense: dict[str, Any]
    batches: int = 0


class ShardActor:
    """One shard and its end of the wire."""

    def __init__(self, number: int, config: Config, rules: Rules, who: tuple[int, int, int], logs: str) -> None:
        log_to(logs, f"shard-{number}")
        keep_memory()
        torch.set_num_threads(1)
        sys.setswitchinterval(0.001)  # who writes a cut shares the interpreter with who answers
        self.number, self.config, self.rules = number, config, rules
        self.who = Identity(*who)
        self.shard: Shard | None = None
        self.server: Server | None = None
        self._cuts: dict[int, Cut] = {}
        self._dropped = 0
        self._cut_taken = threading.Condition()
        self._changes: Changes | None = None
        self._socket_file = ""
        self._files: list[Path] = []
        self._cpu, self._trained = 0.0, Stopwatch()

    def load(self, origin: Origin, who: tuple[int, int, int], peers: list[int]) -> dict[str, Any]:
        """Starts, or starts anew, from an origin in that epoch of the run; its addresses."""
        shards = self.config.cluster.shards
        self._forget_files()
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
        shard.on_cut = self._on_cut
        with self._cut_taken:
            for cut in self._cuts.values():
                cut.rows.close()
            self._cuts = {}
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

        self._socket_file = os.path.join(
            tempfile.gettempdir(), f"clickfleet-{self.who.run:x}-{self.number}-{os.getpid()}"
        )
        self.server = Server(handle, lambda: self.who, width, [self._address(), f"ipc://{self._socket_file}"])
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

    def _on_cut(self, cut: Cut) -> None:
        with self._cut_taken:
            if cut.number <= self._dropped:
                cut.rows.close()
            else:
                self._cuts[cut.number] = cut
            self._cut_taken.notify_all()

    def drop_cut(self, number: int) -> None:
        """Nobody will save that cut any more, taken or not."""
        with self._cut_taken:
            self._dropped = number
            if number in self._cuts:
                self._cuts.pop(number).rows.close()
            self._cut_taken.notify_all()

    def next_epoch(self) -> None:
        assert self.server is not None
        with self.server.lock:
            assert self.shard is not None
            self.shard.resume_rounds()
        self._trained.start()

    def end_epoch(self) -> None:
        self._trained.stop()

    def save(self, number: int, folder: str, timeout_s: float) -> dict[str, Any]:
        """Writes the rows of a cut into a directory in the making, once the cut is taken; facts of the files, and the dense part."""
        with self._cut_taken:
            there = self._cut_taken.wait_for(lambda: number in self._cuts or number <= self._dropped, timeout_s)
            if not there or number not in self._cuts:
                raise ClusterError(f"shard {self.number}: cut {number} was not complete within {timeout_s:.0f} s")
            cut = self._cuts.pop(number)
        found: list[Any] = []
        # Behind everyone else: a thread of its own, as it stays so.
        writer = threading.Thread(target=lambda: found.append(self._write(cut, folder)), name="clickfleet-cut")
        writer.start()
        writer.join()
        if not found:
            raise ClusterError(f"shard {self.number}: cut {number} could not be written", "see the shard's log")
        if isinstance(found[0], Exception):
            raise found[0]
        return dict(found[0])

    def _write(self, cut: Cut, folder: str) -> dict[str, Any] | Exception:
        if sys.platform == "linux":  # elsewhere threads have no niceness of their own
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), CUT_NICENESS)
        try:
            return self._write_rows(cut, folder)
        except Exception as error:
            return error

    def _write_rows(self, cut: Cut, folder: str) -> dict[str, Any]:
        begin = time.monotonic()
        shards, n = self.config.cluster.shards, self.rules.row_files
        first, last = (edge * n // 1024 for edge in checkpoint.span(self.number, shards))
        written: dict[str, storage.HashedFile] = {}

        Path(folder).mkdir(parents=True, exist_ok=True)  # on another host than the driver's

        def file(name: str) -> storage.HashedFile:
            written[name] = storage.HashedFile(Path(folder) / name)
            return written[name]

        try:
            with cut.rows:
                counts = checkpoint.write_rows(file, cut.rows, n, range(first, last))
                changed, deleted, tracking = cut.rows.changed, cut.rows.deleted, cut.rows.tracking
        finally:
            for each in written.values():
                each.abandon()
        self._forget_files()
        self._files = [Path(folder) / name for name in written]
        log(f"cut {cut.number}: {sum(counts):,} rows written in {time.monotonic() - begin:.2f} s")
        return {
            "files": {name: each.facts() for name, each in written.items()},
            "counts": counts,
            "changed": changed,
            "deleted": deleted,
            "tracking": tracking,
            "dense": cut.dense,
            "batches": cut.facts["batches"],
        }

    def deliver(self, number: int, url: str) -> None:
        """Puts the row files of the last cut to a URL."""
        mirror.put(self._files, url)
        log(f"cut {number}: put to {url}")
        self._forget_files()

    def _forget_files(self) -> None:
        """Row files that were put elsewhere, or whose cut came to nothing; in a folder that all see they have moved."""
        for file in self._files:
            file.unlink(missing_ok=True)
        self._files = []

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
        if self._socket_file and os.path.exists(self._socket_file):
            os.unlink(self._socket_file)


class WorkerActor:
    """One worker."""

    def __init__(self, index: int, config: Config, schema: dict[str, Any], logs: str) -> None:
        log_to(logs, f"worker-{index}")
        keep_memory()
        self.worker = Worker(config, schema, index, config.cluster.workers)
        log(f"worker {index} of {config.cluster.workers} with {config.cluster.threads} threads is ready")

    def process(self) -> dict[str, Any]:
        return describe_process()

    def connect(self, endpoints: list[list[str]], who: tuple[int, int, int], buffers: bytes = b"") -> None:
        self.worker.connect(endpoints, who)
        adopt_buffers(self.worker.learner, buffers)
        log(f"connected to {len(endpoints)} shards, epoch {who[2]}")

    def train(self, task: Assignment) -> dict[str, Any]:
        files = sum(len(stream.files) for stream in task.streams)
        log(f"epoch {task.epoch}: {len(task.streams)} streams, {files} files")
        done = self.worker.train(task)
        log(f"epoch {task.epoch} done: {done['rows']:,} rows, {done['steps']:,} steps")
        return done

    def cut(self, number: int, hold: bool = False) -> dict[str, Any]:
        return self.worker.cut(number, hold)

    def release(self) -> None:
        self.worker.release()

    def move(self, shard: int, addresses: list[str]) -> None:
        log(f"shard {shard} is now at {addresses[0]}")
        self.worker.move(shard, addresses)

    def abandon(self, epoch: int) -> None:
        self.worker.abandon(epoch)

    def metrics(self) -> dict[str, Any]:
        return self.worker.metrics.state()

    def said(self) -> str:
        return said()

    def reset_metrics(self) -> None:
        self.worker.metrics.reset()

    def look(self) -> dict[str, Any]:
        return self.worker.progress()

    def measure(self, files: list[str], buffers: bytes) -> dict[str, Any]:
        return self.worker.measure(files, buffers)

    def score(self, files: list[str], buffers: bytes) -> list[Any]:
        return self.worker.score(files, buffers)

    def buffers(self) -> bytes:
        return pack_buffers(self.worker.learner)


def split_dense(spread: Spread, dense: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """The parts of the dense state that each shard keeps; numbers that are not per value go to all."""
    return [
        {key: tensor[first:last].clone() if tensor.ndim else tensor for key, tensor in dense.items()}
        for first, last in spread.spans
    ]


def join_dense(parts: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {key: torch.cat([p[key] for p in parts]) if parts[0][key].ndim else parts[0][key] for key in parts[0]}
