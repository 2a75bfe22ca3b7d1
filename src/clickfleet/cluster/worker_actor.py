"""A process with a worker, as Ray starts it. Thin: what a worker does is in worker.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from clickfleet.cluster.base import adopt_buffers, pack_buffers
from clickfleet.cluster.process import describe_process, keep_memory, log, log_to, said
from clickfleet.cluster.streams import Assignment
from clickfleet.cluster.worker import Worker
from clickfleet.config import Config


class WorkerActor:
    """One worker."""

    def __init__(self, index: int, config: Config, schema: dict[str, Any], logs: str) -> None:
        log_to(logs, f"worker-{index}")
        keep_memory()
        self.worker = Worker(config, schema, index, config.cluster.workers)
        log(f"worker {index} of {config.cluster.workers} with {config.cluster.threads} threads is ready")

    def process(self) -> dict[str, Any]:
        return describe_process()

    def connect(
        self, endpoints: list[list[str]], who: tuple[int, bytes, int], buffers: bytes = b"", learned: Sequence[int] = ()
    ) -> None:
        self.worker.connect(endpoints, who, learned)
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

    def measure(self, files: list[str], buffers: bytes, reading: Config | None = None) -> tuple[dict[str, Any], int]:
        return self.worker.measure(files, buffers, reading)

    def score(self, files: list[str], buffers: bytes) -> tuple[list[Any], int]:
        return self.worker.score(files, buffers)

    def buffers(self) -> bytes:
        return pack_buffers(self.worker.learner)
