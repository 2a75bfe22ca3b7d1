"""A worker: train its share of the data in a mode, and answer the driver meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypedDict, cast

import numpy as np
import torch

from clickfleet.cluster.assignments import AssignedStream, AssignedStreams, Assignment, Share, links_of
from clickfleet.cluster.authentication import ProcessKey, ShardAddress, new_key
from clickfleet.cluster.process import ProcessFacts, Stopwatch, describe_process, keep_memory, log, log_to, read_log
from clickfleet.cluster.shard_client import AbandonedError, ShardClient, ShardTable
from clickfleet.cluster.start_state import adopt_buffers, last_batches, pack_buffers
from clickfleet.cluster.status import WorkerStatus
from clickfleet.cluster.wire import PeerIdentity
from clickfleet.config.load import Config
from clickfleet.data.batch import Batch, Floats
from clickfleet.data.dataset import Source, for_scoring, open_source
from clickfleet.data.feed_files import FeedFiles
from clickfleet.data.memory import Feed
from clickfleet.data.reader import Reader
from clickfleet.data.schema import Schema
from clickfleet.data.split import RowSplit, count
from clickfleet.errors import ClusterError, MissingError
from clickfleet.store.table import Table
from clickfleet.training import modes, predict
from clickfleet.training.handed_batches import HandedBatches
from clickfleet.training.learner import Learner
from clickfleet.training.loop import WorkerJob
from clickfleet.training.metrics import State, make_metrics
from clickfleet.training.monitor import PHASES, EvaluationLines
from clickfleet.training.sharding import Kind, Link, Request, Spread
from clickfleet.training.step import NotFiniteError

try:
    import zmq
except ModuleNotFoundError:
    raise MissingError("pyzmq", "cluster") from None


class WorkerCheckpoint(TypedDict):
    """The part of a worker in a checkpoint: what it had trained at that moment."""

    position: dict[str, Mapping[str, object] | None]
    """The position of each of its streams; None at its end."""
    steps: int
    rows: int
    metrics: State
    read: tuple[int, int]
    """Bytes and bad lines of its streams that have ended."""
    keep: dict[str, bytes]
    """Files of the mode."""
    optimizer: dict[str, torch.Tensor]
    """The state of the dense optimizer, if the mode runs it in the worker."""
    buffers: bytes
    """The buffers of the network, from the first worker only."""


MeasuredShare = tuple[State, tuple[Floats, Floats, Floats] | None]
"""Metrics of a share of the data; and labels, scores and weights of its rows, if they are asked for."""


class WorkerActor:
    """The Ray actor of a worker. The driver calls it from other threads while it trains."""

    def __init__(self, index: int, config: Config, schema: Mapping[str, object], logs: str) -> None:
        log_to(logs, f"worker {index}")
        keep_memory()
        self.config, self.index = config, index
        self.schema = Schema.from_dict(schema, "the driver")
        torch.set_num_threads(1)
        torch.manual_seed(config.train.seed + index)
        self.learner = self._fresh_learner()
        self.spread = Spread(config.cluster.shards, 1 + self.learner.table.factors, len(self.learner.flat.values))
        self.trainers, self.needs = config.cluster.threads, modes.needs(config)
        self._metrics = make_metrics(self.config, self.schema)
        self.job: WorkerJob | None = None
        self.links: list[ShardClient] = []
        self.context: zmq.Context[Any] | None = None
        self.who = PeerIdentity(0, b"", -1)
        self.shards: list[ShardAddress] = []
        self._key: ProcessKey | None = None
        self._wanted = self._taken = 0
        self._reports: dict[int, WorkerCheckpoint] = {}
        self._change = threading.Condition()
        self._training = self._held = False
        self._leads = index == 0
        """Whether this is the first worker, whose buffers are those of the model."""
        self._abandoned_generation = -1
        """The last generation that was abandoned."""
        self._ended: dict[str, Mapping[str, object] | None] | None = None
        self._carried: dict[str, object] = {}
        self._lasting: dict[str, object] = {}
        self._with_files = True
        """Whether the checkpoint that is asked for needs the files of the mode."""
        self._aside: tuple[tuple[Share, RowSplit], Iterable[Batch]] | None = None
        """The rows that were set aside for validation, once they were read."""
        self._handed: HandedBatches | None = None
        """What a program hands over, in an epoch that it trains batch by batch."""
        self._counted = (0, 0, 0)
        """Batches handed out, rows trained and batches trained before this epoch."""
        self._trained_before = 0
        """Batches that all workers had trained before this generation."""
        self._trained, self._by_phase = Stopwatch(), dict.fromkeys(PHASES, 0.0)
        """CPU time of training: of the process, and of its trainers in earlier epochs."""
        log(f"worker {index} of {config.cluster.workers} with {config.cluster.threads} threads is ready")

    def process(self) -> ProcessFacts:
        return describe_process()

    def key(self) -> bytes:
        """Return the public key of this process."""
        self._key = self._key or new_key(self.config.cluster.encrypt)
        return self._key.shared

    def read_log(self) -> str:
        return read_log()

    def _fresh_learner(self) -> Learner:
        table = replace(self.config.table, memory_limit=None, snapshot_reserve=None, disk=None, disk_limit=None)
        return Learner(replace(self.config, table=table), self.schema)

    def connect(
        self,
        shards: list[ShardAddress],
        who: tuple[int, bytes, int],
        optimizer: dict[str, torch.Tensor],
        buffers: bytes = b"",
        learned: Sequence[tuple[int, int]] = (),
        workers: Sequence[int] = (),
        trained: int = 0,
        lasts: bool = False,
    ) -> None:
        """Connect to these shards as part of a generation of the run, and forget the generation before.

        `optimizer` is the state of the dense optimizer, for modes that run it here; empty at the start of a run. `learned` is for the
        replacement of a failed worker: how many messages and batches of each link the shards have applied. `workers` are all workers
        of the generation, and `trained` is how many batches the run had trained before it. With `lasts`, the shards have all that
        this worker had trained, and the mode keeps its lasting state.
        """
        self.abandon(self.who.generation)
        with self._change:
            if not self._change.wait_for(lambda: not self._training, timeout=60):
                raise ClusterError(f"worker {self.index} did not stop training within 60 s")
            for link in self.links:
                link.close()
            self.context = self.context or zmq.Context(1)
            self.shards, self.who = shards, PeerIdentity(*who)
            self._leads = not workers or self.index == min(workers)
            cluster = replace(self.config.cluster, workers=len(workers) or self.config.cluster.workers)
            self.config = replace(self.config, cluster=replace(cluster, shards=len(shards)))
            self.spread = Spread(len(shards), self.spread.width, self.spread.floats)
            self._held = False
            self._wanted = self._taken = 0
            self._reports, self._ended, self.job = {}, None, None
            self._trained, self._by_phase = Stopwatch(), dict.fromkeys(PHASES, 0.0)
            self._metrics, self.learner = make_metrics(self.config, self.schema), self._fresh_learner()
            self._carried, self._trained_before = {}, trained
            self._lasting = self._lasting if lasts else {}
            links = links_of(self.config)
            known = [*learned, *[(0, 0)] * (links - len(learned))]
            self.links = [self._link(self.index * links + i, known[i][0]) for i in range(links)]
            batches = sum(count for _, count in known)
            self._counted = (batches, batches * self.config.data.batch_rows, batches)
        if optimizer:
            self.learner.optimizer.restore({key: tensor.clone() for key, tensor in optimizer.items()})
        adopt_buffers(self.learner, buffers)
        log(f"connected to {len(shards)} shards, generation {self.who.generation}")

    def _link(self, peer: int, learned: int = 0) -> ShardClient:
        assert self._key is not None
        return ShardClient(
            self.shards,
            self.spread,
            self.who,
            peer,
            self._key,
            timeout_s=self.config.cluster.timeout,
            abandoned=lambda: self._abandoned,
            context=self.context,
            learned=learned,
        )

    def train(self, task: Assignment) -> WorkerStatus:
        """Train the streams of an assignment to their ends."""
        shares = [[stream.data] if isinstance(stream.data, FeedFiles) else stream.data for stream in task.streams]
        log(f"epoch {task.epoch}: {len(task.streams)} streams, {sum(map(len, shares))} files")
        for share in shares:
            for file in share:
                log(f"  {file}")
        with self._change:
            self._training = True
            self._ended = None
            self._trained.start()
        try:
            readers = {s.number: self._reader(s, task) for s in task.streams}
            if task.by_batch:
                readers[self.index] = handed = HandedBatches(self.schema, task.epoch)
            source = AssignedStreams(self.schema, task.epoch, readers, task.skip)
            self._by_phase = self._phases()
            if self.job is not None:
                self._counted = (self.job.steps, self.job.rows, self.job.trained)
            self.job = job = WorkerJob(
                self.learner,
                cast(Source, source),
                self._metrics,
                links=cast(list[Link], self.links),
                worker=self.index,
                workers=self.config.cluster.workers,
                trainers=self.trainers,
                wanted=self._asked,
                took=self._took,
            )
            job.steps, job.rows, job.trained = self._counted
            job.taken, job.trained_before = job.trained, self._trained_before
            job.saved, job.carried, job.lasting = task.saved, self._carried, self._lasting
            for trainer in job.trainers:
                trainer.step.score_first = task.score_first and trainer.step.is_noisy()
            marks = self.needs.marks_checkpoints
            job.stop_when = (lambda: self._abandoned) if marks else (lambda: self._abandoned or self._asked() > 0)
            if task.by_batch:
                job.cuts = False
                job.stop_when = lambda: self._abandoned or handed.idle
                with self._change:
                    self._handed = handed
                    self._change.notify_all()
            self.learner.model.train()
            train = modes.load(self.config)
            try:
                for stretch in self._stretches(job):
                    train(stretch)
                    if task.by_batch:
                        handed.finish()
            except NotFiniteError as problem:
                raise ClusterError(
                    f"worker {self.index}, step {job.steps}: {problem}; nothing of that batch was applied",
                    "check the dense columns and weights, lower dense.lr or set dense.clip_norm, and resume with --resume",
                ) from None
            finally:
                job.close()
                self._trained.stop()
            with self._change:  # from here on, `checkpoint` must mark by itself
                self._ended, self._training = source.state(), False
                if number := self._asked():
                    self._mark(number, self._ended)
        except Exception as error:
            if self._handed is not None:
                self._handed.finish(str(error) or type(error).__name__)
            raise
        finally:
            with self._change:
                self._training = False
                self._handed = None
                self._change.notify_all()
        status = self.status()
        log(f"epoch {task.epoch} done: {status['rows']:,} rows, {status['steps']:,} steps")
        return status

    def _reader(self, stream: AssignedStream, task: Assignment) -> Source:
        folder = Path(self.config.run.dir) / f"worker-{self.index}"
        reader = open_source(task.reading or self.config, stream.data, self.schema, labels=True, folder=folder)
        if isinstance(reader, Reader):
            reader.whole = task.reading is None and not stream.part  # a pass or part may have only a few lines
        reader.split = task.split
        reader.epoch = task.epoch if task.reading is None else 0  # each pass has its own seed
        if stream.state is not None:
            reader.restore(dict(stream.state))
        return reader

    def _stretches(self, job: WorkerJob) -> Iterator[WorkerJob]:
        """Yield the job until its streams end. Between two stretches, take part in the checkpoint that is asked for."""
        while True:
            if self._abandoned:
                raise AbandonedError
            if not self.needs.marks_checkpoints and (number := self._asked()):
                self._mark(number, job.position())
            if job.epoch_ended:
                return
            if self._handed is not None:
                self._handed.wait(lambda: self._abandoned)
                for trainer in job.trainers:
                    trainer.clock.start()
            if not self._abandoned:
                yield job

    def train_batch(self, batch: Batch, epoch: int) -> tuple[float, float]:
        """Train on a batch that the program hands over; return the sum of its losses and its weight."""
        handed = self._waiting_for(epoch)
        assert self.job is not None
        loss, weight = self.job.loss, self.job.weight
        handed.put_and_wait(batch.take(np.arange(len(batch))), lambda: self._abandoned)  # what Ray sends is read-only
        return self.job.loss - loss, self.job.weight - weight

    def end_batches(self, epoch: int) -> None:
        """End an epoch that the program trains batch by batch."""
        self._waiting_for(epoch).close()

    def _waiting_for(self, epoch: int) -> HandedBatches:
        """Return where the batches of an epoch go, once the worker has begun it."""
        with self._change:
            begun = self._change.wait_for(lambda: self._handed is not None, self.config.cluster.timeout)
            if not begun or self._handed is None or self._handed.epoch != epoch:
                raise ClusterError(f"worker {self.index} does not wait for batches of epoch {epoch}")
            return self._handed

    def _asked(self) -> int:
        """Return the number of the requested checkpoint; 0 if none is requested or it is taken already."""
        return self._wanted if self._wanted > self._taken else 0

    def _mark(self, number: int, position: dict[str, Mapping[str, object] | None]) -> None:
        assert self.job is not None
        self.job.before_checkpoint()
        for ticket in [link.ask(Request(Kind.MARK, checkpoint=number)) for link in self.links]:
            ticket.wait()
        self._took(number, position)

    def _took(self, number: int, position: dict[str, Mapping[str, object] | None]) -> None:
        assert self.job is not None
        report: WorkerCheckpoint = {
            "position": position,
            "steps": self.job.trained,
            "rows": self.job.rows,
            "metrics": self._metrics.state(),
            "read": cast(AssignedStreams, self.job.source).read(),
            "keep": self.job.keep() if self._with_files else {},
            "optimizer": self.learner.optimizer.state() if self.job.runs_optimizer else {},
            "buffers": pack_buffers(self.learner) if self._leads else b"",
        }
        with self._change:
            self._reports = {number: report}
            self._taken = max(self._taken, number)
            self._change.notify_all()
            if self._training and self._held:
                self._change.wait_for(lambda: not self._held or self._abandoned)
                for trainer in self.job.trainers:
                    trainer.clock.start()

    def release(self) -> None:
        """Let a worker that paused after a checkpoint continue."""
        with self._change:
            self._held = False
            self._change.notify_all()

    def lend(self) -> dict[str, bytes]:
        """Return files of the mode for a worker that joins, while this one trains."""
        return {} if self.job is None else self.job.lend()

    def borrow(self, files: dict[str, bytes]) -> None:
        """Begin with the state that another worker lends. Call it before `connect`."""
        if files:
            self._lasting = modes.unpack(self.config, self.learner.table, files)

    def checkpoint(self, number: int, hold: bool = False, files: bool = True) -> WorkerCheckpoint:
        """Take part in a checkpoint, and pause after it if `hold`. Return what the worker had trained at that moment.

        Without `files`, leave out those of the mode.
        """
        with self._change:
            generation = self.who.generation
            self._held, self._with_files = hold, files
            self._wanted = number
            if not self._training and self._ended is not None and self._asked():
                self._mark(number, self._ended)
            self._change.wait_for(lambda: number in self._reports or self._abandoned_generation >= generation)
            if self._abandoned_generation >= generation:
                raise AbandonedError
            return self._reports[number]

    def move(self, shard: int, address: ShardAddress) -> None:
        """Use a new address for a shard that was restarted."""
        log(f"shard {shard} is now at {address.addresses[0]}")
        self.shards[shard] = address
        for link in self.links:
            link.move(shard, address)

    @property
    def _abandoned(self) -> bool:
        return self._abandoned_generation >= self.who.generation

    def abandon(self, generation: int) -> None:
        """Stop the work of a generation, because the run continues from an older state in the next one."""
        # Without the lock, because its holder may wait for a failed shard.
        self._abandoned_generation = max(self._abandoned_generation, generation)
        with self._change:
            self._change.notify_all()

    def metrics(self) -> State:
        return self._metrics.state()

    def results(self) -> predict.Results:
        """Return the metrics of what this worker has trained, by name."""
        return dict(self._metrics.results())

    def reset_metrics(self) -> None:
        self._metrics.reset()

    def buffers(self) -> bytes:
        return pack_buffers(self.learner)

    def status(self) -> WorkerStatus:
        """Return how far the worker has come and how long it has been idle."""
        job = self.job
        if job is None:
            return {"rows": 0, "steps": 0, "training": self._training, "idle_s": 0.0}
        now = time.perf_counter()
        handed = self._handed
        waiting = self._held or any(link.waiting for link in self.links) or (handed is not None and handed.idle)
        latest = max(trainer.clock.last for trainer in job.trainers)
        counters = job.source.counters
        return {
            "rows": job.rows,
            "steps": job.trained,
            "loss": job.loss,
            "weight": job.weight,
            "training": self._training,
            "idle_s": now - latest if self._training and not waiting else 0.0,
            "shares": job.shares(),
            "buckets": self._metrics.buckets.state()["buckets"],
            "sliding": last_batches(self._metrics),
            "queued": job.queued(),
            "streams": cast(AssignedStreams, job.source).left,
            "bytes": counters.bytes,
            "bad_lines": counters.bad_lines,
            "sent": sum(link.bytes_out for link in self.links),
            "received": sum(link.bytes_in for link in self.links),
            "dropped": sum(link.dropped for link in self.links),
            "latencies": self._latencies(),
            "cpu_s": time.process_time(),
            "trained_cpu_s": self._trained.seconds,
            "cpu_by_phase": self._phases(),
        }

    def _phases(self) -> dict[str, float]:
        """Return the CPU seconds of the trainers in each phase of their steps."""
        clocks = [trainer.clock for trainer in self.job.trainers] if self.job is not None else []
        return {phase: spent + sum(c.cpu_seconds[phase] for c in clocks) for phase, spent in self._by_phase.items()}

    def _latencies(self) -> dict[str, list[float]]:
        """Return the latency of the shards in milliseconds: median and 99th percentile of pulls and of pushes."""
        samples = [sample for link in self.links for sample in list(link.latencies)]
        quantiles = {}
        for name, pushed in (("pull", False), ("push", True)):
            times = [1e3 * seconds for learns, seconds in samples if learns is pushed]
            quantiles[name] = [float(np.percentile(times, q)) for q in (50, 99)] if times else []
        return quantiles

    def measure(
        self,
        files: Share,
        buffers: bytes,
        reading: Config | None = None,
        split: RowSplit | None = None,
        collect: bool = False,
    ) -> tuple[MeasuredShare, int]:
        """Return the metrics of the shards' model on the worker's share of the data, and the number of bad lines.

        With a split, only the rows that are set aside count. With `collect`, return the labels, scores and weights of all rows, too.
        """
        rows = predict.ScoredRows()
        with self._shards_model(buffers) as learner:
            bad_lines, lines = 0, EvaluationLines(log, self.config.train.print_every)
            if not len(files):
                measured = predict.measure(learner, ())
            elif split is not None:
                measured = predict.measure(learner, self._rows_aside(files, split), collected=rows if collect else None)
            else:
                source = files_to_score(reading or self.config, self.schema, files)
                measured = predict.measure(learner, source, on_batch=lines, collected=rows if collect else None)
                bad_lines = source.counters.bad_lines
            return (measured.state(), rows.columns() if collect else None), bad_lines

    def _rows_aside(self, files: Share, split: RowSplit) -> Iterable[Batch]:
        """Return the rows of the files that are set aside. If they are few, they are read once and kept."""
        if self._aside is None or self._aside[0] != (files, split):
            source = files_to_score(self.config, self.schema, files)
            source.split, source.validation = split, True
            rows = count(source).kept
            self._aside = (files, split), source if rows is None else Feed(rows, self.schema, source.batch_size)
        return self._aside[1]

    def score(self, files: list[str], buffers: bytes) -> tuple[list[np.ndarray[Any, Any]], int]:
        """Return the scores of each file, in order, and the number of bad lines."""
        with self._shards_model(buffers) as learner:
            by_file, bad_lines = [], 0
            for file in files:
                source = files_to_score(self.config, self.schema, [file], labels=False)
                parts = [scores for _, scores in predict.Scorer(learner)(source)]
                by_file.append(np.concatenate([np.empty(0, np.float32), *parts]))
                bad_lines += source.counters.bad_lines
            return by_file, bad_lines

    @contextmanager
    def _shards_model(self, buffers: bytes) -> Iterator[Learner]:
        """Turn the learner into the shards' model until the block ends."""
        learner, link = self.learner, self._link(1_000_000 + self.index)
        own_table, own_values = learner.table, learner.flat.values.clone()
        try:
            values = link.ask(Request(values=True)).wait().values
            assert values is not None
            learner.flat.values.copy_(torch.from_numpy(values))
            adopt_buffers(learner, buffers)
            learner.table = cast(Table, ShardTable(link, own_table.factors))
            yield learner
        finally:
            learner.table = own_table
            learner.flat.values.copy_(own_values)
            link.close()


def files_to_score(config: Config, schema: Schema, files: Share, labels: bool = True) -> Any:
    """Return the source of data to evaluate or score, in its order."""
    return open_source(for_scoring(config), files, schema, labels=labels)
