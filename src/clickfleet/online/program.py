"""Write the training loop yourself: the same program on one machine and as every worker of a cluster.

import clickfleet

with clickfleet.join("config.yaml", "mode.name=async") as job:
    for day in days:
        job.train(job.split_files(files_of(day)))
        clicks = job.all_reduce(count_clicks(day))
        job.save("delta")
        if job.is_first_worker:
            print(job.evaluate(tests)["auc"], clicks)

Batch by batch:

    with job.epoch() as epoch:
        for batch in epoch.batches(job.split_files(files)):
            loss = epoch.step(batch)

`clickfleet launch --server_num 2 --worker_num 4 program.py` runs the program in every role on this machine. On several hosts,
start it on each with its role in the environment. A server does not return from `join`: it serves until the job ends. Without roles,
the program is the only worker and starts its own shards. In mode local, there are none.

All workers must call `train`, `epoch`, `evaluate`, `save`, `shrink`, `barrier` and `all_reduce` in the same order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from clickfleet.config import check
from clickfleet.config.load import Config
from clickfleet.config.plugins import extensions
from clickfleet.data import dataset
from clickfleet.data.batch import Batch
from clickfleet.data.dataset import Data, Source, open_source
from clickfleet.data.files import split_files
from clickfleet.data.memory import Feed
from clickfleet.data.schema import Schema
from clickfleet.errors import ConfigError, DataError
from clickfleet.store import mirror
from clickfleet.training import modes
from clickfleet.training.predict import Results

Kind = Literal["checkpoint", "base", "delta"]
_REDUCE: dict[str, Callable[..., Any]] = {"sum": np.sum, "max": np.max, "min": np.min}


@contextmanager
def join(
    config: Config | Mapping[str, Any] | str | Path | None = None,
    *overrides: str,
    schema: Schema | None = None,
    resume: bool = False,
    quiet: bool = False,
) -> Iterator[ProgramJob]:
    """Join the job of a configuration as one of its workers. In a server process, serve and do not return.

    In mode local, the program is the whole job. `schema` is that of the data; by default, the configuration names it.
    """
    settings, role = check.configure(config, overrides), next((role() for role in extensions("role")), None)
    distributed = modes.distributed(settings)
    if role is not None and not distributed:
        raise ConfigError(
            f"mode {settings.mode.name} runs in one process, and this one is the {role.name} of a job",
            "set mode.name=async, sync, half_async or geo",
        )
    if mirror.url_of(settings.run.dir) is None:
        settings = replace(settings, run=replace(settings.run, dir=str(Path(settings.run.dir).absolute())))
    if distributed:
        from clickfleet.online.cluster_program import join_cluster as opened
    else:
        from clickfleet.online.local_program import run_here as opened
    with opened(settings, schema or dataset.schema_of(settings), role, resume, quiet) as job:
        yield job


class ProgramJob(ABC):
    """One worker's view of a job. All workers get the same results."""

    def __init__(self, index: int, workers: int, config: Config, schema: Schema) -> None:
        self.worker_index, self.worker_num = index, workers
        self.config, self.schema = config, schema

    @property
    def is_first_worker(self) -> bool:
        return self.worker_index == 0

    def split_files(self, files: Sequence[str]) -> list[str]:
        """Return the files of this worker: a contiguous block of the list, which must be the same for all workers."""
        return split_files(files, self.worker_index, self.worker_num)

    @abstractmethod
    def train(self, data: Data) -> Results:
        """Train one epoch and save a checkpoint. Every worker passes its own files, or its own data in memory.

        Return the metrics of all workers. Every row is trained once, even after failures.
        """

    @abstractmethod
    def epoch(self) -> AbstractContextManager[ProgramEpoch]:
        """Train one epoch batch by batch, in the block. It ends when all workers have left it, and saves a checkpoint."""

    @abstractmethod
    def evaluate(self, data: Data) -> Results:
        """Return the metrics of the model. All workers pass the same files and share them, or each its own data in memory."""

    @abstractmethod
    def save(self, kind: Kind = "checkpoint") -> str:
        """Save a checkpoint, or a checkpoint and a published entry; return its path."""

    @abstractmethod
    def shrink(self) -> int:
        """Decay the statistics of the rows and remove old and rare ones; return how many were removed."""

    @abstractmethod
    def _meet(self, value: Any) -> list[Any]:
        """Exchange a value with all workers; return all values."""

    def barrier(self) -> None:
        """Wait for all workers."""
        self._meet(None)

    def all_reduce(self, value: Any, how: Literal["sum", "max", "min"] = "sum") -> Any:
        """Combine a number or array of all workers."""
        if how not in _REDUCE:
            raise ConfigError(f"unknown all_reduce operation {how!r}", "use sum, max or min")
        values = np.stack([np.asarray(each) for each in self._meet(value)])
        reduced = np.asarray(_REDUCE[how](values, axis=0))
        return reduced if reduced.ndim else reduced.item()

    def source(self, data: Data) -> Source:
        """Open training data of this worker."""
        return open_source(self.config, data, self.schema, labels=True, folder=Path(self.config.run.dir))


def check_kind(kind: str) -> None:
    """Refuse an unknown kind of saved model."""
    if kind not in ("checkpoint", "base", "delta"):
        raise ConfigError(f"cannot save a {kind!r}", "use checkpoint, base or delta")


class ProgramEpoch(ABC):
    """An epoch that the program trains batch by batch.

    In mode sync, a step waits until all workers that are still in the block have made theirs. A worker that leaves the block early is
    not waited for, so that workers may have different numbers of batches.
    """

    def __init__(self, job: ProgramJob, number: int) -> None:
        self.number = number
        """The number of the epoch."""
        self.steps = self.rows = 0
        """What this worker has trained in this epoch."""
        self.results: Results = {}
        """The metrics of all workers, once the block has ended."""
        self._job, self._open = job, True

    def batches(self, data: Data) -> Iterator[Batch]:
        """Yield the batches of this worker's files or data in memory, shuffled as data.shuffle says."""
        source = self._job.source(data)
        source.epoch = self.number
        yield from source

    def step(self, rows: Data) -> float | None:
        """Train on these rows as one batch: a batch, a frame, a mapping of arrays or a list of rows.

        Return their mean loss before this step; None if their weights are all 0. When it returns, the mode has pushed the gradients, or
        in mode geo added them to the worker's copy.
        """
        if not self._open:
            raise ConfigError("the epoch has ended", "make steps inside the block of `with job.epoch() as epoch:`")
        batch = rows if isinstance(rows, Batch) else Feed(rows, self._job.schema).rows()
        if not len(batch):
            return None
        if batch.labels is None:
            raise DataError(f"the rows have no label ({self._job.schema.label}); training needs one")
        batch = next(iter(Feed(batch, self._job.schema, len(batch))))  # checks what a user may have made
        loss, weight = self._train(batch)
        self.steps, self.rows = self.steps + 1, self.rows + len(batch)
        return loss / weight if weight else None

    @abstractmethod
    def metrics(self) -> Results:
        """Return the metrics of the rows that this worker has trained in this epoch, each scored before it was trained."""

    @abstractmethod
    def _train(self, batch: Batch) -> tuple[float, float]:
        """Train on a batch; return the sum of its losses and its weight."""

    def close(self) -> None:
        """Refuse further steps."""
        self._open = False
